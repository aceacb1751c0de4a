"""ssm_kernels.compat.fla beside flash-linear-attention: its signatures, and its functions in plain PyTorch."""

from __future__ import annotations

import inspect
import itertools
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fla_package import import_fla, without
from test_fla import counted_kernels

from ssm_kernels.compat import fla as functions

CLIENT, OPERATOR = "flash-linear-attention", "delta_rule_scan"
HOMES = {
    "chunk_delta_rule": "fla.ops.delta_rule",
    "chunk_gated_delta_product": "fla.ops.gated_delta_product",
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
    "chunk_gdn": "fla.ops.gated_delta_rule",
    "chunk_kda": "fla.ops.kda",
    "fused_recurrent_delta_rule": "fla.ops.delta_rule",
    "fused_recurrent_gated_delta_rule": "fla.ops.gated_delta_rule",
    "fused_recurrent_gdn": "fla.ops.gated_delta_rule",
    "fused_recurrent_kda": "fla.ops.kda",
}
SEQLEN, HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 70, 2, 4, 8, 6
chunked = pytest.mark.parametrize("model", [name for name in HOMES if name.startswith("chunk") and name != "chunk_gdn"])
recurrent = pytest.mark.parametrize("model", [name for name in HOMES if name.startswith("fused") and name[-3:] != "gdn"])


@pytest.fixture(scope="module")
def fla():
    """FLA's functions, and those in plain PyTorch, on (batch, seqlen, heads, dim) and with one set of names."""
    modules = sorted({*HOMES.values(), *(f"{name}.naive" for name in HOMES.values()), "fla.ops.kda.gate"})
    modules += ["fla.ops.gated_delta_rule.gate"]
    with without("fla"):
        of = dict(zip(modules, import_fla(*modules), strict=True))
        yield SimpleNamespace(
            functions={name: getattr(of[home], name) for name, home in HOMES.items()},
            gdn=of["fla.ops.gated_delta_rule.naive"].naive_recurrent_gated_delta_rule,
            kda=of["fla.ops.kda.naive"].naive_recurrent_kda,
            delta=of["fla.ops.delta_rule.naive"].delta_rule_recurrence,
            product=of["fla.ops.gated_delta_product.naive"].naive_recurrent_gated_delta_product,
            gdn_gate=of["fla.ops.gated_delta_rule.gate"].naive_gdn_gate,
            kda_gate=of["fla.ops.kda.gate"].naive_kda_gate,
            kda_bounded_gate=of["fla.ops.kda.gate"].naive_kda_lowerbound_gate,
        )


def naive(fla, model, q, k, v, beta, g=None, *, initial_state=None, updates=1):
    """FLA's function in plain PyTorch, which is one loop for each gate; key heads repeat where it has no groups."""
    if model.endswith("kda"):
        return fla.kda(q, k, v, g, beta, initial_state=initial_state, output_final_state=True)
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    if model == "chunk_gated_delta_product":
        scale = q.shape[-1] ** -0.5
        return fla.product(q, k, v, g, beta, scale, None, initial_state, True, updates)
    if model.endswith("gated_delta_rule"):
        return fla.gdn(q, k, v, beta, g, initial_state=initial_state, output_final_state=True)
    o, state = fla.delta(*(x.transpose(1, 2) for x in (q, k, v, beta)), initial_state, True)
    return o.transpose(1, 2), state


def tensors(model, device, seqlen=SEQLEN, batch=2, updates=1, sequences=None):
    generator = torch.Generator().manual_seed(seqlen)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    steps = seqlen * updates
    found = {
        "q": randn(batch, seqlen, HEADS, KEY_DIM),
        "k": F.normalize(randn(batch, steps, HEADS, KEY_DIM), dim=-1),
        "v": randn(batch, steps, VALUE_HEADS, VALUE_DIM),
        "beta": randn(batch, steps, VALUE_HEADS).sigmoid(),
        "initial_state": randn(sequences or batch, VALUE_HEADS, KEY_DIM, VALUE_DIM),
    }
    if not model.endswith("delta_rule") or "gated" in model:
        gates = (KEY_DIM,) if model.endswith("kda") else ()
        found["g"] = F.logsigmoid(randn(batch, seqlen, VALUE_HEADS, *gates))
    return found


