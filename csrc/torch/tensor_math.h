// Math<T> for whole tensors of doubles, so that the formulas in common/ run as ATen operators, on any device.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>

#include "common/math.h"

namespace ssm_kernels {

// A tensor with the arithmetic and the conversion from a number that the formulas require of their T.
struct TensorValue {
  at::Tensor tensor;

  explicit TensorValue(at::Tensor tensor) : tensor(std::move(tensor)) {}
  explicit TensorValue(double number) : tensor(at::scalar_tensor(number, at::kDouble)) {}

  friend TensorValue operator+(const TensorValue& a, const TensorValue& b) { return TensorValue(a.tensor + b.tensor); }
  friend TensorValue operator-(const TensorValue& a, const TensorValue& b) { return TensorValue(a.tensor - b.tensor); }
  friend TensorValue operator*(const TensorValue& a, const TensorValue& b) { return TensorValue(a.tensor * b.tensor); }
};

template <>
struct Math<TensorValue> {
  using Scalar = double;
  static TensorValue exp(const TensorValue& x) { return TensorValue(x.tensor.exp()); }
  static TensorValue abs(const TensorValue& x) { return TensorValue(x.tensor.abs()); }
  static TensorValue reciprocal(const TensorValue& x) { return TensorValue(x.tensor.reciprocal()); }
  static TensorValue fma(const TensorValue& a, const TensorValue& b, const TensorValue& c) { return a * b + c; }
  static TensorValue less(const TensorValue& a, const TensorValue& b) { return TensorValue(a.tensor.lt(b.tensor)); }
  static TensorValue select(const TensorValue& mask, const TensorValue& a, const TensorValue& b) {
    return TensorValue(at::where(mask.tensor, a.tensor, b.tensor));
  }
};

}  // namespace ssm_kernels
