"""The stubs of the operators' modules, which scripts/generate_stubs.py writes, and the schemas of their operators."""

from __future__ import annotations

import inspect
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from mlstm_helpers import function_of

from ssm_kernels import ops

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
import check_bodies
import generate_stubs

FLAGS = {*generate_stubs.FLAGS, "states_at"}
FLAGGED = {name for name in ops.__all__ if FLAGS & {*inspect.signature(getattr(ops, name)).parameters}}


@pytest.mark.parametrize("module", generate_stubs.MODULES)
def test_stubs_are_those_of_the_modules(module):
    assert generate_stubs.stub_path(module).read_text() == generate_stubs.stub(module), "run scripts/generate_stubs.py"


def test_bodies_of_all_these_modules_are_checked(tmp_path):
    shutil.copytree(generate_stubs.PACKAGE, tmp_path / "ssm_kernels", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    found = {path.relative_to(tmp_path).as_posix() for path in check_bodies.copies(tmp_path / "ssm_kernels")}
    assert found == {f"ssm_kernels/{module.replace('.', '/')}_body.py" for module in generate_stubs.MODULES}


def test_every_function_with_a_flag_has_overloads():
    stubs = "".join(path.read_text() for path in (generate_stubs.PACKAGE / "ops").glob("*.pyi"))
    assert {*re.findall(r"@overload\ndef (\w+)\(", stubs)} == FLAGGED


def test_overloads_of_states_and_flags():
    assert generate_stubs.overloads({"x"}) == [({}, "Tensor")]
    found = generate_stubs.overloads({"states_at", "return_last_state"})
    assert [returned for _, returned in found] == [
        "Tensor",
        "tuple[Tensor, Tensor]",
        "tuple[Tensor, Tensor]",
        "tuple[Tensor, Tensor, Tensor]",
        "Tensor | tuple[Tensor, Tensor]",
        "Tensor | tuple[Tensor, ...]",
    ]


@pytest.mark.parametrize("name", ops.__all__)
def test_typed_functions_have_the_arguments_of_the_schema(name):
    """Names, order and kinds of the inputs, and the names of the options."""
    schema = getattr(torch.ops.ssm_kernels, name).default._schema.arguments
    parameters = inspect.signature(function_of(name)).parameters
    required = [each.name for each in parameters.values() if each.default is each.empty]
    assert required == [each.name for each in schema if not each.has_default_value()]
    of_schema = {each.name for each in schema}
    # alpha becomes a part of the name of the discretization.
    options = {*parameters} - (FLAGS - of_schema) - {"alpha"}
    if name in ("selective_scan", "ssd_chunk_scan"):  # of selective_scan_two_sample and ssd_chunk_scan_two_sample
        options -= {"lam", "lam_sigmoid", "previous", "delta_A", "conjugate_pairs"}
    # Steps and summaries have Python options, such as reset, that their operators do not see.
    assert options == of_schema if name in FLAGGED else options >= of_schema
