"""The operator between the projections of ``nn.MLSTM`` for its tests: arguments, options and results."""

from __future__ import annotations

from typing import Any

import torch
from mixer_spec import MixerSpec
from torch import Tensor

from ssm_kernels.rules.mixers import composed_mlstm

D_MODEL = 7

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "bias": {"bias": True, "projects": True},
    "no_cap": {"gate_soft_cap": None},
    "states": {"states": True},
    "cu_seqlens": {"batch": 1, "packed": True, "states": True, "projects": True},
    "no_norm": {"norm": False},
    "projection_without_norm": {"norm": False, "projects": True},
    "projection": {"projects": True, "states": True},
    "recomputed": {"projects": True, "recomputes_scan": True},
    "recomputed_without_projection": {"recomputes_scan": True},
    "recomputed_without_norm": {"recomputes_scan": True, "norm": False},
}


def make_inputs(
    *,
    batch: int = 2,
    seqlen: int = 9,
    heads: int = 2,
    key_dim: int = 4,
    value_dim: int = 3,
    gate_soft_cap: float | None = 2.0,
    bias: bool = False,
    states: bool = False,
    norm: bool = True,
    projects: bool = False,
    packed: bool = False,
    recomputes_scan: bool = False,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> dict[str, Any]:
    """The operator's arguments in its order."""
    generator, wide = torch.Generator().manual_seed(0), torch.float64 if dtype == torch.float64 else torch.float32

    def draw(*shape: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, to)

    values, rows = heads * value_dim, 3 if packed else batch
    columns = {"q": heads * key_dim, "k": heads * key_dim, "v": values, "i": heads, "f": heads}
    inputs: dict[str, Any] = {name: draw(batch, seqlen, size) for name, size in columns.items()}
    inputs["z"] = draw(batch, seqlen, values) if norm else None
    inputs["norm_weight"] = draw(values) if norm else None
    inputs["norm_bias"] = draw(values) if norm and bias else None
    inputs["C"] = draw(rows, heads, value_dim, key_dim, to=wide) if states else None
    inputs["n"] = draw(rows, heads, key_dim, to=wide) if states else None
    inputs["m"] = draw(rows, heads, to=wide) if states else None
    inputs["out_proj_weight"] = draw(D_MODEL, values) if projects else None
    inputs["out_proj_bias"] = draw(D_MODEL) if projects and bias else None
    inputs["cu_seqlens"] = torch.tensor([0, 4, 4, seqlen], device=device, dtype=torch.int32) if packed else None
    return inputs | {
        "gate_soft_cap": gate_soft_cap,
        "eps": 1e-6,
        "norm_eps": 1e-5,
        "recomputes_scan": recomputes_scan,
        "layer": "MLSTM",
    }


MLSTM_MIXER = MixerSpec(
    name="_mlstm_mixer",
    composition=composed_mlstm,
    make_inputs=make_inputs,
    results=("out", "final_C", "final_n"),
    all_results=("out", "final_C", "final_n", "final_m"),
    options=OPTIONS,
    of_one_result=("projection", "recomputed", "no_norm", "projection_without_norm", "recomputed_without_norm"),
    of_a_subset=("bias", "recomputed", "no_norm"),
    of_opcheck=("bias", "cu_seqlens", "recomputed", "no_norm", "no_cap"),
    whole={"projects": True},
    of_gradcheck=({"key_dim": 2, "value_dim": 2}, ("out",)),  # the states have the unit m, which is a constant
    sizes={"seqlen": 80, "key_dim": 16, "value_dim": 32},
    of_low_precision=({}, {"projects": True}, {"projects": True, "recomputes_scan": True}),
    layer="MLSTM",
)
