// Shared by mamba3_chunk_scan (mamba3_op.cpp) and the rotation of its B and C (rotation.cpp): arguments and results.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

#include "torch/checks.h"

namespace ssm_kernels::mamba3 {

using OptionalTensor = std::optional<at::Tensor>;

struct Inputs {
  at::Tensor x, dt, A, B, C, trap, angles;
  OptionalTensor B_bias, C_bias, D, z, mimo_x, mimo_z, mimo_out, norm_weight;
  OptionalTensor initial_angle, initial_ssm, initial_k, initial_x, seq_idx, cu_seqlens;
  double norm_eps = 1e-5;
  std::string_view rotate;  // of the caller's string
  std::optional<c10::SymInt> chunk_size;
  bool wide_out = false;       // out in the accumulation type
  bool premultiplied = false;  // A is A dt

  auto tensors() {
    return std::tie(x, dt, A, B, C, trap, angles, B_bias, C_bias, D, z, mimo_x, mimo_z, mimo_out, norm_weight, initial_angle,
                    initial_ssm, initial_k, initial_x);
  }
  auto fields() {
    return std::tuple_cat(tensors(), std::tie(seq_idx, cu_seqlens, norm_eps, rotate, chunk_size, wide_out, premultiplied));
  }

  at::ScalarType wide() const { return accumulate_type(x.scalar_type()); }
  at::TensorOptions wide_options() const { return x.options().dtype(wide()); }
  bool is_pairs() const { return rotate == "pairs"; }
  // B and C have an axis of ranks after that of steps.
  bool has_ranks() const { return B.dim() == 5; }
  int64_t ranks() const { return has_ranks() ? B.size(2) : 1; }
};

// In the order of tensors().
enum Grad {
  kGradX,
  kGradDt,
  kGradA,
  kGradB,
  kGradC,
  kGradTrap,
  kGradAngles,
  kGradBBias,
  kGradCBias,
  kGradD,
  kGradZ,
  kGradMimoX,
  kGradMimoZ,
  kGradMimoOut,
  kGradNormWeight,
  kGradInitialAngle,
  kGradInitialSsm,
  kGradInitialK,
  kGradInitialX,
  kNumGrads
};
using GradTensors = std::array<at::Tensor, kNumGrads>;

struct Outputs {
  at::Tensor out, final_angle, final_ssm, final_k, final_x;

  auto fields() { return std::tie(out, final_angle, final_ssm, final_k, final_x); }
};

struct BwdInputs {
  OptionalTensor grad_out, grad_final_angle, grad_final_ssm, grad_final_k, grad_final_x;
  Inputs in;
  std::array<bool, kNumGrads> needs_grad = {};

  auto grads() { return std::tie(grad_out, grad_final_angle, grad_final_ssm, grad_final_k, grad_final_x); }
  auto saved() { return std::tie(); }
  auto fields() { return std::tuple_cat(grads(), in.fields(), std::tie(needs_grad)); }
};

// The angle of `angles` and `initial_angle`: one in pi radians, the other in 2 pi.
constexpr double kPi = 3.14159265358979323846;

// Raises unless it is finite and not negative.
void check_norm_eps(const char* op, double norm_eps);

// Raises unless the name is "pairs" or "halves" and dstate has as many pairs as there are angles.
void check_rotation(const char* op, std::string_view rotate, const c10::SymInt& angles, const c10::SymInt& dstate);

}  // namespace ssm_kernels::mamba3
