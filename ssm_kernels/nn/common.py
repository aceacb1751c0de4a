"""Shared by the mixers: dtypes, the short convolution, the states for decoding."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from .._dtypes import readable, wide_dtype
from .._torchscript import refuse_tracing
from ..choices import ConvActivation, RecomputeName
from ..ops._arguments import is_autocast_enabled
from ..ops._packing import check_same_packing, with_padding
from ..ops.convolution import causal_conv1d_update
from ._operators import CallsOperators
from .checks import check_dtype, check_floating, check_int, check_number, check_shape, check_tensor
from .initialization import initialized, reset_conv
from .naming import class_name
from .weight_decay import NamesNoDecay


def update_state(state: Tensor, dtype: torch.dtype, update: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns ``update(state)``, which modifies a state of any dtype in place and takes a ``readable`` one."""
    converted = readable(state, dtype)
    out = update(converted)
    if converted is not state:
        state.copy_(converted)
    return out


def states_from_cache(
    module: Any, inference_params: Any, batch_size: int, device: torch.device, expected: str, names: Sequence[str]
) -> Sequence[Tensor]:
    """The states ``names`` of a layer in ``inference_params.key_value_memory_dict``; created if absent.

    A caller may have replaced or damaged them. Messages call all of them ``expected``. Layers check the shapes.
    """
    layer = class_name(module)
    refuse_tracing(layer, "inference_params")
    for name in ("seqlen_offset", "key_value_memory_dict"):
        if not hasattr(inference_params, name):
            raise TypeError(f"{layer}: expected inference_params with {name}, got {type(inference_params).__name__}")
    if module.layer_idx is None:
        raise ValueError(f"{layer}: inference_params needs a layer_idx, which this layer was built without")
    cache = inference_params.key_value_memory_dict
    if not isinstance(cache, MutableMapping):
        raise TypeError(f"{layer}: expected inference_params.key_value_memory_dict to be a dict, got {type(cache).__name__}")
    offset = inference_params.seqlen_offset
    if not isinstance(offset, (torch.SymInt, Tensor)):
        check_int(layer, "inference_params.seqlen_offset", offset, low=0)
    if module.layer_idx not in cache:
        cache[module.layer_idx] = module.allocate_inference_cache(batch_size, max_seqlen=0)
    entry, what = cache[module.layer_idx], f"entry {module.layer_idx} of the cache"
    if not isinstance(entry, (tuple, list)) or len(entry) != len(names):
        got = f"{type(entry).__name__} of {len(entry)}" if isinstance(entry, (tuple, list)) else type(entry).__name__
        raise TypeError(f"{layer}: expected {what} to be {expected}, got {got}")
    for name, state in zip(names, entry, strict=True):
        check_tensor(layer, f"{name} of {what}", state)
    for name, state in zip(names, entry, strict=True):
        check_floating(layer, name, state)
        if state.device != device:
            raise RuntimeError(f"{layer}: expected {name} of {what} on {device} (the layer's device), got {state.device}")
    if entry[0].dim() > 0 and entry[0].shape[0] != batch_size:
        raise ValueError(f"{layer}: expected a batch of {entry[0].shape[0]} as in the cache, got {batch_size}")
    return entry


def mark_parameters(mark: str, *parameters: nn.Parameter) -> None:
    """Sets an attribute that training code written for ``mamba_ssm`` looks for."""
    for parameter in parameters:
        setattr(parameter, mark, True)


_linear_forward = nn.Linear.forward


def is_only_a_product(module: nn.Module) -> bool:
    """Whether a call of ``module`` is ``torch.nn.functional.linear`` of its ``weight`` and ``bias``, and nothing sees the call.

    Adapters and quantized layers are other modules, hooks see the call, and FSDP and accelerate replace ``forward``.
    Parametrizations act on ``weight`` and ``bias`` wherever these are read.
    """
    # torch.export and parametrizations derive classes from nn.Linear and leave its forward.
    return isinstance(module, nn.Linear) and type(module).forward is _linear_forward and is_unseen(module)


def is_unseen(module: nn.Module) -> bool:
    """Whether a call of ``module`` is its class's ``forward``, and nothing sees the call."""
    return (
        type(module).__call__ is nn.Module.__call__
        and "forward" not in module.__dict__
        and not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)
        and not _has_any_global_hook()
    )


