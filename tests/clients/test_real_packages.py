"""The functions of ssm_kernels.compat beside those of mamba_ssm and causal_conv1d themselves, where they are installed.

The same call on the same tensors: results of the same number, shape, dtype and value, the same gradients, the same effects on
tensors that are updated in place. The errors of the packages' own kernels set the tolerances: fast-math exponentials, and TF32
products in the Triton kernels of Mamba-2.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from ssm_kernels import compat
from ssm_kernels.compat._modules import MODULES

CLIENT = "mamba_ssm"
ROOTS = ("mamba_ssm", "causal_conv1d")
LOW = torch.bfloat16
# Limits on the relative error (L2) of two kernels' results, both of which are rounded to the dtype.
TOLERANCES = {torch.float32: 1e-4, LOW: 1e-2}
TF32 = 4e-3

pytestmark = pytest.mark.cuda
_modules: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def packages() -> Iterator[None]:
    """The packages in sys.modules for this module's tests, and no longer: others install compat's modules of these names."""
    compat.uninstall()
    sys.modules.update(_modules)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ROOTS]:
        _modules[name] = sys.modules.pop(name)


def imported(module: str, *others: str) -> Any:
    for name in (*others, module):
        try:
            found = importlib.import_module(name)
        except (ImportError, OSError) as error:
            pytest.skip(f"{name} itself cannot be imported: {error}")
    return found


@dataclass(frozen=True)
class Call:
    """A call of one function: its module there, its tensors, the names of those that get gradients, and its options.

    ``cancels``: its gradients are sums that cancel, so that either side's rounding grows. Both are compared with float64.
    """

    module: str
    tensors: Callable[[torch.dtype], dict[str, Tensor]]
    differentiable: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    in_place: tuple[str, ...] = ()
    cancels: bool = False
    fp32_error: float = TOLERANCES[torch.float32]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def steps(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(*shape, device="cuda") * 0.5).to(dtype)


def indices(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def scan(dtype: torch.dtype) -> dict[str, Tensor]:
    sequences = {"u": randn(2, 32, 77, dtype=dtype), "delta": steps(2, 32, 77, dtype=dtype), "A": -randn(32, 16).exp()}
    sequences |= {"B": randn(2, 2, 16, 77, dtype=dtype), "C": randn(2, 2, 16, 77, dtype=dtype), "D": randn(32)}
    return sequences | {"z": randn(2, 32, 77, dtype=dtype), "delta_bias": randn(32)}


def scan_of_constant_matrices(dtype: torch.dtype) -> dict[str, Tensor]:
    return scan(dtype) | {"B": randn(32, 16), "C": randn(32, 16)}


def inner(dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Without an out_proj_bias, for which mamba_ssm's backward returns one number: PyTorch refuses it."""
    return {
        "xz": randn(2, 64, 77, dtype=dtype),
        "conv1d_weight": randn(32, 1, 4, dtype=dtype),
        "conv1d_bias": randn(32, dtype=dtype),
        "x_proj_weight": randn(2 + 2 * 16, 32, dtype=dtype) / 6,
        "delta_proj_weight": randn(32, 2, dtype=dtype),
        "out_proj_weight": randn(16, 32, dtype=dtype) / 6,
        "out_proj_bias": None,
        "A": -randn(32, 16).exp(),
        "D": randn(32),
        "delta_bias": randn(32),
    }


def ssd(dtype: torch.dtype) -> dict[str, Tensor]:
    sequences = {"x": randn(2, 300, 4, 64, dtype=dtype), "dt": steps(2, 300, 4, dtype=dtype), "A": -randn(4).exp()}
    sequences |= {"B": randn(2, 300, 2, 32, dtype=dtype), "C": randn(2, 300, 2, 32, dtype=dtype), "D": randn(4)}
    return sequences | {"z": randn(2, 300, 4, 64, dtype=dtype), "dt_bias": randn(4), "initial_states": randn(2, 4, 64, 32)}


