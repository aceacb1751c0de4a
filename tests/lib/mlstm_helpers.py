"""Inputs of mlstm_scan, and its comparison with the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
from helpers import LAYOUTS, Draws, arrange, parameter_dtype
from mamba3_helpers import SCAN as MAMBA3_SCAN
from mlstm_rounding import in_two_tf32_parts, mlstm_scan_in_16_bit_products
from operator_spec import Cotangents, Offsets, OperatorSpec, Shapes
from ssd_helpers import PACKED, make_seq_idx
from torch import Tensor

import ssm_kernels
from ssm_kernels import reference

SEQUENCES = ("q", "k", "v", "i", "f")
STATES = ("initial_C", "initial_n", "initial_m")
# The differentiable arguments.
TENSORS = (*SEQUENCES, *STATES[:2])

# Float32 results that the scan computes from operands in the dtype of q.
FROM_ROUNDED = ("grad_initial_C", "grad_initial_n", "final_C", "final_n")

# Options of make_inputs, by what they reach: each input gate with each divisor, and what a scan may begin with.
GATES: dict[str, dict[str, Any]] = {
    "exp": {},
    "sigmoid": {"input_gate": "sigmoid"},
    "without_divisor": {"input_gate": "sigmoid", "normalize": False},
}
OPTIONS: dict[str, dict[str, Any]] = GATES | {
    "required_only": {"initial_states": False},
    "sigmoid_from_nothing": {"input_gate": "sigmoid", "initial_states": False},
    "without_divisor_from_nothing": {"input_gate": "sigmoid", "normalize": False, "initial_states": False},
    "options": {"scale": 0.7, "eps": 0.1},
    "large_eps": {"eps": 3.0, "input_gate": "sigmoid"},
    "packed": {"cu_seqlens": PACKED, "initial_states": False},
    "packed_with_states": {"cu_seqlens": PACKED},
    "packed_sigmoid": {"cu_seqlens": PACKED, "input_gate": "sigmoid"},
    "packed_without_divisor": {"cu_seqlens": PACKED, "input_gate": "sigmoid", "normalize": False},
    "resets": {"resets": ((2, 3), (1,)), "initial_states": False},
    "resets_with_states": {"resets": ((2, 3), (1,))},
    "resets_without_divisor": {"resets": ((2, 3), (1,)), "input_gate": "sigmoid", "normalize": False},
    "packed_with_resets": {"cu_seqlens": PACKED, "resets": ((3, 4, 6, 8),)},
    "reverse": {"reverse": True},
    "reverse_without_divisor": {"reverse": True, "input_gate": "sigmoid", "normalize": False, "initial_states": False},
    "reverse_packed_with_resets": {"reverse": True, "cu_seqlens": PACKED, "resets": ((3, 4, 6, 8),)},
}
FEW = ("exp", "required_only", "without_divisor", "packed_with_states", "resets_with_states")
CASES = {name: OPTIONS[name] for name in FEW}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
every_gate = pytest.mark.parametrize("options", GATES.values(), ids=list(GATES))


def make_inputs(
    *,
    batch: int = 2,
    seqlen: int = 5,
    heads: int = 4,
    key_dim: int = 3,
    value_dim: int = 2,
    scale: float | None = None,
    eps: float = 1e-6,
    input_gate: str = "exp",
    normalize: bool = True,
    initial_states: bool = True,
    cu_seqlens: Sequence[int] | None = None,
    resets: Sequence[Iterable[int]] | None = None,
    reverse: bool = False,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    layout: str = "contiguous",
    seed: int = 0,
) -> dict[str, Any]:
    """Keyword arguments of :func:`scan_of_tensors`, the same numbers on every device.

    Args:
        cu_seqlens: takes the place of batch and seqlen.
        resets: of each row of the batch, in turn, the steps before which a new sequence begins; makes ``seq_idx``.
        layout: see :func:`helpers.arrange`; of every floating-point tensor.
    """
    normal = Draws(seed).normal
    sequences = batch
    if cu_seqlens is not None:
        batch, seqlen, sequences = 1, cu_seqlens[-1], len(cu_seqlens) - 1
    values = {
        "q": normal(batch, seqlen, heads, key_dim),
        "k": normal(batch, seqlen, heads, key_dim),
        "v": normal(batch, seqlen, heads, value_dim),
        "i": normal(batch, seqlen, heads),
        "f": normal(batch, seqlen, heads) + 1,
        "initial_C": normal(sequences, heads, value_dim, key_dim) if initial_states else None,
        "initial_n": normal(sequences, heads, key_dim) if initial_states else None,
        "initial_m": normal(sequences, heads) if initial_states else None,
    }
    inputs: dict[str, Any] = {
        name: None if value is None else arrange(value.to(device, parameter_dtype(dtype) if name in STATES else dtype), layout)
        for name, value in values.items()
    }
    inputs["cu_seqlens"] = inputs["seq_idx"] = None
    if resets is not None:
        inputs["seq_idx"] = make_seq_idx([resets[row % len(resets)] for row in range(batch)], seqlen).to(device)
    if cu_seqlens is not None:
        inputs["cu_seqlens"] = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
    return inputs | {"scale": scale, "eps": eps, "input_gate": input_gate, "normalize": normalize, "reverse": reverse}


def of_tensors(scan: Callable[..., Any]) -> Callable[..., Any]:
    """A scan whose initial states are three arguments, and whose results are in one tuple, as the operator has both."""

    @functools.wraps(scan, assigned=("__doc__", "__name__", "__qualname__"), updated=())
    def scan_of_tensors(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        i: Tensor,
        f: Tensor,
        *,
        scale: float | None = None,
        eps: float = 1e-6,
        input_gate: str = "exp",
        normalize: bool = True,
        initial_C: Tensor | None = None,
        initial_n: Tensor | None = None,
        initial_m: Tensor | None = None,
        return_final_states: bool = False,
        cu_seqlens: Tensor | None = None,
        seq_idx: Tensor | None = None,
        reverse: bool = False,
    ) -> Any:
        states = (initial_C, initial_n, initial_m)
        found = scan(
            *(q, k, v, i, f),
            scale=scale,
            eps=eps,
            input_gate=input_gate,
            normalize=normalize,
            initial_states=None if all(state is None for state in states) else states,
            return_final_states=return_final_states,
            cu_seqlens=cu_seqlens,
            seq_idx=seq_idx,
            reverse=reverse,
        )
        return (found[0], *found[1]) if return_final_states else found

    del scan_of_tensors.__wrapped__  # whose signature inspect would report
    return scan_of_tensors


# Once, not in each call: Dynamo of PyTorch 2.11 does not trace the making of such a function.
SCAN, REFERENCE_SCAN = of_tensors(ssm_kernels.mlstm_scan), of_tensors(reference.mlstm_scan)


def function_of(name: str) -> Callable[..., Any]:
    """The Python function of an operator, whose states are arguments as those of the operator."""
    return {"mlstm_scan": SCAN, "mamba3_chunk_scan": MAMBA3_SCAN}.get(name) or getattr(ssm_kernels, name)


def states_like(inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Empty states, of the shapes of the final states."""
    q, v, cu_seqlens = inputs["q"], inputs["v"], inputs["cu_seqlens"]
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    heads, key_dim = q.shape[2:]
    C = q.new_zeros(sequences, heads, v.shape[3], key_dim, dtype=parameter_dtype(q.dtype))
    return C, C.new_zeros(sequences, heads, key_dim), C.new_full((sequences, heads), -torch.inf)


