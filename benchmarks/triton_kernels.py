"""Triton kernels of the peers: their tuning, and their compilation by several processes before anything is measured.

Triton compiles a kernel when it is first called: for the tensors' dtypes, for which of its sizes and strides are 1 or multiples
of 16, and to tune it, for each of its configurations. An SSD layer with its gradients has 140 of these; each takes about a
second. Compiling one kernel after another would take longer than all measurements. So :func:`compile_ahead` starts
processes that make the same calls as the benchmark, where no kernel runs. Each compiles what no other has begun with, into
Triton's cache on disk. What is not done in time is compiled by the benchmark itself.

The configuration of a tuned kernel is known only after this process has timed all of them. So there are two rounds: of all
configurations at the calls that tune, and, after the tuning, of the chosen ones at all calls.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.peers import imported

# The name of a case, and a function that calls its Triton kernels.
Calls = Callable[[], Iterable[tuple[str, Callable[[], Any]]]]
# Milliseconds for which a configuration is warmed up and timed. Triton takes 25 and 100.
TUNING = {"warmup": 5, "rep": 25}
PROCESSES = 24
# Seconds that a process waits for the chosen configurations; the benchmark, whose child it is, ends it earlier.
LONGEST_WAIT = 600.0
CHOSEN, OPTION = "chosen.json", "--compile_share"


def _key(tuner: Any, args: Sequence[Any], kwargs: Mapping[str, Any], once: bool) -> str:
    """The key of a tuned kernel: its name and the dtypes, and unless it is tuned ``once``, the sizes that Triton compares."""
    function = tuner.base_fn
    words = [function.__module__, function.__qualname__, *(str(arg.dtype) for arg in args if isinstance(arg, Tensor))]
    if not once:
        given = dict(zip(tuner.arg_names, args, strict=False)) | dict(kwargs)
        words += [f"{name}={given[name]}" for name in tuner.keys if name in given]
    return " ".join(words)


def tune(once: bool) -> Mapping[str, str]:
    """Shortens tuning in this process; returns the chosen configurations, which are added when kernels are called.

    With ``once``, each of Triton's tuned kernels keeps, for a set of dtypes, the configuration of the first size it is called
    with: a sweep has hundreds of sizes, and Triton would tune for most of them anew. Others are tuned if that one fails.
    """
    found = imported("triton.runtime.autotuner", "Autotuner")
    if found is None:
        return {}
    autotuner = found[0]
    if hasattr(autotuner.run, "names"):
        return autotuner.run.names
    tuned = autotuner.run
    chosen: dict[str, Any] = {}
    names: dict[str, str] = {}

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        key = _key(self, args, kwargs, once)
        every = self.configs
        if key in chosen:
            try:
                self.configs = [chosen[key]]
                return tuned(self, *args, **kwargs)
            except Exception:  # such as more shared memory than there is
                del chosen[key]
            finally:
                self.configs = every
        result = tuned(self, *args, **kwargs)
        chosen[key] = self.best_config
        names[key] = str(self.best_config)
        return result

    run.names = names  # type: ignore[attr-defined]
    autotuner.run = run
    if (bench := imported("triton.testing", "do_bench")) is not None:
        autotuner.do_bench = property(lambda self: functools.partial(bench[0], **TUNING))
    return names


# ----- the processes that compile


def _specialization(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The key of a compiled kernel: constants by value, other numbers by whether they are 1 or a multiple of 16."""
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    names = [parameter.name for parameter in kernel.params]

    def words(name: str, value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{name}: {value.dtype} {value.data_ptr() % 16 == 0}"
        if name in constants or name not in names or value is None or not isinstance(value, int | float):
            return f"{name}: {value!r}"
        return f"{name}: {type(value).__name__} {value == 1} {isinstance(value, int) and value % 16 == 0}"

    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return f"{kernel.fn.__module__}.{kernel.fn.__qualname__} " + ", ".join(words(*pair) for pair in sorted(given.items()))


class _Share:
    """Makes Triton's kernels compile, not run: those that ``claim`` allows, which returns True to one process alone.

    Attributes:
        tuning: the cases whose calls tune a kernel.
        chosen: the configurations of tuned kernels, once they are known.
    """

    def __init__(self, claim: Callable[[str], bool], once: bool) -> None:
        self.tuning: list[str] = []
        self.chosen: Mapping[str, str] | None = None
        self.case = ""
        seen: set[str] = set()
        keys: set[str] = set()
        (autotuner,) = imported("triton.runtime.autotuner", "Autotuner") or (None,)
        (kernel,) = imported("triton.runtime.jit", "JITFunction") or (None,)
        if autotuner is None or kernel is None:
            raise RuntimeError("Triton is not installed")
        compiled = kernel.run

        def run_kernel(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            specialization = _specialization(self, args, kwargs)
            if specialization in seen:
                return
            seen.add(specialization)
            if claim(specialization):
                with contextlib.suppress(Exception):  # the benchmark raises it
                    compiled(self, *args, grid=grid, warmup=True, **kwargs)

        def run_tuned(tuner: Any, *args: Any, **kwargs: Any) -> None:
            tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
            key, configs = _key(tuner, args, kwargs, once), list(tuner.configs)
            if len(configs) > 1 and self.chosen is None:
                configs = [] if key in keys else list(tuner.prune_configs(kwargs))
                if configs and self.case not in self.tuning:
                    self.tuning.append(self.case)
                keys.add(key)
            elif len(configs) > 1 and self.chosen is not None:
                configs = [config for config in configs if str(config) == self.chosen.get(key)]
            for config in configs:
                tuner.fn.run(*args, **kwargs | config.all_kwargs())
            tuner.best_config = (configs or tuner.configs)[0]  # callers read sizes from it

        kernel.run, autotuner.run = run_kernel, run_tuned

    def make(self, calls: Calls) -> None:
        parent = os.getppid()
        for self.case, call in calls():
            if os.getppid() != parent:
                sys.exit("the benchmark has ended")
            with contextlib.suppress(Exception):  # the benchmark raises it
                call()


def compile_share(index: int, folder: Path, once: bool, calls: Calls) -> None:
    """Runs one process of :func:`compile_ahead`."""

    def claim(specialization: str) -> bool:
        try:
            (folder / f"{hashlib.sha256(specialization.encode()).hexdigest()}.claim").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    share = _Share(claim, once)
    share.make(calls)
    _write(folder / f"tuning-{index}.json", share.tuning)
    parent, end = os.getppid(), time.monotonic() + LONGEST_WAIT
    while not (folder / CHOSEN).exists():
        if time.monotonic() > end or os.getppid() != parent:
            return
        time.sleep(0.05)
    share.chosen = json.loads((folder / CHOSEN).read_text())
    share.make(calls)


def _write(path: Path, value: Any) -> None:
    """Writes the file at once: readers find all of it."""
    path.with_suffix(".part").write_text(json.dumps(value))
    path.with_suffix(".part").rename(path)


# ----- the process that measures


def compile_ahead(
    program: Sequence[str], folder: Path, once: bool, calls: Calls, seconds_allowed: tuple[float, float]
) -> dict[str, float]:
    """Compiles and tunes the Triton kernels that ``calls`` call; returns the seconds of each step.

    Args:
        program: the command that calls :func:`compile_share` with what follows ``OPTION``: index and folder.
        folder: an empty folder.
        once: as :func:`tune` takes it.
        calls: those of all cases.
        seconds_allowed: in all, and for the configurations.
    """
    seconds: dict[str, float] = {}
    start = time.monotonic()
    end, first_end = (start + allowed for allowed in seconds_allowed)

    def lap(step: str) -> None:
        nonlocal start
        seconds[step], start = round(time.monotonic() - start, 2), time.monotonic()

    chosen = tune(once)
    count = max(1, min(PROCESSES, (os.cpu_count() or 1) - 2))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = []
    for index in range(count):
        command = [*program, OPTION, str(index), str(folder)]
        with (folder / f"{index}.log").open("w") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
    try:
        tunings = [folder / f"tuning-{index}.json" for index in range(count)]
        while time.monotonic() < first_end and not all(
            path.exists() or process.poll() is not None for path, process in zip(tunings, processes, strict=True)
        ):
            time.sleep(0.05)
        lap("configurations")
        found = next((path for path in tunings if path.exists()), None)
        if found is None:
            print((folder / "0.log").read_text()[-2000:], file=sys.stderr)
        else:
            names = set(json.loads(found.read_text()))
            for name, call in calls():
                if name in names:
                    with contextlib.suppress(Exception):  # the benchmark raises it
                        call()
        lap("tuning")
        _write(folder / CHOSEN, dict(chosen))
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        lap("sizes")
        seconds["kernels"] = len(list(folder.glob("*.claim")))
        seconds["processes that did not end"] = sum(process.poll() is None for process in processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return seconds
