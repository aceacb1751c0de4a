"""Inputs of selective_scan and of selective_state_update, and their comparison with the reference."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any

import torch
from helpers import LAYOUTS, Draws, arrange, assert_as_accurate, parameter_dtype, step_on_a_copy
from operator_spec import OperatorSpec, Shapes, as_float64, rows
from ssd_helpers import PACKED, make_seq_idx
from torch import Tensor

import ssm_kernels
from ssm_kernels import reference, selective_state_update
from ssm_kernels.reference import ALIASES, DISCRETIZATIONS

TENSORS = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")


def chunk_length(dstate: int) -> int:
    """The steps between the states that forward saves for backward."""
    seqlen, device = 256, "meta"
    steps, state = torch.empty(1, 1, seqlen, device=device), torch.empty(1, dstate, device=device)
    values = {"u": steps, "delta": steps, "A": state, "B": state, "C": state}
    saved = torch.ops.ssm_kernels._selective_scan_fwd(*map(values.get, TENSORS), "zoh", False, True)[2]
    return seqlen // (saved.shape[1] - 1)


CHUNK = chunk_length(1)  # tests that cross chunks choose lengths around it


def plans_of(inputs: dict[str, Any]) -> tuple[str, str]:
    """The plan of forward and backward of a call: the kernel, its channels in a block, and the segments and spans of time."""
    options = inputs.get("discretization", "zoh"), inputs.get("delta_softplus", False)
    of_time = inputs.get("seq_idx"), inputs.get("cu_seqlens"), inputs.get("reverse", False)
    return torch.ops.ssm_kernels._selective_scan_plan(*(inputs.get(name) for name in TENSORS), *options, *of_time)


def kernels_of(inputs: dict[str, Any]) -> tuple[str, str]:
    """The names of the kernels that forward and backward of a call take."""
    forward, backward = (plan.partition(",")[0] for plan in plans_of(inputs))
    return forward, backward


def spans_of(inputs: dict[str, Any]) -> int:
    """The number of spans of time that backward of a call on CUDA takes in turn."""
    return int(re.search(r"(\d+) spans", plans_of(inputs)[1])[1])


# Options of make_inputs that leave out every optional argument.
MINIMAL = dict.fromkeys(("D", "z", "delta_bias", "delta_softplus", "initial_state"), False)

# Dtypes of selective_state_update: first the dtype of x, dt, B, C, z and out, then of the state.
STEP_DTYPES = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.float16, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
]

# Sizes of its arguments, with and without heads and groups.
STEP_FORMS: dict[str, dict[str, Any]] = {
    "channels": {"dim": 6},
    "channels_groups": {"dim": 6, "groups": 3},
    "heads": {"heads": 4, "dim": 5},
    "heads_groups": {"heads": 4, "dim": 5, "groups": 2},
}


def make_inputs(
    *,
    batch: int = 2,
    dim: int = 4,
    seqlen: int = 5,
    dstate: int = 3,
    groups: int | None = None,
    B: str = "variable",
    C: str = "variable",
    D: bool = True,
    z: bool = True,
    delta_bias: bool = True,
    delta_softplus: bool = True,
    initial_state: bool = True,
    reverse: bool = False,
    resets: Sequence[Iterable[int]] | None = None,
    cu_seqlens: Sequence[int] | None = None,
    discretization: str = "zoh",
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    layout: str = "contiguous",
    seed: int = 0,
) -> dict[str, Any]:
    """Keyword arguments of ``selective_scan``, the same numbers on every device.

    ``delta * A`` is in (-2, 0), where no method blows up, whatever the length.

    Args:
        groups: None for B and C of shape (batch, dstate, seqlen), else (batch, groups, dstate, seqlen).
        B, C: ``"variable"`` (per step) or ``"constant"``, (dim, dstate).
        resets: of each row of the batch, in turn, the steps before which a new sequence begins; makes ``seq_idx``.
        cu_seqlens: takes the place of batch and seqlen.
        layout: see :func:`helpers.arrange`; of every floating-point tensor.
    """
    draws = Draws(seed)
    normal, uniform = draws.normal, draws.uniform
    sequences = batch
    if cu_seqlens is not None:
        batch, seqlen, sequences = 1, cu_seqlens[-1], len(cu_seqlens) - 1

    def matrix(form: str) -> Tensor:
        if form == "constant":
            return normal(dim, dstate)
        return normal(batch, dstate, seqlen) if groups is None else normal(batch, groups, dstate, seqlen)

    values = {
        "u": normal(batch, dim, seqlen),
        "delta": 0.6 * normal(batch, dim, seqlen) - 1 if delta_softplus else 0.02 + 0.6 * uniform(batch, dim, seqlen),
        "A": -0.1 - 0.9 * uniform(dim, dstate),
        "B": matrix(B),
        "C": matrix(C),
        "D": normal(dim) if D else None,
        "z": normal(batch, dim, seqlen) if z else None,
        "delta_bias": 0.2 * uniform(dim) if delta_bias else None,
        "initial_state": normal(sequences, dim, dstate) if initial_state else None,
    }
    constants = {"A", "D", "delta_bias", "initial_state"}
    constants |= {name for name, form in (("B", B), ("C", C)) if form == "constant"}
    inputs: dict[str, Any] = {
        name: None
        if value is None
        else arrange(value.to(device, parameter_dtype(dtype) if name in constants else dtype), layout)
        for name, value in values.items()
    }
    inputs["seq_idx"] = inputs["cu_seqlens"] = None
    if resets is not None:
        inputs["seq_idx"] = make_seq_idx([resets[row % len(resets)] for row in range(batch)], seqlen).to(device)
    if cu_seqlens is not None:
        inputs["cu_seqlens"] = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
    return inputs | {"discretization": discretization, "delta_softplus": delta_softplus, "reverse": reverse}


def at_steps(inputs: dict[str, Any], steps: slice) -> dict[str, Any]:
    """The arguments of some steps."""
    return inputs | {name: inputs[name][..., steps] for name in SELECTIVE_SCAN.time_axes(inputs)}


def make_step_inputs(
    *,
    batch: int = 2,
    dim: int = 4,
    dstate: int = 3,
    heads: int | None = None,
    groups: int | None = None,
    D: bool = True,
    z: bool = True,
    dt_bias: bool = True,
    dt_softplus: bool = True,
    slots: int | None = None,
    discretization: str = "zoh",
    dtype: torch.dtype = torch.float64,
    state_dtype: torch.dtype | None = None,
    device: str = "cpu",
    layout: str = "contiguous",
    seed: int = 0,
) -> dict[str, Any]:
    """Keyword arguments of ``selective_state_update``, the same numbers on every device.

    Args:
        heads: None for a state of shape (batch, dim, dstate), else (batch, heads, dim, dstate): ``dim`` is then headdim.
        groups: None for B and C of shape (batch, dstate), else (batch, groups, dstate). With heads None means one group.
        slots: the number of cache slots, with ``state_batch_indices`` in reverse order; None for no indices.
        layout: see :func:`helpers.arrange`; of every tensor but the indices.
    """
    draws = Draws(seed)
    normal, uniform = draws.normal, draws.uniform
    channels = (dim,) if heads is None else (heads, dim)
    matrix = (batch, dstate) if groups is None and heads is None else (batch, groups or 1, dstate)
    values = {
        "state": normal(batch if slots is None else slots, *channels, dstate),
        "x": normal(batch, *channels),
        "dt": 0.6 * normal(batch, *channels) - 1 if dt_softplus else 0.02 + 0.6 * uniform(batch, *channels),
        "A": -0.1 - 0.9 * uniform(*channels, dstate),
        "B": normal(*matrix),
        "C": normal(*matrix),
        "D": normal(*channels) if D else None,
        "z": normal(batch, *channels) if z else None,
        "dt_bias": 0.2 * uniform(*channels) if dt_bias else None,
    }
    dtypes = dict.fromkeys(("A", "D", "dt_bias"), parameter_dtype(dtype)) | {"state": state_dtype or parameter_dtype(dtype)}
    inputs: dict[str, Any] = {
        name: None if value is None else arrange(value.to(device, dtypes.get(name, dtype)), layout)
        for name, value in values.items()
    }
    if slots is not None:
        inputs["state_batch_indices"] = torch.arange(slots - 1, slots - 1 - batch, -1, dtype=torch.int32, device=device)
    return inputs | {"discretization": discretization, "dt_softplus": dt_softplus}


# Options of make_inputs.
CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "required_only": MINIMAL,
    "groups": {"groups": 2},
    "constant_B_and_C": {"B": "constant", "C": "constant"},
    "channels_contiguous": {"layout": "transposed", "groups": 1},
    "bfloat16": {"dtype": torch.bfloat16},
    "two_chunks": {"seqlen": 70, "dtype": torch.float32},
    "no_steps": {"seqlen": 0},
    "packed": {"cu_seqlens": PACKED, "initial_state": False},
    "packed_with_states": {"cu_seqlens": PACKED, "groups": 2},
    "packed_with_resets": {"cu_seqlens": PACKED, "resets": ((3, 4, 6, 8),)},
    "resets": {"resets": ((2,), (1, 3)), "layout": "transposed"},
    "reverse": {"reverse": True, "groups": 2},
    "reverse_packed_with_resets": {"reverse": True, "cu_seqlens": PACKED, "resets": ((3, 4, 6, 8),)},
}
SIZES = [
    {"seqlen": seqlen, **CASES[case]}
    for seqlen in (0, 5, 64, 65, 200)
    for case in ("all", "required_only", "groups", "constant_B_and_C")
] + [{"cu_seqlens": PACKED}, {"cu_seqlens": (0,)}, {"seqlen": 70, "resets": ((2, 60),)}]

CUDA_SIZES = {"long": (1, 64, 8192), "longer": (1, 256, 8192), "wide": (2, 2048, 200), "rows": (8, 1024, 200)}
CUDA_CALLS: dict[str, dict[str, Any]] = {
    **{
        name + suffix: {"batch": batch, "dim": dim, "seqlen": seqlen, "dstate": 16, "B": form, "C": form}
        for suffix, form in (("", "variable"), ("_constant", "constant"))
        for name, (batch, dim, seqlen) in (CUDA_SIZES | {"small": (3, 70, 150)}).items()
    },
    "medium": {"batch": 2, "dim": 256, "seqlen": 1024, "dstate": 16},
    "groups": {"dim": 70, "seqlen": 150, "dstate": 16, "groups": 2},
    "transposed": {"dim": 70, "seqlen": 150, "dstate": 16, "layout": "transposed", "dtype": torch.bfloat16},
    "required_only": {"batch": 1, "dim": 5, "seqlen": 8300, "dstate": 16, **MINIMAL},
    "packed": {"dim": 70, "dstate": 16, "cu_seqlens": (0, 0, 65, 200, 1000)},
    "packed_vectors": {"dim": 128, "cu_seqlens": (0, 33, 33, 300), "layout": "transposed", "dtype": torch.bfloat16},
    "reverse": {"dim": 70, "seqlen": 152, "dstate": 16, "reverse": True},
    "packed_reverse": {"dim": 128, "cu_seqlens": (0, 33, 33, 300), "layout": "transposed", "reverse": True},
}

BDL, DN, BDN = "(batch, dim, seqlen)", "(dim, dstate)", "(batch, dim, dstate)"
B_FORMS = "(dim, dstate), (batch, dstate, seqlen) or (batch, groups, dstate, seqlen)"
SHAPES: Shapes = {
    "u": [(BDL, [(6, 5), (2, 6, 5, 1), ()])],
    "delta": [
        (f"{BDL} = [2, 6, 5]", [(6, 5), (2, 6, 5, 1), (3, 6, 5), (2, 7, 5), (2, 6, 4), (1, 6, 5), (2, 1, 5), (2, 6, 1)]),
    ],
    "A": [
        (DN, [(6,), (2, 6, 3, 3)]),
        (f"{DN} = [6, 3]", [(4, 3), (1, 3)]),
        ("(dim, dstate, dstate) = [6, 3, 3]", [(6, 3, 2), (2, 3, 3)]),
        ("(1, dstate, dstate) = [1, 3, 3]", [(1, 3, 2)]),
    ],
    "B": [
        (B_FORMS, [(6,), (1, 2, 2, 3, 5)]),
        (
            "(batch, groups, dstate, seqlen) = [2, 2, 3, 5]",
            [(3, 2, 3, 5), (2, 2, 4, 5), (2, 2, 3, 6), (1, 2, 3, 5), (2, 2, 3, 1)],
        ),
        ("(batch, dstate, seqlen) = [2, 3, 5]", [(1, 3, 5), (2, 1, 5), (2, 3, 4)]),
        (f"{DN} = [6, 3]", [(1, 3), (6, 4)]),
    ],
    "C": [
        (B_FORMS, [(6,), (1, 2, 2, 3, 5)]),
        ("(batch, groups, dstate, seqlen) = [2, 2, 3, 5]", [(3, 2, 3, 5), (2, 2, 2, 5), (2, 2, 3, 4), (2, 2, 1, 5)]),
        ("(batch, dstate, seqlen) = [2, 3, 5]", [(1, 3, 5), (2, 3, 1)]),
        (f"{DN} = [6, 3]", [(1, 3), (6, 2)]),
    ],
    "D": [("(dim,) = [6]", [(1, 6), (7,), (1,)])],
    "z": [(f"{BDL} = [2, 6, 5]", [(6, 5), (1, 6, 5), (2, 7, 5), (2, 6, 1)])],
    "delta_bias": [("(dim,) = [6]", [(6, 1), (5,), (1,)])],
    "initial_state": [(f"{BDN} = [2, 6, 3]", [(6, 3), (1, 6, 3), (2, 5, 3), (2, 6, 4)])],
    "seq_idx": [("(batch, seqlen) = [2, 5]", [(5,), (1, 5), (2, 1), (2, 4), (2, 6), (2, 5, 1)])],
}
OF_STEPS = "u delta z B C out"


def unknown_discretization(name: str) -> str:
    known = ", ".join((*DISCRETIZATIONS, "gbt", "dirac", *ssm_kernels.two_sample_discretizations, *ALIASES))
    return f"unknown discretization '{name}', expected one of: {known}"


BAD_DISCRETIZATIONS = ("", "ZOH", "zoh ", "tustin", "foh-ramp")


class SelectiveScan(OperatorSpec):
    results = ("out", "last_state")
    all_results = "return_last_state"
    internal = "_selective_scan"
    offset_exact = True
    cases = options = CASES
    several_chunks = MappingProxyType({"dim": 6, "seqlen": 70})
    packs = True
    large = MappingProxyType({"dim": 60, "seqlen": 70, "dstate": 16})
    compiled = ("all", "required_only", "groups", "constant_B_and_C", "channels_contiguous", "resets", "reverse")
    mapped = (
        *("all", "required_only", "groups", "constant_B_and_C"),
        *("packed_with_states", "packed_with_resets", "resets", "reverse"),
    )
    sizes = SIZES
    layouts = LAYOUTS
    nested = ("u", "A")
    good = MappingProxyType({"batch": 2, "dim": 6, "seqlen": 5, "dstate": 3, "groups": 2})
    indices = ({"resets": ((2,),)}, {"cu_seqlens": PACKED})
    wide = ("A", "D", "delta_bias", "initial_state")
    bad_shapes = (
        ({}, SHAPES),
        ({"cu_seqlens": PACKED}, {"initial_state": [("(sequences, dim, dstate) = [7, 6, 3]", [(1, 6, 3), (6, 6, 3)])]}),
    )
    bad_values = (
        *(
            ({}, {name: torch.zeros(2, groups, 3, 5)}, f"expected the groups of {name} to divide dim = 6, got {groups}")
            for name in ("B", "C")
            for groups in (0, 4, 5, 12)
        ),
        ({"dstate": 257}, {}, "expected dstate from 1 to 256, got 257"),
        *(({}, {"discretization": name}, unknown_discretization(name)) for name in BAD_DISCRETIZATIONS),
    )
    # Tails of every kernel: more than one tile or chunk, and no multiple of a vector. Fewer than 33 steps take other kernels.
    offsets = MappingProxyType(
        {
            "steps": rows(OF_STEPS, -1, dim=37, seqlen=197, dstate=16),
            "few steps": rows(OF_STEPS, -1, dim=37, seqlen=29, dstate=16),
            "reverse": rows(OF_STEPS, -1, dim=21, seqlen=77, dstate=16, reverse=True),
            "dstate 13": rows(OF_STEPS, -1, dim=21, seqlen=77, dstate=13),
            "groups": rows(OF_STEPS, -1, dim=24, seqlen=77, dstate=16, groups=3),
            "channels": rows(OF_STEPS, 1, dim=83, seqlen=70, dstate=16),
        }
    )
    cuda_calls = CUDA_CALLS
    cuda_kernels = ("selective_scan_kernel", ("faster", "sequential"))

    def make_inputs(self, **options: Any) -> dict[str, Any]:
        return make_inputs(**options)

    def result_shapes(self, inputs: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
        u, A, cu_seqlens = inputs["u"], inputs["A"], inputs["cu_seqlens"]
        return u.shape, (u.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, *A.shape)

    def time_axes(self, inputs: dict[str, Any]) -> dict[str, int]:
        names = ("u", "delta", "z", "B", "C", "seq_idx")
        sequences = (name for name in names if inputs[name] is not None and (inputs[name].dim() > 2 or name == "seq_idx"))
        return {name: inputs[name].dim() - 1 for name in sequences}

    def cast_by_autocast(self, inputs: dict[str, Any]) -> list[str]:
        return [name for name in self.time_axes(inputs) if name != "seq_idx"]

    def needed(self, inputs: dict[str, Any]) -> list[bool]:
        return [inputs[name] is not None for name in TENSORS]

    def internal_values(self, inputs: dict[str, Any]) -> dict[str, Any]:
        # Not all chunk states of packed sequences are written: those of two calls differ.
        return {"save_chunk_states": inputs["seq_idx"] is None and inputs["cu_seqlens"] is None} | inputs

    def saved_values(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"chunk_states": self.forward_operator(*self.forward_arguments(inputs | {"save_chunk_states": True}))[2]}


SELECTIVE_SCAN = SelectiveScan("selective_scan")
assert_matches_reference, evaluate = SELECTIVE_SCAN.assert_matches_reference, SELECTIVE_SCAN.evaluate
reference_scan = SELECTIVE_SCAN.reference_function
evaluate_in_float64, make_cotangents = SELECTIVE_SCAN.evaluate_in_float64, SELECTIVE_SCAN.make_cotangents


def evaluate_kernel_in_float64(inputs: dict[str, Any], cotangents: Any = None) -> dict[str, Tensor]:
    """The CPU's kernel in float64: the reference's loop takes a second for thousands of steps."""
    return evaluate_in_float64(inputs, cotangents, SELECTIVE_SCAN)


def step(inputs: dict[str, Any], function: Callable = selective_state_update) -> tuple[Tensor, Tensor]:
    """``out`` and the new state, of a copy of the state."""
    return step_on_a_copy(function, inputs, "state")


def assert_step_matches_reference(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """As ``assert_matches_reference``, for ``selective_state_update``; returns ``out`` and the new state."""
    out, state = step(inputs)
    assert out.shape == inputs["x"].shape and out.dtype == inputs["x"].dtype
    exact_out, exact_state = reference.selective_state_update(**as_float64(inputs))
    if inputs["x"].dtype == torch.float64:
        torch.testing.assert_close(out, exact_out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state, exact_state, rtol=1e-12, atol=1e-12)
    else:
        native_out, native_state = reference.selective_state_update(**inputs)
        assert_as_accurate(out, native_out.to(out.dtype), exact_out, "out")
        assert_as_accurate(state, native_state, exact_state, "state")
    return out, state


def assert_close(actual: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype) -> None:
    """float64 to 1e-10; else to roundings of the largest value, which cancellation may leave far below the terms of its sum."""
    assert actual.keys() == exact.keys()
    for name, value in actual.items():
        rtol = atol = 1e-10
        if dtype != torch.float64:
            scale = max(1.0, exact[name].abs().max().item())
            rtol, atol = 2 * torch.finfo(value.dtype).eps, 64 * torch.finfo(torch.float32).eps * scale
        torch.testing.assert_close(
            value.cpu().double(), exact[name], rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
        )
