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

// The gates of all steps. The results are contiguous and of the accumulation type: (batch, seqlen, heads), and final_m
// (sequences, heads).
struct GateParams {
  int64_t sequences = 0, seqlen = 0, heads = 0;
  bool is_exp = true;
  GateView i, f;
  const int64_t* cu_seqlens = nullptr;  // null: a sequence is a row of the batch
  const void* initial_m = nullptr;      // (sequences, heads), contiguous, or null
  void *m = nullptr, *log_decay = nullptr, *gain = nullptr, *final_m = nullptr;
};

// A row of `columns` elements and a number of each kind for each of `count` steps and heads, all contiguous. The kernel
// computes and writes `divisor` from `products`, or reads `divisor` where `products` is null.
struct RowParams {
  int64_t count = 0, columns = 0;
  double scale = 1, eps = 0;
  const void *rows = nullptr, *products = nullptr;  // of the inputs' type
  void* divisor = nullptr;                          // of the accumulation type, as m
  const void* m = nullptr;
  void* out = nullptr;
};

// A (batch, seqlen, heads, key_dim) tensor with contiguous rows.
struct KeyView {
  const void* data = nullptr;
  int64_t stride_batch = 0, stride_step = 0, stride_head = 0;
};

struct ProductGradParams {
  int64_t batch = 0, seqlen = 0, heads = 0, key_dim = 0;
  double scale = 1, eps = 0;
  KeyView q, grad_q;
  const void *divisor = nullptr, *m = nullptr;  // contiguous, of the accumulation type
  void* grad_products = nullptr;                // contiguous, of the inputs' type
};

SSM_KERNEL_STRUCT(GateView, 40);
SSM_KERNEL_STRUCT(GateParams, 160);
SSM_KERNEL_STRUCT(RowParams, 72);
SSM_KERNEL_STRUCT(KeyView, 32);
SSM_KERNEL_STRUCT(ProductGradParams, 136);

}  // namespace ssm_kernels::mlstm
