"""The style of all figures: applies ``style.mplstyle``."""

from __future__ import annotations

from pathlib import Path

import matplotlib

STYLE = matplotlib.rc_params_from_file(str(Path(__file__).with_suffix(".mplstyle")), use_default_template=False)
COLORS: tuple[str, ...] = tuple(f"#{color.removeprefix('#')}" for color in STYLE["axes.prop_cycle"].by_key()["color"])
