// Parameters of the delta rule's kernels: plain data without torch types, so that CUDA sources compile without torch headers.
#pragma once

#include <cstdint>

#include "common/kernel_abi.h"
#include "common/macros.h"
#include "cuda/chunked/geometry.h"
#include "cuda/tma_descriptor.h"

namespace ssm_kernels::delta_rule {

// The delta rule is one of the chunked scans: a state (V, K) of each value head, with headdim V and dstate K.
using namespace cuda::chunked;

// The matrices of chunks (cuda/chunk_matrices_sm90.cuh) are a workspace of so many bytes for each chunk number and value head.
constexpr int64_t kChunkMatrixBytes = 2 * kChunk * kChunk * 2;
// Chunk numbers: cuda/chunked/span.cuh.
SSM_HOST_DEVICE constexpr int64_t chunk_numbers(int64_t batch, int64_t seqlen, bool is_packed) {
  return is_packed ? max_packed_chunks(seqlen, batch) : batch * ((seqlen + kChunk - 1) / kChunk);
}

// The inputs and the output of the kernel of these matrices. Of ChunkedGeometry it reads batch, seqlen, heads and dstate.
struct DeltaRuleMatricesParams : ChunkedGeometry {
  int value_heads_per_key_head = 1;
  bool scales_by_beta = true;  // the columns of the matrices
  RowsView log_decay, beta;    // as in DeltaRuleFwdParams
  const int64_t* cu_seqlens = nullptr;
  const uint8_t* resets = nullptr;
  void* matrices = nullptr;               // (chunk_numbers, heads, kChunkMatrixBytes), aligned to 16 bytes
  cuda::TmaDescriptor k_descriptor = {};  // tiles of 64 steps and columns
};

// q and k have rows of key heads, v and out rows of value heads. `groups` equals `heads`, the value heads: each has an inverse
// of its own, so that no two of them share a work tile.
struct DeltaRuleFwdParams : ChunkedGeometry {
  int value_heads_per_key_head = 1;
  float scale = 1;
  RowsView out;
  RowsView log_decay, beta;  // rows of one fp32 element; log_decay.data null: no decay
  const int64_t* cu_seqlens = nullptr;
  const uint8_t* resets = nullptr;
  const float* initial_states = nullptr;
  int64_t states_stride_entry = 0;
  float* final_states = nullptr;
  // They describe tiles of 64 steps and columns for TMA.
  cuda::TmaDescriptor q_descriptor = {}, k_descriptor = {}, v_descriptor = {}, out_descriptor = {};
  // As in SsdFwdParams.
  float* chunk_states = nullptr;
  int chunk_states_every = 1, chunk_states_count = 0;
  int64_t chunk_states_row = 0;
};

SSM_KERNEL_STRUCT(DeltaRuleFwdParams, 896);
SSM_KERNEL_STRUCT(DeltaRuleMatricesParams, 384);

}  // namespace ssm_kernels::delta_rule
