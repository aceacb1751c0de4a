"""selective_state_update as a PyTorch operator: opcheck, meta, compile, grad modes, vmap, autocast, errors, CUDA graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import LAYOUTS, captured, says, split
from selective_scan_helpers import STEP_DTYPES, STEP_FORMS, assert_step_matches_reference, make_step_inputs, step
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ssm_kernels import selective_state_update

OPERATOR = "selective_state_update"
operator = torch.ops.ssm_kernels.selective_state_update

every_form = pytest.mark.parametrize("form", STEP_FORMS)

OPCHECK = {
    "channels": {},
    "heads": {"heads": 3, "groups": 3},
    "required_only": dict.fromkeys(("D", "z", "dt_bias", "dt_softplus"), False),
    "slots": {"slots": 4},
    "bfloat16": {"dtype": torch.bfloat16, "state_dtype": torch.bfloat16},
    "transposed": {"layout": "transposed"},
}


@pytest.mark.parametrize("case", OPCHECK)
def test_opcheck(case, device):
    torch.library.opcheck(operator.default, *split(operator, make_step_inputs(**OPCHECK[case], device=device)))


@pytest.mark.parametrize("layout", LAYOUTS)
@every_form
def test_meta_agrees_with_the_device(form, layout, device):
    for dtype, state_dtype in STEP_DTYPES:
        inputs = make_step_inputs(**STEP_FORMS[form], dtype=dtype, state_dtype=state_dtype, layout=layout, device=device)
        args, kwargs = split(operator, inputs)
        on_meta = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x for x in args
        ]
        meta, real = operator(*on_meta, **kwargs), operator(*args, **kwargs)
        assert meta.is_meta and not real.is_meta
        assert (meta.shape, meta.dtype, meta.stride()) == (real.shape, real.dtype, real.stride())


def decode_twice(**inputs):
    """Two steps and work around them, on a state that the caller holds."""
    first = selective_state_update(**inputs)
    second = selective_state_update(**(inputs | {"x": torch.tanh(first)}))
    return second * 2 + inputs["state"].sum()


@pytest.mark.parametrize(
    ("slots", "backend"),
    [
        *((None, "aot_eager"), (4, "aot_eager"), pytest.param(4, "inductor", marks=pytest.mark.slow)),
        pytest.param(None, "inductor", marks=pytest.mark.exhaustive),
    ],
)
def test_compile(slots, backend, device, fresh_dynamo):
    compiled = torch.compile(decode_twice, fullgraph=True, backend=backend)
    inputs = make_step_inputs(slots=slots, dstate=16, device=device)
    for actual, expected in zip(step(inputs, compiled), step(inputs, decode_twice), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_compile_once_for_every_batch(device, fresh_dynamo):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(decode_twice, fullgraph=True, backend=counter, dynamic=True)
    for batch in (2, 3, 7):
        inputs = make_step_inputs(batch=batch, device=device)
        for actual, expected in zip(step(inputs, compiled), step(inputs, decode_twice), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name, result", [("state", "state"), *((name, "out") for name in ("state", "x", "A", "D"))])
def test_backward_says_that_there_is_none(name, result, device):
    inputs = make_step_inputs(device=device)
    leaf = inputs[name].requires_grad_()
    # A leaf cannot be written to, so the state is a function of it.
    inputs[name] = leaf * 1
    results = {"out": selective_state_update(**inputs), "state": inputs["state"]}
    with pytest.raises(RuntimeError, match=says("selective_state_update: decoding is not differentiable", "selective_scan")):
        results[result].sum().backward()


@pytest.mark.parametrize("is_function", [False, True], ids=["plain", "of_a_parameter"])
def test_a_cache_collects_no_graph(is_function, device):
    """The state of one layer, a view of all layers' states, beside weights that require gradients: it requires one only if the
    cache does, which is a function of a learned initial state."""
    inputs = make_step_inputs(device=device)
    learned = torch.stack([inputs["state"], inputs["state"]]).requires_grad_(is_function)
    cache = learned * 1
    inputs |= {"A": inputs["A"].requires_grad_(), "state": cache[1]}
    expected = step(inputs | {"A": inputs["A"].detach(), "state": cache[1].detach()})[1]
    out = selective_state_update(**inputs)
    assert out.requires_grad and cache.requires_grad == is_function
    assert torch.equal(cache[1], expected)
    if is_function:
        with pytest.raises(RuntimeError, match=says("selective_state_update: decoding is not differentiable")):
            cache.sum().backward()
    else:
        before = cache[1].clone()
        assert selective_state_update(**inputs).requires_grad and cache.grad_fn is None
        assert not torch.equal(cache[1], before)


def test_forward_mode_says_that_there_is_none(device):
    inputs = make_step_inputs(device=device)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        dual = torch.autograd.forward_ad.make_dual(inputs["x"], torch.ones_like(inputs["x"]))
        selective_state_update(**(inputs | {"x": dual}))


def test_state_that_requires_grad_cannot_be_written_to(device):
    inputs = make_step_inputs(device=device)
    inputs["state"].requires_grad_()
    with pytest.raises(NotImplementedError, match=says("selective_state_update: decoding is not differentiable")):
        selective_state_update(**inputs)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode, device):
    inputs = make_step_inputs(device=device)
    expected = step(inputs)
    inputs |= {name: inputs[name].requires_grad_() for name in ("x", "A", "D")}
    with mode():
        actual = step(inputs)
        assert not actual[0].requires_grad and not actual[1].requires_grad
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


@every_form
def test_lazy_copies_stay_lazy(form, device):
    """All arguments but the state are read through pointers that may be shared: nothing is copied on write."""
    originals = make_step_inputs(**STEP_FORMS[form], slots=3, device=device)
    expected_out, expected_state = step(originals)
    before = originals["state"].clone()
    inputs = {name: torch._lazy_clone(x) if isinstance(x, Tensor) else x for name, x in originals.items()}
    out = selective_state_update(**inputs)
    assert torch.equal(out, expected_out) and torch.equal(inputs["state"], expected_state)
    assert torch.equal(originals["state"], before)
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    assert {name for name, x in tensors.items() if not torch._C._is_cow_tensor(x)} == {"state"}


def test_version_is_counted_without_gradients(device):
    inputs = make_step_inputs(device=device)
    version = inputs["state"]._version
    with torch.inference_mode():
        selective_state_update(**inputs)
    with torch.no_grad():
        selective_state_update(**inputs)
    assert inputs["state"]._version == version + 2


def test_vmap(device):
    sets = [make_step_inputs(dstate=16, seed=seed, device=device) for seed in range(3)]
    batched = ("state", "x", "dt", "B", "C", "z")
    stacked = {name: torch.stack([s[name] for s in sets]) for name in batched}
    shared = {name: sets[0][name] for name in ("A", "D", "dt_bias")}

    def one(state, x, dt, B, C, z):
        return selective_state_update(state, x, dt, shared["A"], B, C, shared["D"], z, shared["dt_bias"], dt_softplus=True)

    out = torch.vmap(one)(*stacked.values())
    for i, inputs in enumerate(sets):
        expected_out, expected_state = step(inputs | shared)
        assert torch.equal(out[i], expected_out) and torch.equal(stacked["state"][i], expected_state)


@pytest.mark.parametrize(
    "names", [("state",), ("state", "x"), ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias")], ids="-".join
)
def test_vmap_over_no_samples(names, device):
    inputs = make_step_inputs(device=device)

    def one(*tensors):
        return selective_state_update(**(inputs | dict(zip(names, tensors, strict=True))))

    out = torch.vmap(one)(*(inputs[name].new_empty(0, *inputs[name].shape) for name in names))
    assert out.shape == (0, *inputs["x"].shape) and out.dtype == inputs["x"].dtype


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("low_state", [False, True], ids=["float32_state", "low_state"])
def test_autocast(low_state, low, device):
    """x, dt, B, C and z are cast, A, D and dt_bias are float32, the state stays what it is."""
    inputs = make_step_inputs(dstate=16, dtype=torch.float32, state_dtype=low if low_state else None, device=device)
    mixed = inputs | {name: inputs[name].to(low) for name in ("x", "B", "D")}
    cast = inputs | {name: inputs[name].to(low) for name in ("x", "dt", "B", "C", "z")} | {"D": inputs["D"].to(low).float()}
    with torch.autocast(device, dtype=low):
        out, state = step(mixed)
    expected = step(cast)
    assert out.dtype == low and state.dtype == (low if low_state else torch.float32)
    assert torch.equal(out, expected[0]) and torch.equal(state, expected[1])


SIZES = {"batch": 2, "dim": 6, "dstate": 4, "groups": 2, "dtype": torch.float32}


def good_inputs(heads: int | None = None, **options) -> dict[str, Any]:
    return make_step_inputs(**(SIZES | {"heads": heads, "groups": heads or SIZES["groups"]} | options))


INTERNAL_OVERLAP = "selective_state_update: expected state, which is updated in place, to have elements that share no memory"


def test_state_whose_elements_share_memory(device):
    inputs = good_inputs(device=device)
    windows = torch.zeros(40, device=device).as_strided(inputs["state"].shape, (4, 3, 1))
    for state in (inputs["state"][:1].expand(inputs["state"].shape), windows[..., :1].expand(windows.shape), windows):
        before = state.clone()
        with pytest.raises(RuntimeError, match=says(INTERNAL_OVERLAP, str([*state.stride()]), "state.clone()")):
            selective_state_update(**inputs | {"state": state})
        assert torch.equal(state, before)


def overlap_message(name: str) -> str:
    return f"selective_state_update: expected {name} to share no memory with state, which is updated in place"


@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "C", "D", "z", "dt_bias"])
def test_state_that_shares_memory_with_another_argument(name, device):
    """The last element of one and the first of the other, or, in tensors with gaps, elements that neither range ends with."""
    inputs = good_inputs(device=device)
    state, other = inputs["state"], inputs[name]
    memory = torch.zeros(3 * (state.numel() + other.numel()), device=device)
    inputs["state"] = memory[: state.numel()].view(state.shape).copy_(state)
    beside = memory[state.numel() :][: other.numel()].view(other.shape).copy_(other)
    selective_state_update(**(inputs | {name: beside}))
    before = memory.clone()
    shared = memory[state.numel() - 1 :][: other.numel()].view(other.shape)
    every_second = memory[::2][: other.numel()].view(other.shape)
    for overlapping in (shared, every_second):
        with pytest.raises(RuntimeError, match=says(overlap_message(name), f"{name}.clone()")):
            selective_state_update(**(inputs | {name: overlapping}))
        assert torch.equal(memory, before)
    # Interleaved: no element is in both.
    inputs["state"] = memory[::2][: state.numel()].view(state.shape)
    selective_state_update(**inputs | {name: memory[1::2][: other.numel()].view(other.shape)})


def test_input_that_is_a_part_of_the_state(device):
    inputs = good_inputs(device=device)
    inputs["x"] = inputs["state"][..., 0]
    with pytest.raises(RuntimeError, match=says(overlap_message("x"))):
        selective_state_update(**inputs)
    columns = torch.zeros(*inputs["state"].shape[:2], 5, device=device)  # the state beside the input, in one buffer
    columns[..., :4] = inputs["state"]
    selective_state_update(**inputs | {"state": columns[..., :4], "x": columns[..., 4]})


def test_indices_in_the_memory_of_the_state(device):
    inputs = good_inputs(device=device)
    inputs["state_batch_indices"] = inputs["state"].view(torch.int32)[:, 0, 0].zero_()
    with pytest.raises(RuntimeError, match=says(overlap_message("state_batch_indices"))):
        selective_state_update(**inputs)


def test_lazy_copies_share_no_memory(device):
    inputs = good_inputs(device=device)
    memory = inputs["state"].clone()
    state, x = torch._lazy_clone(memory), torch._lazy_clone(memory)[..., 0]
    selective_state_update(**inputs | {"state": state, "x": x})
    assert torch.equal(memory, inputs["state"]) and not torch.equal(state, memory)


def test_overlap_of_any_strides():
    """Against NumPy's exact answer, for strided views of one buffer."""
    random = np.random.default_rng(0)
    inputs = good_inputs(device="cpu")
    state_shape, x_shape = inputs["state"].shape, inputs["x"].shape
    memory = torch.zeros(400)
    seen = set()
    for _ in range(3000):
        strides, x_strides = random.integers(1, 16, 3).tolist(), random.integers(0, 16, 2).tolist()
        state = memory.as_strided(state_shape, strides, int(random.integers(0, 60)))
        x = memory.as_strided(x_shape, x_strides, int(random.integers(0, 60)))
        elements = torch.arange(400).as_strided(state_shape, strides).flatten()
        message = ""
        if elements.unique().numel() < elements.numel():
            message = INTERNAL_OVERLAP
        elif np.shares_memory(state.numpy(), x.numpy()):
            message = overlap_message("x")
        seen.add(message)
        if message:
            with pytest.raises(RuntimeError, match=says(message)):
                selective_state_update(**inputs | {"state": state, "x": x})
        else:
            selective_state_update(**inputs | {"state": state, "x": x})
        memory.zero_()
    assert len(seen) == 3


