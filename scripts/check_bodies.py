"""Checks the types in the bodies of the modules that have stubs: mypy reads the stubs in their place.

    python scripts/check_bodies.py

It runs mypy on a copy of the package in which each of these modules is beside its stub under a second name.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def copies(package: Path) -> list[Path]:
    """Copies the sources of ``package``'s stubs to ``<module>_body.py`` beside them."""
    found = [stub.with_suffix(".py") for stub in sorted(package.rglob("*.pyi"))]
    return [Path(shutil.copy(source, source.with_name(f"{source.stem}_body.py"))) for source in found]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "ssm_kernels"
        shutil.copytree(ROOT / "ssm_kernels", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", "/dev/null"]
        return subprocess.run([*command, *map(str, copies(package))], cwd=folder).returncode


if __name__ == "__main__":
    sys.exit(main())
