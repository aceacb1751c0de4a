// Checks of calls with a complex A, whose states are pairs of real numbers (common/complex.h).
#pragma once

#include <string_view>

#include "common/complex.h"
#include "torch/checks.h"

namespace ssm_kernels {

// Raises unless the method has kernels of complex states and each row has pairs of numbers. `name` is for the message.
inline void check_complex_states(const char* op, Discretization method, std::string_view name, const c10::SymInt& dstate) {
  TORCH_CHECK_VALUE(takes_complex_A(method), op,
                    ": expected a complex A with discretization 'zoh', 'zoh_exact', 'bilinear', 'trapezoidal' or "
                    "'exp_trapezoidal', got '",
                    name, "'");
  TORCH_CHECK_VALUE(dstate % 2 == 0, op, ": expected the real and the imaginary parts of complex states, an even dstate, got ",
                    dstate);
}

}  // namespace ssm_kernels
