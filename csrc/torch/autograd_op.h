// The mechanism of a differentiable operator, from a struct Op that describes it:
//
//   struct Op : DifferentiableOp<Op, BwdInputs, Result> {
//     static constexpr char kSchema[] = "ssm_kernels::op";
//     static constexpr char kForward[] = "ssm_kernels::_op_fwd", kBackward[] = "ssm_kernels::_op_bwd";
//     static const char* name(const Inputs& in);         // in messages
//     static auto differentiable(Inputs& in);            // std::tie of tensors, in the order of their gradients
//     static Result forward(Inputs& in, variable_list* saved);  // by default, calls kForward and saves nothing more
//     static GradTensors backward(BwdInputs& bwd);              // by default, calls kBackward
//     static void cast(Inputs& in, const Autocast& to);
//   };
//   SSM_DIFFERENTIABLE_OPERATOR(Op)
//
// `forward` calls an operator that autograd does not look into and, if `saved` is not null, appends what backward needs beside
// the inputs. `saved` is null where no input needs a gradient. BwdInputs has the members `in`, of type Inputs, and
// `needs_grad`, an array of bool, and lists the members that receive the gradients of the results, grads(), and the saved
// tensors, saved(). SSM_DIFFERENTIABLE_OPERATOR registers the Autograd kernel, the kernel for inference, which is `forward`
// alone, and the Autocast kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "torch/autocast.h"
#include "torch/checks.h"
#include "torch/dispatch.h"
#include "torch/eager.h"
#include "torch/lazy_views.h"
#include "torch/not_differentiable.h"

namespace ssm_kernels {

using torch::autograd::variable_list;

// Whether a node of the graph has to be made for this input, or its tangent of forward-mode differentiation raises an error.
inline bool needs_autograd(const at::Tensor& tensor) {
  return tensor.defined() && ((at::GradMode::is_enabled() && tensor.requires_grad()) || has_tangent(tensor));
}
inline bool needs_autograd(const std::optional<at::Tensor>& tensor) { return tensor.has_value() && needs_autograd(*tensor); }
inline bool needs_autograd(at::TensorList tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) { return needs_autograd(tensor); });
}

// The tensors of an operator's results: a tuple, or a struct that lists them as fields().
template <typename... Tensors>
std::tuple<Tensors...>& tensors_of(std::tuple<Tensors...>& result) {
  return result;
}
template <typename Result>
auto tensors_of(Result& result) -> decltype(result.fields()) {
  return result.fields();
}

// Defaults of an operator's description.
template <typename Op, typename BwdInputsType, typename ResultType>
struct DifferentiableOp {
  using BwdInputs = BwdInputsType;
  using Inputs = decltype(BwdInputs::in);
  using Result = ResultType;
  using NeedsGrad = decltype(BwdInputs::needs_grad);
  using GradTensors = std::array<at::Tensor, std::tuple_size_v<NeedsGrad>>;

  // Whether users call the operator itself: its arguments are then checked here.
  static constexpr bool kIsPublic = false;
  // Whether compiled autograd may trace backward, which then calls registered operators unless it runs eagerly.
  static constexpr bool kIsTraceable = true;

  static Result forward(Inputs& in, variable_list*) {
    static const Operator<Result, Inputs> op(Op::kForward);
    return op(in);
  }

  static GradTensors backward(BwdInputs& bwd) {
    static const Operator<GradTensors, BwdInputs> op(Op::kBackward);
    return op(bwd);
  }

  // The members that backward needs.
  static auto saved_fields(Inputs& in) { return in.fields(); }

  // The place of a gradient among the arguments of the node: that of its tensor among the differentiable inputs.
  static size_t argument_of(const Inputs&, size_t grad) { return grad; }

  // Which of the differentiable inputs are present, from the saved members: absent ones have no edge in the graph.
  static NeedsGrad has_edges(Inputs& in) {
    return std::apply([](const auto&... tensor) { return NeedsGrad{is_present(tensor)...}; }, Op::differentiable(in));
  }
};

template <typename Op>
const auto& operator_of() {
  static const Operator<typename Op::Result, typename Op::Inputs> op(Op::kSchema);
  return op;
}

// The node in the graph. Its name, which users see as grad_fn, contains that of Op.
template <typename Op>
class AutogradNode : public torch::autograd::Function<AutogradNode<Op>> {
  using Inputs = typename Op::Inputs;
  using Context = torch::autograd::AutogradContext;

 public:
  static constexpr bool is_traceable = Op::kIsTraceable;

