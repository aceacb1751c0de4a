// Plain data that the SSD chunk-scan's kernels take: no torch types, so that CUDA sources compile without torch headers.
#pragma once

#include <cstdint>

#include "common/discretization.h"

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

struct SsdFwdParams : SsdParams {
  RowsView out;
  float* final_states = nullptr;  // (batch, heads, headdim, dstate)
};

}  // namespace ssm_kernels::ssd
