"""Every form in which torch takes a call: keywords in any order, NumPy's names, `out=`; and misread calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from law import Expr, Grid, holds, image, raises
from mural.errors import UnsupportedOp
from mural.shard.call_forms import usual_form
from mural.shard.misread_calls import refusal_of
from ranks import run_on

GRIDS = [Grid((2, 1)), Grid((1, 2), data=2)]

KEYWORDS = """
torch.reshape(input=x, shape=(2, 4, 143)), x.reshape(shape=(2, 4, 143)), x.view(size=(2, 4, 143))
torch.where(condition=x > 0, input=x, other=-x), torch.where(other=0.0, condition=x > 0, input=x)
torch.searchsorted(sorted_sequence=torch.arange(3.0).double(), input=x) + x
x * torch.equal(input=x, other=x) + torch.equal(x, other=x * 2)
torch.linalg.norm(x, ord=1, dim=3), torch.linalg.norm(input=x, dim=(2, 3), ord='fro')
torch.max(input=x, dim=2)[0], torch.max(a=x), x.max(axis=1, keepdims=True)[0], torch.max(input=x, other=x * 2)
torch.maximum(other=x * 2, input=x), torch.add(x1=x, x2=x), torch.sum(x=x, axis=1)
x.repeat(repeats=(1, 1, 2, 1)), x.permute(dims=(0, 2, 1, 3)), x.expand(size=(3, 2, 4, 13, 11))
torch.cat(tensors=[x, x], dim=2), torch.stack(tensors=[x, x]), torch.stack(dim=1, tensors=[x, x])
torch.clamp(max=0.5, input=x), torch.lerp(input=x, end=x * 2, weight=0.25), torch.addcmul(input=x, tensor1=x, tensor2=x)
torch.unflatten(input=x, dim=1, sizes=(2, 2)), torch.movedim(input=x, source=1, destination=-1)
torch.matmul(input=x, other=image(11, 3)), torch.conv2d(input=x, weight=image(3, 4, 3, 3), padding=1)
""".strip().splitlines()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("code", KEYWORDS)
def test_keywords(code: str, grid: Grid) -> None:
    holds(Expr(code), image(2, 4, 13, 11), grid)


@pytest.mark.parametrize("code", [
    "torch.nn.functional.instance_norm(x, weight=image(4), bias=image(4, seed=1))",
    "torch.nn.functional.instance_norm(input=x, bias=image(4), weight=image(4, seed=1), eps=0.1)",
    "torch.nn.functional.batch_norm(x, image(4), image(4) ** 2, bias=image(4, seed=1), weight=image(4), eps=0.1)",
])  # fmt: skip
def test_functions_in_python_have_an_order_of_their_own(code: str) -> None:
    """Keywords came in the order of the operation underneath: `weight` was taken for `running_mean`, and had no
    gradient.
    """
    holds(Expr(code), image(2, 4, 13, 11), GRIDS[0])


def test_positions_are_taken_as_far_as_the_signature_goes() -> None:
    x = torch.ones(2)
    assert usual_form(torch.var, (x,), {"dim": 0, "correction": 0}) == ((x, 0), {"correction": 0})
    assert usual_form(torch.sum, (x,), {"keepdim": True}) == ((x,), {"keepdim": True})
    assert usual_form(torch.Tensor.float, (x,), {}) == ((x,), {})


OUTS = """
max(x; min(x; sum(x, 2; mean(x, (1, 2, 3); logsumexp(x, 2; var(x, 3; std(x, 2; amax(x, (2, 3); all(x > 0, 2
max(x, 2; min(x, 3, keepdim=True; aminmax(x, dim=2; topk(x, 2, 1; linalg.norm(x, dim=1; linalg.vector_norm(x, 2, (2, 3)
add(x, x; exp(x; gt(x, 0; where(x > 0, x, -x; cat([x, x], 2; stack([x, x]; matmul(x, image(11, 3); cumsum(x, 3
addcmul(x, x, x; softmax(x, 2; argmax(x, 1; clamp(x, 0; bitwise_not(x > 0; isposinf(x; nansum(x, 1
""".strip().splitlines()
"""Calls without their last parenthesis."""


class Outs(torch.nn.Module):
    """The calls of a line, with `out=` of garbage in the place of their results."""

    def __init__(self, code: str):
        super().__init__()
        self.calls = [f"torch.{call}" for call in code.split("; ")]

    def forward(self, x: Tensor) -> list[Tensor]:
        made: list[Tensor] = []
        for call in self.calls:
            result = Expr(f"{call})")(x)
            given = [torch.full_like(t, 1) for t in ([result] if isinstance(result, Tensor) else result)]
            out = given[0] if isinstance(result, Tensor) else tuple(given)
            got = eval(f"{call}, out=out)", {"torch": torch, "image": image, "x": x, "out": out})
            assert got is out or all(a is b for a, b in zip(got, given, strict=True))
            made += given
        return made


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("code", OUTS)
def test_out_was_ignored(code: str, grid: Grid) -> None:
    holds(Outs(code), image(2, 4, 13, 11), grid, needs_grad=False)


def written_to(case: str) -> Tensor:
    x = Grid((2, 1)).shard(image(2, 4, 13, 11))
    if case == "plain":
        out = torch.zeros(2, 4, 13, 11).double()
        torch.mul(x, 2, out=out)
        return out
    if case == "itself":
        return torch.mul(x, 2, out=x).full()  # type: ignore[attr-defined]
    if case == "of plain ones":
        return torch.mul(x.full(), 2, out=torch.empty_like(x)).full()  # type: ignore[attr-defined]
    if case == "gradient":
        return torch.mul(x.requires_grad_(), 2, out=torch.empty_like(x))
    return torch.mul(x, 2, out=torch.empty_like(x)[:, :1])


@pytest.mark.parametrize("case", ["plain", "itself", "of plain ones"])
def test_out_of_other_places(case: str) -> None:
    for found in run_on(2, written_to, case):
        assert torch.equal(found, image(2, 4, 13, 11) * 2)


@pytest.mark.parametrize(("case", "message"), [("gradient", "require a gradient"), ("shape", "(2, 4, 13, 11)")])
def test_out_that_does_not_fit_is_refused(case: str, message: str) -> None:
    raises(message, UnsupportedOp, written_to, case)


def wrong(call: str) -> object:
    x = Grid((2, 1)).shard(image(2, 4, 13, 11))
    return eval(call, {"torch": torch, "x": x})


@pytest.mark.parametrize(("call", "kind"), [("x.sum(5)", IndexError), ("x.sum(1, 2, 3, 4)", TypeError)])
def test_a_call_that_torch_refuses_keeps_its_error(call: str, kind: type[Exception]) -> None:
    raises("", kind, wrong, call)


def test_a_form_that_a_rule_misreads_is_refused_by_name() -> None:
    found = refusal_of(torch.roll, (torch.ones(2, 3), 1), {"dims": [1]}, KeyError("shifts"))
    assert found is not None
    assert "roll(tensor of shape (2, 3), 1, dims=[1]): the rule for sharded tensors does not take" in str(found)
    assert refusal_of(torch.roll, (torch.ones(2, 3), "a"), {}, TypeError("str")) is None
    assert refusal_of(torch.roll, (torch.ones(2, 3), 1), {}, torch.OutOfMemoryError("memory")) is None
    assert refusal_of(torch.roll, (torch.ones(2, 3), 1), {}, IndexError("index 3 is out of range")) is None
