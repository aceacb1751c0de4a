// The discretizations of h' = A h + B u, A diagonal. With z = delta A, each method is
//
//   h_t = Abar(z) h_{t-1} + delta (k(z) B_t u_t + m(z) B_{t-1} u_{t-1})
//
// A method is a struct, shared by the CPU's SIMD vectors, CUDA threads and scalar host code:
//
//   basis(z)             the one expensive value (an exponential or a reciprocal), from which the others follow cheaply
//   abar(z, basis)       Abar
//   gain(z, basis)       the coefficients {k, m} of the current and the previous input
//   derivatives(z, basis, k)   Abar', k' and (z k)'
//   kUnitGain            k = 1, known at compile time
//   kInputHasDelta       the input's factor is delta k; false: it is k, without delta
//   kExponential         Abar = basis = e^z, known at compile time: products of Abar over time are exponentials of sums of z
//   kUsesPreviousInput   m != 0, known at compile time: the methods of common/two_sample_discretization.h
//
// With z = delta A the chain rule needs no division by A or z, so that A -> 0 and delta -> 0 are ordinary points:
//
//   d Abar / d delta = A Abar'          d Abar / d A = delta Abar'
//   d (delta k) / d delta = (z k)'      d (delta k) / d A = delta^2 k'
//
// Functions of a method without a parameter are static; `method.basis(z)` calls them of any method. A method with a parameter
// is made by make_method().
//
// To add a method: a struct here, a row in SSM_BASIC_DISCRETIZATIONS, a function in ssm_kernels/reference/discretizations.py
// and a row in the tests' table. docs/discretizations.md has the formulas and their properties.
// selective_scan/cuda/sequential_step.cuh may have a form of it with fewer instructions.
#pragma once

#include <iterator>
#include <string_view>
#include <type_traits>

#include "common/math.h"
#include "common/phi.h"
#include "common/unknown_enumerator.h"

namespace ssm_kernels {

// The factors of delta B_t u_t and of delta B_{t-1} u_{t-1}.
template <typename T>
struct Coefficients {
  T current;
  T previous = T(typename Math<T>::Scalar(0));
};

// The input's one factor, for kernels that read u_t and B_t only. The assertion names the code to extend when a method with a
// second coefficient enters the table.
template <typename Method, typename T>
SSM_HOST_DEVICE T current_gain(const Method& method, T z, T basis) {
  static_assert(!Method::kUsesPreviousInput, "the caller has no term in B_{t-1} u_{t-1}: add it there");
  return method.gain(z, basis).current;
}

template <typename T>
struct DiscretizationDerivatives {
  T abar;    // Abar'(z)
  T gain;    // k'(z)
  T z_gain;  // (z k(z))'
};

// Methods with Abar = e^z; they differ in the gain.
struct ExponentialTransition {
  static constexpr bool kExponential = true;
  static constexpr bool kInputHasDelta = true;
  static constexpr bool kUsesPreviousInput = false;
  template <typename T>
  static SSM_HOST_DEVICE T basis(T z) {
    return Math<T>::exp(z);
  }
  template <typename T>
  static SSM_HOST_DEVICE T abar(T, T ez) {
    return ez;
  }
};

// Mamba's rule: zero-order hold for A, Euler for B.
struct Zoh : ExponentialTransition {
  static constexpr bool kUnitGain = true;
  template <typename T>
  static SSM_HOST_DEVICE Coefficients<T> gain(T, T) {
    return {T(typename Math<T>::Scalar(1))};
  }
  template <typename T>
  static SSM_HOST_DEVICE DiscretizationDerivatives<T> derivatives(T, T ez, T one) {
    return {ez, T(typename Math<T>::Scalar(0)), one};
  }
};

// Input impulses, one at the end of each step: h_t = e^z h_{t-1} + B_t u_t. The factor of the input is one, without delta.
struct Dirac : Zoh {
  static constexpr bool kInputHasDelta = false;
  template <typename T>
  static SSM_HOST_DEVICE DiscretizationDerivatives<T> derivatives(T, T ez, T) {
    const T zero(typename Math<T>::Scalar(0));
    return {ez, zero, zero};
  }
};

// Exact for a piecewise-constant input: delta phi1(z) = (e^z - 1) / A.
struct ZohExact : ExponentialTransition {
  static constexpr bool kUnitGain = false;
  template <typename T>
  static SSM_HOST_DEVICE Coefficients<T> gain(T z, T ez) {
    return {phi1(z, ez)};
  }
  template <typename T>
  static SSM_HOST_DEVICE DiscretizationDerivatives<T> derivatives(T z, T ez, T p1) {
    return {ez, phi1_derivative(z, ez, p1), ez};
  }
};

// phi1 truncated after `terms` Taylor terms: k = sum_{j < terms} z^j / (j + 1)!.
template <int terms>
struct TruncatedPhi1 : ExponentialTransition {
  static_assert(terms >= 2 && terms <= 4, "the coefficients below are written out for up to four terms");
  static constexpr bool kUnitGain = false;
  template <typename T>
  static SSM_HOST_DEVICE Coefficients<T> gain(T z, T) {
    return {horner<terms>(z, 1.0, 1.0 / 2, 1.0 / 6, 1.0 / 24)};
  }
  template <typename T>
  static SSM_HOST_DEVICE DiscretizationDerivatives<T> derivatives(T z, T ez, T) {
    return {ez, horner<terms - 1>(z, 1.0 / 2, 1.0 / 3, 1.0 / 8, 0.0), horner<terms>(z, 1.0, 1.0, 1.0 / 2, 1.0 / 6)};
  }

