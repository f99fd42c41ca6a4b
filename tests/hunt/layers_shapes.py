"""Layers that move values: skips, reuse, views, slices, windows, rolls, what is written in place."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from hunt.layers_values import same_conv
from hunt.recipe import Layer

Inside = Callable[[Random], tuple[Layer, ...]]
FIT = '''
def fit(x, like):
    """The values at the extents of another tensor."""
    return x if x.shape[2:] == like.shape[2:] else F.interpolate(x, like.shape[2:])
'''.strip()


def lines(kind: str, forms: dict[str, tuple[str, ...]]) -> Callable[[Random], Layer]:
    """A layer of one of some forms, which have names."""

    def draw(d: Random) -> Layer:
        name = d.choice(list(forms))
        return Layer(f"{kind} {name}", (), forms[name])

    return draw


VIEWS = {
    "strided": ("x = x[:, :, ::2]",),
    "strided columns": ("x = x[..., 1::2]",),
    "inner": ("x = x[:, :, 1:-1, 1:]",),
    "narrow": ("x = x.narrow(2, 1, x.shape[2] - 2)",),
    "chunk": ("a, b = x.chunk(2, 1)", "x = torch.cat([b.tanh(), a], 1)"),
    "split": ("a, b = x.split([1, 3], dim=1)", "x = torch.cat([a * b[:, :1], b], dim=1)"),
    "split rows": ("h = x.shape[2] // 2", "x = torch.cat([x[:, :, h:], x[:, :, :h]], 2)"),
    "unbind": ("a, b, c, e = x.unbind(1)", "x = torch.stack([a + b, b * c, c, e], 1)"),
    "difference": ("x = x[..., 1:] - x[..., :-1]",),
    "flip": ("x = x.flip(3)",),
    "flip rows": ("x = torch.flip(x, [2])",),
    "transposed": ("x = x.transpose(2, 3)",),
    "permuted": ("x = x.permute(0, 2, 3, 1)", "x = (x * x.mean(-1, keepdim=True)).permute(0, 3, 1, 2)"),
    "flat": ("x = x.flatten(2).softmax(1).view(x.shape)",),
    "flat all": ("x = (x.reshape(-1, *x.shape[2:]) * 0.7).reshape(x.shape)",),
    "grouped": ("n, c, h, w = x.shape", "x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)"),
    "index": ("x = x[:, [2, 0, 3, 1]]",),
    "index select": ("x = x.index_select(1, torch.tensor([3, 2, 1, 0]))",),
    "roll": ("x = x.roll((2, -1), (2, 3))",),
    "roll channels": ("x = torch.roll(x, 1, 1) + x",),
    "expand": ("x = x + x[:, :1].expand(-1, 4, -1, -1)",),
    "first row": ("x = x + x[:, :, :1]",),
    "last column": ("x = x - x[..., -1:].tanh()",),
    "cumulative": ("x = x.cumsum(3) / 5",),
    "cumulative rows": ("x = x.cumsum(dim=2) * 0.2",),
    "sorted": ("x = x.sort(dim=1).values",),
    "top": ("v, i = x.topk(2, dim=1)", "x = torch.cat([v, x[:, :2]], 1)"),
    "largest": ("x = x * (x == x.amax(1, keepdim=True))",),
    "positions": ("x = x + torch.linspace(-1, 1, x.shape[3], dtype=x.dtype)",),
    "rows of positions": ("x = x * torch.arange(x.shape[2], dtype=x.dtype)[:, None].cos()",),
    "mask by position": ("x = x.masked_fill((torch.arange(x.shape[3]) % 3 == 0), 0.3)",),
    "shuffle": ("x = F.pixel_shuffle(x.repeat(1, 4, 1, 1) * x.mean(1, keepdim=True), 2)",),
    "unfold": ("u = F.unfold(x, 3, padding=1)", "x = u.view(x.shape[0], 4, 9, *x.shape[2:]).amax(2)"),
    "patches": (
        "p = F.pad(x, (0, -x.shape[3] % 2, 0, -x.shape[2] % 2))",
        "x = p.unfold(2, 2, 2).unfold(3, 2, 2).mean((-1, -2))",
    ),
    "windows": (
        "n, c, h, w = x.shape",
        "p = F.pad(x, (0, -w % 4, 0, -h % 4))",
        "a, b = p.shape[2] // 4, p.shape[3] // 4",
        "s = p.view(n, c, a, 4, b, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, c)",
        "s = (s @ s.transpose(1, 2) / 4).softmax(-1) @ s",
        "x = s.view(n, a, b, 4, 4, c).permute(0, 5, 1, 3, 2, 4).reshape(n, c, 4 * a, 4 * b)[..., :h, :w]",
    ),
    "gather": ("x = x.gather(1, x.argsort(1))",),
    "where": ("x = torch.where(x > x.mean((2, 3), keepdim=True), x, 0.3 * x)",),
    "repeat": ("x = x.repeat(1, 1, 1, 2)",),
    "tensor split": ("x = torch.cat([2 * part for part in x.tensor_split(3, 3)], 3)",),
    "contiguous": ("x = x.transpose(1, 2).contiguous().transpose(1, 2).to(memory_format=torch.channels_last)",),
    "squeezed": ("x = x.unsqueeze(2).squeeze(2).unflatten(1, (2, 2)).flatten(1, 2)",),
}
WRITES = {
    "scaled": ("x = x * 1.0", "x.mul_(1.1).add_(0.1)"),
    "activation": ("x = F.relu_(x * 2)",),
    "sum": ("y = x.tanh()", "x = x + 0", "x += y"),
    "first channel": ("x = x * 1.0", "x[:, 0] = x[:, 1].tanh()"),
    "channels": ("x = x * 1.0", "x[:, :1].add_(x[:, 1:2])"),
    "strided": ("x = x * 1.0", "x[:, :, ::2].mul_(0.5)"),
    "columns": ("x = x * 1.0", "x[..., 1:4] *= 0.3"),
    "corner": ("x = x * 1.0", "x[:, :, :2, :2] = 0.7"),
    "row": ("x = x * 1.0", "x[:, :, 0] = x[:, :, 1]"),
    "view": ("x = x * 1.0", "x.view(x.shape[0], 2, 2, *x.shape[2:])[:, 0].mul_(2)"),
    "transposed": ("x = x * 1.0", "x.transpose(1, 2).mul_(0.8)"),
    "detached": ("x = x * 1.0", "x.detach()[:, :, :2] = 0.7"),
    "detached scale": ("x = x * 1.0", "with torch.no_grad():", "    x.mul_(0.9)"),
    "clamped": ("x = (x * 2).clamp_(-1.0, 1.0)",),
    "filled": ("x = (x * 1.0).masked_fill_(x > 0.5, 0.2)",),
    "copied": ("y = torch.zeros_like(x)", "y.copy_(x * 0.5)", "x = x + y"),
    "zeros": ("y = torch.zeros_like(x)", "y[:, :, 1:] = x[:, :, :-1]", "x = x + y"),
    "new zeros": ("y = x.new_zeros(x.shape)", "y[:, 1:3] += x[:, 1:3]", "x = y + 0.1 * x"),
    "index": ("x = x * 1.0", "x[:, [0, 2]] = 0.5 * x[:, [1, 3]]"),
    "index add": ("x = x + 0", "x.index_add_(1, torch.tensor([0, 3]), x[:, 1:3].tanh())"),
    "out": ("with torch.no_grad():", "    y = torch.empty_like(x)", "    torch.tanh(x, out=y)", "x = x + y"),
    "chunks": ("x = x * 1.0", "a, b = x.split(2, 1)", "x = torch.cat([a.tanh(), b.sigmoid()], 1)"),
    "swapped": ("y = x.clone()", "y[:, :2] = x[:, 2:]", "y[:, 2:] = x[:, :2]", "x = y"),
    "addcmul": ("x = x * 1.0", "x.addcmul_(x.detach(), x.detach().tanh(), value=0.1)"),
    "alias": ("x = x * 1.0", "y = x", "y.add_(1.0)", "x = x * y"),
    "two views": ("x = x * 1.0", "a, b = x[:, :2], x[:, 1:3]", "a.mul_(0.5)", "x = torch.cat([a, b], 1)"),
}


def residual(d: Random, inside: Inside) -> Layer:
    how = d.choice(["x = fit(x, s#) + s#", "x = s# + 0.5 * fit(x, s#)", "x = torch.cat([fit(x, s#), s#], 1)[:, 1:5]"])
    return Layer("residual", (), ("s# = x", "...", how), inside(d), needs=FIT)


def branches(d: Random, inside: Inside) -> Layer:
    """A skip over a part at lower resolution, as a U-Net has it."""
    down = d.choice(["F.max_pool2d(x, 2, ceil_mode=True)", "F.avg_pool2d(x, 2, ceil_mode=True)", "x[:, :, ::2, ::2]"])
    up = d.choice(["bilinear", "nearest"])
    return Layer(
        "u-net",
        ("self.join# = nn.Conv2d(8, 4, 3, padding=1)",),
        (
            "s# = x",
            f"x = {down}",
            "...",
            f"x = self.join#(torch.cat([s#, F.interpolate(x, s#.shape[2:], mode={up!r})], 1))",
        ),
        inside(d),
    )


def reused(d: Random, inside: Inside) -> Layer:
    """A module that is called twice."""
    return Layer("reused", (), ("x = self.block#(x)", "x = self.block#(x.tanh())"), inside(d), block=True)


def tied(d: Random) -> Layer:
    init = ("self.a# = nn.Conv2d(4, 4, 3, padding=1)", "self.b# = nn.Conv2d(4, 4, 3, padding=1)")
    how = d.choice(["self.b#.weight = self.a#.weight", "self.b# = self.a#"])
    return Layer("tied", (*init, how), ("x = self.b#(self.a#(x).tanh())",))


def borrowed(d: Random) -> Layer:
    conv = same_conv(d)
    how = "x = self.conv#(x) + F.conv2d(x, self.conv#.weight.transpose(0, 1).flip(2, 3), padding=1)"
    return Layer("borrowed", conv.init, (how,))


def recalled(d: Random) -> Layer:
    """An activation that the model keeps as an attribute."""
    return Layer("kept", (), ("self.kept# = x.tanh()", "x = x * 0.5", "x = x + self.kept#"))


def block(d: Random, inside: Inside) -> Layer:
    return Layer("block", (), ("x = self.block#(x)",), inside(d), block=True)


NESTED: dict[str, tuple[Callable[[Random, Inside], Layer], float]] = {
    "residual": (residual, 1.5), "branches": (branches, 1.5), "reused": (reused, 0.7), "block": (block, 2.5),
}  # fmt: skip
SHAPES: dict[str, tuple[Callable[[Random], Layer], float]] = {
    "views": (lines("view", VIEWS), 3.0), "writes": (lines("write", WRITES), 2.0), "tied": (tied, 0.4),
    "borrowed": (borrowed, 0.3), "kept": (recalled, 0.3),
}  # fmt: skip