  // Autograd finds the inputs among `Tensors`.
  template <typename... Tensors>
  static variable_list forward(Context* ctx, Inputs& in, const Tensors&...) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto fields = Op::saved_fields(in);
    variable_list saved;
    saved.reserve(std::tuple_size_v<decltype(fields)>);
    auto result = Op::forward(in, &saved);
    int place = 0;
    ctx->saved_data.reserve(count_options(fields));
    const auto save = [&](const auto& field) {
      using Field = std::decay_t<decltype(field)>;
      if constexpr (kIsTensor<Field>) {
        saved.push_back(or_undefined(field));
      } else if constexpr (std::is_same_v<Field, at::TensorList>) {
        saved.insert(saved.end(), field.begin(), field.end());
        ctx->saved_data[std::to_string(place++)] = static_cast<int64_t>(field.size());
      } else {
        ctx->saved_data[std::to_string(place++)] = owned(field);
      }
    };
    std::apply([&](const auto&... each) { (save(each), ...); }, fields);
    ctx->save_for_backward(std::move(saved));
    ctx->set_materialize_grads(false);
    if constexpr (std::is_same_v<typename Op::Result, at::Tensor>) {
      return {std::move(result)};
    } else {
      return std::apply([](auto&... tensors) { return variable_list{std::move(tensors)...}; }, tensors_of(result));
    }
  }

  static variable_list backward(Context* ctx, variable_list grads) {
    constexpr size_t kNumGrads = std::tuple_size_v<typename Op::NeedsGrad>;
    variable_list result(1 + kNumGrads);  // the arguments of forward after ctx
    if (std::none_of(grads.begin(), grads.end(), [](const at::Tensor& grad) { return grad.defined(); })) return result;
    variable_list saved = ctx->get_saved_variables();
    typename Op::BwdInputs bwd;
    assign(bwd.grads(), grads);
    assign(bwd.saved(), saved);
    const auto fields = Op::saved_fields(bwd.in);
    size_t tensor = std::tuple_size_v<decltype(bwd.saved())>;
    int place = 0;
    const auto restore = [&](auto& field) {
      using Field = std::decay_t<decltype(field)>;
      if constexpr (kIsTensor<Field>) {
        if (at::Tensor& value = saved[tensor++]; value.defined()) field = std::move(value);
      } else if constexpr (std::is_same_v<Field, at::TensorList>) {
        field = at::TensorList(saved).slice(tensor, ctx->saved_data[std::to_string(place++)].toInt());
        tensor += field.size();
      } else {
        set(field, ctx->saved_data[std::to_string(place++)]);
      }
    };
    std::apply([&](auto&... each) { (restore(each), ...); }, fields);

    typename Op::NeedsGrad needs_grad = Op::has_edges(bwd.in);
    size_t edge = 0;
    for (bool& needs : needs_grad) needs = needs && ctx->needs_input_grad(edge++);
    bwd.needs_grad = needs_grad;
    typename Op::GradTensors computed = run_backward(bwd);
    for (size_t i = 0; i < kNumGrads; ++i) {
      if (needs_grad[i]) result[1 + Op::argument_of(bwd.in, i)] = std::move(computed[i]);
    }
    return result;
  }

 private:
  // Unless second derivatives or tangents are recorded, backward's operators skip their Autograd kernels, which box all
  // arguments and raise errors for tangents.
  static typename Op::GradTensors run_backward(typename Op::BwdInputs& bwd) {
    if (records_derivatives()) return Op::backward(bwd);
    at::AutoDispatchBelowADInplaceOrView guard;
    return Op::backward(bwd);
  }

  template <typename Field>
  static constexpr bool kIsTensor = std::is_same_v<Field, at::Tensor> || std::is_same_v<Field, std::optional<at::Tensor>>;

  // Assigns the first tensors of the list to the members.
  template <typename... Members>
  static void assign(std::tuple<Members&...> members, const variable_list& list) {
    [[maybe_unused]] auto next = list.begin();
    std::apply([&](auto&... member) { ((next->defined() ? void(member = *next) : void(), ++next), ...); }, members);
  }

  // Counts the options among the fields. saved_data keeps them in a map, which is reserved to this size.
  template <typename... Fields>
  static constexpr size_t count_options(const std::tuple<Fields&...>&) {
    return (size_t(0) + ... + size_t(!kIsTensor<std::decay_t<Fields>>));
  }

  // An option as saved_data keeps it, and back. Strings of `in` are views: those of backward are of saved_data.
  template <typename T>
  static const T& owned(const T& option) {
    return option;
  }
  static std::string owned(std::string_view option) { return std::string(option); }
  static std::optional<std::string> owned(std::optional<std::string_view> option) {
    return option.has_value() ? std::optional<std::string>(*option) : std::nullopt;
  }
  template <typename T>
  static void set(T& option, const c10::IValue& value) {
    option = value.to<T>();
  }
  static void set(std::string_view& option, const c10::IValue& value) { option = value.toStringView(); }
  static void set(std::optional<std::string_view>& option, const c10::IValue& value) {
    if (!value.isNone()) option = value.toStringView();
  }
};

