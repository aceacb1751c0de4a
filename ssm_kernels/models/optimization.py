"""The groups of parameters that an optimizer decays and does not decay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn as nn
from torch import Tensor

from ..nn.checks import check_not_negative
from ..nn.weight_decay import NamesNoDecay, own_no_decay

__all__ = ["parameter_groups"]

# Modules that only wrap another: FSDP1, torch.compile, activation checkpointing, DistributedDataParallel, AveragedModel.
_WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "module")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups of all parameters of ``model`` for an optimizer such as ``torch.optim.AdamW``.

    A parameter has no weight decay if one of these is true:

    - it has less than two dimensions, as biases and the weights of norms have;
    - it is ``A_log``, ``D``, ``dt_bias`` or ``lam_logit`` of a mixer or ``raw_tau_*`` of ``nn.Liquid``, wherever in ``model``
      the layer is;
    - a module of ``model`` names it in a method ``no_weight_decay()``, timm's convention;
    - it has the attribute ``_no_weight_decay``, by which code written for ``mamba_ssm`` marks parameters.

    Names and types of modules decide, so that ``fully_shard``, FSDP1 with ``use_orig_params=True``, ``TensorParallel``,
    ``DistributedDataParallel``, ``torch.compile``, copies, ``to_empty`` and conversions of dtype give the same groups. Call
    this function after them, because they replace parameters.

    Args:
        model: contains any layers; parameters with several names are in one group once.
        weight_decay: of the first group.

    Returns:
        ``[{"params": [...], "weight_decay": weight_decay}, {"params": [...], "weight_decay": 0.0}]``, each in the order of
        ``model.parameters()``.

    Raises:
        TypeError: ``model`` is not a module, or ``weight_decay`` not a number.
        ValueError: ``weight_decay`` is negative or not finite, or FSDP1 has flattened the parameters into one.

    Examples:
        >>> import torch
        >>> from ssm_kernels.models import MambaConfig, MambaLM, parameter_groups
        >>> model = MambaLM(MambaConfig(d_model=64, n_layer=1, vocab_size=100))
        >>> groups = parameter_groups(model, weight_decay=0.1)
        >>> [group["weight_decay"] for group in groups]
        [0.1, 0.0]
        >>> optimizer = torch.optim.AdamW(groups, lr=1e-3)
    """
    name = "parameter_groups"
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name}: expected model to be an nn.Module, got {type(model).__name__}")
    check_not_negative(name, "weight_decay", weight_decay)
    exempt = {id(parameter) for parameter in _named(model)}
    dimensions = _dimensions_before_fsdp1(model)
    decay: list[Tensor] = []
    no_decay: list[Tensor] = []
    for path, parameter in model.named_parameters():
        if getattr(parameter, "_is_flat_param", False):
            raise ValueError(
                f"{name}: expected FSDP1 with use_orig_params=True, got {path}, which holds many parameters in one vector"
            )
        # DeepSpeed's ZeRO-3 leaves empty vectors.
        shape = getattr(parameter, "ds_shape", parameter.shape)
        is_vector = dimensions.get(id(parameter), len(shape)) < 2
        is_exempt = is_vector or id(parameter) in exempt or getattr(parameter, "_no_weight_decay", False)
        (no_decay if is_exempt else decay).append(parameter)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


def _named(model: nn.Module) -> Iterator[Tensor]:
    """The parameters that layers and models name."""
    for module in model.modules():
        for _, parameter in own_no_decay(module):
            yield parameter
        # The class: wrappers forward attributes of the module in them.
        method = getattr(type(module), "no_weight_decay", None)
        if callable(method) and method is not NamesNoDecay.no_weight_decay:
            names = {_without_wrappers(name) for name in method(module)}
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if _without_wrappers(name) in names:
                    yield parameter


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _dimensions_before_fsdp1(model: nn.Module) -> dict[int, int]:
    """The number of dimensions of the parameters of which FSDP1 shows each rank's part as a vector."""
    dimensions = {}
    for module in model.modules():
        flat: Any = getattr(module.__dict__.get("_handle"), "flat_param", None)
        shapes = zip(getattr(flat, "_params", None) or (), getattr(flat, "_shapes", None) or (), strict=False)
        dimensions.update({id(parameter): len(shape) for parameter, shape in shapes})
    return dimensions