 private:
  // The first n terms of c0 + c1 z + c2 z^2 + c3 z^3.
  template <int n, typename T>
  static SSM_HOST_DEVICE T horner(T z, double c0, double c1, double c2, double c3) {
    using Scalar = typename Math<T>::Scalar;
    T sum(Scalar(n == 4 ? c3 : n == 3 ? c2 : n == 2 ? c1 : c0));
    if constexpr (n >= 4) sum = Math<T>::fma(sum, z, T(Scalar(c2)));
    if constexpr (n >= 3) sum = Math<T>::fma(sum, z, T(Scalar(c1)));
    if constexpr (n >= 2) sum = Math<T>::fma(sum, z, T(Scalar(c0)));
    return sum;
  }
};
using HighOrder = TruncatedPhi1<2>;
using Poly = TruncatedPhi1<3>;
using Rk4 = TruncatedPhi1<4>;

// The one-sample generalized bilinear transform: Abar = (1 + (1 - alpha) z) / (1 - alpha z), k = 1 / (1 - alpha z), with
// alpha = 0 forward Euler, 1/2 Tustin's bilinear rule, 1 backward Euler.
template <int twice_alpha>
struct GeneralizedBilinear {
  static_assert(twice_alpha >= 0 && twice_alpha <= 2, "alpha is 0, 1/2 or 1");
  static constexpr bool kUnitGain = twice_alpha == 0;
  static constexpr bool kExponential = false;
  static constexpr bool kInputHasDelta = true;
  static constexpr bool kUsesPreviousInput = false;
  template <typename T>
  static SSM_HOST_DEVICE T basis(T z) {
    using Scalar = typename Math<T>::Scalar;
    const T one(Scalar(1));
    if constexpr (twice_alpha == 0) return one;
    return Math<T>::reciprocal(Math<T>::fma(z, T(Scalar(-0.5 * twice_alpha)), one));
  }
  template <typename T>
  static SSM_HOST_DEVICE T abar(T z, T r) {
    using Scalar = typename Math<T>::Scalar;
    if constexpr (twice_alpha == 2) return r;
    const T numerator = Math<T>::fma(z, T(Scalar(1 - 0.5 * twice_alpha)), T(Scalar(1)));
    if constexpr (twice_alpha == 0) return numerator;
    return numerator * r;
  }
  template <typename T>
  static SSM_HOST_DEVICE Coefficients<T> gain(T, T r) {
    return {r};
  }
  template <typename T>
  static SSM_HOST_DEVICE DiscretizationDerivatives<T> derivatives(T, T r, T) {
    using Scalar = typename Math<T>::Scalar;
    const T r2 = r * r;
    return {r2, T(Scalar(0.5 * twice_alpha)) * r2, r2};
  }
};
using Euler = GeneralizedBilinear<0>;
using Bilinear = GeneralizedBilinear<1>;
using BackwardEuler = GeneralizedBilinear<2>;

// The bilinear family takes alpha, from 0 to 1, as a parameter of the call.
struct Gbt {
  static constexpr bool kUnitGain = false;
  static constexpr bool kExponential = false;
  static constexpr bool kInputHasDelta = true;
  static constexpr bool kUsesPreviousInput = false;

