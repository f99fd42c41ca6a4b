"""Document 004: the demerits of model parallelism, the hybrid, and what it concludes."""

from __future__ import annotations

import statistics

from documents.lookup import Field, Made, Number, Printed, record
from documents.row import Row, Verdict, say
from documents.traffic_004 import TRAFFIC, sent
from documents.training_004 import BATCHES, CPU, on_cpu, on_gpu, printed, trained


def r_squared(*seconds: Number) -> Made:
    """How linear seconds are in the batch: r² of the first batches."""
    return Made(lambda *found: statistics.correlation(BATCHES[: len(found)], found) ** 2, seconds)


def gain(batch: int) -> Made:
    """The CPU's seconds of an iteration over the GPU's, data parallelism on 2 ranks, width 32."""
    cpu = trained("cpu", "data", 2, batch, 50, 32, "seconds") / 50
    return cpu / (on_gpu("data", 2, batch, "seconds") / 400)


def early_loss(file: str, way: str) -> Field:
    """The loss after 100 of 400 iterations on 4 CPU ranks, batch 200, before rounding has grown."""
    about = {"kind": "training", "way": way, "ranks": 4, "batch": 200, "iterations": 400, "width": 8}
    return Field(f"hybrid/{file}.json", ("records", about, "losses", 0))


def over_mpi(way: str) -> Field:
    """The accuracy at the end of the same over MPI."""
    return record("hybrid/mpi-sixteen.json", "accuracy", kind="training", way=way, ranks=4, batch=200, iterations=400)


CONCLUSIONS = (
    Row(
        "demerits of model parallelism, 1",
        "no fault tolerance: if a node fails, the cluster cannot go on",
        "the others end with an error that names the node, and the run goes on from its last checkpoint, under any "
        "plan",
        "pytest tests/train/test_faults.py tests/engine/test_one_rank_fails.py",
        Verdict.BETTER,
        "by restart; no plan goes on without the node's ranks",
    ),
    Row(
        "demerits, 2",
        "a burden on programmers, which grows with the model",
        "the model is not changed: `channel = 4` in a plan",
        "pytest tests/engine/test_channel_steps.py",
        Verdict.BETTER,
    ),
    Row(
        "demerits, 3",
        "frequent communication costs productivity",
        say(
            "400 iterations on 4 ranks, batch 200: data {cpu_data:.1f} s, model {cpu:.1f} s on 2 CPU cores; "
            "{cuda_data:.1f} and {cuda:.1f} s on one H200",
            cpu_data=trained("cpu", "data", 4, 200, 400, 8, "seconds"),
            cpu=trained("cpu", "model", 4, 200, 400, 8, "seconds"),
            cuda_data=on_gpu("data", 4, 200, "seconds"),
            cuda=on_gpu("model", 4, 200, "seconds"),
        ),
        "mural bench hybrid --parts training",
        Verdict.REPRODUCED,
    ),
    Row(
        "hybrid model; shortcomings, 2",
        "convolutions data-parallel, linear layers model-parallel: proposed, not built",
        say(
            "LeNet-5, 4 ranks, 8 images: {hybrid:,.0f} values a step, data {data:,.0f}, model {model:,.0f}; 400 "
            "iterations on 4 GPU ranks {seconds:.1f} s, data {data_seconds:.1f} s",
            hybrid=sent("lenet5", "hybrid", "values"),
            data=sent("lenet5", "data", "values"),
            model=sent("lenet5", "model", "values"),
            seconds=on_gpu("hybrid", 4, 200, "seconds"),
            data_seconds=on_gpu("data", 4, 200, "seconds"),
        ),
        TRAFFIC,
        Verdict.BETTER,
        "it sends least; on one machine data parallelism is still faster",
    ),
    Row(
        "shortcomings, 1",
        "model parallelism over MPI could not be built",
        "data, channel and hybrid plans, and stages, train over MPI as one device does",
        "pytest tests/comm/test_mpi.py tests/pipeline/test_stage_transports.py",
        Verdict.BETTER,
    ),
    Row(
        "to be added, 1 and 2",
        "verified results of data and model parallelism over MPI",
        say(
            "4 CPU ranks, batch 200: the loss after 100 of 400 iterations is {data:.3f} for data, {model:.3f} for "
            "model and {hybrid:.3f} for hybrid parallelism over MPI, {gloo_data:.3f}, {gloo_model:.3f} and "
            "{gloo_hybrid:.3f} over gloo; accuracy over MPI {data_right:.1%}, {model_right:.1%} and {hybrid_right:.1%}",
            data=early_loss("mpi-sixteen", "data"),
            model=early_loss("mpi-sixteen", "model"),
            hybrid=early_loss("mpi-sixteen", "hybrid"),
            gloo_data=early_loss("training-cpu", "data"),
            gloo_model=early_loss("training-cpu", "model"),
            gloo_hybrid=early_loss("training-cpu", "hybrid"),
            data_right=over_mpi("data"),
            model_right=over_mpi("model"),
            hybrid_right=over_mpi("hybrid"),
        ),
        "mpirun -n 4 python benchmarks/hybrid/over_mpi.py cpu mpi-sixteen.jsonl",
        Verdict.BETTER,
        "the document lists them as missing. In float32, rounding grows to several points of accuracy on the way; in "
        "float64 all ways are the same",
    ),
    Row(
        "conclusion 1",
        say(
            "30 times faster on GPUs; its tables: {ten:.1f} times at batch 10, {hundred:.1f} at 100, {most:.1f} at 200",
            ten=Printed("hybrid", lambda module: module.gains()[10]),
            hundred=Printed("hybrid", lambda module: module.gains()[100]),
            most=Printed("hybrid", lambda module: module.gains()[200]),
        ),
        say(
            "two ranks on an H200 over two CPU threads, an iteration of width 32: {ten:.1f} times at batch 10, "
            "{two:.1f} at 200, {most:.1f} at 800",
            ten=gain(10),
            two=gain(200),
            most=gain(800),
        ),
        "mural bench hybrid --parts training --width 32",
        Verdict.CONTRADICTED,
        "by its own tables; ours depends on the batch, too",
    ),
    Row(
        "conclusion 2",
        "accuracy grows with the batch up to a point, then «a drop in efficiency»; on its GPU it grows up to batch 800",
        say(
            "CPU, 4,000 iterations: {b10:.1%} at batch 10, {b50:.1%} at 50, {b100:.1%} at 100, {b200:.1%} at 200, "
            "{b400:.1%} at 400, {b800:.1%} at 800",
            **{f"b{batch}": on_cpu(batch, "accuracy") for batch in BATCHES},
        ),
        CPU,
        Verdict.REPRODUCED,
        "it saturates; a drop is not to be seen",
    ),
    Row(
        "conclusion 3",
        say(
            "time is linear in the batch; r² of its tables {gpu:.4f} (GPU) and {cpu:.4f} (CPU)",
            gpu=r_squared(*(printed("ROWS", i, "seconds") for i in range(6))),
            cpu=r_squared(*(printed("ROWS", 6 + i, "seconds") for i in range(4))),
        ),
        say(
            "r² {cpu:.4f} on the CPU (4,000 iterations); on the H200 batch 800 takes {gpu:.2f} times as long as batch "
            "10",
            cpu=r_squared(*(on_cpu(batch, "seconds") for batch in BATCHES)),
            gpu=on_gpu("data", 2, 800, "seconds") / on_gpu("data", 2, 10, "seconds"),
        ),
        CPU,
        Verdict.REPRODUCED,
        "on the CPU; a modern GPU is not full at these batches",
    ),
)
