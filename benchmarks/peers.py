"""Other libraries' kernels, where they are installed, and what was recorded of them where they are not."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

SOURCE = "state-spaces/mamba e9594ce, torch 2.11.0+cu130, Triton 3.6.0, on one H200"

# By triton.testing.do_bench, median, seconds. The step: by (batch, heads, dim, dstate), state in float32.
RECORDED_STATE_UPDATE = {(64, None, 2048, 16): 0.0246e-3, (64, 80, 64, 128): 0.110e-3}
# The scan, (forward, backward): by (dtype, batch, dim, seqlen, dstate, with z), one group, with D, delta_bias and softplus.
RECORDED_SCAN = {
    (torch.bfloat16, 8, 2048, 2048, 16, True): (0.592e-3, 2.316e-3),
    (torch.bfloat16, 8, 2048, 2048, 16, False): (0.557e-3, 2.334e-3),
    (torch.float32, 8, 2048, 2048, 16, True): (1.162e-3, 2.690e-3),
    (torch.bfloat16, 8, 5120, 2048, 16, True): (1.450e-3, 5.685e-3),
    (torch.bfloat16, 1, 2048, 65536, 16, True): (2.956e-3, 11.410e-3),
    (torch.float32, 32, 512, 60, 16, False): (0.082e-3, 0.215e-3),
    (torch.float32, 8, 512, 1024, 16, False): (0.156e-3, 0.383e-3),
}
# Mamba-2's scan in bfloat16 with D, dt_bias and softplus, without z, in chunks of 256, (forward, backward): by (batch, seqlen,
# heads, headdim, dstate, groups).
RECORDED_SSD = {
    (8, 4096, 80, 64, 128, 1): (1.407e-3, 4.656e-3),
    (8, 2048, 24, 64, 128, 1): (0.293e-3, 1.877e-3),
    (1, 16384, 80, 64, 128, 1): (0.720e-3, 2.399e-3),
    (1, 4096, 24, 64, 128, 1): (0.328e-3, 1.677e-3),
}
# Of scans in bfloat16 whose gates are given, (forward, backward): by (batch, seqlen, channels).
RECORDED_GATED_SCAN = {
    (8, 2048, 2048): {"chunk_hgrn": (0.273e-3, 0.418e-3), "accelerated_scan": (0.060e-3, 0.154e-3)},
    (32, 512, 1024): {"chunk_hgrn": (0.160e-3, 0.246e-3), "accelerated_scan": (0.099e-3, 0.123e-3)},
    (1, 65536, 1024): {"chunk_hgrn": (1.553e-3, 2.292e-3), "accelerated_scan": (0.146e-3, 0.342e-3)},
}
# Whole layers in bfloat16 of 2048 steps, in seconds and bytes: by (layer, batch, d_model). "before" is ours when only the scan
# was fused.
RECORDED_LAYERS = {
    ("Mamba", 8, 2048): {
        "mamba_ssm": {"forward": 2.447e-3, "both": 9.462e-3, "peak": 1393e6},
        "before": {"forward": 3.389e-3, "both": 10.040e-3, "peak": 1512e6},
    },
    ("Mamba2", 8, 2560): {
        "mamba_ssm": {"forward": 2.822e-3, "both": 9.566e-3, "peak": 2091e6},
        "before": {"forward": 5.534e-3, "both": 15.275e-3, "peak": 3476e6},
    },
    ("Mamba", 1, 768): {
        "mamba_ssm": {"forward": 0.754e-3, "both": 3.332e-3, "peak": 62e6},
        "before": {"forward": 0.57e-3, "both": 1.92e-3, "peak": 71e6},
    },
    ("Mamba2", 1, 768): {
        "mamba_ssm": {"forward": 1.008e-3, "both": 5.077e-3, "peak": 97e6},
        "before": {"forward": 0.37e-3, "both": 2.18e-3, "peak": 150e6},
    },
}
# A replay of a CUDA graph with the forward of two such layers, 32 steps of 256 channels in float32: by layer.
RECORDED_REPLAYS = {"Mamba": {"before": {"replay": 0.134e-3}}, "Mamba2": {"before": {"replay": 0.146e-3}}}
# The training step of a language model of 24 such layers, ours before: by layer.
RECORDED_MODELS = {
    "Mamba": {"before": {"step": 108.0e-3, "peak": 21.2 * 2**30}},
    "Mamba2": {"before": {"step": 119.2e-3, "peak": 30.9 * 2**30}},
}
# By name: the package, and the commit that the figures above were recorded with.
GATED_SCANS = {"chunk_hgrn": ("flash-linear-attention", "bc3b101"), "accelerated_scan": ("accelerated-scan", "866fa4c")}


def _imported(module: str, *names: str) -> list[Any] | None:
    """The objects of these names in another library's module; None where it cannot be imported."""
    try:
        found = importlib.import_module(module)
        return [getattr(found, name) for name in names]
    except (
        ImportError,
        AttributeError,
        OSError,
        RuntimeError,
    ):  # a library that is built for another torch raises any of these
        return None


def _version(package: str) -> str:
    """The package's name and version. Sources on the path are not an installed package, but may state a version."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"{package} {importlib.metadata.version(package)}"
    found = _imported(package.replace("-", "_"), "__version__")
    return f"{package} {found[0] if found else 'of unknown version'}"


def described(peer: Any, *packages: str) -> str:
    """Names the source of mamba_ssm's figures: the installed packages, or the recorded figures if there is no peer."""
    if not peer:
        return "recorded: " + SOURCE.replace("e9594ce", " with ".join(["e9594ce", *packages]))
    return " with ".join(map(_version, ("mamba_ssm", *packages))) + ", in this run"


