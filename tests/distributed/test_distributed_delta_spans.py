"""``ContextParallel`` of the layers of the delta rule on 1 to 4 ranks: outputs and gradients of one process; bytes; errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from distributed_helpers import (
    SEQLEN,
    Collectives,
    Cut,
    compare_layer,
    cu_seqlens_of,
    generator,
    over_places,
    own_span,
    packings,
    parallelize,
)
from process_pool import TWO_GPUS, Mesh, Place, Processes, param
from torch import Tensor

import ssm_kernels
from ssm_kernels import nn

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from ssm_kernels.distributed import delta_rule_scan, keep_exchanged_states, sum_gradients
from ssm_kernels.models import MambaConfig, MambaLM

OPERATOR = "delta_rule_scan"
WIDTH = 6
HEADS: dict[str, Any] = {"hidden_size": WIDTH, "head_dim": 3, "num_heads": 2}
LAYERS: dict[str, tuple[type[torch.nn.Module], dict[str, Any]]] = {
    "DeltaNet": (nn.DeltaNet, {"hidden_size": WIDTH, "num_heads": 2, "use_gate": True}),
    "DeltaNet, no convolution": (nn.DeltaNet, {"hidden_size": WIDTH, "num_heads": 2, "use_short_conv": False}),
    "GatedDeltaNet": (nn.GatedDeltaNet, HEADS | {"num_v_heads": 4, "expand_v": 2, "conv_bias": True}),
    "KimiDeltaAttention": (nn.KimiDeltaAttention, HEADS | {"conv_size": 2}),
    "KimiDeltaAttention, bounded": (nn.KimiDeltaAttention, HEADS | {"safe_gate": True, "lower_bound": -5.0}),
    "GatedDeltaProduct": (nn.GatedDeltaProduct, HEADS | {"num_v_heads": 4, "expand_v": 1, "num_householder": 3}),
}


def make(name: str, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    layer, options = LAYERS[name]
    torch.manual_seed(0)
    return layer(**options, layer_idx=0, dtype=dtype)


def check_layers(mesh: Mesh) -> None:
    x = generator(mesh, 0)(2, SEQLEN, WIDTH)
    seq_idx, cu_seqlens, row = packings(mesh, 2)["ascending"]["seq_idx"], cu_seqlens_of(mesh), x[:1]
    for name in LAYERS if mesh.size() in (2, 3) else ("GatedDeltaNet", "GatedDeltaProduct"):
        layer = make(name)
        compare_layer(mesh, layer, lambda layer, cut: layer(cut(x, 1)), name)
        compare_layer(mesh, layer, lambda layer, cut: layer(cut(x, 1), seq_idx=cut(seq_idx, 1)), f"{name}, seq_idx")
        compare_layer(mesh, layer, lambda layer, cut: layer(cut(row, 1), cu_seqlens=cu_seqlens), f"{name}, cu_seqlens")


def check_model(mesh: Mesh) -> None:
    """Blocks of both kinds share what the ranks know of the borders."""
    torch.manual_seed(0)
    sizes = {"head_dim": 4, "num_heads": 2}
    config = MambaConfig(d_model=16, n_layer=2, vocab_size=20, mixer="GatedDeltaNet", ssm_cfg=sizes, d_intermediate=20)
    model = MambaLM(config, {"initializer_range": 1.0}, dtype=torch.float64)
    tokens = torch.randint(20, (1, SEQLEN), generator=torch.Generator().manual_seed(0)).to(mesh.device_type)
    cu_seqlens = cu_seqlens_of(mesh)
    compare_layer(mesh, model, lambda model, cut: model(cut(tokens, 1), cu_seqlens=cu_seqlens).logits, "MambaLM")


CHECKS = {"layers": check_layers, "MambaLM": check_model}


@pytest.mark.slow
@pytest.mark.parametrize(("check", "place"), over_places(CHECKS))
def test_layers_on_ranks_are_those_on_one_process(processes: Processes, check: Callable[..., None], place: Place):
    processes.check(place, check)


def check_checkpointing(mesh: Mesh) -> None:
    x = generator(mesh, 0)(2, SEQLEN, WIDTH)
    for options in ({}, {"context_fn": keep_exchanged_states}):

        def call(layer: torch.nn.Module, cut: Cut, options: dict[str, Any] = options) -> Tensor:
            own = cut(x, 1).clone().requires_grad_()
            return torch.utils.checkpoint.checkpoint(layer, own, use_reentrant=False, **options)

        compare_layer(mesh, make("GatedDeltaNet"), call, f"checkpointed, {[*options]}")


def check_compiled(mesh: Mesh) -> None:
    x = generator(mesh, 0)(2, SEQLEN, WIDTH)
    torch._dynamo.reset()

    def call(layer: torch.nn.Module, cut: Cut) -> Any:
        own = cut(x, 1)
        return torch.compile(layer, backend="aot_eager", fullgraph=True)(own) if own is not x else layer(own)

    for name in ("GatedDeltaNet", "GatedDeltaProduct"):
        compare_layer(mesh, make(name), call, f"compiled {name}", exchanges=("chain",))


def check_low_precision(mesh: Mesh) -> None:
    """Under autocast, and in bf16: dtypes of one process, and values within the rounding of bf16."""
    own, device = own_span(mesh), mesh.device_type
    x = generator(mesh, 0)(2, SEQLEN, WIDTH)
    for exchange in ("chain", "summaries"):
        for dtype in (torch.float32, torch.bfloat16):
            layer = make("GatedDeltaNet", dtype).to(device)
            parallel = parallelize(copy.deepcopy(layer), mesh, exchange)
            results = []
            for module, steps in ((layer, x), (parallel, x[:, own])):
                with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.float32):
                    out = module(steps.to(dtype))
                out.float().square().sum().backward()
                results.append(out)
            whole, part = results
            assert part.dtype == whole.dtype
            torch.testing.assert_close(part, whole[:, own], rtol=0.03, atol=0.03 * whole.abs().max().item())
            sum_gradients(parallel, mesh)
            for (name, actual), expected in zip(parallel.named_parameters(), layer.parameters(), strict=True):
                largest = expected.grad.abs().max().item()
                torch.testing.assert_close(actual.grad, expected.grad, rtol=0.05, atol=0.05 * largest, msg=name)


def check_float32(mesh: Mesh) -> None:
    """Also where autocast would round products of matrices."""
    random, own = generator(mesh, 0), own_span(mesh)
    q, k, v = (random(2, SEQLEN, 2, 8).float() for _ in range(3))
    beta, g = random(2, SEQLEN, 2).float(), -random(2, SEQLEN, 2).abs().float()
    options = {"qk_l2norm": True, "beta_sigmoid": True}
    expected = delta_rule_scan(
        q, k, v, beta, g=g, **options, group=dist.new_group([dist.get_rank()], use_local_synchronization=True)
    )
    steps = [x[:, own] for x in (q, k, v, beta)]
    out = delta_rule_scan(*steps, g=g[:, own], **options, group=mesh, exchange="summaries")
    torch.testing.assert_close(out, expected[:, own], rtol=1e-5, atol=1e-5)


def check_bytes(mesh: Mesh) -> None:
    """Sizes of the docstring of ``delta_rule_scan``."""
    rank, gather, tag, number = mesh.get_local_rank(), "all_gather_into_tensor", 8, 4
    batch, heads, value_heads, key_dim, value_dim = 2, 1, 2, 3, 5
    q, k = torch.randn(2, batch, 4 + rank, heads, key_dim, device=mesh.device_type)
    v = torch.randn(batch, 4 + rank, value_heads, value_dim, device=mesh.device_type, requires_grad=True)
    beta = torch.rand(batch, 4 + rank, value_heads, device=mesh.device_type)
    states, maps = (batch * value_heads * rows * key_dim * number for rows in (value_dim, value_dim + key_dim))
    for exchange, sent_forward, sent_backward in (
        ("summaries", [(gather, maps)], [(gather, states)]),
        ("chain", [("send", states + tag)] * (rank < mesh.size() - 1), [("send", states + tag)] * (rank > 0)),
    ):
        with Collectives() as forward:
            out = delta_rule_scan(q, k, v, beta, group=mesh, exchange=exchange)
        with Collectives() as backward:
            out.sum().backward()
        assert forward.sent == sent_forward, exchange
        assert backward.sent == sent_backward, exchange
    with Collectives() as backward:
        out, final_states = delta_rule_scan(q, k, v, beta, group=mesh, return_final_states=True)
        (out.sum() + final_states.sum()).backward()
    assert backward.sent == [(gather, maps), (gather, 2 * states)]
    # No gradient of a state is needed where the queries alone need one.
    with Collectives() as backward:
        delta_rule_scan(q.requires_grad_(), k, v.detach(), beta, group=mesh, exchange="summaries").sum().backward()
    assert backward.sent == [(gather, maps)]


def check_errors(mesh: Mesh) -> None:
    rank = mesh.get_local_rank()
    layer = parallelize(make("GatedDeltaNet", torch.float32), mesh)
    cache = type("Cache", (), {"seqlen_offset": 0, "key_value_memory_dict": {}})()
    with pytest.raises(ValueError, match="no inference_params and no step with context parallelism"):
        layer(torch.randn(1, 5, WIDTH), cache)
    q, k = torch.randn(2, 1, 5 + rank, 2, 3)
    v, beta = torch.randn(1, 10 + 2 * rank, 2, 3), torch.rand(1, 10 + 2 * rank, 2)

    def scan(**options: Any) -> Any:
        return delta_rule_scan(q, k.repeat(1, 2, 1, 1), v, beta, num_householder=2, group=mesh, **options)

    scan()  # unequal spans, several updates
    with pytest.raises(ValueError, match=r"same scale on every rank, got 0\.5 on rank 0 and 1\.5 on rank 1"):
        scan(scale=0.5 + rank)
    with pytest.raises(ValueError, match="allow_neg_eigval with beta_sigmoid"):
        scan(allow_neg_eigval=True)
    ends = {"cu_seqlens": torch.tensor([0, 3, 11]), "initial_states": torch.zeros(2, 2, 3, 3)}
    with pytest.raises(ValueError, match="neither initial nor final states with cu_seqlens"):
        scan(**ends)
    with pytest.raises(ValueError, match="expected k of shape"):  # one rank's keys lack an update
        delta_rule_scan(q, k.repeat(1, 2, 1, 1)[:, rank:], v, beta, num_householder=2, reverse=True, group=mesh)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("updates", [1, 2])
def test_the_map_of_a_span(updates: int, dtype: torch.dtype, device: str) -> None:
    """The last states from any initial states are S T + B."""
    from ssm_kernels.distributed._delta_rule import _summary

    source = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source).to(device, dtype)

    q, k, v = draw(2, 80, 2, 16), draw(2, 80 * updates, 2, 16), draw(2, 80 * updates, 4, 24)
    beta, g = draw(2, 80 * updates, 4), -draw(2, 80, 4).abs() / 50
    options: dict[str, Any] = {"g": g, "qk_l2norm": True, "beta_sigmoid": True, "num_householder": updates}

    def last_states(q: Tensor, v: Tensor, states: Tensor | None) -> Tensor:
        return ssm_kernels.delta_rule_scan(q, k, v, beta, initial_states=states, return_final_states=True, **options)[1]

    B, T = _summary(k, v, updates, last_states)
    initial = draw(2, 4, 24, 16).float()
    expected = last_states(q, v, initial)
    error = (initial.double() @ T.double() + B - expected).norm() / expected.double().norm()
    assert error <= (1e-5 if dtype == torch.float32 else 2e-2)


WITH = {
    "checkpointing": (check_checkpointing, Place((3,))),
    "compile": (check_compiled, Place((3,))),
    "low precision": (check_low_precision, Place((2,))),
    "float32": (check_float32, Place((3,))),
    "bytes": (check_bytes, Place((3,))),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "place"),
    [
        *(param(place, check, id=name) for name, (check, place) in WITH.items()),
        *(param(TWO_GPUS, check, id=name) for name, (check, _) in WITH.items()),
    ],
)
def test_works_with(processes: Processes, check: Callable[..., None], place: Place):
    processes.check(place, check)


def test_errors_are_raised_on_every_rank(processes: Processes):
    processes.check(Place((2,)), check_errors)
