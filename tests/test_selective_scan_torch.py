"""selective_scan as a PyTorch operator: opcheck, meta, compile, export, checkpoint, grad modes, autocast, memory, schema."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    CHUNK,
    MINIMAL,
    TENSORS,
    KeptGraphs,
    as_float64,
    assert_as_accurate,
    chunk_length,
    evaluate,
    make_cotangents,
    make_inputs,
    parameter_dtype,
    reference_scan,
    scan_with_state,
    split,
    training_step,
    with_gradients,
)
from torch._dynamo.testing import CompileCounterWithBackend

from ssm_kernels import selective_scan

OPERATOR = "selective_scan"
ops = torch.ops.ssm_kernels

CASES = {
    "all": {},
    "required_only": MINIMAL,
    "groups": {"groups": 2},
    "constant_B_and_C": {"B": "constant", "C": "constant"},
    "channels_contiguous": {"layout": "transposed", "groups": 1},
    "bfloat16": {"dtype": torch.bfloat16},
    "two_chunks": {"seqlen": 70, "dtype": torch.float32},
    "no_steps": {"seqlen": 0},
}

every_case = pytest.mark.parametrize("case", CASES)


def fwd_arguments(inputs: dict, save_chunk_states: bool = True) -> tuple:
    return *(inputs[name] for name in TENSORS), inputs["discretization"], inputs["delta_softplus"], save_chunk_states


def bwd_arguments(inputs: dict) -> tuple:
    *_, chunk_states = ops._selective_scan_fwd(*fwd_arguments(inputs))
    return (
        *make_cotangents(inputs),
        *(inputs[name] for name in TENSORS if name != "initial_state"),
        chunk_states,
        inputs["discretization"],
        inputs["delta_softplus"],
        [inputs[name] is not None for name in TENSORS],
    )


@every_case
@pytest.mark.parametrize("needs_grad", [True, False], ids=["grad", "no_grad"])
def test_opcheck(needs_grad, case, device):
    inputs = make_inputs(**CASES[case], device=device)
    arguments = split(ops.selective_scan, with_gradients(inputs) if needs_grad else inputs)
    torch.library.opcheck(ops.selective_scan.default, *arguments)


@pytest.mark.parametrize("save_chunk_states", [True, False])
@every_case
def test_opcheck_fwd(case, save_chunk_states, device):
    inputs = make_inputs(**CASES[case], device=device)
    torch.library.opcheck(ops._selective_scan_fwd.default, fwd_arguments(inputs, save_chunk_states))


@every_case
def test_opcheck_bwd(case, device):
    arguments = bwd_arguments(make_inputs(**CASES[case], device=device))
    torch.library.opcheck(ops._selective_scan_bwd.default, arguments)
    if case in ("all", "two_chunks"):
        torch.library.opcheck(ops._selective_scan_bwd.default, (None, *arguments[1:]))
        torch.library.opcheck(ops._selective_scan_bwd.default, (arguments[0], None, *arguments[2:]))


def assert_same_layout(meta: torch.Tensor, real: torch.Tensor, what: str) -> None:
    assert meta.is_meta and not real.is_meta
    assert meta.shape == real.shape, what
    assert meta.dtype == real.dtype, what
    assert meta.stride() == real.stride() or not real.numel(), what  # no elements, no layout
    assert meta.storage_offset() == real.storage_offset(), what


@pytest.mark.parametrize("seqlen", [0, 5, 64, 65, 200])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "permuted", "offset", "sliced"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_meta_agrees_with_the_device(dtype, layout, seqlen, device):
    """Shapes, dtypes and strides, of the operator and of the two below it."""
    for options in ({}, CASES["required_only"], {"groups": 2}, CASES["constant_B_and_C"]):
        inputs = make_inputs(seqlen=seqlen, dtype=dtype, layout=layout, device=device, **options)
        arguments = {
            "selective_scan": split(ops.selective_scan, inputs),
            "_selective_scan_fwd": (fwd_arguments(inputs), {}),
            "_selective_scan_bwd": (bwd_arguments(inputs), {}),
        }
        for name, (args, kwargs) in arguments.items():
            operator = getattr(ops, name)
            # Not .to("meta"), which keeps the strides of dense tensors only.
            on_meta = [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, torch.Tensor) else x
                for x in args
            ]
            metas, reals = operator(*on_meta, **kwargs), operator(*args, **kwargs)
            for index, (meta, real) in enumerate(zip(metas, reals, strict=True)):
                assert_same_layout(meta, real, f"result {index} of {name}")


def test_meta_backward(device):
    inputs = make_inputs(device="meta")
    leaves = with_gradients(inputs)
    out, last_state = selective_scan(**leaves, return_last_state=True)
    (out.sum() + last_state.sum()).backward()
    for name in TENSORS:
        gradient = leaves[name].grad
        assert gradient.is_meta and gradient.shape == inputs[name].shape and gradient.dtype == inputs[name].dtype


def test_results_share_no_memory_with_arguments(device):
    inputs = make_inputs(device=device)
    storages = {inputs[name].untyped_storage().data_ptr() for name in TENSORS}
    for result in (*selective_scan(**inputs, return_last_state=True), *ops._selective_scan_fwd(*fwd_arguments(inputs))):
        assert result.untyped_storage().data_ptr() not in storages


def assert_compiled_equals_eager(compiled, inputs: dict, tolerance: float = 1e-12) -> None:
    actual, expected = training_step(inputs, compiled), training_step(inputs, scan_with_state)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def mark_seqlen_dynamic(inputs: dict) -> dict:
    for name in ("u", "delta", "z", "B", "C"):
        if inputs[name] is not None and inputs[name].dim() > 2:
            torch._dynamo.mark_dynamic(inputs[name], inputs[name].dim() - 1)
    return inputs


@pytest.mark.parametrize("case", ["all", "required_only", "groups", "constant_B_and_C", "channels_contiguous"])
def test_compile_once_for_every_length(case, device, fresh_dynamo):
    """fullgraph, forward and backward, one graph each for lengths on both sides of a chunk's."""
    graphs = KeptGraphs()
    counter = CompileCounterWithBackend("aot_eager")
    for compiler in (graphs.backend, counter):
        compiled = torch.compile(scan_with_state, fullgraph=True, backend=compiler)
        for seqlen in (5, 64, 65, 130, 7):
            inputs = make_inputs(seqlen=seqlen, device=device, **CASES[case])
            assert_compiled_equals_eager(lambda compiled=compiled, **leaves: compiled(**mark_seqlen_dynamic(leaves)), inputs)
    assert counter.frame_count == 1
    assert graphs.kernels() == (["ssm_kernels._selective_scan_fwd.default"], ["ssm_kernels._selective_scan_bwd.default"])


