"""What is checked on the ranks of one mpirun: each function runs on all of them, in this order.

    mpirun -n 4 python mpi_checks.py FOLDER fast | slow | plans

Each rank writes into the folder, as JSON, what every check raised, or "". With MPI_CHECKS_DEVICE=cuda the tensors lie
on a GPU.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import mpi_collectives
import mpi_groups
import mpi_messages
import mpi_models
import mpi_plans
import torch
import torch.distributed as dist
from mpi_values import DEVICE, rank

from mural.comm import mpi

PLANS: tuple[Callable[[], None], ...] = (
    mpi_plans.data_channel_and_hybrid_plans_train_as_one_device,
    mpi_plans.gradients_added_up_in_every_way_train_as_one_device,
    mpi_plans.a_master_trains_as_one_device,
)
CHECKS: tuple[Callable[[], None], ...] = (
    mpi_collectives.all_reduce_sums_in_every_type,
    mpi_collectives.all_reduce_by_every_operation,
    mpi_collectives.all_reduce_of_truth_values_and_complex_numbers,
    mpi_collectives.half_precision_is_added_in_float32,
    mpi_collectives.every_rank_gets_the_same_bits,
    mpi_collectives.broadcast_and_reduce_with_every_root,
    mpi_collectives.gathers_in_every_type,
    mpi_collectives.scatters_in_every_type,
    mpi_collectives.all_to_all_with_equal_and_uneven_parts,
    mpi_messages.messages_arrive_in_their_order,
    mpi_messages.batches_blocking_calls_and_any_source,
    mpi_messages.tensors_with_gaps_travel,
    mpi_messages.large_messages_travel_in_parts,
    mpi_collectives.objects_travel,
    mpi_groups.groups_of_some_ranks,
    mpi_groups.a_gloo_group_lives_beside,
    mpi_groups.a_wait_without_an_answer_ends,
    mpi_groups.an_abort_ends_a_wait,
    mpi_messages.sizes_that_differ_are_noticed,
    mpi_groups.threads_may_call_at_once,
    mpi_messages.operations_move_on_while_nobody_waits,
    mpi_messages.futures_complete_by_themselves,
    mpi_messages.buffers_outlive_their_callers,
    mpi_models.the_law_holds,
    mpi_models.nothing_relies_on_buffers,
    mpi_models.training_gives_the_weights_of_one_device,
    *PLANS,
    mpi_models.a_lone_error_reaches_the_others,
)


ON_HOST = (
    *PLANS,
    mpi_models.the_law_holds,
    mpi_models.nothing_relies_on_buffers,
    mpi_models.training_gives_the_weights_of_one_device,
    mpi_models.ddp_runs_over_it,
    mpi_models.a_lone_error_reaches_the_others,
)
"""Those that bring their tensors to the device themselves."""
SLOW: tuple[Callable[[], None], ...] = (mpi_models.ddp_runs_over_it,)


def main(folder: Path, checks: tuple[Callable[[], None], ...]) -> None:
    torch.set_num_threads(1)
    assert "mpi4py" not in sys.modules, "importing mural loads mpi4py"
    if DEVICE == "cuda":
        torch.cuda.set_per_process_memory_fraction(16 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    mpi.register()
    dist.init_process_group(mpi.NAME, init_method=mpi.METHOD, timeout=timedelta(seconds=60))
    found: dict[str, str] = {}
    for check in checks:
        begun = time.monotonic()
        try:
            with torch.device(DEVICE if check not in ON_HOST else "cpu"):
                check()
            found[check.__name__] = ""
        except BaseException:
            found[check.__name__] = traceback.format_exc()
        dist.barrier()  # messages of the next check shall not meet those of this one
        print(f"{rank()} {check.__name__} {time.monotonic() - begun:.2f} s", flush=True)
        (folder / f"{rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), {"fast": CHECKS, "slow": SLOW, "plans": PLANS}[sys.argv[2]])
