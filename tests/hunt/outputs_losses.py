"""What models give and losses read: logits with further parts, criteria, and terms beside the output."""

from __future__ import annotations

from random import Random

from hunt.recipe import Extra

CRITERIA: dict[str, tuple[str, ...]] = {
    "labels": (
        "F.cross_entropy(y, t)",
        "F.cross_entropy(y, t)",
        "F.cross_entropy(y, t, label_smoothing=0.1)",
        "F.cross_entropy(y, t, torch.tensor([0.5, 1.0, 2.0], dtype=y.dtype))",
        "1e-2 * F.cross_entropy(y, t, reduction='sum')",
        "F.cross_entropy(y, t, reduction='none').mean()",
        "F.cross_entropy(y, t, reduction='none').flatten(1).mean(1).square().mean()",
        "F.cross_entropy(y.movedim(1, -1).reshape(-1, 3), t.reshape(-1))",
        "F.nll_loss(y.log_softmax(1), t)",
        "-y.log_softmax(1).gather(1, t.unsqueeze(1)).mean()",
        "(1 - (F.one_hot(t, 3).movedim(-1, 1) * y.softmax(1)).sum(1)).square().mean()",
        "F.multi_margin_loss(y.movedim(1, -1).reshape(-1, 3), t.reshape(-1))",
        "F.mse_loss(y.softmax(1), F.one_hot(t, 3).movedim(-1, 1).to(y.dtype))",
        "F.kl_div(y.log_softmax(1), F.one_hot(t, 3).movedim(-1, 1).to(y.dtype), reduction='batchmean')",
        "F.cross_entropy(y, F.one_hot(t, 3).movedim(-1, 1).to(y.dtype))",
    ),
    "pixel labels": (
        "F.cross_entropy(y.permute(0, 2, 3, 1).reshape(-1, 3), t.view(-1))",
        "F.cross_entropy(y.flatten(2), t.flatten(1))",
        "F.cross_entropy(y.flatten(2).transpose(1, 2).flatten(0, 1), t.flatten())",
        "F.cross_entropy(y[:, :, 1:-1], t[:, 1:-1])",
        "1 - (2 * (y.softmax(1)[:, 1] * (t == 1)).sum() + 1) / (y.softmax(1)[:, 1].sum() + (t == 1).sum() + 1)",
        "(1 - (2 * (y.sigmoid() * F.one_hot(t, 3).movedim(-1, 1)).sum((2, 3)) + 1)"
        " / ((y.sigmoid() + F.one_hot(t, 3).movedim(-1, 1)).sum((2, 3)) + 1)).mean()",
        "F.cross_entropy(y, t, reduction='none').flatten(1).mean(1).max()",
        "(F.cross_entropy(y, t, reduction='none') * (1 + (t == 2))).mean()",
        "F.cross_entropy(y.mean((2, 3)), t.flatten(1).amax(1))",
        "F.cross_entropy(y, t) + (y[:, :, 1:] - y[:, :, :-1]).abs().mean()",
        "mural.dice_loss(y, t)",
    ),
    "ignored": (
        "F.cross_entropy(y, t, ignore_index=255)",
        "F.cross_entropy(y, t, torch.tensor([0.5, 1.0, 2.0], dtype=y.dtype), ignore_index=255)",
        "F.cross_entropy(y, t, ignore_index=255, reduction='none').sum() / (t != 255).sum().clamp(min=1)",
        "(F.cross_entropy(y, t.clamp(max=2), reduction='none') * (t != 255)).sum() / ((t != 255).sum() + 1)",
        "F.cross_entropy(y, t, ignore_index=255, label_smoothing=0.1)",
    ),
    "real": (
        "F.mse_loss(y, t)",
        "F.l1_loss(y, t)",
        "F.smooth_l1_loss(y, t, beta=0.3)",
        "F.huber_loss(y, t, delta=0.7)",
        "F.mse_loss(y, t, reduction='sum') * 1e-2",
        "(y - t).square().mean().sqrt()",
        "(y - t).square().flatten(1).mean(1).sqrt().mean()",
        "F.mse_loss(y, t) / t.var()",
        "F.gaussian_nll_loss(y, t, y.detach().square() + 0.1)",
        "1 - F.cosine_similarity(y, t, dim=1).mean()",
        "(y - t).abs().amax(1).mean()",
        "(y - t).norm() + y.mean() ** 2",
        "torch.linalg.vector_norm(y - t, dim=1).mean()",
        "F.poisson_nll_loss(y, t)",
        "(y * t).sum() / (y.norm() * t.norm() + 1e-6)",
    ),
    "binary": (
        "F.binary_cross_entropy_with_logits(y, t)",
        "F.binary_cross_entropy(y.sigmoid(), t)",
        "F.binary_cross_entropy_with_logits(y, t, pos_weight=torch.tensor(2.0, dtype=y.dtype))",
        "F.binary_cross_entropy_with_logits(y, t, t + 0.5)",
        "((1 - (y.sigmoid() * t + (1 - y.sigmoid()) * (1 - t))) ** 2"
        " * F.binary_cross_entropy_with_logits(y, t, reduction='none')).mean()",
        "1 - ((2 * (y.sigmoid() * t).flatten(1).sum(1) + 1) / ((y.sigmoid() + t).flatten(1).sum(1) + 1)).mean()",
        "F.soft_margin_loss(y, 2 * t - 1)",
        "F.softplus(-y * (2 * t - 1)).mean()",
    ),
}
"""By the kind of target: criteria of logits `y` and target `t`."""
BESIDE = (
    "1e-2 * model.head.weight.square().sum()",
    "1e-3 * sum(p.square().sum() for p in model.parameters())",
    "1e-2 * model.inward.weight.abs().sum()",
    "0.1 * y.mean() ** 2",
    "0.1 * y.square().mean()",
    "1e-2 * y.sum().tanh()",
    "0.1 * y.std()",
    "0.1 * y.max()",
    "0.1 * y.flatten(1).logsumexp(1).mean()",
    "0.1 * y.mean(0).square().mean()",
    "torch.zeros(())",
    "0.3",
)
"""Terms that read the logits as a whole, or something else."""
LABEL = "t.flatten(1).amax(1)"
EXTRAS: tuple[Extra, ...] = (
    Extra(
        "low", "self.low#(F.avg_pool2d(x, 2, ceil_mode=True))", ("self.low# = nn.Conv2d(4, 3, 1)",),
        (
            "0.4 * e.square().mean()", "0.1 * e.abs().sum().sqrt()", "0.2 * e.softmax(1)[:, 1].mean()",
            "0.4 * F.mse_loss(e, F.interpolate(y, e.shape[2:]))",
            "0.4 * F.cross_entropy(e, F.interpolate(t[:, None].double(), e.shape[2:])[:, 0].long())",
            "0.4 * F.mse_loss(e, F.interpolate(t, e.shape[2:], mode='bilinear'))",
            "0.4 * F.cross_entropy(F.interpolate(e, t.shape[1:], mode='bilinear'), t)",
        ),
    ),
    Extra(
        "low strided", "self.low#(x)", ("self.low# = nn.Conv2d(4, 3, 3, stride=2, padding=1)",),
        ("0.4 * e.square().mean()", "0.3 * (e.sigmoid() - 0.4).abs().mean()"),
    ),
    Extra(
        "gate", "x.mean((2, 3)).sigmoid()", (),
        (
            "0.1 * e.mean()", "0.1 * e.square().sum()", "0.2 * F.binary_cross_entropy(e, torch.ones_like(e) * 0.3)",
            f"0.2 * F.cross_entropy(e, {LABEL})", "0.1 * e.prod(1).mean()", "0.1 * e.std()",
        ),
    ),
    Extra("maximum", "x.amax((2, 3))", (), ("0.1 * e.mean()", "0.1 * e.logsumexp(1).sum()")),
    Extra("map gate", "x.mean((2, 3), keepdim=True)", (), ("0.1 * e.square().mean()",)),
    Extra(
        "latent", "x.mean((2, 3))", (),
        ("0.1 * (e[:, 2:].exp() + e[:, :2].square() - 1 - e[:, 2:]).sum(1).mean()", "-0.05 * (1 + e - e.exp()).sum()"),
    ),
    Extra("scalar", "x.square().mean()", (), ("0.2 * e", "e.sqrt()")),
    Extra("count", "x.shape[2]", (), ("0.01 * e",)),
    Extra("nothing", "None", (), ()),
    Extra("weights", "self.head.weight.square().sum()", (), ("0.1 * e",)),
    Extra("early", "early", (), ("0.1 * e.square().mean()", "0.1 * e.mean().tanh()", "0.1 * e.var((2, 3)).mean()")),
    Extra(
        "second head", "self.second#(early)", ("self.second# = nn.Conv2d(4, 3, 3, padding=1)",),
        (
            "0.3 * e.square().mean()", "0.3 * F.cross_entropy(e, e.detach().argmax(1))",
            "0.3 * e.softmax(1).amax(1).mean()",
        ),
    ),
    Extra("labels", "x.argmax(1)", (), ("0.01 * e.double().mean()",)),
    Extra("features", "x", (), ("0.1 * e.abs().mean()", "0.05 * (e @ e.transpose(2, 3)).mean().tanh()")),
)  # fmt: skip
"""What a model gives besides logits, and terms of the loss that read it; those of labels need that target."""


