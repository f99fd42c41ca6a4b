"""Models that are refused: what names them, what makes them, and what they do with an image."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from refusals import Bad, Made, called, content, refused, write_good

ODD = Path(__file__).with_name("odd_models.py")


def odd(name: str, more: str = "") -> str:
    return f"--model.factory models.py:{name} --model.arguments '{more}'"


def models(folder: Path) -> None:
    shutil.copy(ODD, folder / "models.py")


def net(text: str) -> Made:
    return content("net.py", text)


LENET = "mural.models:LeNet5"
NET = "--model.factory net.py:Net --model.arguments ''"
KEYS = "returned a dict with the keys 'out', 'aux': return the tensor alone"
LARGER = "let the model return its result at the size of the targets"

MAKING = [
    Bad("no colon", "--model.factory mural.models.UNet", 'should be "package.module:callable" or "path/to/file.py'),
    Bad("an unknown module", "--model.factory mural.model:UNet", "did you mean 'mural.models'?"),
    Bad("an unknown package", "--model.factory nothing.at.all:UNet", "there is no module 'nothing': install it"),
    Bad("a name in other case", "--model.factory mural.models:Unet", "did you mean 'UNet'?"),
    Bad("an unknown name", "--model.factory mural.models:Banana", "mural.models has no 'Banana': it has CNN1D,"),
    Bad("a name of another library", "--model.factory mural.models:resnet50", 'write "torchvision.models:resnet50"'),
    Bad("a number", odd("number"), "names 3, which cannot be called: name a class or a function", models),
    Bad("an unknown argument", "--model.arguments 'clases = 3'", "does not take 'clases': did you mean 'classes'?"),
    Bad("a bad argument", "--model.arguments 'width = 0'", "UNet got width=0, but width is an integer of at least 1"),
    Bad("a mistake inside", odd("typo"), ("unexpected keyword argument 'padding_mod'", "(models.py, line"), models),
    Bad("a constructor that raises", odd("raising"), "RuntimeError: no licence for this model (models.py", models),
    Bad("no module", odd("text"), "gave a str, not an nn.Module: return one", models),
    Bad("a file that is not there", "--model.factory nowhere.py:Net", "there is no file nowhere.py"),
    Bad("a syntax error", NET, "SyntaxError: invalid syntax (net.py, line 1)", net("def Net(:\n")),
    Bad("a binary file", NET, "the file net.py raised SyntaxError", content("net.py", b"\x00\xff")),
    Bad("an import of nothing", NET, "No module named 'nowhere' (net.py, line 1)", net("import nowhere\n")),
    Bad("weights that are not there", "--model.weights x.safetensors", "'x.safetensors' cannot be read as safetensors"),
    Bad("weights of another kind", "--model.weights run.toml", "'run.toml' cannot be read as safetensors"),
    Bad("no parameters", odd("empty"), "the model has no parameters that require gradients", models),
    Bad("frozen parameters", odd("frozen"), "the model has no parameters that require gradients", models),
    Bad("half the size", odd("halving"), ("(2, 16, 16) with masks of shape (32, 32)", LARGER), models),
    Bad("masks for a classifier", f"--model.factory {LENET} --model.arguments 'in_channels = 3'", "give labels"),
]  # fmt: skip

RUNNING = [
    Bad("a dict", odd("Returning"), KEYS, models),
    Bad("a tuple", odd("Returning", 'kind = "tuple"'), "the model returned a tuple: return the tensor alone", models),
    Bad("a list", odd("Returning", 'kind = "list"'), "the model returned a list: return the tensor alone", models),
    Bad("nothing", odd("Returning", 'kind = "nothing"'), "the model returned a NoneType", models),
    Bad("other channels", odd("of_grey_images"), ("(2, 1, 1, 1)", "(2, 3, 32, 32)", "in the layer 1 (Conv2d)"), models),
    Bad("other dims", odd("OfVolumes"), ("conv", "in the layer conv (Conv3d)"), models),
    Bad(
        "shapes that do not join", odd("Nested"), ("(2, 3, 16, 16)", "in the layer inner (Joining) (models.py"), models
    ),
    Bad("shapes that do not add", odd("Adding"), ("(2, 2, 30, 30)", "in the forward of Adding (models.py"), models),
    Bad("an operation in place", odd("Overwriting"), "modified by an inplace operation", models),
    Bad(
        "an unknown attribute",
        odd("Misspelt"),
        ("no attribute 'covn'", "in the forward of Misspelt (models.py"),
        models,
    ),
    Bad(
        "weights that lack", odd("Loading"), ("state_dict for Conv2d", "in the layer conv (Conv2d) (models.py"), models
    ),
    Bad("two inputs", odd("OfTwo"), "missing 1 required positional argument: 'y'", models),
    Bad("a loss that is not a number", odd("NotFinite"), "the loss is nan", models),
]
RULE = "linalg_inv has no rule for sharded tensors"
WITHOUT_RULE = Bad("an operation without a rule", odd("WithoutRule"), (RULE, "in the forward of WithoutRule"), models)


@pytest.mark.parametrize("bad", MAKING, ids=str)
def test_a_model_is_refused(bad: Bad, tmp_path: Path) -> None:
    refused(bad, tmp_path)


@pytest.mark.parametrize("bad", RUNNING, ids=str)
@pytest.mark.parametrize("plan", ["", "--plan.stream 16,16"], ids=["whole", "streamed"])
def test_a_model_that_fails_in_a_step_is_one_line(bad: Bad, plan: str, tmp_path: Path) -> None:
    refused(replace(bad, command=f"{bad.command} {plan}", begun=True), tmp_path)


@pytest.mark.parametrize("plan", ["--plan.microbatches 2"])
def test_an_operation_without_a_rule_is_named_with_its_place(plan: str, tmp_path: Path) -> None:
    refused(replace(WITHOUT_RULE, command=f"{WITHOUT_RULE.command} {plan}", begun=True), tmp_path)


def test_a_traceback_is_shown_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "MURAL_TRACEBACK", "1")
    write_good(tmp_path)
    models(tmp_path)
    said = called(f"train run.toml {odd('raising')}")
    assert said.err.startswith("Traceback")
    assert said.err.splitlines()[-1].startswith("mural: model: the call of raising raised RuntimeError: no licence")
