"""linear_scan and its family as PyTorch operators: opcheck, meta, compile, export, autocast, memory, schema."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers import LAYOUTS, KeptGraphs, assert_equal, split
from recurrence_helpers import (
    COMMON,
    LINEAR,
    LIQUID,
    MINGRU,
    PACKED,
    PLAIN,
    RGLRU,
    VARIANTS,
    Variant,
    assert_all_close,
    backward_arguments,
    evaluate,
    every_recurrence,
    every_variant,
    forward_arguments,
    make_cotangents,
    make_inputs,
    operator_arguments,
    sequence_names,
    step_inputs,
    tensor_names,
    training_step,
    with_gradients,
    with_state,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

OPERATOR = "linear_scan"
ops = torch.ops.ssm_kernels

some_recurrences = pytest.mark.parametrize("variant", [LINEAR, MINGRU, LIQUID, RGLRU], ids=lambda variant: variant.name)

# ----- opcheck and Meta


@pytest.mark.parametrize("needs_grad", [True, False], ids=["grad", "no_grad"])
@every_recurrence
def test_opcheck(variant, needs_grad, device):
    for common in ("h0", "packed_reverse", "required_only"):
        inputs = make_inputs(variant, device=device, **COMMON[common])
        arguments = operator_arguments(variant, with_gradients(inputs) if needs_grad else inputs)
        torch.library.opcheck(variant.operator, *arguments)


@every_recurrence
def test_opcheck_of_steps(variant, device):
    operator = getattr(ops, variant.step.__name__)
    for h0 in (True, False):
        inputs = with_gradients(make_inputs(variant, seqlen=1, h0=h0, device=device))
        arguments = step_inputs(variant, inputs) | variant.options | {"state": inputs["h0"]}
        torch.library.opcheck(operator.default, *split(operator, arguments))


@pytest.mark.parametrize("common", ["h0", "packed_reverse", "required_only"])
@pytest.mark.parametrize("variant", [LINEAR, RGLRU], ids=lambda variant: variant.name)
def test_opcheck_of_the_internal_operators(variant, common, device):
    inputs = make_inputs(variant, device=device, **COMMON[common])
    torch.library.opcheck(ops._linear_recurrence.default, forward_arguments(variant, with_gradients(inputs)))
    torch.library.opcheck(ops._linear_recurrence_fwd.default, forward_arguments(variant, inputs))
    arguments = backward_arguments(variant, inputs)
    torch.library.opcheck(ops._linear_recurrence_bwd.default, arguments)
    torch.library.opcheck(ops._linear_recurrence_bwd.default, (None, *arguments[1:]))
    torch.library.opcheck(ops._linear_recurrence_bwd.default, (arguments[0], None, *arguments[2:]))
    for needed in range(4):
        needs_grad = [needed == i for i in range(5)]
        torch.library.opcheck(ops._linear_recurrence_bwd.default, (*arguments[:-1], needs_grad))


def on_meta(value: Any) -> Any:
    """Not .to("meta"), which keeps the strides of dense tensors only."""
    if isinstance(value, list):
        return [on_meta(x) for x in value]
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def flat(results) -> list[Tensor]:
    return [x for result in results for x in (result if isinstance(result, (list, tuple)) else [result])]


@pytest.mark.parametrize("layout", LAYOUTS)
@every_recurrence
def test_meta_agrees_with_the_device(variant, layout, device):
    """Shapes, dtypes and strides, of the operator and of the two below it."""
    sizes = ({}, {"seqlen": 70}, {"seqlen": 0}, {"batch": 0}, {"cu_seqlens": PACKED}, {"cu_seqlens": (0,)}, {"h0": False})
    for dtype, size in itertools.product((torch.float64, torch.float32, torch.bfloat16), sizes):
        inputs = make_inputs(variant, dtype=dtype, layout=layout, device=device, **size)
        calls = [
            (variant.operator, *operator_arguments(variant, inputs)),
            (ops._linear_recurrence_fwd.default, forward_arguments(variant, inputs), {}),
            (ops._linear_recurrence_bwd.default, backward_arguments(variant, inputs), {}),
        ]
        for operator, args, kwargs in calls:
            metas = flat(operator(*map(on_meta, args), **{name: on_meta(value) for name, value in kwargs.items()}))
            for meta, real in zip(metas, flat(operator(*args, **kwargs)), strict=True):
                assert meta.is_meta and not real.is_meta
                assert (meta.shape, meta.dtype) == (real.shape, real.dtype), operator
                assert meta.stride() == real.stride() or not real.numel(), operator  # no elements, no layout


@every_recurrence
def test_meta_backward(variant, device):
    leaves = with_gradients(make_inputs(variant, device="meta"))
    h, last_state = variant.scan(**leaves, return_last_state=True)
    (h.sum() + last_state.sum()).backward()
    for name in tensor_names(leaves):
        gradient = leaves[name].grad
        assert gradient.is_meta and gradient.shape == leaves[name].shape and gradient.dtype == leaves[name].dtype


@every_recurrence
def test_results_share_no_memory_with_arguments(variant, device):
    for common in COMMON.values():
        inputs = make_inputs(variant, device=device, **common)
        storages = {inputs[name].untyped_storage().data_ptr() for name in tensor_names(inputs)}
        results = variant.scan(**inputs, return_last_state=True)
        assert not storages & {result.untyped_storage().data_ptr() for result in results}


# ----- compile and export


def mark_seqlen_dynamic(variant: Variant, inputs: dict[str, Any]) -> dict[str, Any]:
    for name in sequence_names(variant, inputs):
        torch._dynamo.mark_dynamic(inputs[name], 1)
    return inputs


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@every_recurrence
def test_compile_once_for_every_length(variant, reverse, device, fresh_dynamo):
    """fullgraph, forward and backward: one graph each for every length, that calls nothing but the kernels."""
    graphs = KeptGraphs()
    compiled = torch.compile(with_state(variant), fullgraph=True, backend=graphs.backend)
    for seqlen in (5, 32, 70, 7):
        inputs = make_inputs(variant, seqlen=seqlen, reverse=reverse, device=device)
        actual = training_step(lambda **leaves: compiled(**mark_seqlen_dynamic(variant, leaves)), inputs)
        assert_all_close(actual, training_step(with_state(variant), inputs), 1e-12)
    assert graphs.kernels() == (["ssm_kernels._linear_recurrence_fwd.default"], ["ssm_kernels._linear_recurrence_bwd.default"])


@some_recurrences
def test_compile_packed_sequences(variant, device, fresh_dynamo):
    """Once for every length and every number of sequences: the offsets are data."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(with_state(variant), fullgraph=True, dynamic=True, backend=counter)
    for cu_seqlens in (PACKED, (0, 3, 5, 5, 6), (0, 40, 41, 60)):
        inputs = make_inputs(variant, cu_seqlens=cu_seqlens, device=device)
        assert_all_close(training_step(compiled, inputs), training_step(with_state(variant), inputs), 1e-12)
    assert counter.frame_count == 1


