"""states_at of selective_scan and ssd_chunk_scan: values, gradients and how many calls they take."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import selective_scan_helpers
import ssd_helpers
import torch
from helpers import METHODS, gradients_of_dependent, says
from operator_spec import as_float64, tensor_names
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ssm_kernels
from ssm_kernels import reference

OPERATOR = "ssd_chunk_scan"  # runs on the devices that selective_scan has, too
CHUNK = selective_scan_helpers.CHUNK
SEQLEN = 2 * CHUNK + 6
# Not in order, some twice; the first and the last, some at chunk boundaries, some next to each other.
POSITIONS = (CHUNK + 1, 0, SEQLEN, 5, CHUNK, 5, 2 * CHUNK, CHUNK - 1, SEQLEN - 1)
PACKED = (0, 0, 3, 4, 4, 40, SEQLEN, SEQLEN)
SELECTIVE, SSD = "selective_scan", "ssd_chunk_scan"
SSD_SEQUENCES = (*ssd_helpers.SEQUENCES, *ssd_helpers.GIVEN)
ALL_RESULTS = {SELECTIVE: "return_last_state", SSD: "return_final_states"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"selective_{name}": (SELECTIVE, {"discretization": name}) for name in METHODS},
    "selective_minimal": (SELECTIVE, selective_scan_helpers.MINIMAL),
    "selective_constant": (SELECTIVE, {"B": "constant", "C": "constant"}),
    "selective_groups": (SELECTIVE, {"groups": 2}),
    "selective_many_states": (SELECTIVE, {"dstate": 17}),
    "selective_transposed": (SELECTIVE, {"layout": "transposed"}),
    **{f"ssd_{name}": (SSD, {"discretization": name}) for name in ssd_helpers.METHODS},
    "ssd_minimal": (SSD, ssd_helpers.MINIMAL),
    "ssd_log_decay": (SSD, {"log_decay": True}),
    "ssd_log_decay_without_gain": (SSD, {"log_decay": True, "gain": False}),
    "ssd_resets": (SSD, {"resets": ((2, 5, CHUNK), (CHUNK + 1, CHUNK + 2))}),
    "ssd_packed": (SSD, {"cu_seqlens": PACKED}),
    "ssd_packed_log_decay": (SSD, {"cu_seqlens": PACKED, "log_decay": True}),
    "ssd_packed_without_states": (SSD, {"cu_seqlens": PACKED, "initial_states": False}),
    "ssd_packed_with_resets": (SSD, {"cu_seqlens": PACKED, "resets": ((3, 4, 5, CHUNK, 40, CHUNK + 1, 2 * CHUNK),)}),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
every_scan = pytest.mark.parametrize("name", [SELECTIVE, SSD])


def make_inputs(name: str, **options: Any) -> dict[str, Any]:
    helpers = selective_scan_helpers if name == SELECTIVE else ssd_helpers
    return helpers.make_inputs(**({"seqlen": SEQLEN} | options))


def of_steps(name: str, inputs: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """The arguments of some steps."""
    sequences, axis = (("u", "delta", "B", "C", "z"), -1) if name == SELECTIVE else (SSD_SEQUENCES, 1)
    return inputs | {key: inputs[key].narrow(axis, begin, end - begin) for key in sequences if inputs[key] is not None}


def evaluate(function: Callable, inputs: dict[str, Any], weights: list[Tensor] | None, **options: Any) -> list[Tensor]:
    """The results and, with weights, which are their gradients, the gradients of the tensors."""
    names = tensor_names(inputs)
    leaves = {name: inputs[name].detach().clone().requires_grad_(weights is not None) for name in names}
    results = function(**inputs | leaves, **options)
    if weights is None:
        return list(results)
    cotangents = [weight.to(result) for result, weight in zip(results, weights, strict=True)]
    return [*results, *gradients_of_dependent(results, cotangents, list(leaves.values()))]


def draw_like(results: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result.device) for result in results]


@pytest.mark.parametrize("needs_grad", [True, False], ids=["gradients", "inference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@every_case
def test_matches_reference(case, dtype, needs_grad, device):
    name, options = case
    inputs = make_inputs(name, **options, dtype=dtype, device=device)
    asked = {ALL_RESULTS[name]: True, "states_at": POSITIONS}
    function, of_reference = getattr(ssm_kernels, name), getattr(reference, name)
    exact = as_float64(inputs)
    weights = draw_like(evaluate(of_reference, exact, None, **asked)) if needs_grad else None
    expected = evaluate(of_reference, exact, weights, **asked)
    actual = evaluate(function, inputs, weights, **asked)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    for value, wanted in zip(actual, expected, strict=True):
        scale = max(1.0, wanted.abs().max().item())
        torch.testing.assert_close(value.double(), wanted, rtol=tolerance, atol=tolerance * scale)
    out, last, states = actual[:3]
    assert states.dtype == last.dtype == dtype and states.shape == (
        inputs[tensor_names(inputs)[0]].shape[0],
        9,
        *last.shape[1:],
    )
    assert torch.equal(states[:, 3], states[:, 5])  # position 5 twice
    assert out.stride() == function(**inputs).stride()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@every_scan
def test_low_precision(name, dtype, device):
    """The state at a position is the last state of a scan of the steps before it."""
    inputs = make_inputs(name, dtype=dtype, device=device)
    function, full = getattr(ssm_kernels, name), {ALL_RESULTS[name]: True}
    states = function(**inputs, states_at=POSITIONS)[1]
    assert states.dtype == torch.float32
    tolerance = 2e-2 if name == SSD and device == "cuda" else 1e-4  # products of operands rounded to 16 bits
    for i, p in enumerate(POSITIONS):
        before = of_steps(name, inputs, 0, p)
        torch.testing.assert_close(states[:, i], function(**before, **full)[1], rtol=tolerance, atol=tolerance)


@every_scan
def test_restarting_continues(name, device):
    inputs, p = make_inputs(name, device=device), CHUNK + 1
    function = getattr(ssm_kernels, name)
    out, states = function(**inputs, states_at=[p])
    rest = of_steps(name, inputs, p, SEQLEN) | {"initial_state" if name == SELECTIVE else "initial_states": states[:, 0]}
    expected = out.narrow(-1 if name == SELECTIVE else 1, p, SEQLEN - p)
    torch.testing.assert_close(function(**rest), expected, rtol=1e-11, atol=1e-11)


@every_scan
def test_kinds_of_positions(name, device):
    inputs = make_inputs(name, device=device)
    function = getattr(ssm_kernels, name)
    expected = function(**inputs, states_at=POSITIONS)[1]
    for dtype in (torch.int32, torch.int64):
        assert torch.equal(function(**inputs, states_at=torch.tensor(POSITIONS, dtype=dtype))[1], expected)
    assert torch.equal(function(**inputs, states_at=list(POSITIONS))[1], expected)
    out, states = function(**inputs, states_at=())
    assert states.shape == (2, 0, *expected.shape[2:]) and torch.equal(out, function(**inputs))
    empty = make_inputs(name, seqlen=0, device=device)
    initial = empty["initial_state" if name == SELECTIVE else "initial_states"]
    assert torch.equal(function(**empty, states_at=[0, 0])[1], torch.stack([initial, initial], 1))


@pytest.mark.parametrize("cu_seqlens", [(0,), (0, 0), (0, 0, 0, 0)])
@every_scan
def test_packed_sequences_without_steps(name, cu_seqlens, device):
    """No sequence has a step 0: the state there is zero, and those of the sequences are their initial ones."""
    inputs = make_inputs(name, cu_seqlens=cu_seqlens, device=device)
    asked = {ALL_RESULTS[name]: True, "states_at": [0, 0]}
    function, of_reference = getattr(ssm_kernels, name), getattr(reference, name)
    weights = draw_like(evaluate(of_reference, as_float64(inputs), None, **asked))
    actual, expected = (evaluate(f, inputs, weights, **asked) for f in (function, of_reference))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    _, last, states = actual[:3]
    assert torch.equal(last, inputs["initial_state" if name == SELECTIVE else "initial_states"])
    assert states.shape == (1, 2, *last.shape[1:]) and not states.any()


class Calls(TorchDispatchMode):
    """Counts calls of the operators' forward kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.forward += func.name().endswith(("_scan_fwd", "_states_fwd"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "name, needs_grad, positions, calls",
    [
        (SELECTIVE, False, (0, CHUNK, 2 * CHUNK, SEQLEN), 1),  # multiples of the chunk: no further call
        (SELECTIVE, False, (0, CHUNK, CHUNK + 1, CHUNK + 1, 3), 3),
        (SELECTIVE, True, (0, CHUNK, SEQLEN), 2),
        (SELECTIVE, True, (3, 3, CHUNK), 3),
        (SSD, False, (0, SEQLEN), 1),
        (SSD, False, POSITIONS, 1),
        (SSD, True, POSITIONS, {"cpu": 1, "cuda": 7}),
    ],
)
def test_number_of_calls(name, needs_grad, positions, calls, device):
    inputs = make_inputs(name, device=device)
    inputs["A"].requires_grad_()
    with torch.set_grad_enabled(needs_grad), Calls() as counted:
        getattr(ssm_kernels, name)(**inputs, states_at=positions)
    assert counted.forward == (calls[torch.device(device).type] if isinstance(calls, dict) else calls)