def test_bad_arguments_leave_the_state_alone(device):
    inputs = good_inputs(device=device)
    before = inputs["state"].clone()
    with pytest.raises(ValueError, match="expected C of shape"):
        selective_state_update(**(inputs | {"C": inputs["C"][:, :1]}))
    assert torch.equal(inputs["state"], before)


@pytest.mark.cuda
@pytest.mark.parametrize("slots", [None, 6])
def test_cuda_graph(slots):
    """A captured step replays on new values in the same tensors, the slots' too, and goes on with the same state."""
    draws = [
        make_step_inputs(batch=3, dim=70, dstate=16, slots=slots, dtype=torch.float32, device="cuda", seed=s) for s in range(4)
    ]
    static = {k: v.clone() if isinstance(v, Tensor) else v for k, v in draws[0].items()}
    graph, out = captured(lambda: selective_state_update(**static))

    state = draws[0]["state"].clone()
    static["state"].copy_(state)
    for shift, draw in enumerate(draws):
        if slots is not None:
            draw["state_batch_indices"] = (draw["state_batch_indices"] + shift) % slots
        for name, value in draw.items():
            if isinstance(value, Tensor) and name != "state":
                static[name].copy_(value)
        graph.replay()
        expected = selective_state_update(**(draw | {"state": state}))
        assert torch.equal(out, expected) and torch.equal(static["state"], state)


@pytest.mark.cuda
def test_runs_on_the_current_stream():
    """A step that waits for a long write on its own stream sees what was written."""
    inputs = make_step_inputs(batch=4, dim=512, dstate=16, dtype=torch.float32, device="cuda")
    expected, _ = step(inputs)
    values, inputs["x"] = inputs["x"], torch.full_like(inputs["x"], float("nan"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        inputs["x"].copy_(values)
        out = selective_state_update(**inputs)
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.cuda
def test_runs_on_the_device_of_its_arguments():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA GPUs")
    inputs = make_step_inputs(dstate=16, dtype=torch.float32, device="cuda:1")
    assert torch.cuda.current_device() == 0
    out, _ = assert_step_matches_reference(inputs)
    assert out.device == torch.device("cuda:1")
