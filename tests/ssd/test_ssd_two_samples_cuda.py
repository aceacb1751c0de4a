"""``ssd_chunk_scan`` with discretizations that read two input samples a step, on CUDA beside the CPU in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import debug_option
from test_ssd_two_samples import cut, evaluate, every_rule, make_inputs
from torch import Tensor
from two_sample_helpers import on, widened

from ssm_kernels import ssd_chunk_scan

pytestmark = pytest.mark.cuda
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Relative errors, in norms. For fp16 and bf16 the kernels round the operands of products and, with z, the gradient of y.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}
# Few sums over many steps, whose terms partly cancel.
SUMS = ("grad_A", "grad_D", "grad_dt_bias", "grad_previous_0", "grad_previous_1", "grad_initial_states")
CHUNK = 64  # of the kernels


def given(rule: str, **options: Any) -> dict[str, Any]:
    sizes = {"batch": 2, "seqlen": 150, "heads": 4, "headdim": 16, "groups": 2, "dstate": 16, "chunk_size": None}
    return make_inputs(rule, **sizes | {"previous": "given"} | options)


def assert_accurate(inputs: dict[str, Any], factor: float = 1) -> dict[str, Tensor]:
    found = evaluate(ssd_chunk_scan, on("cuda", inputs))
    for name, value in evaluate(ssd_chunk_scan, widened(inputs)).items():
        bound = BOUNDS[inputs["x"].dtype] * factor * (3 if name in SUMS else 1)
        error, norm = (found[name].double().cpu() - value).norm().item(), value.norm().item()
        # A dtype does not tell the least numbers from zero: the floor of an element is the smallest subnormal number.
        limits = torch.finfo(found[name].dtype)
        floor = max(1e-30, limits.tiny * limits.eps * value.numel() ** 0.5)
        assert error <= bound * norm + floor, (name, error / max(norm, 1e-30), bound)
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "repeat": {"previous": "repeat"},
    "zero": {"previous": "zero"},
    "one_group": {"groups": 1, "D": "headdim"},
    "required_only": {**dict.fromkeys(("D", "z", "dt_bias", "initial_states")), "dt_softplus": False, "previous": "zero"},
    "limits": {"dt_limit": (0.1, 0.6)},
    "no_initial_states": {"initial_states": None},
    "one_step": {"seqlen": 1},
    "two_steps": {"seqlen": 2, "previous": "repeat"},
    "chunk_less_one": {"seqlen": CHUNK - 1},
    "chunk": {"seqlen": CHUNK},
    "chunk_and_one": {"seqlen": CHUNK + 1, "previous": "repeat"},
    "long": {"batch": 1, "seqlen": 20 * CHUNK + 3, "heads": 2, "groups": 1, "dstate": 8, "headdim": 8},
    "odd_sizes": {"headdim": 5, "dstate": 7, "heads": 3, "groups": 3},
    "many_rows": {"headdim": 80, "dstate": 64, "seqlen": 100, "batch": 1},
    "many_states": {"headdim": 64, "dstate": 128, "seqlen": 100, "batch": 1},
    "most_states": {"headdim": 24, "dstate": 200, "seqlen": 100, "batch": 1},
    "many_heads": {"heads": 40, "seqlen": 70, "headdim": 8, "dstate": 8, "batch": 1},
    "reverse": {"reverse": True},
    "reverse_repeat": {"reverse": True, "previous": "repeat"},
    "no_steps": {"seqlen": 0},
}


@every_dtype
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@every_rule
def test_against_the_reference(rule, options, dtype):
    assert_accurate(given(rule, dtype=dtype, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["all", "most_states", "many_states", "chunk_and_one"])
@every_rule
def test_without_wgmma(rule, name, dtype):
    with debug_option("ssd_mma", "mma"):
        assert_accurate(given(rule, dtype=dtype, **OPTIONS[name]))


@every_dtype
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["zero", "repeat", "given"])
def test_packed_sequences(name, reverse, dtype):
    """Empty sequences, of one step, and with ends inside and at the ends of chunks."""
    ends = [0, 0, 4, 4, 5, CHUNK, 2 * CHUNK, 150, 150]
    inputs = given("foh_ramp", batch=1, sequences=len(ends) - 1, previous=name, reverse=reverse, dtype=dtype)
    assert_accurate(inputs | {"cu_seqlens": torch.tensor(ends)})


@every_dtype
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["zero", "repeat", "given"])
@every_rule
def test_resets(rule, name, reverse, dtype):
    """Sequences that begin at a chunk's first and last step, and inside of a chunk."""
    inputs = given(rule, previous=name, reverse=reverse, dtype=dtype)
    seq_idx = torch.zeros(2, 150, dtype=torch.int32)
    seq_idx[0, CHUNK:] += 1
    seq_idx[1, 1:] += 1
    seq_idx[1, CHUNK - 1 :] += 1
    seq_idx[:, CHUNK + 5 :] += 1
    assert_accurate(inputs | {"seq_idx": seq_idx})


