"""The benchmark of lakes: its map, its windows, what is counted, and a run at toy size on a made map."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from water import page, run
from water.cases import TOY, Part, Settings, all_parts, selected
from water.evaluation import THRESHOLDS, counted, lake_chance, overlap, ranges
from water.training import as_input, corners, cut, on_windows, turned
from water.world import CONTINENTS, LAKE, LAND, OCEAN, TEST, TRAINING, VALIDATION, WIDTH, loaded

import mural
from mural.errors import ConfigError, DataError

ROWS, COLUMNS = 270, 540


@pytest.fixture
def mask(tmp_path: Path) -> Path:
    """A map with the layout of the package's, 32 times coarser: ocean, blocks of land, a lake in each; an icy south."""
    values = torch.zeros(ROWS, COLUMNS, dtype=torch.uint8)
    blocks = values.unfold(0, 30, 30).unfold(1, 30, 30)
    blocks[..., 5:25, 5:25] = 1
    blocks[..., 12:18, 10:20] = 2
    values[:3] = 1
    path = tmp_path / "made.bin"
    path.write_bytes(gzip.compress(values.numpy().tobytes(), 1))
    return path


@pytest.fixture
def world(mask: Path) -> Tensor:
    return loaded(mask, TOY.coarse)


def test_a_map_lies_north_up_with_its_classes(mask: Path, world: Tensor) -> None:
    assert world.shape == (ROWS, COLUMNS)
    assert bool((world[-3:] == LAND).all())
    assert [int(v) for v in (world[0, 0], world[ROWS - 1 - 7, 7], world[ROWS - 1 - 15, 15])] == [OCEAN, LAND, LAKE]
    assert torch.equal(loaded(mask, 2 * TOY.coarse), world[::2, ::2])


@pytest.mark.parametrize(
    ("content", "coarse", "words"),
    [
        (b"no map", 32, "gzip"),
        (gzip.compress(bytes(7)), 32, "twice as many columns"),
        (gzip.compress(bytes([3] * 8)), 32, "8 of them above 2"),
        (gzip.compress(bytes(2 * 270**2)), 1, "540 columns"),
    ],
    ids=["other bytes", "odd number", "other values", "too coarse"],
)
def test_what_is_no_map_is_refused(tmp_path: Path, content: bytes, coarse: int, words: str) -> None:
    (tmp_path / "other.bin").write_bytes(content)
    with pytest.raises(DataError, match=words):
        loaded(tmp_path / "other.bin", coarse)


