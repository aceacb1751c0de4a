"""Context parallelism on 1 to 4 processes of the CPU: outputs, states and gradients of one process; what travels; errors."""

from __future__ import annotations

import copy
import datetime
import gc
import math
import os
import pickle
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint
from distributed_helpers import Collectives, Pool, spans
from model_helpers import MIXERS, make_model, make_tokens
from torch import Tensor

import ssm_kernels
from ssm_kernels import nn as layers

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from ssm_kernels import distributed
from ssm_kernels.distributed import ContextParallel, _agreement, _packing, sum_gradients

SEQLEN = 23
# The steps of each rank: fewer than a convolution's halo, none, and as many as a rank likes.
LENGTHS = {1: (23,), 2: (9, 14), 3: (2, 0, 21), 4: (1, 2, 17, 3)}
SIZES = [*LENGTHS]
TOLERANCE = 1e-10
RECURRENCES = {
    "linear_scan": ("a", "b"),
    "mingru_scan": ("gate", "candidate"),
    "minlstm_scan": ("forget", "input", "candidate"),
    "liquid_scan": ("candidate", "tau", "dt"),
    "rglru_scan": ("recurrence_gate", "input_gate", "x", "recurrent_param"),
    "hgrn_scan": ("log_gate", "x"),
    "elu_gru_scan": ("gate", "candidate"),
    "diag_linear_scan": ("gate", "x"),
}
CU_SEQLENS = (0, 5, 5, 11, 23)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("pool"))
    yield pool
    pool.close()


def generator(seed: int) -> Callable[..., Tensor]:
    source = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=source, dtype=torch.float64)


