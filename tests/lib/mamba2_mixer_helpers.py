"""Arguments of the operator between Mamba-2's projections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SEQUENCES = ("projected", "conv_state")
TENSORS = ("projected", "conv_weight", "conv_bias", "A_log", "D", "dt_bias", "norm_weight", "conv_state", "ssm_state")
RESULTS = ("out", "final_conv_state", "final_ssm_state")

# Options of make_inputs.
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "norm_before_gate": {"norm_before_gate": True},
    "no_norm": {"norm": False},
    "groups": {"groups": 2},
    "states": {"states": True},
    "no_norm_states": {"norm": False, "states": True},
    "D_of_channels": {"D": "channel"},
    "no_D_no_bias": {"D": None, "conv_bias": False},
    "seq_idx": {"resets": True, "states": True},
    "cu_seqlens": {"cu_seqlens": (0, 0, 2, 9, 9, 14), "states": True},
    "foh": {"discretization": "foh", "dt_limit": (0.1, 0.5)},
}


def make_inputs(
    *,
    batch: int = 2,
    seqlen: int = 14,
    heads: int = 4,
    headdim: int = 3,
    groups: int = 1,
    dstate: int = 5,
    width: int = 4,
    norm: bool = True,
    norm_before_gate: bool = False,
    states: bool = False,
    D: str | None = "head",
    conv_bias: bool = True,
    resets: bool = False,
    cu_seqlens: tuple[int, ...] | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    discretization: str = "zoh",
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> dict[str, Any]:
    """The operator's arguments in its order, the same numbers on every device."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    if cu_seqlens is not None:
        batch, seqlen = 1, cu_seqlens[-1]
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    d_ssm, d_conv_in = heads * headdim, heads * headdim + 2 * groups * dstate
    values = {
        "projected": normal(batch, seqlen, d_ssm + d_conv_in + heads),
        "conv_weight": normal(d_conv_in, width),
        "conv_bias": normal(d_conv_in) if conv_bias else None,
        "A_log": normal(heads),
        "D": {"head": normal(heads), "channel": normal(heads, headdim), None: None}[D],
        "dt_bias": normal(heads),
        "norm_weight": normal(d_ssm) if norm else None,
        "conv_state": normal(sequences, d_conv_in, width - 1) if states else None,
        "ssm_state": normal(sequences, heads, headdim, dstate) if states else None,
    }
    inputs: dict[str, Any] = {
        name: None if value is None else value.to(device, dtype if name in SEQUENCES else wide)
        for name, value in values.items()
    }
    steps = torch.arange(seqlen, device=device)
    return inputs | {
        "seq_idx": (steps // 5 % 2).expand(batch, -1) if resets else None,
        "cu_seqlens": None if cu_seqlens is None else torch.tensor(cu_seqlens, device=device),
        "headdim": headdim,
        "ngroups": groups,
        "dstate": dstate,
        "chunk_size": None,
        "dt_min": dt_limit[0],
        "dt_max": dt_limit[1],
        "eps": 1e-5,
        "norm_before_gate": norm_before_gate,
        "discretization": discretization,
    }
