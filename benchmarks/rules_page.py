#!/usr/bin/env python3
"""Writes the tables of the rules and of the classifiers trained with them into docs/discretizations.md.

    python benchmarks/rules_page.py [PAGE.md]

The formulas are from here, and the numbers from files in docs/figures: orders, DC gains and times from those of
``profile_discretization.py``, accuracies from that of ``examples/train_sequence.py``.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.labels import ALIASES
from benchmarks.tables import Column, Table, markdown

DOCS = Path(__file__).resolve().parents[1] / "docs"
PROFILE, HELD, RATES = (
    DOCS / "figures" / f"{name}.json" for name in ("profile_discretization", "held_input", "sampling_rates")
)
S4D = {name: DOCS / "figures" / f"s4d_{name}.json" for name in ("lin", "inv")}
LEGS = DOCS / "figures" / "legs.json"
BLOCKS = ("rules", "complex", "matrix", "errors", "errors of held input", "trained")

Result = Mapping[str, Any]


class Rule(NamedTuple):
    """The properties of a rule that follow from its formulas.

    Attributes:
        name: with its number, as in the measurements.
        decay, now, before: the coefficients of the recurrence, in Markdown.
        stability: for A < 0.
        gain: the DC gain over the exact one; "exact", or a factor.
        safe: the largest safe |z|.
    """

    name: str
    decay: str
    now: str
    before: str
    stability: str
    gain: str
    safe: str


_EXP, _BILINEAR = "$e^z$", r"$\dfrac{1 + z/2}{1 - z/2}$"
_GBT = r"$\dfrac{1 + (1 - \alpha) z}{1 - \alpha z}$"
_OF_ALPHA = r"A for $\alpha \ge 1/2$, L for $\alpha = 1$"
_TRUNCATED = r"A and L; $c$ unbounded"

RULES = (
    Rule("zoh", _EXP, r"$\Delta$", "0", "A and L", r"$1/\varphi_1$", "0.19"),
    Rule("zoh_exact", _EXP, r"$\Delta\,\varphi_1$", "0", "A and L", "exact", "any"),
    Rule("bilinear", _BILINEAR, r"$\dfrac{\Delta}{1 - z/2}$", "0", "A", "exact", "2"),
    Rule("highorder", _EXP, r"$\Delta\,(1 + z/2)$", "0", _TRUNCATED, r"$k/\varphi_1$", "0.71"),
    Rule("poly", _EXP, r"$\Delta\,(1 + z/2 + z^2/6)$", "0", _TRUNCATED, r"$k/\varphi_1$", "1.20"),
    Rule("rk4", _EXP, r"$\Delta\,(1 + z/2 + z^2/6 + z^3/24)$", "0", _TRUNCATED, r"$k/\varphi_1$", "1.65"),
    Rule("euler", "$1 + z$", r"$\Delta$", "0", "$-2 < z < 0$ only", "exact", "1"),
    Rule("backward_euler", r"$\dfrac{1}{1 - z}$", r"$\dfrac{\Delta}{1 - z}$", "0", "A and L", "exact", "any"),
    Rule("gbt(0.7)", _GBT, r"$\dfrac{\Delta}{1 - \alpha z}$", "0", _OF_ALPHA, "exact", r"$1/(1 - \alpha)$"),
    Rule("dirac", _EXP, "1", "0", "A and L", "none", "-"),
    Rule("foh_ramp", _EXP, r"$\Delta\,\varphi_2$", r"$\Delta\,(\varphi_1 - \varphi_2)$", "A and L", "exact", "any"),
    Rule("trapezoidal", _BILINEAR, r"$\dfrac{\Delta/2}{1 - z/2}$", r"$\dfrac{\Delta/2}{1 - z/2}$", "A", "exact", "2"),
    Rule(
        *(
            "gbt_two_sample(0.7)",
            _GBT,
            r"$\dfrac{\alpha \Delta}{1 - \alpha z}$",
            r"$\dfrac{(1 - \alpha) \Delta}{1 - \alpha z}$",
        ),
        *(_OF_ALPHA, "exact", r"$1/(1 - \alpha)$"),
    ),
    Rule(
        *("exp_trapezoidal", _EXP, r"$\lambda_t \Delta$", r"$(1 - \lambda_t) \Delta\,e^z$", "A and L"),
        *(r"$(\lambda + (1 - \lambda) e^z)/\varphi_1$", "1.11"),
    ),
)


def title_of(name: str) -> str:
    """The rule as its users write it."""
    stem, _, alpha = name.removesuffix(")").partition("(")
    alias = f" (`{ALIASES[stem]}`)" if stem in ALIASES else ""
    return f"`{stem}`{alias}" + (rf", $\alpha$ {alpha}" if alpha else "")


def by_method(result: Result, part: str) -> dict[str, Any]:
    return {row["method"]: row for row in result[part]}


def order_of(found: Result | None, sampling: str) -> str:
    """The measured order as a whole number; "exact" where every error is one of rounding."""
    if found is None:
        return "-"
    curve = found[f"sampled_at_{sampling}"]
    if curve["order"] is not None:
        return f"{curve['order']:.0f}"
    return "exact" if max(error for error in curve["errors"][-3:]) < 1e-12 else "-"


def gain_of(rule: Rule, found: Result | None) -> str:
    if found is None or rule.gain == "none":
        return "-"
    error = found["dc_gain_error"]
    if rule.gain == "exact":
        assert error is not None and abs(error) < 1e-12, rule.name
        return "exact"
    return f"{rule.gain}: {100 * error:+.0f} %"


def time_of(rule: str, scans: Mapping[str, Any], what: str) -> str:
    """Over the time of zoh."""
    return "-" if rule not in scans else f"{scans[rule][what]['median'] / scans['zoh'][what]['median']:.2f}"


def rules_block(profile: Result, held: Result) -> str:
    """The table of all rules, and the conditions of its numbers."""
    accuracies, scans, of_held = by_method(profile, "accuracies"), by_method(profile, "scans"), by_method(held, "accuracies")

    def orders(rule: Rule) -> str:
        found = accuracies.get(rule.name)
        return f"{order_of(found, 'end')} / {order_of(found, 'middle')} / {order_of(of_held.get(rule.name), 'end')}"

    columns = [
        Column("rule", lambda row: title_of(row["rule"].name)),
        Column(r"$\bar A$", lambda row: row["rule"].decay),
        Column("$c$, of $u_t$", lambda row: row["rule"].now),
        Column("$c_0$, of $u_{t-1}$", lambda row: row["rule"].before),
        Column("order: end / middle / held", lambda row: orders(row["rule"])),
        Column("DC gain", lambda row: gain_of(row["rule"], accuracies.get(row["rule"].name))),
        Column("stable", lambda row: row["rule"].stability),
        Column(r"safe $\lvert z \rvert$", lambda row: row["rule"].safe),
        Column("forward", lambda row: time_of(row["rule"].name, scans, "forward")),
        Column("backward", lambda row: time_of(row["rule"].name, scans, "backward")),
    ]
    settings, zoh = profile["settings"], scans["zoh"]
    place = profile["machine"].get("gpu") or profile["machine"]["cpu"]
    size = f"{settings['dtype']} B{settings['batch']} D{settings['dim']} L{settings['seqlen']} N{settings['dstate']} z"
    milliseconds = " and ".join(f"{1e3 * zoh[what]['median']:.3f} ms" for what in ("forward", "backward"))
    step, (slow, fast) = profile["accuracies"][0]["dc_step"], settings["A_range"]
    words = (
        f"Measured by `profile_discretization.py`: the orders; the percentages of the DC gain at $z = {-step * fast:.2g}$ "
        f"(step {step:g}, the worst of A from -{slow:g} to -{fast:g}); and time over that of `zoh`, which takes {milliseconds} "
        f"in `selective_scan` on an {place}, {size}. In the table `exp_trapezoidal` has $\\lambda = 1/2$; "
        "the profiler leaves out `dirac`."
    )
    return f"{markdown(Table('rules', columns, [{'rule': rule} for rule in RULES], left=8))}\n\n{filled(words)}"


def errors_block(result: Result, steps: Sequence[float], middle: float | None) -> str:
    """The table of relative errors at some step sizes; with ``middle`` also of samples from the middle of that step."""

    def error(sampling: str, step: float) -> Column:
        def of_row(row: Mapping[str, Any]) -> str:
            (found,) = (
                value
                for at, value in zip(row["steps"], row[f"sampled_at_{sampling}"]["errors"], strict=True)
                if math.isclose(at, step)
            )
            return "diverges" if found is None else f"{found:.1e}"

        return Column(f"step {step:g}{', sampled at its middle' if sampling == 'middle' else ''}", of_row)

    columns = [Column("relative error", lambda row: title_of(row["method"])), *(error("end", step) for step in steps)]
    columns += [] if middle is None else [error("middle", middle)]
    return markdown(Table("errors", columns, result["accuracies"]))


def error_at(row: Mapping[str, Any], step: float) -> str:
    """The error with the input at the steps' ends."""
    errors = zip(row["steps"], row["sampled_at_end"]["errors"], strict=True)
    return f"{next(value for at, value in errors if math.isclose(at, step)):.1e}"