@every_dtype
def test_resets_inside_of_packed_sequences(dtype):
    inputs = given("exp_trapezoidal", batch=1, sequences=3, dtype=dtype, seqlen=100)
    seq_idx = (torch.arange(100)[None] // 13).int()
    assert_accurate(inputs | {"seq_idx": seq_idx, "cu_seqlens": torch.tensor([0, 70, 70, 100])})


@every_dtype
@every_rule
def test_backward_in_spans_and_sub_batches(rule, dtype):
    inputs = given(rule, seqlen=5 * CHUNK + 3, dtype=dtype)
    with debug_option("ssd_workspace_bytes", 1):
        assert_accurate(inputs)


@pytest.mark.parametrize("z", [-1e-4, -0.7, -3.0, -30.0, -300.0])
@every_dtype
@every_rule
def test_large_and_small_steps(rule, dtype, z):
    """No weight is divided by a decay, which underflows."""
    inputs = given(rule, dtype=dtype, dt_softplus=False, dt_bias=None)
    inputs["A"] = inputs["A"].clamp(-1.2, -0.8)
    inputs["dt"] = (-z * torch.sigmoid(inputs["dt"].float() / 4) * 2).to(dtype)
    assert_accurate(inputs, factor=2)


@every_dtype
@every_rule
def test_a_strong_decay_beside_weak_ones(rule, dtype):
    inputs = given(rule, dtype=dtype, dt_softplus=False, dt_bias=None)
    inputs["dt"] = inputs["dt"].abs() / 10
    inputs["dt"][:, [3, CHUNK - 1, CHUNK, 100]] = 1000
    found = assert_accurate(inputs, factor=2)
    assert all(value.isfinite().all() for value in found.values())


@every_dtype
@pytest.mark.parametrize("step", [CHUNK - 1, CHUNK, CHUNK + 3])
@every_rule
def test_later_arguments_do_not_reach_earlier_outputs(rule, step, dtype):
    inputs = on("cuda", given(rule, dtype=dtype))
    before = ssd_chunk_scan(**inputs)
    for name in ("x", "dt", "B", "C", "z", "lam"):
        if name in inputs:
            changed = inputs[name].clone()
            changed[:, step] += 1
            after = ssd_chunk_scan(**inputs | {name: changed})
            assert torch.equal(after[:, :step], before[:, :step]), name
            assert not torch.equal(after[:, step:], before[:, step:]), name


@every_dtype
@every_rule
def test_nan_stays_in_its_head(rule, dtype):
    inputs = on("cuda", given(rule, dtype=dtype))
    before = ssd_chunk_scan(**inputs)
    inputs["x"][0, 100, 1] = torch.nan
    after = ssd_chunk_scan(**inputs)
    assert torch.equal(after[:, :CHUNK], before[:, :CHUNK])
    assert torch.equal(after[1], before[1])
    assert torch.equal(after[0, :, [0, 2, 3]], before[0, :, [0, 2, 3]])
    assert after[0, 100:, 1].isnan().all()


@every_dtype
@every_rule
def test_same_bits_for_any_strides(rule, dtype):
    inputs = on("cuda", given(rule, dtype=dtype))
    expected = evaluate(ssd_chunk_scan, inputs)
    strided = dict(inputs)
    for name in ("x", "dt", "B", "C", "z", "lam"):
        if name in inputs:
            strided[name] = inputs[name].transpose(0, 1).contiguous().transpose(0, 1)
    for name, value in evaluate(ssd_chunk_scan, strided).items():
        assert torch.equal(value, expected[name]), name


@every_dtype
def test_the_same_call_has_the_same_bits(dtype):
    inputs = on("cuda", given("exp_trapezoidal", dtype=dtype, seqlen=500, groups=1, heads=6))
    first, second = (evaluate(ssd_chunk_scan, inputs) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@every_dtype
@every_rule
def test_split_is_the_whole(rule, dtype):
    inputs = on("cuda", given(rule, dtype=dtype))
    whole, last = ssd_chunk_scan(**inputs, return_final_states=True)
    first, middle = ssd_chunk_scan(**cut(inputs, 0, 77), return_final_states=True)
    later = cut(inputs, 77, 150) | {"initial_states": middle.state, "previous": (middle.u, middle.B)}
    second, end = ssd_chunk_scan(**later, return_final_states=True)
    bound = 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 3e-6
    for found, value in ((torch.cat([first, second], 1), whole), (end.state, last.state)):
        assert (found.double() - value.double()).norm() < bound * value.double().norm()


@every_dtype
def test_mixed_and_strided_gradients(dtype):
    """A gradient of every argument alone equals the gradient among all of them."""
    inputs = on("cuda", given("exp_trapezoidal", dtype=dtype))
    expected = evaluate(ssd_chunk_scan, inputs)
    names = ["x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states", "lam"]
    for name in names:
        leaf = inputs[name].clone().requires_grad_()
        out, last = ssd_chunk_scan(**inputs | {name: leaf}, return_final_states=True)
        generator = torch.Generator().manual_seed(5)
        weights = [torch.randint(-4, 5, x.shape, generator=generator).double() / 4 for x in (out, *last)]
        loss = sum((x * w.to(x)).double().sum() for x, w in zip((out, *last), weights, strict=True))
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert torch.equal(gradient, expected[f"grad_{name}"]), name
