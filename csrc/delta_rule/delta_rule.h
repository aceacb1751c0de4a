// Parameters of the delta rule's kernels: plain data without torch types, so that CUDA sources compile without torch headers.
#pragma once

#include <cstdint>

#include "common/kernel_abi.h"
#include "common/macros.h"
#include "cuda/chunked/geometry.h"
#include "cuda/tma_descriptor.h"
#include "delta_rule/cuda/chunk_matrices.h"

namespace ssm_kernels::delta_rule {

// The delta rule is one of the chunked scans: a state (V, K) of each value head, with headdim V and dstate K.
using namespace cuda::chunked;

// The kernels of cuda/wide_state.cuh take keys of more than kStateColumns columns. Their state tiles have all columns.
SSM_HOST_DEVICE constexpr bool is_wide(int64_t dstate) { return dstate > kStateColumns; }
SSM_HOST_DEVICE constexpr int64_t state_tile_columns(int64_t dstate) {
  return is_wide(dstate) ? kMaxKernelDstate : tile_columns(dstate);
}
inline WorkPartition partition_states(const ChunkedGeometry& p) {
  return partition_work({p.batch, p.seqlen, p.heads, p.groups, p.headdim, is_wide(p.dstate) ? kStateColumns : p.dstate});
}

// How many chunk numbers there are (cuda/chunked/span.cuh): workspaces have a place for each.
SSM_HOST_DEVICE constexpr int64_t chunk_numbers(int64_t batch, int64_t seqlen, bool is_packed) {
  return is_packed ? max_packed_chunks(seqlen, batch) : batch * ((seqlen + kChunk - 1) / kChunk);
}

// How the log decay and beta of a step follow from the arguments (common/delta_gates.h).
struct DeltaRuleGateOptions {
  bool has_raw_gate = false, is_bounded = false;  // bounded: by gate_lower_bound
  bool beta_sigmoid = false, allow_neg_eigval = false;
  float gate_lower_bound = 0;
  const float *A_log = nullptr, *dt_bias = nullptr;  // (heads,), or null
};

// Parameters of the kernel that computes the factors of rows, the log decays and beta (cuda/step_factors.cuh). Of
// ChunkedGeometry it reads batch, seqlen, heads and dstate. Arguments have the inputs' type, or fp32; results are fp32, as in
// DeltaRuleFwdParams.
struct DeltaRuleFactorsParams : ChunkedGeometry {
  int value_heads_per_key_head = 1;
  int log2_updates = 0;  // as in DeltaRuleFwdParams
  bool gate_is_fp32 = false, beta_is_fp32 = false;
  DeltaRuleGateOptions options;
  RowsView q, k;  // rows of whole vectors of 16 bytes
  RowsView raw_gate, raw_beta;
  RowsView row_factors, log_decay, beta;  // null: not needed
};

// Parameters of the kernel that makes gradients of rows of q or k of those with has_fp32_rows (cuda/row_gradients.cuh). All are
// (batch, seqlen, heads, ...).
struct DeltaRuleRowGradsParams {
  int64_t batch = 0, seqlen = 0, heads = 0;
  int key_dim = 0;           // at most kMaxKernelDstate; rows are filled up to whole vectors of 16 bytes
  RowsView rows, grad;       // grad of the inputs' type, as rows
  RowsView sums;             // fp32
  RowsView row_factors;      // as in DeltaRuleFwdParams
  bool are_queries = false;  // which of the two factors
};

// Parameters of the kernel that makes gradients of the arguments g, beta, A_log and dt_bias of those of log decays and beta
// (cuda/gate_gradients.cuh). Gradients have the types of their arguments; those that are not needed are null.
struct DeltaRuleGateGradsParams {
  int64_t steps = 0, seqlen = 0, heads = 0;  // steps: of all rows of the batch
  bool gate_is_fp32 = false, beta_is_fp32 = false;
  DeltaRuleGateOptions options;
  RowsView raw_gate, raw_beta;
  RowsView grad_log_decay, grad_beta;  // fp32; null: neither g nor its parameters, or not beta
  RowsView grad_raw_gate, grad_raw_beta;
  double* sums = nullptr;  // (kGateGradSteps at a time, 2, heads): parts of the gradients of A_log and dt_bias
};
constexpr int64_t kGateGradSteps = 64;

// Parameters of the kernel that computes forward's chunk matrices (cuda/chunk_matrices_sm90.cuh). Of ChunkedGeometry it reads
// batch, seqlen, heads and dstate.
struct DeltaRuleMatricesParams : ChunkedGeometry {
  int value_heads_per_key_head = 1;
  int multiprocessors = 1;  // of the device
  int log2_updates = 0;     // as in DeltaRuleFwdParams
  float scale = 1;
  bool beta_is_fp32 = true;               // else of the inputs' type
  RowsView log_decay, beta, row_factors;  // as in DeltaRuleFwdParams
  const int64_t* cu_seqlens = nullptr;
  const uint8_t* resets = nullptr;
  void* inverses = nullptr;               // (chunk_numbers, heads, kChunkMatrixBytes), aligned to 128 bytes
  cuda::TmaDescriptor k_descriptor = {};  // tiles of 64 steps and columns
};

// q and k have rows of key heads, v and out rows of value heads. `groups` equals `heads`, the value heads: each has an inverse
// of its own, so that no two of them share a work tile.
//
// With several updates a step `seqlen` counts updates, and k, v and beta have a row for each. q, out and the log decays have
// one for 2^log2_updates of them (cuda/step_updates.cuh).
struct DeltaRuleFwdParams : ChunkedGeometry {
  int value_heads_per_key_head = 1;
  float scale = 1;
  int log2_updates = 0;
  int work_tiles_of_block = 1;  // cuda/chunked/scheduler.cuh
  RowsView out;
  // Rows of one fp32 element; log_decay.data null: no decay. row_factors has rows of key heads, of two elements and one after
  // another in time: the factors of the key and the query (cuda/step_tables.cuh), which are 1 if it is null. The scan does not
  // read beta, which is in the chunk matrices: it may have another type there (DeltaRuleMatricesParams).
  RowsView log_decay, beta, row_factors;
  const int64_t* cu_seqlens = nullptr;
  const uint8_t* resets = nullptr;
  const float* initial_states = nullptr;
  int64_t states_stride_entry = 0;
  float* final_states = nullptr;
  const int64_t* first_segments = nullptr;  // as in DeltaRuleBwdParams
  int64_t sequences = 0;
  // They describe tiles of 64 steps, or as many rows as these have, and 64 columns for TMA.
  cuda::TmaDescriptor q_descriptor = {}, k_descriptor = {}, v_descriptor = {}, out_descriptor = {};
  // StateCarry reads these members, as in SsdFwdParams. The delta rule has no chunk states: they keep their defaults.
  float* chunk_states = nullptr;
  int chunk_states_every = 1, chunk_states_count = 0;
  int64_t chunk_states_row = 0;
  void* matrices = nullptr;        // with dstate over kStateColumns, of DeltaRuleBwdParams
  const void* inverses = nullptr;  // of DeltaRuleMatricesParams
};

// Parameters of the kernel that cuts sequences into segments of segment_steps steps (cuda/segment_fold.cuh). A sequence has one
// at least. The places of all segments, `places`, are as many as any lengths of the sequences need; the last ones may be empty.
struct DeltaRuleSegmentsParams {
  int64_t sequences = 0, places = 0, segment_steps = 0;
  int64_t seqlen = 0;                   // of each sequence, or of all packed sequences together
  const int64_t* cu_seqlens = nullptr;  // (sequences + 1,) if they are packed
  int64_t* bounds = nullptr;            // (places + 1,): the segments as packed sequences
  int64_t* first_segments = nullptr;    // (sequences + 1,): of each sequence, and after the last one
  int64_t* last_segments = nullptr;     // (sequences,)
};

// Parameters of the kernel that computes the states before each segment of each sequence, or their gradients after each segment
// if is_reverse (cuda/segment_fold.cuh).
struct DeltaRuleFoldParams {
  int64_t sequences = 0, heads = 0;
  int headdim = 0, dstate = 0;
  int map_rows = 0;  // of a segment's map: headdim, filled up to whole tiles, and dstate
  bool is_reverse = false;
  const int64_t* first_segments = nullptr;  // as in DeltaRuleSegmentsParams
  const float* maps = nullptr;              // (places, heads, map_rows, dstate)
  const float* states = nullptr;  // (sequences, heads, headdim, dstate): before the first segment (after the last); null: zero
  float* starts = nullptr;        // (places, heads, headdim, dstate)
};

// Bytes of backward's workspaces (cuda/bwd_workspace.cuh) for each chunk of a value head: a matrix and the tables, which take
// 17 * 128 bytes; and for each 64 rows of V two state tiles of `columns` columns, two tiles of steps and four bits of each
// element of a tile of steps.
constexpr int64_t kBwdMatricesBytes = kChunk * kChunk * 2 + 17 * 128;
// Keys with more than kStateColumns columns have two more matrices, and their states a second part of kStateColumns columns.
constexpr int64_t kWideMatricesBytes = kBwdMatricesBytes + 2 * kChunk * kChunk * 2;
constexpr int64_t kBwdStatePartBytes = 2 * kStateRows * kStateColumns * 2;
constexpr int64_t bwd_states_bytes(int64_t columns) {
  return 2 * kStateRows * (columns + kChunk) * 2 + kStateRows * kChunk / 2;
}

// Parameters of backward's kernels. grad_q and grad_k have rows of key heads, of fp32 and times row_factors with has_fp32_rows,
// else of the inputs' type. grad_log_decay is fp32, grad_beta without rounds_grad_beta. Gradients that are not needed are null,
// except grad_q, grad_k and grad_v.
struct DeltaRuleBwdParams : ChunkedGeometry {
  int value_heads_per_key_head = 1;
  float scale = 1;
  int log2_updates = 0;  // as in DeltaRuleFwdParams
  bool has_fp32_rows = false;
  bool beta_is_fp32 = true;               // else of the inputs' type
  bool rounds_grad_beta = false;          // grad_beta has the inputs' type
  RowsView log_decay, beta, row_factors;  // as in DeltaRuleFwdParams
  RowsView grad_q, grad_k, grad_v, grad_log_decay, grad_beta;
  const int64_t* cu_seqlens = nullptr;
  const uint8_t* resets = nullptr;
  const float *initial_states = nullptr, *grad_final_states = nullptr;
  float *final_states = nullptr, *grad_initial_states = nullptr;
  int64_t states_stride_entry = 0;
  // For maps of segments (cuda/segment_fold.cuh): those of DeltaRuleSegmentsParams, and the rows of V; the other rows of a
  // state have no values. Null: the states are those of sequences.
  const int64_t* first_segments = nullptr;
  int64_t sequences = 0;
  int value_rows = 0;
  void *matrices = nullptr, *states = nullptr;  // (chunk_numbers, heads, ...), aligned to 128 bytes; launch.h: states null
  float* sums = nullptr;  // with several value heads of a key head, (blocks, kWarpgroups, kChunk, tile_columns)
  // As in DeltaRuleFwdParams. With several updates a step q_of_updates and grad_out_of_updates describe tiles that have a row
  // for each update (cuda/step_tiles.cuh).
  cuda::TmaDescriptor q_descriptor = {}, k_descriptor = {}, v_descriptor = {}, grad_out_descriptor = {}, q_of_updates = {},
                      grad_out_of_updates = {}, grad_v_descriptor = {};
  cuda::TmaDescriptor grad_q_descriptor = {}, grad_k_descriptor = {};  // without has_fp32_rows
};

// For keys of more than kStateColumns columns: the parameters of the gradients' kernel for each part of the columns.
constexpr int kColumnParts = 2;
struct DeltaRuleBwdParts {
  DeltaRuleBwdParams of[kColumnParts];
};

SSM_KERNEL_STRUCT(DeltaRuleBwdParams, 1664);
SSM_KERNEL_STRUCT(DeltaRuleBwdParts, 3328);
SSM_KERNEL_STRUCT(DeltaRuleFactorsParams, 304);
SSM_KERNEL_STRUCT(DeltaRuleFoldParams, 64);
SSM_KERNEL_STRUCT(DeltaRuleFwdParams, 896);
SSM_KERNEL_STRUCT(DeltaRuleGateGradsParams, 256);
SSM_KERNEL_STRUCT(DeltaRuleMatricesParams, 384);
SSM_KERNEL_STRUCT(DeltaRuleRowGradsParams, 168);
SSM_KERNEL_STRUCT(DeltaRuleSegmentsParams, 64);

}  // namespace ssm_kernels::delta_rule
