"""Writes the stubs of the operators' modules: an overload for each value of a flag that changes what a function returns.

    python scripts/generate_stubs.py

The modules have one signature a function, with all types. Their stubs have the same signatures, and for functions with
``return_last_state`` (or another of ``FLAGS``) or ``states_at`` an overload for each kind of result. Type checkers read the
stubs and not the modules. Functions that a loop makes have their docstrings in the stubs, too: the site takes them from there.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1] / "ssm_kernels"
sys.path.insert(0, str(PACKAGE.parent))

from ssm_kernels import choices  # noqa: E402

# With one of these flags a function also returns the state after the last step.
FLAGS = ("return_last_state", "return_final_state", "return_final_states")


def has_flags(source: Path) -> bool:
    """Whether a function of the module has one of FLAGS."""
    names = {node.arg for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.arg)}
    return not names.isdisjoint(FLAGS)


MODULES = (
    *(f"ops.{path.stem}" for path in sorted((PACKAGE / "ops").glob("[!_]*.py")) if has_flags(path)),
    "distributed._keyword_scans",
    "distributed._recurrences",
)


def result_type(states: int, state: str) -> str:
    return "Tensor" if states == 0 else f"tuple[{', '.join(['Tensor'] + [state] * states)}]"


def overloads(names: set[str], state: str = "Tensor") -> list[tuple[dict[str, str], str]]:
    """For each overload of a function with the parameters ``names``: types with defaults of its flags, and what it returns.

    Args:
        state: the type of its states.
    """
    flag = next((name for name in FLAGS if name in names), None)
    with_states = "states_at" in names
    values = (False, True, None) if flag else (False,)
    found = []
    for value, states in itertools.product(values, (False, True) if with_states else (False,)):
        types = {}
        if flag:
            types[flag] = "bool" if value is None else f"Literal[{value}]" + ("" if value else " = False")
        if with_states:
            types["states_at"] = "None = None" if not states else "Positions" if value is not None else "Positions | None"
        if value is not None:
            returned = result_type(value + states, state)
        elif states:
            returned = f"Tensor | tuple[{'Tensor' if state == 'Tensor' else 'Any'}, ...]"
        else:
            returned = f"Tensor | {result_type(1, state)}"
        found.append((types, returned))
    return found


def parameters(source: str, arguments: ast.arguments) -> list[tuple[str, str]]:
    """Names and ``type = default`` of a function's parameters as its module writes them, with ``*`` before keywords."""

    def typed(argument: ast.arg, default: ast.expr | None) -> tuple[str, str]:
        annotation = ast.get_source_segment(source, argument.annotation)
        return argument.arg, annotation + ("" if default is None else f" = {ast.get_source_segment(source, default)}")

    positional = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    found = [typed(*each) for each in zip(positional, defaults, strict=True)]
    keywords = [typed(*each) for each in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return found + ([("*", "")] if keywords else []) + keywords


def signature(name: str, arguments: list[tuple[str, str]], returned: str) -> str:
    lines = [f"    {argument}: {kind},\n" if kind else f"    {argument},\n" for argument, kind in arguments]
    return f"def {name}(\n{''.join(lines)}) -> {returned}: ...\n"


TWO_SAMPLES = re.compile(r" \| (\w*TwoSampleDiscretizationName)")


def function_stub(source: str, function: ast.FunctionDef) -> str:
    arguments, returned = parameters(source, function.args), ast.get_source_segment(source, function.returns)
    states = re.search(r"tuple\[Tensor, (tuple\[[^]]*\]|Mamba3State)", returned)  # several tensors
    names = {name for name, _ in arguments}
    of_flags = overloads(names, states[1] if states else "Tensor")
    rule = dict(arguments).get("discretization", "")
    if found := TWO_SAMPLES.search(rule):
        kinds = {"discretization": rule.replace(found[0], "")}, {"discretization": found[1]}
        both = (of_flags, kinds[0]), (overloads(names, "ScanState"), kinds[1])
        of_flags = [(types | kind, result) for found, kind in both for types, result in found]
    if len(of_flags) == 1 or returned == "Any":
        return signature(function.name, arguments, returned)
    return "".join(
        "@overload\n" + signature(function.name, [(name, types.get(name, kind)) for name, kind in arguments], returned)
        for types, returned in of_flags
    )


def made_stub(function: Callable[..., Any]) -> str:
    """The stub of a function that a loop makes: no source has its signature."""
    signature_of_made = inspect.signature(function)
    arguments, keyword = [], False
    for name, each in signature_of_made.parameters.items():
        if each.kind is each.KEYWORD_ONLY and not keyword:
            arguments, keyword = [*arguments, "*"], True
        default = "" if each.default is each.empty else f" = {each.default!r}".replace("'", '"')
        arguments.append(f"{name}: {each.annotation}{default}")
    source = f"def {function.__name__}({', '.join(arguments)}) -> {signature_of_made.return_annotation}: ..."
    text = function_stub(source, ast.parse(source).body[0])
    doc = textwrap.indent(f'"""{inspect.getdoc(function)}"""', "    ")
    return f"{text.rstrip().removesuffix(' ...')}\n{doc}\n\n"


def import_group(statement: ast.ImportFrom | ast.Import) -> int:
    """The place of an import: 0 for Python's modules, 1 for PyTorch's, 2 for this package's."""
    if isinstance(statement, ast.ImportFrom) and statement.level:
        return 2
    module = statement.module if isinstance(statement, ast.ImportFrom) else statement.names[0].name
    return int(module.partition(".")[0] not in sys.stdlib_module_names)


def stub_path(module: str) -> Path:
    return PACKAGE / f"{module.replace('.', '/')}.pyi"


def stub(module: str) -> str:
    """The text of the stub of ``ssm_kernels.<module>``."""
    source = stub_path(module).with_suffix(".py").read_text()
    tree = ast.parse(source)
    members = vars(importlib.import_module(f"ssm_kernels.{module}"))
    written = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
    body = "".join(
        function_stub(source, written[name]) if name in written else made_stub(members[name]) for name in members["__all__"]
    )
    used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    groups: list[list[str]] = [[], [], []]
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and statement.module not in ("typing", "choices"):
            names = [name for name in statement.names if name.name in used]
            if names:
                groups[import_group(statement)].append(ast.unparse(ast.ImportFrom(statement.module, names, statement.level)))
        elif isinstance(statement, ast.Import) and statement.names[0].name in used:
            groups[import_group(statement)].append(ast.unparse(statement))
    typing = [name for name in ("Any", "Literal", "overload") if name in used]
    groups[0] += [f"from typing import {', '.join(typing)}"] if typing else []
    types = sorted(used & {*choices.__all__})
    groups[2] += [f"from ..choices import {', '.join(types)}"] if types else []
    groups[2].sort(key=lambda line: (not line.startswith("from .."), line))
    imports = "\n\n".join("\n".join(_wrapped(line) for line in group) for group in groups if group)
    names = ", ".join(f'"{name}"' for name in sorted(members["__all__"]))
    exported = f"__all__ = [{names}]"
    if len(exported) > 128:
        exported = "__all__ = [\n    " + names.replace(", ", ",\n    ") + ",\n]"
    return f"# Written by scripts/generate_stubs.py.\n\n{imports}\n\n{exported}\n\n{body.rstrip()}\n"


def _wrapped(line: str) -> str:
    """An import in the layout of ruff's formatter."""
    if len(line) <= 128:
        return line
    start, names = line.split(" import ")
    return f"{start} import (\n" + "".join(f"    {name},\n" for name in names.split(", ")) + ")"


if __name__ == "__main__":
    for name in MODULES:
        stub_path(name).write_text(stub(name))
