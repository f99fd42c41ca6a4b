"""Document 001: offload to the CPU."""

from __future__ import annotations

from collections.abc import Callable, Collection

from documents.lookup import Field, Made, Number, Printed, ms, record
from documents.row import Row, Text, Verdict, say

GPU = "offload/gpu.json"
TITLES = {"vgg19": "VGG-19", "alexnet": "AlexNet", "resnet50": "ResNet-50", "inception_v3": "Inception-v3"}
NAMES = {"naive": "naive", "pinned": "pin-memory", "nonblocking": "non-blocking", "both": "both"}


def command(model: str, *variants: str) -> str:
    """What trains a model by some variants, or by all."""
    parts = [f"table/{model}/{variant}" for variant in variants] or [f"'table/{model}/*'"]
    return f"mural bench offload --only {' '.join(parts)}"


def trained(model: str, variant: str, field: str = "step") -> Field:
    """The median step of a training, or another field of its record."""
    return record(GPU, field, kind="measure", name=f"table/{model}/{variant}")


def printed(model: str, machine: str, variant: str) -> Printed:
    """Seconds of the document's table."""
    return Printed("offload", lambda module: module.TABLES[model, machine][variant].seconds)


def added(model: str, machine: str, part: int) -> Printed:
    """Seconds that naive offload adds to a step: by the totals, or by the copies."""
    return Printed("offload", lambda module: module.added(model, machine)[part])


def factors(model: str, machine: str) -> Text:
    """A column of table 1: the baseline's seconds, and the variants over it."""
    numbers: dict[str, Number] = {"baseline": printed(model, machine, "baseline")}
    numbers |= {name: printed(model, machine, name) / printed(model, machine, "baseline") for name in NAMES}
    words = ", ".join(f"{word} {{{name}:.2f}}" for name, word in NAMES.items())
    return Text(f"{TITLES[model]} on a {machine}: {{baseline:.2f}} s; {words} times that", numbers)


def ours(model: str, *measured: str) -> Text:
    """The same of ours, by median steps."""
    numbers: dict[str, Number] = {"baseline": ms(trained(model, "baseline"))}
    numbers |= {name: trained(model, name) / trained(model, "baseline") for name in (*measured, "mural")}
    words = ", ".join(f"{NAMES[name]} {{{name}:.2f}}" for name in measured)
    return Text(f"a step {{baseline:.1f}} ms; {words} times that; mural's offload {{mural:.2f}} times", numbers)


def copies(model: str, machine: str) -> Text:
    """Naive offload in an appendix table: the mean seconds of the model's copies, and the best accuracy."""
    rows: dict[str, Number] = {
        "came": Printed("offload", lambda module: module.TABLES[model, machine]["naive"].to_device[0]),
        "left": Printed("offload", lambda module: module.TABLES[model, machine]["naive"].to_host[0]),
        "accuracy": Printed("offload", lambda module: module.TABLES[model, machine]["naive"].accuracy),
    }
    return Text("naive: mean to the GPU {came:.4f} s, to the CPU {left:.4f} s; best accuracy {accuracy:.4f}", rows)


def our_copies(model: str) -> Text:
    """The same of ours."""
    path = ("records", {"kind": "measure", "name": f"table/{model}/naive"})
    return say(
        "naive: {came:.4f} s and {left:.4f} s; {accuracy:.4f}",
        came=Field(GPU, (*path, "came", 0)),
        left=Field(GPU, (*path, "left", 0)),
        accuracy=trained(model, "naive", "accuracy"),
    )


def accuracies(found: Callable[[str, str], Number], short: Collection[str] = ()) -> Text:
    """The least and the most of the best accuracies by variants; of models in `short`, but for the slowest two."""
    numbers: dict[str, Number] = {}
    for model in TITLES:
        names = [name for name in NAMES if model not in short or name not in ("naive", "pinned")]
        each = tuple(found(model, name) for name in ("baseline", *names))
        numbers |= {f"{model}_least": Made(min, each), f"{model}_most": Made(max, each)}
    words = (f"{title} {{{model}_least:.4f}} to {{{model}_most:.4f}}" for model, title in TITLES.items())
    return Text(", ".join(words), numbers)


def printed_accuracy(model: str, variant: str) -> Printed:
    """The best accuracy of an appendix table, on the V100."""
    return Printed("offload", lambda module: module.TABLES[model, "V100"][variant].accuracy)


