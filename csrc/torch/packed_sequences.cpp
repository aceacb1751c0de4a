#include "torch/packed_sequences.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "torch/allocation.h"

namespace ssm_kernels {

void check_sequences(const ArgumentChecks& checks, const std::optional<at::Tensor>& seq_idx,
                     const std::optional<at::Tensor>& cu_seqlens, const c10::SymInt& batch, const c10::SymInt& seqlen) {
  const char* const op = checks.op();
  checks.indices("seq_idx", seq_idx, "(batch, seqlen)", {batch, seqlen});
  if (!is_present(cu_seqlens)) return;
  const c10::SymIntArrayRef shape = cu_seqlens->sym_sizes();
  TORCH_CHECK_VALUE(shape.size() == 1 && shape[0] >= 1, op, ": expected cu_seqlens of shape (sequences + 1,), got ", shape);
  checks.indices("cu_seqlens", cu_seqlens, "(sequences + 1,)", shape);
  TORCH_CHECK_VALUE(batch == 1, op, ": expected batch 1 with cu_seqlens, got ", batch);
  TORCH_CHECK_VALUE(shape[0] >= 2 || seqlen == 0, op, ": expected cu_seqlens to end at seqlen = ", seqlen, ", got 0 sequences");
}

void check_cu_seqlens_values(std::string_view op, const at::Tensor& cu_seqlens, int64_t seqlen, bool has_padding) {
  const at::Tensor values = cu_seqlens.to(at::kLong).contiguous();
  const int64_t* const begin = values.const_data_ptr<int64_t>();
  const int64_t* const end = begin + values.numel();
  TORCH_CHECK_VALUE(*begin == 0, op, ": expected cu_seqlens to start at 0, got ", *begin);
  const int64_t* const decrease = std::adjacent_find(begin, end, [](int64_t a, int64_t b) { return a > b; });
  TORCH_CHECK_VALUE(decrease == end, op, ": expected cu_seqlens not to decrease, got ", decrease[0], " before ", decrease[1]);
  if (has_padding) {
    TORCH_CHECK_VALUE(end[-1] <= seqlen, op, ": expected cu_seqlens to end at ", seqlen,
                      ", the number of tokens, or before, got ", end[-1]);
  } else {
    TORCH_CHECK_VALUE(end[-1] == seqlen, op, ": expected cu_seqlens to end at seqlen = ", seqlen, ", got ", end[-1]);
  }
}

c10::SymInt count_states(const std::optional<at::Tensor>& cu_seqlens, const c10::SymInt& batch) {
  return is_present(cu_seqlens) ? cu_seqlens->sym_size(0) - 1 : batch;
}

at::Tensor allocate_states(const std::optional<at::Tensor>& cu_seqlens, const c10::SymInt& seqlen, c10::SymIntArrayRef shape,
                           const at::TensorOptions& options, const std::optional<at::Tensor>& empty) {
  if (!is_present(cu_seqlens) && seqlen != 0) return empty_tensor(shape, options);
  return is_present(empty) ? empty->clone(at::MemoryFormat::Contiguous) : at::zeros_symint(shape, options);
}

at::Tensor sequence_at(const at::Tensor& cu_seqlens, const at::Tensor& steps) {
  // The number of sequences after the first that begin at or before the step.
  const at::Tensor begins = cu_seqlens.slice(0, 1, -1).contiguous();
  return at::searchsorted(begins, steps, /*out_int32=*/true, /*right=*/true);
}

at::Tensor sequence_parts(const at::Tensor& seq_idx, const std::optional<at::Tensor>& cu_seqlens) {
  const int64_t batch = seq_idx.size(0), seqlen = seq_idx.size(1);
  at::Tensor starts = sequence_starts(seq_idx), begins_of_packed;
  if (is_present(cu_seqlens)) {
    begins_of_packed = cu_seqlens->to(at::kLong).contiguous();
    const at::Tensor steps = at::arange(seqlen, begins_of_packed.options());
    starts.logical_or_(sequence_starts(sequence_at(begins_of_packed, steps).unsqueeze(0)));
  }
  if (seqlen > 0) starts.select(1, 0).fill_(true);
  const at::Tensor places = starts.nonzero(), row = places.select(1, 0), begin = places.select(1, 1);
  const at::Tensor first_of_row = row.mul(seqlen), place = first_of_row.add(begin);
  // A part ends where the next one begins, which may be in the next row.
  at::Tensor end = at::full_like(place, batch * seqlen);
  const int64_t others = std::max<int64_t>(0, place.size(0) - 1);
  end.narrow(0, 0, others).copy_(place.narrow(0, place.size(0) - others, others));
  end.sub_(first_of_row);
  at::Tensor state = row, is_first = begin.eq(0), is_last = end.eq(seqlen);
  if (begins_of_packed.defined()) {
    state = sequence_at(begins_of_packed, begin).to(at::kLong);
    is_first = begins_of_packed.index_select(0, state).eq(begin);
    is_last = begins_of_packed.index_select(0, state.add(1)).eq(end);
  }
  return at::stack(
             {row, begin, end, state.masked_fill(is_first.logical_not(), -1), state.masked_fill(is_last.logical_not(), -1)}, 1)
      .contiguous();
}

at::Tensor sequence_starts(const at::Tensor& ids) {
  const int64_t inner = ids.size(1) - 1;
  at::Tensor starts = at::zeros(ids.sizes(), ids.options().dtype(at::kBool));
  if (inner > 0) starts.narrow(1, 1, inner).copy_(ids.narrow(1, 1, inner).ne(ids.narrow(1, 0, inner)));
  return starts;
}

}  // namespace ssm_kernels
