"""The least time that selective_scan needs on a chip of known rates, by resource.

For E = batch x dim x seqlen:

* memory: bytes / copy, each argument, result and gradient read or written once and nothing else;
* special functions: E (dstate + 1, with z + 3) / rate: an exponential per state, one function for softplus and two for SiLU;
* issue: E slots / rate, with slots = 5.5 dstate + 27 forward (two products, exponential, two multiply-adds, half a load of B
  and C) and 15 dstate + 50 backward, which recomputes the states.

It counts what zoh needs; the other methods are held against the same floor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Per second, of one H200, 132 SMs at 1.83 GHz: bytes of a copy (measured); special functions, 16 per SM and clock; instructions
# of one lane, 128 per SM and clock.
H200_RATES = {"copy": 4.257e12, "special functions": 3.87e12, "issue": 30.9e12}
SLOTS_PER_UPDATE = {"forward": 5.5, "backward": 15.0}
_SLOTS_PER_ELEMENT = {"forward": 27, "backward": 50}


def floors(row: Mapping[str, Any], rates: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Seconds that each resource needs, forward and backward, for a row of the benchmark's result."""
    elements = row["batch"] * row["dim"] * row["seqlen"]
    special = elements * (row["dstate"] + (3 if row["z"] else 1))
    return {
        direction: {
            "memory": row["bytes"][direction] / rates["copy"],
            "special functions": special / rates["special functions"],
            "issue": elements * (slots * row["dstate"] + _SLOTS_PER_ELEMENT[direction]) / rates["issue"],
        }
        for direction, slots in SLOTS_PER_UPDATE.items()
    }
