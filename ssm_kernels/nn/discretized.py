"""The discretization in the ``state_dict``: weights are trained through one rule and are inexact under another."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from .._discretizations import discretization_aliases, discretization_names, is_rule, split_name
from .._warnings import warn
from ..choices import DiscretizationName, TwoSampleDiscretizationName
from .naming import class_name
from .weight_decay import NamesNoDecay

# The rule of a checkpoint without the entry: mamba_ssm has no other.
_DEFAULT = "zoh"
_ENTRY = "discretization_name"


def _canonical(name: str) -> str:
    stem, alpha = split_name(name)
    return discretization_aliases.get(name, name) if alpha is None else f"{stem}({alpha!r})"


def _encode(name: str, device: torch.device | str | None) -> Tensor:
    return torch.tensor([*_canonical(name).encode()], dtype=torch.uint8, device=device)


def _decode(entry: Any) -> str | None:
    """The discretization that an entry names, or None.

    Bytes that were cast with the weights, or averaged over checkpoints, are floating-point numbers near an integer.
    """
    if not isinstance(entry, Tensor):
        return None
    try:
        name = _canonical(bytes(round(byte) for byte in entry.tolist()).decode())
    except (TypeError, ValueError, OverflowError):
        # TypeError: other shapes, complex numbers. ValueError: NaN, not bytes or not UTF-8. OverflowError: infinity.
        return None
    return name if is_rule(name) else None


def _described(entry: Any) -> str:
    if not isinstance(entry, Tensor):
        return type(entry).__name__
    values = f" with the values {entry.tolist()}" if entry.dim() == 1 and entry.numel() <= 32 else ""
    return f"a tensor of shape {list(entry.shape)} and dtype {entry.dtype}{values}"


class DiscretizedModule(NamesNoDecay, nn.Module):
    """A layer whose ``state_dict`` names its discretization, unless that is ``"zoh"``.

    The entry is ``discretization_name``, the UTF-8 bytes of the name: a buffer, which every way of saving and distributing a
    model handles. A layer with ``"zoh"``, the rule of ``mamba_ssm``, has no entry, and its ``state_dict`` equals
    the one of ``mamba_ssm``'s layer. ``load_state_dict`` compares:

    - an entry with another name: an error, with ``strict=False`` too, as for a tensor of another shape. Without the entry the
      checkpoint loads. Entries that were cast to a floating-point dtype or averaged are rounded to bytes;
    - an entry that names no discretization: an error in the same way;
    - no entry, in a layer whose discretization is not ``"zoh"``: a warning.
    """

    discretization: DiscretizationName | TwoSampleDiscretizationName

    def _register_discretization(self, device: torch.device | str | None) -> None:
        if _canonical(self.discretization) != _DEFAULT:
            self.register_buffer(_ENTRY, _encode(self.discretization, device))

    def _reset_discretization(self) -> None:
        """Writes the name into the buffer again, in which ``to_empty()`` leaves arbitrary bytes."""
        buffer = self._buffers.get(_ENTRY)
        if buffer is not None and not buffer.is_meta:
            buffer.copy_(_encode(self.discretization, buffer.device))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # Encode the attribute, because to_empty() leaves arbitrary bytes in the buffer.
        buffer = destination.pop(prefix + _ENTRY, None)
        if _canonical(self.discretization) != _DEFAULT:
            destination[prefix + _ENTRY] = _encode(self.discretization, None if buffer is None else buffer.device)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        has_entry = prefix + _ENTRY in state_dict
        entry = state_dict.pop(prefix + _ENTRY, None)
        own = _canonical(self.discretization)
        saved: str | None = _DEFAULT
        layer = f"{class_name(self)} ({prefix.removesuffix('.')})" if prefix else class_name(self)
        delete = f"delete {prefix + _ENTRY!r} from the checkpoint to load it all the same"
        if has_entry:
            saved = own if isinstance(entry, Tensor) and entry.is_meta else _decode(entry)
        if saved is None:
            error_msgs.append(
                f"{layer}: expected {prefix + _ENTRY!r} of the checkpoint to be the bytes of one of {[*discretization_names]}, "
                f"a 1-D tensor, got {_described(entry)}. If the checkpoint's discretization is {own!r}, {delete}"
            )
        elif saved != own:
            named = f"of {saved!r}" if has_entry else f"that names none, as of mamba_ssm, whose is {_DEFAULT!r}"
            message = (
                f"{layer}: expected a checkpoint of discretization {own!r}, got one {named}: weights trained with one "
                f"discretization are inexact with another. Make the layer with discretization={saved!r}"
            )
            if has_entry:
                error_msgs.append(f"{message}, or {delete}")
            else:
                warn(message)
        if _ENTRY in self._buffers:
            # PyTorch then copies or assigns the buffer like any other, with the layer's own name.
            beside = entry if isinstance(entry, Tensor) else state_dict.get(f"{prefix}A_log")
            state_dict[prefix + _ENTRY] = _encode(own, beside.device if isinstance(beside, Tensor) else None)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
