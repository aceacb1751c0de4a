"""Processes that run checks together on a device mesh: on CPUs with gloo, or on one GPU each with NCCL.

The fixture ``processes`` starts them for the first test that needs them, and they serve all others. A test calls
``processes.check(place, function, *args)``: the ranks of ``place`` run ``function(mesh, *args)``, and the test fails with the
tracebacks of those that raised. Their current folder is empty at first. After a failure the ranks no longer agree about the
next collective, so the next test starts new processes.
"""

from __future__ import annotations

import datetime
import importlib
import math
import multiprocessing
import multiprocessing.forkserver
import os
import queue
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Mesh = Any  # torch.distributed.device_mesh.DeviceMesh
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {"cpu": ((1,), (2,), (3,), (4,), (2, 2)), "cuda": ((1,), (2,))}
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
SECONDS = 120  # of a check
TIMEOUT = datetime.timedelta(seconds=30)  # of a collective
# A server imports these once, and the processes without CUDA are forks of it: imports take each process seconds.
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.utils.cpp_extension",
    "mpmath",
    "pytest",
    "ssm_kernels.distributed",
    "ssm_kernels.models",
)
START_METHODS = {"cpu": "forkserver", "cuda": "spawn"}  # a fork of a process that has asked for GPUs cannot use them


class Place(NamedTuple):
    """The mesh that a check gets: (n,) is named "model", (m, n) "data" and "model"."""

    shape: tuple[int, ...]
    device: str = "cpu"

    @property
    def ranks(self) -> int:
        return math.prod(self.shape)


TWO_GPUS = Place((2,), "cuda")


def param(place: Place, *values: Any, id: str = "", exhaustive: bool = False) -> Any:
    """Parameters of a test: ``values`` and then the place, or the place alone."""
    ranks = "x".join(map(str, place.shape)) + (" GPUs" if place.device == "cuda" else "")
    marks = [pytest.mark.cuda] if place.device == "cuda" else []
    marks += [pytest.mark.exhaustive] if exhaustive else []
    return pytest.param(*values, place, id=f"{id}-{ranks}" if id else ranks, marks=marks)


def why_not(device: str) -> str | None:
    """The reason why no processes can run on this kind of device here; None if they can."""
    if not dist.is_available():
        return "needs torch.distributed"
    if device == "cpu":
        return None if dist.is_gloo_available() else "needs torch.distributed with gloo"
    if not dist.is_nccl_available():
        return "needs torch.distributed with NCCL"
    needed, found = max(map(math.prod, SHAPES["cuda"])), torch.cuda.device_count()
    return None if found >= needed else f"needs {needed} CUDA GPUs, found {found}"


def start_fork_server() -> None:
    """Starts the server of forks, which imports what they need.

    It sees no GPUs: an import asks for them, and CUDA fails in forks of a process that has asked.
    """
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible


def start(function: Callable[..., None], args: tuple[Any, ...], count: int, device: str = "cpu", daemon: bool = False) -> Any:
    """Starts processes that run ``function(rank, *args)``."""
    method = START_METHODS[device]
    if method == "forkserver":
        start_fork_server()
    return mp.start_processes(function, args, count, join=False, daemon=daemon, start_method=method).processes


class Processes:
    """The processes of each kind of device, started when they are first needed."""

    def __init__(self, make_folder: Callable[[], Path]) -> None:
        self._make_folder = make_folder
        self._pools: dict[str, _Pool] = {}

    def check(self, place: Place, function: Callable[..., None], *args: Any) -> None:
        """Runs a function of a test module on the ranks of ``place``; skips the test where there are no such devices."""
        reason = why_not(place.device)
        if reason is not None:
            pytest.skip(reason)
        if place.device not in self._pools:
            self._pools[place.device] = _Pool(place.device, self._make_folder())
        outcomes = self._pools[place.device].run(function, place.shape, args)
        failures = [f"rank {rank}:\n{outcome}" for rank, outcome in enumerate(outcomes) if outcome is not None]
        if failures:
            self._pools.pop(place.device).close()
        assert not failures, "\n".join(failures)

    def folder(self, device: str) -> Path | None:
        """The folder of the processes that run now."""
        return self._pools[device].folder if device in self._pools else None

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


class _Pool:
    def __init__(self, device: str, folder: Path) -> None:
        self.folder = folder
        count = max(map(math.prod, SHAPES[device]))
        context = mp.get_context(START_METHODS[device])
        self._commands = [context.Queue() for _ in range(count)]
        self._results = context.Queue()
        arguments = (device, str(folder), self._commands, self._results)
        self._processes = start(_serve, arguments, count, device=device, daemon=True)

    def run(self, function: Callable[..., None], shape: tuple[int, ...], args: Sequence[Any]) -> list[str | None]:
        """The traceback of each rank, None for those that raised nothing."""
        ranks = math.prod(shape)
        for commands in self._commands[:ranks]:
            commands.put((function.__module__, function.__qualname__, shape, args))
        outcomes: dict[int, str | None] = {}
        deadline = time.monotonic() + SECONDS
        while not outcomes.keys() >= set(range(ranks)):
            try:
                outcomes.update([self._results.get(timeout=1)])
            except queue.Empty:
                codes = [process.exitcode for process in self._processes]
                if time.monotonic() > deadline or any(code is not None for code in codes):
                    missing = f"no result within {SECONDS} s; exit codes of the processes: {codes}"
                    return [outcomes.get(rank, missing) for rank in range(ranks)]
        return [outcomes[rank] for rank in range(ranks)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()


def _serve(rank: int, device: str, folder: str, commands: list[Any], results: Any) -> None:
    try:
        meshes = _make_meshes(rank, device, folder, len(commands))
    except BaseException:
        results.put((rank, traceback.format_exc()))
        raise
    os.chdir(folder)
    while True:
        module, name, shape, args = commands[rank].get()
        outcome = None
        torch.manual_seed(0)
        try:
            getattr(importlib.import_module(module), name)(meshes[shape], *args)
        except BaseException:
            outcome = traceback.format_exc()
        sys.stdout.flush()
        results.put((rank, outcome))


def _make_meshes(rank: int, device: str, folder: str, count: int) -> dict[tuple[int, ...], Mesh]:
    from torch.distributed.device_mesh import DeviceMesh

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = f"file://{folder}/store"
    dist.init_process_group(BACKENDS[device], init_method=store, rank=rank, world_size=count, timeout=TIMEOUT)
    return {
        shape: DeviceMesh(device, torch.arange(math.prod(shape)).view(shape), mesh_dim_names=("data", "model")[-len(shape) :])
        for shape in SHAPES[device]
    }
