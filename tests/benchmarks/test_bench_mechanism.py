"""The mechanism of the benchmarks: bars, contenders, the program, and the page that ``report.py`` makes of every result."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("rich", reason="the benchmarks print their tables with rich")

from benchmarks import (
    bars,
    bench_causal_conv1d,
    bench_clients,
    bench_delta_rule,
    bench_delta_rule_layers,
    bench_delta_rule_step,
    bench_linear_scan,
    bench_mamba3,
    bench_mamba3_layers,
    bench_mlstm,
    bench_norms,
    bench_overhead,
    bench_selective_scan,
    bench_sizes,
    bench_ssd,
    bench_state_update,
    bench_summaries,
    benchmark,
    layer_cases,
    report,
    size_cases,
)
from benchmarks.benchmark import Benchmark, Contender, Contest, Run, Turns, main, measured
from benchmarks.operator_cases import Norm
from benchmarks.tables import Column, Table, text

RUN = Run(torch.device("cpu"), trials=1, warmup=0, options=argparse.Namespace(json=None, cases=None))


@pytest.mark.parametrize(
    ("bar", "met", "goal_met"),
    [
        ({"at_least": 1.5, "goal": 2.0}, True, True),
        ({"at_least": 2.5, "goal": 3.0}, False, False),
        ({"at_least": 1.5, "goal": 3.0}, True, False),
        ({"at_most": 2.0, "goal": 1.9}, True, False),
        ({"at_most": 1.9}, False, None),
        ({"at_least": 1 / 3, "at_most": 3}, True, None),
        ({"at_least": 2.5, "at_most": 3}, False, None),
    ],
)
def test_bar(bar, met, goal_met):
    (judged,) = bars.judge([("row", {"figure": 2.0, "another": 7.0})], {"*": {"figure": bar}})
    assert judged == {"row": "row", "figure": "figure", "found": 2.0, "bar": bar, "met": met, "goal_met": goal_met}


def test_the_last_matching_bar_holds_and_nan_meets_none():
    asked = {"*": {"*": {"at_least": 1}}, "row *": {"time*": {"at_most": 2}}}
    rows = [("row 1", {"time": 3.0, "ratio": 3.0}), ("another", {"time": 3.0}), ("last", {"time": math.nan})]
    found = {(one["row"], one["figure"]): one["met"] for one in bars.judge(rows, asked)}
    assert found == {("row 1", "time"): False, ("row 1", "ratio"): True, ("another", "time"): True, ("last", "time"): False}


@pytest.mark.parametrize("name", [name for name in report.BENCHMARKS if bars.load(name)])
def test_every_bar_holds_a_measured_row(name):
    """Every pattern of ``bars.json`` matches a row and a figure of the results beside the pages."""
    benchmark = report.BENCHMARKS[name]
    results = [json.loads(path.read_text()) for path in report.DOCS.glob("benchmarks/*.json")]
    rows = [
        (row.get("name") or row["function"], benchmark.figures(row, result))
        for result in results
        if result["benchmark"] == name
        for row in result.get("rows", ())
    ]
    for pattern, asked in bars.load(name).items() if rows else ():
        for figure in asked:
            judged = bars.judge(rows, {pattern: {figure: asked[figure]}})
            assert judged, (pattern, figure)


def test_contenders_that_raise_are_unsupported_and_ours_must_not():
    def prepare(who: str, contender: str, figures: dict) -> dict:
        if contender == "bad":
            raise ValueError("first line\nsecond")
        figures["size"] = 1
        return {"forward": (lambda: None,)}

    def contest(**contenders: str) -> Contest:
        out = torch.full((2,), float(len(contenders)))
        return Contest(contenders, lambda contender: {"out": out}, {"out": torch.ones(2).double()}, prepare, lambda name: 0.5)

    turns = Turns(RUN)
    row = contest(ours="good", peer="bad").row(turns)
    turns.measure()
    assert row["peer"] == {"recorded": False, "unsupported": "ValueError: first line"}
    assert row["ours"]["size"] == 1 and row["ours"]["forward"]["trials"] == 1
    assert row["errors"] == {"ours": {"out": 1.0}, "peer": {"out": 1.0}} and row["wrong"] == ["ours: out", "peer: out"]
    with pytest.raises(ValueError, match="first line"):
        contest(ours="bad").row(Turns(RUN))


@pytest.mark.parametrize("name", ["forward", "training", "backward", "both"])
def test_stages_of_a_contender(name):
    layer = torch.nn.Linear(3, 2)
    x, grad = torch.randn(4, 3), torch.randn(4, 2)
    contender = Contender(lambda x: layer(x), {"x": x}, [grad], dict(layer.named_parameters()))
    result = None
    for index, stage in enumerate(contender.stages(name)[name]):
        result = stage() if index == 0 else stage(result)
    found = contender.results()
    assert list(found) == ["out", "grad_x", "grad_weight", "grad_bias"] and x.grad is None
    if name in ("forward", "training"):
        torch.testing.assert_close(result.detach(), found["out"])
        assert result.requires_grad == (name == "training")
    else:
        torch.testing.assert_close(list(result), [found["grad_x"], grad.T @ x, grad.sum(0)])


def test_recorded_figures_fill_gaps_on_an_h200(monkeypatch):
    row = {"ours": {"forward": {"median": 1.0}}}
    benchmark.recorded_figures({"peer": {"forward": 2.0, "backward": 3.0}}, row, torch.device("cpu"))
    assert "peer" not in row
    monkeypatch.setattr(benchmark, "on_h200", lambda device: True)
    benchmark.recorded_figures(
        {"peer": {"backward": 3.0}, "before": {"peak": 5.0}, "ours": {"forward": 9.0}}, row, torch.device("cpu")
    )
    assert row["peer"]["backward"] == {"median": 3.0} and row["peer"]["recorded"] and row["before"]["peak"] == 5.0
    assert row["ours"]["forward"]["median"] == 1.0


def test_recorded_rows_are_cases():
    options = argparse.Namespace(no_models=False, device="cuda")
    for name, rows in json.loads(benchmark.RECORDED.read_text()).items():
        assert rows.keys() <= {case.name for case in report.BENCHMARKS[name].cases(options)}


def toy(error: float) -> Benchmark:
    """A benchmark of two cases that take turns, measured out of their order."""

    def rows(cases: list[argparse.Namespace], run: Run) -> list[dict]:
        ours = {"forward": {"median": 1e-3, "spread": 0.0}}
        wrong = ["out"] if error > 1 else []
        return [{"name": case.name, "ours": ours, "wrong": wrong} for case in reversed(cases)]

    return Benchmark(
        "toy",
        lambda options: [argparse.Namespace(name=name, turns=0) for name in ("first", "second")],
        lambda result: [Table("toy", [text("case", "name"), Column("ms", lambda row: "1.000")], result["rows"])],
        lambda row, result: {"forward": 2.0},
        rows,
        add_options=lambda parser: parser.set_defaults(device="cpu"),
        required={"require": "first"},
    )


def test_program(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bars, "load", lambda name: {"*": {"forward": {"at_least": 3}}, "first": {"forward": {"at_least": 1}}})
    path = tmp_path / "toy.json"
    assert main(toy(0), None, ["--json", str(path), "--trials", "2"]) == 0
    result = json.loads(path.read_text())
    assert [row["name"] for row in result["rows"]] == ["first", "second"] and result["settings"]["trials"] == 2
    printed = capsys.readouterr().out
    assert "first: forward 1.0000 ms" in printed and printed.count("missed") == 1
    assert main(toy(0), None, ["--require"]) == 0 and main(toy(0), None, ["--require", "2.5"]) == 1
    assert "first: forward is 2, required ≥ 2.5" in capsys.readouterr().err
    assert main(toy(2), None, ["--only", "sec"]) == 1
    assert capsys.readouterr().err == "wrong results: second: out\n"


@pytest.mark.parametrize("name", report.BENCHMARKS)
def test_arguments(name, capsys, tmp_path):
    with pytest.raises(SystemExit, match="0"):
        main(report.BENCHMARKS[name], "what it does", ["--help"])
    assert "what it does" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(report.BENCHMARKS[name], None, ["--json", str(tmp_path / "absent" / "file.json")])
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda_device(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(bench_norms.BENCHMARK, None, [])
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_every_benchmark_is_documented_and_checked():
    """The page of benchmarks lists every script, and scripts/gpu_check.sh runs all that need a GPU."""
    root = report.DOCS.parent
    names = {path.stem.removeprefix("bench_") for path in root.glob("benchmarks/bench_*.py")}
    assert set(re.findall(r"^\| `bench_(\w+)\.py` \|", (report.DOCS / "benchmarks" / "README.md").read_text(), re.M)) == names
    (run,) = re.findall(r"for name in ([\w ]+); do\n +echo \"-- \$name\"", (root / "scripts/gpu_check.sh").read_text())
    assert set(run.split()) == names - {"cpu"}


def smallest_sizes() -> list[size_cases.SizeCase]:
    """A size of each operator and layout, and its neighbor."""
    few = {"B": 2, "D": 13, "L": 21, "T": 21, "C": 12, "R": 9, "N": 5, "P": 6, "d_model": 32, "of": 56}
    cases = {}
    for case in size_cases.all_cases():
        if case.dtype == torch.float32 and case.neighbor is not case:
            few_heads = {"H": 2 if "P" in case.size else 11, "G": 2 if case.operator == "ssd_chunk_scan" else 1}
            small = few | few_heads | {"P": 16 if case.operator == "Mamba2" else 6}
            sizes = tuple((letter, small.get(letter, size)) for letter, size in case.sizes)
            cases.setdefault((case.operator, case.layout, "first" in case.size, "G" in case.size), replace(case, sizes=sizes))
    return size_cases.with_neighbors(cases.values())


def smallest(name: str) -> list:
    """A case of each kind of the benchmark, as small as it can be."""
    few = {"batch": 2, "seqlen": 24}
    cases = {
        "selective_scan": [
            replace(case, batch=1 if case.packed else 2, seqlen=24, dim=16, dstate=4)
            for case in bench_selective_scan.CASES[::7]
        ],
        "ssd_chunk_scan": [
            *(replace(case, **few, heads=2, dstate=16) for case in bench_ssd.CASES[:2]),
            replace(bench_ssd.CASES[-1], **few, heads=2, groups=2, headdim=8, dstate=16),
        ],
        "linear_scan": [replace(case, **few, channels=16) for case in bench_linear_scan.CASES[:3]],
        "summaries": [
            replace(bench_summaries.CASES[0], sizes={"B": 2, "D": 16, "L": 24, "N": 4}),
            replace(bench_summaries.CASES[2], sizes={"B": 2, "L": 24, "H": 2, "P": 8, "N": 8}),
            *(replace(case, sizes={"B": 2, "T": 24, "H": 16}) for case in bench_summaries.CASES[4:12]),
        ],
        "selective_state_update": [replace(case, batch=2, dim=8) for case in bench_state_update.CASES[:2]],
        "delta_rule_scan": [
            replace(case, batch=1, seqlen=24, heads=1, value_heads=2, key_dim=8, value_dim=4)
            for case in bench_delta_rule.CASES[3:]
        ],
        "mamba3_chunk_scan": [
            replace(case, batch=1, seqlen=24, heads=2, headdim=4, dstate=8)
            for case in bench_mamba3.CASES
            if case.sequences > 1 or case.ranks
        ],
        "mamba3_layers": [replace(case, **few, d_model=64) for case in bench_mamba3_layers.CASES[:1]],
        "mlstm_scan": [replace(case, **few, heads=2, key_dim=16, value_dim=16) for case in bench_mlstm.CASES[5:7]],
        "delta_rule_layers": [
            layer_cases.DeltaLayerCase(**few, d_model=32, heads=1, value_heads=2, key_dim=16, value_dim=16),
        ],
        "delta_rule_step": [
            replace(case, batch=2, heads=1, value_heads=2, key_dim=8, value_dim=4) for case in bench_delta_rule_step.CASES[:3]
        ],
        "causal_conv1d": [replace(bench_causal_conv1d.CPU_CASES[0], **few, channels=16, columns=40)],
        "norms": [replace(case, rows=(9,), columns=16) for case in bench_norms.CASES if case.group_size is case.slice_of],
        "layers": [
            layer_cases.LayerCase("Mamba2", **few, d_model=64),
            layer_cases.DecodeCase("Mamba", 2, 64),
            layer_cases.LatencyCase("Mamba", 64, 8),
            layer_cases.ModelCase("Mamba", 2, 64, 2, 100, 24),
            layer_cases.GenerationCase("Mamba", 1, 64, 2, 100, 8, 4),
            Norm("add_rms_norm", (2, 24), 16, residual_dtype=torch.float32),
        ],
        "sizes": smallest_sizes(),
        "overhead": bench_overhead.cases(argparse.Namespace()),
        "clients": [bench_clients.ModelCase("mamba2", 1, 64, 20)],
    }
    return cases[name]


# The others have files of their own.
@pytest.mark.parametrize("name", [name for name in report.BENCHMARKS if name not in ("selective_scan_cpu", "distributed")])
def test_every_benchmark_measures_its_smallest_cases(name, monkeypatch, tmp_path, capsys):
    """On the CPU, where a call stands for its CUDA graph. Results are right and make tables, figures and a section."""
    if name == "clients":
        pytest.importorskip("transformers", reason="transformers is not installed: the extra [clients]")
        module = importlib.import_module("transformers.models.mamba2.modeling_mamba2")
        for function in [each for each, value in vars(module).items() if inspect.isfunction(value)]:
            monkeypatch.setattr(module, function, getattr(module, function))  # the benchmark leaves others there
    monkeypatch.setattr(bench_linear_scan, "COPIED_BYTES", 2**20)
    monkeypatch.setattr(bench_linear_scan, "LAYERS", ((2, 8, 16),))
    path = tmp_path / "result.json"
    options = argparse.Namespace(json=path, cases=None, skip_compile=True, no_models=False)
    found = report.BENCHMARKS[name]
    measured(found, Run(torch.device("cpu"), 1, 0, options), smallest(name))
    result = json.loads(path.read_text())
    assert len(result["rows"]) >= len(smallest(name)) and not any(row.get("wrong") for row in result["rows"])
    for row in result["rows"]:
        assert all(isinstance(figure, float) for figure in found.figures(row, result).values())
    section = report.section({"figure": "figure.png", **result})
    # The page has no rows of all sizes.
    assert name == "sizes" or all(row["name"] in section or row.get("sizes", "-") in section for row in result["rows"])


def test_page_has_every_table():
    """Every table that a benchmark makes has its place in ``page.md``, with text before it."""
    committed = [json.loads(path.read_text()) for path in report.DOCS.glob("benchmarks/*.json")]
    case = replace(bench_causal_conv1d.CPU_CASES[0], seqlen=20, channels=24, columns=64)
    committed.append(measured(bench_causal_conv1d.BENCHMARK, RUN, [case]))
    times = {what: {"median": 1e-5, "spread": 0.1} for what in ("forward", "backward", "both")}
    row = {"name": "a norm", "ours": times, "copy": times, "PyTorch": times}
    committed.append({"benchmark": "norms", "settings": {"trials": 1}, "rows": [row]})
    if not any(result["benchmark"] == "delta_rule_scan" for result in committed):
        product = next(case for case in bench_delta_rule.CASES if case.householder > 1)
        products = [replace(product, batch=1, seqlen=24, heads=1, value_heads=1, key_dim=8, value_dim=4)]
        committed.insert(0, measured(bench_delta_rule.BENCHMARK, RUN, products))
    if not any(result["benchmark"] == "delta_rule_layers" for result in committed):
        layers = [layer_cases.DeltaLayerCase(batch=1, seqlen=24, d_model=32, heads=1, value_heads=2, key_dim=16, value_dim=16)]
        committed.insert(0, measured(bench_delta_rule_layers.BENCHMARK, RUN, layers))
    if not any(result["benchmark"] == "delta_rule_step" for result in committed):
        steps = [replace(bench_delta_rule_step.CASES[0], batch=2, heads=1, value_heads=2, key_dim=8, value_dim=4)]
        committed.insert(0, measured(bench_delta_rule_step.BENCHMARK, RUN, steps))
    if not any(result["benchmark"] == "mlstm_scan" for result in committed):
        scans = [replace(bench_mlstm.CASES[0], batch=1, seqlen=24, heads=1, key_dim=8, value_dim=4)]
        committed.insert(0, measured(bench_mlstm.BENCHMARK, RUN, scans))
    if not any(result["benchmark"] == "mamba3_chunk_scan" for result in committed):
        scans = [replace(bench_mamba3.CASES[0], batch=1, seqlen=24, heads=1, headdim=4, dstate=8)]
        committed.insert(0, measured(bench_mamba3.BENCHMARK, RUN, scans))
    if not any(result["benchmark"] == "mamba3_layers" for result in committed):
        layers = [replace(bench_mamba3_layers.CASES[0], batch=1, seqlen=24, d_model=64)]
        committed.insert(0, measured(bench_mamba3_layers.BENCHMARK, RUN, layers))
    if not any(result["benchmark"] == "sizes" for result in committed):
        sizes = [case for case in smallest_sizes() if case.operator == "causal_conv1d"]
        committed.insert(0, measured(bench_sizes.BENCHMARK, RUN, sizes))
    assert {result["benchmark"] for result in committed} | {"distributed"} == set(report.BENCHMARKS)
    for result in committed:
        template = report.TEMPLATES[result["benchmark"]]
        for table in report.BENCHMARKS[result["benchmark"]].tables(result):
            assert f"\n\n[table: {table.title}]" in template, table.title
        section = report.section({"figure": "figure.png", **result})
        assert section.startswith("## ") and "[table" not in section and "{" not in section
        for word in ("missed", "goal", " bar "):
            assert word not in section, word
    assert "| a norm | 10.0 ± 10 % | 10.0 | 1.00 | 10.0 ± 10 % | 10.0 | 1.00 | 20.0 | 10.0 |" in report.section(committed[-1])


@pytest.mark.parametrize("path", sorted(report.DOCS.glob("benchmarks/NVIDIA*.json")), ids=lambda path: path.stem)
def test_results_of_a_run_that_ended_early(path, tmp_path):
    """The JSON file after the first case, without the measurements that follow the cases, makes a page and its figure."""
    result = json.loads(path.read_text())
    result |= {"rows": result["rows"][:1]} | {key: type(result[key])() for key in ("layers", "host_seconds") if key in result}
    early = tmp_path / "early.json"
    early.write_text(json.dumps(result))
    assert report.main([str(early), "--output", str(tmp_path)]) == 0
    (page,) = tmp_path.glob("*.md")
    row, text = result["rows"][0], page.read_text()
    # A page of decoding steps has a column of sizes in place of names.
    label = row["sizes"] if result["benchmark"] == "delta_rule_step" else row.get("name", row.get("sizes", "selective_scan"))
    assert result["benchmark"] == "sizes" or label in text
