"""What the layers run beside their matrix products: every operator that is not a view is at least one kernel on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ssm_kernels.nn as snn

MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "linear")
MEMORY = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "lift_fresh", "_unsafe_view")
MIXERS = {
    "Mamba": lambda dtype: snn.Mamba(16, d_state=4, dtype=dtype),
    "Mamba_d_bias": lambda dtype: snn.Mamba(16, d_state=4, bias=True, conv_bias=False, dtype=dtype),
    "Mamba2": lambda dtype: snn.Mamba2(16, d_state=4, headdim=8, dtype=dtype),
    "Mamba2_D_has_hdim": lambda dtype: snn.Mamba2(16, d_state=4, headdim=8, D_has_hdim=True, rmsnorm=False, dtype=dtype),
}
every_mixer = pytest.mark.parametrize("make", MIXERS.values(), ids=list(MIXERS))
# The parameters of the recurrence stay float32 in a layer that is made in bfloat16, and do not in one that is cast to it.
every_dtype = pytest.mark.parametrize(
    ("made", "cast"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16)],
    ids=["float32", "bfloat16", "cast_to_bfloat16"],
)


class Launches(TorchDispatchMode):
    """Names of the operators that computed something, matrix products apart."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and name not in (*MATRIX_PRODUCTS, *MEMORY):
            self.names.append(name)
        return result


def count(run) -> list[str]:
    with Launches() as launches:
        run()
    return launches.names


def make_layer(make, made: torch.dtype, cast: torch.dtype | None) -> tuple[torch.nn.Module, Tensor]:
    torch.manual_seed(0)
    layer = make(made) if cast is None else make(made).to(cast)
    return layer, torch.randn(2, 5, 16).to(made if cast is None else cast)


@every_dtype
@every_mixer
def test_step(make, made, cast):
    """The convolution's step, the recurrence's and, in Mamba-2, the norm."""
    layer, x = make_layer(make, made, cast)
    states = layer.allocate_inference_cache(2, 1)
    expected = ["causal_conv1d_update", "selective_state_update"]
    if hasattr(layer, "norm"):
        expected.append("_norm_gated_fwd")
    assert count(lambda: layer.step(x[:, :1], *states)) == expected
