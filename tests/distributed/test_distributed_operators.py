"""Operators over 1 to 4 ranks, on CPUs and on two GPUs: outputs, states and gradients of one process; errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_helpers import (
    CU_SEQLENS,
    SEQLEN,
    close,
    cu_seqlens_of,
    generator,
    over_places,
    own_span,
    packings,
    random_flags,
)
from process_pool import TWO_GPUS, Mesh, Place, Processes, param
from recurrence_helpers import FORMS, RECURRENCES
from torch import Tensor

import ssm_kernels

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from ssm_kernels import distributed


def some_or_all(mesh: Mesh, names: Iterable[str], some: Sequence[str]) -> Sequence[str]:
    """All on two ranks, which GPUs have, and on three; elsewhere some: formulas do not depend on the number of ranks."""
    return [*names] if mesh.size() in (2, 3) else some


def parts_of(value: Tensor) -> Tensor:
    """A complex tensor as real and imaginary parts."""
    return torch.view_as_real(value) if value.is_complex() else value


def compare(
    mesh: Mesh,
    name: str,
    inputs: Mapping[str, Tensor],
    of_steps: Mapping[str, int],
    axis: int,
    options: Mapping[str, Any],
    state: str | None,
    exchange: str = "chain",
    entries: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Compares the operator ``name`` over the ranks of a mesh with the one of ``ssm_kernels``.

    It passes states along a chain without a last state, and with ``state`` also by summaries.

    Args:
        inputs: differentiable, of the whole sequence.
        of_steps: the axis of time of the inputs and options that have one.
        axis: the axis of time of the result.
        options: other arguments.
        state: the flag that asks for the last state, if that is compared too.
        exchange: of a call without it.
        entries: how many entries of its axis of time a step has, for inputs with several.
    """
    if state is not None:
        compare(mesh, name, inputs, of_steps, axis, options, None, entries=entries)
        exchange = "summaries"
    rank, size, own = mesh.get_local_rank(), mesh.size(), own_span(mesh)

    def cut(name: str, value: Any) -> Any:
        if name not in of_steps:
            return value
        each = entries.get(name, 1)
        return value.narrow(of_steps[name], own.start * each, (own.stop - own.start) * each)

    flags = {} if state is None else {state: True}
    pair = [key for key in inputs if key.startswith("previous_")]

    def call(package: Any, given: dict[str, Tensor], **others: Any) -> Sequence[Tensor]:
        """The result and, with ``state``, the last state, and its samples if there are some."""
        samples = tuple(given.get(key) for key in pair) if pair else None
        if pair:
            others["previous"] = samples if len(pair) == 2 else (*samples, None)
        results = getattr(package, name)(**{key: value for key, value in given.items() if key not in pair}, **others, **flags)
        flat = [*results] if state else [results]
        last = flat.pop() if state else ()
        return [parts_of(each) for each in (*flat, *(last if isinstance(last, tuple) else [last])) if each is not None]

    whole = {name: value.clone().requires_grad_() for name, value in inputs.items()}
    expected = call(ssm_kernels, whole, **options)
    random = generator(mesh, 1)
    factors = [random(*result.shape) for result in expected]
    sum((result * factor).sum() for result, factor in zip(expected, factors, strict=True)).backward()

    runs = []
    for _ in range(2):
        local = {name: cut(name, value).clone().requires_grad_() for name, value in inputs.items()}
        own_options = {name: cut(name, value) for name, value in options.items()}
        actual = call(distributed, local, **own_options, group=mesh, exchange=exchange)
        # Every rank returns the last state, and its share of the loss reads a part of it.
        loss = (actual[0] * factors[0].narrow(axis, own.start, own.stop - own.start)).sum()
        for last, factor in zip(actual[1:], factors[1:], strict=True):
            loss = loss + (last * factor).sum() * (rank + 1) / (size * (size + 1) / 2)
        loss.backward()
        runs.append([*actual, *(value.grad for value in local.values())])
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True)), f"{name}: other bits in a second run"

    close(actual[0], expected[0].narrow(axis, own.start, own.stop - own.start), f"{name}, {size} ranks, result")
    for last, value in zip(actual[1:], expected[1:], strict=True):
        close(last, value, f"{name}, {size} ranks, {state}")
    for key, value in local.items():
        gradient = parts_of(value.grad)
        if key not in of_steps:
            dist.all_reduce(gradient, group=mesh.get_group())
        close(gradient, parts_of(cut(key, whole[key].grad)), f"{name}, {size} ranks, {options}, gradient of {key}")


