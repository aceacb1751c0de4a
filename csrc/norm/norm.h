// Parameters of the norm kernels, CPU and CUDA: plain data, no torch type.
//
// A row is one index of the leading axes. A group is group_size consecutive columns of a row, with its own statistics. The
// operators share one set of parameters:
//
//   norm_gated   v = x, or x a(z) with the gate before the norm
//                out = norm(v) weight + bias, times a(z) with the gate after the norm
//   add_norm     v = x + residual, rounded to the dtype of new_residual
//                out = norm(v) weight + bias,  new_residual = v
//
//   norm(v) = (v - mean) rstd,  rstd = 1 / sqrt(mean((v - mean)^2) + eps);  mean is 0 for RMSNorm
//
// Where the columns of an RMSNorm's groups are on several devices, a first call writes the sums of each group's columns, and a
// second one takes the means over the groups: of v^2 in forward, and in backward of gy weight y, y = norm(v), gy the gradient
// of y weight.
#pragma once

#include <cstdint>

#include "common/kernel_abi.h"
#include "common/macros.h"
#include "common/scalar_kind.h"
#include "norm/gate_activation.h"

namespace ssm_kernels::norm {

// Kernels count the columns of a row in 32 bits. Rows and offsets are 64-bit.
constexpr int64_t kMaxColumns = int64_t(1) << 30;

// Row r = outer_index * inner + inner_index begins at outer_index * stride_outer + inner_index * stride_inner; its columns are
// contiguous. Two strides cover every slice of a contiguous tensor along one leading axis and along its columns.
struct RowsView {
  void* data = nullptr;  // null where the tensor is absent
  int64_t stride_outer = 0, stride_inner = 0;
  bool is_accumulate = false;  // whether elements have the accumulation type, not the kernel's element type
};

// A contiguous tensor of one value per column.
struct ParameterView {
  void* data = nullptr;
  bool is_accumulate = false;
};

struct NormParams {
  ScalarKind kind = ScalarKind::kFloat;
  int device = -1;
  int64_t outer = 0, inner = 1;
  int64_t groups = 1, group_size = 0;
  double eps = 0;
  GateActivation activation = GateActivation::kSilu;
  bool is_add = false, subtract_mean = false, norm_before_gate = false;

  RowsView x;  // backward of add_norm: new_residual
  RowsView z;  // norm_gated
  ParameterView weight, bias;
  void *rstd = nullptr, *mean = nullptr;  // (rows, groups), accumulation type; mean is null for RMSNorm
  // For groups on several devices (see above); (rows, groups), accumulation type. If `sums` is not null, kernels write nothing
  // else.
  const void* group_mean = nullptr;
  void* sums = nullptr;

  SSM_HOST_DEVICE int64_t rows() const { return outer * inner; }
  SSM_HOST_DEVICE int64_t columns() const { return groups * group_size; }
};

struct NormFwdParams : NormParams {
  RowsView residual, new_residual;  // add_norm
  RowsView out;
};

// Backward does not compute a gradient whose data is null.
struct NormBwdParams : NormParams {
  RowsView grad_out;
  RowsView grad_new_residual;  // add_norm; may be absent
  RowsView grad_x, grad_z;     // grad_z: norm_gated
  RowsView grad_residual;      // add_norm, accumulation type
  RowsView out;                // norm_gated: the output of forward, written once more; may be absent
  ParameterView grad_weight, grad_bias;
  // Partial sums over rows, (partials, columns) in the accumulation type. grad_weight and grad_bias are their sums in order.
  void *partial_weight = nullptr, *partial_bias = nullptr;
  int64_t partials = 0;
};

SSM_KERNEL_STRUCT(NormFwdParams, 280);
SSM_KERNEL_STRUCT(NormBwdParams, 432);

}  // namespace ssm_kernels::norm
