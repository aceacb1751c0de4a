"""State-space model kernels for PyTorch: the selective scan with a choice of discretization, Mamba-2's scan in chunks, gated
linear recurrences, and the short causal convolution before them.

``selective_scan``, ``ssd_chunk_scan``, ``selective_state_update``, ``causal_conv1d``, ``causal_conv1d_update``, the scans and
steps of ``linear_scan``'s family, the scans' summaries (``selective_scan_summary``, ...) and the norms (``rms_norm_gated``,
``add_rms_norm``, ...) are the operators, ``ssm_kernels.nn`` the layers made of them, ``ssm_kernels.models`` language models of
these layers, and ``ssm_kernels.reference`` the operators in plain PyTorch. ``ssm_kernels.choices`` has the types of names, such
as those of discretizations.
``python -m ssm_kernels`` prints what was built and what is usable on this machine.

``ssm_kernels.distributed``, ``ssm_kernels.compat`` and ``ssm_kernels.integrations`` are imported when they are first used.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ._build_info import build_info, load_operators

load_operators()

from . import _vmap, choices, models, nn, reference  # noqa: E402, F401
from ._submodules import public_names, submodules_on_use  # noqa: E402
from .choices import DiscretizationName as _DiscretizationName  # noqa: E402
from .convolutions import causal_conv1d, causal_conv1d_update  # noqa: E402
from .norms import add_layer_norm, add_rms_norm, layer_norm_gated, rms_norm_gated  # noqa: E402
from .ops import selective_scan, selective_state_update  # noqa: E402
from .recurrences import (  # noqa: E402
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
from .ssd import ssd_chunk_scan  # noqa: E402
from .summaries import (  # noqa: E402
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

if _TYPE_CHECKING:
    from . import compat as compat
    from . import distributed as distributed
    from . import integrations as integrations
else:  # A type checker would take a __getattr__ for every misspelled name.
    __getattr__ = submodules_on_use(__name__, ("compat", "distributed", "integrations"))

__dir__ = public_names(__name__, "compat", "distributed", "integrations")

__version__: str = build_info()["version"]
discretizations: tuple[_DiscretizationName, ...] = build_info()["discretizations"]
"""The names that ``discretization=`` takes, aliases left out."""

__all__ = [
    "__version__",
    "add_layer_norm",
    "add_rms_norm",
    "build_info",
    "causal_conv1d",
    "causal_conv1d_update",
    "choices",
    "diag_linear_scan",
    "diag_linear_scan_summary",
    "diag_linear_step",
    "discretizations",
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
    "models",
    "nn",
    "reference",
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
