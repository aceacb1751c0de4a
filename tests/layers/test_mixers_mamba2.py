"""The operator between Mamba-2's projections: comparison with the composed operators, and the tensors saved for backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mamba2_mixer_helpers import OPTIONS, RESULTS, TENSORS, make_inputs
from mixer_spec import assert_close, assert_vmap_is_a_loop
from torch import Tensor

from ssm_kernels.rules.mixers import composed_mamba2 as composition

OPERATOR = "mamba2_mixer"
ops = torch.ops.ssm_kernels
operator = ops._mamba2_mixer
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))


def with_gradients(inputs: dict[str, Any], names: tuple[str, ...] = TENSORS) -> dict[str, Any]:
    return inputs | {n: inputs[n].detach().requires_grad_() for n in names if inputs[n] is not None}


def evaluate(function: Any, inputs: dict[str, Any], results: tuple[str, ...] = RESULTS) -> dict[str, Tensor]:
    """The results, and the gradients through some of them."""
    inputs = with_gradients(inputs)
    outputs = dict(zip(RESULTS, function(*inputs.values()), strict=True))
    generator = torch.Generator().manual_seed(1)
    cotangents = {n: torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v) for n, v in outputs.items()}
    leaves = [n for n in TENSORS if inputs[n] is not None]
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
    assert_close(evaluate(operator, inputs), evaluate(composition, inputs), 1e-10)


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no_norm"])
@pytest.mark.parametrize("result", RESULTS)
def test_gradient_of_one_result(result, norm, device):
    inputs = make_inputs(states=True, norm=norm, device=device)
    assert_close(evaluate(operator, inputs, (result,)), evaluate(composition, inputs, (result,)), 1e-10)


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no_norm"])
def test_gradients_of_a_subset(norm, device):
    inputs = make_inputs(states=True, norm=norm, device=device)
    whole = evaluate(operator, inputs)
    for name in TENSORS:
        if inputs[name] is None:
            continue
        subset = with_gradients(inputs, (name,))
        outputs = operator(*subset.values())
        generator = torch.Generator().manual_seed(1)
        cotangents = [torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v) for v in outputs]
        (gradient,) = torch.autograd.grad(outputs, subset[name], cotangents)
        assert_close({name: gradient}, {name: whole[f"grad_{name}"]}, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("options", [{}, {"resets": True}, {"norm": False}], ids=["default", "seq_idx", "no_norm"])
def test_low_precision(options, dtype, device):
    """Forward and backward equal the composed operators: the same kernels run on the same numbers."""
    inputs = make_inputs(seqlen=80, heads=4, headdim=16, dstate=16, dtype=dtype, device=device, **options)
    actual, expected = evaluate(operator, inputs), evaluate(composition, inputs)
    assert_close(actual, expected, 4 * torch.finfo(dtype).eps)
    assert torch.equal(actual["out"], expected["out"])


def test_keeps_little_for_backward(device):
    inputs = with_gradients(make_inputs(seqlen=80, heads=4, headdim=16, dstate=16, dtype=torch.bfloat16, device=device))
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out, *_ = operator(*inputs.values())
    given = {v.untyped_storage().data_ptr() for v in inputs.values() if isinstance(v, Tensor)}
    rows, d_ssm = 2 * 80, 64
    assert inputs["projected"].untyped_storage().data_ptr() in saved
    y_and_rstd, A = rows * (d_ssm * 2 + 4), 4 * 4
    assert sum(size for pointer, size in saved.items() if pointer not in given) == y_and_rstd + A
    assert out.untyped_storage().data_ptr() not in saved


def test_writes_the_gradient_of_a_slice(device):
    """As beside an MLP, whose columns come first."""
    inputs = make_inputs(device=device)
    expected = evaluate(operator, inputs)["grad_projected"]
    wider = torch.cat([torch.ones(2, 14, 6, device=device, dtype=torch.float64), inputs["projected"]], dim=-1)
    sliced = evaluate(operator, inputs | {"projected": wider[..., 6:]})["grad_projected"]
    assert torch.equal(sliced, expected)


def test_wrong_number_of_columns(device):
    inputs = make_inputs(device=device)
    inputs["projected"] = inputs["projected"][..., 1:]
    with pytest.raises(ValueError, match="Mamba2: expected projected of 38 columns, got 37"):
        operator(*inputs.values())


@pytest.mark.parametrize("name", ["default", "no_norm_states", "cu_seqlens"])
def test_opcheck(name, device):
    inputs = make_inputs(device=device, **OPTIONS[name])
    torch.library.opcheck(operator.default, tuple(with_gradients(inputs).values()))
    torch.library.opcheck(torch.ops.ssm_kernels._mamba2_mixer_fwd.default, tuple(inputs.values()))


# ----- The norm of groups that continue on other devices


class SplitMixer(torch.autograd.Function):
    """The mixer in the pieces between which ranks add their sums."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        y, conv_state, ssm_state, *saved, parameters = ops._mamba2_mixer_fwd(*arguments, applies_norm=False)
        assert [tensor.numel() for tensor in saved] == [0, 0]
        _, groups, *_, eps, before, _ = arguments[11:]
        size = y.shape[-1] // groups
        z, norm_weight = arguments[0][..., : y.shape[-1]], arguments[6]
        mean_square = ops._norm_gated_squares(y, None if before else z, size, "silu") / size
        out, rstd, _ = ops._norm_gated_fwd(y, norm_weight, z, None, eps, size, before, "silu", False, mean_square)
        ctx.save_for_backward(*arguments[:11], y, z, rstd, parameters)
        ctx.options = arguments[11:], size, before
        return out, conv_state, ssm_state

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (*tensors, y, z, rstd, parameters), (options, size, before) = ctx.saved_tensors, ctx.options
        mean_product = ops._norm_gated_products(grads[0], y, tensors[6], z, rstd, size, before, "silu") / size
        needs = [*ctx.needs_input_grad[:9]]
        results = ops._mamba2_mixer_bwd(*grads, y, rstd, parameters, needs, *tensors, *options, mean_product)
        return *(grad if need else None for grad, need in zip(results, needs, strict=True)), *(None,) * 11


