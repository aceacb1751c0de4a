"""delta_rule_step as a PyTorch operator: opcheck, meta, compile, grad modes, vmap, autocast, errors, CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoding_helpers import DELTA_RULE_STEP
from delta_rule_step_helpers import DTYPES, GATES, assert_step_matches_reference, make_inputs, step
from helpers import LAYOUTS, captured, says, split
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import ssm_kernels
from ssm_kernels import delta_rule_step

OPERATOR = "delta_rule_step"
operator = torch.ops.ssm_kernels.delta_rule_step

OPCHECK: dict[str, dict[str, Any]] = {
    "head": {},
    "column": {"gate": "column", "A_log": True, "dt_bias": True},
    "required_only": {"gate": None},
    "tokens": {"tokens": 3},
    "updates": {"num_householder": 2},
    "slots": {"slots": 4},
    "bfloat16": {"dtype": torch.bfloat16, "state_dtype": torch.bfloat16},
    "transposed": {"layout": "transposed"},
}


@pytest.mark.parametrize("case", OPCHECK)
def test_opcheck(case, device):
    torch.library.opcheck(operator.default, *split(operator, make_inputs(**OPCHECK[case], device=device)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gate", GATES)
def test_meta_agrees_with_the_device(gate, layout, device):
    for dtype, state_dtype in DTYPES:
        for tokens, updates in ((None, 1), (None, 2), (3, 2)):
            options = {"gate": gate, "tokens": tokens, "num_householder": updates, "layout": layout, "device": device}
            args, kwargs = split(operator, make_inputs(**options, dtype=dtype, state_dtype=state_dtype))
            on_meta = [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x
                for x in args
            ]
            meta, real = operator(*on_meta, **kwargs), operator(*args, **kwargs)
            assert meta.is_meta and not real.is_meta
            assert (meta.shape, meta.dtype, meta.stride()) == (real.shape, real.dtype, real.stride())


def decode_twice(**inputs):
    """Two steps and work around them, on states that the caller holds."""
    first = delta_rule_step(**inputs)
    second = delta_rule_step(**(inputs | {"v": torch.tanh(first)}))
    return second * 2 + inputs["states"].sum()


@pytest.mark.parametrize(
    ("slots", "backend"),
    [
        *((None, "aot_eager"), (4, "aot_eager"), pytest.param(4, "inductor", marks=pytest.mark.slow)),
        pytest.param(None, "inductor", marks=pytest.mark.exhaustive),
    ],
)
def test_compile(slots, backend, device, fresh_dynamo):
    compiled = torch.compile(decode_twice, fullgraph=True, backend=backend)
    inputs = make_inputs(slots=slots, qk_l2norm=True, device=device)
    for actual, expected in zip(step(inputs, compiled), step(inputs, decode_twice), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_compile_once_for_every_batch(device, fresh_dynamo):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(decode_twice, fullgraph=True, backend=counter, dynamic=True)
    for batch in (3, 5, 7):
        inputs = make_inputs(batch=batch, device=device)
        for actual, expected in zip(step(inputs, compiled), step(inputs, decode_twice), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name, result", [("states", "states"), *((name, "out") for name in ("states", "q", "g", "A_log"))])
def test_backward_says_that_there_is_none(name, result, device):
    inputs = make_inputs(A_log=True, device=device)
    leaf = inputs[name].requires_grad_()
    # A leaf cannot be written to, so the state is a function of it.
    inputs[name] = leaf * 1
    results = {"out": delta_rule_step(**inputs), "states": inputs["states"]}
    with pytest.raises(RuntimeError, match=says("delta_rule_step: decoding is not differentiable", "delta_rule_scan")):
        results[result].sum().backward()


def test_a_cache_collects_no_graph(device):
    """The states of one layer, a view of all layers', beside weights that require gradients."""
    inputs = make_inputs(A_log=True, device=device)
    cache = torch.stack([inputs["states"], inputs["states"]])
    expected = step(inputs)[1]
    inputs |= {"A_log": inputs["A_log"].requires_grad_(), "states": cache[1]}
    out = delta_rule_step(**inputs)
    assert out.requires_grad and not cache.requires_grad and cache.grad_fn is None
    assert torch.equal(cache[1], expected)


