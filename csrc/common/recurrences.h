// The family of gated linear recurrences. Each member turns a step's raw inputs x into the coefficients of
//
//   h_t = a_t h_{t-1} + b_t
//
// A member is a struct, shared by the CPU's SIMD vectors and CUDA threads:
//
//   kNames               names of the inputs, in the order of the operator's arguments: gates, the gated input, inputs that
//                        broadcast
//   kPositional          number of inputs that the operator takes by position; the others are keyword-only
//   kAdded               the input that is b itself, which backward does not read; kNoInput if there is none
//   kCandidate           an input that a does not depend on. If it is kZeroCandidate everywhere, without an activation,
//                        b is zero
//   kFirstBroadcast      inputs from this one on may have any shape that broadcasts, and the accumulation type
//   gates(x)             the expensive part of the following functions: a number or a struct. A kernel that visits a
//                        step twice may keep it
//   step(gates, x)       a and b
//   gradients(gates, x, h, g, grad)   grad[i] = g (h da/dx_i + db/dx_i), with h the state before the step and g the gradient of
//                        the state after it
//
// Options that change the formulas are a base class. Kernels for calls without options know DefaultOptions at compile time;
// other kernels read RuntimeOptions.
//
// docs/recurrences.md has the formulas and their sources, and the recipe for a new member: a struct and a row of
// SSM_RECURRENCES here, and rows in other files that tests compare with this table.
#pragma once

#include <array>
#include <cstddef>
#include <iterator>
#include <limits>
#include <string_view>
#include <type_traits>

#include "common/activations.h"
#include "common/limits.h"
#include "common/math.h"
#include "common/unknown_enumerator.h"

namespace ssm_kernels {

template <typename T>
struct Step {
  T a, b;
};

// The candidate's activation: none, the minGRU paper's g (x + 1/2 for x >= 0, else sigmoid(x)), or tanh.
enum class Activation : int { kNone, kG, kTanh };

struct RecurrenceOptions {
  Activation candidate_activation = Activation::kNone;
  bool gate_is_logit = true;