def options_of(model):
    return {"num_householder": 2} if model == "chunk_gated_delta_product" else {}


def differentiable(given):
    return {name: value.clone().requires_grad_() for name, value in given.items()}


def assert_close(actual, expected, name="o", rtol=2e-5):
    distance = (actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
    assert distance <= rtol, f"{name}: relative distance {distance:.1e}, allowed {rtol:.1e}"


@pytest.mark.parametrize("name", HOMES)
def test_signature(fla, name):
    def parameters(function):
        return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]

    assert parameters(getattr(functions, name)) == parameters(fla.functions[name])


@pytest.mark.serves("values and gradients")
@chunked
def test_chunked_functions(fla, model, device):
    updates = 2 if model == "chunk_gated_delta_product" else 1
    given = tensors(model, device, updates=updates)
    ours, theirs = differentiable(given), differentiable(given)
    with counted_kernels() as calls:
        found = getattr(functions, model)(**ours, output_final_state=True, **options_of(model))
        sum(x.sin().sum() for x in found).backward()
    assert calls == {"_delta_rule_scan_fwd": 1, "_delta_rule_scan_bwd": 1}
    expected = naive(fla, model, **theirs, updates=updates)
    sum(x.sin().sum() for x in expected).backward()
    assert found[1].shape == (2, VALUE_HEADS, KEY_DIM, VALUE_DIM) and found[1].dtype == torch.float32
    for name, value, other in zip(("o", "final_state"), found, expected, strict=True):
        assert_close(value, other, name)
    for name, value in ours.items():
        assert_close(value.grad, theirs[name].grad, name)
    assert getattr(functions, model)(**given, **options_of(model))[1] is None


@pytest.mark.serves("cached steps")
@recurrent
def test_recurrent_functions(fla, model, device):
    given = tensors(model, device, seqlen=5)
    expected = naive(fla, model, **given)
    before = given["initial_state"].clone()
    with counted_kernels() as calls:
        found = getattr(functions, model)(**given, output_final_state=True)
        alone = getattr(functions, model)(**given)
    assert calls == {"delta_rule_step": 2} and alone[1] is None and torch.equal(alone[0], found[0])
    assert torch.equal(given["initial_state"], before)
    for name, value, other in zip(("o", "final_state"), found, expected, strict=True):
        assert_close(value, other, name)
    state, outs = before, []
    for t in range(5):
        step = {name: value[:, t : t + 1] for name, value in given.items() if name != "initial_state"}
        out, state = getattr(functions, model)(**step, initial_state=state, output_final_state=True)
        outs.append(out)
    assert_close(torch.cat(outs, 1), expected[0])
    assert_close(state, expected[1], "final_state")


@pytest.mark.serves("values and gradients")
@recurrent
def test_gradients_of_recurrent_functions(fla, model, device):
    given = tensors(model, device, seqlen=5)
    ours, theirs = differentiable(given), differentiable(given)
    with counted_kernels() as calls:
        sum(x.sin().sum() for x in getattr(functions, model)(**ours, output_final_state=True)).backward()
    assert calls == {"_delta_rule_scan_fwd": 1, "_delta_rule_scan_bwd": 1}
    sum(x.sin().sum() for x in naive(fla, model, **theirs)).backward()
    for name, value in ours.items():
        assert_close(value.grad, theirs[name].grad, name)


LENGTHS = (0, 9, 1, 0, 20, 0)


@pytest.mark.serves("packed sequences")
@pytest.mark.parametrize("model", [name for name in HOMES if not name.endswith("gdn")])
def test_packed_sequences(model, device):
    function, options = getattr(functions, model), options_of(model)
    updates = options.get("num_householder", 1)
    given = tensors(model, device, seqlen=sum(LENGTHS), batch=1, updates=updates, sequences=len(LENGTHS))
    ends = [0, *itertools.accumulate(LENGTHS)]
    cu_seqlens = torch.tensor(ends, device=device)
    states = given.pop("initial_state")
    packed, finals = function(**given, **options, initial_state=states, output_final_state=True, cu_seqlens=cu_seqlens)
    assert finals.shape == states.shape
    for i, (begin, end) in enumerate(itertools.pairwise(ends)):
        if begin == end:
            assert torch.equal(finals[i], states[i])
            continue
        factors = {name: updates if name in ("k", "v", "beta") else 1 for name in given}
        part = {name: value[:, begin * factors[name] : end * factors[name]] for name, value in given.items()}
        out, final = function(**part, **options, initial_state=states[i : i + 1], output_final_state=True)
        assert_close(packed[:, begin:end], out)
        assert_close(finals[i : i + 1], final, "final_state")


