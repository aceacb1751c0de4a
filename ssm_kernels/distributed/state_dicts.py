"""State dicts of models and optimizers whose entries do not depend on how the model is distributed.

A distributed checkpoint of these entries, or a file of them, loads on any number of ranks, with tensor parallelism, FSDP2,
both or neither. PyTorch's own functions give the same for models, whose ``state_dict`` joins the parts of a parameter. An
optimizer keeps a state for each part and does not know of the whole; the functions of this module join and split these states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor

from ._sharding import ShardedLinear, join, placed_like, split

__all__ = ["get_state_dict", "set_state_dict"]

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


@dataclasses.dataclass(frozen=True)
class _FusedParameter:
    """A parameter that the model holds in parts: its name, their names and DTensors, and the axis along which they follow."""

    name: str
    parts: list[str]
    parameters: list[Tensor]
    dim: int

    @property
    def sizes(self) -> list[int]:
        return [parameter.shape[self.dim] for parameter in self.parameters]

    def fits(self, value: Any) -> bool:
        """Whether ``value`` has the shape of the whole parameter."""
        shape = [*self.parameters[0].shape]
        shape[self.dim] = sum(self.sizes)
        return isinstance(value, Tensor) and [*value.shape] == shape

    def join(self, values: list[Any]) -> Any:
        """Joins a value of each part; numbers, such as the count of steps, are the same for all of them."""
        shapes = [parameter.shape for parameter in self.parameters]
        if [getattr(value, "shape", None) for value in values] == shapes:
            return join(values, self.dim)
        self._check_number(values[0])
        return values[0]

    def split(self, value: Any) -> list[Any]:
        if self.fits(value):
            return [*split(value, self.sizes, self.dim)]
        self._check_number(value)
        return [value.clone() if isinstance(value, Tensor) else value for _ in self.parts]

    def _check_number(self, value: Any) -> None:
        if isinstance(value, Tensor) and value.ndim > 0:
            raise ValueError(
                f"state_dict: expected optimizer states of {self.name} in its shape or as one number, got a tensor of shape "
                f"{[*value.shape]}"
            )


def _names(model: nn.Module, name: str) -> list[str]:
    """The names that PyTorch gives a parameter in a checkpoint: without those of the modules that only wrap another, such as
    DistributedDataParallel. Several if the parameter holds others, as with FSDP1.
    """
    return sorted(torch_state_dict._get_fqns(model, name))


def _fused_parameters(model: nn.Module) -> list[_FusedParameter]:
    found = []
    for module_name, module in model.named_modules():
        if isinstance(module, ShardedLinear):
            prefix = f"{module_name}." if module_name else ""
            for name, parts, dim in module.fused_parameters():
                parameters = [cast(Tensor, module._parameters[part]) for part in parts]
                names = [saved for part in parts for saved in _names(model, prefix + part)]
                found.append(_FusedParameter(names[0].removesuffix(parts[0]) + name, names, parameters, dim))
    return found


def _join_keys(state: dict[str, Any], whole: _FusedParameter, before: str = "", after: str = "") -> None:
    keys = [f"{before}{part}{after}" for part in whole.parts]
    if keys[0] in state:
        state[f"{before}{whole.name}{after}"] = whole.join([state.pop(key) for key in keys])


def _split_key(state: dict[str, Any], whole: _FusedParameter, before: str = "", after: str = "") -> None:
    key = f"{before}{whole.name}{after}"
    if key in state:
        pieces = whole.split(state.pop(key))
        state.update(zip((f"{before}{part}{after}" for part in whole.parts), pieces, strict=True))


def _is_flat(state: dict[str, Any]) -> bool:
    return "param_groups" not in state


def _suffixes(state: dict[str, Any], prefix: str) -> list[str]:
    return [key[len(prefix) :] for key in state if key.startswith(f"{prefix}.")]


def _joined_optimizer(state: dict[str, Any], fused: list[_FusedParameter]) -> dict[str, Any]:
    """An optimizer's state dict with the entries of whole parameters."""
    if not state:
        return state
    if _is_flat(state):
        state = dict(state)
        for whole in fused:
            for kind in ("state.", "param_groups."):
                for suffix in _suffixes(state, kind + whole.parts[0]):
                    _join_keys(state, whole, kind, suffix)
        return state
    states = dict(state["state"])
    groups = [dict(group, params=[*group["params"]]) for group in state["param_groups"]]
    for whole in fused:
        if whole.parts[0] in states:
            values = [states.pop(part) for part in whole.parts]
            states[whole.name] = {key: whole.join([value[key] for value in values]) for key in values[0]}
        for group in groups:
            if whole.parts[0] in group["params"]:
                missing = [part for part in whole.parts if part not in group["params"]]
                if missing:
                    raise ValueError(
                        f"get_state_dict: expected the parts of {whole.name} in one group of the optimizer, got one without "
                        f"{', '.join(missing)}"
                    )
                group["params"][group["params"].index(whole.parts[0])] = whole.name
                group["params"] = [name for name in group["params"] if name not in whole.parts]
    return state | {"state": states, "param_groups": groups}


