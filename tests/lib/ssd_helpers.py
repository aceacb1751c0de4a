"""Inputs of ssd_chunk_scan, and its comparison with the reference."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
from helpers import LAYOUTS, Draws, arrange, debug_option, parameter_dtype
from operator_spec import Cotangents, Offsets, OperatorSpec, Shapes, as_float64, rows, tensor_names
from ssd_rounding import scan_in_16_bit_products
from torch import Tensor

from ssm_kernels.reference import ALIASES

# The differentiable arguments of a call with dt and A, and those that take the place of these two.
TENSORS = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")
GIVEN = ("log_decay", "gain")
SEQUENCES = ("x", "dt", "B", "C", "z")

# The methods with transition e^z, which the operator takes.
METHODS = ("zoh", "zoh_exact", "poly", "highorder", "rk4")
# As messages list the rules that the operator takes: those of one sample, of two, and other names.
NAMES = (*METHODS, "foh_ramp", "exp_trapezoidal", *ALIASES)

# Where assert_nan_ends may put its NaN.
NAN_PLACES = (*SEQUENCES, "initial_states", "grad_out", "grad_final_states")

# Steps that CUDA's kernels take together, whatever chunk_size says.
KERNEL_CHUNK = 64

# Options of make_inputs that leave out every optional argument.
MINIMAL: dict[str, Any] = {"D": None} | dict.fromkeys(("z", "dt_bias", "dt_softplus", "initial_states"), False)

# Offsets of packed sequences. Some sequences have no steps, also the first and the last; some have one.
PACKED = (0, 0, 3, 4, 4, 4, 9, 9)

# Gradients with one number per head, each a sum over all steps.
FEW_SUMS = ("grad_A", "grad_dt_bias", "grad_log_decay")

# Options of make_inputs, each with what it does not name as in MINIMAL.
OPTIONS: dict[str, dict[str, Any]] = {
    "required_only": {},
    "D": {"D": "head"},
    "D_of_channels": {"D": "channel"},
    "z": {"z": True},
    "D_and_z": {"D": "head", "z": True},
    "dt_bias": {"dt_bias": True},
    "dt_softplus": {"dt_softplus": True},
    "dt_bias_and_softplus": {"dt_bias": True, "dt_softplus": True},
    "dt_limit": {"dt_bias": True, "dt_softplus": True, "dt_limit": (0.2, 0.4)},
    "initial_states": {"initial_states": True},
    "resets": {"resets": ((2, 3), (1,))},
    "resets_with_states": {"resets": ((2, 3), (1,)), "initial_states": True},
    "packed": {"cu_seqlens": PACKED},
    "packed_with_states": {"cu_seqlens": PACKED, "initial_states": True},
    "packed_with_resets": {"cu_seqlens": PACKED, "resets": ((3, 4, 6, 8),), "initial_states": True},
    "reverse": {"reverse": True, "z": True, "initial_states": True},
    "reverse_packed_with_resets": {"reverse": True, "cu_seqlens": PACKED, "resets": ((3, 4, 6, 8),), "initial_states": True},
    "log_decay": {"log_decay": True, "gain": False},
    "log_decay_and_gain": {"log_decay": True, "D": "channel", "z": True, "initial_states": True},
    "log_decay_with_resets": {"log_decay": True, "resets": ((2, 3), (1,)), "initial_states": True},
    "log_decay_packed": {"log_decay": True, "cu_seqlens": PACKED, "resets": ((3, 4, 6, 8),), "initial_states": True},
    "log_decay_reverse": {"log_decay": True, "reverse": True, "cu_seqlens": PACKED, "initial_states": True},
    "everything": {"D": "channel", "z": True, "dt_bias": True, "dt_softplus": True, "initial_states": True},
}
OPTIONS = {name: MINIMAL | options for name, options in OPTIONS.items()}
CASES = {
    name: OPTIONS[name]
    for name in ("everything", "required_only", "packed_with_states", "resets", "dt_limit", "log_decay_and_gain")
}
SIZES = [
    {},
    {"seqlen": 70},
    {"seqlen": 0},
    {"batch": 0},
    {"cu_seqlens": PACKED},
    {"cu_seqlens": (0,)},
    OPTIONS["required_only"],
    OPTIONS["log_decay_and_gain"],
]
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
every_method = pytest.mark.parametrize("discretization", METHODS)


def make_inputs(
    *,
    batch: int = 2,
    seqlen: int = 5,
    heads: int = 4,
    headdim: int = 3,
    groups: int = 2,
    dstate: int = 2,
    D: str | None = "head",
    z: bool = True,
    dt_bias: bool = True,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_states: bool = True,
    reverse: bool = False,
    resets: Sequence[Iterable[int]] | None = None,
    cu_seqlens: Sequence[int] | None = None,
    chunk_size: int | None = None,
    discretization: str = "zoh",
    log_decay: bool = False,
    gain: bool = True,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    layout: str = "contiguous",
    seed: int = 0,
) -> dict[str, Any]:
    """Keyword arguments of ``ssd_chunk_scan``, the same numbers on every device.

    ``dt * A`` is in (-2, 0), ``log_decay`` in (-1.4, 0.1).

    Args:
        D: ``"head"``, ``"channel"`` or None.
        log_decay: whether it takes the place of ``dt`` and ``A``, and what goes with them.
        gain: whether it goes with ``log_decay``.
        resets: of each row of the batch, in turn, the steps before which a new sequence begins; makes ``seq_idx``.
        cu_seqlens: takes the place of batch and seqlen.
        layout: see :func:`helpers.arrange`; of every floating-point tensor.
    """
    draws = Draws(seed)
    normal, uniform = draws.normal, draws.uniform
    sequences = batch
    if cu_seqlens is not None:
        batch, seqlen, sequences = 1, cu_seqlens[-1], len(cu_seqlens) - 1
    dt_bias, dt_softplus = dt_bias and not log_decay, dt_softplus and not log_decay
    values = {
        "x": normal(batch, seqlen, heads, headdim),
        "dt": 0.6 * normal(batch, seqlen, heads) - 1 if dt_softplus else 0.02 + 0.6 * uniform(batch, seqlen, heads),
        "A": -0.1 - 0.9 * uniform(heads),
        "B": normal(batch, seqlen, groups, dstate),
        "C": normal(batch, seqlen, groups, dstate),
        "D": {"head": normal(heads), "channel": normal(heads, headdim), None: None}[D],
        "z": normal(batch, seqlen, heads, headdim) if z else None,
        "dt_bias": 0.2 * uniform(heads) if dt_bias else None,
        "initial_states": normal(sequences, heads, headdim, dstate) if initial_states else None,
        "log_decay": 0.1 - 1.5 * uniform(batch, seqlen, heads) if log_decay else None,
        "gain": normal(batch, seqlen, heads) if log_decay and gain else None,
    }
    if log_decay:
        values["dt"] = values["A"] = None
    inputs: dict[str, Any] = {
        name: None
        if value is None
        else arrange(value.to(device, dtype if name in (*SEQUENCES, "gain") else parameter_dtype(dtype)), layout)
        for name, value in values.items()
    }
    inputs["seq_idx"] = inputs["cu_seqlens"] = None
    if resets is not None:
        inputs["seq_idx"] = make_seq_idx([resets[row % len(resets)] for row in range(batch)], seqlen).to(device)
    if cu_seqlens is not None:
        inputs["cu_seqlens"] = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
    return inputs | {
        "dt_softplus": dt_softplus,
        "dt_limit": dt_limit,
        "chunk_size": chunk_size,
        "discretization": discretization,
        "reverse": reverse,
    }


def make_seq_idx(resets: Sequence[Iterable[int]], seqlen: int) -> Tensor:
    """Numbers that change at these steps, not in ascending order, and come again."""
    seq_idx = torch.zeros(len(resets), seqlen, dtype=torch.int32)
    for row, steps in zip(seq_idx, resets, strict=True):
        for step in steps:
            row[step:] += 1
    return 5 - (3 * seq_idx) % 4


def at_steps(inputs: dict[str, Any], steps: slice) -> dict[str, Any]:
    """The arguments of some steps."""
    of_steps = [name for name in (*SEQUENCES, *GIVEN, "seq_idx") if inputs[name] is not None]
    return inputs | {name: inputs[name][:, steps] for name in of_steps}


def states_like(inputs: dict[str, Any]) -> Tensor:
    """Zero states, of the shape of final_states."""
    x, B, cu_seqlens = inputs["x"], inputs["B"], inputs["cu_seqlens"]
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_zeros(sequences, *x.shape[2:], B.shape[3], dtype=parameter_dtype(x.dtype))


CUDA_SIZES = {"headdim": 64, "dstate": 64, "dtype": torch.bfloat16}
CUDA_CALLS: dict[str, dict[str, Any]] = {
    "long": {"batch": 1, "seqlen": 3000, **CUDA_SIZES},
    "wide": {"seqlen": 300, "heads": 160, "groups": 1, **CUDA_SIZES},
    "resets": {"seqlen": 130, "resets": ((64, 65),), **CUDA_SIZES},
    "packed": {"cu_seqlens": (0, 0, 65, 200), **CUDA_SIZES},
    "reverse": {"seqlen": 300, "reverse": True, **CUDA_SIZES},
    "packed_reverse": {"cu_seqlens": (0, 0, 65, 200), "reverse": True, **CUDA_SIZES},
}

BLHP, BLGN = "(batch, seqlen, heads, headdim)", "(batch, seqlen, groups, dstate)"
RANKS = [(2, 5, 12), (2, 5, 4, 3, 1), (5,), ()]
SHAPES: Shapes = {
    "x": [(BLHP, RANKS)],
    "dt": [
        ("(batch, seqlen, heads) = [2, 5, 4]", [(2, 5), (2, 5, 4, 3), (1, 5, 4), (2, 1, 4), (2, 5, 1), (2, 6, 4), (2, 4, 5)])
    ],
    "A": [("(heads,) = [4]", [(3,), (1,), (), (4, 3), (4, 1), (4, 3, 6)])],
    "B": [(BLGN, RANKS), (f"{BLGN} = [2, 5, 2, 6]", [(1, 5, 2, 6), (3, 5, 2, 6), (2, 1, 2, 6), (2, 6, 2, 6)])],
    "C": [
        (
            f"{BLGN} = [2, 5, 2, 6]",
            [(1, 5, 2, 6), (2, 4, 2, 6), (2, 5, 1, 6), (2, 5, 4, 6), (2, 5, 2, 1), (2, 5, 6), (2, 5, 12)],
        )
    ],
    "D": [
        (
            "(heads,) = [4] or (heads, headdim) = [4, 3]",
            [(), (4, 3, 1), (3,), (1,), (12,), (3, 4), (4, 1), (1, 3), (2, 3)],
        )
    ],
    "z": [(f"{BLHP} = [2, 5, 4, 3]", [(2, 5, 12), (1, 5, 4, 3), (2, 1, 4, 3), (2, 5, 1, 3), (2, 5, 4, 1), (2, 5, 3, 4)])],
    "dt_bias": [("(heads,) = [4]", [(3,), (1,), (), (4, 3), (1, 4)])],
    "initial_states": [
        (
            "(batch, heads, headdim, dstate) = [2, 4, 3, 6]",
            [(1, 4, 3, 6), (2, 1, 3, 6), (2, 4, 6, 3), (2, 4, 3, 1), (4, 3, 6), (2, 12, 6)],
        )
    ],
    "seq_idx": [("(batch, seqlen) = [2, 5]", [(5,), (1, 5), (2, 1), (2, 4), (2, 6), (2, 5, 1)])],
}
OF_HEADS = "x z B C out"
ONE_FORM = "expected either dt and A or log_decay, got dt = {}, A = {}, log_decay = {}"
LIMITS = "expected dt_limit = (min, max) with min <= max, got ({:g}, {:g})"


def unknown_discretization(name: str) -> str:
    return f"unknown discretization '{name}', expected one of: {', '.join(NAMES)}"


class SsdChunkScan(OperatorSpec):
    results = ("out", "final_states")
    all_results = "return_final_states"
    internal = "_ssd_chunk_scan"
    tolerance = 1e-11
    gradient_tolerance = 1e-10
    reference_tolerance = 1e-10
    sums_cancel = True
    frames = 2  # of numbers such as dt_limit
    cases = CASES
    options = OPTIONS
    packs = True
    compiled = ("everything", "resets_with_states", "reverse", "log_decay_and_gain")
    mapped = (
        *("everything", "required_only", "packed_with_states", "resets_with_states", "packed_with_resets"),
        *("reverse", "reverse_packed_with_resets", "log_decay", "log_decay_and_gain", "log_decay_packed"),
    )
    sizes = SIZES
    layouts = LAYOUTS
    nested = ("x", "A")
    good = MappingProxyType({"batch": 2, "seqlen": 5, "heads": 4, "headdim": 3, "groups": 2, "dstate": 6, "D": "channel"})
    indices = ({"resets": ((2,),)}, {"cu_seqlens": PACKED})
    together = MappingProxyType({"resets": ((2,),)})
    wide = ("A", "D", "dt_bias", "initial_states")
    bad_shapes = (
        ({}, SHAPES),
        ({"log_decay": True}, {"log_decay": SHAPES["dt"], "gain": SHAPES["dt"]}),
        ({"cu_seqlens": PACKED}, {"initial_states": [("(sequences, heads, headdim, dstate) = [7, 4, 3, 6]", [(1, 4, 3, 6)])]}),
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
            ({name: size}, {}, f"expected {name} from 1 to 256, got {size}")
            for name in ("headdim", "dstate")
            for size in (0, 257)
        ),
        *(({}, {"discretization": name}, unknown_discretization(name)) for name in ("", "ZOH", "zoh ", "tustin")),
        *(({}, {"chunk_size": size}, f"expected chunk_size of at least 1, got {size}") for size in (0, -1, -64)),
        *(
            ({}, {"dt_limit": limits}, LIMITS.format(*limits))
            for limits in ((0.2, 0.1), (1.0, 0.0), (math.inf, 0.0), (math.nan, 1.0), (0.0, math.nan), (0.5, 0.25))
        ),
        *(
            ({}, {"dt_limit": limits}, f"expected dt_limit = (min, max), got {len(limits)} numbers")
            for limits in ((0.1,), (0.0, 1.0, 2.0), ())
        ),
        ({}, {"dt_limit": 0.1}, "expected dt_limit = (min, max), got 0.1"),
        *(
            ({"log_decay": given}, changed, ONE_FORM.format(*("a tensor" if each else "None" for each in present)))
            for given, changed, present in (
                (False, {"log_decay": torch.zeros(2, 5, 4)}, (1, 1, 1)),
                (False, {"A": None}, (1, 0, 0)),
                (False, {"dt": None}, (0, 1, 0)),
                (False, {"dt": None, "A": None}, (0, 0, 0)),
                (True, {"dt": torch.zeros(2, 5, 4)}, (1, 0, 1)),
                (True, {"A": torch.zeros(4)}, (0, 1, 1)),
            )
        ),
        ({}, {"gain": torch.zeros(2, 5, 4)}, "expected gain with log_decay only, got it with dt and A"),
        *(
            ({"log_decay": True}, {name: value}, f"expected {name} with dt and A only, got it with log_decay")
            for name, value in (
                ("dt_bias", torch.zeros(4)),
                ("dt_softplus", True),
                ("dt_limit", (0.0, 1.0)),
                ("dt_limit", (0.1, math.inf)),
                ("discretization", "zoh_exact"),
            )
        ),
    )
    offsets = MappingProxyType(
        {
            "": Offsets(
                {"seqlen": 70, "heads": 3, "groups": 1, "headdim": 50, "dstate": 36},
                {**dict.fromkeys(OF_HEADS.split(), (2, 3)), "dt": (2,)},
            ),
            "log decays": Offsets(
                {"seqlen": 70, "heads": 3, "groups": 1, "headdim": 50, "dstate": 36, "log_decay": True},
                {**dict.fromkeys(OF_HEADS.split(), (2, 3)), "log_decay": (2,), "gain": (2,)},
            ),
            "odd": rows(OF_HEADS, 2, 3, seqlen=131, heads=2, groups=2, headdim=65, dstate=130),
        }
    )
    cuda_calls = CUDA_CALLS
    cuda_kernels = ("ssd_mma", ("wgmma", "mma"))
    large = MappingProxyType({"headdim": 8, "dstate": 8, "seqlen": 70})

    def make_inputs(self, **options: Any) -> dict[str, Any]:
        return make_inputs(**options)

    def sums_of_pytorch(self, inputs: dict[str, Any]) -> list[str]:
        if has_kernels(inputs):
            return []
        return [*self.results, *(f"grad_{name}" for name in (*TENSORS, *GIVEN))]

    def result_shapes(self, inputs: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
        return inputs["x"].shape, states_like(inputs).shape

    def time_axes(self, inputs: dict[str, Any]) -> dict[str, int]:
        return {name: 1 for name in (*SEQUENCES, *GIVEN, "seq_idx") if inputs[name] is not None}

    def cast_by_autocast(self, inputs: dict[str, Any]) -> list[str]:
        return [name for name in SEQUENCES if inputs[name] is not None]

    def needed(self, inputs: dict[str, Any]) -> list[bool]:
        return [inputs[name] is not None for name in (*TENSORS, *GIVEN)]

    def internal_values(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return inputs | dict(zip(("dt_min", "dt_max"), inputs["dt_limit"], strict=True))

    def evaluate_natively(
        self, inputs: dict[str, Any], cotangents: Cotangents | None, exact: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Rounds the operands of products as the operator's kernels do."""
        if not has_16_bit_products(inputs):
            return super().evaluate_natively(inputs, cotangents, exact)
        if cotangents is None:
            return self.evaluate(scan_in_16_bit_products, inputs)
        # One draw of roundings of so few numbers may by chance be far more exact than usual: take the least exact of several
        # chunk lengths.
        draws = [self.evaluate(partial(scan_in_16_bit_products, chunk=steps), inputs, cotangents) for steps in (64, 48, 32)]
        few = [f"grad_{name}" for name in tensor_names(inputs) if f"grad_{name}" in FEW_SUMS]
        return draws[0] | {
            name: max((draw[name] for draw in draws), key=lambda value, name=name: (value - exact[name]).abs().sum().item())
            for name in few
        }

    def rounding_floor(self, name: str, inputs: dict[str, Any]) -> float | None:
        # Rounding the operands to fp16 or bf16 limits the accuracy of their float32 sum.
        is_of_few = name in FEW_SUMS or (name == "grad_initial_states" and inputs["x"].shape[3] == 1)
        of_16_bits = is_of_few and has_16_bit_products(inputs)
        if of_16_bits:
            return torch.finfo(inputs["x"].dtype).eps / 2
        # Through the final states alone it is their gradient times the decay of all steps. The sums of log decays of a chunk
        # reach 2^7, and their rounding is not in the products of the yardstick.
        has_sums = name == "grad_initial_states" and inputs["log_decay"] is not None
        return 2**-18 if has_sums and has_16_bit_products(inputs) else None


