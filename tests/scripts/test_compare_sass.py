"""The script that compares the machine code of two builds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
import compare_sass

LISTING = """
Fatbin elf code:
================
arch = {architecture}
\tcode for sm_90
\t\tFunction : {first}
\t.headerflags\t@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;          /* 0x00000a00ff017b82 */
                                                                   /* 0x000fe20000000800 */
        /*0010*/                   {instruction} ;                 /* {encoding} */
                                                                   /* {control} */
\t\t..........
\t\tFunction : {second}
        /*0000*/                   EXIT ;                          /* 0x000000000000794d */
                                                                   /* 0x000fea0003800000 */
"""
DEFAULTS = {
    "architecture": "sm_90a",
    "first": "scan",
    "second": "norm",
    "instruction": "EXIT",
    "encoding": "0x000000000000794d",
    "control": "0x000fea0003800000",
}


def kernels(**changes: str) -> list[compare_sass.Kernel]:
    return list(compare_sass.kernels_of(LISTING.format(**(DEFAULTS | changes)).splitlines()))


def test_a_listing_is_cut_into_kernels():
    first, second = kernels()
    assert (first.architecture, first.name, len(first.lines)) == ("sm_90a", "scan", 4)
    assert (second.architecture, second.name, len(second.lines)) == ("sm_90a", "norm", 2)


def test_names_do_not_matter():
    lines, is_same = compare_sass.report(kernels(), kernels(first="sequential_scan", second="scan"))
    assert is_same and lines == ["2 kernels before, 2 after, 2 with the same SASS"]


def test_the_width_of_columns_does_not_matter():
    wide = compare_sass.kernels_of(LISTING.format(**DEFAULTS).replace(" ;  ", " ;      ").splitlines())
    assert list(wide) == kernels()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"instruction": "BRA 0x10"}, "differs, sm_90a: scan: EXIT -> BRA 0x10"),
        ({"control": "0x000fe20003800000"}, "differs, sm_90a: scan: (encoding or end) -> (encoding or end)"),
    ],
    ids=["instruction", "control"],
)
def test_a_changed_instruction_is_named(changes, expected):
    lines, is_same = compare_sass.report(kernels(), kernels(**changes))
    assert not is_same and lines[1:] == [expected]


def test_architectures_are_compared_apart():
    lines, is_same = compare_sass.report(kernels(), kernels(architecture="sm_80"))
    assert not is_same and len(lines) == 5


def test_each_equal_counts_once():
    twice = [*kernels(), *kernels()]
    lines, is_same = compare_sass.report(twice, [*kernels(), kernels()[0]])
    assert not is_same and lines[1:] == ["only before, sm_90a: norm, 2 lines"]


LOAD = {"instruction": "ULDC.64 UR4, c[0x0][0x218]", "encoding": "0x0000860000047ab9"}
INDEXED = {"instruction": "LDC.64 R4, c[0x0][R2+0x218]", "encoding": "0x0000860002047b82"}


def masked(**changes: str) -> list[compare_sass.Kernel]:
    return [compare_sass.without_parameters(kernel) for kernel in kernels(**changes)]


@pytest.mark.parametrize("load", [LOAD, INDEXED], ids=["direct", "indexed"])
def test_the_place_of_a_parameter_can_be_ignored(load):
    moved = {"instruction": load["instruction"].replace("0x218", "0x230"), "encoding": load["encoding"].replace("86", "8c")}
    assert not compare_sass.report(kernels(**load), kernels(**moved))[1]
    assert compare_sass.report(masked(**load), masked(**moved))[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"instruction": "ULDC UR4, c[0x0][0x218]"},
        {"instruction": "ULDC.64 UR6, c[0x0][0x218]"},
        {"instruction": "ULDC.64 UR4, c[0x2][0x218]"},
        {"instruction": "ULDC.64 UR4, c[0x0][UR6+0x218]"},
        {"control": "0x000fe20003800000"},
    ],
    ids=["width", "register", "bank", "index", "control"],
)
def test_all_else_about_a_parameter_counts(changes):
    assert not compare_sass.report(masked(**LOAD), masked(**LOAD | changes))[1]


def test_encodings_of_other_instructions_count():
    lines, is_same = compare_sass.report(masked(), masked(encoding="0x000000000000794f"))
    assert not is_same and lines[1:] == ["differs, sm_90a: scan: EXIT -> EXIT"]


@pytest.mark.parametrize("arguments, status", [([], 1), (["--ignore-parameters"], 0)], ids=["strict", "ignored"])
def test_the_option_of_the_command(arguments, status, monkeypatch, capsys):
    moved = LOAD | {"instruction": "ULDC.64 UR4, c[0x0][0x230]", "encoding": "0x00008c0000047ab9"}
    builds = {"old": kernels(**LOAD), "new": kernels(**moved)}
    monkeypatch.setattr(compare_sass, "disassemble", lambda path: builds[path.name])
    assert compare_sass.main([*arguments, "old", "new"]) == status
    assert f"{2 - status} with the same SASS" in capsys.readouterr().out
