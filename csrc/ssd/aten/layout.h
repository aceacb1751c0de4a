// Splits a call of chunked_scan.cpp into runs of chunks, and computes what forward and backward share. chunked_scan.cpp begins
// with the formulas.
//
// Tensors have one of three orders of axes:
//   by step:  (chunks, rows, steps, groups, heads of a group, headdim), the order of x in memory
//   by group: (chunks, rows, groups, steps, heads of a group, headdim), as matrices (steps, heads and headdim) of each group:
//             one matmul multiplies all heads of a group with B, C or the state
//   by head:  (chunks, rows, groups, heads of a group, steps, headdim), as matrices (steps, headdim) of each head
// `chunks` counts the chunks of the run, `rows` the rows of the batch, `steps` the steps of a chunk. With ranks (Inputs::ranks)
// `steps` counts samples, the ranks of one step after those of another: each step has `ranks` rows of x, B, C and y, which
// share its gates.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include "ssd/aten/step_sizes.h"
#include "ssd/ssd_op.h"
#include "torch/chunk_runs.h"

namespace ssm_kernels::ssd {

inline at::Tensor transposed(const at::Tensor& matrices) { return matrices.transpose(1, 2); }

inline at::Tensor row_products(const at::Tensor& a, const at::Tensor& b) { return (a * b).sum(-1); }

// Returns the cumulative sums of (chunks, rows, steps, ...) float64 values along the steps.
at::Tensor cumsum_of_steps(const at::Tensor& values);

// The tensors of a run that forward and backward read.
struct Chunks {
  Run run;
  // Also with ranks, `steps`, `cs`, `read_cs`, `sequence` and `is_cut` have one value for all samples of a step.
  Steps steps;    // (chunks, rows, steps, heads)
  at::Tensor cs;  // (chunks, rows, steps, heads), float64
  // cs of what an output reads of earlier steps: cs_i, or with a diagonal gain cs_{i-1}.
  at::Tensor read_cs;
  // With seq_idx, (chunks, rows, steps): the number of sequences that begin in the chunk up to a step, whether there is one,
  // and whether one begins after the step. (chunks, rows, 1): whether any sequence begins in the chunk.
  at::Tensor sequence, is_after_beginning, is_before_beginning, is_cut;
  at::Tensor x;     // by step, accumulation type; with ranks, times the factor of each
  at::Tensor B, C;  // matrices (steps, dstate) of each group; C undefined if the call has none
  // c_j, e^(cs_i) of read_cs and e^(cs_last - cs_j), by step with 1 for headdim
  at::Tensor gain, exp_cumsum, decay_to_chunk_end;
  at::Tensor diagonal;  // the diagonal gain, by step with 1 for headdim; undefined if the call has none
  at::Tensor decay;     // e^cs_last, zero if a sequence begins in the chunk, (chunks, rows, heads, 1, 1)
};

// The scan of a batch. Packed sequences become batches before (torch/sequence_batches.h).
class Scan : public ChunkRuns {
 public:
  Scan(const Inputs& in, Discretization method);

  Chunks load(const Run& run) const;
  // Splits the axis of heads of (chunks, rows, steps, heads, ...) into (groups, heads of a group).
  at::Tensor split_heads(const at::Tensor& tensor) const { return tensor.unflatten(3, {groups, heads_per_group}); }
  at::Tensor merge_heads(const at::Tensor& tensor) const { return tensor.flatten(3, 4); }
  // The same for an axis of heads elsewhere.
  at::Tensor split(const at::Tensor& tensor, int64_t axis = 0) const {
    return tensor.unflatten(axis, {groups, heads_per_group});
  }
  // (groups, heads of a group, headdim or 1)
  at::Tensor D() const;

