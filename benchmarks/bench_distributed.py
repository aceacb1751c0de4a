#!/usr/bin/env python3
"""Language models over several GPUs beside one: context and tensor parallelism, what they send, and collectives alone.

    python benchmarks/bench_distributed.py [--ranks N] [--device cpu] [--json FILE] [--cases NAME ...] [--trials N]
    torchrun --nproc-per-node N benchmarks/bench_distributed.py [--json FILE] ...

Without torchrun the program starts a process for each GPU, on the CPU two with small models. Loss and norm of the gradients are
first compared with those of one GPU. Exits with 1 if they are wrong; a missed bar is only reported. ``page.md`` says what each
figure is. :func:`model_rows` computes, from the measured times, those of more ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import io
import math
import operator
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.benchmark import Benchmark, Result, Run, main, measured, parse, speedups
from benchmarks.tables import Column, Row, Table, cell, figure, median, over, ratio, text

WHATS = ("forward", "backward", "both")
TIMEOUT = datetime.timedelta(seconds=120)
MODEL_RANKS = (2, 8, 32, 128, 1024)


def cases(options: argparse.Namespace) -> list[Any]:
    from benchmarks.distributed_cases import CollectiveCase, ContextCase, TensorCase

    if options.ranks < 2 or (options.device == "cuda" and options.ranks > torch.cuda.device_count()):
        found = f"{options.ranks} on {torch.cuda.device_count()} GPUs"
        raise SystemExit(f"bench_distributed.py: expected two ranks or more, and on CUDA a GPU for each, got {found}")
    common: dict[str, Any] = {"ranks": options.ranks, "device": options.device}
    long: dict[str, Any] = common | ({"seqlen": 512, "d_model": 64, "n_layer": 2} if options.device == "cpu" else {})
    wide = common | {"batch": 8, "seqlen": 2048, "d_model": 2560, "n_layer": 24}
    if options.device == "cpu":
        wide |= {"batch": 2, "seqlen": 64, "d_model": 256, "n_layer": 2}
    sizes = [2**power for power in ((12, 16) if options.device == "cpu" else (12, 16, 18, 20, 22, 24, 26))]
    return [
        *(ContextCase(layer, **long) for layer in ("Mamba", "Mamba2")),
        *(ContextCase(layer, **long, exchange="summaries") for layer in ("Mamba", "Mamba2")),
        *(TensorCase(layer, **wide) for layer in ("Mamba", "Mamba2")),
        TensorCase("Mamba2", **wide, groups=8),
        *(CollectiveCase(operation, size, options.ranks) for operation in ("all-gather", "all-reduce") for size in sizes),
    ]


def figures(row: Row, result: Result) -> dict[str, float]:
    found = speedups(row, {"one": "one"}, WHATS)
    ours, one = (median(row.get(who), "peak") for who in ("ours", "one"))
    return found | ({"peak over one": ours / one} if ours and one else {})


# The model of the time on more ranks.


def straight_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The intercept and the slope of the least relative squared differences; the intercept is not below 0."""
    # Not by torch.linalg.lstsq, whose last bits change from call to call.
    weights = [y**-2 for _, y in points]
    mean_x, mean_y = (
        math.fsum(map(operator.mul, weights, values)) / math.fsum(weights) for values in zip(*points, strict=True)
    )
    moments = ((w * (x - mean_x) * (y - mean_y), w * (x - mean_x) ** 2) for w, (x, y) in zip(weights, points, strict=True))
    covariance, variance = map(math.fsum, zip(*moments, strict=True))
    slope = covariance / variance
    intercept = mean_y - slope * mean_x
    if intercept >= 0:
        return intercept, slope
    return 0.0, math.fsum(x * y for x, y in points) / math.fsum(x * x for x, _ in points)


def sent_by_a_rank(operation: str, nbytes: float, ranks: int) -> float:
    """Bytes that a rank sends around a ring, for a buffer of ``nbytes`` on each rank."""
    return nbytes * (ranks - 1) * (1 if operation == "all-gather" else 2 / ranks)


