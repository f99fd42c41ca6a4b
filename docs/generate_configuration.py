"""Writes docs/reference/configuration.md from the configuration's fields: python docs/generate_configuration.py"""

from itertools import groupby
from pathlib import Path

from mural.train.flags import Flag, default_of, flags
from mural.typed import in_words

PAGE = Path(__file__).parent / "reference" / "configuration.md"

HEAD = """# The configuration of a run

Written by `python docs/generate_configuration.py` from the fields themselves. Each field is a key of `run.toml` and a
flag of `mural train`: `lr` in the table `[optimizer]` is `--optimizer.lr`. A flag's value is read as TOML; a list may
be typed as `2,2`, a table as `255=1`. An unknown key is an error that names the nearest one. `mural train run.toml
--show` prints the configuration with every default filled in, and the run's folder holds it as `config.toml`.

"""


def row(flag: Flag) -> str:
    """One line of a table."""
    name = flag.name.rpartition(".")[2]
    default = default_of(flag)
    return f"| `{name}` | {in_words(flag.kind)} | {f'`{default}`' if default else ''} | {flag.words} |"


def page() -> str:
    """The text of the page."""
    parts = [HEAD]
    for table, members in groupby(flags(), lambda flag: flag.table):
        parts.append(
            f"## {f'[{table}]' if table else 'The run'}\n\n| key | value | default | meaning |\n|---|---|---|---|\n"
        )
        parts += [row(flag) + "\n" for flag in members]
        parts.append("\n")
    return "".join(parts).rstrip("\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
