// Parameters of the delta rule's decoding kernels, on CPU and CUDA: plain data, no torch type.
//
// One update of a head's state S, stored (value_dim, key_dim) = (V, K):
//
//   S <- S diag(e^g)          g: one number a head, or one a column; only in the first update of a token
//   S <- S + beta (v - S k) k^T
//   out = S (scale q)         after the last update of a token
//
// A token has `updates` updates (the Householder factors of DeltaProduct), each with its own k, v and beta. Value head h reads
// q and k of key head h / (value_heads / key_heads).
#pragma once

#include <cstdint>

#include "common/decoding_rows.h"
#include "common/kernel_abi.h"
#include "common/scalar_kind.h"

namespace ssm_kernels::delta_rule_step {

constexpr int64_t kMaxKeyDim = 512;
// A (rows, tokens, heads, columns) tensor; `data` is null if it is absent. Strides count elements. Packed tokens have no stride
// of rows. k, v and beta have one entry an update in place of one a token. A gate of one number a head, and beta, have no
// columns.
struct TokenView {
  void* data = nullptr;
  int64_t stride_row = 0, stride_token = 0, stride_head = 0, stride_column = 0;

  SSM_HOST_DEVICE int64_t offset(int64_t row, int64_t token, int64_t head) const {
    return row * stride_row + token * stride_token + head * stride_head;
  }
};

// A (slots, value_heads, value_dim, key_dim) tensor.
struct StateView {
  void* data = nullptr;
  int64_t stride_slot = 0, stride_head = 0, stride_row = 0, stride_column = 0;
};

// A (value_heads,) or (value_heads, key_dim) tensor, of the inputs' type or of the accumulation type.
struct ParameterView {
  void* data = nullptr;
  int64_t stride_head = 0, stride_column = 0;
  bool is_input_kind = false;
};

struct StepParams {
  int64_t rows = 0, slots = 0, key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
  int64_t updates = 1;                         // of each token
  ScalarKind input_kind = ScalarKind::kFloat;  // of q, k, v and out
  ScalarKind state_kind = ScalarKind::kFloat;
  // Else the accumulation type.
  bool beta_is_input_kind = false, g_is_input_kind = false;
  bool qk_l2norm = false, beta_sigmoid = false, allow_neg_eigval = false;
  // Whether g has a number for each column.
  bool has_column_gate = false;
  // Whether e^A_log and dt_bias make the log decay from g; with `is_bounded` it is gate_lower_bound times a sigmoid.
  bool has_raw_gate = false, is_bounded = false;
  double scale = 1, gate_lower_bound = 0;

  TokenView q, k, v, beta, g, out;
  StateView state;
  ParameterView A_log, dt_bias;
  IndexTable slot_of_row;  // without a table, row b uses slot b

  SSM_HOST_DEVICE int64_t heads_per_key() const { return value_heads / key_heads; }
  SSM_HOST_DEVICE int64_t slot(int64_t row) const { return slot_of_row.data == nullptr ? row : slot_of_row.at(row); }
};

// The additional parameters of a call with several tokens a row or chosen slots: the rows, and an (entries, tokens,
// value_heads, value_dim, key_dim) buffer that receives the state after each token.
struct TokenParams {
  DecodingRows rows;
  StateView intermediate;
  int64_t intermediate_token = 0;  // elements between tokens
};

SSM_KERNEL_STRUCT(StepParams, 472);
SSM_KERNEL_STRUCT(TokenParams, 304);

}  // namespace ssm_kernels::delta_rule_step
