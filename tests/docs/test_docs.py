"""The documentation: its Python runs, and its tables, recipes and figures match the code and the results."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import textwrap
from pathlib import Path

import pytest
import recurrence_helpers
import torch
import torch._inductor.config
from decoding_helpers import DECODING_STEPS
from operators import OPERATORS

from ssm_kernels import compat, ops, reference

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))


def snippets() -> list:
    """Python blocks of README and docs: each runs by itself. Indented ones are parts of recipes, with tests of their own."""
    found = []
    for path in PAGES:
        blocks = re.findall(r"^```(?:python|py)\b[^\n]*\n(.*?)^```$", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for index, block in enumerate(blocks):
            marks = [pytest.mark.clients] if packages_of_clients(block) else []
            found.append(pytest.param(block, id=f"{path.relative_to(ROOT)}-{index}", marks=marks))
    return found


def packages_of_clients(snippet: str) -> list[str]:
    """Packages of the extra [clients] that the snippet needs."""
    needed = {"transformers": ["transformers"], "Trainer": ["accelerate"], "torch.onnx": ["onnx", "onnxscript", "onnxruntime"]}
    return [package for name, packages in needed.items() if name in snippet for package in packages]


def indented_blocks(page: str) -> int:
    return len(re.findall(r"^ +```(?:python|py)\b", page, flags=re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("snippet", snippets())
def test_snippet_runs(snippet, tmp_path, monkeypatch):
    torch.manual_seed(0)
    for package in packages_of_clients(snippet):
        pytest.importorskip(package, reason=f"{package} is not installed: the extra [clients]")
    monkeypatch.chdir(tmp_path)
    # The code around the kernels of an AOTInductor package takes most of the compiler's time.
    fast = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}
    try:
        with torch._inductor.config.patch(fast):
            exec(compile(snippet, "<documentation>", "exec"), {"__name__": "documentation"})
    finally:
        compat.uninstall()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        if "transformers" in snippet:
            importlib.import_module("ssm_kernels.integrations.transformers").unpatch()


def test_there_are_snippets():
    names = {parameter.id.rpartition("-")[0] for parameter in snippets()}
    assert "README.md" in names
    assert {"layers.md", "recurrences.md", "ssd.md", "torch_ops.md", "api/choices.md"} <= {
        name.removeprefix("docs/") for name in names
    }
    # Blocks that do not run by themselves: the recipe for a recurrence, which test_recipe_for_a_recurrence runs.
    blocks = {str(path.relative_to(ROOT)): indented_blocks(path.read_text()) for path in PAGES}
    assert {name: count for name, count in blocks.items() if count} == {"docs/recurrences.md": 2}


def test_schemas_of_the_page_are_those_registered():
    page = (ROOT / "docs" / "torch_ops.md").read_text()
    documented = re.search(r"<!-- schemas -->\n```text\n(.*?)\n```", page, flags=re.DOTALL)[1].splitlines()
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("ssm_kernels::")]
    public = [str(schema) for schema in schemas if not schema.name.startswith("ssm_kernels::_")]
    # Parsed, because PyTorch's versions may print a schema in different ways.
    assert sorted(str(torch._C.parse_schema(f"ssm_kernels::{line}")) for line in documented) == sorted(public)
    # The page's statements about results, positional arguments and private operators.
    for schema in schemas:
        name = schema.name.removeprefix("ssm_kernels::")
        if not name.startswith("_"):
            name = name.removesuffix("_two_sample").removesuffix("_dense")
            results = OPERATORS[name].results if name in OPERATORS else () if name.endswith("_out") else ("out", "state")
            has_states = any(argument.name == "states_at" for argument in schema.arguments)
            is_step = name in (*DECODING_STEPS, "mamba3_state_update", "mlstm_step")
            assert len(schema.returns) == (1 if is_step else len(results) + has_states)
        else:
            forms = (
                "|".join(f"_{each}" for each in OPERATORS)
                + "|_(selective|ssd_chunk|mlstm)_scan(_two_sample|_dense)?_states_at|"
            )
            forms += "_ssd_chunk_scan_(states|two_sample)|_linear_recurrence|_norm_gated(_squares|_products)?|_add_norm"
            forms += "|_(mamba2?|delta_rule|mlstm)_mixer(_projected)?|_mamba_inner|_mamba_conv|_mixer_parameters|_copy_rows"
            forms += "|_(two_sample_)?discretizations|_discretization_aliases|_recurrences|_nearest_choice"
            forms += "|_(ssd_chunk_scan|linear_recurrence)_summary|_(selective|ssd_chunk)_scan_initial_gradient"
            assert re.fullmatch(
                f"_set_debug_option|_(selective|ssd_chunk)_scan_plan|{forms}|_.*_(fwd|bwd|bwd_out|bwd_last)",
                name,
            ), name
    positional = [a.name for a in torch.ops.ssm_kernels.selective_scan.default._schema.arguments if not a.kwarg_only]
    assert positional[8] == "initial_state"


def test_files_that_the_pages_name_exist():
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))):
        # The compile report lists object files.
        page = re.sub(r"<!-- compile report: begin -->.*?<!-- compile report: end -->", "", path.read_text(), flags=re.DOTALL)
        for name in re.findall(r"`((?:csrc|ssm_kernels|tests|scripts|benchmarks|examples)/[\w./]+\.\w+)`", page):
            assert (ROOT / name).exists(), (path.name, name)


def test_names_of_the_table_are_arguments():
    """Every name that docs/layers.md gives an operator's states, step sizes and input is one of its arguments or results."""
    page = (ROOT / "docs" / "layers.md").read_text()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    start = next(index for index, row in enumerate(table) if row[0] == "" and len(row) == 7)
    operators = ("selective_scan", "ssd_chunk_scan", "selective_state_update")
    checked = 0
    for row in table[start + 2 : start + 7]:
        for column, operator in enumerate(operators, start=1):
            schema = getattr(torch.ops.ssm_kernels, operator).default._schema
            names = {argument.name for argument in (*schema.arguments, *schema.returns)}
            for name in re.findall(r"`(\w+)`", row[column]):
                assert name in names, (operator, name)
                checked += 1
    assert checked >= 17