template <typename Op>
typename Op::Result without_graph(typename Op::Inputs& in) {
  if constexpr (Op::kIsPublic) operator_of<Op>().check(in);
  return Op::forward(in, nullptr);
}

template <typename Op>
typename Op::Result with_graph(typename Op::Inputs& in) {
  check_no_func_transform(Op::name(in));
  if constexpr (Op::kIsPublic) operator_of<Op>().check(in);
  return std::apply(
      [&](const auto&... tensors) -> typename Op::Result {
        if (!(needs_autograd(tensors) || ...)) {
          at::AutoDispatchBelowADInplaceOrView guard;
          return Op::forward(in, nullptr);
        }
        TORCH_CHECK_NOT_IMPLEMENTED(!(has_tangent(tensors) || ...), not_supported(Op::name(in), kForwardMode));
        variable_list results = AutogradNode<Op>::apply(in, tensors...);
        if constexpr (std::is_same_v<typename Op::Result, at::Tensor>) {
          return std::move(results[0]);
        } else {
          typename Op::Result result;
          auto next = results.begin();
          std::apply([&](auto&... each) { ((each = std::move(*next++)), ...); }, tensors_of(result));
          return result;
        }
      },
      Op::differentiable(in));
}

// Shared by operators with and without gradients.
template <typename Op, at::DeviceType device>
typename Op::Result under_autocast(typename Op::Inputs& in) {
  if constexpr (Op::kIsPublic) operator_of<Op>().check(in);
  c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key(device));
  Op::cast(in, Autocast(device));
  return operator_of<Op>()(in);
}

// The mechanism of a decoding operator, which writes to arguments, returns another tensor or nothing, and has no gradients. A
// struct Op describes it:
//
//   struct Op : InPlaceOp<Inputs> {  // or InPlaceOp<Inputs, NoResult>
//     static constexpr char kSchema[] = "ssm_kernels::op";
//     static constexpr const char *kName, *kScan;      // for messages: the operator, and the one to train with
//     static auto tensors(const Inputs& in);           // std::tie of what may require a gradient, the state first
//     static void count_writes(const Inputs& in);      // increments the versions of the arguments that it writes to
//     static void cast(Inputs& in, const Autocast& to);
//     static at::Tensor meta(const Inputs& in);        // checks the inputs and allocates the result
//   };
//   SSM_IN_PLACE_OPERATOR(Op)
template <typename InputsType, typename ResultType = at::Tensor>
struct InPlaceOp {
  using Inputs = InputsType;
  using Result = ResultType;
  static constexpr bool kIsPublic = true;
  static constexpr size_t kStates = 1;  // of tensors(): the first ones, which are written to
};

// Counts the writes, so that autograd notices when a tensor has been saved for backward.
template <typename Op>
typename Op::Result count_version(c10::DispatchKeySet keys, const typename Op::Inputs& in) {
  typename Op::Result result;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    result = operator_of<Op>().redispatch(keys & c10::after_ADInplaceOrView_keyset, in);
  }
  Op::count_writes(in);
  return result;
}

// "<op>: decoding is not differentiable: train with <scan>, and decode under torch.no_grad()": the sentence with which all
// decoding operators refuse gradients.
inline std::string not_differentiable(const char* op, const char* scan) {
  return c10::str(op, ": decoding is not differentiable: train with ", scan, ", and decode under torch.no_grad()");
}

// Whether autograd refuses writes to the tensor: it requires a gradient, and it is a leaf or a view of one.
inline bool is_leaf_of_graph(const at::Tensor& tensor) {
  if (!at::GradMode::is_enabled() || !tensor.requires_grad()) return false;
  return tensor.is_leaf() || (tensor.is_view() && tensor._base().is_leaf());
}

// The form of a decoding operator whose results are arguments: they cannot have a node that raises later, because the caller
// uses their memory again. Raises if one of `tensors` requires a gradient.
template <typename Op, typename... Tensors>
NoResult step_into_arguments_below_autograd(const char* op, const char* scan, c10::DispatchKeySet keys,
                                            const typename Op::Inputs& in, const Tensors&... tensors) {
  TORCH_CHECK_NOT_IMPLEMENTED(!(has_tangent(tensors) || ...), not_supported(op, kForwardMode));
  TORCH_CHECK_NOT_IMPLEMENTED(!torch::autograd::compute_requires_grad(tensors...), not_differentiable(op, scan));
  at::AutoDispatchBelowAutograd guard;
  return operator_of<Op>().redispatch(keys & c10::after_autograd_keyset, in);
}

