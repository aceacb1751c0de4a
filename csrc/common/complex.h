// Complex numbers as pairs of a number type T, so that the methods of common/discretization.h and
// common/two_sample_discretization.h run on a complex z = delta A; e^z with an angle in turns; and the rules of complex states.
//
// A complex state is a pair of neighboring real ones. All coefficients are holomorphic functions f of z: with the gradient
// g = dL/dRe + i dL/dIm of a result, that of z is g conj(f'(z)), so that the formulas for derivatives are those of real states.
//
// The angle delta Im(A) reaches tens of radians in S4D and hundreds in long steps. A float of that size has an error of 1e-6
// radians or more. The rate is therefore kept in turns, Im(A) / 2 pi, as a sum of two numbers; the product with delta is exact,
// and its nearest integer is subtracted before the sine and cosine.
#pragma once

#include <type_traits>

#include "common/two_sample_discretization.h"

namespace ssm_kernels {

template <typename T>
struct Complex {
  using Scalar = typename Math<T>::Scalar;
  T re, im;

  Complex() = default;
  SSM_HOST_DEVICE explicit Complex(Scalar real) : re(real), im(Scalar(0)) {}
  SSM_HOST_DEVICE Complex(T real, T imaginary) : re(real), im(imaginary) {}
};

template <typename T>
SSM_HOST_DEVICE Complex<T> operator+(const Complex<T>& a, const Complex<T>& b) {
  return {a.re + b.re, a.im + b.im};
}
template <typename T>
SSM_HOST_DEVICE Complex<T> operator-(const Complex<T>& a, const Complex<T>& b) {
  return {a.re - b.re, a.im - b.im};
}
// a b + c
template <typename T>
SSM_HOST_DEVICE Complex<T> multiply_add(const Complex<T>& a, const Complex<T>& b, const Complex<T>& c) {
  return {Math<T>::fma(Math<T>::negate(a.im), b.im, Math<T>::fma(a.re, b.re, c.re)),
          Math<T>::fma(a.im, b.re, Math<T>::fma(a.re, b.im, c.im))};
}
template <typename T>
SSM_HOST_DEVICE Complex<T> operator*(const Complex<T>& a, const Complex<T>& b) {
  return {Math<T>::fma(Math<T>::negate(a.im), b.im, a.re * b.re), Math<T>::fma(a.im, b.re, a.re * b.im)};
}
// conj(a) b and conj(a) b + c
template <typename T>
SSM_HOST_DEVICE Complex<T> conjugate_times(const Complex<T>& a, const Complex<T>& b) {
  return {Math<T>::fma(a.im, b.im, a.re * b.re), Math<T>::fma(Math<T>::negate(a.im), b.re, a.re * b.im)};
}
template <typename T>
SSM_HOST_DEVICE Complex<T> conjugate_times_add(const Complex<T>& a, const Complex<T>& b, const Complex<T>& c) {
  return {Math<T>::fma(a.im, b.im, Math<T>::fma(a.re, b.re, c.re)),
          Math<T>::fma(Math<T>::negate(a.im), b.re, Math<T>::fma(a.re, b.im, c.im))};
}
// Re(conj(a) b) + c
template <typename T>
SSM_HOST_DEVICE T dot_add(const Complex<T>& a, const Complex<T>& b, T c) {
  return Math<T>::fma(a.im, b.im, Math<T>::fma(a.re, b.re, c));
}
template <typename T>
SSM_HOST_DEVICE Complex<T> scaled(T a, const Complex<T>& b) {
  return {a * b.re, a * b.im};
}

// The operations that the methods need. abs() and less() compare moduli.
template <typename T>
struct Math<Complex<T>> {
  using Scalar = typename Math<T>::Scalar;
  static SSM_HOST_DEVICE Complex<T> fma(const Complex<T>& a, const Complex<T>& b, const Complex<T>& c) {
    return multiply_add(a, b, c);
  }
  static SSM_HOST_DEVICE Complex<T> reciprocal(const Complex<T>& a) {
    const T scale = Math<T>::reciprocal(Math<T>::fma(a.re, a.re, a.im * a.im));
    return {a.re * scale, Math<T>::negate(a.im) * scale};
  }
  static SSM_HOST_DEVICE Complex<T> abs(const Complex<T>& a) {
    return {Math<T>::sqrt(Math<T>::fma(a.re, a.re, a.im * a.im)), T(Scalar(0))};
  }
  static SSM_HOST_DEVICE auto less(const Complex<T>& a, const Complex<T>& b) { return Math<T>::less(a.re, b.re); }
  template <typename Mask>
  static SSM_HOST_DEVICE Complex<T> select(const Mask& mask, const Complex<T>& a, const Complex<T>& b) {
    return {Math<T>::select(mask, a.re, b.re), Math<T>::select(mask, a.im, b.im)};
  }
};

// 1 / 2 pi as a sum of two numbers.
template <typename Scalar>
constexpr Scalar kInverseTurn = Scalar(0.15915494309189535);
template <>
inline constexpr float kInverseTurn<float> = 0.15915493667125702f;
template <typename Scalar>
constexpr Scalar kInverseTurnLow = Scalar(-9.839338337591243e-18);
template <>
inline constexpr float kInverseTurnLow<float> = 6.4206383167e-9f;

// A rate of A: its real part, and its imaginary part in turns.
template <typename T>
struct ComplexRate {
  T re, turns, turns_low;

