// What a step of the scan is made of, (..., heads), from dt to the two numbers that the recurrence reads, and back:
//
//   d = clamp(softplus?(dt + dt_bias), dt_min, dt_max)      zeta = d A      c = d k(zeta)
#pragma once

#include <ATen/core/Tensor.h>

#include "common/discretization.h"
#include "ssd/ssd_op.h"

namespace ssm_kernels::ssd {

struct Steps {
  at::Tensor biased;     // dt + dt_bias, accumulation type
  at::Tensor unclamped;  // softplus of it, accumulation type
  at::Tensor size;       // d, float64
  at::Tensor zeta;       // the logarithm of the state's decay, float64
  at::Tensor gain;       // c, the input's factor, accumulation type
};
// Of in.dt or a part of it, heads last.
Steps make_steps(const Inputs& in, Discretization method, const at::Tensor& dt);

struct StepGrads {
  at::Tensor biased;  // of dt and, summed over the steps, of dt_bias; float64
  at::Tensor A;       // (heads,), float64
};
// Given the gradient of zeta as the decay's logarithm alone, and that of the gain.
StepGrads step_grads(const Inputs& in, Discretization method, const Steps& steps, const at::Tensor& grad_zeta,
                     const at::Tensor& grad_gain);

}  // namespace ssm_kernels::ssd
