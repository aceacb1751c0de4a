"""Inputs of mamba3_chunk_scan and mamba3_state_update, and their comparison with the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any

import pytest
import torch
from helpers import LAYOUTS, Draws, arrange, parameter_dtype
from operator_spec import Offsets, OperatorSpec, Shapes
from ssd_helpers import PACKED, make_seq_idx
from torch import Tensor

import ssm_kernels
from ssm_kernels import reference

SEQUENCES = ("x", "dt", "A", "B", "C", "trap", "angles")
STATES = ("initial_angle", "initial_ssm", "initial_k", "initial_x")
FACTORS = ("mimo_x", "mimo_z", "mimo_out")
PARAMETERS = ("B_bias", "C_bias", "D", *FACTORS, "norm_weight")
# The differentiable arguments in the order of their gradients.
TENSORS = (*SEQUENCES, *PARAMETERS[:3], "z", *PARAMETERS[3:], *STATES)
OF_STEPS = (*SEQUENCES, "z", "seq_idx")
WIDE = (*PARAMETERS, *STATES[:3])

MINIMAL: dict[str, Any] = {"D": None} | dict.fromkeys(("z", "biases", "initial_states"), False)
# Options of make_inputs, each with what it does not name as in MINIMAL.
OPTIONS: dict[str, dict[str, Any]] = {
    "required_only": {},
    "biases": {"biases": True},
    "D": {"D": "head"},
    "D_and_z": {"D": "channel", "z": True},
    "initial_states": {"initial_states": True},
    "halves": {"rotate": "halves", "biases": True, "initial_states": True},
    "angles_of_heads": {"angles_of_heads": True, "biases": True},
    "every_pair": {"angles": 3, "initial_states": True},
    "norm": {"norm": True, "D": "head"},
    "norm_and_z": {"norm": True, "z": True, "initial_states": True},
    "resets": {"resets": ((2, 3), (1,))},
    "resets_with_states": {"resets": ((2, 3), (1,)), "initial_states": True, "biases": True},
    "packed": {"cu_seqlens": PACKED},
    "packed_with_states": {"cu_seqlens": PACKED, "initial_states": True, "biases": True, "z": True},
    "packed_with_resets": {"cu_seqlens": PACKED, "resets": ((3, 4, 6, 8),), "initial_states": True},
    "everything": {"D": "channel", "z": True, "biases": True, "initial_states": True},
    "ranks_only": {"ranks": 3, "factors": False, "D": "head", "z": True},
    "ranks": {"ranks": 2, "rotate": "halves", "biases": True, "D": "channel", "z": True, "norm": True, "initial_states": True},
    "ranks_packed": {"ranks": 3, "cu_seqlens": PACKED, "biases": True, "D": "head", "initial_states": True},
    "ranks_resets": {"ranks": 2, "resets": ((2, 3), (1,)), "z": True, "angles_of_heads": True, "initial_states": True},
}
OPTIONS = {name: MINIMAL | options for name, options in OPTIONS.items()}
FEW = ("everything", "required_only", "packed_with_states", "resets_with_states", "norm_and_z")
CASES = {name: OPTIONS[name] for name in FEW}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))


def make_inputs(
    *,
    batch: int = 2,
    seqlen: int = 5,
    heads: int = 4,
    headdim: int = 3,
    groups: int = 2,
    dstate: int = 6,
    angles: int = 2,
    angles_of_heads: bool = False,
    ranks: int | None = None,
    factors: bool = True,
    D: str | None = "head",
    z: bool = True,
    biases: bool = True,
    norm: bool = False,
    rotate: str = "pairs",
    initial_states: bool = True,
    resets: Sequence[Iterable[int]] | None = None,
    cu_seqlens: Sequence[int] | None = None,
    chunk_size: int | None = None,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    layout: str = "contiguous",
    seed: int = 0,
) -> dict[str, Any]:
    """Keyword arguments of :func:`scan_of_tensors`, the same numbers on every device.

    Args:
        ranks: of B, C and their biases; None for a call without an axis of ranks.
        factors: with ranks, pass ``mimo_x``, ``mimo_z`` (if there is a gate) and ``mimo_out``.
        D: ``"head"``, ``"channel"`` or None.
        resets: of each row of the batch, in turn, the steps before which a new sequence begins; makes ``seq_idx``.
        cu_seqlens: takes the place of batch and seqlen.
        layout: see :func:`helpers.arrange`; of every floating-point tensor.
    """
    draws = Draws(seed)
    normal, uniform = draws.normal, draws.uniform
    sequences = batch
    if cu_seqlens is not None:
        batch, seqlen, sequences = 1, cu_seqlens[-1], len(cu_seqlens) - 1
    of_ranks = () if ranks is None else (ranks,)
    has_factors = ranks is not None and factors
    values = {
        "x": normal(batch, seqlen, heads, headdim),
        "dt": 0.05 + uniform(batch, seqlen, heads),
        "A": -0.05 - uniform(batch, seqlen, heads),
        "B": normal(batch, seqlen, *of_ranks, groups, dstate),
        "C": normal(batch, seqlen, *of_ranks, groups, dstate),
        "trap": normal(batch, seqlen, heads),
        "angles": normal(batch, seqlen, heads, angles) if angles_of_heads else normal(batch, seqlen, angles),
        "B_bias": normal(heads, *of_ranks, dstate) if biases else None,
        "C_bias": normal(heads, *of_ranks, dstate) if biases else None,
        "D": {"head": normal(heads), "channel": normal(heads, headdim), None: None}[D],
        "z": normal(batch, seqlen, heads, headdim) if z else None,
        "norm_weight": normal(heads, headdim) if norm else None,
        "initial_angle": normal(sequences, heads, angles) if initial_states else None,
        "initial_ssm": normal(sequences, heads, headdim, dstate) if initial_states else None,
        "initial_k": normal(sequences, heads, *of_ranks, dstate) if initial_states else None,
        "initial_x": normal(sequences, heads, headdim) if initial_states else None,
    }
    values |= {name: normal(heads, ranks, headdim) if has_factors and (z or name != "mimo_z") else None for name in FACTORS}
    inputs: dict[str, Any] = {
        name: None if value is None else arrange(value.to(device, parameter_dtype(dtype) if name in WIDE else dtype), layout)
        for name, value in values.items()
    }
    inputs["seq_idx"] = inputs["cu_seqlens"] = None
    if resets is not None:
        inputs["seq_idx"] = make_seq_idx([resets[row % len(resets)] for row in range(batch)], seqlen).to(device)
    if cu_seqlens is not None:
        inputs["cu_seqlens"] = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
    return inputs | {"norm_eps": 1e-5, "rotate": rotate, "chunk_size": chunk_size}


def of_tensors(scan: Callable[..., Any]) -> Callable[..., Any]:
    """A scan whose initial states are four arguments, and whose results are in one tuple, as the operator has both."""

    @functools.wraps(scan, assigned=("__doc__", "__name__", "__qualname__"), updated=())
    def scan_of_tensors(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        trap: Tensor,
        angles: Tensor,
        *,
        B_bias: Tensor | None = None,
        C_bias: Tensor | None = None,
        D: Tensor | None = None,
        z: Tensor | None = None,
        mimo_x: Tensor | None = None,
        mimo_z: Tensor | None = None,
        mimo_out: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-5,
        rotate: str = "pairs",
        chunk_size: int | None = None,
        initial_angle: Tensor | None = None,
        initial_ssm: Tensor | None = None,
        initial_k: Tensor | None = None,
        initial_x: Tensor | None = None,
        return_final_states: bool = False,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        reverse: bool = False,
    ) -> Any:
        states = (initial_angle, initial_ssm, initial_k, initial_x)
        found = scan(
            *(x, dt, A, B, C, trap, angles),
            B_bias=B_bias,
            C_bias=C_bias,
            D=D,
            z=z,
            mimo_x=mimo_x,
            mimo_z=mimo_z,
            mimo_out=mimo_out,
            norm_weight=norm_weight,
            norm_eps=norm_eps,
            rotate=rotate,
            chunk_size=chunk_size,
            initial_states=None if all(state is None for state in states) else states,
            return_final_states=return_final_states,
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
            reverse=reverse,
        )
        return (found[0], *found[1]) if return_final_states else found

    del scan_of_tensors.__wrapped__  # whose signature inspect would report
    return scan_of_tensors


# Once, not in each call: Dynamo of PyTorch 2.11 does not trace the making of such a function.
SCAN, REFERENCE_SCAN = of_tensors(ssm_kernels.mamba3_chunk_scan), of_tensors(reference.mamba3_chunk_scan)


def states_like(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Zero states, of the shapes of the final states."""
    x, B, cu_seqlens = inputs["x"], inputs["B"], inputs["cu_seqlens"]
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    (heads, headdim), dstate = x.shape[2:], B.shape[-1]
    shapes = (inputs["angles"].shape[-1],), (headdim, dstate), (*B.shape[2:-2], dstate), (headdim,)
    wide = x.new_zeros((), dtype=parameter_dtype(x.dtype))
    likes = wide, wide, wide, x
    return tuple(like.new_zeros(sequences, heads, *shape) for like, shape in zip(likes, shapes, strict=True))


