// Argument checks, shared by the Meta kernel and the real kernels of every operator. Sizes are symbolic, so that one trace of
// torch.compile serves every length. An invalid value or shape raises a ValueError, an invalid dtype or device a RuntimeError;
// messages have what was expected and what was passed.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

#include <array>
#include <optional>
#include <string_view>

#include "common/discretization.h"
#include "common/scalar_kind.h"

namespace ssm_kernels {

// float64 for float64, else float32: the type of parameters, states and accumulation beside tensors of `dtype`.
at::ScalarType accumulate_type(at::ScalarType dtype);

// The kernels' name for a dtype that ArgumentChecks has let through.
ScalarKind scalar_kind(at::ScalarType dtype);

// Absent optional tensors come as nullopt or, from saved tensors, as undefined ones.
inline bool is_present(const at::Tensor& tensor) { return tensor.defined(); }
inline bool is_present(const std::optional<at::Tensor>& tensor) { return tensor.has_value() && tensor->defined(); }
// From one form to the other.
inline const at::Tensor& or_undefined(const at::Tensor& tensor) { return tensor; }
const at::Tensor& or_undefined(const std::optional<at::Tensor>& tensor);
std::optional<at::Tensor> or_absent(const at::Tensor& tensor);

// Raises under a transform of torch.func other than vmap. PyTorch raises too, with a message that names neither the operator
// nor an alternative.
void check_no_func_transform(const char* op);

// Returns the method of that name. Raises a ValueError that lists the supported ones if it is none of them; by default those
// that read one input sample are. With lists_all the error for an unknown name lists the others, too. The name of a method with
// alpha has it in parentheses, as in "gbt(0.7)". "gbt(0)" is euler.
Discretization parse_discretization(const char* op, std::string_view name,
                                    bool (*is_supported)(Discretization) = &is_one_sample, bool lists_all = false);
// The numbers in a name that parse_discretization() has accepted.
MethodParameters parse_method_parameters(std::string_view name);
// Raises unless a method that reads two input samples has lam, and lam_sigmoid, if and only if it is exp_trapezoidal. `name` is
// for the messages.
void check_lam_options(const char* op, Discretization method, std::string_view name, bool has_lam, bool lam_sigmoid);

// Raises, with the reason, unless the method has a meaning with a step of its own for A, the argument `argument`.
void check_takes_delta_A(const char* op, const char* argument, Discretization method, std::string_view name);

// The smallest and the largest step size.
using DtLimit = std::array<double, 2>;
// The argument dt_limit as operators pass it to each other: the largest finite numbers stand for no limit, because AOTInductor
// cannot load a package whose graph contains an infinity. Absent, there are no limits.
DtLimit parse_dt_limit(const char* op, std::optional<at::ArrayRef<double>> dt_limit);
// Returns the limits that kernels compare with: the largest finite numbers, which stand for no limit, become infinities.
DtLimit kernel_dt_limit(double min, double max);
// Raises unless min <= max.
void check_dt_limit(const char* op, double min, double max);

// The checks of one operator's arguments, against the dtype and device of its first.
class ArgumentChecks {
 public:
  // `like` must be float32, float16, bfloat16 or float64.
  ArgumentChecks(const char* op, const char* like_name, const at::Tensor& like);

  const char* op() const { return op_; }
  at::ScalarType accumulate() const { return accumulate_; }

  void rank(const char* name, const at::Tensor& tensor, int64_t rank, const char* axes) const;

  // Shape, dtype and device at once; `axes` names the sizes, as "(batch, dim, seqlen)".
  void tensor(const char* name, const at::Tensor& tensor, const char* axes, c10::SymIntArrayRef shape,
              at::ScalarType dtype) const;

  // As above for an argument that may be absent.
  void tensor(const char* name, const std::optional<at::Tensor>& tensor, const char* axes, c10::SymIntArrayRef shape,
              at::ScalarType dtype) const;

  // The same for a parameter, which may have the dtype of `like` or the accumulation type.
  void parameter(const char* name, const at::Tensor& tensor, const char* axes, c10::SymIntArrayRef shape) const;
  void parameter(const char* name, const std::optional<at::Tensor>& tensor, const char* axes, c10::SymIntArrayRef shape) const;
  // The same for int32 or int64.
  void indices(const char* name, const std::optional<at::Tensor>& tensor, const char* axes, c10::SymIntArrayRef shape) const;

  void shape(const char* name, const at::Tensor& tensor, const char* axes, c10::SymIntArrayRef shape) const;
  void device(const char* name, const at::Tensor& tensor) const;

 private:
  void dtype(const char* name, const at::Tensor& tensor, at::ScalarType expected) const;

  const char* op_;
  const char* like_name_;
  const at::Tensor& like_;
  at::ScalarType accumulate_;
};

}  // namespace ssm_kernels
