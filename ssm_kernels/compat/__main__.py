"""Runs a Python script whose imports of ``mamba_ssm`` and ``causal_conv1d`` find this package's operators.

python -m ssm_kernels.compat [--only PARTS] [--served] script.py [arguments ...]
python -m ssm_kernels.compat [--only PARTS] [--served] -m module [arguments ...]

--only PARTS  install these parts, such as selective_scan_cuda,causal_conv1d_cuda, beside a project's own mamba_ssm
--served      at the end, print to stderr which names were asked for, by whom, and what answered
"""

from __future__ import annotations

import sys

from ._script import run_main


def main() -> None:
    arguments, only, prints_served = sys.argv[1:], None, False
    while arguments[:1] in (["--only"], ["--served"]):
        if arguments.pop(0) == "--served":
            prints_served = True
        else:
            only = arguments.pop(0).split(",") if arguments else []
    as_module = arguments[:1] == ["-m"]
    if len(arguments) <= as_module or (arguments[0].startswith("-") and not as_module):
        print(__doc__, file=sys.stderr)
        if arguments[:1] in (["-h"], ["--help"]):
            sys.exit(0)
        got = arguments[0] if arguments else "nothing"
        print(f"python -m ssm_kernels.compat: expected a script, or -m and a module, got {got}", file=sys.stderr)
        sys.exit(2)
    run_main(arguments[as_module:], as_module, only, prints_served)


if __name__ == "__main__":
    main()
