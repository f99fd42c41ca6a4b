"""Models and losses that a configuration names by file: each file is a module of its own."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import run_config

from mural.errors import ConfigError
from mural.train.config import ModelConfig
from mural.train.factory import make_model, named
from mural.train.local_ranks import on_local_ranks

NET = """
from torch import nn

class Net(nn.Sequential):
    width = {width}

def make():
    return Net(nn.Conv2d(3, {width}, 1))
"""


def written(folder: Path, width: int, name: str = "net.py") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(NET.format(width=width))
    return f"{folder / name}:make"


def widths(_: int, config: Any) -> list[int]:
    """What a rank gets from two files of one stem."""
    return [make_model(ModelConfig(path), 0)[0].out_channels for path in config.model.arguments["paths"]]


def test_two_files_of_one_stem_are_two_modules(tmp_path: Path) -> None:
    """`b/net.py:make` gave the model of `a/net.py`."""
    paths = [written(tmp_path / "a", 4), written(tmp_path / "b", 5)]
    models: list[Any] = [make_model(ModelConfig(path), 0) for path in paths]
    assert [model[0].out_channels for model in models] == [4, 5]
    kinds = [type(model) for model in models]
    assert kinds[0].__module__ != kinds[1].__module__
    assert all(sys.modules[kind.__module__].Net is kind for kind in kinds)
    assert [type(pickle.loads(pickle.dumps(model))) for model in models] == kinds
    assert named(paths[0], "model.factory") is named(paths[0], "model.factory")


def test_one_file_is_one_module_by_whatever_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a", 4)
    (tmp_path / "link.py").symlink_to(tmp_path / "a" / "net.py")
    monkeypatch.chdir(tmp_path)
    assert named("a/net.py:make", "model.factory") is named(path, "model.factory")
    assert named("link.py:make", "model.factory") is named(path, "model.factory")


@pytest.mark.slow
def test_local_ranks_get_the_models_of_their_files(tmp_path: Path) -> None:
    paths = [written(tmp_path / "a", 4), written(tmp_path / "b", 5)]
    config = run_config(tmp_path, model={"arguments": {"paths": paths}}, plan={"data": 2}, launch={"device": "cpu"})
    assert on_local_ranks(widths, config) == [4, 5]


@pytest.mark.slow
def test_a_file_that_changed_is_read_anew_by_a_new_process(tmp_path: Path) -> None:
    """Its compiled form, kept by the second, was taken for it."""
    found: list[str] = []
    for width in (4, 5):
        path = written(tmp_path, width)
        code = f"from mural.train.factory import named; print(named({path!r}, 'model.factory')()[0].out_channels)"
        found.append(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert found == ["4\n", "5\n"]
    assert list(tmp_path.iterdir()) == [tmp_path / "net.py"]


def test_a_file_that_fails_is_run_again(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("raise RuntimeError('not yet')")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not yet"):
            named(f"{tmp_path / 'net.py'}:make", "model.factory")
    with pytest.raises(ConfigError, match="there is no file"):
        named(f"{tmp_path / 'absent.py'}:make", "model.factory")