def close(actual: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{what}: {text}")


def compare(
    group: dist.ProcessGroup,
    name: str,
    inputs: Mapping[str, Tensor],
    of_steps: Mapping[str, int],
    axis: int,
    options: Mapping[str, Any],
    state: str | None,
) -> None:
    """Compares the operator ``name`` over the ranks of a group with the one of ``ssm_kernels``.

    Args:
        inputs: differentiable, of the whole sequence.
        of_steps: the axis of time of the inputs and options that have one.
        axis: the axis of time of the result.
        options: other arguments.
        state: the flag that asks for the last state, if that is compared too.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    own = [*spans(LENGTHS[size])][rank]

    def cut(name: str, value: Any) -> Any:
        if name not in of_steps:
            return value
        return value.narrow(of_steps[name], own.start, own.stop - own.start)

    flags = {} if state is None else {state: True}
    whole = {name: value.clone().requires_grad_() for name, value in inputs.items()}
    results = getattr(ssm_kernels, name)(**whole, **options, **flags)
    random = generator(1)
    factors = [random(*result.shape) for result in (results if state else (results,))]
    expected = results if state else (results,)
    sum((result * factor).sum() for result, factor in zip(expected, factors, strict=True)).backward()

    runs = []
    for _ in range(2):
        local = {name: cut(name, value).clone().requires_grad_() for name, value in inputs.items()}
        own_options = {name: cut(name, value) for name, value in options.items()}
        results = getattr(distributed, name)(**local, **own_options, **flags, group=group)
        actual = results if state else (results,)
        # Every rank returns the last state, and its share of the loss reads a part of it.
        loss = (actual[0] * factors[0].narrow(axis, own.start, own.stop - own.start)).sum()
        if state:
            loss = loss + (actual[1] * factors[1]).sum() * (rank + 1) / (size * (size + 1) / 2)
        loss.backward()
        runs.append([*actual, *(value.grad for value in local.values())])
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True)), f"{name}: other bits in a second run"

    close(actual[0], expected[0].narrow(axis, own.start, own.stop - own.start), f"{name}, {size} ranks, result")
    if state:
        close(actual[1], expected[1], f"{name}, {size} ranks, {state}")
    for key, value in local.items():
        gradient = value.grad
        if key not in of_steps:
            dist.all_reduce(gradient, group=group)
        close(gradient, cut(key, whole[key].grad), f"{name}, {size} ranks, {options}, gradient of {key}")


def packings(batch: int) -> dict[str, dict[str, Tensor]]:
    """Options of packed sequences: some cross the borders, some end there, and the numbers may go down."""
    source = torch.Generator().manual_seed(3)
    ascending = torch.randint(0, 3, (batch, SEQLEN), generator=source).sort(1).values
    random = torch.randint(0, 2, (batch, SEQLEN), generator=source)
    return {"unpacked": {}, "ascending": {"seq_idx": ascending}, "random": {"seq_idx": random.int()}}


def check_selective_scan(group: dist.ProcessGroup, rank: int) -> None:
    random = generator(0)
    batch, dim, dstate = 2, 4, 3
    steps = random(batch, dim, SEQLEN)
    inputs = {
        "u": steps,
        "delta": random(batch, dim, SEQLEN),
        "A": -random(dim, dstate).abs() - 0.1,
        "B": random(batch, 2, dstate, SEQLEN),
        "C": random(batch, dstate, SEQLEN),
        "D": random(dim),
        "z": random(batch, dim, SEQLEN),
        "delta_bias": random(dim),
        "initial_state": random(batch, dim, dstate),
    }
    of_steps = {"u": 2, "delta": 2, "z": 2, "B": 3, "C": 2, "seq_idx": 1}
    for discretization in ssm_kernels.discretizations:
        options = {"discretization": discretization, "delta_softplus": True}
        compare(group, "selective_scan", inputs, of_steps, 2, options, "return_last_state")
    for packing in packings(batch).values():
        compare(group, "selective_scan", inputs, of_steps, 2, {"delta_softplus": True} | packing, "return_last_state")
    row = {name: value[:1] if name in of_steps else value for name, value in inputs.items() if name != "initial_state"}
    packed = {"cu_seqlens": torch.tensor(CU_SEQLENS)}
    for packing in (packed, packed | packings(1)["random"]):
        compare(group, "selective_scan", row, of_steps, 2, {"discretization": "bilinear"} | packing, None)
    few = {name: inputs[name] for name in ("u", "delta", "A", "C")} | {"B": random(dim, dstate)}
    compare(group, "selective_scan", few, {"u": 2, "delta": 2, "C": 2}, 2, {}, None)


def check_ssd_chunk_scan(group: dist.ProcessGroup, rank: int) -> None:
    random = generator(0)
    batch, heads, headdim, groups, dstate = 2, 4, 3, 2, 5
    inputs = {
        "x": random(batch, SEQLEN, heads, headdim),
        "dt": random(batch, SEQLEN, heads),
        "A": -random(heads).abs(),
        "B": random(batch, SEQLEN, groups, dstate),
        "C": random(batch, SEQLEN, groups, dstate),
        "D": random(heads, headdim),
        "z": random(batch, SEQLEN, heads, headdim),
        "dt_bias": random(heads),
        "initial_states": random(batch, heads, headdim, dstate),
    }
    of_steps = dict.fromkeys(("x", "dt", "B", "C", "z", "seq_idx"), 1)
    step_sizes = {"dt_softplus": True, "dt_limit": (0.2, 1.0)}
    for discretization in ("zoh", "zoh_exact", "poly", "highorder", "rk4"):
        options = step_sizes | {"discretization": discretization}
        compare(group, "ssd_chunk_scan", inputs, of_steps, 1, options, "return_final_states")
    for packing in packings(batch).values():
        compare(group, "ssd_chunk_scan", inputs, of_steps, 1, step_sizes | packing, "return_final_states")
    row = {name: value[:1] if name in of_steps else value for name, value in inputs.items() if name != "initial_states"}
    packed = {"cu_seqlens": torch.tensor(CU_SEQLENS)}
    for packing in (packed, packed | packings(1)["random"]):
        compare(group, "ssd_chunk_scan", row, of_steps, 1, step_sizes | packing, None)


def check_causal_conv1d(group: dist.ProcessGroup, rank: int) -> None:
    random = generator(0)
    batch, channels = 2, 5
    of_steps = {"x": 1, "seq_idx": 1}
    for width in (1, 2, 4, 7):
        inputs = {"x": random(batch, SEQLEN, channels), "weight": random(channels, width), "bias": random(channels)}
        state = {"initial_state": random(batch, channels, width - 1)}
        for packing in packings(batch).values():
            options = {"activation": "silu"} | packing
            compare(group, "causal_conv1d", inputs | state, of_steps, 1, options, "return_final_state")
        row = inputs | {"x": inputs["x"][:1]}
        packed = {"cu_seqlens": torch.tensor(CU_SEQLENS, dtype=torch.int32)}
        for packing in (packed, packed | packings(1)["random"]):
            compare(group, "causal_conv1d", row, of_steps, 1, packing, None)


def check_recurrences(group: dist.ProcessGroup, rank: int) -> None:
    batch, channels = 2, 3
    for name, names in RECURRENCES.items():
        random = generator(0)
        inputs = {key: random(batch, SEQLEN, channels) for key in names}
        positive = {"a": "a", "log_gate": "log_gate"}
        inputs |= {
            key: -inputs[key].abs() if key == "log_gate" else torch.tanh(inputs[key]) for key in positive if key in inputs
        }
        if name == "liquid_scan":
            inputs |= {"tau": random(channels).abs() + 0.5, "dt": random(batch, SEQLEN, 1).abs()}
        if name == "rglru_scan":
            inputs["recurrent_param"] = random(channels)
        of_steps = {key: 1 for key, value in inputs.items() if value.dim() == 3} | {"reset": 1}
        reset = torch.rand(batch, SEQLEN, generator=torch.Generator().manual_seed(2)) < 0.15
        activations = ("g", "tanh") if name == "mingru_scan" else ()
        settings = [{}, {"reset": reset}, *({"candidate_activation": activation} for activation in activations)]
        if name == "mingru_scan":
            settings.append({"gate_is_logit": False})
        for reverse in (False, True):
            state = {"h0": random(batch, channels)}
            for options in settings:
                compare(group, name, inputs | state, of_steps, 1, options | {"reverse": reverse}, "return_last_state")
            row = {key: value[:1] if key in of_steps else value for key, value in inputs.items()}
            row["h0"] = random(len(CU_SEQLENS) - 1, channels)
            packed = {"cu_seqlens": torch.tensor(CU_SEQLENS), "reverse": reverse}
            compare(group, name, row, of_steps, 1, packed, "return_last_state")


CHECKS = {
    "selective_scan": check_selective_scan,
    "ssd_chunk_scan": check_ssd_chunk_scan,
    "causal_conv1d": check_causal_conv1d,
    "recurrences": check_recurrences,
}


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("check", CHECKS.values(), ids=list(CHECKS))
def test_ranks_are_one_process(pool: Pool, check: Callable[..., None], size: int):
    pool.check(check, size)


Cut = Callable[[Tensor, int], Tensor]


def compare_layer(
    group: dist.ProcessGroup, layer: nn.Module, call: Callable[[nn.Module, Cut], Any], what: str, axis: int = 1
) -> None:
    """Compares a layer whose sequences are split over the ranks of a group with the same layer on one process.

    Args:
        call: calls a layer with inputs that its second argument cuts along an axis; returns the outputs of these steps and, if
            there is one, the last state.
        axis: the axis of time of the outputs.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    own = [*spans(LENGTHS[size])][rank]
    parallel = copy.deepcopy(layer)
    distributed_layer = parallelize(parallel, group)

    expected = call(layer, lambda value, axis: value)
    expected = expected if isinstance(expected, tuple) else (expected,)
    random = generator(1)
    factors = [random(*result.shape) for result in expected]
    sum((result * factor).sum() for result, factor in zip(expected, factors, strict=True)).backward()

    def cut(value: Tensor, axis: int) -> Tensor:
        return value.narrow(axis, own.start, own.stop - own.start)

    actual = call(distributed_layer, cut)
    actual = actual if isinstance(actual, tuple) else (actual,)
    close(actual[0], cut(expected[0], axis), f"{what}, {size} ranks, output")
    loss = (actual[0] * cut(factors[0], axis)).sum()
    for value, whole, factor in zip(actual[1:], expected[1:], factors[1:], strict=True):
        close(value, whole, f"{what}, {size} ranks, last state")
        loss = loss + (value * factor).sum() / size
    loss.backward()
    sum_gradients(parallel, group)
    for (name, parameter), whole in zip(parallel.named_parameters(), layer.parameters(), strict=True):
        close(parameter.grad, whole.grad, f"{what}, {size} ranks, gradient of {name}")
    layer.zero_grad()


def parallelize(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
    return parallelize_module(module, mesh, ContextParallel())


def check_mamba(group: dist.ProcessGroup, rank: int) -> None:
    random = generator(0)
    x, z = random(2, SEQLEN, 6), random(2, SEQLEN, 6)
    for options in ({}, {"discretization": "bilinear", "bias": True}, {"d_conv": 1}, {"conv_bias": False, "d_conv": 6}):
        torch.manual_seed(0)
        layer = layers.Mamba(6, 4, **{"dt_rank": 2, "dtype": torch.float64} | options)
        compare_layer(group, layer, lambda layer, cut: layer(cut(x, 1)), f"Mamba {options}")
    seq_idx, cu_seqlens, row = packings(2)["ascending"]["seq_idx"], torch.tensor(CU_SEQLENS), x[:1]
    compare_layer(group, layer, lambda layer, cut: layer(cut(x, 1), seq_idx=cut(seq_idx, 1)), "Mamba, seq_idx")
    compare_layer(group, layer, lambda layer, cut: layer(cut(row, 1), cu_seqlens=cu_seqlens), "Mamba, cu_seqlens")
    layer = layers.SelectiveSSM(6, 4, dtype=torch.float64)
    initial = random(2, 6, 4)

    def call(layer: nn.Module, cut: Cut) -> Any:
        return layer(cut(x, 1), cut(z, 1), initial, return_last_state=True)

    compare_layer(group, layer, call, "SelectiveSSM")


def check_mamba2(group: dist.ProcessGroup, rank: int) -> None:
    x = generator(0)(2, SEQLEN, 6)
    seq_idx = packings(2)["ascending"]["seq_idx"]
    cu_seqlens = torch.tensor(CU_SEQLENS)
    sizes = {"d_state": 3, "headdim": 2, "dtype": torch.float64}
    variants: list[dict[str, Any]] = [
        {},
        {"ngroups": 2, "D_has_hdim": True, "norm_before_gate": True, "discretization": "zoh_exact"},
        {"rmsnorm": False, "d_ssm": 8, "bias": True, "conv_bias": False, "d_conv": 2, "dt_limit": (0.01, 0.05)},
    ]
    for options in variants:
        torch.manual_seed(0)
        layer = layers.Mamba2(6, **sizes | options)
        compare_layer(group, layer, lambda layer, cut: layer(cut(x, 1)), f"Mamba2 {options}")
    compare_layer(group, layer, lambda layer, cut: layer(cut(x, 1), seq_idx=cut(seq_idx, 1)), "Mamba2, seq_idx")
    row = x[:1]
    compare_layer(group, layer, lambda layer, cut: layer(cut(row, 1), cu_seqlens=cu_seqlens), "Mamba2, cu_seqlens")


def check_recurrent_layers(group: dist.ProcessGroup, rank: int) -> None:
    random = generator(0)
    x, hx, dt = random(2, SEQLEN, 5), random(4, 2, 3), random(2, SEQLEN).abs()
    reset = torch.rand(2, SEQLEN, generator=torch.Generator().manual_seed(2)) < 0.2
    cu_seqlens = torch.tensor(CU_SEQLENS)
    row = random(SEQLEN, 1, 5)
    for kind in (layers.MinGRU, layers.MinLSTM, layers.Liquid):
        torch.manual_seed(0)
        layer = kind(5, 3, num_layers=2, bidirectional=True, batch_first=True, dtype=torch.float64)

        def call(layer: nn.Module, cut: Cut, kind: type[nn.Module] = kind) -> Any:
            options = {"dt": cut(dt, 1)} if kind is layers.Liquid else {}
            return layer(cut(x, 1), hx, reset=cut(reset, 1), **options)

        compare_layer(group, layer, call, f"{kind.__name__}, reset")
        layer = kind(5, 3, dtype=torch.float64)
        compare_layer(group, layer, lambda layer, cut: layer(cut(row, 0), cu_seqlens=cu_seqlens), f"{kind.__name__}, packed", 0)


def check_models(group: dist.ProcessGroup, rank: int) -> None:
    tokens = make_tokens(1, SEQLEN)
    cu_seqlens = torch.tensor(CU_SEQLENS)
    for mixer in MIXERS:
        model = make_model(mixer, d_intermediate=20)
        options = {} if mixer == "Mamba" else {"cu_seqlens": cu_seqlens}

        def call(model: nn.Module, cut: Cut, options: dict[str, Tensor] = options) -> Tensor:
            return model(cut(tokens, 1), **options).logits

        compare_layer(group, model, call, f"MambaLM of {mixer}")


LAYER_CHECKS = {
    "Mamba": check_mamba,
    "Mamba2": check_mamba2,
    "recurrent": check_recurrent_layers,
    "MambaLM": check_models,
}


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("check", LAYER_CHECKS.values(), ids=list(LAYER_CHECKS))
def test_layers_on_ranks_are_those_on_one_process(pool: Pool, check: Callable[..., None], size: int):
    pool.check(check, size)


def check_collectives(group: dist.ProcessGroup, rank: int) -> None:
    """Counts what a rank sends: sizes of the docstrings of ``functions.py``, in bytes."""
    batch, d_model, width, dstate, channels = 2, 6, 4, 3, 12
    x = torch.randn(batch, 5 + rank, d_model, requires_grad=True)
    gather, number = "all_gather_into_tensor", 4
    halo, grad_halo = (batch * channels + 1) * (width - 1) * number, batch * channels * (width - 1) * number
    states = batch * channels * dstate * number

    layer = parallelize(layers.Mamba(d_model, dstate, width), group)
    with Collectives() as forward:
        out = layer(x)
    with Collectives() as backward:
        out.sum().backward()
    assert forward.sent == [(gather, halo), (gather, 2 * states)]
    assert backward.sent == [(gather, states), (gather, grad_halo)]

    heads, headdim, groups = 6, 2, 2
    channels += 2 * groups * dstate
    halo, grad_halo = (batch * channels + 1) * (width - 1) * number, batch * channels * (width - 1) * number
    states = batch * heads * headdim * dstate * number
    layer = parallelize(layers.Mamba2(d_model, dstate, width, headdim=headdim, ngroups=groups), group)
    borders = 4 * batch * 8
    for options, packing in (({}, []), ({"seq_idx": torch.zeros(batch, 5 + rank, dtype=torch.int32)}, [(gather, borders)])):
        with Collectives() as forward:
            out = layer(x, **options)
        with Collectives() as backward:
            out.sum().backward()
        assert forward.sent == [*packing, (gather, halo), (gather, states + batch * heads * number)]
        assert backward.sent == [(gather, states), (gather, grad_halo)]

    layer = parallelize(layers.MinGRU(d_model, 7, batch_first=True), group)
    with Collectives() as forward:
        out, _ = layer(x)
    with Collectives() as backward:
        out.sum().backward()
    assert forward.sent == [(gather, 2 * batch * 7 * number)]
    # The layer also returns the last state.
    assert backward.sent == [(gather, 2 * batch * 7 * number)]

    # All layers of a model share what they know of the borders.
    model = parallelize(make_model("Mamba2"), group)
    lengths, borders = 4 * 8, 4 * 8
    ends = torch.tensor([0, 7, 5 + 6 + 7])
    with Collectives() as forward:
        model(make_tokens(1, 5 + rank), cu_seqlens=ends)
    assert [sent for _, sent in forward.sent[:2]] == [lengths, borders] and len(forward.sent) == 2 + 2 * 2
    ends[1] = 8
    with Collectives() as forward:
        model(make_tokens(1, 5 + rank), cu_seqlens=ends)
    assert len(forward.sent) == 2 + 2 * 2

    # Gradients are added in buckets, with a number for each parameter.
    layer = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2).double())
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, rank + 1.0)
    with Collectives() as sums:
        sum_gradients(layer, group)
    assert sums.sent == [("all_reduce", (20 + 2) * 4), ("all_reduce", (12 + 2) * 8)]
    assert all((parameter.grad == 1 + 2 + 3).all() for parameter in layer.parameters())

    # Nothing before the scan needs a gradient, and so no rank sends one.
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    layer = parallelize(layers.Mamba(d_model, dstate, width).requires_grad_(False), group)
    layer.out_proj.requires_grad_(True)
    layer.D.requires_grad_(True)
    out = layer(x.detach())
    with Collectives() as backward:
        out.sum().backward()
    assert backward.sent == []


