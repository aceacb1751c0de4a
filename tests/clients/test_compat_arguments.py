"""The functions of ssm_kernels.compat: arguments that they refuse, slots of caches, padding, meta tensors and references."""

from __future__ import annotations

import inspect
import math
import re

import pytest
import torch
import torch.nn.functional as F
from helpers import COMPAT_VERSION
from torch.fx.experimental.proxy_tensor import make_fx

from ssm_kernels.compat import references
from ssm_kernels.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states
from ssm_kernels.compat.layer_norm import layer_norm_fn, rms_norm_fn
from ssm_kernels.compat.norms import layernorm_fn, rmsnorm_fn
from ssm_kernels.compat.selective_scan import mamba_inner_fn, selective_scan_fn, selective_state_update
from ssm_kernels.compat.ssd import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined

OPERATOR = "every operator"
CLIENT = "mamba_ssm"
CLIENT_VERSION = COMPAT_VERSION
LOW = torch.bfloat16


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def ssd_arguments(**others):
    return {
        "x": torch.randn(1, 9, 4, 8),
        "dt": torch.rand(1, 9, 4),
        "A": -torch.rand(4),
        "B": torch.randn(1, 9, 2, 6),
        "C": torch.randn(1, 9, 2, 6),
        "chunk_size": 16,
        **others,
    }


def split_arguments(device: str = "cpu", batch: int = 1, **others):
    """For 4 heads of 8 channels and 2 groups of 6 states."""
    return {
        "zxbcdt": torch.randn(batch, 9, 32 + 56 + 4, device=device),
        "conv1d_weight": torch.randn(56, 4, device=device),
        "conv1d_bias": torch.randn(56, device=device),
        "dt_bias": torch.randn(4, device=device),
        "A": -torch.rand(4, device=device),
        "D": torch.randn(4, device=device),
        "chunk_size": 16,
        "headdim": 8,
        "ngroups": 2,
        **others,
    }


def test_cu_seqlens_alone_is_refused():
    cu_seqlens, seq_idx = torch.tensor([0, 4, 9]), torch.tensor([[0] * 4 + [1] * 5])
    with pytest.raises(ValueError, match="expected seq_idx or return_varlen_states=True with cu_seqlens"):
        mamba_chunk_scan_combined(**ssd_arguments(cu_seqlens=cu_seqlens))
    with pytest.raises(TypeError, match="mamba_chunk_scan_combined: expected cu_seqlens to be a tensor or None, got str"):
        mamba_chunk_scan_combined(**ssd_arguments(cu_seqlens="junk", seq_idx=seq_idx))
    with pytest.raises(ValueError, match=r"expected cu_seqlens of shape \(sequences \+ 1,\), got \[1, 3\]"):
        mamba_chunk_scan_combined(**ssd_arguments(cu_seqlens=cu_seqlens[None], seq_idx=seq_idx))
    arguments = ssd_arguments(seq_idx=seq_idx)
    # mamba_ssm's layer passes both in training.
    assert torch.equal(mamba_chunk_scan_combined(**arguments, cu_seqlens=cu_seqlens), mamba_chunk_scan_combined(**arguments))


@pytest.mark.parametrize("function", [mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined])
def test_state_dtype(function):
    arguments = ssd_arguments if function is mamba_chunk_scan_combined else split_arguments
    with pytest.raises(TypeError, match=r"expected state_dtype to be a torch\.dtype or None, got str"):
        function(**arguments(state_dtype="fp32"))
    with pytest.raises(ValueError, match=r"expected a floating-point state_dtype, got torch\.int32"):
        function(**arguments(state_dtype=torch.int32))
    function(**arguments(state_dtype=torch.float32))


# ---- Slots of caches, in the calls that one kernel serves and in those that it does not.


def conv_update(kind: str, device: str, indices, batch: int = 2, slots: int = 5, view=lambda state: state):
    x, weight = torch.randn(batch, 6, device=device), torch.randn(6, 4, device=device)
    state = torch.randn(slots, 6, 5, device=device, dtype=torch.float16 if kind == "third dtype" else torch.float32)
    lengths = torch.tensor([3] * batch, device=device, dtype=torch.int32) if kind == "circular" else None
    if kind == "recorded":
        weight.requires_grad_()
    state = view(state)
    before = state.clone()
    try:
        out = causal_conv1d_update(x, state, weight, cache_seqlens=lengths, conv_state_indices=indices)
    except Exception:
        assert torch.equal(state, before)
        raise
    return out, before, state