  // A copy of a part's states, zero if absent, (rows, heads, headdim, dstate).
  at::Tensor load_states(const OptionalTensor& states, const Part& part) const;
  // A chunk's first states, or the gradients of its last states, before the decay; zero where a sequence begins in the chunk.
  static at::Tensor across(const at::Tensor& states, const Chunks& chunks, int64_t chunk);
  // The states before each chunk and after the last, (chunks + 1, rows, heads, headdim, dstate).
  at::Tensor boundary_states(const Chunks& chunks, const at::Tensor& first) const;
  // `count` of these states from `begin` on, as matrices (heads and headdim, dstate) of each group.
  at::Tensor state_matrices(const at::Tensor& states, int64_t begin, int64_t count) const;

  // A copy of B or C, zero where the mask is true.
  at::Tensor without(const at::Tensor& matrices, const at::Tensor& mask, const Run& run) const;
  // e^cs_i g_i, and c_j e^(cs_last - cs_j) x_j, by group.
  at::Tensor decayed(const at::Tensor& g, const Chunks& chunks) const;
  at::Tensor weighted_input(const Chunks& chunks) const;
  // e^(cs_i - cs_j), with cs_i of read_cs, zero for j > i and where a sequence begins in between: (groups of all chunks, heads
  // of a group, i, 1, j, 1), the same for all samples of the steps. With a diagonal gain zero for j = i too.
  at::Tensor decay_between(const Chunks& chunks) const;
  // Matrices of samples as (groups of all chunks, matrices of a group, i, ranks, j, ranks).
  at::Tensor by_pairs(const at::Tensor& matrices, const Run& run) const {
    const int64_t in_group = matrices.size(0) / (run.chunks * run.rows * groups);
    return matrices.view({-1, in_group, run.length, ranks, run.length, ranks});
  }
  // The sum over the ranks of (chunks, rows, samples, ...).
  at::Tensor of_steps(const at::Tensor& samples) const;
  // Steps (chunks, rows, steps, groups, heads of a group, headdim) times the factors of the ranks, with an axis of ranks after
  // that of steps; and such factors, (heads, ranks, headdim), as (ranks, groups, heads of a group, headdim).
  at::Tensor times_factor(const at::Tensor& steps, const OptionalTensor& factor) const;
  at::Tensor rank_factor(const at::Tensor& factor) const { return split(factor.transpose(0, 1), 1); }
  // Each step as many times as there are ranks, and the ranks of each step on an axis of their own.
  at::Tensor of_samples(const at::Tensor& steps) const;
  at::Tensor by_rank(const at::Tensor& samples) const { return samples.unflatten(2, {-1, ranks}); }

  // by_step: a run of a (batch, seqlen, heads, headdim) argument, ordered by step, in the accumulation type. write_by_step:
  // copies such a run to a result.
  at::Tensor by_step(const at::Tensor& argument, const Run& run) const;
  void write_by_step(const at::Tensor& result, const Run& run, const at::Tensor& values) const;
  // A tensor by step, times a factor, as matrices in the other orders; contiguous.
  at::Tensor by_group(const at::Tensor& tensor, const at::Tensor& factor) const;
  at::Tensor by_head(const at::Tensor& tensor, const at::Tensor& factor) const;
  at::Tensor by_head(const at::Tensor& tensor) const;
  // Views of such matrices by step, and of matrices of B or C as (chunks, rows, steps, groups, dstate).
  at::Tensor matrices_by_step(const at::Tensor& matrices, const Run& run) const;
  at::Tensor group_by_step(const at::Tensor& product, const Run& run) const;
  at::Tensor head_by_step(const at::Tensor& product, const Run& run) const;

  const Inputs& in;
  const Discretization method;
  const at::TensorOptions options;  // of the accumulation type
  const int64_t heads, headdim, groups, dstate, heads_per_group, ranks;

  // The samples of a chunk.
  int64_t samples(const Run& run) const { return run.length * ranks; }

 private:
  at::Tensor starts_;  // with seq_idx: where sequences begin, (batch, seqlen), in the scan's order
};

}  // namespace ssm_kernels::ssd
