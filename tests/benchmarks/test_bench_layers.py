"""benchmarks/bench_layers.py: its bars, what it counts as kept for backward, its operators, and its section of the results."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich", reason="the benchmarks print their tables with rich")

from benchmarks import bars, bench_causal_conv1d, bench_layers, bench_norms, layer_cases, peers, report
from benchmarks.benchmark import Run, measure_cases, outputs_of
from benchmarks.layer_cases import LayerCase
from benchmarks.operator_cases import Convolution, Norm
from ssm_kernels import reference

RUN = Run(torch.device("cpu"), trials=1, warmup=0)


def timing(seconds: float) -> dict[str, float]:
    return {"median": seconds, "p20": seconds * 0.99, "p80": seconds * 1.01, "trials": 30, "spread": 0.01}


def figures(**quantities: object) -> dict[str, object]:
    return {"recorded": False, "unsupported": None, **quantities}


def test_figures_of_a_row():
    """A speed-up is the other's time over ours, a ratio of memory ours over the other's."""
    row = {
        "ours": figures(forward=timing(2e-3), peak=95, kept=40e3),
        "mamba_ssm": figures(forward=timing(4e-3), peak=100),
        "copy": figures(forward=timing(1e-3)),
    }
    assert bench_layers.figures(row, {}) == {
        "forward, speed-up over mamba_ssm": 2.0,
        "forward, speed-up over copy": 0.5,
        "kept": 40e3,
        "peak over mamba_ssm": 0.95,
    }
    assert bench_layers.figures({"ours": figures(forward=timing(1e-3)), "mamba_ssm": None}, {}) == {}


def test_kept_bytes_counts_storages_once_without_parameters_and_input():
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            return self.second(hidden) * self.second(hidden[..., :16])

    # The hidden tensor, which both calls of the second layer save, and the two factors.
    assert layer_cases.kept_bytes(Layer(), torch.randn(2, 3, 8, requires_grad=True)) == 4 * 6 * (16 + 4 + 4)


@pytest.mark.parametrize("layer", ["Mamba", "Mamba2"])
def test_layer_is_compared_with_float64(layer, monkeypatch):
    """A peer with other weights is reported as wrong."""
    monkeypatch.setattr(peers, "layers", lambda: {layer: getattr(layer_cases.ssm_kernels.nn, layer)})
    case = LayerCase(layer, 2, 64, 24)
    (row,) = measure_cases([case], RUN)
    assert row["wrong"] == [] and {"forward", "both", "kept"} <= row["ours"].keys() & row["mamba_ssm"].keys()
    assert 0 < row["errors"]["mamba_ssm"]["out"] < layer_cases.WRONG_OUT

    def spoil(ours: torch.nn.Module, peer: torch.nn.Module) -> None:
        peer.load_state_dict({name: 1.1 * value for name, value in ours.state_dict().items()})

    monkeypatch.setattr(layer_cases, "share_weights", spoil)
    assert "mamba_ssm: out" in measure_cases([case], RUN)[0]["wrong"]


BF16 = torch.bfloat16
SMALL_OPERATORS = [
    Convolution(2, 300, 24, columns=64, dtype=BF16),
    Convolution(2, 300, 24, channels_first=True, dtype=BF16),
    Norm("rms_norm_gated", (2, 300), 24, weight_dtype=BF16),
    Norm("add_rms_norm", (2, 300), 24, residual_dtype=torch.float32),
]


@pytest.mark.parametrize("call", SMALL_OPERATORS, ids=lambda call: call.name)
def test_operator_is_compared_with_float64(call, monkeypatch):
    """Results and gradients of ours and of PyTorch's functions are right; a peer that computes something else is wrong."""
    ours = call.function()
    monkeypatch.setattr(peers, "operator", lambda name: lambda x, **rest: ours(x=1.1 * x + 0.1, **rest))
    (row,) = measure_cases([call], RUN)
    assert row["wrong"] and all(wrong.startswith("mamba_ssm: out") for wrong in row["wrong"]), row["errors"]
    assert row["bytes"] == call.moved_bytes() and row["copy"]["forward"]["median"] > 0
    assert {"out 0", "grad_x", "grad_weight"} <= row["errors"]["PyTorch"].keys()


