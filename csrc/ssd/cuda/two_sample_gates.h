// Interface between the host code that makes the gates of rules with two input samples (two_sample_gates.cpp) and its kernels
// (two_sample_gates.cuh). ssd/aten/two_sample_gates.h has the formulas.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/discretization.h"
#include "common/kernel_abi.h"
#include "cuda/chunked/geometry.h"

namespace ssm_kernels::ssd {

// Steps of a thread, and threads of a block: warps have kGateSteps steps each, one after another, and lanes a head each.
constexpr int kGateSteps = 8, kGateWarps = 8;
constexpr int64_t kGateBlockSteps = kGateSteps * kGateWarps;

// All tensors with steps are in the order of the scan: in reverse, the views run backward. dt and lam are of one type, the
// others of fp32.
struct TwoSampleGateParams {
  int64_t batch = 0, seqlen = 0, heads = 0;
  Discretization discretization = Discretization::kFohRamp;
  bool dt_softplus = false, lam_sigmoid = false;
  // The first sample of a sequence is also the one before it; with `given`, except where that is nonzero.
  bool repeats_first = false;
  bool premultiplied = false;  // zeta, d A, is given in the place of an A for each step
  double dt_min = 0, dt_max = 0;
  const float *A = nullptr, *dt_bias = nullptr;       // (heads,), or null; A is null if steps have it
  const uint8_t *starts = nullptr, *given = nullptr;  // (batch, seqlen): whether a sequence begins at a step; or null
  cuda::chunked::RowsView dt, lam, A_of_steps;        // lam: null if the rule has none
  cuda::chunked::RowsView log_decay, gain, diagonal_gain;
};

// The adjoint. The parameters have the gates' gradients in the gates' place.
struct TwoSampleGateBwdParams : TwoSampleGateParams {
  // The gradients of zeta and of m d at the first step of each sequence, (sequences, heads), or null, and the sequence that
  // begins at each step, or -1, (batch, seqlen). Without the latter, sequence b begins at step 0 of row b.
  const float *first_zeta = nullptr, *first_previous = nullptr;
  const int* sequences = nullptr;
  cuda::chunked::RowsView grad_dt, grad_lam;  // of the type of dt; null if not needed
  cuda::chunked::RowsView grad_A;             // of an A for each step; null if not needed
  // (batch, blocks of kGateBlockSteps steps, heads); grad_A_parts of an A for each head.
  float *grad_A_parts = nullptr, *grad_bias_parts = nullptr;
};

// Instantiated for float, __half and __nv_bfloat16; with an A for each step, which callers convert the steps for, for float.
template <typename Scalar, bool has_A_of_steps>
SSM_KERNEL_API cudaError_t launch_two_sample_gates(const TwoSampleGateParams& params, cudaStream_t stream);
template <typename Scalar, bool has_A_of_steps>
SSM_KERNEL_API cudaError_t launch_two_sample_gates_bwd(const TwoSampleGateBwdParams& params, cudaStream_t stream);

SSM_KERNEL_STRUCT(TwoSampleGateParams, 272);
SSM_KERNEL_STRUCT(TwoSampleGateBwdParams, 408);

}  // namespace ssm_kernels::ssd
