"""Timing on the CPU and on CUDA: warm-up, interleaved trials, median and spread, cold caches on CUDA; graphs; host time.

:func:`measure` times sequences of *stages*; the first takes no argument, every other takes its predecessor's result. The stages
of one trial are timed separately and together, so that a training step gives its forward, its backward and their sum from the
same run. Several sequences are measured in turns, trial by trial: a machine that slows down slows them all.
"""

from __future__ import annotations

import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

Stages = Sequence[Callable[..., Any]]

_CACHE_WRITES = 8
# Where their number depends on the host's time.
_FEWEST_WRITES, _MOST_WRITES, _HOST_MARGIN = 2, 32, 1.5

UNRELIABLE_SPREAD = 0.2
"""The spread above which a timing says little: on a machine without other load it is a few hundredths."""


@dataclass(frozen=True)
class Timing:
    """Seconds per trial: the median, and the 20th and 80th percentile around it."""

    median: float
    p20: float
    p80: float
    trials: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        percentiles = torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)
        return cls(*torch.tensor(seconds, dtype=torch.float64).quantile(percentiles).tolist(), len(seconds))

    @property
    def spread(self) -> float:
        """Half the distance of the two percentiles, relative to the median."""
        return (self.p80 - self.p20) / (2 * self.median) if self.median > 0 else 0.0

    @property
    def is_reliable(self) -> bool:
        """Whether the spread is small enough to compare the median with another."""
        return self.spread <= UNRELIABLE_SPREAD

    def scaled(self, factor: float) -> Timing:
        """The same timing for ``factor`` times the work."""
        return Timing(self.median * factor, self.p20 * factor, self.p80 * factor, self.trials)

    def to_dict(self) -> dict[str, float]:
        return {**asdict(self), "spread": self.spread}


@dataclass(frozen=True)
class Measurement:
    """The timing of each stage of a benchmark and of all of them together."""

    stages: tuple[Timing, ...]
    total: Timing


class _CpuClock:
    """Marks are readings of the monotonic clock."""

    def prepare(self, writes: int | None = None) -> None:
        pass

    def mark(self) -> float:
        return time.perf_counter()

    def differences(self, trials: list[list[float]]) -> list[list[float]]:
        return [[b - a for a, b in pairwise(marks)] for marks in trials]


class _CudaClock:
    """Marks are events on the current stream; before each trial writes of twice the L2 cache's size evict the inputs.

    One write would do for that. The others keep the device busy while the host enqueues the trial, so that launch latency is
    not part of short trials: eight write 1 GB on an H200, for which it takes about a quarter of a millisecond.
    """

    def __init__(self, device: torch.device, writes: int) -> None:
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._evict, self._writes = torch.empty(2 * max(cache, 2**25), dtype=torch.int8, device=device), writes

    def prepare(self, writes: int | None = None) -> None:
        for _ in range(self._writes if writes is None else writes):
            self._evict.zero_()

    def seconds_of_a_write(self) -> float:
        marks = []
        for _ in range(5):
            self.prepare(1)
            marks.append(self.mark())
        torch.cuda.synchronize()
        return marks[0].elapsed_time(marks[-1]) / 4e3

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def differences(self, trials: list[list[torch.cuda.Event]]) -> list[list[float]]:
        torch.cuda.synchronize()
        return [[a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)] for marks in trials]


