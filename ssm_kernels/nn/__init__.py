"""Layers built on the operators: ``torch.nn.Module``s for use in a model.

- :class:`SelectiveSSM`: the selective state-space model of the Mamba paper, with its projections.
- :class:`Mamba`: the whole mixer (in-projection, short convolution, selective SSM, gate, out-projection) with the constructor
  and the ``state_dict`` of ``mamba_ssm``'s ``Mamba``.
- :class:`Mamba2`: the mixer of Mamba-2, with heads, the state-space dual form and a gated norm; also with ``mamba_ssm``'s
  constructor and ``state_dict``.
- :class:`Mamba3`: the mixer of Mamba-3, SISO and MIMO, with rotated B and C and two samples a step; likewise.
- :class:`DeltaNet`, :class:`GatedDeltaNet`, :class:`KimiDeltaAttention`, :class:`GatedDeltaProduct`: layers around the delta
  rule, with the constructors and the ``state_dict`` of flash-linear-attention.
- :class:`MLSTM`: the layer of xLSTM-7B around the matrix memory, with its parameters.
- :class:`MinGRU`, :class:`MinLSTM`: projections and linear recurrence, with the constructor and the calls of ``torch.nn.GRU``.
- :class:`Liquid`: the same for states that relax towards a target, with step lengths for irregular samples.
- :class:`Block`, :class:`GatedMLP`: the residual block of Mamba's language models and its MLP, with ``mamba_ssm``'s parameters.

``Mamba``, ``Mamba2`` and ``SelectiveSSM`` take ``discretization=``, and backward differentiates that discretization.
``ssm_kernels.models`` has whole language models.
"""

from .._submodules import public_names
from .block import Block, GatedMLP
from .delta_net import DeltaNet
from .gated_delta_net import GatedDeltaNet
from .gated_delta_product import GatedDeltaProduct
from .kimi_delta_attention import KimiDeltaAttention
from .liquid import Liquid
from .mamba import Mamba
from .mamba2 import Mamba2
from .mamba3 import Mamba3
from .minrnn import MinGRU, MinLSTM
from .mlstm import MLSTM
from .selective_ssm import SelectiveSSM

__all__ = [
    "MLSTM",
    "Block",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedDeltaProduct",
    "GatedMLP",
    "KimiDeltaAttention",
    "Liquid",
    "Mamba",
    "Mamba2",
    "Mamba3",
    "MinGRU",
    "MinLSTM",
    "SelectiveSSM",
]

__dir__ = public_names(__name__)