def check_selective_scan(mesh: Mesh) -> None:
    random = generator(mesh, 0)
    batch, dim, dstate = 2, 4, 3
    steps = random(batch, dim, SEQLEN)
    inputs = {
        "u": steps,
        "delta": random(batch, dim, SEQLEN),
        "A": -random(dim, dstate).abs() - 0.1,
        "B": random(batch, 2, dstate, SEQLEN),
        "C": random(batch, dstate, SEQLEN),
        "D": random(dim),
        "z": random(batch, dim, SEQLEN),
        "delta_bias": random(dim),
        "initial_state": random(batch, dim, dstate),
    }
    of_steps = {"u": 2, "delta": 2, "z": 2, "B": 3, "C": 2, "seq_idx": 1}
    for discretization in some_or_all(mesh, ssm_kernels.discretizations, ("zoh", "euler")):
        options = {"discretization": discretization, "delta_softplus": True}
        compare(mesh, "selective_scan", inputs, of_steps, 2, options, "return_last_state")
    options = {"discretization": "bilinear", "delta_softplus": True, "reverse": True}
    compare(mesh, "selective_scan", inputs, of_steps, 2, options, "return_last_state")
    row = {name: value[:1] if name in of_steps else value for name, value in inputs.items() if name != "initial_state"}
    packed = {"cu_seqlens": cu_seqlens_of(mesh)}
    few = {name: inputs[name] for name in ("u", "delta", "A", "C", "z")} | {"B": random(dim, dstate)}
    for reverse in ({}, {"reverse": True}):
        for packing in packings(mesh, batch).values():
            options = {"delta_softplus": True} | reverse | packing
            compare(mesh, "selective_scan", inputs, of_steps, 2, options, "return_last_state")
        for packing in (packed, packed | packings(mesh, 1)["random"]):
            compare(mesh, "selective_scan", row, of_steps, 2, {"discretization": "bilinear"} | reverse | packing, None)
        compare(mesh, "selective_scan", few, {"u": 2, "delta": 2, "z": 2, "C": 2}, 2, reverse, None)
    constant = {name: inputs[name] for name in ("u", "delta", "A", "B")} | {"C": random(dim, dstate)}
    compare(mesh, "selective_scan", constant, {"u": 2, "delta": 2, "B": 3}, 2, {"reverse": True}, None)


def check_two_sample_scan(mesh: Mesh) -> None:
    """Of rules that read two samples, and with ``delta_A``: halos, states and samples of every kind of call."""
    random = generator(mesh, 0)
    batch, dim, dstate = 2, 4, 3
    inputs = {
        "u": random(batch, dim, SEQLEN),
        "delta": random(batch, dim, SEQLEN),
        "A": -random(dim, dstate).abs() - 0.1,
        "B": random(batch, 2, dstate, SEQLEN),
        "C": random(batch, dstate, SEQLEN),
        "D": random(dim),
        "z": random(batch, dim, SEQLEN),
        "delta_bias": random(dim),
        "initial_state": random(batch, dim, dstate),
    }
    of_steps = {"u": 2, "delta": 2, "z": 2, "B": 3, "C": 2, "lam": 2, "delta_A": 2, "seq_idx": 1}
    given = {"previous_u": random(batch, dim), "previous_B": random(batch, 2, dstate)}
    lam, delta_A = {"lam": random(batch, dim, SEQLEN)}, {"delta_A": random(batch, dim, SEQLEN).abs()}
    exp = {"discretization": "exp_trapezoidal", "lam_sigmoid": True, "delta_softplus": True}
    flag, name = "return_last_state", "selective_scan"
    rules: dict[str, dict[str, Any]] = {"foh_ramp": {}, "trapezoidal": {}, "gbt_two_sample": {"alpha": 0.7}}
    for rule in some_or_all(mesh, rules, ("foh_ramp",)):
        options = {"discretization": rule, "delta_softplus": True} | rules[rule]
        compare(mesh, name, inputs | given, of_steps, 2, options, flag)
    for rule in some_or_all(mesh, ("zoh_exact", "zoh", "dirac"), ("zoh_exact",)):
        compare(mesh, name, inputs | delta_A, of_steps, 2, {"discretization": rule, "delta_softplus": True}, flag)
    few = {key: inputs[key] for key in ("u", "delta", "A", "C", "z")} | {"B": random(dim, dstate)}
    row = {key: value[:1] if key in of_steps else value for key, value in (inputs | lam).items() if key != "initial_state"}
    packed = {"cu_seqlens": cu_seqlens_of(mesh)}
    for reverse in ({}, {"reverse": True}):
        for packing in packings(mesh, batch).values():
            options = exp | reverse | packing
            compare(mesh, name, inputs | lam | given | delta_A, of_steps, 2, options, flag)
            for previous in ("zero", "repeat"):
                compare(mesh, name, inputs | lam, of_steps, 2, options | {"previous": previous}, flag)
        for packing in (packed, packed | packings(mesh, 1)["random"]):
            for previous in ("zero", "repeat"):
                compare(mesh, name, row, of_steps, 2, exp | reverse | packing | {"previous": previous}, None)
        options = {"discretization": "foh_ramp"} | reverse
        compare(mesh, name, few | {"previous_u": given["previous_u"]}, {"u": 2, "delta": 2, "z": 2, "C": 2}, 2, options, flag)


