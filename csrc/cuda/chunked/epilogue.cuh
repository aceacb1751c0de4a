// The epilogues of forward: the stores of a chunk's out from accumulator fragments.
//
// Their math is a type, `Finish`. Finish(p, state_tile, lane) loads what belongs to the rows of the state tile.
// finish.round<Scalar, Order>(y, x, z_tile, tile, lane) rounds out to this warp's columns of a tile, from y^T, x^T, whose steps
// are in that order, and a tile of another operand or null.
//
// On compute capability 9.0 a chunk's tile of out leaves shared memory by one TMA store, which runs beside everything else
// (TmaEpilogue). Stores from registers (RegisterEpilogue) would occupy these for as long as they wait behind the loads of later
// chunks.
#pragma once

#include "cuda/chunked/state.cuh"
#include "cuda/ptx/tma.cuh"

namespace ssm_kernels::cuda::chunked {

// Called by all threads of a consumer warpgroup. For each chunk of a segment: write(), a barrier of the warpgroup, then send(),
// or for the segment's last chunk send_last() with no wgmma in flight. Before the next write(): wait_for_sent() and a barrier.
// At the end of the kernel: wait_for_sent().
template <typename Scalar, typename Order, typename Finish, typename Params>
class TmaEpilogue {
 public:
  __device__ __forceinline__ TmaEpilogue(const Params& p, const WorkSpan& at, const StateTile& state_tile,
                                         const FragmentLane& lane)
      : p_(p), finish_(p, state_tile, lane), at_(at), state_tile_(state_tile) {}

  __device__ __forceinline__ void write(const float (&y)[kStepBlocks][4], const uint32_t (&x)[kStepGroups][4],
                                        SmemTile<kStateRows>* z_tile, SmemTile<kStateRows>& tile,
                                        const FragmentLane& lane) const {
    finish_.template round<Scalar, Order>(y, x, z_tile, tile, lane);
    fence_proxy_async();
  }

  // TMA does not write the part of the tile that is outside of the tensor.
  __device__ __forceinline__ void send(const SmemTile<kStateRows>& tile, int chunk) const {
    tma_store_tile(p_.out_descriptor, state_tile_.first_row, state_tile_.head, static_cast<int>(at_.start) + chunk * kChunk,
                   static_cast<int>(at_.batch), &tile, state_tile_.is_there() && thread() == 0);
  }
  // The steps after the end of a packed sequence belong to the next one, so only the sequence's own steps are stored.
  __device__ __forceinline__ void send_last(SmemTile<kStateRows>& tile) const {
    const int chunk = at_.chunks - 1, steps = at_.steps_of(chunk);
    if (!state_tile_.is_there() || chunk < 0 || steps <= 0) return;
    if (steps == kChunk || !is_packed(p_)) {
      send(tile, chunk);
      return;
    }
    constexpr int kVectors = SmemTile<kStateRows>::kVectors;
    Scalar* const target = at_.template rows<Scalar>(p_.out, state_tile_.head, chunk) + state_tile_.first_row;
    for (int i = thread(); i < steps * kVectors; i += kWarpgroupThreads) {
      const int row = i / kVectors, vector = i % kVectors, column = vector * SmemTile<kStateRows>::kVectorElements;
      if (column < state_tile_.rows) {
        __stcg(reinterpret_cast<uint4*>(target + row * p_.out.stride_step + column), *tile.vector(row, vector));
      }
    }
  }
  static __device__ __forceinline__ void wait_for_sent() { tma_store_wait_read<0>(); }

 private:
  static __device__ __forceinline__ int thread() { return threadIdx.x % kWarpgroupThreads; }

  const Params& p_;
  Finish finish_;
  const WorkSpan& at_;
  const StateTile& state_tile_;
};

// The epilogue, chunk by chunk: each warp writes its columns of out, through the same columns of a tile, which no other warp
// uses.
template <typename Scalar, typename Finish, typename Params>
class RegisterEpilogue {
 public:
  using OutTile = SmemTile<kStateRows, sizeof(Scalar)>;

  __device__ __forceinline__ RegisterEpilogue(const Params& p, const WorkSpan& at, const StateTile& state_tile,
                                              const FragmentLane& lane)
      : p_(p), finish_(p, state_tile, lane) {
    const int column = vector(lane) * OutTile::kVectorElements;
    is_there_ = column < state_tile.rows;
    target_ = at.rows<Scalar>(p.out, state_tile.head, 0) + state_tile.first_row + column + row(lane) * p.out.stride_step;
  }

  __device__ __forceinline__ void write(const float (&y)[kStepBlocks][4], const OperandA<Scalar> (&x)[kStepGroups],
                                        OutTile* z_tile, OutTile& tile, const FragmentLane& lane, int steps) {
    finish_.template round<Scalar, InOrder>(y, x, z_tile, tile, lane);
    __syncwarp();
    const uint4* const source = tile.vector(row(lane), vector(lane));
    const int rows = is_there_ ? steps - row(lane) : 0;
    uint4 vectors[kChunk / kRows];
#pragma unroll
    for (int i = 0; i < kChunk / kRows; ++i) vectors[i] = source[kRows * i * OutTile::kPanelVectors];
#pragma unroll
    for (int i = 0; i < kChunk / kRows; ++i) {
      if (kRows * i < rows) __stcg(reinterpret_cast<uint4*>(target_), vectors[i]);
      target_ += kRows * p_.out.stride_step;
    }
    __syncwarp();
  }

 private:
  // Vectors of a warp's 16 columns, and rows that it writes at once. The vectors of eight lanes are in different banks.
  static constexpr int kVectors = 16 / OutTile::kVectorElements, kRows = kWarpSize / kVectors;
  // The lane writes every kRows-th row from row() on, in each the vector vector().
  static __device__ __forceinline__ int row(const FragmentLane& lane) {
    return kIsFp32<Scalar> ? lane.index / kVectors : lane.index % kRows;
  }
  static __device__ __forceinline__ int vector(const FragmentLane& lane) {
    return kVectors * lane.warp + (kIsFp32<Scalar> ? lane.index % kVectors : lane.index / kRows);
  }

  const Params& p_;
  Finish finish_;
  bool is_there_;
  Scalar* target_;
};

}  // namespace ssm_kernels::cuda::chunked
