"""The sweep of sizes: neighbors, aligned copies, the figures of a row, and runs in parts."""

from __future__ import annotations

import argparse
import functools
import json
import sys
import types
from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("rich", reason="the benchmarks print their tables with rich")

from benchmarks import bench_sizes, triton_kernels
from benchmarks.bench_sizes import BENCHMARK, cases, figures, part, ratios
from benchmarks.benchmark import Run, measured
from benchmarks.size_cases import BF16, FP32, SizeCase, aligned_copy, all_cases, is_aligned, sizes


@pytest.mark.parametrize(
    ("operator", "size", "neighbor"),
    [
        ("selective_scan", {"B": 3, "D": 770, "L": 777, "N": 13}, {"B": 3, "D": 776, "L": 784, "N": 16}),
        ("causal_conv1d", {"B": 1, "L": 8, "C": 5, "first": 2, "of": 41}, {"B": 1, "L": 8, "C": 8, "first": 8, "of": 48}),
        ("ssd_chunk_scan", {"L": 2040, "H": 12, "P": 100, "N": 130}, {"L": 2040, "H": 12, "P": 112, "N": 144}),
        ("mingru", {"B": 1, "T": 1, "H": 1020}, {"B": 1, "T": 8, "H": 1024}),
        ("rms_norm_gated", {"R": 17, "C": 50, "G": 3}, {"R": 17, "C": 56, "G": 3}),
        ("Mamba2", {"B": 4, "L": 2048, "d_model": 770, "P": 70}, {"B": 4, "L": 2048, "d_model": 880, "P": 80}),
    ],
)
def test_neighbors(operator, size, neighbor):
    case = SizeCase(operator, "", sizes(**size))
    found = case.neighbor
    assert found.size == neighbor and found.neighbor is found


def test_every_size_has_its_neighbor_in_the_sweep():
    found = all_cases()
    names = [case.name for case in found]
    assert len(set(names)) == len(names) and {case.neighbor.name for case in found} <= set(names)
    assert {case.dtype for case in found} == {BF16, FP32}


def test_parts_are_disjoint_and_keep_neighbors_together():
    parts = [cases(argparse.Namespace(part=(index, 3))) for index in (1, 2, 3)]
    assert sorted(case.name for one in parts for case in one) == sorted(case.name for case in all_cases())
    turns = [{case.turns for case in one} for one in parts]
    assert not turns[0] & turns[1] and not turns[1] & turns[2] and not turns[0] & turns[2]
    for text in ("0/2", "3/2", "1", "a/b"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected I/N"):
            part(text)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 13),
        torch.randn(2, 3, 16),
        torch.randn(2, 13, 3).mT,
        torch.randn(2, 3, 40)[..., 1:14],
        torch.randn(2, 5, 41)[..., 3:33].unflatten(-1, (3, 10)),
        torch.randn(2, 5, 1, 7),
        torch.randn(13),
        torch.randn(0, 3),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.stride()}",
)
def test_aligned_copy(tensor):
    copy = aligned_copy(tensor)
    assert torch.equal(copy, tensor) and copy.shape == tensor.shape
    heads = tensor.dim() == 4 and tensor.shape[2] > 1  # the axes of a row have no gaps between them
    strides = [stride for stride, size in zip(copy.stride(), copy.shape, strict=True) if size > 1]
    assert is_aligned(copy) or (heads and strides == [5 * 32, 32, 10, 1])
    order = [sorted(range(x.dim()), key=lambda axis, x=x: (x.shape[axis] > 1, x.stride(axis))) for x in (tensor, copy)]
    assert not tensor.numel() or order[0] == order[1]


def time(median: float) -> dict:
    return {"median": median, "spread": 0.0}


