"""mamba_ssm's names of Mamba-3, from ssm_kernels.compat: values and gradients of its reference, and generation."""

from __future__ import annotations

import math

import pytest
import torch
from mamba3_helpers import REFERENCE_SCAN, make_inputs
from operator_spec import with_gradients
from torch import Tensor

from ssm_kernels import compat, nn
from ssm_kernels.compat.mamba3 import mamba3_mimo, mamba3_siso_combined

OPERATOR = "mamba3_chunk_scan"


def make_arguments(device: str = "cpu", dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The operator's arguments, with A times dt in place of A, and the function's."""
    inputs = make_inputs(seqlen=20, angles_of_heads=True, device=device)
    own = {name: value.detach().to(dtype).requires_grad_() for name, value in inputs.items() if isinstance(value, Tensor)}
    own["product"] = (own.pop("A") * own["dt"]).detach().requires_grad_()
    peer = {
        "Q": own["C"],
        "K": own["B"],
        "V": own["x"],
        "ADT": own["product"].transpose(1, 2),
        "DT": own["dt"].transpose(1, 2),
        "Trap": own["trap"].transpose(1, 2),
        "Q_bias": own["C_bias"],
        "K_bias": own["B_bias"],
        "Angles": own["angles"],
        "D": own["D"],
        "Z": own["z"],
    }
    return own, peer


@pytest.mark.parametrize(
    ("dtype", "of_results", "of_gradients"),
    [(torch.float64, 1e-10, 1e-9), (torch.float32, 2e-4, 2e-4)],
    ids=["float64", "float32"],
)
def test_values_and_gradients(dtype, of_results, of_gradients, device):
    """Trap 9: the gradient of ADT is that of the product, and DT has none through the decay."""
    own, peer = make_arguments(device, dtype)
    states = [own[f"initial_{name}"] for name in ("angle", "ssm", "k", "x")]
    out, *last = mamba3_siso_combined(**peer, Input_States=states, chunk_size=16, return_final_states=True)
    wide = {name: value.double() for name, value in own.items()}
    others = {name: value for name, value in wide.items() if name != "product"}
    expected, *wanted = REFERENCE_SCAN(**others, A=wide["product"] / wide["dt"].detach(), return_final_states=True)

    def assert_same(actual: Tensor, exact: Tensor, tolerance: float, name: str = "") -> None:
        exact = exact.to(actual.dtype)
        torch.testing.assert_close(actual, exact, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")

    assert_same(out, expected, of_results)
    wanted[0] = torch.remainder(wanted[0], 2 * math.pi)
    for found, state in zip(last, wanted, strict=True):
        assert_same(found, state, of_results)
    # The reference's decay is A times dt: dividing by a detached dt leaves the product's gradient and one of dt to remove.
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype).to(out.device)
    names = [*own]
    actual = dict(zip(names, torch.autograd.grad(out, [own[name] for name in names], cotangent), strict=True))
    found = torch.autograd.grad(expected, [wide[name] for name in names], cotangent.double())
    exact = dict(zip(names, found, strict=True))
    exact["dt"] = exact["dt"] - exact["product"] * wide["product"].detach() / wide["dt"].detach()
    for name in names:
        assert_same(actual[name], exact[name], of_gradients, name)


def test_a_decay_without_time(device):
    """ADT is the decay's logarithm, whatever DT is: a step of no time may decay."""
    own, peer = make_arguments(device)
    peer["DT"] = torch.zeros_like(peer["DT"])
    states = [own[f"initial_{name}"] for name in ("angle", "ssm", "k", "x")]
    _, angle, ssm, *_ = mamba3_siso_combined(**peer, Input_States=states, return_final_states=True)
    decay = own["product"].sum(1).exp()[..., None, None]
    torch.testing.assert_close(ssm, own["initial_ssm"] * decay, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(angle, torch.remainder(own["initial_angle"], 2 * math.pi), rtol=1e-10, atol=1e-12)


def test_mixed_dtypes(device):
    _, peer = make_arguments(device)
    half = {name: value.bfloat16() if name in ("Q", "K", "V", "Z") else value.float() for name, value in peer.items()}
    out, *last = mamba3_siso_combined(**half, return_final_states=True)
    assert out.dtype == torch.bfloat16
    assert [state.dtype for state in last] == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    wide = {name: value.double() for name, value in half.items()}
    exact = mamba3_siso_combined(**wide)
    assert ((out.double() - exact).norm() / exact.norm()).item() < 2.5e-3
    with pytest.raises(ValueError, match=r"^mamba3_siso_combined: expected V of shape"):
        mamba3_siso_combined(**peer | {"V": peer["V"][0]})
    with pytest.raises(ValueError, match=r"^mamba3_siso_combined: expected DT of shape \(batch, heads, seqlen\) = "):
        mamba3_siso_combined(**peer | {"DT": peer["DT"].transpose(1, 2)})


@pytest.mark.parametrize("options", [{}, {"cu_seqlens": (0, 3, 12)}, {"sums": False}], ids=str)
def test_ranks(options, device):
    """mamba3_mimo: values, the states of each packed sequence, and gradients; without MIMO_Out the outputs of each rank."""
    sums, sizes = options.get("sums", True), {name: value for name, value in options.items() if name != "sums"}
    sizes |= {"seqlen": 12, "ranks": 2, "angles_of_heads": True, "initial_states": False, "rotate": "halves", "dstate": 8}
    inputs = make_inputs(device=device, **sizes)
    own = with_gradients(inputs)
    gates = [each.transpose(1, 2) for each in (own["A"] * own["dt"], own["dt"], own["trap"])]
    factors = own["mimo_x"], own["mimo_z"], own["mimo_out"] if sums else None
    scan = own["C"], own["B"], own["x"], *gates, own["C_bias"], own["B_bias"], *factors, own["angles"], own["D"], own["z"]
    out, *last = mamba3_mimo(*scan, 16, 4, None, return_state=True, cu_seqlens=inputs["cu_seqlens"])
    expected, *wanted = REFERENCE_SCAN(**own, return_final_states=True)
    wanted[0], wanted[2] = torch.remainder(wanted[0], 2 * math.pi), wanted[2].transpose(1, 2)
    found = out if sums else (out * own["mimo_out"].transpose(0, 1)).sum(2)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    for state, other in zip(last, wanted, strict=True):
        torch.testing.assert_close(state, other, rtol=1e-10, atol=1e-10)
    leaves = [value for value in own.values() if isinstance(value, Tensor) and value.requires_grad]
    gradients = torch.autograd.grad(found.sum() + last[1].sum(), leaves)
    for actual, exact in zip(gradients, torch.autograd.grad(expected.sum() + wanted[1].sum(), leaves), strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-8, atol=1e-9)
    with pytest.raises(ValueError, match=r"^mamba3_mimo: expected rotary_dim_divisor times the columns of Angles to be dstate"):
        mamba3_mimo(*scan, 16, 2, None)
    with pytest.raises(ValueError, match=r"^mamba3_mimo: expected ADT of shape \(batch, heads, seqlen\) = "):
        mamba3_mimo(*scan[:3], scan[3].transpose(1, 2), *scan[4:], 16, 4, None)


def test_names_are_served():
    with compat.installed():
        from mamba_ssm import Mamba3
        from mamba_ssm.modules.mamba3 import Mamba3 as of_module
        from mamba_ssm.ops.tilelang.mamba3.mamba3_mimo import mamba3_mimo as of_ranks
        from mamba_ssm.ops.triton.mamba3.mamba3_siso_combined import mamba3_siso_combined as function
    assert Mamba3 is of_module is nn.Mamba3 and function is mamba3_siso_combined and of_ranks is mamba3_mimo


def test_a_model_generates():
    """mamba_ssm's own step takes no axis of time, which its generation passes."""
    with compat.installed():
        from mamba_ssm import MambaLMHeadModel
        from mamba_ssm.models.config_mamba import MambaConfig
    torch.manual_seed(0)
    config = MambaConfig(d_model=16, n_layer=2, vocab_size=11, ssm_cfg={"layer": "Mamba3", "headdim": 8, "d_state": 8})
    model = MambaLMHeadModel(config)
    tokens = torch.randint(11, (2, 4))
    assert model.generate(tokens, max_length=9).shape == (2, 9)
