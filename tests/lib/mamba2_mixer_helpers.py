"""The operators between Mamba-2's projections for their tests: arguments, options and results."""

from __future__ import annotations

from typing import Any

import torch
from mixer_spec import MixerSpec
from torch import Tensor

from ssm_kernels.rules.mixers import composed_mamba2, composed_mamba2_projected

D_MODEL = 7
SEQUENCES = ("projected", "conv_state")
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


def make_projected_inputs(
    *, weight: bool = True, bias: bool = True, recomputes: bool = False, **options: Any
) -> dict[str, Any]:
    """The arguments of the operator with the out-projection, in its order."""
    inputs = make_inputs(**options)
    of_rows, generator = inputs["projected"], torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(of_rows)

    inputs["out_proj_weight"] = draw(D_MODEL, inputs["dt_bias"].numel() * inputs["headdim"]) if weight else None
    inputs["out_proj_bias"] = draw(D_MODEL) if weight and bias else None
    return inputs | {"recomputes_scan": recomputes}


MAMBA2_MIXER = MixerSpec(
    name="_mamba2_mixer",
    composition=composed_mamba2,
    make_inputs=make_inputs,
    results=RESULTS,
    all_results=RESULTS,
    options=OPTIONS,
    of_one_result=("states", "no_norm_states"),
    of_a_subset=("states", "no_norm_states"),
    of_opcheck=("default", "no_norm_states", "cu_seqlens"),
    whole={},
    of_gradcheck=({"heads": 2, "headdim": 2, "dstate": 2}, ("out",)),
    sizes={"seqlen": 80, "heads": 4, "headdim": 16, "dstate": 16},
    of_low_precision=({}, {"resets": True}, {"norm": False}),
    layer="Mamba2",
)

WITHOUT_PROJECTION: dict[str, dict[str, Any]] = {
    "no_projection_bias": {"states": True, "bias": False},
    "no_projection": {"states": True, "weight": False},
    "no_projection_no_norm": {"states": True, "weight": False, "norm": False},
}
RECOMPUTED = {f"recomputed_{name}": options | {"recomputes": True} for name, options in (OPTIONS | WITHOUT_PROJECTION).items()}
MAMBA2_PROJECTED = MixerSpec(
    name="_mamba2_mixer_projected",
    composition=composed_mamba2_projected,
    make_inputs=make_projected_inputs,
    results=RESULTS,
    all_results=RESULTS,
    options=OPTIONS | WITHOUT_PROJECTION | RECOMPUTED,
    of_one_result=("states", "recomputed_states"),
    of_a_subset=("states", "no_norm_states", "recomputed_states", "recomputed_no_norm_states"),
    of_opcheck=(
        *("default", "no_norm_states", "cu_seqlens"),
        *("recomputed_default", "recomputed_no_norm_states", "recomputed_cu_seqlens"),
    ),
    whole={},
    of_gradcheck=({"heads": 2, "headdim": 2, "dstate": 2}, ("out",)),
    sizes={"seqlen": 80, "heads": 4, "headdim": 16, "dstate": 16},
    of_low_precision=({}, {"norm_before_gate": True}, {"recomputes": True}, {"recomputes": True, "norm": False}),
    layer="Mamba2",
)