def test_bytes_of_a_layer(pool: Pool):
    pool.check(check_collectives, 3)


def test_one_rank_sends_nothing(pool: Pool):
    pool.check(check_one_rank, 1)


def check_one_rank(group: dist.ProcessGroup, rank: int) -> None:
    layer = parallelize(layers.Mamba2(6, 3, headdim=2), group)
    with Collectives() as sent:
        layer(torch.randn(1, 5, 6), cu_seqlens=torch.tensor([0, 2, 5])).sum().backward()
    assert sent.sent == []


def check_checkpointing(group: dist.ProcessGroup, rank: int) -> None:
    x = generator(0)(2, SEQLEN, 6)
    layer = layers.Mamba(6, 4, dtype=torch.float64)

    def call(layer: nn.Module, cut: Cut) -> Tensor:
        return torch.utils.checkpoint.checkpoint(layer, cut(x, 1), use_reentrant=False)

    compare_layer(group, layer, call, "checkpointed Mamba")


def check_compiled(group: dist.ProcessGroup, rank: int) -> None:
    x = generator(0)(2, SEQLEN, 6)
    random = generator(0)
    for layer in (
        layers.Mamba(6, 4, dtype=torch.float64),
        layers.Mamba2(6, 3, headdim=2, dtype=torch.float64),
        layers.MinGRU(6, 5, batch_first=True, dtype=torch.float64),
    ):
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(random(*parameter.shape) * 0.3)
        torch._dynamo.reset()

        def call(layer: nn.Module, cut: Cut) -> Any:
            own = cut(x, 1)
            return torch.compile(layer, backend="aot_eager", fullgraph=True)(own) if own is not x else layer(own)

        compare_layer(group, layer, call, f"compiled {type(layer).__name__}")


