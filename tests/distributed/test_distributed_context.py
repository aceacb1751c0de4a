"""``ContextParallel`` on 1 to 4 ranks, on CPUs and on two GPUs: layers and models of one process; errors."""

from __future__ import annotations

import copy
import datetime
import functools
import itertools
import math
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint
from distributed_helpers import (
    SEQLEN,
    Collectives,
    Cut,
    LargeResults,
    close,
    compare_layer,
    cu_seqlens_of,
    generator,
    over_places,
    own_span,
    packings,
    parallelize,
    random_flags,
)
from model_helpers import MIXERS, make_model, make_tokens
from process_pool import TWO_GPUS, Mesh, Place, Processes, param, start
from torch import Tensor

from ssm_kernels import nn as layers
from ssm_kernels._mixers import Mamba2Options, Mamba2Tensors

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh

from ssm_kernels.distributed import (
    ContextParallel,
    keep_exchanged_states,
    sum_gradients,
)
from ssm_kernels.distributed._convolution import CausalConv1d, MambaConv
from ssm_kernels.distributed._group import Group
from ssm_kernels.distributed._messages import Call


def check_mamba(mesh: Mesh) -> None:
    random = generator(mesh, 0)
    x, z = random(2, SEQLEN, 6), random(2, SEQLEN, 6)
    for options in ({}, {"discretization": "bilinear", "bias": True}, {"d_conv": 1}, {"conv_bias": False, "d_conv": 6}):
        torch.manual_seed(0)
        layer = layers.Mamba(6, 4, **{"dt_rank": 2, "dtype": torch.float64} | options)
        compare_layer(mesh, layer, lambda layer, cut: layer(cut(x, 1)), f"Mamba {options}")
    seq_idx, cu_seqlens, row = packings(mesh, 2)["ascending"]["seq_idx"], cu_seqlens_of(mesh), x[:1]
    compare_layer(mesh, layer, lambda layer, cut: layer(cut(x, 1), seq_idx=cut(seq_idx, 1)), "Mamba, seq_idx")
    compare_layer(mesh, layer, lambda layer, cut: layer(cut(row, 1), cu_seqlens=cu_seqlens), "Mamba, cu_seqlens")
    for rule, samples in (("zoh", 0), ("exp_trapezoidal", 1)):
        layer = layers.SelectiveSSM(6, 4, discretization=rule, dtype=torch.float64)
        initial = random(2, 6 + samples, 4 + samples)

        def call(layer: nn.Module, cut: Cut, initial: Tensor = initial) -> Any:
            return layer(cut(x, 1), cut(z, 1), initial, return_last_state=True)

        compare_layer(mesh, layer, call, f"SelectiveSSM, {rule}")


def check_second_order(mesh: Mesh) -> None:
    """Layers whose rules read two input samples, and with measured times."""
    random = generator(mesh, 0)
    x, time_steps = random(2, SEQLEN, 6), random(2, SEQLEN).abs()
    row, cu_seqlens = x[:1], cu_seqlens_of(mesh)
    mamba = {"dt_rank": 2, "dtype": torch.float64}
    mamba2 = {"headdim": 2, "dtype": torch.float64}
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (layers.Mamba, mamba | {"discretization": "exp_trapezoidal"}),
        (layers.Mamba, mamba | {"discretization": "trapezoidal"}),
        (layers.Mamba2, mamba2 | {"discretization": "exp_trapezoidal", "ngroups": 2}),
        (layers.Mamba2, mamba2 | {"discretization": "foh_ramp", "rmsnorm": False}),
    ]
    for kind, options in kinds:
        torch.manual_seed(0)
        layer, what = kind(6, 4, **options), f"{kind.__name__} {options}"
        compare_layer(mesh, layer, lambda layer, cut: layer(cut(x, 1)), what)
        compare_layer(mesh, layer, lambda layer, cut: layer(cut(row, 1), cu_seqlens=cu_seqlens), f"{what}, cu_seqlens")
    for scale in ("both", "A"):
        layer = layers.Mamba(6, 4, discretization="zoh_exact", time_steps_scale=scale, **mamba)
        compare_layer(mesh, layer, lambda layer, cut: layer(cut(x, 1), time_steps=cut(time_steps, 1)), f"time_steps, {scale}")


