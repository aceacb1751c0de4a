"""mamba3_chunk_scan against its reference: options, sizes, dtypes, layouts, gradients, and both rotations on the CPU."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from helpers import debug_option
from mamba3_helpers import MAMBA3, OPTIONS, PARAMETERS, SCAN, TENSORS, at_steps, every_option, make_inputs
from operator_spec import tensor_names, with_gradients
from ssd_helpers import PACKED
from torch import Tensor

from ssm_kernels import mamba3_chunk_scan
from ssm_kernels.rules.mamba3 import decomposed_scan

OPERATOR = "mamba3_chunk_scan"
# The kernels, and the operators of PyTorch, which other devices run.
WAYS = {"kernels": contextlib.nullcontext, "pytorch": lambda: debug_option("mamba3_cpu", "operators")}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
# Bounds of gradients from kernels with 16-bit operands, and of those that are sums of larger terms.
ROUNDED = {torch.bfloat16: (5e-3, 1e-2), torch.float16: (7e-4, 1.4e-3)}
CANCELLING = ("grad_angles", "grad_dt", "grad_initial_angle", "grad_initial_x")


def assert_same(inputs: dict[str, Any], tolerance: float = 1e-10) -> None:
    """Results and all gradients, from every result, are the reference's, in float64."""
    cotangents = MAMBA3.make_cotangents(inputs)
    actual = MAMBA3.evaluate(MAMBA3, inputs, cotangents)
    MAMBA3.assert_close(actual, MAMBA3.evaluate_in_float64(inputs, cotangents), tolerance)


@pytest.mark.parametrize("name", ["everything", "ranks", "angles_of_heads"])
def test_backward_of_one_row_at_a_time(name, device):
    """As that of a call whose k and q take too much memory: gradients of parameters are sums over the rows."""
    with debug_option("ssd_workspace_bytes", 1):
        assert_same(make_inputs(batch=3, seqlen=9, device=device, **OPTIONS[name]))


def rounds_in_backward(inputs: dict[str, Any]) -> bool:
    """Whether backward takes the kernels of 16-bit operands."""
    return inputs["x"].is_cuda and inputs["x"].dtype in ROUNDED and inputs["B"].dim() == 4 and inputs.get("norm_weight") is None


def assert_within_rounding(inputs: dict[str, Any], bound: float, bound_of_sums: float) -> None:
    """``out`` has at most 1.15 times its rounding; the other results and the gradients are within bounds, by norms."""
    cotangents = MAMBA3.make_cotangents(inputs)
    actual = MAMBA3.evaluate(MAMBA3, inputs, cotangents)
    exact = MAMBA3.evaluate_in_float64(inputs, cotangents)

    def error(value: Tensor, name: str) -> float:
        return ((value.double() - exact[name]).norm() / exact[name].norm().clamp_min(1e-30)).item()

    assert error(actual.pop("out"), "out") <= 1.15 * error(exact["out"].to(inputs["x"].dtype), "out")
    errors = {name: error(value, name) for name, value in actual.items()}
    assert {name: e for name, e in errors.items() if not e <= (bound_of_sums if name in CANCELLING else bound)} == {}


@every_way
@every_option
def test_matches_reference(options, way, device):
    with way():
        assert_same(make_inputs(seqlen=9, device=device, **options))
        assert_same(make_inputs(seqlen=9, chunk_size=4, device=device, **options))


@every_way
@pytest.mark.parametrize(
    "sizes",
    [
        {"seqlen": 1, "heads": 1, "groups": 1, "headdim": 1, "dstate": 2, "angles": 1},
        {"batch": 1, "seqlen": 67, "heads": 3, "groups": 1, "headdim": 48, "dstate": 16, "angles": 4},
        {"batch": 1, "seqlen": 33, "heads": 2, "groups": 2, "headdim": 80, "dstate": 96, "angles": 24},
        {"batch": 1, "seqlen": 20, "heads": 2, "groups": 1, "headdim": 16, "dstate": 256, "angles": 128, "rotate": "halves"},
        {"seqlen": 7, "dstate": 7, "angles": 3},
        {"seqlen": 7, "dstate": 10, "angles": 1, "rotate": "halves"},
        {"seqlen": 7, "dstate": 1, "angles": 0},
        {"batch": 3, "seqlen": 70, "heads": 6, "groups": 3, "resets": ((63, 64, 65), (1, 69), (68,))},
        {"cu_seqlens": (0, 1, 64, 64, 65, 80), "resets": ((63, 66),)},
        {"ranks": 1, "seqlen": 7, "norm": True},
        {"ranks": 8, "batch": 1, "seqlen": 5, "heads": 2, "groups": 1, "headdim": 5, "dstate": 10, "rotate": "halves"},
        {"ranks": 4, "batch": 1, "seqlen": 33, "heads": 3, "groups": 3, "headdim": 48, "dstate": 16, "angles": 4},
    ],
    ids=str,
)
def test_sizes(sizes, way, device):
    """Traps 1, 4 and 11: unrotated columns, odd and large sizes, groups between, boundaries at the ends of chunks."""
    with way():
        assert_same(make_inputs(device=device, **sizes), 1e-9)


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["everything", "norm_and_z", "packed_with_states", "ranks"])
def test_dtypes(name, dtype, way, device):
    if name == "ranks" and device == "cuda" and dtype != torch.float32:
        pytest.skip("forward rounds k and q: test_mamba3_ranks_cuda.py has the bounds")
    inputs = make_inputs(seqlen=70, headdim=8, dstate=8, dtype=dtype, device=device, **OPTIONS[name])
    if rounds_in_backward(inputs):
        return assert_within_rounding(inputs, *ROUNDED[dtype])
    with way():
        MAMBA3.assert_matches_reference(inputs)


