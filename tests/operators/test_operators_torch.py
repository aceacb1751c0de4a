"""Every operator as a PyTorch operator: opcheck, Meta, grad modes, autocast, memory, schema."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from helpers import assert_equal, on_meta
from operator_spec import TRACED, UNTRACED, OperatorSpec, tensor_names, with_gradients
from operators import (
    ALL_SCANS,
    OPERATORS,
    SCANS,
    every_case,
    every_case_of_scans,
    every_operator,
    every_scan,
    over,
    over_options,
)
from recurrence_helpers import PLAIN, RECURRENCES, Recurrence
from torch import Tensor

OPERATOR = "every operator"
ops = torch.ops.ssm_kernels

every_option = over_options(SCANS, lambda spec: spec.options)
low_precision = pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


# ----- opcheck and Meta


def is_traced(operator: OperatorSpec, options: dict[str, Any]) -> bool:
    """Whether opcheck traces a case: an operator's first and last; test_operators_compile.py traces others."""
    first, *others = operator.cases.values()
    return options in (first, *others[-1:])


@every_case
def test_opcheck(operator, options, device):
    inputs = operator.make_inputs(**options, device=device)
    for values in (inputs, with_gradients(inputs)):
        args, kwargs = operator.operator_arguments(values)
        torch.library.opcheck(operator.operator, args, kwargs, test_utils=UNTRACED)
    if is_traced(operator, options):
        torch.library.opcheck(operator.operator, args, kwargs, test_utils="test_aot_dispatch_dynamic")


@pytest.mark.exhaustive
@every_case
def test_opcheck_traced(operator, options, device):
    args, kwargs = operator.operator_arguments(with_gradients(operator.make_inputs(**options, device=device)))
    torch.library.opcheck(operator.operator, args, kwargs, test_utils="test_aot_dispatch_dynamic")


FIRST_OF_INTERNAL = {spec.internal: spec for spec in reversed(SCANS.values())}


@every_case_of_scans
def test_opcheck_of_the_internal_operators(operator, options, device):
    """Tests backward also without each incoming gradient, and for some of the gradients. One case of an operator is traced.

    The operator with autograd is not traced here: test_opcheck traces it within the public one.
    """
    inputs = operator.make_inputs(**options, device=device)
    if operator.autograd:
        arguments = operator.forward_arguments(with_gradients(inputs))
        torch.library.opcheck(getattr(ops, operator.autograd).default, arguments, test_utils=UNTRACED)
    is_first = options == next(iter(operator.cases.values())) and FIRST_OF_INTERNAL.get(operator.internal, operator) is operator
    checks = TRACED if is_first else UNTRACED
    torch.library.opcheck(operator.forward_operator, operator.forward_arguments(inputs), test_utils=checks)
    arguments = operator.backward_arguments(inputs)
    count = len(arguments[-1])
    width = 1 if count <= 5 else 2
    masks = [[first <= i < first + width for i in range(count)] for first in range(0, count, 1 if count <= 5 else 3)]
    for variant in (arguments, (None, *arguments[1:]), (arguments[0], None, *arguments[2:])):
        torch.library.opcheck(operator.backward_operator, variant, test_utils=checks)
    for mask in masks:
        torch.library.opcheck(operator.backward_operator, (*arguments[:-1], mask), test_utils=UNTRACED)


def flat(results: Any) -> list[Tensor]:
    return [x for result in results for x in (result if isinstance(result, (list, tuple)) else [result])]


def layouts_of(operators: dict[str, OperatorSpec]) -> list[Any]:
    pairs = ((spec, layout) for spec in operators.values() for layout in spec.layouts)
    return [pytest.param(spec, layout, id=f"{spec.name}-{layout}") for spec, layout in pairs]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("operator", "layout"), layouts_of(SCANS))
def test_meta_agrees_with_the_device(operator, layout, dtype, device):
    """Shapes, dtypes and strides, of the operator and of the two below it."""
    for size in operator.sizes:
        inputs = operator.make_inputs(**size, dtype=dtype, layout=layout, device=device)
        backward = operator.backward_arguments(inputs)
        calls = [
            (operator.operator, *operator.operator_arguments(inputs)),
            (operator.forward_operator, operator.forward_arguments(inputs), {}),
            (operator.backward_operator, backward, {}),
            (operator.backward_operator, (*backward[:-1], [i == 1 for i in range(len(backward[-1]))]), {}),
        ]
        for function, args, kwargs in calls:
            metas = flat(function(*map(on_meta, args), **{name: on_meta(value) for name, value in kwargs.items()}))
            for meta, real in zip(metas, flat(function(*args, **kwargs)), strict=True):
                operator.assert_same_layout(meta, real)


