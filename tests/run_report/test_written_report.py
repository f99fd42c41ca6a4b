"""`mural report` on small runs: pictures, files that are not lost, and the page in a real Chromium."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from runs import run_config, write_images
from told import scored_line, train_line, write_run
from typer.testing import CliRunner

import mural
from chromium import Browser
from mural import cli
from mural.errors import ConfigError
from mural.report import plots
from mural.report.class_maps import class_colours, rgb
from mural.run_report import write_report
from mural.run_report.predicted_samples import HELD_OUT, OTHER, given_samples, shown, written_samples
from mural.run_report.run_history import read_history
from mural.run_report.run_pictures import gallery
from mural.train.config import Config
from mural.train.configured_samples import datasets
from mural.train.loop import fit_rank
from pages import contrasts

EVIL = "</script><b>tumour"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run of three epochs, with the predictions of its held-out images."""
    folder = tmp_path_factory.mktemp("reported")
    write_images(folder, 5)
    held = {"fraction": 0.4, "write": "tiff"}
    config = run_config(folder, "run", validation=held, data__classes=["background", EVIL], checkpoint__best="mean_iou")
    fit_rank(0, config)
    return config


@pytest.fixture(scope="module")
def page(trained: Config) -> Path:
    return write_report(trained.folder).path


def without_plotly(page: Path) -> str:
    return page.read_text("utf-8").replace(plots.script(), "")


def test_the_page_has_everything_and_needs_nothing_else(trained: Config, page: Path) -> None:
    text = without_plotly(page)
    assert page == trained.folder / "report.html"
    assert "http" not in text.replace("http-equiv", "")
    assert "<b>tumour" not in text
    assert text.count("data:image/jpeg") == 2  # of two held-out images
    assert text.count("data:image/png") == 2 * 3
    for words in ("Finished: 6 steps", "Best mean_iou", "the best by mean_iou", "mural.models:UNet, 7,554 weights",
                  "3 to train on, 2 held out; 3 channels of uint8, 48 × 48", "CPU, ", "predicted for a step",
                  "images a second", f"torch {torch.__version__}"):  # fmt: skip
        assert words in text, words
    changed, whole = re.findall("<pre>(.*?)</pre>", text, re.DOTALL)
    assert "write = &quot;tiff&quot;" in changed
    assert "prefetch" not in changed
    assert "prefetch" in whole


def test_the_page_in_a_browser(browser: Browser, page: Path) -> None:
    for width in (1280, 800):
        browser.resize(width, 900)
        browser.errors.clear()
        browser.open(page)
        assert browser.errors == []
        assert browser.value("document.documentElement.scrollWidth") == width
    names = browser.value("document.querySelector('.js-plotly-plot').data.map((trace) => trace.name)")
    assert names == ["training", "validation", "accuracy", "mean_iou", "mean_dice", names[5], "background", EVIL]
    assert names[5].startswith("best (step")
    wide = "document.querySelector('.pictures img').getBoundingClientRect().width"
    before = browser.value(wide)
    browser.click(".pictures button")
    assert browser.value(wide) > 3 * before
    assert min(contrasts(browser)) > 4.5
    browser.resize(1280, 900)


