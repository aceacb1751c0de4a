// One step of one state and its adjoint, for the methods of two_sample_forms.cuh, as sequential_step.cuh has them for others:
//
//   h = Abar h_before + current(z) a b + previous(z) w b_before
//
// a, w, and what else the states of a (channel, step) share, are in Input. Besides what sequential_step.cuh lists, a Step has:
//
//   kSamplesHaveDelta   whether a and w have the factor delta
//   Advance             one step without what add_gradients needs. Its constructor takes `time`, which is delta or, with
//                       kAdvancesByInverse, 1 / delta; and kConstant, which may be in a register
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
  static constexpr bool kInputHasDelta = false, kSamplesHaveDelta = true, kAdvancesByInverse = false;
  static constexpr Acc kConstant = 0;

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

// Advance of methods that have no other form of it.
template <typename Step>
struct AdvanceByStep {
  using Acc = typename Step::Acc;

  typename Step::Input input;

  template <typename Method>
  __device__ __forceinline__ AdvanceByStep(const Method& method, Acc time, Acc a, Acc w, Acc constant = Step::kConstant)
      : input(method, time, a, w, constant) {}
  __device__ __forceinline__ Acc operator()(const typename Step::Rate& rate, Acc before, Acc b, Acc b_before) const {
    return Step(input, rate).advance(input, rate, before, b, b_before);
  }
};

// h = e^z (h_before + w b_before) + a b. The gradient of w b_before is that of h_before.
template <typename Scalar>
struct Step<ExpTrapezoidalForm, Scalar> : TwoSampleStepDefaults<AccumulateType<Scalar>> {
  using Acc = AccumulateType<Scalar>;
  using Advance = AdvanceByStep<Step>;
  using Defaults = TwoSampleStepDefaults<Acc>;
  using typename Defaults::Rate;
  static constexpr Acc kScaleOfA = Acc(kLog2E), kScaleOfSampleStepSum = Acc(kLn2);

  struct Input {
    Acc delta, a, w;

    __device__ __forceinline__ Input(const ExpTrapezoidalForm&, Acc delta_, Acc a_, Acc w_, Acc = 0)
        : delta(delta_), a(a_), w(w_) {}
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

// h = h_before + delta r (A h_before + a b + w b_before), r = 1 / (1 - alpha z), a = alpha u, w = (1 - alpha) u_before. With
// p = r g and s = r (A h_before + a b + w b_before), the gradient of A is delta p (h_before + alpha delta s), and that of delta
// is p s: sums.step is all of it.
template <typename Scalar>
struct Step<GbtForm, Scalar> : TwoSampleStepDefaults<AccumulateType<Scalar>> {
  using Acc = AccumulateType<Scalar>;
  using typename StepDefaults<Acc>::Rate;
  static constexpr bool kSamplesHaveDelta = false, kAdvancesByInverse = true;
  static constexpr Acc kScaleOfSampleStepSum = 1, kLargestA = Acc(1e30);  // A h_before has to be finite

  struct Input {
    Acc delta, a, w, of_r;  // of_r: alpha delta

    __device__ __forceinline__ Input(const GbtForm& method, Acc delta_, Acc a_, Acc w_)
        : delta(delta_), a(a_), w(w_), of_r(method.template weight<Acc>() * delta_) {}
  };
  // delta r = 1 / (1 / delta - alpha A), which is zero for a step of zero.
  struct Advance {
    Acc inverse, a, w, alpha;

    __device__ __forceinline__ Advance(const GbtForm& method, Acc time, Acc a_, Acc w_, Acc = 0)
        : inverse(time), a(a_), w(w_), alpha(method.template weight<Acc>()) {}
    __device__ __forceinline__ Acc operator()(const Rate& rate, Acc before, Acc b, Acc b_before) const {
      const Acc delta_r = Math<Acc>::reciprocal(Math<Acc>::fma(-alpha, rate.A, inverse));
      return Math<Acc>::fma(delta_r, slope(*this, rate, before, b, b_before), before);
    }
  };

  Acc r, s;

  Step() = default;
  __device__ __forceinline__ Step(const Input& input, const Rate& rate)
      : r(Math<Acc>::reciprocal(Math<Acc>::fma(-input.of_r, rate.A, Acc(1)))) {}
  __device__ __forceinline__ Acc advance(const Input& input, const Rate& rate, Acc before, Acc b, Acc b_before) {
    s = r * slope(input, rate, before, b, b_before);
    return Math<Acc>::fma(input.delta, s, before);
  }
  __device__ __forceinline__ Acc add_gradients(const SampleSums<Acc>& sums, const Input& input, const Rate& rate, Acc b,
                                               Acc b_before, Acc g, Acc before, Acc, Acc& of_previous) const {
    const Acc of_slope = r * g;
    of_previous = input.delta * of_slope;
    sums.current = Math<Acc>::fma(of_previous, b, sums.current);
    sums.previous = Math<Acc>::fma(of_previous, b_before, sums.previous);
    sums.step = Math<Acc>::fma(of_slope, s, sums.step);
    sums.A = Math<Acc>::fma(of_previous, Math<Acc>::fma(input.of_r, s, before), sums.A);
    sums.B = Math<Acc>::fma(of_previous, input.a, sums.B);
    sums.B_before = Math<Acc>::fma(of_previous, input.w, sums.B_before);
    return Math<Acc>::fma(rate.A, of_previous, g);
  }