def scan_update(kind: str, device: str, indices, batch: int = 2, slots: int = 5, view=lambda state: state):
    x, B = torch.randn(batch, 6, device=device), torch.randn(batch, 4, device=device)
    state = view(torch.randn(slots, 6, 4, device=device, dtype=torch.float16 if kind == "third dtype" else torch.float32))
    before = state.clone()
    try:
        out = selective_state_update(state, x, x.abs(), -torch.ones(6, 4, device=device), B, B, state_batch_indices=indices)
    except Exception:
        assert torch.equal(state, before)
        raise
    return out, before, state


CACHES = [
    *(pytest.param(conv_update, kind, id=f"convolution, {kind}") for kind in ("kernel", "circular", "third dtype", "recorded")),
    *(pytest.param(scan_update, kind, id=f"scan, {kind}") for kind in ("kernel", "third dtype")),
]


@pytest.mark.parametrize(("update", "kind"), CACHES)
def test_refused_slots(update, kind):
    name = "conv_state_indices" if update is conv_update else "state_batch_indices"
    for indices, error, message in (
        ([1, 1], ValueError, f"expected distinct {name}, got 1 at positions 0 and 1"),
        ([1, 5], ValueError, f"expected {name} below the number of slots, 5, got 5 at position 1"),
        ([1], ValueError, rf"expected {name} of shape \(batch,\) = \[2\], got \[1\]"),
        ([1.0, 2.0], RuntimeError, f"expected {name} of dtype int32 or int64, got float32"),
    ):
        with pytest.raises(error, match=message):
            update(kind, "cpu", torch.tensor(indices))
    with pytest.raises(ValueError, match=r"expected (conv_)?state of shape .*got \[5, 6, "):
        update(kind, "cpu", None)


@pytest.mark.parametrize(("update", "kind"), CACHES)
def test_slots_and_padding(device, update, kind):
    out, before, state = update(kind, device, torch.tensor([3, -1, -7, 0], device=device), batch=4)
    assert out[[0, 3]].any() and not out[[1, 2]].any()
    assert torch.equal(state[[1, 2, 4]], before[[1, 2, 4]])
    assert not torch.equal(state[0], before[0]) and not torch.equal(state[3], before[3])
    for slots in (5, 0):
        out, before, state = update(kind, device, torch.tensor([-1, -1], device=device), slots=slots)
        assert out.shape == (2, 6) and not out.any() and torch.equal(state, before)


@pytest.mark.parametrize(("update", "kind"), CACHES)
def test_slots_under_autocast(update, kind):
    with torch.autocast("cpu", dtype=LOW):
        out, before, state = update(kind, "cpu", torch.tensor([3, 0]))
    assert out.all() and not torch.equal(state, before)


@pytest.mark.parametrize("indices", [None, [1, 0]])
@pytest.mark.parametrize(("update", "kind"), CACHES)
def test_a_state_whose_elements_share_memory(device, update, kind, indices):
    name = "conv_state" if update is conv_update else "state"
    message = f"expected {name}, which is updated in place, to have elements that share no memory, got strides .*{name}.clone"
    indices = None if indices is None else torch.tensor(indices, device=device)
    for view in (lambda state: state[:1].expand(state.shape), lambda state: state.as_strided(state.shape, (3, 2, 1))):
        with pytest.raises(RuntimeError, match=message):
            update(kind, device, indices, slots=2, view=view)
    update(kind, device, indices, slots=2, view=lambda state: state.transpose(0, 2).contiguous().transpose(0, 2))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("update", "kind"), CACHES)
def test_slots_past_the_last_on_cuda(update, kind):
    """CUDA cannot raise: the row is NaN and touches no slot."""
    out, before, state = update(kind, "cuda", torch.tensor([1, 5], device="cuda"))
    assert out[1].isnan().all() and out[0].isfinite().all()
    assert torch.equal(state[[0, 2, 3, 4]], before[[0, 2, 3, 4]])


