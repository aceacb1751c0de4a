"""A pool of processes that run functions together on gloo: it starts once for a file of tests."""

from __future__ import annotations

import datetime
import os
import queue
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PROCESSES = 4


class Pool:
    """Processes that have joined one group, and groups of the first 1, 2, 3 and 4 of them."""

    def __init__(self, folder: Path, processes: int = PROCESSES) -> None:
        self._is_broken = False
        context = mp.get_context("spawn")
        self._commands = [context.Queue() for _ in range(processes)]
        self._results = context.Queue()
        arguments = (str(folder / "store"), self._commands, self._results)
        self._processes = mp.start_processes(_serve, arguments, processes, join=False, start_method="spawn")

    def run(self, function: Callable[..., None], size: int, *args: Any, seconds: float = 60) -> list[str | None]:
        """Runs ``function(group, rank, *args)`` on the first ``size`` processes; returns each one's traceback or None."""
        assert not self._is_broken, "the pool has lost a process in an earlier test"
        for commands in self._commands[:size]:
            commands.put((function, size, args))
        outcomes: dict[int, str | None] = {}
        try:
            while len(outcomes) < size:
                outcomes.update([self._results.get(timeout=seconds)])
        except queue.Empty:
            self._is_broken = True
            raise AssertionError(f"{function.__name__}: no result within {seconds} s; results of others: {outcomes}") from None
        return [outcomes[rank] for rank in range(size)]

    def check(self, function: Callable[..., None], size: int, *args: Any) -> None:
        """Runs a function on ``size`` processes and fails with the tracebacks of those that raised."""
        outcomes = self.run(function, size, *args)
        failures = [f"rank {rank}:\n{outcome}" for rank, outcome in enumerate(outcomes) if outcome is not None]
        assert not failures, "\n".join(failures)

    def close(self) -> None:
        for commands in self._commands:
            commands.put(None)
        for process in self._processes.processes:
            process.join(0 if self._is_broken else 10)
            if process.is_alive():
                process.kill()


def _serve(rank: int, store: str, commands: list[Any], results: Any) -> None:
    torch.set_num_threads(1)
    processes = len(commands)
    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes, timeout=timeout)
    groups = {size: dist.new_group([*range(size)]) for size in range(1, processes + 1)}
    for function, size, args in iter(commands[rank].get, None):
        outcome = None
        torch.manual_seed(0)
        try:
            function(groups[size], rank, *args)
        except Exception:
            outcome = traceback.format_exc()
        results.put((rank, outcome))
    results.close()
    results.join_thread()
    sys.stdout.flush()
    # Compiled code and sharded modules keep the group, and with it gloo's threads, alive.
    os._exit(0)


class Collectives(TorchDispatchMode):
    """Records the name of each collective and the bytes that this rank sends in it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")
        if name[0] in ("_c10d_functional", "c10d") and not name[2].startswith("wait"):
            tensors = [value for value in args if isinstance(value, Tensor)]
            self.sent.append((name[2], sum(value.numel() * value.element_size() for value in tensors)))
        return func(*args, **(kwargs or {}))


def spans(lengths: tuple[int, ...]) -> Iterator[slice]:
    begin = 0
    for length in lengths:
        yield slice(begin, begin + length)
        begin += length
