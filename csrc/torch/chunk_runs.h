// Scans by chunks as PyTorch matmuls: how a batch is divided into runs of chunks, and what their products share.
//
// Steps and chunks are in the scan's order. A reverse scan reads a run's steps as a flipped copy, since ATen has no negative
// strides, and flips what it writes: no copy is longer than a run.
#pragma once

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include <vector>

namespace ssm_kernels {

// Keeps fp32 matmuls in fp32, also if backward is called under autocast or TF32 is allowed.
struct ExactProducts {
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  at::NoTF32Guard no_tf32;
};

// Sets values (chunks, rows, steps, ...) to zero where the mask (chunks, rows, steps), if there is one, is true, and returns
// them. A product with zero would let NaN through.
at::Tensor zero_where_(at::Tensor values, const at::Tensor& mask);

// sum_{j < t <= i} V_ij for each t, of matrices V, (..., steps, steps).
at::Tensor sum_across(const at::Tensor& V);

// e^(cs_i - cs_j) for i >= j and zero above, in the dtype of `options`, of sums cs, (..., steps), float64. The differences are
// as exact as ones in float64 that are rounded.
at::Tensor exp_of_differences(const at::Tensor& cs, const at::TensorOptions& options);
// e^(a_i - b_j) for i > j and zero elsewhere, likewise.
at::Tensor exp_of_differences(const at::Tensor& a, const at::Tensor& b, const at::TensorOptions& options);

// Its exponential is zero even in float64. Lower values would cost the differences of sums their accuracy, and those of minus
// infinity are NaN.
constexpr double kLowestLogDecay = -800;

// Rows of the batch that are scanned together.
struct Part {
  int64_t row, rows;
};

// Consecutive chunks of equal length, of a part's rows.
struct Run {
  int64_t row, rows, begin, chunks, length;

  int64_t steps() const { return chunks * length; }
};

// A batch whose rows are scanned by chunks. Temporaries of a run have a bounded size.
class ChunkRuns {
 public:
  // bytes_per_chunk: of a chunk's temporaries in one row, approximately; zero if there are no heads and so no runs.
  ChunkRuns(const at::Tensor& like, int64_t chunk_length, int64_t bytes_per_chunk, bool reverse);

  std::vector<Part> parts() const;
  // Runs of whole chunks; the last run has the incomplete chunk. Each of the ascending bounds is the end of a chunk: a run of
  // one shorter chunk ends where whole chunks would not.
  std::vector<Run> runs(const Part& part, at::IntArrayRef bounds = {}) const;
  // Runs of one long chunk each, for what needs no pairs of steps.
  std::vector<Run> long_runs(const Part& part) const;

  // A run of a (batch, seqlen, ...) tensor whose steps are in the scan's order, as (chunks, rows, steps, ...): a view.
  static at::Tensor run_of(const at::Tensor& tensor, const Run& run);
  // read: run_of an argument, whose steps a reverse scan puts in the scan's order. write: copies such a run to a result.
  at::Tensor read(const at::Tensor& argument, const Run& run) const;
  void write(const at::Tensor& result, const Run& run, const at::Tensor& values) const;

  const int64_t batch, seqlen;
  const int64_t chunk_length;  // steps of a chunk, except the last of a sequence
  const bool reverse;

 private:
  // Maps a run of a reverse scan to the run of the tensors that holds its steps.
  Run mirrored(const Run& run) const;

  int64_t chunks_per_run_;  // of one row
  bool is_empty_;
};

// The states at positions that are asked for beside the results, (rows of the batch, positions, ...), or their gradients.
struct ChosenStates {
  at::IntArrayRef positions;
  at::Tensor states;

  // Calls body(chosen state, state at a bound of a run's chunks) for positions after the beginning of the run.
  template <typename Body>
  void visit(const Run& run, const at::Tensor& bounds, const Body& body) const {
    for (size_t i = 0; i < positions.size(); ++i) {
      const int64_t steps = positions[i] - run.begin;
      if (steps <= 0 || steps > run.steps()) continue;
      body(states.narrow(0, run.row, run.rows).select(1, i), bounds.select(0, steps / run.length));
    }
  }

  // The state before all steps of a part's rows; undefined if it is not asked for.
  at::Tensor first(const Part& part) const {
    const bool is_asked = !positions.empty() && positions[0] == 0;
    return is_asked ? states.narrow(0, part.row, part.rows).select(1, 0) : at::Tensor();
  }
};

}  // namespace ssm_kernels
