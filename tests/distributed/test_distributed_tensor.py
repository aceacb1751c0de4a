"""Tensor parallelism of layers on 1 to 4 ranks, on CPUs and on two GPUs: outputs, states and gradients of one process."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from process_pool import Mesh, Place, Processes
from ssd_helpers import METHODS
from tensor_parallel_helpers import (
    BATCH,
    D_MODEL,
    DSTATE,
    RANK,
    SEQLEN,
    WIDTH,
    Case,
    assert_close,
    assert_same_gradients,
    check_layer,
    draw,
    language_model,
    mamba,
    mamba2,
    mamba3,
    mlp,
    over_places,
    own,
    pair,
    parallelize,
    record_collectives,
    run,
    tokens_of,
)

import ssm_kernels
from ssm_kernels.models import MambaConfig, MambaLM
from ssm_kernels.nn import Mamba, Mamba2, Mamba3
from ssm_kernels.nn.block import GatedMLP

RANKS = (1, 2, 3, 4)

# All numbers of groups, of which each number of ranks owns, repeats and divides some.
MAMBA2_OPTIONS: dict[str, dict[str, Any]] = {
    **{f"{groups} groups": {"ngroups": groups} for groups in (1, 2, 3, 4, 6, 12)},
    "1 group, norm before gate": {"norm_before_gate": True, "dt_limit": (0.01, 0.2)},
    "2 groups, norm before gate": {"norm_before_gate": True, "ngroups": 2, "D_has_hdim": True},
    "no norm": {"rmsnorm": False, "ngroups": 2, "conv_bias": False},
    "an MLP beside": {"d_ssm": 12, "headdim": 1, "ngroups": 2, "bias": True},
    "biases, D of channels": {"D_has_hdim": True, "bias": True, "ngroups": 3},
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    **{f"Mamba, {method}": partial(mamba, discretization=method) for method in ssm_kernels.discretizations},
    "Mamba, foh_ramp": partial(mamba, discretization="foh_ramp"),
    "Mamba, exp_trapezoidal": partial(mamba, discretization="exp_trapezoidal"),
    "Mamba, biases": partial(mamba, bias=True),
    "Mamba, no bias": partial(mamba, conv_bias=False, d_conv=2),
    **{f"Mamba2, {method}": partial(mamba2, discretization=method) for method in METHODS},
    **{f"Mamba2, {name}": partial(mamba2, **options) for name, options in MAMBA2_OPTIONS.items()},
    **{f"Mamba3, {groups} groups": partial(mamba3, ngroups=groups) for groups in (1, 2, 3)},
    "Mamba3, norm": partial(mamba3, is_outproj_norm=True, rope_fraction=1.0, A_activation="softplus"),
    "Mamba3, ranks": partial(mamba3, is_mimo=True, mimo_rank=2, ngroups=2, is_outproj_norm=True),
    "GatedMLP": mlp,
}


def check_generation(make: Callable[[], nn.Module], mesh: Mesh) -> None:
    """A prompt, steps and a longer continuation from the cache; each rank has its part of the states."""
    expected, actual = pair(make, mesh)
    x = draw(mesh)
    caches = [SimpleNamespace(seqlen_offset=0, key_value_memory_dict={}) for _ in range(2)]
    for begin, end in ((0, 5), (5, 6), (6, 7), (7, SEQLEN)):
        outputs = []
        for layer, cache in zip((expected, actual), caches, strict=True):
            cache.seqlen_offset = begin
            with torch.no_grad():
                outputs.append(layer(x[:, begin:end], inference_params=cache))
        assert_close(outputs[1], outputs[0], f"steps {begin} to {end}")
        states, own_states = (cache.key_value_memory_dict[0] for cache in caches)
        if isinstance(expected, Mamba3):
            for axis, state, own_state in zip((1, 1, 2, 1), states, own_states, strict=True):
                assert_close(own_state, own(state, axis, mesh), "state")
            continue
        (conv_state, ssm_state), (own_conv_state, own_ssm_state) = states, own_states
        assert_close(own_ssm_state, own(ssm_state, 1, mesh), "ssm_state")
        inner = expected.d_inner // mesh.size()
        assert_close(own_conv_state[:, :inner], own(conv_state[:, : expected.d_inner], 1, mesh), "conv_state")


def check_sequence_parallel(make: Callable[[], nn.Module], mesh: Mesh) -> None:
    expected, actual = pair(make, mesh, sequence_parallel=True)
    x, weights = draw(mesh), draw(mesh, 2)
    wanted = run(expected, x, weights)
    for got, value in zip(run(actual, own(x, 1, mesh), own(weights, 1, mesh)), wanted, strict=True):
        assert_close(got, own(value, 1, mesh), "out, grad_x")
    assert_same_gradients(actual, expected)


def check_low_precision(make: Callable[..., nn.Module], mesh: Mesh) -> None:
    """Autocast: the parallel layer is as near to float64 as the layer is."""
    expected, actual = pair(partial(make, dtype=torch.float32), mesh)
    exact = copy.deepcopy(expected).double()
    x, weights = draw(mesh), draw(mesh, 2)
    results = [run(exact, x, weights)]
    for layer in (expected, actual):
        with torch.autocast(mesh.device_type, torch.bfloat16):
            inputs = x.float().requires_grad_()
            out = layer(inputs)
        assert out.dtype == torch.bfloat16
        out.backward(weights.bfloat16())
        results.append((out.detach(), inputs.grad))
    for truth, plain, parallel in zip(*results, strict=True):
        error, bound = ((value.double() - truth).norm() / truth.norm() for value in (parallel, plain))
        assert error < 2 * bound + 2**-9, (error, bound)


def check_bfloat16(make: Callable[..., nn.Module], mesh: Mesh) -> None:
    """Layers whose parameters are bfloat16: the parallel layer is as near to float64 as the layer is."""
    expected, actual = pair(lambda: make(dtype=torch.float32).bfloat16(), mesh)
    exact = copy.deepcopy(expected).double()
    x, weights = (draw(mesh, seed).bfloat16() for seed in (1, 2))
    results = [run(exact, x.double(), weights.double()), run(expected, x, weights), run(actual, x, weights)]
    for truth, plain, parallel in zip(*results, strict=True):
        error, bound = ((value.double() - truth).norm() / truth.norm() for value in (parallel, plain))
        assert error < 2 * bound + 2**-8, (error, bound)


def check_same_bits(mesh: Mesh) -> None:
    results = []
    for _ in range(2):
        _, layer = pair(mamba2, mesh)
        results.append((*run(layer, draw(mesh), draw(mesh, 2)), layer))
    for first, second in zip(results[0][:2], results[1][:2], strict=True):
        assert torch.equal(first, second)
    for first, second in zip(results[0][2].parameters(), results[1][2].parameters(), strict=True):
        assert torch.equal(first.grad.to_local(), second.grad.to_local())


def check_checkpointing(mesh: Mesh) -> None:
    from torch.utils.checkpoint import checkpoint

    expected, actual = pair(mamba2, mesh)
    x, weights = draw(mesh), draw(mesh, 2)
    wanted = run(expected, x, weights)
    got = run(lambda inputs: checkpoint(actual, inputs, use_reentrant=False), x, weights)
    assert_close(got[1], wanted[1], "grad_x")
    assert_same_gradients(actual, expected)


def check_compilation(mesh: Mesh) -> None:
    expected, actual = pair(mamba2, mesh)
    x, weights = draw(mesh), draw(mesh, 2)
    wanted = run(expected, x, weights)
    got = run(torch.compile(actual, backend="aot_eager", fullgraph=True), x, weights)
    for value, truth in zip(got, wanted, strict=True):
        assert_close(value, truth, "out, grad_x")
    assert_same_gradients(actual, expected)


def check_frozen_parts(mesh: Mesh) -> None:
    """Frozen parameters get no gradient and change no other one. Gradients of two calls accumulate."""
    _, expected = pair(mamba2, mesh)
    _, actual = pair(mamba2, mesh)
    frozen = {"in_proj.weight_B", "conv1d.bias_x", "conv1d.bias_B", "conv1d.bias_C", "D"}
    for name in frozen:
        dict(actual.named_parameters())[name].requires_grad_(False)
    for layer, calls in ((expected, 1), (actual, 2)):
        for _ in range(calls):
            run(layer, draw(mesh), draw(mesh, 2))
    for (name, wanted), parameter in zip(expected.named_parameters(), actual.parameters(), strict=True):
        if name in frozen:
            assert parameter.grad is None, name
        else:
            assert_close(parameter.grad.to_local(), 2 * wanted.grad.to_local(), name)


def replace_parameters(layer: nn.Module, factor: float) -> None:
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(factor * parameter.detach())


def check_parts_that_are_apart(mesh: Mesh) -> None:
    """Parts that are not adjacent in memory give the same results as those that are."""
    _, expected = pair(mamba2, mesh)
    _, actual = pair(mamba2, mesh)
    replace_parameters(actual, 1.0)
    assert len(expected.in_proj.local("weight")) == 1 and len(actual.in_proj.local("weight")) == 5
    outputs = [run(layer, draw(mesh), draw(mesh, 2)) for layer in (expected, actual)]
    for wanted, got in zip(*outputs, strict=True):
        assert_close(got, wanted, "out, grad_x")
    for wanted, got in zip(expected.parameters(), actual.parameters(), strict=True):
        assert_close(got.grad.to_local(), wanted.grad.to_local(), "gradient")


def check_changed_parameters(mesh: Mesh) -> None:
    """A layer that has run before follows its parameters into other memory, to other values, and to other parameters."""
    _, layer = pair(mamba2, mesh)
    run(layer, draw(mesh), draw(mesh, 2))

    def replace() -> None:
        replace_parameters(layer, 0.8)

    def move() -> None:
        for parameter in layer.parameters():
            parameter._local_tensor.data = 1.5 * parameter._local_tensor

    @torch.no_grad()
    def write() -> None:
        for parameter in layer.parameters():
            parameter *= 0.9

    def freeze() -> None:
        for name in ("in_proj.weight_x", "A_log"):
            dict(layer.named_parameters())[name].requires_grad_(False)

    def load() -> None:
        layer.load_state_dict({name: 0.7 * value for name, value in layer.state_dict().items()})

    before = run(layer, draw(mesh), draw(mesh, 2))[0]
    for change in (replace, move, write, freeze, load):
        change()
        layer.zero_grad()
        new = copy.deepcopy(layer)
        results = [run(each, draw(mesh), draw(mesh, 2)) for each in (layer, new)]
        assert change is freeze or not torch.allclose(results[0][0], before), change.__name__
        for got, wanted in zip(*results, strict=True):
            assert torch.equal(got, wanted), change.__name__
        for (name, got), wanted in zip(layer.named_parameters(), new.parameters(), strict=True):
            assert (got.grad is None) == (wanted.grad is None) == (not got.requires_grad), (change.__name__, name)
            assert got.grad is None or torch.equal(got.grad.to_local(), wanted.grad.to_local()), (change.__name__, name)
        before = results[0][0]


# Collectives of a layer.


def check_collectives(
    make: Callable[[], nn.Module], forward: tuple[int, int], backward: tuple[int, int], mesh: Mesh, parameters: tuple[int, int]
) -> None:
    """``forward`` and ``backward``: collectives, and numbers per step of a sequence. ``parameters``: those of backward
    that do not grow with the steps.
    """
    _, layer = pair(make, mesh)
    x = draw(mesh).requires_grad_()
    out, counts, numbers = record_collectives(mesh, lambda: layer(x))
    wanted = Counter(all_reduce=forward[0]), BATCH * SEQLEN * forward[1]
    assert (counts, numbers) == wanted, (counts, numbers, wanted)
    _, counts, numbers = record_collectives(mesh, lambda: out.sum().backward())
    wanted = Counter(all_reduce=backward[0] + parameters[0]), BATCH * SEQLEN * backward[1] + parameters[1]
    assert (counts, numbers) == wanted, (counts, numbers, wanted)


def check_sequence_parallel_collectives(mesh: Mesh) -> None:
    """An all-gather and a reduce-scatter of the same numbers take the place of an all-reduce."""
    _, layer = pair(mamba, mesh, sequence_parallel=True)
    x = own(draw(mesh), 1, mesh).requires_grad_()
    inner = RANK + 2 * DSTATE
    wanted = Counter(all_gather_into_tensor=1, reduce_scatter_tensor=1, all_reduce=1)
    out, counts, numbers = record_collectives(mesh, lambda: layer(x))
    assert (counts, numbers) == (wanted, BATCH * SEQLEN * (2 * D_MODEL + inner))
    _, counts, numbers = record_collectives(mesh, lambda: out.sum().backward())
    assert (counts, numbers) == (wanted, BATCH * SEQLEN * (2 * D_MODEL + inner))


def check_one_rank(mesh: Mesh) -> None:
    for make in (mamba, mamba2):
        _, layer = pair(make, mesh)
        x = draw(mesh).requires_grad_()
        assert record_collectives(mesh, lambda layer=layer, x=x: layer(x).sum().backward())[1].total() == 0


# Errors, which every rank raises.


def cut_sequences_and_channels(layer: nn.Module, mesh: Mesh) -> nn.Module:
    from torch.distributed.tensor.parallel import parallelize_module

    from ssm_kernels.distributed import ContextParallel

    return parallelize(parallelize_module(layer, mesh["data"], ContextParallel()), mesh["model"])


def check_context_parallel(make: Callable[[], nn.Module], mesh: Mesh) -> None:
    """Sequences are cut over the first dimension of the mesh, channels over the second."""
    torch.manual_seed(0)
    expected = make()
    actual = cut_sequences_and_channels(copy.deepcopy(expected), mesh)
    inputs, weights = draw(mesh), draw(mesh, 2)
    out, grad = run(expected, inputs, weights)
    span = slice(SEQLEN // 3) if mesh["data"].get_local_rank() == 0 else slice(SEQLEN // 3, SEQLEN)
    own_out, own_grad = run(actual, inputs[:, span], weights[:, span])
    assert_close(own_out, out[:, span], "out")
    assert_close(own_grad, grad[:, span], "gradient of the inputs")
    for parameter in actual.parameters():
        local = parameter.grad.to_local()
        torch.distributed.all_reduce(local, group=mesh["data"].get_group())
    assert_same_gradients(actual, expected)


def check_errors(mesh: Mesh) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    from ssm_kernels.distributed import ContextParallel, TensorParallel

    apply = partial(parallelize, mesh=mesh)
    others = [rank for rank in range(3) if rank != mesh.get_local_rank()]
    for style, other in ((TensorParallel, ContextParallel), (ContextParallel, TensorParallel)):
        layer = parallelize_module(mamba(), mesh, other())
        says = (
            f"{style.__name__}: expected another dimension of the mesh than that of {other.__name__}, which .* got the ranks "
        )
        with pytest.raises(ValueError, match=says + re.escape(str(others)) + " in both"):
            parallelize_module(layer, mesh, style())
    with pytest.raises(ValueError, match="TensorParallel: Mamba: expected a number of ranks that divides d_inner = 26, got 3"):
        apply(Mamba(13))
    with pytest.raises(ValueError, match="Mamba2: expected a number of ranks that divides nheads = 4, got 3"):
        apply(Mamba2(16, headdim=8))
    with pytest.raises(ValueError, match="expected a number of ranks that divides d_inner - d_ssm = 8, got 3"):
        apply(Mamba2(16, d_ssm=24, headdim=8))
    with pytest.raises(ValueError, match=r"GatedMLP: expected a number of ranks that divides fc2.in_features = 128, got 3"):
        apply(GatedMLP(16))
    model = language_model("Mamba", d_intermediate=128)
    with pytest.raises(ValueError, match=r"backbone.layers.0.mlp: expected a number of ranks that divides fc2.in_features"):
        apply(model)
    assert not any(hasattr(parameter, "placements") for parameter in model.parameters())
    with pytest.raises(
        ValueError, match=r"expected a layer of Mamba, Mamba2, Mamba3, GatedMLP, DeltaNet, .* or a MambaLM of such, got Linear"
    ):
        apply(nn.Linear(3, 3))
    recurrent = MambaLM(MambaConfig(d_model=12, n_layer=1, vocab_size=24, mixer="MinGRU"))
    with pytest.raises(ValueError, match=r"backbone.layers.0.mixer: expected a layer of .*, got RecurrentMixer"):
        apply(recurrent)
    layer = apply(mamba())
    with pytest.raises(ValueError, match="expected parameters that are not distributed yet: apply it once"):
        apply(layer)
    with pytest.raises(NotImplementedError, match="expected parameters to be initialized before TensorParallel"):
        layer.in_proj.reset_parameters()
    adapted = mamba2()
    adapted.in_proj = nn.Sequential(adapted.in_proj)
    with pytest.raises(TypeError, match=r"expected in_proj to be an nn.Linear, got Sequential"):
        apply(adapted)
    with pytest.raises(TypeError, match="expected gather_logits to be a bool, got int"):
        TensorParallel(gather_logits=1)
    state = mamba(d_state=2).state_dict() | {"in_proj.weight": torch.zeros(3, D_MODEL)}
    with pytest.raises(RuntimeError, match=r"size mismatch for in_proj.weight: expected shape \[48, 12\], got \[3, 12\]"):
        layer.load_state_dict({"in_proj.weight": state["in_proj.weight"]}, strict=False)
    spans = apply(language_model("Mamba"), sequence_parallel=True)
    with pytest.raises(ValueError, match="expected a seqlen that is a multiple of the 3 ranks with sequence_parallel, got 4"):
        spans(tokens_of(mesh, 1, 4))
    with pytest.raises(ValueError, match="MambaLM: expected num_last_tokens 0 with sequence_parallel, got 1"):
        spans(tokens_of(mesh, 1, 3), num_last_tokens=1)
    mixer = spans.backbone.layers[0].mixer
    with pytest.raises(ValueError, match=r"expected \(batch, seqlen, channels\) with sequence_parallel, which cannot cut one"):
        mixer.step(draw(mesh)[:1, :1], *mixer.allocate_inference_cache(1, 1))
    with pytest.raises(ValueError, match=r"MambaLM.generate: expected a model without sequence_parallel"):
        spans.generate(tokens_of(mesh, 1, 3), 4)
    with pytest.raises(ValueError, match=r"MambaLM.generate: expected no cg with tensor parallelism"):
        apply(language_model("Mamba")).generate(tokens_of(mesh, 1, 3), 4, cg=True)
    assert parallelize_module(nn.Module(), mesh, {}) is not None


def check_ranks_that_differ(mesh: Mesh) -> None:
    rank = mesh.get_local_rank()
    with pytest.raises(
        ValueError, match=r"expected the same layer on every rank, got Mamba2\(.*'zoh'\) on ranks 0, 1 and .*'rk4'\) on rank 2"
    ):
        parallelize(mamba2(discretization="rk4" if rank == 2 else "zoh"), mesh)
    with pytest.raises(ValueError, match=r"expected the same A_log on every rank, got torch.float64 .* and torch.float32"):
        parallelize(mamba(dtype=torch.float32 if rank == 1 else torch.float64), mesh)
    with pytest.raises(ValueError, match=r"expected the same style on every rank, got .*sequence_parallel=False"):
        parallelize(mamba(), mesh, sequence_parallel=rank == 1)
    with pytest.raises(ValueError, match=r"d_inner = 26, got 3"):
        parallelize(Mamba(13) if rank == 1 else mamba(), mesh)


def check_mesh_of_two_dimensions(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match="TensorParallel: expected a mesh of one dimension, got 2"):
        parallelize(mamba(), mesh)


PACKING = {
    "cu_seqlens": {"cu_seqlens": torch.tensor([0, 5, 5, SEQLEN])},
    "seq_idx": {"seq_idx": torch.tensor([[0] * 3 + [1] * (SEQLEN - 3)] * BATCH)},
}
INNER = RANK + 2 * DSTATE
BC = 2 * DSTATE  # rows of B and C of one group


def is_rare(name: str, ranks: int) -> bool:
    """Whether a case is exhaustive: all numbers of ranks meet all numbers of groups, and each other layer meets one of them."""
    if "groups" in name or name in ("Mamba, biases", "GatedMLP"):
        return False
    return ranks != RANKS[1:][[*LAYERS].index(name) % 3]


CASES: dict[str, Case] = {
    **{
        f"{name}, {n}": Case((n,), partial(check_layer, make), is_rare(name, n)) for name, make in LAYERS.items() for n in RANKS
    },
    **{
        f"{packing}, {name}, 3": Case((3,), partial(check_layer, partial(mamba2, **MAMBA2_OPTIONS[name]), **arguments))
        for packing, arguments in PACKING.items()
        for name in ("1 group, norm before gate", "2 groups", "3 groups")
    },
    **{
        f"{packing}, Mamba3, 3": Case((3,), partial(check_layer, mamba3, **arguments)) for packing, arguments in PACKING.items()
    },
    **{
        f"generation, {name}, {n}": Case((n,), partial(check_generation, make))
        for name, make in LAYERS.items()
        if name
        in ("Mamba, bilinear", "Mamba2, 1 groups", "Mamba2, 2 groups", "Mamba2, 2 groups, norm before gate", "Mamba3, 2 groups")
        for n in (2, 3)
    },
    **{
        f"sequence parallel, {name}, {n}": Case((n,), partial(check_sequence_parallel, make))
        for name, make in LAYERS.items()
        if name in ("Mamba, biases", "Mamba2, biases, D of channels", "Mamba2, 1 groups", "Mamba3, 1 groups", "GatedMLP")
        for n in (2, 3)
    },
    "autocast, Mamba": Case((2,), partial(check_low_precision, mamba)),
    "autocast, Mamba2": Case((2,), partial(check_low_precision, mamba2)),
    "bfloat16, Mamba": Case((2,), partial(check_bfloat16, mamba)),
    "bfloat16, Mamba2": Case((2,), partial(check_bfloat16, partial(mamba2, norm_before_gate=True))),
    "same bits": Case((3,), check_same_bits),
    "activation checkpointing": Case((2,), check_checkpointing),
    "compilation": Case((2,), check_compilation),
    "frozen parts": Case((2,), check_frozen_parts),
    "parts apart": Case((2,), check_parts_that_are_apart),
    "changed parameters": Case((2,), check_changed_parameters),
    "collectives, Mamba": Case(
        (2,),
        lambda mesh: check_collectives(mamba, (2, D_MODEL + INNER), (2, D_MODEL + INNER), mesh, (0, 0)),
    ),
    "collectives, Mamba2 that owns groups": Case(
        (2,), lambda mesh: check_collectives(partial(mamba2, ngroups=2), (1, D_MODEL), (1, D_MODEL), mesh, (0, 0))
    ),
    "collectives, Mamba2 with one group": Case(
        (2,),
        # A number a step of the norm; the gradients of the rows of B and C in in_proj, conv1d.weight and conv1d.bias.
        lambda mesh: check_collectives(mamba2, (2, D_MODEL + 1), (2, D_MODEL + 1), mesh, (1, BC * (D_MODEL + WIDTH + 1))),
    ),
    "collectives, Mamba3": Case(
        (2,),
        # The gradients of the rows of B, C and angles in in_proj, and those of the two norms' weights.
        lambda mesh: check_collectives(mamba3, (1, D_MODEL), (1, D_MODEL), mesh, (1, (8 + 8 + 2) * D_MODEL + 8 + 8)),
    ),
    "collectives, GatedMLP": Case((2,), lambda mesh: check_collectives(mlp, (1, D_MODEL), (1, D_MODEL), mesh, (0, 0))),
    "collectives, sequence parallel": Case((2,), check_sequence_parallel_collectives),
    "collectives, one rank": Case((1,), check_one_rank),
    "errors": Case((3,), check_errors),
    "errors, ranks that differ": Case((3,), check_ranks_that_differ),
    "Mamba, context parallel": Case((2, 2), partial(check_context_parallel, mamba)),
    "Mamba2, context parallel": Case((2, 2), partial(check_context_parallel, mamba2)),
    "Mamba3, context parallel": Case((2, 2), partial(check_context_parallel, mamba3)),
    "Mamba2, context parallel, norm before gate": Case(
        (2, 2), partial(check_context_parallel, partial(mamba2, norm_before_gate=True))
    ),
    "errors, two dimensions": Case((2, 2), check_mesh_of_two_dimensions),
}


# The cases that also run on two GPUs: one of each layer and placement.
ON_GPUS = (
    *("Mamba, zoh, 2", "Mamba, bilinear, 2", "Mamba2, zoh, 2", "Mamba2, 2 groups, 2", "Mamba2, 2 groups, norm before gate, 2"),
    *("Mamba2, an MLP beside, 2", "GatedMLP, 2", "generation, Mamba, bilinear, 2", "generation, Mamba2, 1 groups, 2"),
    *("sequence parallel, Mamba, biases, 2", "sequence parallel, Mamba2, 1 groups, 2", "autocast, Mamba", "autocast, Mamba2"),
    *("Mamba3, 1 groups, 2", "Mamba3, norm, 2"),
    *("bfloat16, Mamba", "bfloat16, Mamba2", "activation checkpointing", "compilation", "collectives, Mamba"),
    "changed parameters",
    *("collectives, Mamba2 with one group", "collectives, sequence parallel"),
)


def run_case(mesh: Mesh, name: str) -> None:
    CASES[name].check(mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place"), over_places(CASES, ON_GPUS))
def test_ranks_are_one_process(processes: Processes, name: str, place: Place) -> None:
    assert CASES[name].shape == place.shape
    processes.check(place, run_case, name)
