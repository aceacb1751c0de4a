"""The operators, typed and documented. Each calls the operator of its name in ``torch.ops.ssm_kernels``."""

from .._submodules import public_names
from .convolution import causal_conv1d, causal_conv1d_update
from .norm import add_layer_norm, add_rms_norm, layer_norm_gated, rms_norm_gated
from .recurrences import (
    diag_linear_scan,
    diag_linear_step,
    elu_gru_scan,
    elu_gru_step,
    hgrn_scan,
    hgrn_step,
    linear_scan,
    linear_step,
    liquid_scan,
    liquid_step,
    mingru_scan,
    mingru_step,
    minlstm_scan,
    minlstm_step,
    rglru_scan,
    rglru_step,
)
from .selective_scan import selective_scan
from .ssd import ssd_chunk_scan
from .state_update import selective_state_update
from .summaries import (
    diag_linear_scan_summary,
    elu_gru_scan_summary,
    hgrn_scan_summary,
    linear_scan_summary,
    liquid_scan_summary,
    mingru_scan_summary,
    minlstm_scan_summary,
    rglru_scan_summary,
    selective_scan_summary,
    ssd_chunk_scan_summary,
)

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "causal_conv1d",
    "causal_conv1d_update",
    "diag_linear_scan",
    "diag_linear_scan_summary",
    "diag_linear_step",
    "elu_gru_scan",
    "elu_gru_scan_summary",
    "elu_gru_step",
    "hgrn_scan",
    "hgrn_scan_summary",
    "hgrn_step",
    "layer_norm_gated",
    "linear_scan",
    "linear_scan_summary",
    "linear_step",
    "liquid_scan",
    "liquid_scan_summary",
    "liquid_step",
    "mingru_scan",
    "mingru_scan_summary",
    "mingru_step",
    "minlstm_scan",
    "minlstm_scan_summary",
    "minlstm_step",
    "rglru_scan",
    "rglru_scan_summary",
    "rglru_step",
    "rms_norm_gated",
    "selective_scan",
    "selective_scan_summary",
    "selective_state_update",
    "ssd_chunk_scan",
    "ssd_chunk_scan_summary",
]

__dir__ = public_names(__name__)