def state_update() -> Callable[[dict[str, Any]], Tensor] | None:
    """The Triton kernel of the decoding step, if it is installed; takes ``selective_state_update``'s keyword arguments."""
    found = _imported("mamba_ssm.ops.triton.selective_state_update", "selective_state_update")
    return found and (lambda inputs: found[0](**inputs))


def selective_scan() -> Callable[..., Tensor] | None:
    """The CUDA kernel of the scan, if it is installed and runs on this GPU; takes ``selective_scan``'s tensors, softplus on."""
    found = _imported("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn")
    if found is None:
        return None
    scan = functools.partial(found[0], delta_softplus=True)
    try:  # without its CUDA extension some versions can be imported
        u, A, B = (torch.zeros(shape, device="cuda") for shape in ((1, 8, 16), (8, 4), (1, 4, 16)))
        scan(u, u, A, B, B)
        torch.cuda.synchronize()
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return None
    return scan


def ssd() -> Callable[..., Tensor] | None:
    """The Triton kernels of Mamba-2's scan, if installed, in chunks of 256; takes ``ssd_chunk_scan``'s tensors, softplus on."""
    found = _imported("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
    return found and functools.partial(found[0], chunk_size=256, dt_softplus=True)


def layers() -> dict[str, Callable[..., nn.Module]]:
    """The mixers with causal-conv1d's kernels, by their names; none where one of the two packages cannot be imported."""
    # Without causal-conv1d the mixers can be imported, and run PyTorch's convolution.
    needed = (_imported("causal_conv1d"), _imported("mamba_ssm.modules.mamba_simple", "Mamba"))
    second = _imported("mamba_ssm.modules.mamba2", "Mamba2")
    return {} if None in (*needed, second) else {"Mamba": needed[1][0], "Mamba2": second[0]}


def language_model() -> Callable[..., nn.Module] | None:
    """The language model, if installed with causal-conv1d; takes the layer's name, the configuration, device and dtype."""
    configs = _imported("mamba_ssm.models.config_mamba", "MambaConfig")
    models = _imported("mamba_ssm.models.mixer_seq_simple", "MambaLMHeadModel")
    if not layers() or configs is None or models is None:
        return None

    def make(layer: str, config: dict[str, Any], **factory: Any) -> nn.Module:
        ssm_cfg = {"layer": "Mamba2"} if layer == "Mamba2" else {}
        return models[0](configs[0](**config, ssm_cfg=ssm_cfg), **factory)

    return make


def layer_operator(name: str) -> Callable[..., Any] | None:
    """The operator between scans and projections in mamba_ssm's layers, by the name of ours; None if it is not installed."""
    module, function = {
        "causal_conv1d": ("causal_conv1d", "causal_conv1d_fn"),
        "rms_norm_gated": ("mamba_ssm.ops.triton.layernorm_gated", "rmsnorm_fn"),
        "add_rms_norm": ("mamba_ssm.ops.triton.layer_norm", "rms_norm_fn"),
    }.get(name, ("", ""))
    found = _imported(module, function) if module else None
    calls = {
        "causal_conv1d": lambda x, weight, bias: found[0](x.mT, weight, bias, activation="silu").mT,
        "rms_norm_gated": lambda x, weight, z: found[0](x, weight, None, z=z, eps=1e-5, norm_before_gate=False),
        "add_rms_norm": lambda x, residual, weight: found[0](
            x, weight, None, residual=residual, prenorm=True, residual_in_fp32=True, eps=1e-5
        ),
    }
    return found and calls[name]


class GatedScan(NamedTuple):
    """A scan ``h = a h + b`` of another library.

    Attributes:
        scan: the states, of the tensors that ``arrange`` makes.
        arrange: of ``a`` and ``b``, the scan's arguments, and of ``grad`` the gradient of its result.
    """

    scan: Callable[..., Tensor]
    arrange: Callable[..., tuple[dict[str, Tensor], Tensor]]


def gated_scans() -> dict[str, GatedScan]:
    """The installed scans, by the names in ``RECORDED_GATED_SCAN``."""
    hgrn = _imported("fla.ops.hgrn", "chunk_hgrn")
    # The second module is the first one's name before version 0.3.
    scalar = _imported("accelerated_scan.scalar", "scan") or _imported("accelerated_scan.triton", "scan")

    def logarithms(a: Tensor, b: Tensor, grad: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return {"x": b, "g": a.float().log().to(a.dtype)}, grad

    def channels_first(a: Tensor, b: Tensor, grad: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        gates, tokens, grad = (tensor.transpose(1, 2).contiguous() for tensor in (a, b, grad))
        return {"gates": gates, "tokens": tokens}, grad

    found = {}
    if hgrn is not None:
        found["chunk_hgrn"] = GatedScan(lambda x, g: hgrn[0](x, g)[0], logarithms)
    if scalar is not None:
        found["accelerated_scan"] = GatedScan(lambda gates, tokens: scalar[0](gates, tokens), channels_first)
    return found


def described_gated_scans(found: Iterable[str]) -> str:
    """Where the figures of each come from."""
    recorded = f"recorded with {SOURCE.partition(', ')[2]}"
    return "; ".join(
        f"{name}: {_version(package)}, in this run" if name in found else f"{name}: {package} {commit}, {recorded}"
        for name, (package, commit) in GATED_SCANS.items()
    )
