"""mamba3_state_update against its reference; slots, layouts, dtypes, guarded memory, autograd, vmap and compilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_as_accurate, captured, debug_option, launched_kernels
from mamba3_step_helpers import CASES, DTYPES, STATES, make_inputs, step
from torch import Tensor

from ssm_kernels import mamba3_state_update, reference

OPERATOR = "mamba3_state_update"

every_case = pytest.mark.parametrize("options", CASES.values(), ids=list(CASES))


def assert_matches_reference(inputs: dict[str, Any]) -> None:
    def in_float64(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    exact = step({name: in_float64(x) for name, x in inputs.items()}, reference.mamba3_state_update)
    native = step(inputs, reference.mamba3_state_update)
    for name, actual, own, wanted in zip(("out", *STATES), step(inputs), native, exact, strict=True):
        if inputs["x"].dtype == torch.float64:
            torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
        else:
            assert_as_accurate(actual, own.to(actual.dtype), wanted, name)


@every_case
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_matches_reference(dtypes, options, device):
    dtype, state_dtype = dtypes
    for slots in (None, 5):
        assert_matches_reference(make_inputs(slots=slots, dtype=dtype, state_dtype=state_dtype, device=device, **options))


@every_case
def test_as_operators_of_pytorch(options):
    """The step that CUDA runs."""
    with debug_option("mamba3_cpu", "operators"):
        for slots in (None, 5):
            assert_matches_reference(make_inputs(slots=slots, **options))
        inputs = make_inputs(slots=4, batch=3, **options)
        inputs["state_batch_indices"] = torch.tensor([-1, 2, 0])
        assert_matches_reference(inputs)


@pytest.mark.parametrize("sizes", [(1, 2, 1), (7, 5, 2), (48, 33, 16), (80, 96, 48), (16, 256, 128), (256, 1, 0)], ids=str)
def test_sizes(sizes, device):
    headdim, dstate, angles = sizes
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for groups in (1, 2, 4):
            assert_matches_reference(
                make_inputs(headdim=headdim, dstate=dstate, angles=angles, groups=groups, dtype=dtype, device=device)
            )
        assert_matches_reference(
            make_inputs(headdim=headdim, dstate=dstate, angles=angles, ranks=4, dtype=dtype, device=device)
        )


@pytest.mark.parametrize("layout", ["transposed", "permuted", "offset", "sliced"])
def test_layouts(layout, device):
    for dtype in (torch.float64, torch.float32):
        assert_matches_reference(make_inputs(layout=layout, dtype=dtype, device=device))
        assert_matches_reference(make_inputs(layout=layout, ranks=2, dtype=dtype, device=device))


def test_angles_of_float64(device):
    inputs = make_inputs(dtype=torch.float32, angle_dtype=torch.float64, device=device)
    assert_matches_reference(inputs)
    assert step(inputs)[1].dtype == torch.float64


def test_padding_touches_nothing(device):
    inputs = make_inputs(slots=4, batch=3, device=device)
    inputs["state_batch_indices"] = torch.tensor([-1, 2, 0], device=device)
    out, *states = step(inputs)
    assert out[0].eq(0).all() and not out[1:].eq(0).any()
    for state, name in zip(states, STATES, strict=True):
        assert torch.equal(state[[1, 3]], inputs[name][[1, 3]])
        assert not torch.equal(state[2], inputs[name][2])
    inputs["state_batch_indices"] = torch.full((3,), -1, device=device)
    out, *states = step(inputs)
    assert out.eq(0).all()
    for state, name in zip(states, STATES, strict=True):
        assert torch.equal(state, inputs[name])


@pytest.mark.parametrize("way", ["kernels", "operators"])
def test_rows_of_a_pool_without_slots_are_padding(way, device):
    inputs = make_inputs(slots=1, batch=3, device=device)
    inputs |= {name: inputs[name][:0] for name in STATES}
    inputs["state_batch_indices"] = torch.full((3,), -1, device=device)
    with debug_option("mamba3_cpu", way):
        out = mamba3_state_update(**inputs)
    assert torch.equal(out, torch.zeros_like(out))


def test_bad_slots():
    inputs = make_inputs(slots=4, batch=3)
    for values, message in (((2, 2, 0), "same slot|distinct|twice"), ((4, 1, 0), "4")):
        inputs["state_batch_indices"] = torch.tensor(values)
        with pytest.raises(ValueError, match=message):
            mamba3_state_update(**inputs)


def test_writes_nothing_else(device):
    """Trap 11: elements between those of strided states, and beyond them, keep their bits at odd sizes."""
    inputs = make_inputs(headdim=5, dstate=7, angles=3, dtype=torch.float32, device=device)
    wide = {}
    for name in STATES:
        memory = torch.full(
            [*inputs[name].shape[:-1], inputs[name].shape[-1] + 3], 7.0, dtype=inputs[name].dtype, device=device
        )
        view = memory[..., 1:-2]
        view.copy_(inputs[name])
        wide[name] = memory, view
    mamba3_state_update(**inputs | {name: view for name, (_, view) in wide.items()})
    for memory, _ in wide.values():
        assert memory[..., 0].eq(7).all() and memory[..., -2:].eq(7).all()


def test_no_gradients(device):
    inputs = make_inputs(device=device)
    out = mamba3_state_update(**inputs | {"x": inputs["x"].clone().requires_grad_()})
    with pytest.raises(RuntimeError, match="mamba3_state_update: decoding is not differentiable: train with mamba3_chunk"):
        out.sum().backward()
    version = inputs["ssm"]._version
    mamba3_state_update(**inputs)
    assert inputs["ssm"]._version == version + 1


def test_memory_is_not_shared(device):
    inputs = make_inputs(device=device)
    with pytest.raises(RuntimeError, match="previous_x"):
        mamba3_state_update(**inputs | {"x": inputs["previous_x"]})
    with pytest.raises(RuntimeError, match="ssm"):
        mamba3_state_update(**inputs | {"ssm": inputs["ssm"][:1].expand(2, -1, -1, -1)})


def test_vmap(device):
    inputs = make_inputs(device=device)
    states = {name: torch.stack([inputs[name], 2 * inputs[name]]) for name in STATES}
    others = {name: value for name, value in inputs.items() if name not in STATES}

    def call(angle: Tensor, ssm: Tensor, previous_k: Tensor, previous_x: Tensor) -> Tensor:
        return mamba3_state_update(angle, ssm, previous_k, previous_x, **others)

    copies = [value.clone() for value in states.values()]
    mapped = torch.vmap(call)(*copies)
    for sample in range(2):
        own = [value[sample].clone() for value in states.values()]
        torch.testing.assert_close(mapped[sample], call(*own), rtol=0, atol=0)
        for copy, wanted in zip(copies, own, strict=True):
            torch.testing.assert_close(copy[sample], wanted, rtol=0, atol=0)


def test_compiles(device):
    inputs = make_inputs(device=device, dtype=torch.float32)
    expected = step(inputs)
    compiled = torch.compile(mamba3_state_update, fullgraph=True, backend="aot_eager")
    for actual, wanted in zip(step(inputs, compiled), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0)


def test_opcheck(device):
    inputs = make_inputs(device=device)
    names = [argument.name for argument in torch.ops.ssm_kernels.mamba3_state_update.default._schema.arguments]
    arguments = tuple((inputs | {"norm_eps": 1e-5})[name] for name in names)
    torch.library.opcheck(torch.ops.ssm_kernels.mamba3_state_update.default, arguments)


def test_bad_arguments(device):
    inputs = make_inputs(device=device)
    for changes, message in (
        ({"ssm": inputs["ssm"][:1]}, r"expected ssm of shape \(batch, heads, headdim, dstate\)"),
        ({"angle": inputs["angle"][..., :2]}, r"expected angle of shape \(batch, heads, angles\)"),
        ({"previous_k": inputs["previous_k"][:, :2]}, r"expected previous_k of shape"),
        ({"B_bias": inputs["B_bias"][:2]}, r"expected B_bias of shape \(heads, dstate\)"),
        ({"rotate": "half"}, r'expected rotate "pairs" or "halves", got "half"'),
        (
            {"mimo_x": torch.zeros(4, 3, 6, device=device)},
            r"expected mimo_x with B and C of shape \(batch, ranks, groups, dstate\)",
        ),
        ({"angles": torch.zeros(2, 9, dtype=torch.float64, device=device)}, "at most dstate / 2 angles, got 9"),
    ):
        with pytest.raises(ValueError, match=f"^mamba3_state_update: .*{message}"):
            mamba3_state_update(**inputs | changes)


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_batches(batch, device):
    assert_matches_reference(make_inputs(batch=batch, device=device))


@pytest.mark.cuda
@pytest.mark.parametrize("ranks", [None, 4])
def test_one_kernel_and_replays_of_its_graph(ranks):
    """Other values in the same tensors, slots included: nothing is read on the host."""
    sizes = {"headdim": 64, "dstate": 128, "angles": 32, "ranks": ranks, "norm": True, "slots": 5}
    static = make_inputs(**sizes, batch=3, dtype=torch.bfloat16, device="cuda")
    (kernel,) = launched_kernels(lambda: mamba3_state_update(**static)).items()
    assert "mamba3_step_kernel" in kernel[0] and kernel[1] == 1
    graph, out = captured(lambda: mamba3_state_update(**static))
    for indices in ([4, -1, 2], [0, 3, 1]):
        for x in (static[name] for name in ("x", "dt", "B", "C", "trap", "angles", "z")):
            x.mul_(0.75)
        static["state_batch_indices"].copy_(torch.tensor(indices))
        expected = step(static)
        graph.replay()
        for actual, wanted in zip((out, *(static[name] for name in STATES)), expected, strict=True):
            assert torch.equal(actual, wanted)


@pytest.mark.cuda
def test_ranks_beyond_shared_memory_run_as_operators():
    inputs = make_inputs(ranks=160, dtype=torch.float32, headdim=5, dstate=100, heads=2, device="cuda")
    assert "mamba3_step_kernel" not in str(launched_kernels(lambda: step(inputs)))
    assert_matches_reference(inputs)
