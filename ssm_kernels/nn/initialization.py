"""Initialization by PyTorch's contract: ``reset_parameters`` of a module draws its own parameters, and those alone.

``for module in model.modules(): module.reset_parameters()``, FSDP1's materialization and ``model.apply`` visit parents and
children in different orders. Each order gives the same distribution only if no parent draws the parameters of a child. Where a
layer wants another distribution than ``nn.Linear`` has, the linear module therefore gets an :class:`Initialization`.

Every function here takes parameters of FSDP2, which are DTensors. Their numbers depend on the seed alone, not on the number of
ranks.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.nn as nn
from torch import Tensor

from .._dtypes import wide_dtype
from ..choices import StepInitialization
from .naming import class_name

__all__ = [
    "Initialization",
    "fill_",
    "init_dt_bias",
    "initialized",
    "inverse_softplus",
    "linear",
    "normal_",
    "reset_all",
    "reset_conv",
    "reset_embedding",
    "reset_linear",
    "reset_step_projection",
    "uniform_",
    "uniform_rows_",
]

# Numbers that are drawn with one seed.
_BLOCK = 2**18

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def _nothing() -> None:
    return None


class Initialization:
    """``module.reset_parameters`` of one module, instead of the method of its class.

    The module keeps its class, because code for quantization and adapters compares it with ``nn.Linear``. Copies and pickles of
    the module have their own object.

    Args:
        module: has this object as its attribute ``reset_parameters``.
        draw: initializes the module's parameters; a function of a Python module, for pickle.
    """

    def __init__(self, module: nn.Module, draw: Callable[[Any], None]) -> None:
        # A strong reference would be a cycle, which keeps the parameters' memory until the garbage collector runs.
        self._module: Callable[[], nn.Module | None] = weakref.ref(module)
        self.draw = draw

    def __call__(self) -> None:
        module = self._module()
        if module is None:
            raise ReferenceError("reset_parameters: expected a module that exists")
        with torch.no_grad():
            self.draw(module)

    def __getstate__(self) -> tuple[Any, ...]:
        return self._module(), self.draw

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        module, self.draw = state
        self._module = _nothing if module is None else weakref.ref(module)


def initialized(module: ModuleT, draw: Callable[[Any], None]) -> ModuleT:
    """Gives ``module`` an :class:`Initialization`; leaves its parameters as they are."""
    module.__dict__["reset_parameters"] = Initialization(module, draw)
    return module


def reset_all(model: nn.Module, name: str) -> None:
    """Calls ``reset_parameters`` of every module of ``model`` that has this method, of children before their parents.

    As in constructors the parent has the last word on a child's parameters: ``nn.MultiheadAttention`` relies on it.

    Args:
        name: the caller's, for messages.

    Raises:
        RuntimeError: a module's own parameters would keep their values. If it has no ``reset_parameters``, holds adapters of
            peft or has parameters of integers, nothing was changed. Otherwise its ``reset_parameters`` does not write them, as
            happens below a weight norm or in a subclass that adds parameters; all others have new values.
    """
    modules = [*model.named_modules()][::-1]
    resets = [(path, module, _reset_of(module, path or "the model", name)) for path, module in modules]
    kept: list[tuple[str, nn.Module, list[str]]] = []
    # A parameter of several modules needs one that initializes it.
    written: set[int] = set()
    for path, module, reset in resets:
        if reset is not None:
            names = _left_by(module, reset)
            written.update(id(value) for each, value in module._parameters.items() if each not in names)
            kept.append((path or "the model", module, names))
    # Only here, because the ranks of a sharded model draw together.
    own = {id(module._parameters[each]) for _, module, names in kept for each in names} - written
    unset = _left_on_any_rank([each for _, module, _ in kept for each in module.parameters(recurse=False)], own)
    left = []
    for path, module, _ in reversed(kept):
        if names := [each for each, value in module._parameters.items() if id(value) in unset]:
            left.append(f"{path} ({class_name(module)}: {', '.join(names)})")
    if left:
        raise RuntimeError(
            f"{name}: expected reset_parameters of every module to initialize all of its parameters, got some that it leaves "
            f"as they are, in {'; '.join(left)}: {_REMEDY}"
        )


def _left_on_any_rank(parameters: list[nn.Parameter], left: set[int]) -> set[int]:
    """The ids of ``left``, and of the DTensors that another rank of their mesh has left.

    A rank without a part of them sees nothing. Ranks that raised alone would let it wait in its next collective.
    """
    distributed: dict[Any, list[Any]] = {}
    for parameter in parameters:
        if is_distributed(parameter):
            mesh = cast(Any, parameter).device_mesh
            distributed.setdefault(mesh, []).append(parameter)
    found = set(left)
    for mesh, own in distributed.items():
        if mesh.get_coordinate() is None:
            continue
        import torch.distributed as dist

        marks = torch.tensor([id(parameter) in left for parameter in own], dtype=torch.int32, device=mesh.device_type)
        for dimension in range(mesh.ndim):
            dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=mesh.get_group(dimension))
        found.update(id(parameter) for parameter, mark in zip(own, marks.tolist(), strict=True) if mark)
    return found


_REMEDY = (
    "initialize the model before you change it, as by weight norm, quantization or adapters, or give the module's class a "
    "reset_parameters that initializes all parameters of its own"
)


def _reset_of(module: nn.Module, path: str, name: str) -> Callable[[], Any] | None:
    """``reset_parameters`` of the module itself, or None if it has neither the method nor parameters."""
    own = [*module.parameters(recurse=False)]
    # Wrappers, as of torch.compile and of checkpointing, forward every attribute to the module inside, which has its own turn.
    has = {attribute for attribute in _RESETS if attribute in module.__dict__ or hasattr(type(module), attribute)}
    # The method with an underscore is nn.MultiheadAttention's; containers such as nn.Transformer have it, too.
    attribute = "reset_parameters" if "reset_parameters" in has else "_reset_parameters" if own and has else None
    reset = getattr(module, attribute) if attribute else None
    got = None
    if own and not callable(reset):
        got = f"{class_name(module)}, whose parameters nothing initializes"
    elif hasattr(type(module), "adapter_layer_names"):
        got = f"{class_name(module)}, a layer of peft, whose adapters do not start as nn.Linear does"
    elif _is_flattened(module):
        got = f"{class_name(module)}, whose weight FSDP1 has flattened"
    elif not all(parameter.is_floating_point() or parameter.is_complex() for parameter in own):
        got = f"{class_name(module)} with parameters of integers"
    if got is not None:
        raise RuntimeError(f"{name}: expected {path} to have reset_parameters for its parameters, got {got}: {_REMEDY}")
    return reset if callable(reset) else None


_RESETS = ("reset_parameters", "_reset_parameters")


def _is_flattened(module: nn.Module) -> bool:
    """Whether FSDP1 has made the weight a part of a vector: it calls ``reset_parameters`` before, of a model on meta."""
    weight = getattr(module, "weight", None)
    is_matrix = isinstance(module, (nn.Linear, nn.Embedding, nn.Conv1d))
    return is_matrix and getattr(weight, "_fsdp_flattened", False) and cast(Tensor, weight).dim() == 1


@torch.no_grad()
def _left_by(module: nn.Module, reset: Callable[[], Any]) -> list[str]:
    """Calls ``reset``; returns the names of the module's own parameters that it did not write, which keep their values.

    NaN in one element of each parameter shows it, also where a method writes through ``parameter.data``.
    """
    marked = []
    for name, parameter in module._parameters.items():
        local: Any = parameter
        if parameter is not None and is_distributed(parameter):
            local = local.to_local()
        if type(local) in (Tensor, nn.Parameter) and not local.is_meta and local.numel():
            first = (0,) * local.dim()
            marked.append((name, parameter, local, first, local[first].clone()))
            local[first] = math.nan
    left = []
    try:
        reset()
    finally:
        for name, parameter, local, first, value in marked:
            if module._parameters.get(name) is parameter and bool(local[first].isnan()):
                local[first] = value
                left.append(name)
    return left


def is_distributed(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor; without an import of ``torch.distributed.tensor``."""
    return hasattr(tensor, "device_mesh")


