// The checks of ArgumentChecks with their messages, and the parsing of options.

#include "torch/checks.h"

#include <ATen/FuncTorchTLS.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <locale>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "common/separate_step.h"
#include "torch/arguments.h"
#include "torch/choices.h"
#include "torch/not_differentiable.h"

namespace ssm_kernels {
namespace {

// The sizes; nullopt if one is symbolic.
std::optional<std::vector<int64_t>> known_sizes(c10::SymIntArrayRef shape) {
  std::vector<int64_t> sizes;
  for (const c10::SymInt& size : shape) {
    if (size.is_heap_allocated()) return std::nullopt;
    sizes.push_back(size.as_int_unchecked());
  }
  return sizes;
}

// The axes of the tensor in the order that gives it this shape; empty if no order does. The first axis stays first if it can.
std::vector<int64_t> order_of_axes(const std::vector<int64_t>& sizes, const std::vector<int64_t>& shape) {
  std::vector<int64_t> order(sizes.size());
  std::iota(order.begin(), order.end(), int64_t(0));
  const auto fits = [&] {
    for (size_t i = 0; i < order.size(); ++i) {
      if (sizes[order[i]] != shape[i]) return false;
    }
    return true;
  };
  while (std::next_permutation(order.begin(), order.end())) {
    if (fits()) return order;
  }
  return {};
}

std::string joined(const std::vector<int64_t>& numbers) {
  std::string list;
  for (const int64_t number : numbers) list += (list.empty() ? "" : ", ") + std::to_string(number);
  return list;
}

// Advice about a tensor of a wrong shape: ": pass u.transpose(1, 2)" for another layout, ": pass A[:, None].expand(4, 8)" for
// missing last axes; otherwise nothing.
std::string remedy(const char* name, c10::SymIntArrayRef got, c10::SymIntArrayRef expected) {
  constexpr size_t kMostAxes = 4;
  const auto known = known_sizes(got), shape = known_sizes(expected);
  if (!known.has_value() || !shape.has_value() || known->empty() || known->size() > shape->size()) return "";
  const std::string call = std::string(": pass ") + name;
  if (known->size() == shape->size()) {
    if (known->size() > kMostAxes) return "";
    const std::vector<int64_t> order = order_of_axes(*known, *shape);
    std::vector<int64_t> moved;
    for (size_t i = 0; i < order.size(); ++i) {
      if (order[i] != static_cast<int64_t>(i)) moved.push_back(order[i]);
    }
    if (order.empty()) return "";
    if (moved.size() > 2) return call + ".permute(" + joined(order) + ")";
    std::sort(moved.begin(), moved.end());
    return call + ".transpose(" + joined(moved) + ")";
  }
  if (!std::equal(known->begin(), known->end(), shape->begin())) return "";
  std::string index;
  for (size_t i = 0; i < known->size(); ++i) index += i == 0 ? ":" : ", :";
  for (size_t i = known->size(); i < shape->size(); ++i) index += ", None";
  return call + "[" + index + "].expand(" + joined(*shape) + ")";
}

void check_real(const char* op, const char* name, at::ScalarType dtype) {
  TORCH_CHECK(!c10::isComplexType(dtype), op, ": expected a real ", name, ", got ", dtype_name(dtype),
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
      TORCH_CHECK(false, "expected a tensor of dtype float32, float16, bfloat16 or float64, got ", dtype_name(dtype));
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
    TORCH_CHECK(false, not_supported(op, "a transform of torch.func other than vmap (grad, vjp, jvp, jacrev, ...)"),
                ", and torch.autograd.grad and backward() serve the operator itself");
  }
}

namespace {

// The number between the parentheses that end a name, or none.
std::optional<double> alpha_of(std::string_view name) {
  const size_t begin = name.find('(');
  if (begin == std::string_view::npos || name.back() != ')') return std::nullopt;
  std::istringstream text(std::string(name.substr(begin + 1, name.size() - begin - 2)));
  text.imbue(std::locale::classic());
  double alpha = 0;
  return text >> alpha && text.peek() == std::istringstream::traits_type::eof() ? std::optional<double>(alpha) : std::nullopt;
}

}  // namespace

Discretization parse_discretization(const char* op, std::string_view name, bool (*is_supported)(Discretization),
                                    bool lists_all) {
  const std::string_view stem = name.substr(0, name.find('('));
  const Discretization* method = find_discretization(stem);
  if (method != nullptr && is_supported(*method)) {
    const std::optional<double> alpha = alpha_of(name);
    TORCH_CHECK_VALUE(has_alpha(*method) || stem == name, op, ": expected discretization '", stem, "' without a number, got '",
                      name, "'");
    TORCH_CHECK_VALUE(!has_alpha(*method) || (alpha && *alpha >= 0 && *alpha <= 1), op, ": expected discretization '", stem,
                      "' with alpha, a number from 0 to 1, as in '", stem, "(0.7)', got '", name, "'");
    // Without a product of zero and an infinite rate.
    return *method == Discretization::kGbt && *alpha == 0 ? Discretization::kEuler : *method;
  }
  std::vector<std::string_view> supported;
  const auto list = [&](const DiscretizationRow& row) {
    if (is_supported(row.method) || (lists_all && method == nullptr)) supported.push_back(row.name);
  };
  for (const DiscretizationRow& row : kDiscretizationTable) list(row);
  for (const DiscretizationRow& row : kDiscretizationAliases) list(row);
  if (method == nullptr) raise_unknown_choice(op, "discretization", name, supported);
  std::string names;
  for (const std::string_view each : supported) names += (names.empty() ? "" : ", ") + std::string(each);
  TORCH_CHECK_VALUE(false, op, ": discretization '", name, "' is not supported, expected one of: ", names);
}

MethodParameters parse_method_parameters(std::string_view name) { return {alpha_of(name).value_or(MethodParameters().alpha)}; }

void check_lam_options(const char* op, Discretization method, std::string_view name, bool has_lam, bool lam_sigmoid) {
  const bool weighs = method == Discretization::kExpTrapezoidal;
  TORCH_CHECK_VALUE(has_lam == weighs, op, ": expected lam with discretization 'exp_trapezoidal' and no other, got '", name,
                    "'", weighs ? " without lam" : "");
  TORCH_CHECK_VALUE(weighs || !lam_sigmoid, op, ": expected lam_sigmoid with discretization 'exp_trapezoidal' only, got '",
                    name, "'");
}

void check_takes_delta_A(const char* op, const char* argument, Discretization method, std::string_view name) {
  const char* const reason = is_two_sample(method) ? "whose two samples are the ends of the one step of the state"
                                                   : "which advances the state and the input by one rational step";
  TORCH_CHECK_VALUE(takes_delta_A(method), op, ": expected ", argument,
                    " with discretization 'zoh', 'zoh_exact', 'poly', 'highorder', 'rk4', 'dirac' or 'exp_trapezoidal', got '",
                    name, "', ", reason);
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
              like_name, " of dtype float32, float16, bfloat16 or float64, got ", dtype_name(dtype));
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
  TORCH_CHECK_VALUE(equal, op_, ": expected ", name, " of shape ", axes, " = ", shape, ", got ", got, remedy(name, got, shape));
}

void ArgumentChecks::dtype(const char* name, const at::Tensor& tensor, at::ScalarType expected) const {
  const at::ScalarType got = tensor.scalar_type();
  check_real(op_, name, got);
  TORCH_CHECK(got == expected, op_, ": expected ", name, " of dtype ", dtype_name(expected), " (with ", like_name_,
              " of dtype ", dtype_name(like_.scalar_type()), "), got ", dtype_name(got));
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
    TORCH_CHECK(got == like || got == accumulate_, op_, ": expected ", name, " of dtype ", dtype_name(like), " or ",
                dtype_name(accumulate_), " (with ", like_name_, " of dtype ", dtype_name(like), "), got ", dtype_name(got));
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
  TORCH_CHECK(got == at::kInt || got == at::kLong, op_, ": expected ", name, " of dtype int32 or int64, got ", dtype_name(got));
  device(name, *tensor);
}

}  // namespace ssm_kernels
