// Selective scan on CUDA, sequential: one step of one state and its adjoint, for each method.
//
//   h = Abar h_before + gain v b
//
// where v, which producers store, is a multiple of u or of delta u. common/discretization.h has the methods' formulas; the
// forms below compute the same functions with fewer instructions for each state and step. They multiply A by a constant once.
// The forms of exponential methods have polynomials in x = delta A log2(e), the exponent of two, so they need no z = x ln(2).
//
// Step<Method, Scalar> has:
//
//   kScaleOfA           Rate takes A times this constant
//   kInputHasDelta, kInputScale   v = kInputScale delta u, or kInputScale u
//   kKeepsAddresses     whether backward's registers suffice to keep addresses from group to group
//   kScaleOfStepSum, kScaleOfGradA   factors that sums.step and sums.A lack
//   Rate                what the steps of a (channel, state) share
//   Input               what the states of a (channel, step) share
//   Step(input, rate)   the values that both directions use
//   advance             h, from h_before
//   add_gradients       adds the step's terms to the sums and returns Abar g; g is the gradient of h
#pragma once

#include <utility>

#include "selective_scan/cuda/position.cuh"
#include "selective_scan/cuda/transition.cuh"

namespace ssm_kernels::selective_scan::sequential {

// The sums to which an update adds its terms: the gradients of v, of B and of A, and the part of delta's gradient that does not
// go through v.
template <typename Acc>
struct GradientSums {
  Acc &input, &step, &B, &A;
};

template <typename Acc>
struct StepDefaults {
  static constexpr bool kInputHasDelta = true, kKeepsAddresses = true;
  static constexpr Acc kInputScale = 1, kScaleOfA = 1, kScaleOfStepSum = 1, kScaleOfGradA = 1, kLargestA = kLargestRate<Acc>;

  struct Rate {
    Acc A;

    Rate() = default;
    __device__ __forceinline__ explicit Rate(Acc scaled_A) : A(scaled_A) {}
  };
  struct Input {
    Acc delta, v;

    __device__ __forceinline__ Input(Acc delta_, Acc v_) : delta(delta_), v(v_) {}
  };

 protected:
  // Adds the gradients of v, B, A and delta, where h = Abar h_before + gain v b: `gained` is gain g, and `q` the gradient of z.
  __device__ __forceinline__ static void add(const GradientSums<Acc>& sums, const Input& input, const Rate& rate, Acc b,
                                             Acc gained, Acc q) {
    sums.input = Math<Acc>::fma(gained, b, sums.input);
    const Acc of_B = gained * input.v;
    sums.step = Math<Acc>::fma(rate.A, q, sums.step);
    sums.A = Math<Acc>::fma(input.delta, q, sums.A);
    sums.B += of_B;
  }
};

// The formulas of common/discretization.h as they are: for methods without a form below.
template <typename Method, typename Scalar>
struct Step : StepDefaults<AccumulateType<Scalar>> {
  using Acc = AccumulateType<Scalar>;
  using Defaults = StepDefaults<Acc>;
  using typename Defaults::Input, typename Defaults::Rate;
  static constexpr bool kInputHasDelta = Method::kInputHasDelta, kKeepsAddresses = Method::kInputHasDelta;
  static constexpr Acc kScaleOfA = selective_scan::kScaleOfA<Method, Acc>, kScaleOfStepSum = 1 / kScaleOfA;

  Acc z, basis;