def complex_block(linear: Result, inverse: Result) -> str:
    """The table of the rules that take complex states, and the conditions of its numbers."""
    of_inverse = by_method(inverse, "accuracies")

    def orders(name: str) -> str:
        return " / ".join(order_of(found, at) for found in (linear_of[name], of_inverse[name]) for at in ("end", "middle"))

    def gain(row: Mapping[str, Any]) -> str:
        found = row["dc_gain_error"]
        return "exact" if found < 1e-12 else f"{100 * found:.0f} %"

    linear_of = by_method(linear, "accuracies")
    columns = [
        Column("complex states", lambda row: title_of(row["method"])),
        Column("order: Lin, end / middle / Inv, end / middle", lambda row: orders(row["method"])),
        *(Column(f"error, step {step:g}", lambda row, step=step: error_at(row, step)) for step in (0.064, 0.008, 0.001)),
        Column("DC gain, error", gain),
    ]
    (slow, fast), (_, fastest) = linear["settings"]["A_range"], inverse["settings"]["A_range"]
    words = (
        f"S4D with {linear['settings']['dstate']} states. Orders and errors are measured as for real ones. Errors are of "
        f"S4D-Lin with the input at the steps' ends, where $\\lvert A \\rvert$ is {slow:g} to {fast:.3g}; S4D-Inv reaches "
        f"{fastest:.3g}. DC gain: the largest relative error of $c/(1 - \\bar A)$, S4D-Lin, step "
        f"{linear['accuracies'][0]['dc_step']:g}."
    )
    return f"{markdown(Table('complex', columns, linear['accuracies'], left=2))}\n\n{filled(words)}"


