r"""Vision forks of ``mamba_ssm``: mixers of both directions, and the functions between their projections.

Vim (``bimamba_type``) and VideoMamba (``bimamba``) scan each sequence forwards and backwards and add the two before the
out-projection. SegMamba (``nslices``) adds a third scan, over interleaved slices. For :math:`s`, the mixer between its
projections with its gate, and :math:`R`, the reversal of time:

.. math::
    v1: \; s(x; A) + R\, s(R x; A_b) \text{ with all other parameters shared after the convolution}, \qquad
    v2: \; s(x; \theta) + R\, s(R x; \theta_b), \qquad v3: \; \text{v2} + P^{-1} s(P x; \theta_s)

where :math:`P` interleaves ``nslices`` slices of the sequence. Sources: Zhu et al., *Vision Mamba* (arXiv 2401.09417),
algorithm 1; Xing et al., *SegMamba* (arXiv 2401.13560), section 2.2.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import nn as own
from .._discretizations import is_two_sample
from ..choices import DiscretizationName, RecomputeName, StepInitialization
from ..nn.checks import check_bools, check_choice, check_int, check_number
from ..nn.common import conv_parameters, is_only_a_product, mark_parameters, short_convolution
from ..nn.initialization import fill_, linear
from ..ops import selective_scan

__all__ = ["Mamba"]

_mamba_conv = torch.ops.ssm_kernels._mamba_conv.default
_mamba_mixer = torch.ops.ssm_kernels._mamba_mixer.default

# The suffixes of the further directions' parameters.
_DIRECTIONS = {"none": (), "v1": (), "v2": ("_b",), "v3": ("_b", "_s")}


class _MambaType(type):
    """``isinstance`` counts :class:`ssm_kernels.nn.Mamba`, of which this package's models are made, as ``Mamba``."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or (cls.__dict__.get("_is_root", False) and isinstance(instance, own.Mamba))


