"""``distributed.mlstm_scan`` and ``ContextParallel`` of ``MLSTM`` on 1 to 4 ranks: results and gradients of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_helpers import (
    CU_SEQLENS,
    SEQLEN,
    Collectives,
    Cut,
    close,
    compare_layer,
    cu_seqlens_of,
    generator,
    over_places,
    own_span,
    parallelize,
)
from process_pool import TWO_GPUS, Mesh, Place, Processes, param
from torch import Tensor

from ssm_kernels import mlstm_scan, nn

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from ssm_kernels import distributed

HEADS, KEY_DIM, VALUE_DIM = 2, 3, 5
SEQUENCES, STATES = ("q", "k", "v", "i", "f"), ("C", "n", "m")


def make_inputs(mesh: Mesh, batch: int, rows: int) -> dict[str, Tensor]:
    """Gates near which a memory is forgotten and filled: units grow and fall by several powers of e."""
    random = generator(mesh, 0)
    sizes = dict.fromkeys(("q", "k"), (HEADS, KEY_DIM)) | {"v": (HEADS, VALUE_DIM)} | dict.fromkeys(("i", "f"), (HEADS,))
    inputs = {name: random(batch, SEQLEN, *size) for name, size in sizes.items()}
    inputs["i"], inputs["f"] = 3 * inputs["i"], 3 * inputs["f"]
    states = {"C": random(rows, HEADS, VALUE_DIM, KEY_DIM), "n": random(rows, HEADS, KEY_DIM), "m": 2 * random(rows, HEADS)}
    return inputs | states


def compare(
    mesh: Mesh, inputs: dict[str, Tensor], exchange: str, *, final: bool = False, initial: bool = True, **options: Any
) -> None:
    """Without eps, through which alone results depend on the unit that gradients hold constant."""
    own, rank, size = own_span(mesh), mesh.get_local_rank(), mesh.size()
    what = f"{size} ranks, {exchange}, {final}, {initial}, {[*options]}"
    names = [name for name in inputs if initial or name in SEQUENCES]

    def call(function: Any, leaves: dict[str, Tensor], **more: Any) -> tuple[Tensor, Any]:
        states = tuple(leaves[name] for name in STATES) if initial else None
        results = function(*(leaves[name] for name in SEQUENCES), initial_states=states, eps=0.0, **options, **more)
        return results if final else (results, ())

    whole = {name: inputs[name].clone().requires_grad_() for name in names}
    out, states = call(mlstm_scan, whole, return_final_states=final)
    random = generator(mesh, 1)
    factors = [random(*out.shape), *(random(*state.shape) for state in states[:2])]
    sum((x * factor).sum() for x, factor in zip((out, *states[:2]), factors, strict=True)).backward()

    runs = []
    for _ in range(2):
        local = {name: (x[:, own] if name in SEQUENCES else x).detach().clone().requires_grad_() for name, x in whole.items()}
        more = {"return_final_states": final, "group": mesh, "exchange": exchange}
        part, last = call(distributed.mlstm_scan, local, **more)
        loss = (part * factors[0][:, own]).sum()
        for state, factor in zip(last[:2], factors[1:], strict=True):
            loss = loss + (state * factor).sum() * (rank + 1) / (size * (size + 1) / 2)
        loss.backward()
        runs.append([part, *last, *(x.grad for x in local.values())])
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True)), f"{what}: other bits in a second run"
    close(part, out[:, own], f"{what}, out")
    for name, state, expected in zip(STATES, last, states, strict=False):
        close(state, expected, f"{what}, final {name}")
    for name, x in local.items():
        gradient, expected = x.grad, whole[name].grad
        if name in STATES:
            dist.all_reduce(gradient, group=mesh.get_group())
        close(gradient, expected[:, own] if name in SEQUENCES else expected, f"{what}, gradient of {name}")


def check_scan(mesh: Mesh) -> None:
    inputs = make_inputs(mesh, 2, 2)
    for exchange in ("chain", "summaries"):
        compare(mesh, inputs, exchange)
        compare(mesh, inputs, exchange, initial=False, scale=0.7)
        compare(mesh, inputs, exchange, input_gate="sigmoid")
        compare(mesh, inputs, exchange, input_gate="sigmoid", normalize=False, initial=False)
        compare(mesh, inputs, exchange, reverse=True)
    compare(mesh, inputs, "summaries", final=True)
    compare(mesh, inputs, "summaries", final=True, reverse=True)
    compare(mesh, inputs, "summaries", final=True, input_gate="sigmoid")
    compare(mesh, inputs, "summaries", final=True, input_gate="sigmoid", normalize=False)
    closed = inputs | {"f": inputs["f"].index_fill(1, torch.tensor([4, 17], device=mesh.device_type), -torch.inf)}
    closed["i"] = inputs["i"].index_fill(1, torch.arange(9, 12, device=mesh.device_type), -torch.inf)
    empty = closed | {"m": torch.full_like(inputs["m"], -torch.inf), "C": 0 * inputs["C"], "n": 0 * inputs["n"]}
    for given in (closed, empty):
        compare(mesh, given, "summaries", final=True)
        compare(mesh, given, "chain")


def check_packed(mesh: Mesh) -> None:
    """The states are those of all sequences, of which one has no steps."""
    inputs, packed = make_inputs(mesh, 1, len(CU_SEQLENS) - 1), {"cu_seqlens": cu_seqlens_of(mesh)}
    for exchange in ("chain", "summaries"):
        compare(mesh, inputs, exchange, **packed)
        compare(mesh, inputs, exchange, initial=False, **packed)
        compare(mesh, inputs, exchange, reverse=True, **packed)
    compare(mesh, inputs, "summaries", final=True, **packed)
    compare(mesh, inputs, "summaries", final=True, input_gate="sigmoid", **packed)


def check_layer(mesh: Mesh) -> None:
    x, cu_seqlens = generator(mesh, 0)(2, SEQLEN, 8), cu_seqlens_of(mesh)
    torch.manual_seed(0)
    layer = nn.MLSTM(8, num_heads=2, eps=0.0, dtype=torch.float64)
    with torch.no_grad():
        for gate in (layer.igate_preact, layer.fgate_preact):
            torch.nn.init.normal_(gate.weight)
    compare_layer(mesh, layer, lambda layer, cut: layer(cut(x, 1)), "MLSTM")
    compare_layer(mesh, layer, lambda layer, cut: layer(cut(x[:1], 1), cu_seqlens=cu_seqlens), "MLSTM, cu_seqlens")


CHECKS = {"scan": check_scan, "packed": check_packed, "layer": check_layer}


@pytest.mark.slow
@pytest.mark.parametrize(("check", "place"), over_places(CHECKS))
def test_ranks_are_one_process(processes: Processes, check: Callable[..., None], place: Place):
    processes.check(place, check)


def check_compiled(mesh: Mesh) -> None:
    x = generator(mesh, 0)(2, SEQLEN, 8)
    torch._dynamo.reset()
    torch.manual_seed(0)

    def call(layer: torch.nn.Module, cut: Cut) -> Any:
        own = cut(x, 1)
        return torch.compile(layer, backend="aot_eager", fullgraph=True)(own) if own is not x else layer(own)

    layer = nn.MLSTM(8, num_heads=2, eps=0.0, dtype=torch.float64)
    compare_layer(mesh, layer, call, "compiled MLSTM", exchanges=("chain",))


def check_long_decays(mesh: Mesh) -> None:
    """Units of -1e5 in float32: what a memory stands for does not depend on the rounding of its unit."""
    random, own = generator(mesh, 0), own_span(mesh)
    q, k, v = (random(1, SEQLEN, HEADS, KEY_DIM).float() for _ in range(3))
    i = torch.full((1, SEQLEN, HEADS), -torch.inf, device=mesh.device_type)
    i[:, 0], f = 1.0, torch.full_like(i, -5000.1)
    options = {"input_gate": "exp", "eps": 0.0}
    expected = mlstm_scan(q, k, v, i, f, **options)
    parts = [x[:, own] for x in (q, k, v, i, f)]
    actual = distributed.mlstm_scan(*parts, **options, group=mesh, exchange="summaries")
    torch.testing.assert_close(actual, expected[:, own], rtol=1e-4, atol=1e-6)


def check_bytes_and_errors(mesh: Mesh) -> None:
    rank, gather, tag = mesh.get_local_rank(), "all_gather_into_tensor", 8
    q, k, v = torch.randn(3, 2, 4 + rank, HEADS, KEY_DIM, device=mesh.device_type)
    i, f = torch.randn(2, 2, 4 + rank, HEADS, device=mesh.device_type)
    v.requires_grad_()
    states, sums = 2 * HEADS * (KEY_DIM + 2) * KEY_DIM * 4, 2 * HEADS * 8
    states += -states % 8
    for exchange, sent_forward, sent_backward in (
        ("summaries", [(gather, states + sums)], [(gather, states)]),
        ("chain", [("send", states + tag)] * (rank < mesh.size() - 1), [("send", states + tag)] * (rank > 0)),
    ):
        with Collectives() as forward:
            out = distributed.mlstm_scan(q, k, v, i, f, group=mesh, exchange=exchange)
        with Collectives() as backward:
            out.sum().backward()
        assert (forward.sent, backward.sent) == (sent_forward, sent_backward), exchange
    with pytest.raises(ValueError, match="expected normalize with input_gate"):
        distributed.mlstm_scan(q, k, v, i, f, normalize=False, group=mesh)
    with pytest.raises(ValueError, match="expected initial_states to be the three tensors C, n and m, got 2 of them"):
        distributed.mlstm_scan(q, k, v, i, f, initial_states=(q, k), group=mesh)  # type: ignore[arg-type]
    layer = parallelize(nn.MLSTM(8, num_heads=2, layer_idx=0).to(mesh.device_type), mesh)
    x = torch.randn(1, 1, 8, device=mesh.device_type)
    cache = type("Cache", (), {"seqlen_offset": 0, "key_value_memory_dict": {}})()
    with pytest.raises(ValueError, match="MLSTM: expected no inference_params and no step with context parallelism"):
        layer(x, cache)
    with pytest.raises(ValueError, match="no inference_params and no step"):
        layer.step(x, *layer.allocate_inference_cache(1, 5))


WITH = {"compile": check_compiled, "long decays": check_long_decays, "bytes and errors": check_bytes_and_errors}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "place"), [param(place, check, id=name) for name, check in WITH.items() for place in (Place((3,)), TWO_GPUS)]
)
def test_works_with(processes: Processes, check: Callable[..., None], place: Place):
    processes.check(place, check)