def matrix_block(found: Result) -> str:
    """The table of all rules with the matrix of HiPPO-LegS, and the conditions of its numbers."""

    def orders(row: Mapping[str, Any]) -> str:
        return " / ".join(order_of(row, at) for at in ("end", "middle"))

    def gain(row: Mapping[str, Any]) -> str:
        return "exact" if row["dc_gain_error"] < 1e-12 else f"{100 * row['dc_gain_error']:.0f} %"

    def unstable(row: Mapping[str, Any]) -> str:
        steps = [step for step, radius in zip(row["steps"], row["spectral_radii"], strict=True) if not radius < 1]
        return f"from {min(steps):g}" if steps else "at none"

    columns = [
        Column("HiPPO-LegS", lambda row: title_of(row["method"])),
        Column("computed by", lambda row: {"operator": "operators", "reference": "the reference"}[row["computed_by"]]),
        Column("order: end / middle", orders),
        *(Column(f"error, step {step:g}", lambda row, step=step: error_at(row, step)) for step in (0.064, 0.008, 0.001)),
        Column("DC gain, error", gain),
        Column("unstable step", unstable),
    ]
    settings, rows = found["settings"], found["accuracies"]
    words = (
        f"HiPPO-LegS with {settings['dstate']} states, one matrix for all channels, float64 on a CPU. Orders and errors are "
        "measured as for a diagonal A, errors with the input at the steps' ends. DC gain: the norm of the error of the states "
        f"that a constant input leads to, over the norm of the exact ones, step {rows[0]['dc_step']:g}. Unstable step: the "
        f"smallest measured step, of those up to {max(rows[0]['steps']):g}, with a spectral radius of $\\bar A$ of 1 or more."
    )
    return f"{markdown(Table('matrix', columns, rows, left=3))}\n\n{filled(words)}"


def filled(paragraph: str, **indents: str) -> str:
    return textwrap.fill(paragraph, 128, break_long_words=False, break_on_hyphens=False, **indents)


