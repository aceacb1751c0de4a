"""``python -m ssm_kernels``: prints what was built, what is usable on this machine, and how to build the rest."""

from __future__ import annotations

import platform
import shutil
import subprocess

import torch

import ssm_kernels

from ._build_info import runs_on
from ._rebuild import rebuild_command, rebuild_with_cuda_command


def nvidia_driver() -> str | None:
    """Version of the NVIDIA driver, or None."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    result = subprocess.run(query, capture_output=True, text=True)
    return result.stdout.split("\n")[0].strip() or None if result.returncode == 0 else None


def capability_in_use(built: tuple[str, ...]) -> str:
    """The instruction set whose kernels run here, in PyTorch's names: the CPU's if it was built, else the baseline."""
    capability = torch.backends.cpu.get_cpu_capability()
    return capability if capability in built else "DEFAULT"


def cuda_status(info: ssm_kernels._build_info.BuildInfo) -> tuple[list[tuple[str, str]], list[str]]:
    """Checks which parts of CUDA are usable; returns (rows to print, hints)."""
    driver = nvidia_driver()
    rows = [("NVIDIA driver", driver or "none found")]
    hints = []
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(devices):
        major, minor = torch.cuda.get_device_capability(index)
        usable = info["cuda"] is not None and runs_on(info["architectures"], (major, minor))
        name = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
        rows.append((f"cuda:{index}", f"{name}: {'usable' if usable else 'not usable'}"))
        if info["cuda"] is not None and not usable:
            hints.append(
                f"cuda:{index} is not among the architectures built. Rebuild with TORCH_CUDA_ARCH_LIST unset, "
                f"or with {major}.{minor} in it: {rebuild_command()}"
            )
    if devices == 0:
        rows.append(("CUDA devices", "none that torch can use"))
        if driver is not None and torch.version.cuda is None:
            hints.append("There is an NVIDIA driver, but this torch is built without CUDA: install a CUDA build of torch.")
        elif driver is not None:
            hints.append(f"torch {torch.__version__} cannot use the NVIDIA driver {driver}: it may be too old for its CUDA.")
    if info["cuda"] is None and torch.version.cuda is not None:
        purpose = "" if driver else " for a GPU on another machine"
        hints.append(f"CUDA kernels were not built. To build them{purpose}: {rebuild_with_cuda_command()}")
    return rows, hints


def main() -> None:
    info = ssm_kernels.build_info()
    cuda_rows, hints = cuda_status(info)
    cuda = f"nvcc {info['cuda']}, for {', '.join(info['architectures'])}" if info["cuda"] else "not built"
    sections = {
        f"ssm_kernels {info['version']}: built": [
            ("torch", info["torch"]),
            ("compiler", info["compiler"]),
            ("CPU kernels", ", ".join(info["cpu_capabilities"])),
            ("CUDA kernels", cuda),
            ("discretizations", ", ".join(info["discretizations"])),
        ],
        "usable here": [
            ("Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"),
            ("torch", torch.__version__),
            ("CPU kernels", capability_in_use(info["cpu_capabilities"])),
            ("threads", str(torch.get_num_threads())),
            *cuda_rows,
        ],
    }
    for title, rows in sections.items():
        print(title)
        for name, value in rows:
            print(f"  {name:<16} {value}")
    for hint in hints:
        print(hint)


if __name__ == "__main__":
    main()
