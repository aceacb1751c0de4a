// Splits a call of chunked_scan.cpp into runs of chunks, and loads the tensors of a run. chunked_scan.cpp begins with the
// formulas.
//
// Tensors of a run are (chunks, rows, heads, steps, ...), contiguous. `chunks` counts the chunks of the run, `rows` the rows of
// the batch. A chunk's steps are those of k, v and beta: num_householder for each step of q, g and out.
#pragma once

#include <ATen/core/Tensor.h>

#include "delta_rule/aten/gates.h"
#include "delta_rule/aten/pairs.h"
#include "delta_rule/delta_rule_op.h"
#include "torch/chunk_runs.h"

namespace ssm_kernels::delta_rule {

// The arguments with an axis for the updates of a step: k, v and beta are (batch, seqlen, num_householder, ...).
Inputs by_update(const Inputs& call);

// The tensors of a run that forward and backward read.
struct Chunks {
  Run run;
  NormalizedRows q, k;         // of key heads, before the scale
  at::Tensor raw_beta, raw_g;  // (chunks, rows, steps of the argument, value_heads, ...); raw_g undefined if absent
  Vectors vectors;
  at::Tensor v, beta, log_decay;  // of value heads; beta (..., steps, 1), log_decay of make_pairs
  // With sequences that begin in chunks, (chunks, rows, steps): their number up to a step, whether there is one, and whether
  // one begins after the step. (chunks, rows, 1): whether any begins in the chunk.
  at::Tensor sequence, is_after_beginning, is_before_beginning, is_cut;
};

// Sets (chunks, rows, heads, ...) to zero where the mask (chunks, rows, steps or 1), if there is one, is true.
at::Tensor zero_steps_where_(at::Tensor values, const at::Tensor& mask);

// The scan of a batch of by_update. Packed sequences become batches before (torch/sequence_batches.h).
class Scan : public ChunkRuns {
 public:
  explicit Scan(const Inputs& in);

  Chunks load(const Run& run) const;
  // A run of a (batch, seqlen, updates, heads, ...) or (batch, seqlen, heads, ...) argument with the axis of heads before
  // steps.
  at::Tensor by_head(const at::Tensor& argument, const Run& run, bool has_updates) const;
  // A contiguous copy in the accumulation type.
  at::Tensor copied(const at::Tensor& tensor) const;
  // Copies such a run to a result.
  void write_by_head(const at::Tensor& result, const Run& run, const at::Tensor& values, bool has_updates) const;

  // A copy of a part's states, zero if absent, (rows, value_heads, value_dim, key_dim).
  at::Tensor load_states(const OptionalTensor& states, const Part& part) const;

  const Inputs& in;
  const at::TensorOptions options;  // of the accumulation type
  const int64_t updates, heads, value_heads, key_dim, value_dim;

 private:
  at::Tensor starts_;  // with seq_idx: where sequences begin, (batch, seqlen), in the scan's order
};

}  // namespace ssm_kernels::delta_rule