def test_ratios():
    row = {
        "operator": "selective_scan",
        "ours": {"forward": time(3.0), "backward": time(4.0)},
        "sequential": {"forward": time(2.0), "backward": time(5.0)},
        "mamba_ssm": {"forward": time(6.0)},
    }
    assert ratios(row, {"ours": {"forward": time(2.0)}}) == {
        "forward, time over the neighbor's": 1.5,
        "forward, time over the best kernel's": 1.5,
        "backward, time over the best kernel's": 1.0,
        "forward, speed-up over mamba_ssm": 2.0,
    }
    norms = [
        {"operator": "add_rms_norm", "dtype": "float32", "sizes": {"R": rows, "C": columns}, "ratios": {}, "ours": ours}
        for rows, columns, ours in (
            (8192, 2560, {"forward": time(1.0), "backward": time(2.0)}),
            (2048, 12288, {"forward": time(1.2), "backward": time(4.8)}),
        )
    ]
    found = figures(norms[1], {"rows": norms})
    elements = 8192 * 2560 / (2048 * 12288)
    assert list(found.values()) == pytest.approx([1.2 * elements, 2.4 * elements]) and not figures(norms[0], {"rows": norms})


def test_what_raises_becomes_a_figure(monkeypatch):
    good = {"forward": [lambda: None]}

    def bad() -> dict:
        raise RuntimeError("out of memory\nmore")

    case = SizeCase("selective_scan", "length", sizes(L=3))
    run = Run(torch.device("cpu"), 1, 0, argparse.Namespace(json=None, without_peers=False))
    monkeypatch.setattr(bench_sizes, "stages_of", lambda case, device: ({"ours": lambda: good, "mamba_ssm": bad}, {}))
    (row,) = BENCHMARK.measure([case], run)
    assert row["mamba_ssm"]["unsupported"] == "RuntimeError: out of memory" and not row["wrong"] and row["ours"]["forward"]
    monkeypatch.setattr(bench_sizes, "stages_of", lambda case, device: ({"ours": bad}, {"out": 0.5}))
    (row,) = BENCHMARK.measure([case], run)
    assert row["wrong"] == ["out", "RuntimeError: out of memory"]


def test_a_run_adds_its_rows_to_those_of_an_earlier_one(tmp_path):
    path, small = tmp_path / "sizes.json", [SizeCase("mingru", "length", sizes(B=1, T=size, H=8), FP32) for size in (8, 16)]
    for chosen, append in ((small, False), (small[1:], True)):
        options = argparse.Namespace(json=path, append=append, without_peers=True)
        measured(BENCHMARK, Run(torch.device("cpu"), 1, 0, options), chosen)
        assert [row["name"] for row in json.loads(path.read_text())["rows"]] == [case.name for case in small]


def test_kernels_of_triton_are_tuned_once(monkeypatch):
    class Autotuner:
        configs = ("small", "large", "huge")
        base_fn = staticmethod(lambda x: x)

        def run(self, x: torch.Tensor) -> str:
            if self.configs == ["huge"] and x.numel() > 10:
                raise RuntimeError("out of resources")
            tunings.append(len(self.configs))
            self.best_config = self.configs[-1]
            return self.best_config

    tunings: list[int] = []
    monkeypatch.setitem(sys.modules, "triton.runtime.autotuner", types.SimpleNamespace(Autotuner=Autotuner))
    monkeypatch.setitem(sys.modules, "triton.testing", types.SimpleNamespace(do_bench=None))
    names = triton_kernels.tune(once=True)
    assert triton_kernels.tune(once=True) is names
    kernel = Autotuner()
    for size, dtype in ((1, torch.float32), (2, torch.float32), (2, torch.float16), (20, torch.float32)):
        assert kernel.run(torch.zeros(size, dtype=dtype)) == "huge"
    assert tunings == [3, 1, 3, 3] and kernel.configs == ("small", "large", "huge")


