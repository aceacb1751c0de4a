"""mlstm_scan beside the functions in plain PyTorch that transformers carries for xLSTM, layout (batch, heads, seqlen, dim)."""

from __future__ import annotations

import pytest
import torch
from mlstm_helpers import SEQUENCES, make_inputs
from torch import Tensor

from ssm_kernels import mlstm_scan

CLIENT = "transformers"
OPERATOR = "mlstm_scan"

xlstm = pytest.importorskip("transformers.models.xlstm.modeling_xlstm")


@pytest.mark.parametrize("initial_states", [False, True])
def test_recurrent_function(initial_states, device):
    """Outputs, states and the gradients of the outputs, without eps, through which alone they depend on the unit."""
    if not hasattr(xlstm, "mlstm_recurrent_sequence_native"):
        pytest.skip("the package xlstm takes the place of these functions")
    inputs = make_inputs(seqlen=70, key_dim=8, value_dim=12, initial_states=initial_states, device=device)
    leaves = {name: inputs[name].clone().requires_grad_() for name in SEQUENCES}
    states, theirs = None, {}
    if initial_states:
        C, n, m = states = tuple(inputs[f"initial_{name}"] for name in "Cnm")
        theirs = {"c_initial": C.transpose(2, 3), "n_initial": n, "m_initial": m[..., None]}
    out, (C, n, m) = mlstm_scan(**leaves, eps=0.0, initial_states=states, return_final_states=True)

    def head_first(x: Tensor) -> Tensor:
        return x.transpose(1, 2)

    expected, last = xlstm.mlstm_recurrent_sequence_native(
        *(head_first(leaves[name]) for name in SEQUENCES),
        **theirs,
        return_last_states=True,
        eps=0.0,
        dtype_state=torch.float64,
    )
    torch.testing.assert_close(out, head_first(expected).to(out.dtype), rtol=1e-5, atol=1e-7)
    # In units of the largest of both.
    unit = torch.maximum(m, last[2].squeeze(-1))
    for actual, wanted in ((C, last[0].transpose(2, 3)), (n, last[1])):
        shape = (..., *(None,) * (actual.dim() - 2))
        own, other = actual * (m - unit).exp()[shape], wanted * (last[2].squeeze(-1) - unit).exp()[shape]
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-10)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(device)
    of_ours = torch.autograd.grad(out, [*leaves.values()], weights)
    of_theirs = torch.autograd.grad(expected, [*leaves.values()], head_first(weights).to(expected.dtype))
    for name, actual, wanted in zip(leaves, of_ours, of_theirs, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
