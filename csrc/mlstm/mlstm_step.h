// Parameters of the decoding step of xLSTM's matrix memory, on CPU and CUDA: plain data, no torch type.
//
// One step of a head's memory (C, n, m), C stored (value_dim, key_dim) = (V, K), with the decay and the gain of
// common/mlstm_gates.h:
//
//   C <- decay C + gain v k^T,  n <- decay n + gain k,  out = scale C q / (max(|scale n q|, e^-m) + eps)
#pragma once

#include <cstdint>

#include "common/decoding_rows.h"
#include "common/kernel_abi.h"
#include "common/scalar_kind.h"

namespace ssm_kernels::mlstm::step {

constexpr int64_t kMaxKeyDim = 512;

// A (rows, heads, columns) tensor. Strides count elements. Gates have no columns.
struct TokenView {
  void* data = nullptr;
  int64_t stride_row = 0, stride_head = 0, stride_column = 0;
  bool is_input_kind = true;  // gates: else of the accumulation type

  SSM_HOST_DEVICE int64_t offset(int64_t row, int64_t head) const { return row * stride_row + head * stride_head; }
};

// A (slots, heads, value_dim, key_dim), (slots, heads, key_dim) or (slots, heads) tensor.
struct StateView {
  void* data = nullptr;
  int64_t stride_slot = 0, stride_head = 0, stride_row = 0, stride_column = 0;

  SSM_HOST_DEVICE int64_t offset(int64_t slot, int64_t head) const { return slot * stride_slot + head * stride_head; }
};

struct StepParams {
  int64_t rows = 0, slots = 0, heads = 0, key_dim = 0, value_dim = 0;
  ScalarKind input_kind = ScalarKind::kFloat;  // of q, k, v and out
  ScalarKind state_kind = ScalarKind::kFloat;  // of C; n and m have the accumulation type
  bool is_exp = true, normalize = true;
  double scale = 1, eps = 0;
  TokenView q, k, v, i, f, out;
  StateView C, n, m;
  IndexTable slot_of_row;  // without a table, row b uses slot b

  SSM_HOST_DEVICE int64_t slot(int64_t row) const { return slot_of_row.data == nullptr ? row : slot_of_row.at(row); }
};

SSM_KERNEL_STRUCT(StepParams, 472);

}  // namespace ssm_kernels::mlstm::step
