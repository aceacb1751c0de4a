"""Tensor parallelism of the layers of the delta rule on 2 and 3 ranks: outputs, states and gradients of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from process_pool import Mesh, Place, Processes
from tensor_parallel_helpers import (
    D_MODEL,
    SEQLEN,
    VOCABULARY,
    Case,
    Recorded,
    assert_close,
    assert_same_gradients,
    check_layer,
    draw,
    over_places,
    own,
    pair,
    parallelize,
    run,
    tokens_of,
)

from ssm_kernels import nn
from ssm_kernels.models import MambaConfig, MambaLM

HEADS = {"hidden_size": D_MODEL, "head_dim": 4, "num_heads": 6}
LAYERS: dict[str, tuple[type[torch.nn.Module], dict[str, Any]]] = {
    "DeltaNet": (nn.DeltaNet, {"hidden_size": D_MODEL, "num_heads": 6, "use_gate": True}),
    "DeltaNet, no beta": (nn.DeltaNet, {"hidden_size": D_MODEL, "num_heads": 6, "use_beta": False, "use_short_conv": False}),
    "GatedDeltaNet": (nn.GatedDeltaNet, HEADS | {"num_v_heads": 12, "conv_bias": True}),
    "KimiDeltaAttention": (nn.KimiDeltaAttention, HEADS | {"expand_v": 0.5}),
    "GatedDeltaProduct": (nn.GatedDeltaProduct, HEADS | {"num_v_heads": 12, "expand_v": 0.5, "conv_bias": True}),
}


def make(name: str) -> torch.nn.Module:
    layer, options = LAYERS[name]
    made = layer(**options, layer_idx=0, dtype=torch.float64)
    torch.nn.init.uniform_(made.get_parameter("o_norm.weight"), 0.5, 1.5)
    return made


def check_generation(build: Callable[[], torch.nn.Module], mesh: Mesh) -> None:
    expected, actual = pair(build, mesh)
    x = draw(mesh)
    caches = [SimpleNamespace(seqlen_offset=0, key_value_memory_dict={}) for _ in range(2)]
    for begin, end in ((0, 5), (5, 6), (6, SEQLEN)):
        outputs = []
        for layer, cache in zip((expected, actual), caches, strict=True):
            cache.seqlen_offset = begin
            with torch.no_grad():
                outputs.append(layer(x[:, begin:end], inference_params=cache))
        assert_close(outputs[1], outputs[0], f"steps {begin} to {end}")


def check_spans(build: Callable[[], torch.nn.Module], mesh: Mesh) -> None:
    """With sequence_parallel inputs and outputs are spans."""
    expected, actual = pair(build, mesh, sequence_parallel=True)
    x, weights = draw(mesh), draw(mesh, 2)
    wanted = run(expected, x, weights)
    got = run(actual, own(x, 1, mesh), own(weights, 1, mesh))
    for a, b, name in zip(got, wanted, ("out", "grad_x"), strict=True):
        assert_close(a, own(b, 1, mesh), name)
    assert_same_gradients(actual, expected)


def check_model(mesh: Mesh) -> None:
    torch.manual_seed(0)
    sizes = {"head_dim": 4, "num_heads": 6}
    config = MambaConfig(d_model=D_MODEL, n_layer=2, vocab_size=VOCABULARY, mixer="GatedDeltaNet", ssm_cfg=sizes)
    model = MambaLM(config, dtype=torch.float64).to(mesh.device_type)
    tokens = tokens_of(mesh, 2, 7)
    expected = model(tokens).logits.detach()
    assert_close(parallelize(model, mesh)(tokens).logits.detach(), expected, "logits")


def check_number_of_ranks(mesh: Mesh) -> None:
    layer = nn.GatedDeltaNet(**HEADS | {"num_heads": 5})
    with pytest.raises(ValueError, match="expected a number of ranks that divides num_heads = 5, got 2"):
        parallelize(layer, mesh)


def check_collectives(build: Callable[[], torch.nn.Module], mesh: Mesh) -> None:
    """All projections of the input share its collectives. The others are those of parameters that every rank has."""
    others = 3 if isinstance(build(), nn.KimiDeltaAttention) else 1  # o_norm.weight, f_proj.0 and g_proj.0
    for spans in (False, True):
        _, layer = pair(build, mesh, sequence_parallel=spans)
        x = own(draw(mesh), 1, mesh) if spans else draw(mesh)
        with Recorded(mesh.size()) as of_forward:
            out = layer(x.requires_grad_())
        with Recorded(mesh.size()) as of_backward:
            out.sum().backward()
        of_spans = {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
        assert of_forward.counts == (of_spans if spans else {"all_reduce": 1})
        assert of_backward.counts == ({"all_reduce": others} | of_spans if spans else {"all_reduce": 1 + others})


def check_sizes(mesh: Mesh) -> None:
    layer = parallelize(make("KimiDeltaAttention"), mesh)
    assert layer.gate_dim == layer.num_v_heads * layer.head_k_dim == HEADS["num_heads"] * HEADS["head_dim"] // 2


PACKED = {"cu_seqlens": torch.tensor([0, 5, 5, SEQLEN])}
CASES = {
    **{f"{name}, 2": Case((2,), partial(check_layer, partial(make, name))) for name in LAYERS},
    "GatedDeltaProduct, 3": Case((3,), partial(check_layer, partial(make, "GatedDeltaProduct"))),
    "packed, GatedDeltaNet, 2": Case((2,), partial(check_layer, partial(make, "GatedDeltaNet"), **PACKED)),
    **{f"generation, {name}, 2": Case((2,), partial(check_generation, partial(make, name))) for name in LAYERS},
    **{f"spans, {name}, 2": Case((2,), partial(check_spans, partial(make, name))) for name in LAYERS},
    **{f"collectives, {name}, 2": Case((2,), partial(check_collectives, partial(make, name))) for name in LAYERS},
    "sizes, 2": Case((2,), check_sizes),
    "model, 2": Case((2,), check_model),
    "number of ranks": Case((2,), check_number_of_ranks),
}


def run_case(mesh: Mesh, name: str) -> None:
    CASES[name].check(mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place"), over_places(CASES, ["GatedDeltaNet, 2", "KimiDeltaAttention, 2"]))
def test_ranks_are_one_process(processes: Processes, name: str, place: Place) -> None:
    assert CASES[name].shape == place.shape
    processes.check(place, run_case, name)