def test_compile_with_automatic_dynamic_shapes(device, fresh_dynamo):
    """Nothing marked: the second length makes the size symbolic, and no later one compiles again."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(scan_with_state, fullgraph=True, backend=counter)
    for seqlen in (5, 64, 65, 130, 7):
        assert_compiled_equals_eager(compiled, make_inputs(seqlen=seqlen, device=device))
    assert counter.frame_count == 2


def test_compile_once_for_every_number_of_states(device, fresh_dynamo):
    """The number of steps between two saved states depends on it."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(scan_with_state, fullgraph=True, dynamic=True, backend=counter)
    for dstate, seqlen in ((16, 70), (17, 70), (64, 33), (5, 130)):
        inputs = make_inputs(dstate=dstate, seqlen=seqlen, groups=2, device=device)
        assert_compiled_equals_eager(compiled, inputs)
    assert counter.frame_count == 1


def test_compile_with_inductor(device, fresh_dynamo):
    """With work around the operator for Inductor to fuse and to lay out, channels contiguous."""

    def layer(*, u, z, **inputs):
        out, last_state = selective_scan(torch.tanh(u) * 2, z=z * 3, **inputs, return_last_state=True)
        return torch.relu(out) + u, last_state * 2

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for seqlen in (70, 9):
        inputs = make_inputs(seqlen=seqlen, dtype=torch.float32, layout="transposed", device=device)
        actual, expected = training_step(inputs, compiled), training_step(inputs, layer)
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-4)


def test_compile_without_gradients(device, fresh_dynamo):
    inputs = make_inputs(device=device)
    compiled = torch.compile(scan_with_state, fullgraph=True, backend="aot_eager")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for actual, expected in zip(compiled(**inputs), scan_with_state(**inputs), strict=True):
                assert torch.equal(actual, expected)


