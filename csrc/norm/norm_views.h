// Describes the tensors of a call by the kernels' views. Host code of norm_call.cpp and the operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "norm/norm.h"
#include "torch/checks.h"
#include "torch/tensor_data.h"

namespace ssm_kernels::norm {

inline bool is_accumulate(const at::Tensor& tensor) { return tensor.scalar_type() == accumulate_type(tensor.scalar_type()); }

// Describes the rows of all tensors of a call by two strides each. fill() copies an input whose rows need more strides or whose
// columns are not contiguous; an output like that is an error.
class Rows {
 public:
  explicit Rows(const char* op) : op_(op) {}

  void add(const at::Tensor& tensor, Access access, const char* name, RowsView& view) {
    entries_.push_back({tensor, access, name, &view});
  }
  void add(const std::optional<at::Tensor>& tensor, Access access, const char* name, RowsView& view) {
    if (is_present(tensor)) add(*tensor, access, name, view);
  }

  void fill(NormParams& params) {
    for (Entry& entry : entries_) {
      if (entry.tensor.size(-1) == 1 || entry.tensor.stride(-1) == 1) continue;
      check_is_read(entry);
      entry.tensor = entry.tensor.contiguous();
    }
    if (!merge(params)) {
      for (Entry& entry : entries_) {
        if (entry.access == Access::kRead) entry.tensor = entry.tensor.contiguous();
      }
      if (!merge(params)) {
        for (const Entry& entry : entries_) check_is_read(entry);
      }
    }
    for (const Entry& entry : entries_) {
      entry.view->data = data_of(entry.tensor, entry.access);
      entry.view->is_accumulate = is_accumulate(entry.tensor);
    }
  }

 private:
  struct Entry {
    at::Tensor tensor;
    Access access;
    const char* name;
    RowsView* view;
  };

  void check_is_read(const Entry& entry) const {
    TORCH_CHECK_VALUE(entry.access == Access::kRead || entry.tensor.is_contiguous(), op_, ": expected ", entry.name,
                      ", which is written to, to be a slice of a contiguous tensor, got strides ", entry.tensor.strides(),
                      " for shape ", entry.tensor.sizes());
  }

  // Fills the views in and returns true if the leading axes of all tensors merge into two.
  bool merge(NormParams& params) {
    const auto sizes = entries_[0].tensor.sizes();
    int64_t extents[2] = {1, 1};  // inner, outer
    for (Entry& entry : entries_) *entry.view = {};
    const auto stride_of = [](RowsView& view, int level) -> int64_t& {
      return level == 0 ? view.stride_inner : view.stride_outer;
    };
    int level = -1;
    for (int64_t axis = entries_[0].tensor.dim() - 2; axis >= 0; --axis) {
      if (sizes[axis] == 1) continue;
      bool continues = level >= 0;
      for (Entry& entry : entries_) {
        continues = continues && entry.tensor.stride(axis) == stride_of(*entry.view, level) * extents[level];
      }
      if (!continues) {
        if (++level > 1) return false;
        for (Entry& entry : entries_) stride_of(*entry.view, level) = entry.tensor.stride(axis);
      }
      extents[level] *= sizes[axis];
    }
    params.inner = extents[0];
    params.outer = extents[1];
    return true;
  }

  const char* op_;
  std::vector<Entry> entries_;
};

// Makes parameters contiguous, and keeps the copies alive.
class Parameters {
 public:
  ParameterView view(const std::optional<at::Tensor>& parameter) {
    if (!is_present(parameter)) return {};
    kept_.push_back(parameter->contiguous());
    return {data_of(kept_.back(), Access::kRead), is_accumulate(kept_.back())};
  }

 private:
  std::vector<at::Tensor> kept_;
};

}  // namespace ssm_kernels::norm
