// The code that norm_gated_op.cpp and add_norm_op.cpp share: checks of the arguments, allocation of the results, parameters of
// the kernels, and which gradients autograd needs.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <tuple>

#include "norm/norm.h"
#include "norm/norm_views.h"
#include "torch/arguments.h"
#include "torch/checks.h"

namespace ssm_kernels::norm {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalSize = std::optional<c10::SymInt>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using FourFlags = std::array<bool, 4>;
using TwoFlags = std::array<bool, 2>;

// The signatures of _norm_gated and _add_norm.
using GatedSignature = Tensor(const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, double,
                              OptionalSize, bool, std::string_view, bool);
using AddSignature = std::tuple<Tensor, Tensor>(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                                const OptionalTensor&, double, OptionalSize, bool, bool);

inline constexpr char kRowAxes[] = "(..., columns)";

// The arguments that both operators share. `x` is new_residual in add_norm's backward, `like` the tensor that has the dtype of
// x there.
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

// A contiguous tensor of the shape of `like`.
Tensor empty_rows(const Tensor& like, at::ScalarType dtype);
Tensor empty_statistics(const Call& call);
// A new tensor in every call: results of an operator must not share memory.
Tensor nothing(const Call& call);
Tensor empty_gradient(const Call& call, const OptionalTensor& parameter, bool is_needed);

// Run the kernels of the device; `rows` has the tensors of the size of x. Backward allocates its partial sums.
void run_fwd(const Call& call, NormFwdParams& params, Rows& rows, const Tensor& rstd, const Tensor& mean);
void run_bwd(const Call& call, NormBwdParams& params, Rows& rows, const Tensor& rstd, const Tensor& mean,
             const Tensor& grad_weight, const Tensor& grad_bias);

// Which of the inputs, in their order, have edges and need gradients: those that are absent have no edge of the graph.
FourFlags needed_gradients(torch::autograd::AutogradContext* ctx, const std::array<bool, 4>& is_input_present);
// Whether autograd has to record the call. With a tangent of forward-mode AD, apply() says that there is none.
bool is_recorded(std::initializer_list<const OptionalTensor*> inputs, const Tensor& x);

// Under autocast a parameter of a third dtype beside x is cast to float32, and so is a residual; the gate is cast to x's dtype.
template <at::DeviceType device_type>
OptionalTensor as_legal(const OptionalTensor& tensor, at::ScalarType dtype) {
  const bool is_legal = !is_present(tensor) || tensor->scalar_type() == dtype;
  return is_legal ? tensor : OptionalTensor(at::autocast::cached_cast(at::kFloat, *tensor, device_type));
}

}  // namespace ssm_kernels::norm