# Subclasses of Tensor, such as DTensors and quantized weights, have their own products.
PLAIN_TENSORS = (nn.Parameter, Tensor)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether an operator may compute the product of ``module`` itself, forward and backward, from its plain tensors.

    That needs more than :func:`is_only_a_product`: exactly ``nn.Linear``, as parametrizations derive classes from it, and no
    subclass of ``Tensor`` as its weight or bias.
    """
    if type(module) is not nn.Linear:
        return False
    # Not as attributes, whose lookup takes longer than all the rest. What stands in for a parameter is an attribute.
    parameters = module._parameters
    bias = parameters.get("bias")
    return (
        type(parameters.get("weight")) in PLAIN_TENSORS
        and (bias is None or type(bias) in PLAIN_TENSORS)
        and is_only_a_product(module)
    )


def keeps_less(layer: Any) -> bool:
    """Whether a layer with ``recompute`` gives its projections to its operator, if they are plain: where there is a backward.

    Exported programs keep the projections as they are, for tools that quantize or convert them. Tangents, which PyTorch's
    functions support and the operators do not, may be of the projection alone.
    """
    if layer.recompute == "none" or not torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting()
    return forward_ad._current_level < 0


def expanded(layer: str, expand: float, d_model: int) -> int:
    """The inner channels, ``int(expand * d_model)``."""
    check_number(layer, "expand", expand)
    if not 1 <= expand * d_model < math.inf:
        raise ValueError(f"{layer}: expected expand * d_model to be at least 1 and finite, got {expand} * {d_model}")
    return int(expand * d_model)


def short_convolution(
    layer: str,
    channels: int,
    d_conv: int,
    bias: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    bound: float | None = None,
) -> nn.Conv1d:
    """Depthwise convolution over the last ``d_conv`` steps; ``bound`` is that of its initial weights, ``None`` PyTorch's."""
    check_int(layer, "d_conv", d_conv)
    conv = nn.Conv1d(channels, channels, d_conv, groups=channels, padding=d_conv - 1, bias=bias, device=device, dtype=dtype)
    return initialized(conv, functools.partial(reset_conv, bound=bound))


# Hooks that compute a module's weight before each of its calls.
_WEIGHT_HOOKS = (WeightNorm, SpectralNorm, BasePruningMethod)


def conv_parameters(layer: str, conv1d: nn.Module) -> tuple[Tensor, Tensor | None]:
    """The weight, (channels, 1, d_conv), and the bias of a convolution that ``layer`` reads and does not call.

    Parametrizations act on them, and so do hooks that compute the weight: they run here.

    Raises:
        NotImplementedError: an adapter has taken the place of the convolution.
    """
    if not isinstance(conv1d, nn.Conv1d):
        extra = [name for name, _ in conv1d.named_parameters() if name.rpartition(".")[2] not in ("weight", "bias")]
        extra += [name for name, module in conv1d.named_modules() if isinstance(module, nn.Linear | nn.ModuleDict)]
        if extra:
            raise NotImplementedError(
                f"{layer}: expected conv1d without adapters, whose weights the layer would not read, got "
                f"{type(conv1d).__name__} with {extra[0]}: merge the adapter or leave conv1d out of its targets"
            )
    elif conv1d._forward_pre_hooks:
        for hook in conv1d._forward_pre_hooks.values():
            if isinstance(hook, _WEIGHT_HOOKS):
                hook(conv1d, None)
    weight, bias = conv1d.weight, conv1d.bias
    assert isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))
    return weight, bias


def convolve_step(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, activation: ConvActivation | None
) -> Tensor:
    """A convolution of one step, ``x`` (batch, channels), in the autocast dtype; modifies ``conv_state`` in place."""
    if is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return update_state(conv_state, x.dtype, lambda state: causal_conv1d_update(x, state, weight, bias, activation=activation))


