"""Runs a Python script whose imports of ``mamba_ssm`` and ``causal_conv1d`` find this package's operators.

python -m ssm_kernels.compat script.py [arguments ...]
python -m ssm_kernels.compat -m module [arguments ...]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from . import install


def main() -> None:
    arguments = sys.argv[1:]
    as_module = arguments[:1] == ["-m"]
    if len(arguments) <= as_module or arguments[0] in ("-h", "--help"):
        print(__doc__, file=sys.stderr)
        sys.exit(0 if arguments[:1] in (["-h"], ["--help"]) else 2)
    install()
    sys.argv = arguments[as_module:]
    if as_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
