#include "norm/norm_call.h"

#include <limits>
#include <utility>

#include "norm/norm_op.h"
#include "torch/allocation.h"

namespace ssm_kernels::norm {

ArgumentChecks check_call(const Call& call, const char* like_name) {
  const ArgumentChecks checks(call.op, like_name, call.like);
  TORCH_CHECK_VALUE(call.like.dim() >= 1 && call.columns() >= 1, call.op, ": expected ", like_name, " of shape ", kRowAxes,
                    " with at least one column, got ", call.like.sym_sizes());
  TORCH_CHECK_VALUE(call.columns() <= kMaxColumns, call.op, ": expected at most ", kMaxColumns, " columns, got ",
                    call.columns());
  TORCH_CHECK_VALUE(call.group() >= 1 && call.columns() % call.group() == 0, call.op,
                    ": expected group_size to divide columns = ", call.columns(), ", got ", call.group());
  checks.parameter("weight", call.weight, "(columns,)", {call.columns()});
  checks.parameter("bias", call.bias, "(columns,)", {call.columns()});
  return checks;
}

void check_eps(const char* op, double eps) {
  TORCH_CHECK_VALUE(eps >= 0 && eps <= std::numeric_limits<double>::max(), op, ": expected a finite eps >= 0, got ", eps);
}

void check_statistics(const Call& call, const ArgumentChecks& checks, const Tensor& mean, const Tensor& rstd) {
  checks.tensor("rstd", rstd, "(rows, groups)", {call.rows(), call.groups()}, checks.accumulate());
  if (call.subtract_mean) {
    checks.tensor("mean", mean, "(rows, groups)", {call.rows(), call.groups()}, checks.accumulate());
  }
}

void check_group_mean(const Call& call, const ArgumentChecks& checks, const char* name, const OptionalTensor& group_mean) {
  if (!is_present(group_mean)) return;
  TORCH_CHECK_VALUE(!call.subtract_mean, call.op, ": expected no ", name, ", which RMSNorm alone takes, got a tensor");
  checks.tensor(name, group_mean, "(rows, groups)", {call.rows(), call.groups()}, checks.accumulate());
}

Tensor empty_rows(const Tensor& like, at::ScalarType dtype) {
  return empty_tensor(like.sym_sizes(), like.options().dtype(dtype));
}

Tensor empty_statistics(const Call& call) { return empty_tensor({call.rows(), call.groups()}, call.statistics_options()); }

Tensor nothing(const Call& call) { return empty_tensor({0}, call.statistics_options()); }

Tensor empty_gradient(const Call& call, const OptionalTensor& parameter, bool is_needed) {
  return is_needed && is_present(parameter) ? empty_tensor(parameter->sym_sizes(), parameter->options()) : nothing(call);
}

namespace {

const DeviceKernels& kernels_of(const Tensor& tensor) {
#ifdef SSM_KERNELS_WITH_CUDA
  if (tensor.is_cuda()) return kCuda;
#endif
  return kCpu;
}

ParameterView gradient_view(const Tensor& gradient) {
  if (!gradient.defined() || gradient.numel() == 0) return {};
  return {gradient.mutable_data_ptr(), is_accumulate(gradient)};
}

void fill_params(NormParams& params, const Call& call, Parameters& parameters) {
  params.kind = scalar_kind(call.like.scalar_type());
  params.device = call.like.get_device();
  params.group_size = call.group().expect_int();
  params.groups = call.groups().expect_int();
  params.subtract_mean = call.subtract_mean;
  params.weight = parameters.view(call.weight);
  params.bias = parameters.view(call.bias);
}

// A contiguous copy of statistics, if they are given.
Tensor contiguous(const OptionalTensor& statistics) { return is_present(statistics) ? statistics->contiguous() : Tensor(); }

const void* read_data(const Tensor& tensor) { return tensor.defined() ? data_of(tensor, Access::kRead) : nullptr; }

bool has_work(const Call& call) { return !call.like.is_meta() && call.like.numel() > 0; }

}  // namespace

void run_fwd(const Call& call, NormFwdParams& params, Rows& rows, const Tensor& rstd, const Tensor& mean,
             const OptionalTensor& group_mean) {
  if (!has_work(call)) return;
  Parameters parameters;
  fill_params(params, call, parameters);
  rows.fill(params);
  params.rstd = rstd.mutable_data_ptr();
  params.mean = call.subtract_mean ? mean.mutable_data_ptr() : nullptr;
  const Tensor kept_mean = contiguous(group_mean);
  params.group_mean = read_data(kept_mean);
  kernels_of(call.like).fwd(params);
}

Tensor run_fwd_sums(const Call& call, NormFwdParams& params, Rows& rows) {
  const Tensor sums = empty_statistics(call);
  if (!has_work(call)) return sums;
  Parameters parameters;
  fill_params(params, call, parameters);
  rows.fill(params);
  params.sums = sums.mutable_data_ptr();
  kernels_of(call.like).fwd(params);
  return sums;
}

Tensor run_bwd_sums(const Call& call, NormBwdParams& params, Rows& rows, const Tensor& rstd) {
  const Tensor sums = empty_statistics(call);
  if (!has_work(call)) return sums;
  Parameters parameters;
  fill_params(params, call, parameters);
  rows.fill(params);
  const Tensor kept_rstd = rstd.contiguous();
  params.rstd = data_of(kept_rstd, Access::kRead);
  params.sums = sums.mutable_data_ptr();
  const DeviceKernels& kernels = kernels_of(call.like);
  params.partials = kernels.count_partials(params);
  kernels.bwd(params);
  return sums;
}

void run_bwd(const Call& call, NormBwdParams& params, Rows& rows, const Tensor& rstd, const Tensor& mean,
             const OptionalTensor& group_mean, const Tensor& grad_weight, const Tensor& grad_bias) {
  if (call.like.is_meta()) return;
  if (call.like.numel() == 0) {
    if (grad_weight.numel() > 0) grad_weight.zero_();
    if (grad_bias.numel() > 0) grad_bias.zero_();
    return;
  }
  Parameters parameters;
  fill_params(params, call, parameters);
  rows.fill(params);
  const Tensor kept_rstd = rstd.contiguous(), kept_mean = mean.contiguous(), kept_group_mean = contiguous(group_mean);
  params.rstd = data_of(kept_rstd, Access::kRead);
  params.group_mean = read_data(kept_group_mean);
  params.mean = call.subtract_mean ? data_of(kept_mean, Access::kRead) : nullptr;
  params.grad_weight = gradient_view(grad_weight);
  params.grad_bias = gradient_view(grad_bias);
  const DeviceKernels& kernels = kernels_of(call.like);
  if (params.out.data != nullptr && !kernels.bwd_writes_out(params)) {
    NormFwdParams forward;
    static_cast<NormParams&>(forward) = params;
    forward.out = std::exchange(params.out, {});
    const Tensor rstd_again = empty_statistics(call), mean_again = call.subtract_mean ? empty_statistics(call) : Tensor();
    forward.rstd = rstd_again.mutable_data_ptr();
    forward.mean = call.subtract_mean ? mean_again.mutable_data_ptr() : nullptr;
    kernels.fwd(forward);
  }
  Tensor partials;
  const int64_t sums = (params.grad_weight.data != nullptr) + (params.grad_bias.data != nullptr);
  params.partials = kernels.count_partials(params);
  if (sums > 0) {
    partials = empty_tensor({sums, params.partials, params.columns()}, call.statistics_options());
    auto* next = static_cast<char*>(partials.mutable_data_ptr());
    for (auto [gradient, partial] :
         {std::pair(params.grad_weight.data, &params.partial_weight), std::pair(params.grad_bias.data, &params.partial_bias)}) {
      if (gradient == nullptr) continue;
      *partial = next;
      next += partials.stride(0) * partials.element_size();
    }
  }
  kernels.bwd(params);
}

}  // namespace ssm_kernels::norm