@pytest.mark.parametrize("variant", [VARIANTS["mingru_scan-g-False"], VARIANTS["minlstm_scan-tanh"]], ids=lambda v: v.name)
def test_compile_with_options(variant, device, fresh_dynamo):
    compiled = torch.compile(with_state(variant), fullgraph=True, backend="aot_eager")
    inputs = make_inputs(variant, device=device)
    assert_all_close(training_step(compiled, inputs), training_step(with_state(variant), inputs), 1e-12)


def test_compile_with_a_number_for_the_step_size(device, fresh_dynamo):
    compiled = torch.compile(with_state(LIQUID), fullgraph=True, backend="aot_eager")
    for dt in (0.1, 0.3):
        inputs = make_inputs(LIQUID, device=device) | {"dt": dt}
        assert_all_close(training_step(compiled, inputs), training_step(with_state(LIQUID), inputs), 1e-12)


@pytest.mark.slow
def test_compile_with_inductor(device, fresh_dynamo):
    """With work around the operator for Inductor to fuse and to lay out."""

    def layer(*, candidate, tau, **inputs):
        h, last_state = LIQUID.scan(torch.tanh(candidate) * 2, tau.exp(), **inputs, return_last_state=True)
        return torch.relu(h) + candidate, last_state * 2

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for seqlen in (70, 9):
        inputs = make_inputs(LIQUID, seqlen=seqlen, dtype=torch.float32, layout="transposed", device=device)
        assert_all_close(training_step(compiled, inputs), training_step(layer, inputs), 1e-4)