def packed_ssd(dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = {name: value[:1] if value.dim() > 2 else value for name, value in ssd(dtype).items() if name != "initial_states"}
    seq_idx = torch.arange(300, device="cuda").div(77, rounding_mode="floor").int()[None]
    return tensors | {"seq_idx": seq_idx, "cu_seqlens": indices(0, 77, 154, 231, 300)}


def split(dtype: torch.dtype) -> dict[str, Tensor]:
    dim, columns, heads = 256, 256 + 2 * 2 * 32, 4
    return {
        "zxbcdt": randn(2, 300, dim + columns + heads, dtype=dtype),
        "conv1d_weight": randn(columns, 4, dtype=dtype) / 2,
        "conv1d_bias": randn(columns, dtype=dtype),
        "dt_bias": randn(heads),
        "A": -randn(heads).exp(),
        "D": randn(heads),
        "rmsnorm_weight": randn(dim, dtype=dtype),
        "outproj_weight": randn(32, dim, dtype=dtype) / 16,
        "outproj_bias": randn(32, dtype=dtype),
    }


def conv(dtype: torch.dtype) -> dict[str, Tensor]:
    return {"x": randn(2, 32, 77, dtype=dtype), "weight": randn(32, 4, dtype=dtype), "bias": randn(32, dtype=dtype)}


def conv_of_channels_last(dtype: torch.dtype) -> dict[str, Tensor]:
    initial = randn(2, 3, 32, dtype=dtype).transpose(1, 2)
    return conv(dtype) | {"x": randn(2, 77, 32, dtype=dtype).transpose(1, 2), "initial_states": initial}


def packed_conv(dtype: torch.dtype) -> dict[str, Tensor]:
    seq_idx = torch.arange(77, device="cuda").div(20, rounding_mode="floor").int()[None].expand(2, -1).contiguous()
    return conv(dtype) | {"x": randn(2, 77, 32, dtype=dtype).transpose(1, 2), "seq_idx": seq_idx}


def conv_step(dtype: torch.dtype) -> dict[str, Tensor]:
    return conv(dtype) | {"x": randn(2, 32, 3, dtype=dtype), "conv_state": randn(2, 32, 6, dtype=dtype)}


def conv_step_in_slots(dtype: torch.dtype) -> dict[str, Tensor]:
    state = randn(5, 32, 6, dtype=dtype)
    return conv_step(dtype) | {"conv_state": state, "cache_seqlens": indices(5, 9), "conv_state_indices": indices(4, 1)}


def step(dtype: torch.dtype) -> dict[str, Tensor]:
    sequences = {"state": randn(3, 32, 16, dtype=dtype), "x": randn(3, 32, dtype=dtype), "dt": steps(3, 32, dtype=dtype)}
    sequences |= {"A": -randn(32, 16).exp(), "B": randn(3, 16), "C": randn(3, 16), "D": randn(32, dtype=dtype)}
    return sequences | {"z": randn(3, 32, dtype=dtype), "dt_bias": randn(32, dtype=dtype)}


def step_of_heads(dtype: torch.dtype) -> dict[str, Tensor]:
    def one_number_a_head(values: Tensor, *sizes: int) -> Tensor:
        return values.view(*values.shape, *[1] * len(sizes)).expand(*values.shape, *sizes)

    return {
        "state": randn(5, 4, 64, 32, dtype=dtype),
        "x": randn(3, 4, 64, dtype=dtype),
        "dt": one_number_a_head(steps(3, 4, dtype=dtype), 64),
        "A": one_number_a_head(-randn(4).exp(), 64, 32),
        "B": randn(3, 2, 32, dtype=dtype),
        "C": randn(3, 2, 32, dtype=dtype),
        "D": one_number_a_head(randn(4), 64),
        "dt_bias": one_number_a_head(randn(4), 64),
        "state_batch_indices": indices(4, 0, 2),
    }


def gated_norm(dtype: torch.dtype) -> dict[str, Tensor]:
    return {"x": randn(6, 256, dtype=dtype), "weight": randn(256, dtype=dtype), "bias": None, "z": randn(6, 256, dtype=dtype)}


def norm(dtype: torch.dtype) -> dict[str, Tensor]:
    return {"x": randn(6, 256, dtype=dtype), "weight": randn(256, dtype=dtype), "bias": None, "residual": randn(6, 256)}


SCAN, SSD = "mamba_ssm.ops.selective_scan_interface", "mamba_ssm.ops.triton.ssd_combined"
UPDATE, CONV = "mamba_ssm.ops.triton.selective_state_update", "causal_conv1d"
GATED, ADDED = "mamba_ssm.ops.triton.layernorm_gated", "mamba_ssm.ops.triton.layer_norm"
CONVOLVES = ("mamba_inner_fn", "mamba_split_conv1d_scan_combined")  # mamba_ssm's functions that call causal_conv1d
# By the function's name; words after it tell the calls of one function apart.
CALLS = {
    "selective_scan_fn": Call(SCAN, scan, options={"delta_softplus": True}),
    "selective_scan_fn, constant B and C": Call(SCAN, scan_of_constant_matrices, options={"delta_softplus": True}),
    "mamba_inner_fn": Call(SCAN, inner),
    "mamba_chunk_scan_combined": Call(
        SSD, ssd, options={"chunk_size": 64, "dt_softplus": True, "return_final_states": True}, fp32_error=TF32
    ),
    "mamba_chunk_scan_combined, states of packed sequences": Call(
        SSD,
        packed_ssd,
        differentiable=False,
        options={"chunk_size": 64, "dt_softplus": True, "return_varlen_states": True},
        fp32_error=TF32,
    ),
    "mamba_split_conv1d_scan_combined": Call(
        SSD,
        split,
        options={"chunk_size": 64, "headdim": 64, "ngroups": 2, "norm_before_gate": False},
        cancels=True,
        fp32_error=TF32,
    ),
    "causal_conv1d_fn": Call(CONV, conv, options={"activation": "silu"}),
    "causal_conv1d_fn, channels last": Call(
        CONV, conv_of_channels_last, options={"activation": "silu", "return_final_states": True}
    ),
    "causal_conv1d_fn, packed sequences": Call(CONV, packed_conv, options={"activation": "silu"}),
    "causal_conv1d_update": Call(CONV, conv_step, False, {"activation": "silu"}, ("conv_state",)),
    "causal_conv1d_update, circular states in slots": Call(
        CONV, conv_step_in_slots, False, {"activation": "silu"}, ("conv_state",)
    ),
    "selective_state_update": Call(UPDATE, step, False, {"dt_softplus": True}, ("state",)),
    "selective_state_update, heads in slots": Call(UPDATE, step_of_heads, False, {"dt_softplus": True}, ("state",)),
    "rmsnorm_fn": Call(GATED, gated_norm, options={"group_size": 64, "norm_before_gate": False}),
    "rmsnorm_fn, before the gate": Call(GATED, gated_norm),
    "layernorm_fn": Call(GATED, lambda dtype: gated_norm(dtype) | {"bias": randn(256, dtype=dtype)}),
    "rms_norm_fn": Call(ADDED, norm, options={"prenorm": True, "residual_in_fp32": True}),
    "layer_norm_fn": Call(ADDED, lambda dtype: norm(dtype) | {"bias": randn(256, dtype=dtype)}, options={"prenorm": True}),
}


def compared(name: str) -> pytest.MarkDecorator:
    return pytest.mark.serves("equal to the package", model=f"`{name.partition(',')[0]}`")


def outcome(function: Callable[..., Any], call: Call, tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Every result, gradient and updated tensor of one call, by name."""
    given = {name: None if tensor is None else tensor.detach() for name, tensor in tensors.items()}
    given |= {name: tensors[name].clone() for name in call.in_place}
    if call.differentiable:
        for tensor in given.values():
            if tensor is not None and tensor.is_floating_point():
                tensor.requires_grad_()
    with contextlib.nullcontext() if call.differentiable else torch.no_grad():
        results = function(**given, **call.options)
    results = results if isinstance(results, tuple) else (results,)
    found = {f"result {i}": result for i, result in enumerate(results)}
    if call.differentiable:
        generator = torch.Generator("cuda").manual_seed(1)
        weights = [torch.randn(result.shape, device="cuda", generator=generator).to(result.device) for result in results]
        sum((result * weight).sum() for result, weight in zip(results, weights, strict=True)).backward()
        found |= {f"grad_{name}": tensor.grad for name, tensor in given.items() if tensor is not None and tensor.requires_grad}
    return found | {name: given[name] for name in call.in_place}


@pytest.mark.parametrize("dtype", [torch.float32, LOW], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=compared(name)) for name in CALLS])
def test_same_as_the_packages(name, dtype):
    torch.manual_seed(0)
    call, function = CALLS[name], name.partition(",")[0]
    theirs = getattr(imported(call.module, *(CONV,) * (function in CONVOLVES)), function)
    ours = MODULES[call.module][function]
    assert theirs is not ours
    tensors = call.tensors(dtype)
    expected, found = outcome(theirs, call, tensors), outcome(ours, call, tensors)
    assert {key: (value.shape, value.dtype) for key, value in found.items()} == {
        key: (value.shape, value.dtype) for key, value in expected.items()
    }
    limit = call.fp32_error if dtype == torch.float32 else TOLERANCES[dtype]
    if not call.cancels:
        errors = {key: relative_error(found[key], value) for key, value in expected.items()}
        assert all(error <= limit for error in errors.values()), errors
        return
    doubles = {key: None if value is None else value.double().cpu() for key, value in tensors.items()}
    exact = outcome(ours, call, doubles)
    for key, value in exact.items():
        own, other = (relative_error(results[key].cpu(), value) for results in (found, expected))
        assert own <= 2 * other + limit and (dtype != torch.float32 or own <= TOLERANCES[dtype]), (key, own, other)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).double().norm() / expected.double().norm()).item()


@compared("selective_scan_fn")
def test_same_last_state():
    torch.manual_seed(0)
    tensors = scan(torch.float32)
    theirs = imported(SCAN).selective_scan_fn(**tensors, delta_softplus=True, return_last_state=True)
    ours = MODULES[SCAN]["selective_scan_fn"](**tensors, delta_softplus=True, return_last_state=True)
    for found, expected in zip(ours, theirs, strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
