"""Layers with a life of their own: hooks, buffers, random numbers, checkpoints, custom functions, odd autograd."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from hunt.layers_shapes import Inside, lines
from hunt.recipe import Layer

BENT = '''
class Bent(torch.autograd.Function):
    """A tanh whose gradient is not tanh's."""

    @staticmethod
    def forward(ctx, x):
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y) * 1.3
'''.strip()
TIMES = '''
class Times(torch.autograd.Function):
    """An activation times a weight for each channel, with both gradients by hand."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum((0, 2, 3), keepdim=True)
'''.strip()
CONV = "self.conv# = nn.Conv2d(4, 4, 3, padding=1)"
HOOKS = {
    "forward hook": ((CONV, "self.conv#.register_forward_hook(lambda m, a, y: y * 1.2)"), ("x = self.conv#(x)",)),
    "pre-hook": ((CONV, "self.conv#.register_forward_pre_hook(lambda m, a: (a[0] * 0.8,))"), ("x = self.conv#(x)",)),
    "backward hook": (
        (CONV, "self.conv#.register_full_backward_hook(lambda m, a, b: tuple(g * 0.5 for g in a))"),
        ("x = self.conv#(x)",),
    ),
    "tensor hook": ((), ("x = x * 1.0", "if x.requires_grad:", "    x.register_hook(lambda g: g * 1.5)")),
    "clipping hook": (
        (),
        ("x = x * 1.0", "if x.requires_grad:", "    x.register_hook(lambda g: (g * 0.5).clamp(-0.1, 0.1))"),
    ),
    "looking hook": ((), ("x = x * 1.0", "if x.requires_grad:", "    x.register_hook(lambda g: None)")),
    "parameter hook": ((CONV, "self.conv#.weight.register_hook(lambda g: g * 0.5)"), ("x = self.conv#(x)",)),
    "clipped parameter": (
        (CONV, "self.conv#.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))"),
        ("x = self.conv#(x)",),
    ),
    "retained": ((), ("x = x * 1.0", "if x.requires_grad:", "    x.retain_grad()")),
}
BUFFERS = {
    "counter": (("self.register_buffer('n#', torch.zeros(()))",), ("self.n# += 1", "x = x / self.n#")),
    "python counter": (("self.n# = 0",), ("self.n# += 1", "x = x * (1 + 0.1 * self.n#)")),
    "running mean": (
        ("self.register_buffer('m#', torch.zeros(4, 1, 1))",),
        (
            "if self.training:",
            "    self.m#.lerp_(x.detach().mean((0, 2, 3)).view(4, 1, 1), 0.3)",
            "x = x - self.m#.clone()",
        ),
    ),
    "assigned mean": (
        ("self.register_buffer('m#', torch.zeros(4, 1, 1))",),
        ("self.m# = 0.7 * self.m# + 0.3 * x.detach().mean((0, 2, 3), keepdim=True)[0]", "x = x - self.m#"),
    ),
    "running maximum": (
        ("self.register_buffer('m#', torch.zeros(()))",),
        ("self.m#.copy_(torch.maximum(self.m#, x.detach().abs().max()))", "x = x / (1 + self.m#.clone())"),
    ),
    "silent": (
        ("self.register_buffer('m#', torch.zeros(1, 4, 1, 1), persistent=False)",),
        ("self.m#.add_(x.detach().sum((0, 2, 3), keepdim=True), alpha=1e-3)", "x = x + 0"),
    ),
    "weight average": (
        (CONV, "self.register_buffer('m#', torch.zeros(4, 4, 3, 3))"),
        (
            "with torch.no_grad():",
            "    self.m#.lerp_(self.conv#.weight, 0.5)",
            "x = self.conv#(x) + F.conv2d(x, self.m#.clone(), padding=1)",
        ),
    ),
    "constant": (("self.register_buffer('m#', torch.randn(1, 4, 1, 1))",), ("x = x * self.m#",)),
    "batches": (
        ("self.register_buffer('m#', torch.zeros((), dtype=torch.long))",),
        ("if self.training:", "    self.m# += x.shape[0]", "x = x + 0.01 * self.m#"),
    ),
}
RANDOM = {
    "dropout": ("x = F.dropout(x, 0.3, self.training)",),
    "dropout2d": ("x = F.dropout2d(x, 0.4, self.training) + 0.2 * x",),
    "alpha dropout": ("x = F.alpha_dropout(x, 0.2, self.training)",),
    "drop path": ("if self.training:", "    x = x + x.tanh() * x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(0.5)"),
    "noise": ("if self.training:", "    x = x + 0.1 * torch.randn_like(x)"),
    "normal": ("if self.training:", "    x = x + torch.normal(0.0, 0.1, x.shape).to(x)"),
    "rand": ("if self.training:", "    x = x * torch.rand(x.shape[0], 4, 1, 1, dtype=x.dtype)"),
    "randint": ("if self.training:", "    x = x * torch.randint(1, 3, (1, 4, 1, 1)).to(x)"),
    "bernoulli": ("if self.training:", "    x = x * torch.bernoulli(torch.full_like(x, 0.8))"),
    "uniform in place": ("if self.training:", "    x = x + torch.empty_like(x).uniform_(-0.1, 0.1)"),
    "dropped block": ("if self.training:", "    x = x * (F.max_pool2d(torch.rand_like(x), 3, 1, 1) < 0.97)"),
    "python chance": ("if self.training:", "    x = x * (0.5 + random.random())"),
}
WHOLE = {
    "gate": ("x = x * x.mean((2, 3), keepdim=True).sigmoid()",),
    "largest gate": ("x = x * x.amax((2, 3), keepdim=True).tanh()",),
    "least": ("x = x - x.amin(dim=(2, 3), keepdim=True).tanh()",),
    "context": ("w = x[:, :1].flatten(2).softmax(-1)", "x = x + (x.flatten(2) @ w.transpose(1, 2)).unsqueeze(-1)"),
    "scalar": ("x = x / (1 + x.square().mean())",),
    "std": ("x = x / (x.std() + 0.5)",),
    "sum": ("x = x + 1e-3 * x.sum((1, 2, 3), keepdim=True)",),
    "logsumexp": ("x = x - 0.1 * x.logsumexp((2, 3), keepdim=True)",),
    "batch mean": ("x = x - 0.5 * x.mean(0, keepdim=True)",),
    "rows": ("x = x + x.mean(2, keepdim=True).tanh()",),
    "pooled": ("x = x + F.interpolate(F.adaptive_avg_pool2d(x, 2).tanh(), x.shape[2:], mode='nearest')",),
    "spread": ("g = x.mean((2, 3))", "x = torch.cat([x[:, :2], g[:, 2:, None, None].expand(-1, -1, *x.shape[2:])], 1)"),
    "norm": ("x = x / (1 + torch.linalg.vector_norm(x, dim=(1, 2, 3), keepdim=True)) * 5",),
    "gram": ("f = x.flatten(2)", "x = x + torch.einsum('ncd,nd->nc', f, f.mean(1))[:, :, None, None] / f.shape[-1]"),
}
ODD = {
    "detached": ("x = x + x.detach().tanh()",),
    "no grad": ("with torch.no_grad():", "    g = x.sigmoid()", "x = x * g"),
    "inference mode": ("with torch.inference_mode():", "    g = x.mean()", "x = x * (1 + float(g.clone()))"),
    "inner gradient": (
        "with torch.enable_grad():",
        "    z = x.detach().requires_grad_()",
        "    (g,) = torch.autograd.grad(z.tanh().sum(), z)",
        "x = x * g",
    ),
    "branch on shape": ("if x.shape[2] > 6:", "    x = x.tanh()", "else:", "    x = x * 2"),
    "branch on value": ("if float(x.detach().mean()) > 0:", "    x = x.tanh()", "else:", "    x = x * 2"),
    "item": ("x = x * (1 + x.detach().abs().max().item())",),
    "training": ("x = x * 1.5 if self.training else x.tanh()",),
    "loop": ("for i in range(3):", "    x = x + 0.1 * x.roll(i, 2)"),
    "list": ("many = [x]", "for i in range(2):", "    many.append(many[-1].tanh())", "x = sum(many)"),
    "sized": ("x = x / x.numel() * x.size(2) * x.size(-1)",),
}


def with_init(kind: str, forms: dict[str, tuple[tuple[str, ...], tuple[str, ...]]]) -> Callable[[Random], Layer]:
    """A layer of one of some forms with a part in `__init__`."""

    def draw(d: Random) -> Layer:
        name = d.choice(list(forms))
        return Layer(f"{kind} {name}" if kind else name, *forms[name])

    return draw


def chance(d: Random) -> Layer:
    name = d.choice(list(RANDOM))
    return Layer(f"random {name}", (), RANDOM[name], random=True)


def function(d: Random) -> Layer:
    if d.random() < 0.5:
        return Layer("custom function", (), ("x = Bent.apply(x)",), needs=BENT)
    init = ("self.gain# = nn.Parameter(torch.ones(1, 4, 1, 1))",)
    return Layer("custom function with weight", init, ("x = Times.apply(x, self.gain#)",), needs=TIMES)


def checkpointed(d: Random, inside: Inside) -> Layer:
    reentrant = d.random() < 0.25
    how = f"x = checkpoint(self.block#, x, use_reentrant={reentrant})"
    return Layer(f"checkpoint{' reentrant' if reentrant else ''}", (), (how,), inside(d), block=True)


def checkpointed_lines(d: Random, inside: Inside) -> Layer:
    how = ("def run#(x):", "    ...", "    return x", "", "x = checkpoint(run#, x, use_reentrant=False)")
    return Layer("checkpointed lines", (), how, inside(d))


def excite(d: Random) -> Layer:
    init = ("self.a# = nn.Conv2d(4, 2, 1)", "self.b# = nn.Conv2d(2, 4, 1)")
    pool = d.choice(["F.adaptive_avg_pool2d(x, 1)", "x.mean((2, 3), keepdim=True)", "F.adaptive_max_pool2d(x, 1)"])
    return Layer("squeeze and excite", init, (f"x = x * self.b#(self.a#({pool}).relu()).sigmoid()",))


STATE: dict[str, tuple[Callable[[Random], Layer], float]] = {
    "hooks": (with_init("", HOOKS), 0.8), "buffers": (with_init("buffer", BUFFERS), 0.8), "random": (chance, 0.6),
    "whole": (lines("whole", WHOLE), 1.5), "odd": (lines("odd", ODD), 0.8), "function": (function, 0.4),
    "excite": (excite, 0.6),
}  # fmt: skip
AROUND: dict[str, tuple[Callable[[Random, Inside], Layer], float]] = {
    "checkpoint": (checkpointed, 0.6), "checkpointed lines": (checkpointed_lines, 0.3),
}  # fmt: skip