  bool are_default() const { return candidate_activation == Activation::kNone && gate_is_logit; }
};

struct DefaultOptions {
  static SSM_HOST_DEVICE constexpr Activation candidate_activation() { return Activation::kNone; }
  static SSM_HOST_DEVICE constexpr bool gate_is_logit() { return true; }
};
struct RuntimeOptions {
  RecurrenceOptions options;
  SSM_HOST_DEVICE Activation candidate_activation() const { return options.candidate_activation; }
  SSM_HOST_DEVICE bool gate_is_logit() const { return options.gate_is_logit; }
};

// Makes a variant with the options of a call. Options that the variant knows at compile time must equal them.
template <typename Variant>
SSM_HOST_DEVICE Variant make_variant(const RecurrenceOptions& options) {
  if constexpr (std::is_base_of_v<RuntimeOptions, Variant>) {
    return Variant{RuntimeOptions{options}};
  } else {
    return Variant{};
  }
}

constexpr size_t kMaxRecurrenceInputs = 4;
constexpr int kNoInput = -1;

template <typename T>
SSM_HOST_DEVICE T one() {
  return T(typename Math<T>::Scalar(1));
}

template <typename T>
SSM_HOST_DEVICE T negate(T x) {
  return Math<T>::negate(x);
}

// An activation's value and derivative.
template <typename T>
struct Activated {
  T value, derivative;
};

template <typename T>
SSM_HOST_DEVICE Activated<T> activate(Activation activation, T x) {
  using Scalar = typename Math<T>::Scalar;
  if (activation == Activation::kG) {
    const auto is_negative = Math<T>::less(x, T(Scalar(0)));
    const T s = sigmoid(x);
    return {Math<T>::select(is_negative, s, x + T(Scalar(0.5))), Math<T>::select(is_negative, s * (one<T>() - s), one<T>())};
  } else if (activation == Activation::kTanh) {
    const T y = Math<T>::tanh(x);
    return {y, one<T>() - y * y};
  } else {
    return {x, one<T>()};
  }
}

// Base of members without options: the member is its only variant.
template <typename Recurrence>
struct SingleVariant {
  using ByDefault = Recurrence;
  using AtRunTime = Recurrence;
  static constexpr int kAdded = kNoInput;
  static constexpr double kZeroCandidate = 0;
  static constexpr size_t kPositional = kMaxRecurrenceInputs;
  static constexpr bool kHasCandidateActivation = false, kHasGateIsLogit = false;
};

// a is a function of the first input; the second input is b itself. Recurrence::through_gate(v, a) is v da / dx_0 for v = g h.
template <typename Recurrence>
struct AddedInput : SingleVariant<Recurrence> {
  static constexpr int kAdded = 1;
  static constexpr size_t kCandidate = 1, kFirstBroadcast = 2;
  template <typename T>
  static SSM_HOST_DEVICE Step<T> step(T a, const T* x) {
    return {a, x[1]};
  }
  template <typename T>
  static SSM_HOST_DEVICE void gradients(T a, const T*, T h, T g, T* grad) {
    grad[0] = Recurrence::through_gate(g * h, a);
    grad[1] = g;
  }
};

// a and b themselves.
struct LinearScan : AddedInput<LinearScan> {
  static constexpr std::array<std::string_view, 2> kNames = {"a", "b"};
  template <typename T>
  static SSM_HOST_DEVICE T gates(const T* x) {
    return x[0];
  }
  template <typename T>
  static SSM_HOST_DEVICE T through_gate(T v, T) {
    return v;
  }
};

// h = (1 - z) h + z c, for a gate z and a candidate c.
template <typename T>
SSM_HOST_DEVICE Step<T> interpolate(T z, T candidate) {
  return {one<T>() - z, z * candidate};
}

// z = sigmoid(gate), or the gate itself.
template <typename Options>
struct MinGruVariant : Options {
  using Options::candidate_activation, Options::gate_is_logit;
  static constexpr std::array<std::string_view, 2> kNames = {"gate", "candidate"};
  static constexpr int kAdded = kNoInput;
  static constexpr size_t kFirstBroadcast = 2;
  template <typename T>
  SSM_HOST_DEVICE T gates(const T* x) const {
    if (gate_is_logit()) return sigmoid(x[0]);
    return x[0];
  }
  template <typename T>
  SSM_HOST_DEVICE Step<T> step(T z, const T* x) const {
    return interpolate(z, activate(candidate_activation(), x[1]).value);
  }
  template <typename T>
  SSM_HOST_DEVICE void gradients(T z, const T* x, T h, T g, T* grad) const {
    const Activated<T> candidate = activate(candidate_activation(), x[1]);
    grad[0] = g * (candidate.value - h);
    if (gate_is_logit()) grad[0] = grad[0] * (z * (one<T>() - z));
    grad[1] = g * z * candidate.derivative;
  }
};

struct MinGru {
  static constexpr auto kNames = MinGruVariant<RuntimeOptions>::kNames;
  static constexpr size_t kCandidate = 1;
  static constexpr double kZeroCandidate = 0;
  static constexpr size_t kFirstBroadcast = kNames.size();
  static constexpr size_t kPositional = kMaxRecurrenceInputs;
  static constexpr bool kHasCandidateActivation = true, kHasGateIsLogit = true;
  using ByDefault = MinGruVariant<DefaultOptions>;
  using AtRunTime = MinGruVariant<RuntimeOptions>;
};

// The normalized gates f / (f + i) and i / (f + i) of f = sigmoid(forget), i = sigmoid(input). With d_f = 1 + e^-forget and
// d_i = 1 + e^-input, the second is d_f / (d_f + d_i) and the first 1 minus it. If both exponentials are so large that the ones
// are negligible, both are scaled down by the same factor, so that the quotient is right even if both gates underflow.
template <typename T>
struct NormalizedGates {
  T input;
  T one_minus_f, one_minus_i;  // before normalization
};

template <typename T>
SSM_HOST_DEVICE NormalizedGates<T> normalized_gates(T forget_logit, T input_logit) {
  using Scalar = typename Math<T>::Scalar;
  constexpr bool is_double = std::is_same_v<Scalar, double>;
  const T large(Scalar(is_double ? 40 : 17)), largest(Scalar(is_double ? 700 : 80));
  const T shift = Math<T>::max(negate(Math<T>::max(forget_logit, input_logit)) - large, T(Scalar(0)));
  const T e_f = Math<T>::exp(Math<T>::min(negate(forget_logit) - shift, largest));
  const T e_i = Math<T>::exp(Math<T>::min(negate(input_logit) - shift, largest));
  const T d_f = one<T>() + e_f, d_i = one<T>() + e_i;
  return {d_f * Math<T>::reciprocal(d_f + d_i), e_f * Math<T>::reciprocal(d_f), e_i * Math<T>::reciprocal(d_i)};
}

template <typename Options>
struct MinLstmVariant : Options {
  using Options::candidate_activation;
  static constexpr std::array<std::string_view, 3> kNames = {"forget", "input", "candidate"};
  static constexpr int kAdded = kNoInput;
  static constexpr size_t kFirstBroadcast = 3;
  template <typename T>
  static SSM_HOST_DEVICE NormalizedGates<T> gates(const T* x) {
    return normalized_gates(x[0], x[1]);
  }
  template <typename T>
  SSM_HOST_DEVICE Step<T> step(const NormalizedGates<T>& gates, const T* x) const {
    return interpolate(gates.input, activate(candidate_activation(), x[2]).value);
  }
  template <typename T>
  SSM_HOST_DEVICE void gradients(const NormalizedGates<T>& gates, const T* x, T h, T g, T* grad) const {
    const Activated<T> candidate = activate(candidate_activation(), x[2]);
    const T grad_logit = g * (candidate.value - h) * (gates.input * (one<T>() - gates.input));
    grad[0] = negate(grad_logit) * gates.one_minus_f;
    grad[1] = grad_logit * gates.one_minus_i;
    grad[2] = g * gates.input * candidate.derivative;
  }
};

struct MinLstm {
  static constexpr auto kNames = MinLstmVariant<RuntimeOptions>::kNames;
  static constexpr size_t kCandidate = 2;
  static constexpr double kZeroCandidate = 0;
  static constexpr size_t kFirstBroadcast = kNames.size();
  static constexpr size_t kPositional = kMaxRecurrenceInputs;
  static constexpr bool kHasCandidateActivation = true, kHasGateIsLogit = false;
  using ByDefault = MinLstmVariant<DefaultOptions>;
  using AtRunTime = MinLstmVariant<RuntimeOptions>;
};

// The exact relaxation of tau dh/dt = f - h over a step dt: h = f + (h - f) e^(-dt/tau).
struct Liquid : SingleVariant<Liquid> {
  static constexpr std::array<std::string_view, 3> kNames = {"candidate", "tau", "dt"};
  static constexpr size_t kCandidate = 0, kFirstBroadcast = 1;
  // a multiplies h, gain multiplies f. Both are computed directly: 1 - a loses digits for dt << tau, 1 - gain for dt >> tau.
  template <typename T>
  struct Relaxation {
    T a, gain;
  };
  template <typename T>
  static SSM_HOST_DEVICE Relaxation<T> gates(const T* x) {
    const T exponent = negate(x[2]) * Math<T>::reciprocal(x[1]);
    return {Math<T>::exp(exponent), negate(Math<T>::expm1(exponent))};
  }
  template <typename T>
  static SSM_HOST_DEVICE Step<T> step(const Relaxation<T>& gates, const T* x) {
    return {gates.a, gates.gain * x[0]};
  }
  template <typename T>
  static SSM_HOST_DEVICE void gradients(const Relaxation<T>& gates, const T* x, T h, T g, T* grad) {
    // Bounded, as the derivatives by tau and dt have the limit zero where dt / tau is infinite.
    const T largest(kLargestRate<typename Math<T>::Scalar>);
    const T rate = Math<T>::min(Math<T>::reciprocal(x[1]), largest);
    const T grad_exponent = g * (h - x[0]) * gates.a * rate;  // over tau
    grad[0] = g * gates.gain;
    grad[1] = grad_exponent * Math<T>::min(x[2] * rate, largest);
    grad[2] = negate(grad_exponent);
  }
};

// Griffin's real-gated linear recurrent unit: log a = -8 softplus(recurrent_param) sigmoid(recurrence_gate), and the gated
// input times sqrt(1 - a^2).
struct RgLru : SingleVariant<RgLru> {
  static constexpr std::array<std::string_view, 4> kNames = {"recurrence_gate", "input_gate", "x", "recurrent_param"};
  static constexpr size_t kPositional = 2;  // older versions take x first: a call by position in that order is an error
  static constexpr size_t kCandidate = 2, kFirstBroadcast = 3;
  template <typename T>
  struct Gates {
    T rate, a, norm, gain;
  };
  template <typename T>
  static SSM_HOST_DEVICE Gates<T> gates(const T* x) {
    using Scalar = typename Math<T>::Scalar;
    const T gate = sigmoid(x[0]), rate = T(Scalar(-8)) * softplus(x[3]);
    const T log_a = rate * gate, a_minus_one = Math<T>::expm1(log_a);
    // Near one, where a state lasts long, a is as exact as its rounding.
    const auto is_near_one = Math<T>::less(T(Scalar(-0.5)), log_a);
    const T a = Math<T>::select(is_near_one, one<T>() + a_minus_one, Math<T>::exp(log_a));
    const T norm = Math<T>::sqrt(negate(a_minus_one) * (a_minus_one + T(Scalar(2))));
    return {rate, a, norm, norm * sigmoid(x[1])};
  }
  template <typename T>
  static SSM_HOST_DEVICE Step<T> step(const Gates<T>& gates, const T* x) {
    return {gates.a, gates.gain * x[2]};
  }
  template <typename T>
  static SSM_HOST_DEVICE void gradients(const Gates<T>& gates, const T* x, T h, T g, T* grad) {
    using Scalar = typename Math<T>::Scalar;
    const T gate = sigmoid(x[0]), input_gate = sigmoid(x[1]), input = input_gate * x[2];
    // If log a underflows, the square root's slope overflows, but the next factor of the chain rule is zero: bound the slope.
    constexpr Scalar kMinNorm = std::is_same_v<Scalar, double> ? Scalar(1e-150) : Scalar(1e-18f);
    const T slope = negate(gates.a) * Math<T>::reciprocal(Math<T>::max(gates.norm, T(kMinNorm)));
    const T grad_log_a = g * gates.a * Math<T>::fma(input, slope, h);
    // Bounded: where the parameter is infinite, the gradient of log a is zero.
    const T rate = Math<T>::max(gates.rate, T(-kLargestRate<Scalar>));
    grad[0] = grad_log_a * rate * (gate * (one<T>() - gate));
    grad[1] = g * gates.norm * input * (one<T>() - input_gate);
    grad[2] = g * gates.norm * input_gate;
    grad[3] = grad_log_a * T(Scalar(-8)) * gate * softplus_derivative(x[3]);
  }
};

// HGRN's recurrence. The scan takes the logarithms of its gates: a = e^log_gate.
struct Hgrn : AddedInput<Hgrn> {
  static constexpr std::array<std::string_view, 2> kNames = {"log_gate", "x"};
  static constexpr size_t kPositional = 1;  // as RgLru
  template <typename T>
  static SSM_HOST_DEVICE T gates(const T* x) {
    return Math<T>::exp(x[0]);
  }
  template <typename T>
  static SSM_HOST_DEVICE T through_gate(T v, T a) {
    return v * a;
  }
};

// minGRU with the positive candidate 1 + elu(candidate).
struct EluGru : SingleVariant<EluGru> {
  static constexpr std::array<std::string_view, 2> kNames = {"gate", "candidate"};
  static constexpr size_t kCandidate = 1, kFirstBroadcast = 2;
  static constexpr double kZeroCandidate = -std::numeric_limits<double>::infinity();
  template <typename T>
  static SSM_HOST_DEVICE Activated<T> positive(T x) {
    using Scalar = typename Math<T>::Scalar;
    const auto is_positive = Math<T>::less(T(Scalar(0)), x);
    const T e = Math<T>::exp(x);
    return {Math<T>::select(is_positive, x + one<T>(), e), Math<T>::select(is_positive, one<T>(), e)};
  }
  template <typename T>
  static SSM_HOST_DEVICE T gates(const T* x) {
    return sigmoid(x[0]);
  }
  template <typename T>
  static SSM_HOST_DEVICE Step<T> step(T z, const T* x) {
    return interpolate(z, positive(x[1]).value);
  }
  template <typename T>
  static SSM_HOST_DEVICE void gradients(T z, const T* x, T h, T g, T* grad) {
    const Activated<T> candidate = positive(x[1]);
    grad[0] = g * (candidate.value - h) * (z * (one<T>() - z));
    grad[1] = g * z * candidate.derivative;
  }
};

// a = sigmoid(gate).
struct DiagLinear : AddedInput<DiagLinear> {
  static constexpr std::array<std::string_view, 2> kNames = {"gate", "x"};
  template <typename T>
  static SSM_HOST_DEVICE T gates(const T* x) {
    return sigmoid(x[0]);
  }
  template <typename T>
  static SSM_HOST_DEVICE T through_gate(T v, T a) {
    return v * (a * (one<T>() - a));
  }
};

// The table of members: enumerator, operator, struct. Schemas, checks, dispatch and instantiations follow from it.
#define SSM_RECURRENCES(ROW)              \
  ROW(kLinear, "linear_scan", LinearScan) \
  ROW(kMinGru, "mingru_scan", MinGru)     \
  ROW(kMinLstm, "minlstm_scan", MinLstm)  \
  ROW(kLiquid, "liquid_scan", Liquid)     \
  ROW(kRgLru, "rglru_scan", RgLru)        \
  ROW(kHgrn, "hgrn_scan", Hgrn)           \
  ROW(kEluGru, "elu_gru_scan", EluGru)    \
  ROW(kDiagLinear, "diag_linear_scan", DiagLinear)

enum class Recurrence : int {
#define SSM_ROW(enumerator, name, type) enumerator,
  SSM_RECURRENCES(SSM_ROW)
#undef SSM_ROW
};

// The recurrence of a variant.
template <typename Variant>
constexpr Recurrence recurrence_of() {
#define SSM_ROW(enumerator, name, type)                                                                 \
  if constexpr (std::is_same_v<Variant, type::ByDefault> || std::is_same_v<Variant, type::AtRunTime>) { \
    return Recurrence::enumerator;                                                                      \
  }
  SSM_RECURRENCES(SSM_ROW)
#undef SSM_ROW
}

struct RecurrenceRow {
  const char* name;
  Recurrence recurrence;
  const std::string_view* input_names;
  size_t inputs, positional, first_broadcast, candidate;
  double zero_candidate;
  bool has_candidate_activation, has_gate_is_logit;
};

#define SSM_ROW(enumerator, name, type)        \
  RecurrenceRow{name,                          \
                Recurrence::enumerator,        \
                type::kNames.data(),           \
                type::kNames.size(),           \
                type::kPositional,             \
                type::kFirstBroadcast,         \
                type::kCandidate,              \
                type::kZeroCandidate,          \
                type::kHasCandidateActivation, \
                type::kHasGateIsLogit},
inline constexpr RecurrenceRow kRecurrenceTable[] = {SSM_RECURRENCES(SSM_ROW)};
#undef SSM_ROW

// Throws if the activation is unknown: for launches of kernels that read it at run time. Host code.
inline void check_known(Activation activation) {
  switch (activation) {
    case Activation::kNone:
    case Activation::kG:
    case Activation::kTanh:
      return;
  }
  SSM_UNKNOWN_ENUMERATOR("a candidate's activation", static_cast<int>(Activation::kTanh) + 1, activation);
}

// Calls visitor(Variant{}) for the recurrence with DefaultOptions.
template <typename Visitor>
void visit_default_recurrence(Recurrence recurrence, Visitor&& visitor) {
  switch (recurrence) {
#define SSM_ROW(enumerator, name, type) \
  case Recurrence::enumerator:          \
    return visitor(type::ByDefault{});
    SSM_RECURRENCES(SSM_ROW)
#undef SSM_ROW
  }
  SSM_UNKNOWN_ENUMERATOR("a recurrence", static_cast<int>(std::size(kRecurrenceTable)), recurrence);
}

// Calls visitor(Variant{}) for the recurrence with RuntimeOptions.
template <typename Visitor>
void visit_recurrence_at_run_time(Recurrence recurrence, Visitor&& visitor) {
  switch (recurrence) {
#define SSM_ROW(enumerator, name, type) \
  case Recurrence::enumerator:          \
    return visitor(type::AtRunTime{});
    SSM_RECURRENCES(SSM_ROW)
#undef SSM_ROW
  }
  SSM_UNKNOWN_ENUMERATOR("a recurrence", static_cast<int>(std::size(kRecurrenceTable)), recurrence);
}

}  // namespace ssm_kernels
