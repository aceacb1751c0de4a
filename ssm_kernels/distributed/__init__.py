"""Sequences and models larger than one GPU, on ``torch.distributed``: see ``docs/distributed.md``.

:class:`ContextParallel` splits the sequences of layers and models over ranks, and the functions, which have the names of the
operators, those of single operators.
"""

from .context_parallel import ContextParallel, sum_gradients
from .functions import (
    causal_conv1d,
    diag_linear_scan,
    elu_gru_scan,
    hgrn_scan,
    linear_scan,
    liquid_scan,
    mingru_scan,
    minlstm_scan,
    rglru_scan,
    selective_scan,
    ssd_chunk_scan,
)

__all__ = [
    "ContextParallel",
    "causal_conv1d",
    "diag_linear_scan",
    "elu_gru_scan",
    "hgrn_scan",
    "linear_scan",
    "liquid_scan",
    "mingru_scan",
    "minlstm_scan",
    "rglru_scan",
    "selective_scan",
    "ssd_chunk_scan",
    "sum_gradients",
]
