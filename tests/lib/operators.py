"""Every operator, for the tests that run for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from conv_helpers import CONV
from delta_rule_helpers import DELTA_RULE
from mamba3_helpers import MAMBA3
from mlstm_helpers import MLSTM
from norm_helpers import NORMS
from operator_spec import OperatorSpec
from recurrence_helpers import PLAIN, VARIANTS
from selective_scan_helpers import SELECTIVE_SCAN
from ssd_helpers import SSD

_SCANS = (SELECTIVE_SCAN, SSD, DELTA_RULE, MAMBA3, MLSTM, *PLAIN.values(), CONV)
SCANS: dict[str, OperatorSpec] = {spec.name: spec for spec in _SCANS}
# With all options of the recurrences.
ALL_SCANS: dict[str, OperatorSpec] = {name: spec for name, spec in SCANS.items() if name not in PLAIN} | VARIANTS
OPERATORS: dict[str, OperatorSpec] = SCANS | NORMS


Options = Mapping[str, dict[str, Any]]


def over(operators: Mapping[str, OperatorSpec]) -> pytest.MarkDecorator:
    """Parametrizes a test over these operators."""
    return pytest.mark.parametrize("operator", operators.values(), ids=list(operators))


def over_options(operators: Mapping[str, OperatorSpec], options_of: Callable[[OperatorSpec], Options]) -> pytest.MarkDecorator:
    """Parametrizes a test over operators with each of these options of ``make_inputs``."""
    pairs = {f"{key}-{name}": (spec, options) for key, spec in operators.items() for name, options in options_of(spec).items()}
    return pytest.mark.parametrize(("operator", "options"), pairs.values(), ids=list(pairs))


every_operator, every_scan = over(OPERATORS), over(SCANS)
every_case, every_case_of_scans = (over_options(operators, lambda spec: spec.cases) for operators in (OPERATORS, SCANS))
