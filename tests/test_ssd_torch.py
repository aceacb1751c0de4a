"""ssd_chunk_scan as a PyTorch operator: opcheck, meta, compile, export, grad modes, autocast, vmap, memory, schema."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
from helpers import FUNC_TRANSFORMS, LAYOUTS, KeptGraphs, assert_equal
from ssd_helpers import (
    OPTIONS,
    PACKED,
    SEQUENCES,
    TENSORS,
    assert_all_close,
    backward_arguments,
    evaluate,
    every_option,
    forward_arguments,
    make_cotangents,
    make_inputs,
    operator_arguments,
    scan,
    states_like,
    tensor_names,
    training_step,
    with_gradients,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ssm_kernels import ssd_chunk_scan

OPERATOR = "ssd_chunk_scan"
ops = torch.ops.ssm_kernels

some_options = pytest.mark.parametrize("name", ["everything", "required_only", "packed_with_states", "resets", "dt_limit"])

# ----- opcheck and Meta


@pytest.mark.parametrize("needs_grad", [True, False], ids=["grad", "no_grad"])
@some_options
def test_opcheck(name, needs_grad, device):
    inputs = make_inputs(device=device, **OPTIONS[name])
    args, kwargs = operator_arguments(with_gradients(inputs) if needs_grad else inputs)
    torch.library.opcheck(ops.ssd_chunk_scan.default, args, kwargs)


@pytest.mark.parametrize("name", ["everything", "required_only", "packed_with_states", "resets"])
def test_opcheck_of_the_internal_operators(name, device):
    inputs = make_inputs(device=device, **OPTIONS[name])
    torch.library.opcheck(ops._ssd_chunk_scan_fwd.default, forward_arguments(inputs))
    arguments = backward_arguments(inputs)
    torch.library.opcheck(ops._ssd_chunk_scan_bwd.default, arguments)
    torch.library.opcheck(ops._ssd_chunk_scan_bwd.default, (None, *arguments[1:]))
    torch.library.opcheck(ops._ssd_chunk_scan_bwd.default, (arguments[0], None, *arguments[2:]))
    for needed in range(0, 9, 3):
        needs_grad = [needed <= i < needed + 2 for i in range(9)]
        torch.library.opcheck(ops._ssd_chunk_scan_bwd.default, (*arguments[:-1], needs_grad))


def on_meta(value: Any) -> Any:
    """Not .to("meta"), which keeps the strides of dense tensors only."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_meta_agrees_with_the_device(layout, device):
    """Shapes, dtypes and strides, of the operator and of the two below it."""
    sizes = [{}, {"seqlen": 70}, {"seqlen": 0}, {"batch": 0}, {"cu_seqlens": PACKED}, {"cu_seqlens": (0,)}]
    for dtype, size in itertools.product((torch.float64, torch.float32, torch.bfloat16), [*sizes, OPTIONS["required_only"]]):
        inputs = make_inputs(dtype=dtype, layout=layout, device=device, **size)
        calls = [
            (ops.ssd_chunk_scan, *operator_arguments(inputs)),
            (ops._ssd_chunk_scan_fwd, forward_arguments(inputs), {}),
            (ops._ssd_chunk_scan_bwd, backward_arguments(inputs), {}),
        ]
        for operator, args, kwargs in calls:
            metas = operator(*map(on_meta, args), **{name: on_meta(value) for name, value in kwargs.items()})
            for meta, real in zip(metas, operator(*args, **kwargs), strict=True):
                assert meta.is_meta and not real.is_meta
                assert (meta.shape, meta.dtype) == (real.shape, real.dtype), operator
                assert meta.stride() == real.stride() or not real.numel(), operator  # no elements, no layout


@some_options
def test_meta_backward(name, device):
    leaves = with_gradients(make_inputs(device="meta", **OPTIONS[name]))
    out, final_states = scan(**leaves)
    (out.sum() + final_states.sum()).backward()
    for tensor in tensor_names(leaves):
        gradient = leaves[tensor].grad
        assert gradient.is_meta and gradient.shape == leaves[tensor].shape and gradient.dtype == leaves[tensor].dtype


def test_gradients_that_are_not_needed_have_no_elements(device):
    inputs = make_inputs(device=device)
    everything = ops._ssd_chunk_scan_bwd(*backward_arguments(inputs))
    for needed in range(9):
        gradients = ops._ssd_chunk_scan_bwd(*backward_arguments(inputs, [i == needed for i in range(9)]))
        for i, gradient in enumerate(gradients):
            assert torch.equal(gradient, everything[i]) if i == needed else not gradient.numel()


