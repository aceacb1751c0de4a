// The launches of backward's kernels of a part of a call (launch_bwd.cpp).
#pragma once

#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/core/Tensor.h>

#include "delta_rule/aten/gates.h"
#include "delta_rule/cuda/tensors.h"
#include "delta_rule/delta_rule.h"
#include "delta_rule/delta_rule_op.h"

namespace ssm_kernels::delta_rule {

// A part of a call: some rows of the batch, or all packed sequences, and value heads of whole key heads or some of one.
struct Range {
  int64_t entry, entries, head, heads, key_head, key_heads;
  bool begins_key_head = true, ends_key_head = true;

  at::Tensor of_entries(const at::Tensor& tensor) const { return tensor.narrow(0, entry, entries); }
  at::Tensor of_heads(const at::Tensor& sequence) const { return of_entries(sequence).narrow(2, head, heads); }
  at::Tensor of_key_heads(const at::Tensor& sequence) const { return of_entries(sequence).narrow(2, key_head, key_heads); }
};

// The tensors of a call that the kernels read and write. Undefined tensors are absent or not needed.
struct GradOperands {
  at::Tensor q, k, v, grad_out, log_decay, beta, row_factors, initial_states, grad_final_states, cu_seqlens, resets;
  at::Tensor grad_q, grad_k, grad_v;     // of q and k only without partial sums
  at::Tensor grad_log_decay, grad_beta;  // fp32
  at::Tensor grad_initial_states;
  NormalizedRows normalized_q, normalized_k;  // with has_normalized_rows()
};

// The gradients of q and k of a part, and whether the kernels write them in the opposite order of steps.
struct KeyGrads {
  at::Tensor q, k;
  bool is_reversed;
};

inline RowsView rows_view(const at::Tensor& rows, bool is_reversed) {
  return is_reversed ? reversed_view_of(rows) : view_of(rows);
}

// A part's rows as the kernels of `params` take them: all rows of the batch as one if these have segments.
at::Tensor rows_for(const DeltaRuleBwdParams& params, const at::Tensor& rows);

// The work tiles of the states of a part.
WorkPartition bwd_partition_of(const DeltaRuleBwdParams& params);

// They queue kernels: with has_matrices not the first, and without a workspace of states not the last.
//
// The kernels with mma.sync. Each part of the keys' columns has its terms of the gradients of log decays.
void launch_bwd_sm80(const Inputs& in, const GradOperands& of, const DeltaRuleBwdParams& common, const Range& range,
                     bool has_matrices);

// The kernels of keys of more than kStateColumns columns. Each part of the columns has its gradients of q and k, and
// its terms of those of log decays, which are sums over columns. The first part has the gradients of v and beta.
void launch_bwd_wide(const Inputs& in, const GradOperands& of, const DeltaRuleBwdParams& params, const Range& range,
                     const KeyGrads& grads, bool has_matrices);

}  // namespace ssm_kernels::delta_rule

#endif