def check_complex_scan(mesh: Mesh) -> None:
    """Complex states pass as pairs: decays with an exponential and without, halos, packed sequences."""
    random = generator(mesh, 0)
    batch, dim, dstate = 2, 4, 3

    def pairs(*shape: int) -> Tensor:
        return torch.complex(random(*shape), 2 * random(*shape))

    inputs = {
        "u": random(batch, dim, SEQLEN),
        "delta": random(batch, dim, SEQLEN),
        "A": pairs(dim, dstate) - 3,
        "B": pairs(batch, 2, dstate, SEQLEN),
        "C": pairs(batch, dstate, SEQLEN),
        "D": random(dim),
        "z": random(batch, dim, SEQLEN),
        "delta_bias": random(dim),
        "initial_state": pairs(batch, dim, dstate),
    }
    of_steps = {"u": 2, "delta": 2, "z": 2, "B": 3, "C": 2, "lam": 2, "seq_idx": 1}
    given = {"previous_u": random(batch, dim), "previous_B": pairs(batch, 2, dstate), "lam": random(batch, dim, SEQLEN)}
    flag, name, softplus = "return_last_state", "selective_scan", {"delta_softplus": True}
    exp = {"discretization": "exp_trapezoidal", "lam_sigmoid": True} | softplus
    compare(mesh, name, inputs, of_steps, 2, softplus | packings(mesh, batch)["random"], flag)
    compare(mesh, name, inputs | given, of_steps, 2, exp | {"reverse": True}, flag)
    few = {key: inputs[key] for key in ("u", "delta", "A", "C", "z")} | {"B": pairs(dim, dstate)}
    steps = {"u": 2, "delta": 2, "z": 2, "C": 2}
    options = {"discretization": "trapezoidal", "previous": "repeat", "conjugate_pairs": False} | softplus
    compare(mesh, name, few, steps, 2, options, flag)
    row = {key: value[:1] if key in of_steps else value for key, value in inputs.items() if key != "initial_state"}
    compare(mesh, name, row, of_steps, 2, {"discretization": "bilinear", "cu_seqlens": cu_seqlens_of(mesh)} | softplus, None)
    one, error = torch.ones(1, 1, 2).to(inputs["u"]), None
    try:
        distributed.selective_scan(one, one, one[0, :, :1], one[:, :1], one[:, :1], conjugate_pairs=False, group=mesh)
    except ValueError as raised:
        error = raised
    assert "expected conjugate_pairs=False with a complex A only" in str(error)


