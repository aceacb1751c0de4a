// _mixer_parameters: allocation, the CPU and Meta kernels, the launch on CUDA, and the views of its result.

#include "mixers/mixer_parameters_op.h"

#include <ATen/ops/mul.h>
#include <torch/library.h>

#ifdef SSM_KERNELS_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "mixers/cuda/launch.h"
#endif

#include <array>

#include "common/limits.h"
#include "torch/allocation.h"
#include "torch/checks.h"
#include "torch/dispatch.h"
#include "torch/schemas.h"

namespace ssm_kernels::mixers {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // -e^A_log and the other parameters in the accumulation type, one after another in one tensor: one kernel on a GPU.
  schemas.kernels("_mixer_parameters(Tensor A_log, Tensor? bias, Tensor? D, ScalarType dtype) -> Tensor");
}

namespace {

struct Inputs {
  at::Tensor A_log;
  OptionalTensor bias, D;
  at::ScalarType dtype = at::kFloat;

  auto fields() { return std::tie(A_log, bias, D, dtype); }
};

at::Tensor allocate(const Inputs& in) {
  c10::SymInt count = in.A_log.sym_numel();
  for (const OptionalTensor* other : {&in.bias, &in.D}) {
    if (!is_present(*other)) continue;
    TORCH_CHECK((*other)->device() == in.A_log.device(), "expected the parameters of a mixer on one device, got A_log on ",
                in.A_log.device(), " and ", other == &in.D ? "D" : "the bias of the step sizes", " on ", (*other)->device());
    count += (*other)->sym_numel();
  }
  return empty_tensor({count}, in.A_log.options().dtype(in.dtype));
}

at::Tensor cpu(const Inputs& in) {
  const at::Tensor out = allocate(in);
  int64_t first = 0;
  const auto next = [&](const at::Tensor& parameter) {
    const at::Tensor view = out.narrow(0, first, parameter.numel()).view(parameter.sizes()).copy_(parameter);
    first += parameter.numel();
    return view;
  };
  const double largest = in.dtype == at::kDouble ? kLargestRate<double> : kLargestRate<float>;
  next(in.A_log).exp_().clamp_max_(largest).neg_();
  for (const OptionalTensor* other : {&in.bias, &in.D}) {
    if (is_present(*other)) next(**other);
  }
  return out;
}

#ifdef SSM_KERNELS_WITH_CUDA
at::Tensor cuda(const Inputs& in) {
  const c10::cuda::CUDAGuard guard(in.A_log.device());
  const at::Tensor out = allocate(in);
  if (out.numel() == 0) return out;
  // Copies of strided parameters live until the launch; their memory is then reused in stream order.
  std::array<at::Tensor, 3> contiguous;
  const auto view = [&](size_t place, const OptionalTensor& parameter) {
    if (!is_present(parameter)) return ParameterView();
    contiguous[place] = parameter->contiguous();
    return ParameterView{contiguous[place].const_data_ptr(), parameter->numel(), scalar_kind(parameter->scalar_type())};
  };
  const MixerParametersParams params{view(0, in.A_log), view(1, in.bias), view(2, in.D), out.mutable_data_ptr()};
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(in.dtype == at::kDouble ? launch_mixer_parameters<double>(params, stream)
                                         : launch_mixer_parameters<float>(params, stream));
  return out;
}
#endif

}  // namespace

Parameters restore_parameters(const at::Tensor& saved, const at::Tensor& A_log, const OptionalTensor& bias,
                              const OptionalTensor& D) {
  Parameters parameters;
  parameters.saved = saved;
  c10::SymInt first = 0;
  const auto next = [&](const at::Tensor& parameter) {
    const c10::SymInt count = parameter.sym_numel();
    const at::Tensor view = saved.narrow_symint(0, first, count);
    first += count;
    return parameter.dim() == 1 ? view : view.view_symint(parameter.sym_sizes());
  };
  const auto other = [&](const OptionalTensor& parameter) -> OptionalTensor {
    if (!is_present(parameter) || parameter->scalar_type() == saved.scalar_type()) return parameter;
    return next(*parameter);
  };
  parameters.A = next(A_log);
  parameters.bias = other(bias);
  parameters.D = other(D);
  return parameters;
}

Parameters compute_parameters(const at::Tensor& A_log, const OptionalTensor& bias, const OptionalTensor& D,
                              at::ScalarType dtype) {
  static const Operator<at::Tensor, Inputs> op("ssm_kernels::_mixer_parameters");
  const at::ScalarType wide = accumulate_type(dtype);
  const auto to_convert = [&](const OptionalTensor& parameter) {
    return is_present(parameter) && parameter->scalar_type() != wide ? parameter : std::nullopt;
  };
  return restore_parameters(op(Inputs{A_log, to_convert(bias), to_convert(D), wide}), A_log, bias, D);
}

at::Tensor grad_of_A_log(const at::Tensor& grad_A, const at::Tensor& A, at::ScalarType dtype) {
  if (dtype == grad_A.scalar_type()) return grad_A.mul_(A);
  at::Tensor result = empty_tensor(A.sym_sizes(), grad_A.options().dtype(dtype));
  return at::mul_out(result, grad_A, A);  // rounds the product as it stores it
}

at::Tensor in_dtype_of(const at::Tensor& grad, const at::Tensor& parameter) {
  return grad.scalar_type() == parameter.scalar_type() ? grad : grad.to(parameter.scalar_type());
}

TORCH_LIBRARY_IMPL(ssm_kernels, CPU, m) { implement<&cpu>(m, "_mixer_parameters"); }

TORCH_LIBRARY_IMPL(ssm_kernels, Meta, m) { implement<&allocate>(m, "_mixer_parameters"); }

#ifdef SSM_KERNELS_WITH_CUDA
TORCH_LIBRARY_IMPL(ssm_kernels, CUDA, m) { implement<&cuda>(m, "_mixer_parameters"); }
#endif

}  // namespace ssm_kernels::mixers
