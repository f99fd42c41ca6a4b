"""Classifiers of whole images: a table with a row for each image, the same under any plan, resumed by image."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from runs import run_config, write_images
from slides import predicted

import mural
from mural.errors import ConfigError
from mural.plans import Plan
from mural.prediction.result_rows import row_of
from mural.train import Config
from mural.train.loop import fit_rank
from ranks import run_on

MODELS = Path(__file__).resolve().parents[1] / "train" / "dropping.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that tells two kinds of images apart."""
    folder = tmp_path_factory.mktemp("classifier")
    write_images(folder, 5)
    (folder / "labels.csv").write_text("image,label\n" + "".join(f"images/{i}.tif,{i % 2}\n" for i in range(5)))
    model = {"factory": f"{MODELS}:classifier", "dtype": "float64"}
    data = {"table": str(folder / "labels.csv"), "batch": 2, "classes": ["cold", "warm"]}
    fit_rank(0, run_config(folder, model=model, data=data))
    return folder / "run"


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [(1, Plan(stream=(16, 16))), (2, Plan(data=2)), (2, Plan(spatial=(2, 1))), (2, Plan(stage=2))],
    ids=str,
)
def test_the_table_is_the_same_under_any_plan(run: Path, tmp_path: Path, ranks: int, plan: Plan) -> None:
    images = run.parent / "images"
    found = mural.predict(run, images, tmp_path / "one")
    assert (found.files, found.images) == ((tmp_path / "one" / "predictions.csv",), 5)
    one = rows(found.files[0])
    assert [Path(row["image"]).name for row in one] == [f"{i}.tif" for i in range(5)]
    for row in one:
        chances = [float(row["probability/cold"]), float(row["probability/warm"])]
        assert sum(chances) == pytest.approx(1, abs=1e-5)
        assert int(row["class"]) == chances.index(max(chances))
        assert row["name"] == ("cold", "warm")[int(row["class"])]
    run_on(ranks, predicted, run, tmp_path / "other", plan, images)
    assert rows(tmp_path / "other" / "predictions.csv") == one


def test_an_image_is_classified_once_and_a_broken_row_again(run: Path, tmp_path: Path) -> None:
    images, table = run.parent / "images", tmp_path / "predictions.csv"
    mural.predict(run, images / "0.tif", tmp_path)
    again = mural.predict(run, images, tmp_path)
    assert (again.images, again.skipped) == (5, 1)
    whole = table.read_text()
    table.write_text(whole[:-20])
    assert mural.predict(run, images, tmp_path).skipped == 4
    assert table.read_text() == whole
    with pytest.raises(ConfigError, match=r"predictions.csv holds the prediction of .*0.tif by step 6 .* by step 4"):
        mural.predict(run, images, tmp_path, step=4)
    assert mural.predict(run, images, tmp_path, step=4, overwrite=True).skipped == 0
    assert len(rows(table)) == 5
    table.write_text("name,score\nx,1\n")
    with pytest.raises(ConfigError, match="another program's file"):
        mural.predict(run, images, tmp_path)


def test_a_row_says_what_the_loss_says_of_the_numbers() -> None:
    several = Config.of({"loss": {"name": "bce"}, "data": {"mask": "channels", "classes": ["cat", "dog"]}})
    assert row_of(several, 2)(torch.tensor([-1.0, 2.0])) == {
        "class/cat": "0", "class/dog": "1", "probability/cat": "0.268941", "probability/dog": "0.880797",
    }  # fmt: skip
    assert row_of(several, 1)(torch.tensor([2.0])) == {"class": "1", "probability": "0.880797"}
    regression = Config.of({"loss": {"name": "mse"}})
    assert row_of(regression, 1)(torch.tensor([2.5])) == {"value": "2.5"}
    assert row_of(regression, 2)(torch.tensor([2.5, 1.0])) == {"value/0": "2.5", "value/1": "1"}  # was the class 0
    assert list(row_of(Config(), 3)(torch.zeros(3))) == ["class", *(f"probability/{i}" for i in range(3))]


def test_fractions_are_no_classes_whatever_the_loss(tmp_path: Path) -> None:
    """Of two values under a loss of one's own, the table named the larger one as the class."""
    write_images(tmp_path, 3)
    lines = ["from torch.utils.data import Dataset", "import torch, mural", "def samples(folder):"]
    lines += ["    files = [f'{folder}/images/{i}.tif' for i in range(3)]"]
    lines += ["    return [mural.data.Sample(f, f, torch.tensor([0.5, 0.25])) for f in files]"]
    lines += ["def loss(output, target): return (output - target).abs().mean()"]
    (tmp_path / "own.py").write_text("\n".join(lines) + "\n")
    own = f"{tmp_path}/own.py"
    data = {"dataset": f"{own}:samples", "arguments": {"folder": str(tmp_path)}}
    config = run_config(
        tmp_path, model={"factory": f"{MODELS}:classifier"}, data=data, loss={"name": f"{own}:loss"}, train__steps=2,
        validation={"fraction": 0.4},
    )  # fmt: skip
    scores = fit_rank(0, config).scores
    assert set(scores) == {"loss", "absolute_error"}
    found = mural.predict(config.folder, tmp_path / "images", tmp_path / "out")
    assert list(rows(found.files[0])[0]) == ["image", "value/0", "value/1"]
