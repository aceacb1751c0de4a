"""ssm_kernels.compat: the modules mamba_ssm and causal_conv1d, installed, used, and taken back."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers import COMPAT_VERSION

import ssm_kernels
from ssm_kernels import compat
from ssm_kernels.compat.__main__ import main
from ssm_kernels.compat._modules import MODULES, VERSIONS

CLIENT = "mamba_ssm"
CLIENT_VERSION = COMPAT_VERSION
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def only_ours():
    """Hides real packages of these names, and takes back what a test leaves installed."""
    compat.uninstall()
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in VERSIONS}
    yield
    compat.uninstall()
    sys.modules.update(hidden)


def run_python(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, **options)


@pytest.mark.serves("imports")
def test_every_name_is_imported_from_its_module():
    with compat.installed():
        for name, exports in MODULES.items():
            module = importlib.import_module(name)
            assert module.__name__ == name and importlib.util.find_spec(name).name == name
            for attribute, value in exports.items():
                assert getattr(module, attribute) is value
        from mamba_ssm import Mamba
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        assert issubclass(Mamba, ssm_kernels.nn.Mamba) and isinstance(ssm_kernels.nn.Mamba(8), Mamba)
        assert mamba_chunk_scan_combined is compat.ssd.mamba_chunk_scan_combined


@pytest.mark.serves("versions that clients compare")
def test_versions():
    version = pytest.importorskip("packaging.version").parse
    with compat.installed():
        for root, least in (("mamba_ssm", "2.2.6.post3"), ("causal_conv1d", "1.6.0")):
            assert version(importlib.import_module(root).__version__) >= version(least)
            assert version(importlib.metadata.version(root)) >= version(least)
            assert importlib.metadata.version(root.replace("_", "-")) == VERSIONS[root]


def test_a_call_runs_our_operator():
    with compat.installed():
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
    u, delta = torch.randn(2, 3, 5), torch.rand(2, 3, 5)
    A, B, C = -torch.rand(3, 4), torch.randn(2, 4, 5), torch.randn(2, 4, 5)
    expected = ssm_kernels.selective_scan(u, delta, A, B, C, delta_softplus=True)
    assert torch.equal(selective_scan_fn(u, delta, A, B, C, None, None, None, True), expected)


def test_uninstall_leaves_no_trace():
    before = dict(sys.modules), list(sys.meta_path)
    compat.install()
    compat.uninstall()
    assert (dict(sys.modules), list(sys.meta_path)) == before
    assert not [name for name in sys.modules if name.partition(".")[0] in VERSIONS]
    if importlib.util.find_spec("causal_conv1d") is None:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("causal_conv1d")


def test_installing_twice_and_uninstalling_twice():
    compat.install()
    module = sys.modules["mamba_ssm"]
    compat.install()
    assert sys.modules["mamba_ssm"] is module and sys.meta_path.count(compat._FINDER) == 1
    compat.uninstall()
    compat.uninstall()
    assert "mamba_ssm" not in sys.modules
    compat.install()
    assert importlib.import_module("mamba_ssm") is not module


def test_a_context_leaves_an_installation_as_it_was():
    compat.install()
    with compat.installed(), compat.installed():
        pass
    assert "mamba_ssm" in sys.modules
    compat.uninstall()
    with pytest.raises(KeyError, match="mine"), compat.installed():
        raise KeyError("mine")
    assert "mamba_ssm" not in sys.modules


def test_a_context_keeps_the_modules_until_its_end():
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:  # as two threads may interleave them
        first.enter_context(compat.installed())
        second.enter_context(compat.installed())
        first.close()
        compat.install()
        compat.uninstall()
        assert "mamba_ssm" in sys.modules
    assert "mamba_ssm" not in sys.modules
    with compat.installed():
        compat.install()
    assert "mamba_ssm" in sys.modules


@pytest.mark.parametrize("name", ["mamba_ssm", "causal_conv1d", "mamba_ssm.ops"])
def test_a_package_that_is_imported_already_stays(name):
    other = ModuleType(name)
    sys.modules[name] = other
    try:
        with pytest.raises(RuntimeError, match=f"expected {name.split('.')[0]} not to be imported yet, got {name} from an"):
            compat.install()
        assert sys.modules[name] is other
        assert not [each for each in sys.modules if each.partition(".")[0] in VERSIONS and each != name]
    finally:
        del sys.modules[name]


def test_a_blocked_package_is_refused_and_stays_blocked(monkeypatch):
    monkeypatch.setitem(sys.modules, "causal_conv1d", None)
    with pytest.raises(RuntimeError, match=r"to be blocked, got None in sys\.modules for causal_conv1d: delete"):
        compat.install()
    assert sys.modules["causal_conv1d"] is None and "mamba_ssm" not in sys.modules


def test_uninstall_keeps_a_module_of_somebody_else():
    compat.install()
    other = sys.modules["mamba_ssm.ops"] = ModuleType("mamba_ssm.ops")
    compat.uninstall()
    assert sys.modules.pop("mamba_ssm.ops") is other


def test_an_installed_package_is_hidden_and_comes_back(tmp_path, monkeypatch):
    (tmp_path / "causal_conv1d").mkdir()
    (tmp_path / "causal_conv1d" / "__init__.py").write_text("is_real = True\n")
    (tmp_path / "causal_conv1d" / "extras.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with compat.installed():
        assert not hasattr(importlib.import_module("causal_conv1d"), "is_real")
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("causal_conv1d.extras")
    assert importlib.import_module("causal_conv1d").is_real
    del sys.modules["causal_conv1d"]


def test_a_missing_submodule_is_named():
    with (
        compat.installed(),
        pytest.raises(ModuleNotFoundError, match=r"has no module mamba_ssm\.nothing, it has mamba_ssm.") as error,
    ):
        importlib.import_module("mamba_ssm.nothing")
    assert error.value.name == "mamba_ssm.nothing"


def test_a_missing_submodule_has_no_spec():
    with compat.installed():
        assert importlib.util.find_spec("mamba_ssm.modules.ssd_minimal") is None
        assert compat._FINDER.find_spec("mamba_ssm.modules.ssd_minimal") is None


def test_a_missing_name_is_named():
    with compat.installed():
        module = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
        with pytest.raises(
            AttributeError, match=r"ssd_combined of ssm_kernels\.compat has no mamba_chunk_scan, it has mamba_chunk_"
        ):
            module.mamba_chunk_scan  # noqa: B018
        assert not hasattr(module, "mamba_chunk_scan") and getattr(module, "mamba_chunk_scan", None) is None
        with pytest.raises(ImportError, match=r"'Mamba4' from 'mamba_ssm' \(<ssm_kernels.compat, which has Mamba, Mamba2, "):
            from mamba_ssm import Mamba4  # noqa: F401
        with pytest.raises(ImportError, match=r"'ssd_bmm' from 'mamba_ssm.ops.triton' \(<.*has ssd_combined, layer_norm, "):
            from mamba_ssm.ops.triton import ssd_bmm  # noqa: F401


# Modules of 2.3.2 and 1.7 that are not served, and names in served modules.
MISSING_MODULES = {
    "mamba_ssm": "ops.cute utils.determinism modules.ssd_minimal",
    "mamba_ssm.ops.triton": "k_activations softplus ssd_bmm ssd_chunk_scan ssd_chunk_state ssd_state_passing",
}
MISSING_NAMES = {
    "mamba_ssm": "Mamba4",
    "mamba_ssm.ops.triton.ssd_combined": "mamba_chunk_scan ssd_selective_scan mamba_conv1d_scan_ref",
    "mamba_ssm.ops.triton.layer_norm": "layer_norm_ref rms_norm_ref",
    "mamba_ssm.utils.generation": "capture_graph",
    "mamba_ssm.distributed.tensor_parallel": "VocabParallelEmbedding ParallelEmbeddings parallel_linear_func",
    "mamba_ssm.distributed.distributed_utils": "all_gather sync_shared_params",
    "causal_conv1d.causal_conv1d_varlen": "causal_conv1d_varlen_states_ref",
}


def test_every_missing_name_says_what_there_is():
    with compat.installed():
        for package, names in MISSING_MODULES.items():
            for name in names.split():
                with pytest.raises(ModuleNotFoundError, match=f"compat has no module {package}.{name}, it has {package}"):
                    importlib.import_module(f"{package}.{name}")
        for module, names in MISSING_NAMES.items():
            for name in names.split():
                with pytest.raises(ImportError, match=f"'{name}' from '{module}' .<ssm_kernels.compat, which has "):
                    exec(f"from {module} import {name}", {})


def test_names_of_what_is_not_supported_refuse_to_be_used():
    with compat.installed():
        from mamba_ssm.distributed.distributed_utils import all_reduce, reduce_scatter
        from mamba_ssm.distributed.tensor_parallel import ColumnParallelLinear, RowParallelLinear
        from mamba_ssm.modules.mha import MHA
    for name in (all_reduce, reduce_scatter, ColumnParallelLinear, RowParallelLinear, MHA):
        with pytest.raises(NotImplementedError, match=f"^{name.__name__}: ssm_kernels.compat does not support (att|tensor p)"):
            name(8, 8)


def test_decorators_of_autograd_functions():
    with compat.installed():
        from mamba_ssm.utils.torch import custom_bwd, custom_fwd

    class Double(torch.autograd.Function):
        @staticmethod
        @custom_fwd(cast_inputs=torch.float32)
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        @custom_bwd
        def backward(ctx, grad):
            return 2 * grad

    x = torch.ones(3, requires_grad=True)
    Double.apply(x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_a_module_that_left_sys_modules_comes_back_and_reloads():
    with compat.installed():
        module = sys.modules.pop("mamba_ssm.ops.triton.ssd_combined")
        assert importlib.import_module("mamba_ssm.ops.triton.ssd_combined") is module
        assert importlib.reload(module) is module


def test_threads_that_install_and_uninstall():
    errors = []

    def work():
        try:
            for _ in range(50):
                compat.install()
                compat.uninstall()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and compat._FINDER not in sys.meta_path
    assert not [name for name in sys.modules if name.partition(".")[0] in VERSIONS]


def test_layers_are_pickled_without_the_installation():
    with compat.installed():
        from mamba_ssm.modules.mamba_simple import Mamba

        data = pickle.dumps(Mamba(8))
    assert isinstance(pickle.loads(data), ssm_kernels.nn.Mamba)


SCRIPT = """
    import multiprocessing
    import sys
    import torch
    from mamba_ssm import Mamba2
    from causal_conv1d import causal_conv1d_fn

    def work(epochs: int = 3):
        assert work.__annotations__["epochs"] is int
        print(__name__, Mamba2.__module__, sys.argv[1:], list(causal_conv1d_fn(torch.randn(1, 4, 6), torch.randn(4, 3)).shape))

    if __name__ == "__main__":
        work()
        sys.stdout.flush()
        process = multiprocessing.get_context("spawn").Process(target=work)
        process.start()
        process.join()
        sys.exit(process.exitcode)
