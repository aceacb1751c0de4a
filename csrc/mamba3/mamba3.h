// Parameters of Mamba-3's CPU kernels: plain data without torch types.
#pragma once

#include <cstdint>

#include "common/kernel_abi.h"
#include "common/scalar_kind.h"

namespace ssm_kernels::mamba3 {

// A (batch, seqlen, ranks, groups, dstate) tensor of the inputs' type, or one of its gradient's. Strides count elements; rows
// of dstate elements are contiguous.
struct RowView {
  const void* data = nullptr;
  int64_t stride_batch = 0, stride_step = 0, stride_rank = 0, stride_group = 0;
};

// The bias and the rotation of B and C. "Accumulated" is the accumulation type of the inputs, float or double; all tensors but
// B and C are contiguous.
struct RotationParams {
  int64_t batch = 0, seqlen = 0, ranks = 1, heads = 0, groups = 0, dstate = 0, angles = 0, sequences = 0;
  ScalarKind input_kind = ScalarKind::kFloat;
  bool is_pairs = true;                             // (2 i, 2 i + 1), else (i, i + dstate / 2)
  bool has_angles_of_heads = false;                 // `rates` then has an axis of heads
  const int64_t* cu_seqlens = nullptr;              // or null: each row of the batch is a sequence
  const uint8_t* resets = nullptr;                  // (batch, seqlen): steps before which the phases are zero; or null
  RowView B, C;                                     // of forward
  const void *B_bias = nullptr, *C_bias = nullptr;  // (ranks, heads, dstate), accumulated, or null
  const double* rates = nullptr;                    // tanh(angles), (batch, seqlen, angles) or (batch, seqlen, heads, angles)
  const double* sizes = nullptr;                    // dt, (batch, seqlen, heads)
  // (sequences, heads, angles), in turns. Forward begins with these phases and leaves those after the last step; backward
  // begins with the gradient of these and leaves that of the former, per radian.
  double* phases = nullptr;
  // (batch, seqlen, heads, angles), accumulated. Forward writes the phase of each step, in turns; backward reads it, and
  // writes the gradient of the radians that the step adds to the phase in its place.
  void* turns = nullptr;
  void *k = nullptr, *q = nullptr;  // (batch, seqlen, ranks, heads, dstate), accumulated: forward writes, backward reads them
  // Likewise: backward reads their gradients, and writes those of the rows before the rotation in their place.
  void *grad_k = nullptr, *grad_q = nullptr;
};

SSM_KERNEL_STRUCT(RowView, 40);
SSM_KERNEL_STRUCT(RotationParams, 248);

}  // namespace ssm_kernels::mamba3