def test_forward_mode_says_that_there_is_none(device):
    inputs = make_inputs(device=device)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        dual = torch.autograd.forward_ad.make_dual(inputs["v"], torch.ones_like(inputs["v"]))
        delta_rule_step(**(inputs | {"v": dual}))


def test_states_that_require_grad_cannot_be_written_to(device):
    inputs = make_inputs(device=device)
    inputs["states"].requires_grad_()
    with pytest.raises(NotImplementedError, match=says("delta_rule_step: decoding is not differentiable")):
        delta_rule_step(**inputs)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode, device):
    inputs = make_inputs(device=device)
    expected, version = step(inputs), inputs["states"]._version
    inputs |= {name: inputs[name].requires_grad_() for name in ("q", "k", "g")}
    with mode():
        actual = step(inputs)
        delta_rule_step(**inputs)
    assert not actual[0].requires_grad and not actual[1].requires_grad
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
    assert inputs["states"]._version == version + 1


def test_lazy_copies_stay_lazy(device):
    """All arguments but the states are read through pointers that may be shared: nothing is copied on write."""
    originals = make_inputs(gate="column", A_log=True, dt_bias=True, slots=3, device=device)
    expected_out, expected_states = step(originals)
    before = originals["states"].clone()
    inputs = {name: torch._lazy_clone(x) if isinstance(x, Tensor) else x for name, x in originals.items()}
    out = delta_rule_step(**inputs)
    assert torch.equal(out, expected_out) and torch.equal(inputs["states"], expected_states)
    assert torch.equal(originals["states"], before)
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    assert {name for name, x in tensors.items() if not torch._C._is_cow_tensor(x)} == {"states"}


def test_vmap(device):
    names = ("states", "q", "k", "v", "beta", "g")
    for tokens, updates in ((None, 1), (3, 2)):
        options = {"tokens": tokens, "num_householder": updates, "A_log": True, "device": device}
        sets = [make_inputs(**options, seed=seed) for seed in range(3)]
        stacked = [torch.stack([each[name] for each in sets]) for name in names]

        def one(*tensors, first=sets[0]):
            return delta_rule_step(**first | dict(zip(names, tensors, strict=True)))

        out = torch.vmap(one)(*stacked)
        for i, inputs in enumerate(sets):
            expected_out, expected_states = step(inputs | {"A_log": sets[0]["A_log"]})
            assert torch.equal(out[i], expected_out) and torch.equal(stacked[0][i], expected_states)


@pytest.mark.parametrize("names", [("states",), ("states", "q"), ("states", "q", "k", "v", "beta", "g")], ids="-".join)
def test_vmap_over_no_samples(names, device):
    inputs = make_inputs(device=device)

    def one(*tensors):
        return delta_rule_step(**(inputs | dict(zip(names, tensors, strict=True))))

    out = torch.vmap(one)(*(inputs[name].new_empty(0, *inputs[name].shape) for name in names))
    assert out.shape == (0, *inputs["v"].shape) and out.dtype == inputs["v"].dtype


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("low_state", [False, True], ids=["float32_state", "low_state"])
def test_autocast(low_state, low, device):
    """q, k and v are cast, gates and parameters are float32, the states stay what they are."""
    options = {"A_log": True, "dt_bias": True, "tokens": 3}
    inputs = make_inputs(**options, dtype=torch.float32, state_dtype=low if low_state else None, device=device)
    mixed = inputs | {name: inputs[name].to(low) for name in ("q", "beta", "A_log")}
    cast = inputs | {name: inputs[name].to(low) for name in ("q", "k", "v")}
    cast |= {name: inputs[name].to(low).float() for name in ("beta", "A_log")}
    with torch.autocast(device, dtype=low):
        out, states = step(mixed)
        packed = DELTA_RULE_STEP.make_token_inputs(packed=(0, 2, 3), out=False, dtype=torch.float32, device=device)
        assert delta_rule_step(**packed).dtype == low
    expected = step(cast)
    assert out.dtype == low and states.dtype == (low if low_state else torch.float32)
    assert torch.equal(out, expected[0]) and torch.equal(states, expected[1])


