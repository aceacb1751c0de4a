"""Sequences and models larger than one GPU, on ``torch.distributed``: see ``docs/distributed.md``.

:class:`ContextParallel` splits the sequences of layers and models over ranks, and the functions, which have the names of the
operators, those of single operators. :class:`TensorParallel` splits channels and heads. :func:`get_state_dict` and
:func:`set_state_dict` are for checkpoints that do not depend on how a model is distributed.
"""

import sys

import torch.distributed

if not torch.distributed.is_available():
    raise ImportError("ssm_kernels.distributed: expected a PyTorch with torch.distributed, got one that was built without it")

from .._submodules import public_names
from . import functions, state_dicts
from ._recomputation import keep_exchanged_states
from ._recurrences import *  # noqa: F403  # mypy follows one star
from .context_parallel import ContextParallel, sum_gradients
from .functions import *  # noqa: F403
from .state_dicts import get_state_dict, set_state_dict
from .tensor_parallel import TensorParallel

__all__ = [
    "ContextParallel",
    "TensorParallel",
    "get_state_dict",
    "keep_exchanged_states",
    "set_state_dict",
    "sum_gradients",
]
__all__ += functions.__all__

# The earlier path of the module, for imports and pickles.
sys.modules[f"{__name__}.checkpoints"] = checkpoints = state_dicts

__dir__ = public_names(__name__)
