"""The backend in FLA's registry: FLA's own functions on these operators."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fla_package import import_fla, without
from test_fla import counted_kernels

from ssm_kernels import delta_rule_scan
from ssm_kernels.compat import fla as functions
from ssm_kernels.integrations import fla as integration
from ssm_kernels.integrations.fla import register, unregister

CLIENT, OPERATOR = "flash-linear-attention", "delta_rule_scan"


@pytest.fixture(scope="module")
def fla():
    modules = ("fla.backends", "fla.ops.gated_delta_rule", "fla.ops.kda", "fla.ops.delta_rule")
    with without("fla"):
        backends, gdn, kda, delta = import_fla(*modules)
        yield SimpleNamespace(backends=backends, gdn=gdn, kda=kda, delta=delta)


@pytest.fixture(autouse=True)
def registered(fla):
    register()
    register()
    yield
    unregister()


def tensors(device, *channels):
    q, k = torch.randn(2, 2, 40, 2, 8, device=device)
    v, beta = torch.randn(2, 40, 4, 6, device=device), torch.rand(2, 40, 4, device=device)
    g = F.logsigmoid(torch.randn(2, 40, 4, *channels, device=device))
    return [x.requires_grad_() for x in (q, k, v, g, beta)]


@pytest.mark.serves("FLA's own functions", model="`chunk_gated_delta_rule`, `chunk_kda`")
@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "chunk_kda"])
def test_chunked_functions(fla, name, device):
    function = fla.kda.chunk_kda if name == "chunk_kda" else fla.gdn.chunk_gated_delta_rule
    given = tensors(device, *([8] if name == "chunk_kda" else []))
    with counted_kernels() as calls:
        o, state = function(*given, output_final_state=True, use_qk_l2norm_in_kernel=True, state_v_first=True)
        (o.sum() + state.sum()).backward()
    assert calls == {"_delta_rule_scan_fwd": 1, "_delta_rule_scan_bwd": 1}
    q, k, v, g, beta = given
    expected = delta_rule_scan(q, k, v, beta, g=g, qk_l2norm=True, return_final_states=True)
    assert torch.equal(o, expected[0]) and torch.equal(state, expected[1])
    assert all(x.grad is not None for x in given)


def test_recurrent_kda(fla):
    """On the CPU: FLA's function reads the device of its tensors, which it needs to have an index, and calls this one."""
    given = [x.detach() for x in tensors("cpu", 8)]
    fwd = sys.modules["fla.ops.kda.fused_recurrent"].fused_recurrent_kda_fwd
    with counted_kernels() as calls:
        o, state = fwd(*(x[:, :3] for x in given), inplace_final_state=False, output_final_state=True)
    assert calls == {"delta_rule_step": 1} and o.shape == (2, 3, 4, 6) and state.shape == (2, 4, 8, 6)
    # A_log, dt_bias, initial_state, scale, output_final_state, inplace_final_state by place.
    continued = fwd(*(x[:, 3:6] for x in given), None, None, state, 0.5, True, False)
    named = {"initial_state": state, "scale": 0.5, "output_final_state": True}
    expected = functions.fused_recurrent_kda(*(x[:, 3:6] for x in given), **named)
    assert all(torch.equal(x, y) for x, y in zip(continued, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "unserved"),
    [
        ("chunk_gated_delta_rule", {"cp_context": object()}),
        ("chunk_kda", {"use_graph": True}),
        ("chunk_kda", {"return_intermediate_states": True}),
        ("fused_recurrent_kda_fwd", {}),
        ("fused_recurrent_kda_fwd", {"inplace_final_state": False, "ssm_state_indices": torch.arange(2)}),
        (
            "fused_recurrent_kda_fwd",
            {"inplace_final_state": False, "v": torch.zeros(1, 2, 4, 6), "beta": torch.zeros(1, 2, 4, 6)},
        ),
        ("chunk_gated_delta_rule_fwd_intra", {}),
    ],
)
def test_other_calls_go_on_to_fla(fla, name, unserved):
    registry = fla.backends._function_registries if name == "chunk_kda" else fla.backends._operation_registries
    key = "kda" if "kda" in name else "gated_delta_rule"
    found = registry[inspect.unwrap(fla.kda.chunk_kda)] if name == "chunk_kda" else registry[key]
    backend = next(each for each in found._get_sorted_backends() if each.backend_type == "ssm_kernels")
    assert backend.is_available() and backend.is_enabled()
    accepted, reason = backend.verify(name, **unserved)
    assert not accepted and reason.startswith("ssm_kernels ")


def test_switches(fla, monkeypatch):
    backend = next(each for each in fla.backends._operation_registries["kda"]._get_sorted_backends() if each.priority == 1)
    monkeypatch.setenv("FLA_SSM_KERNELS", "0")
    assert not backend.is_enabled()
    monkeypatch.undo()
    assert backend.is_enabled()
    unregister()
    assert not backend.is_enabled()


def test_every_import_of_fla_has_the_backend(monkeypatch):
    """Also if a module takes the address of one that is gone."""
    added = []
    monkeypatch.setattr(integration, "_backends", SimpleNamespace)
    monkeypatch.setattr(integration, "_add", lambda backends: added.append("one more"))
    monkeypatch.setattr(integration, "_registered", None)
    for _ in range(5):
        register()
    assert len(added) == 5


def test_without_fla():
    code = """
import sys
sys.modules["fla"] = None
from ssm_kernels.integrations.fla import register
try:
    register()
except ImportError as error:
    print(error)
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=120)
    assert done.stdout == "ssm_kernels.integrations.fla: expected flash-linear-attention, which is not installed\n", done.stderr
