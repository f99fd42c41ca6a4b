"""Document 001: what it concludes about offload, and leaves for later."""

from __future__ import annotations

from documents.lookup import Field, Made, gib, median, ms, record
from documents.offload_001 import GPU, command, printed, trained
from documents.row import Row, Verdict, say


def rate(tensors: int) -> Made:
    """GB/s of 512 MiB in so many tensors, from the device to pinned memory without waiting."""
    path = ("records", {"kind": "measure", "name": f"shape/{tensors}"})
    return Field(GPU, (*path, "bytes")) / Field(GPU, (*path, "nonblocking", "out"), median) / 1e9


TAKEAWAYS = (
    Row(
        "takeaway 1",
        "offload makes larger models possible, and costs time for transfers",
        say(
            "Adam with {state:.0f} GiB of weights, gradients and moments under a cap of 16 GiB: step and update take "
            "{cost:.2f} times those without a cap; plain torch runs out of memory",
            state=gib(record(GPU, "parameters", name="hosted/mural") * 16),
            cost=(
                record(GPU, "steps", median, name="hosted/mural") + record(GPU, "updates", median, name="hosted/mural")
            )
            / (
                record(GPU, "steps", median, name="hosted/uncapped")
                + record(GPU, "updates", median, name="hosted/uncapped")
            ),
        ),
        "mural bench offload --only 'hosted/*'",
        Verdict.REPRODUCED,
    ),
    Row(
        "takeaway 2",
        say(
            "hardware matters: the K80 takes three times as long as the V100 (baseline: {baseline:.2f}; with naive "
            "offload {naive:.2f}); naive over baseline {k80:.2f} on the K80, {v100:.2f} on the V100",
            baseline=printed("vgg19", "K80", "baseline") / printed("vgg19", "V100", "baseline"),
            naive=printed("vgg19", "K80", "naive") / printed("vgg19", "V100", "naive"),
            k80=printed("vgg19", "K80", "naive") / printed("vgg19", "K80", "baseline"),
            v100=printed("vgg19", "V100", "naive") / printed("vgg19", "V100", "baseline"),
        ),
        say(
            "naive over baseline {ours:.2f} on an H200 (VGG-19)",
            ours=trained("vgg19", "naive") / trained("vgg19", "baseline"),
        ),
        command("vgg19", "naive", "baseline"),
        Verdict.REPRODUCED,
        "the faster the device, the more the same copies cost",
    ),
    Row(
        "takeaway 3",
        "fewer and denser tensors are faster",
        say(
            "512 MiB to the host: {few:.1f} GB/s in 64 tensors, {more:.1f} in 4,096, {many:.2f} in 32,768",
            few=rate(64),
            more=rate(4096),
            many=rate(32768),
        ),
        "mural bench offload --only 'shape/*'",
        Verdict.REPRODUCED,
    ),
    Row(
        "takeaway 4",
        say(
            "optimizations help models with more layers and parameters: only ResNet50 and InceptionV3. Its table: "
            "both over naive {resnet:.2f} and {inception:.2f}, but {vgg:.2f} for VGG19, which has the most parameters",
            resnet=printed("resnet50", "V100", "both") / printed("resnet50", "V100", "naive"),
            inception=printed("inception_v3", "V100", "both") / printed("inception_v3", "V100", "naive"),
            vgg=printed("vgg19", "V100", "both") / printed("vgg19", "V100", "naive"),
        ),
        say(
            "both over naive, median steps: AlexNet {alexnet:.2f}, VGG-19 {vgg:.2f}, ResNet-50 {resnet:.2f}, "
            "Inception-v3 {inception:.2f}",
            alexnet=trained("alexnet", "both") / trained("alexnet", "naive"),
            vgg=trained("vgg19", "both") / trained("vgg19", "naive"),
            resnet=trained("resnet50", "both") / trained("resnet50", "naive"),
            inception=trained("inception_v3", "both") / trained("inception_v3", "naive"),
        ),
        "mural bench offload --only 'table/*'",
        Verdict.CONTRADICTED,
        "by its own table as far as parameters go; with today's torch the nets with the fewest layers gain most",
    ),
    Row(
        "CPU offloading, definition of pin_memory",
        "a DataLoader with pin_memory=True makes transfers to the GPU faster",
        say(
            "a pinned loader changes the step of naive offload from {vgg_naive:.1f} to {vgg:.1f} ms (VGG-19), from "
            "{resnet_naive:.1f} to {resnet:.1f} ms (ResNet-50)",
            vgg_naive=ms(trained("vgg19", "naive")),
            vgg=ms(trained("vgg19", "pinned")),
            resnet_naive=ms(trained("resnet50", "naive")),
            resnet=ms(trained("resnet50", "pinned")),
        ),
        "mural bench offload --only 'table/*/pinned' 'table/*/naive'",
        Verdict.NOT_COMPARABLE,
        "it pins the images, not the model that is moved: neither table shows the speed of the images alone",
    ),
    Row(
        "future work, 2",
        "overlap offload with computing, to make it cheap and to train larger models",
        say(
            "mural's offload, median step over the baseline: VGG-19 {vgg:.2f} with {vgg_peak:.2f} of the peak, "
            "ResNet-50 {resnet:.2f} with {resnet_peak:.2f}, Inception-v3 {inception:.2f} with {inception_peak:.2f}, "
            "AlexNet {alexnet:.2f} with {alexnet_peak:.2f}",
            vgg=trained("vgg19", "mural") / trained("vgg19", "baseline"),
            vgg_peak=trained("vgg19", "mural", "allocated") / trained("vgg19", "baseline", "allocated"),
            resnet=trained("resnet50", "mural") / trained("resnet50", "baseline"),
            resnet_peak=trained("resnet50", "mural", "allocated") / trained("resnet50", "baseline", "allocated"),
            inception=trained("inception_v3", "mural") / trained("inception_v3", "baseline"),
            inception_peak=trained("inception_v3", "mural", "allocated")
            / trained("inception_v3", "baseline", "allocated"),
            alexnet=trained("alexnet", "mural") / trained("alexnet", "baseline"),
            alexnet_peak=trained("alexnet", "mural", "allocated") / trained("alexnet", "baseline", "allocated"),
        ),
        "mural bench offload --only 'table/*/mural' 'table/*/baseline'",
        Verdict.BETTER,
        say(
            "it moves only what can travel unnoticed, which is little memory, and nothing of AlexNet; since then "
            "nothing of ResNet-50 either: {later:.2f}",
            later=record("offload/resnet50.json", "step", kind="measure", name="table/resnet50/mural")
            / record("offload/resnet50.json", "step", kind="measure", name="table/resnet50/baseline"),
        ),
    ),
    Row(
        "future work, 2, aim",
        "better model parallelism, by larger models on a single GPU",
        say(
            "U-Net at 2560², stages of 16 GiB: one with offload takes {one:.2f} s a step, two {two:.2f}; without it "
            "one, two and 4 stages under 1F1B run out of memory, and GEMS on 4 stages takes {gems:.2f}. One stage "
            "with offload runs at 3072², too ({large:.2f} s); without, up to 2048²",
            one=record(GPU, "step", kind="measure", name="stages/2560/1offload"),
            two=record(GPU, "step", kind="measure", name="stages/2560/2offload"),
            gems=record(GPU, "step", kind="measure", name="stages/2560/gems4"),
            large=record(GPU, "step", kind="measure", name="stages/3072/1offload"),
        ),
        "mural bench offload --only 'stages/2560/*' stages/3072/1offload stages/2048/1",
        Verdict.BETTER,
        "the document left it for later. Stages share the GPU, so their seconds do not show what several GPUs would "
        "gain",
    ),
)