def test_a_table_of_slots_with_a_state_of_a_third_dtype():
    x, B = torch.randn(2, 3, 6), torch.randn(2, 3, 4)
    state = torch.zeros(8, 6, 4, dtype=torch.float16)
    table = torch.arange(6).view(2, 3)
    with pytest.raises(NotImplementedError, match=r"state_batch_indices of shape \(batch,\) with a state of another dtype"):
        selective_state_update(state, x, x.abs(), -torch.ones(6, 4), B, B, state_batch_indices=table)


@pytest.mark.parametrize(
    ("cache_seqlens", "error", "message"),
    [
        (torch.tensor([3]), ValueError, r"expected cache_seqlens of shape \(batch,\) = \[2\], got \[1\]"),
        (torch.tensor([3.0, 4.0]), RuntimeError, "expected cache_seqlens of dtype int32 or int64, got torch.float32"),
        ([3, 4], TypeError, "expected cache_seqlens to be a tensor or None, got list"),
    ],
)
def test_refused_cache_seqlens(cache_seqlens, error, message):
    with pytest.raises(error, match=f"causal_conv1d_update: {message}"):
        causal_conv1d_update(torch.randn(2, 6), torch.zeros(2, 6, 4), torch.randn(6, 4), cache_seqlens=cache_seqlens)


@pytest.mark.parametrize("shape", [(5, 4), (6,), (), (6, 4, 1), (6, 0)])
def test_a_wrong_weight_leaves_a_state(shape):
    """The message does not depend on which operators serve the call."""
    x, state, messages = torch.randn(2, 6), torch.zeros(2, 6, 4), set()
    for cache_seqlens in (None, torch.tensor([0, 0])):
        with pytest.raises(ValueError, match=r"^causal_conv1d_update: expected weight of ") as raised:
            causal_conv1d_update(x, state, torch.randn(shape), cache_seqlens=cache_seqlens)
        messages.add(str(raised.value))
    assert len(messages) == 1 and not state.any()


# ---- Shapes, dtypes and missing tensors.


def inner_arguments(**others):
    return {
        "xz": torch.randn(2, 12, 9),
        "conv1d_weight": torch.randn(6, 1, 4),
        "conv1d_bias": torch.randn(6),
        "x_proj_weight": torch.randn(3 + 8, 6),
        "delta_proj_weight": torch.randn(6, 3),
        "out_proj_weight": torch.randn(5, 6),
        "out_proj_bias": None,
        "A": -torch.rand(6, 4),
        **others,
    }


def scan_arguments(**others):
    x = torch.randn(2, 6, 9)
    return {"u": x, "delta": x.abs(), "A": -torch.rand(6, 4), "B": x[:, :4], "C": x[:, 2:], **others}


def step_arguments(**others):
    x, B = torch.randn(2, 6), torch.randn(2, 4)
    return {"state": torch.zeros(2, 6, 4), "x": x, "dt": x.abs(), "A": -torch.rand(6, 4), "B": B, "C": B, **others}


def conv_arguments(**others):
    return {"x": torch.randn(2, 6, 9), "weight": torch.randn(6, 4), **others}


def conv_step_arguments(**others):
    return {"x": torch.randn(2, 6), "conv_state": torch.zeros(2, 6, 4), "weight": torch.randn(6, 4), **others}


def norm_arguments(**others):
    return {"x": torch.randn(2, 6), "weight": torch.ones(6), "bias": None, **others}


REQUIRED = [
    (selective_scan_fn, scan_arguments, "u delta A B C"),
    (mamba_inner_fn, inner_arguments, "xz conv1d_weight x_proj_weight delta_proj_weight out_proj_weight A"),
    (selective_state_update, step_arguments, "state x dt A B C"),
    (mamba_chunk_scan_combined, ssd_arguments, "x dt A B C"),
    (mamba_split_conv1d_scan_combined, split_arguments, "zxbcdt conv1d_weight A D"),
    (causal_conv1d_fn, conv_arguments, "x weight"),
    (causal_conv1d_update, conv_step_arguments, "x conv_state weight"),
    (rmsnorm_fn, norm_arguments, "x"),
    (layer_norm_fn, norm_arguments, "x"),
    (rms_norm_fn, norm_arguments, "x"),
]


