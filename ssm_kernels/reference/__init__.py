"""Reference operators: the ground truth that every kernel is tested against.

Plain, differentiable PyTorch, written from the formulas, one time step after another. Everything is computed in the dtype of
the arguments (pass float64 for a precise one); nothing here is fast.

The continuous system is diagonal, ``h'(t) = A h(t) + B(t) u(t)``, ``y(t) = C(t) h(t) + D u(t)``. With the step ``delta`` and
``z = delta * A`` every discretization has the form

    h_t = Abar(z_t) * h_{t-1} + delta_t * gain(z_t) * B_t * u_t

and differs only in the two functions ``Abar`` and ``gain``. ``"dirac"`` alone has no ``delta_t`` before the gain.

In the state-space dual form the state is a matrix, headdim x dstate, and the whole matrix decays by one number. The delta rule
also subtracts from such a state what it already has for a key. xLSTM's matrix memory has a vector ``n`` that decays and grows
as the matrix does, and divides its output by the size of ``n q``.
"""

from .._submodules import public_names
from .._torchscript import refuse_script_of
from . import recurrences
from .complex_states import complex_scan, complex_state_update
from .convolution import causal_conv1d, causal_conv1d_update
from .delta_rule import delta_rule_scan
from .delta_rule_step import delta_rule_step
from .dense import dense_coefficients, dense_scan
from .discretizations import ALIASES, DISCRETIZATIONS, Discretization, coefficients, discretization_of, phi1
from .mamba3 import Mamba3State, mamba3_chunk_scan, mamba3_state_update
from .mlstm import mlstm_scan
from .mlstm_step import mlstm_step
from .norms import GATE_ACTIVATIONS, add_layer_norm, add_rms_norm, layer_norm_gated, rms_norm_gated
from .recurrences import *  # noqa: F403
from .selective_scan import selective_scan
from .ssd import ssd_chunk_scan
from .state_update import selective_state_update
from .two_samples import ScanState, phi2, two_sample_chunk_scan, two_sample_coefficients, two_sample_scan

__all__ = [
    "ALIASES",
    "DISCRETIZATIONS",
    "GATE_ACTIVATIONS",
    "Discretization",
    "Mamba3State",
    "ScanState",
    "add_layer_norm",
    "add_rms_norm",
    "causal_conv1d",
    "causal_conv1d_update",
    "coefficients",
    "complex_scan",
    "complex_state_update",
    "delta_rule_scan",
    "delta_rule_step",
    "dense_coefficients",
    "dense_scan",
    "discretization_of",
    "layer_norm_gated",
    "mamba3_chunk_scan",
    "mamba3_state_update",
    "mlstm_scan",
    "mlstm_step",
    "phi1",
    "phi2",
    "rms_norm_gated",
    "selective_scan",
    "selective_state_update",
    "ssd_chunk_scan",
    "two_sample_chunk_scan",
    "two_sample_coefficients",
    "two_sample_scan",
]
__all__ += recurrences.__all__

__dir__ = public_names(__name__)

refuse_script_of(__name__)