def check_two_sample_chunk_scan(mesh: Mesh) -> None:
    random = generator(mesh, 0)
    batch, heads, headdim, groups, dstate = 2, 4, 3, 2, 5
    inputs = {
        "x": random(batch, SEQLEN, heads, headdim),
        "dt": random(batch, SEQLEN, heads),
        "A": -random(heads).abs(),
        "B": random(batch, SEQLEN, groups, dstate),
        "C": random(batch, SEQLEN, groups, dstate),
        "D": random(heads, headdim),
        "z": random(batch, SEQLEN, heads, headdim),
        "dt_bias": random(heads),
        "initial_states": random(batch, heads, headdim, dstate),
    }
    of_steps = dict.fromkeys(("x", "dt", "B", "C", "z", "lam", "seq_idx"), 1)
    given = {"previous_x": random(batch, heads, headdim), "previous_B": random(batch, groups, dstate)}
    lam = {"lam": random(batch, SEQLEN, heads)}
    exp = {"discretization": "exp_trapezoidal", "lam_sigmoid": True, "dt_softplus": True, "dt_limit": (0.2, 1.0)}
    flag, name = "return_final_states", "ssd_chunk_scan"
    compare(mesh, name, inputs | given, of_steps, 1, {"discretization": "foh_ramp", "dt_softplus": True}, flag)
    row = {key: value[:1] if key in of_steps else value for key, value in (inputs | lam).items() if key != "initial_states"}
    packed = {"cu_seqlens": cu_seqlens_of(mesh)}
    for reverse in ({}, {"reverse": True}):
        for packing in packings(mesh, batch).values():
            options = exp | reverse | packing
            compare(mesh, name, inputs | lam | given, of_steps, 1, options, flag)
            compare(mesh, name, inputs | lam, of_steps, 1, options | {"previous": "repeat"}, flag)
        for packing in (packed, packed | packings(mesh, 1)["random"]):
            compare(mesh, name, row, of_steps, 1, exp | reverse | packing | {"previous": "repeat"}, None)


def check_ssd_chunk_scan(mesh: Mesh) -> None:
    random = generator(mesh, 0)
    batch, heads, headdim, groups, dstate = 2, 4, 3, 2, 5
    inputs = {
        "x": random(batch, SEQLEN, heads, headdim),
        "dt": random(batch, SEQLEN, heads),
        "A": -random(heads).abs(),
        "B": random(batch, SEQLEN, groups, dstate),
        "C": random(batch, SEQLEN, groups, dstate),
        "D": random(heads, headdim),
        "z": random(batch, SEQLEN, heads, headdim),
        "dt_bias": random(heads),
        "initial_states": random(batch, heads, headdim, dstate),
    }
    of_steps = dict.fromkeys(("x", "B", "C", "z", "seq_idx", "log_decay", "gain"), 1)
    given = {name: value for name, value in inputs.items() if name not in ("dt", "A", "dt_bias")}
    given |= {"log_decay": -random(batch, SEQLEN, heads).abs(), "gain": random(batch, SEQLEN, heads)}
    for reverse in (False, True):
        options = {"dt": None, "A": None, "reverse": reverse} | packings(mesh, batch)["random"]
        compare(mesh, "ssd_chunk_scan", given, of_steps, 1, options, "return_final_states")
    of_steps["dt"] = 1
    step_sizes = {"dt_softplus": True, "dt_limit": (0.2, 1.0)}
    for discretization in some_or_all(mesh, ("zoh", "zoh_exact", "poly", "highorder", "rk4"), ("zoh_exact",)):
        options = step_sizes | {"discretization": discretization}
        compare(mesh, "ssd_chunk_scan", inputs, of_steps, 1, options, "return_final_states")
    options = step_sizes | {"discretization": "rk4", "reverse": True}
    compare(mesh, "ssd_chunk_scan", inputs, of_steps, 1, options, "return_final_states")
    row = {name: value[:1] if name in of_steps else value for name, value in inputs.items() if name != "initial_states"}
    packed = {"cu_seqlens": cu_seqlens_of(mesh)}
    for reverse in ({}, {"reverse": True}):
        for packing in packings(mesh, batch).values():
            compare(mesh, "ssd_chunk_scan", inputs, of_steps, 1, step_sizes | reverse | packing, "return_final_states")
        for packing in (packed, packed | packings(mesh, 1)["random"]):
            compare(mesh, "ssd_chunk_scan", row, of_steps, 1, step_sizes | reverse | packing, None)


