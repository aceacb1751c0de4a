"""The configuration of a language model, and its form in a ``config.json``."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..choices import DiscretizationName, MixerName, RecomputeName, TwoSampleDiscretizationName
from ..nn.checks import check_bools, check_choice, check_discretization, check_int, check_recompute
from ..nn.delta_net import DeltaNet
from ..nn.gated_delta_net import GatedDeltaNet
from ..nn.gated_delta_product import GatedDeltaProduct
from ..nn.kimi_delta_attention import KimiDeltaAttention
from ..nn.mamba import Mamba
from ..nn.mamba2 import Mamba2
from ..nn.mamba3 import Mamba3
from ..nn.mlstm import MLSTM
from ..ops._arguments import did_you_mean
from .recurrent_mixer import RecurrentMixer

__all__ = ["DELTA_RULES", "MIXERS", "MambaConfig"]

# The mixers whose constructors call the channels hidden_size.
DELTA_RULES: dict[MixerName, Any] = {
    "DeltaNet": DeltaNet,
    "GatedDeltaNet": GatedDeltaNet,
    "KimiDeltaAttention": KimiDeltaAttention,
    "GatedDeltaProduct": GatedDeltaProduct,
}
_CLASSES: dict[MixerName, Any] = {
    **{"Mamba": Mamba, "Mamba2": Mamba2, "Mamba3": Mamba3, "MinGRU": RecurrentMixer, "MinLSTM": RecurrentMixer},
    **DELTA_RULES,
    "MLSTM": MLSTM,
}
MIXERS = tuple(_CLASSES)
# mamba_ssm's names, in ssm_cfg["layer"].
_LAYERS: dict[str, MixerName] = {"Mamba1": "Mamba", "Mamba2": "Mamba2", "Mamba3": "Mamba3"}
_OWN_FIELDS = ("discretization", "recompute")
_SET_BY_THE_MODEL = ("d_model", "hidden_size", "embedding_dim", "rnn", "layer_idx", "device", "dtype")
# The largest sizes: far above those of any model, and small enough that no product of them overflows.
_LARGEST = {
    "d_model": 2**20,
    "d_intermediate": 2**24,
    "n_layer": 2**16,
    "vocab_size": 2**31 - 1,
    "pad_vocab_size_multiple": 2**31 - 1,
}
_LARGEST_OPTION = 2**24


@dataclasses.dataclass
class MambaSsmFields:
    """The fields of ``mamba_ssm``'s ``MambaConfig``, with its defaults."""

    d_model: int = 2560
    d_intermediate: int = 0
    n_layer: int = 64
    vocab_size: int = 50277
    ssm_cfg: dict[str, Any] = dataclasses.field(default_factory=dict)
    attn_layer_idx: list[int] = dataclasses.field(default_factory=list)
    attn_cfg: dict[str, Any] = dataclasses.field(default_factory=dict)
    rms_norm: bool = True
    residual_in_fp32: bool = True
    fused_add_norm: bool = True
    pad_vocab_size_multiple: int = 8
    tie_embeddings: bool = True


