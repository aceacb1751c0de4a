"""The gated linear recurrences: their table, their inputs, and their comparison with the reference.

A new recurrence needs one row in ``RECURRENCES``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import mpmath
import pytest
import torch
import torch.nn.functional as F
from helpers import LAYOUTS, Draws, arrange, move_all, parameter_dtype
from operator_spec import Cotangents, OperatorSpec, Shapes, rows
from torch import Tensor

import ssm_kernels
from ssm_kernels import reference


class Recurrence(NamedTuple):
    """Known properties of a recurrence, independent of its code.

    Attributes:
        inputs: by name, in the operator's order, what makes a legal input of normally distributed numbers.
        formula: ``(a, b)`` of ``h = a h + b`` for the inputs as mpmath numbers, written from its source.
        broadcast: the usual form, one of ``FORMS``, of the inputs that broadcast.
        options: the values of each option.
        positional: how many of the inputs are taken by position too; None for all, and h0 after them.
    """

    inputs: dict[str, Callable[[Tensor], Tensor]]
    formula: Callable[..., tuple[Any, Any]]
    broadcast: Mapping[str, str] = MappingProxyType({})
    options: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
    positional: int | None = None

    @property
    def positional_names(self) -> list[str]:
        return [*self.inputs, "h0"] if self.positional is None else list(self.inputs)[: self.positional]


def anything(x: Tensor) -> Tensor:
    return x


def positive(x: Tensor) -> Tensor:
    return 0.1 + x.abs()


def negative(x: Tensor) -> Tensor:
    return -x.abs()


def logistic(x):
    return 1 / (1 + mpmath.exp(-x))


ACTIVATIONS: dict[str | None, Callable[[Any], Any]] = {
    None: lambda x: x,
    "g": lambda x: x + mpmath.mpf("0.5") if x >= 0 else logistic(x),
    "tanh": mpmath.tanh,
}


def interpolation(z, candidate):
    return 1 - z, z * candidate


def mingru(gate, candidate, candidate_activation, gate_is_logit):
    return interpolation(logistic(gate) if gate_is_logit else gate, ACTIVATIONS[candidate_activation](candidate))


def minlstm(forget, input, candidate, candidate_activation):
    """The two sigmoids, divided by their sum."""
    f, i = logistic(forget), logistic(input)
    return f / (f + i), i / (f + i) * ACTIVATIONS[candidate_activation](candidate)


def rglru(recurrence_gate, input_gate, x, recurrent_param):
    """Griffin's a = sigmoid(Lambda)^(8 r), Lambda = -recurrent_param."""
    a = logistic(-recurrent_param) ** (8 * logistic(recurrence_gate))
    return a, mpmath.sqrt(1 - a**2) * logistic(input_gate) * x


RECURRENCES = {
    "linear_scan": Recurrence({"a": torch.tanh, "b": anything}, lambda a, b: (a, b)),
    "mingru_scan": Recurrence(
        {"gate": anything, "candidate": anything},
        mingru,
        options={"candidate_activation": tuple(ACTIVATIONS), "gate_is_logit": (True, False)},
    ),
    "minlstm_scan": Recurrence(
        {"forget": anything, "input": anything, "candidate": anything},
        minlstm,
        options={"candidate_activation": tuple(ACTIVATIONS)},
    ),
    "liquid_scan": Recurrence(
        {"candidate": anything, "tau": positive, "dt": positive},
        lambda candidate, tau, dt: interpolation(1 - mpmath.exp(-dt / tau), candidate),
        broadcast={"tau": "channels", "dt": "steps"},
    ),
    "rglru_scan": Recurrence(
        {"recurrence_gate": anything, "input_gate": anything, "x": anything, "recurrent_param": anything},
        rglru,
        broadcast={"recurrent_param": "channels"},
        positional=2,
    ),
    "hgrn_scan": Recurrence({"log_gate": negative, "x": anything}, lambda log_gate, x: (mpmath.exp(log_gate), x), positional=1),
    "elu_gru_scan": Recurrence(
        {"gate": anything, "candidate": anything},
        lambda gate, x: interpolation(logistic(gate), 1 + x if x > 0 else mpmath.exp(x)),
    ),
    "diag_linear_scan": Recurrence({"gate": anything, "x": anything}, lambda gate, x: (logistic(gate), x)),
}

