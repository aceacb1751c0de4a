"""Layers built on the operators: ``torch.nn.Module``s to put into a model.

- :class:`SelectiveSSM`: the selective state-space model of the Mamba paper, with its projections.
- :class:`Mamba`: the whole mixer (in-projection, short convolution, selective SSM, gate, out-projection) with the constructor
  and the ``state_dict`` of ``mamba_ssm``'s ``Mamba``.

Both take ``discretization=`` and are trained through the discretization they are given.
"""

from .mamba import Mamba
from .selective_ssm import SelectiveSSM

__all__ = ["Mamba", "SelectiveSSM"]