@every_case_of_scans
def test_meta_backward(operator, options):
    leaves = with_gradients({name: on_meta(value) for name, value in operator.make_inputs(**options).items()})
    sum(result.sum() for result in operator(**leaves)).backward()
    for name in tensor_names(leaves):
        gradient = leaves[name].grad
        assert gradient.is_meta and gradient.shape == leaves[name].shape and gradient.dtype == leaves[name].dtype


@every_option
def test_results_share_no_memory_with_arguments(operator, options, device):
    """Not even without steps, which leave the states as they are. Neither do the results of the forward operator."""
    sizes = [{}, {"seqlen": 0}]
    if operator.packs:
        sizes.append(dict.fromkeys(options.keys() & {"resets", "reset", "seq_idx"}) | {"cu_seqlens": (0, 0)})
    for size in sizes:
        inputs = operator.make_inputs(**(options | size), device=device)
        tensors = [inputs[name] for name in tensor_names(inputs) if inputs[name].numel()]
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        results = (*operator(**inputs), *operator.forward_operator(*operator.forward_arguments(inputs)))
        assert not storages & {result.untyped_storage().data_ptr() for result in results if result.numel()}


# ----- grad modes


@pytest.mark.parametrize("use_reentrant", [False, True])
@every_operator
def test_checkpoint(operator, use_reentrant, device):
    inputs = operator.make_inputs(**operator.several_chunks, device=device)
    names = tensor_names(inputs)

    def checkpointed(**leaves):
        def of_tensors(*tensors):
            return operator(**(leaves | dict(zip(names, tensors, strict=True))))

        return torch.utils.checkpoint.checkpoint(of_tensors, *(leaves[name] for name in names), use_reentrant=use_reentrant)

    assert_equal(operator.training_step(checkpointed, inputs), operator.training_step(operator, inputs))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@every_case
def test_without_gradients(operator, options, mode, device):
    inputs = operator.make_inputs(**options, device=device)
    expected = operator(**inputs)
    with mode():
        results = operator(**with_gradients(inputs))
    for actual, value in zip(results, expected, strict=True):
        assert not actual.requires_grad and actual.grad_fn is None
        assert actual.is_inference() == (mode is torch.inference_mode)
        assert torch.equal(actual, value)


@every_scan
def test_results_are_differentiable_where_an_argument_is(operator, device):
    inputs = operator.make_inputs(device=device)
    node = operator.internal.replace("_", "")
    for name in tensor_names(inputs):
        for result in operator(**with_gradients(inputs, [name])):
            assert result.requires_grad and node in result.grad_fn.name().lower()


@over({name: spec for name, spec in OPERATORS.items() if name != "linear_scan"})
def test_double_backward_says_that_there_is_none(operator, device):
    leaves = with_gradients(operator.make_inputs(device=device))
    tensors = [leaves[name] for name in tensor_names(leaves)]
    message = rf"^{operator.name}: double backward .* is not supported; "
    for gradient in torch.autograd.grad(operator(**leaves)[0].square().sum(), tensors, create_graph=True, allow_unused=True):
        if gradient is not None:
            with pytest.raises(RuntimeError, match=message):
                gradient.sum().backward(retain_graph=True)


@every_scan
def test_forward_mode_says_that_there_is_none(operator, device):
    inputs = operator.make_inputs(device=device)
    for name in tensor_names(inputs):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(inputs[name], torch.ones_like(inputs[name]))
            with pytest.raises(RuntimeError, match=r"forward-mode differentiation \(.*\) is not supported; "):
                operator(**(inputs | {name: dual}))


@every_operator
def test_backward_in_forward_mode_says_that_there_is_none(operator, device):
    """With ``create_graph=False`` too, where backward skips autograd's kernels unless a gradient has a tangent."""
    leaves = with_gradients(operator.make_inputs(device=device))
    tensors = [leaves[name] for name in tensor_names(leaves)]
    result = operator(**leaves)[0]
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones_like(result), torch.ones_like(result))
        with pytest.raises(RuntimeError, match=r"(?i)jvp is not implemented|forward.mode|forward AD"):
            torch.autograd.grad(result, tensors, dual, allow_unused=True)


