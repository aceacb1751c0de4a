"""The operator between the projections of the delta rules: comparison with the composed operators, and what it keeps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from test_mixers_mamba2 import assert_close, assert_vmap_is_a_loop
from torch import Tensor

from ssm_kernels.rules.mixers import composed_delta_rule as composition

OPERATOR = "delta_rule_mixer"
ops = torch.ops.ssm_kernels
mixer = ops._delta_rule_mixer
RESULTS = ("out", "ssm_state")
D_MODEL = 7

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "no_gate": {"gate": None, "bias": True},
    "channels": {"gate": "channels"},
    "lower_bound": {"gate": "channels", "gate_lower_bound": -5.0},
    "updates": {"num_householder": 3, "bias": True},
    "states": {"states": True},
    "seq_idx": {"resets": True},
    "cu_seqlens": {"batch": 1, "packed": True, "states": True},
    "linear_keys": {"qk_activation": None, "qk_l2norm": False},
    "no_convolution": {"convolves": "", "num_householder": 2},
    "convolved_values": {"convolves": "v", "states": True},
    "no_gate_of_output": {"z": False},
    "sigmoid": {"norm_activation": "sigmoid", "allow_neg_eigval": True},
    "gate_before_norm": {"norm_before_gate": False},
    "no_norm": {"norm": False},
    "projection_without_norm": {"norm": False, "projects": True},
    "projection": {"projects": True, "states": True},
    "recomputed": {"projects": True, "recomputes_scan": True},
    "recomputed_without_projection": {"recomputes_scan": True},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))


def make_inputs(
    *,
    batch: int = 2,
    seqlen: int = 9,
    heads: int = 2,
    value_heads: int = 4,
    key_dim: int = 4,
    value_dim: int = 3,
    num_householder: int = 1,
    gate: str | None = "heads",
    gate_lower_bound: float | None = None,
    convolves: str = "qkv",
    bias: bool = False,
    states: bool = False,
    z: bool = True,
    norm: bool = True,
    projects: bool = False,
    resets: bool = False,
    packed: bool = False,
    qk_activation: str | None = "silu",
    qk_l2norm: bool = True,
    allow_neg_eigval: bool = False,
    norm_before_gate: bool = True,
    norm_activation: str = "silu",
    recomputes_scan: bool = False,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> dict[str, Any]:
    """The operator's arguments in its order."""
    generator, wide = torch.Generator().manual_seed(0), torch.float64 if dtype == torch.float64 else torch.float32

    def draw(*shape: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, to)

    updates, values = num_householder, value_heads * value_dim
    columns = {"q": heads * key_dim, "k": updates * heads * key_dim, "v": updates * values}
    inputs: dict[str, Any] = {name: draw(batch, seqlen, size) for name, size in columns.items()}
    inputs["beta"] = draw(batch, seqlen * updates, value_heads)
    of_gate = {"heads": (value_heads,), "channels": (value_heads, key_dim)}.get(gate or "", ())
    inputs["g"] = draw(batch, seqlen, *of_gate) if gate else None
    inputs["z"] = draw(batch, seqlen, values) if z and norm else None
    inputs |= {f"{name}_weight": draw(size, 1, 4) / 2 if name in convolves else None for name, size in columns.items()}
    inputs |= {f"{name}_bias": draw(size) if bias and name in convolves else None for name, size in columns.items()}
    inputs["A_log"] = draw(value_heads, to=wide) / 2 if gate else None
    inputs["dt_bias"] = draw(*of_gate, to=wide) if gate else None
    inputs["norm_weight"] = draw(value_dim) if norm else None
    rows = 3 if packed else batch
    inputs |= {f"{name}_state": draw(rows, size, 3) if states and name in convolves else None for name, size in columns.items()}
    inputs["ssm_state"] = draw(rows, value_heads, value_dim, key_dim, to=wide) if states else None
    inputs["out_proj_weight"] = draw(D_MODEL, values) if projects else None
    inputs["out_proj_bias"] = draw(D_MODEL) if projects else None
    inputs["seq_idx"] = (torch.arange(seqlen) // 4).to(device).expand(batch, seqlen) if resets else None
    inputs["cu_seqlens"] = torch.tensor([0, 4, 4, seqlen], device=device, dtype=torch.int32) if packed else None
    return inputs | {
        "key_dim": key_dim,
        "value_dim": value_dim,
        "num_householder": updates,
        "qk_activation": qk_activation,
        "qk_l2norm": qk_l2norm,
        "gate_lower_bound": gate_lower_bound,
        "beta_sigmoid": True,
        "allow_neg_eigval": allow_neg_eigval,
        "eps": 1e-5,
        "norm_before_gate": norm_before_gate,
        "norm_activation": norm_activation,
        "recomputes_scan": recomputes_scan,
        "layer": "GatedDeltaNet",
    }


def leaves_of(inputs: dict[str, Any]) -> list[str]:
    return [name for name, value in inputs.items() if isinstance(value, Tensor) and value.is_floating_point()]


def evaluate(
    function: Any, inputs: dict[str, Any], results: tuple[str, ...] = RESULTS, leaves: list[str] | None = None
) -> dict[str, Tensor]:
    """The results, and the gradients of some arguments through some of the results."""
    leaves = leaves_of(inputs) if leaves is None else leaves
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


@every_option
def test_is_the_composition(options, device):
    inputs = make_inputs(device=device, **options)
    assert_close(evaluate(mixer, inputs), evaluate(composition, inputs), 1e-10)


@pytest.mark.parametrize("name", ["projection", "recomputed", "no_norm", "projection_without_norm", "no_convolution"])
@pytest.mark.parametrize("result", RESULTS)
def test_gradient_of_one_result(result, name, device):
    inputs = make_inputs(device=device, **OPTIONS[name])
    assert_close(evaluate(mixer, inputs, (result,)), evaluate(composition, inputs, (result,)), 1e-10)


@pytest.mark.parametrize("name", ["projection", "recomputed", "no_norm", "updates"])
def test_gradients_of_a_subset(name, device):
    inputs = make_inputs(device=device, **OPTIONS[name] | {"states": True})
    whole = evaluate(mixer, inputs)
    for leaf in leaves_of(inputs):
        alone = evaluate(mixer, inputs, leaves=[leaf])
        assert_close({leaf: alone[f"grad_{leaf}"]}, {leaf: whole[f"grad_{leaf}"]}, 1e-12)


SIZES = {"seqlen": 80, "key_dim": 16, "value_dim": 16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("options", [{}, {"resets": True}, {"projects": True}, {"projects": True, "recomputes_scan": True}])
def test_low_precision(options, dtype, device):
    """Forward and backward are those of the composed operators: the same kernels run on the same numbers."""
    inputs = make_inputs(dtype=dtype, device=device, **SIZES, **options)
    actual, expected = evaluate(mixer, inputs), evaluate(composition, inputs)
    assert_close(actual, expected, 4 * torch.finfo(dtype).eps)
    assert torch.equal(actual["out"], expected["out"])


def kept_bytes(inputs: dict[str, Any], autocast: torch.dtype | None = None) -> int:
    """Bytes that are kept for backward beside the arguments."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    given = {v.untyped_storage().data_ptr() for v in inputs.values() if isinstance(v, Tensor)}
    inputs = inputs | {"q": inputs["q"].detach().requires_grad_()}
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast(inputs["q"].device.type, autocast, enabled=autocast is not None),
    ):
        out, _ = mixer(*inputs.values())
    assert out.untyped_storage().data_ptr() not in saved
    return sum(size for pointer, size in saved.items() if pointer not in given)


@pytest.mark.parametrize("projects", [False, True])
def test_keeps_little_for_backward(projects, device):
    rows = 2 * 80 * 4
    make = partial(make_inputs, projects=projects, dtype=torch.bfloat16, device=device, **SIZES)
    assert kept_bytes(make()) == rows * (16 * 2 + 4)  # y and rstd
    assert kept_bytes(make(recomputes_scan=True)) == rows * 4


def test_keeps_no_copy_of_a_weight_under_autocast(device):
    inputs = make_inputs(projects=True, dtype=torch.float32, device=device, **SIZES)
    inputs["out_proj_weight"].requires_grad_()
    inputs |= {name: inputs[name].bfloat16() for name in ("q", "k", "v", "beta", "g", "z")}
    assert kept_bytes(inputs, torch.bfloat16) == 2 * 80 * 4 * (16 * 2 + 4)


@pytest.mark.parametrize("name", ["default", "channels", "updates", "cu_seqlens", "recomputed", "no_convolution", "no_norm"])
def test_opcheck(name, device):
    inputs = make_inputs(device=device, **OPTIONS[name])
    leaves = leaves_of(inputs)
    torch.library.opcheck(mixer.default, tuple(v.detach().requires_grad_() if n in leaves else v for n, v in inputs.items()))
    plain = tuple(inputs.values())
    torch.library.opcheck(ops._delta_rule_mixer_fwd.default, plain)
    out, _, *saved = ops._delta_rule_mixer_fwd(*plain)
    needs = [tensor is not None for tensor in plain[:21]]
    torch.library.opcheck(ops._delta_rule_mixer_bwd.default, (out, None, *saved, needs, *plain))


def test_gradcheck(device):
    inputs = make_inputs(batch=1, seqlen=4, key_dim=2, value_dim=2, projects=True, states=True, device=device)
    leaves = leaves_of(inputs)

    def run(*tensors: Tensor) -> Any:
        return mixer(*(inputs | dict(zip(leaves, tensors, strict=True))).values())

    assert torch.autograd.gradcheck(run, [inputs[name].requires_grad_() for name in leaves])


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
    out, _ = mixer(*inputs.values())
    with pytest.raises((NotImplementedError, RuntimeError), match="GatedDeltaNet"):
        torch.autograd.grad(out.sum(), inputs["q"], create_graph=True)[0].sum().backward()
