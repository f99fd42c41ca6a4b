"""The MPI library of this process: started at the first call, and what it reports about itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mural.errors import DISTRIBUTION, PlanError

NAME = "mural_mpi"
"""The name of the backend in torch.distributed; users of mural say "mpi"."""
REMEDY = f'install both with pip install "{DISTRIBUTION}[mpi]", or mpi4py next to the cluster\'s MPI'
PIPELINE = ("OMPI_MCA_pml_ob1_send_pipeline_depth", "64")
"""By default Open MPI moves three pieces of a large message per call, and ranks here do not call often."""
LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "MPI_LOCAL", "HYDRA_", "SLURM_")
DESCRIBE_SECONDS = 60.0


@dataclass(frozen=True)
class LibraryFacts:
    """What an MPI library reports about itself."""

    version: str
    threads: str
    cuda: bool

    def __str__(self) -> str:
        pointers = "takes CUDA pointers" if self.cuda else "takes no CUDA pointers: GPU tensors are staged"
        return f"{self.version}; threads {self.threads}; {pointers}"


@cache
def library() -> Any:
    """mpi4py's MPI module; the first call starts MPI in this process."""
    module, trouble = loaded()
    if module is None:
        raise PlanError(f"messages over MPI need mpi4py and an MPI library, but {trouble}: {REMEDY}")
    if module.Is_finalized():
        raise PlanError(
            "MPI was finalized in this process and cannot start again: leave that to the end of the program"
        )
    if not module.Is_initialized():
        os.environ.setdefault(*PIPELINE)
        module.Init_thread(module.THREAD_MULTIPLE)
    if module.Query_thread() < module.THREAD_SERIALIZED:
        raise PlanError(
            f"this MPI gives the thread level {levels(module)[module.Query_thread()]}, but backward passes and the "
            "alarm run in threads of their own: start it with MPI_THREAD_SERIALIZED or more (mpi4py.rc.thread_level)"
        )
    return module


def loaded() -> tuple[Any, str]:
    """mpi4py's MPI module, not started; or None and the reason why it cannot be loaded."""
    try:
        import mpi4py  # noqa: PLC0415
    except ImportError:
        return None, "mpi4py is not installed"
    if "mpi4py.MPI" not in sys.modules:
        # Loading must not start MPI: a program that only asks what is installed would become a rank.
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    try:
        from mpi4py import MPI  # noqa: PLC0415
    except (ImportError, RuntimeError) as error:
        return None, f"mpi4py finds no MPI library ({str(error).splitlines()[0]})"
    return MPI, ""


def available() -> str | None:
    """None if messages can travel over MPI, otherwise what is missing. Does not start MPI."""
    module, trouble = loaded()
    return f"{trouble}: {REMEDY}" if module is None else None


def describe() -> str:
    """The library, its thread level and whether it takes CUDA pointers, as text.

    If MPI does not run in this process, another process starts it and reports: an MPI that cannot start ends its
    process.
    """
    module, trouble = loaded()
    if module is None:
        return f"no MPI: {trouble}"
    if module.Is_initialized() and not module.Is_finalized():
        return str(facts(module))
    bare = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
    code = "from mural.comm.mpi.installation import facts, library; print(facts(library()))"
    try:
        answer = subprocess.run(
            [sys.executable, "-c", code],
            env=bare,
            capture_output=True,
            text=True,
            timeout=DESCRIBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{named(module)}; it did not start within {DESCRIBE_SECONDS:.0f} s"
    if answer.returncode:
        lines = (answer.stderr or answer.stdout).strip().splitlines() or ["no message"]
        return f"{named(module)}; it does not start: {lines[-1]}"
    return answer.stdout.strip().splitlines()[-1]


def facts(module: Any) -> LibraryFacts:
    """What the library that runs in this process reports."""
    return LibraryFacts(named(module), levels(module)[module.Query_thread()], takes_cuda_pointers())


def named(module: Any) -> str:
    """The library's name and version on one line."""
    return str(module.Get_library_version()).split(",")[0].splitlines()[0].strip("\x00 ")


def levels(module: Any) -> dict[int, str]:
    """The names of the thread levels."""
    return {getattr(module, f"THREAD_{n}"): n.lower() for n in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}


@cache
def takes_cuda_pointers() -> bool:
    """Whether the library reports that it takes pointers to GPU memory.

    Open MPI and MPICH each have a call for this. A library with neither counts as one that does not: without CUDA
    support, a pointer to GPU memory is a segmentation fault.
    """
    for path in loaded_libraries(Path("/proc/self/maps")):
        with contextlib.suppress(OSError, AttributeError):
            found: Any = ctypes.CDLL(path)
            if hasattr(found, "MPIX_Query_cuda_support"):
                return bool(found.MPIX_Query_cuda_support())
            answer = ctypes.c_int(0)
            cuda = 0  # MPIX_GPU_SUPPORT_CUDA
            if found.MPIX_GPU_query_support(cuda, ctypes.byref(answer)) == 0:
                return bool(answer.value)
    return False


def loaded_libraries(maps: Path) -> list[str]:
    """The files of the MPI libraries that this process has loaded: their names are not visible to the whole process."""
    if not maps.exists():
        return []
    files = {line.split(maxsplit=5)[-1].strip() for line in maps.read_text().splitlines() if "/" in line}
    return sorted(file for file in files if Path(file).name.startswith(("libmpi", "libmpich")))
