"""benchmarks/bench_distributed.py: small models on two processes of the CPU, its section, and its model of more ranks."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich", reason="the benchmarks print their tables with rich")
if not torch.distributed.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from process_pool import TWO_GPUS, Mesh, Place, Processes, param

from benchmarks import bars, bench_distributed, report
from benchmarks.bench_distributed import BENCHMARK, constants, model_rows, straight_line
from benchmarks.benchmark import Run, measured

OPTIONS = argparse.Namespace(ranks=2, device="cpu", json=None, cases=None)


def small_cases() -> list[Any]:
    """Returns one case of each kind; its model has one layer."""
    chain, _, summaries, _, tensor, *_, reduce = bench_distributed.cases(OPTIONS)
    chain, summaries, tensor = (replace(case, layer="Mamba2", n_layer=1) for case in (chain, summaries, tensor))
    gather = replace(reduce, operation="all-gather")
    collectives = [replace(case, nbytes=size) for case in (gather, reduce) for size in (64, 2**16)]
    return [replace(chain, seqlen=65), replace(summaries, seqlen=65), tensor, *collectives]


def measure(mesh: Mesh, path: str) -> None:
    device = torch.device(mesh.device_type, mesh.get_local_rank()) if mesh.device_type == "cuda" else torch.device("cpu")
    options = argparse.Namespace(**vars(OPTIONS) | {"mesh": mesh, "json": None if mesh.get_local_rank() else Path(path)})
    measured(BENCHMARK, Run(device, 1, 0, options), small_cases())


@pytest.mark.slow
@pytest.mark.parametrize("place", [param(Place((2,))), param(TWO_GPUS)])
def test_smallest_cases(processes: Processes, place: Place, tmp_path):
    """Results are right, and make figures and a section."""
    path = tmp_path / "distributed.json"
    processes.check(place, measure, str(path))
    result = json.loads(path.read_text())
    chain, summaries, tensor, *collectives = result["rows"]
    assert not any(row["wrong"] for row in result["rows"]) and len(collectives) == 4
    heads, headdim, dstate, channels, taps = 2, 64, 128, 2 * 64 + 2 * 128, 3
    states = 4 * heads * headdim * dstate
    for calls in chain["sent"].values():
        assert calls == [{"operation": "message", "bytes": states + 2 * channels * taps + 8}]
    halo, grad_halo = 2 * (channels + 1) * taps, 2 * channels * taps
    gathered = {"forward": [halo, states + 4 * heads], "backward": [states, grad_halo]}
    for direction, calls in summaries["sent"].items():
        assert calls == [{"operation": "all-gather", "bytes": size} for size in gathered[direction]]
    # The output, and the squares of the one group of the norm, in float32.
    assert {call["bytes"] for call in tensor["sent"]["forward"]} == {2 * 64 * 2 * 256, 2 * 64 * 4}
    for context in (chain, summaries):
        assert BENCHMARK.figures(context, result).keys() >= {"forward, speed-up over one", "both, speed-up over one"}
    section = report.section({"figure": "figure.png", **result})
    assert "](figure.png)" in section and all(row["name"] in section for row in result["rows"])
    assert "1 message, " in section and "2 all-gathers, " in section
    assert "Mamba2 | 8 | chain | 256 |" in section and "Mamba2 | 1024 | summaries | 32,768 |" in section


def row_of(operation: str, nbytes: int, seconds: float) -> dict[str, Any]:
    timing = {"median": seconds, "spread": 0.0}
    return {"name": "a", "kind": "collective", "operation": operation, "bytes": nbytes, "ranks": 4, "ours": {"call": timing}}


def test_constants_are_those_of_the_times():
    """Times of four ranks that follow the model exactly."""
    latency, per_byte = 1e-5, 1e-11
    rows = [
        row_of(operation, size, 2 * latency + per_byte * size * factor)
        for operation, factor in (("all-gather", 3), ("all-reduce", 1.5))
        for size in (2**12, 2**20, 2**26)
    ]
    found = constants(rows)
    assert found.keys() == {"all-gather", "all-reduce"}
    for values in found.values():
        assert values == pytest.approx((latency, per_byte))
    assert straight_line([(1.0, 1.0), (2.0, 3.0)])[0] == 0.0

    times = {name: {"both": {"median": value}} for name, value in (("ours", 0.6), ("one", 1.0), ("part", 0.5))}
    calls = {
        "forward": [{"operation": "all-gather", "bytes": 10**6}],
        "backward": [{"operation": "all-gather", "bytes": 10**6}],
    }
    model = {"name": "m", "kind": "context parallel", "layer": "Mamba", "ranks": 4, "seqlen": 400, "n_layer": 10, "sent": calls}
    model |= times | {"ours": times["ours"] | {"parameters": 10**8}}

    def sent(ranks: int, doublings: int) -> float:
        of_layers = 30 * (doublings * latency + (ranks - 1) * 10**6 * per_byte)
        return of_layers + doublings * latency + 2 * (ranks - 1) / ranks * 10**8 * per_byte

    by_ranks = {row["ranks"]: row for row in model_rows({"rows": [*rows, model]})}
    work = 0.6 - sent(4, 2)
    assert by_ranks[1024]["weak"]["both"] == pytest.approx(work + sent(1024, 10))
    assert by_ranks[8]["efficiency"] == pytest.approx(0.5 / (work + sent(8, 3)))
    assert by_ranks[8]["speedup"] == pytest.approx(1.0 / (work / 2 + sent(8, 3)))
    assert by_ranks[8]["steps"] == 800
    # Along a chain each rank begins later than the one before.
    calls["forward"] = calls["backward"] = [{"operation": "message", "bytes": 10**6}]
    by_ranks = {row["ranks"]: row for row in model_rows({"rows": [*rows, model]})}
    messages, reduced = 20 * (latency + 10**6 * per_byte), sent(4, 2) - 30 * (2 * latency + 3 * 10**6 * per_byte)
    lag = (0.6 - 0.5 - messages - reduced) / 3
    reduced = sent(8, 3) - 30 * (3 * latency + 7 * 10**6 * per_byte)
    assert by_ranks[8]["weak"]["both"] == pytest.approx(0.5 + 7 * lag + messages + reduced)
    # More than 8 ranks exchange summaries, if these were measured.
    gathers = {way: [{"operation": "all-gather", "bytes": 10**6}] for way in ("forward", "backward")}
    with_summaries = model | {"sent": gathers, "ours": {"both": {"median": 0.8}, "parameters": 10**8}}
    by_ranks_of_both = {row["ranks"]: row for row in model_rows({"rows": [*rows, model, with_summaries]})}
    for ranks, row in by_ranks_of_both.items():
        if ranks <= 8:
            assert row == by_ranks[ranks] and row["exchange"] == "chain"
        else:
            expected = 0.8 - sent(4, 2) + sent(ranks, ranks.bit_length() - 1)
            assert row["exchange"] == "summaries" and row["weak"]["both"] == pytest.approx(expected)
    assert {row["exchange"] for row in by_ranks.values()} == {"chain"}
    # model_rows() models nothing before the collectives are measured.
    assert model_rows({"rows": [model]}) == []


def test_figure_of_speedups(monkeypatch, tmp_path):
    """The measured and the modelled speed-ups of the committed results, in a legible figure."""
    pytest.importorskip("matplotlib", reason="the figures are drawn with matplotlib")
    from plot_helpers import assert_legible

    from benchmarks import roofline

    figures: list[Any] = []
    close = roofline.plt.close
    monkeypatch.setattr(roofline.plt, "close", figures.append)
    paths = [*report.DOCS.glob("benchmarks/*_distributed.json")]
    assert paths
    for path in paths:
        result = json.loads(path.read_text())
        roofline.draw_scaling(result, tmp_path / "figure.png")
        assert_legible(figures[-1])
        lines = [tuple(map(tuple, line.get_xydata())) for line in figures[-1].axes[0].lines]
        models = [row for row in result["rows"] if "one" in row]
        for row in models:
            speedup = row["one"]["both"]["median"] / row["ours"]["both"]["median"]
            assert ((1.0, 1.0), (float(row["ranks"]), speedup)) in lines, row["name"]
        for layer in {row["name"] for row in model_rows(result)}:
            of_layer = [(float(row["ranks"]), row["speedup"]) for row in model_rows(result) if row["name"] == layer]
            assert tuple(of_layer) in lines, layer
        # The point of one rank and the line of as many times as fast as ranks are the others.
        assert len(lines) == len(models) + len({row["name"] for row in model_rows(result)}) + 2
    for figure in figures:
        close(figure)


def test_every_model_has_its_own_name_and_a_bar():
    on_gpus = [replace(case, device="cuda") for case in bench_distributed.cases(OPTIONS) if hasattr(case, "device")]
    assert len({case.name for case in on_gpus}) == len(on_gpus)
    for case in on_gpus:
        assert any(fnmatchcase(case.name, rows) for rows in bars.load("distributed")), case.name


def test_too_few_ranks():
    with pytest.raises(SystemExit, match="expected two ranks or more, and on CUDA a GPU for each, got 1"):
        bench_distributed.cases(argparse.Namespace(ranks=1, device="cpu"))