@every_option
def test_results_share_no_memory_with_arguments(options, device):
    """Where nothing happens to the states either."""
    for sizes in ({}, {"seqlen": 0}, {"cu_seqlens": (0, 0)}):
        inputs = make_inputs(device=device, **(options | sizes | ({"resets": None} if "cu_seqlens" in sizes else {})))
        storages = {inputs[name].untyped_storage().data_ptr() for name in tensor_names(inputs) if inputs[name].numel()}
        for result in scan(**inputs):
            assert not result.numel() or result.untyped_storage().data_ptr() not in storages


# ----- compile and export


def mark_seqlen_dynamic(inputs: dict[str, Any]) -> dict[str, Any]:
    for name in (*SEQUENCES, "seq_idx"):
        if inputs[name] is not None:
            torch._dynamo.mark_dynamic(inputs[name], 1)
    return inputs


@pytest.mark.parametrize("name", ["everything", "resets_with_states"])
def test_compile_once_for_every_length(name, device, fresh_dynamo):
    """fullgraph, forward and backward: one graph each for every length, that calls nothing but the kernels."""
    graphs = KeptGraphs()
    compiled = torch.compile(scan, fullgraph=True, backend=graphs.backend)
    for seqlen in (5, 32, 70, 7):
        inputs = make_inputs(device=device, **OPTIONS[name] | {"seqlen": seqlen})
        actual = training_step(lambda **leaves: compiled(**mark_seqlen_dynamic(leaves)), inputs)
        assert_all_close(actual, training_step(scan, inputs), 1e-11)
    assert graphs.kernels() == (["ssm_kernels._ssd_chunk_scan_fwd.default"], ["ssm_kernels._ssd_chunk_scan_bwd.default"])


