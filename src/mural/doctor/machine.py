"""The machine: versions, processors, memory, GPUs, and what limits a process on it."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch

from mural.checkpoint.manifest import mural_version
from mural.doctor.findings import Finding, found
from mural.memory.machine_memory import machine_memory
from mural.ranks.spawn import processors
from mural.report.words import bytes_in_words

SMALL_SHARED_MEMORY, FEW_FILES = 2**30, 1024


def versions() -> tuple[Finding, ...]:
    """The versions that a bug report needs."""
    return (
        *found("mural", mural_version),
        *found("Python", lambda: f"{platform.python_version()} on {platform.system()} {platform.release()}"),
        *found("torch", lambda: f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}"),
        *found("numpy", lambda: version("numpy")),
    )


def machine() -> tuple[Finding, ...]:
    """Processors, memory, name, and limits that are known to hurt."""
    return (
        *found("processors", processor),
        *found("memory", memory),
        *found("shared memory", shared_memory),
        *found("open files", open_files),
        *found("host name", host_name),
        *found("GPUs", gpus),
    )


def processor() -> str:
    """The kind of processor, and how many this process may use."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = models[0].split(":", 1)[1].strip() if models else platform.machine()
    return f"{processors()} of {os.cpu_count()} ({model})"


def memory() -> str:
    """How much memory the machine has, is free, and a container allows."""
    found_ = machine_memory()
    allowed = "" if found_.allowed is None else f", of which the container may use {bytes_in_words(found_.allowed)}"
    return f"{bytes_in_words(found_.total)}, {bytes_in_words(found_.free)} free{allowed}"


def shared_memory() -> Finding:
    """The room in /dev/shm, through which processes of a machine hand tensors to each other."""
    total = shutil.disk_usage("/dev/shm").total
    if total < SMALL_SHARED_MEMORY:
        return Finding(
            "shared memory", f"{bytes_in_words(total)} is little: in a container, raise it with --shm-size", "missing"
        )
    return Finding("shared memory", bytes_in_words(total))


def open_files() -> Finding:
    """How many files and connections a process may open."""
    import resource  # noqa: PLC0415  (Windows has none)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft <= FEW_FILES and (hard == resource.RLIM_INFINITY or hard > soft)
    advice = f": many ranks or files need more, ulimit -n {4 * FEW_FILES}" if few else ""
    return Finding("open files", f"{soft}{advice}", "missing" if few else "found")


def host_name() -> Finding:
    """The machine's name, and where other machines would look for it."""
    name = socket.gethostname()
    try:
        return Finding("host name", f"{name} ({socket.gethostbyname(name)})")
    except OSError as error:
        return Finding(
            "host name", f"{name} does not resolve ({error}): set GLOO_SOCKET_IFNAME for runs on several", "failed"
        )


def gpus() -> Iterator[Finding]:
    """Each GPU with its memory, and whether others use it now."""
    if not torch.cuda.is_available():
        yield Finding("GPUs", "torch finds none" if torch.version.cuda else "none: this torch was built for the CPU")
        return
    yield Finding("GPUs", str(torch.cuda.device_count()))
    for index in range(torch.cuda.device_count()):
        yield from found(f"GPU {index}", lambda index=index: gpu(index))


def gpu(index: int) -> str:
    """A GPU in words."""
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    mine = torch.cuda.memory_reserved(index)
    # The context of this process takes some hundred MiB of what is not free.
    busy = f", {bytes_in_words(total - free - mine)} in use" if total - free - mine > 2**30 else ""
    return f"{properties.name}, {bytes_in_words(total)}{busy}, compute capability {properties.major}.{properties.minor}"
