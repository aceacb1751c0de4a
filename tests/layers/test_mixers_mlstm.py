"""The operator between the projections of ``nn.MLSTM``: comparison with the composed operators, and what it keeps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from test_mixers_mamba2 import assert_close, assert_vmap_is_a_loop
from torch import Tensor

from ssm_kernels import nn
from ssm_kernels.rules.mixers import composed_mlstm as composition

OPERATOR = "mlstm_mixer"
ops = torch.ops.ssm_kernels
mixer = ops._mlstm_mixer
# The unit m is a constant.
RESULTS = ("out", "final_C", "final_n")
D_MODEL = 7

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "bias": {"bias": True, "projects": True},
    "no_cap": {"gate_soft_cap": None},
    "states": {"states": True},
    "cu_seqlens": {"batch": 1, "packed": True, "states": True, "projects": True},
    "no_norm": {"norm": False},
    "projection_without_norm": {"norm": False, "projects": True},
    "projection": {"projects": True, "states": True},
    "recomputed": {"projects": True, "recomputes_scan": True},
    "recomputed_without_projection": {"recomputes_scan": True},
    "recomputed_without_norm": {"recomputes_scan": True, "norm": False},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))


def make_inputs(
    *,
    batch: int = 2,
    seqlen: int = 9,
    heads: int = 2,
    key_dim: int = 4,
    value_dim: int = 3,
    gate_soft_cap: float | None = 2.0,
    bias: bool = False,
    states: bool = False,
    norm: bool = True,
    projects: bool = False,
    packed: bool = False,
    recomputes_scan: bool = False,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> dict[str, Any]:
    """The operator's arguments in its order."""
    generator, wide = torch.Generator().manual_seed(0), torch.float64 if dtype == torch.float64 else torch.float32

    def draw(*shape: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, to)

    values, rows = heads * value_dim, 3 if packed else batch
    columns = {"q": heads * key_dim, "k": heads * key_dim, "v": values, "i": heads, "f": heads}
    inputs: dict[str, Any] = {name: draw(batch, seqlen, size) for name, size in columns.items()}
    inputs["z"] = draw(batch, seqlen, values) if norm else None
    inputs["norm_weight"] = draw(values) if norm else None
    inputs["norm_bias"] = draw(values) if norm and bias else None
    inputs["C"] = draw(rows, heads, value_dim, key_dim, to=wide) if states else None
    inputs["n"] = draw(rows, heads, key_dim, to=wide) if states else None
    inputs["m"] = draw(rows, heads, to=wide) if states else None
    inputs["out_proj_weight"] = draw(D_MODEL, values) if projects else None
    inputs["out_proj_bias"] = draw(D_MODEL) if projects and bias else None
    inputs["cu_seqlens"] = torch.tensor([0, 4, 4, seqlen], device=device, dtype=torch.int32) if packed else None
    return inputs | {
        "gate_soft_cap": gate_soft_cap,
        "eps": 1e-6,
        "norm_eps": 1e-5,
        "recomputes_scan": recomputes_scan,
        "layer": "MLSTM",
    }


def leaves_of(inputs: dict[str, Any]) -> list[str]:
    return [name for name, value in inputs.items() if isinstance(value, Tensor) and value.is_floating_point()]


def evaluate(
    function: Any, inputs: dict[str, Any], results: tuple[str, ...] = RESULTS, leaves: list[str] | None = None
) -> dict[str, Tensor]:
    """The results, and the gradients of some arguments through some of the results."""
    leaves = leaves_of(inputs) if leaves is None else leaves
    inputs = inputs | {name: inputs[name].detach().requires_grad_() for name in leaves}
    outputs = dict(zip((*RESULTS, "final_m"), function(*inputs.values()), strict=True))
    generator = torch.Generator().manual_seed(1)
    cotangents = {n: torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v) for n, v in outputs.items()}
    gradients = torch.autograd.grad(
        [outputs[n] for n in results],
        [inputs[n] for n in leaves],
        [cotangents[n] for n in results],
        allow_unused=True,
        materialize_grads=True,
    )
    return {n: v.detach() for n, v in outputs.items()} | {f"grad_{n}": g for n, g in zip(leaves, gradients, strict=True)}


@every_option
def test_is_the_composition(options, device):
    inputs = make_inputs(device=device, **options)
    assert_close(evaluate(mixer, inputs), evaluate(composition, inputs), 1e-10)


@pytest.mark.parametrize("name", ["projection", "recomputed", "no_norm", "projection_without_norm", "recomputed_without_norm"])
@pytest.mark.parametrize("result", RESULTS)
def test_gradient_of_one_result(result, name, device):
    inputs = make_inputs(device=device, **OPTIONS[name])
    assert_close(evaluate(mixer, inputs, (result,)), evaluate(composition, inputs, (result,)), 1e-10)


@pytest.mark.parametrize("name", ["bias", "recomputed", "no_norm"])
def test_gradients_of_a_subset(name, device):
    inputs = make_inputs(device=device, **OPTIONS[name] | {"states": True})
    whole = evaluate(mixer, inputs)
    for leaf in leaves_of(inputs):
        alone = evaluate(mixer, inputs, leaves=[leaf])
        assert_close({leaf: alone[f"grad_{leaf}"]}, {leaf: whole[f"grad_{leaf}"]}, 1e-12)


