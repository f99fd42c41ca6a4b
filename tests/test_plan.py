"""Plans are data: what is written comes back, what is unknown or wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural.errors import ConfigError, PlanError
from mural.plans import Plan

PLANS = st.builds(
    Plan,
    data=st.integers(1, 9),
    stage=st.integers(1, 4),
    spatial=st.lists(st.integers(1, 5), max_size=3).map(tuple),
    schedule=st.sampled_from(["sequential", "gpipe", "1f1b", "interleaved", "gems"]),
    cuts=st.sampled_from(["memory", "layers"]) | st.lists(st.text("ab.#\"'\\", min_size=1), max_size=3).map(tuple),
    stream=st.none() | st.lists(st.integers(1, 4096), min_size=1, max_size=3).map(tuple),
    offload=st.lists(st.sampled_from(["activations", "parameters", "optimizer"]), max_size=3, unique=True).map(tuple),
    batchnorm=st.sampled_from(["global", "rank", "micro"]),
    average=st.integers(0, 5),
)


@given(PLANS)
def test_what_is_saved_is_loaded(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    plan.save(path)
    assert Plan.load(path) == plan


def test_how_many_ranks_a_plan_needs() -> None:
    assert Plan(data=2, stage=3, spatial=(2, 1)).devices == 12
    assert Plan(stage=2, grids=((2, 2), (1, 1))).devices == 5
    assert Plan(stage=2, schedule="interleaved", chunks=3).stages == 6
    assert Plan(stage=3, seats=(0, 1, 2, 1, 0)).stages == 5


def test_defaults_change_nothing() -> None:
    assert Plan().devices == 1
    assert str(Plan()) == "one rank"
    Plan().check_runnable()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("datta = 2", "unknown key 'datta': did you mean 'data'?"),
        ('data = "2"', "data = '2' should be a whole number"),
        ("data = true", "data = True should be a whole number"),
        ("data = 0", "at least 1"),
        ("spatial = [2, 0]", "1 to 3 sizes"),
        ("spatial = [1, 1, 1, 1]", "1 to 3 sizes"),
        ('precision = "float16"', "did you mean 'bfloat16'?"),
        ('batchnorm = "globl"', "did you mean 'global'?"),
        ("data = ", "is not TOML"),
        ('offload = ["optimizer", "optimizer"]', "names something twice: name each once"),
        ('offload = ["weights"]', "offload[0] = 'weights' is not one of"),
        ("stage = 2\ngrids = [[2, 1]]", "give each stage a grid"),
        ("stage = 2\ngrids = [[2, 1], [1, 1]]\nspatial = [2]", "leave spatial empty"),
        ("stage = 2\nseats = [0, 0]", "use every place"),
        ('schedule = "1f1"', "did you mean '1f1b'?"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert message in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Plan.load(tmp_path / "plan.toml")


def test_a_plan_by_hand_is_checked_too() -> None:
    with pytest.raises(PlanError, match=r"data = 1\.5 should be a whole number"):
        Plan(data=1.5)  # type: ignore[arg-type]
    assert Plan(spatial=2).spatial == (2,)  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [{"schedule": "1f1b"}, {"microbatches": 2}, {"channel": 2}, {"stream": (64, 64)}])
def test_what_does_not_go_with_domains_is_refused_when_it_runs(other: dict[str, object]) -> None:
    Plan(domain=2, stage=2, spatial=(2, 1), data=2).check_runnable()
    with pytest.raises(PlanError, match=rf"domain = 2 with {next(iter(other))} = .* cannot be run"):
        Plan(domain=2, **other).check_runnable()  # type: ignore[arg-type]
