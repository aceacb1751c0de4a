"""Prints ptxas's report of each CUDA kernel in the output of a build. Fails if a kernel spills more registers than
ALLOWED_SPILLS allows, or if there is no kernel.

    SSM_KERNELS_CUDA=1 TORCH_CUDA_ARCH_LIST=9.0a python setup.py build_ext --inplace > build.log 2>&1
    python scripts/check_kernels.py build.log

The script checks the build itself, with PyTorch's own flags. An incremental build compiles, and prints, only the changed files.
The script needs neither a GPU nor nvcc. ptxas does not know the shared memory of a launch:
tests/lib/selective_scan_plan.cu prints it for the selective scan.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

# A warning of spills repeats their sizes in a line that does not begin with the stack frame.
MEMORY = re.compile(r"^ *(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", re.MULTILINE)
REGISTERS = re.compile(r"Used (\d+) registers")
# Bytes stored and loaded. With 128 states and mma.sync, the backward kernels of ssd_chunk_scan keep 96 sums, or a state, in
# 168 registers. They spill some words, each once a chunk; setmaxnreg avoids this on 9.0a. The forward kernels spill some
# words of their work tile and of the steps whose tables come next, which have three words each with given gates; those that
# rotate B and C spill addresses and angles of the producer warps. In fp32
# operands are hi/lo pairs, which leave fewer registers; with TF32 the warps that copy for states spill addresses, once a
# segment. The norms of any rows keep the registers of the aligned kernels, so that as many blocks are resident; they spill
# words of addresses and weights, each once a row; before 9.0a those of aligned rows spill an address or two. The convolution
# of any rows spills words of addresses, the warp scan's backward of methods with a gain a word or two of a tile, that of
# float64 for rare methods 40 doubles, and with a step of its own for A 28, the recurrences' forward of shifted tiles numbers
# of tiles and addresses, each once a tile. The sequential scan's backward of rare methods spills addresses, and loads about
# ten words for four steps of two channels; that of methods that read two samples, one kernel for all of them, spills some
# words of a group of steps in each, and its forward's producers spill addresses. The delta rule's forward has four
# warpgroups: the warps that make tables and matrices, which work ahead, spill words that the others would lack. In its
# backward, those that make a chunk's gradients spill some words. Its kernels with mma.sync keep 256 columns of a state in
# half of a thread's registers, and spill operands; with fewer columns, in fp32 and fp16, they spill words of tables. mLSTM's
# normalizer spills doubles of the steps that its backward keeps, and before 9.0a addresses of rows of any alignment. The
# scan with matrices A keeps those of a channel in the registers of its lanes, and spills addresses and, in float64, entries.
# The backward of complex states keeps the states of eight steps of two channels, and spills those and addresses; that of a
# chunk, which keeps two samples and their weights besides with exp_trapezoidal, spills some words of a group of steps.
ALLOWED_SPILLS = {
    re.compile(r"delta_rule::delta_rule_fwd_sm90_kernel<.*>@sm_90a"): 480,
    re.compile(r"delta_rule::delta_rule_bwd_chunks_kernel<\w+, \d+, \w+>@sm_90a"): 48,
    re.compile(r"delta_rule::delta_rule_bwd_wide_chunks_kernel<\w+, \w+>@sm_90a"): 48,
    re.compile(r"delta_rule::delta_rule_sm80_states_kernel<float, (64|128), .*>@"): 176,
    re.compile(r"delta_rule::delta_rule_sm80_states_kernel<__half, 128, .*>@"): 168,
    re.compile(r"delta_rule::delta_rule_sm80_states_kernel<\w+, 256, .*>@"): 1560,
    re.compile(r"ssd::ssd_bwd_chunks_kernel<\w+, 128, cuda::Sm80(Mma|Tf32), .*>@(?!sm_90a)"): 200,
    re.compile(r"cuda::chunked::state_passing_kernel<.*::StatePassing<\w+, 128, .*cuda::Sm80(Mma|Tf32), .*>@(?!sm_90a)"): 200,
    re.compile(r"ssd::ssd_bwd_chunks_kernel<float, \d+, cuda::Sm80(Mma|Tf32), .*>@(?!sm_90a)"): 700,
    re.compile(r"ssd::ssd_bwd_chunks_kernel<float, 128, cuda::Sm80Mma, .*>@sm_90a"): 32,
    re.compile(r"cuda::chunked::state_passing_kernel<.*::StatePassing<float, \d+, .*cuda::Sm80Tf32, .*>@"): 200,
    re.compile(r"ssd::ssd_fwd_sm80_kernel<\w+, (128|256), ssd::\w+, .*>@(?!sm_90a)"): 144,
    re.compile(r"ssd::ssd_fwd_sm80_kernel<\w+, (128|256), ssd::Ssd(Log|Diagonal)FwdParams, .*>@(?!sm_90a)"): 208,
    re.compile(r"ssd::ssd_fwd_sm80_kernel<\w+, (128|256), ssd::SsdLogFwdParams, .*>@sm_90a"): 48,
    re.compile(r"ssd::ssd_fwd_sm80_kernel<\w+, (128|256), ssd::SsdDiagonalFwdParams, .*>@sm_90a"): 56,
    re.compile(r"ssd::ssd_fwd_sm90_kernel<\w+, 128, false, ssd::RotatedGates<\w+, 1>\s*>@sm_90a"): 480,
    re.compile(r"ssd::ssd_fwd_sm90_kernel<\w+, 128, false, ssd::RotatedGates<\w+, 2>\s*>@sm_90a"): 3200,
    re.compile(r"mlstm::mlstm_normalizer_bwd_kernel<double, \d>@"): 720,
    re.compile(r"mlstm::mlstm_normalizer_bwd_kernel<\w+, 1>@(?!sm_90a)"): 40,
    re.compile(r"causal_conv1d::conv_bwd_channels_last_kernel<\w+, true, false, true>@"): 40,
    re.compile(r"causal_conv1d::conv_bwd_channels_first_shifted_kernel<\w+>@"): 80,
    re.compile(r"causal_conv1d::conv_fwd_channels_first_shifted_kernel<\w+>@sm_90a"): 16,
    re.compile(r"causal_conv1d::conv_fwd_channels_(first|first_shifted|last_run)_kernel<\w+>@(?!sm_90a)"): 80,
    re.compile(r"selective_scan::warp_scan::warp_scan_bwd_kernel<.*>@sm_90a"): 32,
    re.compile(r"selective_scan::warp_scan::warp_scan_bwd_kernel<double, selective_scan::RareMethod, .*>@sm_90a"): 640,
    re.compile(r"selective_scan::sequential::sequential_bwd_kernel<\w+, selective_scan::RareMethod>@sm_90a"): 336,
    re.compile(r"selective_scan::sequential::sequential_two_sample_bwd_kernel<\w+>@sm_90a"): 1800,
    re.compile(r"selective_scan::sequential::sequential_two_sample_bwd_kernel<\w+>@(?!sm_90a)"): 3400,
    re.compile(r"selective_scan::sequential::sequential_two_sample_fwd_kernel<\w+>@sm_90a"): 272,
    re.compile(r"selective_scan::sequential::sequential_two_sample_fwd_kernel<\w+>@(?!sm_90a)"): 760,
    re.compile(r"selective_scan::warp_scan::warp_scan_two_sample_bwd_kernel<double>@"): 240,
    re.compile(r"selective_scan::warp_scan::warp_scan_separate_(two_sample_)?bwd_kernel<double>@"): 640,
    re.compile(r"selective_scan::dense::dense_(fwd|bwd)_kernel<.*Layout<float, (8|16), .*>@"): 800,
    re.compile(r"selective_scan::dense::dense_(fwd|bwd)_kernel<.*Layout<double, .*>@"): 2400,
    re.compile(r"selective_scan::dense::channel::dense_channel_fwd_kernel@"): 4800,
    re.compile(r"selective_scan::complex_scan::complex_scan_bwd_kernel<\w+, \w+>@"): 6400,
    re.compile(r"selective_scan::complex_scan::complex_chunk_bwd_kernel<\w+, .*>@"): 4000,
    re.compile(r"selective_scan::complex_scan::complex_scan_fwd_kernel<\w+, true>@"): 120,
    re.compile(r"mamba3::step::mamba3_step_kernel<\w+, \w+, (true|false)>@"): 160,
    re.compile(r"mamba3::unrotate_kernel<\w+, (true|false)>@"): 400,
    re.compile(r"linear_scan::linear_scan_fwd_kernel<.*, 2>@"): 128,
    re.compile(r"norm::norm_rms_\w+<.*true>@sm_90a"): 80,
    re.compile(r"norm::norm_rms_\w+<.*true>@(?!sm_90a)"): 208,
    re.compile(r"norm::norm_(fwd|bwd)_kernel<\w+, false, (false|true)>@"): 384,
    re.compile(r"norm::norm_rms_bwd_kernel<float, .*false>@(?!sm_90a)"): 8,
    re.compile(r"norm::norm_bwd_kernel<\w+, true, false>@(?!sm_90a)"): 8,
    re.compile(r"norm::norm_rms_short_bwd_kernel<__half>@"): 8,  # an address
    re.compile(r"norm::norm_fwd_kernel<\w+, true, true>@(?!sm_90a)"): 32,
}
ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")


class Kernel(NamedTuple):
    architecture: str
    name: str
    registers: int
    stack_bytes: int
    spill_bytes: int


def read_kernels(log: str) -> list[Kernel]:
    """The kernels in a build's output, in ptxas's order."""
    entries = [*ENTRY.finditer(log)]
    bounds = [entry.start() for entry in entries] + [len(log)]
    kernels = []
    for entry, end in zip(entries, bounds[1:], strict=True):
        report = log[entry.end() : end]
        memory, registers = MEMORY.search(report), REGISTERS.search(report)
        if memory is None or registers is None:
            sys.exit(f"{entry[1]}: unexpected report of ptxas:\n{report}")
        stack, stores, loads = map(int, memory.groups())
        kernels.append(Kernel(entry[2], entry[1], int(registers[1]), stack, stores + loads))
    return kernels


def demangle(names: list[str]) -> list[str]:
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if tool is None or not names:
        return names
    output = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    # cu++filt writes (bool)1 and (int)128 where c++filt writes true and 128; both write an enumerator as (Type)1.
    for pattern, text in ((r"\(bool\)0", "false"), (r"\(bool\)1", "true"), (r"\([\w: ]+\)(?=-?\d)", "")):
        output = re.sub(pattern, text, output)
    return [re.sub(r"ssm_kernels::|\(.*\)$|\bvoid ", "", line) for line in output.splitlines()]


def is_wrong(kernel: Kernel, name: str) -> bool:
    allowed = [size for pattern, size in ALLOWED_SPILLS.items() if pattern.match(f"{name}@{kernel.architecture}")]
    return kernel.spill_bytes > max(allowed, default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("log", type=Path, help="the output of the build")
    arguments = parser.parse_args()
    kernels = read_kernels(arguments.log.read_text(errors="replace"))
    print(f"{'for':>8} {'registers':>9} {'stack B':>7} {'spill B':>7}  kernel")
    names = demangle([kernel.name for kernel in kernels])
    for kernel, name in zip(kernels, names, strict=True):
        print(f"{kernel.architecture:>8} {kernel.registers:9} {kernel.stack_bytes:7} {kernel.spill_bytes:7}  {name}")
    spilling = sum(kernel.spill_bytes > 0 for kernel in kernels)
    wrong = sum(map(is_wrong, kernels, names))
    print(f"{len(kernels)} kernels, {spilling} with spills" + (f", {spilling - wrong} of them allowed" if spilling else ""))
    if not kernels or wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