# ----- autocast


@low_precision
@over_options(ALL_SCANS, lambda spec: spec.options if len(spec.options) < 5 else spec.cases)
def test_autocast(operator, options, low, device):
    """Inputs are cast, parameters stay float32, and so do states that add up; gradients come back in float32."""
    inputs = operator.make_inputs(**dict(operator.several_chunks) | options | {"dtype": torch.float32}, device=device)
    cast = inputs | {name: inputs[name].to(low) for name in operator.cast_by_autocast(inputs)}
    cotangents, leaves = operator.make_cotangents(cast), with_gradients(inputs)
    with torch.autocast(device, dtype=low):
        results = operator(**leaves)
        without_graph = operator(**inputs)
    assert [result.dtype for result in results] == list(operator.result_dtypes(cast))
    assert results[0].dtype == low and all(map(torch.equal, results, without_graph))
    explicit = operator.evaluate(operator, cast, cotangents)
    torch.autograd.backward(results, cotangents)
    for name, result in zip(operator.results, results, strict=True):
        assert torch.equal(result, explicit[name])
    for name in tensor_names(inputs):
        assert leaves[name].grad.dtype == torch.float32
        assert torch.equal(leaves[name].grad, explicit[f"grad_{name}"].float()), name


@every_scan
def test_autocast_of_mixed_arguments(operator, device):
    """Inputs as projections give them under autocast: float16 or bfloat16 beside float32, and parameters to cast up."""
    inputs = operator.make_inputs(dtype=torch.float32, device=device)
    low = operator.cast_by_autocast(inputs)
    rounded = inputs | {name: inputs[name].bfloat16() for name in tensor_names(inputs)}
    expected = operator(**{n: x.float() if n in tensor_names(inputs) and n not in low else x for n, x in rounded.items()})
    for wide in ((), low, low[::2], low[:1]):
        with torch.autocast(device, dtype=torch.bfloat16):
            results = operator(**rounded | {name: rounded[name].float() for name in wide})
        for actual, value in zip(results, expected, strict=True):
            assert actual.dtype == value.dtype and torch.equal(actual, value)


