// Interface between entry.cpp, compiled once, and kernel.cpp, compiled once per instruction set.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/kernel_abi.h"
#include "norm/norm.h"

namespace ssm_kernels::norm {

// Backward writes a row of partial sums per task of consecutive rows. The number of rows alone determines the tasks, and thus
// the bits of the sums.
struct RowTasks {
  int64_t rows, rows_per_task, count;
  explicit RowTasks(int64_t rows) : rows(rows) {
    constexpr int64_t kMaxTasks = 64, kMinRows = 16;
    rows_per_task = std::max(kMinRows, (rows + kMaxTasks - 1) / kMaxTasks);
    count = (rows + rows_per_task - 1) / rows_per_task;
  }
  int64_t begin(int64_t task) const { return task * rows_per_task; }
  int64_t end(int64_t task) const { return std::min(rows, begin(task) + rows_per_task); }
};

// Scratch memory per thread: backward keeps four rows of a group, each rounded up to whole vectors.
constexpr int64_t kScratchRows = 4, kScratchPadding = 16;

// The kernels of one instruction set.
struct CpuKernels {
  void (*fwd_row)(const NormFwdParams&, int64_t row, std::byte* scratch);
  void (*bwd_rows)(const NormBwdParams&, const RowTasks&, int64_t task, std::byte* scratch);
  void (*sum_partials)(const NormBwdParams&);
};

SSM_KERNEL_STRUCT(RowTasks, 24);
SSM_KERNEL_STRUCT(CpuKernels, 24);

}  // namespace ssm_kernels::norm