def check_mamba2(mesh: Mesh) -> None:
    x = generator(mesh, 0)(2, SEQLEN, 6)
    seq_idx = packings(mesh, 2)["ascending"]["seq_idx"]
    cu_seqlens = cu_seqlens_of(mesh)
    sizes = {"d_state": 3, "headdim": 2, "dtype": torch.float64}
    variants: list[dict[str, Any]] = [
        {},
        {"ngroups": 2, "D_has_hdim": True, "norm_before_gate": True, "discretization": "zoh_exact"},
        {"rmsnorm": False, "d_ssm": 8, "bias": True, "conv_bias": False, "d_conv": 2, "dt_limit": (0.01, 0.05)},
    ]
    for options in variants:
        torch.manual_seed(0)
        layer = layers.Mamba2(6, **sizes | options)
        compare_layer(mesh, layer, lambda layer, cut: layer(cut(x, 1)), f"Mamba2 {options}")
    compare_layer(mesh, layer, lambda layer, cut: layer(cut(x, 1), seq_idx=cut(seq_idx, 1)), "Mamba2, seq_idx")
    row = x[:1]
    compare_layer(mesh, layer, lambda layer, cut: layer(cut(row, 1), cu_seqlens=cu_seqlens), "Mamba2, cu_seqlens")


def check_recurrent_layers(mesh: Mesh) -> None:
    random = generator(mesh, 0)
    x, hx, dt = random(2, SEQLEN, 5), random(4, 2, 3), random(2, SEQLEN).abs()
    reset = random_flags(mesh, 2, 0.2)
    cu_seqlens = cu_seqlens_of(mesh)
    row = random(SEQLEN, 1, 5)
    for kind in (layers.MinGRU, layers.MinLSTM, layers.Liquid):
        torch.manual_seed(0)
        layer = kind(5, 3, num_layers=2, bidirectional=True, batch_first=True, dtype=torch.float64)

        def call(layer: nn.Module, cut: Cut, kind: type[nn.Module] = kind) -> Any:
            options = {"dt": cut(dt, 1)} if kind is layers.Liquid else {}
            return layer(cut(x, 1), hx, reset=cut(reset, 1), **options)

        compare_layer(mesh, layer, call, f"{kind.__name__}, reset")
        layer = kind(5, 3, dtype=torch.float64)
        compare_layer(mesh, layer, lambda layer, cut: layer(cut(row, 0), cu_seqlens=cu_seqlens), f"{kind.__name__}, packed", 0)


def check_models(mesh: Mesh) -> None:
    tokens = make_tokens(1, SEQLEN, device=mesh.device_type)
    cu_seqlens = cu_seqlens_of(mesh)
    for mixer in MIXERS:
        model = make_model(mixer, mesh.device_type, d_intermediate=20)
        options = {} if mixer == "Mamba" else {"cu_seqlens": cu_seqlens}

        def call(model: nn.Module, cut: Cut, options: dict[str, Tensor] = options) -> Tensor:
            return model(cut(tokens, 1), **options).logits

        compare_layer(mesh, model, call, f"MambaLM of {mixer}")


LAYER_CHECKS = {
    "Mamba": check_mamba,
    "second order": check_second_order,
    "Mamba2": check_mamba2,
    "recurrent": check_recurrent_layers,
    "MambaLM": check_models,
}


@pytest.mark.slow
@pytest.mark.parametrize(("check", "place"), over_places(LAYER_CHECKS))
def test_layers_on_ranks_are_those_on_one_process(processes: Processes, check: Callable[..., None], place: Place):
    processes.check(place, check)


def check_mamba_conv(mesh: Mesh) -> None:
    """The node of the convolution and the gate, beside that of the convolution alone, for each set of results in use."""
    random, group = generator(mesh, 0), Group.of(mesh)
    xz, other = random(2, 7, 12).requires_grad_(), random(2, 7, 6).requires_grad_()
    weight, factors = random(6, 4).requires_grad_(), random(2, 7, 12)
    for used in itertools.product([False, True], repeat=3):
        for needs_xz in (True, False):
            source = xz if needs_xz else xz.detach()

            def gradients(results: tuple[Tensor, ...], used: tuple[bool, ...] = used) -> list[Tensor | None]:
                x, again, z = (result if is_used else result.detach() for result, is_used in zip(results, used, strict=True))
                # The gradient of z is the right half of that of a concatenation.
                loss = (x * factors[..., :6]).sum() + again.square().sum() + (torch.cat([other, z], 2) * factors).sum()
                return torch.autograd.grad(loss, [xz, weight, other], allow_unused=True, materialize_grads=True)

            x, z = source.chunk(2, 2)
            x = CausalConv1d.apply(x, weight, None, None, None, None, "silu", False, None, group)
            expected = gradients((x, x, z))
            for chain in (None, Call()):
                actual = gradients(MambaConv.apply(source, weight, None, None, chain, group))
                for name, *values in zip(("xz", "weight", "other"), actual, expected, strict=True):
                    close(*values, f"results in use {used}, chain {chain}, gradient of {name}")