# Student's t for a two-sided interval of 95 %, by degrees of freedom.
_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def distinguished(best: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the 95 % interval of the mean difference, paired by seed, is above zero."""
    differences = [a - b for a, b in zip(best, other, strict=True)]
    mean, seeds = statistics.mean(differences), len(differences)
    return mean > _T[seeds - 1] * statistics.stdev(differences) / math.sqrt(seeds)


def listed(names: Sequence[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"


def compared(results: Result, condition: str, where: str) -> str:
    """A sentence or two: the rule with the highest mean, and which others it is not distinguished from.

    Rules that diverged with a seed are left out.
    """
    trained = {rule: entry for rule, entry in results["rules"].items() if not entry["diverged"]}
    shares = {rule: entry["accuracies"][condition] for rule, entry in trained.items()}
    means = {rule: statistics.mean(values) for rule, values in shares.items()}
    best = max(means, key=lambda rule: means[rule])
    near = [rule for rule in shares if rule != best and not distinguished(shares[best], shares[rule])]
    far = sorted((rule for rule in shares if rule != best and rule not in near), key=lambda rule: means[rule])
    first = f"{where} `{best}` has the highest mean, {100 * means[best]:.1f} %"
    if not far:
        return f"{first}, and is distinguished from none of the others: no rule wins."
    without = f"and is distinguished from all others, of which `{far[-1]}` comes next with {100 * means[far[-1]]:.1f} %."
    if not near:
        return f"{first}, {without}"
    rest = f"Below them are {listed([*reversed(far)])}, down to {100 * means[far[0]]:.1f} %."
    return f"{first}, and is not distinguished from {listed(near)}: none of these wins. {rest}"


CONDITIONS = {
    "equal": "At the rate of the training",
    "half": "At half the rate, with step sizes doubled,",
    "twice": "At twice the rate, with step sizes halved,",
}
NOT_SCALED = ("half, not scaled", "twice, not scaled")


def not_scaled(results: Result) -> str:
    """A sentence: the range of the means at other rates, with step sizes as they are."""
    trained = [entry["accuracies"] for entry in results["rules"].values() if not entry["diverged"]]
    means = [statistics.mean(shares[name]) for shares in trained for name in NOT_SCALED]
    return (
        f"At half and twice the rate, with step sizes as they are, the means are {100 * min(means):.1f} to "
        f"{100 * max(means):.1f} %, where chance is {100 / results['classes']:.4g} %."
    )


def trained_block(results: Result) -> str:
    """The table of accuracies, and sentences that say which differences the seeds leave."""
    seeds = results["settings"]["seeds"]

    def share(condition: str) -> Column:
        def of_row(row: Mapping[str, Any]) -> str:
            values = [100 * value for value in row["entry"]["accuracies"][condition]]
            return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"

        return Column(condition, of_row)

    def reach(row: Mapping[str, Any]) -> str:
        reached = [value for value in row["entry"]["reach"] if value is not None]
        return f"{statistics.median(reached):.1f}" if reached else "-"

    columns = [
        Column("rule", lambda row: title_of(row["rule"])),
        *map(share, (*CONDITIONS, *NOT_SCALED)),
        Column(r"$\lvert z \rvert$", reach),
    ]
    diverged = {rule: entry["diverged"] for rule, entry in results["rules"].items() if entry["diverged"]}
    rows = [{"rule": rule, "entry": entry} for rule, entry in results["rules"].items()]
    sentences = [*(compared(results, name, where) for name, where in CONDITIONS.items()), not_scaled(results)]
    sentences += [
        f"`{rule}` diverged in training with {count} of {seeds} seeds, and is not compared." for rule, count in diverged.items()
    ]
    paragraphs = [
        markdown(Table("trained", columns, rows)),
        filled(
            f"Test accuracy in %, mean ± standard deviation of {seeds} seeds, on an {results['machine']} with torch "
            f"{results['torch'].partition('+')[0]}. Two rules are distinguished where the 95 % interval of their mean "
            "difference, paired by seed, is above zero. Last column: what 90 % of all $\\lvert z \\rvert$ in a trained model "
            "are below, at the rate of the training, median of the seeds."
        ),
        "\n".join(filled(sentence, initial_indent="* ", subsequent_indent="  ") for sentence in sentences),
    ]
    return "\n\n".join(paragraphs)


def replaced(page: str, name: str, block: str) -> str:
    """The page with the block between its two markers written anew.

    Raises:
        ValueError: the markers are not there once each.
    """
    begin, end = f"<!-- {name}: written by benchmarks/rules_page.py -->", f"<!-- end of {name} -->"
    pattern = f"{re.escape(begin)}\n.*?{re.escape(end)}"
    if len(re.findall(pattern, page, flags=re.DOTALL)) != 1:
        raise ValueError(f"expected one block between {begin!r} and {end!r}")
    return re.sub(pattern, lambda _: f"{begin}\n{block}\n{end}", page, flags=re.DOTALL)


def written(page: str) -> str:
    """The page with all blocks written anew."""
    profile, held, rates = (json.loads(path.read_text()) for path in (PROFILE, HELD, RATES))
    blocks = (
        rules_block(profile, held),
        complex_block(*(json.loads(path.read_text()) for path in S4D.values())),
        matrix_block(json.loads(LEGS.read_text())),
        errors_block(profile, (0.512, 0.064, 0.001), 0.064),
        errors_block(held, (0.256, 0.008, 0.001), None),
        trained_block(rates),
    )
    for name, block in zip(BLOCKS, blocks, strict=True):
        page = replaced(page, name, block)
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("page", nargs="?", type=Path, default=DOCS / "discretizations.md", metavar="PAGE.md")
    page = parser.parse_args(arguments).page
    try:
        page.write_text(written(page.read_text()))
    except (OSError, KeyError, ValueError) as error:
        parser.error(f"{page}: {error}")
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
