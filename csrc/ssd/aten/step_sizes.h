// From dt, or from log_decay and gain, to the two numbers of a step that the recurrence reads, zeta and c, (..., heads), and
// the adjoint:
//
//   d = clamp(softplus?(dt + dt_bias), dt_min, dt_max)      zeta = d A      c = d k(zeta)
//   or                                                      zeta = log_decay      c = gain, 1 if absent
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include "common/discretization.h"
#include "ssd/ssd_op.h"

namespace ssm_kernels::ssd {

struct Steps {
  // The form with dt and A alone defines these three.
  at::Tensor biased;     // dt + dt_bias, accumulation type
  at::Tensor unclamped;  // softplus of it, accumulation type
  at::Tensor size;       // d, float64
  // Both forms define these two.
  at::Tensor zeta;  // the logarithm of the state's decay, float64
  at::Tensor gain;  // c, the input's factor, accumulation type
};
// The step size in the accumulation type, `biased` and `unclamped`, without zeta and the gain.
Steps make_step_sizes(const Inputs& in, const at::Tensor& dt);
// The gradient of dt, from that of the step size, float64, which it overwrites.
at::Tensor biased_grads(const Inputs& in, const Steps& steps, at::Tensor grad_size);
// The gradient of the step size through the decay, from that of zeta.
at::Tensor through_decay(const Inputs& in, const at::Tensor& grad_zeta);

// `read` returns some steps of in.dt, in.log_decay or in.gain; heads are the last axis.
Steps make_steps(const Inputs& in, Discretization method, c10::function_ref<at::Tensor(const at::Tensor&)> read);

// The sum of zeta over all steps, as if no sequence began in them, (batch, heads), float64.
at::Tensor log_decay_of_all_steps(const Inputs& in);

// float64. Those of the other form are undefined.
struct StepGrads {
  at::Tensor biased;           // of dt; summed over the steps, of dt_bias
  at::Tensor A;                // (heads,)
  at::Tensor log_decay, gain;  // zero for a log decay of -inf
};
// grad_zeta is the gradient of zeta as the decay's logarithm alone; the gain's dependence on zeta comes in here.
StepGrads step_grads(const Inputs& in, Discretization method, const Steps& steps, const at::Tensor& grad_zeta,
                     const at::Tensor& grad_gain);

}  // namespace ssm_kernels::ssd
