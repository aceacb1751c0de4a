// A call as the CUDA entry points of the selective scan (entry.cpp, complex_entry.cpp, dense_entry.cpp) see it: its rows, the
// limits of its device, and its memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "common/integers.h"
#include "cuda/device.h"
#include "selective_scan/cuda/plan.h"
#include "selective_scan/selective_scan_op.h"
#include "torch/allocation.h"
#include "torch/checks.h"
#include "torch/debug_options.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::selective_scan {

inline DeviceLimits limits_of(const at::Tensor& tensor) {
  const cudaDeviceProp& properties = cuda::device_properties(tensor.get_device());
  return {
      properties.multiProcessorCount,
      std::min(static_cast<int64_t>(properties.sharedMemPerBlockOptin), debug_option(DebugOption::kSelectiveScanSharedBytes)),
      static_cast<int64_t>(properties.sharedMemPerMultiprocessor), static_cast<int64_t>(properties.reservedSharedMemPerBlock)};
}

inline PackedRows packed_rows(const Inputs& in) {
  TORCH_CHECK(
      !is_present(in.seq_idx) || !cuda::is_capturing(),
      "selective_scan: expected no seq_idx while a CUDA graph is captured: the host has to know the number of sequences; "
      "cu_seqlens can be captured");
  return make_packed_rows(in);
}

// The host waits for the values, unless a CUDA graph is being captured.
inline void check_cu_seqlens(const Inputs& in) {
  if (is_present(in.cu_seqlens) && !cuda::is_capturing()) {
    check_cu_seqlens_values("selective_scan", in.cu_seqlens->cpu(), in.u.size(2));
  }
}

// One allocation for several arrays.
class Workspace {
 public:
  // Reserves memory for `count` values; its address is in `*place` once allocated.
  void reserve(void** place, int64_t count) {
    if (count == 0) return;
    places_.emplace_back(place, count_);
    count_ += round_up(count, kVectorBytes);
  }

  void allocate(const at::TensorOptions& options) {
    if (count_ == 0) return;
    memory_ = empty_tensor({count_}, options);
    for (const auto& [place, first] : places_) {
      *place = static_cast<char*>(memory_.data_ptr()) + first * static_cast<int64_t>(memory_.element_size());
    }
  }

 private:
  at::Tensor memory_;
  std::vector<std::pair<void**, int64_t>> places_;
  int64_t count_ = 0;
};

}  // namespace ssm_kernels::selective_scan
