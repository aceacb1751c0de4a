"""The operators and layers on DTensors of two processes of the CPU: the results of one process, without communication."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mlstm_helpers import function_of
from process_pool import start
from torch import Tensor

import ssm_kernels

PROCESSES = 2
BATCH, SEQLEN, CHANNELS, HEADDIM, DSTATE = 4, 20, 8, 6, 5


def selective_scan(groups: int | None = None) -> tuple[Callable[..., Any], dict[str, Tensor], dict[str, int]]:
    """A function, its tensors, and the axis of their channels."""
    matrix = (BATCH, DSTATE, SEQLEN) if groups is None else (BATCH, groups, DSTATE, SEQLEN)
    tensors = {
        "u": torch.randn(BATCH, CHANNELS, SEQLEN),
        "delta": torch.rand(BATCH, CHANNELS, SEQLEN),
        "A": -torch.rand(CHANNELS, DSTATE),
        "B": torch.randn(matrix),
        "C": torch.randn(matrix),
        "D": torch.randn(CHANNELS),
        "z": torch.randn(BATCH, CHANNELS, SEQLEN),
        "delta_bias": torch.randn(CHANNELS),
        "initial_state": torch.randn(BATCH, CHANNELS, DSTATE),
    }
    channels = {"u": 1, "delta": 1, "A": 0, "D": 0, "z": 1, "delta_bias": 0, "initial_state": 1}
    channels |= {"B": 1, "C": 1} if groups else {}
    return lambda **t: ssm_kernels.selective_scan(**t, delta_softplus=True, return_last_state=True), tensors, channels


def scan_of_two_samples(groups: int | None = None) -> tuple[Callable[..., Any], dict[str, Tensor], dict[str, int]]:
    _, tensors, channels = selective_scan(groups)
    tensors |= {
        "lam": torch.rand(BATCH, CHANNELS, SEQLEN),
        "previous_u": torch.randn(BATCH, CHANNELS),
        "previous_B": torch.randn(tensors["B"].shape[:-1]),
    }
    channels |= {"lam": 1, "previous_u": 1} | ({"previous_B": 1} if groups else {})
    operator = torch.ops.ssm_kernels.selective_scan_two_sample
    return lambda **t: operator(**t, discretization="exp_trapezoidal", delta_softplus=True), tensors, channels


def ssd_chunk_scan(groups: int) -> tuple[Callable[..., Any], dict[str, Tensor], dict[str, int]]:
    tensors = {
        "x": torch.randn(BATCH, SEQLEN, CHANNELS, HEADDIM),
        "dt": torch.rand(BATCH, SEQLEN, CHANNELS),
        "A": -torch.rand(CHANNELS),
        "B": torch.randn(BATCH, SEQLEN, groups, DSTATE),
        "C": torch.randn(BATCH, SEQLEN, groups, DSTATE),
        "D": torch.randn(CHANNELS),
        "z": torch.randn(BATCH, SEQLEN, CHANNELS, HEADDIM),
        "dt_bias": torch.randn(CHANNELS),
        "initial_states": torch.randn(BATCH, CHANNELS, HEADDIM, DSTATE),
    }
    channels = {"x": 2, "dt": 2, "A": 0, "D": 0, "z": 2, "dt_bias": 0, "initial_states": 1}
    channels |= {"B": 2, "C": 2} if groups > 1 else {}
    return lambda **t: ssm_kernels.ssd_chunk_scan(**t, dt_softplus=True, return_final_states=True), tensors, channels


def ssd_chunk_scan_of_log_decays() -> tuple[Callable[..., Any], dict[str, Tensor], dict[str, int]]:
    _, tensors, channels = ssd_chunk_scan(2)
    tensors = {name: value for name, value in tensors.items() if name not in ("dt", "A", "dt_bias")}
    tensors |= {name: torch.rand(BATCH, SEQLEN, CHANNELS) - 0.7 for name in ("log_decay", "gain")}
    channels = {name: axis for name, axis in channels.items() if name in tensors} | {"log_decay": 2, "gain": 2}
    return lambda **t: ssm_kernels.ssd_chunk_scan(dt=None, A=None, **t, return_final_states=True), tensors, channels


def delta_rule_scan(
    *, heads: int = CHANNELS // 2, gate: bool = False, updates: int = 1
) -> tuple[Callable[..., Any], dict[str, Tensor], dict[str, int]]:
    """``gate``: one a column; else one a head."""
    columns, steps = (CHANNELS, DSTATE) if gate else (CHANNELS,), SEQLEN * updates
    tensors = {
        "q": torch.randn(BATCH, SEQLEN, heads, DSTATE),
        "k": torch.randn(BATCH, steps, heads, DSTATE),
        "v": torch.randn(BATCH, steps, CHANNELS, HEADDIM),
        "beta": torch.rand(BATCH, steps, CHANNELS),
        "g": torch.randn(BATCH, SEQLEN, *columns),
        "A_log": torch.randn(CHANNELS),
        "dt_bias": torch.randn(columns),
        "initial_states": torch.randn(BATCH, CHANNELS, HEADDIM, DSTATE),
    }
    channels = {"v": 2, "beta": 2, "g": 2, "A_log": 0, "dt_bias": 0, "initial_states": 1}
    channels |= {"q": 2, "k": 2} if heads > 1 else {}
    options = {"qk_l2norm": True, "num_householder": updates, "return_final_states": True}
    return lambda **t: ssm_kernels.delta_rule_scan(**t, **options), tensors, channels


def mlstm_scan() -> tuple[Callable[..., Any], dict[str, Tensor], dict[str, int]]:
    tensors = {
        **{name: torch.randn(BATCH, SEQLEN, CHANNELS, DSTATE) for name in "qk"},
        "v": torch.randn(BATCH, SEQLEN, CHANNELS, HEADDIM),
        **{name: torch.randn(BATCH, SEQLEN, CHANNELS) for name in "if"},
        "initial_C": torch.randn(BATCH, CHANNELS, HEADDIM, DSTATE),
        "initial_n": torch.randn(BATCH, CHANNELS, DSTATE),
        "initial_m": torch.randn(BATCH, CHANNELS),
    }
    channels = dict.fromkeys("qkvif", 2) | dict.fromkeys(("initial_C", "initial_n", "initial_m"), 1)
    return lambda **t: function_of("mlstm_scan")(**t, return_final_states=True), tensors, channels


def causal_conv1d() -> tuple[Callable[..., Any], dict[str, Tensor], dict[str, int]]:
    tensors = {
        "x": torch.randn(BATCH, SEQLEN, CHANNELS),
        "weight": torch.randn(CHANNELS, 4),
        "bias": torch.randn(CHANNELS),
        "initial_state": torch.randn(BATCH, CHANNELS, 3),
    }
    channels = {"x": 2, "weight": 0, "bias": 0, "initial_state": 1}
    return lambda **t: ssm_kernels.causal_conv1d(**t, activation="silu", return_final_state=True), tensors, channels


def rglru_scan() -> tuple[Callable[..., Any], dict[str, Tensor], dict[str, int]]:
    shape = (BATCH, SEQLEN, CHANNELS)
    tensors = {name: torch.randn(shape) for name in ("recurrence_gate", "input_gate", "x")}
    tensors |= {"recurrent_param": torch.rand(CHANNELS), "h0": torch.randn(BATCH, CHANNELS)}
    channels = {"recurrence_gate": 2, "input_gate": 2, "x": 2, "recurrent_param": 0, "h0": 1}
    return lambda **t: ssm_kernels.rglru_scan(**t, return_last_state=True), tensors, channels


def rms_norm_gated() -> tuple[Callable[..., Any], dict[str, Tensor], dict[str, int]]:
    shape = (BATCH, SEQLEN, CHANNELS)
    tensors = {"x": torch.randn(shape), "weight": torch.randn(CHANNELS), "z": torch.randn(shape)}
    return lambda **t: (ssm_kernels.rms_norm_gated(**t),), tensors, {}


def add_rms_norm() -> tuple[Callable[..., Any], dict[str, Tensor], dict[str, int]]:
    shape = (BATCH, SEQLEN, CHANNELS)
    tensors = {"x": torch.randn(shape), "residual": torch.randn(shape), "weight": torch.randn(CHANNELS)}
    return lambda **t: ssm_kernels.add_rms_norm(**t), tensors, {}


Case = tuple[Callable[..., Any], dict[str, Tensor], dict[str, int]]


def selective_state_update(*, heads: bool = False, tokens: int = 0, groups: int = 0, writes: tuple[str, ...] = ()) -> Case:
    """``writes``: the tensors beside the state that the call is given to write into."""
    channels = (CHANNELS, HEADDIM) if heads else (CHANNELS,)
    rows = (BATCH, tokens) if tokens else (BATCH,)
    matrix = (*rows, groups, DSTATE) if groups else (*rows, DSTATE)
    tensors = {
        "state": torch.randn(BATCH, *channels, DSTATE),
        "x": torch.randn(*rows, *channels),
        "dt": torch.rand(*rows, *channels),
        "A": -torch.rand(*channels, DSTATE),
        "B": torch.randn(matrix),
        "C": torch.randn(matrix),
        "D": torch.randn(channels),
        "z": torch.randn(*rows, *channels),
        "dt_bias": torch.randn(channels),
    }
    axis = len(rows)
    places = {"state": 1, "x": axis, "dt": axis, "z": axis, "A": 0, "D": 0, "dt_bias": 0}
    places |= {"B": axis, "C": axis} if groups else {}
    if "out" in writes:
        tensors["out"], places["out"] = torch.zeros(*rows, *channels), axis
    if "intermediate_states_buffer" in writes:
        tensors["intermediate_states_buffer"] = torch.zeros(BATCH, tokens, *channels, DSTATE)
        places["intermediate_states_buffer"] = 2

    def call(**t: Tensor) -> tuple[Tensor, ...]:
        return ssm_kernels.selective_state_update(**t, dt_softplus=True), t["state"], *(t[name] for name in writes)

    return call, tensors, places


def step_of_two_samples(*, heads: bool = False, tokens: int = 0, groups: int = 0) -> Case:
    _, tensors, places = selective_state_update(heads=heads, tokens=tokens, groups=groups)
    samples = {
        "previous_x": torch.randn(tensors["state"].shape[:-1]),
        "previous_B": torch.randn(BATCH, *((groups,) if groups else ()), DSTATE),
    }
    places |= {"previous_x": 1, "lam": places["x"]} | ({"previous_B": 1} if groups else {})

    def call(**t: Tensor) -> tuple[Tensor, ...]:
        out = ssm_kernels.selective_state_update(**t, dt_softplus=True, discretization="exp_trapezoidal")
        return out, t["state"], t["previous_x"]

    return call, tensors | samples | {"lam": torch.rand(tensors["x"].shape)}, places


def delta_rule_step(*, gate: bool = False, updates: int = 1, tokens: int = 0, writes: tuple[str, ...] = ()) -> Case:
    """``gate``: one a column; else one a head. Half as many heads of q and k as value heads."""
    rows = (BATCH, tokens) if tokens else (BATCH,)
    entries = (BATCH, tokens * updates) if tokens else rows if updates == 1 else (BATCH, updates)
    columns = (CHANNELS, DSTATE) if gate else (CHANNELS,)
    tensors = {
        "states": torch.randn(BATCH, CHANNELS, HEADDIM, DSTATE),
        "q": torch.randn(*rows, CHANNELS // 2, DSTATE),
        "k": torch.randn(*entries, CHANNELS // 2, DSTATE),
        "v": torch.randn(*entries, CHANNELS, HEADDIM),
        "beta": torch.rand(*entries, CHANNELS),
        "g": torch.randn(*rows, *columns),
        "A_log": torch.randn(CHANNELS),
        "dt_bias": torch.randn(columns),
    }
    axis, entry = len(rows), len(entries)
    places = {"states": 1, "q": axis, "k": entry, "v": entry, "beta": entry, "g": axis, "A_log": 0, "dt_bias": 0}
    if "out" in writes:
        tensors["out"], places["out"] = torch.zeros(*rows, CHANNELS, HEADDIM), axis
    if "intermediate_states_buffer" in writes:
        tensors["intermediate_states_buffer"] = torch.zeros(BATCH, tokens, CHANNELS, HEADDIM, DSTATE)
        places["intermediate_states_buffer"] = 2

    def call(**t: Tensor) -> tuple[Tensor, ...]:
        out = ssm_kernels.delta_rule_step(**t, qk_l2norm=True, num_householder=updates)
        return out, t["states"], *(t[name] for name in writes)

    return call, tensors, places


def mlstm_step() -> Case:
    tensors = {
        "C": torch.randn(BATCH, CHANNELS, HEADDIM, DSTATE),
        "n": torch.randn(BATCH, CHANNELS, DSTATE),
        "m": torch.randn(BATCH, CHANNELS),
        **{name: torch.randn(BATCH, CHANNELS, DSTATE) for name in "qk"},
        "v": torch.randn(BATCH, CHANNELS, HEADDIM),
        **{name: torch.randn(BATCH, CHANNELS) for name in "if"},
    }

    def call(**t: Tensor) -> tuple[Tensor, ...]:
        return ssm_kernels.mlstm_step(**t), t["C"], t["n"], t["m"]

    return call, tensors, dict.fromkeys(tensors, 1)


def causal_conv1d_update(*, tokens: int = 0, writes: tuple[str, ...] = ()) -> Case:
    rows = (BATCH, tokens) if tokens else (BATCH,)
    tensors = {
        "conv_state": torch.randn(BATCH, CHANNELS, 4 + tokens),
        "x": torch.randn(*rows, CHANNELS),
        "weight": torch.randn(CHANNELS, 4),
        "bias": torch.randn(CHANNELS),
    }
    places = {"conv_state": 1, "x": len(rows), "weight": 0, "bias": 0}
    if "out" in writes:
        tensors["out"], places["out"] = torch.zeros(*rows, CHANNELS), len(rows)
    if "intermediate_conv_window" in writes:
        tensors["intermediate_conv_window"], places["intermediate_conv_window"] = torch.zeros(BATCH, tokens, CHANNELS, 3), 2

    def call(**t: Tensor) -> tuple[Tensor, ...]:
        return ssm_kernels.causal_conv1d_update(**t), t["conv_state"], *(t[name] for name in writes)

    return call, tensors, places


def summary(name: str, of_scan: tuple[Callable[..., Any], dict[str, Tensor], dict[str, int]]) -> Case:
    """The summary of a scan, of the tensors that it shares with the scan."""
    function = getattr(ssm_kernels, f"{name}_summary")
    names = inspect.signature(function).parameters
    tensors, channels = ({key: value for key, value in of.items() if key in names} for of in of_scan[1:])
    return lambda **t: function(**t), tensors, channels


BUFFER, WINDOW = ("out", "intermediate_states_buffer"), ("out", "intermediate_conv_window")
CASES = {
    "selective_scan": selective_scan,
    "selective_scan, two groups": lambda: selective_scan(2),
    "selective_scan, two samples": scan_of_two_samples,
    "selective_scan, two samples and groups": lambda: scan_of_two_samples(2),
    "ssd_chunk_scan": lambda: ssd_chunk_scan(1),
    "ssd_chunk_scan, two groups": lambda: ssd_chunk_scan(2),
    "ssd_chunk_scan, log decays": ssd_chunk_scan_of_log_decays,
    "selective_scan_summary": lambda: summary("selective_scan", selective_scan(2)),
    "ssd_chunk_scan_summary": lambda: summary("ssd_chunk_scan", ssd_chunk_scan(2)),
    "rglru_scan_summary": lambda: summary("rglru_scan", rglru_scan()),
    "delta_rule_scan": delta_rule_scan,
    "delta_rule_scan, one head": lambda: delta_rule_scan(heads=1),
    "delta_rule_scan, gates of columns": lambda: delta_rule_scan(gate=True),
    "delta_rule_scan, updates": lambda: delta_rule_scan(updates=2),
    "mlstm_scan": mlstm_scan,
    "causal_conv1d": causal_conv1d,
    "rglru_scan": rglru_scan,
    "rms_norm_gated": rms_norm_gated,
    "add_rms_norm": add_rms_norm,
    "selective_state_update": selective_state_update,
    "selective_state_update, heads": lambda: selective_state_update(heads=True, groups=2),
    "selective_state_update, two groups": lambda: selective_state_update(groups=2),
    "selective_state_update, two samples": step_of_two_samples,
    "selective_state_update, two samples and tokens": lambda: step_of_two_samples(heads=True, tokens=3, groups=2),
    "selective_state_update_out": lambda: selective_state_update(writes=("out",)),
    "selective_state_update_out, heads": lambda: selective_state_update(heads=True, writes=("out",)),
    "selective_state_update_out, tokens": lambda: selective_state_update(tokens=2, writes=BUFFER),
    "selective_state_update_out, heads and tokens": lambda: selective_state_update(
        heads=True, tokens=4, groups=2, writes=BUFFER
    ),
    "delta_rule_step": delta_rule_step,
    "delta_rule_step, gates of columns": lambda: delta_rule_step(gate=True),
    "delta_rule_step, updates": lambda: delta_rule_step(updates=2),
    "delta_rule_step_out, tokens": lambda: delta_rule_step(tokens=2, updates=2, writes=BUFFER),
    "mlstm_step": mlstm_step,
    "causal_conv1d_update": causal_conv1d_update,
    "causal_conv1d_update, tokens": lambda: causal_conv1d_update(tokens=2),
    "causal_conv1d_update_out": lambda: causal_conv1d_update(writes=("out",)),
    "causal_conv1d_update_out, tokens": lambda: causal_conv1d_update(tokens=2, writes=WINDOW),
}
WITHOUT_BATCH = {"A", "A_log", "recurrent_param", "D", "delta_bias", "dt_bias", "weight", "bias"}


def check_operator(name: str, axis: str, mesh: Any) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    torch.manual_seed(0)
    function, tensors, channels = CASES[name]()
    if axis == "batch":
        cut = {tensor: 0 for tensor in tensors if tensor not in WITHOUT_BATCH}
    else:
        cut = channels
        if not channels:
            return
    placements = {tensor: Shard(cut[tensor]) if tensor in cut else Replicate() for tensor in tensors}
    trains = not {"state", "states", "conv_state", "m"} & set(tensors)
    whole = {key: value.clone().requires_grad_(trains) for key, value in tensors.items()}
    sharded = {key: distribute_tensor(value, mesh, [placements[key]]).requires_grad_(trains) for key, value in tensors.items()}
    expected = function(**whole)
    weights = [torch.rand_like(output) for output in expected]
    with CommDebugMode() as communication:
        actual = function(**sharded)
        if trains:
            pairs = zip(weights, actual, strict=True)
            spread = [distribute_tensor(weight, mesh, output.placements, src_data_rank=None) for weight, output in pairs]
            torch.autograd.backward(actual, spread)
    assert communication.get_total_counts() == 0, f"{name}, {axis}: {communication.get_comm_counts()}"
    for output, wanted in zip(actual, expected, strict=True):
        assert output.placements[0].is_shard(), f"{name}, {axis}: {output.placements}"
        torch.testing.assert_close(output.full_tensor(), wanted, msg=lambda text: f"{name}, {axis}: {text}")
    if not trains:
        return
    torch.autograd.backward(expected, weights)
    for key, tensor in sharded.items():
        wanted = placements[key] if key in cut else Partial()
        assert tensor.grad.placements == (wanted,), f"{name}, {axis}, {key}: {tensor.grad.placements}"
        assert_same(tensor.grad, whole[key].grad, f"{name}, {axis}, {key}")


def check_slots(mesh: Any) -> None:
    """Slots of a cache are cut along the channels only: a batch that is cut raises, before anything is written."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    function, tensors, channels = selective_state_update(writes=("out",))
    tensors["state_batch_indices"] = torch.tensor([3, 0, 2, 1])
    whole = {key: value.clone() for key, value in tensors.items()}
    expected = function(**whole)

    def distribute(cut: dict[str, int]) -> dict[str, Any]:
        return {
            key: distribute_tensor(value, mesh, [Shard(cut[key]) if key in cut else Replicate()])
            for key, value in tensors.items()
        }

    for output, wanted in zip(function(**distribute(channels)), expected, strict=True):
        assert output.placements[0].is_shard()
        torch.testing.assert_close(output.full_tensor(), wanted)
    with pytest.raises(RuntimeError, match="selective_state_update_out: expected state to be replicated or cut as the other"):
        function(**distribute({key: 0 for key in tensors if key not in WITHOUT_BATCH}))


