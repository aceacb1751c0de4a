// Launches the kernels of a call. Included by instantiations/*.cu, one per dtype.
#pragma once

#include <type_traits>

#include "causal_conv1d/cuda/bwd_reduce.cuh"
#include "causal_conv1d/cuda/channels_first.cuh"
#include "causal_conv1d/cuda/channels_first_shifted.cuh"
#include "causal_conv1d/cuda/channels_last_bwd.cuh"
#include "causal_conv1d/cuda/channels_last_fwd.cuh"
#include "causal_conv1d/cuda/channels_last_run_fwd.cuh"
#include "causal_conv1d/cuda/general.cuh"
#include "causal_conv1d/cuda/update.cuh"
#include "cuda/launch.cuh"

namespace ssm_kernels::causal_conv1d {

constexpr int kThreads = kWarpSize * kWarps;

inline unsigned blocks_for(int64_t count, int64_t threads) { return static_cast<unsigned>((count + threads - 1) / threads); }
inline unsigned channels_last_blocks(const ConvParams& p, const Tiling& tiling) {
  return static_cast<unsigned>(p.batch * tiling.tiles * tiling.channel_blocks);
}
inline unsigned channels_first_blocks(const ConvParams& p, const Tiling& tiling) {
  return blocks_for(p.batch * p.channels * tiling.tiles, kWarps * (kWarpSize >> tiling.log_row_lanes));
}
template <typename Scalar>
cudaError_t launch_fwd(const ConvFwdParams& params, KernelSet set, const Tiling& tiling, cudaStream_t stream) {
  if constexpr (!std::is_same_v<Scalar, double>) {
    if (set == KernelSet::kChannelsLastRuns) {
      // As many batch rows as a grid has blocks along its third axis.
      for (int64_t first = 0; first < params.batch; first += kMostGridBlocks) {
        const int64_t rows = params.batch - first < kMostGridBlocks ? params.batch - first : kMostGridBlocks;
        const dim3 blocks(static_cast<unsigned>(tiling.channel_blocks), static_cast<unsigned>(tiling.tiles),
                          static_cast<unsigned>(rows));
        const ConvRunParams run(params, tiling, sizeof(Scalar), first);
        conv_fwd_channels_last_run_kernel<Scalar><<<blocks, kThreads, 0, stream>>>(run);
      }
      return cudaGetLastError();
    }
    if (set == KernelSet::kChannelsLast || set == KernelSet::kChannelsLastShifted) {
      const auto kernel = set == KernelSet::kChannelsLast ? &conv_fwd_channels_last_kernel<Scalar, false, false>
                          : is_specialized(params)        ? &conv_fwd_channels_last_kernel<Scalar, true, true>
                                                          : &conv_fwd_channels_last_kernel<Scalar, false, true>;
      kernel<<<channels_last_blocks(params, tiling), kThreads, 0, stream>>>(params, tiling);
      return cudaGetLastError();
    }
    if (set == KernelSet::kChannelsFirst || set == KernelSet::kChannelsFirstShifted) {
      const auto kernel = set == KernelSet::kChannelsFirst ? &conv_fwd_channels_first_kernel<Scalar>
                                                           : &conv_fwd_channels_first_shifted_kernel<Scalar>;
      kernel<<<channels_first_blocks(params, tiling), kThreads, 0, stream>>>(params, tiling);
      return cudaGetLastError();
    }
  }
  const int64_t elements = params.batch * params.seqlen * params.channels;
  conv_fwd_general_kernel<Scalar><<<blocks_for(elements, kGeneralThreads), kGeneralThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

template <typename Scalar>
cudaError_t launch_bwd_reduce(const ConvBwdParams& params, const void* sums, int64_t tiles, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(TileSums::blocks((params.width + 1) * params.channels));
  const auto* const rows = static_cast<const AccumulateType<Scalar>*>(sums);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  const auto reduce = &conv_bwd_reduce_kernel<Scalar>;
  return cuda::launch<ConvBwdParams, const AccumulateType<Scalar>*, int64_t>(reduce, blocks, TileSums::kThreads, 0, stream,
                                                                             cuda::has_pdl(reduce), params, rows, tiles);
}

template <typename Scalar>
cudaError_t launch_bwd(const ConvBwdParams& params, KernelSet set, const Tiling& tiling, const BwdWorkspace& workspace,
                       cudaStream_t stream) {
  using Acc = AccumulateType<Scalar>;
  Acc* const sums = static_cast<Acc*>(workspace.sums);
  const auto launch_tiles = [&] {
    if constexpr (!std::is_same_v<Scalar, double>) {
      if (set == KernelSet::kChannelsLast || set == KernelSet::kChannelsLastShifted) {
        const bool is_shifted = set == KernelSet::kChannelsLastShifted;
        void (*kernel)(ConvBwdParams, Tiling, Acc*) = is_shifted ? &conv_bwd_channels_last_kernel<Scalar, false, false, true>
                                                                 : &conv_bwd_channels_last_kernel<Scalar, false, false, false>;
        if (params.grad_out_2.data != nullptr) {
          kernel = &conv_bwd_channels_last_kernel<Scalar, true, true, false>;
        } else if (is_specialized(params) && params.grad_x.data != nullptr) {
          kernel = is_shifted ? &conv_bwd_channels_last_kernel<Scalar, true, false, true>
                              : &conv_bwd_channels_last_kernel<Scalar, true, false, false>;
        }
        return kernel<<<channels_last_blocks(params, tiling), kThreads, 0, stream>>>(params, tiling, sums);
      }
      if (set == KernelSet::kChannelsFirst || set == KernelSet::kChannelsFirstShifted) {
        const auto kernel = set == KernelSet::kChannelsFirst ? &conv_bwd_channels_first_kernel<Scalar>
                                                             : &conv_bwd_channels_first_shifted_kernel<Scalar>;
        return kernel<<<channels_first_blocks(params, tiling), kThreads, 0, stream>>>(params, tiling, sums);
      }
    }
    const unsigned blocks = blocks_for(params.batch * params.seqlen * params.channels, kGeneralThreads);
    conv_bwd_pre_general_kernel<Scalar><<<blocks, kGeneralThreads, 0, stream>>>(params, workspace.grad_pre);
    if (params.grad_x.data != nullptr) {
      conv_bwd_x_general_kernel<Scalar><<<blocks, kGeneralThreads, 0, stream>>>(params, workspace.grad_pre);
    }
    if (sums != nullptr) {
      const int64_t count = params.batch * tiling.tiles * (params.width + 1) * params.channels;
      conv_bwd_sums_general_kernel<Scalar>
          <<<blocks_for(count, kGeneralThreads), kGeneralThreads, 0, stream>>>(params, tiling, workspace.grad_pre, sums);
    }
  };
  if (params.seqlen > 0 && params.batch > 0) {
    launch_tiles();
    if (params.grad_initial_state.data != nullptr) {
      const int64_t count = params.batch * (params.ids.data == nullptr ? 1 : params.seqlen) * params.channels;
      conv_bwd_initial_kernel<Scalar><<<blocks_for(count, kGeneralThreads), kGeneralThreads, 0, stream>>>(params);
    }
  }
  if (sums == nullptr) return cudaGetLastError();
  return launch_bwd_reduce<Scalar>(params, sums, params.batch * tiling.tiles, stream);
}

template <typename Scalar>
cudaError_t launch_update(const ConvUpdateParams& params, const ConvTokenParams* tokens, cudaStream_t stream) {
  const unsigned blocks = blocks_for(params.batch * params.channels, kUpdateThreads);
  if (tokens == nullptr) {
    conv_update_kernel<Scalar><<<blocks, kUpdateThreads, 0, stream>>>(params);
  } else {
    conv_update_tokens_kernel<Scalar><<<blocks, kUpdateThreads, 0, stream>>>(params, *tokens);
  }
  return cudaGetLastError();
}

#define SSM_INSTANTIATE_CAUSAL_CONV1D(Scalar)                                                                                 \
  template cudaError_t launch_fwd<Scalar>(const ConvFwdParams&, KernelSet, const Tiling&, cudaStream_t);                      \
  template cudaError_t launch_bwd<Scalar>(const ConvBwdParams&, KernelSet, const Tiling&, const BwdWorkspace&, cudaStream_t); \
  template cudaError_t launch_bwd_reduce<Scalar>(const ConvBwdParams&, const void*, int64_t, cudaStream_t);                   \
  template cudaError_t launch_update<Scalar>(const ConvUpdateParams&, const ConvTokenParams*, cudaStream_t);

}  // namespace ssm_kernels::causal_conv1d