class Scan(torch.nn.Module):
    def forward(self, u, delta, A, B, C, D, z, delta_bias, initial_state):
        return selective_scan(
            u, delta, A, B, C, D, z, delta_bias, initial_state=initial_state, delta_softplus=True, return_last_state=True
        )


def test_export(device):
    """Exports the public name, with a symbolic length."""
    arguments = tuple(make_inputs(seqlen=9, device=device)[name] for name in TENSORS)
    seqlen = torch.export.Dim("seqlen", min=2, max=4096)
    dynamic = {name: {2: seqlen} if name in ("u", "delta", "B", "C", "z") else None for name in TENSORS}
    exported = torch.export.export(Scan(), arguments, dynamic_shapes=dynamic)
    targets = [str(node.target) for node in exported.graph.nodes if "ssm_kernels" in str(node.target)]
    assert targets == ["ssm_kernels.selective_scan.default"]
    for length in (9, 64, 200):
        arguments = tuple(make_inputs(seqlen=length, device=device)[name] for name in TENSORS)
        for actual, expected in zip(exported.module()(*arguments), Scan()(*arguments), strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant, device):
    inputs = make_inputs(seqlen=70, device=device)

    def checkpointed(**leaves):
        tensors = [leaves[name] for name in TENSORS]

        def scan(*tensors):
            return selective_scan(**(leaves | dict(zip(TENSORS, tensors, strict=True))), return_last_state=True)

        return torch.utils.checkpoint.checkpoint(scan, *tensors, use_reentrant=use_reentrant)

    actual, expected = training_step(inputs, checkpointed), training_step(inputs, scan_with_state)
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def test_no_grad_has_no_grad_fn(device):
    inputs = make_inputs(device=device)
    expected = selective_scan(**inputs, return_last_state=True)
    with torch.no_grad():
        results = selective_scan(**with_gradients(inputs), return_last_state=True)
    for actual, value in zip(results, expected, strict=True):
        assert actual.grad_fn is None and not actual.requires_grad
        assert torch.equal(actual, value)


def test_inference_mode(device):
    inputs = make_inputs(device=device)
    expected = selective_scan(**inputs, return_last_state=True)
    with torch.inference_mode():
        results = selective_scan(**make_inputs(device=device), return_last_state=True)
    for actual, value in zip(results, expected, strict=True):
        assert actual.is_inference() and torch.equal(actual, value)


def test_results_are_differentiable_only_where_arguments_are(device):
    inputs = make_inputs(device=device)
    for name in TENSORS:
        out, last_state = selective_scan(**with_gradients(inputs, [name]), return_last_state=True)
        assert out.requires_grad and "SelectiveScan" in type(out.grad_fn).__name__ + out.grad_fn.name()
        assert last_state.requires_grad


def test_double_backward_says_that_there_is_none(device):
    leaves = with_gradients(make_inputs(device=device))
    (grad_u,) = torch.autograd.grad(selective_scan(**leaves).square().sum(), leaves["u"], create_graph=True)
    with pytest.raises(RuntimeError, match=r"derivative for ssm_kernels::_selective_scan_bwd is not implemented"):
        grad_u.sum().backward()


def test_forward_mode_says_that_there_is_none(device):
    inputs = make_inputs(device=device)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs["u"], torch.ones_like(inputs["u"]))
        with pytest.raises(RuntimeError, match=r"(?i)jvp is not implemented|forward.mode|forward AD"):
            selective_scan(**(inputs | {"u": dual}))


@pytest.mark.parametrize("form", ["variable", "constant"])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast(low, form, device):
    """u, delta, z and per-step B and C are cast; A, D, delta_bias, states and constant B and C stay float32."""
    inputs = make_inputs(dim=6, seqlen=70, B=form, C=form, dtype=torch.float32, device=device)
    per_step = {"u", "delta", "z"} | ({"B", "C"} if form == "variable" else set())
    cast = inputs | {name: inputs[name].to(low) for name in per_step}
    results = []
    for arguments, enabled in ((inputs, True), (cast, False)):
        leaves = with_gradients(arguments)
        with torch.autocast(device, dtype=low, enabled=enabled):
            out, last_state = selective_scan(**leaves, return_last_state=True)
        assert out.dtype == low and last_state.dtype == torch.float32
        torch.autograd.backward((out, last_state), make_cotangents(cast))
        results.append({"out": out, "last_state": last_state} | {name: leaves[name].grad for name in TENSORS})
    autocast, explicit = results
    for name in TENSORS:
        assert autocast[name].dtype == torch.float32
        assert torch.equal(autocast[name], explicit[name].float()), name
    assert torch.equal(autocast["out"], explicit["out"]) and torch.equal(autocast["last_state"], explicit["last_state"])