def check_delta_rule_scan(mesh: Mesh) -> None:
    random = generator(mesh, 0)
    batch, heads, value_heads, key_dim, value_dim = 2, 2, 4, 3, 5

    def inputs_of(updates: int = 1) -> dict[str, Tensor]:
        steps = SEQLEN * updates
        return {
            "q": random(batch, SEQLEN, heads, key_dim),
            "k": random(batch, steps, heads, key_dim),
            "v": random(batch, steps, value_heads, value_dim),
            "beta": random(batch, steps, value_heads),
        }

    inputs = inputs_of()
    of_head, of_channels = random(batch, SEQLEN, value_heads), random(batch, SEQLEN, value_heads, key_dim)
    state = {"initial_states": random(batch, value_heads, value_dim, key_dim)}
    raw = {"A_log": random(value_heads), "dt_bias": random(value_heads)}
    norm = {"qk_l2norm": True, "beta_sigmoid": True}
    gates: dict[str, dict[str, Tensor]] = {
        "none": {},
        "head": {"g": -of_head.abs()},
        "channels": {"g": -of_channels.abs()},
        "raw": {"g": of_head} | raw,
        "raw, channels": {"g": of_channels, "A_log": raw["A_log"], "dt_bias": random(value_heads, key_dim)},
    }
    of_steps = dict.fromkeys(("q", "k", "v", "beta", "g", "seq_idx"), 1)
    for name in some_or_all(mesh, gates, ("raw",)):
        options = norm | ({"gate_lower_bound": -2.0} if name == "raw, channels" else {})
        compare(mesh, "delta_rule_scan", inputs | gates[name] | state, of_steps, 1, options, "return_final_states")
    gated = inputs | gates["raw"]
    row = {name: value[:1] if name in of_steps else value for name, value in gated.items()}
    packed = {"cu_seqlens": cu_seqlens_of(mesh)}
    for reverse in ({}, {"reverse": True}):
        for packing in packings(mesh, batch).values():
            options = norm | {"allow_neg_eigval": True, "scale": 0.7} | reverse | packing
            compare(mesh, "delta_rule_scan", gated | state, of_steps, 1, options, "return_final_states")
        for packing in (packed, packed | packings(mesh, 1)["random"]):
            for exchange in ("chain", "summaries"):
                compare(mesh, "delta_rule_scan", row, of_steps, 1, norm | reverse | packing, None, exchange=exchange)
        several = inputs_of(2) | gates["head"] | state
        each = dict.fromkeys(("k", "v", "beta"), 2)
        options = norm | {"num_householder": 2} | reverse
        compare(mesh, "delta_rule_scan", several, of_steps, 1, options, "return_final_states", entries=each)


def check_causal_conv1d(mesh: Mesh) -> None:
    random = generator(mesh, 0)
    batch, channels = 2, 5
    of_steps = {"x": 1, "seq_idx": 1}
    for width in (1, 2, 4, 7):
        inputs = {"x": random(batch, SEQLEN, channels), "weight": random(channels, width), "bias": random(channels)}
        state = {"initial_state": random(batch, channels, width - 1)}
        for packing in packings(mesh, batch).values():
            options = {"activation": "silu"} | packing
            compare(mesh, "causal_conv1d", inputs | state, of_steps, 1, options, "return_final_state")
        row = inputs | {"x": inputs["x"][:1]}
        packed = {"cu_seqlens": cu_seqlens_of(mesh, torch.int32)}
        for packing in (packed, packed | packings(mesh, 1)["random"]):
            compare(mesh, "causal_conv1d", row, of_steps, 1, packing, None)


def check_recurrences(mesh: Mesh) -> None:
    batch, channels = 2, 3
    for name in some_or_all(mesh, RECURRENCES, ("linear_scan", "mingru_scan", "liquid_scan")):
        recurrence, random = RECURRENCES[name], generator(mesh, 0)
        forms = {key: FORMS[recurrence.broadcast.get(key, "full")] for key in recurrence.inputs}
        inputs = {key: legal(random(*forms[key](batch, SEQLEN, channels))) for key, legal in recurrence.inputs.items()}
        of_steps = {key: 1 for key, value in inputs.items() if value.dim() == 3} | {"reset": 1}
        reset = random_flags(mesh, batch, 0.15)
        options = [{key: value} for key, (_, *others) in recurrence.options.items() for value in others]
        settings = [{}, {"reset": reset}, *options]
        for reverse in (False, True):
            state = {"h0": random(batch, channels)}
            for options in settings:
                compare(mesh, name, inputs | state, of_steps, 1, options | {"reverse": reverse}, "return_last_state")
            row = {key: value[:1] if key in of_steps else value for key, value in inputs.items()}
            row["h0"] = random(len(CU_SEQLENS) - 1, channels)
            packed = {"cu_seqlens": cu_seqlens_of(mesh), "reverse": reverse}
            compare(mesh, name, row, of_steps, 1, packed, "return_last_state")