  double alpha = 0.5;
  float short_alpha = 0.5f;

  Gbt() = default;
  SSM_HOST_DEVICE explicit Gbt(double alpha_) : alpha(alpha_), short_alpha(static_cast<float>(alpha_)) {}

  template <typename T>
  SSM_HOST_DEVICE T basis(T z) const {
    return Math<T>::reciprocal(Math<T>::fma(z, T(-value<T>()), T(typename Math<T>::Scalar(1))));
  }
  template <typename T>
  SSM_HOST_DEVICE T abar(T z, T r) const {
    using Scalar = typename Math<T>::Scalar;
    if (value<T>() == Scalar(1)) return r;  // zero times infinity would be NaN
    return Math<T>::fma(z, T(Scalar(1) - value<T>()), T(Scalar(1))) * r;
  }
  template <typename T>
  SSM_HOST_DEVICE Coefficients<T> gain(T, T r) const {
    return {r};
  }
  template <typename T>
  SSM_HOST_DEVICE DiscretizationDerivatives<T> derivatives(T, T r, T) const {
    const T r2 = r * r;
    return {r2, T(value<T>()) * r2, r2};
  }

 protected:
  // No conversion in a kernel's loop.
  template <typename T>
  SSM_HOST_DEVICE typename Math<T>::Scalar value() const {
    if constexpr (std::is_same_v<typename Math<T>::Scalar, float>) return short_alpha;
    return alpha;
  }
};

// The tables of methods: enumerator, name, struct. Parsing, dispatch, instantiations, error messages and
// ssm_kernels.discretizations follow from them. Kernels that choose a method at run time choose among the methods of one table,
// so that a method of the second leaves the kernels of the first as they are.
#define SSM_BASIC_DISCRETIZATIONS(ROW)    \
  ROW(kZoh, "zoh", Zoh)                   \
  ROW(kZohExact, "zoh_exact", ZohExact)   \
  ROW(kBilinear, "bilinear", Bilinear)    \
  ROW(kPoly, "poly", Poly)                \
  ROW(kHighOrder, "highorder", HighOrder) \
  ROW(kRk4, "rk4", Rk4)                   \
  ROW(kEuler, "euler", Euler)             \
  ROW(kBackwardEuler, "backward_euler", BackwardEuler)
#define SSM_FURTHER_DISCRETIZATIONS(ROW) \
  ROW(kGbt, "gbt", Gbt)                  \
  ROW(kDirac, "dirac", Dirac)
#define SSM_ONE_SAMPLE_DISCRETIZATIONS(ROW) \
  SSM_BASIC_DISCRETIZATIONS(ROW)            \
  SSM_FURTHER_DISCRETIZATIONS(ROW)
// Their structs are in common/two_sample_discretization.h.
#define SSM_TWO_SAMPLE_DISCRETIZATIONS(ROW)          \
  ROW(kFohRamp, "foh_ramp", FohRamp)                 \
  ROW(kTrapezoidal, "trapezoidal", Trapezoidal)      \
  ROW(kGbtTwoSample, "gbt_two_sample", GbtTwoSample) \
  ROW(kExpTrapezoidal, "exp_trapezoidal", ExpTrapezoidalRule)
#define SSM_DISCRETIZATIONS(ROW)      \
  SSM_ONE_SAMPLE_DISCRETIZATIONS(ROW) \
  SSM_TWO_SAMPLE_DISCRETIZATIONS(ROW)

enum class Discretization : int {
#define SSM_ROW(enumerator, name, type) enumerator,
  SSM_DISCRETIZATIONS(SSM_ROW)
#undef SSM_ROW
};

struct DiscretizationRow {
  std::string_view name;
  Discretization method;
};

constexpr DiscretizationRow kDiscretizationTable[] = {
#define SSM_ROW(enumerator, name, type) {name, Discretization::enumerator},
    SSM_DISCRETIZATIONS(SSM_ROW)
#undef SSM_ROW
};

constexpr DiscretizationRow kDiscretizationAliases[] = {{"foh", Discretization::kZohExact}};

// The method with this name or alias; null if there is none.
inline const Discretization* find_discretization(std::string_view name) {
  for (const DiscretizationRow& row : kDiscretizationTable) {
    if (row.name == name) return &row.method;
  }
  for (const DiscretizationRow& row : kDiscretizationAliases) {
    if (row.name == name) return &row.method;
  }
  return nullptr;
}

// Methods that take alpha. Their names are written with it: "gbt(0.7)".
inline bool has_alpha(Discretization method) {
  return method == Discretization::kGbt || method == Discretization::kGbtTwoSample;
}

// Methods of the first table, whose kernels the others do not share.
inline bool is_basic(Discretization method) { return method < Discretization::kGbt; }

// Methods of the third table, which read two input samples, and those of the other two.
inline bool is_two_sample(Discretization method) { return method >= Discretization::kFohRamp; }
inline bool is_one_sample(Discretization method) { return !is_two_sample(method); }
constexpr int kOneSampleDiscretizations = static_cast<int>(Discretization::kFohRamp);

// A call's method is an enumerator and these parameters.
struct MethodParameters {
  double alpha = 0.5;
};

template <typename Method>
SSM_HOST_DEVICE Method make_method(const MethodParameters& parameters) {
  if constexpr (std::is_base_of_v<Gbt, Method>) {
    return Method(parameters.alpha);
  } else {
    return {};
  }
}

// Defines `function`, which calls visitor(Zoh{}), visitor(ZohExact{}), ...: it turns the run-time method, one of the table
// `ROWS`, into a type. The visitor may be host or device code. `count` is that of the first method that the library does not
// know.
#if defined(__CUDACC__)
#define SSM_NO_EXEC_CHECK _Pragma("nv_exec_check_disable")
#else
#define SSM_NO_EXEC_CHECK
#endif
#define SSM_VISIT_DISCRETIZATION(enumerator, name, type) \
  case Discretization::enumerator:                       \
    visitor(make_method<type>(parameters));              \
    return;
#define SSM_DEFINE_DISCRETIZATION_VISITOR(function, ROWS, count)                                                \
  SSM_NO_EXEC_CHECK                                                                                             \
  template <typename Visitor>                                                                                   \
  SSM_HOST_DEVICE void function(Discretization method, const MethodParameters& parameters, Visitor&& visitor) { \
    switch (method) {                                                                                           \
      ROWS(SSM_VISIT_DISCRETIZATION)                                                                            \
      default:                                                                                                  \
        break;                                                                                                  \
    }                                                                                                           \
    SSM_UNKNOWN_ENUMERATOR("a discretization", count, method);                                                  \
  }

SSM_DEFINE_DISCRETIZATION_VISITOR(visit_discretization, SSM_ONE_SAMPLE_DISCRETIZATIONS, kOneSampleDiscretizations)
SSM_DEFINE_DISCRETIZATION_VISITOR(visit_basic_discretization, SSM_BASIC_DISCRETIZATIONS,
                                  static_cast<int>(Discretization::kBackwardEuler) + 1)
SSM_DEFINE_DISCRETIZATION_VISITOR(visit_further_discretization, SSM_FURTHER_DISCRETIZATIONS, kOneSampleDiscretizations)

// For visitors that need the type alone, and for methods without parameters.
SSM_NO_EXEC_CHECK
template <typename Visitor>
SSM_HOST_DEVICE void visit_discretization(Discretization method, Visitor&& visitor) {
  visit_discretization(method, MethodParameters(), visitor);
}
SSM_NO_EXEC_CHECK
template <typename Visitor>
SSM_HOST_DEVICE void visit_basic_discretization(Discretization method, Visitor&& visitor) {
  visit_basic_discretization(method, MethodParameters(), visitor);
}

// Throws if the method is unknown: for launches of kernels that read it at run time. Host code.
inline void check_known(Discretization method) {
  visit_discretization(method, [](auto) {});
}

}  // namespace ssm_kernels