SIZES = {"seqlen": 80, "key_dim": 16, "value_dim": 32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("options", [{}, {"projects": True}, {"projects": True, "recomputes_scan": True}])
def test_low_precision(options, dtype, device):
    """Forward and backward are those of the composed operators: the same kernels run on the same numbers."""
    inputs = make_inputs(dtype=dtype, device=device, **SIZES, **options)
    actual, expected = evaluate(mixer, inputs), evaluate(composition, inputs)
    assert_close(actual, expected, 4 * torch.finfo(dtype).eps)
    assert torch.equal(actual["out"], expected["out"])


def kept_bytes(run: Any, given: list[Tensor]) -> int:
    """Bytes that are kept for backward beside these tensors."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    pointers = {tensor.untyped_storage().data_ptr() for tensor in given}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    assert out.untyped_storage().data_ptr() not in saved
    return sum(size for pointer, size in saved.items() if pointer not in pointers)


@pytest.mark.parametrize("projects", [False, True])
def test_keeps_little_for_backward(projects, device):
    rows = 2 * 80 * 2
    make = partial(make_inputs, projects=projects, dtype=torch.bfloat16, device=device, **SIZES)
    for recomputes_scan, expected in ((False, rows * (32 * 2 + 12)), (True, rows * 8)):  # y, the divisor, rstd and mean
        inputs = make(recomputes_scan=recomputes_scan)
        inputs["q"].requires_grad_()
        given = [value for value in inputs.values() if isinstance(value, Tensor)]
        assert kept_bytes(lambda inputs=inputs: mixer(*inputs.values())[0], given) == expected


@pytest.mark.parametrize("name", ["bias", "cu_seqlens", "recomputed", "no_norm", "no_cap"])
def test_opcheck(name, device):
    inputs = make_inputs(device=device, **OPTIONS[name])
    leaves = leaves_of(inputs)
    torch.library.opcheck(mixer.default, tuple(v.detach().requires_grad_() if n in leaves else v for n, v in inputs.items()))
    plain = tuple(inputs.values())
    torch.library.opcheck(ops._mlstm_mixer_fwd.default, plain)
    out, _, _, _, *saved = ops._mlstm_mixer_fwd(*plain)
    needs = [tensor is not None for tensor in plain[:13]]
    torch.library.opcheck(ops._mlstm_mixer_bwd.default, (out, None, None, *saved, needs, *plain))


def test_vmap(device):
    assert_vmap_is_a_loop(mixer, make_inputs(projects=True, device=device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast(dtype, device):
    inputs = make_inputs(projects=True, dtype=torch.float32, device=device)
    with torch.autocast(device, dtype=dtype):
        actual, expected = evaluate(mixer, inputs), evaluate(composition, inputs)
    assert actual["out"].dtype == dtype and torch.equal(actual["out"], expected["out"])
    assert all(actual[f"grad_{name}"].dtype == inputs[name].dtype for name in leaves_of(inputs))
    assert_close(actual, {name: value.float() for name, value in expected.items()}, 4 * torch.finfo(dtype).eps)


def test_second_derivatives_raise(device):
    inputs = make_inputs(device=device)
    inputs["q"].requires_grad_()
    out, *_ = mixer(*inputs.values())
    with pytest.raises((NotImplementedError, RuntimeError), match=r"MLSTM|mlstm"):
        torch.autograd.grad(out.sum(), inputs["q"], create_graph=True)[0].sum().backward()


# ----- the layer


def nodes_of(tensor: Tensor) -> list[str]:
    """The names of the graph's nodes but those of leaves and views."""
    found, waiting = {tensor.grad_fn}, [tensor.grad_fn]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                waiting.append(node)
    names = [type(node).__name__ if "Mlstm" not in node.name() else "mixer" for node in found]
    return sorted(
        name for name in names if not name.startswith(("AccumulateGrad", "View", "UnsafeView", "TBackward", "Unflatten"))
    )


@pytest.mark.parametrize("recompute", ["none", "cheap", "all"])
@pytest.mark.parametrize("mode", ["single", "fused"])
def test_one_node_between_the_projections(mode, recompute, device):
    layer = nn.MLSTM(64, num_heads=2, weight_mode=mode, device=device, dtype=torch.bfloat16)
    layer.recompute = recompute
    u = torch.randn(2, 80, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    out = layer(u)
    products = {"single": 6, "fused": 2}[mode] + (recompute == "none")
    nodes = nodes_of(out)
    assert nodes.count("mixer") == 1
    others = [name for name in nodes if name != "mixer"]
    assert len([name for name in others if name.startswith(("Mm", "Addmm", "Linear"))]) == products, nodes
    assert all(name.startswith(("Mm", "Addmm", "Linear", "Split", "ReshapeAlias")) for name in others), nodes
    # The projections' outputs; y and three float32 numbers a head, which "all" leaves out but for the norm's two.
    steps = 2 * 80
    projected = steps * (32 + 32 + 64 + 64 + 4) * 2
    expected = projected + (steps * 2 * 8 if recompute == "all" else steps * (64 * 2 + 2 * 12))
    expected += steps * 64 * 2 if recompute == "none" else 0  # the input of the out-projection
    assert kept_bytes(lambda: layer(u), [u, *layer.parameters()]) == expected


@pytest.mark.cuda
def test_peak_memory_of_layers():
    """Less than with the composed operators, which keep the input of each out-projection and the gates."""
    layers = [nn.MLSTM(1024, num_heads=4, device="cuda", dtype=torch.bfloat16) for _ in range(6)]
    model = torch.nn.Sequential(*layers)
    u = torch.randn(4, 2048, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def peak() -> int:
        for _ in range(2):
            model.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(u).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    class Composed:
        is_local = False
        mlstm_mixer = staticmethod(composition)

    fused = peak()
    for layer in layers:
        layer.operators = Composed()
    assert fused < peak()