CHECKS = {
    "selective_scan": check_selective_scan,
    "selective_scan, two samples": check_two_sample_scan,
    "selective_scan, complex states": check_complex_scan,
    "ssd_chunk_scan": check_ssd_chunk_scan,
    "ssd_chunk_scan, two samples": check_two_sample_chunk_scan,
    "delta_rule_scan": check_delta_rule_scan,
    "causal_conv1d": check_causal_conv1d,
    "recurrences": check_recurrences,
}


@pytest.mark.slow
@pytest.mark.parametrize(("check", "place"), over_places(CHECKS))
def test_ranks_are_one_process(processes: Processes, check: Callable[..., None], place: Place):
    processes.check(place, check)


def check_wide_numbers(mesh: Mesh) -> None:
    """Numbers of int64 that agree in 32 bits, beside ``cu_seqlens``: other sequences, and the negative ones are padding."""
    random, source = generator(mesh, 0), torch.Generator().manual_seed(3)
    numbers = torch.tensor([-1, 0, 2**32 - 1, 2**32])[torch.randint(0, 4, (1, SEQLEN), generator=source)]
    numbers[:, 8:11] = torch.tensor([0, 2**32, 0])  # the border of two ranks is before step 9
    options = {"seq_idx": numbers, "cu_seqlens": cu_seqlens_of(mesh)}
    steps = random(1, 3, SEQLEN)
    inputs = {"u": steps, "delta": steps, "A": -torch.ones(3, 2, dtype=steps.dtype), "B": steps[:, :2], "C": steps[:, :2]}
    compare(mesh, "selective_scan", inputs, dict.fromkeys(("u", "delta", "B", "C"), 2) | {"seq_idx": 1}, 2, options, None)
    inputs = {"x": random(1, SEQLEN, 3), "weight": random(3, 4)}
    compare(mesh, "causal_conv1d", inputs, {"x": 1, "seq_idx": 1}, 1, options, None)


@pytest.mark.parametrize("place", [param(Place((2,))), param(Place((3,)))])
def test_wide_numbers_of_sequences(processes: Processes, place: Place):
    processes.check(place, check_wide_numbers)


def raises(error: type[Exception], pattern: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=pattern):
        call()


