// Code that norm_gated_op.cpp and add_norm_op.cpp share: argument structs, checks, allocation, and parameters of the kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

#include "norm/norm.h"
#include "norm/norm_views.h"
#include "torch/autograd_op.h"
#include "torch/checks.h"

namespace ssm_kernels::norm {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalSize = std::optional<c10::SymInt>;

// The arguments of _norm_gated.
struct GatedInputs {
  Tensor x;
  OptionalTensor weight, z, bias;
  double eps = 0;
  OptionalSize group_size;
  bool norm_before_gate = false;
  std::string_view activation;
  bool subtract_mean = false;

  auto tensors() { return std::tie(x, weight, z, bias); }
  auto options() { return std::tie(group_size, norm_before_gate, activation, subtract_mean); }
  auto fields() { return std::tuple_cat(tensors(), std::tie(eps), options()); }
};

// The arguments of _norm_gated_fwd.
struct GatedFwdInputs : GatedInputs {
  OptionalTensor mean_square;

  auto fields() { return std::tuple_cat(GatedInputs::fields(), std::tie(mean_square)); }
};

struct GatedOutputs {
  Tensor out, rstd, mean;

  auto fields() { return std::tie(out, rstd, mean); }
};

// The arguments that both backward operators of _norm_gated share.
struct GatedBwdInputs {
  Tensor grad_out;
  GatedInputs in;
  Tensor mean, rstd;
  OptionalTensor mean_product;

  auto grads() { return std::tie(grad_out); }
  auto saved() { return std::tie(rstd, mean); }
  auto common_fields() { return std::tuple_cat(std::tie(grad_out), in.tensors(), std::tie(mean, rstd), in.options()); }
};

struct GatedBwdOutInputs : GatedBwdInputs {
  std::array<bool, 2> needs_parameter_grad{};  // weight, bias
  OptionalTensor grad_x, grad_z;               // written if they are present
  OptionalTensor out;                          // if present, written as in forward with `eps`
  double eps = 0;

  auto fields() {
    return std::tuple_cat(GatedBwdInputs::common_fields(),
                          std::tie(needs_parameter_grad, grad_x, grad_z, mean_product, out, eps));
  }
};
using GatedParameterGrads = std::array<Tensor, 2>;

// The arguments of _norm_gated_squares. z is a gate before the norm.
struct SquaresInputs {
  Tensor x;
  OptionalTensor z;
  OptionalSize group_size;
  std::string_view activation;

  auto fields() { return std::tie(x, z, group_size, activation); }
};

// The arguments of _norm_gated_products.
struct ProductsInputs {
  Tensor grad_out, x;
  OptionalTensor weight, z;
  Tensor rstd;
  OptionalSize group_size;
  bool norm_before_gate = false;
  std::string_view activation;

  auto fields() { return std::tie(grad_out, x, weight, z, rstd, group_size, norm_before_gate, activation); }
};

// The arguments of _add_norm.
struct AddInputs {
  Tensor x;
  OptionalTensor residual, weight, bias;
  double eps = 0;
  OptionalSize group_size;
  bool residual_in_fp32 = false, subtract_mean = false;

  auto fields() { return std::tie(x, residual, weight, bias, eps, group_size, residual_in_fp32, subtract_mean); }
};

inline constexpr char kRowAxes[] = "(..., columns)";

// The arguments that _norm_gated and _add_norm share. `like` has the shape and dtype of x. In add_norm's backward, `x` is
// new_residual, which may have another dtype.
struct Call {
  const char* op;
  const Tensor &x, &like;
  const OptionalTensor &weight, &bias;
  const OptionalSize& group_size;
  bool subtract_mean;

  c10::SymInt columns() const { return like.sym_size(-1); }
  c10::SymInt group() const { return group_size.has_value() ? *group_size : columns(); }
  c10::SymInt groups() const { return columns() / group(); }
  c10::SymInt rows() const {
    c10::SymInt rows = 1;
    for (const c10::SymInt& size : like.sym_sizes().slice(0, like.dim() - 1)) rows = rows * size;
    return rows;
  }
  at::TensorOptions statistics_options() const { return like.options().dtype(accumulate_type(like.scalar_type())); }
};

ArgumentChecks check_call(const Call& call, const char* like_name);
void check_eps(const char* op, double eps);
void check_statistics(const Call& call, const ArgumentChecks& checks, const Tensor& mean, const Tensor& rstd);
void check_group_mean(const Call& call, const ArgumentChecks& checks, const char* name, const OptionalTensor& group_mean);

// A contiguous tensor of the shape of `like`.
Tensor empty_rows(const Tensor& like, at::ScalarType dtype);
Tensor empty_statistics(const Call& call);
// An empty tensor, a new one in every call because results of an operator must not share memory.
Tensor nothing(const Call& call);
Tensor empty_gradient(const Call& call, const OptionalTensor& parameter, bool is_needed);

// Run the device's kernels, on the Meta device none; `rows` has the tensors of the shape of x. run_bwd allocates the partial
// sums. group_mean may be absent.
void run_fwd(const Call& call, NormFwdParams& params, Rows& rows, const Tensor& rstd, const Tensor& mean,
             const OptionalTensor& group_mean);
void run_bwd(const Call& call, NormBwdParams& params, Rows& rows, const Tensor& rstd, const Tensor& mean,
             const OptionalTensor& group_mean, const Tensor& grad_weight, const Tensor& grad_bias);
// Return the sums of each group.
Tensor run_fwd_sums(const Call& call, NormFwdParams& params, Rows& rows);
Tensor run_bwd_sums(const Call& call, NormBwdParams& params, Rows& rows, const Tensor& rstd);

}  // namespace ssm_kernels::norm
