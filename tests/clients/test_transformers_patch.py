"""The integration of transformers replaces names, and puts back those that it found."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="the tests patch modules of transformers, in the extra [clients]")

import transformers
from transformers_models import DELTA_MODELS, MODELS, counting, tokens

from ssm_kernels.integrations import transformers as integration
from ssm_kernels.integrations._transformers_functions import DELTA_RULES
from ssm_kernels.integrations._transformers_mixers import CalledProjection
from ssm_kernels.integrations.transformers import patch, patched, served, unpatch

CLIENT = "transformers"
ROOT = Path(__file__).resolve().parents[2]
MODELING = Path(transformers.__file__).parent / "models"
MAMBA2 = "transformers.models.mamba2.modeling_mamba2"


@pytest.fixture(autouse=True)
def unpatched():
    unpatch()
    yield
    unpatch()


def contents() -> dict[str, dict[str, Any]]:
    return {name: dict(vars(module)) for name, module in sys.modules.items() if ".modeling_" in name}


def changed(before: dict[str, dict[str, Any]]) -> set[tuple[str, str]]:
    return {
        (name, attribute)
        for name, attributes in before.items()
        for attribute, value in vars(sys.modules[name]).items()
        if attributes.get(attribute) is not value
    }


def runs_on_kernels() -> bool:
    net = MODELS["Mamba2"].make()
    with torch.no_grad(), counting() as calls:
        net(tokens(1, 5, "cpu"), use_cache=False)
    assert calls in ({}, MODELS["Mamba2"].calls(1))
    return bool(calls)


def test_a_context_that_waits_for_another_patch_leaves_it() -> None:
    def work() -> None:
        with patched():
            pass

    thread = threading.Thread(target=work)
    with integration._lock:
        thread.start()
        time.sleep(0.2)  # until the thread waits for the lock
        patch()
    thread.join()
    assert served().active


def test_a_context_does_not_end_those_of_other_threads() -> None:
    first, second = patched(), patched()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # in the order in which two threads may end theirs
    assert served().active and runs_on_kernels()
    unpatch()
    assert served().active
    second.__exit__(None, None, None)
    assert not served().active and not runs_on_kernels()


def test_patch_in_a_context_outlasts_it() -> None:
    with patched():
        patch()
    assert served().active
    assert not unpatch().active


def test_an_error_while_it_patches_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mamba", "mamba2"):
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    before, finders, serve, modules = contents(), list(sys.meta_path), integration._State.serve, []

    def fail_later(self: Any, module: ModuleType) -> None:
        modules.append(module)
        if len(modules) == 2:
            raise KeyError
        serve(self, module)

    with monkeypatch.context() as context:
        context.setattr(integration._State, "serve", fail_later)
        with pytest.raises(KeyError):
            patch()
    assert not served().active and not served().modules
    assert not changed(before) and sys.meta_path == finders
    patch()
    assert runs_on_kernels()


@pytest.mark.parametrize("model", ["Mamba", "Mamba2"])
def test_models_on_the_meta_device(model: str) -> None:
    net = MODELS[model].make().to("meta")
    with patched(), counting() as calls:
        logits = net(tokens(1, 5, "cpu").to("meta"), use_cache=False).logits
    assert logits.is_meta and calls == MODELS[model].calls(1)


def test_a_second_patch_changes_nothing_and_unpatch_restores_all() -> None:
    importlib.import_module(MAMBA2)
    before = contents()
    first = patch()
    assert first.active and MAMBA2 in first.modules
    # Classes in modules have entries of their own.
    names = {(module, name) for module, names in first.modules.items() for name in names if module in sys.modules}
    fused = {(module, name) for module, name in changed(before) if re.search("inner_fn|split_conv1d", name)}
    assert changed(before) == names | fused
    once = contents()
    assert patch() == first
    assert not changed(once)
    assert runs_on_kernels()
    last = unpatch()
    assert not last.active and not last.modules
    assert not changed(before)
    assert unpatch() == last
    assert not runs_on_kernels()
    patch()
    assert runs_on_kernels()


def test_nested_contexts_restore_what_was_before_them() -> None:
    with patched():
        with patched() as inner:
            assert inner.active
        assert served().active and runs_on_kernels()
    assert not served().active and not runs_on_kernels()
    patch()
    with patched():
        pass
    assert served().active
    with pytest.raises(KeyError), patched():
        unpatch()
        raise KeyError
    assert served().active is False


def test_a_context_is_left_on_an_exception() -> None:
    with pytest.raises(KeyError), patched():
        raise KeyError
    assert not served().active


def test_names_copied_from_a_modeling_module_follow() -> None:
    modeling: Any = importlib.import_module(MAMBA2)
    before, after = ModuleType("imports_before"), ModuleType("imports_after")
    original = modeling.mamba2_chunk_scan
    before.scan = original  # type: ignore[attr-defined]
    sys.modules |= {"imports_before": before, "imports_after": after}
    try:
        with patched() as report:
            after.scan = modeling.mamba2_chunk_scan  # type: ignore[attr-defined]
            assert before.scan is modeling.mamba2_chunk_scan is not original  # type: ignore[attr-defined]
            assert report.modules["imports_before"] == {"scan": "mamba_chunk_scan_combined"}
        assert before.scan is after.scan is original  # type: ignore[attr-defined]
    finally:
        del sys.modules["imports_before"], sys.modules["imports_after"]


def test_unpatch_keeps_what_others_have_assigned_since() -> None:
    modeling: Any = importlib.import_module(MAMBA2)
    original, other = modeling.mamba2_chunk_scan, object()
    try:
        with patched():
            modeling.mamba2_chunk_scan = other
        assert modeling.mamba2_chunk_scan is other
    finally:
        modeling.mamba2_chunk_scan = original


@pytest.mark.serves("causal_conv1d_fn", model="every model that calls it")
def test_every_modeling_file_that_asks_for_the_kernels_is_served() -> None:
    marked = re.compile(r'^@use_kernel_func_from_hub_with_fallback\(\s*"(\w+)"', re.MULTILINE)
    asked = {
        f"transformers.models.{path.parent.name}.{path.stem}": set(marked.findall(path.read_text()))
        for path in MODELING.glob("*/modeling_*.py")
        if "causal_conv1d" in path.read_text()
    }
    asked = {name: kernels for name, kernels in asked.items() if kernels}
    assert len(asked) >= 20
    with patched():
        for name in asked:
            importlib.import_module(name)
        report = served()
    ours = {
        "causal_conv1d_fn",
        "causal_conv1d_update",
        "selective_scan_fn",
        "selective_state_update",
        "mamba_chunk_scan_combined",
        *DELTA_RULES,
    }
    assert sum(not kernels.isdisjoint(DELTA_RULES) for kernels in asked.values()) == len(DELTA_MODELS)
    for name, kernels in asked.items():
        assert set(report.modules[name].values()) == kernels & ours, name
    assert "modeling_lfm2: causal_conv1d_update, causal_conv1d_fn" in str(report)


def run(code: str) -> str:
    path = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("clients", "lib"))]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path}\n{code}"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_model_imported_after_the_patch() -> None:
    """In a process of its own: the module must not be imported yet."""
    out = run(f"""
