"""Predictions of whole images: the same labels under any plan, in the formats of their images, resumed by image."""

from __future__ import annotations

import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest
import tifffile
from runs import run_config
from slides import SIDES, predicted
from typer.testing import CliRunner

import mural
from mural.cli import app
from mural.errors import CheckpointError, ConfigError, DataError
from mural.plans import Plan
from mural.prediction import result_batches
from mural.prediction.trained_run import trained_run
from mural.train.loop import fit_rank
from ranks import run_on


def labels(out: Path) -> dict[str, np.ndarray]:
    return {name: tifffile.imread(out / f"{name}.tif") for name in SIDES}


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        (1, Plan(stream=(24, 24))),
        (2, Plan(spatial=(2, 1))),
        (2, Plan(spatial=(1, 2), stream=(24, 24))),
        pytest.param(2, Plan(stage=2), marks=pytest.mark.slow),
        pytest.param(2, Plan(data=2), marks=pytest.mark.slow),
        pytest.param(4, Plan(spatial=(2, 2)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_label_maps_are_the_same_to_the_bit_under_any_plan(
    run: Path, tmp_path: Path, ranks: int, plan: Plan
) -> None:
    predicted(run, tmp_path / "one", Plan())
    run_on(ranks, predicted, run, tmp_path / "other", plan)
    one, other = labels(tmp_path / "one"), labels(tmp_path / "other")
    for name, side in SIDES.items():
        assert one[name].dtype == np.uint8
        assert one[name].shape[-2:] == side
        assert 0 < one[name].mean() < 1
        assert np.array_equal(one[name], other[name])


def test_an_image_is_predicted_once_and_keeps_its_resolution(run: Path, tmp_path: Path) -> None:
    first = mural.predict(run, run.parent / "slides", tmp_path, probabilities=True)
    assert (len(first.files), first.skipped, first.step) == (2, 0, trained_run(run).step)
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        tags = file.pages.first.tags
        assert [tags[name].value for name in ("XResolution", "YResolution")] == [(40000, 1), (20000, 1)]
    shares = mural.open(tmp_path / "probabilities" / "a.tif").read()
    assert np.allclose(shares.sum(0), 1)
    assert np.array_equal(shares.argmax(0), mural.open(tmp_path / "a.tif").read()[0])
    (tmp_path / "a.tif").unlink()
    before = (tmp_path / "b.tif").stat().st_mtime_ns
    again = mural.predict(run, str(run.parent / "slides/*.tif"), tmp_path, probabilities=True)
    assert again.skipped == 1
    assert (tmp_path / "a.tif").exists()
    assert (tmp_path / "b.tif").stat().st_mtime_ns == before


def test_a_file_of_that_name_for_something_else_is_not_taken_for_the_prediction(run: Path, tmp_path: Path) -> None:
    """An image of the same name in another folder was skipped, and so was one by a checkpoint that was replaced."""
    slides, out = run.parent / "slides", tmp_path / "out"
    (tmp_path / "other").mkdir()
    shutil.copy(slides / "b.tif", tmp_path / "other" / "a.tif")
    mural.predict(run, slides / "a.tif", out, step=10)
    with pytest.raises(ConfigError, match=r"a.tif holds the prediction of .*slides/a.tif .* that of .*other/a.tif"):
        mural.predict(run, tmp_path / "other" / "a.tif", out, step=10)
    shutil.copy(slides / "a.tif", out / "b.tif")
    with pytest.raises(ConfigError, match=r"b\.tif holds another program's file"):
        mural.predict(run, slides / "b.tif", out, step=10)
    found = mural.predict(run, tmp_path / "other" / "a.tif", out, step=10, overwrite=True)
    assert mural.open(found.files[0]).shape[1:] == SIDES["b"]
    again = tmp_path / "run"
    shutil.copytree(run, again)
    mural.predict(again, slides / "b.tif", tmp_path / "kept", step=10)
    manifest = again / "checkpoints" / "step-00000010" / "checkpoint.json"
    manifest.write_bytes(manifest.read_bytes() + b" ")
    with pytest.raises(ConfigError, match="choose another folder, or overwrite it"):
        mural.predict(again, slides / "b.tif", tmp_path / "kept", step=10)


def test_an_overwrite_that_fails_leaves_no_file_of_the_old_checkpoint(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slides = run.parent / "slides"
    mural.predict(run, slides, tmp_path, step=10)
    monkeypatch.setattr(result_batches, "deliver", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mural.predict(run, slides, tmp_path, step=30, overwrite=True)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"by step 10 of .* by step 30"):
        mural.predict(run, slides, tmp_path, step=30)
    assert not (tmp_path / "a.tif").exists()


def test_labels_as_zarr_hold_what_a_tiff_holds(run: Path, tmp_path: Path) -> None:
    predicted(run, tmp_path / "tiff", Plan())
    predicted(run, tmp_path / "zarr", Plan(), kind="zarr")
    for name in SIDES:
        found = mural.open(tmp_path / "zarr" / f"{name}.ome.zarr").read()
        assert np.array_equal(found, mural.open(tmp_path / "tiff" / f"{name}.tif").read())


def test_what_cannot_be_predicted_is_said(run: Path, tmp_path: Path) -> None:
    slides = run.parent / "slides"
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        mural.predict(tmp_path, slides)
    with pytest.raises(ConfigError, match="has no domain 'lab': it has no domains"):
        mural.predict(run, slides, domain="lab")
    with pytest.raises(CheckpointError, match="holds no step 99"):
        mural.predict(run, slides, step=99)
    with pytest.raises(DataError, match="nothing matches"):
        mural.predict(run, str(slides / "*.png"))
    tifffile.imwrite(tmp_path / "grey.tif", np.zeros((32, 32), np.uint8))
    with pytest.raises(DataError, match=r"the images have 1 channels, but the model of .* was trained on 3"):
        mural.predict(run, tmp_path / "grey.tif", tmp_path / "out")
    with pytest.raises(ConfigError, match="would take the place of an image"):
        mural.predict(run, slides, slides)
    mural.predict(run, slides / "a.tif", tmp_path / "kept", step=10)
    with pytest.raises(ConfigError, match=r"holds the prediction of .*a.tif by step 10 of .* by step 30 of"):
        mural.predict(run, slides / "a.tif", tmp_path / "kept", step=30)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        mural.predict(run, slides, tmp_path / "file")
    with pytest.raises(ConfigError, match='device = "tpu" is not one of run, auto, cuda, cpu'):
        mural.predict(run, slides, tmp_path / "out", device="tpu")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="multiple = -1"):
        mural.predict(run, slides, tmp_path / "out", multiple=-1)
    with pytest.raises(ConfigError, match='format = "png" is not one of'):
        mural.predict(run, slides, tmp_path / "out", format="png")  # type: ignore[arg-type]


def test_a_volume_keeps_its_format_and_its_affine(tmp_path: Path) -> None:
    affine = np.array([[0.0, 2, 0, 5], [1.5, 0, 0, 6], [0, 0, -3, 7], [0, 0, 0, 1]])
    draw = np.random.default_rng(0)
    for kind in ("images", "masks"):
        (tmp_path / kind).mkdir()
    for number in range(2):
        mask = (draw.random((9, 14, 11)) > 0.5).astype(np.uint8)
        for kind, values in (("images", (mask * 200).astype(np.uint8)), ("masks", mask)):
            nibabel.Nifti1Image(values, affine).to_filename(tmp_path / kind / f"{number}.nii")
    arguments = {"in_channels": 1, "classes": 2, "width": 4, "depth": 2, "dims": 3}
    files = {"images": str(tmp_path / "images/*.nii"), "masks": str(tmp_path / "masks/*.nii"), "batch": 1}
    model = {"factory": "mural.models:UNet", "arguments": arguments}
    config = run_config(tmp_path, model=model, data={**files, "multiple": 4}, train__steps=12)
    fit_rank(0, config)
    for name, plan in {"one": None, "tiles": Plan(stream=(8, 8, 8))}.items():
        mural.predict(config.folder, tmp_path / "images", tmp_path / name, plan=plan)
    one, tiles = (nibabel.load(tmp_path / name / "1.nii") for name in ("one", "tiles"))
    assert np.allclose(one.affine, affine)
    found = np.asarray(one.dataobj)
    assert found.shape == (9, 14, 11)
    assert found.dtype == np.uint8
    assert 0 < found.mean() < 1
    assert np.array_equal(found, np.asarray(tiles.dataobj))


def test_the_verb_predicts_under_a_plan_of_its_own(run: Path, tmp_path: Path) -> None:
    slide, out = str(run.parent / "slides" / "a.tif"), tmp_path / "out"
    typed = ["predict", str(run), slide, "--out", str(out), "--stream", "24,24", "--format", "zarr"]
    typed += ["--device", "cpu", "--multiple", "32", "--grid", "level", "--no-pyramid"]
    found = CliRunner().invoke(app, typed)
    assert "1 image predicted by step" in found.output
    assert mural.open(out / "a.ome.zarr").shape == (1, *SIDES["a"])
