"""Checks that a figure is legible, by the extents of what matplotlib draws."""

from __future__ import annotations

from itertools import combinations

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox


def _box(text: Text) -> Bbox:
    """The extent of the text alone: an annotation's own extent includes its arrow."""
    if isinstance(text, Annotation):
        text.update_positions(text.figure.canvas.get_renderer())
    return Text.get_window_extent(text)


def assert_legible(figure: Figure) -> None:
    """No two texts overlap, all are inside the figure, and no legend covers a panel."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend() is not None)]
    for legend in legends:
        for axes in figure.axes:
            assert not legend.get_window_extent().overlaps(axes.get_window_extent()), "a legend covers a panel"
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    # matplotlib keeps tick labels outside the limits, and does not draw them.
    hidden: set[Text] = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            drawn = set(axis._update_ticks())
            hidden |= {label for tick in ticks if tick not in drawn for label in (tick.label1, tick.label2)}
    boxes = {text: _box(text) for text in texts if text not in hidden}
    for text, box in boxes.items():
        assert figure.bbox.padded(1).containsx(box.x0) and figure.bbox.padded(1).containsx(box.x1), text.get_text()
        assert figure.bbox.padded(1).containsy(box.y0) and figure.bbox.padded(1).containsy(box.y1), text.get_text()
    for (first, box), (second, other) in combinations(boxes.items(), 2):
        assert not box.padded(-0.5).overlaps(other.padded(-0.5)), f"{first.get_text()!r} overlaps {second.get_text()!r}"