def _split_optimizer(state: dict[str, Any], fused: list[_FusedParameter]) -> dict[str, Any]:
    """The inverse of :func:`_joined_optimizer`."""
    if not state:
        return state
    if _is_flat(state):
        state = dict(state)
        for whole in fused:
            for kind in ("state.", "param_groups."):
                for suffix in _suffixes(state, kind + whole.name):
                    _split_key(state, whole, kind, suffix)
        return state
    states = {name: dict(of_parameter) for name, of_parameter in state["state"].items()}
    groups = [dict(group, params=[*group["params"]]) for group in state["param_groups"]]
    for whole in fused:
        if whole.name in states:
            pieces = {key: whole.split(value) for key, value in states.pop(whole.name).items()}
            for place, part in enumerate(whole.parts):
                states[part] = {key: values[place] for key, values in pieces.items()}
        for group in groups:
            if whole.name in group["params"]:
                place = group["params"].index(whole.name)
                group["params"][place : place + 1] = whole.parts
    return state | {"state": states, "param_groups": groups}


def _place(state: dict[str, Any], parameters: dict[str, Any], of_optimizer: bool = False) -> None:
    """Gives tensors of a parameter's shape its placements. With ``of_optimizer`` keys are ``state.<parameter>.<name>``."""
    for key, value in state.items():
        parameter = parameters.get(key.removeprefix("state.").rpartition(".")[0] if of_optimizer else key)
        if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape:
            state[key] = placed_like(value, parameter)


def get_state_dict(
    model: nn.Module, optimizers: Optimizers, *, options: StateDictOptions | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dicts of a model and its optimizers, with the names and shapes of the undistributed model.

    ``torch.distributed.checkpoint.state_dict.get_state_dict`` for models with and without :class:`TensorParallel`, FSDP2 and
    DistributedDataParallel. Every rank calls it. Values are DTensors, or with ``StateDictOptions(full_state_dict=True)`` whole
    tensors. As in PyTorch's function, names leave out modules that only wrap another: those of DistributedDataParallel,
    ``torch.compile`` and ``checkpoint_wrapper``.

    Args:
        model: the model.
        optimizers: one or several, of the model's parameters. Their states are tensors of a parameter's shape, or numbers.
        options: PyTorch's.

    Returns:
        ``(model_state_dict, optimizer_state_dict)``, for ``torch.distributed.checkpoint.save`` and ``load``.

    Raises:
        ValueError: an optimizer's state has another shape, or its groups divide a parameter that the model holds in parts.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from ssm_kernels import distributed
        >>> from ssm_kernels.models import MambaConfig, MambaLM
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # no arguments under torchrun
        >>> model = MambaLM(MambaConfig(d_model=32, n_layer=1, vocab_size=100))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model_state, optimizer_state = distributed.get_state_dict(model, optimizer)
        >>> model_state["backbone.layers.0.mixer.A_log"].shape  # whole, whatever holds it
        torch.Size([64, 16])
        >>> dist.destroy_process_group()
    """
    model_state, optimizer_state = torch_state_dict.get_state_dict(model, optimizers, options=options)
    return dict(model_state), _joined_optimizer(cast(dict[str, Any], optimizer_state), _fused_parameters(model))


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: dict[str, Any],
    optim_state_dict: dict[str, Any],
    options: StateDictOptions | None = None,
) -> Any:
    """Loads what :func:`get_state_dict` returned, for this or another distribution of the model. Every rank calls it.

    Args:
        model: the model.
        optimizers: one or several, of the model's parameters.
        model_state_dict: DTensors or, with ``StateDictOptions(full_state_dict=True)``, whole tensors; with
            ``broadcast_from_rank0`` too only rank 0 has them.
        optim_state_dict: as ``model_state_dict``.
        options: PyTorch's.

    Returns:
        The missing and the unexpected keys, as ``load_state_dict``.

    Raises:
        RuntimeError: the state dicts do not fit.
        ValueError: an optimizer's state has neither the shape of its parameter nor is it one number.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from ssm_kernels import distributed
        >>> from ssm_kernels.models import MambaConfig, MambaLM
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # no arguments under torchrun
        >>> model = MambaLM(MambaConfig(d_model=32, n_layer=1, vocab_size=100))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model_state, optimizer_state = distributed.get_state_dict(model, optimizer)
        >>> distributed.set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        <All keys matched successfully>
        >>> dist.destroy_process_group()
    """
    fused, model_state = _fused_parameters(model), dict(model_state_dict)
    for whole in fused:
        if whole.fits(model_state.get(whole.name)):
            _split_key(model_state, whole)
    optimizer_state = _split_optimizer(optim_state_dict, fused)
    if options is None or not options.broadcast_from_rank0:
        named = model.named_parameters(remove_duplicate=False)
        parameters = {saved: parameter for name, parameter in named for saved in _names(model, name)}
        _place(model_state, parameters)
        if _is_flat(optimizer_state):
            _place(optimizer_state, parameters, of_optimizer=True)
        for name, state in optimizer_state.get("state", {}).items():
            _place(state, dict.fromkeys(state, parameters.get(name)))
        options = dataclasses.replace(options or StateDictOptions(), full_state_dict=False)
    # PyTorch's set_state_dict takes an empty model_state_dict, which ranks other than 0 have, as none.
    torch_state_dict.set_optimizer_state_dict(model, optimizers, cast(Any, optimizer_state), options=options)
    return torch_state_dict.set_model_state_dict(model, model_state, options=options)