def complete(arguments, **shapes):
    """The arguments and further tensors: floating-point ones of these shapes, and integers as they are."""
    return lambda: arguments(**{k: v if isinstance(v, torch.Tensor) else torch.randn(v) for k, v in shapes.items()})


ZEROS = torch.zeros(2, 9, dtype=torch.int32)
SLOTS = torch.arange(2)
COMPLETE = {
    "scan": (selective_scan_fn, complete(scan_arguments, D=6, z=(2, 6, 9), delta_bias=6)),
    "inner": (
        mamba_inner_fn,
        complete(
            inner_arguments,
            out_proj_bias=5,
            D=6,
            delta_bias=6,
            B_proj_bias=4,
            C_proj_bias=4,
            b_rms_weight=4,
            c_rms_weight=4,
            dt_rms_weight=6,
        ),
    ),
    "step": (selective_state_update, complete(step_arguments, D=6, z=(2, 6), dt_bias=6, state_batch_indices=SLOTS)),
    "ssd": (
        mamba_chunk_scan_combined,
        complete(ssd_arguments, D=4, z=(1, 9, 4, 8), dt_bias=4, initial_states=(1, 4, 8, 6), seq_idx=ZEROS[:1]),
    ),
    "split": (
        mamba_split_conv1d_scan_combined,
        complete(
            split_arguments,
            initial_states=(1, 4, 8, 6),
            seq_idx=ZEROS[:1],
            rmsnorm_weight=32,
            outproj_weight=(5, 32),
            outproj_bias=5,
        ),
    ),
    "convolution": (
        causal_conv1d_fn,
        lambda: (
            complete(conv_arguments, bias=6, seq_idx=ZEROS, initial_states=(2, 6, 3), final_states_out=(2, 6, 3))()
            | {"return_final_states": True}
        ),
    ),
    "convolution step": (causal_conv1d_update, complete(conv_step_arguments, bias=6, conv_state_indices=SLOTS)),
    "circular step": (
        causal_conv1d_update,
        complete(conv_step_arguments, bias=6, conv_state_indices=SLOTS, cache_seqlens=SLOTS),
    ),
    "states": (causal_conv1d_varlen_states, lambda: {"x": torch.randn(9, 6), "cu_seqlens": SLOTS, "state_len": 3}),
    "gated norm": (rmsnorm_fn, complete(norm_arguments, bias=6, z=(2, 6))),
    "gated layer norm": (layernorm_fn, complete(norm_arguments, bias=6, z=(2, 6))),
    "norm": (rms_norm_fn, complete(norm_arguments, bias=6, residual=(2, 6))),
    "two norms": (layer_norm_fn, complete(norm_arguments, bias=6, residual=(2, 6), x1=(2, 6), weight1=6, bias1=6)),
}


OPERATORS = [
    torch.ops.ssm_kernels.selective_scan,
    torch.ops.ssm_kernels.selective_state_update,
    torch.ops.ssm_kernels.ssd_chunk_scan,
    torch.ops.ssm_kernels.causal_conv1d,
    torch.ops.ssm_kernels.causal_conv1d_update,
    torch.ops.ssm_kernels.rms_norm_gated,
    torch.ops.ssm_kernels.add_rms_norm,
]


def wrong_values(value):
    yield "junk"
    if isinstance(value, torch.Tensor):
        yield from (value[None], value.to(torch.complex64), value.to("meta"))
        yield value.int() if value.is_floating_point() else value.float()
        yield from (torch.cat([value, value[-1:]]), torch.cat([value, value[..., -1:]], -1))


@pytest.mark.parametrize("case", COMPLETE)
def test_messages_name_the_functions_arguments(case):
    """A message has the function's name and its arguments' names, not those of the operators under it."""
    function, arguments = COMPLETE[case]
    own = set(inspect.signature(function).parameters)
    foreign = {argument.name for operator in OPERATORS for argument in operator.default._schema.arguments} - own
    function(**arguments())
    for name, value in arguments().items():
        if isinstance(value, bool):
            continue
        message = f"^{function.__name__}: expected {name} to be (a tensor|an integer)( or None)?, got str$"
        with pytest.raises(TypeError, match=message):
            function(**arguments() | {name: "junk"})
        for number, wrong in enumerate(wrong_values(value)):
            try:
                function(**arguments() | {name: wrong})
            except (RuntimeError, TypeError, ValueError) as error:
                words = set(re.findall(r"\w+", str(error)))
                assert str(error).startswith(f"{function.__name__}: ") and words & own and not words & foreign, error
            else:
                assert number >= 5, name  # another size is right for some