def measure(
    benchmarks: Mapping[str, Stages],
    *,
    device: torch.device | str = "cpu",
    trials: int = 20,
    warmup: int = 2,
    budget: float | None = None,
    least: int = 3,
    on_trial: Callable[[], None] | None = None,
    cache_writes: int | None = _CACHE_WRITES,
    warm_code: bool = False,
) -> dict[str, Measurement]:
    """Times every benchmark, in turns.

    Args:
        benchmarks: by name, the stages of each.
        device: ``"cpu"`` is timed by the monotonic clock, a CUDA device by events.
        trials: trials of each benchmark that count.
        warmup: trials of each benchmark that do not.
        budget: seconds after which no further round of trials starts, once there have been ``least``; None for no limit.
        on_trial: called after every trial, the warm-up's included.
        cache_writes: how often the cache is overwritten before a trial on CUDA. With one, as in triton.testing.do_bench, the
            host's time to enqueue a trial counts wherever the device is faster. With None, as often as keeps the device busy
            for longer than the host takes to enqueue a trial, by a trial of the warm-up.
        warm_code: whether a call that is not timed comes before the cache is overwritten, so that the multiprocessors hold
            the kernels' instructions. Without it a kernel that also ran in the turn before takes 10 µs less than the others.
    """

    def call(stages: Stages, mark: Callable[[], Any]) -> list[Any]:
        reading = [mark()]
        result: tuple[Any, ...] = ()
        for stage in stages:
            result = (stage(*result),)
            reading.append(mark())
        return reading

    device = torch.device(device)
    clock = _CudaClock(device, _MOST_WRITES if cache_writes is None else cache_writes) if device.type == "cuda" else _CpuClock()
    marks: dict[str, list[list[Any]]] = {name: [] for name in benchmarks}
    writes: dict[str, int] = {}
    if cache_writes is None and isinstance(clock, _CudaClock):
        for stages in benchmarks.values():
            call(stages, lambda: None)
        of_a_write = clock.seconds_of_a_write()
        for name, stages in benchmarks.items():
            clock.prepare()
            begin = time.perf_counter()
            if warm_code:
                call(stages, lambda: None)
            reading = call(stages, clock.mark)
            host = time.perf_counter() - begin
            (seconds,) = clock.differences([reading])
            # The time of a launch that waits for the host counts as the device's here, never more than the host's.
            idle = _HOST_MARGIN * host - sum(seconds) * (1 + warm_code)
            writes[name] = min(_MOST_WRITES, max(_FEWEST_WRITES, math.ceil(idle / of_a_write)))
        warmup = 0
    start = time.perf_counter()
    for trial in range(-warmup, trials):
        if device.type == "cuda" and budget is not None:
            torch.cuda.synchronize()
        if budget is not None and trial >= least and time.perf_counter() - start > budget:
            break
        for name, stages in benchmarks.items():
            if warm_code:
                call(stages, lambda: None)
            clock.prepare(writes.get(name))
            reading = call(stages, clock.mark)
            if trial >= 0:
                marks[name].append(reading)
            if on_trial is not None:
                on_trial()
    measurements = {}
    for name, readings in marks.items():
        seconds = clock.differences(readings)
        stages_seconds = tuple(Timing.of(stage) for stage in zip(*seconds, strict=True))
        measurements[name] = Measurement(stages_seconds, Timing.of([sum(trial) for trial in seconds]))
    return measurements


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sets_beyond_cache(make: Callable[[int], Any], nbytes: int, device: torch.device, most: int = 2**20) -> list[Any]:
    """Makes sets of inputs from seeds, so many that the second-level cache holds none of them when its turn comes again."""
    if device.type != "cuda":
        return [make(0), make(1)]
    cache = torch.cuda.get_device_properties(device).L2_cache_size or 2**26
    return [make(seed) for seed in range(min(most, max(2, math.ceil(4 * cache / nbytes))))]


def graph_of(function: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Captures a call in a CUDA graph and returns its replay; on the CPU the function itself."""
    if device.type != "cuda":
        return function
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()

    def replay(_: Callable[[], Any] = function) -> None:
        # The graph has the addresses of the function's tensors: the function keeps them.
        graph.replay()

    return replay


def time_graph(function: Callable[[Any], Any], sets: Sequence[Any], trials: int, device: torch.device) -> Timing:
    """Seconds per call in a CUDA graph that calls the function on one set of inputs after another."""
    calls = max(20, len(sets))

    def call_all() -> None:
        for i in range(calls):
            function(sets[i % len(sets)])

    for inputs in sets:
        function(inputs)
    stages = {"replay": [graph_of(call_all, device)]}
    timing = measure(stages, device=device, trials=trials, warmup=1, cache_writes=0)["replay"].total
    return timing.scaled(1 / calls)


def time_host(function: Callable[[], Any], device: torch.device, *, blocks: int = 40, calls: int = 50) -> Timing:
    """Seconds that the host needs per call of a function that enqueues work on CUDA: the median of ``blocks``.

    A block starts on an idle device and its clock stops before the device is waited for. It is so short that the queue of
    launches does not fill up, where the host would wait for the device.
    """
    for _ in range(2 * calls):
        function()
    seconds = []
    for _ in range(blocks):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            function()
        seconds.append((time.perf_counter() - start) / calls)
    synchronize(device)
    return Timing.of(seconds)


def available_memory(device: torch.device | str = "cpu") -> int | None:
    """Bytes that can be allocated now on ``device``; None where the system does not say."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def peak_bytes(step: Callable[[], Any], device: torch.device) -> int | None:
    """Returns the memory that ``step`` takes at its highest, over what was allocated before; None on the CPU.

    The function returns the largest of three calls. When a call begins, autograd's thread may still hold the gradients of the
    call before, which makes its own peak look smaller.
    """
    if device.type != "cuda":
        return None
    step()  # allocates what later calls share
    found = []
    for _ in range(3):
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        found.append(torch.cuda.max_memory_allocated(device) - before)
    return max(found)


def on_h200(device: torch.device) -> bool:
    return device.type == "cuda" and "H200" in torch.cuda.get_device_name(device)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def driver_version() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def machine(device: torch.device | str = "cpu") -> dict[str, str | int]:
    """Describes the machine and the versions of the software."""
    import ssm_kernels

    device = torch.device(device)
    description: dict[str, str | int] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _processor(),
        "cores": os.cpu_count() or 1,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ssm_kernels": getattr(ssm_kernels, "__version__", "unknown"),
        "device": str(device),
    }
    if device.type == "cuda":
        description["gpu"] = torch.cuda.get_device_name(device)
        description["cuda"] = torch.version.cuda or "unknown"
        description["driver"] = driver_version()
    return description
