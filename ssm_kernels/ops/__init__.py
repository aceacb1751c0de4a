"""The operators, typed and documented. Each calls the operator of its name in ``torch.ops.ssm_kernels``."""

from .._submodules import public_names
from . import recurrences
from .convolution import causal_conv1d, causal_conv1d_update
from .delta_rule import delta_rule_scan
from .delta_rule_step import delta_rule_step
from .mamba3 import mamba3_chunk_scan
from .mamba3_step import mamba3_state_update
from .mlstm import mlstm_scan
from .mlstm_step import mlstm_step
from .norm import add_layer_norm, add_rms_norm, layer_norm_gated, rms_norm_gated
from .recurrences import *  # noqa: F403
from .selective_scan import selective_scan
from .ssd import ssd_chunk_scan
from .state_update import selective_state_update
from .summaries import selective_scan_summary, ssd_chunk_scan_summary

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "causal_conv1d",
    "causal_conv1d_update",
    "delta_rule_scan",
    "delta_rule_step",
    "layer_norm_gated",
    "mamba3_chunk_scan",
    "mamba3_state_update",
    "mlstm_scan",
    "mlstm_step",
    "rms_norm_gated",
    "selective_scan",
    "selective_scan_summary",
    "selective_state_update",
    "ssd_chunk_scan",
    "ssd_chunk_scan_summary",
]
__all__ += recurrences.__all__

__dir__ = public_names(__name__)
