// Parameters of the selective scan's kernels, on CPU and CUDA: plain data, no torch type.
//
//   delta_t = softplus?(delta_raw_t + delta_bias)                       (batch, dim, seqlen)
//   h_t     = Abar(delta_t A) h_{t-1} + delta_t k(delta_t A) B_t u_t    (batch, dim, dstate)
//   out_t   = (<C_t, h_t> + D u_t) silu(z_t)                            (batch, dim, seqlen)
//
// Time is cut into chunks of chunk_length steps. Forward saves the state at each chunk boundary, the first and the last
// included, (batch, chunks + 1, dim, dstate), and backward recomputes the states inside a chunk from the one before it: nothing
// of size batch * dim * seqlen * dstate exists. (With the last state there are never just one or none, so that the number of
// chunks is no special case when torch.compile traces a dynamic seqlen.)
#pragma once

#include <cstdint>

#include "common/discretization.h"
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

  SequenceView u, delta, z;
  MatrixView B, C;
  StateView A, initial_state;
  ChannelView D, delta_bias;
};

struct SelectiveScanFwdParams : SelectiveScanParams {
  SequenceView out;
  void* last_state = nullptr;    // (batch, dim, dstate), contiguous
  void* chunk_states = nullptr;  // (batch, chunks + 1, dim, dstate), contiguous; null: not saved
};

// A pass over all steps that writes no outputs, with one matrix, B: the summary, from u and B to the last state from zero, or
// the gradient of the state before all steps, from the gradients of the outputs (in place of u) and C (in place of B).
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
  // Contiguous: (dim, dstate), (dim,), (dim,) and (batch, dim, dstate).
  void* grad_A = nullptr;
  void* grad_D = nullptr;
  void* grad_delta_bias = nullptr;
  void* grad_initial_state = nullptr;
};

}  // namespace ssm_kernels::selective_scan
