// SSD on CUDA: the states that the scan of a span leaves, for context parallelism and for backward in spans (launch_bwd.cpp).
// Forward in time these are the final states. Backward in time they are the gradient of the states before the span, from the
// gradients of its outputs.
//
// The launch has two kernels. The first is backward's state pass in one direction (state_passing.cuh, StatesPass::kBwdSummary):
// it splits each work tile into segments along time and stores the summaries of all of them, and no state before a chunk. The
// second, below, folds the summaries in scan order into the initial states, or zero, and stores the states as (batch, heads,
// headdim, dstate).
#pragma once

#include "cuda/chunked/state_passing.cuh"
#include "ssd/cuda/discretized_gates.cuh"
#include "ssd/cuda/log_gates.cuh"
#include "ssd/cuda/state_operands.cuh"

namespace ssm_kernels::ssd {

// A block has kBlockColumns columns of a state tile.
constexpr int kBlockColumns = 8;

template <int columns>
static __global__ void __launch_bounds__(kWarpgroupThreads)
    ssd_fold_summaries_kernel(const __grid_constant__ SsdBwdParams p, const __grid_constant__ WorkPartition work,
                              float* states) {
  constexpr int kBlocks = columns / kBlockColumns;
  const int tile = static_cast<int>(blockIdx.x) / kBlocks, block = static_cast<int>(blockIdx.x) % kBlocks;
  const WorkSpan at(p, work, tile / kWarpgroups);
  StateTile state_tile(p, work, at, tile % kWarpgroups);
  if (!state_tile.is_there()) return;
  state_tile.first_column += block * kBlockColumns;
  const int tiles = static_cast<int>(work.work_tiles) * kWarpgroups;  // from one segment of a work tile to the next
  const FragmentLane lane;
  State<kBlockColumns> state;
  state.load(p, states_of(p, p.initial_states, at.entry), state_tile, lane);
  SegmentSummaries<columns, ScalarMap>{work.states, work.maps}.fold_into(state, tile, tiles * work.segments, tiles, block);
  state.store(p, states_of(p, states, at.entry), state_tile, lane);
}

template <typename Gates>
cudaError_t launch_ssd_span_states_of(const typename Gates::BwdParams& params, const WorkPartition& partition, float* states,
                                      Products products, int max_shared_bytes, cudaStream_t stream) {
  using Scalar = typename Gates::Scalar;
  return visit_kernels<Scalar, kStateColumns>(params.dstate, products, [&](auto columns, auto mma) -> cudaError_t {
    using Mma = decltype(mma);
    constexpr int kColumns = decltype(columns)::value;
    using Summaries = SsdStatePassing<Scalar, kColumns, StatesPass::kBwdSummary, Mma, Gates>;
    const int available = Mma::kIsAsync ? kSm90SharedBytes : max_shared_bytes;
    const cudaError_t error =
        launch_state_passing<Summaries>(partition.work_tiles * partition.segments, available, stream, params, partition);
    if (error != cudaSuccess) return error;
    const SsdBwdParams& without_gates = params;
    return cuda::launch(ssd_fold_summaries_kernel<kColumns>, partition.work_tiles * kWarpgroups * (kColumns / kBlockColumns),
                        kWarpgroupThreads, 0, stream, /*uses_pdl=*/false, without_gates, partition, states);
  });
}
template <typename Scalar>
cudaError_t launch_ssd_span_states(const SsdBwdParams& params, const WorkPartition& partition, float* states, Products products,
                                   int max_shared_bytes, cudaStream_t stream) {
  check_known(params.discretization);
  return launch_ssd_span_states_of<DiscretizedGates<Scalar>>(params, partition, states, products, max_shared_bytes, stream);
}
template <typename Scalar>
cudaError_t launch_ssd_span_states(const SsdLogBwdParams& params, const WorkPartition& partition, float* states,
                                   Products products, int max_shared_bytes, cudaStream_t stream) {
  return launch_ssd_span_states_of<LogGates<Scalar>>(params, partition, states, products, max_shared_bytes, stream);
}

}  // namespace ssm_kernels::ssd
