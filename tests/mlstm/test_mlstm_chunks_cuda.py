"""mlstm_scan's own chunked kernels on CUDA, beside float64 on the CPU of the same rounded inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_equal, debug_option
from mlstm_helpers import SCAN, SEQUENCES, STATES, TENSORS, make_inputs

pytestmark = pytest.mark.cuda

# Relative L2 errors. Rounding a result to bfloat16 makes 1.7e-3, and so does each rounding of an operand of its products. The
# gradients through numerators and divisor cancel in part: emulated in PyTorch, the roundings of both give 6.8e-3 for these
# inputs, and 8e-3 for the gradient of n, a sum of few steps.
BARS = {"out": 3.5e-3, "final_C": 1e-3, "grad_v": 4e-3, "grad_initial_C": 4e-3, "grad_initial_n": 1.2e-2}
GRADIENT_BAR = 8e-3
RESULTS = ("out", "final_C", "final_n", "final_m")


def make_long_memories(**options: Any) -> dict[str, Any]:
    """Inputs whose memories last for tens of steps.

    eps keeps divisors away from zero: the results of a step whose n q cancels would be mostly rounding errors.
    """
    sizes = {"batch": 2, "seqlen": 300, "heads": 2, "key_dim": 256, "value_dim": 256}
    inputs = make_inputs(**(sizes | {"dtype": torch.bfloat16, "eps": 0.5} | options))
    return inputs | {"f": inputs["f"] + 2}


def evaluate(inputs: dict[str, Any], device: str, double: bool, through_ends: bool = True) -> dict[str, torch.Tensor]:
    """All results, and the gradients of all tensors, given random gradients of out and, with `through_ends`, of C and n."""

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().to(device, torch.double if double and value.is_floating_point() else value.dtype)

    arguments = {name: moved(value) for name, value in inputs.items()}
    names = [name for name in TENSORS if arguments[name] is not None]
    leaves = {name: arguments[name].requires_grad_() for name in names}
    found = SCAN(**arguments, return_final_states=True)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(one.shape, generator=generator).to(inputs["v"].dtype).to(one.device, one.dtype) for one in found[:3]]
    differentiated = 3 if through_ends else 1
    of_leaves = torch.autograd.grad(found[:differentiated], list(leaves.values()), grads[:differentiated])
    return dict(zip(RESULTS, found, strict=True)) | {f"grad_{n}": g for n, g in zip(names, of_leaves, strict=True)}


def assert_accurate(inputs: dict[str, Any], through_ends: bool = True) -> dict[str, torch.Tensor]:
    found, expected = (evaluate(inputs, *where, through_ends) for where in (("cuda", False), ("cpu", True)))
    for name, value in found.items():
        value, wanted = value.detach().double().cpu(), expected[name].detach()
        if name == "final_m":  # -inf after no steps
            empty = wanted.isneginf()
            assert torch.equal(value.isneginf(), empty), name
            value, wanted = value[~empty], wanted[~empty]
        assert value.isfinite().all(), name
        error = ((value - wanted).norm() / wanted.norm().clamp_min(1e-30)).item()
        assert error < BARS.get(name, GRADIENT_BAR), (name, error)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"initial_states": False},
        {"input_gate": "sigmoid"},
        {"input_gate": "sigmoid", "normalize": False},
        {"scale": 0.02, "eps": 0.1},
        {"value_dim": 512, "heads": 1},
    ],
    ids=str,
)
def test_options(options):
    assert_accurate(make_long_memories(**options))


def test_memory_at_any_address():
    """A contiguous memory that begins at an odd float; backward gets its gradient from a concatenation."""
    inputs = make_long_memories(batch=1, heads=1, seqlen=130)
    memory = inputs["initial_C"]
    moved = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    flat = torch.cat([memory.new_zeros(1), memory.flatten()]).cuda().requires_grad_()
    results = {}
    for name, initial_C in (("aligned", flat[1:].clone().view(memory.shape)), ("odd", flat[1:].view(memory.shape))):
        out, final_C, _, final_m = SCAN(**moved | {"initial_C": initial_C}, return_final_states=True)
        ends = torch.cat([final_m.flatten(), final_C.flatten()]) if name == "odd" else final_C.flatten()
        grad = torch.autograd.grad(ends.sum() + out.float().sum(), flat)[0]
        results[name] = {"out": out, "final_C": final_C, "grad": grad}
    assert_equal(results["odd"], results["aligned"])


@pytest.mark.parametrize("input_gate", ["exp", "sigmoid"])
@pytest.mark.parametrize("step", [0, 7, 100])
def test_nan_of_a_forget_gate_stays(step, input_gate):
    inputs = make_long_memories(batch=1, heads=1, seqlen=130, input_gate=input_gate)
    moved = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    moved["f"][:, step] = torch.nan
    with torch.no_grad():
        out, final_C, *_ = SCAN(**moved, return_final_states=True)
    assert out[:, step:].isnan().all() and final_C.isnan().all() and out[:, :step].isfinite().all()


@pytest.mark.parametrize("seqlen", [1, 63, 64, 65, 127, 128, 129, 257])
def test_lengths(seqlen):
    assert_accurate(make_long_memories(seqlen=seqlen, batch=3, heads=1))


def test_long_sequences_are_split_into_segments():
    assert_accurate(make_long_memories(batch=1, heads=1, seqlen=2100))


# Ends of sequences inside chunks of 128 steps, several in one, at their first and last steps, and without steps.
PACKED = {
    "inside": (300, 128, 84, 5, 0, 1, 130, 376),
    "whole_chunks": (128, 256, 0, 0, 640),
    "short": (*[3] * 60, 1, 2, 0, 700, 127, 129),
    "segments": (2000, 100, 1),
}


def make_packed(lengths: tuple[int, ...], **options: Any) -> dict[str, Any]:
    inputs = make_long_memories(batch=1, seqlen=sum(lengths), heads=1, initial_states=False, **options)
    return inputs | {"cu_seqlens": torch.tensor((0, *lengths)).cumsum(0)}


@pytest.mark.parametrize("through_ends", [False, True])
@pytest.mark.parametrize("lengths", PACKED.values(), ids=list(PACKED))
def test_packed_sequences(lengths, through_ends):
    """With gradients of the final states, backward takes the kernels of ssd_chunk_scan."""
    assert_accurate(make_packed(lengths), through_ends)


@pytest.mark.parametrize(
    "options", [{"input_gate": "sigmoid"}, {"input_gate": "sigmoid", "normalize": False}, {"reverse": True}]
)
def test_options_of_packed_sequences(options):
    assert_accurate(make_packed(PACKED["inside"], **options), through_ends=False)


def test_no_step_reaches_another_sequence():
    """Twice the keys and values in the first sequence leave every bit of the second one's results."""
    inputs = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in make_packed((300, 84)).items()}
    changed = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
    for name in ("k", "v"):
        changed[name][:, :300] *= 2
    with torch.no_grad():
        (out, final_C, *_), (out_2, final_C_2, *_) = (SCAN(**each, return_final_states=True) for each in (inputs, changed))
    assert torch.equal(out[:, 300:], out_2[:, 300:]) and torch.equal(final_C[1], final_C_2[1])
    assert not torch.equal(final_C[0], final_C_2[0])


