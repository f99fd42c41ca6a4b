"""Windows: which input interval an operation reads for an output interval, along one dim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mural.geometry.interval import Interval


class Reads(Protocol):
    """What one dim of a windowed operation reads: the extension point of the rule table."""

    @property
    def extent(self) -> int:
        """The input's extent."""
        ...

    @property
    def out_extent(self) -> int:
        """The output's extent."""
        ...

    def reads(self, out: Interval) -> tuple[Interval, ...]:
        """Disjoint ascending input intervals, inside the image, that the output interval depends on."""
        ...


@dataclass(frozen=True)
class Window:
    """The rational map of a windowed operation: output o reads [(num·o + lo) // den, (num·o + hi) // den).

    One form covers them all: a convolution has num = stride; a transposed convolution has den = stride;
    adaptive pooling and interpolation have num / den = input extent / output extent. Positions outside
    [0, extent) are the operation's border, which its rule fills.

    >>> w = Window.conv(extent=10, kernel=3, stride=2, padding=1)
    >>> w.out_extent, w.span(Interval(0, 2)), w.reads(Interval(0, 2))
    (5, Interval(start=-1, stop=4), (Interval(start=0, stop=4),))
    """

    extent: int
    out_extent: int
    num: int = 1
    den: int = 1
    lo: int = 0
    hi: int = 1

    def span(self, out: Interval) -> Interval:
        """The input interval under an output interval, border included."""
        if out.size == 0:
            return Interval(0, 0)
        start = (self.num * out.start + self.lo) // self.den
        return Interval(start, max(start, (self.num * (out.stop - 1) + self.hi) // self.den))

    def reads(self, out: Interval) -> tuple[Interval, ...]:
        """The part of the span that is inside the image."""
        span, image = self.span(out), Interval(0, self.extent)
        return (span & image,) if span.start < image.stop and span.stop > 0 else (Interval(0, 0),)

    def touching(self, inputs: Interval) -> Interval:
        """The outputs whose span meets an input interval, not limited to the image's outputs.

        >>> Window.conv(extent=10, kernel=3, stride=1, padding=1).touching(Interval(4, 5))
        Interval(start=3, stop=6)
        """
        if inputs.size == 0:
            return Interval(0, 0)
        # span(o).stop > start  <=>  (num·o + hi) // den >= start + 1; span(o).start < stop likewise.
        first = -(-(self.den * (inputs.start + 1) - self.hi) // self.num)
        last = (self.den * inputs.stop - 1 - self.lo) // self.num
        return Interval(first, max(first, last + 1))

    @classmethod
    def conv(
        cls,
        extent: int,
        kernel: int,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        out: int | None = None,
    ) -> Window:
        """A convolution or pool; `out` overrides the output's extent (ceil_mode, one-sided padding)."""
        reach = dilation * (kernel - 1) + 1
        if out is None:
            out = (extent + 2 * padding - reach) // stride + 1
        return cls(extent, out, num=stride, lo=-padding, hi=reach - padding)

    @classmethod
    def transposed(
        cls,
        extent: int,
        kernel: int,
        stride: int = 1,
        padding: int = 0,
        output_padding: int = 0,
        dilation: int = 1,
    ) -> Window:
        """A transposed convolution: input i writes the outputs i·stride - padding + dilation·t, 0 <= t < kernel."""
        reach = dilation * (kernel - 1)
        out = (extent - 1) * stride - 2 * padding + reach + output_padding + 1
        return cls(extent, out, den=stride, lo=padding - reach + stride - 1, hi=padding + stride)

    @classmethod
    def adaptive(cls, extent: int, out: int) -> Window:
        """Adaptive pooling: output o reads [floor(o·extent / out), ceil((o + 1)·extent / out))."""
        return cls(extent, out, num=extent, den=out, hi=extent + out - 1)

    @classmethod
    def shifted(cls, extent: int, out: int, by: int) -> Window:
        """Output o reads only input o + by: padding with constants, and cropping."""
        return cls(extent, out, lo=by, hi=by + 1)


@dataclass(frozen=True)
class Segment:
    """Outputs [out.start, out.stop) read the inputs first, first + step, … (step 1, 0 or -1)."""

    out: Interval
    first: int
    step: int

    def index(self, o: int) -> int:
        """The input that output o reads."""
        return self.first + self.step * (o - self.out.start)

    def reads(self, out: Interval) -> Interval:
        """The inputs that the outputs in this segment read."""
        part = self.out & out
        if part.size == 0:
            return Interval(0, 0)
        a, b = self.index(part.start), self.index(part.stop - 1)
        return Interval(min(a, b), max(a, b) + 1)


@dataclass(frozen=True)
class Remap:
    """A map that reads one input per output, in straight pieces: reflect, replicate, circular padding, roll.

    >>> Remap.reflect(5, 2, 1).reads(Interval(0, 3))
    (Interval(start=0, stop=3),)
    >>> Remap.circular(9, 2, 0).reads(Interval(0, 3))
    (Interval(start=0, stop=1), Interval(start=7, stop=9))
    """

    extent: int
    segments: tuple[Segment, ...]

    @property
    def out_extent(self) -> int:
        """The output's extent."""
        return self.segments[-1].out.stop

    def reads(self, out: Interval) -> tuple[Interval, ...]:
        """The inputs that the outputs read, with adjacent pieces merged."""
        merged: list[Interval] = []
        for piece in sorted(s.reads(out) for s in self.segments):
            if piece.size == 0:
                continue
            if merged and piece.start <= merged[-1].stop:
                merged[-1] = Interval(merged[-1].start, max(merged[-1].stop, piece.stop))
            else:
                merged.append(piece)
        return tuple(merged) or (Interval(0, 0),)

    def index(self, o: int) -> int:
        """The input that output o reads."""
        return next(s for s in self.segments if s.out.start <= o < s.out.stop).index(o)

    @classmethod
    def of(cls, extent: int, left: Segment, right: Segment) -> Remap:
        """The identity with one segment before and one after; an empty segment is left out."""
        middle = Segment(Interval(left.out.size, left.out.size + extent), 0, 1)
        return cls(extent, tuple(s for s in (left, middle, right) if s.out.size))

    @classmethod
    def reflect(cls, extent: int, before: int, after: int) -> Remap:
        """Mirrored without the edge itself."""
        end = before + extent
        return cls.of(
            extent,
            Segment(Interval(0, before), before, -1),
            Segment(Interval(end, end + after), extent - 2, -1),
        )

    @classmethod
    def replicate(cls, extent: int, before: int, after: int) -> Remap:
        """The edge repeated."""
        end = before + extent
        return cls.of(extent, Segment(Interval(0, before), 0, 0), Segment(Interval(end, end + after), extent - 1, 0))

    @classmethod
    def circular(cls, extent: int, before: int, after: int) -> Remap:
        """The image repeated."""
        end = before + extent
        return cls.of(
            extent,
            Segment(Interval(0, before), extent - before, 1),
            Segment(Interval(end, end + after), 0, 1),
        )

    @classmethod
    def roll(cls, extent: int, shift: int) -> Remap:
        """Output o reads input o - shift, wrapping around."""
        shift %= extent
        parts = (Segment(Interval(0, shift), extent - shift, 1), Segment(Interval(shift, extent), 0, 1))
        return cls(extent, tuple(s for s in parts if s.out.size))
