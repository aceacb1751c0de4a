"""Mamba-2's operator with the out-projection: comparison with the mixer and F.linear, and what it keeps for backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mamba2_mixer_helpers import OPTIONS, RESULTS, TENSORS, make_inputs
from mixer_spec import assert_close, assert_vmap_is_a_loop
from test_mixers_mamba2 import operator
from torch import Tensor

from ssm_kernels.rules.mixers import composed_mamba2_projected as composition

OPERATOR = "mamba2_mixer"
ops = torch.ops.ssm_kernels
projected = ops._mamba2_mixer_projected
LEAVES = (*TENSORS, "out_proj_weight", "out_proj_bias")
D_MODEL = 7
MIXER_ARGUMENTS = len(make_inputs())


def make_projected_inputs(
    *, weight: bool = True, bias: bool = True, recomputes: bool = False, **options: Any
) -> dict[str, Any]:
    """The operator's arguments in its order."""
    inputs = make_inputs(**options)
    of_rows = inputs["projected"]
    d_ssm = inputs["dt_bias"].numel() * inputs["headdim"]
    generator = torch.Generator().manual_seed(2)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    inputs["out_proj_weight"] = draw(D_MODEL, d_ssm).to(of_rows) if weight else None
    inputs["out_proj_bias"] = draw(D_MODEL).to(of_rows) if weight and bias else None
    return inputs | {"recomputes_scan": recomputes}


def mixer_and_linear(*arguments: Any) -> tuple[Tensor, ...]:
    """As a layer that calls out_proj as a module."""
    weight, bias, _ = arguments[MIXER_ARGUMENTS:]
    out, *states = operator(*arguments[:MIXER_ARGUMENTS])
    return out if weight is None else F.linear(out, weight, bias), *states


def evaluate(
    function: Any, inputs: dict[str, Any], leaves: tuple[str, ...] = LEAVES, results: tuple[str, ...] = RESULTS
) -> dict[str, Tensor]:
    """The results, and the gradients of some arguments through some of the results."""
    leaves = tuple(name for name in leaves if inputs[name] is not None)
    inputs = inputs | {name: inputs[name].detach().requires_grad_() for name in leaves}
    outputs = dict(zip(RESULTS, function(*inputs.values()), strict=True))
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


recomputation = pytest.mark.parametrize("recomputes", [False, True], ids=["cheap", "all"])


@recomputation
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_is_the_composition(options, recomputes, device):
    inputs = make_projected_inputs(device=device, recomputes=recomputes, **options)
    assert_close(evaluate(projected, inputs), evaluate(composition, inputs), 1e-10)


@recomputation
@pytest.mark.parametrize("options", [{"bias": False}, {"weight": False}, {"weight": False, "norm": False}])
def test_without_bias_or_projection(options, recomputes, device):
    inputs = make_projected_inputs(device=device, recomputes=recomputes, states=True, **options)
    assert_close(evaluate(projected, inputs), evaluate(composition, inputs), 1e-10)


@recomputation
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"norm_before_gate": True}, {"norm": False}, {"groups": 2}])
def test_has_the_bits_of_a_module(options, dtype, recomputes, device):
    """The input of the out-projection is recomputed with the bits of forward."""
    sizes = {"seqlen": 80, "heads": 4, "headdim": 16, "dstate": 16}
    inputs = make_projected_inputs(device=device, dtype=dtype, recomputes=recomputes, bias=False, **sizes, **options)
    actual, expected = evaluate(projected, inputs), evaluate(mixer_and_linear, inputs)
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@recomputation
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no_norm"])
def test_gradients_of_a_subset(norm, recomputes, device):
    inputs = make_projected_inputs(states=True, norm=norm, recomputes=recomputes, device=device)
    whole = evaluate(projected, inputs)
    for name in LEAVES:
        if inputs[name] is not None:
            assert_close({name: evaluate(projected, inputs, (name,))[f"grad_{name}"]}, {name: whole[f"grad_{name}"]}, 1e-12)


@recomputation
@pytest.mark.parametrize("result", RESULTS)
def test_gradient_of_one_result(result, recomputes, device):
    inputs = make_projected_inputs(states=True, recomputes=recomputes, device=device)
    expected = evaluate(composition, inputs, results=(result,))
    assert_close(evaluate(projected, inputs, results=(result,)), expected, 1e-10)


