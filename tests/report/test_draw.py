"""Drawings of graphs: one box for each layer, none for weights, nested and wired as the model is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import mural
from mural import Plan
from mural.cli import graph_verb as graph_command
from mural.engine.stage_starts import stage_starts
from mural.errors import ConfigError, DataError, PlanError
from mural.graph import Graph, capture
from mural.graph.blocks import blocks
from mural.models import UNet, amoebanetd
from mural.report.graph_drawing.box_rows import Net, rows
from mural.report.graph_drawing.draw import draw
from mural.report.graph_drawing.outline import Outline, outline
from mural.report.graph_drawing.stages import starts_of
from pages import Inverse
from printed import Basic, Interconnected
from zoo import dense


class Shared(nn.Module):
    """A unit that is called twice, a layer of several calls, two inputs, two outputs, and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
        self.mean = Mean()
        self.steps = nn.ModuleList([nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()) for _ in range(3)])

    def forward(self, image: Tensor, more: Tensor) -> dict[str, Tensor]:
        image = self.unit(self.unit(image)) + more
        mean = self.mean(image)
        for step in self.steps:
            image = image + step(image)
        return {"image": image, "mean": mean}


class Mean(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        return (image * image).mean((2, 3)).sqrt()


def captured(make: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> Graph:
    with torch.device("meta"):
        model = make()
    return capture(model, list(shapes))


@pytest.fixture(scope="module")
def interconnected() -> Graph:
    return captured(Interconnected, (4, 3, 32, 32))


@pytest.fixture(scope="module")
def shared() -> Graph:
    return captured(Shared, (2, 4, 8, 8), (2, 4, 8, 8))


@cache
def amoebanet(layers: int) -> Graph:
    return captured(lambda: amoebanetd(layers, 16), (1, 3, 64, 64))


def names(shown: Outline, role: str = "layer") -> list[str]:
    return [box.name for box in shown.boxes if box.role == role]


def wired(shown: Outline, opened: frozenset[int]) -> list[tuple[str, str]]:
    ends = shown.shown_edges(opened)
    return [(shown.boxes[a].site or shown.boxes[a].name, shown.boxes[b].site or shown.boxes[b].name) for a, b in ends]


def test_first_network_of_document_001_has_its_layers_in_a_chain(interconnected: Graph) -> None:
    shown = outline(interconnected)
    line = ["conv1", "relu", "pool1", "conv2", "relu", "pool2", "view", "fc1", "relu", "fc2", "relu", "fc3"]
    assert names(shown) == line
    assert [box.role for box in shown.boxes if box.role != "layer"] == ["block", "input", "output"]
    ids = [box.id for box in shown.boxes[1:]]
    assert list(shown.edges) == list(pairwise(ids))
    # Without the calls of functions, this is the printed list: conv1 → pool1 → conv2 → pool2 → fc1 → fc2 → fc3.
    assert [box.name for box in shown.boxes if box.kind] == ["conv1", "pool1", "conv2", "pool2", "fc1", "fc2", "fc3"]


def test_second_network_of_document_001(tmp_path: Path) -> None:
    graph = captured(Basic, (4, 1, 28, 28))
    line = ["conv1", "max_pool2d", "relu", "conv2", "conv2_drop", "max_pool2d", "relu"]
    line += ["view", "fc1", "relu", "dropout", "fc2", "log_softmax"]
    assert names(outline(graph)) == line
    assert "weight" not in draw(graph) + draw(graph, tmp_path / "net.dot")
    nodes = re.findall(r"^ *n\d+ \[", draw(graph, tmp_path / "net.dot"), re.MULTILINE)
    assert len(nodes) == len(line) + 2  # and the input and the output


def test_text_of_the_first_network(interconnected: Graph) -> None:
    assert draw(interconnected, stages=["conv2", "fc1"]).splitlines() == [
        "layer           kind       output      parameters   FLOPs  stage",
        "----------------------------------------------------------------",
        "Interconnected             4×10            62.0 k  5.27 M  0-2",
        "  x             input      4×3×32×32",
        "  conv1         Conv2d     4×6×28×28          456  2.82 M  0",
        "  relu                     4×6×28×28            0  18.8 k  0",
        "  pool1         MaxPool2d  4×6×14×14            0  18.8 k  0",
        "  conv2         Conv2d     4×16×10×10      2.42 k  1.92 M  1",
        "  relu                     4×16×10×10           0  6.40 k  1",
        "  pool2         MaxPool2d  4×16×5×5             0  6.40 k  1",
        "  view                     4×400                0       0  1",
        "  fc1           Linear     4×120           48.1 k   384 k  2",
        "  relu                     4×120                0     480  2",
        "  fc2           Linear     4×84            10.2 k  80.6 k  2",
        "  relu                     4×84                 0     336  2",
        "  fc3           Linear     4×10               850  6.72 k  2",
        "  output        output     4×10",
    ]


@pytest.mark.parametrize("layers", [6, pytest.param(18, marks=pytest.mark.slow)])
def test_amoebanet_is_a_line_of_cells_that_read_the_two_before(layers: int) -> None:
    shown = outline(amoebanet(layers))
    opened = shown.opened("module")
    cells = [box.name for box in shown.shown(opened) if box.kind == "Cell"]
    assert len(cells) == layers + 4  # and two reductions, and two in the stem
    line = ["image", "stem1", *cells, "classify", "output"]
    expected = set(pairwise(line)) | set(zip(line[1:-3], line[3:-2], strict=False))
    assert set(wired(shown, opened)) == expected
    assert shown.opened() == opened  # that many boxes are legible


def test_levels_are_those_of_the_blocks() -> None:
    graph = captured(lambda: dense(8, 4, (2, 3)), (1, 3, 64, 64))
    shown = outline(graph)
    for level in ("block", "layer"):
        seen = {box.site for box in shown.shown(shown.opened(level)) if box.id not in shown.opened(level)}
        assert {block.name for block in blocks(graph, level)} <= seen
    layers = [box for box in shown.boxes if box.role == "layer"]
    assert [box.site for box in layers] == [block.name for block in blocks(graph, "layer")]
    assert shown.opened("module") < shown.opened("block") < shown.opened("layer")
    assert "features.denseblock2.denselayer3" in {shown.boxes[i].site for i in shown.opened("layer")}
    assert "features.denseblock2.denselayer3" not in {shown.boxes[i].site for i in shown.opened("block")}


def test_a_module_called_twice_is_two_boxes_and_counts_once(shared: Graph) -> None:
    shown = outline(shared)
    by_site = {box.site: box for box in shown.boxes}
    first, second = by_site["unit"], by_site["unit@2"]
    assert [shown.boxes[i].name for i in second.children] == ["0@2", "1@2"]
    assert shown.parameters(first.start, second.stop) == shown.parameters(first.start, first.stop) == 20
    assert by_site["image"].role == by_site["more"].role == "input"
    assert names(shown, "output") == ["output['image']", "output['mean']"]


def test_a_layer_of_several_calls_is_one_box_with_them_inside(shared: Graph) -> None:
    shown = outline(shared)
    mean = next(box for box in shown.boxes if box.site == "mean")
    assert mean.role == "layer"
    assert [shown.boxes[i].name for i in mean.children] == ["mul", "mean", "sqrt"]
    assert not any(mean.id in shown.opened(level) for level in ("module", "block", "layer", None))
    assert shown.layers(mean.start, mean.stop) == 1
    steps = next(box for box in shown.boxes if box.role == "list")
    assert [shown.boxes[i].name for i in steps.children] == ["0", "add", "1", "add", "2"]


def test_nets_carry_each_edge_from_its_origin_to_its_reader(shared: Graph) -> None:
    for shown in (outline(shared), outline(amoebanet(6))):
        by_origin = {(box, net.origin): net for box, nets in shown.nets.items() for net in nets}
        reached: set[tuple[int, int]] = set()
        for (box, origin), net in by_origin.items():
            if net.source is None:
                around = by_origin[shown.boxes[box].parent or 0, origin]
                assert box in around.targets
            else:
                assert net.source in shown.around(origin)
            if net.leaves:
                assert by_origin[shown.boxes[box].parent or 0, origin].source == box
            reached |= {(origin, target) for target in net.targets if not shown.boxes[target].children}
        assert reached == set(shown.edges)


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.sets(st.integers(0, n - 1))))))
def test_rows_keep_forward_order(drawn: tuple[int, list[set[int]]]) -> None:
    count, readers = drawn
    nets = [Net(i, i if i < count else None, tuple(t for t in sorted(to) if t > i)) for i, to in enumerate(readers)]
    placed = rows(range(count), nets)
    row = {part: index for index, parts in enumerate(placed) for part in parts}
    assert sorted(part for parts in placed for part in parts) == list(range(count))
    assert all(placed)
    assert all(row[net.source] < row[target] for net in nets if net.source is not None for target in net.targets)