def test_autocast_of_mixed_arguments(device):
    """Inputs as Mamba's projections give them under autocast: float16 or bfloat16 beside float32, and an A to cast up."""
    inputs = make_inputs(dim=6, dtype=torch.float32, device=device)
    mixed = inputs | {name: inputs[name].bfloat16() for name in ("u", "B", "z")} | {"A": inputs["A"].bfloat16()}
    with torch.autocast(device, dtype=torch.bfloat16):
        out, last_state = selective_scan(**mixed, return_last_state=True)
    low = {name: inputs[name].bfloat16() for name in ("u", "delta", "B", "C", "z")}
    expected = selective_scan(**(inputs | low | {"A": inputs["A"].bfloat16().float()}), return_last_state=True)
    assert out.dtype == torch.bfloat16 and last_state.dtype == torch.float32
    assert torch.equal(out, expected[0]) and torch.equal(last_state, expected[1])


def test_autocast_accuracy(device):
    inputs = make_inputs(dim=6, seqlen=150, dtype=torch.float32, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = selective_scan(**inputs)
    cast = inputs | {name: inputs[name].bfloat16() for name in ("u", "delta", "B", "C", "z")}
    native, exact = evaluate(reference_scan, cast)["out"], evaluate(reference_scan, as_float64(cast))["out"]
    assert_as_accurate(out, native, exact, "out")


def test_autocast_leaves_float64_alone(device):
    inputs = make_inputs(device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = selective_scan(**inputs)
    assert out.dtype == torch.float64 and torch.equal(out, selective_scan(**inputs))


def test_autocast_in_compile(device, fresh_dynamo):
    inputs = make_inputs(dtype=torch.float32, device=device)

    def scan(**inputs):
        with torch.autocast(device, dtype=torch.bfloat16):
            return selective_scan(**inputs, return_last_state=True)

    compiled = torch.compile(scan, fullgraph=True, backend="aot_eager")
    actual, expected = training_step(inputs, compiled), training_step(inputs, scan)
    assert actual["out"].dtype == torch.bfloat16
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def allocated(function, device: str) -> int:
    """Bytes that PyTorch's allocator is asked for during the call."""
    if device == "cuda":
        before = torch.cuda.memory_stats()["requested_bytes.all.allocated"]
        function()
        return torch.cuda.memory_stats()["requested_bytes.all.allocated"] - before
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        function()
    return sum(
        event.nbytes()
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.nbytes() > 0
    )


def test_memory_grows_only_with_results_and_chunk_states(device):
    """From one length to twice the length, nothing of size batch * dim * seqlen * dstate appears, in either direction."""
    batch, dim, dstate, grown = 2, 64, 32, 16 * CHUNK

    def measure(seqlen):
        inputs = make_inputs(batch=batch, dim=dim, seqlen=seqlen, dstate=dstate, dtype=torch.float32, device=device)
        arguments = bwd_arguments(inputs)
        return (
            allocated(lambda: ops._selective_scan_fwd(*fwd_arguments(inputs, save_chunk_states=False)), device),
            allocated(lambda: ops._selective_scan_fwd(*fwd_arguments(inputs)), device),
            allocated(lambda: ops._selective_scan_bwd(*arguments), device),
        )

    measure(CHUNK)  # what is allocated once
    inference, fwd, bwd = (long - short for short, long in zip(measure(grown), measure(2 * grown), strict=True))
    sequence, matrix = 4 * batch * dim * grown, 4 * batch * dstate * grown
    chunk_states = sequence * dstate // chunk_length(dstate)
    # On CUDA also the carries between blocks, which grow with the number of segments.
    slack = 1024 if device == "cpu" else sequence * dstate // 8
    assert sequence <= inference <= sequence + slack  # out
    assert sequence + chunk_states <= fwd <= sequence + chunk_states + slack
    assert 3 * sequence + 2 * matrix <= bwd <= 3 * sequence + 2 * matrix + slack  # grad_u, grad_delta, grad_z; grad_B, grad_C


def test_memory_that_backward_needs_for_itself(device, two_threads):
    """With groups of B, sums of C's gradient over channels must not hold the sequence once per channel.

    On the CPU, whatever the groups: a chunk of each gradient for every state of every channel, and what is left of half-empty
    vectors. On CUDA once per block of 32 channels, which share their group: with a group for every channel, once for each.
    """
    batch, dim, dstate, seqlen = 4, 256, 16, 512
    groups = dim if device == "cpu" else dim // 32
    inputs = make_inputs(batch=batch, dim=dim, seqlen=seqlen, dstate=dstate, groups=groups, dtype=torch.float32, device=device)
    inputs["C"] = inputs["C"][:, :1].contiguous()
    arguments = bwd_arguments(inputs)
    gradients = []
    taken = allocated(lambda: gradients.extend(ops._selective_scan_bwd(*arguments)), device)
    own = taken - sum(gradient.nbytes for gradient in gradients)
    if device == "cpu":
        assert 0 <= own <= (2 * CHUNK + 64) * 4 * batch * dim * dstate
    else:
        # Of C only, what a block adds to the gradient of B being the gradient, and what segments of time hand to each other.
        assert 0 <= own <= batch * dim // 32 * dstate * seqlen * 4 + 2**19


@every_case
def test_lazy_copies_stay_lazy(case, device):
    """Arguments and incoming gradients are read through pointers that may be shared: nothing is copied on write."""
    inputs = make_inputs(**CASES[case], device=device)
    cotangents = tuple(torch._lazy_clone(x) for x in make_cotangents(inputs))
    inputs |= {name: torch._lazy_clone(inputs[name]) for name in TENSORS if inputs[name] is not None}
    evaluate(selective_scan, inputs, cotangents)
    lazy = {name: inputs[name] for name in TENSORS if inputs[name] is not None} | dict(enumerate(cotangents))
    assert [name for name, tensor in lazy.items() if not torch._C._is_cow_tensor(tensor)] == []


# Programs and exported graphs call these schemas. A change breaks them: add arguments at the end, with defaults.
SCHEMAS = {
    "selective_scan": (
        "ssm_kernels::selective_scan(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D=None, Tensor? z=None, "
        "Tensor? delta_bias=None, Tensor? initial_state=None, *, str discretization='zoh', bool delta_softplus=False) "
        "-> (Tensor out, Tensor last_state)"
    ),
    "selective_state_update": (
        "ssm_kernels::selective_state_update(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, "
        "Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False, Tensor? state_batch_indices=None, *, "
        "str discretization='zoh', float[]? dt_limit=None) -> Tensor"
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema_is_backward_compatible(name):
    current, released = getattr(ops, name).default._schema, torch._C.parse_schema(SCHEMAS[name])
    assert current.is_backward_compatible_with(released), f"now {current}, was {released}"
    arguments = [(a.name, a.kwarg_only) for a in released.arguments]
    assert [(a.name, a.kwarg_only) for a in current.arguments][: len(arguments)] == arguments


@pytest.mark.parametrize("name", [*SCHEMAS, "_selective_scan_fwd", "_selective_scan_bwd"])
def test_operators_are_tagged_for_compile(name):
    assert torch.Tag.pt2_compliant_tag in getattr(ops, name).default.tags


def test_chunk_states(device):
    """(batch, chunks + 1, dim, dstate): the state at each chunk boundary; none where backward does not ask for them."""
    seqlen = 2 * CHUNK + 1
    inputs = make_inputs(seqlen=seqlen, dim=5, device=device)
    out, last_state, chunk_states = ops._selective_scan_fwd(*fwd_arguments(inputs))
    assert chunk_states.shape == (2, 4, 5, 3) and chunk_states.dtype == parameter_dtype(out.dtype)
    for index, steps in enumerate((0, CHUNK, 2 * CHUNK, seqlen)):
        upto = {k: v[..., :steps] if k in ("u", "delta", "z", "B", "C") else v for k, v in inputs.items()}
        _, state = reference_scan(**upto, return_last_state=True)
        torch.testing.assert_close(chunk_states[:, index], state, rtol=1e-12, atol=1e-12)
    unsaved = ops._selective_scan_fwd(*fwd_arguments(inputs, save_chunk_states=False))
    assert torch.equal(unsaved[0], out) and torch.equal(unsaved[1], last_state) and not unsaved[2].numel()