  Step() = default;
  __device__ __forceinline__ Step(const Input& input, const Rate& rate) {
    const Transition<Method, Acc> transition(Method(), input.delta, rate.A);
    z = transition.z;
    basis = transition.basis;
  }
  __device__ __forceinline__ Acc advance(const Input& input, const Rate&, Acc before, Acc b) const {
    const Acc gained = Method::kUnitGain ? input.v : input.v * current_gain(Method(), z, basis);
    return Math<Acc>::fma(Method::abar(z, basis), before, gained * b);
  }
  __device__ __forceinline__ Acc add_gradients(const GradientSums<Acc>& sums, const Input& input, const Rate& rate, Acc b,
                                               Acc g, Acc before, Acc) const {
    const Acc gain = current_gain(Method(), z, basis), adjoint = Method::abar(z, basis) * g;
    const auto derivatives = Method::derivatives(z, basis, gain);
    Acc q = Method::kExponential ? adjoint * before : derivatives.abar * (g * before);
    if constexpr (!Method::kUnitGain) q = Math<Acc>::fma(input.v * (g * b), derivatives.gain, q);
    Defaults::add(sums, input, rate, b, Method::kUnitGain ? g : g * gain, q);
    return adjoint;
  }
};

// Producers of a kernel for all rare methods compute the same v for each of them, and read kScaleOfStepSum at run time.
template <typename Scalar>
struct Step<RareMethod, Scalar> {
  using Defaults = StepDefaults<AccumulateType<Scalar>>;
  static constexpr bool kInputHasDelta = Defaults::kInputHasDelta;
  static constexpr auto kInputScale = Defaults::kInputScale;
};

template <typename Scalar>
struct Step<FurtherMethod, Scalar> {
  static constexpr bool kInputHasDelta = false;
  static constexpr auto kInputScale = StepDefaults<AccumulateType<Scalar>>::kInputScale;
};

// The states of a (channel, step) share this input; a method with parameters computes it with these.
template <typename Step, typename Method, typename Acc>
__device__ __forceinline__ typename Step::Input make_input(const Method& method, Acc delta, Acc v) {
  if constexpr (!Method::kInputHasDelta) {
    return {Math<Acc>::min(delta, kLargestRate<Acc>), v};  // warp_scan_bwd.cuh says why
  } else if constexpr (std::is_empty_v<Method>) {
    return {delta, v};
  } else {
    return {delta, v, method};
  }
}

// v, from delta and u.
template <typename Step, typename Acc>
__device__ __forceinline__ Acc input_of(Acc delta, Acc u) {
  return (Step::kInputHasDelta ? delta * u : u) * Step::kInputScale;
}

// h = (1 + z) h_before + delta u b, with 1 + z in one instruction.
template <typename Scalar>
struct Step<Euler, Scalar> : StepDefaults<AccumulateType<Scalar>> {
  using Acc = AccumulateType<Scalar>;
  using Defaults = StepDefaults<Acc>;
  using typename Defaults::Input, typename Defaults::Rate;

  Acc abar;

  Step() = default;
  __device__ __forceinline__ Step(const Input& input, const Rate& rate) : abar(Math<Acc>::fma(input.delta, rate.A, Acc(1))) {}
  __device__ __forceinline__ Acc advance(const Input& input, const Rate&, Acc before, Acc b) const {
    return Math<Acc>::fma(abar, before, input.v * b);
  }
  __device__ __forceinline__ Acc add_gradients(const GradientSums<Acc>& sums, const Input& input, const Rate& rate, Acc b,
                                               Acc g, Acc before, Acc) const {
    Defaults::add(sums, input, rate, b, g, g * before);
    return abar * g;
  }
};

// h = r (h_before + delta u b), r = 1 / (1 - z). The gradient of z is g r h.
template <typename Scalar>
struct Step<BackwardEuler, Scalar> : StepDefaults<AccumulateType<Scalar>> {
  using Acc = AccumulateType<Scalar>;
  using Defaults = StepDefaults<Acc>;
  using typename Defaults::Input, typename Defaults::Rate;
  static constexpr Acc kScaleOfA = -1, kScaleOfStepSum = -1;

  Acc r;