from ssm_kernels.integrations.transformers import patch, served, unpatch
assert not patch().modules
assert "{MAMBA2}" not in sys.modules
import importlib.util
found = importlib.util.find_spec("{MAMBA2}")
assert "class Mamba2Mixer" in found.loader.get_source(found.name)
from transformers_models import DELTA_MODULES, MODELS, counting, tokens
of = MODELS["Mamba2"]
net, ids = of.make(), tokens(1, 9, "cpu")
with counting() as calls:
    ours = net(ids, use_cache=False).logits
assert calls == of.calls(1), calls
module = sys.modules["{MAMBA2}"]
assert {{*served().modules}} == {{"{MAMBA2}", *DELTA_MODULES}}
assert type(module.__spec__.loader).__module__ != "ssm_kernels.integrations.transformers"
assert module.__loader__ is module.__spec__.loader
import inspect
assert "class Mamba2Mixer" in inspect.getsource(module)
unpatch()
assert not any("ssm_kernels" in type(finder).__module__ for finder in sys.meta_path)
with counting() as calls:
    own = net(ids, use_cache=False).logits
assert not calls
assert (ours - own).norm() < 1e-5 * own.norm()
print(served())
""")
    assert out == f"transformers {transformers.__version__}: not patched, 0 imported modules served\n"


def test_a_missing_transformers() -> None:
    out = run("""
sys.modules["transformers"] = None
from ssm_kernels.integrations.transformers import patch, served
try:
    patch()
except ImportError as error:
    print(error)
assert not served().active
""")
    assert out == "ssm_kernels.integrations.transformers: expected transformers, which is not installed\n"


def test_the_weight_of_a_called_projection_takes_one_product_only() -> None:
    layer, x = torch.nn.Linear(3, 3), torch.randn(2, 3, 4)
    weight = CalledProjection(layer).weight
    torch.testing.assert_close(weight @ x, layer.weight @ x)
    for call in (lambda: x.mT @ weight, lambda: torch.nn.functional.linear(x.mT, weight), lambda: x * weight):
        with pytest.raises(TypeError):
            call()


@pytest.mark.parametrize("version", ["4.56.2", "5.14.1"])
def test_an_unserved_version(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("transformers"), "__version__", version)
    hub = importlib.import_module("transformers.integrations.hub_kernels")
    monkeypatch.delattr(hub, "use_kernel_func_from_hub_with_fallback")
    with pytest.raises(RuntimeError, match=f"expected transformers 5.17 or newer, or 4.57, got {re.escape(version)}"):
        patch()
    assert not served().active
