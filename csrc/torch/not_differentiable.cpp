#include "torch/not_differentiable.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "torch/arguments.h"

namespace ssm_kernels {
namespace {

bool ends_with(std::string_view name, std::string_view suffix) {
  return name.size() >= suffix.size() && name.substr(name.size() - suffix.size()) == suffix;
}

// The function of ssm_kernels.reference from which an operator or a layer can be composed.
std::string reference_of(std::string_view op) {
  if (op == "Mamba" || op == "mamba_mixer" || op == "selective_state_update") return "selective_scan";
  if (op == "Mamba2" || op == "mamba2_mixer") return "ssd_chunk_scan";
  if (op == "causal_conv1d_update") return "causal_conv1d";
  if (op == "selective_scan_two_sample") return "two_sample_scan";
  if (op == "ssd_chunk_scan_two_sample") return "two_sample_chunk_scan";
  if (op == "selective_scan_dense") return "dense_scan";
  for (const std::string_view suffix : {"_summary", "_step"}) {
    if (!ends_with(op, suffix)) continue;
    const std::string stem(op.substr(0, op.size() - suffix.size()));
    return suffix == "_step" ? stem + "_scan" : stem;
  }
  return std::string(op);
}

// The mixer that the operator is a part of, or the operator of other rules or states than those of the function that messages
// name, else "". `shown` is what messages name: of a mixer it is the layer, whose convolution runs as causal_conv1d.
std::string composed_of(const c10::OperatorHandle& op, const std::string& shown) {
  const std::string& schema = op.schema().name();
  for (const char* const name : {"selective_scan_two_sample", "ssd_chunk_scan_two_sample", "selective_scan_dense"}) {
    if (schema.find(name) != std::string::npos) return name;
  }
  const std::string name = public_name(op);
  if (name == "causal_conv1d" && shown != name) return "mamba_mixer";
  return ends_with(name, "_mixer") ? name : "";
}

// A node that raises when backward reaches it. PyTorch holds nodes by std::shared_ptr, in newer versions by intrusive_ptr.
template <typename Pointer = decltype(torch::autograd::Edge::function)>
Pointer make_error_node(const std::string& message, torch::autograd::edge_list inputs) {
  constexpr bool kIsShared = std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>;
  using Node = std::enable_if_t<sizeof(Pointer) != 0, torch::autograd::Error>;  // a dependent name: one branch is looked into
  if constexpr (kIsShared) {
    return Pointer(new Node(message, std::move(inputs)), [](Node* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<Node>(message, std::move(inputs));
  }
}

// Calls function(tensor) for each defined tensor of the arguments, those in lists included.
template <typename Function>
void for_each_tensor(c10::ArrayRef<c10::IValue> arguments, const Function& function) {
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor()) {
      if (argument.toTensor().defined()) function(argument.toTensor());
    } else if (argument.isTensorList()) {
      for (const at::Tensor& tensor : argument.toTensorVector()) function(tensor);
    }
  }
}

}  // namespace

const char kForwardMode[] = "forward-mode differentiation (torch.autograd.forward_ad, torch.func.jvp)";

std::string not_supported(std::string_view op, std::string_view what, std::string_view of) {
  return c10::str(op, ": ", what, " is not supported; ssm_kernels.reference.", reference_of(of.empty() ? op : of),
                  ", which is plain PyTorch, supports it");
}

bool has_tangent(at::TensorList tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) { return has_tangent(tensor); });
}

void set_error_node(const at::Tensor& result, const std::string& message, const torch::autograd::edge_list& inputs) {
  torch::autograd::set_history(result, make_error_node(message, inputs));
}

void rebase_to_error_node(const at::Tensor& written, const std::string& message, const torch::autograd::edge_list& inputs) {
  torch::autograd::rebase_history(written, make_error_node(message, inputs));
}

void below_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  bool is_dual = false;
  std::vector<at::Tensor> differentiated;
  for_each_tensor(arguments, [&](const at::Tensor& tensor) {
    is_dual = is_dual || has_tangent(tensor);
    if (at::GradMode::is_enabled() && tensor.requires_grad()) differentiated.push_back(tensor);
  });
  const std::string shown = is_dual || !differentiated.empty() ? public_name(op, arguments) : "";
  TORCH_CHECK_NOT_IMPLEMENTED(!is_dual, not_supported(shown, kForwardMode, composed_of(op, shown)));
  std::string message;
  torch::autograd::edge_list edges;
  if (!differentiated.empty()) {
    message = not_supported(shown, "double backward (a derivative of a gradient)", composed_of(op, shown));
    edges = torch::autograd::collect_next_edges(differentiated);
  }
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }
  if (differentiated.empty()) return;
  for_each_tensor(torch::jit::last(*stack, op.schema().returns().size()), [&](const at::Tensor& result) {
    if (result.is_floating_point()) set_error_node(result, message, edges);
  });
}

}  // namespace ssm_kernels
