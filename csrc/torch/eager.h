// Whether a call runs eagerly on plain tensors: only then may it reuse the memory of tensors that nothing else refers to.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <tuple>

#include "torch/checks.h"

namespace ssm_kernels {

// Whether a tensor is undefined or a plain one with memory: no subclass, not fake, functional, batched or lazily negated.
inline bool is_plain_tensor(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kPlain({c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::ADInplaceOrView,
                                        c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA,
                                        c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA});
  return !tensor.defined() || (kPlain | tensor.key_set()) == kPlain;
}

template <typename Tensors>
bool are_plain(const Tensors& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!is_plain_tensor(tensor)) return false;
  }
  return true;
}

// The same for each of a tuple of tensors, some of them optional.
template <typename Tuple>
bool has_plain_tensors(const Tuple& tensors) {
  return std::apply([](const auto&... tensor) { return (is_plain_tensor(or_undefined(tensor)) && ...); }, tensors);
}

// Whether backward's operators record second derivatives, or tangents: a level of forward-mode differentiation is entered.
inline bool records_derivatives() {
  return at::GradMode::is_enabled() || torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
}

// Whether operators are neither traced nor record derivatives.
inline bool runs_eagerly() { return !c10::impl::dispatch_mode_enabled() && !records_derivatives(); }

// Whether backward, called by the engine, frees the tensors that forward has saved, and so may write to those that only it
// reads.
inline bool frees_saved_tensors() { return !torch::autograd::get_current_graph_task_keep_graph(); }

// Whether this is the only reference to a tensor and to its memory, which may then be written to.
inline bool is_sole_owner(const at::Tensor& tensor) {
  return tensor.use_count() == 1 && tensor.has_storage() && tensor.storage().use_count() == 1;
}

}  // namespace ssm_kernels