def _agreed_seed(mesh: Any) -> int:
    """A seed from the random numbers of the mesh's first rank."""
    import torch.distributed as dist

    seed = torch.randint(2**62, (1,), device="cpu").to(mesh.device_type)
    for dimension in range(mesh.ndim):
        dist.broadcast(seed, group_src=0, group=mesh.get_group(dimension))
    return int(seed)


def _own_part(tensor: Tensor) -> tuple[slice, ...]:
    """The place in the whole tensor of this rank's part of a DTensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    parameter: Any = tensor
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def _draw_(tensor: Tensor, draw: Callable[[Tensor, torch.Generator | None], Any]) -> None:
    """Draws ``tensor`` with PyTorch's generator; of a DTensor this rank's part, with a seed on which the ranks agree.

    Ranks that were seeded alike must not draw equal shards, and those that were not must draw equal copies. Blocks of rows have
    seeds of their own, so that the numbers do not depend on how many ranks there are.
    """
    if not is_distributed(tensor):
        draw(tensor, None)
        return
    parameter: Any = tensor
    local = parameter.to_local()
    if local.is_meta:
        return
    seed, generator = _agreed_seed(parameter.device_mesh), torch.Generator(local.device)
    own, *columns = _own_part(tensor)
    rows = max(1, _BLOCK // max(1, tensor.shape[1:].numel()))
    for block in range(own.start // rows, -(-own.stop // rows)):
        first, last = block * rows, min((block + 1) * rows, tensor.shape[0])
        values = local.new_empty(last - first, *tensor.shape[1:])
        draw(values, generator.manual_seed(seed + block))
        begin, end = max(first, own.start), min(last, own.stop)
        place = (slice(begin - first, end - first), *columns)
        local[begin - own.start : end - own.start].copy_(values[place])


@torch.no_grad()
def uniform_(tensor: Tensor, low: float, high: float) -> Tensor:
    """Draws ``tensor`` uniformly from [``low``, ``high``]."""
    _draw_(tensor, lambda values, generator: values.uniform_(low, high, generator=generator))
    return tensor


@torch.no_grad()
def normal_(tensor: Tensor, std: float) -> Tensor:
    """Draws ``tensor`` from a normal distribution of mean 0 and standard deviation ``std``."""
    _draw_(tensor, lambda values, generator: values.normal_(0.0, std, generator=generator))
    return tensor


@torch.no_grad()
def fill_(tensor: Tensor, value: Tensor) -> Tensor:
    """Copies ``value``, which broadcasts to the shape of ``tensor``; every rank takes its part of it."""
    if tensor.is_meta:
        return tensor
    if is_distributed(tensor):
        parameter: Any = tensor
        parameter.to_local().copy_(value.expand(tensor.shape)[_own_part(tensor)])
        return tensor
    return tensor.copy_(value)


@torch.no_grad()
def uniform_rows_(
    tensor: Tensor,
    rows: slice,
    low: float,
    high: float,
    transform: Callable[[Tensor], Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Draws some rows of a vector uniformly from [``low``, ``high``], in ``dtype``, and transforms them.

    A slice of a DTensor is a copy. All ranks therefore draw all of these rows, with equal numbers, and each takes its part.
    """
    if tensor.is_meta:
        return
    parameter: Any = tensor
    local, generator, whole = tensor, None, tensor
    if is_distributed(tensor):
        local = parameter.to_local()
        generator = torch.Generator(local.device).manual_seed(_agreed_seed(parameter.device_mesh))
        whole = torch.zeros(tensor.shape, dtype=tensor.dtype, device=local.device)
    target = whole[rows]
    values = torch.empty_like(target, dtype=dtype).uniform_(low, high, generator=generator)
    target.copy_(values if transform is None else transform(values))
    if whole is not tensor:
        is_drawn = torch.zeros(tensor.shape, dtype=torch.bool, device=local.device)
        is_drawn[rows] = True
        own = _own_part(tensor)
        local.copy_(torch.where(is_drawn[own], whole[own], local))


