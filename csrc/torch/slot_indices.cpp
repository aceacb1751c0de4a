// The check of state_batch_indices on the CPU.

#include "torch/slot_indices.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "torch/checks.h"

namespace ssm_kernels {

void check_slot_indices(const char* op, const std::optional<at::Tensor>& indices, int64_t slots) {
  if (!is_present(indices)) return;
  const at::Tensor contiguous = indices->to(at::kLong).contiguous();
  const int64_t* const values = contiguous.const_data_ptr<int64_t>();
  using SlotAndRow = std::pair<int64_t, int64_t>;
  std::vector<SlotAndRow> used;
  used.reserve(contiguous.numel());
  for (int64_t b = 0; b < contiguous.numel(); ++b) {
    TORCH_CHECK_VALUE(values[b] < slots, op, ": expected state_batch_indices below the number of slots, ", slots, ", got ",
                      values[b], " at position ", b);
    if (values[b] >= 0) used.emplace_back(values[b], b);
  }
  std::sort(used.begin(), used.end());
  const auto repeated =
      std::adjacent_find(used.begin(), used.end(), [](const SlotAndRow& a, const SlotAndRow& b) { return a.first == b.first; });
  TORCH_CHECK_VALUE(repeated == used.end(), op, ": expected distinct state_batch_indices, got ", repeated->first,
                    " at positions ", repeated->second, " and ", (repeated + 1)->second);
}

}  // namespace ssm_kernels
