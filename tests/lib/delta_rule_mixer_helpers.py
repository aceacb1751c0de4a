"""The operator between the projections of the delta rules for its tests: arguments, options and results."""

from __future__ import annotations

from typing import Any

import torch
from mixer_spec import MixerSpec
from torch import Tensor

from ssm_kernels.rules.mixers import composed_delta_rule

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


DELTA_RULE_MIXER = MixerSpec(
    name="_delta_rule_mixer",
    composition=composed_delta_rule,
    make_inputs=make_inputs,
    results=("out", "ssm_state"),
    all_results=("out", "ssm_state"),
    options=OPTIONS,
    of_one_result=("projection", "recomputed", "no_norm", "projection_without_norm", "no_convolution"),
    of_a_subset=("projection", "recomputed", "no_norm", "updates"),
    of_opcheck=("default", "channels", "updates", "cu_seqlens", "recomputed", "no_convolution", "no_norm"),
    whole={"projects": True},
    of_gradcheck=({"key_dim": 2, "value_dim": 2, "states": True}, ("out", "ssm_state")),
    sizes={"seqlen": 80, "key_dim": 16, "value_dim": 16},
    of_low_precision=({}, {"resets": True}, {"projects": True}, {"projects": True, "recomputes_scan": True}),
    layer="GatedDeltaNet",
)