KINDS = {"int": "an integer", "float": "a number", "str": "a string"}


@pytest.mark.parametrize("case", COMPLETE)
def test_none_for_a_required_option(case):
    function, arguments = COMPLETE[case]
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.annotation in KINDS and name != "checkpoint_lvl":  # which names the two levels
            message = f"^{function.__name__}: expected {name} to be {KINDS[parameter.annotation]}, got None$"
            with pytest.raises(TypeError, match=message):
                function(**arguments() | {name: None})


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [(function, arguments, name) for function, arguments, names in REQUIRED for name in names.split()],
)
def test_required_tensors(function, arguments, name):
    with pytest.raises(TypeError, match=rf"{function.__name__}: expected {name} to be a tensor, got None"):
        function(**arguments(**{name: None}))


def small(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda x: causal_conv1d_fn(x, x[0, :, :4], return_final_states=True, final_states_out=small(4, 6, 3)),
            ValueError,
            r"expected final_states_out of shape \(batch, channels, width - 1\) = \[1, 6, 3\], got \[4, 6, 3\]",
        ),
        (
            lambda x: causal_conv1d_fn(x, x[0, :, :4], return_final_states=True, final_states_out=small(1, 6, 3).double()),
            RuntimeError,
            "expected final_states_out of dtype torch.float32, got torch.float64",
        ),
        (
            lambda x: layer_norm_fn(x, small(17), None, x1=x[:, :1]),
            ValueError,
            r"layer_norm_fn: expected x1 of the shape of x = \[1, 6, 17\], got \[1, 1, 17\]",
        ),
        (
            lambda x: rms_norm_fn(x, small(17), None, rowscale=small(5)),
            ValueError,
            r"rms_norm_fn: expected rowscale of the leading axes of x = \[1, 6\], got \[5\]",
        ),
        (lambda x: rms_norm_fn(x, small(17), None, dropout_p=2.0), ValueError, "expected dropout_p from 0 to 1, got 2.0"),
        (lambda x: rms_norm_fn(x, small(17), None, dropout_p=-0.5), ValueError, "expected dropout_p from 0 to 1, got -0.5"),
        (
            lambda x: mamba_split_conv1d_scan_combined(**split_arguments(ngroups=0)),
            ValueError,
            "expected ngroups of at least 1, got 0",
        ),
        (
            lambda x: mamba_split_conv1d_scan_combined(**split_arguments(headdim=0)),
            ValueError,
            "expected headdim of at least 1, got 0",
        ),
        (
            lambda x: mamba_split_conv1d_scan_combined(**split_arguments(conv1d_weight=small(55, 4))),
            ValueError,
            r"expected conv1d_weight of shape \(dim \+ 2 \* ngroups \* dstate, width\), with dim = 32 and ngroups = 2, got",
        ),
        (
            lambda x: mamba_split_conv1d_scan_combined(**split_arguments(D=small(4, 8, 1))),
            ValueError,
            r"expected D of shape \(heads,\) or \(heads, headdim\), got \[4, 8, 1\]",
        ),
        (
            lambda x: mamba_chunk_scan_combined(
                **ssd_arguments(seq_idx=torch.zeros(9), cu_seqlens=torch.tensor([0, 9]), return_varlen_states=True)
            ),
            ValueError,
            r"expected seq_idx of shape \(1, seqlen\) = \[1, 9\], got \[9\]",
        ),
        (
            lambda x: causal_conv1d_varlen_states(x[0], torch.tensor([0, 4, 9]), 3),
            ValueError,
            r"states: expected cu_seqlens from 0 to the steps of x = 6, not decreasing, got \[0, 4, 9\]",
        ),
        (
            lambda x: causal_conv1d_varlen_states(x[0], torch.tensor([0, 6]), 4.0),
            TypeError,
            "causal_conv1d_varlen_states: expected state_len to be an integer, got float",
        ),
    ],
)
def test_refused_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.randn(1, 6, 17))


