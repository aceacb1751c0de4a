"""Calls of ``ssm_kernels.distributed`` that are invalid on one rank alone: every rank raises at once, and the group goes on."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_pool import Mesh, Place, Processes

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from torch.distributed.tensor.parallel import parallelize_module

from ssm_kernels import distributed, nn
from ssm_kernels.distributed import ContextParallel

SECONDS = 5.0  # the time-out of the group is 30


def arguments_of(name: str, batch: int) -> dict[str, Any]:
    x = torch.rand(batch, 4, 2)
    if name == "selective_scan":
        u = x.transpose(1, 2)
        return {"u": u, "delta": u, "A": -torch.rand(2, 3), "B": torch.rand(batch, 3, 4), "C": torch.rand(batch, 3, 4)}
    if name == "ssd_chunk_scan":
        B = torch.rand(batch, 4, 1, 3)
        return {"x": x[..., None], "dt": x, "A": -torch.rand(2), "B": B, "C": B}
    if name in ("delta_rule_scan", "mlstm_scan"):
        heads, gates = torch.rand(batch, 4, 2, 3), torch.rand(batch, 4, 2)
        sequences = {"q": heads, "k": heads, "v": heads}
        return sequences | ({"beta": gates, "g": -gates} if name == "delta_rule_scan" else {"i": gates, "f": gates})
    if name == "causal_conv1d":
        return {"x": x, "weight": torch.rand(2, 3)}
    if name == "rglru_scan":
        return {"recurrence_gate": x, "input_gate": x, "x": x, "recurrent_param": torch.rand(2)}
    return {"candidate": x, "tau": x, "dt": x} if name == "liquid_scan" else {"gate": x, "candidate": x}


NAMES = (
    *("selective_scan", "ssd_chunk_scan", "delta_rule_scan", "mlstm_scan"),
    *("causal_conv1d", "mingru_scan", "liquid_scan", "rglru_scan"),
)


def damaged(arguments: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Arguments of a call, one of them invalid, by the kind of damage."""
    value = arguments[name]
    # A tau of no axes broadcasts: it is another tau, and valid.
    axes = {} if name == "tau" else {"no axes": {**arguments, name: value.sum()}}
    return axes | {
        "None": {**arguments, name: None},
        "a string": {**arguments, name: "x"},
        "a list": {**arguments, name: [1.0]},
        "an integer dtype": {**arguments, name: value.long()},
        "complex": {**arguments, name: value.to(torch.complex64)},
        "one axis more": {**arguments, name: value[None]},
        "missing": {key: other for key, other in arguments.items() if key != name},
        "an unknown keyword": {**arguments, "unknown": 1},
        "an unknown exchange": {**arguments, "exchange": "none"},
        "seqlens of a wrong type": {**arguments, "cu_seqlens": 3},
    }


def raises_everywhere(mesh: Mesh, bad_rank: int, call: Callable[[], Any], what: str) -> None:
    """``call`` is invalid on ``bad_rank`` alone."""
    start = time.monotonic()
    with pytest.raises((TypeError, ValueError, RuntimeError, AttributeError)) as raised:
        call()
    assert time.monotonic() - start < SECONDS, what
    if mesh.get_local_rank() != bad_rank:
        assert f"rank {bad_rank} of the group raised: " in str(raised.value), (what, str(raised.value))


def check_functions(mesh: Mesh, bad_rank: int) -> None:
    group = mesh.get_group()
    batch = 11 + bad_rank  # on which the ranks have not agreed
    for name in NAMES:
        function, arguments = getattr(distributed, name), arguments_of(name, batch)
        for argument in [*arguments][:2]:
            for what, bad in damaged(arguments, argument).items():
                given = bad if mesh.get_local_rank() == bad_rank else arguments
                raises_everywhere(
                    mesh, bad_rank, functools.partial(function, **given, group=group), f"{name}, {argument}: {what}"
                )
        # The group is as good as new.
        function(**arguments, group=group)


def check_layers(mesh: Mesh, bad_rank: int) -> None:
    makers: dict[str, Callable[[], torch.nn.Module]] = {
        "Mamba": lambda: nn.Mamba(4, 4),
        "Mamba2": lambda: nn.Mamba2(4, 3, headdim=2),
        "MinGRU": lambda: nn.MinGRU(4, 4),
        "GatedDeltaNet": lambda: nn.GatedDeltaNet(4, head_dim=2, num_heads=2),
        "MLSTM": lambda: nn.MLSTM(4, num_heads=2),
        "Mamba3": lambda: nn.Mamba3(4, 4, headdim=2),
    }
    for name, make in makers.items():
        x = torch.rand(4, 1, 4) if name == "MinGRU" else torch.rand(1, 4, 4)
        for exchange in ("chain", "summaries"):
            layer: Any = make()
            layer = parallelize_module(layer, mesh, ContextParallel(exchange=exchange))
            for bad in (None, x[..., :3], x.long(), "x", x.to(torch.complex64)):
                given = bad if mesh.get_local_rank() == bad_rank else x
                raises_everywhere(mesh, bad_rank, functools.partial(layer, given), f"{name}: {type(bad)}")
            layer(x)


@pytest.mark.parametrize("check", [check_functions, check_layers])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_calls_that_are_invalid_on_one_rank(processes: Processes, bad_rank: int, check: Callable[..., None]):
    processes.check(Place((2,)), check, bad_rank)


def test_one_of_three_ranks(processes: Processes):
    processes.check(Place((3,)), check_functions, 1)
