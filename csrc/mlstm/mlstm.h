// Parameters of mlstm_scan's CUDA kernels: plain data without torch types, so that CUDA sources compile without torch headers.
#pragma once

#include <cstdint>

#include "common/kernel_abi.h"
#include "common/scalar_kind.h"

namespace ssm_kernels::mlstm {

// A (batch, seqlen, heads) tensor of the inputs' type or of the accumulation type. Strides count elements.
struct GateView {
  const void* data = nullptr;
  int64_t stride_batch = 0, stride_step = 0, stride_head = 0;
  bool is_input_kind = false;
};

// The rows of the batch, and the sequences in them: each row is one, or cu_seqlens packs all of them into one row.
struct SequenceParams {
  int64_t batch = 0, seqlen = 0, heads = 0, sequences = 0;
  const int64_t* cu_seqlens = nullptr;
};

// The gates of all steps. The results are contiguous and of the accumulation type: (batch, seqlen, heads), and final_m
// (sequences, heads), of which those of sequences without steps are not written.
struct GateParams : SequenceParams {
  bool is_exp = true;
  GateView i, f;
  const uint8_t* resets = nullptr;  // (batch, seqlen), contiguous: steps before which the memory is emptied; or null
  const void* initial_m = nullptr;  // (sequences, heads), contiguous, or null
  void *m = nullptr, *log_decay = nullptr, *gain = nullptr, *final_m = nullptr;
  void* maps = nullptr;  // workspace for gate_maps() pairs of the accumulation type
};

// Consecutive steps of a row that a block of the gates' kernel has.
constexpr int kGateTileSteps = 2048;
constexpr int64_t gate_tiles(int64_t seqlen) { return (seqlen + kGateTileSteps - 1) / kGateTileSteps; }
// The pairs of GateParams::maps: none where each row is one tile.
constexpr int64_t gate_maps(const SequenceParams& p) {
  return gate_tiles(p.seqlen) > 1 ? p.batch * p.heads * gate_tiles(p.seqlen) : 0;
}

// A row of `columns` elements and a number of each kind for each of `count` steps and heads, all contiguous.
struct RowParams {
  int64_t count = 0, columns = 0;
  double scale = 1, eps = 0;
  const void* rows = nullptr;                   // of the inputs' type
  const void *divisor = nullptr, *m = nullptr;  // of the accumulation type
  void* out = nullptr;
};

// A (batch, seqlen, heads, key_dim) tensor of the inputs' type.
struct KeyView {
  void* data = nullptr;
  int64_t stride_batch = 0, stride_step = 0, stride_head = 0, stride_column = 0;
};

// The normalizer n and the products n q, and their adjoint. Tensors without a view are contiguous and of the accumulation type.
struct NormalizerParams : SequenceParams {
  int64_t key_dim = 0;
  double scale = 1, eps = 0;
  KeyView q, k;
  const void *log_decay = nullptr, *gain = nullptr;  // (batch, seqlen, heads)
  const void* initial_n = nullptr;                   // (sequences, heads, key_dim) or null: zero
  // Workspace: the normalizer before each chunk, the gradient of that after it, (batch, chunks, heads, key_dim), and the decay
  // over the chunk, (batch, chunks, heads).
  void *states = nullptr, *grad_states = nullptr, *decays = nullptr;

  // Forward writes these, the final states of sequences without steps apart.
  void* divisor = nullptr;   // scale n q, (batch, seqlen, heads)
  void* final_n = nullptr;   // as initial_n
  bool only_states = false;  // ends with `states` and final_n, of sequences that are not packed
};
struct NormalizerBwdParams : NormalizerParams {
  const void *read_divisor = nullptr, *m = nullptr;
  // The sum over value_dim of the gradient of out times out, in `parts` parts: (batch, seqlen, heads, parts). Null: zero.
  const void* out_products = nullptr;
  int64_t parts = 1;
  const void* grad_final_n = nullptr;                    // or null
  void* grad_initial_n = nullptr;                        // or null; those of sequences without steps are not written
  KeyView grad_q, grad_k;                                // added to, unless null
  void *grad_log_decay = nullptr, *grad_gain = nullptr;  // (batch, seqlen, heads)
};

// Steps that a warp of the normalizer's kernels has.
constexpr int kNormalizerChunk = 64;
constexpr int64_t normalizer_chunks(int64_t seqlen) { return (seqlen + kNormalizerChunk - 1) / kNormalizerChunk; }

SSM_KERNEL_STRUCT(GateView, 40);
SSM_KERNEL_STRUCT(SequenceParams, 40);
SSM_KERNEL_STRUCT(GateParams, 184);
SSM_KERNEL_STRUCT(RowParams, 64);
SSM_KERNEL_STRUCT(KeyView, 40);
SSM_KERNEL_STRUCT(NormalizerParams, 216);
SSM_KERNEL_STRUCT(NormalizerBwdParams, 360);

}  // namespace ssm_kernels::mlstm
