// Parameters of Mamba-3's decoding kernels, on CPU and CUDA: plain data, no torch type.
//
// One step of a head, with the phases theta <- theta + pi tanh(angles) dt and the weight lambda = sigmoid(trap):
//
//   k' = R(theta) (B + B_bias),  q = R(theta) (C + C_bias)
//   S <- e^(A dt) (S + (1 - lambda) dt x_before k^T) + lambda dt x k'^T,  k <- k',  x_before <- x
//   y = S q + D x,  out = y silu(z), or rms(y) norm_weight silu(z)
//
// With ranks k, q and y have R rows, x k^T is sum_r v^r (k^r)^T of v^r = x mimo_x^r, D x is D v^r, z is z mimo_z^r, and `out`
// is the sum of the rows' results times mimo_out^r.
#pragma once

#include <cstdint>

#include "common/decoding_rows.h"
#include "common/kernel_abi.h"
#include "common/scalar_kind.h"

namespace ssm_kernels::mamba3::step {

// A tensor of tokens, (rows, ...), or of parameters, without a stride of rows. Strides count elements; `stride_head` is that of
// the heads or groups, `stride_rank` that of the ranks or zero. A null tensor is absent.
struct TokenView {
  void* data = nullptr;
  int64_t stride_row = 0, stride_head = 0, stride_rank = 0, stride_column = 0;
  bool is_input_kind = true;  // else of the accumulation type
};

// A (slots, heads, rows, columns) or (slots, heads, columns) tensor.
struct StateView {
  void* data = nullptr;
  int64_t stride_slot = 0, stride_head = 0, stride_row = 0, stride_column = 0;
  ScalarKind kind = ScalarKind::kFloat;
};

struct StepParams {
  int64_t rows = 0, slots = 0, ranks = 1, heads = 0, groups = 0, headdim = 0, dstate = 0, angles = 0;
  ScalarKind input_kind = ScalarKind::kFloat;  // of x, B, C, z, out and previous_x
  bool is_pairs = true;                        // (2 i, 2 i + 1), else (i, i + dstate / 2)
  double norm_eps = 0;
  TokenView x, dt, A, B, C, trap, rates, B_bias, C_bias, D, z, norm_weight, out;  // rates: angles before tanh
  TokenView mimo_x, mimo_z, mimo_out;                                             // 1 if absent
  StateView angle, ssm, k, previous_x;                                            // the rows of k are the ranks
  IndexTable slot_of_row;                                                         // without a table, row b uses slot b

  SSM_HOST_DEVICE int64_t slot(int64_t row) const { return slot_of_row.data == nullptr ? row : slot_of_row.at(row); }
};

SSM_KERNEL_STRUCT(StepParams, 1080);

}  // namespace ssm_kernels::mamba3::step