def check_low_precision(group: dist.ProcessGroup, rank: int) -> None:
    """Under autocast, and in bf16: dtypes of one process, and values within the rounding of bf16."""
    own = [*spans(LENGTHS[2])][rank]
    x = generator(0)(2, SEQLEN, 16)
    for make in (
        lambda dtype: layers.Mamba(16, 4, dtype=dtype),
        lambda dtype: layers.Mamba2(16, 4, headdim=8, dtype=dtype),
        lambda dtype: layers.MinGRU(16, 16, batch_first=True, dtype=dtype),
        lambda dtype: layers.Liquid(16, 16, batch_first=True, dtype=dtype),
        lambda dtype: layers.SelectiveSSM(16, 4, dtype=dtype),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            layer = make(dtype)
            parallel = parallelize(copy.deepcopy(layer), group)
            results = []
            for module, steps in ((layer, x), (parallel, x[:, own])):
                with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
                    out = module(steps.to(dtype))
                out = out[0] if isinstance(out, tuple) else out
                out.float().square().sum().backward()
                results.append(out)
            whole, part = results
            assert part.dtype == whole.dtype
            torch.testing.assert_close(part, whole[:, own], rtol=0.03, atol=0.03 * whole.abs().max().item())
            sum_gradients(parallel, group)
            for (name, actual), expected in zip(parallel.named_parameters(), layer.parameters(), strict=True):
                assert actual.grad.dtype == expected.grad.dtype
                scale = expected.grad.abs().max().item()
                close_to = torch.allclose(actual.grad, expected.grad, rtol=0.05, atol=0.05 * scale)
                assert close_to, f"{type(layer).__name__}, {dtype}, gradient of {name}"


def check_fsdp(group: dist.ProcessGroup, rank: int) -> None:
    """Two ranks for the batch, whose parameters FSDP2 shards, times two for the sequence."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    row, column = mesh["dp"].get_local_rank(), mesh["cp"].get_local_rank()
    tokens = make_tokens(4, SEQLEN + 1)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    own = (slice(2 * row, 2 * row + 2), [*spans(LENGTHS[2])][column])
    for mixer in MIXERS:
        model = make_model(mixer)
        parallel = copy.deepcopy(model)
        parallelize_module(parallel, mesh["cp"], ContextParallel())
        for layer in parallel.backbone.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(parallel, mesh=mesh["dp"])
        F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten()).backward()
        logits = parallel(inputs[own]).logits
        # FSDP2 averages over its two ranks; each has half of the batch.
        loss = F.cross_entropy(logits.flatten(0, 1), targets[own].flatten(), reduction="sum") / (2 * SEQLEN)
        loss.backward()
        sum_gradients(parallel, mesh["cp"])
        for (name, actual), expected in zip(parallel.named_parameters(), model.parameters(), strict=True):
            close(actual.grad.full_tensor(), expected.grad, f"{mixer}, gradient of {name}")

    # Sharded over the ranks of the sequence: FSDP2's average times their number is the sum.
    model.zero_grad()
    F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten()).backward()
    parallel = copy.deepcopy(model)
    parallel.zero_grad()
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
    parallelize_module(parallel, mesh, ContextParallel())
    for layer in parallel.backbone.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(parallel, mesh=mesh)
    steps = [*spans(LENGTHS[4])][rank]
    logits = parallel(inputs[:, steps]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets[:, steps].flatten(), reduction="sum") / targets.numel()
    (loss * dist.get_world_size(group)).backward()
    for (name, actual), expected in zip(parallel.named_parameters(), model.parameters(), strict=True):
        close(actual.grad.full_tensor(), expected.grad, f"sharded over the sequence's ranks, gradient of {name}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "size"),
    [(check_checkpointing, 3), (check_compiled, 2), (check_low_precision, 2), (check_fsdp, 4)],
    ids=["checkpointing", "compile", "low precision", "fsdp2"],
)
def test_works_with(pool: Pool, check: Callable[..., None], size: int):
    pool.check(check, size)


def raises(error: type[Exception], pattern: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=pattern):
        call()


def check_errors(group: dist.ProcessGroup, rank: int) -> None:
    """Every rank raises, and can go on."""

    def scan(dim: int, batch: int = 2, dtype: torch.dtype = torch.float32, needs_grad: bool = False, **options: Any) -> Any:
        u = torch.randn(batch, dim, 5 + rank, dtype=dtype, requires_grad=needs_grad)
        B = torch.randn(batch, 3, 5 + rank, dtype=dtype)
        A = options.pop("A", -torch.ones(dim, 3, dtype=dtype))
        return distributed.selective_scan(u, u, A, B, B, group=group, **options)

    # Each call is new on both ranks, so that they compare it.
    rule = ("zoh", "bilinear")[rank]
    expected = "same discretization on every rank, got zoh on rank 0 and bilinear on rank 1"
    raises(ValueError, expected, lambda: scan(1, discretization=rule))
    expected = r"same u on every rank, got float32 cpu \[2, 2, seqlen\] on rank 0 and float32 cpu \[1, 2, seqlen\] on rank 1"
    raises(ValueError, expected, lambda: scan(2, batch=2 - rank))
    expected = r"got float32 cpu \[2, 3, seqlen\] on rank 0 and float64 cpu \[2, 3, seqlen\] on rank 1"
    raises(ValueError, expected, lambda: scan(3, dtype=(torch.float32, torch.float64)[rank]))
    expected = r"got float32 cpu \[2, 4, seqlen\], requires_grad on rank 0 and float32 cpu \[2, 4, seqlen\] on rank 1"
    raises(ValueError, expected, lambda: scan(4, needs_grad=rank == 0))
    raises(ValueError, "expected A of shape", lambda: scan(5, A=-torch.ones(5 + rank, 3)))
    raises(ValueError, "unknown discretization 'cubic'", lambda: scan(6, discretization=("cubic", "euler")[rank]))

    def other() -> Any:
        value = torch.randn(2, 5, 7)
        return scan(7) if rank == 0 else distributed.linear_scan(value, value, group=group)

    raises(ValueError, "expected the same call on every rank, got selective_scan on rank 0 and linear_scan on rank 1", other)
    assert torch.isfinite(scan(1)).all()

    x, weight = torch.randn(1, 5 + rank, 4), torch.randn(4, 3)
    convolve = distributed.causal_conv1d

    def packed(*ends: int) -> Callable[[], Any]:
        return lambda: convolve(x, weight, cu_seqlens=torch.tensor([0, 3, *ends]), group=group)

    expected = r"expected weight on cpu \(the device of x\), got meta"
    raises(RuntimeError, expected, lambda: convolve(x, weight.to("meta"), group=group))
    packed(11)()
    raises(ValueError, r"sum of the spans' lengths, 5 \+ 6 = 11, got 10", packed(10))
    raises(ValueError, "same cu_seqlens on every rank, got others, that end at", packed(11 + rank))
    raises(ValueError, "same cu_seqlens on every rank, got others, that end at", packed(*[4, 5][: 1 + rank], 6, 7, 11))
    raises(ValueError, "begin at 0 and do not decrease", packed(2, 11))
    states = {"initial_state": torch.zeros(1, 4, 2), "cu_seqlens": torch.tensor([0, 3, 11])}
    raises(ValueError, "neither initial nor final states with cu_seqlens", lambda: convolve(x, weight, group=group, **states))

    layer = parallelize(layers.Mamba(4, 3, layer_idx=0), group)
    cache = type("Cache", (), {"seqlen_offset": 0, "key_value_memory_dict": {}})()
    raises(ValueError, "no inference_params and no step with context parallelism", lambda: layer(torch.randn(1, 5, 4), cache))
    states = layer.allocate_inference_cache(1, 5)
    raises(ValueError, "no inference_params and no step", lambda: layer.step(torch.randn(1, 1, 4), *states))
    raises(TypeError, "expected a state_dict", lambda: pickle.dumps(layer))
    gru = parallelize(layers.MinGRU(4, 3, bidirectional=True, batch_first=True), group)
    x, reset = torch.randn(1 + rank, 5, 4), torch.zeros(1 + rank, 5, dtype=torch.bool)
    expected = r"same reset on every rank, got bool cpu \[1, seqlen\] on rank 0 and bool cpu \[2, seqlen\] on rank 1"
    raises(ValueError, expected, lambda: gru(x, reset=reset))
    gru = parallelize(layers.MinGRU(4, 3), group)
    sequences = nn.utils.rnn.pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
    raises(ValueError, "no PackedSequence with context parallelism", lambda: gru(sequences))
    raises(ValueError, "contains layers of ssm_kernels, got Linear", lambda: parallelize(nn.Linear(3, 3), group))
    expected = "expected a ProcessGroup or a DeviceMesh, got str"
    raises(TypeError, expected, lambda: distributed.linear_scan(x, x, group="cp"))


def test_errors_are_raised_on_every_rank(pool: Pool):
    pool.check(check_errors, 2)


def test_a_rank_without_steps_passes_states_on(pool: Pool):
    pool.check(check_empty, 2)


def check_empty(group: dist.ProcessGroup, rank: int) -> None:
    a, state = torch.full((1, 0, 2), 0.5), torch.tensor([[3.0, 4.0]])
    _, last_state = distributed.linear_scan(a, a, state, return_last_state=True, group=group)
    assert torch.equal(last_state, state)


def fail(rank: int, folder: str) -> None:
    """Two processes of groups with a short time-out. Exit codes: 0 for the expected errors, 3 for the rank that dies."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    groups = [dist.new_group([0, 1], timeout=datetime.timedelta(seconds=5)) for _ in range(2)]
    x = torch.randn(2, 5, 6)

    def is_message(call: Callable[[], Any], *parts: str) -> bool:
        began, message = time.perf_counter(), "no error"
        try:
            call()
        except RuntimeError as error:
            message = str(error)
        is_expected = all(part in message for part in parts) and time.perf_counter() - began < 15
        if not is_expected:
            print(f"rank {rank}: expected {parts}, got {message}", file=sys.stderr, flush=True)
        return is_expected

    # Rank 1 alone comes with another batch, after both have made a call.
    layer = parallelize(layers.Mamba(6, 4), groups[0])
    dist.barrier()
    layer(x)
    changed = "causal_conv1d(x=float32 cpu [1, seqlen, 12]"
    parts = ("the all-gather failed on rank 0 of 2", f"Rank 1 called {changed}")
    if rank == 1:
        parts = (f"rank 1 makes a call with new arguments, {changed}", "waits for ranks [0]")
    are_expected = is_message(lambda: layer(x[:1] if rank == 1 else x), *parts)

    # Rank 1 dies.
    layer = parallelize(layers.Mamba(6, 4), groups[1])
    dist.barrier()
    layer(x)
    if rank == 1:
        os._exit(3 if are_expected else 1)
    are_expected &= is_message(lambda: layer(x), "the all-gather failed on rank 0 of 2: a rank has died")
    os._exit(0 if are_expected else 1)


@pytest.mark.slow
def test_no_rank_hangs(tmp_path: Path):
    processes = mp.start_processes(fail, (str(tmp_path),), 2, join=False, start_method="spawn").processes
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 3]


