// Parameters of the chunked kernels of mlstm_scan (chunks.cuh): plain data without torch types.
#pragma once

#include <cstdint>

#include "common/kernel_abi.h"
#include "cuda/tma_descriptor.h"

namespace ssm_kernels::mlstm {

constexpr int kMatrixChunk = 128;   // steps of a chunk
constexpr int kMatrixKeys = 256;    // the key_dim that the kernels take
constexpr int kMatrixValues = 256;  // value_dim is a multiple of it: values of a result that a block has at a time

// Numbers of a chunk's steps, of which each chunk has kMatrixChunk.
enum ChunkTable : int {
  kTableLog2Decay,  // the sum of the log2 decays of the chunk up to the step
  kTableGain,
  kTableFactor,     // of the output; 1 in a forward that divides
  kTableFloor,      // e^-m, the least divisor
  kTableToEnd,      // the gain times the decay from the step to the chunk's end
  kTableFromStart,  // the factor times the decay from before the chunk to the step
  kChunkTables
};
// Sums of a chunk's steps that backward's chunks leave for the gradients of gates. A pair of steps (j, i) is the gradient of
// out at i times the part of it that comes from j.
enum ChunkSum : int {
  kSumFromState,  // pairs with steps j before the chunk, for i
  kSumEarlier,    // pairs with j < i of the chunk, for i
  kSumSame,       // the pair of a step with itself
  kSumToEnd,      // pairs with steps i after the chunk, for j
  kSumLater,      // pairs with j < i of the chunk, for j
  kChunkSums
};

// A part of a call: some rows of the batch and some heads. Tensors of the workspace have the part's rows and heads: lines.
struct ChunkParams {
  cuda::TmaDescriptor q = {}, k = {}, v = {}, grad_out = {};  // tiles of 64 steps and columns
  cuda::TmaDescriptor out = {}, grad_q = {}, grad_k = {}, grad_v = {};
  int64_t batch = 0, seqlen = 0, heads = 0, chunks = 0, value_dim = 0;
  int64_t first_entry = 0, entries = 0, first_head = 0, part_heads = 0;
  int64_t multiprocessors = 1, segments = 1;
  double scale = 1, eps = 0;
  // (batch, seqlen, heads), fp32. With `divisor`, as backward of a call that divides has it, the factor of each output is scale
  // / (max(|divisor|, e^-m) + eps), else `scale`.
  const float *log_decay = nullptr, *gain = nullptr, *m = nullptr, *divisor = nullptr;
  // Forward of a call that divides: n before every kNormalizerChunk steps, (batch, normalizer_chunks(seqlen), heads, key_dim),
  // n before the first step, (batch, heads, key_dim) or null: zero, and the divisors, which the kernels write.
  const float *normalizers = nullptr, *initial_normalizers = nullptr;
  float* written_divisor = nullptr;
  // (batch, heads, value_dim, key_dim), or null: states before the first step and their gradients, and those after the last
  // one.
  const float *initial_states = nullptr, *grad_final_states = nullptr;
  float *final_states = nullptr, *grad_initial_states = nullptr;
  // Workspace. The memory before each chunk, and the gradient of the memory after it: (lines, chunks, value_dim / 64) tiles of
  // 64 values and all keys, in the 128-byte swizzle.
  void *states = nullptr, *grad_states = nullptr;
  float* tables = nullptr;          // (lines, chunks, kChunkTables, kMatrixChunk)
  float* decays = nullptr;          // (lines, chunks): over the chunk
  float* sums = nullptr;            // (lines, chunks, kChunkSums, kMatrixChunk)
  float* products = nullptr;        // (lines, chunks, value_dim / 16): parts of the product of `states` and `grad_states`
  float* segment_states = nullptr;  // (segments, lines, value_dim / 128) blocks of states, in the order of registers
  float* segment_decays = nullptr;  // (segments, lines, value_dim / 128)
  // Forward of packed sequences, whose first steps have a decay of zero: the memory after each sequence with steps goes to its
  // row of `final_states`, (sequences, heads, value_dim, key_dim). For sequences that end before the last step of a chunk, the
  // tables have the gains times the decay to that end, (lines, sequences, kMatrixChunk), and the decay from the chunk's start
  // to it, (lines, sequences).
  const int64_t* cu_seqlens = nullptr;
  int64_t sequences = 0;
  float *end_tables = nullptr, *end_decays = nullptr;
  // (batch, seqlen, heads): gradients of the log decays and, times the gain, of the gains, and out times its gradient.
  float *grad_log_decay = nullptr, *gain_times_grad = nullptr, *out_products = nullptr;

  constexpr int64_t lines() const { return entries * part_heads; }
};
SSM_KERNEL_STRUCT(ChunkParams, 1408);

}  // namespace ssm_kernels::mlstm