def test_dropout_of_everything_has_zero_gradients():
    x, residual = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    y, total = rms_norm_fn(x, torch.ones(8), None, residual=residual, dropout_p=1.0, prenorm=True)
    assert torch.equal(total, residual)
    y.square().sum().backward()
    assert not x.grad.any() and residual.grad.isfinite().all()


# ---- Padding, meta tensors, compilation.


@pytest.mark.serves("packed sequences", model="`mamba_split_conv1d_scan_combined`")
@pytest.mark.parametrize("normalized", [False, True])
def test_padding_of_the_split_function(device, normalized):
    """Steps of padding are zero and change no sequence, whatever they hold; a row that ends with them has a zero state."""
    given = split_arguments(device, batch=2, return_final_states=True)
    if normalized:
        given["rmsnorm_weight"] = torch.randn(32, device=device)
    seq_idx = torch.tensor([[-1, -1] + [0] * 3 + [1] * 4, [0] * 5 + [1] * 2 + [-1] * 2], device=device)
    zxbcdt = given.pop("zxbcdt").requires_grad_()
    out, states = mamba_split_conv1d_scan_combined(zxbcdt, **given, seq_idx=seq_idx)
    padding = seq_idx < 0
    assert not out[padding].any() and out[~padding].any() and not states[1].any()
    for row, start, end in ((0, 2, 5), (0, 5, 9), (1, 0, 5), (1, 5, 7)):
        alone, state = mamba_split_conv1d_scan_combined(zxbcdt[row, None, start:end], **given)
        torch.testing.assert_close(out[row, None, start:end], alone, rtol=1e-4, atol=1e-5)
        if end == 9:
            torch.testing.assert_close(states[row, None], state, rtol=1e-4, atol=1e-5)
    (out.square().sum() + states.square().sum()).backward()
    assert not zxbcdt.grad[padding].any() and zxbcdt.grad[~padding].any()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", None])
def test_padding_that_is_not_in_the_traced_call(backend, fresh_dynamo):
    """A traced call masks the padding of later calls too."""
    x, weight = torch.randn(1, 6, 9), torch.randn(6, 4)
    without, with_padding = torch.zeros(1, 9, dtype=torch.int32), torch.tensor([[0] * 6 + [-1] * 3], dtype=torch.int32)

    def call(x, seq_idx):
        return causal_conv1d_fn(x, weight, seq_idx=seq_idx)

    run = torch.compile(call, fullgraph=True, backend=backend) if backend else make_fx(call, tracing_mode="real")(x, without)
    for seq_idx in (without, with_padding):
        torch.testing.assert_close(run(x, seq_idx), call(x, seq_idx))
    assert not call(x, with_padding)[..., 6:].any() and call(x, without)[..., 6:].any()


