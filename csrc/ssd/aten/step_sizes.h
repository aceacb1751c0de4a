// From dt to the two numbers of a step that the recurrence reads, zeta and c, (..., heads), and the adjoint:
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
// The steps of in.dt, or of a part of it; heads are the last axis.
Steps make_steps(const Inputs& in, Discretization method, const at::Tensor& dt);

// d alone, in the accumulation type.
at::Tensor step_sizes(const Inputs& in, const at::Tensor& dt);

struct StepGrads {
  at::Tensor biased;  // of dt; summed over the steps, of dt_bias; float64
  at::Tensor A;       // (heads,), float64
};
// grad_zeta is the gradient of zeta as the decay's logarithm alone; the gain's dependence on zeta comes in here.
StepGrads step_grads(const Inputs& in, Discretization method, const Steps& steps, const at::Tensor& grad_zeta,
                     const at::Tensor& grad_gain);

}  // namespace ssm_kernels::ssd
