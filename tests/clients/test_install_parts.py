"""ssm_kernels.compat: installation in parts beside a project's own mamba_ssm, and the account of what was asked for."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import warnings
from types import ModuleType

import pytest

from ssm_kernels import compat
from ssm_kernels.compat._modules import PARTS

KERNELS = ["selective_scan_cuda", "causal_conv1d_cuda"]


@pytest.fixture(autouse=True)
def only_ours():
    """Hides real packages of these names and the fork, and takes back what a test leaves installed."""
    compat.uninstall()
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in PARTS}
    yield
    compat.uninstall()
    for name in [*sys.modules]:
        if name.partition(".")[0] in (*PARTS, "client"):
            del sys.modules[name]
    sys.modules.update(hidden)


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """A project's own copy of mamba_ssm, as Vim has one, and a module of the project."""
    package = tmp_path / "mamba_ssm"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import selective_scan_cuda\n"
        "try:\n    import causal_conv1d_cuda\nexcept ImportError:\n    causal_conv1d_cuda = None\n"
        "try:\n    from causal_conv1d import causal_conv1d_fn\nexcept ImportError:\n    causal_conv1d_fn = None\n"
    )
    (tmp_path / "client.py").write_text(
        "try:\n    from mamba_ssm.ops.triton.layernorm import RMSNorm\nexcept ImportError:\n    RMSNorm = None\n"
        "try:\n    from mamba_ssm.modules.mha import MHA, Attention\nexcept ImportError:\n    MHA = None\n"
        "try:\n    import mamba_ssm.ops.cute\nexcept ImportError:\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return package


def test_extension_modules_serve_a_fork_that_stays(fork):
    compat.install(only=KERNELS)
    own = importlib.import_module("mamba_ssm")
    assert own.__file__ == str(fork / "__init__.py")
    assert own.selective_scan_cuda.fwd is compat.scan_extensions.selective_scan_fwd
    assert own.causal_conv1d_cuda is sys.modules["causal_conv1d_cuda"] and own.causal_conv1d_fn is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("mamba_ssm")
    assert importlib.util.find_spec("selective_scan_cuda_core") is None
    assert compat.served().installed == tuple(KERNELS)
    compat.uninstall()
    assert not {*KERNELS} & {*sys.modules} and sys.modules["mamba_ssm"] is own


@pytest.mark.parametrize("first", [None, KERNELS, ["mamba_ssm"]], ids=["all", "kernels", "package"])
@pytest.mark.parametrize("second", [None, KERNELS, ["mamba_ssm"]], ids=["all", "kernels", "package"])
def test_selections_that_contradict_each_other(first, second):
    compat.install(only=first)
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in PARTS}
    if first == second:
        compat.install(only=None if second is None else second[::-1])
        with compat.installed(only=second):
            pass
    else:
        for call in (compat.install, lambda only: compat.installed(only).__enter__()):
            with pytest.raises(
                RuntimeError, match=r"expected the parts that are installed already, .*: call uninstall\(\) first"
            ):
                call(only=second)
    assert before == {name: module for name, module in sys.modules.items() if name.partition(".")[0] in PARTS}
    compat.uninstall()
    compat.install(only=second)
    assert compat.served().installed == (PARTS if second is None else tuple(second))


def test_contexts_that_contradict_each_other():
    with compat.installed(only=KERNELS):
        with pytest.raises(RuntimeError, match=r"compat.install: .* got mamba_ssm: end the contexts of installed\(\) first"):
            compat.install(only=["mamba_ssm"])
        with compat.installed(only=KERNELS[::-1]):
            pass
        assert "selective_scan_cuda" in sys.modules
    assert compat.served().installed == ()


@pytest.mark.parametrize(
    ("only", "error", "message"),
    [
        (["selective_scan"], ValueError, "expected parts out of selective_scan_cuda, .* in only, got selective_scan$"),
        (["causal-conv1d"], ValueError, "expected parts out of causal_conv1d, causal_conv1d_cuda, .* got causal-conv1d$"),
        (
            ["mamba_ssm.ops"],
            ValueError,
            "expected parts out of .* got mamba_ssm.ops; mamba_ssm.ops comes with the part mamba_ssm$",
        ),
        ([], ValueError, "expected at least one part in only, got none; the parts are mamba_ssm, causal_conv1d, "),
        (
            "mamba_ssm",
            TypeError,
            r'expected only to be a list of strings or None, got the string "mamba_ssm": write \["mamba_ssm"\]',
        ),
        (3, TypeError, "expected only to be a list of strings or None, got int"),
        ([3], TypeError, r"expected only to be a list of strings, got \[3\]"),
    ],
)
@pytest.mark.parametrize("call", ["install", "installed"])
def test_wrong_selections(call, only, error, message):
    with pytest.raises(error, match=f"^ssm_kernels.compat.{call}: {message}"):
        getattr(compat, call)(only).__enter__()
    assert compat.served().installed == ()


def test_a_fork_that_was_imported_before(fork):
    sys.modules["mamba_ssm"] = ModuleType("mamba_ssm")
    with pytest.raises(
        RuntimeError, match=r"expected mamba_ssm not to be imported yet, .*or install the rest beside it with only="
    ) as error:
        compat.install()
    compat.install(only=eval(str(error.value).partition("only=")[2]))
    assert compat.served().installed == PARTS[1:]


