// The end of a layer after its scan, which mixers share: the norm of each head with its gate, and the out-projection.
//
//   out = norm(y) a(z) or, without norm_weight, y   (batch, seqlen, columns)
//   out = out weight^T + bias, with the weight of the out-projection
//
// Backward writes the input of the out-projection again instead of keeping it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <string_view>

#include "norm/norm_call.h"
#include "torch/checks.h"

namespace ssm_kernels::mixers {

struct NormedProjection {
  std::optional<at::Tensor> z, norm_weight, norm_bias, proj_weight, proj_bias;
  c10::SymInt row_size = 0;  // consecutive columns that the norm takes as a row
  norm::OptionalSize group_size;
  bool subtract_mean = false;
  double eps = 0;
  bool norm_before_gate = false;
  std::string_view activation;
  // Under autocast: forward and backward cast the projection's parameters each for itself, so that no copies are kept.
  bool casts_projection = false;

  bool has_norm() const { return is_present(norm_weight); }
  bool projects() const { return is_present(proj_weight); }

  struct Outputs {
    at::Tensor out, rstd, mean;  // the statistics have no elements without a norm, and the mean none unless it is subtracted
  };
  // y is (batch, seqlen, heads, columns of a head).
  Outputs forward(const at::Tensor& y) const;

  struct Needs {
    bool y = false, z = false, norm_weight = false, norm_bias = false, proj_weight = false, proj_bias = false;

    bool any_before_projection() const { return y || z || norm_weight || norm_bias; }
  };
  // Whether backward reads y.
  bool reads_y(const Needs& needs) const { return needs.proj_weight || (has_norm() && needs.any_before_projection()); }
  // Those not needed are undefined. That of y is (batch, seqlen, columns), and undefined too without grad_out.
  struct Grads {
    at::Tensor y, z, norm_weight, norm_bias, proj_weight, proj_bias;
  };
  // Without grad_out that of out is zero. The tensors are released when they have been read.
  Grads backward(std::optional<at::Tensor> grad_out, at::Tensor y, const at::Tensor& rstd, const at::Tensor& mean,
                 const Needs& needs) const;

 private:
  at::Tensor in_rows(const at::Tensor& columns) const;
  norm::GatedInputs norm_inputs(const at::Tensor& rows) const;
  norm::GatedOutputs normalize(const at::Tensor& y) const;
  // The weight or the bias as the product with `columns` takes it.
  at::Tensor in_product(const at::Tensor& parameter, const at::Tensor& columns) const;
};

}  // namespace ssm_kernels::mixers
