// Parameters of the selective scan's kernels, on CPU and CUDA: plain data, no torch type.
//
//   delta_t = softplus?(delta_raw_t + delta_bias)                       (batch, dim, seqlen)
//   h_t     = Abar(delta_t A) h_{t-1} + delta_t k(delta_t A) B_t u_t    (batch, dim, dstate)
//   out_t   = (<C_t, h_t> + D u_t) silu(z_t)                            (batch, dim, seqlen)
//
// Time is cut into chunks of chunk_length steps. Forward saves the state at each chunk boundary, the first and the last
// included, (batch, chunks + 1, dim, dstate), and backward recomputes the states inside a chunk from the one before it: nothing
// of size batch * dim * seqlen * dstate exists. (With the last state there are never just one or none, so that the number of
// chunks is not a special case when torch.compile traces a dynamic seqlen.)
//
// A reverse scan, in which h_t follows from h_{t+1}, is a scan of views of the same memory whose step 0 is the last step of
// the tensor: their strides along time are negative. All that is said here of steps, chunks and rows is then in the scan's
// time.
//
// A batch row may hold several sequences. Kernels scan rows: a row is a batch row or, of a packed call, one sequence, whose
// chunks begin at its own first step. A packed sequence saves only the states between its chunks, the one before step t
// of the batch row in place t / chunk_length: such steps are at least chunk_length apart, also across sequences, so that no two
// share a place. Backward takes the state before a packed sequence from initial_state.
#pragma once

#include <cstdint>

#include "common/discretization.h"
#include "common/kernel_abi.h"
#include "common/limits.h"

namespace ssm_kernels::selective_scan {

constexpr int64_t kShortChunk = 32, kLongChunk = 64, kMaxStatesOfShortChunk = 16;

// Steps of a chunk: chunks are longer where the saved states are larger. Int is int64_t or a symbolic integer, which a
// comparison would tie to one side.
template <typename Int>
SSM_HOST_DEVICE constexpr Int chunk_length(const Int& dstate) {
  const Int is_long = (dstate + (kMaxDstate - 1 - kMaxStatesOfShortChunk)) / kMaxDstate;
  return is_long * (kLongChunk - kShortChunk) + kShortChunk;
}

static_assert(chunk_length(kMaxStatesOfShortChunk) == kShortChunk && chunk_length(kMaxStatesOfShortChunk + 1) == kLongChunk &&
                  chunk_length(int64_t(kMaxDstate)) == kLongChunk,
              "the quotient is 0 or 1");

// Number of saved states per channel: one more than there are chunks.
template <typename Int>
Int chunk_boundary_count(const Int& seqlen, const Int& dstate) {
  const Int length = chunk_length(dstate);
  return (seqlen + length - 1) / length + 1;
}

// A (batch, dim, seqlen) tensor, data null if absent. Strides are in elements.
struct SequenceView {
  void* data = nullptr;
  int64_t stride_batch = 0, stride_dim = 0, stride_step = 0;
};

// B or C: per step, (batch, groups, dstate, seqlen), where stride_channel is the stride between groups; or constant,
// (dim, dstate), where it is the stride between channels.
struct MatrixView {
  void* data = nullptr;
  bool per_step = false;
  int64_t groups = 1;
  int64_t stride_batch = 0, stride_channel = 0, stride_state = 0, stride_step = 0;
};

// Steps `begin` to `end` - 1 of a batch row, which start from state `initial` of initial_state and end in state `last` of
// last_state. -1: they start from zero; their last state is not returned.
struct ScanRow {
  int64_t batch = 0, begin = 0, end = 0, initial = 0, last = 0;
};
constexpr int64_t kScanRowFields = 5;

// A (dim,) tensor, data null if absent.
struct ChannelView {
  const void* data = nullptr;
  int64_t stride = 0;
};

// A (batch, dim, dstate) or, with no batch stride, (dim, dstate) tensor, data null if absent.
struct StateView {
  const void* data = nullptr;
  int64_t stride_batch = 0, stride_dim = 0, stride_state = 0;
};

struct SelectiveScanParams {
  int64_t batch = 0, dim = 0, seqlen = 0, dstate = 0;
  int64_t chunk_length = 0, chunk_boundaries = 0;
  Discretization discretization = Discretization::kZoh;
  bool delta_softplus = false;
  // The number of rows: batch unless the call is packed. Packed, either cu_seqlens, (rows + 1,), or the fields of each ScanRow,
  // (rows, kScanRowFields), is not null.
  int64_t rows = 0;
  const int64_t* cu_seqlens = nullptr;
  const int64_t* row_fields = nullptr;

