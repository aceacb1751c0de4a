"""Examples in docstrings: every public object has one, and all run."""

from __future__ import annotations

import doctest
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from test_site import public_names

from ssm_kernels import compat

# Constants have no docstring of their own.
CONSTANTS = {"ALIASES", "CANDIDATE_ACTIVATIONS", "DISCRETIZATIONS", "GATE_ACTIVATIONS", "RECURRENCES"}
CONSTANTS |= {"discretizations", "two_sample_discretizations"}
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def objects() -> dict[str, Any]:
    """The public objects that have docstrings, by their names in docs/api, and the module of the types of names."""
    import ssm_kernels

    found: dict[str, Any] = {"ssm_kernels.choices": ssm_kernels.choices}
    for name in sorted(public_names()):
        if name.rpartition(".")[2] not in CONSTANTS and not name.startswith("ssm_kernels.choices."):
            value: Any = ssm_kernels
            for part in name.split(".")[1:]:
                value = getattr(value, part)
            found[name] = value
    return found


def members(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The object and, of a class, its public methods that this package defines."""
    yield name, value
    if inspect.isclass(value):
        for attribute, member in inspect.getmembers(
            value, lambda member: inspect.isfunction(member) or inspect.ismethod(member)
        ):
            if not attribute.startswith("_") and (member.__module__ or "").startswith("ssm_kernels."):
                yield f"{name}.{attribute}", member


def examples(name: str, value: Any) -> list[doctest.DocTest]:
    docstring = inspect.getdoc(value) if not inspect.isclass(value) else value.__doc__
    test = doctest.DocTestParser().get_doctest(inspect.cleandoc(docstring or ""), {}, name, None, None)
    return [test] if test.examples else []


OBJECTS = objects()


def test_every_public_object_has_an_example():
    assert [name for name, value in OBJECTS.items() if not examples(name, value)] == []


# install() warns of the client that this test adds and of those that earlier tests have imported. The examples do not see them.
@pytest.mark.filterwarnings("ignore:ssm_kernels.compat.*expected clients to be imported after:UserWarning")
@pytest.mark.parametrize("name", OBJECTS)
def test_examples_run(name, capsys, tmp_path, monkeypatch):
    if ".integrations.transformers." in name:
        pytest.importorskip("transformers", reason="transformers is not installed: the extra [clients]")
    tests = [test for each, value in members(name, OBJECTS[name]) for test in examples(each, value)]
    monkeypatch.chdir(tmp_path)
    client = ModuleType("client_without_kernels")
    client.selective_scan_cuda = client.causal_conv1d_fn = None
    monkeypatch.setitem(sys.modules, client.__name__, client)
    runner = doctest.DocTestRunner(optionflags=OPTIONS, verbose=False)
    try:
        for test in tests:
            torch.manual_seed(0)
            runner.run(test)
    finally:
        compat.uninstall()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert not runner.failures, capsys.readouterr().out