"""


@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_a_program_runs_unchanged_and_spawns_processes(as_module, tmp_path):
    program = tmp_path / "program" / "__main__.py"
    program.parent.mkdir()
    (program.parent / "layers.py").write_text("from mamba_ssm import Mamba2\n")
    source = textwrap.dedent(SCRIPT)
    program.write_text(source.replace("from mamba_ssm import", "from .layers import") if as_module else source)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    target = ["-m", "program"] if as_module else [str(program)]
    result = run_python("-m", "ssm_kernels.compat", *target, "--epochs", "3", env=environment)
    assert result.returncode == 0, result.stderr
    rest = "ssm_kernels.nn.mamba2 ['--epochs', '3'] [1, 4, 6]"
    assert result.stdout.splitlines() == [f"__main__ {rest}", f"__mp_main__ {rest}"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "expected a script, or -m and a module, got nothing"),
        (["-c", "pass"], 2, "expected a script, or -m and a module, got -c"),
        (["missing.py"], 1, "expected a script, got missing.py, which does not exist"),
        (["--only", "mamba", "-"], 2, "expected a script, or -m and a module, got -"),
        (["--only"], 2, "expected a script, or -m and a module, got nothing"),
        (["--served"], 2, "expected a script, or -m and a module, got nothing"),
        (["-m", "missing"], 1, "expected a module that Python can run, got missing"),
        (["-m", "missing.part"], 1, "expected a module that Python can run, got missing.part"),
    ],
    ids=["nothing", "code", "script", "only code", "only", "served", "module", "submodule"],
)
def test_the_command_without_a_program_says_how_to_use_it(arguments, code, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compat", *arguments])
    monkeypatch.setenv("SSM_KERNELS_COMPAT_MAIN", "")
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    with pytest.raises(SystemExit) as stop:
        main()
    usage = capsys.readouterr().err
    message = f"python -m ssm_kernels.compat: {message}"
    if code == 2:
        assert (
            stop.value.code == 2
            and "python -m ssm_kernels.compat [--only PARTS] [--served] script.py" in usage
            and message in usage
        )
    else:
        assert stop.value.code == message  # Python prints it and exits with 1


def test_the_command_installs_parts_and_prints_the_account(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import multiprocessing
        import sys
        import selective_scan_cuda

        def work():
            try:
                import mamba_ssm
            except ImportError:
                print(__name__, selective_scan_cuda.fwd.__module__, sys.argv[1:], flush=True)

        if __name__ == "__main__":
            work()
            process = multiprocessing.get_context("spawn").Process(target=work)
            process.start()
            process.join()
        """)
    )
    command = ["-m", "ssm_kernels.compat", "--served", "--only", "selective_scan_cuda,causal_conv1d_cuda"]
    result = run_python(*command, str(script), "--only", "x")
    rest = "ssm_kernels.compat.scan_extensions ['--only', 'x']"
    assert result.stdout.splitlines() == [f"__main__ {rest}", f"__mp_main__ {rest}"], result.stderr
    assert "installed: selective_scan_cuda, causal_conv1d_cuda; " in result.stderr
    assert (
        f"missing    mamba_ssm: not among the installed parts, so left to other packages; asked by __main__ ({script}:"
        in result.stderr
    )


def test_the_command_names_parts_that_do_not_exist(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compat", "--only", "mamba_sm", __file__])
    with pytest.raises(
        SystemExit, match=r"^python -m ssm_kernels\.compat --only: expected parts out of mamba_ssm, .* got mamba_sm$"
    ):
        main()