@every_way
@pytest.mark.parametrize("ranks", [None, 3])
def test_float32_is_float32(ranks, way, device):
    """Trap 10: no input is rounded to another dtype. Relative L2 norms against float64."""
    with way():
        sizes = {"ranks": ranks, "norm": ranks is not None} | {"heads": 2, "headdim": 16, "dstate": 32, "angles": 8}
        inputs = make_inputs(seqlen=100, dtype=torch.float32, device=device, **sizes)
        cotangents = MAMBA3.make_cotangents(inputs)
        actual = MAMBA3.evaluate(MAMBA3, inputs, cotangents)
        exact = MAMBA3.evaluate_in_float64(inputs, cotangents)
        for name, value in actual.items():
            error = ((value.double() - exact[name]).norm() / exact[name].norm()).item()
            # The sum over all steps, of terms that cancel: a rotation of everything changes nothing.
            assert error < (2e-6 if name == "grad_initial_angle" else 1e-6), (name, error)


def test_bfloat16_output_is_rounded_once(device):
    inputs = make_inputs(seqlen=80, headdim=16, dstate=32, angles=8, dtype=torch.bfloat16, device=device)
    assert_within_rounding(inputs, *(ROUNDED[torch.bfloat16] if rounds_in_backward(inputs) else (2.5e-3, 2.5e-3)))


def test_gates_of_other_dtypes(device):
    """dt, A, trap and angles of float32 beside 16-bit sequences."""
    inputs = make_inputs(seqlen=20, dtype=torch.bfloat16, device=device)
    inputs |= {name: make_inputs(seqlen=20, dtype=torch.float32, device=device)[name] for name in ("dt", "A", "trap", "angles")}
    if rounds_in_backward(inputs):
        assert_within_rounding(inputs, *ROUNDED[torch.bfloat16])
    else:
        MAMBA3.assert_matches_reference(inputs)


@every_way
@pytest.mark.parametrize("layout", MAMBA3.layouts)
def test_layouts(layout, way, device):
    with way():
        assert_same(make_inputs(seqlen=9, layout=layout, device=device))
        assert_same(make_inputs(seqlen=5, ranks=2, layout=layout, device=device))


@every_way
@pytest.mark.parametrize(
    "name", ["everything", "halves", "norm_and_z", "resets_with_states", "packed_with_states", "ranks", "ranks_packed"]
)
def test_gradcheck(name, way, device):
    inputs = make_inputs(**{"seqlen": 4, "heads": 2, "groups": 1, "headdim": 2, "dstate": 4} | OPTIONS[name], device=device)
    leaves = with_gradients(inputs)
    names = tensor_names(leaves)

    def scan(*tensors: Tensor) -> tuple[Tensor, ...]:
        return MAMBA3(**leaves | dict(zip(names, tensors, strict=True)))

    with way():
        assert torch.autograd.gradcheck(scan, [leaves[name] for name in names], fast_mode=True)


@pytest.mark.parametrize("name", TENSORS)
def test_each_gradient_alone(name, device):
    """Backward that computes one gradient computes the same bits."""
    inputs = make_inputs(seqlen=6, device=device, **OPTIONS["ranks"] if name in PARAMETERS[3:] else {})
    cotangents = MAMBA3.make_cotangents(inputs)
    every = MAMBA3.evaluate(MAMBA3, inputs, cotangents)
    one = MAMBA3.evaluate(MAMBA3, inputs, cotangents, [name])
    torch.testing.assert_close(one[f"grad_{name}"], every[f"grad_{name}"], rtol=0, atol=0)