  Step() = default;
  __device__ __forceinline__ Step(const Input& input, const Rate& rate)
      : r(Math<Acc>::reciprocal(Math<Acc>::fma(input.delta, rate.A, Acc(1)))) {}
  __device__ __forceinline__ Acc advance(const Input& input, const Rate&, Acc before, Acc b) const {
    return r * Math<Acc>::fma(input.v, b, before);
  }
  __device__ __forceinline__ Acc add_gradients(const GradientSums<Acc>& sums, const Input& input, const Rate& rate, Acc b,
                                               Acc g, Acc, Acc h) const {
    const Acc adjoint = r * g;
    Defaults::add(sums, input, rate, b, adjoint, adjoint * h);
    return adjoint;
  }
};

// h = r (n h_before + delta u b / 2), r = 1 / (1 / 2 - z / 4) and n = 1 / 2 + z / 4, which keeps its digits where Abar = n r is
// small. The gradient of z is g r^2 (h_before + delta u b / 2) / 4.
template <typename Scalar>
struct Step<Bilinear, Scalar> : StepDefaults<AccumulateType<Scalar>> {
  using Acc = AccumulateType<Scalar>;
  using Defaults = StepDefaults<Acc>;
  using typename Defaults::Input, typename Defaults::Rate;
  static constexpr bool kKeepsAddresses = false;
  static constexpr Acc kInputScale = Acc(0.5), kScaleOfA = Acc(-0.25), kScaleOfStepSum = -1, kScaleOfGradA = Acc(0.25);

  Acc r;

  Step() = default;
  __device__ __forceinline__ Step(const Input& input, const Rate& rate)
      : r(Math<Acc>::reciprocal(Math<Acc>::fma(input.delta, rate.A, Acc(0.5)))) {}
  __device__ __forceinline__ Acc advance(const Input& input, const Rate& rate, Acc before, Acc b) const {
    return r * Math<Acc>::fma(numerator(input, rate), before, input.v * b);
  }
  __device__ __forceinline__ Acc add_gradients(const GradientSums<Acc>& sums, const Input& input, const Rate& rate, Acc b,
                                               Acc g, Acc before, Acc) const {
    const Acc gained = r * g;
    Defaults::add(sums, input, rate, b, gained, gained * (r * Math<Acc>::fma(input.v, b, before)));
    return numerator(input, rate) * gained;
  }

 private:
  __device__ __forceinline__ static Acc numerator(const Input& input, const Rate& rate) {
    return Math<Acc>::fma(-input.delta, rate.A, Acc(0.5));
  }
};

// h = (1 + (1 - alpha) z) r h_before + delta r u b, r = 1 / (1 - alpha z).
template <typename Scalar>
struct Step<Gbt, Scalar> : StepDefaults<AccumulateType<Scalar>> {
  using Acc = AccumulateType<Scalar>;
  using typename StepDefaults<Acc>::Rate;
  static constexpr bool kInputHasDelta = false, kKeepsAddresses = false;

  struct Input {
    Acc delta, v;
    Gbt method;

    __device__ __forceinline__ Input(Acc delta_, Acc v_, const Gbt& method_) : delta(delta_), v(v_), method(method_) {}
  };

  Acc z, r;