@dataclasses.dataclass
class MambaConfig(MambaSsmFields):
    """The fields of ``mamba_ssm``'s ``MambaConfig``, with its defaults, and three more: ``mixer``, ``discretization``
    and ``recompute``.

    Args:
        d_model: channels of the residual stream.
        d_intermediate: channels of the gated MLP of each block, rounded up to a multiple of 128; 0: blocks have no MLP.
        n_layer: blocks.
        vocab_size: tokens.
        ssm_cfg: arguments of the mixer's constructor, such as ``{"d_state": 64}``. ``mamba_ssm``'s ``"layer"``, ``"Mamba1"``,
            ``"Mamba2"`` or ``"Mamba3"``, moves from here to ``mixer``.
        attn_layer_idx: must be empty: attention layers are not supported.
        attn_cfg: must be empty.
        rms_norm: norm with ``nn.RMSNorm`` instead of ``nn.LayerNorm``.
        residual_in_fp32: keeps the residual stream in float32 (float64 in a float64 model).
        fused_add_norm: computes residual sum and norm in one operator; see :class:`ssm_kernels.nn.Block`.
        pad_vocab_size_multiple: the embedding has ``vocab_size`` rows rounded up to a multiple of this.
        tie_embeddings: embedding and head share their weight.
        mixer: ``"Mamba"``, ``"Mamba2"``, ``"Mamba3"``, ``"MinGRU"``, ``"MinLSTM"``, ``"DeltaNet"``, ``"GatedDeltaNet"``,
            ``"KimiDeltaAttention"``, ``"GatedDeltaProduct"`` or ``"MLSTM"``; ``None`` takes ``ssm_cfg["layer"]``, or
            ``"Mamba"``.
        discretization: for ``"Mamba"`` and ``"Mamba2"``; see :func:`ssm_kernels.selective_scan`.
        recompute: for ``"Mamba"``, ``"Mamba2"`` and the delta rules: ``"none"``, ``"cheap"`` or ``"all"``; see
            :class:`ssm_kernels.nn.Mamba2`.

    Raises:
        ValueError: a value is not as above.
        TypeError: a value is of another type.

    Examples:
        >>> from ssm_kernels.models import MambaConfig
        >>> config = MambaConfig(d_model=64, n_layer=2, vocab_size=100, mixer="Mamba2", ssm_cfg={"headdim": 16})
        >>> config.padded_vocab_size
        104
    """

    mixer: MixerName | None = None
    discretization: DiscretizationName | TwoSampleDiscretizationName = "zoh"
    recompute: RecomputeName = "cheap"

    def __post_init__(self) -> None:
        name = type(self).__name__
        for size, high in _LARGEST.items():
            low = 0 if size == "d_intermediate" else 1
            check_int(name, size, getattr(self, size), low)
            check_int(name, size, getattr(self, size), low, high)
            setattr(self, size, int(getattr(self, size)))
        for flag in ("rms_norm", "residual_in_fp32", "fused_add_norm", "tie_embeddings"):
            check_bools(name, **{flag: getattr(self, flag)})
            setattr(self, flag, bool(getattr(self, flag)))
        for field, kind in (("ssm_cfg", Mapping), ("attn_cfg", Mapping), ("attn_layer_idx", Sequence)):
            if not isinstance(getattr(self, field), kind) or isinstance(getattr(self, field), str):
                expected = "a dict" if kind is Mapping else "a list"
                raise TypeError(f"{name}: expected {field} to be {expected}, got {type(getattr(self, field)).__name__}")
        if len(self.attn_layer_idx) > 0 or self.attn_cfg:
            raise ValueError(
                f"{name}: expected no attention layers, which are not supported, got attn_layer_idx={self.attn_layer_idx} and "
                f"attn_cfg={self.attn_cfg}"
            )
        self.ssm_cfg = dict(self.ssm_cfg)
        self.mixer = self._resolve_mixer(self.ssm_cfg.pop("layer", None))
        self._check_ssm_cfg(self.mixer)
        check_discretization(name, self.discretization, takes_two_samples=self.mixer in ("Mamba", "Mamba2"))
        if self.discretization != "zoh" and self.mixer not in ("Mamba", "Mamba2"):
            raise ValueError(
                f"{name}: expected no discretization with mixer {self.mixer!r}, which has none, got {self.discretization!r}"
            )
        check_recompute(name, self.recompute)
        if self.recompute != "cheap" and self.mixer not in ("Mamba", "Mamba2", *DELTA_RULES):
            raise ValueError(f"{name}: expected no recompute with mixer {self.mixer!r}, which has none, got {self.recompute!r}")

    def _check_ssm_cfg(self, mixer: MixerName) -> None:
        name, known = type(self).__name__, [*inspect.signature(_CLASSES[mixer]).parameters]
        for key, value in self.ssm_cfg.items():
            if key in _OWN_FIELDS:
                raise ValueError(f"{name}: expected {key} as MambaConfig({key}=...), got it in ssm_cfg")
            if key in _SET_BY_THE_MODEL:
                raise ValueError(f"{name}: expected ssm_cfg without {key}, which the model sets itself, got {value!r}")
            if key not in known:
                expected = [other for other in known if other not in (*_SET_BY_THE_MODEL, *_OWN_FIELDS)]
                nearest = did_you_mean(key, expected)
                raise TypeError(f"{name}: expected arguments of {mixer} in ssm_cfg, {expected}, got {key!r}{nearest}")
            if isinstance(value, int | float) and abs(value) > _LARGEST_OPTION and value not in (math.inf, -math.inf):
                raise ValueError(f"{name}: expected ssm_cfg[{key!r}] of at most {_LARGEST_OPTION}, got {value}")

    def _resolve_mixer(self, layer: Any) -> MixerName:
        name = type(self).__name__
        if layer is not None:
            check_choice(name, 'ssm_cfg["layer"]', layer, [*_LAYERS])
        named = None if layer is None else _LAYERS[layer]
        if self.mixer is None:
            return named or "Mamba"
        check_choice(name, "mixer", self.mixer, MIXERS)
        if named not in (None, self.mixer):
            raise ValueError(f'{name}: expected one mixer, got mixer={self.mixer!r} and ssm_cfg["layer"] of {named!r}')
        return self.mixer

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the head."""
        return -(-self.vocab_size // self.pad_vocab_size_multiple) * self.pad_vocab_size_multiple

    def to_dict(self) -> dict[str, Any]:
        """Fields for a ``config.json``: ``mamba_ssm``'s, and ``mixer`` and ``discretization`` only if ``mamba_ssm`` has no such
        model, ``recompute`` only if it is not the default.

        Examples:
            >>> from ssm_kernels.models import MambaConfig
            >>> MambaConfig(d_model=64, n_layer=2, vocab_size=100).to_dict()["d_model"]
            64
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        mixer, discretization = fields.pop("mixer"), fields.pop("discretization")
        if mixer in ("Mamba2", "Mamba3"):
            fields["ssm_cfg"] = {"layer": mixer, **self.ssm_cfg}
        elif mixer != "Mamba":
            fields["mixer"] = mixer
        if discretization != "zoh":
            fields["discretization"] = discretization
        if self.recompute == "cheap":
            del fields["recompute"]
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> MambaConfig:
        """Reads the fields of a ``config.json``; the inverse of :meth:`to_dict`.

        Raises:
            ValueError: there are other fields, or a value is not as above.
            TypeError: a value is of another type.

        Examples:
            >>> from ssm_kernels.models import MambaConfig
            >>> config = MambaConfig.from_dict({"d_model": 64, "n_layer": 2, "vocab_size": 100})
            >>> config.d_model
            64
        """
        if not isinstance(fields, Mapping):
            raise TypeError(f"{cls.__name__}: expected fields to be a dict, got {type(fields).__name__}")
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = [name for name in fields if name not in known]
        if unknown:
            nearest = did_you_mean(unknown[0], known)
            raise ValueError(
                f"{cls.__name__}: expected the fields of mamba_ssm's config.json, {known}, got {unknown} too{nearest}"
            )
        return cls(**fields)