def check_drops(group: dist.ProcessGroup, rank: int) -> None:
    """What a reset or a new sequence drops leaves no trace in later steps, nor their gradients in earlier ones."""
    steps, own, axes = torch.arange(12)[None], slice(4 * rank, 4 * rank + 4), (1, 12, 2)

    def run(name: str, place: int, bad: float, bad_gradient: float) -> list[Tensor]:
        """Output and gradients of a scan that starts anew at the step ``place``."""
        x, decay, factor = torch.ones(axes), torch.full(axes, 0.5), torch.ones(axes)
        x[:, 1 if place > 4 else 0], factor[:, 10] = bad if place > 2 else 1, bad_gradient
        initial, seq_idx = torch.full((1, 2, 1), float(bad)), (steps >= place).long()[:, own]
        x, decay = (value[:, own].clone().requires_grad_() for value in (x, decay))
        ones = torch.ones(1, 4, 1)
        if name == "linear_scan":
            out = distributed.linear_scan(decay, x, reset=(steps == place)[:, own], group=group)
        elif name == "selective_scan":
            u, delta, B = (value.transpose(1, 2) for value in (x, decay, ones))
            options = {"initial_state": initial, "seq_idx": seq_idx, "group": group}
            out = distributed.selective_scan(u, delta, -torch.ones(2, 1), B, B, **options).transpose(1, 2)
        else:
            B, options = ones[..., None], {"initial_states": initial[..., None], "seq_idx": seq_idx, "group": group}
            out = distributed.ssd_chunk_scan(x[..., None], decay, -torch.ones(2), B, B, **options)[..., 0]
        (out * factor[:, own]).sum().backward()
        # On one process the gradients of dt in a chunk of ssd_chunk_scan share the NaN of one of its steps.
        return [out.detach(), x.grad] if name == "ssd_chunk_scan" else [out.detach(), x.grad, decay.grad]

    for name in ("linear_scan", "selective_scan", "ssd_chunk_scan"):
        for place in (2, 4, 6, 8):
            finite, later, earlier = run(name, place, 1, 1), run(name, place, math.inf, 1), run(name, place, 1, math.inf)
            for value, wanted in zip(later, finite, strict=True):
                new = (steps >= place)[:, own].expand_as(value[..., 0])
                assert torch.equal(value[new], wanted[new]), (name, place, "later steps")
            for value, wanted in zip(earlier, finite, strict=True):
                old = (steps < place)[:, own].expand_as(value[..., 0])
                assert torch.equal(value[old], wanted[old]), (name, place, "earlier steps")


