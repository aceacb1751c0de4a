"""Tables of results: columns that are declared once, rendered for the terminal and as Markdown.

A row of results is a dictionary, as the JSON file has it. Under the name of each contender ("ours", "mamba_ssm", ...) it has
*figures*: times with median and spread (``harness.Timing``), sizes as numbers, whether they are ``recorded`` instead of
measured, and why a contender is ``unsupported``. Contenders and figures that were not measured are missing; their cells are
empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]
Figures = Mapping[str, Any]
Result = Mapping[str, Any]
DIRECTIONS = ("forward", "backward")


class Column(NamedTuple):
    """A column: its name, and its cell for a row."""

    name: str
    of_row: Callable[[Row], str]


class Table(NamedTuple):
    """A table of a result; its title is also its name in ``page.md``. ``left`` columns are aligned to the left."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    left: int = 1

    def cells(self, row: Row) -> list[str]:
        return [column.of_row(row) for column in self.columns]


def markdown(table: Table) -> str:
    lines = [[column.name for column in table.columns], ["---"] * table.left + ["---:"] * (len(table.columns) - table.left)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [*lines, *map(table.cells, table.rows)])


def show(table: Table, console: Any = None) -> None:
    """Prints the table on the terminal, by a ``rich`` console."""
    from rich.console import Console  # here, because a page needs no rich
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(box=None, padding=(0, 1), pad_edge=False, collapse_padding=True)
    for index, column in enumerate(table.columns):
        shown.add_column(column.name, justify="left" if index < table.left else "right", no_wrap=True, vertical="bottom")
    for row in table.rows:
        shown.add_row(*map(Text, table.cells(row)))
    (console or Console(width=220, highlight=False)).print("", Text(table.title, "bold"), shown, sep="\n")


def median(figures: Figures | None, what: str) -> float | None:
    """A figure as a number: the median of a time, or a size."""
    found = (figures or {}).get(what)
    return found["median"] if isinstance(found, Mapping) else found


def cell(figures: Figures | None, what: str, unit: float = 1e-3, decimals: int = 3, *, spread: bool = False) -> str:
    """A figure in a unit, marked if it is recorded."""
    figures, found = figures or {}, median(figures, what)
    if found is None:
        return "unsupported" if figures.get("unsupported") else ""
    words = f"{found / unit:.{decimals}f}"
    if spread and isinstance(figures[what], Mapping):
        words += f" ± {100 * figures[what]['spread']:.0f} %"
    return words + (" (recorded)" if figures.get("recorded") else "")


def over(above: float | None, below: float | None, decimals: int = 2) -> str:
    """A ratio; empty where one of the two is not known."""
    return "" if above is None or below is None else f"{above / below:.{decimals}f}"


def text(name: str, key: str | None = None) -> Column:
    """The column of a field that is printed as it is."""
    return Column(name, lambda row: str(row[name if key is None else key]))


def figure(name: str, who: str, what: str, unit: float = 1e-3, decimals: int = 3) -> Column:
    """The column of a contender's figure; ours is given with its spread."""
    return Column(name, lambda row: cell(row.get(who), what, unit, decimals, spread=who == "ours"))


def ratio(name: str, what: str, above: str, below: str, decimals: int = 2) -> Column:
    """The column of one contender's figure over another's. A speed-up is the other's time over ours."""
    return Column(name, lambda row: over(median(row.get(above), what), median(row.get(below), what), decimals))


def throughput(name: str, amount: str, what: str, unit: float, who: str = "ours") -> Column:
    """The column of what a contender moves or computes in a second, in a unit."""

    def of_row(row: Row) -> str:
        done = row[amount]
        return over((done[what] if isinstance(done, Mapping) else done) / unit, median(row.get(who), what), 0)

    return Column(name, of_row)


def versus(name: str, who: str, what: str, unit: float = 1e-3, decimals: int = 3) -> list[Column]:
    """The columns of another's figure and of our speed-up over it."""
    return [figure(name, who, what, unit, decimals), ratio("speed-up", what, who, "ours")]


def by_direction(rows: Sequence[Row]) -> list[Row]:
    """A row for each direction of every row: the times and amounts of this direction are "it"."""

    def of_one(value: Any, what: str) -> Any:
        return {**value, "it": value[what]} if isinstance(value, Mapping) and what in value else value

    return [
        {"direction": what, **{key: of_one(value, what) for key, value in row.items()}} for row in rows for what in DIRECTIONS
    ]


def errors_of(row: Row, who: str = "ours") -> Mapping[str, float]:
    """A contender's errors by result; older results have those of ours alone."""
    found = row["errors"]
    return found if who == "ours" and "ours" not in found else found.get(who, {})


def error_columns(rows: Sequence[Row]) -> list[Column]:
    """The columns of our errors, one for each result and gradient."""

    def column(name: str) -> Column:
        return Column(name, lambda row: f"{errors_of(row)[name]:.1e}" if name in errors_of(row) else "")

    return [column(name) for name in dict.fromkeys(name for row in rows for name in errors_of(row))]


def largest_errors(rows: Sequence[Row], key: str) -> Table:
    """The largest error of each result and gradient, over the rows that have ``key`` in common."""
    worst: dict[str, dict[str, float]] = {}
    for row in rows:
        found = worst.setdefault(row[key], {})
        for name, error in errors_of(row).items():
            found[name] = max(error, found.get(name, error))
    groups = [{"group": group, "errors": {"ours": errors}} for group, errors in worst.items()]
    return Table("largest relative errors", [text(key, "group"), *error_columns(groups)], groups)
