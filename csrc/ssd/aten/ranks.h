// The inputs and outputs of the ranks of a scan (Ranks in ssd_op.h), and their adjoint, for a run of chunked_scan.cpp:
//
//   v^r = x * x^r       u^r = y^r, or rms(y^r) norm_weight       out = sum_r out^r * u^r * silu(z * z^r)
//
// y^r has D v^r. The gate is absent without z. Gradients of factors are added to sums in float64.
#pragma once

#include "ssd/aten/layout.h"

namespace ssm_kernels::ssd {

// `out` by step, (chunks, rows, steps, groups, heads of a group, headdim), from the samples y.
at::Tensor sum_of_ranks(const Scan& scan, const Run& run, const at::Tensor& y);

// The gradient of y, from those of `out` by step; writes that of z where grad_z has elements.
at::Tensor sum_of_ranks_adjoint(const Scan& scan, const Run& run, const at::Tensor& y, const at::Tensor& grad_out,
                                const at::Tensor& grad_z, const RankGrads& grads);

// The gradient of x by step, from that of the samples v.
at::Tensor input_of_ranks_adjoint(const Scan& scan, const Run& run, const at::Tensor& grad_v, const RankGrads& grads);

}  // namespace ssm_kernels::ssd
