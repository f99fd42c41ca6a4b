"""Environments as real launchers set them, and the placements that follow; what is half set is refused."""

from __future__ import annotations

import pytest

from mural.errors import PlanError
from mural.ranks.identity import FIRST_PORT, PORTS, Placement, resolve
from mural.ranks.launchers import expand_counts, expand_nodes

TORCHRUN = {  # torchrun --nnodes 2 --nproc-per-node 4, second machine
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "ROLE_RANK": "5",
    "MASTER_ADDR": "node001",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
OPEN_MPI = {  # mpirun -n 2 of Open MPI 5, as printed by env
    "PMIX_NAMESPACE": "prterun-vm-9128@1",
    "PMIX_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "2",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}
OPEN_MPI_TWO_MACHINES = OPEN_MPI | {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "6",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4", "PMI_FD": "9"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
SALLOC = {  # the shell of salloc, on the login machine
    "SLURM_JOB_ID": "1568029",
    "SLURM_JOBID": "1568029",
    "SLURM_JOB_NAME": "interactive",
    "SLURM_NTASKS": "12",
    "SLURM_NPROCS": "12",
    "SLURM_NNODES": "4",
    "SLURM_JOB_NODELIST": "worker[2080,5071-5072,5422]",
    "SLURM_NODELIST": "worker[2080,5071-5072,5422]",
    "SLURM_TASKS_PER_NODE": "3(x4)",
}
SBATCH = {  # a batch script: it looks like task 0, but nobody else runs
    "SLURM_JOB_ID": "200505",
    "SLURM_JOB_NAME": "test-multi-nodes",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "4",
    "SLURM_GTIDS": "0",
    "SLURM_JOB_NODELIST": "gnode[10,20,25,37]",
    "SLURM_TASKS_PER_NODE": "1(x4)",
}
INTERACTIVE_STEP = {  # the shell of salloc on the first machine (LaunchParameters=use_interactive_step)
    "SLURM_JOB_ID": "1731563",
    "SLURM_JOB_NAME": "1_sh_gpu",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_PTY_PORT": "39933",
    "SLURM_STEPID": "4294967290",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "GPU71E4",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "8",
    "SLURM_MPI_TYPE": "pmix",
    "PMIX_RANK": "0",
    "PMIX_NAMESPACE": "slurm.pmix.1731563.4294967290",
}
SRUN_PTY = {  # srun -n 4 --pty bash
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NAME": "bash",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_PTY_PORT": "39900",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "sh04-16n09",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "4",
}
SRUN_PTY_ONE = SRUN_PTY | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
SRUN = {  # srun -n 7 inside of sbatch, on two machines
    "SLURM_JOB_ID": "8652",
    "SLURM_JOB_NAME": "run.slurm",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "node[001-002]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.205.134",
}
SRUN_IN_SALLOC = SRUN | {"SLURM_JOB_NAME": "interactive"}  # what Lightning took for no job
SRUN_ONE_MACHINE = SRUN | {
    "SLURM_STEP_NODELIST": "node001",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "0",
}
MURAL = {
    "MURAL_LOCAL_STORE": "/tmp/x/store",
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "2",
    "LOCAL_WORLD_SIZE": "4",
}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4000"}

# rank, world, local rank, local world, node, address, launcher
TABLE = {
    "nothing": ({}, (0, 1, 0, 1, 0, None, "single")),
    "empty values": ({"RANK": "", "WORLD_SIZE": " "}, (0, 1, 0, 1, 0, None, "single")),
    "torchrun": (TORCHRUN, (5, 8, 1, 4, 1, "node001", "torchrun")),
    "torchrun of one": (
        TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        (0, 1, 0, 1, 1, None, "torchrun"),
    ),
    "by hand": (BY_HAND, (1, 2, 1, 2, 0, "127.0.0.1", "environment")),
    "by hand, one rank per machine": (
        BY_HAND | {"MASTER_ADDR": "trainer-0"},
        (1, 2, 0, 1, None, "trainer-0", "environment"),
    ),
    "Open MPI": (OPEN_MPI, (1, 2, 1, 2, 0, "127.0.0.1", "mpirun (Open MPI)")),
    "Open MPI, two machines": (OPEN_MPI_TWO_MACHINES, (6, 8, 2, 4, None, None, "mpirun (Open MPI)")),
    "Open MPI, two machines, MASTER_ADDR": (
        OPEN_MPI_TWO_MACHINES | {"MASTER_ADDR": "a"},
        (6, 8, 2, 4, None, "a", "mpirun (Open MPI)"),
    ),
    "MPICH": (HYDRA, (3, 4, 3, 4, 0, "127.0.0.1", "mpiexec (MPICH, Intel MPI)")),
    "MVAPICH": (MVAPICH, (1, 2, 1, 2, 0, "127.0.0.1", "mpirun (MVAPICH)")),
    "salloc": (SALLOC, (0, 1, 0, 1, 0, None, "single")),
    "sbatch": (SBATCH, (0, 1, 0, 1, 0, None, "single")),
    "salloc with an interactive step": (INTERACTIVE_STEP, (0, 1, 0, 1, 0, None, "single")),
    "srun -n 4 --pty bash": (SRUN_PTY, (0, 1, 0, 1, 0, None, "single")),
    "srun --pty bash": (SRUN_PTY_ONE, (0, 1, 0, 1, 0, None, "srun")),
    "srun": (SRUN, (5, 7, 1, 3, 1, "node001", "srun")),
    "srun in salloc": (SRUN_IN_SALLOC, (5, 7, 1, 3, 1, "node001", "srun")),
    "srun, one machine": (SRUN_ONE_MACHINE, (1, 2, 1, 2, 0, "127.0.0.1", "srun")),
    "srun with pmix": (
        SRUN | {"PMIX_RANK": "5", "PMIX_NAMESPACE": "slurm.pmix.8652.2"},
        (5, 7, 1, 3, 1, "node001", "srun"),
    ),
    "srun with pmi2": (
        SRUN | {"PMI_RANK": "5", "PMI_SIZE": "7"},
        (5, 7, 1, 3, 1, "node001", "mpiexec (MPICH, Intel MPI)"),
    ),
    "srun, MASTER_ADDR and WORLD_SIZE from the script": (
        SRUN | {"MASTER_ADDR": "ib-001", "WORLD_SIZE": "7"},
        (5, 7, 1, 3, 1, "ib-001", "srun"),
    ),
    "srun, without the tasks of each machine": (
        {name: value for name, value in SRUN.items() if "TASKS_PER_NODE" not in name},
        (5, 7, 1, 4, 1, "node001", "srun"),
    ),
    "mural": (MURAL, (2, 4, 2, 4, 0, None, "mural")),
    # one launcher inside of another
    "torchrun in srun": (SRUN | TORCHRUN, (5, 8, 1, 4, 1, "node001", "torchrun")),
    "torchrun in mpirun": (OPEN_MPI | TORCHRUN, (5, 8, 1, 4, 1, "node001", "torchrun")),
    "torchrun in a local rank": (MURAL | TORCHRUN, (5, 8, 1, 4, 1, "node001", "torchrun")),
    "mpirun whose daemons srun started": (SRUN | OPEN_MPI, (1, 2, 1, 2, 0, "127.0.0.1", "mpirun (Open MPI)")),
    "mpirun in a batch script": (SBATCH | OPEN_MPI, (1, 2, 1, 2, 0, "127.0.0.1", "mpirun (Open MPI)")),
    "local ranks in an allocation": (SALLOC | MURAL, (2, 4, 2, 4, 0, None, "mural")),
    "local ranks in an srun of one": (SRUN_PTY_ONE | MURAL, (2, 4, 2, 4, 0, None, "mural")),
    "srun, RANK from SLURM_PROCID": (
        SRUN | {"RANK": "5", "WORLD_SIZE": "7", "MASTER_ADDR": "node001", "MASTER_PORT": "9999"},
        (5, 7, 1, 3, 1, "node001", "environment"),
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_placements(name: str) -> None:
    environ, expected = TABLE[name]
    found = resolve(environ)
    place = (found.rank, found.world, found.local_rank, found.local_world, found.node, found.address, found.launcher)
    assert place == expected
    assert found.why
    assert (found.port is not None) == (found.address is not None)


REFUSED = {
    "RANK alone": ({"RANK": "0"}, "WORLD_SIZE is not"),
    "WORLD_SIZE alone": ({"WORLD_SIZE": "4"}, "RANK is not"),
    "rank beyond": (BY_HAND | {"RANK": "2"}, "RANK=2, but WORLD_SIZE=2"),
    "no number": (BY_HAND | {"RANK": "one"}, "RANK='one' is not a whole number"),
    "negative": (BY_HAND | {"RANK": "-1"}, "RANK='-1'"),
    "no address": ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT"),
    "no port": ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT"),
    "port": (BY_HAND | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
    "port no number": (BY_HAND | {"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
    "local rank": (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK"),
    "local world": (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE"),
    "half of mpirun": ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not"),
    "half of PMI": ({"PMI_RANK": "0"}, "PMI_SIZE is not"),
    "PMIx alone": ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prte-1@1"}, "PMIX_RANK=1"),
    "a step without a task": ({"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}, "SLURM_PROCID is not"),
    "a task without a step": (SBATCH | {"SLURM_PROCID": "3"}, "SLURM_STEP_ID"),
    "node list": (SRUN | {"SLURM_STEP_NODELIST": "node[1-"}, r"node\[1-"),
    "RANK set once outside of srun": (
        SRUN | {"RANK": "0", "WORLD_SIZE": "7", "MASTER_ADDR": "a", "MASTER_PORT": "1234"},
        "unset RANK and WORLD_SIZE",
    ),
    "RANK set once outside of mpirun": (OPEN_MPI | BY_HAND | {"RANK": "0"}, "unset RANK and WORLD_SIZE"),
    "another WORLD_SIZE": (SRUN | {"WORLD_SIZE": "4"}, "unset WORLD_SIZE"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_half_set_variables_are_refused(name: str) -> None:
    environ, words = REFUSED[name]
    with pytest.raises(PlanError, match=words):
        resolve(environ)


def test_why_names_what_was_ignored() -> None:
    why = " ".join(resolve(SRUN | TORCHRUN).why)
    assert "RANK=5" in why
    assert "ignored: srun: SLURM_PROCID=5, SLURM_STEP_NUM_TASKS=7 in step 2 of job 8652" in why
    assert "allocation" in " ".join(resolve(SALLOC).why)
    assert "srun --pty" in " ".join(resolve(SRUN_PTY).why)
    assert "SLURM_STEP_ID=4294967290" in " ".join(resolve(INTERACTIVE_STEP).why)


def test_ranks_of_a_job_meet_at_one_port_and_jobs_at_several() -> None:
    ports = set[int]()
    for job in range(40):
        found = {resolve(SRUN | {"SLURM_JOB_ID": str(job), "SLURM_PROCID": str(rank)}).port for rank in (0, 3, 6)}
        assert len(found) == 1
        ports |= {port for port in found if port is not None}
    assert len(ports) > 35
    assert all(FIRST_PORT <= port < FIRST_PORT + PORTS for port in ports)
    assert resolve(OPEN_MPI).port != resolve(OPEN_MPI | {"PMIX_NAMESPACE": "prterun-vm-9129@1"}).port


@pytest.mark.parametrize(
    ("environ", "one"),
    [
        (OPEN_MPI, True),
        (OPEN_MPI_TWO_MACHINES, False),
        (SRUN, False),
        (SRUN_ONE_MACHINE, True),
        (MURAL, True),
        (BY_HAND, True),
        (BY_HAND | {"MASTER_ADDR": "other", "LOCAL_RANK": "1"}, False),
        ({}, True),
    ],
)
def test_one_machine(environ: dict[str, str], one: bool) -> None:
    assert resolve(environ).one_machine is one


def test_words() -> None:
    assert str(Placement()) == "one process (single)"
    assert str(resolve(TORCHRUN)) == "rank 5 of 8, local rank 1 of 4 (torchrun; rank 0 at node001:29400)"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node001", ["node001"]),
        ("a,b", ["a", "b"]),
        ("node[001-004,7]", ["node001", "node002", "node003", "node004", "node7"]),
        ("n[9-11],m[1,3]-x,z", ["n9", "n10", "n11", "m1-x", "m3-x", "z"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
        ("", []),
    ],
)
def test_node_lists(text: str, names: list[str]) -> None:
    assert list(expand_nodes(text)) == names


@pytest.mark.parametrize("text", ["n[1-x]", "n[1", "n1]", "n[]"])
def test_node_lists_that_are_none(text: str) -> None:
    with pytest.raises(PlanError, match="MASTER_ADDR"):
        expand_nodes(text)


def test_counts() -> None:
    assert expand_counts("2(x3),1") == (2, 2, 2, 1)
    with pytest.raises(PlanError, match="SLURM_STEP_TASKS_PER_NODE"):
        expand_counts("two")
