"""mamba_ssm's kernels, where it is installed, and what was recorded of them where it is not."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["RECORDED_SCAN", "RECORDED_STATE_UPDATE", "SOURCE", "described", "selective_scan", "state_update"]

SOURCE = "state-spaces/mamba e9594ce, torch 2.11.0+cu130, Triton 3.6.0, on one H200"

# By triton.testing.do_bench, median, seconds. The step: by (batch, heads, dim, dstate), state in float32.
RECORDED_STATE_UPDATE = {(64, None, 2048, 16): 0.0246e-3, (64, 80, 64, 128): 0.110e-3}
# The scan, (forward, backward): by (dtype, batch, dim, seqlen, dstate, with z), one group, with D, delta_bias and softplus.
RECORDED_SCAN = {
    (torch.bfloat16, 8, 2048, 2048, 16, True): (0.592e-3, 2.316e-3),
    (torch.bfloat16, 8, 2048, 2048, 16, False): (0.557e-3, 2.334e-3),
    (torch.float32, 8, 2048, 2048, 16, True): (1.162e-3, 2.690e-3),
    (torch.bfloat16, 8, 5120, 2048, 16, True): (1.450e-3, 5.685e-3),
    (torch.bfloat16, 1, 2048, 65536, 16, True): (2.956e-3, 11.410e-3),
    (torch.float32, 32, 512, 60, 16, False): (0.082e-3, 0.215e-3),
    (torch.float32, 8, 512, 1024, 16, False): (0.156e-3, 0.383e-3),
}


def described(peer: Callable[..., Any] | None) -> str:
    """Where the peer's figures come from."""
    if peer is None:
        return f"recorded: {SOURCE}"
    try:
        return f"mamba_ssm {importlib.metadata.version('mamba_ssm')}, in this run"
    except importlib.metadata.PackageNotFoundError:
        return "mamba_ssm, in this run"


def state_update() -> Callable[[dict[str, Any]], Tensor] | None:
    """The Triton kernel of the decoding step, if it is installed; takes ``selective_state_update``'s keyword arguments."""
    try:
        from mamba_ssm.ops.triton.selective_state_update import selective_state_update
    except ImportError:
        return None
    return lambda inputs: selective_state_update(**inputs)


def selective_scan() -> Callable[..., Tensor] | None:
    """The CUDA kernel of the scan, if it is installed and runs on this GPU; takes ``selective_scan``'s tensors, softplus on."""
    try:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

        u, A, B = (torch.zeros(shape, device="cuda") for shape in ((1, 8, 16), (8, 4), (1, 4, 16)))
        selective_scan_fn(u, u, A, B, B, delta_softplus=True)
        torch.cuda.synchronize()
    except (ImportError, AttributeError, TypeError, RuntimeError):  # without its CUDA extension some versions can be imported
        return None
    return lambda **tensors: selective_scan_fn(**tensors, delta_softplus=True)
