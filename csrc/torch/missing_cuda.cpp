// A boxed kernel: one function serves every operator, whatever its arguments.

#include "torch/missing_cuda.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "torch/arguments.h"

namespace ssm_kernels {
namespace {

// Raises if the tensors are on several devices: one CUDA tensor among CPU tensors is dispatched here too.
void check_one_device(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack.size() - arguments.size();
  const at::Tensor* like = nullptr;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = stack[first + i];
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const at::Tensor& tensor = value.toTensor();
    if (like == nullptr) like = &tensor;
    TORCH_CHECK(tensor.device() == like->device(), public_name(op), ": expected ", arguments[i].name(), " on ", like->device(),
                " like the other tensors, got ", tensor.device());
  }
}

}  // namespace

void built_without_cuda(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_one_device(op, *stack);
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, public_name(op),
      ": expected CPU tensors, as ssm_kernels was built without CUDA kernels, got CUDA tensors. In the folder of its sources, "
      "`FORCE_CUDA=1 pip install --no-deps -e .` builds them; run `python -m ssm_kernels` to see what was built");
}

}  // namespace ssm_kernels
