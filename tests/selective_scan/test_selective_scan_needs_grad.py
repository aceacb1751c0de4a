"""selective_scan's backward computes the gradients that are asked for, with the same bits as beside all others."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import allocated, on_meta
from operator_spec import with_gradients
from selective_scan_helpers import MINIMAL, SELECTIVE_SCAN, TENSORS, evaluate, make_cotangents, make_inputs, plans_of
from torch._dynamo.testing import CompileCounterWithBackend

from ssm_kernels import selective_scan

OPERATOR = "selective_scan"
pytestmark = pytest.mark.usefixtures("kernel")
ops = torch.ops.ssm_kernels

CASES = {
    "all": {"groups": 2},
    "required_only": MINIMAL,
    "constant_B_and_C": {"B": "constant", "C": "constant"},
    "constant_B": {"B": "constant"},
    "channels_contiguous": {"layout": "transposed", "dtype": torch.bfloat16, "dim": 72, "dstate": 16},
    "vectors": {"dim": 64, "seqlen": 128, "dtype": torch.bfloat16, "dstate": 16},
    "segments": {"dim": 8, "seqlen": 2100, "dtype": torch.float32, "dstate": 16},
    "no_steps": {"seqlen": 0},
    "empty_batch": {"batch": 0},
}
every_case = pytest.mark.parametrize("case", CASES)


def masks() -> list[tuple[bool, ...]]:
    """Each gradient alone, all but each, the halves, the sequences, the parameters, and none."""
    alone = [tuple(i == needed for i in range(9)) for needed in range(9)]
    halves = [tuple(i // 2 % 2 == odd for i in range(9)) for odd in range(2)]
    sequences = tuple(name in ("u", "delta", "B", "C", "z") for name in TENSORS)
    others = [sequences, tuple(not is_sequence for is_sequence in sequences), (False,) * 9]
    return [*alone, *(tuple(not x for x in mask) for mask in alone), *halves, *others]


@every_case
def test_each_gradient_has_the_same_bits_whatever_else_is_needed(case, device):
    inputs = make_inputs(**CASES[case], device=device)
    arguments = SELECTIVE_SCAN.backward_arguments(inputs)[:-1]
    everything = ops._selective_scan_bwd(*arguments, [True] * 9)
    for mask in masks():
        for name, needed, expected, actual in zip(
            TENSORS, mask, everything, ops._selective_scan_bwd(*arguments, mask), strict=True
        ):
            # The initial state is not among the operator's arguments: the mask alone asks for its gradient.
            if needed and (inputs[name] is not None or name == "initial_state"):
                assert torch.equal(actual, expected), f"{name} of {mask}"
            else:
                assert actual.shape == (0,), f"{name} of {mask}"


def test_without_one_of_the_incoming_gradients(device):
    grad_out, grad_last_state, *others = SELECTIVE_SCAN.backward_arguments(make_inputs(device=device))[:-1]
    for incoming in ((grad_out, None), (None, grad_last_state)):
        everything = ops._selective_scan_bwd(*incoming, *others, [True] * 9)
        for mask in masks():
            for needed, expected, actual in zip(
                mask, everything, ops._selective_scan_bwd(*incoming, *others, mask), strict=True
            ):
                assert torch.equal(actual, expected) if needed else not actual.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_whose_padding_gradients_do_not_have(dtype, device):
    """Padding aligns the rows of u, delta and z, but not of gradients: needs_grad must not decide the CUDA kernel."""
    inputs = make_inputs(batch=1, dim=64, seqlen=98, dstate=16, dtype=dtype, device=device)
    for name in ("u", "delta", "z"):
        rows = inputs[name].new_zeros(1, 64, 104)
        rows[..., :98] = inputs[name]
        inputs[name] = rows[..., :98]
    *arguments, _ = SELECTIVE_SCAN.backward_arguments(inputs)
    everything = ops._selective_scan_bwd(*arguments, [True] * 9)
    for mask in masks():
        for needed, expected, actual in zip(mask, everything, ops._selective_scan_bwd(*arguments, mask), strict=True):
            assert torch.equal(actual, expected) if needed else not actual.numel()


@pytest.mark.parametrize("case", ["all", "constant_B_and_C"])
def test_opcheck_and_meta(case, device):
    arguments = SELECTIVE_SCAN.backward_arguments(make_inputs(**CASES[case], device=device))[:-1]
    for mask in masks()[::4]:
        torch.library.opcheck(ops._selective_scan_bwd.default, (*arguments, mask))
        results = (ops._selective_scan_bwd(*map(on_meta, arguments), mask), ops._selective_scan_bwd(*arguments, mask))
        for meta, real in zip(*results, strict=True):
            SELECTIVE_SCAN.assert_same_layout(meta, real)


# ----- autograd


@pytest.mark.parametrize("case", ["all", "required_only", "constant_B_and_C"])
def test_frozen_inputs_get_none_and_change_no_other_gradient(case, device):
    inputs = make_inputs(**CASES[case], device=device)
    cotangents = make_cotangents(inputs)
    expected = evaluate(SELECTIVE_SCAN, inputs, cotangents)
    present = [name for name in TENSORS if inputs[name] is not None]
    for trained in (*itertools.combinations(present, 1), *itertools.combinations(present, 2), tuple(present[1::2])):
        leaves = {name: inputs[name].detach().requires_grad_(name in trained) for name in present}
        results = selective_scan(**(inputs | leaves), return_last_state=True)
        torch.autograd.backward(results, cotangents)
        for name, leaf in leaves.items():
            if name in trained:
                assert torch.equal(leaf.grad, expected[f"grad_{name}"]), f"{name} of {trained}"
            else:
                assert leaf.grad is None


class RecordedMasks(torch.utils._python_dispatch.TorchDispatchMode):
    """Records needs_grad of each call of the backward operator."""

    def __init__(self):
        super().__init__()
        self.masks = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is ops._selective_scan_bwd.default:
            self.masks.append(tuple(args[-1]))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("absent", [(), ("z",), ("D", "delta_bias"), ("initial_state",)])
def test_backward_is_asked_for_what_training_needs(absent, device):
    """Also where all inputs require gradients, but torch.autograd.grad is called for some of them."""
    inputs = make_inputs(device=device) | dict.fromkeys(absent)
    for wanted in ("u", "B", "delta_bias", "initial_state", "z"):
        if wanted in absent:
            continue
        leaves = with_gradients(inputs)
        out = selective_scan(**leaves)
        with RecordedMasks() as recorded:
            torch.autograd.grad(out.sum(), leaves[wanted])
        assert recorded.masks == [tuple(name == wanted for name in TENSORS)]


def test_compiled_backward_computes_what_is_needed(device, fresh_dynamo):
    inputs = make_inputs(device=device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(selective_scan, backend=counter, fullgraph=True)
    for trained in (("u", "z"), ("A", "C", "initial_state")):
        leaves = inputs | {name: inputs[name].detach().requires_grad_() for name in trained}
        out = compiled(**leaves).sum()
        with RecordedMasks() as recorded:  # Dynamo compiles nothing under a mode
            out.backward()
        assert recorded.masks in ([], [tuple(name in trained for name in TENSORS)])
        eager = inputs | {name: inputs[name].detach().requires_grad_() for name in trained}
        selective_scan(**eager).sum().backward()
        assert all(torch.equal(leaves[name].grad, eager[name].grad) for name in trained)
        assert all(leaves[name].grad is None for name in TENSORS if name not in trained)


# ----- the last backward of a graph

REUSE = {
    "many channels": {"dim": 256, "seqlen": 100},
    "fewer states": {"dim": 128, "seqlen": 96, "dstate": 13, "dtype": torch.float32},
    "groups": {"dim": 256, "groups": 2, "seqlen": 64},
    "segments": {"batch": 1, "dim": 128, "seqlen": 2100},
    "reverse": {"dim": 128, "seqlen": 128, "reverse": True},
    "one tile of channels": {"dim": 64, "seqlen": 64},
    "a tile of fewer channels": {"dim": 136, "seqlen": 64},
    "packed": {"dim": 128, "cu_seqlens": [0, 40, 96]},
}


@pytest.mark.parametrize("case", REUSE)
def test_the_last_backward_gives_the_same_bits(case, device):
    """It may write to the chunk states. The other must not: its graph may be used again."""
    inputs = make_inputs(**{"dstate": 16, "dtype": torch.bfloat16, "device": device} | REUSE[case])
    arguments = SELECTIVE_SCAN.backward_arguments(inputs)
    expected = ops._selective_scan_bwd(*arguments)
    for operator in (ops._selective_scan_bwd, ops._selective_scan_bwd_last):
        for actual, value in zip(operator(*arguments), expected, strict=True):
            assert torch.equal(actual, value)


def test_backward_through_a_retained_graph(device):
    inputs = make_inputs(dim=128, seqlen=100, dstate=16, dtype=torch.bfloat16, device=device)
    leaves = [value.requires_grad_() for value in inputs.values() if isinstance(value, torch.Tensor)]
    out = selective_scan(**inputs)
    cotangent = torch.randn_like(out)
    expected = torch.autograd.grad(out, leaves, cotangent, retain_graph=True)
    for retain_graph in (True, False):
        for actual, value in zip(torch.autograd.grad(out, leaves, cotangent, retain_graph), expected, strict=True):
            assert torch.equal(actual, value)


@pytest.mark.cuda
def test_the_last_backward_has_no_workspace_for_partial_sums():
    batch, dim, seqlen, dstate = 8, 512, 1024, 16
    inputs = make_inputs(batch=batch, dim=dim, seqlen=seqlen, dstate=dstate, dtype=torch.bfloat16, device="cuda")
    if not plans_of(inputs)[1].startswith("sequential"):
        pytest.skip("backward is the warp scan here, whose partial sums are larger than the chunk states")
    leaves = [value.requires_grad_() for value in inputs.values() if isinstance(value, torch.Tensor)]

    def taken(retain_graph: bool) -> int:
        out = selective_scan(**inputs)
        cotangent = torch.randn_like(out)
        return allocated(lambda: torch.autograd.grad(out, leaves, cotangent, retain_graph), "cuda")

    taken(True)  # what is allocated once
    assert taken(True) - taken(False) >= 2 * 4 * batch * (dim // 64) * dstate * seqlen


# ----- memory


@pytest.mark.parametrize("matrices", ["variable", "constant"])
def test_what_is_not_needed_takes_no_memory(matrices, device, two_threads):
    """Above all, no partial sums of the gradients of B and C."""
    batch, dim, seqlen, dstate = 4, 256, 512, 16
    inputs = make_inputs(
        batch=batch, dim=dim, seqlen=seqlen, dstate=dstate, B=matrices, C=matrices, dtype=torch.float32, device=device
    )
    arguments = SELECTIVE_SCAN.backward_arguments(inputs)[:-1]

    def taken(*needed: str) -> int:
        mask = [name in needed for name in TENSORS]
        return allocated(lambda: ops._selective_scan_bwd(*arguments, mask), device)

    taken(*TENSORS)  # what is allocated once
    none = taken()
    sequence, states, channels = 4 * batch * dim * seqlen, 4 * batch * dim * dstate, 4 * batch * dim
    # Beside the gradient: of u, delta and z nothing; of the others the sums of each block, or task, of channels.
    least = {"u": sequence, "delta": sequence, "z": sequence, "A": states, "D": channels, "delta_bias": channels}
    for name, size in least.items():
        extra = taken(name) - none
        assert extra >= min(size, inputs[name].nbytes), name
        if name in ("u", "delta", "z"):
            assert extra <= size + 1024, name
    without_matrices = taken(*(name for name in TENSORS if name not in ("B", "C")))
    saved = taken(*TENSORS) - without_matrices
    own = 2 * batch * dstate * seqlen * (2 if device == "cpu" else dim // 64 + 1) if matrices == "variable" else states // 2
    assert saved >= own
    # The rest when no gradient is needed: the adjoint, and on CUDA the carries between segments.
    assert none <= 3 * states + 2**19