def check_gradient_buffer(mesh: Mesh) -> None:
    """Backward of Mamba writes the gradients of x and z into one tensor: it concatenates, adds and copies no sequence."""
    layer = parallelize(layers.Mamba(6, 4, dtype=torch.float64).to(mesh.device_type), mesh)
    loss = layer(generator(mesh, 0)(2, 40, 6).requires_grad_()).sum()
    with LargeResults(2 * 40 * layer.d_inner) as operators:
        loss.backward()
    assert "ssm_kernels::_selective_scan_bwd_out" in operators.names
    assert not operators.names & {"aten::cat", "aten::add.Tensor", "aten::copy_", "aten::clone"}, operators.names


def check_checkpointing(mesh: Mesh) -> None:
    """Recomputed layers, with ``keep_exchanged_states`` without messages and collectives."""
    x = generator(mesh, 0)(2, SEQLEN, 6)
    seq_idx = packings(mesh, 2)["ascending"]["seq_idx"]
    blocks = [
        layers.Mamba(6, 4, dtype=torch.float64),
        nn.Sequential(*(layers.Mamba2(6, 3, headdim=2, dtype=torch.float64) for _ in range(2))),
    ]
    for block in blocks:
        for options in ({}, {"context_fn": keep_exchanged_states}):

            def call(block: nn.Module, cut: Cut, options: dict[str, Any] = options) -> Tensor:
                own, numbers = cut(x, 1).clone().requires_grad_(), {"seq_idx": cut(seq_idx, 1)}
                for layer in block if isinstance(block, nn.Sequential) else [block]:
                    own = torch.utils.checkpoint.checkpoint(layer, own, **numbers, use_reentrant=False, **options)
                return own

            compare_layer(mesh, block, call, f"checkpointed {type(block).__name__}, {[*options]}")
    layer = layers.Mamba(6, 4, dtype=torch.float64).to(mesh.device_type)
    own = x[:, own_span(mesh)].requires_grad_()
    for exchange in ("chain", "summaries"):
        parallelize(layer, mesh, exchange)
        sent = []
        for options in ({}, {"context_fn": keep_exchanged_states}):
            out = torch.utils.checkpoint.checkpoint(layer, own, use_reentrant=False, **options)
            with Collectives() as backward:
                out.sum().backward()
            sent.append(len(backward.sent))
        of_forward = 2 * (exchange == "summaries" or mesh.get_local_rank() < mesh.size() - 1)
        assert sent[0] == sent[1] + of_forward, (exchange, sent)


def check_compiled(mesh: Mesh) -> None:
    x = generator(mesh, 0)(2, SEQLEN, 6)
    random = generator(mesh, 0)
    for layer, exchange in (
        (layers.Mamba(6, 4, dtype=torch.float64), "chain"),
        (layers.Mamba2(6, 3, headdim=2, dtype=torch.float64), "summaries"),
        (layers.MinGRU(6, 5, batch_first=True, dtype=torch.float64), "summaries"),
    ):
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(random(*parameter.shape) * 0.3)
        torch._dynamo.reset()

        def call(layer: nn.Module, cut: Cut) -> Any:
            own = cut(x, 1)
            return torch.compile(layer, backend="aot_eager", fullgraph=True)(own) if own is not x else layer(own)

        compare_layer(mesh, layer, call, f"compiled {type(layer).__name__}", exchanges=(exchange,))