// The form of a decoding operator that returns its result, which has a node that raises when backward reaches it if one of the
// arguments requires a gradient. A state gets one only if it requires a gradient itself: a cache beside parameters that
// require gradients would collect a node in each step. `tensors`: the states first.
template <typename Op, typename... Tensors>
at::Tensor step_below_autograd(const char* op, const char* scan, c10::DispatchKeySet keys, const typename Op::Inputs& in,
                               const Tensors&... tensors) {
  const auto for_each_state = [&](const auto& visit) {
    const std::tuple<const Tensors&...> all(tensors...);
    [&]<size_t... i>(std::index_sequence<i...>) { (visit(std::get<i>(all)), ...); }(std::make_index_sequence<Op::kStates>());
  };
  TORCH_CHECK_NOT_IMPLEMENTED(!(has_tangent(tensors) || ...), not_supported(op, kForwardMode));
  const bool needs_graph = torch::autograd::compute_requires_grad(tensors...);
  for_each_state([&](const at::Tensor& state) {
    TORCH_CHECK_NOT_IMPLEMENTED(!is_leaf_of_graph(state), not_differentiable(op, scan));
    torch::autograd::check_inplace(state, torch::autograd::compute_requires_grad(state));
  });
  torch::autograd::edge_list edges;
  if (needs_graph) edges = torch::autograd::collect_next_edges(tensors...);
  at::Tensor out;
  {
    at::AutoDispatchBelowAutograd guard;
    out = operator_of<Op>().redispatch(keys & c10::after_autograd_keyset, in);
  }
  if (needs_graph) set_error_node(out, not_differentiable(op, scan), edges);
  for_each_state([&](const at::Tensor& state) {
    if (torch::autograd::compute_requires_grad(state)) rebase_to_error_node(state, not_differentiable(op, scan), edges);
  });
  return out;
}

// The Autograd kernel of an in-place operator.
template <typename Op>
typename Op::Result in_place_below_autograd(c10::DispatchKeySet keys, const typename Op::Inputs& in) {
  operator_of<Op>().check(in);
  return std::apply(
      [&](const auto&... tensors) {
        if constexpr (std::is_same_v<typename Op::Result, NoResult>) {
          return step_into_arguments_below_autograd<Op>(Op::kName, Op::kScan, keys, in, tensors...);
        } else {
          return step_below_autograd<Op>(Op::kName, Op::kScan, keys, in, tensors...);
        }
      },
      Op::tensors(in));
}

#define SSM_AUTOCAST_OPERATOR(Op)                                                                               \
  TORCH_LIBRARY_IMPL(ssm_kernels, AutocastCPU, m) { implement<&under_autocast<Op, at::kCPU>>(m, Op::kSchema); } \
  TORCH_LIBRARY_IMPL(ssm_kernels, AutocastCUDA, m) { implement<&under_autocast<Op, at::kCUDA>>(m, Op::kSchema); }

#define SSM_DIFFERENTIABLE_OPERATOR(Op)                                                                            \
  TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) { implement<&without_graph<Op>>(m, Op::kSchema); } \
  TORCH_LIBRARY_IMPL(ssm_kernels, Autograd, m) { implement<&with_graph<Op>>(m, Op::kSchema); }                     \
  SSM_AUTOCAST_OPERATOR(Op)

#define SSM_IN_PLACE_OPERATOR(Op)                                                                           \
  TORCH_LIBRARY_IMPL(ssm_kernels, Autograd, m) { implement<&in_place_below_autograd<Op>>(m, Op::kSchema); } \
  TORCH_LIBRARY_IMPL(ssm_kernels, Meta, m) { implement<&Op::meta>(m, Op::kSchema); }                        \
  TORCH_LIBRARY_IMPL(ssm_kernels, ADInplaceOrView, m) { implement<&count_version<Op>>(m, Op::kSchema); }    \
  TORCH_LIBRARY_IMPL(ssm_kernels, Negative, m) { read_lazy_views(m, Op::kSchema); }                         \
  TORCH_LIBRARY_IMPL(ssm_kernels, Conjugate, m) { read_lazy_views(m, Op::kSchema); }                        \
  SSM_AUTOCAST_OPERATOR(Op)

}  // namespace ssm_kernels
