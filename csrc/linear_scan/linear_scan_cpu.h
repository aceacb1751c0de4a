// Between the CPU entry points (linear_scan_cpu.cpp, compiled once) and the CPU kernels (linear_scan_cpu_kernel.cpp, compiled
// once per instruction set).
//
// A task is a block of channels of one batch entry, over all of time: tiles of [steps][lanes] in the accumulation type pass
// through scratch memory that stays in the first caches.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear_scan/linear_scan.h"

namespace ssm_kernels::linear_scan {

constexpr int64_t kTaskChannels = 64, kTileSteps = 32;

struct Tasks {
  int64_t blocks, count;
  explicit Tasks(const LinearScanParams& p)
      : blocks((p.channels + kTaskChannels - 1) / kTaskChannels), count(p.batch * blocks) {}
};

// Backward has the most tiles: the inputs and their gradients, h and grad_h; and two rows of states.
constexpr int64_t kScratchRows = (2 * kMaxRecurrenceInputs + 2) * kTileSteps + 2;
constexpr int64_t kScratchBytes = kScratchRows * kTaskChannels * static_cast<int64_t>(sizeof(double));

// The kernels of one instruction set. `scratch` is kScratchBytes of 64-byte aligned memory of the calling thread's own.
struct CpuKernels {
  void (*fwd_task)(const LinearScanFwdParams&, ScalarKind, int64_t task, std::byte* scratch);
  void (*bwd_task)(const LinearScanBwdParams&, ScalarKind, int64_t task, std::byte* scratch);
};

}  // namespace ssm_kernels::linear_scan
