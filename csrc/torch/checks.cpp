// The checks of ArgumentChecks with their messages, and the parsing of options.

#include "torch/checks.h"

#include <ATen/FuncTorchTLS.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "torch/arguments.h"

namespace ssm_kernels {
namespace {

void check_real(const char* op, const char* name, at::ScalarType dtype) {
  TORCH_CHECK(!c10::isComplexType(dtype), op, ": expected a real ", name, ", got ", dtype,
              ": complex tensors are not supported");
}

// c10's operator== makes an object of its result even for numbers.
bool is_equal(const c10::SymInt& a, const c10::SymInt& b) {
  if (a.is_heap_allocated() || b.is_heap_allocated()) return a == b;
  return a.as_int_unchecked() == b.as_int_unchecked();
}

}  // namespace

at::ScalarType accumulate_type(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

ScalarKind scalar_kind(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return ScalarKind::kFloat;
    case at::kDouble:
      return ScalarKind::kDouble;
    case at::kHalf:
      return ScalarKind::kHalf;
    case at::kBFloat16:
      return ScalarKind::kBFloat16;
    default:
      TORCH_CHECK(false, "expected a tensor of dtype Float, Half, BFloat16 or Double, got ", dtype);
  }
}

const at::Tensor& or_undefined(const std::optional<at::Tensor>& tensor) {
  static const at::Tensor undefined;
  return tensor.has_value() ? *tensor : undefined;
}

std::optional<at::Tensor> or_absent(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

void check_no_func_transform(const char* op) {
  const auto& transforms = at::functorch::functorchTLSAccessor();
  if (transforms == nullptr) return;
  try {
    transforms->checkSupportsCppAutogradFunction();
  } catch (const c10::Error&) {
    TORCH_CHECK(false, op,
                ": the transforms of torch.func (grad, vjp, jvp, jacrev, ...) are not supported; use torch.autograd.grad or "
                "backward(). torch.vmap is supported");
  }
}

Discretization parse_discretization(const char* op, std::string_view name, bool (*is_supported)(Discretization)) {
  const auto supports = [&](Discretization method) { return is_supported == nullptr || is_supported(method); };
  const Discretization* method = find_discretization(name);
  if (method != nullptr && supports(*method)) return *method;
  std::string supported;
  const auto list = [&](const DiscretizationRow& row) {
    if (supports(row.method)) supported += (supported.empty() ? "" : ", ") + std::string(row.name);
  };
  for (const DiscretizationRow& row : kDiscretizationTable) list(row);
  for (const DiscretizationRow& row : kDiscretizationAliases) list(row);
  TORCH_CHECK_VALUE(method != nullptr, op, ": unknown discretization '", name, "', expected one of: ", supported);
  TORCH_CHECK_VALUE(false, op, ": discretization '", name, "' is not supported, expected one of: ", supported);
}

DtLimit parse_dt_limit(const char* op, std::optional<at::ArrayRef<double>> dt_limit) {
  constexpr double kLargest = std::numeric_limits<double>::max();
  if (!dt_limit.has_value()) return {-kLargest, kLargest};
  TORCH_CHECK_VALUE(dt_limit->size() == 2, op, ": expected dt_limit = (min, max), got ", dt_limit->size(), " numbers");
  return {std::clamp((*dt_limit)[0], -kLargest, kLargest), std::clamp((*dt_limit)[1], -kLargest, kLargest)};
}

DtLimit kernel_dt_limit(double min, double max) {
  using Limits = std::numeric_limits<double>;
  const auto limit = [](double value) {
    return std::abs(value) == Limits::max() ? std::copysign(Limits::infinity(), value) : value;
  };
  return {limit(min), limit(max)};
}

void check_dt_limit(const char* op, double min, double max) {
  const auto [low, high] = kernel_dt_limit(min, max);
  TORCH_CHECK_VALUE(low <= high, op, ": expected dt_limit = (min, max) with min <= max, got (", low, ", ", high, ")");
}

ArgumentChecks::ArgumentChecks(const char* op, const char* like_name, const at::Tensor& like)
    : op_(op), like_name_(like_name), like_(like), accumulate_(accumulate_type(like.scalar_type())) {
  check_defined(op, like_name, like);
  const at::ScalarType dtype = like.scalar_type();
  check_real(op, like_name, dtype);
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kDouble, op, ": expected ",
              like_name, " of dtype Float, Half, BFloat16 or Double, got ", dtype);
}

void ArgumentChecks::rank(const char* name, const at::Tensor& tensor, int64_t rank, const char* axes) const {
  check_defined(op_, name, tensor);
  TORCH_CHECK_VALUE(tensor.dim() == rank, op_, ": expected ", name, " of shape ", axes, ", got ", tensor.sym_sizes());
}

void ArgumentChecks::shape(const char* name, const at::Tensor& tensor, const char* axes, c10::SymIntArrayRef shape) const {
  check_defined(op_, name, tensor);
  const c10::SymIntArrayRef got = tensor.sym_sizes();
  bool equal = got.size() == shape.size();
  for (size_t i = 0; equal && i < shape.size(); ++i) equal = is_equal(got[i], shape[i]);
  TORCH_CHECK_VALUE(equal, op_, ": expected ", name, " of shape ", axes, " = ", shape, ", got ", got);
}

void ArgumentChecks::dtype(const char* name, const at::Tensor& tensor, at::ScalarType expected) const {
  const at::ScalarType got = tensor.scalar_type();
  check_real(op_, name, got);
  TORCH_CHECK(got == expected, op_, ": expected ", name, " of dtype ", expected, " (with ", like_name_, " of dtype ",
              like_.scalar_type(), "), got ", got);
}

void ArgumentChecks::device(const char* name, const at::Tensor& tensor) const {
  TORCH_CHECK(tensor.device() == like_.device(), op_, ": expected ", name, " on ", like_.device(), " (the device of ",
              like_name_, "), got ", tensor.device());
}

void ArgumentChecks::tensor(const char* name, const at::Tensor& tensor, const char* axes, c10::SymIntArrayRef shape,
                            at::ScalarType dtype) const {
  this->shape(name, tensor, axes, shape);
  this->dtype(name, tensor, dtype);
  device(name, tensor);
}

void ArgumentChecks::tensor(const char* name, const std::optional<at::Tensor>& tensor, const char* axes,
                            c10::SymIntArrayRef shape, at::ScalarType dtype) const {
  if (is_present(tensor)) this->tensor(name, *tensor, axes, shape, dtype);
}

void ArgumentChecks::parameter(const char* name, const at::Tensor& tensor, const char* axes, c10::SymIntArrayRef shape) const {
  this->shape(name, tensor, axes, shape);
  const at::ScalarType got = tensor.scalar_type(), like = like_.scalar_type();
  if (like == accumulate_) {
    dtype(name, tensor, like);
  } else {
    check_real(op_, name, got);
    TORCH_CHECK(got == like || got == accumulate_, op_, ": expected ", name, " of dtype ", like, " or ", accumulate_, " (with ",
                like_name_, " of dtype ", like, "), got ", got);
  }
  device(name, tensor);
}

void ArgumentChecks::parameter(const char* name, const std::optional<at::Tensor>& tensor, const char* axes,
                               c10::SymIntArrayRef shape) const {
  if (is_present(tensor)) parameter(name, *tensor, axes, shape);
}

void ArgumentChecks::indices(const char* name, const std::optional<at::Tensor>& tensor, const char* axes,
                             c10::SymIntArrayRef shape) const {
  if (!is_present(tensor)) return;
  this->shape(name, *tensor, axes, shape);
  const at::ScalarType got = tensor->scalar_type();
  TORCH_CHECK(got == at::kInt || got == at::kLong, op_, ": expected ", name, " of dtype Int or Long, got ", got);
  device(name, *tensor);
}

}  // namespace ssm_kernels