def check_low_precision(mesh: Mesh) -> None:
    """Under autocast, and in bf16: dtypes of one process, and values within the rounding of bf16."""
    own, device = own_span(mesh), mesh.device_type
    x = generator(mesh, 0)(2, SEQLEN, 16)
    for make in (
        lambda dtype: layers.Mamba(16, 4, dtype=dtype),
        lambda dtype: layers.Mamba2(16, 4, headdim=8, dtype=dtype),
        lambda dtype: layers.MinGRU(16, 16, batch_first=True, dtype=dtype),
        lambda dtype: layers.Liquid(16, 16, batch_first=True, dtype=dtype),
        lambda dtype: layers.SelectiveSSM(16, 4, dtype=dtype),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            layer = make(dtype).to(device)
            parallel = parallelize(copy.deepcopy(layer), mesh)
            results = []
            for module, steps in ((layer, x), (parallel, x[:, own])):
                with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.float32):
                    out = module(steps.to(dtype))
                out = out[0] if isinstance(out, tuple) else out
                out.float().square().sum().backward()
                results.append(out)
            whole, part = results
            assert part.dtype == whole.dtype
            torch.testing.assert_close(part, whole[:, own], rtol=0.03, atol=0.03 * whole.abs().max().item())
            sum_gradients(parallel, mesh)
            for (name, actual), expected in zip(parallel.named_parameters(), layer.parameters(), strict=True):
                assert actual.grad.dtype == expected.grad.dtype
                scale = expected.grad.abs().max().item()
                close_to = torch.allclose(actual.grad, expected.grad, rtol=0.05, atol=0.05 * scale)
                assert close_to, f"{type(layer).__name__}, {dtype}, gradient of {name}"


def shard(model: nn.Module, mesh: Mesh) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in model.backbone.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten(), reduction="sum")


def check_fsdp(mesh: Mesh) -> None:
    """Ranks for the batch, whose parameters FSDP2 shards, times ranks for the sequence."""
    data, model = mesh["data"], mesh["model"]
    tokens = make_tokens(4, SEQLEN + 1, device=mesh.device_type)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    rows, steps = range(4)[2 * data.get_local_rank() :][:2], own_span(model)
    own = slice(rows.start, rows.stop), steps
    for mixer in MIXERS:
        expected = make_model(mixer, mesh.device_type)
        parallel = copy.deepcopy(expected)
        parallelize(parallel, model)
        shard(parallel, data)
        (loss_of(expected, inputs, targets) / targets.numel()).backward()
        # FSDP2 averages over its two ranks; each has half of the batch.
        (loss_of(parallel, inputs[own], targets[own]) / (2 * SEQLEN)).backward()
        sum_gradients(parallel, model)
        for (name, actual), wanted in zip(parallel.named_parameters(), expected.parameters(), strict=True):
            close(actual.grad.full_tensor(), wanted.grad, f"{mixer}, gradient of {name}")


def check_fsdp_of_the_same_ranks(mesh: Mesh) -> None:
    """Sharded over the ranks of the sequence: FSDP2's average times their number is the sum."""
    tokens, steps = make_tokens(2, SEQLEN + 1, device=mesh.device_type), own_span(mesh)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    expected = make_model("Mamba2", mesh.device_type)
    parallel = copy.deepcopy(expected)
    parallelize(parallel, mesh)
    for block in parallel.backbone.layers:
        options = {"use_reentrant": False, "context_fn": keep_exchanged_states}
        block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, **options)
    shard(parallel, mesh)
    loss_of(expected, inputs, targets).backward()
    (loss_of(parallel, inputs[:, steps], targets[:, steps]) * mesh.size()).backward()
    for (name, actual), wanted in zip(parallel.named_parameters(), expected.parameters(), strict=True):
        close(actual.grad.full_tensor(), wanted.grad, f"gradient of {name}")


WITH = {
    "checkpointing": (check_checkpointing, Place((3,))),
    "mamba_conv": (check_mamba_conv, Place((2,))),
    "gradient_buffer": (check_gradient_buffer, Place((2,))),
    "compile": (check_compiled, Place((2,))),
    "low precision": (check_low_precision, Place((2,))),
    "fsdp2": (check_fsdp, Place((2, 2))),
    "fsdp2 of the same ranks": (check_fsdp_of_the_same_ranks, Place((4,))),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "place"),
    [
        *(param(place, check, id=name) for name, (check, place) in WITH.items()),
        *(param(TWO_GPUS, check, id=name) for name, (check, place) in WITH.items() if len(place.shape) == 1),
    ],
)
def test_works_with(processes: Processes, check: Callable[..., None], place: Place):
    processes.check(place, check)