def assert_compiles_once(calls: list[dict[str, Any]]) -> None:
    """Nothing for a call after the first, which of numbers such as dt_limit may take two attempts."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(scan, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for inputs in calls:
        assert_all_close(training_step(compiled, inputs), training_step(scan, inputs), 1e-11)
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1


def test_compile_packed_sequences(device, fresh_dynamo):
    """Once for every length and every number of sequences: the offsets are data."""
    assert_compiles_once([make_inputs(cu_seqlens=offsets, device=device) for offsets in (PACKED, (0, 3, 5, 6), (0, 40, 60))])


def test_compile_with_options(device, fresh_dynamo):
    """Also once for every chunk_size."""
    options = {"seqlen": 70, "dt_limit": (0.1, 0.5), "discretization": "foh", "device": device}
    assert_compiles_once([make_inputs(chunk_size=chunk_size, **options) for chunk_size in (16, 32, 48)])


def test_compiled_autograd(device, fresh_dynamo):
    """The backward pass traced as a whole."""
    inputs = make_inputs(seqlen=20, device=device)
    expected = training_step(scan, inputs)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", dynamic=True)):
        assert_all_close(training_step(scan, inputs), expected, 1e-11)


@pytest.mark.slow
def test_compile_with_inductor(device, fresh_dynamo):
    """With work around the operator for Inductor to fuse and to lay out."""

    def layer(*, x, **inputs):
        out, final_states = ops.ssd_chunk_scan(x=torch.tanh(x), **inputs)
        return torch.relu(out) + x, final_states

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for seqlen in (70, 9):
        inputs = make_inputs(seqlen=seqlen, dtype=torch.float32, layout="transposed", device=device) | {"dt_limit": None}
        assert_all_close(training_step(compiled, inputs), training_step(layer, inputs), 1e-4)


def test_export(device):
    """Exports with a symbolic length."""

    options = {name: value for name, value in make_inputs().items() if name not in TENSORS}

    class Scan(torch.nn.Module):
        def forward(self, *tensors):
            return scan(**options | dict(zip(TENSORS, tensors, strict=True)))

    def arguments(seqlen):
        inputs = make_inputs(seqlen=seqlen, device=device)
        return tuple(inputs[name] for name in TENSORS)

    seqlen = torch.export.Dim("seqlen", min=2, max=4096)
    dynamic = tuple({1: seqlen} if name in SEQUENCES else None for name in TENSORS)
    exported = torch.export.export(Scan(), arguments(9), dynamic_shapes=(dynamic,))
    targets = [str(node.target) for node in exported.graph.nodes if "ssm_kernels" in str(node.target)]
    assert len(targets) == 1
    for length in (9, 32, 200):
        for actual, expected in zip(exported.module()(*arguments(length)), Scan()(*arguments(length)), strict=True):
            assert torch.equal(actual, expected)


# ----- grad modes


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant, device):
    inputs = make_inputs(seqlen=70, device=device)

    def checkpointed(**leaves):
        def of_tensors(*tensors):
            return scan(**(leaves | dict(zip(TENSORS, tensors, strict=True))))

        return torch.utils.checkpoint.checkpoint(of_tensors, *(leaves[n] for n in TENSORS), use_reentrant=use_reentrant)

    assert_equal(training_step(checkpointed, inputs), training_step(scan, inputs))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@some_options
def test_without_gradients(name, mode, device):
    inputs = make_inputs(device=device, **OPTIONS[name])
    expected = scan(**inputs)
    with mode():
        results = scan(**with_gradients(inputs))
    for actual, value in zip(results, expected, strict=True):
        assert not actual.requires_grad and actual.grad_fn is None
        assert actual.is_inference() == (mode is torch.inference_mode)
        assert torch.equal(actual, value)


def test_results_are_differentiable_where_an_argument_is(device):
    inputs = make_inputs(device=device)
    for name in TENSORS:
        for result in scan(**with_gradients(inputs, [name])):
            assert result.requires_grad and "SsdChunkScan" in result.grad_fn.name()


def test_forward_mode_says_that_there_is_none(device):
    inputs = make_inputs(device=device)
    for name in TENSORS:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(inputs[name], torch.ones_like(inputs[name]))
            with pytest.raises(RuntimeError, match=r"(?i)jvp is not implemented|forward.mode|forward AD"):
                scan(**(inputs | {name: dual}))


# ----- autocast


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast(low, device):
    """Sequences are cast; parameters and states stay float32. The gradients come back in float32."""
    for options in ({}, {"cu_seqlens": (0, 20, 20, 70)}):
        inputs = make_inputs(seqlen=70, dtype=torch.float32, device=device, **options)
        cast = inputs | {name: inputs[name].to(low) for name in SEQUENCES}
        cotangents = make_cotangents(cast)
        leaves = with_gradients(inputs)
        with torch.autocast(device, dtype=low):
            results = scan(**leaves)
        assert results[0].dtype == low and results[1].dtype == torch.float32
        torch.autograd.backward(results, cotangents)
        explicit = evaluate(scan, cast, cotangents)
        assert torch.equal(results[0], explicit["out"]) and torch.equal(results[1], explicit["final_states"])
        for name in TENSORS:
            assert leaves[name].grad.dtype == torch.float32
            assert torch.equal(leaves[name].grad, explicit[f"grad_{name}"].float()), name


def test_autocast_of_mixed_arguments(device):
    """Inputs as projections give them under autocast: float16 or bfloat16 beside float32, and parameters to cast up."""
    inputs = make_inputs(dtype=torch.float32, device=device)
    rounded = inputs | {name: inputs[name].bfloat16() for name in TENSORS}
    expected = evaluate(scan, rounded | {name: rounded[name].float() for name in set(TENSORS) - set(SEQUENCES)})
    for mixed in (rounded, rounded | {name: rounded[name].float() for name in ("x", "B")}):
        with torch.autocast(device, dtype=torch.bfloat16):
            out, final_states = scan(**mixed)
        assert torch.equal(out, expected["out"]) and torch.equal(final_states, expected["final_states"])


def test_autocast_leaves_float64_alone(device):
    inputs = make_inputs(device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out, final_states = scan(**inputs)
    assert out.dtype == final_states.dtype == torch.float64 and torch.equal(out, ssd_chunk_scan(**inputs))


def test_autocast_in_compile(device, fresh_dynamo):
    inputs = make_inputs(dtype=torch.float32, device=device)

    def cast_scan(**inputs):
        with torch.autocast(device, dtype=torch.bfloat16):
            return scan(**inputs)

    compiled = torch.compile(cast_scan, fullgraph=True, backend="aot_eager")
    actual, expected = (training_step(function, inputs) for function in (compiled, cast_scan))
    assert actual["out"].dtype == torch.bfloat16
    assert_equal(actual, expected)


# ----- vmap


def stacked_inputs(names, axis: int = 0, samples: int = 3, **options) -> tuple[list[dict], dict]:
    """Sets of arguments that differ in `names`, and one set with those stacked along `axis`."""
    first, *others = (make_inputs(seed=seed, **options) for seed in range(samples))
    sets = [first, *(first | {name: other[name] for name in names} for other in others)]
    return sets, first | {name: torch.stack([s[name] for s in sets], dim=axis) for name in names}


def vmapped(names, axis: int = 0):
    """The scan, mapped over some of its arguments."""

    def function(**inputs):
        def of_tensors(*tensors):
            return scan(**(inputs | dict(zip(names, tensors, strict=True))))

        return torch.vmap(of_tensors, in_dims=axis)(*(inputs[name] for name in names))

    return function


@pytest.mark.parametrize("options", ["everything", "required_only", "packed_with_states", "resets_with_states"])
def test_vmap_over_each_combination_of_arguments(options, device, no_vmap_fallback):
    options = OPTIONS[options]
    names = tensor_names(make_inputs(**options))
    subsets = [subset for size in (1, 2, len(names)) for subset in itertools.combinations(names, size)]
    for chosen in subsets:
        sets, stacked = stacked_inputs(chosen, device=device, **options)
        expected = zip(*(scan(**s) for s in sets), strict=True)
        for result, column in zip(vmapped(chosen)(**stacked), expected, strict=True):
            torch.testing.assert_close(result, torch.stack(column), rtol=1e-11, atol=1e-11, msg=lambda m, c=chosen: f"{c}: {m}")


@pytest.mark.parametrize("axis", [1, -1])
def test_vmap_over_other_axes(axis, device, no_vmap_fallback):
    names = [name for name in TENSORS if name != "A" or axis == 1]
    sets, stacked = stacked_inputs(names, axis=axis, device=device)
    expected = zip(*(scan(**s) for s in sets), strict=True)
    for result, column in zip(vmapped(names, axis)(**stacked), expected, strict=True):
        torch.testing.assert_close(result, torch.stack(column), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("options", [{}, {"cu_seqlens": PACKED}, {"resets": ((2,), (1, 3))}], ids=["batch", "packed", "resets"])
def test_gradients_outside_vmap(options, device, no_vmap_fallback):
    for names in (["x"], ["A"], ["dt", "B"], ["initial_states", "D"], list(TENSORS)):
        sets, stacked = stacked_inputs(names, device=device, **options)

        def looped(names=names, sets=sets, **inputs):
            results = [scan(**(inputs | {n: inputs[n][i] for n in names})) for i, _ in enumerate(sets)]
            return tuple(torch.stack(column) for column in zip(*results, strict=True))

        assert_all_close(training_step(vmapped(names), stacked), training_step(looped, stacked))


@pytest.mark.parametrize("options", [{}, {"cu_seqlens": PACKED}], ids=["batch", "packed"])
def test_batched_gradients(options, device):
    """is_grads_batched: several vector-Jacobian products in one backward pass."""
    leaves = with_gradients(make_inputs(device=device, **options))
    out = ssd_chunk_scan(**leaves)
    cotangents = torch.stack([make_cotangents(leaves, seed=seed)[0] for seed in range(3)])
    tensors = [leaves[name] for name in TENSORS]
    batched = torch.autograd.grad(out, tensors, cotangents, is_grads_batched=True, retain_graph=True)
    for i, cotangent in enumerate(cotangents):
        for all_of_them, one in zip(batched, torch.autograd.grad(out, tensors, cotangent, retain_graph=True), strict=True):
            torch.testing.assert_close(all_of_them[i], one, rtol=1e-11, atol=1e-11)


def test_vmap_in_vmap(device, no_vmap_fallback):
    inputs = make_inputs(device=device)
    x = torch.stack([torch.stack([inputs["x"] * (i + 1) + j for j in range(2)]) for i in range(3)])
    A = torch.stack([inputs["A"] * (j + 1) for j in range(2)])

    def of_two(x, A):
        return ssd_chunk_scan(**(inputs | {"x": x, "A": A}))

    out = torch.vmap(torch.vmap(of_two), in_dims=(0, None))(x, A)
    expected = torch.stack([torch.stack([of_two(x[i, j], A[j]) for j in range(2)]) for i in range(3)])
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)


def test_vmap_over_no_samples(device, no_vmap_fallback):
    inputs = make_inputs(device=device)
    for names in (("x",), ("A",), TENSORS):
        empty = inputs | {name: inputs[name].new_empty(0, *inputs[name].shape) for name in names}
        out, final_states = vmapped(names)(**empty)
        assert out.shape == (0, *inputs["x"].shape) and out.dtype == inputs["x"].dtype
        assert final_states.shape == (0, *states_like(inputs).shape) and final_states.dtype == inputs["A"].dtype


def test_vmap_over_offsets_says_that_it_is_not_supported(device, no_vmap_fallback):
    inputs = make_inputs(cu_seqlens=PACKED, device=device)
    stacked = torch.stack([inputs["cu_seqlens"]] * 2)
    with pytest.raises(RuntimeError, match=r"^ssd_chunk_scan: expected cu_seqlens that vmap does not map"):
        vmapped(["cu_seqlens"])(**(inputs | {"cu_seqlens": stacked}))


@pytest.mark.parametrize("transform", FUNC_TRANSFORMS)
def test_func_transforms_say_that_they_are_not_supported(transform, device):
    """Naming the operator, what is not supported and what is."""
    inputs = make_inputs(device=device)
    with pytest.raises(RuntimeError, match=r"^ssd_chunk_scan: .*torch\.func.* not supported") as error:
        FUNC_TRANSFORMS[transform](lambda x: ssd_chunk_scan(**(inputs | {"x": x})), inputs["x"])
    assert "torch.autograd" in str(error.value) and "vmap" in str(error.value)


# ----- memory and schema


def peak_memory(function, device: str) -> int:
    """Bytes that are held at once during the call, over those before it."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        return torch.cuda.max_memory_allocated() - before
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        function()
    held = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def test_memory_does_not_hold_a_state_for_every_step(device):
    """Beside results and gradients: nothing that grows as the states or the products of all pairs of steps would."""
    sizes = {"batch": 1, "heads": 4, "headdim": 16, "dstate": 64, "groups": 1, "chunk_size": 64, "dtype": torch.float32}

    def measure(seqlen):
        inputs = make_inputs(**sizes, seqlen=seqlen, device=device)
        forward, backward = forward_arguments(inputs), backward_arguments(inputs)
        return (
            peak_memory(lambda: ops._ssd_chunk_scan_fwd(*forward), device),
            peak_memory(lambda: ops._ssd_chunk_scan_bwd(*backward), device),
        )

    measure(64)  # what is allocated once
    grown = 4096
    fwd, bwd = (long - short for short, long in zip(measure(grown), measure(2 * grown), strict=True))
    states = 4 * grown * 4 * 16 * 64  # (seqlen, heads, headdim, dstate)
    assert fwd < states / 32 and bwd < states / 5, (fwd / states, bwd / states)