SIZES = {"batch": 2, "heads": 3, "value_heads": 6, "key_dim": 4, "value_dim": 5, "dtype": torch.float32}
KEYS, VALUES = "(batch, heads, key_dim) = [2, 3, 4]", "(batch, value_heads, value_dim) = [2, 6, 5]"
BAD_SHAPES = {
    "states": ("states", (2, 6, 5), "expected states of shape (batch, value_heads, value_dim, key_dim), got [2, 6, 5]"),
    "k": ("k", (2, 3, 5), f"expected k of shape {KEYS}, got [2, 3, 5]"),
    "v": ("v", (2, 5, 5), f"expected v of shape {VALUES}, got [2, 5, 5]"),
    "beta": ("beta", (2, 3), "expected beta of shape (batch, value_heads) = [2, 6], got [2, 3]"),
    "g": ("g", (2, 3), "expected g of shape (batch, value_heads) = [2, 6], got [2, 3]"),
    "g_columns": ("g", (2, 6, 5), "expected g of shape (batch, value_heads, key_dim) = [2, 6, 4], got [2, 6, 5]"),
    "g_rank": ("g", (2,), "expected g of shape (batch, value_heads) or (batch, value_heads, key_dim), got [2]"),
    "A_log": ("A_log", (3,), "expected A_log of shape (value_heads,) = [6], got [3]"),
    "dt_bias": ("dt_bias", (6, 4), "expected dt_bias of shape (value_heads,) = [6], got [6, 4]"),
    "out": ("out", (2, 6, 4), f"expected out of shape {VALUES}, got [2, 6, 4]"),
    "indices": ("state_batch_indices", (3,), "expected state_batch_indices of shape (batch,) = [2], got [3]"),
}


@pytest.mark.parametrize("case", BAD_SHAPES)
def test_bad_shapes(case, device):
    name, shape, message = BAD_SHAPES[case]
    inputs = make_inputs(**SIZES, A_log=True, dt_bias=True, device=device)
    dtype = torch.int32 if name == "state_batch_indices" else torch.float32
    with pytest.raises(ValueError, match=says(f"delta_rule_step: {message}")):
        delta_rule_step(**inputs | {name: torch.zeros(shape, dtype=dtype, device=device)})


BAD_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "key_dim": ({"key_dim": 513}, {}, "expected key_dim from 1 to 512, got 513"),
    "no_columns": ({"key_dim": 0}, {}, "expected key_dim from 1 to 512, got 0"),
    "heads": ({"heads": 4}, {}, "expected the heads of q and k to divide value_heads = 6, got 4"),
    "A_log": ({"gate": None, "A_log": True}, {}, "expected g with A_log, dt_bias or gate_lower_bound"),
    "dt_bias": ({"dt_bias": True}, {}, "expected A_log or gate_lower_bound with dt_bias"),
    "bound": ({}, {"gate_lower_bound": 0.5}, "expected a negative and finite gate_lower_bound, got 0.5"),
    "scale": ({}, {"scale": float("nan")}, "expected a finite scale, got nan"),
    "updates": ({}, {"num_householder": 0}, "expected num_householder of at least 1, got 0"),
    "entries": (
        {"tokens": 3, "num_householder": 2},
        {"num_householder": 3},
        "expected k of shape (batch, tokens * num_householder, heads, key_dim) = [2, 9, 3, 4], got [2, 6, 3, 4]",
    ),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options(case, device):
    options, changed, message = BAD_OPTIONS[case]
    inputs = make_inputs(**(SIZES | options), device=device)
    before = inputs["states"].clone()
    with pytest.raises(ValueError, match=says(f"delta_rule_step: {message}")):
        delta_rule_step(**inputs | changed)
    assert torch.equal(inputs["states"], before)