class SsdStates(SsdChunkScan):
    """The scan with the states at the positions that the inputs have as ``states_at``."""

    results = ("out", "final_states", "states")

    def result_dtypes(self, inputs: dict[str, Any]) -> Sequence[torch.dtype]:
        out, states = super().result_dtypes(inputs)
        return out, states, states


scan = SSD = SsdChunkScan("ssd_chunk_scan")
SSD_STATES = SsdStates("ssd_chunk_scan")
assert_matches_reference, assert_all_close, evaluate = SSD.assert_matches_reference, SSD.assert_close, SSD.evaluate
assert_all_as_accurate, evaluate_natively = SSD.assert_as_accurate, SSD.evaluate_natively
evaluate_in_float64, make_cotangents = SSD.evaluate_in_float64, SSD.make_cotangents
reference_scan, backward_arguments = SSD.reference, SSD.backward_arguments


def assert_accurate(inputs: dict[str, Any], cotangents: Cotangents | None = None) -> dict[str, Tensor]:
    """Compares with the operator's own matmuls in float64, which test_ssd_grad.py compares with the reference: a loop over time
    on the CPU would take most of the time of the CUDA tests."""
    return assert_matches_reference(inputs, cotangents=cotangents, exact=scan)


def assert_nan_ends(inputs: dict[str, Any], name: str, step: int, begins: Sequence[int], chunk: int) -> None:
    """A NaN in the last row of the batch, whose sequences begin at these steps, reaches nothing but its own sequence, the
    chunks of that many steps in which this begins and ends, and its own chunk.

    Args:
        name: of an argument or of a result's gradient; one of states has the NaN everywhere, else it is at the step.
    """
    cotangents = dict(zip(("grad_out", "grad_final_states"), make_cotangents(inputs), strict=True))
    clean = evaluate(scan, inputs, tuple(cotangents.values()))
    values = inputs | cotangents
    values[name] = values[name].clone()
    of_states = name in ("initial_states", "grad_final_states")
    values[name][-1 if of_states else (-1, step)] = math.nan
    actual = evaluate(scan, {key: values[key] for key in inputs}, tuple(values[key] for key in cotangents))

    batch, length = inputs["x"].shape[:2]
    last = len(begins) - 1
    sequence = bisect.bisect(begins, step) - 1
    sequence = {"initial_states": 0, "grad_final_states": last}.get(name, sequence)
    first, end = begins[sequence], (*begins, length)[sequence + 1]
    if not of_states:
        first, end = min(first, step // chunk * chunk), max(end, (step // chunk + 1) * chunk)
    reached = torch.zeros(batch, length, dtype=torch.bool, device=inputs["x"].device)
    reached[-1, first // chunk * chunk : -(-end // chunk) * chunk] = True
    for result in ("out", *(f"grad_{of}" for of in SEQUENCES)):
        assert torch.equal(actual[result][~reached], clean[result][~reached]), f"{result} of a NaN in {name}"
    for result, own in (("final_states", last), ("grad_initial_states", 0)):
        rows = slice(0, batch - 1) if sequence == own else slice(None)
        assert torch.equal(actual[result][rows], clean[result][rows]), f"{result} of a NaN in {name}"
    assert any(value.isnan().any() for value in actual.values())


def assert_as_exact_as_rounding(inputs: dict[str, Any]) -> None:
    """Compares ``out`` with its rounding. D is left out, and the decays leave mostly the pairs inside a chunk."""
    decays = torch.linspace(-2, -16, inputs["x"].shape[2], device=inputs["x"].device)
    inputs = inputs | {"D": None, "z": None, "dt": torch.full_like(inputs["dt"], 0.03), "dt_bias": None, "A": decays}
    exact = scan(**as_float64(inputs))[0]
    error, least = (scan(**inputs)[0] - exact).norm(), (exact.to(inputs["x"].dtype) - exact).norm()
    assert error <= 1.15 * least


def plan(inputs: dict[str, Any], is_backward: bool = False) -> dict[str, str]:
    """The kernel that a call or its backward takes, and its division of the work."""
    words = torch.ops.ssm_kernels._ssd_chunk_scan_plan(*SSD.forward_arguments(inputs), is_backward)
    return dict(word.split("=") for word in words.split())


def has_16_bit_products(inputs: dict[str, Any]) -> bool:
    """Whether the kernels multiply operands in the dtype of the inputs, float16 or bfloat16, instead of float32."""
    return plan(inputs).get("products") == "16_bit"


def has_kernels(inputs: dict[str, Any]) -> bool:
    """Whether both directions run as fused kernels; otherwise one of them falls back to PyTorch matmuls."""
    return all(plan(inputs, is_backward)["kernel"] != "aten" for is_backward in (False, True))


def preferred_products(name: str) -> AbstractContextManager[None]:
    """``"wgmma"``: the kernels of capability 9.0a, where the device runs them; ``"mma"``: the kernels of all devices."""
    return debug_option("ssd_mma", name)


def limited_workspace(limit: int) -> AbstractContextManager[None]:
    """Limits the bytes of the states that backward's kernels keep on CUDA; one head of one batch row always fits."""
    return debug_option("ssd_workspace_bytes", limit)


def limited_shared_memory(limit: int) -> AbstractContextManager[None]:
    """Limits a block's bytes: kernels have fewer stages or, with many states or in float32, PyTorch's matmuls run."""
    return debug_option("ssd_shared_bytes", limit)
