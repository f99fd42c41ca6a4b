"""What one step sends, layer by layer, under data, model and hybrid plans; and by the document's own scheme."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from harness.counting import Sent, counting, over_ranks
from payload import Size, gradient_values, sizes, split_values
from problems import NETS, plan_of, seeded
from torch import Tensor, nn
from traffic import traffic, value_bytes

import mural
from mural.channel.which_layers import chosen

FLOAT = 4


@dataclass(frozen=True)
class Step:
    """One step of a network at small scale, under a plan, with that many images for all ranks together."""

    net: str
    way: str
    ranks: int
    images: int

    @property
    def name(self) -> str:
        """The job in a few words."""
        return f"{self.net}, {self.way} on {self.ranks}, {self.images} images"

    def measure(self) -> dict[str, Any]:
        """Messages and bytes of all ranks, by layer: for split channels, and for means of gradients by a ring."""
        net = NETS[self.net]
        model = seeded(net.small)
        layers = sizes(model, net.small_image)
        plan = plan_of(self.way, self.ranks)
        split = {s.name for s in chosen(model, plan.channel, plan.channel_layers)} if plan.channel > 1 else set[str]()
        pm = mural.parallelize(model, plan, image=net.small_image)
        image, target = torch.rand(self.images, *net.small_image), torch.arange(self.images) % 10
        found = {layer.name: layer for layer in traffic(pm, image, target)}
        with counting() as sent:
            pm.step(image, target)
        rings = averaged_by_rings(pm)
        totals = over_ranks((sent.messages, sent.bytes))
        if value_bytes(pm) != FLOAT:
            raise RuntimeError(f"{self.name}: values of {value_bytes(pm)} bytes, where {FLOAT} are counted with")
        rows: list[dict[str, Any]] = []
        for layer in layers:
            messages, size = rings.get(layer.name, (0, 0))
            own = found[layer.name]
            rows.append(
                {
                    **asdict(layer),
                    "split": layer.name in split,
                    "messages": own.messages,
                    "values": own.bytes // FLOAT,
                    "ring_messages": messages,
                    "ring_values": size // FLOAT,
                }
            )
        return {
            "words": net.small_words,
            "layers": rows,
            "channel": plan.channel,
            "data": plan.data,
            "sent_messages": sum(messages for messages, _ in totals),
            "sent_values": sum(size for _, size in totals) // FLOAT,
            "unowned_messages": found[""].messages,
            "unowned_values": found[""].bytes // FLOAT,
        }


def averaged_by_rings(pm: Any) -> dict[str, tuple[int, int]]:
    """Messages and bytes of all ranks to average each layer's gradients, by mural's ring over those that hold them.

    A step averages them by the backend, which does not tell what it sends.
    """
    held: dict[str, list[tuple[Any, Tensor]]] = {}
    for name, p in pm.named_parameters():
        for each in pm.reducer.sets:
            if each.group is not None and any(p is other for _, other in each.named):
                held.setdefault(name.rpartition(".")[0], []).append((each.group, p.grad.detach().clone()))
    found: dict[str, tuple[int, int]] = {}
    for layer, parts in held.items():
        with counting() as sent:
            mural.comm.all_reduce(torch.cat([grad.reshape(-1) for _, grad in parts]), "ring", parts[0][0])
        every = over_ranks((sent.messages, sent.bytes))
        found[layer] = (sum(messages for messages, _ in every), sum(size for _, size in every))
    return found


@dataclass(frozen=True)
class Scheme:
    """The document's own scheme, message by message: a reduce to one node and a broadcast from it.

    Data-parallel, of the model; model-parallel, of what each layer keeps, for all images of a step.
    """

    net: str
    ranks: int
    images: int

    @property
    def name(self) -> str:
        """The job in a few words."""
        return f"{self.net}, the document's scheme on {self.ranks}, {self.images} images"

    def measure(self) -> dict[str, Any]:
        """Messages and values of all ranks for both."""
        group = mural.init(data=self.ranks).transport.group
        layers = sizes(seeded(NETS[self.net].small), NETS[self.net].small_image)
        found: dict[str, Any] = {}
        for kind, buffers in (
            ("data", [sum(layer.parameters for layer in layers)]),
            ("model", [self.images * layer.kept for layer in layers]),
        ):
            with counting() as sent:
                for values in buffers:
                    flat = torch.zeros(values)
                    mural.comm.reduce(flat, group=group)
                    mural.comm.broadcast(flat, group=group)
            every: list[Sent] = over_ranks(sent)
            found[kind] = {
                "messages": sum(each.messages for each in every),
                "values": sum(each.bytes for each in every) // FLOAT,
            }
        return found


@dataclass(frozen=True)
class Sizes:
    """The layers of a network at its published size; nothing is computed."""

    net: str
    ranks: int = 1

    @property
    def name(self) -> str:
        """The job in a few words."""
        return f"{self.net}, sizes"

    def measure(self) -> dict[str, Any]:
        """Parameters and values of each layer."""
        net = NETS[self.net]
        with torch.device("meta"):
            model: nn.Module = net.build()
        kinds = {name: type(module).__name__ for name, module in model.named_modules()}
        found = sizes(model, net.image)
        return {"words": net.words, "layers": [{**asdict(layer), "type": kinds[layer.name]} for layer in found]}


def expected(layers: Sequence[dict[str, Any]], images: int, channel: int, data: int) -> float:
    """The values that `payload` says all ranks send, for layers of which some are split."""
    total = 0.0
    for number, row in enumerate(layers):
        size = Size(*(row[key] for key in ("name", "parameters", "inputs", "outputs", "kept")))
        if row["split"]:
            total += data * split_values(size, images // data, channel)
            # Nobody asks for the gradient of the image.
            total -= images * (channel - 1) * size.inputs if number == 0 else 0
            total += gradient_values(size, data)
        else:
            total += gradient_values(size, data * channel)
    return total


Job = Step | Scheme | Sizes


def jobs(*, quick: bool) -> list[Job]:
    """All networks on two ranks and on four, with as many images as ranks, and LeNet-5 on both sides of crossovers."""
    nets = ["lenet5"] if quick else list(NETS)
    found: list[Job] = [Sizes(net) for net in NETS]
    for ranks in (2,) if quick else (2, 4):
        for net in nets:
            found += [Step(net, way, ranks, 2 * ranks) for way in ("data", "model", "hybrid")]
        found += [Scheme("lenet5", ranks, images) for images in (34, 35)]
    if not quick:
        found += [Step(net, "hybrid, in two groups", 4, 8) for net in nets]
        found += [Step("lenet5", "model", 2, images) for images in (10, 12)]
        found += [Step("lenet5", "hybrid", 2, images) for images in (82, 84)]
    return found