def at_steps(inputs: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """The arguments of the steps from ``begin`` to before ``end``."""
    return inputs | {name: inputs[name][:, begin:end] for name in (*SEQUENCES, "seq_idx") if inputs[name] is not None}


QUERIES, VALUES = "(batch, seqlen, heads, key_dim)", "(batch, seqlen, heads, value_dim)"
GATE_SHAPES = [("(batch, seqlen, heads) = [2, 5, 4]", [(2, 5), (2, 1, 4), (2, 5, 1), (1, 5, 4), (2, 5, 4, 1)])]
SHAPES: Shapes = {
    "q": [(QUERIES, [(2, 5, 12), (2, 5, 4, 3, 1), (5,), ()])],
    "k": [(f"{QUERIES} = [2, 5, 4, 3]", [(1, 5, 4, 3), (2, 1, 4, 3), (2, 5, 1, 3), (2, 5, 4, 1), (2, 5, 12)])],
    "v": [(VALUES, [(2, 5, 8), (5,), ()]), (f"{VALUES} = [2, 5, 4, 6]", [(1, 5, 4, 6), (2, 1, 4, 6), (2, 5, 2, 6)])],
    "i": GATE_SHAPES,
    "f": GATE_SHAPES,
    "initial_C": [("(batch, heads, value_dim, key_dim) = [2, 4, 6, 3]", [(1, 4, 6, 3), (2, 4, 3, 6), (2, 2, 6, 3)])],
    "initial_n": [("(batch, heads, key_dim) = [2, 4, 3]", [(1, 4, 3), (2, 1, 3), (2, 4, 1), (2, 12)])],
    "initial_m": [("(batch, heads) = [2, 4]", [(1, 4), (2, 1), (8,), (2, 4, 1)])],
    "seq_idx": [("(batch, seqlen) = [2, 5]", [(1, 5), (2, 1), (5,), (2, 5, 1)])],
}


class MlstmScan(OperatorSpec):
    results = ("out", "final_C", "final_n", "final_m")
    all_results = "return_final_states"
    internal = "_mlstm_scan"
    autograd = "_mlstm_scan"
    tolerance = 1e-11
    gradient_tolerance = 1e-10
    reference_tolerance = 1e-10
    sums_cancel = True
    packs = True
    cases = CASES
    options = OPTIONS
    compiled = ("exp", "required_only", "without_divisor", "resets_with_states")
    mapped = ("exp", "required_only", "packed_with_states", "without_divisor", "resets", "packed_with_resets", "reverse")
    sizes = (
        *({}, {"seqlen": 70}, {"seqlen": 0}, {"batch": 0}, {"cu_seqlens": PACKED}),
        *(GATES["without_divisor"], {"value_dim": 300, "seqlen": 3}, {"value_dim": 257, "seqlen": 3}, {"reverse": True}),
    )
    layouts = LAYOUTS
    nested = ("q", "i")
    good = MappingProxyType({"value_dim": 6})
    indices = ({"resets": ((2,),)}, {"cu_seqlens": PACKED})
    wide = STATES
    either = ("i", "f")
    large = MappingProxyType({"key_dim": 8, "value_dim": 8, "seqlen": 70})
    bad_shapes = (
        ({}, SHAPES),
        (
            {"cu_seqlens": PACKED},
            {
                "initial_C": [("(sequences, heads, value_dim, key_dim) = [7, 4, 6, 3]", [(1, 4, 6, 3)])],
                "initial_n": [("(sequences, heads, key_dim) = [7, 4, 3]", [(1, 4, 3)])],
                "initial_m": [("(sequences, heads) = [7, 4]", [(1, 4)])],
            },
        ),
    )
    bad_values = (
        ({}, {"scale": float("inf")}, "expected a finite scale, got inf"),
        ({}, {"eps": -1.0}, "expected a finite eps of at least 0, got -1"),
        ({}, {"input_gate": "relu"}, 'expected input_gate "exp" or "sigmoid", got "relu"'),
        (
            {},
            {"normalize": False},
            'expected normalize with input_gate "exp", whose sums are in units that only the division removes',
        ),
        (
            {},
            {"q": torch.zeros(2, 5, 4, 257), "k": torch.zeros(2, 5, 4, 257)},
            "expected key_dim from 1 to 256, got 257",
        ),
    )
    offsets = MappingProxyType(
        {"": Offsets({"seqlen": 70, "heads": 3, "key_dim": 50, "value_dim": 36}, {"i": (2,), "f": (2,)})}
    )

    @property
    def function(self) -> Callable[..., Any]:
        return function_of("mlstm_scan")

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

    def sums_of_pytorch(self, inputs: dict[str, Any]) -> list[str]:
        return [*self.results, *(f"grad_{name}" for name in TENSORS)]

    def result_shapes(self, inputs: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
        return (*inputs["q"].shape[:3], inputs["v"].shape[3]), *(state.shape for state in states_like(inputs))

    def result_dtypes(self, inputs: dict[str, Any]) -> tuple[torch.dtype, ...]:
        dtype = inputs["q"].dtype
        return dtype, *([parameter_dtype(dtype)] * 3)

    def time_axes(self, inputs: dict[str, Any]) -> dict[str, int]:
        return {name: 1 for name in (*SEQUENCES, "seq_idx") if inputs[name] is not None}

    def cast_by_autocast(self, inputs: dict[str, Any]) -> list[str]:
        return ["q", "k", "v"]

    def needed(self, inputs: dict[str, Any]) -> list[bool]:
        return [inputs[name] is not None for name in (*SEQUENCES, *STATES)]

    def evaluate_natively(
        self, inputs: dict[str, Any], cotangents: Cotangents | None, exact: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """On CUDA, rounds the operands of products as the kernels of ssd_chunk_scan do.

        A loop over float32 operands is too exact to bound their error: n q is a sum of terms that cancel, and the division
        multiplies the roundings of its operands by the sizes of the terms over that of the sum, 370 in one test.
        """
        q = inputs["q"]
        if not q.is_cuda or q.dtype == torch.float64:
            return super().evaluate_natively(inputs, cotangents, exact)
        if q.dtype != torch.float32:
            return self.evaluate(mlstm_scan_in_16_bit_products, inputs, cotangents)
        # 3xTF32 keeps 22 of an operand's 24 bits. The gates and sums are float32: the less exact of both roundings.
        in_float32 = super().evaluate_natively(inputs, cotangents, exact)
        rounded = inputs | {name: in_two_tf32_parts(inputs[name]) for name in ("q", "k", "v")}
        of_operands = self.evaluate_in_float64(rounded, cotangents)

        def error(value: Tensor, name: str) -> float:
            return (value.double() - exact[name]).norm().item()

        return {
            name: max(value, of_operands[name].to(value.dtype), key=partial(error, name=name))
            for name, value in in_float32.items()
        }

    def rounding_floor(self, name: str, inputs: dict[str, Any]) -> float | None:
        # The gradient of the numerators is rounded to the dtype of q, and on CUDA the scan rounds what it adds to the states.
        is_half = inputs["q"].element_size() == 2
        return torch.finfo(inputs["q"].dtype).eps if is_half and name in FROM_ROUNDED else None

    def saved_values(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"divisor": self.forward_operator(*self.forward_arguments(inputs))[4]}


MLSTM = MlstmScan("mlstm_scan")
assert_matches_reference, assert_close, evaluate = MLSTM.assert_matches_reference, MLSTM.assert_close, MLSTM.evaluate