@some_recurrences
def test_compiled_steps(variant, device, fresh_dynamo):
    """A decoding loop, without gradients."""
    inputs = make_inputs(variant, seqlen=3, device=device)

    def decode(state, *steps):
        outputs = []
        for of_step in steps:
            h, state = variant.step(**of_step, state=state)
            outputs.append(h)
        return torch.stack(outputs, dim=1), state

    steps = [step_inputs(variant, inputs, t) for t in range(3)]
    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for actual, expected in zip(compiled(inputs["h0"], *steps), decode(inputs["h0"], *steps), strict=True):
                assert torch.equal(actual, expected)


def test_backward_through_one_result_under_compile(device, fresh_dynamo):
    """The last state's gradient is undefined."""
    inputs = make_inputs(LINEAR, seqlen=9, device=device)

    def first(a, b, h0):
        return LINEAR.scan(a, b, h0).square().sum()

    compiled = torch.compile(first, fullgraph=True, backend="aot_eager")
    arguments = [inputs[name].requires_grad_() for name in ("a", "b", "h0")]
    for actual, expected in zip(
        torch.autograd.grad(compiled(*arguments), arguments), torch.autograd.grad(first(*arguments), arguments), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@every_recurrence
def test_export(variant, device):
    """Exports with a symbolic length."""
    names = [*variant.recurrence.inputs, "h0"]

    class Scan(torch.nn.Module):
        def forward(self, *tensors):
            return variant.scan(**dict(zip(names, tensors, strict=True)), return_last_state=True)

    def arguments(seqlen):
        inputs = make_inputs(variant, seqlen=seqlen, device=device)
        return inputs, tuple(inputs[name] for name in names)

    seqlen = torch.export.Dim("seqlen", min=2, max=4096)
    inputs, example = arguments(9)
    dynamic = tuple({1: seqlen} if name in sequence_names(variant, inputs) else None for name in names)
    exported = torch.export.export(Scan(), example, dynamic_shapes=(dynamic,))
    targets = [str(node.target) for node in exported.graph.nodes if "ssm_kernels" in str(node.target)]
    assert len(targets) == 1
    for length in (9, 32, 200):
        _, example = arguments(length)
        for actual, expected in zip(exported.module()(*example), Scan()(*example), strict=True):
            assert torch.equal(actual, expected)


# ----- grad modes


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant, device):
    inputs = make_inputs(MINGRU, seqlen=70, device=device)
    names = tensor_names(inputs)

    def checkpointed(**leaves):
        def scan(*tensors):
            return MINGRU.scan(**(leaves | dict(zip(names, tensors, strict=True))), return_last_state=True)

        return torch.utils.checkpoint.checkpoint(scan, *(leaves[name] for name in names), use_reentrant=use_reentrant)

    assert_equal(training_step(checkpointed, inputs), training_step(with_state(MINGRU), inputs))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@every_recurrence
def test_without_gradients(variant, mode, device):
    inputs = make_inputs(variant, device=device)
    expected = variant.scan(**inputs, return_last_state=True)
    with mode():
        results = variant.scan(**with_gradients(inputs), return_last_state=True)
    for actual, value in zip(results, expected, strict=True):
        assert not actual.requires_grad and actual.grad_fn is None
        assert actual.is_inference() == (mode is torch.inference_mode)
        assert torch.equal(actual, value)


@every_recurrence
def test_results_are_differentiable_where_an_argument_is(variant, device):
    inputs = make_inputs(variant, device=device)
    for name in tensor_names(inputs):
        for result in variant.scan(**with_gradients(inputs, [name]), return_last_state=True):
            assert result.requires_grad and "LinearRecurrence" in result.grad_fn.name()


@every_recurrence
def test_forward_mode_says_that_there_is_none(variant, device):
    inputs = make_inputs(variant, device=device)
    for name in tensor_names(inputs):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(inputs[name], torch.ones_like(inputs[name]))
            with pytest.raises(RuntimeError, match=r"(?i)jvp is not implemented|forward.mode|forward AD"):
                variant.scan(**(inputs | {name: dual}))


