// conv_bwd_of_product: which calls the CUDA kernel takes, their tiling, workspace and launch.

#include "mixers/conv_product.h"

#ifdef SSM_KERNELS_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstdlib>

#include "common/integers.h"
#include "cuda/device.h"
#include "mixers/cuda/conv_product.h"
#include "torch/allocation.h"
#endif

namespace ssm_kernels::mixers {

#ifdef SSM_KERNELS_WITH_CUDA
namespace {

using causal_conv1d::BwdOutInputs;
using causal_conv1d::ConvBwdParams;
using causal_conv1d::SequenceView;

// The kernel counts bytes from a batch row's begin by a 32-bit step and stride.
constexpr int64_t kMostNarrow = (int64_t(1) << 30) - 1024;

bool has_vectors(const SequenceView& view) {
  constexpr int64_t kVector = causal_conv1d::kLaneChannels, kBytes = ConvProductMemory::kBytes;
  return view.stride_channel == 1 && view.stride_step % kVector == 0 && view.stride_batch % kVector == 0 &&
         std::abs(view.stride_step) <= kMostNarrow && reinterpret_cast<int64_t>(view.data) % (kVector * kBytes) == 0;
}

bool has_kernel(const BwdOutInputs& bwd, const at::Tensor& rows, const at::Tensor& weight) {
  constexpr int64_t kBlock = 16;  // bytes of a copy, elements of half of one
  const at::Tensor& x = bwd.in.x;
  const auto starts_at_block = [](const at::Tensor& tensor) {
    return reinterpret_cast<int64_t>(tensor.const_data_ptr()) % kBlock == 0;
  };
  return x.is_cuda() && (x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf) && x.numel() > 0 &&
         x.size(1) <= kMostNarrow && x.size(2) % (kBlock / 2) == 0 && bwd.in.weight.size(1) == causal_conv1d::kMaxVectorWidth &&
         bwd.in.activation.has_value() && *bwd.in.activation == "silu" && is_present(bwd.grad_out) &&
         !is_present(bwd.grad_out_2) && !is_present(bwd.grad_final_state) && !is_present(bwd.in.initial_state) &&
         !is_present(bwd.in.seq_idx) && !is_present(bwd.in.cu_seqlens) && rows.scalar_type() == x.scalar_type() &&
         weight.scalar_type() == x.scalar_type() && rows.size(1) % kTermGroup == 0 && rows.is_contiguous() &&
         weight.stride(1) == 1 && weight.stride(0) % (kBlock / 2) == 0 && starts_at_block(rows) && starts_at_block(weight);
}

struct Plan {
  causal_conv1d::Tiling tiling;
  int warps = 0;  // none if a block does not fit
};

// Blocks of few warps divide a call more evenly; blocks of many share the weight in shared memory.
Plan make_plan(const ConvBwdParams& p, int terms, int device) {
  const cudaDeviceProp& properties = cuda::device_properties(device);
  // In steps: the products after a segment and the weight's copy.
  constexpr int64_t kOverhead = 24, kMinSteps = 16, kMaxSteps = 256;
  Plan plan;
  plan.tiling.channel_blocks = ceil_div(p.channels, int64_t(ConvProductMemory::kChannels));
  const int64_t rows = p.batch * plan.tiling.channel_blocks;
  int64_t least = 0;
  for (int warps = kMostBlockWarps; warps >= kMostBlockWarps / 2; warps /= 2) {
    const int bytes = ConvProductMemory(terms, warps).total;
    if (bytes > cuda::max_shared_bytes(device)) continue;
    const auto all = static_cast<int64_t>(properties.sharedMemPerMultiprocessor);
    const auto of_block = static_cast<int64_t>(bytes + properties.reservedSharedMemPerBlock);
    const int64_t of_multiprocessor = std::max<int64_t>(1, std::min<int64_t>(kProductWarps / warps, all / of_block));
    const int64_t resident = of_multiprocessor * properties.multiProcessorCount;
    const int64_t most = ceil_div(p.seqlen, kMinSteps * warps);
    for (int64_t tiles = std::max<int64_t>(1, ceil_div(p.seqlen, kMaxSteps * warps)); tiles <= most; ++tiles) {
      const int64_t steps = ceil_div(ceil_div(p.seqlen, tiles * warps), int64_t(kProductSteps)) * kProductSteps;
      // A wave's time is that of its warps' steps, as a multiprocessor's warps share its arithmetic.
      const int64_t found = ceil_div(rows * tiles, resident) * of_multiprocessor * warps * (steps + kOverhead);
      if (plan.warps > 0 && found >= least) continue;
      least = found;
      plan.warps = warps;
      plan.tiling.steps = steps;
      plan.tiling.tiles = ceil_div(p.seqlen, steps * warps);
    }
  }
  return plan;
}

}  // namespace

std::optional<causal_conv1d::BwdOutGrads> conv_bwd_of_product(const BwdOutInputs& bwd, const at::Tensor& rows,
                                                              const at::Tensor& weight) {
  if (!has_kernel(bwd, rows, weight)) return std::nullopt;
  const at::Tensor& x = bwd.in.x;
  causal_conv1d::BwdInputs call = bwd;
  call.grad_x = bwd.required_grad_x;
  const c10::cuda::CUDAGuard guard(x.device());
  causal_conv1d::check_inputs(bwd.in);
  causal_conv1d::GradTensors grads = causal_conv1d::allocate_bwd(call);
  ConvProductParams params;
  params.conv = causal_conv1d::make_bwd_params(call, bwd.grad_out, /*grad_out_2=*/std::nullopt, /*ids=*/{}, grads);
  params.rows = rows.const_data_ptr();
  params.weight = weight.const_data_ptr();
  params.weight_stride = weight.stride(0);
  params.terms = static_cast<int>(rows.size(1));
  const ConvBwdParams& p = params.conv;
  if (!has_vectors(p.x) || !has_vectors(p.grad_out) || !has_vectors(p.grad_x)) return std::nullopt;
  const Plan plan = make_plan(p, params.terms, x.get_device());
  if (plan.warps == 0 || p.batch * plan.tiling.tiles * plan.tiling.channel_blocks > kMostNarrow) return std::nullopt;
  at::Tensor sums;
  if (p.grad_weight != nullptr || p.grad_bias != nullptr) {
    sums = empty_tensor({p.batch * plan.tiling.tiles, p.width + 1, p.channels}, x.options().dtype(at::kFloat));
  }
  float* const workspace = sums.defined() ? sums.mutable_data_ptr<float>() : nullptr;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(x.scalar_type() == at::kHalf
                     ? launch_conv_product<__half>(params, plan.tiling, plan.warps, workspace, stream)
                     : launch_conv_product<__nv_bfloat16>(params, plan.tiling, plan.warps, workspace, stream));
  return causal_conv1d::BwdOutGrads{std::move(grads[causal_conv1d::kGradWeight]), std::move(grads[causal_conv1d::kGradBias]),
                                    std::move(grads[causal_conv1d::kGradInitialState])};
}
#else
std::optional<causal_conv1d::BwdOutGrads> conv_bwd_of_product(const causal_conv1d::BwdOutInputs&, const at::Tensor&,
                                                              const at::Tensor&) {
  return std::nullopt;
}
#endif

}  // namespace ssm_kernels::mixers