# Shapes that an input that broadcasts may have.
FORMS: dict[str, Callable[[int, int, int], tuple[int, ...]]] = {
    "full": lambda batch, seqlen, channels: (batch, seqlen, channels),
    "channels": lambda batch, seqlen, channels: (channels,),
    "steps": lambda batch, seqlen, channels: (batch, seqlen, 1),
    "steps of every row": lambda batch, seqlen, channels: (seqlen, 1),
    "rows": lambda batch, seqlen, channels: (batch, 1, 1),
    "number": lambda batch, seqlen, channels: (),
}


# Offsets of packed sequences. Some sequences have no steps, also the first and the last; some have one.
PACKED = (0, 0, 3, 4, 4, 4, 9, 9)
OF_CHANNELS = "a b gate candidate forget input recurrence_gate input_gate log_gate x h"
CUDA_CALLS: dict[str, dict[str, Any]] = {
    "long": {"batch": 1, "channels": 5, "seqlen": 8300},
    "wide": {"batch": 8, "channels": 4160, "seqlen": 300},
    "small": {"batch": 3, "channels": 70, "seqlen": 150},
    "transposed": {"channels": 70, "seqlen": 150, "layout": "transposed", "dtype": torch.bfloat16, "reverse": True},
    "packed": {"channels": 33, "cu_seqlens": (0, 0, 100, 101, 4000)},
    "packed_reverse": {"channels": 33, "cu_seqlens": (0, 0, 100, 101, 4000), "reverse": True, "dtype": torch.bfloat16},
}


def shapes_of(variant: Variant) -> Shapes:
    """One shape for all inputs but those that broadcast to it."""
    axes = "(batch, seqlen, channels)"
    first, *others = (name for name in variant.recurrence.inputs if name not in variant.recurrence.broadcast)
    sizes = [(3, 5, 4), (1, 5, 4), (2, 6, 4), (2, 4, 4), (2, 1, 4), (2, 5, 3), (2, 5, 1), (5, 4), (4,), (), (1, 2, 5, 4)]
    channels_first = "beside inputs of shape (batch, seqlen, channels) = [2, 5, 4]"
    states = [(3, 4), (1, 4), (2, 6), (2, 1), (4,), (2, 1, 4), (2, 5, 4), ()]
    return {
        first: [(axes, [(5, 4), (2, 5, 4, 1), (4,), ()])],
        **{name: [(f"{axes} = [2, 5, 4]", sizes)] for name in others},
        "h0": [("(batch, channels) = [2, 4]", states), (f"(batch, channels) {channels_first}", [(2, 5)])],
        "reset": [
            (f"(batch, seqlen) {channels_first}", [(2, 4)]),
            ("(batch, seqlen) = [2, 5]", [(5,), (2, 3), (1, 5), (2, 1), (5, 2), (2, 5, 2), (2, 5, 4), ()]),
        ],
    }


def values_of(variant: Variant) -> list[tuple[dict[str, Any], dict[str, Any], str]]:
    """Unknown options, and shapes that do not broadcast. The first input's shape is not broadcast."""
    message = "expected {} of a shape that broadcasts to (batch, seqlen, channels) = [2, {}, 4], got {}"
    unknown = "unknown candidate_activation '{}', expected one of: none, g, tanh"
    found = []
    if "candidate_activation" in variant.recurrence.options:
        names = ("relu", "", "G", "Tanh", "None")
        found += [({}, {"candidate_activation": name}, unknown.format(name)) for name in names]
    for name in variant.recurrence.broadcast:
        shapes = ((3,), (4, 1), (2, 1), (5, 2), (3, 1, 1), (2, 5, 3), (1, 2, 5, 4), (0,))
        found += [({}, {name: torch.ones(shape)}, message.format(name, 5, [*shape])) for shape in shapes]
        found.append(({"seqlen": 1}, {name: torch.ones(2, 5, 4)}, message.format(name, 1, [2, 5, 4])))
    return found