def raises(error: type[Exception], pattern: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=pattern):
        call()


def check_errors(mesh: Mesh) -> None:
    layer = parallelize(layers.Mamba(4, 3, layer_idx=0), mesh)
    cache = type("Cache", (), {"seqlen_offset": 0, "key_value_memory_dict": {}})()
    raises(ValueError, "no inference_params and no step with context parallelism", lambda: layer(torch.randn(1, 5, 4), cache))
    states = layer.allocate_inference_cache(1, 5)
    raises(ValueError, "no inference_params and no step", lambda: layer.step(torch.randn(1, 1, 4), *states))
    raises(TypeError, "expected a state_dict", lambda: pickle.dumps(layer))
    tensors = dict.fromkeys(Mamba2Tensors._fields) | {"ssm_state": torch.zeros(1, 2, 2, 3)}
    options = Mamba2Options(2, 1, 3, None, 0.0, math.inf, 1e-5, False, "zoh")
    expected = "expected neither conv_state nor ssm_state over several ranks"
    raises(ValueError, expected, lambda: layer.operators.mamba2_mixer(*tensors.values(), *options))
    rank = mesh.get_local_rank()
    gru = parallelize(layers.MinGRU(4, 3, bidirectional=True, batch_first=True), mesh)
    x, reset = torch.randn(1 + rank, 5, 4), torch.zeros(1 + rank, 5, dtype=torch.bool)
    expected = r"same reset on every rank, got bool cpu \[1, seqlen\] on rank 0 and bool cpu \[2, seqlen\] on rank 1"
    raises(ValueError, expected, lambda: gru(x, reset=reset))
    gru = parallelize(layers.MinGRU(4, 3), mesh)
    sequences = nn.utils.rnn.pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
    raises(ValueError, "no PackedSequence with context parallelism", lambda: gru(sequences))
    expected = "expected exchange to be 'chain', 'summaries' or None, got 'ring'"
    raises(ValueError, expected, lambda: ContextParallel(exchange="ring"))
    layer = parallelize(layers.Mamba(4, 3), mesh, ("chain", "summaries")[rank])
    expected = "same exchange on every rank, got chain on rank 0 and summaries on rank 1"
    raises(ValueError, expected, lambda: layer(torch.randn(1, 5, 4)))
    raises(ValueError, "contains layers of ssm_kernels, got Linear", lambda: parallelize(nn.Linear(3, 3), mesh))


def test_errors_are_raised_on_every_rank(processes: Processes):
    processes.check(Place((2,)), check_errors)


def fail(rank: int, folder: str) -> None:
    """Two processes of groups with a short time-out. Exit codes: 0 for the expected errors, 3 for the rank that dies."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    groups = [dist.new_group([0, 1], timeout=datetime.timedelta(seconds=5)) for _ in range(3)]
    meshes = [DeviceMesh.from_group(group, "cpu", mesh_dim_names=("context",)) for group in groups]
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
    layer = parallelize(layers.Mamba(6, 4), meshes[0], "summaries")
    dist.barrier()
    layer(x)
    changed = "causal_conv1d(x=float32 cpu [1, seqlen, 12]"
    parts = ("the all-gather failed on rank 0 of 2", f"Rank 1 called {changed}")
    if rank == 1:
        parts = (f"rank 1 makes a call with new arguments, {changed}", "waits for ranks [0]")
    are_expected = is_message(lambda: layer(x[:1] if rank == 1 else x), *parts)

    # Rank 1 dies: rank 0 waits for it in an all-gather, and along a chain in backward.
    layer = parallelize(layers.Mamba(6, 4), meshes[1], "summaries")
    chained = parallelize(layers.Mamba(6, 4), meshes[2], "chain")
    dist.barrier()
    layer(x)
    chained(x).sum().backward()
    dist.barrier()  # rank 0 has received
    if rank == 1:
        os._exit(3 if are_expected else 1)
    are_expected &= is_message(lambda: layer(x), "the all-gather failed on rank 0 of 2: a rank has died")
    are_expected &= is_message(lambda: chained(x).sum().backward(), "the message", "failed on rank 0 of 2: a rank has died")
    os._exit(0 if are_expected else 1)


@pytest.mark.slow
def test_no_rank_hangs(tmp_path: Path):
    processes = start(fail, (str(tmp_path),), 2)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 3]
