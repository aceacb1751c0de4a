// Interface between the host code of Mamba-3's rotation on CUDA (rotation.cpp) and its kernels (phases.cuh, rotation.cuh,
// rotation_bwd.cuh).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/kernel_abi.h"
#include "common/scalar_kind.h"
#include "mamba3/mamba3.h"

namespace ssm_kernels::mamba3 {

// Steps of a chunk. Phases are in memory at the first step of each chunk only.
constexpr int kPhaseChunk = 64;
// A block of the rotation has the columns of kBlockPairs pairs of up to so many heads, forward at once and backward in turn.
constexpr int kLanePairs = 4, kRowLanes = 8, kBlockPairs = kLanePairs * kRowLanes;
constexpr int kRotateHeads = 16, kUnrotateHeads = 16;

// A tensor (batch, seqlen, heads) or (batch, seqlen, [heads,] angles) in float32 or 16 bits. Without heads, stride_head is 0.
struct GateView {
  void* data = nullptr;
  int64_t stride_batch = 0, stride_step = 0, stride_head = 0, stride_angle = 0;
  ScalarKind kind = ScalarKind::kFloat;
};

// Parameters of all kernels of a call.
struct PhaseParams {
  int64_t batch = 0, seqlen = 0, chunks = 0, heads = 0, angles = 0, sequences = 0;
  GateView sizes, rates;  // dt, and the angles before tanh
  // (batch, seqlen), or null: -1, or before a step where phases begin anew kFromZero or the number of the sequence.
  const int* resets = nullptr;
  // (seqlen,), or null if each row of the batch is one sequence: the number of the sequence that ends with a step, or -1.
  const int* ends = nullptr;
  const float* initial = nullptr;  // (sequences, heads, angles), radians, or null: zero
  // Workspaces: the turns that each chunk adds, or the phases after it if has_reset, (batch, chunks, heads, angles); has_reset,
  // (batch, chunks): whether phases begin anew within the chunk.
  double* sums = nullptr;
  uint8_t* has_reset = nullptr;
  // tanh of the angles of heads, (batch, seqlen, heads, angles), and the initial phases in turns, from -1/2 to 1/2: written
  // with the sums. Null if heads share their angles, and if phases begin with zero.
  float *rates_of_heads = nullptr, *initial_turns = nullptr;
  // (batch, chunks, heads, angles): the phases before the first step of each chunk, in turns, from -1/2 to 1/2.
  float* starts = nullptr;
};
constexpr int kFromZero = -2;

// The rows of B and C and their biases, and k and q or their gradients.
struct RotateParams : PhaseParams {
  int64_t ranks = 1, groups = 0, dstate = 0;
  bool is_pairs = true;                              // (2 i, 2 i + 1), else (i, i + dstate / 2)
  RowView B, C;                                      // of the inputs' type
  const float *B_bias = nullptr, *C_bias = nullptr;  // (ranks, heads, dstate), or null
  void *k = nullptr, *q = nullptr;                   // (batch, seqlen, ranks, heads, dstate)
  float *final_angle = nullptr, *final_k = nullptr;  // (sequences, heads, angles), radians; (sequences, heads, ranks, dstate)
};

// The adjoint. k and q have the gradients of k and q, fp32, final_angle and final_k, or null, those of the states. A slab is
// kUnrotateHeads heads of one group.
struct UnrotateParams : RotateParams {
  int64_t slabs = 0;  // of a group
  // The sums over the heads of a slab, (batch, seqlen, ranks, groups, slabs, dstate).
  float *B_parts = nullptr, *C_parts = nullptr;
  // The sums over the steps of a chunk, (batch, chunks, 2, ranks, heads, dstate): of B, then of C.
  float* bias_parts = nullptr;
  // The gradients of the rates in half turns of a step, (parts, batch, seqlen, [heads,] angles), and of the sizes, (parts,
  // batch, seqlen, heads), without what later chunks add. Parts of the former are ranks and, unless they have heads, slabs of
  // all groups; of the latter ranks and blocks of pairs.
  float *rate_parts = nullptr, *size_parts = nullptr;
  int64_t rate_part_count = 0, size_part_count = 0;
  // The sums of the gradients of the phases in each chunk, until the first step where phases begin anew, (ranks, batch, chunks,
  // heads, angles), and of all later chunks of the sequence, (batch, chunks, heads, angles).
  float *chunk_parts = nullptr, *later = nullptr;
  // (ranks, sequences, heads, angles), or null: the gradients of the initial phases, per radian.
  float* initial_parts = nullptr;
  // Results. grad_sizes takes the sum of what the tensor `other_sizes` has and of the phases' part.
  GateView grad_rates, grad_sizes, other_sizes;  // null: not needed, or zero
  RowView grad_B, grad_C;                        // of the inputs' type, or null
};

// The phases at the chunks' first steps.
SSM_KERNEL_API cudaError_t launch_phase_starts(const PhaseParams& params, cudaStream_t stream);
// k and q, of the type of B and C. With `is_aligned` all rows have a multiple of 8
// elements, and begin at multiples of 16 bytes, k and q included.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_rotate(const RotateParams& params, bool is_aligned, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_unrotate(const UnrotateParams& params, bool is_aligned, cudaStream_t stream);

SSM_KERNEL_STRUCT(GateView, 48);
SSM_KERNEL_STRUCT(PhaseParams, 208);
SSM_KERNEL_STRUCT(RotateParams, 368);
SSM_KERNEL_STRUCT(UnrotateParams, 680);

}  // namespace ssm_kernels::mamba3