@pytest.mark.parametrize("channels_first", [False, True])
def test_gradients_have_the_strides_of_the_output(channels_first):
    ours = Convolution(2, 10, 24, channels_first=channels_first).contender(torch.device("cpu"))
    ((out,), (gradient,)) = outputs_of(ours.function, ours.inputs), ours.grads
    assert gradient.stride() == out.stride() == ((240, 1, 10) if channels_first else (240, 24, 1))
    assert gradient.std() > 0.5


@pytest.mark.parametrize("case", bench_norms.CASES, ids=lambda case: case.name)
def test_norms_beside_pytorch_and_the_reference(case):
    """In float64, every case of bench_norms.py is the same norm in all three."""
    sizes = {"columns": 1280} if case.group_size else {"columns": 24, "slice_of": case.slice_of and 64}
    short = Norm(**{**case.__dict__, "rows": (5,), **sizes})
    doubles = {name: tensor.double() for name, tensor in short.inputs(torch.device("cpu")).items()}
    exact = outputs_of(short.function(reference), doubles)
    for function in (short.function(), short.by_pytorch):
        torch.testing.assert_close(outputs_of(function, doubles), exact)


def test_names_of_cases_are_unique():
    for cases in (bench_norms.CASES, bench_causal_conv1d.CUDA_CASES, bench_causal_conv1d.CPU_CASES):
        assert len({case.name for case in cases}) == len(cases)


def test_every_case_has_its_own_name_and_a_bar():
    names = [case.name for case in bench_layers.CASES]
    assert len(set(names)) == len(names)
    for case in bench_layers.CASES:
        assert any(fnmatchcase(case.name, rows) for rows in bars.load("layers")), case.name


def test_section_of_the_page(tmp_path):
    layer = {
        "name": "Mamba2 B8 L2048 d_model 2560",
        "kind": "layer",
        "ours": figures(forward=timing(2e-3), both=timing(8e-3), peak=2000e6, kept=41.6e3, held=42e3),
        "mamba_ssm": figures(forward={"median": 2.822e-3}, both={"median": 9.566e-3}, peak=2091e6) | {"recorded": True},
        "before": figures(forward={"median": 5.534e-3}) | {"recorded": True},
        "errors": {"ours": {"out": 4e-3, "grad_x": 5e-3, "grad_D": 6e-3}},
    }
    latency = {"name": "two Mamba", "kind": "latency", "ours": figures(replay=timing(0.07e-3))}
    latency["mamba_ssm"] = {"recorded": False, "unsupported": "RuntimeError: float32"}
    operator = {
        "name": "causal_conv1d",
        "kind": "operator",
        "ours": figures(forward=timing(1e-4), backward=timing(2e-4)),
        "copy": figures(forward=timing(0.9e-4), backward=timing(1.5e-4)),
        "bytes": {"forward": 352e6, "backward": 528e6},
    }
    rows = [{"wrong": [], "errors": {}, **row} for row in (layer, latency, operator)]
    result = {
        "benchmark": "layers",
        "machine": {"gpu": "A GPU", "cpu": "a CPU"},
        "settings": {"trials": 30, "warmup": 5},
        "peer": "recorded: somewhere",
        "rows": rows,
        "skipped": {"Mamba generation": "left out by --no-models"},
    }
    path = tmp_path / "layers.json"
    path.write_text(json.dumps(result))
    assert report.main([str(path), "--output", str(tmp_path)]) == 0
    page = Path(tmp_path / "A_GPU.md").read_text()
    assert "## Layers and models" in page
    (times,) = [line for line in page.splitlines() if "2.822 (recorded)" in line]
    assert "2.000 ± 1 % | 5.534 (recorded) | 2.822 (recorded) | 1.41 | 8.000 ± 1 % |  | 9.566 (recorded) | 1.20 |" in times
    assert "| 2000 |  | 2091 (recorded) | 0.96 | 41.6 |  | 42.0 |  |" in page
    assert "| two Mamba | 0.0700 ± 1 % |  | unsupported |" in page
    assert "| causal_conv1d | forward | 0.1000 ± 1 % | 3520 | 0.0900 | 0.90 |" in page
    assert "| causal_conv1d | backward | 0.2000 ± 1 % | 2640 | 0.1500 | 0.75 |" in page
    assert "4.0e-03 (out) | 6.0e-03 (grad_D)" in page
    assert "| two Mamba | RuntimeError: float32 |" in page
    assert "| Mamba generation | left out by --no-models |" in page
    assert not any(word in page for word in ("bar", "goal", "missed", "training step"))
