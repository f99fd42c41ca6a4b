"""Every field of the configuration as a flag: `--optimizer.lr 0.01`, with the field's own words as its help."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from mural.errors import ConfigError
from mural.train.config import Config
from mural.typed import convert, data_fields, hints_of, in_words, literal


@dataclass(frozen=True)
class Flag:
    """A field of the configuration, as the command line knows it."""

    name: str
    kind: Any
    words: str
    default: Any

    @property
    def table(self) -> str:
        """The table that the field is in."""
        return self.name.rpartition(".")[0]

    @property
    def parameter(self) -> str:
        """The name of a function's parameter for it."""
        return self.name.replace(".", "__")


def flags(kind: type[Any] = Config, table: str = "") -> Iterator[Flag]:
    """Every field of the configuration, in order."""
    words, hints = documented(kind), hints_of(kind)
    for field in data_fields(kind):
        name = f"{table}.{field.name}" if table else field.name
        hint = hints[field.name]
        if is_dataclass(hint):
            yield from flags(hint, name)  # type: ignore[arg-type]
        else:
            yield Flag(name, hint, words.get(field.name, ""), field.default)


@lru_cache
def documented(kind: type[Any]) -> dict[str, str]:
    """The sentence under each field of a dataclass or of those it extends: where its meaning is written down once."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    if not isinstance(body, ast.ClassDef):
        raise TypeError(f"{kind} is not a class")
    found = {name: text for base in kind.__bases__ if is_dataclass(base) for name, text in documented(base).items()}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


def value_of(flag: Flag, text: str) -> Any:
    """What was typed, as TOML would read it; else it is tried as a list, as a table, as a string, as a list of strings.

    >>> some = {f.name: f for f in flags()}
    >>> value_of(some["train.steps"], "5"), value_of(some["folder"], "runs/2"), value_of(some["data.crop"], "64,32")
    (5, 'runs/2', [64, 32])
    >>> value_of(some["data.labels"], "255=1"), value_of(some["data.classes"], "tumour, stroma")
    ({'255': 1}, ['tumour', 'stroma'])
    """
    for form in (text, f"[{text}]", f"{{{text}}}", literal(text), literal([word.strip() for word in text.split(",")])):
        with contextlib.suppress(tomllib.TOMLDecodeError, ConfigError):
            value = tomllib.loads(f"x = {form}")["x"]
            convert(flag.kind, value, flag.name)
            return value
    raise ConfigError(f"--{flag.name} {text!r} should be {in_words(flag.kind)}")


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for every field; what was given reaches it as `changes`."""
    known = {flag.parameter: flag for flag in flags()}

    def call(**given: Any) -> None:
        own = {key: value for key, value in given.items() if key not in known}
        typed = {known[key].name: value for key, value in given.items() if key in known and value is not None}
        command(**own, changes={name: value_of(known[name.replace(".", "__")], text) for name, text in typed.items()})

    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "changes"]
    added = [inspect.Parameter(f.parameter, inspect.Parameter.KEYWORD_ONLY, default=None) for f in known.values()]
    parameters = [p.replace(annotation=option(known[p.name])) if p.name in known else p for p in (*own, *added)]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    call.__doc__, call.__name__ = command.__doc__, command.__name__
    return call


def option(flag: Flag) -> Any:
    """The option of one field."""
    shown = default_of(flag)
    panel = flag.table or "The run"
    help_text = escape(f"{flag.words} {f'[default: {shown}]' if shown else ''}".strip())
    return Annotated[
        str | None,
        typer.Option(f"--{flag.name}", help=help_text, rich_help_panel=panel, metavar="VALUE", show_default=False),
    ]


def default_of(flag: Flag) -> str:
    """The default for the help text, where there is one to show."""
    given = flag.default
    if isinstance(given, (str, Path)):
        return str(given)
    return literal(given) if isinstance(given, (int, float)) else ""


def changed(changes: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The changes together with those of shorter options, where these were given."""
    return {**changes, **{name.replace("__", "."): value for name, value in more.items() if value is not None}}