def test_rows_cross_no_lines_that_need_not() -> None:
    nets = [Net(0, 0, (2, 3)), Net(1, 1, (4, 5)), Net(2, 2, (6,)), Net(3, 3, (6,)), Net(4, 4, (7,)), Net(5, 5, (7,))]
    placed = rows([0, 1, 4, 2, 5, 3, 6, 7], nets)
    assert [set(row) for row in placed] == [{0, 1}, {2, 3, 4, 5}, {6, 7}]
    first = [0, 0, 1, 1] if placed[0] == [0, 1] else [1, 1, 0, 0]
    assert [0 if part in (2, 3) else 1 for part in placed[1]] == first


def statements(dot: str) -> tuple[set[str], set[tuple[str, str]], int]:
    """Nodes, edges and clusters of a DOT text, by the part of the language's grammar that graphs here may use."""
    quoted = r'"(?:[^"\\]|\\.)*"'
    attribute = rf"\w+=(?:\w+|[\d.]+|{quoted})"
    attributes = rf"\[{attribute}(?:, {attribute})*\]"
    depth, clusters = 0, 0
    nodes: set[str] = set()
    edges: set[tuple[str, str]] = set()
    for line in map(str.strip, dot.splitlines()):
        if re.fullmatch(rf"(digraph {quoted}|subgraph cluster_\d+) {{", line):
            depth += 1
            clusters += line.startswith("subgraph")
        elif line == "}":
            depth -= 1
        elif match := re.fullmatch(rf"(n\d+) {attributes};", line):
            nodes.add(match[1])
        elif match := re.fullmatch(r"(n\d+) -> (n\d+);", line):
            edges.add((match[1], match[2]))
        else:
            assert re.fullmatch(rf"(?:(?:graph|node|edge) {attributes}|{attribute});", line), line
    assert depth == 0
    return nodes, edges, clusters