def at_steps(inputs: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """The arguments of the steps from ``begin`` to before ``end``."""
    return inputs | {name: inputs[name][:, begin:end] for name in OF_STEPS if inputs[name] is not None}


BLRGN = "(batch, seqlen, ranks, groups, dstate)"
BLHP, BLH, BLGN = "(batch, seqlen, heads, headdim)", "(batch, seqlen, heads)", "(batch, seqlen, groups, dstate)"
OF_ONE_STEP = [(f"{BLH} = [2, 5, 4]", [(2, 5), (2, 1, 4), (2, 5, 1), (1, 5, 4), (2, 5, 4, 1)])]
BIAS = [("(heads, dstate) = [4, 6]", [(4,), (6,), (1, 6), (4, 1), (2, 6), (4, 6, 1)])]
SHAPES: Shapes = {
    "x": [(BLHP, [(2, 5, 12), (2, 5, 4, 3, 1), (5,), ()])],
    "dt": OF_ONE_STEP,
    "A": [*OF_ONE_STEP, (f"{BLH} = [2, 5, 4]", [(4,)])],
    "B": [
        (f"{BLGN} or {BLRGN}", [(2, 5, 12), (5,), ()]),
        (f"{BLGN} = [2, 5, 2, 6]", [(1, 5, 2, 6), (2, 1, 2, 6), (3, 5, 2, 6)]),
    ],
    "C": [(f"{BLGN} = [2, 5, 2, 6]", [(1, 5, 2, 6), (2, 1, 2, 6), (2, 5, 1, 6), (2, 5, 4, 6), (2, 5, 2, 1), (2, 5, 12)])],
    "trap": OF_ONE_STEP,
    "angles": [
        ("(batch, seqlen, angles) or (batch, seqlen, heads, angles)", [(2, 5), (2,), (), (2, 5, 4, 2, 1)]),
        ("(batch, seqlen, angles) = [2, 5, 2]", [(1, 5, 2), (2, 1, 2)]),
        ("(batch, seqlen, heads, angles) = [2, 5, 4, 2]", [(1, 5, 4, 2), (2, 1, 4, 2), (2, 5, 1, 2)]),
    ],
    "B_bias": BIAS,
    "C_bias": BIAS,
    "D": [
        ("(heads,) or (heads, headdim) = [4]", [(), (4, 3, 1), (3,), (1,), (12,)]),
        ("(heads, headdim) = [4, 3]", [(3, 4), (4, 1), (1, 3)]),
    ],
    "z": [(f"{BLHP} = [2, 5, 4, 3]", [(2, 5, 12), (1, 5, 4, 3), (2, 1, 4, 3), (2, 5, 1, 3), (2, 5, 4, 1)])],
    "initial_angle": [("(batch, heads, angles) = [2, 4, 2]", [(1, 4, 2), (2, 1, 2), (2, 4, 1), (2, 8)])],
    "initial_ssm": [("(batch, heads, headdim, dstate) = [2, 4, 3, 6]", [(1, 4, 3, 6), (2, 4, 6, 3), (2, 2, 3, 6)])],
    "initial_k": [("(batch, heads, dstate) = [2, 4, 6]", [(1, 4, 6), (2, 1, 6), (2, 4, 1), (2, 24)])],
    "initial_x": [("(batch, heads, headdim) = [2, 4, 3]", [(1, 4, 3), (2, 1, 3), (2, 4, 1), (2, 12)])],
    "seq_idx": [("(batch, seqlen) = [2, 5]", [(1, 5), (2, 1), (5,), (2, 5, 1)])],
}


class Mamba3ChunkScan(OperatorSpec):
    results = ("out", "final_angle", "final_ssm", "final_k", "final_x")
    all_results = "return_final_states"
    internal = "_mamba3_chunk_scan"
    autograd = "_mamba3_chunk_scan"
    tolerance = 1e-11
    gradient_tolerance = 1e-10
    reference_tolerance = 1e-10
    sums_cancel = True
    packs = True
    cases = CASES
    options = OPTIONS
    compiled = ("everything", "required_only", "resets_with_states")
    mapped = ("everything", "packed", "norm")
    sizes = (
        *({}, {"seqlen": 70}, {"seqlen": 0}, {"batch": 0}, {"cu_seqlens": PACKED}),
        *(OPTIONS["required_only"], {"dstate": 33, "angles": 16, "seqlen": 3}, {"angles_of_heads": True}),
    )
    layouts = LAYOUTS
    nested = ("x", "A")
    indices = ({"resets": ((2,),)}, {"cu_seqlens": PACKED})
    together = MappingProxyType({"resets": ((2,),), "norm": True})
    wide = WIDE
    either = ("dt", "A", "trap", "angles")
    large = MappingProxyType({"headdim": 8, "dstate": 8, "seqlen": 70})
    bad_shapes = (
        ({}, SHAPES),
        (
            {"ranks": 3, "norm": True},
            {
                "C": [(f"{BLRGN} = [2, 5, 3, 2, 6]", [(2, 5, 2, 6), (2, 5, 1, 2, 6)])],
                "C_bias": [("(heads, ranks, dstate) = [4, 3, 6]", [(4, 1, 6), (3, 4, 6)])],
                "mimo_x": [("(heads, ranks, headdim) = [4, 3, 3]", [(4, 3), (4, 1, 3), (3, 4, 3)])],
                "initial_k": [("(batch, heads, ranks, dstate) = [2, 4, 3, 6]", [(2, 4, 6), (2, 3, 4, 6)])],
            },
        ),
        ({"norm": True}, {"norm_weight": [("(heads, headdim) = [4, 3]", [(4,), (12,), (1, 3), (3, 4)])]}),
        (
            {"cu_seqlens": PACKED},
            {
                "initial_angle": [("(sequences, heads, angles) = [7, 4, 2]", [(1, 4, 2)])],
                "initial_ssm": [("(sequences, heads, headdim, dstate) = [7, 4, 3, 6]", [(1, 4, 3, 6)])],
                "initial_k": [("(sequences, heads, dstate) = [7, 4, 6]", [(1, 4, 6)])],
                "initial_x": [("(sequences, heads, headdim) = [7, 4, 3]", [(1, 4, 3)])],
            },
        ),
    )
    bad_values = (
        *(
            (
                {},
                dict.fromkeys("BC", torch.zeros(2, 5, groups, 6)),
                f"expected the groups of B and C to divide heads = 4, got {groups}",
            )
            for groups in (3, 5, 8, 0)
        ),
        *(
            ({name: size, "angles": 0}, {}, f"expected {name} from 1 to 256, got {size}")
            for name in ("headdim", "dstate")
            for size in (0, 257)
        ),
        *(({}, {"rotate": name}, f'expected rotate "pairs" or "halves", got "{name}"') for name in ("", "Pairs", "half")),
        ({"dstate": 5, "rotate": "halves"}, {}, 'expected an even dstate with rotate "halves", got 5'),
        ({"angles": 4}, {}, "expected at most dstate / 2 angles, got 4 with dstate = 6"),
        *(({}, {"chunk_size": size}, f"expected chunk_size of at least 1, got {size}") for size in (0, -1, -64)),
        (
            {},
            {"mimo_x": torch.zeros(4, 2, 3)},
            f"expected mimo_x with B and C of shape {BLRGN} only, got it with B of shape [2, 5, 2, 6]",
        ),
        ({"ranks": 2}, {"z": None}, "expected mimo_z with z only, got it without z"),
        ({"ranks": 0}, {}, "expected at least one rank in B and C, got [2, 5, 0, 2, 6]"),
        ({}, {"initial_k": None}, "expected all four initial states, angle, ssm, k and x, or none, got 3"),
    )
    offsets = MappingProxyType(
        {
            "": Offsets(
                {"seqlen": 70, "heads": 3, "groups": 1, "headdim": 50, "dstate": 36},
                {**dict.fromkeys(("x", "z", "B", "C", "out"), (2, 3)), "dt": (2,), "trap": (2,), "angles": (2,)},
            )
        }
    )

    @property
    def function(self) -> Callable[..., Any]:
        return SCAN

    def __call__(self, **inputs: Any) -> tuple[Tensor, ...]:
        return self._all_of(self.function, inputs)

    def reference_function(self, *args: Any, **kwargs: Any) -> Any:
        on_cpu = [value.cpu() if isinstance(value, Tensor) else value for value in args]
        named_on_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in kwargs.items()}
        device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        results = REFERENCE_SCAN(*on_cpu, **named_on_cpu)
        return results.to(device) if isinstance(results, Tensor) else tuple(result.to(device) for result in results)

    def make_inputs(self, **options: Any) -> dict[str, Any]:
        return make_inputs(**options)

    def internal_values(self, inputs: dict[str, Any]) -> dict[str, Any]:
        unnormed = {} if inputs["B"].dim() == 5 else {"norm_weight": None}
        return inputs | unnormed | {"wide_out": False, "premultiplied": False}

    def sums_of_pytorch(self, inputs: dict[str, Any]) -> list[str]:
        return [*self.results, *(f"grad_{name}" for name in TENSORS)]

    def result_shapes(self, inputs: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
        return inputs["x"].shape, *(state.shape for state in states_like(inputs))

    def result_dtypes(self, inputs: dict[str, Any]) -> tuple[torch.dtype, ...]:
        return inputs["x"].dtype, *(state.dtype for state in states_like(inputs))

    def time_axes(self, inputs: dict[str, Any]) -> dict[str, int]:
        return {name: 1 for name in OF_STEPS if inputs[name] is not None}

    def cast_by_autocast(self, inputs: dict[str, Any]) -> list[str]:
        return [name for name in ("x", "B", "C", "z", "initial_x") if inputs[name] is not None]

    def needed(self, inputs: dict[str, Any]) -> list[bool]:
        return [inputs[name] is not None for name in TENSORS]


MAMBA3 = Mamba3ChunkScan("mamba3_chunk_scan")

# Relative errors, in norms. In fp16 and bf16 the kernels on CUDA round operands of products, and rows of y with ranks.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
# Few sums over many steps, whose terms partly cancel.
SUMS = ("bias", "grad_D", "mimo", "norm_weight", "initial", "dt", "A", "trap", "angles")


def assert_within_bounds(inputs: dict[str, Any]) -> None:
    """Compares results and gradients with those in float64, by norms."""
    cotangents = MAMBA3.make_cotangents(inputs)
    actual = MAMBA3.evaluate(MAMBA3, inputs, cotangents)
    exact = MAMBA3.evaluate_in_float64(inputs, cotangents)
    for key, value in actual.items():
        error, norm = (value.double() - exact[key]).norm().item(), exact[key].norm().item()
        bound = BOUNDS[inputs["x"].dtype] * (4 if any(part in key for part in SUMS) else 1)
        assert error <= bound * norm + 1e-30, (key, error / max(norm, 1e-30), bound)


assert_matches_reference, assert_close, evaluate = MAMBA3.assert_matches_reference, MAMBA3.assert_close, MAMBA3.evaluate
