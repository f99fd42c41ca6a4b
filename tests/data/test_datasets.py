"""Datasets of files: which mask belongs to which image, what is wrong with them before a run, and reading them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mural
from mural.data.image_sample import Sample
from mural.data.loading.loader import Loader
from mural.data.loading.preflight import DatasetFacts
from mural.data.sets.dataset import Dataset
from mural.data.sets.memory_sources import ArraySource
from mural.data.source import Source
from mural.data.writing.write import create
from mural.errors import DataError
from ranks import run_on


def picture(path: Path, size: tuple[int, int] = (12, 16), channels: int = 3, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 3, (*size, channels), np.uint8)
    Image.fromarray(pixels if channels > 1 else pixels[..., 0]).save(path)
    return path


def files(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def pairs(dataset: Dataset, folder: Path) -> list[tuple[str, str]]:
    return [(str(s.image.relative_to(folder)), str(s.target.relative_to(folder))) for s in dataset]


def test_globs_are_paired_by_stem(tmp_path: Path) -> None:
    files(tmp_path, ["i/b.ome.tif", "i/a.tif", "i/c.v2.nii.gz", "m/a.png", "m/c.v2.npy", "m/b.zarr", "i/notes", "m/.x"])
    (tmp_path / "i/notes").unlink()
    found = Dataset(str(tmp_path / "i" / "*"), tmp_path / "m")
    assert pairs(found, tmp_path) == [
        ("i/a.tif", "m/a.png"),
        ("i/b.ome.tif", "m/b.zarr"),
        ("i/c.v2.nii.gz", "m/c.v2.npy"),
    ]


def test_globs_are_paired_by_folder_where_stems_repeat(tmp_path: Path) -> None:
    files(tmp_path, [f"{kind}/{case}/scan.tif" for kind in ("i", "m") for case in ("one", "two")])
    found = Dataset(str(tmp_path / "i/**/*.tif"), str(tmp_path / "m/**/*.tif"))
    assert pairs(found, tmp_path) == [("i/one/scan.tif", "m/one/scan.tif"), ("i/two/scan.tif", "m/two/scan.tif")]


def test_globs_are_paired_by_their_wildcards_where_stems_differ(tmp_path: Path) -> None:
    files(tmp_path, ["scan_1.tif", "scan_2.tif", "scan_1_mask.png", "scan_2_mask.png"])
    found = Dataset(str(tmp_path / "scan_?.tif"), str(tmp_path / "scan_*_mask.png"))
    assert pairs(found, tmp_path) == [("scan_1.tif", "scan_1_mask.png"), ("scan_2.tif", "scan_2_mask.png")]


def test_what_does_not_match_is_listed(tmp_path: Path) -> None:
    files(tmp_path, ["i/a.tif", "i/b.tif", "i/c.tif", "m/b.png", "m/d.png", "j/a.tif", "j/a.png", "j/b.tif"])
    with pytest.raises(DataError, match=r"no mask for the images 'a', 'c'; no image for the masks 'd'"):
        Dataset(str(tmp_path / "i/*.tif"), str(tmp_path / "m/*.png"))
    with pytest.raises(
        DataError, match=r"several images are called 'a' \(as .*a\.png.*a\.tif.*no mask for the images 'a'"
    ):
        Dataset(str(tmp_path / "j/*"), str(tmp_path / "m/b.png"))
    with pytest.raises(DataError, match=r"images: nothing matches .*\*\.jpg.*look into"):
        Dataset(str(tmp_path / "i/*.jpg"))
    with pytest.raises(DataError, match=r"masks: nothing matches .*the folder '.*nowhere' does not exist"):
        Dataset(str(tmp_path / "i/*.tif"), str(tmp_path / "nowhere/*.png"))
    many = [f"k/{i:02d}.tif" for i in range(30)]
    files(tmp_path, many)
    with pytest.raises(DataError, match="and 22 more"):
        Dataset(str(tmp_path / "k/*.tif"), str(tmp_path / "m/*.png"))


def test_lists_are_paired_by_place() -> None:
    found = Dataset([torch.zeros(1, 4, 4), np.zeros((4, 4)), "x.tif"], labels=[3, 1, 2])
    assert [(s.name, s.target) for s in found] == [("image 0", 3), ("image 1", 1), ("x.tif", 2)]
    assert found.name(2) == "x.tif"
    with pytest.raises(DataError, match="2 images were given with 3 masks"):
        Dataset(["a", "b"], ["a", "b", "c"])
    with pytest.raises(DataError, match="not both"):
        Dataset(["a"], ["a"], labels=[1])
    with pytest.raises(DataError, match="at least one"):
        Dataset([])
    assert [s.target for s in Dataset(["a", "b"], labels=[1, 0.5])] == [1.0, 0.5]


def test_csv(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    table = tmp_path / "sub" / "train.csv"
    table.write_text("\ufeffimage, mask ,notes\na.tif,../m/a.png,x\nb.tif,/far/b.png,\n", encoding="utf-8")
    found = Dataset.from_csv(table)
    assert [s.image for s in found] == [tmp_path / "sub/a.tif", tmp_path / "sub/b.tif"]
    assert [s.target for s in found] == [tmp_path / "sub/../m/a.png", Path("/far/b.png")]
    table.write_text("image,label\na.tif,0\nb.tif,3\n")
    assert [s.target for s in Dataset.from_csv(table)] == [0, 3]
    table.write_text("image,label\na.tif,1\nb.tif,0.25\n")
    assert [s.target for s in Dataset.from_csv(table)] == [1.0, 0.25]
    table.write_text("image,label\na.tif,tumour\nb.tif,benign\n")
    assert [s.target for s in Dataset.from_csv(table, classes=("benign", "tumour"))] == [1, 0]
    table.write_text("image\na.tif\n")
    assert [s.target for s in Dataset.from_csv(table)] == [None]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("images,mask\na,b\n", "no column 'image' among ['images', 'mask']; 'images' looks like 'image'"),
        ("image,masks\na,b\n", "'masks' looks like 'mask': rename it"),
        ("image,lable\na,1\n", "'lable' looks like 'label'"),
        ("image,mask,label\na,b,1\n", "both a column 'mask' and a column 'label'"),
        ("image,label\na,1\nb,tumour\n", "line 3: the label 'tumour' is not a number"),
        ("image,label\na,nan\n", "'nan' is not a number"),
        ("image,mask\na.tif,\n", "line 2: column 'mask' is empty"),
        ("image\n", "at least one"),
        ("", "no column 'image' among []"),
    ],
)
def test_csv_that_cannot_be_understood(tmp_path: Path, text: str, words: str) -> None:
    table = tmp_path / "t.csv"
    table.write_text(text)
    with pytest.raises(DataError, match=re.escape(words)):
        Dataset.from_csv(table)


def test_csv_labels_outside_the_classes_and_no_file(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("image,label\na,tumor\n")
    with pytest.raises(DataError, match=r"'tumor' is not one of the classes .* \(did you mean 'tumour'\?\)"):
        Dataset.from_csv(table, classes=("benign", "tumour"))
    with pytest.raises(DataError, match="cannot be read"):
        Dataset.from_csv(tmp_path / "none.csv")


def test_split_is_drawn_by_its_seed() -> None:
    data = Dataset([f"{i}.tif" for i in range(10)])
    training, validation = data.split(0.3, seed=1)
    assert (len(training), len(validation)) == (7, 3)
    assert sorted(s.name for part in (training, validation) for s in part) == [s.name for s in data]
    assert [s.name for s in data.split(0.3, seed=1)[1]] == [s.name for s in validation]
    assert len({tuple(s.name for s in data.split(0.3, seed=k)[1]) for k in range(9)}) > 5
    assert [len(part) for part in Dataset(["a", "b"]).split(0.01)] == [1, 1]
    for fraction in (0, 1, 1.5):
        with pytest.raises(DataError, match="between 0 and 1"):
            data.split(fraction)
    with pytest.raises(DataError, match="one sample"):
        Dataset(["a"]).split(0.5)


def checked(samples: Any, spatial: tuple[int, ...]) -> Any:
    mesh = mural.init(spatial=spatial)
    try:
        return Dataset.of(samples).check(mesh)
    except DataError as error:
        return str(error)


def test_preflight_finds_what_is_wrong_on_every_rank(tmp_path: Path) -> None:
    good = [(picture(tmp_path / f"i{k}.png", seed=k), picture(tmp_path / f"m{k}.png", channels=1)) for k in range(5)]
    samples = [Sample(i.name, i, m) for i, m in good]
    facts = DatasetFacts(5, 3, torch.uint8, (12, 16), (12, 16))
    assert Dataset.of(samples).check() == facts
    assert run_on(2, checked, samples, (2, 1)) == [facts, facts]
    (tmp_path / "i1.png").write_bytes((tmp_path / "i1.png").read_bytes()[:60])
    picture(tmp_path / "m2.png", (11, 16), 1)
    picture(tmp_path / "i4.png", channels=1)
    (tmp_path / "m3.png").unlink()
    texts = set(run_on(2, checked, samples, (2, 1)))
    assert len(texts) == 1
    text = texts.pop()
    assert text.startswith("4 samples cannot be used:")
    for words in (
        "i1.png",
        "m2.png: the mask has the spatial extents (11, 16), but its image",
        "save the mask at the size of its image",
        "m3.png",
        "i4.png: has 1 channels of uint8 and 2 spatial dims, but i0.png has 3",
    ):
        assert words in text
    with pytest.raises(DataError) as caught:
        Dataset.of(samples).check()
    assert str(caught.value) == text


def test_preflight_of_a_loader_can_skip(tmp_path: Path) -> None:
    samples = [Sample(str(k), picture(tmp_path / f"{k}.png", (12 + k, 16))) for k in range(3)]
    (tmp_path / "1.png").write_bytes(b"nothing")
    loader = Loader(samples, mural.init(), skip_bad=True)
    facts = loader.check()
    assert (facts.smallest, facts.largest) == ((12, 16), (14, 16))
    assert [(bad.index, "1.png" in bad.reason) for bad in loader.bad] == [(1, True)]
    assert sorted(b.names[0] for b in loader.epoch(0)) == ["0", "2"]
    assert len(loader.bad) == 1
    with pytest.raises(DataError, match=r"1 sample cannot be used:\n.*1\.png"):
        Loader(samples, mural.init()).check()


def tiled(path: Path, pixels: torch.Tensor, tile: int) -> Path:
    with create(path, pixels.shape, pixels.dtype, chunks=(*(1,) * (pixels.ndim - 2), tile, tile)) as writer:
        writer.write([(0, n) for n in pixels.shape], pixels)
    return path


def read_counted(images: list[Path], spatial: tuple[int, ...], data: int, options: dict[str, Any]) -> Any:
    mesh = mural.init(spatial=spatial, data=data)
    loader = Loader(Dataset(images), mesh, scale=None, shuffle=False, **options)
    full = [batch.image.full() for batch in loader.epoch(0)]
    box = tuple(tuple(i) for i in batch_box(loader))
    loader.close()
    return full[0] if mesh.rank == 0 else None, box, loader.bytes_decoded


def batch_box(loader: Loader) -> Any:
    return loader.reader.open(0, 0).box


@pytest.mark.parametrize("suffix", [".tif", ".zarr"])
@pytest.mark.parametrize(("spatial", "data"), [((2, 1), 1), ((1, 2), 1), ((2, 2), 1), ((4, 1), 1), ((2, 1), 2)])
def test_each_rank_decodes_its_share_and_at_most_a_row_of_tiles(
    tmp_path: Path, suffix: str, spatial: tuple[int, int], data: int
) -> None:
    """Cuts at 100 and 50 of 200 pixels do not lie on the edges of tiles of 16."""
    pixels = torch.randint(0, 255, (2, 3, 200, 200), dtype=torch.uint8)
    images = [tiled(tmp_path / f"{i}{suffix}", image, 16) for i, image in enumerate(pixels)]
    options = {"batch": 2, "workers": 3}
    found = run_on(data * spatial[0] * spatial[1], read_counted, images, spatial, data, options)
    assert torch.equal(found[0][0], pixels.float())
    for _, box, decoded in found:
        share = 2 // data * 3
        aligned = [-(-stop // 16) * 16 - start // 16 * 16 for start, stop in box]
        assert decoded == share * aligned[0] * aligned[1]
        rows, columns = (208 // parts for parts in spatial)  # the file's tiles cover 208 × 208
        row_of_tiles = 16 * columns * (spatial[0] > 1) + 16 * rows * (spatial[1] > 1)
        assert decoded <= share * (rows * columns + row_of_tiles)


def whole_run(images: Path, masks: Path, spatial: tuple[int, ...], skip: bool) -> Any:
    mesh = mural.init(spatial=spatial)
    loader = Loader(Dataset(images, masks), mesh, shuffle=False, skip_bad=skip)
    try:
        return [batch.names[0] for batch in loader.epoch(0)], loader.summary()
    except DataError as error:
        return str(error)


def test_a_tile_that_is_damaged_raises_on_every_rank_or_is_skipped(tmp_path: Path) -> None:
    """The last chunk of one image is damaged: only the rank that holds the lower half can notice."""
    pixels = torch.randint(0, 255, (3, 64, 64), dtype=torch.uint8)
    (tmp_path / "i").mkdir()
    (tmp_path / "m").mkdir()
    for i in range(3):
        tiled(tmp_path / f"i/{i}.zarr", pixels, 16)
        tiled(tmp_path / f"m/{i}.tif", pixels[:1] % 2, 16)
    chunks = sorted(p for p in (tmp_path / "i/1.zarr").rglob("*") if p.is_file() and p.suffix != ".json")
    chunks[-1].write_bytes(b"\x01" * 20)
    texts = set(run_on(2, whole_run, tmp_path / "i/*.zarr", tmp_path / "m/*.tif", (2, 1), False))
    assert len(texts) == 1
    text = texts.pop()
    assert "rank 1 could not read" in text
    assert "1.zarr" in text
    assert "box" in text
    assert "skip_bad=True" in text
    for names, summary in run_on(2, whole_run, tmp_path / "i/*.zarr", tmp_path / "m/*.tif", (2, 1), True):
        assert [Path(name).name for name in names] == ["0.zarr", "2.zarr"]
        assert "1 of 3 samples were left out" in summary
    content = (tmp_path / "m/0.tif").read_bytes()
    (tmp_path / "m/0.tif").write_bytes(content[: len(content) // 2])
    texts = set(run_on(2, whole_run, tmp_path / "i/*.zarr", tmp_path / "m/*.tif", (2, 1), False))
    assert len(texts) == 1
    text = texts.pop()
    assert "0.tif" in text
    assert "truncated" in text


def test_files_stay_open_between_steps_and_few_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def recorded(path: str, threads: int) -> Source:
        found = mural.data.open(path, threads=threads)
        opened.append(found.close_at_end)  # alive until the file is closed
        return found

    monkeypatch.setattr("mural.data.loading.open_files.open_image", recorded)
    images = [picture(tmp_path / f"{k}.png") for k in range(6)]
    loader = Loader(Dataset(images), mural.init(), prefetch=1)
    loader.files.capacity = 2
    for count in range(1, 3):
        assert len([batch.step for batch in loader.epoch(count)]) == 6
        assert len(loader.files.sources) == 2
        assert sum(each.alive for each in opened) == 2
        assert len(opened) <= 6 * count
    for _ in loader.epoch(1):
        break
    assert sum(each.alive for each in opened) == 2
    loader.close()
    assert not loader.files.sources
    assert not any(each.alive for each in opened)
    assert loader.bytes_decoded > 6 * 12 * 16 * 3 - 1


def test_an_array_source_is_a_copy_of_nothing_and_refuses_wrong_boxes() -> None:
    source = ArraySource(torch.arange(24).view(2, 3, 4), "ours")
    assert source.read([(1, 2), (0, 3), (1, 3)]).tolist() == [[[13, 14], [17, 18], [21, 22]]]
    with pytest.raises(DataError, match="ours"):
        source.read([(0, 3), (0, 3), (0, 4)])
    with pytest.raises(DataError, match="level 1"):
        source.read(level=1)
    with pytest.raises(DataError, match=r"not \(2,\)"):
        ArraySource(np.zeros(2))
