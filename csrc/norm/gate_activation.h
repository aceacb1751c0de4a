// Activations of the gate with their derivatives, for one number or a SIMD vector.
#pragma once

#include "common/activations.h"
#include "common/math.h"
#include "common/unknown_enumerator.h"

namespace ssm_kernels::norm {

// In the order of kActivationNames (norm_gated_op.cpp).
enum class GateActivation : int { kSilu, kGelu, kGeluTanh, kSigmoid, kNone };

template <typename T>
struct Gate {
  T value, derivative;
};

struct Silu {
  template <typename T>
  static SSM_HOST_DEVICE T value(T z) {
    return silu(z);
  }
  template <typename T>
  static SSM_HOST_DEVICE Gate<T> with_derivative(T z) {
    const T s = sigmoid(z);
    return {z * s, silu_derivative(z, s)};
  }
};

// z Phi(z), Phi the normal distribution function.
struct Gelu {
  template <typename T>
  static SSM_HOST_DEVICE T distribution(T z) {
    using Scalar = typename Math<T>::Scalar;
    constexpr double kSqrtHalf = 0.70710678118654752440;
    const T half(Scalar(0.5));
    return Math<T>::fma(half, Math<T>::erf(z * T(Scalar(kSqrtHalf))), half);
  }
  template <typename T>
  static SSM_HOST_DEVICE T value(T z) {
    return z * distribution(z);
  }
  template <typename T>
  static SSM_HOST_DEVICE Gate<T> with_derivative(T z) {
    using Scalar = typename Math<T>::Scalar;
    constexpr double kInverseSqrtTwoPi = 0.39894228040143267794;
    const T phi = distribution(z);
    const T density = T(Scalar(kInverseSqrtTwoPi)) * Math<T>::exp(z * z * T(Scalar(-0.5)));
    return {z * phi, Math<T>::fma(z, density, phi)};
  }
};

// z (1 + tanh(u)) / 2 = z sigmoid(2 u), u = sqrt(2 / pi) (z + 0.044715 z^3). The clamp keeps the cube finite; beyond |z| = 16
// the sigmoid is 0 or 1 in every dtype.
struct GeluTanh {
  template <typename T>
  static SSM_HOST_DEVICE T twice_u(T z) {
    using Scalar = typename Math<T>::Scalar;
    return z * Math<T>::fma(z * z, T(Scalar(kCubic)), T(Scalar(kLinear)));
  }
  template <typename T>
  static SSM_HOST_DEVICE T clamped(T z) {
    using Scalar = typename Math<T>::Scalar;
    return clamp(z, T(Scalar(-16)), T(Scalar(16)));
  }
  template <typename T>
  static SSM_HOST_DEVICE T value(T z) {
    return z * sigmoid(twice_u(clamped(z)));
  }
  template <typename T>
  static SSM_HOST_DEVICE Gate<T> with_derivative(T z) {
    using Scalar = typename Math<T>::Scalar;
    const T c = clamped(z);
    const T s = sigmoid(twice_u(c));
    const T slope = Math<T>::fma(c * c, T(Scalar(3 * kCubic)), T(Scalar(kLinear)));
    return {z * s, s * Math<T>::fma(c * (T(Scalar(1)) - s), slope, T(Scalar(1)))};
  }

  static constexpr double kLinear = 1.5957691216057307117;  // 2 sqrt(2 / pi)
  static constexpr double kCubic = 0.044715 * kLinear;
};

struct Sigmoid {
  template <typename T>
  static SSM_HOST_DEVICE T value(T z) {
    return sigmoid(z);
  }
  template <typename T>
  static SSM_HOST_DEVICE Gate<T> with_derivative(T z) {
    using Scalar = typename Math<T>::Scalar;
    const T s = sigmoid(z);
    return {s, s * (T(Scalar(1)) - s)};
  }
};

// The gate is z itself.
struct Identity {
  template <typename T>
  static SSM_HOST_DEVICE T value(T z) {
    return z;
  }
  template <typename T>
  static SSM_HOST_DEVICE Gate<T> with_derivative(T z) {
    using Scalar = typename Math<T>::Scalar;
    return {z, T(Scalar(1))};
  }
};

// Calls visitor with the activation's struct.
template <typename Visitor>
SSM_HOST_DEVICE void visit_activation(GateActivation activation, const Visitor& visitor) {
  switch (activation) {
    case GateActivation::kSilu:
      return visitor(Silu());
    case GateActivation::kGelu:
      return visitor(Gelu());
    case GateActivation::kGeluTanh:
      return visitor(GeluTanh());
    case GateActivation::kSigmoid:
      return visitor(Sigmoid());
    case GateActivation::kNone:
      return visitor(Identity());
  }
  SSM_UNKNOWN_ENUMERATOR("a gate's activation", static_cast<int>(GateActivation::kNone) + 1, activation);
}

// Throws if the activation is unknown: for launches of kernels that read it at run time. Host code.
inline void check_known(GateActivation activation) {
  visit_activation(activation, [](auto) {});
}

}  // namespace ssm_kernels::norm
