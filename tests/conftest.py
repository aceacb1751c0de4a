"""The `device` fixture: each test that takes it runs on every device its module's ``OPERATOR`` has kernels for.

A test that uses the ``kernel`` fixture runs once more on CUDA with the sequential kernels of selective_scan, which take
by themselves only calls of many channels.

Functions and fixtures import helpers that need torch.compile: the process that starts the workers of pytest-xdist collects
nothing, and the workers wait for it. It does not import torch either, unless there are GPUs to count.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Inductor believes that the compiler knows the instructions which the processor has: to find out, it compiles C++ and imports
# torch, in every worker.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import pytest
from selection import select_tests

# For the benchmarks and the build's own functions, wherever pytest is started; last, so that it hides no installed package.
sys.path.append(str(Path(__file__).resolve().parents[1]))

# Collection makes half a million objects that stay: to look for cycles among them would take each worker seconds.
gc.disable()


def _may_have_gpu() -> bool:
    """Whether a driver for NVIDIA GPUs is installed, on Linux or under Windows. Importing torch to ask it takes seconds."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/nvidia0", "/proc/driver/nvidia", "/dev/dxg"))


def _order_gpus() -> None:
    """Gives the workers of pytest-xdist different GPUs as their first; each still sees all."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if not worker.startswith("gw"):
        return
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")[:count]
    first = int(worker.removeprefix("gw")) % count
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[first:] + visible[:first])


_order_gpus()


def _limit_instruction_sets() -> None:
    """Keeps Inductor to AVX2 of x86's: it checks parts of the wider sets with the compiler all the same."""
    from torch._inductor.cpu_vec_isa import supported_vec_isa_list as sets

    sets[:] = [isa for isa in sets if not type(isa).__name__.startswith(("VecAMX", "VecAVX512"))]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _cores() -> int:
    return len(os.sched_getaffinity(0))