def test_results_in_the_documentation_are_made_of_the_json_files(tmp_path):
    """``benchmarks/report.py`` writes the pages of results, and the statements on cost in docs/discretizations.md."""
    documented = (ROOT / "docs" / "discretizations.md").read_text()
    begin, end = documented.index("<!-- costs:"), documented.index("<!-- end of costs -->")
    page = tmp_path / "page.md"
    page.write_text(documented[:begin] + documented[begin:end].splitlines()[0] + "\n" + documented[end:])
    folder = ROOT / "docs" / "benchmarks"
    report = importlib.import_module("benchmarks.report")
    report.main(["--output", str(tmp_path / "pages"), "--costs", str(page), *map(str, sorted(folder.glob("*.json")))])
    made = {path.name: path.read_text() for path in (tmp_path / "pages").glob("*.md")}
    assert made == {name: (folder / name).read_text() for name in made}
    assert "NVIDIA_H200.md" in made
    assert page.read_text() == documented
    # Outside the block no sentence says how fast a discretization is.
    prose = re.sub(r"^```.*?^```$", "", documented[:begin] + documented[end:], flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"costs (?:about )?the\s+same|dearer|cheaper|times as (?:fast|long|slow)", prose)


def test_tables_of_the_rules_are_made_of_the_json_files(tmp_path):
    """``benchmarks/rules_page.py`` writes the tables of the rules and of the trained classifiers."""
    documented = (ROOT / "docs" / "discretizations.md").read_text()
    page, rules_page = tmp_path / "page.md", importlib.import_module("benchmarks.rules_page")
    empty = documented
    for name in rules_page.BLOCKS:
        empty = rules_page.replaced(empty, name, "")
    page.write_text(empty)
    assert rules_page.main([str(page)]) == 0
    assert page.read_text() == documented != empty
    # Means 3 and 2.9: distinguished where every seed agrees, not where one seed decides.
    assert rules_page.distinguished([3.0, 3.1, 2.9], [2.9, 3.02, 2.78])
    assert not rules_page.distinguished([3.0, 3.1, 2.9], [3.2, 3.02, 2.48])