 private:
  template <typename Factors>
  __device__ __forceinline__ static Acc slope(const Factors& factors, const Rate& rate, Acc before, Acc b, Acc b_before) {
    return Math<Acc>::fma(rate.A, before, Math<Acc>::fma(factors.a, b, factors.w * b_before));
  }
};

// a b + c, or `otherwise` if not `condition`, by one instruction: a choice between values that exist would take one more.
__device__ __forceinline__ float fma_if(bool condition, float a, float b, float c, float otherwise) {
#if defined(__CUDA_ARCH__)
  asm("{\n\t.reg .pred condition;\n\tsetp.ne.s32 condition, %4, 0;\n\t@condition fma.rn.f32 %0, %1, %2, %3;\n\t}"
      : "+f"(otherwise)
      : "f"(a), "f"(b), "f"(c), "r"(static_cast<int>(condition)));
  return otherwise;
#else
  return condition ? Math<float>::fma(a, b, c) : otherwise;
#endif
}

// phi2 and its derivative near zero, where their quotients cancel: for |z| below kBorder and kDerivativeBorder. Inputs in fp16
// and bf16 allow errors of 3e-5 and 1e-4, the quotients' at the border (sequential_step.cuh says how they arise) and those of
// the polynomials, of which that of phi2 is fitted between the borders.
template <typename Scalar>
struct RampSeries {
  static constexpr double kBorder = 0.125, kDerivativeBorder = 0.3, kLeading = 0.04167209074;

  template <typename Acc>
  __device__ __forceinline__ static Acc phi2(Acc z, Acc leading) {
    return polynomial(z, Acc(0.5000000848), Acc(0.1667643315), leading);
  }
  template <typename Acc>
  __device__ __forceinline__ static Acc derivative(Acc z) {
    return polynomial(z, Acc(1.0 / 6), Acc(1.0 / 12), Acc(1.0 / 40), Acc(1.0 / 180));
  }
};
// Errors below 2e-7 and 4e-7.
template <>
struct RampSeries<float> {
  static constexpr double kBorder = 1, kDerivativeBorder = 1.5, kLeading = 2.496078924e-05;

  __device__ __forceinline__ static float phi2(float z, float leading) {
    return polynomial(z, 0.5000000099f, 0.1666669619f, 0.04166651553f, 0.008330930497f, 0.001389133606f, 0.0002032548204f,
                      leading);
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
  using Advance = AdvanceByStep<Step>;
  using Defaults = TwoSampleStepDefaults<Acc>;
  using Series = RampSeries<Scalar>;
  static constexpr Acc kScaleOfSampleStepSum = 1, kConstant = Acc(Series::kLeading);

  // The inverse is infinite for A = 0, where it is not selected. Backward computes it again for each group to save registers.
  struct Rate {
    Acc A, inverse;

    Rate() = default;
    __device__ __forceinline__ explicit Rate(Acc A_) : A(A_), inverse(Math<Acc>::reciprocal(opaque(A_))) {}
  };
  struct Input {
    Acc delta, a, w, inverse, leading;

    __device__ __forceinline__ Input(const RampForm&, Acc delta_, Acc a_, Acc w_, Acc leading_ = kConstant)
        : delta(delta_), a(a_), w(w_), inverse(Math<Acc>::reciprocal(delta_)), leading(leading_) {}
  };

  Acc z, abar, p1, p2;

  Step() = default;
  __device__ __forceinline__ Step(const Input& input, const Rate& rate)
      : z(input.delta * rate.A), abar(Math<Acc>::exp2(z * Acc(kLog2E))) {
    const Acc inverse = input.inverse * rate.inverse, far = Math<Acc>::fma(abar, inverse, -inverse);
    const bool near = is_near(Series::kBorder);
    p2 = near ? Series::phi2(z, input.leading) : Math<Acc>::fma(far, inverse, -inverse);
    p1 = fma_if(near, z, p2, Acc(1), far);
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

// Producers of the sequential scan have code of their own for aligned and whole tiles. For methods that read two samples, fp16
// and fp32 go through the code of shifted vectors, which is as right for them and up to a sixth slower: that saves much of
// these kernels' time of compilation.
template <typename Method, typename Scalar>
constexpr bool kHasWholeTiles = !kIsTwoSample<Method> || std::is_same_v<Scalar, __nv_bfloat16>;

// Producers store u itself; they need no method.
template <typename Scalar>
struct Step<TwoSampleMethod, Scalar> : TwoSampleStepDefaults<AccumulateType<Scalar>> {};

}  // namespace ssm_kernels::selective_scan::sequential
