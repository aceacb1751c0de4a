"""State-space model kernels for PyTorch: the selective scan with a choice of discretization, Mamba-2's scan in chunks, gated
linear recurrences, and the short causal convolution before them.

The package's functions are its operators, which ``ssm_kernels.ops.__all__`` lists: scans, steps for decoding, summaries of
scans, convolutions and norms. ``ssm_kernels.nn`` has the layers made of them, ``ssm_kernels.models`` language models of these
layers, and ``ssm_kernels.reference`` the operators in plain PyTorch. ``ssm_kernels.choices`` has the types of names, such as
those of discretizations.
``python -m ssm_kernels`` prints what was built and what is usable on this machine.

``ssm_kernels.distributed``, ``ssm_kernels.compat`` and ``ssm_kernels.integrations`` are imported when they are first used.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ._build_info import build_info, load_operators

load_operators()

from . import _vmap, choices, models, nn, ops, reference  # noqa: E402, F401
from ._diagonalization import DiagonalSystem, diagonalize  # noqa: E402
from ._discretizations import two_sample_discretizations as _two_sample_discretizations  # noqa: E402
from ._earlier_modules import register as _register_earlier_modules  # noqa: E402
from ._submodules import public_names, submodules_on_use  # noqa: E402
from .choices import DiscretizationName as _DiscretizationName  # noqa: E402
from .choices import TwoSampleDiscretizationName as _TwoSampleDiscretizationName  # noqa: E402
from .ops import *  # noqa: E402, F403
from .ops.recurrences import *  # noqa: E402, F403  # mypy follows one star

if _TYPE_CHECKING:
    from . import compat as compat
    from . import distributed as distributed
    from . import integrations as integrations
else:  # A type checker would take a __getattr__ for every misspelled name.
    __getattr__ = submodules_on_use(__name__, ("compat", "distributed", "integrations"))

__dir__ = public_names(__name__, "compat", "distributed", "integrations")

__version__: str = build_info()["version"]
_register_earlier_modules(__name__)

discretizations: tuple[_DiscretizationName, ...] = build_info()["discretizations"]
"""The names that ``discretization=`` takes, aliases left out."""

two_sample_discretizations: tuple[_TwoSampleDiscretizationName, ...] = _two_sample_discretizations
"""Those of the rules that read two input samples a step."""

__all__ = [
    "DiagonalSystem",
    "__version__",
    "build_info",
    "choices",
    "diagonalize",
    "discretizations",
    "models",
    "nn",
    "reference",
    "two_sample_discretizations",
]
__all__ += ops.__all__
