// Operators whose arguments are the members of a struct. The struct lists its members once, in the order of the schema:
//
//   struct Inputs {
//     at::Tensor x;
//     std::optional<at::Tensor> bias;
//     bool reverse = false;
//
//     auto fields() { return std::tie(x, bias, reverse); }
//   };
//
// The C++ signature, the dispatcher's kernels and calls from C++ follow from the types of these fields. A result is a tensor, a
// tuple of tensors, an array of tensors (gradients) or a struct with fields; the dispatcher sees a tensor or a tuple.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "torch/arguments.h"

namespace ssm_kernels {

// The fields of T in a struct that has the members of T, and may have others.
template <typename T, typename Named>
auto fields_of(const Named& values) {
  const auto as_const = [](auto&... field) { return std::tie(std::as_const(field)...); };
  return std::apply(as_const, const_cast<T&>(static_cast<const T&>(values)).T::fields());
}

// The result type of an operator that returns nothing.
using NoResult = std::tuple<>;

// How the dispatcher passes an argument.
template <typename T>
struct Passed {
  using type = T;
};
template <>
struct Passed<at::Tensor> {
  using type = const at::Tensor&;
};
template <>
struct Passed<std::optional<at::Tensor>> {
  using type = const std::optional<at::Tensor>&;
};

// How the dispatcher returns a result, and conversions between the two forms.
template <typename T, typename = void>
struct Returned {
  using type = T;
  static type to(T&& result) { return std::move(result); }
  static T from(type&& result) { return std::move(result); }
};
template <size_t count>
struct Returned<std::array<at::Tensor, count>> {
  using type = decltype(std::tuple_cat(std::array<at::Tensor, count>()));
  static type to(std::array<at::Tensor, count>&& result) { return std::tuple_cat(std::move(result)); }
  static std::array<at::Tensor, count> from(type&& result) {
    return std::apply([](auto&... tensors) { return std::array<at::Tensor, count>{std::move(tensors)...}; }, result);
  }
};
template <typename T>
struct Returned<T, std::void_t<decltype(std::declval<T&>().fields())>> {
  template <typename... Fields>
  static std::tuple<Fields...> values(std::tuple<Fields&...> fields) {
    return std::apply([](auto&... field) { return std::tuple<Fields...>{std::move(field)...}; }, fields);
  }
  using type = decltype(values(std::declval<T&>().fields()));
  static type to(T&& result) { return values(result.fields()); }
  static T from(type&& result) {
    T converted;
    converted.fields() = std::move(result);
    return converted;
  }
};

template <typename Result, typename Fields>
struct SignatureOf;
template <typename Result, typename... Fields>
struct SignatureOf<Result, std::tuple<Fields&...>> {
  using type = typename Returned<Result>::type(typename Passed<Fields>::type...);
};
template <typename Result, typename Inputs>
using Signature = typename SignatureOf<Result, decltype(std::declval<Inputs&>().fields())>::type;

// A registered operator, such as "ssm_kernels::selective_scan". To be kept in a static variable: the search takes a while.
template <typename Result, typename Inputs>
class Operator {
 public:
  explicit Operator(const char* name)
      : handle_(c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature<Result, Inputs>>()) {}

  template <typename Named>
  Result operator()(const Named& in) const {
    return Returned<Result>::from(
        std::apply([&](const auto&... field) { return handle_.call(field...); }, fields_of<Inputs>(in)));
  }

  Result redispatch(c10::DispatchKeySet keys, const Inputs& in) const {
    return Returned<Result>::from(
        std::apply([&](const auto&... field) { return handle_.redispatch(keys, field...); }, fields_of<Inputs>(in)));
  }

  // Raises as check_arguments does.
  void check(const Inputs& in) const {
    std::apply([&](const auto&... field) { check_arguments(handle_, {AnyArgument(field)...}); }, fields_of<Inputs>(in));
  }

 private:
  c10::TypedOperatorHandle<Signature<Result, Inputs>> handle_;
};

template <typename Result, typename Inputs, typename Signature>
struct KernelOf;
template <typename Result, typename Inputs, typename Out, typename... Arguments>
struct KernelOf<Result, Inputs, Out(Arguments...)> {
  using Named = std::remove_const_t<Inputs>;

  template <Result (*function)(Inputs&)>
  static Out call(Arguments... arguments) {
    Named in;
    in.fields() = std::tie(arguments...);
    return Returned<Result>::to(function(in));
  }

  template <Result (*function)(c10::DispatchKeySet, Inputs&)>
  static Out call_with_keys(c10::DispatchKeySet keys, Arguments... arguments) {
    Named in;
    in.fields() = std::tie(arguments...);
    return Returned<Result>::to(function(keys, in));
  }
};

template <auto function>
struct Kernel;
template <typename Result, typename Inputs, Result (*function)(Inputs&)>
struct Kernel<function> {
  static constexpr auto* call =
      &KernelOf<Result, Inputs, Signature<Result, std::remove_const_t<Inputs>>>::template call<function>;
};
template <typename Result, typename Inputs, Result (*function)(c10::DispatchKeySet, Inputs&)>
struct Kernel<function> {
  static constexpr auto* call =
      &KernelOf<Result, Inputs, Signature<Result, std::remove_const_t<Inputs>>>::template call_with_keys<function>;
};

// The inputs among an operator's arguments: the member `in` of backward's.
template <typename BwdInputs>
auto inputs_of(const BwdInputs& bwd, int) -> decltype((bwd.in)) {
  return bwd.in;
}
template <typename Inputs>
const Inputs& inputs_of(const Inputs& in, long) {
  return in;
}

// The kernel for Meta tensors: checks the inputs and allocates the results.
template <auto check, auto allocate, typename Arguments>
auto meta(const Arguments& arguments) {
  check(inputs_of(arguments, 0));
  return allocate(arguments);
}

// Registers `function`, Result(Inputs&) or Result(DispatchKeySet, Inputs&), as the kernel of an operator.
template <auto function>
void implement(torch::Library& m, const char* name) {
  m.impl(name, Kernel<function>::call);
}

}  // namespace ssm_kernels
