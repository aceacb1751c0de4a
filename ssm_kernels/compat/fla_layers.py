"""``fla.layers.mamba3`` of flash-linear-attention (0.6): its Mamba-3, on any device, with our kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..nn import Mamba3 as OwnMamba3
from ..nn.checks import check_bools, check_not_negative, check_shape, check_tensor
from ..nn.initialization import linear
from ..nn.mamba3 import States

__all__ = ["Mamba3"]

_OF_CONFIG = (
    *("hidden_size", "state_size", "expand", "head_dim", "n_groups", "rope_fraction", "dt_min", "dt_max", "dt_init_floor"),
    *("A_floor", "is_outproj_norm", "is_mimo", "mimo_rank", "chunk_size", "use_bias", "norm_eps"),
)


class Mamba3(OwnMamba3):
    """FLA's Mamba-3: :class:`ssm_kernels.nn.Mamba3` with ``A_activation="softplus"`` and FLA's names.

    Positional arguments, parameters (names and shapes, so that checkpoints load in both directions), ``forward`` and the cache
    are FLA's. FLA's layer needs CUDA, and for cached steps ``nvidia-cutlass-dsl`` and ``quack-kernels``; this one does not. It
    also continues a cache by several tokens at once, and trains and decodes in float32 and float64.

    Args:
        hidden_size: channels of input and output, ``d_model`` of :class:`ssm_kernels.nn.Mamba3`.
        state_size: ``d_state``.
        expand: as there.
        head_dim: ``headdim``.
        n_groups: ``ngroups``.
        rope_fraction, dt_min, dt_max, dt_init_floor, A_floor, is_outproj_norm: as there.
        is_mimo, mimo_rank: as there.
        chunk_size: as there.
        use_bias: whether ``in_proj`` and ``out_proj`` have a bias.
        norm_eps: of all norms.
        layer_idx: the place of the layer in ``past_key_values``.
        device, dtype: as there.

    Raises:
        ValueError, TypeError: as :class:`ssm_kernels.nn.Mamba3`.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.fla_layers import Mamba3
        >>> layer = Mamba3(64, state_size=32, head_dim=16)
        >>> out, _, _ = layer(torch.randn(2, 100, 64))
        >>> out.shape
        torch.Size([2, 100, 64])
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        state_size: int = 128,
        expand: int = 2,
        head_dim: int = 64,
        n_groups: int = 1,
        rope_fraction: float = 0.5,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        A_floor: float = 1e-4,
        is_outproj_norm: bool = False,
        is_mimo: bool = False,
        mimo_rank: int = 4,
        chunk_size: int = 64,
        use_bias: bool = False,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_bools("Mamba3", use_bias=use_bias)
        check_not_negative("Mamba3", "norm_eps", norm_eps)
        super().__init__(
            hidden_size,
            state_size,
            expand,
            head_dim,
            n_groups,
            rope_fraction,
            dt_min,
            dt_max,
            dt_init_floor,
            A_floor,
            is_outproj_norm,
            is_mimo,
            mimo_rank,
            chunk_size=chunk_size,
            layer_idx=layer_idx,
            device=device,
            dtype=dtype,
            A_activation="softplus",
        )
        if use_bias:
            self.in_proj = linear(hidden_size, sum(self._sizes), True, device, dtype)
            self.out_proj = linear(self.d_inner, hidden_size, True, device, dtype)
        for norm in (self.B_norm, self.C_norm, *([self.norm] if is_outproj_norm else [])):
            norm.eps = norm_eps

    @classmethod
    def of_config(cls, config: Any, layer_idx: int | None = None, **options: Any) -> Mamba3:
        """The layer of FLA's ``Mamba3Config``, or of any object with these attributes; ``options``: device and dtype."""
        return cls(**{name: getattr(config, name) for name in _OF_CONFIG}, layer_idx=layer_idx, **options)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Any]:
        """Mixes sequences, from the states of a cache if it has any.

        Args:
            hidden_states: (batch, seqlen, hidden_size).
            attention_mask: (batch, length) with length at least seqlen, of which the last columns count: steps where it is zero
                are padding, which no other step sees and whose outputs are zero. Not with ``cu_seqlens``.
            past_key_values: FLA's ``Cache``, or an object with its ``__len__``, ``__getitem__`` and ``update``, whose
                ``recurrent_state`` has (angle, ssm, k, v) as ``allocate_inference_cache`` of
                :class:`ssm_kernels.nn.Mamba3`. Its states carry no gradient.
            use_cache: whether the states go into ``past_key_values``. They do too if it has had some.
            output_attentions: ignored.
            cu_seqlens: (sequences + 1,), of packed sequences in a batch of 1.
            kwargs: ignored.

        Returns:
            (batch, seqlen, hidden_size), None, and ``past_key_values``.

        Raises:
            ValueError: a shape is not as above, or the layer has no ``layer_idx`` for ``past_key_values``.
            TypeError: an argument is not a tensor.
        """
        check_shape("Mamba3", "hidden_states", hidden_states, "(batch, seqlen, hidden_size)", (None, None, self.d_model))
        batch, seqlen = hidden_states.shape[:2]
        if past_key_values is not None and self.layer_idx is None:
            raise ValueError("Mamba3: expected a layer with layer_idx for past_key_values")
        states = None
        if past_key_values is not None and self.layer_idx is not None and len(past_key_values) > self.layer_idx:
            states = past_key_values[self.layer_idx]["recurrent_state"]
        keeps = past_key_values is not None and (bool(use_cache) or states is not None)
        keep = None
        if attention_mask is not None and cu_seqlens is None and seqlen > 1:
            keep = self._kept_steps(attention_mask, batch, seqlen)
            lengths = keep.sum(1)
            cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
            hidden_states = hidden_states[keep][None]
        if states is not None and cu_seqlens is None and seqlen == 1 and not torch.is_grad_enabled():
            out, *last = self.step(hidden_states, *states)
            new: States | None = (last[0], last[1], last[2], last[3])
        elif states is None and not keeps:
            out, new = OwnMamba3.forward(self, hidden_states, cu_seqlens=cu_seqlens), None
        else:
            self._check_is_local()
            out, new = self._mix(hidden_states, states, None, cu_seqlens, needs_last=True)
        if keeps and new is not None:
            # Rounded in each step, a float32 angle would drift.
            kept = (new[0].detach().double(), *(state.detach() for state in new[1:]))
            past_key_values.update(recurrent_state=kept, layer_idx=self.layer_idx, offset=seqlen)
        if keep is not None:
            padded = out.new_zeros(batch, seqlen, self.d_model)
            padded[keep] = out[0]
            out = padded
        return out, None, past_key_values

    @staticmethod
    def _kept_steps(attention_mask: Tensor, batch: int, seqlen: int) -> Tensor:
        check_tensor("Mamba3", "attention_mask", attention_mask)
        shape = attention_mask.shape
        if len(shape) != 2 or shape[0] != batch or shape[1] < seqlen:
            raise ValueError(
                f"Mamba3: expected attention_mask of shape (batch, length) with batch = {batch} and length of at least "
                f"{seqlen}, got {[*shape]}"
            )
        return attention_mask[:, shape[1] - seqlen :] != 0