def test_dropped_states_leave_no_trace(pool: Pool):
    pool.check(check_drops, 3)


def check_absent_gradients(group: dist.ProcessGroup, rank: int) -> None:
    """A rank without a gradient gets the sum of the others'; where no rank has one there is none."""
    layer = nn.ModuleDict({name: nn.Linear(2, 1, bias=False) for name in ("all", "some", "none", "frozen")})
    layer["frozen"].requires_grad_(False)
    for name, ranks in (("all", (0, 1, 2)), ("some", (1, 2))):
        if rank in ranks:
            layer[name].weight.grad = torch.full((1, 2), rank + 1.0)
    sum_gradients(layer, group)
    gradients = {name: None if part.weight.grad is None else part.weight.grad.tolist() for name, part in layer.items()}
    assert gradients == {"all": [[6.0, 6.0]], "some": [[5.0, 5.0]], "none": None, "frozen": None}


def test_sum_of_absent_gradients(pool: Pool):
    pool.check(check_absent_gradients, 3)


def check_comparisons(group: dist.ProcessGroup, rank: int) -> None:
    """A new call costs 2 * ranks - 1 reads of the store, and another number of packed sequences none."""
    reads = [0]

    class Counting:
        def __init__(self, store: Any) -> None:
            self.store = store

        def __getattr__(self, name: str) -> Any:
            def call(*args: Any) -> Any:
                reads[0] += {"get": 1, "multi_get": len(args[0])}.get(name, 0)
                return getattr(self.store, name)(*args)

            return call

    whole = _agreement._store
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_agreement, "_store", lambda group: (Counting(whole(group)[0]), whole(group)[1]))
        # A later group of the same name has agreed on nothing.
        fresh = dist.new_group([*range(dist.get_world_size(group))], use_local_synchronization=True)
        states = weakref.ref(fresh)
        x, seqlen = torch.randn(1, 3 + rank, 2), sum(range(3, 3 + dist.get_world_size(group)))
        for ends in ((5, seqlen), (2, 4, 6, seqlen), (seqlen,)):
            cu_seqlens, h0 = torch.tensor([0, *ends]), torch.randn(len(ends), 2)
            distributed.linear_scan(x, x, h0, cu_seqlens=cu_seqlens, group=fresh)
            distributed.causal_conv1d(x, torch.ones(2, 3), cu_seqlens=cu_seqlens, group=fresh)
        total = torch.tensor(reads)
        dist.all_reduce(total, group=fresh)
        assert total.item() == 2 * (2 * dist.get_world_size(group) - 1)
        assert fresh in _agreement._histories and fresh in _packing._latest
        dist.destroy_process_group(fresh)
        known = len(_agreement._histories), len(_packing._latest)
        del fresh
        gc.collect()
        assert states() is None and known == (len(_agreement._histories) + 1, len(_packing._latest) + 1)


def test_comparisons_of_ranks(pool: Pool):
    pool.check(check_comparisons, 4)