@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "g", "A_log", "dt_bias"])
def test_states_that_share_memory_with_another_argument(name, device):
    inputs = make_inputs(**SIZES, gate="column", A_log=True, dt_bias=True, device=device)
    states, other = inputs["states"], inputs[name]
    memory = torch.zeros(states.numel() + other.numel(), device=device)
    inputs["states"] = memory[: states.numel()].view(states.shape).copy_(states)
    delta_rule_step(**inputs | {name: memory[states.numel() :][: other.numel()].view(other.shape).copy_(other)})
    message = f"delta_rule_step: expected {name} to share no memory with states, which is updated in place"
    with pytest.raises(RuntimeError, match=says(message, f"{name}.clone()")):
        delta_rule_step(**inputs | {name: memory[states.numel() - 1 :][: other.numel()].view(other.shape)})


def test_states_whose_elements_share_memory(device):
    inputs = make_inputs(**SIZES, device=device)
    message = "delta_rule_step: expected states, which is updated in place, to have elements that share no memory"
    with pytest.raises(RuntimeError, match=says(message)):
        delta_rule_step(**inputs | {"states": inputs["states"][:1].expand(inputs["states"].shape)})


def test_it_is_the_step_of_the_scan(device):
    """A scan and then steps give what one scan gives."""
    scan = getattr(ssm_kernels, "delta_rule_scan", None)
    if scan is None:
        pytest.skip("no delta_rule_scan")
    inputs = make_inputs(tokens=9, gate="column", A_log=True, dt_bias=True, qk_l2norm=True, num_householder=2, device=device)
    states = inputs.pop("states")
    out, final = scan(**inputs, initial_states=states, return_final_states=True)
    decoded = delta_rule_step(states, **inputs)
    torch.testing.assert_close(decoded, out, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(states, final, rtol=1e-11, atol=1e-11)


@pytest.mark.cuda
@pytest.mark.parametrize("slots", [None, 6])
@pytest.mark.parametrize("key_dim", [16, 13, 128])
def test_cuda_graph(key_dim, slots):
    """A captured step replays on new values in the same tensors, the slots' too, and goes on with the same states."""
    options = {"batch": 3, "key_dim": key_dim, "slots": slots, "dtype": torch.float32, "device": "cuda"}
    draws = [make_inputs(**options, seed=seed) for seed in range(4)]
    static = {k: v.clone() if isinstance(v, Tensor) else v for k, v in draws[0].items()}
    graph, out = captured(lambda: delta_rule_step(**static))
    states = draws[0]["states"].clone()
    static["states"].copy_(states)
    for shift, draw in enumerate(draws):
        if slots is not None:
            draw["state_batch_indices"] = (draw["state_batch_indices"] + shift) % slots
        for name, value in draw.items():
            if isinstance(value, Tensor) and name != "states":
                static[name].copy_(value)
        graph.replay()
        expected = delta_rule_step(**(draw | {"states": states}))
        assert torch.equal(out, expected) and torch.equal(static["states"], states)


@pytest.mark.cuda
def test_runs_on_the_current_stream():
    """A step that waits for a long write on its own stream sees what was written."""
    inputs = make_inputs(batch=4, key_dim=128, value_dim=128, dtype=torch.float32, device="cuda")
    expected, _ = step(inputs)
    values, inputs["v"] = inputs["v"], torch.full_like(inputs["v"], float("nan"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        inputs["v"].copy_(values)
        out = delta_rule_step(**inputs)
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.cuda
def test_runs_on_the_device_of_its_arguments():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA GPUs")
    inputs = make_inputs(dtype=torch.float32, device="cuda:1")
    assert torch.cuda.current_device() == 0
    out, _ = assert_step_matches_reference(inputs)
    assert out.device == torch.device("cuda:1")