def test_steps_between_saved_states():
    """The docstring of selective_scan names them."""
    assert [selective_scan_helpers.chunk_length(dstate) for dstate in range(1, 257)] == [32] * 16 + [64] * 240


@pytest.mark.parametrize("resets", [None, ((64, 100, 128), (63, 65, 250), ())], ids=["", "resets"])
def test_many_chunks_in_one_call(resets, device):
    """Runs of one chunk or several, which begin at a position or before it, of a batch that is split."""
    inputs = make_inputs(SSD, batch=3, seqlen=300, headdim=64, dstate=64, heads=8, resets=resets, device=device)
    every = [*range(0, 300, 64), 3, 16, 17, 63, 65, 129, 131, 299, 300]
    out, final_states, states = reference.ssd_chunk_scan(**inputs, states_at=every, return_final_states=True)
    subsets = (every[:5], every[5:], every, [131], [128, 131], [0], [300])
    for chunk_size, positions in itertools.product((16, 64, None), subsets):
        actual = ssm_kernels.ssd_chunk_scan(
            **inputs | {"chunk_size": chunk_size}, states_at=positions, return_final_states=True
        )
        expected = [out, final_states, states[:, [every.index(p) for p in positions]]]
        torch.testing.assert_close(list(actual), expected, rtol=1e-10, atol=1e-10)
    asked = {"return_final_states": True, "states_at": every}
    weights = draw_like([out, final_states, states])
    wanted = evaluate(reference.ssd_chunk_scan, inputs, weights, **asked)
    for chunk_size in (16, None):
        actual = evaluate(ssm_kernels.ssd_chunk_scan, inputs | {"chunk_size": chunk_size}, weights, **asked)
        torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-9)


