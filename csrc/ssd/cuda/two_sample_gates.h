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

// All tensors with steps are in the order of the scan: in reverse, the views run backward. dt and lam are of the inputs' type,
// log_decay, gain and diagonal_gain of fp32.
struct TwoSampleGateParams {
  int64_t batch = 0, seqlen = 0, heads = 0;
  Discretization discretization = Discretization::kFohRamp;
  bool dt_softplus = false, lam_sigmoid = false;
  // The first sample of a sequence is also the one before it; with `given`, except where that is nonzero.
  bool repeats_first = false;
  double dt_min = 0, dt_max = 0;
  const float *A = nullptr, *dt_bias = nullptr;       // (heads,); dt_bias or null
  const uint8_t *starts = nullptr, *given = nullptr;  // (batch, seqlen): whether a sequence begins at a step; or null
  cuda::chunked::RowsView dt, lam;                    // lam: null if the rule has none
  cuda::chunked::RowsView log_decay, gain, diagonal_gain;
};

// The adjoint. The parameters have the gates' gradients in the gates' place.
struct TwoSampleGateBwdParams : TwoSampleGateParams {
  // The gradients of zeta and of m d at the first step of each sequence, (sequences, heads), or null, and the sequence that
  // begins at each step, or -1, (batch, seqlen). Without the latter, sequence b begins at step 0 of row b.
  const float *first_zeta = nullptr, *first_previous = nullptr;
  const int* sequences = nullptr;
  cuda::chunked::RowsView grad_dt, grad_lam;                  // of the inputs' type; null if not needed
  float *grad_A_parts = nullptr, *grad_bias_parts = nullptr;  // (batch, blocks of kGateBlockSteps steps, heads)
};

// Instantiated for float, __half and __nv_bfloat16.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_two_sample_gates(const TwoSampleGateParams& params, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_two_sample_gates_bwd(const TwoSampleGateBwdParams& params, cudaStream_t stream);

SSM_KERNEL_STRUCT(TwoSampleGateParams, 240);
SSM_KERNEL_STRUCT(TwoSampleGateBwdParams, 344);

}  // namespace ssm_kernels::ssd
