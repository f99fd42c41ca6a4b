"""`python -m mural`: the command line, for launchers that start modules."""

from mural.cli import main

if __name__ == "__main__":
    main()
