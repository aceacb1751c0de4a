// state_batch_indices of the decoding steps: the slot of a cache that each row of a batch uses.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace ssm_kernels {

// For indices on the CPU. Raises unless each is below the number of slots and each slot is used by one row at most: threads
// take rows in no fixed order. Negative indices are padding.
void check_slot_indices(const char* op, const std::optional<at::Tensor>& indices, int64_t slots);

}  // namespace ssm_kernels