@pytest.mark.parametrize("name", ["default", "norm_before_gate", "groups", "states", "cu_seqlens"])
def test_norm_in_pieces(name, device):
    inputs = make_inputs(device=device, **OPTIONS[name])
    assert_close(evaluate(SplitMixer.apply, inputs), evaluate(operator, inputs), 1e-12)


def test_opcheck_of_the_pieces(device):
    inputs = make_inputs(device=device)
    arguments = tuple(inputs.values())
    torch.library.opcheck(ops._mamba2_mixer_fwd.default, arguments, {"applies_norm": False})
    out, *_, y, rstd, parameters = ops._mamba2_mixer_fwd(*arguments)
    saved = (out, None, None, y, rstd, parameters, [True] * 7 + [False] * 2)
    torch.library.opcheck(ops._mamba2_mixer_bwd.default, (*saved, *arguments, torch.ones_like(rstd)))


def test_no_norm_to_leave_out(device):
    with pytest.raises(ValueError, match="Mamba2: expected norm_weight with applies_norm=False, got None"):
        ops._mamba2_mixer_fwd(*make_inputs(norm=False, device=device).values(), applies_norm=False)


def test_vmap(device):
    assert_vmap_is_a_loop(operator, make_inputs(device=device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast(dtype, device):
    inputs = make_inputs(dtype=torch.float32, device=device)
    with torch.autocast(device, dtype=dtype):
        out, *_ = operator(*inputs.values())
    assert out.dtype == dtype
    assert torch.equal(out, operator(*(inputs | {"projected": inputs["projected"].to(dtype)}).values())[0])