class Variant(OperatorSpec):
    """A recurrence with certain options."""

    results = ("h", "last_state")
    all_results = "return_last_state"
    family = "linear_scan"
    internal = "_linear_recurrence"
    autograd = "_linear_recurrence"
    several_chunks = MappingProxyType({"channels": 6, "seqlen": 70})
    large = MappingProxyType({"channels": 70, "seqlen": 70})
    packs = True
    compiled = ("h0", "reverse", "reset")
    good = MappingProxyType({"batch": 2, "seqlen": 5, "channels": 4})
    indices = ({"cu_seqlens": (0, 2, 5)}, {"reset": True})
    together = MappingProxyType({"cu_seqlens": (0, 2, 5)})
    wide = ("h0",)
    cuda_calls = CUDA_CALLS
    layouts = LAYOUTS

    def __init__(self, name: str, fixed: dict[str, Any]) -> None:
        super().__init__(name)
        self.recurrence, self.fixed = RECURRENCES[name], fixed
        self.nested = tuple(self.recurrence.inputs)[:2]
        self.either = tuple(self.recurrence.broadcast)
        self.bad_shapes = [
            ({}, shapes_of(self)),
            ({"cu_seqlens": PACKED}, {"h0": [("(sequences, channels) = [7, 4]", [(1, 4)])]}),
        ]
        self.bad_values = values_of(self)
        channels = {"channels": rows(OF_CHANNELS, 2, channels=83, seqlen=130)}
        steps = {"steps": rows(OF_CHANNELS, 1, channels=21, seqlen=197)}
        self.offsets = channels | steps if name in ("linear_scan", "minlstm_scan") else channels

    @property
    def scan(self) -> Callable:
        return self.function

    @property
    def step(self) -> Callable:
        return getattr(ssm_kernels, self.name.replace("_scan", "_step"))

    def make_inputs(self, **options: Any) -> dict[str, Any]:
        return make_inputs(self, **options)

    def result_shapes(self, inputs: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
        return self.first(inputs).shape, state_of(inputs).shape

    def time_axes(self, inputs: dict[str, Any]) -> dict[str, int]:
        names = sequence_names(self, inputs) + ([] if inputs["reset"] is None else ["reset"])
        return dict.fromkeys(names, 1)

    def cast_by_autocast(self, inputs: dict[str, Any]) -> list[str]:
        return [name for name in self.recurrence.inputs if name not in self.recurrence.broadcast]

    def needed(self, inputs: dict[str, Any]) -> list[bool]:
        count = len(self.recurrence.inputs)
        return [*(i < count for i in range(4)), inputs["h0"] is not None]

    def internal_values(self, inputs: dict[str, Any]) -> dict[str, Any]:
        first, *others = (inputs[name] for name in self.recurrence.inputs)
        return {
            "inputs": [first, *(tensor.expand_as(first) for tensor in others)],
            "h0": inputs["h0"],
            "cu_seqlens": inputs["cu_seqlens"],
            "reset": inputs["reset"],
            "recurrence": self.name,
            "candidate_activation": self.fixed.get("candidate_activation") or "none",
            "gate_is_logit": self.fixed.get("gate_is_logit", True),
            "reverse": inputs["reverse"],
        }

    def saved_values(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"h": self.forward_operator(*self.forward_arguments(inputs))[0]}

    def sums_of_pytorch(self, inputs: dict[str, Any]) -> list[str]:
        """On CUDA; those on the CPU are only long ones, over many rows or steps."""
        if not self.first(inputs).is_cuda:
            return []
        summed = [name for name in self.recurrence.broadcast if inputs[name].shape != self.first(inputs).shape]
        return [f"grad_{name}" for name in (*summed, *([] if inputs["reset"] is None else ["h0"]))]

    def evaluate_natively(
        self, inputs: dict[str, Any], cotangents: Cotangents | None, exact: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        native = super().evaluate_natively(inputs, cotangents, exact)
        if cotangents is not None and self.first(inputs).element_size() == 2:
            # Backward reads h in fp16 or bf16; this rounding dominates the error of a broadcast input's gradient.
            of_rounded_states = self.evaluate(partial(scan_that_saves_rounded_states, self), inputs, cotangents)
            native |= {f"grad_{name}": of_rounded_states[f"grad_{name}"] for name in self.recurrence.broadcast}
        return native


def _variants() -> dict[str, Variant]:
    variants = {}
    for name, recurrence in RECURRENCES.items():
        for values in itertools.product(*recurrence.options.values()):
            options = dict(zip(recurrence.options, values, strict=True))
            variants["-".join([name, *(str(value) for value in values)])] = Variant(name, options)
    return variants


VARIANTS = _variants()

every_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=list(VARIANTS))
# Each with the first of its options.
PLAIN = {name: next(variant for variant in VARIANTS.values() if variant.name == name) for name in RECURRENCES}
every_recurrence = pytest.mark.parametrize("variant", PLAIN.values(), ids=list(PLAIN))
LINEAR, MINGRU, MINLSTM, LIQUID, RGLRU = (PLAIN[f"{name}_scan"] for name in ("linear", "mingru", "minlstm", "liquid", "rglru"))
evaluate, make_cotangents, assert_all_close = LINEAR.evaluate, LINEAR.make_cotangents, LINEAR.assert_close
BROADCASTING = {name: variant for name, variant in PLAIN.items() if RECURRENCES[name].broadcast}
every_broadcasting = pytest.mark.parametrize("variant", BROADCASTING.values(), ids=list(BROADCASTING))


def make_inputs(
    variant: Variant,
    *,
    batch: int = 2,
    seqlen: int = 5,
    channels: int = 4,
    h0: bool = True,
    reverse: bool = False,
    cu_seqlens: Sequence[int] | None = None,
    reset: bool = False,
    form: str | None = None,
    dtype: torch.dtype = torch.float64,
    broadcast_dtype: torch.dtype | None = None,
    device: str = "cpu",
    layout: str = "contiguous",
    seed: int = 0,
) -> dict[str, Any]:
    """Keyword arguments of a scan, the same numbers on every device.

    Args:
        cu_seqlens: takes the place of batch and seqlen.
        reset: whether sequences start anew, each at about a third of its steps.
        form: a key of ``FORMS``, for what broadcasts; None for the usual ones.
        broadcast_dtype: of what broadcasts; None for the accumulation dtype.
        layout: see :func:`helpers.arrange`; of every floating-point tensor.
    """
    draws = Draws(seed)
    sequences = batch
    if cu_seqlens is not None:
        batch, seqlen, sequences = 1, cu_seqlens[-1], len(cu_seqlens) - 1
    recurrence, accumulation_dtype = variant.recurrence, parameter_dtype(dtype)
    inputs: dict[str, Any] = {}
    for name, into_range in recurrence.inputs.items():
        shape, own_dtype = (batch, seqlen, channels), dtype
        if name in recurrence.broadcast:
            shape = FORMS[form or recurrence.broadcast[name]](*shape)
            own_dtype = broadcast_dtype or accumulation_dtype
        value = into_range(draws.normal(*shape))
        if name == "gate" and not variant.fixed.get("gate_is_logit", True):
            value = value.sigmoid()
        inputs[name] = arrange(value.to(device, own_dtype), layout)
    inputs["h0"] = None
    if h0:
        value = draws.normal(sequences, channels)
        inputs["h0"] = arrange(value.to(device, accumulation_dtype), layout)
    inputs |= variant.fixed | {"reverse": reverse, "cu_seqlens": None, "reset": None}
    if reset:
        inputs["reset"] = (draws.normal(batch, seqlen) > 0.4).to(device)
    if cu_seqlens is not None:
        inputs["cu_seqlens"] = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
    return inputs


# Options of make_inputs that any recurrence has.
COMMON: dict[str, dict[str, Any]] = {
    "required_only": {"h0": False},
    "h0": {},
    "reverse": {"reverse": True},
    "reverse_without_h0": {"reverse": True, "h0": False},
    "packed": {"cu_seqlens": PACKED},
    "packed_without_h0": {"cu_seqlens": PACKED, "h0": False},
    "packed_reverse": {"cu_seqlens": PACKED, "reverse": True},
}
RESETS: dict[str, dict[str, Any]] = {
    "reset": {"reset": True},
    "reset_without_h0": {"reset": True, "h0": False},
    "reset_reverse": {"reset": True, "reverse": True},
}
Variant.cases = {name: (COMMON | RESETS)[name] for name in ("h0", "packed_reverse", "reset", "required_only")}
Variant.options, Variant.mapped = COMMON | RESETS, tuple(COMMON | RESETS)
Variant.sizes = [
    {},
    {"seqlen": 70},
    {"seqlen": 0},
    {"batch": 0},
    {"cu_seqlens": PACKED},
    {"cu_seqlens": (0,)},
    {"h0": False},
    {"reset": True},
]
common_options = pytest.mark.parametrize("common", COMMON.values(), ids=list(COMMON))


def sequence_names(variant: Variant, inputs: dict[str, Any]) -> list[str]:
    """Names of the inputs that have a time axis."""
    return [name for name in variant.recurrence.inputs if inputs[name].dim() == 3 and inputs[name].shape[1] > 1]


def first_input(inputs: dict[str, Any]) -> Tensor:
    return next(value for value in inputs.values() if isinstance(value, Tensor))


def state_of(inputs: dict[str, Any]) -> Tensor:
    """A zero state for each sequence."""
    x, cu_seqlens = first_input(inputs), inputs["cu_seqlens"]
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_zeros(sequences, x.shape[2], dtype=parameter_dtype(x.dtype))


def scan_that_saves_rounded_states(variant: Variant, **arguments: Any) -> tuple[Tensor, Tensor]:
    """The reference in float32, with the values that PyTorch's autograd rounds to fp16 or bf16: the states that backward
    multiplies with, and the gradient of an expanded input before it is summed."""
    dtype, device = first_input(arguments).dtype, first_input(arguments).device
    arguments = move_all(arguments, "cpu")
    inputs = [x.float() for x in torch.broadcast_tensors(*(arguments[name] for name in variant.recurrence.inputs))]
    a, b = reference.RECURRENCES[variant.name](**dict(zip(variant.recurrence.inputs, inputs, strict=True)), **variant.fixed)
    time = {name: arguments[name] for name in ("h0", "reverse", "cu_seqlens", "reset")}
    with torch.no_grad():
        h = reference.linear_scan(a, b, **time)
        error = h.to(dtype).float() - h
        cu_seqlens = time["cu_seqlens"]
        sequences = error.split([error.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist(), dim=1)
        one_late = slice(1, None) if time["reverse"] else slice(-1)
        padding = (0, 0, 0, 1) if time["reverse"] else (0, 0, 1, 0)
        error = torch.cat([F.pad(x[:, one_late], padding) if x.shape[1] else x for x in sequences], dim=1)
        if time["reset"] is not None:
            error = error.masked_fill(time["reset"].unsqueeze(2), 0)  # the state before is h0
    # Adds nothing to b, and the error of the state before each step to the gradient of a.
    results = reference.linear_scan(a, b + (a - a.detach()) * error, **time, return_last_state=True)
    return tuple(result.to(device) for result in results)


def at_steps(variant: Variant, inputs: dict[str, Any], steps: slice) -> dict[str, Any]:
    """The arguments of some steps."""
    reset = None if inputs["reset"] is None else inputs["reset"][:, steps]
    return inputs | {name: inputs[name][:, steps] for name in sequence_names(variant, inputs)} | {"reset": reset}


def step_inputs(variant: Variant, inputs: dict[str, Any], t: int = 0) -> dict[str, Any]:
    """The inputs of one step."""
    of_scan = {name: inputs[name] for name in variant.recurrence.inputs}
    return {name: x[:, t] if isinstance(x, Tensor) and x.dim() == 3 else x for name, x in of_scan.items()}
