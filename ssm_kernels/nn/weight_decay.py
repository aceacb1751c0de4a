"""The parameters of a layer that optimizers must not decay, by name.

``fully_shard``, ``copy.deepcopy``, ``torch.optim.swa_utils.AveragedModel``, ``to_empty`` and conversions of dtype make new
parameters without the attributes of the old ones. Their names stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch.nn as nn

__all__ = ["NamesNoDecay", "own_no_decay"]


class NamesNoDecay:
    """Mixin for modules: the method :meth:`no_weight_decay`.

    A layer names its own parameters of this kind in ``_no_decay``.
    """

    _no_decay: tuple[str, ...] = ()

    def no_weight_decay(self) -> set[str]:
        """The names of the parameters, submodules included, that an optimizer must not decay, as in models of timm.

        They are the parameters of the recurrence, such as ``A_log`` and ``D``. Biases and the weights of norms are not
        among them: :func:`ssm_kernels.models.parameter_groups` and timm exempt vectors by their shape.

        Examples:
            >>> from ssm_kernels.nn import Mamba2
            >>> sorted(Mamba2(16, headdim=8).no_weight_decay())
            ['A_log', 'D', 'dt_bias']
        """
        module = cast(nn.Module, self)
        return {
            f"{path}.{name}" if path else name
            for path, submodule in module.named_modules()
            for name, _ in own_no_decay(submodule)
        }


def own_no_decay(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The names and parameters of ``module`` itself, without submodules, that an optimizer must not decay."""
    if not isinstance(module, NamesNoDecay):
        return
    for name in module._no_decay:
        parameter = module._parameters.get(name)
        if parameter is not None:
            yield name, parameter
        # torch.nn.utils.parametrize holds the parameters from which it computes one.
        parametrized: Any = getattr(module, "parametrizations", {})
        if name in parametrized:
            for original, value in parametrized[name].named_parameters():
                yield f"parametrizations.{name}.{original}", value