# ----- autocast


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@every_variant
def test_autocast(variant, low, device):
    """Inputs are cast; those that broadcast and h0 stay float32, and so does last_state. The gradients come back in float32."""
    inputs = make_inputs(variant, channels=6, seqlen=70, dtype=torch.float32, device=device)
    narrow = [name for name in variant.recurrence.inputs if name not in variant.recurrence.broadcast]
    cast = inputs | {name: inputs[name].to(low) for name in narrow}
    cotangents = make_cotangents(cast)
    with torch.autocast(device, dtype=low):
        h, last_state = variant.scan(**inputs, return_last_state=True)
        assert h.dtype == low and last_state.dtype == torch.float32
        leaves = with_gradients(inputs)
        results = variant.scan(**leaves, return_last_state=True)
    torch.autograd.backward(results, cotangents)
    explicit = evaluate(variant.scan, cast, cotangents)
    assert torch.equal(results[0], explicit["h"]) and torch.equal(results[1], explicit["last_state"])
    for name in tensor_names(inputs):
        assert leaves[name].grad.dtype == torch.float32
        assert torch.equal(leaves[name].grad, explicit[f"grad_{name}"].float()), name


def test_autocast_of_mixed_arguments(device):
    """Inputs as projections give them under autocast: float16 or bfloat16 beside float32, and parameters to cast up."""
    for variant in (LIQUID, RGLRU):
        inputs = make_inputs(variant, dtype=torch.float32, device=device)
        names = list(variant.recurrence.inputs)
        narrow = [name for name in names if name not in variant.recurrence.broadcast]
        rounded = inputs | {name: inputs[name].bfloat16() for name in names}
        expected = evaluate(variant.scan, rounded | {name: rounded[name].float() for name in variant.recurrence.broadcast})
        for mixed in (rounded, rounded | {name: rounded[name].float() for name in narrow}):
            with torch.autocast(device, dtype=torch.bfloat16):
                h, last_state = variant.scan(**mixed, return_last_state=True)
            assert torch.equal(h, expected["h"]) and torch.equal(last_state, expected["last_state"])


