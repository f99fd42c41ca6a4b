"""What records count and traces note, without a process group."""

from mural.comm.trace import Observed


def test_records_within_records_count_by_themselves() -> None:
    """Records that were equal when the inner one ended were taken for one another: the outer one counted no more."""
    messages = Observed()
    with messages.record() as outer:
        with messages.record() as inner:
            pass
        messages.note("conv2d", ("", 1), 0.0, [8, 0])
    assert (inner.messages, outer.messages, outer.bytes) == (0, 2, 8)
    assert outer.named == {"conv2d": (1, 8)}
    assert not messages.records


def test_a_part_is_noted_in_every_open_trace() -> None:
    messages = Observed()
    with messages.trace() as outer:
        with messages.trace() as inner:
            messages.note("conv2d", ("", 1), 2.5, [])
        messages.note("conv2d", ("", 2), 3.5, [])
    assert inner.posts == {("", 1): 2.5}
    assert outer.posts == {("", 1): 2.5, ("", 2): 3.5}