# Programs and exported graphs call these schemas. A change breaks them: add arguments at the end, with defaults.
SCHEMA = (
    "ssm_kernels::ssd_chunk_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, *, SymInt? chunk_size=None, "
    "Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False, float[]? dt_limit=None, "
    "Tensor? initial_states=None, Tensor? seq_idx=None, Tensor? cu_seqlens=None, str discretization='zoh') "
    "-> (Tensor out, Tensor final_states)"
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@some_options
def test_lazy_copies_stay_lazy(name, dtype, device):
    """Arguments and incoming gradients are read through pointers that may be shared: nothing is copied on write."""
    inputs = make_inputs(**OPTIONS[name], dtype=dtype, headdim=8, dstate=8, device=device)
    cotangents = tuple(torch._lazy_clone(x) for x in make_cotangents(inputs))
    inputs = {k: torch._lazy_clone(v) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    evaluate(scan, inputs, cotangents)
    lazy = {k: v for k, v in inputs.items() if isinstance(v, Tensor)} | dict(enumerate(cotangents))
    assert [k for k, tensor in lazy.items() if not torch._C._is_cow_tensor(tensor)] == []


def test_schema_is_backward_compatible():
    released, current = torch._C.parse_schema(SCHEMA), ops.ssd_chunk_scan.default._schema
    assert current.is_backward_compatible_with(released), f"now {current}, was {released}"
    arguments = [(a.name, a.kwarg_only) for a in released.arguments]
    assert [(a.name, a.kwarg_only) for a in current.arguments][: len(arguments)] == arguments


def test_function_and_schema_have_the_same_arguments():
    of_function = [name for name in inspect.signature(ssd_chunk_scan).parameters if name != "return_final_states"]
    assert of_function == [argument.name for argument in ops.ssd_chunk_scan.default._schema.arguments]


@pytest.mark.parametrize("name", ["ssd_chunk_scan", "_ssd_chunk_scan_fwd", "_ssd_chunk_scan_bwd"])
def test_operators_are_tagged_for_compile(name):
    assert torch.Tag.pt2_compliant_tag in getattr(ops, name).default.tags