OTHER_HOST = (
    "other GPU, host and link, and images of faces instead of Hymenoptera; accuracies compare only between variants"
)
TABLES = (
    Row(
        "table 1, first column",
        factors("vgg19", "K80"),
        ours("vgg19", "naive", "pinned", "nonblocking", "both"),
        command("vgg19"),
        Verdict.NOT_COMPARABLE,
        "there is no K80 here",
    ),
    Row(
        "table 1, second column",
        factors("vgg19", "V100"),
        ours("vgg19", "naive", "pinned", "nonblocking", "both"),
        command("vgg19"),
        Verdict.REPRODUCED,
        say(
            "naive offload is several times slower, on a faster GPU by more; `non_blocking` gains here, since today's "
            "torch pins the memory that it copies to. Naive and pin-memory in {few:.0f} steps instead of {all:.0f}",
            few=trained("vgg19", "naive", "steps"),
            all=trained("vgg19", "baseline", "steps"),
        ),
    ),
    Row(
        "table 1, third column",
        factors("alexnet", "V100"),
        ours("alexnet", "naive", "pinned", "nonblocking", "both"),
        command("alexnet", "naive", "pinned"),
        Verdict.REPRODUCED,
        "naive and pin-memory, by far more on a faster GPU; `non_blocking` gains here, see above. Naive ran next to "
        "other work, pin-memory alone",
    ),
    Row(
        "table 1, fourth column",
        factors("resnet50", "V100"),
        ours("resnet50", "naive", "pinned", "nonblocking", "both"),
        command("resnet50"),
        Verdict.REPRODUCED,
        "naive and pin-memory; `non_blocking` gains here, see above",
    ),
    Row(
        "table 1, fifth column",
        factors("inception_v3", "V100"),
        ours("inception_v3", "naive", "pinned", "nonblocking", "both"),
        command("inception_v3"),
        Verdict.REPRODUCED,
        "naive and pin-memory, in the same way; pin-memory ran next to other work",
    ),
    Row(
        "table 2",
        "parameters: VGG19 139,578,434, AlexNet 57,012,034, ResNet50 23,512,130, InceptionV3 24,348,900",
        say(
            "VGG-19 {vgg19:,.0f}, AlexNet {alexnet:,.0f}, ResNet-50 {resnet50:,.0f}, Inception-v3 {inception_v3:,.0f}",
            **{model: trained(model, "baseline", "parameters") for model in TITLES},
        ),
        "mural bench offload --only 'table/*/baseline'",
        Verdict.REPRODUCED,
    ),
    Row(
        "appendix, VGG19 on sky-k80",
        copies("vgg19", "K80"),
        our_copies("vgg19"),
        command("vgg19", "naive"),
        Verdict.NOT_COMPARABLE,
        OTHER_HOST,
    ),
    Row(
        "appendix, VGG19 on bdw-v100",
        copies("vgg19", "V100"),
        our_copies("vgg19"),
        command("vgg19", "naive"),
        Verdict.NOT_COMPARABLE,
        "as above; our copies into fresh pageable memory are slower",
    ),
    Row(
        "appendix, AlexNet on bdw-v100",
        copies("alexnet", "V100"),
        our_copies("alexnet"),
        command("alexnet", "naive"),
        Verdict.NOT_COMPARABLE,
        "as above; our copies into fresh pageable memory are slower. They ran next to other work",
    ),
    Row(
        "appendix, ResNet50 on bdw-v100",
        copies("resnet50", "V100"),
        our_copies("resnet50"),
        command("resnet50", "naive"),
        Verdict.NOT_COMPARABLE,
        "as above",
    ),
    Row(
        "appendix, InceptionV3 on bdw-v100",
        copies("inception_v3", "V100"),
        our_copies("inception_v3"),
        command("inception_v3", "naive"),
        Verdict.NOT_COMPARABLE,
        "as above; our copies are slower",
    ),
    Row(
        "appendix, best accuracies of all variants",
        accuracies(printed_accuracy),
        accuracies(lambda model, variant: trained(model, variant, "accuracy"), short=("vgg19",)),
        "mural bench offload --only 'table/*'",
        Verdict.CONTRADICTED,
        "offload changes no bit of the weights that a training ends with. The document does not say whether its "
        "variants began with the same weights and images. Naive and pin-memory of VGG-19 took fewer steps, and are "
        "left out",
    ),
    Row(
        "table 1, against the appendix",
        say(
            "naive offload adds {total:.2f} s to a step of ResNet50 by table 1, and {copies:.2f} s by its copies; "
            "VGG19 {vgg:.2f} and {vgg_copies:.2f} s (V100)",
            total=added("resnet50", "V100", 0),
            copies=added("resnet50", "V100", 1),
            vgg=added("vgg19", "V100", 0),
            vgg_copies=added("vgg19", "V100", 1),
        ),
        say(
            "ResNet-50: {total:.3f} s by the steps, {copies:.3f} s by the copies; VGG-19 {vgg:.3f} and "
            "{vgg_copies:.3f} s",
            total=trained("resnet50", "naive") - trained("resnet50", "baseline"),
            copies=Field(GPU, ("records", {"name": "table/resnet50/naive"}, "came", 0))
            + Field(GPU, ("records", {"name": "table/resnet50/naive"}, "left", 0)),
            vgg=trained("vgg19", "naive") - trained("vgg19", "baseline"),
            vgg_copies=Field(GPU, ("records", {"name": "table/vgg19/naive"}, "came", 0))
            + Field(GPU, ("records", {"name": "table/vgg19/naive"}, "left", 0)),
        ),
        command("resnet50", "naive", "baseline"),
        Verdict.CONTRADICTED,
        "its columns do not add up; ours do",
    ),
)
