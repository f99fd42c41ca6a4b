"""Typed data from TOML: frozen dataclasses in and out, where an unknown key is an error that names the nearest one.

Reading never runs code: values are numbers, strings, booleans, lists and tables, and nothing else.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from mural.errors import ConfigError

T = TypeVar("T")


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not TOML: it is not a text file in UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}{instead_of(Path(path))}") from error


def instead_of(path: Path) -> str:
    """A question with the TOML file that may be meant by a path that leads to none; or what to give."""
    folder = path if path.is_dir() else path.parent
    found = [str(each) for each in sorted(folder.glob("*.toml")) if each != path]
    near = get_close_matches(str(path), found, n=1, cutoff=0)
    return f": did you mean {near[0]!r}?" if near else ": give the path of a TOML file"


def build(kind: type[T], given: Mapping[str, Any], where: str = "") -> T:
    """The dataclass with the values given; `where` names the table in messages.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Size:
    ...     rows: int = 1
    >>> build(Size, {"rows": 3})
    Size(rows=3)
    >>> build(Size, {"row": 3})
    Traceback (most recent call last):
    mural.errors.ConfigError: unknown key 'row': did you mean 'rows'? Known: rows
    """
    hints = hints_of(kind)
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in hints:
            raise ConfigError(f"unknown key {named(where, key)!r}{nearest(key, hints)} Known: {', '.join(hints)}")
        values[key] = convert(hints[key], value, named(where, key))
    missing = [f.name for f in data_fields(kind) if f.default is f.default_factory is MISSING and f.name not in values]
    if missing:
        raise ConfigError(f"{where or 'the file'} lacks {', '.join(missing)}: each needs a value")
    return kind(**values)


@lru_cache
def hints_of(kind: type[Any]) -> dict[str, Any]:
    """The type of every field."""
    found = get_type_hints(kind)
    return {field.name: found[field.name] for field in data_fields(kind)}


def data_fields(kind: type[Any]) -> tuple[Field[Any], ...]:
    """The fields of a dataclass."""
    return fields(kind)


def named(where: str, key: str) -> str:
    """The full name of a key."""
    return f"{where}.{key}" if where else key


def nearest(key: str, known: Mapping[str, Any]) -> str:
    """A question with the known name that looks most like this one, or the end of the sentence."""
    found = get_close_matches(key, list(known), n=1, cutoff=0.5)
    return f": did you mean {found[0]!r}?" if found else "."


def convert(kind: Any, value: Any, where: str) -> Any:
    """The value as that type, or an error that names the key."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        return convert_union(kind, arguments, value, where)
    if origin is Literal:
        if value in arguments and type(value) in {type(a) for a in arguments}:
            return value
        near = nearest(value, dict.fromkeys(map(str, arguments))) if isinstance(value, str) else "."
        raise ConfigError(f"{where} = {value!r} is not one of {', '.join(map(repr, arguments))}{near}")
    if origin is tuple and isinstance(value, (list, tuple)):
        return convert_items(arguments, cast("list[Any]", list(value)), where)
    if (origin or kind) in (dict, Mapping) and isinstance(value, Mapping):
        return convert_table(arguments, cast("Mapping[Any, Any]", value), where)
    if is_dataclass(kind) and isinstance(value, Mapping):
        return build(cast("type[Any]", kind), cast("Mapping[str, Any]", value), where)
    if isinstance(kind, type) and scalar_fits(kind, value):
        return cast(Any, kind)(value)
    raise ConfigError(f"{where} = {value!r} should be {in_words(kind)}")


def scalar_fits(kind: type[Any], value: Any) -> bool:
    """Whether a value fits a scalar type: a number is finite and not a string, a boolean is not a number."""
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is float:
        return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
    if kind is Path:
        return isinstance(value, (str, Path))
    return isinstance(value, kind) and kind in (int, str)


