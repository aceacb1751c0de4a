#include "torch/packed_sequences.h"

#include <ATen/ops/searchsorted.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace ssm_kernels {

void check_cu_seqlens_argument(const ArgumentChecks& checks, const char* op, const at::Tensor& cu_seqlens,
                               const c10::SymInt& batch) {
  checks.rank("cu_seqlens", cu_seqlens, 1, "(sequences + 1,)");
  TORCH_CHECK_VALUE(cu_seqlens.sym_size(0) >= 1, op, ": expected cu_seqlens of shape (sequences + 1,), got ",
                    cu_seqlens.sym_sizes());
  checks.index_dtype("cu_seqlens", cu_seqlens);
  checks.device("cu_seqlens", cu_seqlens);
  TORCH_CHECK_VALUE(batch == 1, op, ": expected batch 1 with cu_seqlens, got ", batch);
}

void check_cu_seqlens_values(std::string_view op, const at::Tensor& cu_seqlens, int64_t seqlen) {
  const at::Tensor values = cu_seqlens.to(at::kLong).contiguous();
  const int64_t* const begin = values.const_data_ptr<int64_t>();
  const int64_t* const end = begin + values.numel();
  TORCH_CHECK_VALUE(*begin == 0, op, ": expected cu_seqlens to start at 0, got ", *begin);
  const int64_t* const decrease = std::adjacent_find(begin, end, [](int64_t a, int64_t b) { return a > b; });
  TORCH_CHECK_VALUE(decrease == end, op, ": expected cu_seqlens not to decrease, got ", decrease[0], " before ", decrease[1]);
  TORCH_CHECK_VALUE(end[-1] == seqlen, op, ": expected cu_seqlens to end at seqlen = ", seqlen, ", got ", end[-1]);
}

at::Tensor sequence_at(const at::Tensor& cu_seqlens, const at::Tensor& steps) {
  // The number of sequences after the first that begin at or before the step.
  const at::Tensor begins = cu_seqlens.slice(0, 1, -1).contiguous();
  return at::searchsorted(begins, steps, /*out_int32=*/true, /*right=*/true);
}

}  // namespace ssm_kernels
