"""Runs a Python script whose imports of ``mamba_ssm`` and ``causal_conv1d`` find this package's operators.

python -m ssm_kernels.compat script.py [arguments ...]
python -m ssm_kernels.compat -m module [arguments ...]
"""

from __future__ import annotations

import sys

from ._script import run_main


def main() -> None:
    arguments = sys.argv[1:]
    as_module = arguments[:1] == ["-m"]
    if len(arguments) <= as_module or arguments[0] in ("-h", "--help"):
        print(__doc__, file=sys.stderr)
        sys.exit(0 if arguments[:1] in (["-h"], ["--help"]) else 2)
    run_main(arguments[as_module:], as_module)


if __name__ == "__main__":
    main()