  ComplexRate() = default;
  SSM_HOST_DEVICE ComplexRate(T real, T imaginary) : re(real) {
    using Scalar = typename Math<T>::Scalar;
    const T high(kInverseTurn<Scalar>);
    turns = imaginary * high;
    turns_low = Math<T>::fma(imaginary, T(kInverseTurnLow<Scalar>), Math<T>::fma(imaginary, high, Math<T>::negate(turns)));
  }
};

// The nearest integer of a number below 2^22 (double: 2^51): the sum with 1.5 times 2^23 (2^52) has no fraction.
template <typename T>
SSM_HOST_DEVICE T round_to_integer(T x) {
  using Scalar = typename Math<T>::Scalar;
  const T shift(Scalar(std::is_same_v<Scalar, double> ? 6755399441055744.0 : 12582912.0));
  return (x + shift) - shift;
}

// sum_{k < terms} z^k / (2 k + first)!
template <int first, int terms, int k = 0, typename T>
SSM_HOST_DEVICE T factorial_series(T z) {
  using Scalar = typename Math<T>::Scalar;
  constexpr Scalar kCoefficient(reciprocal_factorial(2 * k + first));
  if constexpr (k + 1 == terms) {
    return T(kCoefficient);
  } else {
    return Math<T>::fma(factorial_series<first, terms, k + 1>(z), z, T(kCoefficient));
  }
}

// The sine and cosine of an angle from -1/2 to 1/2 turns, by their series within an eighth of a turn. They are smaller than
// rounding after the last term.
template <typename T>
SSM_HOST_DEVICE Complex<T> unit_at_turns(T t) {
  using Scalar = typename Math<T>::Scalar;
  constexpr int kTerms = std::is_same_v<Scalar, double> ? 9 : 5;
  constexpr double kTurn = 6.283185307179586476925;
  const T quarters = round_to_integer(t * T(Scalar(4))), r = Math<T>::fma(quarters, T(Scalar(-0.25)), t);
  const T x = r * T(Scalar(kTurn));
  const T minus_x2 = Math<T>::negate(x * x);
  const T sine = x * factorial_series<1, kTerms>(minus_x2), cosine = factorial_series<0, kTerms>(minus_x2);
  // Rotates by the quarters, from -2 to 2.
  const T none(Scalar(0)), half(Scalar(0.5)), odd(Scalar(1.5)), count = Math<T>::abs(quarters);
  const auto is_negative = Math<T>::less(quarters, none), is_zero = Math<T>::less(count, half),
             is_one = Math<T>::less(count, odd);
  const T minus_sine = Math<T>::negate(sine), minus_cosine = Math<T>::negate(cosine);
  const T one_re = Math<T>::select(is_negative, sine, minus_sine), one_im = Math<T>::select(is_negative, minus_cosine, cosine);
  return {Math<T>::select(is_zero, cosine, Math<T>::select(is_one, one_re, minus_cosine)),
          Math<T>::select(is_zero, sine, Math<T>::select(is_one, one_im, minus_sine))};
}

// e^(delta A). An angle of so many turns that a number of them has no fraction is taken as zero.
template <typename T>
SSM_HOST_DEVICE Complex<T> exp_of_step(T delta, const ComplexRate<T>& A) {
  using Scalar = typename Math<T>::Scalar;
  const T zero(Scalar(0)), most(Scalar(std::is_same_v<Scalar, double> ? 2251799813685248.0 : 4194304.0));
  const T product = delta * A.turns;
  const auto is_large = Math<T>::less(most, Math<T>::abs(product));
  const T high = Math<T>::select(is_large, zero, product);
  const T low = Math<T>::fma(delta, A.turns_low, Math<T>::fma(delta, A.turns, Math<T>::negate(product)));
  const T fraction = (high - round_to_integer(high)) + Math<T>::select(is_large, zero, low);
  return scaled(Math<T>::exp(delta * A.re), unit_at_turns(fraction));
}

// A method with one sample, with the functions of the rules with two.
template <typename Method>
struct OfOneSample : WithoutLam<OfOneSample<Method>> {
  static constexpr bool kExponential = Method::kExponential, kUsesPreviousInput = false, kUnitGain = Method::kUnitGain;
  template <typename T>
  SSM_HOST_DEVICE T basis(T z) const {
    return Method::basis(z);
  }
  template <typename T>
  SSM_HOST_DEVICE T abar(T z, T basis) const {
    return Method::abar(z, basis);
  }
  template <typename T>
  SSM_HOST_DEVICE Coefficients<T> gain(T z, T basis) const {
    return Method::gain(z, basis);
  }
  template <typename T>
  SSM_HOST_DEVICE TwoSampleDerivatives<T> derivatives(T z, T basis) const {
    const T zero(typename Math<T>::Scalar(0));
    const auto derivative = Method::derivatives(z, basis, Method::gain(z, basis).current);
    return {derivative.abar, derivative.gain, zero, derivative.z_gain, zero};
  }
};

// The basis of a method for complex states.
template <typename Method, typename T>
SSM_HOST_DEVICE Complex<T> complex_basis(const Method& method, T delta, const Complex<T>& z, const ComplexRate<T>& A) {
  if constexpr (Method::kExponential) {
    return exp_of_step(delta, A);
  } else {
    return method.basis(z);
  }
}

inline bool takes_complex_A(Discretization method) {
  switch (method) {
    case Discretization::kZoh:
    case Discretization::kZohExact:
    case Discretization::kBilinear:
    case Discretization::kTrapezoidal:
    case Discretization::kExpTrapezoidal:
      return true;
    default:
      return false;
  }
}

// Calls visitor(OfOneSample<Zoh>{}), ...: turns the run-time method, one with takes_complex_A(), into a type. The visitor may
// be host or device code.
SSM_NO_EXEC_CHECK
template <typename Visitor>
SSM_HOST_DEVICE void visit_complex_rule(Discretization method, Visitor&& visitor) {
  switch (method) {
    case Discretization::kZoh:
      return visitor(OfOneSample<Zoh>{});
    case Discretization::kZohExact:
      return visitor(OfOneSample<ZohExact>{});
    case Discretization::kBilinear:
      return visitor(OfOneSample<Bilinear>{});
    case Discretization::kTrapezoidal:
      return visitor(Trapezoidal{});
    case Discretization::kExpTrapezoidal:
      return visitor(ExpTrapezoidalRule{});
    default:
      break;
  }
  SSM_UNKNOWN_ENUMERATOR("a discretization that takes a complex A", static_cast<int>(std::size(kDiscretizationTable)), method);
}

}  // namespace ssm_kernels
