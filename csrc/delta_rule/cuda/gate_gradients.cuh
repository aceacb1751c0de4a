// The gradients of the arguments g and beta, of A_log and of dt_bias, given those of log decays and of beta in fp32. A block
// takes kGateGradSteps steps of 32 heads; a warp has one of these steps at a time. The block writes its part of the sums of
// A_log and dt_bias over time in double, and the host adds the parts up.
#pragma once

#include "cuda/constants.h"
#include "delta_rule/cuda/gate_arguments.cuh"

namespace ssm_kernels::delta_rule {

constexpr int kGateGradWarps = 8, kGateGradThreads = kGateGradWarps * cuda::kWarpSize;

template <typename Scalar>
__global__ void __launch_bounds__(kGateGradThreads)
    delta_rule_gate_grads_kernel(const __grid_constant__ DeltaRuleGateGradsParams p) {
  __shared__ double sums[2][kGateGradWarps][cuda::kWarpSize];
  const unsigned head_blocks = static_cast<unsigned>((p.heads + cuda::kWarpSize - 1) / cuda::kWarpSize);
  const int lane = threadIdx.x % cuda::kWarpSize, warp = threadIdx.x / cuda::kWarpSize;
  const int64_t block = blockIdx.x / head_blocks, head = int64_t(blockIdx.x % head_blocks) * cuda::kWarpSize + lane;
  double of_A_log = 0, of_bias = 0;
#pragma unroll 4
  for (int i = warp; i < kGateGradSteps; i += kGateGradWarps) {
    const int64_t place = block * kGateGradSteps + i;
    if (place >= p.steps || head >= p.heads) continue;
    const int64_t batch = place / p.seqlen, step = place - batch * p.seqlen;
    if (p.grad_log_decay.data != nullptr) {
      const float gate = argument_at<Scalar>(p.raw_gate, p.gate_is_fp32, batch, step, head);
      RawGateGrad grad = {fp32_at(p.grad_log_decay, batch, step, head), 0};
      if (p.options.has_raw_gate) {
        const GateOfHead of_head(p.options, head);
        visit_gate(p.options, [&](auto is_bounded) { grad = RawGateGrad::of<is_bounded>(p.options, of_head, gate, grad.raw); });
      }
      put_argument<Scalar>(p.grad_raw_gate, p.gate_is_fp32, batch, step, head, grad.raw);
      of_A_log += grad.A_log;
      of_bias += grad.raw;
    }
    if (p.grad_beta.data != nullptr) {
      float grad = fp32_at(p.grad_beta, batch, step, head);
      if (p.options.beta_sigmoid) {
        const float beta = sigmoid(argument_at<Scalar>(p.raw_beta, p.beta_is_fp32, batch, step, head));
        grad *= (p.options.allow_neg_eigval ? 2.0f : 1.0f) * beta * (1.0f - beta);
      }
      put_argument<Scalar>(p.grad_raw_beta, p.beta_is_fp32, batch, step, head, grad);
    }
  }
  if (p.sums == nullptr) return;
  sums[0][warp][lane] = of_A_log;
  sums[1][warp][lane] = of_bias;
  __syncthreads();
  if (warp >= 2 || head >= p.heads) return;
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kGateGradWarps; ++i) sum += sums[warp][i][lane];
  p.sums[(block * 2 + warp) * p.heads + head] = sum;
}

}  // namespace ssm_kernels::delta_rule