class Kernel:
    """A stand-in for Triton's kernels, which compile when they first run."""

    params = tuple(types.SimpleNamespace(name=name, is_constexpr=name.isupper()) for name in ("x", "size", "BLOCK"))
    fn = staticmethod(lambda x, size, BLOCK: None)

    def run(self, x: torch.Tensor, size: int, *, grid: object, warmup: bool, BLOCK: int) -> None:
        assert warmup, "runs"
        compiled.append((str(x.dtype), size, BLOCK))


class Config(types.SimpleNamespace):
    def all_kwargs(self) -> dict[str, int]:
        return {"BLOCK": self.BLOCK}


class Tuner:
    base_fn, arg_names, keys = Kernel.fn, ("x", "size"), ("size",)

    def __init__(self) -> None:
        self.fn, self.configs = Kernel(), [Config(BLOCK=size) for size in (32, 64, 128)]

    def prune_configs(self, kwargs: dict) -> list[Config]:
        return self.configs[:2]

    def run(self, *args: object, **kwargs: object) -> None: ...


compiled: list[tuple[str, int, int]] = []


def test_processes_share_the_compilation(monkeypatch):
    """They compile all configurations of calls that tune, then the chosen one: once for numbers alike to Triton."""
    monkeypatch.setitem(sys.modules, "triton.runtime.autotuner", types.SimpleNamespace(Autotuner=Tuner))
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", types.SimpleNamespace(JITFunction=Kernel))
    run_kernel, run_tuner = Kernel.run, Tuner.run
    tuner = Tuner()

    def calls() -> Iterator[tuple[str, Callable[[], None]]]:
        def call(size: int) -> None:
            tuner.run(torch.zeros(size), size, grid=None, warmup=False)
            assert tuner.best_config in tuner.configs
            raise RuntimeError("left to the benchmark")

        for size in (16, 32, 7, 9, 1):
            yield f"size {size}", functools.partial(call, size)

    rounds: list[list[tuple[str, int, int]]] = [[], []]
    claimed: set[str] = set()

    def claim(specialization: str) -> bool:
        is_new = specialization not in claimed
        claimed.add(specialization)
        return is_new

    for _ in range(3):
        monkeypatch.setattr(Kernel, "run", run_kernel)
        monkeypatch.setattr(Tuner, "run", run_tuner)
        share = triton_kernels._Share(claim, once=True)
        for of_round in rounds:
            compiled.clear()
            share.make(calls)
            of_round += compiled
            share.chosen = {f"{__name__} {Kernel.fn.__qualname__} torch.float32": str(tuner.configs[1])}
        assert share.tuning == ["size 16"]
    assert sorted(rounds[0]) == [("torch.float32", 16, 32), ("torch.float32", 16, 64)]
    assert sorted(rounds[1]) == [("torch.float32", 1, 64), ("torch.float32", 7, 64)]


def test_compilation_goes_on_with_the_chosen_configurations(monkeypatch, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        """import json, pathlib, sys, time
index, folder = sys.argv[-2:]
if int(index) == 2:
    sys.exit("a process that fails")
pathlib.Path(folder, f"tuning-{index}.json").write_text('["second"]')
while not (chosen := pathlib.Path(folder, "chosen.json")).exists():
    time.sleep(0.01)
pathlib.Path(folder, f"compiled-{index}").write_text(chosen.read_text())
"""
    )
    called: list[str] = []
    monkeypatch.setattr(triton_kernels, "tune", lambda once: {"kernel": "configuration"})
    monkeypatch.setattr(triton_kernels.os, "cpu_count", lambda: 5)
    calls = [(name, functools.partial(called.append, name)) for name in ("first", "second")]
    seconds = triton_kernels.compile_ahead([sys.executable, str(program)], tmp_path, True, lambda: calls, (60.0, 40.0))
    assert called == ["second"] and list(seconds)[:3] == ["configurations", "tuning", "sizes"]
    found = [json.loads(path.read_text()) for path in tmp_path.glob("compiled-*")]
    assert found == [{"kernel": "configuration"}] * 2