def inverse_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))


def _bias_of_steps(log_dt: Tensor, dt_init_floor: float) -> Tensor:
    return inverse_softplus(log_dt.exp().clamp(min=dt_init_floor))


def init_dt_bias(bias: Tensor, dt_min: float, dt_max: float, dt_init_floor: float) -> None:
    """Makes ``softplus(bias)`` log-uniform in [``dt_min``, ``dt_max``], but at least ``dt_init_floor``."""
    wide = wide_dtype(bias.dtype)
    transform = partial(_bias_of_steps, dt_init_floor=dt_init_floor)
    uniform_rows_(bias, slice(None), math.log(dt_min), math.log(dt_max), transform, wide)


def _linear_bound(fan_in: int) -> float:
    """The bound of ``nn.init.kaiming_uniform_(a=sqrt(5))``, with its rounding."""
    return math.sqrt(3.0) * (math.sqrt(2.0 / (1 + math.sqrt(5) ** 2)) / math.sqrt(fan_in))


def reset_linear(module: nn.Linear, divisor: float = 1.0, zero_bias: bool = False) -> None:
    """Draws like ``nn.Linear``, divides the weight by ``divisor`` and, if asked, makes the bias zero."""
    bound = _linear_bound(module.in_features)
    uniform_(module.weight, -bound, bound)
    if divisor != 1:
        module.weight.div_(divisor)
    if module.bias is None:
        return
    if zero_bias:
        module.bias.zero_()
    else:
        uniform_(module.bias, -1 / math.sqrt(module.in_features), 1 / math.sqrt(module.in_features))


def linear(inputs: int, outputs: int, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Linear:
    """An ``nn.Linear`` whose ``reset_parameters`` draws the same numbers on any number of ranks."""
    return initialized(nn.Linear(inputs, outputs, bias=bias, device=device, dtype=dtype), reset_linear)


def reset_step_projection(
    module: nn.Linear, dt_init: StepInitialization, bound: float, dt_min: float, dt_max: float, dt_init_floor: float
) -> None:
    """Draws the projection to step sizes: weights up to ``bound``, and a bias of the step sizes at an input of zero."""
    if dt_init == "constant":
        module.weight.fill_(bound)
    else:
        uniform_(module.weight, -bound, bound)
    init_dt_bias(module.bias, dt_min, dt_max, dt_init_floor)


def reset_conv(conv: nn.Conv1d, bound: float | None = None) -> None:
    """Draws like ``nn.Conv1d``, or the weight uniformly up to ``bound``."""
    fan_in = conv.in_channels // conv.groups * conv.kernel_size[0]
    of_weight = _linear_bound(fan_in) if bound is None else bound
    uniform_(conv.weight, -of_weight, of_weight)
    if conv.bias is not None:
        uniform_(conv.bias, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))


def reset_embedding(embedding: nn.Embedding, std: float) -> None:
    """Draws the weight of ``embedding`` from a normal distribution of mean 0 and standard deviation ``std``, all rows alike.

    ``nn.Embedding`` itself draws with a standard deviation of 1 and keeps the row of ``padding_idx`` at zero.
    """
    normal_(embedding.weight, std)
