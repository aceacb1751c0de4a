"""benchmarks/bench_cpu.py: its compositions of the layers, what its bars hold, and its sections of the results."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich", reason="the benchmarks print their tables with rich")

from benchmarks import bench_cpu, composed_layers, report
from benchmarks.bench_cpu import agreeing, compare, of_convolution, of_layer
from benchmarks.benchmark import Contender, Run, main
from benchmarks.harness import Timing
from benchmarks.operator_cases import Convolution

RUN = Run(torch.device("cpu"), trials=1, warmup=0)
MACHINE = {"cpu": "A CPU", "threads": 2, "cpu_capability": "AVX512"}
CASES = [
    Convolution(2, 40, 24, columns=64),
    Convolution(2, 40, 24, channels_first=True),
    Convolution(2, 40, 24, columns=64, dtype=torch.bfloat16),
]


def timings(ours: str, other: str, forward: float, both: float) -> dict[str, dict[str, float]]:
    """Timings of a side that takes 1 s and 2 s and of another that takes so many times as long."""
    seconds = {f"{ours}_forward": 1.0, f"{other}_forward": forward, f"{ours}_both": 2.0, f"{other}_both": 2.0 * both}
    return {name: Timing.of([value]).to_dict() for name, value in seconds.items()}


@pytest.mark.parametrize("layer", ["Mamba", "Mamba2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer_beside_its_composition(layer, dtype, monkeypatch):
    found = compare(of_layer(layer, 64, dtype, seed=0, batch=2, seqlen=40), RUN)
    assert set(found) == {f"{side}_{what}" for side in ("layer", "composed") for what in ("forward", "both")}
    exact = getattr(composed_layers, layer.lower())
    monkeypatch.setattr(composed_layers, layer.lower(), lambda module, x: 1.1 * exact(module, x))
    with pytest.raises(RuntimeError, match=f"{layer} 64.*expected out of layer and composed to agree"):
        of_layer(layer, 64, dtype, seed=0, batch=2, seqlen=40)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} {case.dtype}")
def test_convolution_beside_pytorch(case):
    found = compare(of_convolution("slice", case, seed=0), RUN)
    assert set(found) == {f"{side}_{what}" for side in ("kernel", "PyTorch") for what in ("forward", "both")}


def test_gradients_are_compared():
    functions = {"kernel": lambda x: 2 * x, "PyTorch": lambda x: x + x.detach()}
    sides = {who: Contender(function, {"x": torch.ones(3)}, [torch.ones(3)]) for who, function in functions.items()}
    with pytest.raises(RuntimeError, match="rows: expected grad_x of kernel and PyTorch to agree"):
        agreeing("rows", sides)


def test_rows_of_convolutions_have_both_dtypes_and_layouts():
    cases = bench_cpu.convolutions().values()
    assert len({(case.dtype, case.channels_first, case.seqlen) for case in cases}) == len(cases) == 8
    assert len({case.dtype for case in cases}) == len({case.channels_first for case in cases}) == 2
    assert all(case.width == 4 and (case.columns is None) == case.channels_first for case in cases)


@pytest.mark.parametrize(
    ("section", "enough", "too_much"),
    [("", 30, 31), ("_recurrences", 30, 31), ("_convolutions", 3, 4), ("_layers", 2, 3)],
    ids=str,
)
def test_requirements(section, enough, too_much, monkeypatch, tmp_path, capsys):
    """Each option holds its own section, and of causal_conv1d forward too; without a number it holds the bars."""
    made = []
    monkeypatch.setattr(
        bench_cpu, "of_functions", lambda name, inputs, **options: made.append(name) or ("kernel", "loop", 1, 30)
    )
    monkeypatch.setattr(bench_cpu, "of_convolution", lambda *args: ("kernel", "PyTorch", 3.5, 9))
    monkeypatch.setattr(bench_cpu, "of_layer", lambda *args, **sizes: ("layer", "composed", 1, 2))
    monkeypatch.setattr(bench_cpu, "compare", lambda sides, run: timings(*sides))
    path = tmp_path / "cpu.json"
    assert main(bench_cpu.BENCHMARK, None, [f"--require{section}", str(enough), "--json", str(path)]) == 0
    assert main(bench_cpu.BENCHMARK, None, [f"--require{section}"]) == 0
    capsys.readouterr()
    assert main(bench_cpu.BENCHMARK, None, [f"--require{section}", str(too_much)]) == 1
    assert f"required ≥ {too_much}" in capsys.readouterr().err
    operators = {"selective_scan", "ssd_chunk_scan", "delta_rule_scan"}
    assert set(made) == {*operators, *(row.partition(",")[0] for row in bench_cpu.RECURRENCES)}

    result = json.loads(path.read_text())
    assert result["methods"].keys() == {"zoh"} and result["recurrences"]["rows"].keys() == bench_cpu.RECURRENCES.keys()
    result["machine"] = MACHINE
    path.write_text(json.dumps(result))
    assert report.main([str(path), "--output", str(tmp_path)]) == 0
    page = Path(tmp_path / "A_CPU.md").read_text()
    assert "| x | forward | forward, PyTorch | ratio | forward + backward | forward + backward, PyTorch | ratio |" in page
    assert page.count("| 3.5 | 2000.00 ± 0 % | 18000.00 ± 0 % | 9.0 |") == 8
    assert "| Mamba2 768, bfloat16 | 1000.00 ± 0 % | 1000.00 ± 0 % | 1.00 |" in page
    assert page.count("| 2.00 |") == 8
    assert "causal_conv1d of width 4" in page and "missed" not in page


def test_sections_without_rows_are_left_out_of_the_page(tmp_path):
    files = {path.stem: json.loads(path.read_text()) for path in sorted(report.DOCS.glob("benchmarks/*_cpu.json"))}
    assert any("layers" not in result for result in files.values())
    for name, result in files.items():
        page = report.section(result)
        assert ("Composed" in page) == ("layers" in result), name


def test_methods_have_their_alias():
    parser = argparse.ArgumentParser()
    bench_cpu.add_options(parser)
    for name in ("foh", "zoh_exact"):
        assert parser.parse_args(["--methods", "zoh", name]).methods == ["zoh", "zoh_exact"]


def test_bad_arguments(capsys):
    for arguments in (
        ["--batch", "0"],
        ["--dstate", "257"],
        ["--methods", "tustin"],
        ["--n_trials", "0"],
        ["--cases", "nothing"],
    ):
        with pytest.raises(SystemExit, match="2"):
            main(bench_cpu.BENCHMARK, None, arguments)
        assert arguments[0] in capsys.readouterr().err