def test_a_client_that_went_on_without_a_part_is_named():
    client = sys.modules["client"] = ModuleType("client")
    client.selective_scan_cuda, client.causal_conv1d_fn, client.mamba_inner_fn = None, None, len
    with pytest.warns(UserWarning, match="client has None for causal_conv1d_fn, selective_scan_cuda. Call install") as caught:
        compat.install()
    assert caught[0].filename == __file__
    compat.uninstall()
    with pytest.warns(UserWarning, match="client has None for selective_scan_cuda") as caught, compat.installed(only=KERNELS):
        account = compat.served()
    assert caught[0].filename == __file__
    missing = {(request.name, request.by, request.answer) for request in account.missing}
    assert missing == {("selective_scan_cuda", "client", "None since an import before install()")}
    assert account.earlier == account.missing and account.requests == () and compat.served().earlier == account.earlier
    assert "1 names asked for, 1 missing" in str(account) and "missing    selective_scan_cuda: None since" in str(account)
    client.selective_scan_cuda = client.causal_conv1d_fn = len
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compat.install()
    assert compat.served().earlier == ()  # an installation begins a new account


def answers(by: str) -> dict[str, tuple[str, str]]:
    return {request.name: (request.status, request.answer) for request in compat.served().requests if request.by == by}


def test_the_account_names_what_clients_asked_for(fork):
    sys.path.remove(str(fork.parent))
    compat.install()
    sys.path.insert(0, str(fork.parent))
    client = importlib.import_module("client")
    assert client.MHA is None
    found = answers("client")
    assert found["mamba_ssm.ops.triton.layernorm"] == ("served", "module of ssm_kernels.compat")
    assert found["mamba_ssm.ops.triton.layernorm.RMSNorm"] == ("served", "ssm_kernels.compat.layer_norm.RMSNorm")
    assert found["mamba_ssm.modules.mha.MHA"][0] == "missing" and "raises" in found["mamba_ssm.modules.mha.MHA"][1]
    assert found["mamba_ssm.modules.mha.Attention"] == ("missing", "no such name")
    assert found["mamba_ssm.ops.cute"] == ("missing", "no such module")
    request = next(request for request in compat.served().missing if request.name == "mamba_ssm.ops.cute")
    assert request.place == f"{client.__file__}:10"
    count = len(compat.served().requests)
    inspect.getmodule(client.RMSNorm, "unknown.py")  # reads attributes of all modules
    assert [vars(sys.modules[part])["__spec__"] for part in PARTS] and len(compat.served().requests) == count
    text = str(compat.served())
    assert "3 missing" in text and f"missing    mamba_ssm.ops.cute: no such module; asked by client ({request.place})" in text
    compat.uninstall()
    assert answers("client") == found and compat.served().installed == ()
    compat.install()
    assert answers("client") == {}


def test_the_account_names_packages_that_are_hidden(fork):
    with compat.installed():
        assert ("mamba_ssm", str(fork / "__init__.py")) in compat.served().hidden
        assert f"hidden     mamba_ssm: {fork / '__init__.py'}" in str(compat.served())
    assert compat.served().hidden == ()
    with compat.installed(only=KERNELS):
        assert "mamba_ssm" not in dict(compat.served().hidden)


def test_the_account_tells_what_other_packages_answer(fork):
    compat.install(only=KERNELS)
    own = importlib.import_module("mamba_ssm")
    with pytest.raises(ImportError):
        importlib.import_module("selective_scan_cuda_oflex")
    assert answers(__name__)["mamba_ssm"] == ("elsewhere", f"module {own.__file__}")
    assert answers(__name__)["selective_scan_cuda_oflex"][0] == "missing"
    assert answers("mamba_ssm")["selective_scan_cuda"][0] == "served"
    assert answers("mamba_ssm")["causal_conv1d"] == ("missing", "not among the installed parts, so left to other packages")


def test_the_nearest_names_come_first_in_messages():
    compat.install()
    with pytest.raises(
        ModuleNotFoundError, match=r"no module mamba_ssm\.ops\.triton\.layernorms, it has mamba_ssm\.ops\.triton\.layernorm, "
    ):
        importlib.import_module("mamba_ssm.ops.triton.layernorms")
    with pytest.raises(ImportError, match=r"<ssm_kernels\.compat, which has Mamba, Mamba2, "):
        from mamba_ssm import Mamba4  # noqa: F401
    with pytest.raises(ImportError, match=r"<ssm_kernels\.compat, which has selective_scan_fn, "):
        from mamba_ssm import selective_scan  # noqa: F401
    with pytest.raises(AttributeError, match=r"selective_scan_cuda of ssm_kernels\.compat has no fwdd, it has fwd, bwd; "):
        importlib.import_module("selective_scan_cuda").fwdd  # noqa: B018
    compat.uninstall()
    compat.install(only=["causal_conv1d"])
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module("causal_conv1d.interface")
    assert "mamba_ssm" not in str(error.value)
