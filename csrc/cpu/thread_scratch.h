// Scratch memory per thread of a parallel loop. Not for cpu/*kernel.cpp files, which include no tensor header.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "torch/allocation.h"

namespace ssm_kernels {

class ThreadScratch {
 public:
  explicit ThreadScratch(int64_t bytes) : memory_(empty_tensor({at::get_num_threads(), bytes}, at::kByte)) {}

  // Calls body(index, scratch) for each index. `work` is the cost of an index, in states times steps of a scan.
  template <typename Body>
  void parallel_for(int64_t count, int64_t work, const Body& body) {
    // Waking a thread costs more than less work takes.
    constexpr int64_t kWorkPerThread = 32768;
    at::parallel_for(
        0, count, std::max<int64_t>(1, kWorkPerThread / std::max<int64_t>(1, work)), [&](int64_t begin, int64_t end) {
          std::byte* scratch = static_cast<std::byte*>(memory_.data_ptr()) + at::get_thread_num() * memory_.size(1);
          for (int64_t index = begin; index < end; ++index) body(index, scratch);
        });
  }

 private:
  at::Tensor memory_;
};

}  // namespace ssm_kernels