def head_of(d: Random) -> str:
    """A head: mostly one of pixels."""
    return d.choices(["pixels", "resized", "classes", "pooled", "largest"], [6, 2.5, 1.2, 0.4, 0.4])[0]


def target_of(d: Random, head: str) -> tuple[str, str]:
    """A kind of target, and a criterion for it."""
    flat = head not in ("pixels", "resized")
    kind = d.choices(["labels", "pixel labels", "ignored", "real", "binary"], [4, 0 if flat else 4, 1, 2, 2])[0]
    return ("labels" if kind == "pixel labels" else kind), d.choice(CRITERIA[kind])


def extras_of(d: Random, head: str, target: str) -> tuple[Extra, ...]:
    """Some further parts of a result, each with some of its terms."""
    found: list[Extra] = []
    for _ in range(d.choices([0, 1, 2], [5, 4, 1])[0]):
        extra = d.choice(EXTRAS)
        fits = [term for term in extra.terms if suits(term, head, target)]
        terms = tuple(d.sample(fits, min(len(fits), d.choices([0, 1, 2], [1, 6, 1])[0])))
        found.append(Extra(extra.kind, extra.value, extra.init, terms))
    return tuple(found)


def suits(term: str, head: str, target: str) -> bool:
    """Whether a term can be computed with that head and target."""
    flat = head not in ("pixels", "resized")
    if "t.shape[1:]" in term or "t[:, None]" in term or "t.flatten" in term:
        return not flat and target == "labels"
    if "F.interpolate(t" in term:
        return not flat and target in ("real", "binary")
    return not flat or "interpolate(y" not in term