def test_continents_are_on_the_map_and_do_not_overlap() -> None:
    for width in (WIDTH, COLUMNS):
        seen = torch.zeros(width // 2, width, dtype=torch.uint8)
        for box in CONTINENTS.values():
            assert box.of(seen).shape == box.pixels(width)[2:]
            box.of(seen).add_(1)
        assert int(seen.max()) == 1
    assert sorted((*TRAINING, *VALIDATION, *TEST)) == sorted(CONTINENTS)
    text = (run.HERE / "README.md").read_text()
    assert all(f"| {box} |" in text for box in CONTINENTS.values())


def test_patches_lie_in_their_continents_and_every_extent_sees_as_many_pixels(world: Tensor) -> None:
    box = CONTINENTS["Europe"]
    row, column, rows, columns = box.pixels(COLUMNS)
    at = corners(("Europe",), 16, COLUMNS, (5, 40), seed=1)
    assert bool(((at >= torch.tensor([row, column])) & (at <= torch.tensor([row + rows, column + columns]) - 16)).all())
    patches = cut(world, at[0], 16)
    first = at[0, 0].tolist()
    assert torch.equal(patches[0], world[first[0] : first[0] + 16, first[1] : first[1] + 16])
    assert len({turned(patches, step).numpy().tobytes() for step in range(8)}) == 8
    settings = Settings()
    assert {(settings.window // extent) ** 2 * extent**2 for extent in settings.extents} == {2048**2}


def test_lakes_are_counted_by_their_distance_from_land() -> None:
    box = torch.full((32, 32), LAKE, dtype=torch.uint8)
    box[:, 0] = LAND
    far = ranges(box, (2, 8))
    assert far[5].tolist() == [0] * 3 + [1] * 6 + [2] * 23
    chance = torch.where(torch.arange(32) < 16, 0.55, 0.25).expand(32, 32)
    found = dict(zip(THRESHOLDS, counted(chance, box, far, 3), strict=True))
    assert found[0.5] == [(64, 32, 0), (192, 0, 0), (224, 0, 512)]
    assert found[0.2] == [(64, 32, 0), (192, 0, 0), (736, 0, 0)]
    assert overlap(found[0.5]) == 480 / 1024


def test_tiles_of_a_pointwise_network_give_what_one_look_gives(world: Tensor) -> None:
    model, box = nn.Conv2d(1, 3, 1), CONTINENTS["Europe"].of(world)
    with torch.no_grad():
        scores = model(as_input(box[None]))[0]
    at_once = (scores[LAKE] - scores[OCEAN]).sigmoid() * (box != LAND)
    assert torch.allclose(lake_chance(model, box, 16), at_once, atol=1e-5)


def test_windows_train_the_same_through_mural_as_in_plain_torch(
    world: Tensor, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    kept = torch.get_default_dtype()
    request.addfinalizer(lambda: torch.set_default_dtype(kept))
    torch.set_default_dtype(torch.float64)
    part = Part("windows", "64", 1e-3, 0)
    through, _ = on_windows(part, TOY, world)
    monkeypatch.setattr(mural, "shard", lambda x, *_, **__: x)
    monkeypatch.setattr(mural, "reduce_gradients", lambda *_: None)
    plain, _ = on_windows(part, TOY, world)
    for a, b in zip(through.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-10)


def test_parts_have_names_and_extents_fill_a_window() -> None:
    parts = all_parts(Settings())
    assert [Part.parse(part.name) for part in parts] == parts
    assert len(selected(parts, ["windows/*/*/0"])) == 10
    with pytest.raises(ValueError, match="--list"):
        selected(parts, ["domains/64/0.001/0"])
    with pytest.raises(ConfigError, match="96 pixels for windows of 2048"):
        replace(Settings(), patches=(96,))


def test_rate_and_threshold_that_are_best_on_the_validation_continent_count() -> None:
    def record(rate: float, seed: int, right: list[int]) -> tuple[Part, dict[str, object]]:
        counts = [[(n, 0, 10 - n)] for n in right]
        return Part("windows", "64", rate, seed), {"rate": rate, "tiles": {"Asia": counts}}

    low, middle = [1] * 9, [1, 1, 6, 1, 1, 1, 1, 1, 1]
    runs = [record(1e-3, 0, middle), record(1e-3, 1, middle), record(3e-3, 0, [9] * 9), record(3e-3, 1, low)]
    records, threshold = page.chosen(runs, VALIDATION)
    assert ([found["rate"] for found in records], threshold) == ([1e-3, 1e-3], 2)


def test_it_runs_at_toy_size_and_knows_what_it_did(
    mask: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "toy.jsonl"
    options = ["run.py", "--toy", "--device", "cpu", "--mask", str(mask), "--output", str(output)]
    monkeypatch.setattr("sys.argv", options)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    run.main()
    printed = capsys.readouterr().out
    assert "| 16² | 0.001 | 0." in printed
    assert "| North America (labelled) |" in printed
    run.main()
    assert capsys.readouterr().out.count(": known") == 4
    folder = tmp_path / "water"
    (folder / "results").mkdir(parents=True)
    (folder / "README.md").write_text((run.HERE / "README.md").read_text())
    run.collect([output], folder / "results" / "gpu.json")
    page.write(folder)
    text = (folder / "README.md").read_text()
    assert "Nothing was measured" not in text
    assert text.count("| **mean of the others** |") >= 1