def test_accuracy_of_the_layers_is_that_of_the_page():
    """The page has every layer, and one of its errors is measured again."""
    accuracy = importlib.import_module("benchmarks.layer_accuracy")
    page = (ROOT / "docs" / "accuracy.md").read_text()
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == [*accuracy.LAYERS] * 3
    name = next(name for name in accuracy.LAYERS if name.startswith("MinGRU"))
    found = accuracy.errors(accuracy.LAYERS[name], torch.bfloat16, torch.device("cpu"))
    documented = [float(row[3]) for row in rows if row[0] == name]
    for error, expected in zip(found, documented, strict=True):
        assert expected / 1.5 < error < expected * 1.5


# Fields that a case and its row of results share, by the benchmark's name.
ROW_NAMES = {
    "ssd": ("name",),
    "selective_scan": ("name",),
    "linear_scan": ("name",),
    "state_update": ("sizes", "dtypes", "discretization"),
}


@pytest.mark.parametrize("operator", ROW_NAMES)
def test_results_are_of_the_cases_that_are_measured(operator):
    pytest.importorskip("rich", reason="the benchmarks print their tables with rich")
    cases = importlib.import_module(f"benchmarks.bench_{operator}").CASES
    rows = json.loads((ROOT / "docs" / "benchmarks" / f"NVIDIA_H200_{operator}.json").read_text())["rows"]
    names = ROW_NAMES[operator]
    assert [[row[name] for name in names] for row in rows] == [[getattr(case, name) for name in names] for case in cases]


def test_every_recurrence_is_in_the_table():
    rows = {}
    for line in (ROOT / "docs" / "recurrences.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 4 and cells[0].startswith("`"):
            scan, step = re.findall(r"`(\w+)`", cells[0])
            assert step == scan.removesuffix("_scan") + "_step" and hasattr(ops, step)
            rows[scan] = [(name, mark == "†") for name, mark in re.findall(r"`(\w+)`(?:\\\*)?(†?)", cells[1])]
    assert set(rows) == set(reference.RECURRENCES)
    for scan, inputs in rows.items():
        arguments = getattr(torch.ops.ssm_kernels, scan).default._schema.arguments
        of_operator = itertools.takewhile(lambda argument: argument.name != "h0", arguments)
        assert inputs == [(argument.name, argument.kwarg_only) for argument in of_operator]


def test_recipe_for_a_recurrence():
    """The recipe's row fits the tests' table and computes the same as its reference."""
    page = (ROOT / "docs" / "recurrences.md").read_text()
    blocks = re.findall(r"^   ```python\n(.*?)^   ```$", page, flags=re.MULTILINE | re.DOTALL)
    of_reference, row = (textwrap.dedent(block) for block in blocks)
    names: dict = {"_recurrence": lambda function: function, "torch": torch, "Tensor": torch.Tensor}
    exec(compile(of_reference, "<recipe>", "exec"), names)
    ((name, recurrence),) = eval("{" + row + "}", vars(recurrence_helpers)).items()
    assert isinstance(recurrence, recurrence_helpers.Recurrence)
    x = torch.linspace(-0.7, 1.3, len(recurrence.inputs), dtype=torch.float64)
    numbers = [into_range(value) for into_range, value in zip(recurrence.inputs.values(), x, strict=True)]
    expected = names[name](**dict(zip(recurrence.inputs, numbers, strict=True)))
    for actual, value in zip(recurrence.formula(*(x.item() for x in numbers)), expected, strict=True):
        assert float(actual) == pytest.approx(value.item(), rel=1e-12)