def assert_same(gradient: Any, expected: Tensor, place: str) -> None:
    """Sums over two devices are rounded in another order."""
    torch.testing.assert_close(gradient.full_tensor(), expected, rtol=1e-4, atol=1e-5, msg=lambda text: f"{place}: {text}")


def check_layers(mesh: Any) -> None:
    """Layers with replicated parameters and a batch that is cut."""
    from ssm_kernels.nn import Mamba, Mamba2, MinGRU

    torch.manual_seed(0)
    layers = {
        "Mamba": Mamba(16, d_state=8),
        "Mamba2": Mamba2(16, d_state=8, headdim=8),
        "MinGRU": MinGRU(16, 16, batch_first=True),
    }
    for name, layer in layers.items():
        check_layer(name, layer, mesh)


def check_layer(place: str, layer: torch.nn.Module, mesh: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    def output_of(x: Tensor) -> Tensor:
        output = layer(x)
        return output[0] if isinstance(output, tuple) else output

    x = torch.randn(BATCH, SEQLEN, 16)
    expected = output_of(x)
    expected.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    distribute_module(layer, mesh)
    actual = output_of(distribute_tensor(x, mesh, [Shard(0)]))
    assert actual.placements == (Shard(0),)
    torch.testing.assert_close(actual.full_tensor(), expected)
    actual.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert_same(parameter.grad, gradients[name], f"{place}, {name}")


def work(rank: int, folder: str) -> None:
    from ssm_kernels.integrations import dtensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    mesh = dist.init_device_mesh("cpu", (PROCESSES,))
    dtensor.register()
    dtensor.register()
    for name in CASES:
        for axis in ("batch", "channels"):
            check_operator(name, axis, mesh)
    check_slots(mesh)
    check_layers(mesh)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    # DTensors keep the group, and with it gloo's threads, alive. Where the interpreter ends before them, the process
    # sometimes aborts.
    os._exit(0)


@pytest.mark.slow
def test_shards_of_two_processes(tmp_path: Path):
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    processes = start(work, (str(tmp_path),), PROCESSES)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * PROCESSES
