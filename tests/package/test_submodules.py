"""Submodules that are imported on use, and what completion of names shows."""

from __future__ import annotations

import ast
import graphlib
import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import ssm_kernels
from ssm_kernels import ops
from ssm_kernels._earlier_modules import EARLIER_MODULES
from ssm_kernels.ops import recurrences

# Modules that `import ssm_kernels` must not load, because it would take longer, and uses of each.
ON_USE = """
import sys
import ssm_kernels
names = ("compat", "distributed", "integrations")
assert not [name for name in names if f"ssm_kernels.{name}" in sys.modules]
assert "torch.distributed.tensor.parallel" not in sys.modules
assert {*names} <= {*dir(ssm_kernels)}
assert callable(ssm_kernels.distributed.ContextParallel)
assert callable(ssm_kernels.compat.install)
assert callable(ssm_kernels.integrations.flops.register)
assert not hasattr(ssm_kernels.integrations, "diffusers")
# The package that an integration needs is missing.
sys.modules["torch.distributed.tensor.experimental"] = None
assert not hasattr(ssm_kernels.integrations, "dtensor")
try:
    import ssm_kernels.integrations.dtensor
except ImportError as error:
    assert error.name == "torch.distributed.tensor.experimental", error
else:
    raise AssertionError("imported without what it needs")
"""


def test_submodules_are_imported_on_use():
    done = subprocess.run([sys.executable, "-c", ON_USE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_modules_of_distributed_import_each_other_without_a_cycle():
    """Imports inside of functions count, because they would only hide a cycle."""
    folder = Path(importlib.import_module("ssm_kernels.distributed").__file__).parent
    imports = {path.stem: set() for path in folder.glob("*.py")}
    for name, imported in imports.items():
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                imported |= {node.module} if node.module else {alias.name for alias in node.names}
    assert len(imports) > 10
    assert imports["context_parallel"] & imports.keys()
    graphlib.TopologicalSorter(imports).prepare()  # raises a CycleError


def test_distributed_checkpoints_are_found_by_the_earlier_path():
    from ssm_kernels import distributed

    module = importlib.import_module("ssm_kernels.distributed.checkpoints")
    assert module is distributed.checkpoints
    assert module.get_state_dict is distributed.get_state_dict


def test_unknown_names_raise_attribute_errors():
    for module in (ssm_kernels, ssm_kernels.integrations):
        with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'distribute'"):
            _ = module.distribute
        with pytest.raises(ImportError, match="cannot import name 'distribute'"):
            exec(f"from {module.__name__} import distribute")


@pytest.mark.parametrize("name", ["", "nn", "ops", "models", "distributed", "compat", "integrations", "reference"])
def test_completion_shows_public_names(name):
    module = importlib.import_module(f"ssm_kernels.{name}".rstrip("."))
    shown = {name for name in dir(module) if not name.startswith("__")}
    modules = {
        "ssm_kernels": {"compat", "distributed", "integrations"},
        "ssm_kernels.compat": {"causal_conv1d", "fla", "layer_norm", "mamba3", "norms", "selective_scan", "ssd"},
    }
    assert shown == {name for name in module.__all__ if not name.startswith("__")} | modules.get(module.__name__, set())
    assert {"__doc__", "__file__", "__all__"} <= {*dir(module)}


# Public names of the modules at their earlier paths.
EARLIER_NAMES = {
    "convolutions": "causal_conv1d causal_conv1d_update",
    "minimal_recurrences": "elu_gru_scan mingru_scan minlstm_scan",
    "norms": "add_layer_norm add_rms_norm layer_norm_gated rms_norm_gated",
    "recurrence_steps": "diag_linear_step elu_gru_step hgrn_step linear_step liquid_step mingru_step minlstm_step rglru_step",
    "recurrences": (
        "diag_linear_scan elu_gru_scan hgrn_scan linear_scan liquid_scan mingru_scan minlstm_scan rglru_scan "
        "diag_linear_step elu_gru_step hgrn_step linear_step liquid_step mingru_step minlstm_step rglru_step"
    ),
    "reference_convolution": "causal_conv1d causal_conv1d_update",
    "reference_discretizations": "ALIASES DISCRETIZATIONS Discretization coefficients decaying phi1",
    "reference_norms": "GATE_ACTIVATIONS add_layer_norm add_rms_norm layer_norm_gated rms_norm_gated",
    "reference_recurrences": (
        "CANDIDATE_ACTIVATIONS RECURRENCES diag_linear_scan elu_gru_scan hgrn_scan linear_scan liquid_scan mingru_scan "
        "minlstm_scan rglru_scan"
    ),
    "reference_sequences": "at_positions of_sequences promoted_dtype resets_of step_sizes",
    "reference_ssd": "ssd_chunk_scan",
    "reference_summaries": "initial_gradient recurrence_summary selective_scan_summary ssd_chunk_scan_summary",
    "ssd": "ssd_chunk_scan",
    "summaries": (
        "diag_linear_scan_summary elu_gru_scan_summary hgrn_scan_summary linear_scan_summary liquid_scan_summary "
        "mingru_scan_summary minlstm_scan_summary rglru_scan_summary selective_scan_summary ssd_chunk_scan_summary"
    ),
}


def test_earlier_paths_are_the_modules_of_today():
    for earlier, path in EARLIER_MODULES.items():
        module = importlib.import_module(f"ssm_kernels.{path}")
        assert importlib.import_module(f"ssm_kernels.{earlier}") is module and getattr(ssm_kernels, earlier) is module, earlier
        assert [name for name in EARLIER_NAMES[earlier].split() if not hasattr(module, name)] == [], earlier
    for package in (ops, ssm_kernels.reference):
        assert callable(package.selective_scan) and callable(package.selective_state_update)


def test_earlier_paths_are_silent():
    code = """
import sys
for earlier in sys.argv[1:]:
    exec(f"import ssm_kernels.{earlier}")
    assert sys.modules[f"ssm_kernels.{earlier}"] is getattr(ssm_kernels, earlier)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code, *EARLIER_MODULES], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_recurrences_are_found_by_every_path():
    """A pickle holds the path of a function: that of the module which defines it, or of one that did."""
    for name in recurrences.__all__:
        function = getattr(ssm_kernels, name)
        assert pickle.loads(f"cssm_kernels.recurrences\n{name}\n.".encode()) is function, name
        assert pickle.loads(pickle.dumps(function)) is function, name