@every_way
@pytest.mark.parametrize("result", range(5))
def test_each_result_alone(result, way, device):
    inputs = make_inputs(seqlen=6, device=device)
    cotangents = [value if i == result else None for i, value in enumerate(MAMBA3.make_cotangents(inputs))]
    with way():
        actual = MAMBA3.evaluate(MAMBA3, inputs, cotangents)
    MAMBA3.assert_close(actual, MAMBA3.evaluate_in_float64(inputs, cotangents))


def test_opcheck(device):
    for name in ("everything", "required_only", "packed_with_states", "norm_and_z", "ranks"):
        inputs = make_inputs(device=device, **OPTIONS[name])
        positional, keywords = MAMBA3.operator_arguments(inputs)
        torch.library.opcheck(MAMBA3.operator, positional, keywords, test_utils=("test_schema", "test_faketensor"))
    inputs = make_inputs(device=device, **OPTIONS["ranks"])
    torch.library.opcheck(MAMBA3.forward_operator, MAMBA3.forward_arguments(inputs))
    torch.library.opcheck(MAMBA3.backward_operator, MAMBA3.backward_arguments(inputs))


def test_ranks_decompose_and_map():
    """The decomposition, and vmap over sequences and over factors of ranks, as calls of one sample."""
    inputs = make_inputs(seqlen=3, **OPTIONS["ranks"])
    expected = MAMBA3(**inputs)
    for found, wanted in zip(decomposed_scan(**inputs), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)
    for name in ("x", "mimo_x", "initial_k"):
        samples = torch.stack([inputs[name], 2 * inputs[name]])
        mapped = torch.vmap(lambda value, name=name: MAMBA3(**inputs | {name: value}))(samples)
        others = MAMBA3(**inputs | {name: samples[1]})
        for found, first, second in zip(mapped, expected, others, strict=True):
            torch.testing.assert_close(found, torch.stack([first, second]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [0, 1])
def test_short_sequences_pass_states_on(length, device):
    """A call without steps returns the states that it got, with their gradients."""
    assert_same(at_steps(make_inputs(device=device, **OPTIONS["ranks"]), 0, length))
    inputs = at_steps(make_inputs(device=device), 0, length)
    assert_same(inputs | {"initial_angle": inputs["initial_angle"] + 7})
    if length == 0:
        leaves = with_gradients(inputs)
        _, *states = MAMBA3(**leaves)
        for state, name in zip(states, ("angle", "ssm", "k", "x"), strict=True):
            torch.testing.assert_close(state, inputs[f"initial_{name}"], rtol=0, atol=0)
            gradient = torch.autograd.grad(state.sum(), leaves[f"initial_{name}"], retain_graph=True)[0]
            assert gradient.eq(1).all()


def test_without_heads(device):
    inputs = make_inputs(device=device)
    axes = {"dt": 2, "A": 2, "trap": 2, "x": 2, "z": 2, "B_bias": 0, "C_bias": 0, "D": 0}
    axes |= {f"initial_{name}": 1 for name in ("angle", "ssm", "k", "x")}
    leaves = with_gradients(inputs | {name: inputs[name].narrow(axis, 0, 0) for name, axis in axes.items()})
    out, *states = MAMBA3(**leaves)
    assert out.shape == leaves["x"].shape and all(state.numel() == 0 for state in states)
    out.sum().backward()
    assert not leaves["B"].grad.any()


def test_what_is_refused(device):
    inputs = make_inputs(initial_states=False, device=device)
    with pytest.raises(NotImplementedError, match=r"^mamba3_chunk_scan: reverse is not supported: phases grow from the first"):
        SCAN(**inputs, reverse=True)
    tensors = [inputs[name] for name in ("x", "dt", "A", "B", "C", "trap", "angles")]
    for states, got in (((1, 2), "2 of them"), (3, "int")):
        with pytest.raises(ValueError, match=rf"expected initial_states to be the four tensors .*, got {got}"):
            mamba3_chunk_scan(*tensors, initial_states=states)


def test_values_of_cu_seqlens():
    inputs = make_inputs(cu_seqlens=PACKED)
    for values, message in (((0, 9, 3, 9), "not to decrease"), ((1, 9), "to start at 0"), ((0, 8), "to end at seqlen = 9")):
        changed = inputs | {name: None for name in inputs if name.startswith("initial")}
        with pytest.raises(ValueError, match=f"^mamba3_chunk_scan: expected cu_seqlens {message}"):
            SCAN(**changed | {"cu_seqlens": torch.tensor(values, dtype=torch.int32)})


def test_saves_the_inputs_alone(device):
    inputs = with_gradients(make_inputs(seqlen=50, device=device, **OPTIONS["ranks"]))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        SCAN(**inputs)
    storages = {value.untyped_storage().data_ptr() for value in inputs.values() if isinstance(value, Tensor)}
    assert saved and {tensor.untyped_storage().data_ptr() for tensor in saved} <= storages