def constants(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Seconds for each doubling of the ranks and for each byte that a rank sends, by operation."""
    found = {}
    for operation in ("all-gather", "all-reduce"):
        measured_rows = [row for row in rows if row.get("operation") == operation]
        if len(measured_rows) > 1:
            doublings = math.log2(measured_rows[0]["ranks"])
            points = [
                (sent_by_a_rank(operation, row["bytes"], row["ranks"]) / doublings, median(row["ours"], "call") / doublings)
                for row in measured_rows
            ]
            found[operation] = straight_line(points)
    return found


def seconds_of_collectives(row: Row, ranks: int, found: dict[str, tuple[float, float]]) -> float:
    """The collectives and messages of a training step: those of the layers and the sum of the gradients.

    Forward's collectives count twice where blocks are computed again; its messages are kept. A message takes as long as an
    all-gather of two ranks.
    """

    def seconds(operation: str, nbytes: float) -> float:
        if operation == "message":
            latency, per_byte = found["all-gather"]
            return latency + per_byte * nbytes
        latency, per_byte = found[operation]
        return latency * math.log2(ranks) + per_byte * sent_by_a_rank(operation, nbytes, ranks)

    forward = row["sent"]["forward"]
    again = [call for call in forward if call["operation"] != "message"]
    calls = [*forward, *again, *row["sent"]["backward"]]
    of_layer = sum(seconds(call["operation"], call["bytes"]) for call in calls)
    return row["n_layer"] * of_layer + seconds("all-reduce", row["ours"]["parameters"])


def exchange_of(row: Row) -> str:
    """The way in which the layers of a row of context parallelism pass states from rank to rank."""
    operations = {call["operation"] for calls in row["sent"].values() for call in calls}
    return "chain" if "message" in operations else "summaries"


def model_rows(result: Result) -> list[dict[str, Any]]:
    """The model's times of context parallelism on more ranks that are linked as the measured ones are.

    A rank's work is the measured time less the model's collectives of the measured ranks, and not less than that of its steps
    on one GPU. The time of ``n`` ranks is this work and the collectives of ``n`` ranks, one after the other. For one sequence
    of the measured length the work shrinks in proportion to the steps of a rank.

    Where layers send messages along a chain, what the work exceeds that of the steps on one GPU by is the wait of the last
    rank, and grows in proportion to the ranks before it.

    A layer's times are those of the exchange that ``ContextParallel`` chooses for the number of ranks, if it was measured, and
    else those of the other one.
    """
    from ssm_kernels.distributed._group_calls import choose_exchange

    found = constants(result["rows"])
    by_layer: dict[str, dict[str, Row]] = {}
    for row in result["rows"]:
        if row.get("kind") == "context parallel" and len(found) == 2:
            by_layer.setdefault(row["layer"], {})[exchange_of(row)] = row
    rows = []
    for layer, measured_rows in by_layer.items():
        for n in MODEL_RANKS:
            exchange = choose_exchange("ContextParallel", None, n)
            if exchange not in measured_rows:
                (exchange,) = measured_rows
            rows.append({"name": layer, "exchange": exchange} | modelled(measured_rows[exchange], n, found))
    return rows


def modelled(row: Row, n: int, found: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """The model's times of ``n`` ranks, from the times of a measured row and the constants."""
    ranks, one, part = row["ranks"], row["one"]["both"]["median"], row["part"]["both"]["median"]
    work = max(row["ours"]["both"]["median"] - seconds_of_collectives(row, ranks, found), part)
    if exchange_of(row) == "chain":
        work += (work - part) / (ranks - 1) * (n - ranks)
    sent = seconds_of_collectives(row, n, found)
    return {
        "ranks": n,
        "steps": n * (row["seqlen"] // ranks),
        "weak": {"both": work + sent},
        "collectives": {"both": sent},
        "efficiency": part / (work + sent),
        "speedup": one / (work * ranks / n + sent),
    }


# Tables.


def sent(row: Row, what: str) -> str:
    """The collectives of a layer and the bytes of their buffers, as in "2 all-gathers, 17,158"."""
    calls = row["sent"][what]
    operations = ", ".join(f"{n} {name}{'s' * (n > 1)}" for name, n in Counter(call["operation"] for call in calls).items())
    return f"{operations}, {sum(call['bytes'] for call in calls):,}" if calls else "none"


def rate(row: Row) -> str:
    """GB/s that a rank sends."""
    return over(sent_by_a_rank(row["operation"], row["bytes"], row["ranks"]) / 1e9, median(row["ours"], "call"), 1)


def tables(result: Result) -> list[Table]:
    models = [row for row in result["rows"] if row["kind"] != "collective"]
    collectives = [row for row in result["rows"] if row["kind"] == "collective"]
    case = text("case", "name")
    parts = [figure("a rank's steps on one GPU", "part", "both", decimals=1)] if any("part" in row for row in models) else []
    errors = [
        Column(what, lambda row, what=what: f"{row['errors']['ours'][what]:.1e}") for what in ("loss", "norm of the gradients")
    ]
    return [
        Table(
            "models over ranks, milliseconds",
            [
                case,
                *(figure(what, "ours", what, decimals=1) for what in ("forward", "backward")),
                figure("together", "ours", "both", decimals=1),
                figure("on one GPU", "one", "both", decimals=1),
                ratio("speed-up", "both", "one", "ours"),
                *parts,
            ],
            models,
        ),
        Table(
            "memory of a rank",
            [
                case,
                figure("peak, GiB", "ours", "peak", 2**30, 2),
                figure("one GPU's, GiB", "one", "peak", 2**30, 2),
                ratio("of one GPU's", "peak", "ours", "one", 3),
            ],
            [row for row in models if median(row["ours"], "peak") is not None],
        ),
        Table(
            "collectives of a layer, bytes",
            [case, *(Column(what, lambda row, what=what: sent(row, what)) for what in ("forward", "backward"))],
            models,
            left=3,
        ),
        Table("relative differences from one GPU", [case, *errors], models),
        Table("collectives", [case, figure("µs", "ours", "call", 1e-6, 1), Column("GB/s sent", rate)], collectives),
        Table(
            "model of more ranks",
            [
                text("model", "name"),
                text("ranks"),
                text("exchange"),
                Column("steps", lambda row: f"{row['steps']:,}"),
                Column("ms", lambda row: cell(row["weak"], "both", decimals=1)),
                Column("of these collectives", lambda row: cell(row["collectives"], "both", decimals=1)),
                Column("efficiency", lambda row: f"{row['efficiency']:.2f}"),
                Column("speed-up of one sequence", lambda row: f"{row['speedup']:.1f}"),
            ],
            model_rows(result),
        ),
    ]


# The program.


def measure_rows(cases: list[Any], run: Run) -> list[dict[str, Any]]:
    rows = [case.row(run) for case in cases]
    gc.collect()  # models whose blocks are recomputed refer to themselves
    return rows


def context(run: Run) -> Result:
    if run.device.type == "cuda":
        version = ".".join(map(str, torch.cuda.nccl.version()))
        return {"ranks": run.options.ranks, "backend": f"NCCL {version}"}
    return {"ranks": run.options.ranks, "backend": "gloo"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    found = int(os.environ.get("WORLD_SIZE", 0)) or max(torch.cuda.device_count(), 2)
    parser.set_defaults(mesh=None)  # a test gives one
    parser.add_argument("--ranks", type=int, default=found, help="processes, with a GPU each (default: all GPUs)")


BENCHMARK = Benchmark(
    "distributed",
    cases,
    tables,
    figures,
    measure_rows,
    trials=8,
    warmup=2,
    cache_writes=1,
    context=context,
    add_options=add_options,
)


def work(rank: int, device: str, ranks: int, init_method: str, arguments: Sequence[str] | None) -> None:
    """A rank: the first one prints and writes, the others measure the same cases."""
    import torch.distributed as dist

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    backend = {"cuda": "nccl", "cpu": "gloo"}[device]
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=ranks, timeout=TIMEOUT)
    status = 0
    if rank == 0:
        status = main(BENCHMARK, __doc__, arguments)
    else:
        run, chosen = parse(BENCHMARK, __doc__, arguments)
        run.options.json = None
        with contextlib.redirect_stdout(io.StringIO()):
            measured(BENCHMARK, run, chosen)
    dist.destroy_process_group()
    if status:
        sys.exit(status)


def program(arguments: Sequence[str] | None = None) -> int:
    import torch.multiprocessing as mp

    run, _ = parse(BENCHMARK, __doc__, arguments)
    device, ranks = run.options.device, run.options.ranks
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]), device, ranks, "env://", arguments)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(work, (device, ranks, f"file://{folder}/store", arguments), ranks)
        except mp.ProcessExitedException as error:
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(program())
