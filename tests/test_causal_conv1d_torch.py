"""causal_conv1d and causal_conv1d_update as PyTorch operators: opcheck, meta, compile, export, vmap, autocast, errors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from conv_helpers import (
    LAYOUTS,
    PACKED,
    TENSORS,
    assert_all_close,
    backward_arguments,
    evaluate,
    forward_arguments,
    make_cotangents,
    make_inputs,
    make_step_inputs,
    step,
    tensor_names,
    with_gradients,
    with_state,
)
from helpers import FUNC_TRANSFORMS, KeptGraphs, arrange, assert_equal, says, split
from helpers import LAYOUTS as ANY_LAYOUTS
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ssm_kernels import causal_conv1d, causal_conv1d_update

OPERATOR = "causal_conv1d"
ops = torch.ops.ssm_kernels

OPTIONS: dict[str, dict[str, Any]] = {
    "required": {"bias": False, "activation": None, "initial_state": False},
    "whole": {},
    "seq_idx": {"seq_idx": True},
    "packed": {"cu_seqlens": (0, 0, 3, 9)},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))


def training_step(function, inputs: dict[str, Any]) -> dict[str, Tensor]:
    leaves = with_gradients(inputs)
    out, final_state = function(**leaves)
    (out.float().square().sum() + final_state.float().square().sum()).backward()
    return {"out": out.detach(), "final_state": final_state.detach()} | {
        f"grad_{name}": leaves[name].grad for name in tensor_names(inputs)
    }


# ----- opcheck and Meta


@pytest.mark.parametrize("needs_grad", [True, False], ids=["grad", "no_grad"])
@every_option
def test_opcheck(options, needs_grad, device):
    for layout in ("contiguous", "channels_first_memory"):
        inputs = make_inputs(**options, layout=layout, device=device)
        arguments, keywords = split(ops.causal_conv1d, with_gradients(inputs) if needs_grad else inputs)
        torch.library.opcheck(ops.causal_conv1d.default, arguments, keywords)


@every_option
def test_opcheck_of_the_internal_operators(options, device):
    inputs = make_inputs(**options, device=device)
    torch.library.opcheck(ops._causal_conv1d.default, forward_arguments(with_gradients(inputs)))
    torch.library.opcheck(ops._causal_conv1d_fwd.default, forward_arguments(inputs))
    arguments = backward_arguments(inputs)
    torch.library.opcheck(ops._causal_conv1d_bwd.default, arguments)
    torch.library.opcheck(ops._causal_conv1d_bwd.default, (None, *arguments[1:]))
    torch.library.opcheck(ops._causal_conv1d_bwd.default, (arguments[0], None, *arguments[2:]))
    torch.library.opcheck(ops._causal_conv1d_bwd_out.default, (*arguments, torch.empty_like(inputs["x"])))
    for needed in range(4):
        needs_grad = tuple(needed == i for i in range(4))
        torch.library.opcheck(ops._causal_conv1d_bwd.default, backward_arguments(inputs, needs_grad))


@pytest.mark.parametrize("slots", [None, 5])
@pytest.mark.parametrize("seqlen", [None, 3])
def test_opcheck_of_the_step(seqlen, slots, device):
    inputs = make_step_inputs(seqlen=seqlen, slots=slots, device=device)
    torch.library.opcheck(ops.causal_conv1d_update.default, split(ops.causal_conv1d_update, inputs)[0])


def on_meta(value: Any) -> Any:
    """Not .to("meta"), which keeps the strides of dense tensors only."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


