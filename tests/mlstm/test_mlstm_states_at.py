"""states_at and reverse of mlstm_scan: values, gradients, and what calls them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import gradients_of_dependent, says
from mlstm_helpers import GATES, MLSTM, OPTIONS, SEQUENCES, STATES, assert_close, at_steps, every_gate, make_inputs
from operator_spec import as_float64, with_gradients
from torch import Tensor

import ssm_kernels
from ssm_kernels import reference

OPERATOR = "mlstm_scan"

SEQLEN = 131
# Not in order, one twice; the first and the last, and around the ends of chunks.
POSITIONS = (64, 0, 3, 65, 130, SEQLEN, 3)
PACKED = (0, 0, 3, 70, 70, SEQLEN)
CASES: dict[str, dict[str, Any]] = GATES | {
    "from_nothing": {"initial_states": False},
    "resets": {"resets": ((3, 64, 66),)},
    "packed": {"cu_seqlens": PACKED},
    "packed_from_nothing": {"cu_seqlens": PACKED, "initial_states": False},
    "packed_with_resets": {"cu_seqlens": PACKED, "resets": ((2, 3, 64, 70, 130),)},
}
every_case = pytest.mark.parametrize("options", CASES.values(), ids=list(CASES))


def in_one_tuple(function: Any, inputs: dict[str, Any], **options: Any) -> list[Tensor]:
    """out, the last states if they are asked for, and those at the positions."""
    states = tuple(inputs[name] for name in STATES)
    given = {
        name: value for name, value in inputs.items() if name not in (*STATES, "cu_seqlens", "seq_idx") or value is not None
    }
    arguments = {name: value for name, value in given.items() if name not in STATES}
    out, *others = function(**arguments, initial_states=None if states[0] is None else states, **options)
    return [out, *(state for group in others for state in group)]


def evaluate(function: Any, inputs: dict[str, Any], **options: Any) -> list[Tensor]:
    """The results, and the gradients of all arguments through all results but the units."""
    leaves = with_gradients(inputs)
    results = in_one_tuple(function, leaves, return_final_states=True, **options)
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in results]
    # The unit of an empty memory is minus infinity.
    used = [place for place in range(7) if place not in (3, 6)]
    names = [name for name, x in leaves.items() if isinstance(x, Tensor) and x.requires_grad and name != "initial_m"]
    outputs, cotangents = ([x[place] for place in used] for x in (results, weights))
    gradients = gradients_of_dependent(outputs, cotangents, [leaves[name] for name in names])
    return [*(x.detach() for x in results), *gradients]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@every_case
def test_matches_reference(options, dtype, device):
    inputs = make_inputs(**{"batch": 1, "seqlen": SEQLEN} | options, dtype=dtype, device=device)
    actual = evaluate(ssm_kernels.mlstm_scan, inputs, states_at=POSITIONS)
    expected = evaluate(reference.mlstm_scan, as_float64(inputs), states_at=POSITIONS)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    for value, wanted in zip(actual, expected, strict=True):
        finite = wanted[wanted.isfinite()]
        largest = max(1.0, finite.abs().max().item()) if finite.numel() else 1.0
        torch.testing.assert_close(value.double(), wanted, rtol=tolerance, atol=tolerance * largest)
    C, n, m = actual[4:7]
    assert C.shape == (1, 7, 4, 2, 3) and n.shape == (1, 7, 4, 3) and m.shape == (1, 7, 4)
    assert C.dtype == n.dtype == m.dtype == dtype
    assert all(torch.equal(x[:, 2], x[:, 6]) for x in (C, n, m))  # position 3 twice


@every_gate
def test_restarting_continues(options, device):
    inputs = make_inputs(seqlen=SEQLEN, device=device, **options)
    out, *states = in_one_tuple(ssm_kernels.mlstm_scan, inputs, states_at=[65])
    rest = at_steps(inputs, 65, SEQLEN) | dict(zip(STATES, (state[:, 0] for state in states), strict=True))
    torch.testing.assert_close(MLSTM(**rest)[0], out[:, 65:], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_low_precision(dtype, device):
    """The states at a position are the last states of a scan of the steps before it."""
    inputs = make_inputs(seqlen=SEQLEN, key_dim=16, value_dim=16, dtype=dtype, device=device)
    _, *states = in_one_tuple(ssm_kernels.mlstm_scan, inputs, states_at=POSITIONS)
    tolerance = 2e-2 if device == "cuda" else 1e-4  # products of rounded operands
    for place, position in enumerate(POSITIONS):
        _, *expected = MLSTM(**at_steps(inputs, 0, position))
        for state, wanted in zip(states, expected, strict=True):
            assert state.dtype == torch.float32
            torch.testing.assert_close(
                state[:, place], wanted, rtol=tolerance, atol=tolerance * max(1.0, wanted.abs().max().item())
            )


def test_kinds_of_positions(device):
    inputs = make_inputs(seqlen=70, device=device)
    expected = in_one_tuple(ssm_kernels.mlstm_scan, inputs, states_at=(3, 0, 70))
    for positions in ([3, 0, 70], torch.tensor([3, 0, 70]), torch.tensor([3, 0, 70], dtype=torch.int32)):
        torch.testing.assert_close(in_one_tuple(ssm_kernels.mlstm_scan, inputs, states_at=positions), expected, rtol=0, atol=0)
    out, C, n, m = in_one_tuple(ssm_kernels.mlstm_scan, inputs, states_at=())
    assert C.shape == (2, 0, 4, 2, 3) and n.shape == (2, 0, 4, 3) and m.shape == (2, 0, 4)
    assert torch.equal(out, MLSTM(**inputs)[0])


@pytest.mark.parametrize("options", [{"seqlen": 0}, {"cu_seqlens": (0,)}, {"cu_seqlens": (0, 0, 0)}])
def test_no_steps(options, device):
    inputs = make_inputs(**options, device=device)
    found, wanted = (evaluate(f, inputs, states_at=(0, 0)) for f in (ssm_kernels.mlstm_scan, reference.mlstm_scan))
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)
    C, n, m = found[4:7]
    if "seqlen" in options:
        assert torch.equal(C[:, 0], inputs["initial_C"]) and torch.equal(m[:, 1], inputs["initial_m"])
    else:  # no sequence has a step 0
        assert not C.any() and not n.any() and torch.isneginf(m).all() and m.shape == (1, 2, 4)


def test_positions_are_refused(device):
    inputs = make_inputs(device=device)
    for positions, options, message in (
        ((6,), {}, "expected states_at from 0 to seqlen = 5, got 6"),
        ((1,), {"reverse": True}, "expected states_at without reverse, got both"),
    ):
        with pytest.raises(ValueError, match=says(f"mlstm_scan: {message}")):
            in_one_tuple(ssm_kernels.mlstm_scan, inputs | options, states_at=positions)
    with pytest.raises(TypeError, match=says("mlstm_scan: expected states_at to be a sequence of ints or a tensor, got 3")):
        in_one_tuple(ssm_kernels.mlstm_scan, inputs, states_at=3)


def test_errors_are_those_of_the_scan(device):
    """Also of tensors with more steps than the others, which the pieces do not reach."""
    inputs = make_inputs(device=device)
    for name in (*SEQUENCES, *STATES):
        for axis in range(inputs[name].dim()):
            messages = []
            for options in ({}, {"states_at": (3,)}):
                with pytest.raises(ValueError) as error:
                    in_one_tuple(ssm_kernels.mlstm_scan, inputs | {name: torch.cat([inputs[name]] * 2, axis)}, **options)
                messages.append(str(error.value))
            assert messages[0] == messages[1]


def test_autocast_and_vmap(device):
    inputs = make_inputs(seqlen=70, dtype=torch.float32, device=device)
    with torch.autocast(device, torch.bfloat16):
        out, *states = in_one_tuple(ssm_kernels.mlstm_scan, inputs, states_at=(3, 64))
    assert out.dtype == torch.bfloat16 and {state.dtype for state in states} == {torch.float32}
    samples = torch.stack([inputs["q"], 2 * inputs["q"]])
    for options in ({"states_at": (3, 64)}, {"reverse": True, "return_final_states": True}):
        call = lambda q, options=options: in_one_tuple(  # noqa: E731
            ssm_kernels.mlstm_scan,
            inputs | {"q": q, "reverse": False} | {"reverse": options.get("reverse", False)},
            **{name: value for name, value in options.items() if name != "reverse"},
        )
        mapped = torch.vmap(call)(samples)
        for place, sample in enumerate(samples):
            torch.testing.assert_close([each[place] for each in mapped], call(sample), rtol=1e-4, atol=1e-4)


def test_compile_and_export(device):
    inputs = make_inputs(seqlen=9, dtype=torch.float32, device=device)
    names = (*SEQUENCES, *STATES)

    class Scan(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> list[Tensor]:
            given = inputs | dict(zip(names, tensors, strict=True))
            in_reverse = in_one_tuple(ssm_kernels.mlstm_scan, given | {"reverse": True}, return_final_states=True)
            return in_one_tuple(ssm_kernels.mlstm_scan, given, states_at=[2, 0, 1, 2]) + in_reverse

    def of_steps(seqlen: int) -> tuple[Tensor, ...]:
        others = make_inputs(seqlen=seqlen, dtype=torch.float32, device=device)
        return tuple(others[name] for name in names)

    compiled = torch.compile(Scan(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*of_steps(9)), Scan()(*of_steps(9)), rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
    length = torch.export.Dim("length", min=4, max=200)
    sizes = tuple({1: length} if name in SEQUENCES else {} for name in names)
    program = torch.export.export(Scan(), of_steps(9), dynamic_shapes=(sizes,))
    for seqlen in (4, 9, 70):
        torch.testing.assert_close(program.module()(*of_steps(seqlen)), Scan()(*of_steps(seqlen)), rtol=1e-5, atol=1e-5)


# ----- reverse


@pytest.mark.parametrize("name", ["reverse", "reverse_without_divisor", "reverse_packed_with_resets"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
def test_reverse_is_flipped(name, layout, device):
    """The scan of flipped tensors, with its gradients; without cu_seqlens, which the reference flips."""
    inputs = make_inputs(**OPTIONS[name] | ({} if "packed" in name else {"seqlen": 70}), layout=layout, device=device)
    found = MLSTM.assert_matches_reference(inputs)
    assert found["out"].shape == inputs["v"].shape
    if "packed" in name:
        return

    def flipped(**leaves: Any) -> tuple[Tensor, ...]:
        steps = {key: leaves[key].flip(1) for key in SEQUENCES}
        out, *states = MLSTM(**leaves | steps | {"reverse": False})
        return out.flip(1), *states

    MLSTM.assert_same_as(flipped, inputs)


@pytest.mark.parametrize("value_dim", [8, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reverse_in_low_precision(dtype, value_dim, device):
    inputs = make_inputs(seqlen=130, key_dim=16, value_dim=value_dim, reverse=True, dtype=dtype, device=device)
    forward = inputs | {key: inputs[key].flip(1) for key in SEQUENCES} | {"reverse": False}
    found, expected = MLSTM(**inputs), MLSTM(**forward)
    assert_close({"out": found[0]}, {"out": expected[0].flip(1)}, 1e-12)
    assert all(torch.equal(x, y) for x, y in zip(found[1:], expected[1:], strict=True))