def test_final_states_after_padding_are_zero(device):
    """Holds for any values in the padding; the operator's kernel masks, and no other operation."""
    x, weight = torch.randn(2, 6, 9, device=device), torch.randn(6, 4, device=device)
    x[0, :, 6:] = math.nan
    seq_idx = torch.tensor([[0] * 6 + [-1] * 3, [-1] * 6 + [0] * 3], device=device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        out, states = causal_conv1d_fn(x, weight, seq_idx=seq_idx, return_final_states=True)
    assert not out[0, :, 6:].any() and not states[0].any() and torch.equal(states[1], x[1, :, 6:])
    assert not {"aten::lt", "aten::where", "aten::masked_fill_"} & {event.key for event in profile.key_averages()}


def test_padding_under_vmap():
    x, weight = torch.randn(2, 1, 6, 9), torch.randn(6, 4)
    seq_idx = torch.tensor([[[0] * 9], [[0] * 6 + [-1] * 3]])
    mapped = torch.vmap(lambda x, seq_idx: causal_conv1d_fn(x, weight, seq_idx=seq_idx))(x, seq_idx)
    separate = [causal_conv1d_fn(x[i], weight, seq_idx=seq_idx[i]) for i in range(2)]
    torch.testing.assert_close(mapped, torch.stack(separate))


def to_meta(arguments):
    return {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


@pytest.mark.parametrize(("function", "arguments", "names"), REQUIRED)
def test_meta_tensors(function, arguments, names):
    given = arguments()
    out, expected = function(**to_meta(given)), function(**given)
    assert out.is_meta and (out.shape, out.dtype) == (expected.shape, expected.dtype)


@pytest.mark.parametrize("kind", ["circular", "third dtype"])
def test_meta_caches(kind):
    assert conv_update(kind, "meta", torch.tensor([3, 1], device="meta"))[0].shape == (2, 6)


@pytest.mark.parametrize(("update", "kind"), CACHES)
def test_a_compiled_step_has_no_graph_break(update, kind, fresh_dynamo):
    weight, x = torch.randn(6, 4), torch.randn(2, 6)
    indices = torch.tensor([3, -1])
    dtype = torch.float16 if kind == "third dtype" else torch.float32
    states = [torch.ones(5, 6, 4, dtype=dtype) for _ in range(2)]
    lengths = torch.tensor([3, 3]) if kind == "circular" else None

    def call(state):
        if update is conv_update:
            return causal_conv1d_update(x, state, weight, cache_seqlens=lengths, conv_state_indices=indices)
        return selective_state_update(state, x, x.abs(), -weight.abs(), x[:, :4], x[:, 2:], state_batch_indices=indices)

    with torch.no_grad():
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(states[0])
        torch.testing.assert_close(compiled, call(states[1]))
    torch.testing.assert_close(*states)


# ---- References.


def test_references_are_what_the_functions_compute():
    scan = scan_arguments(D=torch.randn(6), z=torch.randn(2, 6, 9), delta_bias=torch.randn(6), delta_softplus=True)
    torch.testing.assert_close(
        references.selective_scan_ref(**scan, return_last_state=True),
        selective_scan_fn(**scan, return_last_state=True),
        rtol=1e-4,
        atol=1e-5,
    )
    inner = inner_arguments(D=torch.randn(6), B_proj_bias=torch.randn(4), C_proj_bias=torch.randn(4))
    torch.testing.assert_close(references.mamba_inner_ref(**inner), mamba_inner_fn(**inner), rtol=1e-4, atol=1e-4)
    step = step_arguments(D=torch.randn(6), state=torch.randn(2, 6, 4))
    states = step["state"], step["state"].clone()
    out = references.selective_state_update_ref(**step)
    torch.testing.assert_close(out, selective_state_update(**{**step, "state": states[1]}))
    torch.testing.assert_close(*states)
    x, weight, z = torch.randn(3, 8).to(LOW), torch.randn(8), torch.randn(3, 8)
    for options in ({"group_size": 4}, {"norm_before_gate": False}):
        expected = rmsnorm_fn(x, weight, None, z, **options)
        torch.testing.assert_close(references.rms_norm_ref(x, weight, None, z, **options), expected)
    with pytest.raises(NotImplementedError, match="upcast=False"):
        references.rms_norm_ref(x, weight, None, upcast=False)


def test_references_of_the_convolution():
    x, weight, bias, initial = torch.randn(2, 6, 9).to(LOW), torch.randn(6, 4), torch.randn(6), torch.randn(2, 6, 3).to(LOW)
    states_out = torch.empty_like(initial)
    out, states = references.causal_conv1d_ref(x, weight, bias, initial, True, states_out, "silu")
    assert out.dtype == LOW and states is states_out and torch.equal(states, x[..., -3:])
    steps = torch.cat([initial, x], dim=-1).float()
    torch.testing.assert_close(out, F.silu(F.conv1d(steps, weight[:, None], bias, groups=6)).to(LOW))
    for cache_seqlens in (None, torch.tensor([7, 0])):
        for new in (x[..., 0], x[..., :2], x):
            caches = torch.randn(2, 6, 5).repeat(2, 1, 1, 1)
            outs = [
                function(new, cache, weight, bias, "silu", cache_seqlens)
                for function, cache in zip((references.causal_conv1d_update_ref, causal_conv1d_update), caches, strict=True)
            ]
            torch.testing.assert_close(*outs)
            torch.testing.assert_close(*caches)
