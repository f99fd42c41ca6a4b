"""A search for models, calls and moments at which a plan is not exact: `make hunt MINUTES=30`."""
