// Plain data that the SSD chunk-scan's kernels take: no torch types, so that CUDA sources compile without torch headers.
#pragma once

#include <cstdint>

#include "common/discretization.h"
#include "cuda/tma_descriptor.h"

namespace ssm_kernels::ssd {

// (batch, seqlen, heads, row): x, z, out of headdim elements, B and C of dstate elements for each group. Rows are contiguous.
struct RowsView {
  void* data = nullptr;
  int64_t stride_batch = 0, stride_step = 0, stride_head = 0;
};

struct SsdParams {
  int64_t batch = 0;   // entries, or sequences where they are packed
  int64_t seqlen = 0;  // of each entry, or of all sequences together
  int64_t heads = 0, groups = 0;
  int headdim = 0, dstate = 0;
  Discretization discretization = Discretization::kZoh;  // of the exponential family
  bool dt_softplus = false;
  float dt_min = 0, dt_max = 0;
  RowsView x, z, B, C;
  RowsView dt;                     // of one element each
  const float* A = nullptr;        // (heads,)
  const float* dt_bias = nullptr;  // (heads,) or null
  const float* D = nullptr;        // (heads, headdim), or null
  int64_t D_stride_head = 0, D_stride_row = 0;
  const int64_t* cu_seqlens = nullptr;    // (batch + 1,), where sequences are packed
  const uint8_t* resets = nullptr;        // (batch, seqlen), or null: steps before which the state becomes zero
  const float* initial_states = nullptr;  // (batch, heads, headdim, dstate), or null: zero
};

// What backward keeps between its kernels is numbered by chunk: of those of all sequences, first_chunk_index is a sequence's
// first. A sequence of packed ones begins wherever the one before ends, so that numbers may be left out, but none is taken
// twice.
struct SsdBwdParams : SsdParams {
  RowsView grad_out;                                       // of y, where there is a gate: z is of no concern to these kernels
  const float* grad_final_states = nullptr;                // (batch, heads, headdim, dstate), or null: zero
  RowsView grad_x, grad_dt, grad_B, grad_C;                // null where they are not needed
  float* grad_initial_states = nullptr;                    // as initial_states, or null
  int64_t num_chunks = 0, state_tiles = 0;                 // chunks; kStateRows rows of one head, of all heads
  int64_t splits = 1, heads_per_split = 0;                 // parts of a group's heads; the last may have fewer
  void *states = nullptr, *grad_states = nullptr;          // (slots, units, kStateRows, dstate), tiles of the inputs' type
  float *grad_B_parts = nullptr, *grad_C_parts = nullptr;  // (splits, batch, seqlen, groups, dstate), if not written in place
  float *grad_A_parts = nullptr, *grad_bias_parts = nullptr;  // (slots, heads)
  float* grad_D_parts = nullptr;                              // (slots, heads, headdim), or null
  int stages = 1;  // of a kernel's shared memory, where its products are those of a warp
  // Of each walk along time; and for all pieces but the last, all walks, directions and units, what the piece does to a state.
  int segments = 1;
  float *segment_states = nullptr, *segment_decays = nullptr;
};

struct SsdFwdParams : SsdParams {
  RowsView out;
  cuda::TmaDescriptor out_descriptor = {};  // its tiles, where the device copies such: epilogue.cuh
  float* final_states = nullptr;            // (batch, heads, headdim, dstate)
};

// The same, of a call whose kernel is compiled for packed sequences, or for others.
struct PackedFwdParams : SsdFwdParams {};
struct UnpackedFwdParams : SsdFwdParams {};

}  // namespace ssm_kernels::ssd
