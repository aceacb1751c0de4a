"""Other libraries' kernels, where they are installed.

``recorded.json`` has figures for where they are not: by benchmark, row, contender and what was measured, in seconds and bytes.
"before" is ours when only the scan was fused. Medians by ``triton.testing.do_bench``.
"""

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
SOURCE_OF_SCANS = "mamba_ssm 2.3.2.post1, torch 2.11.0+cu130, Triton 3.6.0, on one H200"

# By name: the package, and the commit that the figures were recorded with.
GATED_SCANS = {"chunk_hgrn": ("flash-linear-attention", "bc3b101"), "accelerated_scan": ("accelerated-scan", "866fa4c")}


def imported(module: str, *names: str) -> list[Any] | None:
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
    found = imported(package.replace("-", "_"), "__version__")
    return f"{package} {found[0] if found else 'of unknown version'}"


def described(peer: Any, *packages: str, recorded: str = SOURCE) -> str:
    """Names the packages that gave mamba_ssm's figures, or says that the figures are recorded, and with what."""
    if not peer:
        name, comma, rest = recorded.partition(",")
        return "recorded: " + " with ".join([name, *packages]) + comma + rest
    return " with ".join(map(_version, ("mamba_ssm", *packages))) + ", in this run"


def _working_scan(scan: Callable[..., Tensor]) -> Callable[..., Tensor] | None:
    """mamba_ssm's scan with softplus, if it runs: without its CUDA extension some versions can be imported."""
    scan = functools.partial(scan, delta_softplus=True)
    try:
        u, A, B = (torch.zeros(shape, device="cuda") for shape in ((1, 8, 16), (8, 4), (1, 4, 16)))
        scan(u, u, A, B, B)
        torch.cuda.synchronize()
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return None
    return scan


# By our operator's name: the module, the function, and what makes it take the tensors of ours.
_OPERATORS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "selective_scan": ("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn", _working_scan),
    "selective_state_update": (
        "mamba_ssm.ops.triton.selective_state_update",
        "selective_state_update",
        lambda update: lambda inputs: update(**inputs),
    ),
    "ssd_chunk_scan": (
        "mamba_ssm.ops.triton.ssd_combined",
        "mamba_chunk_scan_combined",
        lambda scan: functools.partial(scan, chunk_size=256, dt_softplus=True),
    ),
    "causal_conv1d": (
        "causal_conv1d",
        "causal_conv1d_fn",
        lambda conv: lambda x, weight, bias: conv(x.mT, weight, bias, activation="silu").mT,
    ),
    "rms_norm_gated": (
        "mamba_ssm.ops.triton.layernorm_gated",
        "rmsnorm_fn",
        lambda norm: lambda x, weight, z: norm(x, weight, None, z=z, eps=1e-5, norm_before_gate=False),
    ),
    "add_rms_norm": (
        "mamba_ssm.ops.triton.layer_norm",
        "rms_norm_fn",
        lambda norm: (
            lambda x, residual, weight: norm(x, weight, None, residual=residual, prenorm=True, residual_in_fp32=True, eps=1e-5)
        ),
    ),
}


def operator(name: str) -> Callable[..., Any] | None:
    """The kernel of mamba_ssm or causal-conv1d for our operator of this name; None where none is installed and runs.

    It takes the tensors of ours by name; that of the decoding step takes their dictionary.
    """
    module, function, adapt = _OPERATORS.get(name, ("", "", None))
    found = imported(module, function) if module else None
    return found and adapt(found[0])


def mamba3_scan() -> Callable[..., Tensor] | None:
    """The scan of Mamba-3 of rank one, by its own names of arguments; None where it is not installed."""
    found = imported("mamba_ssm.ops.triton.mamba3.mamba3_siso_combined", "mamba3_siso_combined")
    return None if found is None else found[0]


def layers() -> dict[str, Callable[..., nn.Module]]:
    """The mixers with causal-conv1d's kernels, by their names; none where one of the two packages cannot be imported.

    Mamba3 has no convolution, and needs mamba_ssm alone.
    """
    # Without causal-conv1d the mixers can be imported, and run PyTorch's convolution.
    needed = (imported("causal_conv1d"), imported("mamba_ssm.modules.mamba_simple", "Mamba"))
    second = imported("mamba_ssm.modules.mamba2", "Mamba2")
    found = {} if None in (*needed, second) else {"Mamba": needed[1][0], "Mamba2": second[0]}
    third = imported("mamba_ssm.modules.mamba3", "Mamba3")
    return found if third is None else found | {"Mamba3": third[0]}