def kept_bytes(inputs: dict[str, Any], autocast: torch.dtype | None = None) -> int:
    """Bytes that are kept for backward beside the arguments."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    inputs = inputs | {"projected": inputs["projected"].detach().requires_grad_()}
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast(inputs["projected"].device.type, autocast, enabled=autocast is not None),
    ):
        out, *_ = projected(*inputs.values())
    assert out.untyped_storage().data_ptr() not in saved
    given = {v.untyped_storage().data_ptr() for v in inputs.values() if isinstance(v, Tensor)}
    return sum(size for pointer, size in saved.items() if pointer not in given)


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no_norm"])
def test_keeps_little_for_backward(norm, device):
    rows, d_ssm, A = 2 * 80, 64, 4 * 4
    sizes = {"seqlen": 80, "heads": 4, "headdim": 16, "dstate": 16, "dtype": torch.bfloat16, "device": device}
    rstd = rows * 4 if norm else 0
    assert kept_bytes(make_projected_inputs(norm=norm, **sizes)) == rows * d_ssm * 2 + rstd + A
    assert kept_bytes(make_projected_inputs(norm=norm, recomputes=True, **sizes)) == rstd + A


def test_keeps_no_copy_of_a_weight_under_autocast(device):
    sizes = {"seqlen": 80, "heads": 4, "headdim": 16, "dstate": 16, "device": device}
    inputs = make_projected_inputs(dtype=torch.float32, **sizes)
    inputs["out_proj_weight"].requires_grad_()
    inputs["projected"] = inputs["projected"].bfloat16()
    expected = kept_bytes(make_projected_inputs(dtype=torch.bfloat16, **sizes))
    assert kept_bytes(inputs, torch.bfloat16) == expected


@recomputation
@pytest.mark.parametrize("name", ["default", "no_norm_states", "cu_seqlens"])
def test_opcheck(name, recomputes, device):
    inputs = make_projected_inputs(device=device, recomputes=recomputes, **OPTIONS[name])
    with_gradients = {n: v.requires_grad_() if n in LEAVES and v is not None else v for n, v in inputs.items()}
    torch.library.opcheck(projected.default, tuple(with_gradients.values()))
    plain = tuple(v.detach() if isinstance(v, Tensor) else v for v in inputs.values())
    torch.library.opcheck(ops._mamba2_mixer_projected_fwd.default, plain)
    out, _, _, *saved = ops._mamba2_mixer_projected_fwd(*plain)
    needs = [tensor is not None for tensor in (*plain[:9], *plain[MIXER_ARGUMENTS : MIXER_ARGUMENTS + 2])]
    torch.library.opcheck(ops._mamba2_mixer_projected_bwd.default, (out, None, None, *saved, needs, *plain))


def test_gradcheck(device):
    inputs = make_projected_inputs(batch=1, seqlen=4, heads=2, headdim=2, dstate=2, device=device)
    leaves = [name for name in LEAVES if inputs[name] is not None]

    def out(*tensors: Tensor) -> Tensor:
        return projected(*(inputs | dict(zip(leaves, tensors, strict=True))).values())[0]

    assert torch.autograd.gradcheck(out, [inputs[name].requires_grad_() for name in leaves])


def test_vmap(device):
    assert_vmap_is_a_loop(projected, make_projected_inputs(device=device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast(dtype, device):
    inputs = make_projected_inputs(dtype=torch.float32, device=device)
    with torch.autocast(device, dtype=dtype):
        actual, expected = (evaluate(function, inputs) for function in (projected, mixer_and_linear))
    assert actual["out"].dtype == dtype and torch.equal(actual["out"], expected["out"])
    assert all(actual[f"grad_{name}"].dtype == inputs[name].dtype for name in LEAVES if inputs[name] is not None)
    assert_close(actual, {name: value.float() for name, value in expected.items()}, 4 * torch.finfo(dtype).eps)


def test_second_derivatives_raise(device):
    inputs = make_projected_inputs(device=device)
    inputs["projected"].requires_grad_()
    out, *_ = projected(*inputs.values())
    with pytest.raises((NotImplementedError, RuntimeError), match="Mamba2"):
        torch.autograd.grad(out.sum(), inputs["projected"], create_graph=True)[0].sum().backward()