  SSM_HOST_DEVICE bool is_packed() const { return cu_seqlens != nullptr || row_fields != nullptr; }
  SSM_HOST_DEVICE ScanRow row(int64_t index) const {
    if (row_fields != nullptr) {
      const int64_t* const f = row_fields + index * kScanRowFields;
      return {f[0], f[1], f[2], f[3], f[4]};
    }
    if (cu_seqlens == nullptr) return {index, 0, seqlen, index, index};
    // Nobody has checked the values while a CUDA graph is captured: no row may leave the tensors.
    const auto clamped = [](int64_t value, int64_t low, int64_t high) {
      return value < low ? low : value > high ? high : value;
    };
    const int64_t begin = clamped(cu_seqlens[index], 0, seqlen);
    return {0, begin, clamped(cu_seqlens[index + 1], begin, seqlen), index, index};
  }
  // The place, among (batch * chunk_boundaries), of the state before a chunk.
  SSM_HOST_DEVICE int64_t chunk_state(const ScanRow& row, int64_t chunk) const {
    return row.batch * chunk_boundaries + row.begin / chunk_length + chunk;
  }
  // Whether this state is saved. It may be the one after the last chunk.
  SSM_HOST_DEVICE bool saves_chunk_state(const ScanRow& row, int64_t chunk) const {
    return !is_packed() || (chunk > 0 && chunk * chunk_length < row.end - row.begin);
  }

  SequenceView u, delta, z;
  MatrixView B, C;
  StateView A, initial_state;
  ChannelView D, delta_bias;
};

// Kernels of methods that read two input samples (common/two_sample_discretization.h), of a step of its own for A or of complex
// states take these parameters besides:
//
//   h_t = Abar(z_t) h_{t-1} + delta_t (k(z_t) B_t u_t + m(z_t) B_{t-1} u_{t-1})
//
// The sample before the first step of a row is that of previous_u and previous_B in place `initial` of the row. Without them,
// or with `initial` -1, it is the row's first one, B_0 u_0, with repeats_first, and else zero.
struct TwoSampleParams {
  MethodParameters method;
  SequenceView lam;  // of exp_trapezoidal; any strides, zero included. Data null for other methods
  bool lam_sigmoid = false;
  bool repeats_first = false;
  // Complex states (common/complex.h): dstate counts real numbers, and neighbors are the real and the imaginary part of a
  // state. The output is the real part of <C, h>, twice with conjugate_pairs. B and C are of the accumulation type.
  bool is_complex = false, conjugate_pairs = true;
  // In the types of u and B. (batch or sequences, dim), stride_state zero; and (batch or sequences, groups of B, dstate), where
  // stride_dim is the stride between groups. A constant B has no previous_B: the previous sample's is B itself.
  StateView previous_u, previous_B;
  // The steps of A (common/separate_step.h), in place of delta in the decay; any strides, zero included. Data null: delta. With
  // it the method may read one sample.
  SequenceView delta_A;

  // Backward writes these; data is null where no gradient is needed. grad_previous is that of the sample B u before the first
  // step of a row, in place `initial`: (batch or sequences, dim, dstate), contiguous, in the accumulation type. Rows without
  // steps have zero.
  SequenceView grad_lam, grad_delta_A;
  void* grad_previous = nullptr;
};

struct SelectiveScanFwdParams : SelectiveScanParams {
  SequenceView out;
  void* last_state = nullptr;    // (batch or sequences, dim, dstate), contiguous
  void* chunk_states = nullptr;  // (batch, chunks + 1, dim, dstate), contiguous; null: not saved
};

// A pass over all steps that writes no outputs, with one matrix, B: the summary, from u and B to the last state from zero, or
// the gradient of the state before all steps, from the gradients of the outputs (in place of u), z if the outputs have a gate,
// and C (in place of B).
struct SelectiveScanSummaryParams : SelectiveScanParams {
  bool is_adjoint = false;
  void* state = nullptr;  // (batch, dim, dstate), contiguous
  void* decay = nullptr;  // the same; null: not wanted, as always for the adjoint
};

struct SelectiveScanBwdParams : SelectiveScanParams {
  SequenceView grad_out;
  StateView grad_last_state;
  const void* chunk_states = nullptr;

  // Gradients that are absent or not needed have data null; per_step is then false.
  SequenceView grad_u, grad_delta, grad_z;
  MatrixView grad_B, grad_C;
  // Whether the outputs of forward, computed again, replace grad_out: each element is written after its last read, by the
  // thread that read it.
  bool replaces_grad_out = false;
  // Contiguous: (dim, dstate), (dim,), (dim,) and (batch or sequences, dim, dstate).
  void* grad_A = nullptr;
  void* grad_D = nullptr;
  void* grad_delta_bias = nullptr;
  void* grad_initial_state = nullptr;
};

SSM_KERNEL_STRUCT(SelectiveScanFwdParams, 432);
SSM_KERNEL_STRUCT(SelectiveScanBwdParams, 704);
SSM_KERNEL_STRUCT(SelectiveScanSummaryParams, 408);
SSM_KERNEL_STRUCT(TwoSampleParams, 216);

}  // namespace ssm_kernels::selective_scan
