#include "torch/batched_gradients.h"

#include <ATen/LegacyBatchedTensorImpl.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace ssm_kernels {
namespace {

// Replaces each tensor of the arguments, those in lists included, by function(tensor).
template <typename Function>
std::vector<c10::IValue> map_tensors(const std::vector<c10::IValue>& arguments, const Function& function) {
  std::vector<c10::IValue> result;
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor() && argument.toTensor().defined()) {
      result.emplace_back(function(argument.toTensor()));
    } else if (argument.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : argument.toTensorVector()) list.push_back(function(tensor));
      result.emplace_back(std::move(list));
    } else {
      result.push_back(argument);
    }
  }
  return result;
}

// The axis of the samples of this vmap in a batched tensor's value; -1 if it has none.
int64_t axis_of(const at::Tensor& tensor, int64_t level) {
  const at::BatchedTensorImpl* batched = at::maybeGetBatchedImpl(tensor);
  if (batched == nullptr) return -1;
  for (const at::BatchDim& dim : batched->bdims()) {
    if (dim.level() == level) return dim.dim();
  }
  return -1;
}

// One sample of a tensor; the tensor itself, if this vmap does not map it. Without samples, zeros in the shape of one.
at::Tensor select_sample(const at::Tensor& tensor, int64_t level, int64_t sample) {
  const int64_t axis = axis_of(tensor, level);
  if (axis < 0) return tensor;
  const at::BatchedTensorImpl* batched = at::maybeGetBatchedImpl(tensor);
  at::Tensor value = batched->value();
  if (value.size(axis) == 0) {
    std::vector<int64_t> shape = value.sizes().vec();
    shape.erase(shape.begin() + axis);
    value = at::zeros(shape, value.options());
  } else {
    value = value.select(axis, sample);
  }
  at::BatchDims others;
  for (const at::BatchDim& dim : batched->bdims()) {
    if (dim.level() != level) others.emplace_back(dim.level(), dim.dim() - (dim.dim() > axis));
  }
  return others.empty() ? value : at::makeBatched(std::move(value), std::move(others));
}

}  // namespace

void call_each_sample(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::vector<c10::IValue> arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  int64_t level = -1, samples = 0;
  map_tensors(arguments, [&](const at::Tensor& tensor) {
    if (const at::BatchedTensorImpl* batched = at::maybeGetBatchedImpl(tensor)) {
      const at::BatchDim& innermost = batched->bdims().back();
      if (innermost.level() > level) {
        level = innermost.level();
        samples = batched->value().size(innermost.dim());
      }
    }
    return tensor;
  });
  std::vector<std::vector<at::Tensor>> results(op.schema().returns().size());
  for (int64_t sample = 0; sample < std::max<int64_t>(samples, 1); ++sample) {
    torch::jit::Stack call =
        map_tensors(arguments, [&](const at::Tensor& tensor) { return select_sample(tensor, level, sample); });
    op.callBoxed(&call);
    for (size_t i = 0; i < results.size(); ++i) results[i].push_back(call[i].toTensor());
  }
  for (const std::vector<at::Tensor>& column : results) {
    at::Tensor stacked = at::stack(column);
    if (samples == 0) stacked = stacked.narrow(0, 0, 0);
    torch::jit::push(*stack, at::addBatchDim(std::move(stacked), level, /*dim=*/0));
  }
}

}  // namespace ssm_kernels
