"""Writes the stubs of the operators' modules: an overload for each value of a flag that changes what a function returns.

    python scripts/generate_stubs.py

The modules have one signature a function, with all types. Their stubs have the same signatures, and for functions with
``return_last_state`` (or another of ``FLAGS``) or ``states_at`` an overload for each kind of result. Type checkers read the
stubs and not the modules.
"""

from __future__ import annotations

import ast
import itertools
import sys
from pathlib import Path

OPS = Path(__file__).resolve().parents[1] / "ssm_kernels" / "ops"
MODULES = ("convolution", "recurrences", "selective_scan", "ssd")

# With one of these flags a function also returns the state after the last step.
FLAGS = ("return_last_state", "return_final_state", "return_final_states")


def result_type(tensors: int) -> str:
    return "Tensor" if tensors == 1 else f"tuple[{', '.join(['Tensor'] * tensors)}]"


def overloads(names: set[str]) -> list[tuple[dict[str, str], str]]:
    """For each overload of a function with the parameters ``names``: types with defaults of its flags, and what it returns."""
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
            returned = result_type(1 + value + states)
        else:
            returned = "Tensor | tuple[Tensor, ...]" if states else f"Tensor | {result_type(2)}"
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


def function_stub(source: str, function: ast.FunctionDef) -> str:
    arguments = parameters(source, function.args)
    of_flags = overloads({name for name, _ in arguments})
    if len(of_flags) == 1:
        return signature(function.name, arguments, ast.get_source_segment(source, function.returns))
    return "".join(
        "@overload\n" + signature(function.name, [(name, types.get(name, kind)) for name, kind in arguments], returned)
        for types, returned in of_flags
    )


def import_group(statement: ast.ImportFrom | ast.Import) -> int:
    """The place of an import: 0 for Python's modules, 1 for PyTorch's, 2 for this package's."""
    if isinstance(statement, ast.ImportFrom) and statement.level:
        return 2
    module = statement.module if isinstance(statement, ast.ImportFrom) else statement.names[0].name
    return int(module.partition(".")[0] not in sys.stdlib_module_names)


def stub(module: str) -> str:
    """The text of ``ssm_kernels/ops/<module>.pyi``."""
    source = (OPS / f"{module}.py").read_text()
    tree = ast.parse(source)
    exported = next(each for each in tree.body if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "__all__")
    public = set(ast.literal_eval(exported.value))
    functions = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name in public]
    body = "".join(function_stub(source, function) for function in functions)
    used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)} | public
    groups: list[list[str]] = [[], [], []]
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and statement.module != "typing":
            names = [name for name in statement.names if name.name in used]
            if names:
                groups[import_group(statement)].append(ast.unparse(ast.ImportFrom(statement.module, names, statement.level)))
        elif isinstance(statement, ast.Import) and statement.names[0].name in used:
            groups[import_group(statement)].append(ast.unparse(statement))
    if "@overload" in body:
        groups[0].append("from typing import Literal, overload")
    imports = "\n\n".join("\n".join(_wrapped(line) for line in group) for group in groups if group)
    return f"# Written by scripts/generate_stubs.py.\n\n{imports}\n\n{ast.get_source_segment(source, exported)}\n\n{body}"


def _wrapped(line: str) -> str:
    """An import in the layout of ruff's formatter."""
    if len(line) <= 128:
        return line
    start, names = line.split(" import ")
    return f"{start} import (\n" + "".join(f"    {name},\n" for name in names.split(", ")) + ")"


if __name__ == "__main__":
    for name in MODULES:
        (OPS / f"{name}.pyi").write_text(stub(name))
