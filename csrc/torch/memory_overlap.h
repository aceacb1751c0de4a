// The check of a tensor that an operator updates in place. PyTorch's own check gives no answer for tensors with gaps.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <optional>

namespace ssm_kernels {

// An argument of a call and its name; no tensor if it is absent.
struct NamedTensor {
  const char* name;
  const at::Tensor* tensor;

  NamedTensor(const char* name, const at::Tensor& tensor) : name(name), tensor(&tensor) {}
  NamedTensor(const char* name, const std::optional<at::Tensor>& tensor)
      : name(name), tensor(tensor.has_value() ? &*tensor : nullptr) {}
};

// Raises if two elements of `written` share memory, or if it shares memory with an input, which may be read after the write.
void check_in_place(const char* op, const char* name, const at::Tensor& written, at::ArrayRef<NamedTensor> inputs);

}  // namespace ssm_kernels
