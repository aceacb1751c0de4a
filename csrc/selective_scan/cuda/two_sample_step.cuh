// One step of one state and its adjoint, for the methods of two_sample_forms.cuh, as sequential_step.cuh has them for others:
//
//   h = Abar h_before + current(z) a b + previous(z) w b_before
//
// a, w, and what else the states of a (channel, step) share, are in Input.
#pragma once

#include "selective_scan/cuda/sequential_step.cuh"
#include "selective_scan/cuda/two_sample.cuh"

namespace ssm_kernels::selective_scan::sequential {

// The sums to which an update adds its terms: the sums over states of the gradients of a and of w, and A times the gradient of
// z; the sums over channels for B of this step and of the step before; and that of A.
template <typename Acc>
struct SampleSums {
  Acc &current, &previous, &step, &B, &B_before, &A;
};

template <typename Acc>
struct TwoSampleStepDefaults : StepDefaults<Acc> {
  static constexpr bool kInputHasDelta = false;

 protected:
  // `current` and `previous` are the gradients of a b and of w b_before, `q` that of z.
  template <typename Input, typename Rate>
  __device__ __forceinline__ static void add(const SampleSums<Acc>& sums, const Input& input, const Rate& rate, Acc b,
                                             Acc b_before, Acc current, Acc previous, Acc q) {
    sums.current = Math<Acc>::fma(current, b, sums.current);
    sums.previous = Math<Acc>::fma(previous, b_before, sums.previous);
    sums.step = Math<Acc>::fma(rate.A, q, sums.step);
    sums.A = Math<Acc>::fma(input.delta, q, sums.A);
    sums.B = Math<Acc>::fma(current, input.a, sums.B);
    sums.B_before = Math<Acc>::fma(previous, input.w, sums.B_before);
  }
};

// h = e^z (h_before + w b_before) + a b. The gradient of w b_before is that of h_before.
template <typename Scalar>
struct Step<ExpTrapezoidalForm, Scalar> : TwoSampleStepDefaults<AccumulateType<Scalar>> {
  using Acc = AccumulateType<Scalar>;
  using Defaults = TwoSampleStepDefaults<Acc>;
  using typename Defaults::Rate;
  static constexpr Acc kScaleOfA = Acc(kLog2E), kScaleOfSampleStepSum = Acc(kLn2);

  struct Input {
    Acc delta, a, w;

    __device__ __forceinline__ Input(const ExpTrapezoidalForm&, Acc delta_, Acc a_, Acc w_) : delta(delta_), a(a_), w(w_) {}
  };

  Acc abar, decayed;  // `decayed`: what Abar multiplies

  Step() = default;
  __device__ __forceinline__ Step(const Input& input, const Rate& rate) : abar(Math<Acc>::exp2(input.delta * rate.A)) {}
  __device__ __forceinline__ Acc advance(const Input& input, const Rate&, Acc before, Acc b, Acc b_before) {
    decayed = Math<Acc>::fma(input.w, b_before, before);
    return Math<Acc>::fma(abar, decayed, input.a * b);
  }
  __device__ __forceinline__ Acc add_gradients(const SampleSums<Acc>& sums, const Input& input, const Rate& rate, Acc b,
                                               Acc b_before, Acc g, Acc, Acc, Acc& of_previous) const {
    of_previous = abar * g;
    Defaults::add(sums, input, rate, b, b_before, g, of_previous, of_previous * decayed);
    return of_previous;
  }
};

// h = r ((1 + (1 - alpha) z) h_before + a b + w b_before), r = 1 / (1 - alpha z). The gradient of z is
// g r (alpha h + (1 - alpha) h_before).
template <typename Scalar>
struct Step<GbtForm, Scalar> : TwoSampleStepDefaults<AccumulateType<Scalar>> {
  using Acc = AccumulateType<Scalar>;
  using Defaults = TwoSampleStepDefaults<Acc>;
  using typename Defaults::Rate;
  static constexpr Acc kScaleOfSampleStepSum = 1;

  struct Input {
    Acc delta, a, w;
    Acc alpha, minus_current, previous;  // alpha, -alpha delta and (1 - alpha) delta

    __device__ __forceinline__ Input(const GbtForm& method, Acc delta_, Acc a_, Acc w_)
        : delta(delta_), a(a_), w(w_), alpha(method.template weight<Acc>()) {
      minus_current = -alpha * delta;
      previous = (Acc(1) - alpha) * delta;
    }
  };

  Acc r;

  Step() = default;
  __device__ __forceinline__ Step(const Input& input, const Rate& rate)
      : r(Math<Acc>::reciprocal(Math<Acc>::fma(input.minus_current, rate.A, Acc(1)))) {}
  __device__ __forceinline__ Acc advance(const Input& input, const Rate& rate, Acc before, Acc b, Acc b_before) const {
    return r * Math<Acc>::fma(numerator(input, rate), before, samples(input, b, b_before));
  }
  __device__ __forceinline__ Acc add_gradients(const SampleSums<Acc>& sums, const Input& input, const Rate& rate, Acc b,
                                               Acc b_before, Acc g, Acc before, Acc h, Acc& of_previous) const {
    of_previous = r * g;
    const Acc of_z = of_previous * Math<Acc>::fma(input.alpha, h - before, before);
    Defaults::add(sums, input, rate, b, b_before, of_previous, of_previous, of_z);
    return numerator(input, rate) * of_previous;
  }

