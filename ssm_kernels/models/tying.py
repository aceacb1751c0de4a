"""One weight for embedding and head, which PyTorch's own functions take apart.

``to_empty`` and conversions of dtype replace a parameter once for each of its names, and so does ``load_state_dict`` with
``assign=True``: two parameters are left, and an optimizer trains them apart. FSDP1 materializes module by module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor

from .._warnings import warn
from ..nn.initialization import Initialization, is_distributed

__all__ = ["TiedInitialization", "are_different", "first_with_memory", "places_of_shared", "restore_shared", "warn_if_apart"]

# A parameter that has several places, and these.
Places = list[tuple[nn.Parameter, list[tuple[nn.Module, str]]]]


def places_of_shared(model: nn.Module) -> Places:
    """Each parameter that has several places, with their modules and names."""
    places: dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), (parameter, []))[1].append((module, name))
    return [found for found in places.values() if len(found[1]) > 1]


def restore_shared(places: Places) -> None:
    """Makes each parameter one again for all of its places.

    The places take the parameter of the one that was replaced since :func:`places_of_shared`. Of several that were, they take
    the first whose parameter has memory.
    """
    for before, own in places:
        replaced = [now for module, name in own if (now := module._parameters[name]) is not before]
        if replaced:
            parameter = first_with_memory(replaced)
            for module, name in own:
                module._parameters[name] = parameter


def first_with_memory(parameters: Sequence[Any]) -> Any:
    """The first that is not on meta, or else the first."""
    return next((parameter for parameter in parameters if parameter is not None and not parameter.is_meta), parameters[0])


def are_different(one: Any, other: Any) -> bool:
    """Whether two entries of a state dict are weights of different values; of DTensors, whether this rank's shards are."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)) or one is other or one.shape != other.shape:
        return False
    if is_distributed(one) and is_distributed(other):
        if getattr(one, "placements", None) != getattr(other, "placements", None):
            return False
        # torch.equal of DTensors waits for all ranks of the default group, those outside of the mesh too.
        one, other = (cast(Any, value).to_local() for value in (one, other))
    if any(type(value) not in (Tensor, nn.Parameter) or value.is_meta for value in (one, other)):
        return False
    is_alike = (one.device, one.dtype, one.stride()) == (other.device, other.dtype, other.stride())
    if is_alike and one.data_ptr() == other.data_ptr():
        return False
    one, other = one.detach(), other.detach().to(one)
    # NaN is unequal to itself.
    return not (torch.equal(one, other) or torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)))


def warn_if_apart(model: Any) -> None:
    """Warns where an optimizer would train embedding and head apart, though the configuration makes them one parameter.

    Only parameters with memory count: accelerate and FSDP1 give each module a tensor of its own while it runs.
    """
    weights = [getattr(module, "weight", None) for module in (model.backbone.embedding, model.lm_head)]
    if weights[0] is weights[1]:
        return
    if all(isinstance(weight, nn.Parameter) and weight.requires_grad and not weight.is_meta for weight in weights):
        warn(
            "MambaLM: expected embedding and head to share their weight, because tie_embeddings is true, got two parameters: "
            "call tie_weights() and then make the optimizer, or choose MambaConfig(tie_embeddings=False)",
        )


class TiedInitialization(Initialization):
    """Initializes embedding or head, and then makes the two share their weight again.

    Args:
        module: the embedding or the head.
        draw: see :class:`Initialization`.
        owner: the model; its copies and pickles give their modules an object that belongs to them.
    """

    def __init__(self, module: nn.Module, draw: Callable[[Any], None], owner: Any) -> None:
        super().__init__(module, draw)
        self._owner: Callable[[], Any] = weakref.ref(owner)

    def __call__(self) -> None:
        super().__call__()
        owner = self._owner()
        if owner is not None:
            owner.tie_weights()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state)
        self._owner = _nobody


def _nobody() -> None:
    return None