@pytest.mark.parametrize("initial_states", [False, True])
def test_sequences_by_number(initial_states):
    resets = ((1, 64, 100, 128, 200, 201), (129,))
    assert_accurate(make_long_memories(resets=resets, initial_states=initial_states))


def test_parts_of_a_call_give_the_same_bits():
    """Parts of some rows or heads; only the segments of a line depend on them."""
    inputs = make_long_memories(batch=3, heads=4, seqlen=200)
    whole = evaluate(inputs, "cuda", False)
    for lines in (8, 4, 3, 1):
        bytes_of_line = 2 * 2 * 256 * 256 * 2
        with debug_option("ssd_workspace_bytes", lines * bytes_of_line):
            for name, value in evaluate(inputs, "cuda", False).items():
                assert torch.equal(value, whole[name]), (lines, name)


@pytest.mark.parametrize("layout", ["transposed", "permuted", "offset", "sliced"])
def test_layouts(layout):
    assert_accurate(make_long_memories(seqlen=130, layout=layout))


def test_closed_gates():
    """Forget gates of zero, also within a chunk, and input gates of zero."""
    inputs = make_long_memories()
    inputs["f"][:, 37::50] = -torch.inf
    inputs["f"][:, 100:140] = -30.0
    inputs["i"][:, 11::17] = -torch.inf
    assert_accurate(inputs)


def test_the_kernels_of_ssd_give_the_same_within_rounding():
    inputs = make_long_memories(seqlen=400)
    found = evaluate(inputs, "cuda", False)
    with debug_option("ssd_mma", 1):
        other = evaluate(inputs, "cuda", False)
    for name, value in found.items():
        torch.testing.assert_close(value.float(), other[name].float(), rtol=0.05, atol=0.05 * other[name].abs().max().item())


@pytest.mark.parametrize("name", [*SEQUENCES, *STATES[:2]])
def test_each_gradient_alone(name):
    inputs = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in make_long_memories().items()}
    whole = evaluate(inputs, "cuda", False)
    inputs[name] = inputs[name].detach().requires_grad_()
    (alone,) = torch.autograd.grad(SCAN(**inputs).float().square().sum(), [inputs[name]])
    assert alone.isfinite().all() and alone.shape == whole[f"grad_{name}"].shape