class Mamba(own.Mamba, metaclass=_MambaType):
    """``mamba_ssm``'s ``Mamba``: :class:`ssm_kernels.nn.Mamba`, and the mixers of both directions of its vision forks.

    Arguments are those of :class:`ssm_kernels.nn.Mamba`, and:

    Args:
        bimamba_type: ``"none"``: one direction. ``"v1"``: a second scan backwards, with ``A_b_log``. ``"v2"``: a mixer
            backwards with its own convolution, projections, ``A_b_log`` and ``D_b``. ``"v3"``: the same, and a third one over
            slices, with ``A_s_log``, ``D_s`` and so on.
        if_divide_out: halve the sum of the two directions of ``"v2"``; other types ignore it, as the forks do.
        init_layer_scale: multiply the result by the parameter ``gamma``, (d_model,), which starts at this number.
        bimamba: VideoMamba's name: True is ``"v2"``, False ``"none"``.
        nslices: slices of ``"v3"``, which divide the sequence; 5 by default. Other types ignore it, as SegMamba does.
        if_devide_out: another spelling of ``if_divide_out``.

    The ``state_dict`` has the forks' names and shapes: ``A_b_log`` (d_inner, d_state), ``D_b`` (d_inner,), ``conv1d_b.weight``
    and ``.bias``, ``x_proj_b.weight``, ``dt_proj_b.weight`` and ``.bias``, and with ``_s`` likewise. ``A_*_log`` and ``D_*``
    are float32 whatever the ``dtype`` (float64 in a float64 layer). As in the forks, ``dt_proj_b`` and ``dt_proj_s`` start as
    any ``nn.Linear``.

    Mixers of several directions need the whole sequence: ``inference_params``, ``step``, ``seq_idx`` and ``cu_seqlens`` raise.
    The forks scan forwards only with ``inference_params`` or ``use_fast_path=False``; here both directions always run.

    Raises:
        ValueError: an argument is not as above, two contradict each other, or a mixer of several directions has a
            discretization that reads two input samples.
        TypeError: an argument is of another type.

    Example:
        >>> import torch
        >>> from ssm_kernels.compat.bidirectional import Mamba
        >>> Mamba(16, bimamba_type="v2")(torch.randn(2, 9, 16)).shape
        torch.Size([2, 9, 16])
    """

    _is_root = True

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: float = 2,
        dt_rank: int | Literal["auto"] = "auto",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: StepInitialization = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        conv_bias: bool = True,
        bias: bool = False,
        use_fast_path: bool = True,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        bimamba_type: str | None = "none",
        if_divide_out: bool = False,
        init_layer_scale: float | None = None,
        *,
        bimamba: bool | None = None,
        nslices: int | None = None,
        if_devide_out: bool = False,
        discretization: DiscretizationName = "zoh",
        recompute: RecomputeName = "cheap",
    ) -> None:
        kind = _read_type(bimamba_type, bimamba, nslices)
        if kind != "none" and is_two_sample(discretization):
            raise ValueError(
                f"Mamba: discretization {discretization!r} reads two input samples a step, which the mixer of several "
                f"directions does not pass on: expected bimamba_type 'none', got {kind!r}"
            )
        check_bools("Mamba", if_divide_out=if_divide_out, if_devide_out=if_devide_out)
        if init_layer_scale is not None:
            check_number("Mamba", "init_layer_scale", init_layer_scale)
        super().__init__(
            d_model,
            d_state,
            d_conv,
            expand,
            dt_rank,
            dt_min,
            dt_max,
            dt_init,
            dt_scale,
            dt_init_floor,
            conv_bias,
            bias,
            use_fast_path,
            layer_idx,
            device,
            dtype,
            discretization=discretization,
            recompute=recompute,
        )
        self.bimamba_type, self.nslices = kind, 5 if nslices is None else nslices
        self.if_divide_out, self.init_layer_scale = if_divide_out or if_devide_out, init_layer_scale
        # The forks' order, in which optimizer states are saved.
        if init_layer_scale is not None:
            others = dict(self._parameters)
            self._parameters.clear()
            self.gamma = nn.Parameter(torch.empty(d_model, device=device))
            self._parameters.update(others)
        out_proj = self._modules.pop("out_proj")
        if kind == "v1":
            self.A_b_log = nn.Parameter(torch.empty_like(self.A_log))
        for end in _DIRECTIONS[kind]:
            self.register_parameter(f"A{end}_log", nn.Parameter(torch.empty_like(self.A_log)))
            self.register_module(f"conv1d{end}", short_convolution("Mamba", self.d_inner, d_conv, conv_bias, device, dtype))
            columns = self.dt_rank + 2 * d_state
            self.register_module(f"x_proj{end}", linear(self.d_inner, columns, False, device, dtype))
            self.register_module(f"dt_proj{end}", linear(self.dt_rank, self.d_inner, True, device, dtype))
            self.register_parameter(f"D{end}", nn.Parameter(torch.empty_like(self.D)))
        self.register_module("out_proj", out_proj)
        self._reset_directions()
        self._no_decay = tuple(name for name in self._parameters if name.startswith(("A_", "D", "lam_logit")))
        mark_parameters("_no_weight_decay", *(self.get_parameter(name) for name in self._no_decay))

    def reset_parameters(self) -> None:
        """Initializes the layer's own parameters; the submodules have their own ``reset_parameters``."""
        super().reset_parameters()
        if "bimamba_type" in self.__dict__:
            self._reset_directions()

    @torch.no_grad()
    def _reset_directions(self) -> None:
        for name, value in self._parameters.items():
            if value is None:
                continue
            if name.startswith("A_") and name != "A_log":
                fill_(value, torch.arange(1, self.d_state + 1, device=value.device, dtype=value.dtype).log())
            elif name.startswith("D_"):
                value.fill_(1)
        if self.init_layer_scale is not None:
            self.gamma.fill_(self.init_layer_scale)

    def forward(
        self,
        hidden_states: Tensor,
        inference_params: Any = None,
        T: int = 1,
        *,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        time_steps: Tensor | None = None,
    ) -> Tensor:
        """Mixes a sequence: (batch, seqlen, d_model) to itself.

        ``T`` is VideoMamba's, without effect. Other arguments are those of :meth:`ssm_kernels.nn.Mamba.forward`.

        Raises:
            NotImplementedError: ``inference_params``, ``seq_idx``, ``cu_seqlens`` or ``time_steps`` with several directions.
            ValueError, TypeError: as :meth:`ssm_kernels.nn.Mamba.forward`, or ``nslices`` does not divide the sequence.
        """
        if self.bimamba_type == "none":
            packed = {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens}
            out = super().forward(hidden_states, inference_params, **packed, time_steps=time_steps)
        else:
            self._check_whole_sequence(
                inference_params=inference_params, seq_idx=seq_idx, cu_seqlens=cu_seqlens, time_steps=time_steps
            )
            self._check_sequences("hidden_states", hidden_states)
            out = self.out_proj(self._mix_directions(self.in_proj(hidden_states)))
        return out if self.init_layer_scale is None else out * self.gamma

    def step(
        self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor, *, time_steps: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`ssm_kernels.nn.Mamba.step`, of a layer of one direction.

        Raises:
            NotImplementedError: the layer has several directions.
        """
        self._check_whole_sequence(step=self if self.bimamba_type != "none" else None)
        out, conv_state, ssm_state = super().step(hidden_states, conv_state, ssm_state, time_steps=time_steps)
        return out if self.init_layer_scale is None else out * self.gamma, conv_state, ssm_state

    def _check_whole_sequence(self, **arguments: Any) -> None:
        for name, value in arguments.items():
            if value is not None:
                raise NotImplementedError(
                    f"Mamba: expected no {name} with bimamba_type {self.bimamba_type!r}, whose directions need the whole "
                    "sequence at once; a mixer of one direction has bimamba_type 'none'"
                )

    def _mix_directions(self, xz: Tensor) -> Tensor:
        """The sum of all directions, (batch, seqlen, d_inner), of the in-projection's output."""
        if not self.operators.is_local:
            raise NotImplementedError("Mamba: expected bimamba_type 'none' in a context-parallel group, got several directions")
        if self.bimamba_type == "v1":
            return self._mix_v1(xz)
        y = self._mix_one(xz, "") + self._mix_one(xz.flip(1), "_b").flip(1)
        if self.bimamba_type == "v2":
            return y / 2 if self.if_divide_out else y
        seqlen, slices = xz.shape[1], self.nslices
        if seqlen % slices != 0:
            raise ValueError(f"Mamba: expected a sequence whose length {slices} slices divide, got length {seqlen}")
        interleaved = xz.unflatten(1, (slices, seqlen // slices)).transpose(1, 2).flatten(1, 2)
        sliced = self._mix_one(interleaved, "_s").unflatten(1, (seqlen // slices, slices))
        return y + sliced.transpose(1, 2).flatten(1, 2)

    def _mix_one(self, xz: Tensor, end: str) -> Tensor:
        """The mixer between its projections, of the direction whose parameters' names have this suffix."""
        weight, bias = conv_parameters("Mamba", getattr(self, f"conv1d{end}"))
        x, _, z = _mamba_conv(xz, weight, bias, None)
        delta, B, C, delta_bias = self._project_by(x, end)
        A_log, D = getattr(self, f"A{end}_log"), getattr(self, f"D{end}")
        y: Tensor = _mamba_mixer(x, delta, A_log, B, C, D, z, delta_bias, None, self.discretization, None, None)[0]
        return y

    def _mix_v1(self, xz: Tensor) -> Tensor:
        weight, bias = conv_parameters("Mamba", self.conv1d)
        x, _, z = _mamba_conv(xz, weight, bias, None)
        delta, B, C, delta_bias = self._project_by(x, "")
        sequences = [tensor.transpose(1, 2) for tensor in (x, delta, B, C, z)]
        wide = self.A_log.dtype
        options: dict[str, Any] = {"delta_softplus": True, "discretization": self.discretization}
        if delta_bias is not None:
            options["delta_bias"] = delta_bias.to(wide)
        x, delta, B, C, z = sequences
        y = selective_scan(x, delta, -torch.exp(self.A_log), B, C, self.D, z, **options)
        y_b = selective_scan(x, delta, -torch.exp(self.A_b_log), B, C, self.D, z, reverse=True, **options)
        return (y + y_b).transpose(1, 2)

    def _project_by(self, x: Tensor, end: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """As ``_project``, by the projections of a direction."""
        if not end:
            return self._project(x)
        x_proj, dt_proj = getattr(self, f"x_proj{end}"), getattr(self, f"dt_proj{end}")
        dt, B, C = torch.split_with_sizes(x_proj(x), (self.dt_rank, self.d_state, self.d_state), -1)
        if is_only_a_product(dt_proj):
            return F.linear(dt, dt_proj.weight), B, C, dt_proj.bias
        return dt_proj(dt), B, C, None

    def extra_repr(self) -> str:
        kind = "" if self.bimamba_type == "none" else f", bimamba_type={self.bimamba_type!r}"
        return super().extra_repr() + kind


def _read_type(bimamba_type: str | None, bimamba: bool | None, nslices: int | None) -> str:
    kind = "none" if bimamba_type is None else bimamba_type
    check_choice("Mamba", "bimamba_type", kind, tuple(_DIRECTIONS))
    if bimamba is not None:
        check_bools("Mamba", bimamba=bimamba)
        if kind != "none" and (kind != "v2" or not bimamba):
            raise ValueError(f"Mamba: expected bimamba or bimamba_type, got bimamba={bimamba} and bimamba_type={kind!r}")
        kind = "v2" if bimamba else "none"
    if nslices is not None:
        check_int("Mamba", "nslices", nslices)
    return kind