def test_autocast_of_packed_sequences_and_steps(device):
    inputs = make_inputs(MINGRU, cu_seqlens=PACKED, dtype=torch.float32, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        h, last_state = MINGRU.scan(**inputs, return_last_state=True)
        step_h, state = MINGRU.step(inputs["gate"][0], inputs["candidate"][0])
    assert h.dtype == step_h.dtype == torch.bfloat16 and last_state.dtype == state.dtype == torch.float32


@every_recurrence
def test_autocast_leaves_float64_alone(variant, device):
    inputs = make_inputs(variant, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        h, last_state = variant.scan(**inputs, return_last_state=True)
    assert h.dtype == last_state.dtype == torch.float64 and torch.equal(h, variant.scan(**inputs))


def test_autocast_in_compile(device, fresh_dynamo):
    inputs = make_inputs(MINGRU, dtype=torch.float32, device=device)

    def scan(**inputs):
        with torch.autocast(device, dtype=torch.bfloat16):
            return MINGRU.scan(**inputs, return_last_state=True)

    actual, expected = (training_step(f, inputs) for f in (torch.compile(scan, fullgraph=True, backend="aot_eager"), scan))
    assert actual["h"].dtype == torch.bfloat16
    assert_equal(actual, expected)


# ----- memory and schema


def allocated(function, device: str) -> int:
    """Bytes that PyTorch's allocator is asked for during the call."""
    if device == "cuda":
        before = torch.cuda.memory_stats()["requested_bytes.all.allocated"]
        function()
        return torch.cuda.memory_stats()["requested_bytes.all.allocated"] - before
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0)


def test_memory_grows_only_with_results_and_gradients(device):
    """From one length to twice the length, nothing of the size of a sequence appears beside them."""
    batch, channels, grown = 2, 64, 2048

    def measure(seqlen):
        inputs = make_inputs(RGLRU, batch=batch, channels=channels, seqlen=seqlen, dtype=torch.float32, device=device)
        forward, backward = forward_arguments(RGLRU, inputs), backward_arguments(RGLRU, inputs)
        return (
            allocated(lambda: ops._linear_recurrence_fwd(*forward), device),
            allocated(lambda: ops._linear_recurrence_bwd(*backward), device),
        )

    measure(64)  # what is allocated once
    fwd, bwd = (long - short for short, long in zip(measure(grown), measure(2 * grown), strict=True))
    sequence = 4 * batch * channels * grown
    # On CUDA also the carries between blocks, which grow with the number of segments.
    slack = 1024 if device == "cpu" else sequence // 4
    assert sequence <= fwd <= sequence + slack
    assert 4 * sequence <= bwd <= 4 * sequence + slack


def test_lazy_copies_stay_lazy(device):
    """Arguments are read through pointers that may be shared: nothing is copied on write."""
    for common in ({"seqlen": 70}, {"cu_seqlens": PACKED, "reverse": True}):
        inputs = make_inputs(MINGRU, device=device, **common)
        inputs |= {name: torch._lazy_clone(inputs[name]) for name in tensor_names(inputs)}
        evaluate(MINGRU.scan, inputs, tuple(torch._lazy_clone(x) for x in make_cotangents(inputs)))
        assert all(torch._C._is_cow_tensor(inputs[name]) for name in tensor_names(inputs))


def test_what_is_kept_for_backward(device):
    """The inputs, h and h0, all of them tensors that the caller has anyway."""
    inputs = with_gradients(make_inputs(MINGRU, seqlen=70, device=device))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        h = MINGRU.scan(**inputs)
    storages = {x.untyped_storage().data_ptr() for x in (inputs["gate"], inputs["candidate"], inputs["h0"], h)}
    assert {x.untyped_storage().data_ptr() for x in kept} == storages


# Programs and exported graphs call these schemas. A change breaks them: add arguments at the end, with defaults.
SCHEMAS = {
    "linear_scan": "Tensor a, Tensor b, Tensor? h0=None, *",
    "mingru_scan": (
        "Tensor gate, Tensor candidate, Tensor? h0=None, *, str? candidate_activation=None, bool gate_is_logit=True"
    ),
    "minlstm_scan": "Tensor forget, Tensor input, Tensor candidate, Tensor? h0=None, *, str? candidate_activation=None",
    "liquid_scan": "Tensor candidate, Tensor tau, Tensor dt, Tensor? h0=None, *",
    "rglru_scan": "Tensor recurrence_gate, Tensor input_gate, *, Tensor x, Tensor recurrent_param, Tensor? h0=None",
    "hgrn_scan": "Tensor log_gate, *, Tensor x, Tensor? h0=None",
    "elu_gru_scan": "Tensor gate, Tensor candidate, Tensor? h0=None, *",
    "diag_linear_scan": "Tensor gate, Tensor x, Tensor? h0=None, *",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema_is_backward_compatible(name):
    released = torch._C.parse_schema(
        f"ssm_kernels::{name}({SCHEMAS[name]}, bool reverse=False, Tensor? cu_seqlens=None) -> (Tensor h, Tensor last_state)"
    )
    current = getattr(ops, name).default._schema
    assert current.is_backward_compatible_with(released), f"now {current}, was {released}"
    arguments = [(a.name, a.kwarg_only) for a in released.arguments]
    assert [(a.name, a.kwarg_only) for a in current.arguments][: len(arguments)] == arguments


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema_of_the_step(name):
    """The scan's, with `state` for `h0`, and without options of time."""
    of_step = SCHEMAS[name].replace("h0", "state").removesuffix(", *")
    step = name.replace("_scan", "_step")
    released = torch._C.parse_schema(f"ssm_kernels::{step}({of_step}) -> (Tensor h, Tensor new_state)")
    assert str(getattr(ops, step).default._schema) == str(released)


@pytest.mark.parametrize(
    "name",
    [
        *PLAIN,
        *(name.replace("_scan", "_step") for name in PLAIN),
        "_linear_recurrence",
        "_linear_recurrence_fwd",
        "_linear_recurrence_bwd",
    ],
)
def test_operators_are_tagged_for_compile(name):
    assert torch.Tag.pt2_compliant_tag in getattr(ops, name).default.tags