@every_operator
def test_autocast_leaves_float64_alone(operator, device):
    inputs = operator.make_inputs(device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        results = operator(**inputs)
    assert all(result.dtype == torch.float64 for result in results)
    assert all(map(torch.equal, results, operator(**inputs)))


# ----- memory and schema


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@every_case_of_scans
def test_lazy_copies_stay_lazy(operator, options, dtype, device):
    """Arguments and incoming gradients are read through pointers that may be shared: nothing is copied on write."""
    inputs = operator.make_inputs(**{"dtype": dtype, "device": device} | options)
    cotangents = tuple(torch._lazy_clone(x) for x in operator.make_cotangents(inputs))
    inputs = {name: torch._lazy_clone(value) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    operator.evaluate(operator, inputs, cotangents)
    lazy = {name: value for name, value in inputs.items() if isinstance(value, Tensor)} | dict(enumerate(cotangents))
    assert [name for name, tensor in lazy.items() if not torch._C._is_cow_tensor(tensor)] == []


# Programs and exported graphs call these schemas. A change breaks them: add arguments at the end, with defaults.
TIME = "bool reverse=False, Tensor? cu_seqlens=None) -> (Tensor h, Tensor last_state)"
OF_FORMULAS = {"candidate_activation": "str? candidate_activation=None", "gate_is_logit": "bool gate_is_logit=True"}


def released_schema(recurrence: Recurrence) -> str:
    arguments = [*(f"Tensor {name}" for name in recurrence.inputs), "Tensor? h0=None"]
    arguments.insert(len(recurrence.positional_names), "*")
    return f"({', '.join([*arguments, *(OF_FORMULAS[name] for name in recurrence.options), TIME])}"


SCHEMAS = {
    "selective_scan": (
        "(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D=None, Tensor? z=None, Tensor? delta_bias=None, "
        "Tensor? initial_state=None, Tensor? seq_idx=None, Tensor? cu_seqlens=None, *, str discretization='zoh', "
        "bool delta_softplus=False) -> (Tensor out, Tensor last_state)"
    ),
    "selective_state_update": (
        "(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D=None, Tensor? z=None, "
        "Tensor? dt_bias=None, bool dt_softplus=False, Tensor? state_batch_indices=None, *, str discretization='zoh', "
        "float[]? dt_limit=None) -> Tensor"
    ),
    "selective_state_update_out": (
        "(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, "
        "bool dt_softplus, Tensor? state_batch_indices, str discretization, float[]? dt_limit, bool A_is_log, Tensor(b!) out, "
        "Tensor? dst_state_batch_indices=None, int? pad_slot_id=None, Tensor? num_accepted_tokens=None, "
        "Tensor? cu_seqlens=None, Tensor(c!)? intermediate_states_buffer=None, Tensor? intermediate_state_indices=None, "
        "bool disable_state_update=False) -> ()"
    ),
    "ssd_chunk_scan": (
        "(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, *, SymInt? chunk_size=None, Tensor? D=None, Tensor? z=None, "
        "Tensor? dt_bias=None, bool dt_softplus=False, float[]? dt_limit=None, Tensor? initial_states=None, "
        "Tensor? seq_idx=None, Tensor? cu_seqlens=None, str discretization='zoh', bool reverse=False) "
        "-> (Tensor out, Tensor final_states)"
    ),
    **{name: released_schema(recurrence) for name, recurrence in RECURRENCES.items()},
    "causal_conv1d": (
        "(Tensor x, Tensor weight, Tensor? bias=None, *, str? activation=None, Tensor? seq_idx=None, Tensor? cu_seqlens=None, "
        "Tensor? initial_state=None) -> (Tensor out, Tensor final_state)"
    ),
    "causal_conv1d_update": (
        "(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias=None, str? activation=None, "
        "Tensor? state_batch_indices=None) -> Tensor"
    ),
    "causal_conv1d_update_out": (
        "(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, str? activation, Tensor? state_batch_indices, "
        "Tensor(b!) out, Tensor? dst_state_batch_indices=None, int? pad_slot_id=None, Tensor? num_accepted_tokens=None, "
        "Tensor? cu_seqlens=None, Tensor(c!)? intermediate_conv_window=None, Tensor? intermediate_state_indices=None, "
        "bool disable_state_update=False) -> ()"
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema_is_backward_compatible(name):
    released, current = torch._C.parse_schema(f"ssm_kernels::{name}{SCHEMAS[name]}"), getattr(ops, name).default._schema
    assert current.is_backward_compatible_with(released), f"now {current}, was {released}"
    arguments = [(a.name, a.kwarg_only) for a in released.arguments]
    assert [(a.name, a.kwarg_only) for a in current.arguments][: len(arguments)] == arguments


@pytest.mark.parametrize("name", PLAIN)
def test_schema_of_the_step(name):
    """The scan's, with `state` for `h0`, and without options of time."""
    step = name.replace("_scan", "_step")
    of_step = SCHEMAS[name].removesuffix(TIME).strip(", ").removesuffix(", *").replace("h0", "state")
    released = torch._C.parse_schema(f"ssm_kernels::{step}{of_step}) -> (Tensor h, Tensor new_state)")
    assert str(getattr(ops, step).default._schema) == str(released)


@every_operator
def test_function_and_schema_have_the_same_arguments(operator):
    of_operator = {argument.name for argument in operator.operator._schema.arguments}
    # In most operators states_at is several calls. alpha becomes a part of the name of the discretization.
    own = {operator.all_results, "states_at", "alpha"} - of_operator
    if operator.name in ("selective_scan", "ssd_chunk_scan"):  # of selective_scan_two_sample and ssd_chunk_scan_two_sample
        own |= {"lam", "lam_sigmoid", "previous"}
    if operator.name == "selective_scan":
        own |= {"delta_A", "conjugate_pairs"}
    of_function = [name for name in inspect.signature(operator.function).parameters if name not in own]
    assert sorted(of_function) == sorted(of_operator)


TAGGED = {
    *OPERATORS,
    *SCHEMAS,
    *(name.replace("_scan", "_step") for name in PLAIN),
    *(operator.internal + way for operator in SCANS.values() for way in ("_fwd", "_bwd")),
    *(operator.autograd for operator in SCANS.values() if operator.autograd),
}


@pytest.mark.parametrize("name", sorted(TAGGED))
def test_operators_are_tagged_for_compile(name):
    assert torch.Tag.pt2_compliant_tag in getattr(ops, name).default.tags