  Step() = default;
  __device__ __forceinline__ Step(const Input& input, const Rate& rate) : z(input.delta * rate.A), r(input.method.basis(z)) {}
  __device__ __forceinline__ Acc advance(const Input& input, const Rate&, Acc before, Acc b) const {
    return Math<Acc>::fma(input.method.abar(z, r), before, input.delta * r * (input.v * b));
  }
  __device__ __forceinline__ Acc add_gradients(const GradientSums<Acc>& sums, const Input& input, const Rate& rate, Acc b,
                                               Acc g, Acc before, Acc) const {
    const auto derivatives = input.method.derivatives(z, r, r);
    const Acc gained = input.delta * r * g, of_v = g * (input.v * b), q = derivatives.abar * (g * before);
    sums.input = Math<Acc>::fma(gained, b, sums.input);
    sums.B = Math<Acc>::fma(gained, input.v, sums.B);
    sums.step = Math<Acc>::fma(rate.A, q, Math<Acc>::fma(of_v, derivatives.z_gain, sums.step));
    sums.A = Math<Acc>::fma(input.delta, Math<Acc>::fma(of_v * input.delta, derivatives.gain, q), sums.A);
    return input.method.abar(z, r) * g;
  }
};

// ln(2)^power / (power + 1)!: the coefficients of phi1 as a polynomial in x.
template <int power>
constexpr double kPhi1Coefficient = kPhi1Coefficient<power - 1> * kLn2 / (power + 1);
template <>
constexpr double kPhi1Coefficient<0> = 1;

// z^n = ln2_power(n) x^n
__device__ __forceinline__ constexpr double ln2_power(int n) { return n == 0 ? 1 : kLn2 * ln2_power(n - 1); }

// sum_j coefficients[j] x^j
template <typename Acc>
__device__ __forceinline__ Acc polynomial(Acc, Acc coefficient) {
  return coefficient;
}
template <typename Acc, typename... Others>
__device__ __forceinline__ Acc polynomial(Acc x, Acc first, Others... others) {
  return Math<Acc>::fma(polynomial(x, others...), x, first);
}
// The first terms of phi1(z) and of phi1'(z).
template <typename Acc, int... powers>
__device__ __forceinline__ Acc phi1_series(Acc x, std::integer_sequence<int, powers...>) {
  return polynomial(x, Acc(kPhi1Coefficient<powers>)...);
}
template <typename Acc, int... powers>
__device__ __forceinline__ Acc phi1_derivative_series(Acc x, std::integer_sequence<int, powers...>) {
  return polynomial(x, Acc((powers + 1) * kPhi1Coefficient<powers + 1> / kLn2)...);
}

// h = e^z h_before + delta u k(z) b, k a polynomial.
template <int terms, typename Scalar>
struct Step<TruncatedPhi1<terms>, Scalar> : StepDefaults<AccumulateType<Scalar>> {
  using Acc = AccumulateType<Scalar>;
  using typename StepDefaults<Acc>::Input, typename StepDefaults<Acc>::Rate;
  static constexpr bool kKeepsAddresses = false;
  static constexpr Acc kScaleOfA = Acc(kLog2E), kScaleOfStepSum = Acc(kLn2);

  // `gained_input` is v k. With two terms it is one multiply-add: the states of a channel share v / 2. With more terms, such
  // constants occupy the registers that backward needs.
  Acc x, abar, gain, gained_input;

  Step() = default;
  __device__ __forceinline__ Step(const Input& input, const Rate& rate)
      : x(input.delta * rate.A),
        abar(Math<Acc>::exp2(x)),
        gain(phi1_series(x, std::make_integer_sequence<int, terms>())),
        gained_input(input.v * gain) {
    if constexpr (terms == 2) gained_input = polynomial(x, input.v, input.v * Acc(kPhi1Coefficient<1>));
  }
  __device__ __forceinline__ Acc advance(const Input&, const Rate&, Acc before, Acc b) const {
    return Math<Acc>::fma(abar, before, gained_input * b);
  }
  __device__ __forceinline__ Acc add_gradients(const GradientSums<Acc>& sums, const Input& input, const Rate& rate, Acc b,
                                               Acc g, Acc before, Acc) const {
    const Acc of_z = phi1_derivative_series(x, std::make_integer_sequence<int, terms - 1>());
    const Acc adjoint = abar * g, g_b = g * b, q = Math<Acc>::fma(g_b * input.v, of_z, adjoint * before);
    sums.input = Math<Acc>::fma(g_b, gain, sums.input);
    sums.B = Math<Acc>::fma(g, gained_input, sums.B);
    sums.step = Math<Acc>::fma(rate.A, q, sums.step);
    sums.A = Math<Acc>::fma(input.delta, q, sums.A);
    return adjoint;
  }
};

// phi1(z) and phi1'(z) near zero, where the quotients cancel: for |z| below kBorder and kDerivativeBorder. With a relative
// error e of the exponential (1.2e-7 to 1.8e-7), phi1's quotient has the error e / |z|, and that of phi1' has 2 e / z^2
// (absolute). The type of the inputs decides which error is allowed.
//
// Inputs in fp16 and bf16 have relative errors of 2^-12 and 2^-9. There phi1 has an error of up to 6e-7 and phi1' of up to
// 1e-6, both of the quotient at the border. The polynomials are fitted to minimize the relative error between the borders: 2e-7
// and 5e-7.
template <typename Scalar>
struct Phi1Series {
  static constexpr double kBorder = 0.3, kDerivativeBorder = 0.6;

