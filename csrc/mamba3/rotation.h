// The bias and the rotation that make k and q of Mamba-3's B and C, and the adjoint: on the CPU kernels of their own
// (cpu/rotation_kernel.cpp has the formulas), elsewhere operators of PyTorch.
#pragma once

#include <ATen/core/Tensor.h>

#include "mamba3/mamba3_op.h"

namespace ssm_kernels::mamba3 {

struct Rotation {
  at::Tensor rates;   // tanh(angles), (batch, seqlen, angles) or (batch, seqlen, heads, angles), float64
  at::Tensor sizes;   // dt, (batch, seqlen, heads), float64
  at::Tensor k, q;    // (batch, seqlen, heads, dstate), or with ranks before the heads, accumulation type
  at::Tensor turns;   // the phase of each step, (batch, seqlen, heads, angles), accumulation type
  at::Tensor phases;  // after the last step of each sequence, (sequences, heads, angles), in turns, float64

  // The kernels on CUDA keep no turns: they have the fields below (cuda/rotation.h) and `rates` in float32, of heads only.
  at::ScalarType dtype = at::kFloat;  // of k and q
  at::Tensor starts, has_reset, initial_turns, resets, ends;
  at::Tensor final_angle, final_k;  // the states, in the accumulation type
};
Rotation rotate(const Inputs& in);

// Overwrites the gradients of k and q with those of the rows before the rotation, `turns` with those of the radians that each
// step adds to its phase, and `phases`, which has those of the radians after the last steps, with those of the radians before
// the first ones.
void rotate_adjoint(const Inputs& in, Rotation& rotation, const at::Tensor& grad_k, const at::Tensor& grad_q);

// A bias by rank, (ranks, heads, dstate), or (heads, dstate) of a call without ranks.
at::Tensor bias_of_ranks(const Inputs& in, const at::Tensor& bias);

// The same as operators of PyTorch, and by kernels on the CPU.
Rotation rotate_aten(const Inputs& in, Rotation rotation);
void rotate_adjoint_aten(const Inputs& in, Rotation& rotation, const at::Tensor& grad_k, const at::Tensor& grad_q);
Rotation rotate_cpu(const Inputs& in, Rotation rotation);
void rotate_adjoint_cpu(const Inputs& in, Rotation& rotation, const at::Tensor& grad_k, const at::Tensor& grad_q);

// By kernels on CUDA, for all dtypes but float64. k and q are float32 or of the inputs' type.
bool rotates_by_cuda_kernels(const Inputs& in);
Rotation rotate_cuda(const Inputs& in, at::ScalarType dtype);
// The same without k and q, for a scan that rotates B and C itself (ssd::Rotation) and writes the final angle and k.
Rotation phases_cuda(const Inputs& in, at::ScalarType dtype);
// The gradients of k, q and the states, and that of dt through the scan.
struct RotationGrads {
  at::Tensor k, q;
  OptionalTensor final_angle, final_k;
  at::Tensor dt;
};
// Writes the gradients of B, C, their biases, angles, dt and initial_angle, where they have elements.
void rotate_adjoint_cuda(const Inputs& in, const Rotation& rotation, const RotationGrads& given, const GradTensors& grads);

}  // namespace ssm_kernels::mamba3
