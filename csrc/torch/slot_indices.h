// state_batch_indices of the decoding steps: the cache slot of each row of the batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace ssm_kernels {

// For indices on the CPU, whose negative values are padding. Raises unless each is below the number of slots and no two rows
// use the same slot: threads process rows in no fixed order.
void check_slot_indices(const char* op, const std::optional<at::Tensor>& indices, int64_t slots);

}  // namespace ssm_kernels
