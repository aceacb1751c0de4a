// Messages of arguments that name one of several choices, and PyTorch's names of dtypes.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <string>
#include <string_view>

namespace ssm_kernels {

// "float32" for at::kFloat: the name that torch.float32 has in Python.
std::string dtype_name(at::ScalarType dtype);

// "; did you mean 'zoh'?" for the choice nearest to `given`, or "" if none is near. Case, dashes and spaces do not count.
std::string nearest_choice(std::string_view given, c10::ArrayRef<std::string_view> choices);

// Raises a ValueError: "<op>: unknown <argument> '<given>', expected one of: ...", with the nearest choice.
[[noreturn]] void raise_unknown_choice(std::string_view op, std::string_view argument, std::string_view given,
                                       c10::ArrayRef<std::string_view> choices);

}  // namespace ssm_kernels