def test_dot_has_a_cluster_for_each_block_and_a_node_for_each_layer(tmp_path: Path) -> None:
    graph = amoebanet(6)
    text = draw(graph, tmp_path / "amoebanet.dot", stages=3)
    nodes, edges, clusters = statements(text)
    shown = outline(graph)
    closed = [box for box in shown.shown(shown.opened("layer")) if box.id not in shown.opened("layer")]
    assert nodes == {f"n{box.id}" for box in closed}
    assert len(edges) == len(shown.shown_edges(shown.opened("layer")))
    assert clusters == len(shown.opened("layer")) - 1  # the model itself has none
    assert {end for edge in edges for end in edge} <= nodes
    coarse, _, few = statements(draw(graph, tmp_path / "amoebanet.gv", level="module"))
    assert len(coarse) == 14
    assert few == 0
    program = shutil.which("dot")
    if program:
        subprocess.run([program, "-Tcanon", "-o", tmp_path / "out.dot", tmp_path / "amoebanet.dot"], check=True)


def test_page_needs_nothing_else_and_holds_any_name(tmp_path: Path) -> None:
    model = nn.Module()
    model.add_module("</script><b>", nn.Conv2d(1, 1, 1))
    model.forward = lambda x: next(model.children())(x)  # type: ignore[method-assign]
    page = draw(capture(model, (1, 1, 2, 2)), tmp_path / "page.html")
    assert not re.search(
        r"(?:src|href)\s*=\s*[\"']?(?!data:)\w|@import|url\((?!#)|https?://(?!www\.w3\.org/2000/svg)", page
    )
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    boxes = json.loads(data[1])["boxes"]
    assert boxes["name"] == ["Module", "x", "</script><b>", "output"]
    assert boxes["role"] == ["block", "input", "layer", "output"]


def test_stages_by_node_name_and_number(interconnected: Graph, tmp_path: Path) -> None:
    assert starts_of(interconnected, [0, "conv2", 7]) == [0, 3, 7]
    assert starts_of(interconnected, ["conv1", "relu:2"]) == [0, 4]
    named = draw(interconnected, stages=["conv2", "fc1"])
    assert draw(interconnected, stages=["conv1", "conv2", "fc1"]) == named
    page = draw(interconnected, tmp_path / "a.html", stages=[3, 7])
    data = re.search(r'id="data">(.*?)</script>', page)
    assert data is not None
    assert [(s["start"], s["stop"], s["summary"].split(",")[0]) for s in json.loads(data[1])["stages"]] == [
        (0, 3, "3 layers"),
        (3, 7, "4 layers"),
        (7, 12, "5 layers"),
    ]


