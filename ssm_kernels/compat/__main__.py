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
    if len(arguments) <= as_module or (arguments[0].startswith("-") and not as_module):
        print(__doc__, file=sys.stderr)
        if arguments[:1] in (["-h"], ["--help"]):
            sys.exit(0)
        got = arguments[0] if arguments else "nothing"
        print(f"python -m ssm_kernels.compat: expected a script, or -m and a module, got {got}", file=sys.stderr)
        sys.exit(2)
    run_main(arguments[as_module:], as_module)


if __name__ == "__main__":
    main()