def convert_union(kind: Any, arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    """The value as the first of several types that takes it."""
    if value is None and NoneType in arguments:
        return None
    for option in arguments:
        if option is NoneType:
            continue
        try:
            return convert(option, value, where)
        except ConfigError:
            if is_dataclass(option) and isinstance(value, Mapping):
                raise
    raise ConfigError(f"{where} = {value!r} should be {in_words(kind)}")


def convert_items(kinds: tuple[Any, ...], items: list[Any], where: str) -> tuple[Any, ...]:
    """A list as a tuple of those types."""
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(convert(kinds[0], item, f"{where}[{i}]") for i, item in enumerate(items))
    if len(kinds) != len(items):
        raise ConfigError(f"{where} = {items} should have {len(kinds)} entries, not {len(items)}")
    return tuple(convert(k, item, f"{where}[{i}]") for i, (k, item) in enumerate(zip(kinds, items, strict=True)))


def convert_table(kinds: tuple[Any, ...], table: Mapping[Any, Any], where: str) -> dict[Any, Any]:
    """A table with keys and values of those types; TOML writes keys as strings, numbers among them.

    >>> convert_table((int, int), {"255": 1}, "labels")
    {255: 1}
    """
    key_kind, value_kind = kinds or (str, Any)
    found: dict[Any, Any] = {}
    for key, value in table.items():
        number = key_kind is int and isinstance(key, str) and re.fullmatch(r"[+-]?\d+", key)
        made: Any = int(key) if number else key
        if not scalar_fits(key_kind, made):
            raise ConfigError(f"{where} has the key {key!r}, which should be {in_words(key_kind)}")
        if made in found:
            raise ConfigError(f"{where} has the key {made!r} twice")
        found[made] = convert(value_kind, value, named(where, str(key)))
    return found


def in_words(kind: Any) -> str:
    """A type, for a message.

    >>> in_words(tuple[int, ...] | None), in_words(float)
    ('a list of whole numbers, or nothing', 'a number')
    >>> in_words(dict[int, int])
    'a table from whole numbers to whole numbers'
    """
    origin, arguments = get_origin(kind), get_args(kind)
    words = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", Path: "a path"}
    if kind in words:
        return words[kind]
    if kind is NoneType:
        return "nothing"
    if origin in (Union, UnionType):
        return ", or ".join(in_words(a) for a in arguments)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if origin is tuple:
        plain = in_words(arguments[0])
        several = plain.split(" ", 1)[1] + "s" if plain.startswith("a ") else plain
        return f"a list of {several}" if arguments[-1] is Ellipsis else f"a list of {len(arguments)} values"
    if origin in (dict, Mapping) and arguments != (str, Any):
        keys, values = (in_words(a).removeprefix("a ") + "s" for a in arguments)
        return f"a table from {keys} to {values}"
    return "a table" if is_dataclass(kind) or origin in (dict, Mapping) else str(kind)


def dump(data: Any) -> str:
    """A dataclass as TOML text; fields without a value (None) are left out.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Size:
    ...     rows: int = 1
    ...     name: str | None = None
    >>> dump(Size())
    'rows = 1\\n'
    """
    lines = [line for name, values in tables(data, "") for line in ([f"\n[{name}]", *values] if name else values)]
    return "\n".join(lines).lstrip("\n") + "\n"


def tables(data: Any, name: str) -> Iterator[tuple[str, list[str]]]:
    """Each table's name and lines, its own values before the tables inside it."""
    values = {field.name: getattr(data, field.name) for field in fields(data)}
    inner = {key: value for key, value in values.items() if is_dataclass(value)}
    own = [f"{key} = {literal(v)}" for key, v in values.items() if key not in inner and v is not None]
    yield name, own
    for key, value in inner.items():
        yield from tables(value, named(name, key))


def literal(value: Any) -> str:
    """A value as TOML writes it.

    >>> literal((1, 2.5, True, "a")), literal({"k": None, "n": 3})
    ('[1, 2.5, true, "a"]', '{n = 3}')
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (str, Path)):
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(literal(item) for item in cast("list[Any]", value)) + "]"
    if isinstance(value, Mapping):
        known = cast("Mapping[Any, Any]", value).items()
        return "{" + ", ".join(f"{bare(str(key))} = {literal(v)}" for key, v in known if v is not None) + "}"
    raise ConfigError(f"{value!r} of type {type(value).__name__} cannot be written to TOML")


def bare(key: str) -> str:
    """A key, quoted where it has to be."""
    return key if key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key) else json.dumps(key)