@pytest.mark.parametrize("layout", [*LAYOUTS, *ANY_LAYOUTS])
def test_meta_agrees_with_the_device(layout, device):
    """Shapes, dtypes and strides."""
    sizes = (*OPTIONS.values(), {"seqlen": 70}, {"seqlen": 0}, {"batch": 0}, {"cu_seqlens": (0,)}, {"width": 1})
    for dtype, size in itertools.product((torch.float64, torch.float32, torch.bfloat16), sizes):
        inputs = make_inputs(**size, dtype=dtype, layout=layout, device=device)
        arguments = backward_arguments(inputs)
        calls = [
            (ops._causal_conv1d_fwd, forward_arguments(inputs)),
            (ops._causal_conv1d_bwd, arguments),
            (ops._causal_conv1d_bwd, (*arguments[:-1], (False, True, False, False))),
            (ops._causal_conv1d_bwd_out, (*arguments, torch.empty_like(inputs["x"]))),
        ]
        for operator, args in calls:
            for meta, real in zip(operator(*map(on_meta, args)), operator(*args), strict=True):
                assert meta.is_meta and not real.is_meta
                assert (meta.shape, meta.dtype) == (real.shape, real.dtype), operator
                # An axis of one element has any stride, and a tensor without elements no layout.
                strides = zip(meta.stride(), real.stride(), real.shape, strict=True)
                assert not real.numel() or all(a == b for a, b, size in strides if size > 1), operator
    step_inputs = make_step_inputs(seqlen=3, device=device) | {}
    args = split(ops.causal_conv1d_update, step_inputs)[0]
    meta, real = ops.causal_conv1d_update(*map(on_meta, args)), ops.causal_conv1d_update(*args)
    assert (meta.shape, meta.dtype, meta.stride()) == (real.shape, real.dtype, real.stride())


@every_option
def test_meta_backward(options):
    leaves = with_gradients({k: on_meta(v) for k, v in make_inputs(**options).items()})
    out, final_state = with_state(**leaves)
    (out.sum() + final_state.sum()).backward()
    for name in tensor_names(leaves):
        gradient = leaves[name].grad
        assert gradient.is_meta and gradient.shape == leaves[name].shape and gradient.dtype == leaves[name].dtype


# ----- compile and export


@pytest.mark.parametrize(
    "options", [OPTIONS["required"], OPTIONS["whole"], OPTIONS["seq_idx"]], ids=["required", "whole", "seq"]
)
def test_compile_once_for_every_length(options, device, fresh_dynamo):
    """fullgraph, forward and backward: one graph each for every length, that calls nothing but the kernels."""
    graphs = KeptGraphs()
    compiled = torch.compile(with_state, fullgraph=True, backend=graphs.backend)

    def dynamic(**leaves):
        for name in ("x", "seq_idx"):
            if leaves[name] is not None:
                torch._dynamo.mark_dynamic(leaves[name], 1)
        return compiled(**leaves)

    for seqlen in (5, 32, 70, 7):
        inputs = make_inputs(**options, seqlen=seqlen, device=device)
        assert_all_close(training_step(dynamic, inputs), training_step(with_state, inputs), 1e-12)
    assert graphs.kernels() == (["ssm_kernels._causal_conv1d_fwd.default"], ["ssm_kernels._causal_conv1d_bwd.default"])