class ConvMixer(NamesNoDecay, nn.Module, CallsOperators):
    """A mixer with a short causal convolution, ``conv1d``, before its recurrence, and with states for decoding.

    A derived layer sets ``d_model``, ``d_conv`` and ``layer_idx`` and defines ``_mix``, ``_step`` and ``_state_shape``. Its
    ``conv1d`` holds the convolution's parameters under ``mamba_ssm``'s names and is not called.
    """

    d_model: int
    d_conv: int
    layer_idx: int | None
    conv1d: nn.Conv1d

    def _mix(self, hidden_states: Tensor, conv_state: Tensor | None, ssm_state: Tensor | None) -> tuple[Tensor, Any, Tensor]:
        """Mixes a sequence, from the given states or from zero. Also returns the projected inputs, of which
        ``_conv_inputs`` extracts those of the convolution, and the last state of the recurrence.
        """
        raise NotImplementedError

    def _conv_inputs(self, projected: Any) -> Tensor:
        """Extracts the convolution's inputs, (batch, seqlen, channels), from the second result of ``_mix``: the tensor itself
        unless overridden.
        """
        inputs: Tensor = projected
        return inputs

    def _weight_of_states(self) -> Tensor:
        """A parameter with the device of the states and the dtype of the convolution's state."""
        return self.conv1d.weight

    def _conv_channels(self) -> int:
        """Channels of the convolution; of this rank, where several ranks share them."""
        return self.conv1d.weight.shape[0]

    def step(self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mixes one time step, for decoding. Not differentiable.

        Args:
            hidden_states: (batch, 1, d_model).
            conv_state: the last ``d_conv`` inputs of the convolution, (batch, channels, d_conv), modified in place.
            ssm_state: the state of the recurrence, modified in place. ``allocate_inference_cache`` returns both states.

        Returns:
            ``out``, (batch, 1, d_model), and the two states.

        Raises:
            ValueError: ``hidden_states`` has more than one time step, or a state another shape. Neither state is modified then.
            RuntimeError: a state is not of a floating-point dtype. Neither state is modified then.
            TypeError: an argument is not a tensor.

        Examples:
            >>> import torch
            >>> from ssm_kernels import nn
            >>> layer, x = nn.Mamba(32), torch.randn(2, 10, 32)
            >>> states = layer.allocate_inference_cache(batch_size=2, max_seqlen=10)
            >>> with torch.no_grad():
            ...     steps = [layer.step(x[:, t : t + 1], *states)[0] for t in range(10)]
            >>> torch.allclose(torch.cat(steps, dim=1), layer(x), atol=1e-5)
            True
        """
        self._check_one_step(hidden_states, conv_state, ssm_state)
        with torch.no_grad():  # not as a decorator, which hides the signature from names_layer
            return self._step(hidden_states[:, 0], conv_state, ssm_state)[:, None], conv_state, ssm_state

    def _step(self, u: Tensor, conv_state: Tensor, ssm_state: Tensor) -> Tensor:
        """Mixes one time step, (batch, d_model); modifies both states in place."""
        raise NotImplementedError

    def _zero_state(self, batch_size: int, dtype: torch.dtype | None) -> Tensor:
        """The recurrence's zero state, float32 (float64 in a float64 layer) by default."""
        weight = self._weight_of_states()
        dtype = wide_dtype(weight.dtype) if dtype is None else dtype
        return torch.zeros(batch_size, *self._state_shape(), device=weight.device, dtype=dtype)

    _state_axes: str

    def _state_shape(self) -> tuple[int, ...]:
        """The shape of the recurrence's state, without the batch."""
        raise NotImplementedError

    def _mix_or_step(self, hidden_states: Tensor, inference_params: Any, **of_steps: Any) -> Tensor:
        """Mixes a sequence that begins here or continues from the cache of ``inference_params``.

        ``of_steps``: further arguments of ``_mix`` and ``step``, one value for each step.
        """
        if inference_params is None:
            return self._mix(hidden_states, None, None, **of_steps)[0]
        self._check_is_local()
        conv_state, ssm_state = self._get_states_from_cache(inference_params, hidden_states.shape[0])
        if inference_params.seqlen_offset == 0:
            out, projected, last_state = self._mix(hidden_states, None, None, **of_steps)
        elif hidden_states.shape[1] == 1 and not torch.is_grad_enabled():
            return self.step(hidden_states, conv_state, ssm_state, **of_steps)[0]
        else:
            self._check_conv_state(class_name(self), conv_state, hidden_states.shape[0])
            # Backward reads the initial states of this segment, and the cache is overwritten below.
            states = (conv_state, ssm_state)
            out, projected, last_state = self._mix(
                hidden_states, *(s.clone() if torch.is_grad_enabled() else s for s in states), **of_steps
            )
        inputs = self._conv_inputs(projected).detach()
        last_inputs = inputs[:, -self.d_conv :].transpose(1, 2)
        if inference_params.seqlen_offset == 0:
            conv_state.zero_()
        conv_state.copy_(torch.cat([conv_state.to(inputs.dtype), last_inputs], dim=-1)[..., -self.d_conv :])
        ssm_state.copy_(last_state.detach())
        return out

    def _check_sequences(self, name: str, sequences: Tensor) -> None:
        check_shape(class_name(self), name, sequences, "(batch, seqlen, d_model)", (None, None, self.d_model))

    def _check_one_step(self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor) -> None:
        layer = f"{class_name(self)}.step"
        self._check_is_local()
        for name, state in (("conv_state", conv_state), ("ssm_state", ssm_state)):
            check_tensor(layer, name, state)
        self._check_dtypes(layer, conv_state, ssm_state)
        check_shape(layer, "hidden_states", hidden_states, "(batch, 1, d_model)", (None, 1, self.d_model))
        self._check_conv_state(layer, conv_state, hidden_states.shape[0])
        self._check_ssm_state(layer, ssm_state, hidden_states.shape[0])

    def _check_dtypes(self, layer: str, conv_state: Tensor, ssm_state: Tensor) -> None:
        for name, state in (("conv_state", conv_state), ("ssm_state", ssm_state)):
            if not state.is_floating_point():
                raise RuntimeError(f"{layer}: expected {name} of a floating-point dtype, got {state.dtype}")

    def _check_conv_state(self, layer: str, conv_state: Tensor, batch_size: int) -> None:
        expected = [batch_size, self._conv_channels(), self.d_conv]
        if [*conv_state.shape] != expected:
            raise ValueError(
                f"{layer}: expected conv_state of shape (batch, channels, d_conv) = {expected}, got {list(conv_state.shape)}"
            )

    def _check_ssm_state(self, layer: str, ssm_state: Tensor, batch_size: int) -> None:
        expected = [batch_size, *self._state_shape()]
        if [*ssm_state.shape] != expected:
            raise ValueError(
                f"{layer}: expected ssm_state of shape {self._state_axes} = {expected}, got {list(ssm_state.shape)}"
            )

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns zero states for :meth:`step`: ``conv_state``, (batch, channels of the convolution, d_conv), and
        ``ssm_state``.

        Args:
            batch_size: sequences decoded together.
            max_seqlen: ignored, because the states do not grow; for callers written for ``mamba_ssm``.
            dtype: dtype of both states, any floating-point one, whatever the layer's. By default ``conv_state`` has the
                layer's dtype and ``ssm_state`` is float32 (float64 in a float64 layer), so that steps lose no precision: a
                narrower state is rounded after every step. Steps update the default and, in an fp16 or bf16 layer, states
                of the layer's dtype in place; other dtypes take a copy each way.
            kwargs: ignored.

        Raises:
            ValueError: ``batch_size`` is negative, or ``dtype`` is not a floating-point dtype.
            TypeError: ``batch_size`` is not an int, or ``dtype`` not a dtype.

        Examples:
            >>> import torch
            >>> from ssm_kernels import nn
            >>> conv_state, ssm_state = nn.Mamba(32).allocate_inference_cache(batch_size=2, max_seqlen=10)
            >>> conv_state.shape, ssm_state.shape
            (torch.Size([2, 64, 4]), torch.Size([2, 64, 16]))
        """
        name = f"{class_name(self)}.allocate_inference_cache"
        check_int(name, "batch_size", batch_size, low=0)
        check_dtype(name, dtype)
        weight = self._weight_of_states()
        conv_dtype = weight.dtype if dtype is None else dtype
        conv_state = torch.zeros(batch_size, self._conv_channels(), self.d_conv, device=weight.device, dtype=conv_dtype)
        return conv_state, self._zero_state(batch_size, dtype)

    def _conv_parameters(self) -> tuple[Tensor, Tensor | None]:
        """The weight, (channels, d_conv), and the bias."""
        weight, bias = conv_parameters(class_name(self), self.conv1d)
        return weight.squeeze(1), bias

    def _initial_state(self, conv_state: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """The convolution's initial state in ``dtype``: a decoding state without its oldest step."""
        return None if conv_state is None else conv_state[..., 1:].to(dtype)

    def _convolve_step(self, x: Tensor, conv_state: Tensor) -> Tensor:
        """Convolution and activation of one step, ``x`` (batch, channels); modifies ``conv_state`` in place."""
        return convolve_step(x, conv_state, *self._conv_parameters(), "silu")

    def _get_states_from_cache(
        self, inference_params: Any, batch_size: int, initialize_states: bool = False
    ) -> tuple[Tensor, Tensor]:
        """This layer's states in ``inference_params.key_value_memory_dict``; created if absent, cleared on request."""
        expected, names = "a pair of conv_state and ssm_state", ("conv_state", "ssm_state")
        device = self._weight_of_states().device
        conv_state, ssm_state = states_from_cache(self, inference_params, batch_size, device, expected, names)
        self._check_conv_state(class_name(self), conv_state, batch_size)
        self._check_ssm_state(class_name(self), ssm_state, batch_size)
        if initialize_states:
            conv_state.zero_()
            ssm_state.zero_()
        return conv_state, ssm_state


class PackedMixer(ConvMixer):
    """A :class:`ConvMixer` for several sequences in a row, by ``seq_idx`` or by ``cu_seqlens``."""

    # A class attribute, because layers that earlier versions pickled have no value of their own.
    recompute: RecomputeName = "cheap"

    def _mix(
        self,
        hidden_states: Tensor,
        conv_state: Tensor | None,
        ssm_state: Tensor | None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Any, Tensor]:
        """Mixes sequences, from the given states or from zero. Also returns the projected inputs, of which
        ``_conv_inputs`` extracts those of the convolution, and the last states of the recurrence.
        """
        raise NotImplementedError

    def _mix_sequences(
        self,
        hidden_states: Tensor,
        seq_idx: Tensor | None,
        cu_seqlens: Tensor | None,
        inference_params: Any,
        **of_steps: Any,
    ) -> Tensor:
        """As ``_mix_or_step``, of several sequences in a row if ``seq_idx`` or ``cu_seqlens`` is given."""
        if seq_idx is None and cu_seqlens is None:
            return self._mix_or_step(hidden_states, inference_params, **of_steps)
        if inference_params is not None and cu_seqlens is None:
            raise ValueError(
                f"{class_name(self)}: expected no inference_params with seq_idx alone: the cache has one state per row or, "
                "with cu_seqlens, per sequence"
            )
        self._check_packed(hidden_states, seq_idx, cu_seqlens)
        if inference_params is None or cu_seqlens is None:
            return self._mix(hidden_states, None, None, seq_idx, cu_seqlens, **of_steps)[0]
        if seq_idx is not None:
            check_same_packing(class_name(self), seq_idx, cu_seqlens)
        return self._mix_packed(hidden_states, cu_seqlens, inference_params, **of_steps)

    def _mix_packed(self, u: Tensor, cu_seqlens: Tensor, inference_params: Any, **of_steps: Any) -> Tensor:
        """Mixes packed sequences that begin here or continue from the cache, which has a row for each of them."""
        self._check_is_local()
        if u.shape[0] != 1 or cu_seqlens.numel() == 0:
            return self._mix(u, None, None, None, cu_seqlens, **of_steps)[0]  # raises
        conv_state, ssm_state = self._get_states_from_cache(inference_params, cu_seqlens.shape[0] - 1)
        ends = with_padding(cu_seqlens, u.shape[1])
        if inference_params.seqlen_offset == 0:
            out, projected, last_states = self._mix(u, None, None, None, ends, **of_steps)
            conv_state.zero_()
        else:
            # The padding's states are the last. A copy, because the cache is overwritten below and backward reads them.
            first_states = [torch.cat([s, s.new_zeros(1, *s.shape[1:])]) for s in (conv_state, ssm_state)]
            out, projected, last_states = self._mix(u, first_states[0], first_states[1], None, ends, **of_steps)
        conv_state.copy_(self._last_conv_inputs(conv_state, self._conv_inputs(projected)[0].detach(), cu_seqlens.long()))
        ssm_state.copy_(last_states[:-1].detach())
        return out

    def _last_conv_inputs(self, conv_state: Tensor, inputs: Tensor, cu_seqlens: Tensor) -> Tensor:
        """The last ``d_conv`` inputs of each packed sequence, those before ``inputs`` (total, channels) out of ``conv_state``.

        The host does not wait for the values of ``cu_seqlens``.
        """
        if inputs.shape[0] == 0:
            return conv_state
        begins, ends = cu_seqlens[:-1, None], cu_seqlens[1:, None]
        places = ends - self.d_conv + torch.arange(self.d_conv, device=cu_seqlens.device)  # (sequences, d_conv)
        new = inputs[places.clamp(0, inputs.shape[0] - 1)].transpose(1, 2)
        # Where a sequence has fewer steps, the cached inputs move up.
        cached = (places - begins + self.d_conv).clamp(0, self.d_conv - 1)[:, None].expand(conv_state.shape)
        return torch.where((places >= begins)[:, None], new, conv_state.gather(2, cached).to(new.dtype))

    def _check_packed_tensors(self, seq_idx: Tensor | None, cu_seqlens: Tensor | None) -> None:
        for name, value in (("seq_idx", seq_idx), ("cu_seqlens", cu_seqlens)):
            if value is not None:
                check_tensor(class_name(self), name, value)

    def _check_packed(self, hidden_states: Tensor, seq_idx: Tensor | None, cu_seqlens: Tensor | None) -> None:
        layer = class_name(self)
        if seq_idx is not None and seq_idx.shape != hidden_states.shape[:2]:
            expected = [*hidden_states.shape[:2]]
            raise ValueError(f"{layer}: expected seq_idx of shape (batch, seqlen) = {expected}, got {[*seq_idx.shape]}")
        if cu_seqlens is not None:
            if cu_seqlens.dim() != 1:
                raise ValueError(f"{layer}: expected cu_seqlens of shape (sequences + 1,), got {[*cu_seqlens.shape]}")
            if hidden_states.shape[0] != 1:
                raise ValueError(f"{layer}: expected a batch of 1 with cu_seqlens, got {hidden_states.shape[0]}")
            if cu_seqlens.device != hidden_states.device:
                raise RuntimeError(f"{layer}: expected cu_seqlens on {hidden_states.device}, got {cu_seqlens.device}")


class SequenceMixer(PackedMixer):
    """A :class:`PackedMixer` with the call of ``mamba_ssm``'s ``Mamba``, and packed sequences by keyword."""

    def forward(
        self,
        hidden_states: Tensor,
        inference_params: Any = None,
        *,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Mixes a sequence, or several packed one after another.

        Args:
            hidden_states: (batch, seqlen, channels of the layer), any strides.
            inference_params: ``None``, or an object with ``seqlen_offset`` (steps done so far) and ``key_value_memory_dict``
                (a dict, in which this layer keeps its states under ``layer_idx``). With offset 0 the sequence starts anew;
                later calls continue it, by one step or by several: under ``torch.no_grad()`` one step is :meth:`step`. The
                states carry no gradient. With ``cu_seqlens`` the cache has a row for each packed sequence, so that a batch of
                prompts of unequal lengths goes through one call and is then decoded as (sequences, 1, d_model). Steps after
                ``cu_seqlens[-1]`` are then padding, which no sequence and no state sees, and ``seq_idx`` must have the same
                packing: the CPU checks this unless it compiles, CUDA does not. Not together with ``seq_idx`` alone.
            seq_idx: (batch, seqlen), int32 or int64: a new sequence begins wherever it changes. Steps with a negative number
                are padding, whose convolution is zero; what they hold must be finite.
            cu_seqlens: (sequences + 1,), int32 or int64, for a batch of 1: sequence ``i`` begins at ``cu_seqlens[i]`` and ends
                before ``cu_seqlens[i + 1]``. Together with ``seq_idx`` sequences begin where either says so.

        Packed sequences are independent, in the convolution and in the state.

        Returns:
            Shape of ``hidden_states``.

        Raises:
            ValueError: a shape is not as above, the layer has no ``layer_idx`` for ``inference_params``, or arguments are given
                together that exclude each other.
            TypeError: an argument is not a tensor, or ``inference_params`` lacks an attribute.

        Examples:
            >>> from types import SimpleNamespace
            >>> import torch
            >>> from ssm_kernels import nn
            >>> layer, x = nn.Mamba(32, layer_idx=0), torch.randn(2, 10, 32)
            >>> cache = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
            >>> with torch.no_grad():
            ...     first = layer(x[:, :7], inference_params=cache)  # a prompt fills the cache
            ...     cache.seqlen_offset = 7
            ...     rest = layer(x[:, 7:], inference_params=cache)  # continues from it
            ...     torch.allclose(torch.cat([first, rest], dim=1), layer(x), atol=1e-5)
            True
            >>> cu_seqlens = torch.tensor([0, 4, 10], dtype=torch.int32)  # two packed sequences
            >>> layer(x[:1], cu_seqlens=cu_seqlens).shape
            torch.Size([1, 10, 32])
        """
        self._check_packed_tensors(seq_idx, cu_seqlens)
        self._check_sequences("hidden_states", hidden_states)
        return self._mix_sequences(hidden_states, seq_idx, cu_seqlens, inference_params)
