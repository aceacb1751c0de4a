// The part of a call that a block of the warp, sequential and short scans computes, its rows, and launches of such blocks.
#pragma once

#include <type_traits>

#include "cuda/launch.cuh"
#include "cuda/opaque.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/vector_io.cuh"
#include "selective_scan/cuda/launch.h"

namespace ssm_kernels::selective_scan {

using cuda::AccumulateType;
using cuda::from_accumulate;
using cuda::opaque;
using cuda::to_accumulate;
using cuda::Vector;

static_assert(kVectorBytes == cuda::kCpAsyncBytes, "tiles are filled by asynchronous copies of one vector");

template <typename T>
constexpr int kVectorSize = kVectorBytes / static_cast<int>(sizeof(T));

// The thread's index, opaque: addresses that follow from it are computed again for each tile instead of occupying registers
// from tile to tile.
__device__ __forceinline__ int opaque_thread() { return opaque(static_cast<int>(threadIdx.x)); }

// A block's row, channels and steps. It is kept in shared memory and read on use, so it occupies no registers.
struct Position {
  int64_t row, segment, tile;
  int64_t first_channel;
  int channels;
  bool is_packed;
  // The row's batch row and its first step there, and its states, as ScanRow has them.
  int64_t batch, first_step, initial, last;
  // The steps of the block's segment, counted from the row's first.
  int64_t begin, end;
  // The place of the state before the row's first step among the saved states, and the number of states that have places from
  // there on. A packed row does not save the first.
  int64_t chunk_states, saved_states;

  __device__ __forceinline__ Position(const SelectiveScanParams& p, const ChannelPartition& partition, int64_t block) {
    const int64_t row_and_segment = block / partition.tiles;
    tile = block - row_and_segment * partition.tiles;
    row = row_and_segment / partition.launched_segments;
    segment = partition.first_segment + row_and_segment - row * partition.launched_segments;
    const int64_t group = tile / partition.tiles_per_group;
    const int64_t in_group = (tile - group * partition.tiles_per_group) * partition.block_channels;
    first_channel = group * partition.group_channels + in_group;
    channels = static_cast<int>(min(partition.group_channels - in_group, int64_t(partition.block_channels)));
    is_packed = p.is_packed();
    const ScanRow scanned = p.row(row);
    batch = scanned.batch;
    first_step = scanned.begin;
    initial = scanned.initial;
    last = scanned.last;
    const int64_t steps = scanned.end - scanned.begin;
    begin = segment * partition.segment_steps;
    end = segment + 1 == partition.segments ? steps : begin + partition.segment_steps;
    chunk_states = p.chunk_state(scanned, 0);
    saved_states = is_packed ? (steps + p.chunk_length - 1) / p.chunk_length : p.chunk_boundaries;
  }
  // The number of steps, at most `tile_steps`, from t0 to the end of the block's segment.
  __device__ __forceinline__ int steps_from(int64_t t0, int tile_steps) const {
    return static_cast<int>(min(end - t0, int64_t(tile_steps)));
  }
};

// The first of the block's channels at the row's first step.
template <typename Scalar>
__device__ __forceinline__ Scalar* first_row(const SequenceView& view, const Position& at) {
  return static_cast<Scalar*>(view.data) + at.batch * view.stride_batch + at.first_channel * view.stride_dim +
         at.first_step * view.stride_step;
}

// The first state of the block's group at the row's first step; null where the matrix is constant.
template <typename Scalar>
__device__ __forceinline__ const Scalar* first_row(const MatrixView& view, const SelectiveScanParams& p, const Position& at) {
  if (!view.per_step) return nullptr;
  const int64_t group = at.first_channel / (p.dim / view.groups);
  return static_cast<const Scalar*>(view.data) + at.batch * view.stride_batch + group * view.stride_channel +
         at.first_step * view.stride_step;
}

// Whether the steps of a row, which may descend in memory, are closer to each other than neighboring rows.
__device__ __forceinline__ bool are_steps_closer(int64_t stride_step, int64_t stride_row) {
  return (stride_step < 0 ? -stride_step : stride_step) <= stride_row;
}

// The offset of an element of a (rows, dim, dstate) tensor.
__device__ __forceinline__ int64_t state_offset(const SelectiveScanParams& p, int64_t row, int64_t channel, int state) {
  return (row * p.dim + channel) * p.dstate + state;
}

// The block's rows of each tensor, in shared memory for the same reason as Position.
template <typename Scalar>
struct FwdRows {
  Scalar *u, *delta, *z, *out;
  const Scalar *B, *C;

  __device__ __forceinline__ FwdRows(const SelectiveScanFwdParams& p, const Position& at)
      : u(first_row<Scalar>(p.u, at)),
        delta(first_row<Scalar>(p.delta, at)),
        z(first_row<Scalar>(p.z, at)),
        out(first_row<Scalar>(p.out, at)),
        B(first_row<Scalar>(p.B, p, at)),
        C(first_row<Scalar>(p.C, p, at)) {}
};
template <typename Scalar>
struct BwdRows {
  using Acc = AccumulateType<Scalar>;

  Scalar *u, *delta, *z, *grad_out, *grad_u, *grad_delta, *grad_z;
  const Scalar *B, *C;
  // The states before the row's first chunk, (channels, dstate), from the block's first channel on, null if they are zero; and
  // their place among the saved states. Backward's initial state is contiguous.
  const Acc *first_states, *saved_states;

  __device__ __forceinline__ BwdRows(const SelectiveScanBwdParams& p, const Position& at)
      : u(first_row<Scalar>(p.u, at)),
        delta(first_row<Scalar>(p.delta, at)),
        z(first_row<Scalar>(p.z, at)),
        grad_out(first_row<Scalar>(p.grad_out, at)),
        grad_u(first_row<Scalar>(p.grad_u, at)),
        grad_delta(first_row<Scalar>(p.grad_delta, at)),
        grad_z(first_row<Scalar>(p.grad_z, at)),
        B(first_row<Scalar>(p.B, p, at)),
        C(first_row<Scalar>(p.C, p, at)),
        saved_states(static_cast<const Acc*>(p.chunk_states) + state_offset(p, at.chunk_states, at.first_channel, 0)) {
    first_states = saved_states;
    if (p.is_packed()) {
      const bool has_state = p.initial_state.data != nullptr && at.initial >= 0;
      first_states = has_state
                         ? static_cast<const Acc*>(p.initial_state.data) + state_offset(p, at.initial, at.first_channel, 0)
                         : nullptr;
    }
  }
  __device__ __forceinline__ const Acc* states_before(const SelectiveScanBwdParams& p, int64_t chunk) const {
    return chunk == 0 ? first_states : saved_states + chunk * (p.dim * p.dstate);
  }
};

// Launches a block for each tile of channels, row and segment.
template <typename Params, typename ScanPlan, typename... Others>
cudaError_t launch_blocks(void (*kernel)(Params, ScanPlan, Others...), int threads, int64_t shared_bytes, cudaStream_t stream,
                          const Params& params, const ScanPlan& plan, const Others&... others) {
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, shared_bytes); error != cudaSuccess) return error;
  const auto blocks = static_cast<unsigned int>(params.rows * plan.launched_segments * plan.tiles);
  kernel<<<blocks, threads, shared_bytes, stream>>>(params, plan, others...);
  return cudaGetLastError();
}

}  // namespace ssm_kernels::selective_scan
