"""Inputs of the summaries, and their comparison with the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import recurrence_helpers
import selective_scan_helpers
import ssd_helpers
import torch
from helpers import LAYOUTS, parameter_dtype
from operator_spec import Cotangents, Inputs, OperatorSpec, Results
from recurrence_helpers import PLAIN, VARIANTS, Variant
from ssd_rounding import states_in_split_products
from torch import Tensor

from ssm_kernels.reference import summaries as reference_summaries


def cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def assert_within_a_rounding_per_step(actual: Tensor, exact: Tensor, steps: int) -> None:
    """And sixteen roundings for the rest. Single instructions of the GPU may round each transition to the same side."""
    error, largest = (x.abs().max().item() for x in (actual.double() - exact, exact))
    assert error <= (steps + 16) * torch.finfo(actual.dtype).eps * largest


class Summary(OperatorSpec):
    """A map from the state before a span to the state after it. Both results have the dtype of states."""

    results = ("last_state", "decay")
    layouts = LAYOUTS

    def result_dtypes(self, inputs: Inputs) -> tuple[torch.dtype, torch.dtype]:
        return (parameter_dtype(self.first(inputs).dtype),) * 2

    def call_reference(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        return getattr(reference_summaries, self.name)(**inputs)

    def reference(self, **inputs: Any) -> tuple[Tensor, ...]:
        device = self.first(inputs).device
        on_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in inputs.items()}
        return tuple(result.to(device) for result in self.call_reference(on_cpu))

    def from_a_state(self, inputs: Inputs, state: Tensor) -> Tensor:
        """The last state of the scan that begins with this state."""
        raise NotImplementedError


class SelectiveScanSummary(Summary):
    family = "selective_scan"
    internal = "_selective_scan_summary"
    options: ClassVar[Mapping[str, Inputs]] = {
        "all": {},
        "required_only": {"delta_bias": False, "delta_softplus": False},
        "groups": {"groups": 2},
        "constant_B": {"B": "constant"},
        "not_exponential": {"discretization": "bilinear"},
    }
    cases = options
    compiled = ("all", "not_exponential")
    mapped = ("all", "required_only", "groups", "constant_B")
    sizes = ({}, {"seqlen": 70}, {"seqlen": 0}, {"batch": 0}, {"groups": 2}, {"discretization": "euler"})
    nested = ("u", "A")

    def make_inputs(self, **options: Any) -> Inputs:
        inputs = selective_scan_helpers.make_inputs(**options, D=False, z=False, initial_state=False)
        left_out = ("C", "D", "z", "initial_state", "seq_idx", "cu_seqlens", "reverse")
        return {name: value for name, value in inputs.items() if name not in left_out}

    def result_shapes(self, inputs: Inputs) -> tuple[tuple[int, ...], ...]:
        return ((inputs["u"].shape[0], *inputs["A"].shape),) * 2

    def time_axes(self, inputs: Inputs) -> dict[str, int]:
        return {name: inputs[name].dim() - 1 for name in ("u", "delta", "B") if inputs[name].dim() > 2}

    def cast_by_autocast(self, inputs: Inputs) -> list[str]:
        return [*self.time_axes(inputs)]

    def needed(self, inputs: Inputs) -> list[bool]:
        return [True] * 4 + [inputs["delta_bias"] is not None]

    def from_a_state(self, inputs: Inputs, state: Tensor) -> Tensor:
        call = inputs | {"C": inputs["B"], "initial_state": state}
        return selective_scan_helpers.SELECTIVE_SCAN(**call)[1]


class SsdChunkScanSummary(Summary):
    results = ("final_states", "decay")
    family = "ssd_chunk_scan"
    internal = "_ssd_chunk_scan_summary"
    autograd = "_ssd_chunk_scan_summary"
    tolerance = 1e-11
    gradient_tolerance = reference_tolerance = 1e-10
    sums_cancel = True
    frames = 2  # of numbers such as dt_limit
    options: ClassVar[Mapping[str, Inputs]] = {
        "all": {},
        "required_only": {"dt_bias": False, "dt_softplus": False},
        "dt_limit": {"dt_limit": (0.2, 0.4)},
        "resets": {"resets": ((2, 3), (1,))},
        "first_rows_reset": {"resets": ((2, 3), ())},
        "log_decay": {"log_decay": True, "gain": False},
        "log_decay_with_resets": {"log_decay": True, "resets": ((2, 3), (1,))},
    }
    together: ClassVar[Inputs] = {"resets": ((2,),)}
    cases = options
    compiled = ("all", "resets", "log_decay")
    mapped = ("all", "required_only", "resets", "log_decay_with_resets")
    sizes = ({}, {"seqlen": 70}, {"seqlen": 0}, {"batch": 0}, {"resets": ((2, 3), (1,))}, {"log_decay": True})
    nested = ("x", "A")

    def make_inputs(self, **options: Any) -> Inputs:
        inputs = ssd_helpers.make_inputs(**options, D=None, z=False, initial_states=False)
        left_out = ("C", "D", "z", "initial_states", "cu_seqlens", "chunk_size", "reverse")
        return {name: value for name, value in inputs.items() if name not in left_out}

    def result_shapes(self, inputs: Inputs) -> tuple[tuple[int, ...], ...]:
        batch, _, heads, headdim = inputs["x"].shape
        return (batch, heads, headdim, inputs["B"].shape[3]), (batch, heads)

    def time_axes(self, inputs: Inputs) -> dict[str, int]:
        return {name: 1 for name in ("x", "dt", "B", "seq_idx", *ssd_helpers.GIVEN) if inputs[name] is not None}

    def cast_by_autocast(self, inputs: Inputs) -> list[str]:
        return [name for name in ("x", "dt", "B") if inputs[name] is not None]

    def needed(self, inputs: Inputs) -> list[bool]:
        return [inputs[name] is not None for name in ("x", "dt", "A", "B", "dt_bias", *ssd_helpers.GIVEN)]

    def internal_values(self, inputs: Inputs) -> Inputs:
        return inputs | dict(zip(("dt_min", "dt_max"), inputs["dt_limit"], strict=True))

    def scan_inputs(self, inputs: Inputs, state: Tensor | None = None) -> Inputs:
        more = dict.fromkeys(("D", "z", "cu_seqlens", "chunk_size")) | {"reverse": False}
        return {**inputs, **more, "C": inputs["B"], "initial_states": state}

    def from_a_state(self, inputs: Inputs, state: Tensor) -> Tensor:
        return ssd_helpers.scan(**self.scan_inputs(inputs, state))[1]

    def evaluate_natively(self, inputs: Inputs, cotangents: Cotangents | None, exact: Results) -> Results:
        """The final states of the kernels, whose products have operands in fp16 or bf16 on CUDA; all else is exact."""
        native = super().evaluate_natively(inputs, cotangents, exact)
        if ssd_helpers.has_16_bit_products(self.scan_inputs(inputs)):
            native["final_states"] = states_in_split_products(**inputs)
        return native


class RecurrenceSummary(Summary):
    """The summary of a recurrence with certain options."""

    family = "linear_scan"
    internal = "_linear_recurrence_summary"
    autograd = "_linear_recurrence_summary"
    options: ClassVar[Mapping[str, Inputs]] = {
        "all": {},
        "reverse": {"reverse": True},
        "reset": {"reset": True},
        "reset_reverse": {"reset": True, "reverse": True},
        "packed": {"cu_seqlens": recurrence_helpers.PACKED},
        "packed_reverse": {"cu_seqlens": recurrence_helpers.PACKED, "reverse": True},
    }
    cases = options
    compiled = ("reverse", "reset")
    mapped = ("all", "reset_reverse", "packed")
    sizes = ({}, {"seqlen": 70}, {"seqlen": 0}, {"batch": 0}, {"reset": True}, {"cu_seqlens": recurrence_helpers.PACKED})

    def __init__(self, variant: Variant) -> None:
        super().__init__(f"{variant.name}_summary")
        self.variant = variant
        self.nested = variant.nested

    def make_inputs(self, **options: Any) -> Inputs:
        inputs = recurrence_helpers.make_inputs(self.variant, **options, h0=False)
        return {name: value for name, value in inputs.items() if name != "h0"}

    def result_shapes(self, inputs: Inputs) -> tuple[tuple[int, ...], ...]:
        return (recurrence_helpers.state_of(inputs).shape,) * 2

    def time_axes(self, inputs: Inputs) -> dict[str, int]:
        return self.variant.time_axes(inputs)

    def cast_by_autocast(self, inputs: Inputs) -> list[str]:
        return self.variant.cast_by_autocast(inputs)

    def needed(self, inputs: Inputs) -> list[bool]:
        return [i < len(self.variant.recurrence.inputs) for i in range(4)]

    def internal_values(self, inputs: Inputs) -> Inputs:
        return self.variant.internal_values(inputs | {"h0": None}) | {"recurrence": self.name}

    def rounding_floor(self, name: str, inputs: Inputs) -> float | None:
        """The decay is a product of as many factors as steps: the rule allows a rounding for each."""
        if name != "decay":
            return None
        states = self.result_dtypes(inputs)[0]
        return max(16, self.first(inputs).shape[1]) * torch.finfo(states).eps / 2

    def call_reference(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        return reference_summaries.recurrence_summary(self.variant.name, **inputs)

    def from_a_state(self, inputs: Inputs, state: Tensor) -> Tensor:
        return self.variant(**inputs, h0=state)[1]


SELECTIVE_SUMMARY, SSD_SUMMARY = SelectiveScanSummary("selective_scan_summary"), SsdChunkScanSummary("ssd_chunk_scan_summary")
RECURRENCE_SUMMARIES = {name: RecurrenceSummary(variant) for name, variant in PLAIN.items()}
# With all options of the recurrences.
RECURRENCE_SUMMARY_VARIANTS = {name: RecurrenceSummary(variant) for name, variant in VARIANTS.items()}
SUMMARIES: dict[str, Summary] = {spec.name: spec for spec in (SELECTIVE_SUMMARY, SSD_SUMMARY, *RECURRENCE_SUMMARIES.values())}
# One of each internal operator, and one with inputs that broadcast, for the tests of what all recurrences share.
DISTINCT_SUMMARIES = {
    name: SUMMARIES[f"{name}_summary"] for name in ("selective_scan", "ssd_chunk_scan", "linear_scan", "rglru_scan")
}