def language_model() -> Callable[..., nn.Module] | None:
    """The language model, if installed with causal-conv1d; takes the layer's name, the configuration, device and dtype."""
    configs = imported("mamba_ssm.models.config_mamba", "MambaConfig")
    models = imported("mamba_ssm.models.mixer_seq_simple", "MambaLMHeadModel")
    if "Mamba2" not in layers() or configs is None or models is None:
        return None

    def make(layer: str, config: dict[str, Any], **factory: Any) -> nn.Module:
        ssm_cfg = {"layer": "Mamba2"} if layer == "Mamba2" else {}
        return models[0](configs[0](**config, ssm_cfg=ssm_cfg), **factory)

    return make


class GatedScan(NamedTuple):
    """A scan ``h = a h + b`` of another library.

    Attributes:
        scan: the states, of the tensors that ``arrange`` makes.
        arrange: of ``a`` and ``b``, the scan's arguments, and of ``grad`` the gradient of its result.
    """

    scan: Callable[..., Tensor]
    arrange: Callable[..., tuple[dict[str, Tensor], Tensor]]


def gated_scans() -> dict[str, GatedScan]:
    """The installed scans, by the names in ``GATED_SCANS``."""
    hgrn = imported("fla.ops.hgrn", "chunk_hgrn")
    # The second module is the first one's name before version 0.3.
    scalar = imported("accelerated_scan.scalar", "scan") or imported("accelerated_scan.triton", "scan")

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


# By the name of the delta rule: flash-linear-attention's module and function.
_DELTA_RULES = {
    "DeltaNet": ("fla.ops.delta_rule", "chunk_delta_rule"),
    "Gated DeltaNet": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "KDA": ("fla.ops.kda", "chunk_kda"),
    "DeltaProduct": ("fla.ops.gated_delta_product", "chunk_gated_delta_product"),
}
_OPTIONS_OF_FLA = {
    "qk_l2norm": "use_qk_l2norm_in_kernel",
    "beta_sigmoid": "use_beta_sigmoid_in_kernel",
}


def _disable_check_of_triton() -> None:
    """On Hopper flash-linear-attention's gated backward refuses Triton below 3.7.1, which compiles it wrongly.

    For its time the check is disabled.
    """
    importlib.import_module("fla.ops.common.chunk_o").TRITON_ABOVE_3_7_1 = True  # type: ignore[attr-defined]


def layer_of_fla(name: str) -> Callable[..., nn.Module] | None:
    """flash-linear-attention's layer of this name, whose forward returns the output alone; None where there is none."""
    found = imported("fla.layers", name) if name in ("DeltaNet", "GatedDeltaNet", "KimiDeltaAttention") else None
    if found is None:
        return None
    _disable_check_of_triton()

    def make(hidden_size: int, *, device: Any, dtype: Any, **options: Any) -> nn.Module:
        layer = found[0](hidden_size=hidden_size, **options).to(device, dtype)
        layer.register_forward_hook(lambda layer, inputs, outputs: outputs[0])
        return layer

    return make


def delta_rule(name: str) -> Callable[..., Any] | None:
    """flash-linear-attention's chunked scan of a delta rule, by the names of ours; None where it is not installed."""
    module, function = _DELTA_RULES[name]
    found = imported(module, function)
    if found is None:
        return None
    _disable_check_of_triton()

    def scan(cu_seqlens: Tensor | None = None, return_final_states: bool = False, **arguments: Any) -> Any:
        arguments = {_OPTIONS_OF_FLA.get(option, option): value for option, value in arguments.items()}
        if "A_log" in arguments:
            arguments["use_gate_in_kernel"] = True
        if cu_seqlens is not None:
            arguments["cu_seqlens"] = _as_int64(cu_seqlens)
        out, states = found[0](**arguments, output_final_state=return_final_states)
        return (out, states.transpose(-1, -2)) if return_final_states else out

    return scan


@functools.lru_cache
def _as_int64(offsets: Tensor) -> Tensor:
    return offsets.long()


def simple_gla() -> Callable[..., Tensor] | None:
    """flash-linear-attention's scan with given log decays, by the names of ours; None where it is not installed."""
    found = imported("fla.ops.simple_gla", "chunk_simple_gla")
    if found is None:
        return None
    _disable_check_of_triton()
    return lambda x, B, C, log_decay: found[0](C, B, x, g=log_decay, scale=1.0)[0]


def described_of_fla(found: Callable[..., Any] | None) -> str:
    version = _version("flash-linear-attention")
    return "not installed" if found is None else f"{version}, in this run, without its check of Triton's version"


def described_gated_scans(found: Iterable[str]) -> str:
    """The source of each package's figures."""
    recorded = f"recorded with {SOURCE.partition(', ')[2]}"
    return "; ".join(
        f"{name}: {_version(package)}, in this run" if name in found else f"{name}: {package} {commit}, {recorded}"
        for name, (package, commit) in GATED_SCANS.items()
    )
