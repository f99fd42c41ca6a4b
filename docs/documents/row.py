"""A row of the page: a claim of a document, what mural found, and the verdict."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from documents.lookup import Field, Number, known, value

NOT_RUN = "the command was not run yet on the machine that it needs"


class Verdict(StrEnum):
    """What became of a claim."""

    REPRODUCED = "reproduced"
    BETTER = "better"
    CONTRADICTED = "contradicted"
    NOT_COMPARABLE = "not comparable"
    NOT_MEASURED = "not measured yet"


@dataclass(frozen=True)
class Text:
    """Words with numbers in them: `{name:format}` stands for a number that is looked up."""

    template: str
    numbers: Mapping[str, Number] = field(default_factory=dict[str, Number])

    def __str__(self) -> str:
        return self.template.format(**{name: value(number) for name, number in self.numbers.items()})

    @property
    def known(self) -> bool:
        """Whether all its numbers are there."""
        return all(map(known, self.numbers.values()))

    @property
    def words(self) -> str:
        """What is written by hand: the template without its numbers.

        >>> Text("{fits:.0f}² on 8 ranks").words
        '…² on 8 ranks'
        """
        parts = string.Formatter().parse(self.template)
        return "".join(text + ("" if name is None else "…") for text, name, *_ in parts)


def say(template: str, **numbers: Number) -> Text:
    """Words with numbers."""
    return Text(template, numbers)


@dataclass(frozen=True)
class Row:
    """A table, a figure or a claim of a document."""

    place: str
    """Where it is in the document."""
    theirs: Text | str
    ours: Text | str
    command: str
    """What measures ours, or will."""
    verdict: Verdict
    why: Text | str = ""
    awaits: Field | None = None
    """Where the results will be that are not there yet."""
    then: Text | None = None
    """What ours will be once they are there: the page has it at once, and the verdict is then to be judged."""

    @property
    def said(self) -> Text | str:
        """Ours as it can be said now."""
        return self.then if self.then is not None and self.then.known else self.ours

    @property
    def by_hand(self) -> Iterator[str]:
        """What is written by hand about mural."""
        for text in (self.ours, self.why, self.then or ""):
            yield text if isinstance(text, str) else text.words

    @property
    def texts(self) -> Iterator[Text]:
        """All texts with numbers."""
        yield from (text for text in (self.theirs, self.ours, self.why, self.then) if isinstance(text, Text))


@dataclass(frozen=True)
class Document:
    """A document and its rows."""

    number: str
    title: str
    rows: tuple[Row, ...]