@pytest.mark.parametrize("cuts", ["layers", "time", "memory", ("conv2", "fc1")])
def test_a_plan_colours_the_stages_that_it_runs(cuts: str | tuple[str, ...]) -> None:
    graph = mural.capture(Interconnected(), (4, 3, 32, 32))
    plan = Plan(stage=3, cuts=cuts)
    assert graph.draw(stages=plan) == graph.draw(stages=stage_starts(graph, plan)) != graph.draw(stages=Plan())
    assert graph.draw(stages=Plan()) == graph.draw()


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (["conv3"], "write 'conv"),
        ([12], "give an id below 12"),
        (["fc1", "conv2"], "forward order"),
        (13, "give 1 to 12"),
        (0, "give 1 to 12"),
    ],
)
def test_stages_that_are_none_raise(interconnected: Graph, stages: object, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        draw(interconnected, stages=stages)  # type: ignore[arg-type]


def test_unknown_formats_and_levels_raise(interconnected: Graph, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"end in \.html"):
        draw(interconnected, tmp_path / "graph.pdf")
    with pytest.raises(ValueError, match="no level 'deep'"):
        draw(interconnected, level="deep")  # type: ignore[arg-type]


def command(*arguments: str) -> Result:
    return CliRunner().invoke(graph_command.app, ["graph", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_command_prints_a_table_or_writes_a_file(tmp_path: Path) -> None:
    unet = ("mural.models:UNet", "--arguments", "width = 4, depth = 2", "--shape", "1,3,32,32")
    with torch.device("meta"):
        expected = draw(capture(UNet(width=4, depth=2), (1, 3, 32, 32)), stages=2, level="block")
    assert command(*unet, "--stages", "2", "--level", "block").output == expected
    done = command(*unet, "--output", str(tmp_path / "unet.html"))
    assert done.exit_code == 0, done.output
    assert "input" not in done.output
    assert "UNet" in (tmp_path / "unet.html").read_text("utf-8")
    (tmp_path / "plan.toml").write_text('stage = 2\ncuts = ["up.0"]\n')
    assert "0-1" in command(*unet, "--plan", str(tmp_path / "plan.toml")).output
    (tmp_path / "plan.toml").write_text('stage = 3\ncuts = "memory"\n')
    assert "0-2" in command(*unet, "--plan", str(tmp_path / "plan.toml")).output


def test_command_reads_the_model_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[model]\nfactory = "mural.models:UNet"\narguments = { width = 4, depth = 2 }\n')
    shown = command(str(tmp_path / "run.toml"), "--arguments", "classes = 7", "--shape", "1x3x32x32")
    assert shown.exit_code == 0, shown.output
    assert "1×7×32×32" in shown.output


def test_command_says_what_is_wrong() -> None:
    assert "--arguments" in str(command("mural.models:UNet", "--arguments", "width 4").exception)
    assert "no 'Unet'" in str(command("mural.models:Unet").exception)
    assert command("mural.models:UNet", "--stages", "2", "--plan", "plan.toml").exit_code == 2


def test_command_takes_the_sizes_of_the_runs_images(tmp_path: Path) -> None:
    """It drew every run for 1024 × 1024."""
    mural.data.write_synthetic(tmp_path, count=2, size=(48, 40))
    data = f'[data]\nbatch = 2\nimages = "{tmp_path}/images/*.tif"\nmasks = "{tmp_path}/masks/*.tif"\n'
    (tmp_path / "run.toml").write_text(f"[model]\narguments = {{ width = 4, depth = 2 }}\n{data}")
    assert "2×3×48×40" in command(str(tmp_path / "run.toml")).output
    (tmp_path / "images" / "tissue-0000.tif").unlink()
    with pytest.raises(DataError, match=r"without its images, give --shape"):
        graph_command.shapes_of(str(tmp_path / "run.toml"))


def test_operations_without_a_rule_are_marked(tmp_path: Path) -> None:
    graph = capture(Inverse(), (1, 3, 16, 16))
    assert [line.split()[0] for line in draw(graph).splitlines() if "(no rule)" in line] == ["linalg_inv"]
    assert draw(graph, tmp_path / "graph.dot").count("color=red") == 1
    assert "1 operations without a rule" in draw(graph, tmp_path / "graph.html")
