"""benchmarks/bench_cpu.py: its compositions of the layers, what its bars hold, and its sections of the results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich", reason="the benchmarks print their tables with rich")

from benchmarks import bench_cpu, composed_layers, report
from benchmarks.harness import Timing
from benchmarks.operator_cases import Convolution

MACHINE = {"cpu": "A CPU", "threads": 2, "cpu_capability": "AVX512"}
CASES = [
    Convolution(2, 40, 24, columns=64),
    Convolution(2, 40, 24, channels_first=True),
    Convolution(2, 40, 24, columns=64, dtype=torch.bfloat16),
]


def timings(ours: str, other: str, forward: float, both: float) -> dict[str, Timing]:
    """Of a side that takes 1 s and 2 s and another that takes so many times as long."""
    seconds = {f"{ours} forward": 1.0, f"{other} forward": forward, f"{ours} both": 2.0, f"{other} both": 2.0 * both}
    return {name: Timing.of([value]) for name, value in seconds.items()}


@pytest.mark.parametrize("layer", ["Mamba", "Mamba2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer_beside_its_composition(layer, dtype, monkeypatch):
    found = bench_cpu.compare_layer(layer, 64, dtype, trials=1, warmup=0, seed=0, batch=2, seqlen=40)
    assert set(found) == {f"{side} {what}" for side in ("layer", "composed") for what in ("forward", "both")}
    exact = getattr(composed_layers, layer.lower())
    monkeypatch.setattr(composed_layers, layer.lower(), lambda module, x: 1.1 * exact(module, x))
    with pytest.raises(RuntimeError, match=f"{layer} 64.*expected the result of layer and composed to agree"):
        bench_cpu.compare_layer(layer, 64, dtype, trials=1, warmup=0, seed=0, batch=2, seqlen=40)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.described} {case.dtype}")
def test_convolution_beside_pytorch(case):
    found = bench_cpu.compare_convolution("slice", case, trials=1, warmup=0, seed=0)
    assert bench_cpu.sides_of(found) == ("kernel", "PyTorch")


def test_gradients_are_compared():
    x = torch.ones(3, requires_grad=True)
    calls = {"kernel": lambda: 2 * x, "PyTorch": lambda: x + x.detach()}
    with pytest.raises(RuntimeError, match="rows: expected the gradient 0 of kernel and PyTorch to agree"):
        bench_cpu.check_agreement("rows", calls, [x], torch.ones(3))


def test_rows_of_convolutions_have_both_dtypes_and_layouts():
    cases = bench_cpu.convolutions().values()
    assert len({(case.dtype, case.channels_first, case.seqlen) for case in cases}) == len(cases) == 8
    assert len({case.dtype for case in cases}) == len({case.channels_first for case in cases}) == 2
    assert all(case.width == 4 and (case.columns is None) == case.channels_first for case in cases)


@pytest.mark.parametrize(("forward", "both", "holds_forward", "held"), [(2, 4, True, 2), (2, 4, False, 4), (5, 4, True, 4)])
def test_what_a_bar_holds(forward, both, holds_forward, held):
    row = bench_cpu.judged_row("row", timings("kernel", "PyTorch", forward, both), 3, holds_forward)
    assert row["ratio_held"] == held and (row["ratio_forward"], row["ratio_forward_backward"]) == (forward, both)


@pytest.mark.parametrize(
    ("section", "enough", "too_much"), [("convolutions", 3, 4), ("layers", 2, 3), ("recurrences", 30, 31)], ids=str
)
def test_requirements(section, enough, too_much, monkeypatch, tmp_path):
    """Each option holds its own section, causal_conv1d's forward too."""
    monkeypatch.setattr(bench_cpu, "compare", lambda *args: timings("kernel", "loop", 30, 30))
    monkeypatch.setattr(bench_cpu, "compare_recurrence", lambda *args: timings("kernel", "loop", 1, 30))
    monkeypatch.setattr(bench_cpu, "compare_ssd", lambda *args: timings("kernel", "loop", 30, 30))
    monkeypatch.setattr(bench_cpu, "compare_convolution", lambda *args: timings("kernel", "PyTorch", 3.5, 9))
    monkeypatch.setattr(bench_cpu, "compare_layer", lambda *args, **sizes: timings("layer", "composed", 1, 2))
    path = tmp_path / "cpu.json"
    assert bench_cpu.main([f"--require_{section}", str(enough), "--json", str(path)]) == 0
    assert bench_cpu.main([f"--require_{section}", str(too_much)]) == 1

    result = json.loads(path.read_text())
    result["machine"] = MACHINE
    path.write_text(json.dumps(result))
    assert report.main([str(path), "--output", str(tmp_path)]) == 0
    page = Path(tmp_path / "A_CPU.md").read_text()
    assert "| x | forward | forward, PyTorch | ratio | forward + backward | forward + backward, PyTorch | ratio | bar |" in page
    assert page.count("| 3.5 | 2000.00 ± 0 % | 18000.00 ± 0 % | 9.0 | ≥ 3 met |") == 8
    assert "| Mamba2 768, bfloat16 | 1000.00 ± 0 % | 1000.00 ± 0 % | 1.00 |" in page
    assert page.count("| 2.00 | ≥ 1.5 met |") == 8
