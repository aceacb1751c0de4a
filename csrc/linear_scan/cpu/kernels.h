// Tasks of the CPU's linear scan, and the table of kernels of one instruction set. entry.cpp is compiled once, kernel.cpp once
// per instruction set.
//
// A task is a block of channels of one batch row over all of time. Tensors that are not read and written in place pass
// through scratch memory, in tiles of [steps][lanes] in the accumulation type.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/kernel_abi.h"
#include "linear_scan/linear_scan.h"

namespace ssm_kernels::linear_scan {

constexpr int64_t kMinTaskChannels = 64, kMaxTaskChannels = 512, kTileSteps = 16;

// The widest blocks that give every thread one: hardware prefetchers follow long contiguous reads, not short ones a row apart.
struct Tasks {
  int64_t channels, blocks, count;
  Tasks(const LinearScanParams& p, int64_t threads) : channels(kMaxTaskChannels) {
    while (channels > kMinTaskChannels && (p.channels + channels - 1) / channels * p.batch < threads) channels /= 2;
    blocks = (p.channels + channels - 1) / channels;
    count = p.batch * blocks;
  }
};

// Backward has the most tiles: the inputs, what is prepared from them, and their gradients, h and grad_h; and three rows of
// states.
constexpr size_t kMaxPrepared = 2;
constexpr int64_t kScratchRows = (2 * kMaxRecurrenceInputs + kMaxPrepared + 2) * kTileSteps + 3;
constexpr int64_t kScratchBytes = kScratchRows * kMaxTaskChannels * static_cast<int64_t>(sizeof(double));

// The kernels of one instruction set. `scratch` is kScratchBytes of 64-byte aligned memory of the calling thread's own.
struct CpuKernels {
  void (*fwd_task)(const LinearScanFwdParams&, ScalarKind, const Tasks&, int64_t task, std::byte* scratch);
  void (*bwd_task)(const LinearScanBwdParams&, ScalarKind, const Tasks&, int64_t task, std::byte* scratch);
  void (*summary_task)(const LinearScanSummaryParams&, ScalarKind, const Tasks&, int64_t task, std::byte* scratch);
};

SSM_KERNEL_STRUCT(Tasks, 24);
SSM_KERNEL_STRUCT(CpuKernels, 24);

}  // namespace ssm_kernels::linear_scan
