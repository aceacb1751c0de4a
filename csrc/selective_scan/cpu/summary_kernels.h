// The CPU's kernel of selective_scan_summary and of the initial state's gradient, of one instruction set. A task scans the
// blocks of one task of kernels.h, over all steps.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/kernel_abi.h"
#include "selective_scan/cpu/kernels.h"

namespace ssm_kernels::selective_scan::summary {

struct CpuKernels {
  int64_t (*vector_bytes)();
  int64_t (*scratch_bytes)(const SelectiveScanSummaryParams&, const Blocking&, ScalarKind);
  void (*task)(const SelectiveScanSummaryParams&, const Blocking&, ScalarKind, int64_t task, std::byte* scratch);
};

SSM_KERNEL_STRUCT(CpuKernels, 24);

}  // namespace ssm_kernels::selective_scan::summary