 private:
  __device__ __forceinline__ static Acc numerator(const Input& input, const Rate& rate) {
    return Math<Acc>::fma(input.previous, rate.A, Acc(1));
  }
  __device__ __forceinline__ static Acc samples(const Input& input, Acc b, Acc b_before) {
    return Math<Acc>::fma(input.a, b, input.w * b_before);
  }
};

// phi2 and its derivative near zero, where their quotients cancel: for |z| below kBorder and kDerivativeBorder. Inputs in fp16
// and bf16 allow errors of 3e-5 and 1e-4, the quotients' at the border (sequential_step.cuh says how they arise) and those of
// the polynomials, of which that of phi2 is fitted between the borders.
template <typename Scalar>
struct RampSeries {
  static constexpr double kBorder = 0.125, kDerivativeBorder = 0.3;

  template <typename Acc>
  __device__ __forceinline__ static Acc phi2(Acc z) {
    return polynomial(z, Acc(0.5000000848), Acc(0.1667643315), Acc(0.04167209074));
  }
  template <typename Acc>
  __device__ __forceinline__ static Acc derivative(Acc z) {
    return polynomial(z, Acc(1.0 / 6), Acc(1.0 / 12), Acc(1.0 / 40), Acc(1.0 / 180));
  }
};
// Errors below 2e-7 and 4e-7.
template <>
struct RampSeries<float> {
  static constexpr double kBorder = 1, kDerivativeBorder = 1.5;

  __device__ __forceinline__ static float phi2(float z) {
    return polynomial(z, 0.5000000099f, 0.1666669619f, 0.04166651553f, 0.008330930497f, 0.001389133606f, 0.0002032548204f,
                      2.496078924e-05f);
  }
  __device__ __forceinline__ static float derivative(float z) {
    return polynomial(z, float(1.0 / 6), float(1.0 / 12), float(1.0 / 40), float(1.0 / 180), float(1.0 / 1008),
                      float(1.0 / 6720), float(1.0 / 51840), float(1.0 / 453600), float(1.0 / 4435200), float(1.0 / 47900160),
                      float(1.0 / 566092800));
  }
};

// h = e^z h_before + phi2 (a b - w b_before) + phi1 w b_before
template <typename Scalar>
struct Step<RampForm, Scalar> : TwoSampleStepDefaults<AccumulateType<Scalar>> {
  using Acc = AccumulateType<Scalar>;
  using Defaults = TwoSampleStepDefaults<Acc>;
  using Series = RampSeries<Scalar>;
  static constexpr Acc kScaleOfSampleStepSum = 1;

  // The inverse is infinite for A = 0, where it is not selected. Backward computes it again for each group to save registers.
  struct Rate {
    Acc A, inverse;

    Rate() = default;
    __device__ __forceinline__ explicit Rate(Acc A_) : A(A_), inverse(Math<Acc>::reciprocal(opaque(A_))) {}
  };
  struct Input {
    Acc delta, a, w, inverse;

    __device__ __forceinline__ Input(const RampForm&, Acc delta_, Acc a_, Acc w_)
        : delta(delta_), a(a_), w(w_), inverse(Math<Acc>::reciprocal(delta_)) {}
  };

  Acc z, abar, p1, p2;

  Step() = default;
  __device__ __forceinline__ Step(const Input& input, const Rate& rate)
      : z(input.delta * rate.A), abar(Math<Acc>::exp2(z * Acc(kLog2E))) {
    const Acc inverse = input.inverse * rate.inverse, far = (abar - Acc(1)) * inverse;
    p2 = is_near(Series::kBorder) ? Series::phi2(z) : Math<Acc>::fma(far, inverse, -inverse);
    p1 = is_near(Series::kBorder) ? Math<Acc>::fma(z, p2, Acc(1)) : far;
  }
  __device__ __forceinline__ Acc advance(const Input& input, const Rate&, Acc before, Acc b, Acc b_before) const {
    const Acc earlier = input.w * b_before;
    return Math<Acc>::fma(abar, before, Math<Acc>::fma(p2, Math<Acc>::fma(input.a, b, -earlier), p1 * earlier));
  }
  __device__ __forceinline__ Acc add_gradients(const SampleSums<Acc>& sums, const Input& input, const Rate& rate, Acc b,
                                               Acc b_before, Acc g, Acc before, Acc, Acc& of_previous) const {
    const Acc far = Math<Acc>::fma(Acc(-2), p2, p1) * (input.inverse * rate.inverse);
    const Acc slope = is_near(Series::kDerivativeBorder) ? Series::derivative(z) : far;
    const Acc previous = p1 - p2, of_current = g * p2, adjoint = abar * g;
    const Acc earlier = input.w * b_before;
    of_previous = g * previous;
    const Acc samples = Math<Acc>::fma(slope, Math<Acc>::fma(input.a, b, -earlier), previous * earlier);
    Defaults::add(sums, input, rate, b, b_before, of_current, of_previous, Math<Acc>::fma(g, samples, adjoint * before));
    return adjoint;
  }

 private:
  __device__ __forceinline__ bool is_near(double border) const { return Math<Acc>::less(Math<Acc>::abs(z), Acc(border)); }
};

// Producers store u itself; they need no method.
template <typename Scalar>
struct Step<TwoSampleMethod, Scalar> : TwoSampleStepDefaults<AccumulateType<Scalar>> {};

}  // namespace ssm_kernels::selective_scan::sequential