def test_gradients_of_some_results(device):
    """A loss of the states alone, of the output alone, and of the first position, which is the initial state."""
    inputs = make_inputs(SSD, device=device)
    for used, positions in (([1], (3, CHUNK)), ([0], (3, CHUNK)), ([1], (0,)), ([0, 1], (0, SEQLEN))):
        gradients = []
        for function in (ssm_kernels.ssd_chunk_scan, reference.ssd_chunk_scan):
            leaves = [inputs[name].clone().requires_grad_() for name in ("x", "dt", "B", "initial_states")]
            given = dict(zip(("x", "dt", "B", "initial_states"), leaves, strict=True))
            results = function(**inputs | given, states_at=positions)
            loss = sum(results[i].square().sum() for i in used)
            gradients.append(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


def test_the_operator_that_returns_states(device):
    operator = torch.ops.ssm_kernels._ssd_chunk_scan_states.default
    inputs = make_inputs(SSD, cu_seqlens=(0, SEQLEN), device=device)
    packed = ssd_helpers.SSD.forward_arguments(inputs)
    in_reverse = ssd_helpers.SSD.forward_arguments(make_inputs(SSD, reverse=True, device=device))
    arguments = ssd_helpers.SSD.forward_arguments(make_inputs(SSD, device=device))
    for positions in ([], [0, 3, SEQLEN]):
        leaves = [each.requires_grad_() if torch.is_tensor(each) and each.is_floating_point() else each for each in arguments]
        torch.library.opcheck(operator, (*leaves, positions))
    for wrong, values, message in [
        (arguments, [3, 3], "expected states_at in ascending order, got [3, 3]"),
        (arguments, [SEQLEN + 1], f"expected states_at from 0 to seqlen = {SEQLEN}, got {SEQLEN + 1}"),
        (packed, [3], "expected states_at without cu_seqlens in this operator"),
        (in_reverse, [3], "expected states_at without reverse, got both"),
    ]:
        with pytest.raises(ValueError, match=says(f"ssd_chunk_scan: {message}")):
            operator(*wrong, values)


def test_the_state_before_a_reset(device):
    """seq_idx begins a sequence at the position: the state is that of the sequence before, and the scan starts from zero."""
    inputs = make_inputs(SSD, batch=1, resets=((5,),), device=device)
    out, states = ssm_kernels.ssd_chunk_scan(**inputs, states_at=[5])
    assert states.any()
    torch.testing.assert_close(out, ssm_kernels.ssd_chunk_scan(**inputs), rtol=1e-11, atol=1e-11)


@every_scan
def test_autocast_and_vmap(name, device):
    inputs = make_inputs(name, dtype=torch.float32, device=device)
    function, first = getattr(ssm_kernels, name), "u" if name == SELECTIVE else "x"
    for grad in (True, False):
        with torch.set_grad_enabled(grad), torch.autocast(device, torch.bfloat16):
            out, states = function(**inputs, states_at=(3, CHUNK))
        assert out.dtype == torch.bfloat16 and states.dtype == torch.float32
    samples = torch.stack([inputs[first], 2 * inputs[first]])
    mapped = torch.vmap(lambda u: function(**inputs | {first: u}, states_at=(3, CHUNK)))(samples)
    for i, sample in enumerate(samples):
        alone = function(**inputs | {first: sample}, states_at=(3, CHUNK))
        torch.testing.assert_close([each[i] for each in mapped], list(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("needs_grad", [True, False], ids=["gradients", "inference"])
@every_scan
def test_compile(name, needs_grad, device):
    inputs = make_inputs(name, dtype=torch.float32, device=device)
    inputs["A"].requires_grad_()
    function = getattr(ssm_kernels, name)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(needs_grad):
        for positions in ((3, CHUNK), (CHUNK, 7), (0, SEQLEN)):
            actual, expected = (call(**inputs, states_at=positions) for call in (compiled, function))
            torch.testing.assert_close(list(actual), list(expected), rtol=1e-5, atol=1e-5)
            if needs_grad:
                of_actual, of_expected = (
                    torch.autograd.grad(states.square().sum(), inputs["A"]) for _, states in (actual, expected)
                )
                torch.testing.assert_close(of_actual, of_expected, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@every_scan
def test_export_with_any_length(name, packed, device):
    inputs = make_inputs(name, **({"cu_seqlens": (0, 2, 9)} if packed else {}), seqlen=9, device=device)
    first, last = ("u", "initial_state") if name == SELECTIVE else ("x", "initial_states")
    sequences, axis = (("delta", "B", "C", "z"), -1) if name == SELECTIVE else (ssd_helpers.SEQUENCES[1:], 1)
    names = (first, *(key for key in sequences if inputs[key] is not None), *(("cu_seqlens",) if packed else ()))
    rest = {key: value for key, value in inputs.items() if key not in (*names, last)}

    class Scan(torch.nn.Module):
        def forward(self, *given: Tensor) -> Any:
            return getattr(ssm_kernels, name)(**dict(zip(names, given, strict=True)), **rest, states_at=[2, 0, 1, 2])

    length = torch.export.Dim("length", min=4, max=100)  # the last piece has at least 2 steps
    sizes = tuple({} if key == "cu_seqlens" else {axis % inputs[key].dim(): length} for key in names)
    program = torch.export.export(Scan(), tuple(inputs[key] for key in names), dynamic_shapes=(sizes,))
    for seqlen in (4, 9, CHUNK + 6):
        offsets = {"cu_seqlens": (0, 2, seqlen)} if packed else {}
        others = make_inputs(name, **offsets, seqlen=seqlen, device=device)
        given = tuple(others[key] for key in names)
        torch.testing.assert_close(program.module()(*given), Scan()(*given), rtol=1e-12, atol=1e-12)


BAD = [
    ([-1], ValueError, f"expected states_at from 0 to seqlen = {SEQLEN}, got -1"),
    ([0, SEQLEN + 1], ValueError, f"expected states_at from 0 to seqlen = {SEQLEN}, got {SEQLEN + 1}"),
    (torch.zeros(1, 2, dtype=torch.int64), ValueError, "expected states_at of shape (positions,), got [1, 2]"),
    (torch.zeros(2), RuntimeError, "expected states_at of dtype int32 or int64, got torch.float32"),
    (
        torch.zeros(2, dtype=torch.int64, device="meta"),
        RuntimeError,
        "expected states_at on the CPU, where it is read, got meta",
    ),
    ([1.5], TypeError, "expected states_at to be a sequence of ints or a tensor, got [1.5]"),
    (3, TypeError, "expected states_at to be a sequence of ints or a tensor, got 3"),
]


@pytest.mark.parametrize("positions, error, message", BAD, ids=[message for *_, message in BAD])
@every_scan
def test_bad_positions(name, positions, error, message, device):
    with pytest.raises(error, match=says(f"{name}: {message}")):
        getattr(ssm_kernels, name)(**make_inputs(name, device=device), states_at=positions)


@pytest.mark.parametrize(
    "name, changed",
    [
        *((SELECTIVE, name) for name in ("u", "delta", "B", "z", "A", "initial_state")),
        *((SSD, name) for name in ("x", "dt", "B", "z", "seq_idx", "initial_states", "cu_seqlens")),
    ],
)
def test_errors_are_those_of_the_scan(name, changed, device):
    """Also of tensors with more steps than the others, which the pieces do not reach."""
    packed = {"cu_seqlens": (0, 9, SEQLEN)} if changed == "cu_seqlens" else {"resets": ((2,),)} if changed == "seq_idx" else {}
    inputs = make_inputs(name, **packed, device=device)
    value = inputs[changed]
    wrong = [torch.cat([value, value], axis) for axis in range(value.dim())] + [value[None]]
    if changed == "cu_seqlens":
        wrong = [
            torch.tensor(offsets, device=device)
            for offsets in ((0, SEQLEN + 5, SEQLEN), (1, SEQLEN), (0, 9), (0, 9, 5, SEQLEN))
        ]
    for bad in wrong:
        messages = []
        for options in ({}, {"states_at": (3, CHUNK)}):
            with pytest.raises(ValueError) as error:
                getattr(ssm_kernels, name)(**inputs | {changed: bad}, **options)
            messages.append(str(error.value))
        assert messages[0] == messages[1]


def test_every_pair_of_positions(device):
    """All states of a short sequence, from two calls each."""
    for name, make in itertools.product((SELECTIVE, SSD), (True, False)):
        inputs = make_inputs(name, seqlen=6, device=device)
        inputs["A"].requires_grad_(make)
        function, of_reference = getattr(ssm_kernels, name), getattr(reference, name)
        all_states = of_reference(**inputs, states_at=range(7))[1]
        for pair in itertools.product(range(7), repeat=2):
            states = function(**inputs, states_at=pair)[1]
            torch.testing.assert_close(states, all_states[:, list(pair)], rtol=1e-11, atol=1e-11)