@pytest.hookimpl(optionalhook=True)  # pytest also runs without pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    workers = min(_cores(), 12)
    if _may_have_gpu() and _has_gpu():  # a worker's CUDA context and tensors take up to 4 GiB
        import torch

        memory = sum(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
        workers = min(workers, memory // 2**32)
    return max(1, workers)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Runs the whole suite with a worker on each core; named files and tests start faster in one process."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if is_worker or not whole or not config.pluginmanager.hasplugin("xdist") or config.option.numprocesses is not None:
        return
    config.option.numprocesses = "auto"
    # Workers that are done take over tests of others; on a GPU a group of tests keeps to one worker.
    config.option.dist = "loadgroup" if _may_have_gpu() and _has_gpu() else "worksteal"
    os.environ.setdefault("OMP_NUM_THREADS", str(-(-_cores() // pytest_xdist_auto_num_workers())))
    # Tests with two threads in each worker have more threads than cores: a thread that waits must leave its core to others.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


# Files with tests that take more than ten seconds each: they compile C++ or start processes.
LONG = (
    "test_aot_inductor",
    "test_bench_distributed",
    "test_build",
    "test_decompositions",
    "test_docs",
    "test_dtensor",
    "test_examples",
    "test_long_context_example",
    "test_models_distributed",
    "test_profile",
    "test_setup",
    "test_stopped_examples",
    "test_wheel",
)
SELECTIVE_SCAN_KERNELS = ("faster", "sequential")

# The devices of the tests that these expressions of -m select.
DEVICES_OF_MARKS = {"cuda": ("cuda",), "not cuda": ("cpu",)}


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Without CUDA it leaves one case, which is skipped, of those that need CUDA: to make items of all would take seconds."""
    _parametrize_devices(metafunc)
    yield
    calls = metafunc._calls  # pytest has no public name for them
    if len(calls) < 2 or _why_no_cuda() is None:
        return
    all_need_cuda = metafunc.definition.get_closest_marker("cuda") is not None
    need_cuda = [call for call in calls if all_need_cuda or any(mark.name == "cuda" for mark in call.marks)]
    left_out = {id(call) for call in need_cuda[1:]}
    calls[:] = [call for call in calls if id(call) not in left_out]


def _parametrize_devices(metafunc: pytest.Metafunc) -> None:
    if "device" not in metafunc.fixturenames:
        if "kernel" in metafunc.fixturenames:
            metafunc.parametrize("kernel", SELECTIVE_SCAN_KERNELS, indirect=True)
        return
    from helpers import devices_of

    operator = getattr(metafunc.module, "OPERATOR", None)
    if operator is None:
        raise pytest.UsageError(f"{metafunc.module.__name__} must set OPERATOR to an operator or 'every operator'")
    marks = {"cuda": pytest.mark.cuda}
    # None on CUDA where there is no GPU, and only the devices that -m asks for: to collect twenty thousand items takes seconds.
    asked = DEVICES_OF_MARKS.get(metafunc.config.option.markexpr, ("cpu", "cuda"))
    names = [device for device in devices_of(operator) if device in asked and (device == "cpu" or _has_gpu())]
    devices = [pytest.param(device, marks=marks.get(device, ())) for device in names]
    if "kernel" not in metafunc.fixturenames:
        return metafunc.parametrize("device", devices)
    calls = [pytest.param(*device.values, "faster", marks=device.marks, id=device.values[0]) for device in devices]
    if "cuda" in names:
        calls.append(pytest.param("cuda", "sequential", marks=marks["cuda"], id="cuda-sequential"))
    metafunc.parametrize(("device", "kernel"), calls, indirect=["kernel"])


@pytest.fixture
def kernel(request):
    """selective_scan's kernels on CUDA: those that the plan chooses, and the sequential ones wherever they support the call."""
    import helpers

    with helpers.debug_option("selective_scan_kernel", request.param):
        yield request.param


@pytest.fixture
def kernels_by_layout():
    """causal_conv1d's forward on CUDA uses the kernels of its layout for few elements, too."""
    import helpers

    with helpers.debug_option("causal_conv1d_kernel", "by_layout"):
        yield


@functools.cache
def _why_no_cuda() -> str | None:
    if not _has_gpu():
        return "no CUDA GPU here"
    import ssm_kernels

    if not ssm_kernels.build_info()["cuda"]:
        return "ssm_kernels was built without CUDA kernels"
    return None


def _runs(item: pytest.Item) -> bool:
    """Whether the test's operator, if it has one as a parameter, has kernels for the test's device."""
    from operator_spec import OperatorSpec

    params = item.callspec.params if hasattr(item, "callspec") else {}
    operator = params.get("operator")
    return not isinstance(operator, OperatorSpec) or params.get("device", "cpu") in operator.devices


def _skip_without_cuda(items: list[pytest.Item]) -> None:
    """Leaves one test, skipped, of each function that runs on CUDA only: reports of all of them would take seconds."""
    skipped: dict[tuple[Any, ...], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("cuda"):
            skipped.setdefault((item.parent, getattr(item, "originalname", item.name)), []).append(item)
    reason = _why_no_cuda() if skipped else None
    if reason is None:
        return
    for first, *_ in skipped.values():
        first.add_marker(pytest.mark.skip(reason=reason))
    others = {item for _, *rest in skipped.values() for item in rest}
    items[:] = [item for item in items if item not in others]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", metavar="i/n", help="run the i-th of n shares of the tests, for machines that are lent for minutes"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _limit_instruction_sets()
    items[:] = filter(_runs, items)
    select_tests(config, items)
    if config.pluginmanager.hasplugin("xdist"):
        # One worker runs them, with --dist loadgroup: two at a time would not find the memory that they need.
        for item in items:
            if "needs_gpu_memory" in item.fixturenames:
                item.add_marker(pytest.mark.xdist_group("gpu_memory"))
    _skip_without_cuda(items)
    # The longest first: one at the end would leave the other cores idle. Then those of several ranks, which one worker starts.
    items.sort(key=lambda item: (item.path.stem not in LONG, "processes" not in getattr(item, "fixturenames", ())))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    # Extension modules report what is left at the end as leaks. pytest collects garbage several times before.
    atexit.register(gc.unfreeze)


@pytest.fixture(scope="session")
def processes(tmp_path_factory):
    """Processes that run checks together, on gloo or NCCL: see ``process_pool.py``."""
    from process_pool import Processes

    started = Processes(lambda: tmp_path_factory.mktemp("processes"))
    yield started
    started.close()


@pytest.fixture
def two_threads():
    """Runs the test with two threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def uninitialized_memory_is_nan():
    import helpers

    with helpers.uninitialized_memory_is_nan():
        yield


@pytest.fixture
def no_vmap_fallback():
    """PyTorch's loop over samples is an error, not a warning that may come only once."""
    import torch

    before = torch._C._functorch._is_vmap_fallback_enabled()
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(before)


@pytest.fixture
def needs_gpu_memory():
    """Skips the test on a CUDA device that has fewer GiB free; gives back what the test took."""
    import torch

    def check(device: str, gibibytes: float) -> None:
        if device == "cpu":
            return
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0] / 2**30
        if free < gibibytes:
            pytest.skip(f"needs {gibibytes} GiB of free GPU memory, found {free:.1f}")

    yield check
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture
def fresh_dynamo():
    """Clears what torch.compile has compiled for other tests or other versions of the operators."""
    import torch
    from torch._inductor.utils import fresh_inductor_cache

    torch._dynamo.reset()
    with fresh_inductor_cache():
        yield
    torch._dynamo.reset()
