"""Features and backends: which are there, and the command that brings a missing one."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from torch.cuda import nccl as nccl_of_torch

from mural.doctor.findings import Finding, found
from mural.errors import DISTRIBUTION
from mural.ranks.spawn import equipment

SECONDS = 30.0


@dataclass(frozen=True)
class Feature:
    """Something that needs a package that mural does not depend on."""

    name: str
    module: str
    package: str
    extra: str


FEATURES = (
    Feature("NIfTI files", "nibabel", "nibabel", "nifti"),
    Feature("whole slides", "openslide", "openslide-python", "slides"),
    Feature("GeoTIFF files", "rasterio", "rasterio", "geo"),
    Feature("MPI backend", "mpi4py", "mpi4py", "mpi"),
    Feature("TensorBoard", "tensorboard", "tensorboard", "tensorboard"),
    Feature("sample images", "skimage", "scikit-image", "samples"),
    Feature("models of torchvision", "torchvision", "torchvision", "models"),
    Feature("models of timm", "timm", "timm", "models"),
    Feature("masked federations", "cryptography", "cryptography", "federated"),
    Feature("figures of benchmarks", "matplotlib", "matplotlib", "bench"),
)

OTHER_BUILD = (
    "torchvision {} was built for another torch than {}: its operations are missing, and timm and "
    "segmentation_models_pytorch may not load. Install both from one index: pip install torch torchvision"
)
LAUNCHERS = ("torchrun", "mpirun", "srun")

MPI_PROBE = """
import ctypes, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
def cuda():
    for name in (None, "libmpi.so", "libmpi.so.40", "libmpi.so.12", MPI.__file__):
        try:
            return "yes" if ctypes.CDLL(name).MPIX_Query_cuda_support() else "no"
        except (OSError, AttributeError):
            pass
    return "it does not say"
print(MPI.Get_library_version().split(chr(10))[0].split(", package")[0].strip(chr(0)), cuda(), sep="|")
"""


def features() -> tuple[Finding, ...]:
    """Each optional feature: the version of what it needs, or how to get it."""
    return tuple(item for feature in FEATURES for item in found(feature.name, lambda f=feature: optional(f)))


def optional(feature: Feature) -> Finding:
    """Whether a feature's package can be imported."""
    install = f'pip install "{DISTRIBUTION}[{feature.extra}]"'
    try:
        importlib.import_module(feature.module)
    except ModuleNotFoundError:
        return Finding(feature.name, f"missing: {install}", "missing")
    except (ImportError, OSError) as error:
        return Finding(feature.name, f"{feature.package} does not load ({error}): {install}", "failed")
    if feature.module == "torchvision" and not has_operations():
        return Finding(feature.name, OTHER_BUILD.format(version("torchvision"), torch.__version__), "failed")
    return Finding(feature.name, f"{feature.package} {version(feature.package)}")


def has_operations() -> bool:
    """Whether torchvision's own operations are there: its wheel was built for this torch."""
    return importlib.import_module("torchvision.extension")._has_ops()


def backends() -> tuple[Finding, ...]:
    """How messages can travel, and who can start ranks."""
    return (
        *found("local ranks", chosen),
        *found(
            "gloo", lambda: Finding("gloo", "yes") if dist.is_gloo_available() else Finding("gloo", "no", "missing")
        ),
        *found("NCCL", nccl),
        *found("MPI", mpi),
        *(item for name in LAUNCHERS for item in found(name, lambda name=name: launcher(name))),
    )


def chosen() -> Finding:
    """Which backend local ranks would take here by themselves."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backend, _, words = equipment(max(gpus, 2), "auto")
    more = f" up to {gpus} ranks; more share the GPUs over gloo" if gpus > 1 else ""
    return Finding("local ranks", f"over {backend}, {words}{more}")


def nccl() -> Finding:
    """NCCL's version, if torch has it and a GPU is there."""
    if not dist.is_nccl_available():
        return Finding("NCCL", "not built into this torch", "missing")
    numbers = ".".join(str(n) for n in nccl_of_torch.version())
    return Finding("NCCL", numbers if torch.cuda.is_available() else f"{numbers}, but no GPU is there")


def mpi() -> Finding:
    """The MPI library that mpi4py uses, and whether it takes device pointers; asked in a process of its own."""
    done = subprocess.run([sys.executable, "-c", MPI_PROBE], capture_output=True, text=True, timeout=SECONDS)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return Finding("MPI", f'{lines[-1]}: pip install "{DISTRIBUTION}[mpi]"', "missing")
    library, cuda = done.stdout.strip().split("|")
    return Finding("MPI", f"{library}; takes device pointers: {cuda}")


def launcher(name: str) -> Finding:
    """Where a launcher is: next to this Python, or on the path."""
    beside = Path(sys.executable).with_name(name)
    path = str(beside) if beside.exists() else shutil.which(name)
    return Finding(name, path) if path else Finding(name, "not found", "missing")
