// Selective scan, forward, on CUDA: sequential in time, parallel over channels and states.
//
//   delta_t = softplus?(delta_raw_t + delta_bias)                       u, delta, z, out: (batch, dim, seqlen)
//   h_t     = Abar(delta_t A) h_{t-1} + delta_t k(delta_t A) B_t u_t    h: (batch, dim, dstate)
//   out_t   = (<C_t, h_t> + D u_t) silu(z_t)
//
// Saved for backward: the state at every chunk boundary. sequential.h describes tiles, lanes and states per lane. A block has
// producer and consumer warps, which synchronize once a tile:
// * Producers load a tile and store delta, the input and the widened rows of B and C in shared memory.
// * Consumers advance their states through the tile, kGroupSteps steps between loads, and store their partial sums of <C_t,
// h_t>.
// * Producers add the partial sums and D u, apply the gate, and write out, while the consumers scan the next tile.
// The input is a multiple of u or delta u: sequential_step.cuh has the methods.
//
// Shared memory holds two buffers of a tile. Rows may start at any element: sequential_tile.cuh has the accesses. The partial
// sums of two state lanes overwrite delta and the input: all lanes of a warp have read a group of steps before one stores its
// sums.
//
// Three limits are close to each other: the special function unit (one exponential per state and step, 16 a clock and
// multiprocessor), shared memory's bandwidth to registers (32 values a clock), and the issue rate.
#pragma once

#include "selective_scan/cuda/sequential_fwd_consumer.cuh"
#include "selective_scan/cuda/sequential_fwd_producer.cuh"

namespace ssm_kernels::selective_scan::sequential {

template <typename Scalar>
using FwdTileConfig = TileConfig<Scalar, fwd_tile_steps(sizeof(Scalar))>;

template <typename Scalar, typename Method>
__global__ void __launch_bounds__(FwdTileConfig<Scalar>::kThreads, kResidentBlocks)
    sequential_fwd_kernel(const __grid_constant__ SelectiveScanFwdParams params, const __grid_constant__ ScanPlan plan) {
  using C = FwdTileConfig<Scalar>;
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  const FwdShared<C> shared(memory, params);
  begin_block<C, FwdRows<Scalar>>(params, plan, shared);
  if (threadIdx.x < C::kConsumers) {
    if constexpr (std::is_same_v<Method, RareMethod>) {
      visit_method<Method>(params, [&](auto method) { FwdConsumer<C, decltype(method)>(params, method, shared).run(); });
    } else {
      FwdConsumer<C, Method>(params, Method(), shared).run();
    }
  } else {
    FwdProducer<C, Method>(params, plan, shared).run();
  }
}

template <typename Scalar>
__global__ void __launch_bounds__(FwdTileConfig<Scalar>::kThreads, kResidentBlocks)
    sequential_further_fwd_kernel(const __grid_constant__ SelectiveScanFwdParams params, const __grid_constant__ ScanPlan plan,
                                  const __grid_constant__ MethodParameters parameters) {
  using C = FwdTileConfig<Scalar>;
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  const FwdShared<C> shared(memory, params);
  begin_block<C, FwdRows<Scalar>>(params, plan, shared);
  if (threadIdx.x < C::kConsumers) {
    visit_method<FurtherMethod>(params, parameters,
                                [&](auto method) { FwdConsumer<C, decltype(method)>(params, method, shared).run(); });
  } else {
    FwdProducer<C, FurtherMethod>(params, plan, shared).run();
  }
}

template <typename Scalar>
int64_t shared_bytes(const SelectiveScanFwdParams& params) {
  return FwdShared<FwdTileConfig<Scalar>>(nullptr, params).bytes;
}

// Forward has no segments.
template <typename Scalar, typename Method>
cudaError_t launch_fwd(const SelectiveScanFwdParams& params, const ScanPlan& plan, cudaStream_t stream) {
  return launch_blocks(sequential_fwd_kernel<Scalar, OwnOrRareMethod<Method>>, FwdTileConfig<Scalar>::kThreads,
                       shared_bytes<Scalar>(params), stream, params, plan);
}

template <typename Scalar>
cudaError_t launch_further_fwd(const SelectiveScanFwdParams& params, const MethodParameters& parameters, const ScanPlan& plan,
                               cudaStream_t stream) {
  return launch_blocks(sequential_further_fwd_kernel<Scalar>, FwdTileConfig<Scalar>::kThreads, shared_bytes<Scalar>(params),
                       stream, params, plan, parameters);
}

}  // namespace ssm_kernels::selective_scan::sequential