def test_compile_packed_sequences(device, fresh_dynamo):
    """Once for every length and every number of sequences: the offsets are data."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(with_state, fullgraph=True, dynamic=True, backend=counter)
    for cu_seqlens in (PACKED, (0, 3, 5, 5, 6), (0, 40, 41, 60)):
        inputs = make_inputs(cu_seqlens=cu_seqlens, device=device)
        assert_all_close(training_step(compiled, inputs), training_step(with_state, inputs), 1e-12)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_compile_with_inductor(device, fresh_dynamo):
    """With work around the operator for Inductor to fuse and to lay out: a slice of a projection, transposed or not."""

    def layer(*, x, **inputs):
        x = torch.cat([x * 2, torch.tanh(x)], dim=-1)[..., x.shape[-1] // 2 : x.shape[-1] // 2 + x.shape[-1]]
        out, final_state = with_state(**inputs, x=x)
        return torch.relu(out), final_state * 2

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for seqlen, layout in ((70, "contiguous"), (9, "channels_first_memory")):
        inputs = make_inputs(seqlen=seqlen, channels=16, dtype=torch.float32, layout=layout, device=device)
        assert_all_close(training_step(compiled, inputs), training_step(layer, inputs), 1e-4)


def test_compiled_steps(device, fresh_dynamo):
    """A decoding loop, without gradients; the state is mutated in the graph."""
    inputs = make_step_inputs(seqlen=3, device=device)

    def decode(x, conv_state, weight, bias):
        outputs = [causal_conv1d_update(x[:, t], conv_state, weight, bias, activation="silu") for t in range(3)]
        return torch.stack(outputs, dim=1)

    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            states = [inputs["conv_state"].clone() for _ in range(2)]
            results = [
                function(inputs["x"], state, inputs["weight"], inputs["bias"])
                for function, state in zip((compiled, decode), states, strict=True)
            ]
            assert torch.equal(*results) and torch.equal(*states) and not torch.equal(states[0], inputs["conv_state"])


def test_export(device):
    """With a symbolic length."""
    inputs = make_inputs(device=device)

    class Convolution(torch.nn.Module):
        def forward(self, *tensors):
            return with_state(**dict(zip(TENSORS, tensors, strict=True)), activation="silu")

    seqlen = torch.export.Dim("seqlen", min=2, max=4096)
    example = tuple(inputs[name] for name in TENSORS)
    exported = torch.export.export(Convolution(), example, dynamic_shapes=(({1: seqlen}, None, None, None),))
    targets = [str(node.target) for node in exported.graph.nodes if "ssm_kernels" in str(node.target)]
    assert len(targets) == 1
    for length in (2, 9, 200):
        longer = make_inputs(seqlen=length, device=device)
        example = tuple(longer[name] for name in TENSORS)
        for actual, expected in zip(exported.module()(*example), Convolution()(*example), strict=True):
            assert torch.equal(actual, expected)


# ----- vmap

SUBSETS = [subset for size in (1, 2, 3, 4) for subset in itertools.combinations(TENSORS, size)]


def stacked_inputs(names, axis: int = 0, samples: int = 3, **options) -> tuple[list[dict], dict]:
    """Sets of arguments that differ in `names`, and one set with those stacked along `axis`."""
    first, *others = (make_inputs(seed=seed, **options) for seed in range(samples))
    sets = [first, *(first | {name: other[name] for name in names} for other in others)]
    return sets, first | {name: torch.stack([s[name] for s in sets], dim=axis) for name in names}


def vmapped(names, axis: int = 0):
    def function(**inputs):
        def one(*tensors):
            return with_state(**inputs | dict(zip(names, tensors, strict=True)))

        return torch.vmap(one, in_dims=axis)(*(inputs[name] for name in names))

    return function


@pytest.mark.parametrize("names", [*SUBSETS, ("seq_idx",), ("x", "seq_idx"), ("weight", "seq_idx")], ids="-".join)
def test_vmap(names, device, no_vmap_fallback):
    """Over each combination of arguments, gradients outside of it."""
    for options, axis in itertools.product(OPTIONS.values(), (0, 1)):
        options = options | {"bias": True, "initial_state": True}
        if "seq_idx" in names and "seq_idx" not in options:
            continue
        _, stacked = stacked_inputs(names, axis, **options, device=device)

        def looped(axis=axis, **inputs):
            of_samples = ({name: inputs[name].select(axis, i) for name in names} for i in range(3))
            results = [with_state(**(inputs | of_sample)) for of_sample in of_samples]
            return tuple(torch.stack(column) for column in zip(*results, strict=True))

        assert_all_close(training_step(vmapped(names, axis), stacked), training_step(looped, stacked), 1e-12)


def test_vmap_in_vmap(device, no_vmap_fallback):
    inputs = make_inputs(device=device)
    x = torch.stack([torch.stack([inputs["x"] * (i + 1) + j for j in range(2)]) for i in range(3)])
    weight = torch.stack([inputs["weight"] * (j + 1) for j in range(2)])

    def convolution(x, weight):
        return causal_conv1d(**(inputs | {"x": x, "weight": weight}))

    out = torch.vmap(torch.vmap(convolution), in_dims=(0, None))(x, weight)
    expected = torch.stack([torch.stack([convolution(x[i, j], weight[j]) for j in range(2)]) for i in range(3)])
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_vmap_over_no_samples(device, no_vmap_fallback):
    for options, names in itertools.product(OPTIONS.values(), (("x",), ("x", "weight"))):
        inputs = make_inputs(**options, device=device)
        empty = inputs | {name: inputs[name].new_empty(0, *inputs[name].shape) for name in names}
        for result, expected in zip(vmapped(names)(**empty), with_state(**inputs), strict=True):
            assert result.shape == (0, *expected.shape) and result.dtype == expected.dtype


def test_vmap_over_offsets(device):
    inputs = make_inputs(cu_seqlens=(0, 4, 9), device=device)
    inputs["cu_seqlens"] = torch.stack([inputs["cu_seqlens"]] * 2)
    with pytest.raises(RuntimeError, match=says("causal_conv1d: expected cu_seqlens that vmap does not map, got in_dims 0")):
        vmapped(("cu_seqlens",))(**inputs)


def test_batched_gradients(device):
    """is_grads_batched: several vector-Jacobian products in one backward pass."""
    leaves = with_gradients(make_inputs(device=device))
    out = causal_conv1d(**leaves)
    cotangents = torch.stack([make_cotangents(leaves, seed=seed)[0] for seed in range(3)])
    tensors = [leaves[name] for name in TENSORS]
    batched = torch.autograd.grad(out, tensors, cotangents, is_grads_batched=True, retain_graph=True)
    for i, cotangent in enumerate(cotangents):
        for all_of_them, one in zip(batched, torch.autograd.grad(out, tensors, cotangent, retain_graph=True), strict=True):
            torch.testing.assert_close(all_of_them[i], one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("names", [("x", "conv_state"), ("conv_state",), ("x", "conv_state", "weight", "bias")], ids="-".join)
def test_vmap_of_the_step(names, device, no_vmap_fallback):
    for options, axis in itertools.product(({}, {"seqlen": 3}, {"slots": 4}), (0, 1)):
        sets = [make_step_inputs(seed=seed, **options, device=device) for seed in range(3)]
        sets = [sets[0] | {name: s[name] for name in names} for s in sets]
        expected = [step(s) for s in sets]
        stacked = [torch.stack([s[name] for s in sets], dim=axis) for name in names]

        def one(*tensors, sets=sets):
            return causal_conv1d_update(**sets[0] | dict(zip(names, tensors, strict=True)))

        out = torch.vmap(one, in_dims=axis)(*stacked)
        torch.testing.assert_close(out, torch.stack([out for out, _ in expected]))
        state = stacked[names.index("conv_state")]
        torch.testing.assert_close(state, torch.stack([state for _, state in expected], dim=axis))


def test_vmap_of_the_step_needs_a_state_for_each_sample(device):
    inputs = make_step_inputs(device=device)
    with pytest.raises(RuntimeError, match=says("causal_conv1d_update: expected vmap over conv_state")):
        torch.vmap(lambda x: causal_conv1d_update(**inputs | {"x": x}))(torch.stack([inputs["x"]] * 2))


@pytest.mark.parametrize("transform", FUNC_TRANSFORMS)
def test_func_transforms_say_that_they_are_not_supported(transform, device):
    inputs = make_inputs(device=device)
    with pytest.raises(RuntimeError, match=r"^causal_conv1d: .*torch\.func.* not supported"):
        FUNC_TRANSFORMS[transform](lambda x: causal_conv1d(**(inputs | {"x": x})), inputs["x"])


# ----- grad modes


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant, device):
    inputs = make_inputs(seqlen=70, device=device)

    def checkpointed(**leaves):
        def convolution(*tensors):
            return with_state(**leaves | dict(zip(TENSORS, tensors, strict=True)))

        return torch.utils.checkpoint.checkpoint(convolution, *(leaves[n] for n in TENSORS), use_reentrant=use_reentrant)

    assert_equal(training_step(checkpointed, inputs), training_step(with_state, inputs))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode, device):
    inputs = make_inputs(device=device)
    expected = with_state(**inputs)
    with mode():
        for actual, value in zip(with_state(**with_gradients(inputs)), expected, strict=True):
            assert not actual.requires_grad and actual.is_inference() == (mode is torch.inference_mode)
            assert torch.equal(actual, value)


def test_results_are_differentiable_where_an_argument_is(device):
    inputs = make_inputs(device=device)
    for name in TENSORS:
        for result in with_state(**with_gradients(inputs, [name])):
            assert result.requires_grad and "CausalConv1d" in result.grad_fn.name()


def test_forward_mode_says_that_there_is_none(device):
    inputs = make_inputs(device=device)
    for name in TENSORS:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(inputs[name], torch.ones_like(inputs[name]))
            with pytest.raises(RuntimeError, match=r"(?i)jvp is not implemented|forward.mode|forward AD"):
                causal_conv1d(**(inputs | {name: dual}))


def test_double_backward_raises(device):
    leaves = with_gradients(make_inputs(device=device))
    (grad_x,) = torch.autograd.grad(causal_conv1d(**leaves).square().sum(), leaves["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        grad_x.sum().backward()


@pytest.mark.parametrize("name", ["x", "conv_state", "weight", "bias"])
def test_the_step_is_not_differentiable(name, device):
    inputs = make_step_inputs(device=device)
    before = inputs["conv_state"].clone()
    leaf = inputs | {name: inputs[name].clone().requires_grad_()}
    with pytest.raises(NotImplementedError, match=says("causal_conv1d_update is not differentiable")):
        causal_conv1d_update(**leaf)
    assert torch.equal(inputs["conv_state"], before)
    with torch.no_grad():
        causal_conv1d_update(**leaf)


def test_what_is_kept_for_backward(device):
    """The inputs, all of them tensors that the caller has anyway."""
    for options in OPTIONS.values():
        inputs = with_gradients(make_inputs(**options, device=device))
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            causal_conv1d(**inputs)
        storages = {x.untyped_storage().data_ptr() for x in inputs.values() if isinstance(x, Tensor)}
        assert {x.untyped_storage().data_ptr() for x in kept} == storages


def test_changed_inputs_are_noticed(device):
    leaves = with_gradients(make_inputs(device=device))
    x = leaves["x"] * 1
    out = causal_conv1d(**leaves | {"x": x})
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_results_share_no_memory_with_arguments(device):
    for options in (*OPTIONS.values(), {"seqlen": 0}, {"cu_seqlens": (0, 0)}):
        inputs = make_inputs(**options, device=device)
        storages = {x.untyped_storage().data_ptr() for x in inputs.values() if isinstance(x, Tensor) and x.numel()}
        assert not storages & {result.untyped_storage().data_ptr() for result in with_state(**inputs) if result.numel()}


# ----- autocast


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@every_option
def test_autocast(options, low, device):
    """x and the states are cast; parameters stay float32. The gradients come back in float32."""
    inputs = make_inputs(**options, channels=16, seqlen=9, dtype=torch.float32, device=device)
    cast = inputs | {n: inputs[n].to(low) for n in ("x", "initial_state") if inputs[n] is not None}
    cotangents = make_cotangents(cast)
    explicit = evaluate(with_state, cast, cotangents)
    for parameter_dtype in (torch.float32, low):
        leaves = with_gradients(inputs)
        parameters = {n: leaves[n].to(parameter_dtype) for n in ("weight", "bias") if leaves[n] is not None}
        with torch.autocast(device, dtype=low):
            results = with_state(**leaves | parameters)
        assert all(result.dtype == low for result in results)
        if parameter_dtype == torch.float32:
            torch.autograd.backward(results, cotangents)
            assert torch.equal(results[0], explicit["out"]) and torch.equal(results[1], explicit["final_state"])
            for name in tensor_names(inputs):
                assert leaves[name].grad.dtype == torch.float32
                assert torch.equal(leaves[name].grad, explicit[f"grad_{name}"].float()), name


def test_autocast_leaves_float64_alone(device):
    inputs = make_inputs(device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out, final_state = with_state(**inputs)
    assert out.dtype == final_state.dtype == torch.float64 and torch.equal(out, causal_conv1d(**inputs))


def test_autocast_in_compile(device, fresh_dynamo):
    inputs = make_inputs(dtype=torch.float32, device=device)

    def convolution(**inputs):
        with torch.autocast(device, dtype=torch.bfloat16):
            return with_state(**inputs)

    compiled = torch.compile(convolution, fullgraph=True, backend="aot_eager")
    actual, expected = (training_step(f, inputs) for f in (compiled, convolution))
    assert actual["out"].dtype == torch.bfloat16
    assert_equal(actual, expected)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_of_the_step(state_dtype, device):
    """The state stays what it is."""
    inputs = make_step_inputs(dtype=torch.float32, state_dtype=torch.float32, device=device)
    inputs["conv_state"] = inputs["conv_state"].to(state_dtype)
    with torch.autocast(device, dtype=torch.bfloat16):
        out, state = step(inputs)
    expected, expected_state = step(inputs | {"x": inputs["x"].bfloat16()})
    assert out.dtype == torch.bfloat16 and state.dtype == state_dtype
    assert torch.equal(out, expected) and torch.equal(state, expected_state)


# ----- schema


@pytest.mark.parametrize("name", ["causal_conv1d", "_causal_conv1d", "_causal_conv1d_fwd", "_causal_conv1d_bwd"])
def test_operators_are_tagged_for_compile(name):
    assert torch.Tag.pt2_compliant_tag in getattr(ops, name).default.tags


# What programs and exported graphs call. A change here breaks them: add arguments at the end, with defaults.
SCHEMAS = {
    "causal_conv1d": (
        "(Tensor x, Tensor weight, Tensor? bias=None, *, str? activation=None, Tensor? seq_idx=None, Tensor? cu_seqlens=None, "
        "Tensor? initial_state=None) -> (Tensor out, Tensor final_state)"
    ),
    "causal_conv1d_update": (
        "(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias=None, str? activation=None, "
        "Tensor? state_batch_indices=None) -> Tensor"
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema_is_backward_compatible(name):
    released = torch._C.parse_schema(f"ssm_kernels::{name}{SCHEMAS[name]}")
    current = getattr(ops, name).default._schema
    assert current.is_backward_compatible_with(released), f"now {current}, was {released}"
    arguments = [(a.name, a.kwarg_only) for a in released.arguments]
    assert [(a.name, a.kwarg_only) for a in current.arguments][: len(arguments)] == arguments


@pytest.mark.parametrize("layout", ["offset", "sliced"])
def test_positional_arguments(layout, device):
    inputs = make_inputs(activation=None, initial_state=False, device=device)
    inputs["weight"] = arrange(inputs["weight"], layout)
    assert torch.equal(causal_conv1d(inputs["x"], inputs["weight"], inputs["bias"]), causal_conv1d(**inputs))
    inputs = make_step_inputs(activation=None, device=device)
    state = inputs["conv_state"].clone()
    out = causal_conv1d_update(inputs["x"], state, inputs["weight"], inputs["bias"])
    expected = step(inputs)
    assert torch.equal(out, expected[0]) and torch.equal(state, expected[1])