@pytest.mark.parametrize("model", [name for name in HOMES if not name.endswith("gdn")])
def test_packed_sequences_are_a_batch_of_one(model):
    options = options_of(model)
    given = tensors(model, "cpu", seqlen=10, updates=options.get("num_householder", 1))
    with pytest.raises(ValueError, match=f"^{model}: expected a batch of 1 with cu_seqlens, got 2$"):
        getattr(functions, model)(**given, **options, cu_seqlens=torch.tensor([0, 5, 10]))
    given["initial_state"], given["q"] = None, given["q"][:1]
    for name in ("k", "v", "beta"):  # which the decoding step, without an axis of the batch, must not cut
        one = {key: value if value is None or key == name else value[:1] for key, value in given.items()}
        with pytest.raises(ValueError, match=f"^{model}: expected .*, got"):
            getattr(functions, model)(**one, **options, cu_seqlens=torch.tensor([0, 5, 10]))


@pytest.mark.parametrize("function", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_options_in_the_kernel_of_gated_delta_rule(fla, function, allow_neg_eigval, device):
    given = tensors(function, device, seqlen=12)
    q, k, v, state = (given[name] for name in ("q", "k", "v", "initial_state"))
    g, beta = torch.randn(2, 2, 12, VALUE_HEADS, device=device)
    A_log, dt_bias = torch.randn(2, VALUE_HEADS, device=device)
    call = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": allow_neg_eigval}
    call |= {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias, "output_final_state": True}
    o, final = getattr(functions, function)(q, k, v, g=g, beta=beta, initial_state=state.mT, state_v_first=True, **call)
    normal = [F.normalize(x, dim=-1) for x in (q, k)]
    strength = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    expected = naive(fla, function, *normal, v, strength, fla.gdn_gate(g, A_log, dt_bias), initial_state=state)
    assert_close(o, expected[0])
    assert_close(final.mT, expected[1], "final_state")
    call |= {"g": g, "beta": beta, "initial_state": state.mT}
    with pytest.warns(DeprecationWarning, match=f"{function}: transpose_state_layout is the older name"):
        again = getattr(functions, function)(q, k, v, transpose_state_layout=True, **call)
    assert torch.equal(again[1], final)
    call |= {"use_gate_in_kernel": False, "g": -g.abs(), "initial_state": None}
    ignored, absent = (
        getattr(functions, function)(q, k, v, **call | each)[0] for each in ({}, {"A_log": None, "dt_bias": None})
    )
    assert torch.equal(ignored, absent)


@pytest.mark.parametrize("function", ["chunk_kda", "fused_recurrent_kda"])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gates_in_the_kernel_of_kda(fla, function, lower_bound, device):
    given = tensors(function, device, seqlen=12)
    q, k, v, beta, state = (given[name] for name in ("q", "k", "v", "beta", "initial_state"))
    g, A_log = torch.randn(2, 12, VALUE_HEADS, KEY_DIM, device=device), torch.randn(VALUE_HEADS, device=device)
    dt_bias = torch.randn(VALUE_HEADS * KEY_DIM, device=device)
    call = {"use_gate_in_kernel": True, "dt_bias": dt_bias, "lower_bound": lower_bound, "initial_state": state}
    for given_A_log in (A_log, A_log.view(1, 1, -1, 1), *([None] if lower_bound else [])):
        o, _ = getattr(functions, function)(q, k, v, g, beta, A_log=given_A_log, **call)
        if lower_bound is None:
            gate = fla.kda_gate(g, A_log, dt_bias)
        else:
            scale = 1 if given_A_log is None else A_log.exp()[:, None]
            gate = lower_bound * (scale * (g + dt_bias.view(VALUE_HEADS, KEY_DIM))).sigmoid()
            if given_A_log is not None:
                assert_close(gate, fla.kda_bounded_gate(g, A_log, dt_bias, lower_bound), "gate")
        assert_close(o, naive(fla, function, q, k, v, beta, gate, initial_state=state)[0])


def test_decays_of_heads_and_channels_add(fla, device):
    given = tensors("fused_recurrent_gated_delta_rule", device, seqlen=7)
    gk = F.logsigmoid(torch.randn(2, 7, VALUE_HEADS, KEY_DIM, device=device))
    o, _ = functions.fused_recurrent_gated_delta_rule(**given, gk=gk)
    total = given | {"g": given["g"][..., None] + gk}
    assert_close(o, naive(fla, "kda", **total)[0])
    del given["g"], total["g"]
    o, _ = functions.fused_recurrent_gated_delta_rule(**given, gk=gk)
    assert_close(o, naive(fla, "kda", **total, g=gk)[0])
    o, _ = functions.fused_recurrent_gated_delta_rule(**given)
    assert_close(o, naive(fla, "delta", **given)[0])
    del given["beta"]
    o, _ = functions.fused_recurrent_gated_delta_rule(**given)
    assert_close(o, naive(fla, "delta", **given, beta=torch.ones(2, 7, VALUE_HEADS, device=device))[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(fla, dtype, device):
    given = tensors("chunk_kda", device)
    expected = functions.chunk_kda(**{name: value.double() for name, value in given.items()}, output_final_state=True)
    low = {name: value if name in ("g", "initial_state") else value.to(dtype) for name, value in given.items()}
    o, state = functions.chunk_kda(**low, output_final_state=True)
    assert o.dtype == dtype and state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(o, expected[0], rtol=2e-6 if dtype == torch.float64 else 1e-2)
    mixed = functions.chunk_kda(**given | {"v": given["v"].to(dtype)}, output_final_state=True)
    assert mixed[0].dtype == torch.promote_types(dtype, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        same = functions.chunk_kda(**given)[0]
    assert torch.equal(same, functions.chunk_kda(**given)[0])


def words(model, text, **more):
    return pytest.param(model, more, text, id=f"{model} {text[:30]}")


@pytest.mark.parametrize(
    ("model", "more", "text"),
    [
        words("chunk_gated_delta_rule", "cp_context is not supported", cp_context=object()),
        words("chunk_kda", "return_intermediate_states is not supported", return_intermediate_states=True),
        words("chunk_kda", "use_graph is not supported", use_graph=True),
        words("chunk_gated_delta_product", "cp_context is not supported", cp_context=object()),
        words("fused_recurrent_gated_delta_rule", "gv is not supported", gv=torch.zeros(2, 5, VALUE_HEADS, VALUE_DIM)),
        words("fused_recurrent_delta_rule", "a beta of channels is not", beta=torch.zeros(2, 5, VALUE_HEADS, VALUE_DIM)),
        words("chunk_delta_rule", "head_first is not supported", head_first=True),
        words("chunk_delta_rule", "unexpected keyword argument 'chunksize'; did you mean 'chunk_size'?", chunksize=64),
        words("chunk_gated_delta_rule", "expected A_log with use_gate_in_kernel, got None", use_gate_in_kernel=True),
        words("chunk_kda", "expected A_log with use_gate_in_kernel, got None", use_gate_in_kernel=True),
        words("chunk_kda", "expected g of shape (batch, seqlen, value_heads, key_dim)", g=torch.zeros(2, 5, VALUE_HEADS)),
        words("chunk_gated_delta_rule", "expected g of shape (batch, seqlen, value_heads)", g=torch.zeros(2, 5, 4, 8)),
        words("chunk_gated_delta_rule", "expected allow_neg_eigval with use_beta_sigmoid_in_kernel", allow_neg_eigval=True),
        words("chunk_delta_rule", "(sequences, value_heads, key_dim, value_dim)", initial_state=torch.zeros(2, 4, 6, 8)),
        words("chunk_gated_delta_rule", "expected state_v_first or", state_v_first=True, transpose_state_layout=True),
    ],
)
def test_refused_by_name(model, more, text):
    given = tensors(model, "cpu", seqlen=5, updates=2 if "product" in model else 1)
    with pytest.raises((NotImplementedError, TypeError, ValueError), match=f"^{model}: .*{re.escape(text)}"):
        getattr(functions, model)(**given | options_of(model) | more)
