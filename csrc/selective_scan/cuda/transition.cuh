// The method of a kernel, known at compile time or read from its parameters, and the transition of one step.
#pragma once

#include <type_traits>

#include "common/discretization.h"
#include "cuda/opaque.cuh"
#include "selective_scan/cuda/launch.h"
#include "selective_scan/cuda/separate_forms.cuh"
#include "selective_scan/cuda/two_sample_forms.cuh"

namespace ssm_kernels::selective_scan {

using cuda::opaque;

// A is multiplied by this factor once, so that delta A is the exponent of a power of two. (ex2 is the hardware's exponential.)
template <typename Method, typename Acc>
constexpr Acc kScaleOfA = Method::kExponential ? Acc(kLog2E) : Acc(1);

// A method that the kernel reads from its parameters; the kernel branches outside its inner loops. RuntimeMethod: one of
// SSM_BASIC_DISCRETIZATIONS. RareMethod: one of them that is not common. FurtherMethod: one of SSM_FURTHER_DISCRETIZATIONS,
// whose kernels also take its MethodParameters. TwoSampleMethod: one of SSM_TWO_SAMPLE_DISCRETIZATIONS, in the forms of
// two_sample_forms.cuh. SeparateMethod: one of those of separate_forms.cuh, with a step of its own for A.
// SeparateTwoSampleMethod: exp_trapezoidal with such a step, in whose form e^{delta_A A} takes the place of e^z.
struct RuntimeMethod {};
struct RareMethod {};
struct FurtherMethod {};
struct TwoSampleMethod {};
struct SeparateMethod {};
struct SeparateTwoSampleMethod {};
template <typename Method>
constexpr bool kIsTwoSample = std::is_same_v<Method, TwoSampleMethod> || std::is_same_v<Method, SeparateTwoSampleMethod>;
template <typename Method>
constexpr bool kIsSeparate = std::is_same_v<Method, SeparateMethod>;
// Whether kernels keep delta_A where they keep delta for other methods.
template <typename Method>
constexpr bool kHasDeltaA = kIsSeparate<Method> || std::is_same_v<Method, SeparateTwoSampleMethod>;
// The method itself if it is common, else RareMethod.
template <typename Method>
using OwnOrRareMethod = std::conditional_t<kIsCommon<Method>, Method, RareMethod>;

// Calls visit(Method{}), or visit(Zoh{}), visit(ZohExact{}), ... by the parameters.
template <typename Method, typename Visitor>
__device__ __forceinline__ void visit_method(const SelectiveScanParams& p, const MethodParameters& parameters,
                                             const Visitor& visit) {
  if constexpr (std::is_same_v<Method, RuntimeMethod>) {
    visit_basic_discretization(static_cast<Discretization>(opaque(static_cast<int>(p.discretization))), visit);
  } else if constexpr (std::is_same_v<Method, RareMethod>) {
    visit_basic_discretization(static_cast<Discretization>(opaque(static_cast<int>(p.discretization))), [&](auto method) {
      if constexpr (!kIsCommon<decltype(method)>) visit(method);
    });
  } else if constexpr (std::is_same_v<Method, FurtherMethod>) {
    visit_further_discretization(static_cast<Discretization>(opaque(static_cast<int>(p.discretization))), parameters, visit);
  } else if constexpr (std::is_same_v<Method, TwoSampleMethod>) {
    visit_two_sample_form(static_cast<Discretization>(opaque(static_cast<int>(p.discretization))), parameters, visit);
  } else if constexpr (std::is_same_v<Method, SeparateMethod>) {
    visit_separate_form(static_cast<Discretization>(opaque(static_cast<int>(p.discretization))), visit);
  } else if constexpr (std::is_same_v<Method, SeparateTwoSampleMethod>) {
    visit(ExpTrapezoidalForm());
  } else {
    visit(Method{});
  }
}

// This overload is for visitors that do not depend on the parameters.
template <typename Method, typename Visitor>
__device__ __forceinline__ void visit_method(const SelectiveScanParams& p, const Visitor& visit) {
  visit_method<Method>(p, MethodParameters(), visit);
}

template <typename Method, typename Acc>
__device__ __forceinline__ Acc scale_of_A(const SelectiveScanParams& p) {
  Acc scale = 1;
  visit_method<Method>(p, [&](auto method) { scale = kScaleOfA<decltype(method), Acc>; });
  return scale;
}
template <typename Method>
__device__ __forceinline__ bool has_unit_gain(const SelectiveScanParams& p) {
  bool has = true;
  visit_method<Method>(p, [&](auto method) { has = decltype(method)::kUnitGain; });
  return has;
}

template <typename Method>
__device__ __forceinline__ bool input_has_delta(const SelectiveScanParams& p) {
  if constexpr (kIsSeparate<Method>) {
    return p.discretization != Discretization::kDirac;
  } else if constexpr (!std::is_same_v<Method, FurtherMethod>) {
    return true;
  } else {
    bool has = true;
    visit_method<Method>(p, [&](auto method) { has = decltype(method)::kInputHasDelta; });
    return has;
  }
}

// z and the method's basis, computed from delta and the scaled A.
template <typename Method, typename Acc>
struct Transition : Method {
  Acc z, basis;

  __device__ __forceinline__ Transition(const Method& method, Acc delta, Acc scaled_A) : Method(method) {
    if constexpr (Method::kExponential) {
      const Acc exponent = delta * scaled_A;
      basis = Math<Acc>::exp2(exponent);
      z = exponent * Acc(kLn2);
    } else {
      z = delta * scaled_A;
      basis = Method::basis(z);
    }
  }
  __device__ __forceinline__ Transition(const Method& method, Acc delta, Acc scaled_A, Acc known_basis)
      : Method(method), z(delta * scaled_A), basis(known_basis) {
    if constexpr (Method::kExponential) z *= Acc(kLn2);
  }
  __device__ __forceinline__ Acc abar() const { return Method::abar(z, basis); }
  // delta u k(z), given delta u.
  __device__ __forceinline__ Acc input(Acc delta_u) const {
    return Method::kUnitGain ? delta_u : delta_u * current_gain(static_cast<const Method&>(*this), z, basis);
  }
  // The same of two samples, given a_t B_t and w_t B_{t-1} (two_sample_forms.cuh).
  __device__ __forceinline__ Acc inputs(Acc current, Acc previous) const {
    const SampleFactors<Acc> factors = Method::factors(z, basis);
    return Math<Acc>::fma(factors.previous, previous, factors.current * current);
  }
};

}  // namespace ssm_kernels::selective_scan
