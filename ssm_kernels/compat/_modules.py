"""The modules that :func:`ssm_kernels.compat.install` provides, by the names of ``mamba_ssm``, ``causal_conv1d`` and their
extension modules."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import nn
from ..models import mixer_model
from . import (
    autograd_functions,
    bidirectional,
    causal_conv1d,
    conv_extensions,
    generation,
    layer_norm,
    layernorm,
    mamba2_simple,
    mamba3,
    mixer_seq_simple,
    models,
    norms,
    references,
    scan_extensions,
    selective_scan,
    ssd,
    unserved,
)

VERSIONS = {"mamba_ssm": "2.3.2+ssm.kernels", "causal_conv1d": "1.7.0+ssm.kernels"}
"""The versions whose signatures the functions have, which clients compare; the label says whose modules they are."""

_SELECTIVE_SCAN = {
    "selective_scan_fn": selective_scan.selective_scan_fn,
    "mamba_inner_fn": selective_scan.mamba_inner_fn,
    "bimamba_inner_fn": selective_scan.bimamba_inner_fn,
}
_NO_OUT_PROJ = {"mamba_inner_fn_no_out_proj": selective_scan.mamba_inner_fn_no_out_proj}
_SELECTIVE_SCAN_CLASSES = {
    "SelectiveScanFn": autograd_functions.SelectiveScanFn,
    "MambaInnerFn": autograd_functions.MambaInnerFn,
    "MambaInnerFnNoOutProj": autograd_functions.MambaInnerFnNoOutProj,
    "BiMambaInnerFn": autograd_functions.BiMambaInnerFn,
}
_SELECTIVE_SCAN_REFERENCES = {
    "selective_scan_ref": references.selective_scan_ref,
    "mamba_inner_ref": references.mamba_inner_ref,
    "bimamba_inner_ref": references.bimamba_inner_ref,
}
_STATE_UPDATE = {
    "selective_state_update": selective_scan.selective_state_update,
    "selective_state_update_ref": references.selective_state_update_ref,
}
_SSD = {
    "mamba_chunk_scan_combined": ssd.mamba_chunk_scan_combined,
    "mamba_split_conv1d_scan_combined": ssd.mamba_split_conv1d_scan_combined,
}
_CONVOLUTIONS = {
    "causal_conv1d_fn": causal_conv1d.causal_conv1d_fn,
    "causal_conv1d_update": causal_conv1d.causal_conv1d_update,
}
_CONVOLUTION_REFERENCES = {
    "causal_conv1d_ref": references.causal_conv1d_ref,
    "causal_conv1d_update_ref": references.causal_conv1d_update_ref,
}
# torch.amp's decorators of autograd functions, for the autocast of CUDA.
_AUTOCAST = {name: functools.partial(getattr(torch.amp, name), device_type="cuda") for name in ("custom_fwd", "custom_bwd")}
_VARLEN_STATES = {"causal_conv1d_varlen_states": causal_conv1d.causal_conv1d_varlen_states}

_LAYER_NORM = {name: getattr(layer_norm, name) for name in layer_norm.__all__}
_CPP_FUNCTIONS = {name: getattr(conv_extensions, name) for name in conv_extensions.__all__ if name.endswith("_function")}
_CONVOLUTION_KERNELS = {
    "causal_conv1d_fwd": conv_extensions.causal_conv1d_fwd,
    "causal_conv1d_bwd": conv_extensions.causal_conv1d_bwd,
    "causal_conv1d_update": conv_extensions.causal_conv1d_update,
}

MODULES: dict[str, dict[str, Any]] = {
    "mamba_ssm": {
        **_SELECTIVE_SCAN,
        "Mamba": bidirectional.Mamba,
        "Mamba2": nn.Mamba2,
        "Mamba3": nn.Mamba3,
        "MambaLMHeadModel": models.MambaLMHeadModel,
    },
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.selective_scan_interface": {
        **_SELECTIVE_SCAN,
        **_NO_OUT_PROJ,
        **_SELECTIVE_SCAN_CLASSES,
        **_SELECTIVE_SCAN_REFERENCES,
        "rms_norm_forward": selective_scan.rms_norm_forward,
    },
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.selective_state_update": _STATE_UPDATE,
    "mamba_ssm.ops.triton.ssd_combined": {
        **_SSD,
        "MambaChunkScanCombinedFn": autograd_functions.MambaChunkScanCombinedFn,
        "MambaSplitConv1dScanCombinedFn": autograd_functions.MambaSplitConv1dScanCombinedFn,
    },
    "mamba_ssm.ops.tilelang": {},
    "mamba_ssm.ops.tilelang.mamba3": {},
    "mamba_ssm.ops.tilelang.mamba3.mamba3_mimo": {"mamba3_mimo": mamba3.mamba3_mimo},
    "mamba_ssm.ops.triton.mamba3": {},
    "mamba_ssm.ops.triton.mamba3.mamba3_siso_combined": {"mamba3_siso_combined": mamba3.mamba3_siso_combined},
    "mamba_ssm.ops.triton.layernorm_gated": {
        **{name: getattr(norms, name) for name in norms.__all__},
        "LayerNormFn": autograd_functions.GatedLayerNormFn,
        "rms_norm_ref": references.rms_norm_ref,
    },
    "mamba_ssm.ops.triton.layer_norm": {
        **_LAYER_NORM,
        "LayerNormFn": autograd_functions.LayerNormFn,
        "LayerNormLinearFn": autograd_functions.LayerNormLinearFn,
    },
    "mamba_ssm.ops.triton.layernorm": {
        **{name: getattr(layernorm, name) for name in layernorm.__all__},
        "LayerNormFn": autograd_functions.LayerNormFn1x,
        "LayerNormLinearFn": autograd_functions.LayerNormLinearFn,
    },
    "mamba_ssm.modules": {},
    "mamba_ssm.modules.mamba_simple": {"Mamba": bidirectional.Mamba, "Block": mixer_seq_simple.BlockWithoutMLP},
    "mamba_ssm.modules.mamba2": {"Mamba2": nn.Mamba2},
    "mamba_ssm.modules.mamba2_simple": {"Mamba2Simple": mamba2_simple.Mamba2Simple},
    "mamba_ssm.modules.block": {"Block": nn.Block},
    "mamba_ssm.modules.mlp": {"GatedMLP": nn.GatedMLP},
    "mamba_ssm.modules.mamba3": {"Mamba3": nn.Mamba3},
    "mamba_ssm.modules.mha": {"MHA": unserved.MHA},
    "mamba_ssm.models": {},
    "mamba_ssm.models.config_mamba": {"MambaConfig": models.MambaConfig},
    "mamba_ssm.models.mixer_seq_simple": {
        "MambaConfig": models.MambaConfig,
        "MambaLMHeadModel": models.MambaLMHeadModel,
        "MixerModel": mixer_seq_simple.MixerModel,
        "create_block": mixer_seq_simple.create_block,
        "_init_weights": mixer_model._init_weights,
    },
    "mamba_ssm.utils": {},
    "mamba_ssm.utils.generation": {name: getattr(generation, name) for name in generation.__all__ if name != "GenerateOutput"},
    "mamba_ssm.utils.hf": {"load_config_hf": models.load_config_hf, "load_state_dict_hf": models.load_state_dict_hf},
    "mamba_ssm.utils.torch": _AUTOCAST,
    "mamba_ssm.distributed": {},
    "mamba_ssm.distributed.tensor_parallel": {
        "ColumnParallelLinear": unserved.ColumnParallelLinear,
        "RowParallelLinear": unserved.RowParallelLinear,
    },
    "mamba_ssm.distributed.distributed_utils": {
        "all_reduce": unserved.all_reduce,
        "reduce_scatter": unserved.reduce_scatter,
    },
    "causal_conv1d": _CONVOLUTIONS,
    "causal_conv1d.causal_conv1d_interface": {
        **_CONVOLUTIONS,
        **_CONVOLUTION_REFERENCES,
        "CausalConv1dFn": autograd_functions.CausalConv1dFn,
    },
    "causal_conv1d.causal_conv1d_varlen": _VARLEN_STATES,
    "causal_conv1d.cpp_functions": _CPP_FUNCTIONS,
    "selective_scan_cuda": {"fwd": scan_extensions.selective_scan_fwd, "bwd": scan_extensions.selective_scan_bwd},
    "causal_conv1d_cuda": _CONVOLUTION_KERNELS,
    "selective_scan_cuda_core": {"fwd": scan_extensions.core_fwd, "bwd": scan_extensions.core_bwd},
    "selective_scan_cuda_oflex": {"fwd": scan_extensions.oflex_fwd, "bwd": scan_extensions.oflex_bwd},
    "selective_scan_cuda_nrow": {"fwd": scan_extensions.nrow_fwd, "bwd": scan_extensions.nrow_bwd},
    "selective_scan_cuda_ndstate": {"fwd": scan_extensions.ndstate_fwd, "bwd": scan_extensions.ndstate_bwd},
}

PARTS = tuple(dict.fromkeys(name.partition(".")[0] for name in MODULES))
"""The top-level modules, each of which can be installed apart from the rest."""

FUNCTIONS = {
    part: tuple(dict.fromkeys(name for module, names in MODULES.items() if f"{module}.".startswith(start) for name in names))
    for part, start in (("mamba_ssm", "mamba_ssm.ops."), ("causal_conv1d", "causal_conv1d."))
}
"""Names that clients set to None if the import of their part fails."""