def check_errors(mesh: Mesh) -> None:
    """Every rank raises, and can go on."""
    rank, device = mesh.get_local_rank(), mesh.device_type

    def scan(dim: int, batch: int = 2, dtype: torch.dtype = torch.float32, needs_grad: bool = False, **options: Any) -> Any:
        u = torch.randn(batch, dim, 5 + rank, dtype=dtype, device=device, requires_grad=needs_grad)
        B = torch.randn(batch, 3, 5 + rank, dtype=dtype, device=device)
        A = options.pop("A", -torch.ones(dim, 3, dtype=dtype, device=device))
        return distributed.selective_scan(u, u, A, B, B, group=mesh, **options)

    # Each call is new on both ranks, so that they compare it.
    rule = ("zoh", "bilinear")[rank]
    expected = "same discretization on every rank, got zoh on rank 0 and bilinear on rank 1"
    raises(ValueError, expected, lambda: scan(1, discretization=rule))
    expected = "same reverse on every rank, got False on rank 0 and True on rank 1"
    raises(ValueError, expected, lambda: scan(1, reverse=rank == 1))
    single, double = f"float32 {device}", f"float64 {device}"
    expected = rf"same u on every rank, got {single} \[2, 2, seqlen\] on rank 0 and {single} \[1, 2, seqlen\] on rank 1"
    raises(ValueError, expected, lambda: scan(2, batch=2 - rank))
    expected = rf"got {single} \[2, 3, seqlen\] on rank 0 and {double} \[2, 3, seqlen\] on rank 1"
    raises(ValueError, expected, lambda: scan(3, dtype=(torch.float32, torch.float64)[rank]))
    expected = rf"got {single} \[2, 4, seqlen\], requires_grad on rank 0 and {single} \[2, 4, seqlen\] on rank 1"
    raises(ValueError, expected, lambda: scan(4, needs_grad=rank == 0))
    raises(ValueError, "expected A of shape", lambda: scan(5, A=-torch.ones(5 + rank, 3, device=device)))
    raises(ValueError, "unknown discretization 'cubic'", lambda: scan(6, discretization=("cubic", "euler")[rank]))

    def other() -> Any:
        value = torch.randn(2, 5, 7, device=device)
        return scan(7) if rank == 0 else distributed.linear_scan(value, value, group=mesh)

    raises(ValueError, "expected the same call on every rank, got selective_scan on rank 0 and linear_scan on rank 1", other)
    assert torch.isfinite(scan(1)).all()

    x, weight = torch.randn(1, 5 + rank, 4, device=device), torch.randn(4, 3, device=device)
    convolve = distributed.causal_conv1d

    def packed(*ends: int) -> Callable[[], Any]:
        return lambda: convolve(x, weight, cu_seqlens=torch.tensor([0, 3, *ends], device=device), group=mesh)

    expected = rf"expected weight on {device}(:\d)? \(the device of x\), got meta"
    raises(RuntimeError, expected, lambda: convolve(x, weight.to("meta"), group=mesh))
    outside = dist.GroupMember.NON_GROUP_MEMBER  # as dist.new_group returns it
    raises(ValueError, f"expected a group of this process, rank {dist.get_rank()}", lambda: convolve(x, weight, group=outside))
    packed(11)()
    raises(ValueError, r"sum of the spans' lengths, 5 \+ 6 = 11, got 10", packed(10))
    expected = r"same cu_seqlens on every rank, got 2 sequences that end at 11 \(.*\) on rank 0 and 2 sequences that end at 12"
    raises(ValueError, expected, packed(11 + rank))
    expected = "got 5 sequences that end at 11 .* on rank 0 and 6 sequences that end at 11 .* on rank 1"
    raises(ValueError, expected, packed(*[4, 5][: 1 + rank], 6, 7, 11))
    expected = r"same cu_seqlens on every rank, got 4 sequences that end at 11 \(.*\) on rank 0 and 4 sequences that end at 11"
    raises(ValueError, expected, packed(*[(3, 10), (7, 7)][rank], 11))  # sums weighted by the place agree
    raises(ValueError, "begin at 0 and do not decrease, got 3 and then 2 at place 2", packed(2, 11))
    states = {"initial_state": torch.zeros(1, 4, 2, device=device), "cu_seqlens": torch.tensor([0, 3, 11], device=device)}
    raises(ValueError, "neither initial nor final states with cu_seqlens", lambda: convolve(x, weight, group=mesh, **states))

    heads, matrix = torch.randn(1, 5 + rank, 2, 4, device=device), torch.randn(1, 5 + rank, 1, 3, device=device)
    functions: dict[str, Callable[..., Any]] = {
        "selective_scan": lambda batch, **options: scan(4, batch, **options),
        "ssd_chunk_scan": lambda batch, **options: distributed.ssd_chunk_scan(
            heads.expand(batch, -1, -1, -1), heads[..., 0], -torch.ones(2, device=device), matrix, matrix, group=mesh, **options
        ),
        "causal_conv1d": lambda batch, **options: convolve(x.expand(batch, -1, -1), weight, group=mesh, **options),
    }
    ends = torch.tensor([0, 3, 11], device=device)
    for name, call in functions.items():
        shape = rf"{name}: expected cu_seqlens of shape \(sequences \+ 1,\), got"
        raises(ValueError, rf"{shape} \[1, 3\]", lambda call=call: call(1, cu_seqlens=ends[None]))
        raises(ValueError, rf"{shape} \[\]", lambda call=call: call(1, cu_seqlens=ends[0]))
        raises(ValueError, rf"{shape} \[0\]", lambda call=call: call(1, cu_seqlens=ends[:0]))
        expected = f"{name}: expected cu_seqlens of dtype int32 or int64, got float32"
        raises(RuntimeError, expected, lambda call=call: call(1, cu_seqlens=ends.float()))
        if name != "ssd_chunk_scan":
            expected = f"{name}: expected batch 1 with cu_seqlens, got 2"
            raises(ValueError, expected, lambda call=call: call(2, cu_seqlens=ends))

    expected = "expected a ProcessGroup or a DeviceMesh, got str"
    raises(TypeError, expected, lambda: distributed.linear_scan(x, x, group="cp"))


@pytest.mark.parametrize("place", [param(Place((2,))), param(TWO_GPUS)])
def test_errors_are_raised_on_every_rank(processes: Processes, place: Place):
    processes.check(place, check_errors)


def test_a_rank_without_steps_passes_states_on(processes: Processes):
    processes.check(Place((2,)), check_empty)


def check_empty(mesh: Mesh) -> None:
    a, state = torch.full((1, 0, 2), 0.5), torch.tensor([[3.0, 4.0]])
    _, last_state = distributed.linear_scan(a, a, state, return_last_state=True, group=mesh)
    assert torch.equal(last_state, state)
