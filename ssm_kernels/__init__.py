"""State-space model kernels for PyTorch: the selective scan with a choice of discretization, on CPU and CUDA.

``selective_scan`` and ``selective_state_update`` are the operators, ``ssm_kernels.nn`` the layers made of them,
``ssm_kernels.reference`` the same in plain PyTorch. ``python -m ssm_kernels`` says what was built and what is usable here.
"""

from ._build_info import build_info, load_operators

load_operators()

from . import _vmap, nn, reference  # noqa: E402, F401
from .ops import selective_scan, selective_state_update  # noqa: E402

__version__: str = build_info()["version"]
discretizations: tuple[str, ...] = build_info()["discretizations"]
"""The names that ``discretization=`` takes, aliases left out."""

__all__ = ["__version__", "build_info", "discretizations", "nn", "reference", "selective_scan", "selective_state_update"]
