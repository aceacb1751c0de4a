// _mixer_parameters: allocation, the CPU's and Meta's kernel, the launch on CUDA; and the views of its result.

#include "mixers/mixer_parameters_op.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#ifdef SSM_KERNELS_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "mixers/cuda/launch.h"
#endif

#include <array>

#include "torch/checks.h"
#include "torch/dispatch.h"
#include "torch/missing_cuda.h"

namespace ssm_kernels::mixers {
namespace {

using Signature = at::Tensor(const at::Tensor& A_log, const OptionalTensor& bias, const OptionalTensor& D,
                             at::ScalarType dtype);

at::Tensor allocate(const at::Tensor& A_log, const OptionalTensor& bias, const OptionalTensor& D, at::ScalarType dtype) {
  c10::SymInt count = A_log.sym_numel();
  for (const OptionalTensor* other : {&bias, &D}) {
    if (!is_present(*other)) continue;
    TORCH_CHECK((*other)->device() == A_log.device(), "expected the parameters of a mixer on one device, got A_log on ",
                A_log.device(), " and ", other == &D ? "D" : "the bias of the step sizes", " on ", (*other)->device());
    count += (*other)->sym_numel();
  }
  return at::empty_symint({count}, A_log.options().dtype(dtype));
}

at::Tensor cpu(const at::Tensor& A_log, const OptionalTensor& bias, const OptionalTensor& D, at::ScalarType dtype) {
  const at::Tensor out = allocate(A_log, bias, D, dtype);
  int64_t first = 0;
  const auto next = [&](const at::Tensor& parameter) {
    const at::Tensor piece = out.narrow(0, first, parameter.numel()).view(parameter.sizes()).copy_(parameter);
    first += parameter.numel();
    return piece;
  };
  next(A_log).exp_().neg_();
  for (const OptionalTensor* other : {&bias, &D}) {
    if (is_present(*other)) next(**other);
  }
  return out;
}

#ifdef SSM_KERNELS_WITH_CUDA
at::Tensor cuda(const at::Tensor& A_log, const OptionalTensor& bias, const OptionalTensor& D, at::ScalarType dtype) {
  const c10::cuda::CUDAGuard guard(A_log.device());
  const at::Tensor out = allocate(A_log, bias, D, dtype);
  if (out.numel() == 0) return out;
  // They live until the launch; copies of strided parameters are freed after it, in the stream's order.
  std::array<at::Tensor, 3> contiguous;
  const auto view = [&](size_t place, const OptionalTensor& parameter) {
    if (!is_present(parameter)) return ParameterView();
    contiguous[place] = parameter->contiguous();
    return ParameterView{contiguous[place].const_data_ptr(), parameter->numel(), scalar_kind(parameter->scalar_type())};
  };
  const MixerParametersParams params{view(0, A_log), view(1, bias), view(2, D), out.mutable_data_ptr()};
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  if (dtype == at::kDouble) {
    launch_mixer_parameters<double>(params, stream);
  } else {
    launch_mixer_parameters<float>(params, stream);
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}
#endif

// The parameters out of `saved`, in the order in which they were written to it.
Parameters split(const at::Tensor& saved, const at::Tensor& A_log, const OptionalTensor& bias, const OptionalTensor& D) {
  Parameters parameters;
  parameters.saved = saved;
  c10::SymInt first = 0;
  const auto next = [&](const at::Tensor& parameter) {
    const c10::SymInt count = parameter.sym_numel();
    const at::Tensor piece = saved.narrow_symint(0, first, count);
    first += count;
    return parameter.dim() == 1 ? piece : piece.view_symint(parameter.sym_sizes());
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

}  // namespace

Parameters compute_parameters(const at::Tensor& A_log, const OptionalTensor& bias, const OptionalTensor& D,
                              at::ScalarType dtype) {
  static const auto op = find_op<Signature>("ssm_kernels::_mixer_parameters");
  const at::ScalarType wide = accumulate_type(dtype);
  const auto to_convert = [&](const OptionalTensor& parameter) {
    return is_present(parameter) && parameter->scalar_type() != wide ? parameter : std::nullopt;
  };
  return split(op.call(A_log, to_convert(bias), to_convert(D), wide), A_log, bias, D);
}

Parameters restore_parameters(const at::Tensor& saved, const at::Tensor& A_log, const OptionalTensor& bias,
                              const OptionalTensor& D) {
  return split(saved, A_log, bias, D);
}

at::Tensor grad_of_A_log(const at::Tensor& grad_A, const at::Tensor& A, at::ScalarType dtype) {
  if (dtype == grad_A.scalar_type()) return grad_A.mul_(A);
  at::Tensor result = at::empty_symint(A.sym_sizes(), grad_A.options().dtype(dtype));
  return at::mul_out(result, grad_A, A);  // rounds the product as it stores it
}

at::Tensor in_dtype_of(const at::Tensor& grad, const at::Tensor& parameter) {
  return grad.scalar_type() == parameter.scalar_type() ? grad : grad.to(parameter.scalar_type());
}

TORCH_LIBRARY_IMPL(ssm_kernels, CPU, m) { m.impl("_mixer_parameters", &cpu); }

TORCH_LIBRARY_IMPL(ssm_kernels, Meta, m) { m.impl("_mixer_parameters", &allocate); }

TORCH_LIBRARY_IMPL(ssm_kernels, Autograd, m) { m.impl("_mixer_parameters", torch::autograd::autogradNotImplementedFallback()); }

TORCH_LIBRARY_IMPL(ssm_kernels, CUDA, m) {
#ifdef SSM_KERNELS_WITH_CUDA
  m.impl("_mixer_parameters", &cuda);
#else
  m.impl("_mixer_parameters", torch::CppFunction::makeFromBoxedFunction<&built_without_cuda>());
#endif
}

}  // namespace ssm_kernels::mixers
