// How chunked_scan.cpp cuts a call into runs of chunks, and what forward and backward compute of a run alike. The formulas are
// at the head of chunked_scan.cpp.
//
// Axes come in one of three orders, named by what stands together:
//   by step:  (chunks, rows, steps, groups, heads of a group, headdim), the order of x in memory
//   by group: (chunks, rows, groups, steps, heads of a group, headdim), as matrices (steps, heads and headdim) of each group:
//             where all heads of a group meet B, C or the state in one product
//   by head:  (chunks, rows, groups, heads of a group, steps, headdim), as matrices (steps, headdim) of each head
// Chunks are those of the run, rows are those of the batch, steps those of a chunk.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "ssd/aten/step_sizes.h"
#include "ssd/ssd_op.h"

namespace ssm_kernels::ssd {

// Writes zero where a mask says so, if there is one, (chunks, rows, steps) of values (chunks, rows, steps, ...): a factor of
// zero would not end a NaN. Returns the values.
at::Tensor zero_where_(at::Tensor values, const at::Tensor& mask);

// True where a sequence begins, but for the first of each row, (batch, seqlen).
at::Tensor sequence_starts(const at::Tensor& seq_idx);

// Rows of the batch that are scanned together.
struct Part {
  int64_t row, rows;
};

// Chunks of equal length, one after another, of a part's rows.
struct Run {
  int64_t row, rows, begin, chunks, length;

  int64_t steps() const { return chunks * length; }
};

// What forward and backward read of a run.
struct Chunks {
  Run run;
  Steps steps;    // (chunks, rows, steps, heads)
  at::Tensor cs;  // (chunks, rows, steps, heads), float64
  // With seq_idx: how many sequences began in the chunk up to a step, whether one did, whether one does after the step,
  // (chunks, rows, steps), and whether the last step is of another than the chunk begins with, (chunks, rows, 1).
  at::Tensor sequence, is_after_beginning, is_before_beginning, is_cut;
  at::Tensor x;     // by step, accumulation type
  at::Tensor B, C;  // matrices (steps, dstate) of each group
  // c_j, e^cs_i and e^(cs_last - cs_j), by step with 1 for headdim
  at::Tensor gain, exp_cumsum, decay_to_chunk_end;
  at::Tensor decay;  // e^cs_last, zero where the chunk is cut, (chunks, rows, heads, 1, 1)
};

// Of a batch: packed sequences are made batches of before (packed.h).
class Scan {
 public:
  Scan(const Inputs& in, Discretization method);

  std::vector<Part> parts() const;
  // Whole chunks, and in the last run the one that is left. Their temporaries have a bounded size.
  std::vector<Run> runs(const Part& part) const;

  Chunks load(const Run& run) const;
  // A run of a (batch, seqlen, ...) tensor as (chunks, rows, steps, ...).
  static at::Tensor run_of(const at::Tensor& tensor, const Run& run);
  // (chunks, rows, steps, heads, ...) with the heads' axis made (groups, heads of a group).
  at::Tensor split_heads(const at::Tensor& tensor) const { return tensor.unflatten(3, {groups, heads_per_group}); }
  at::Tensor merge_heads(const at::Tensor& tensor) const { return tensor.flatten(3, 4); }
  // (groups, heads of a group, headdim or 1)
  at::Tensor D() const;

  // A copy of a part's states, zero if absent, (rows, heads, headdim, dstate).
  at::Tensor load_states(const OptionalTensor& states, const Part& part) const;
  // What of a chunk's first states, or of its last ones' gradients, reaches its other end, before it decays.
  static at::Tensor across(const at::Tensor& states, const Chunks& chunks, int64_t chunk);
  // The states before each chunk and after the last, (chunks + 1, rows, heads, headdim, dstate).
  at::Tensor boundary_states(const Chunks& chunks, const at::Tensor& first) const;
  // `count` of these from `begin` on as matrices (heads and headdim, dstate) of each group.
  at::Tensor state_matrices(const at::Tensor& states, int64_t begin, int64_t count) const;

  // Of B or C: a copy, zero where the mask says so.
  at::Tensor without(const at::Tensor& matrices, const at::Tensor& mask, const Run& run) const;
  // e^cs_i g_i, and c_j e^(cs_last - cs_j) x_j, by group.
  at::Tensor decayed(const at::Tensor& g, const Chunks& chunks) const;
  at::Tensor weighted_input(const Chunks& chunks) const;
  // e^(cs_i - cs_j), zero for j > i and where a sequence begins in between: a matrix (i, j) of each head, in front of them
  // (groups of all chunks, heads of a group).
  at::Tensor decay_between(const Chunks& chunks) const;

  // A run of a (batch, seqlen, heads, headdim) tensor by step, accumulation type.
  at::Tensor by_step(const at::Tensor& tensor, const Run& run) const;
  // A tensor by step, times a factor, as matrices in the other orders; contiguous.
  at::Tensor by_group(const at::Tensor& tensor, const at::Tensor& factor) const;
  at::Tensor by_head(const at::Tensor& tensor, const at::Tensor& factor) const;
  at::Tensor by_head(const at::Tensor& tensor) const;
  // Views of such matrices by step, and of those of B or C as (chunks, rows, steps, groups, dstate).
  at::Tensor matrices_by_step(const at::Tensor& matrices, const Run& run) const;
  at::Tensor group_by_step(const at::Tensor& product, const Run& run) const;
  at::Tensor head_by_step(const at::Tensor& product, const Run& run) const;

  const Inputs& in;
  const Discretization method;
  const at::TensorOptions options;  // of the accumulation type
  const int64_t batch, seqlen, heads, headdim, groups, dstate, heads_per_group;

 private:
  int64_t chunk_length_;
  int64_t chunks_per_run_;  // of one row
  at::Tensor starts_;       // with seq_idx: where sequences begin, (batch, seqlen)
};

}  // namespace ssm_kernels::ssd
