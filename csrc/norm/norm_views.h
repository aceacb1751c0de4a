// Describes the tensors of a call by the kernels' views. Host code of norm_call.cpp and the operators.
#pragma once

#include <ATen/DimVector.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/Tensor.h>
#include <c10/util/accumulate.h>

#include <algorithm>
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

  // Fills the views in and returns true if the leading axes of all tensors merge into two, at the same axis.
  bool merge(NormParams& params) {
    const at::IntArrayRef sizes = entries_[0].tensor.sizes(), leading = sizes.slice(0, sizes.size() - 1);
    const auto merges_at = [&](size_t axis) {
      params.outer = c10::multiply_integers(leading.slice(0, axis));
      params.inner = c10::multiply_integers(leading.slice(axis));
      return std::all_of(entries_.begin(), entries_.end(), [&](const Entry& entry) {
        const auto strides =
            at::detail::computeStride(sizes, entry.tensor.strides(), at::DimVector{params.outer, params.inner, sizes.back()});
        if (strides.has_value()) *entry.view = {nullptr, (*strides)[0], (*strides)[1]};
        return strides.has_value();
      });
    };
    for (size_t axis = 0; axis <= leading.size(); ++axis) {
      if (merges_at(axis)) return true;
    }
    return false;
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