def test_without_predictions_the_page_says_how_to_get_some(trained: Config, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(trained.folder, bare, ignore=shutil.ignore_patterns("predictions", "*.html"))
    text = without_plotly(write_report(bare).path)
    assert "These lines make some, of held-out images" in text
    lines = re.search(r"<pre>(mural predict .*?)</pre>", text, re.DOTALL)
    assert lines is not None
    assert lines[1].count(".tif") == 2


def test_pictures_of_a_folder_of_predictions(trained: Config, tmp_path: Path) -> None:
    out = tmp_path / "predictions"
    every = sorted(Path(str(trained.data.images)).parent.glob("*.tif"))
    mural.predict(trained.folder, [str(path) for path in every], out=out)
    run, splits = read_history(trained.folder), datasets(trained)
    found = given_samples(run, splits, out)
    assert [one.part for one in found] == [HELD_OUT] * 2 + ["trained on"] * 3
    assert {one.sample.name for one in shown(found, 4)} == {sample.name for sample in splits[""].held_out}
    record = json.loads((out / "predictions.json").read_text())
    record["0.tif"] |= {"image": "/somewhere/else.tif", "run": "/somewhere/run"}
    (out / "predictions.json").write_text(json.dumps(record))
    other = given_samples(run, splits, out)[-1]
    assert (other.part, other.other_run) == (OTHER, "/somewhere/run")


def test_predictions_that_are_not_there_are_one_line(trained: Config, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        write_report(trained.folder, predictions=tmp_path / "none")
    with pytest.raises(ConfigError, match="it holds no prediction"):
        write_report(trained.folder, predictions=tmp_path)
    (tmp_path / "predictions.json").write_text("{")
    with pytest.raises(ConfigError, match=r"predictions\.json in it is damaged"):
        write_report(trained.folder, predictions=tmp_path)


def test_the_predictions_of_the_best_step_are_shown_else_the_newest(trained: Config) -> None:
    run, splits = read_history(trained.folder), datasets(trained)
    assert [one.step for one in written_samples(run, splits, 2)] == [2, 2]
    assert [one.step for one in written_samples(run, splits, 3)] == [6, 6]


def test_a_file_that_is_no_report_stays(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [train_line(1)])
    mine, report = tmp_path / "mine.html", tmp_path / "new" / "report.html"
    mine.write_text("<html>my thesis</html>")
    for wrong, said in ((mine, "is there and is not a report"), (tmp_path / "a.pdf", "ends with .html"),
                        (tmp_path, "is a folder")):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            write_report(run, wrong)
    assert mine.read_text() == "<html>my thesis</html>"
    for _ in range(2):  # a report takes the place of a report
        write_report(run, report)
    write_report(run, mine, overwrite=True)
    assert "Run run" in mine.read_text("utf-8")


def test_a_run_whose_images_are_gone_has_a_report(tmp_path: Path) -> None:
    config: dict[str, Any] = {"data": {"images": "gone/*.tif", "masks": "gone/*.png"}}
    run = write_run(tmp_path / "run", [train_line(1), scored_line(1)], {"state": "finished"}, config=config)
    text = without_plotly(write_report(run).path)
    assert "The run&#x27;s own images are not found from here" in text
    assert "Finished: 1 step<" in text


def test_values_and_images_without_masks_are_shown(tmp_path: Path) -> None:
    config: dict[str, Any] = {"data": {"images": "a/*.tif", "masks": "b/*.tif", "mask": "values"}}
    config |= {"validation": {"images": "a/*.tif", "masks": "b/*.tif"}, "folder": "run"}
    run = write_run(tmp_path / "run", [scored_line(3)], config=config)
    for place in ("a", "b", "run/predictions/step-000003"):
        (tmp_path / place).mkdir(parents=True)
        tifffile.imwrite(tmp_path / place / "x.tif", np.random.default_rng(0).random((9, 9), np.float32))
    text = without_plotly(write_report(run).path)
    assert re.findall("<figcaption>(.*?)</figcaption>", text) == ["image", "mask", "prediction", "difference"]
    assert "held out; 9 × 9; predicted after step 3" in text
    assert '<ul class="legend">' not in text


def test_the_verb_prints_the_path_and_what_was_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [train_line(1)], {"state": "finished"})
    with (run / "metrics.jsonl").open("a") as file:
        file.write("{\n")
    result = CliRunner().invoke(cli.app, ["report", str(run)])
    assert result.exit_code == 0, result.output
    assert "left out: 1 damaged line of the journal" in result.output
    assert result.stdout.splitlines() == ["Finished: 1 step", f"written: {run / 'report.html'}"]


def test_every_label_is_shown_under_its_name(tmp_path: Path) -> None:
    """Of three labels, the first was shown, under the name of the second: its 1 was taken for a class."""
    names = ["disc", "nowhere", "everywhere"]
    write_images(tmp_path, 2)
    for file in (tmp_path / "masks").glob("*.tif"):
        disc = tifffile.imread(file)
        tifffile.imwrite(file, np.stack([disc, disc * 0, disc * 0 + 1]), photometric="minisblack")
    held = {"images": str(tmp_path / "images/0.tif"), "masks": str(tmp_path / "masks/0.tif"), "write": "tiff"}
    arguments = {"classes": 3, "width": 4, "depth": 2}
    config = run_config(
        tmp_path, data__classes=names, data__mask="channels", loss={"name": "bce"}, validation=held, train__steps=2,
        model__arguments=arguments,
    )  # fmt: skip
    fit_rank(0, config)
    history = read_history(config.folder)
    found = gallery(history, datasets(config), None, None, lambda what, done, of: None)
    assert [row.caption.split(";")[0] for row in found.rows] == [f"label {name}" for name in names]
    assert [name for _, name in found.legend[:2]] == ["no", "yes"]
    file = next((config.folder / "predictions").glob("*/0.tif"))
    for number, row in enumerate(found.rows):
        shown = {panel.title: np.asarray(panel.image) for panel in row.panels}
        for title, pixels in (
            ("mask", tifffile.imread(tmp_path / "masks/0.tif")),
            ("prediction", tifffile.imread(file)),
        ):
            yes = (shown[title] != rgb(class_colours(2)[0])).any(-1)
            assert (yes == (pixels[number] == 1)).all(), (row.caption, title)