  template <typename Acc>
  __device__ __forceinline__ static Acc value(Acc x) {
    return polynomial(x, Acc(0.9999999775), Acc(ln2_power(1) * 0.4999964975), Acc(ln2_power(2) * 0.1666681731),
                      Acc(ln2_power(3) * 0.04182286874), Acc(ln2_power(4) * 0.008333326407));
  }
  template <typename Acc>
  __device__ __forceinline__ static Acc derivative(Acc x) {
    return polynomial(x, Acc(0.500000238), Acc(ln2_power(1) * 0.3333326927), Acc(ln2_power(2) * 0.1249876342),
                      Acc(ln2_power(3) * 0.03333928148), Acc(ln2_power(4) * 0.007037665859),
                      Acc(ln2_power(5) * 0.001185527478));
  }
};
// Remainders are below rounding, as in common/phi.h.
template <>
struct Phi1Series<float> {
  static constexpr double kBorder = 0.5, kDerivativeBorder = 1;

  __device__ __forceinline__ static float value(float x) { return phi1_series(x, std::make_integer_sequence<int, 8>()); }
  __device__ __forceinline__ static float derivative(float x) {
    return phi1_derivative_series(x, std::make_integer_sequence<int, 10>());
  }
};

// h = e^z h_before + t u b, t = (e^z - 1) / A = delta phi1(z)
template <typename Scalar>
struct Step<ZohExact, Scalar> : StepDefaults<AccumulateType<Scalar>> {
  using Acc = AccumulateType<Scalar>;
  using Series = Phi1Series<Scalar>;
  using typename StepDefaults<Acc>::Input;
  static constexpr bool kInputHasDelta = false, kKeepsAddresses = false;
  static constexpr Acc kScaleOfA = Acc(kLog2E);

  // The inverse is infinite for A = 0, where it is not selected. Backward computes it again for each group to save registers.
  struct Rate {
    Acc A, unscaled, inverse;

    Rate() = default;
    __device__ __forceinline__ explicit Rate(Acc scaled_A)
        : A(scaled_A), unscaled(opaque(scaled_A) * Acc(kLn2)), inverse(Math<Acc>::reciprocal(unscaled)) {}
  };

  Acc x, abar, t;

  Step() = default;
  __device__ __forceinline__ Step(const Input& input, const Rate& rate) : x(input.delta * rate.A), abar(Math<Acc>::exp2(x)) {
    const Acc near = input.delta * Series::value(x);
    t = is_near(x, Series::kBorder) ? near : Math<Acc>::fma(abar, rate.inverse, -rate.inverse);
  }
  __device__ __forceinline__ Acc advance(const Input& input, const Rate&, Acc before, Acc b) const {
    return Math<Acc>::fma(abar, before, t * (input.v * b));
  }
  __device__ __forceinline__ Acc add_gradients(const GradientSums<Acc>& sums, const Input& input, const Rate& rate, Acc b,
                                               Acc g, Acc before, Acc) const {
    const Acc near = input.delta * (input.delta * Series::derivative(x));
    const Acc away = Math<Acc>::fma(input.delta, abar, -t) * rate.inverse;
    const Acc t_by_A = is_near(x, Series::kDerivativeBorder) ? near : away;
    const Acc adjoint = abar * g, q = adjoint * before, gained = g * t, of_t = g * (input.v * b);
    sums.input = Math<Acc>::fma(gained, b, sums.input);
    sums.step = Math<Acc>::fma(rate.unscaled, q, Math<Acc>::fma(abar, of_t, sums.step));
    sums.A = Math<Acc>::fma(input.delta, q, Math<Acc>::fma(of_t, t_by_A, sums.A));
    sums.B = Math<Acc>::fma(gained, input.v, sums.B);
    return adjoint;
  }

 private:
  __device__ __forceinline__ static bool is_near(Acc x, double border) {
    return Math<Acc>::less(Math<Acc>::abs(x), Acc(border * kLog2E));
  }
};

}  // namespace ssm_kernels::selective_scan::sequential
