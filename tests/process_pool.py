"""Cases that several processes of the CPU run together: one start of the processes, and a result for each case.

A test module has a table of ``Case``s. :func:`run_cases` starts ``PROCESSES`` processes once. Each runs the cases in order, on
a mesh of the first ranks that a case asks for, and reports what the case raised. A test for each case then asserts that it
raised nothing. Cases run in an empty folder. After a failure the ranks no longer agree about the next collective, so the
remaining cases are reported as not run.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PROCESSES = 4
Mesh = Any  # torch.distributed.device_mesh.DeviceMesh


class Case(NamedTuple):
    """A check and the shape of the mesh that it gets: (n,) is named "tensor", (m, n) "data" and "tensor"."""

    shape: tuple[int, ...]
    check: Callable[[Mesh], None]


def run_cases(module: str, folder: Path) -> dict[str, list[str]]:
    """Runs ``CASES`` of a test module; what each rank that took part in a case raised, by the case's name."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    mp.start_processes(_work, (module, str(folder)), PROCESSES, start_method="spawn")
    reports = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(PROCESSES)]
    return {name: [report[name] for report in reports if name in report] for name in reports[0]}


def assert_passed(results: dict[str, list[str]], name: str) -> None:
    errors = [f"rank {rank}: {error}" for rank, error in enumerate(results.get(name, ["not run"])) if error]
    assert not errors, "\n".join(errors)


def _work(rank: int, module: str, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES, timeout=timedelta(seconds=60))
    cases: dict[str, Case] = importlib.import_module(module).CASES
    meshes = {shape: _make_mesh(shape) for shape in sorted({case.shape for case in cases.values()})}
    report = dict.fromkeys((name for name, case in cases.items() if rank in meshes[case.shape].mesh), "not run")
    os.chdir(folder)
    try:
        for name, case in cases.items():
            if name in report:
                report[name] = ""
                case.check(meshes[case.shape])
            # A case may read the files of another case.
            dist.barrier()
    except BaseException:
        report[name] = traceback.format_exc()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(report))
    # fully_shard keeps the group, and with it gloo's threads, alive. Where the interpreter ends before them, the process
    # sometimes aborts.
    sys.stdout.flush()
    os._exit(0)


def _make_mesh(shape: tuple[int, ...]) -> Mesh:
    from torch.distributed.device_mesh import DeviceMesh

    names = ("data", "tensor")[-len(shape) :]
    ranks = torch.arange(torch.Size(shape).numel()).view(shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names)
