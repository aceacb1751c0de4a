// `_ops` compares the number of the boundary and the rows of the tables by which both sides dispatch with those of each kernel
// library, when it is loaded. A library without a row would throw at the first call with it (unknown_enumerator.h).
#pragma once

#include <cstdint>
#include <string_view>

#include "common/discretization.h"
#include "common/kernel_abi.h"
#include "common/recurrences.h"

namespace ssm_kernels {

// The FNV-1a hash of the names of the tables' rows, each followed by a space. kernel_abi of build_metadata.py has the same.
constexpr uint32_t hash_of_tables() {
  uint32_t hash = 2166136261u;
  const auto add = [&](std::string_view name) {
    for (const char letter : name) hash = (hash ^ static_cast<unsigned char>(letter)) * 16777619u;
    hash = (hash ^ static_cast<unsigned char>(' ')) * 16777619u;
  };
  for (const DiscretizationRow& row : kDiscretizationTable) add(row.name);
  for (const RecurrenceRow& row : kRecurrenceTable) add(row.name);
  return hash;
}

// kKernelAbi in the upper bits, the tables' hash in the lower 20.
constexpr int kKernelLibraryAbi = (kKernelAbi << 20) | static_cast<int>(hash_of_tables() & 0xfffff);

}  // namespace ssm_kernels

// The kKernelLibraryAbi that each library was compiled with. `_ops` compares them with its own when it is loaded.
extern "C" {
SSM_KERNEL_API int ssm_kernels_cpu_abi();
SSM_KERNEL_API int ssm_kernels_cuda_abi();
}
