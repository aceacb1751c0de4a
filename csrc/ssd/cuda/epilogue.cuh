// The epilogue of forward: out = (y + D x) silu(z) from accumulator fragments (round_out), and the stores of out on compute
// capability 9.0 (TmaEpilogue). There a chunk's tile of out leaves shared memory by one TMA store, which runs beside everything
// else. Stores from registers would occupy these for as long as they wait behind the loads of later chunks.
#pragma once

#include "common/activations.h"
#include "cuda/chunked/state.cuh"
#include "cuda/ptx/tma.cuh"

namespace ssm_kernels::ssd {

// D for the lane's two rows.
__device__ __forceinline__ float2 load_D(const SsdFwdParams& p, const StateTile& state_tile, const FragmentLane& lane) {
  const auto load = [&](int row) {
    return p.D != nullptr && row < state_tile.rows
               ? p.D[state_tile.head * p.D_stride_head + (state_tile.first_row + row) * p.D_stride_row]
               : 0.0f;
  };
  return {load(lane.row), load(lane.row + 8)};
}

// Rounds out to this warp's columns of a tile, from y^T, x^T, whose steps are in that order, and a tile of z or null.
template <typename Scalar, typename Order>
__device__ __forceinline__ void round_out(const float (&y)[kStepBlocks][4], const uint32_t (&x)[kStepGroups][4], float2 D,
                                          SmemTile<kStateRows>* z_tile, SmemTile<kStateRows>& tile, const FragmentLane& lane) {
  const auto round_gated = [&](const auto& gate) {
#pragma unroll
    for (int i = 0; i < kStepGroups; ++i) {
      float2 values[4];
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const int position = Order::position_of(2 * i + word / 2);
        const float2 u = cuda::unpack<Scalar>(x[position / 2][position % 2 * 2 + word % 2]);
        const float D_of_row = word % 2 == 0 ? D.x : D.y;
        const float (&ungated)[4] = y[2 * i + word / 2];
        values[word] = {fmaf(D_of_row, u.x, ungated[word % 2 * 2]), fmaf(D_of_row, u.y, ungated[word % 2 * 2 + 1])};
      }
      gate(i, values);
      uint32_t rounded[4];
#pragma unroll
      for (int word = 0; word < 4; ++word) rounded[word] = cuda::pack<Scalar>(values[word].x, values[word].y);
      cuda::stmatrix_transposed(tile.ldmatrix_row(16 * i, 2 * lane.warp, lane.index), rounded);
    }
  };
  if (z_tile == nullptr) {
    round_gated([](int, float2(&)[4]) {});
    return;
  }
  round_gated([&](int group, float2(&values)[4]) {
    uint32_t z[4];
    cuda::ldmatrix_transposed(z, z_tile->ldmatrix_row(16 * group, 2 * lane.warp, lane.index));
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const float2 gate = cuda::unpack<Scalar>(z[word]);
      values[word].x *= silu(gate.x);
      values[word].y *= silu(gate.y);
    }
  });
}

// The fp32 version.
template <typename Scalar, typename Order>
__device__ __forceinline__ void round_out(const float (&y)[kStepBlocks][4], const float (&x)[kStepGroups][8], float2 D,
                                          SmemTile<kStateRows, 4>* z_tile, SmemTile<kStateRows, 4>& tile,
                                          const FragmentLane& lane) {
  const auto round_gated = [&](const auto& gate) {
#pragma unroll
    for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = i / 2, step = 8 * n + 2 * lane.pair + i % 2, row = lane.row + 8 * half;
        const float value = fmaf(half == 0 ? D.x : D.y, x[n / 2][n % 2 * 4 + i % 2 * 2 + half], y[n][i]);
        tile.element(step, row) = gate(value, step, row);
      }
    }
  };
  if (z_tile == nullptr) {
    round_gated([](float value, int, int) { return value; });
  } else {
    round_gated([&](float value, int step, int row) { return value * silu(z_tile->element(step, row)); });
  }
}

// Called by all threads of a consumer warpgroup. For each chunk of a segment: write(), a barrier of the warpgroup, then send(),
// or for the segment's last chunk send_last() with no wgmma in flight. Before the next write(): wait_for_sent() and a barrier.
// At the end of the kernel: wait_for_sent().
template <typename Scalar, typename Order>
class TmaEpilogue {
 public:
  __device__ __forceinline__ TmaEpilogue(const SsdFwdParams& p, const WorkSpan& at, const StateTile& state_tile,
                                         const FragmentLane& lane)
      : p_(p), D_(load_D(p, state_tile, lane)), at_(at), state_tile_(state_tile) {}

  __device__ __forceinline__ void write(const float (&y)[kStepBlocks][4], const uint32_t (&x)[kStepGroups][4],
                                        SmemTile<kStateRows>* z_tile, SmemTile<kStateRows>& tile,
                                        const FragmentLane& lane) const {
    round_out<Scalar, Order>(y, x, D_, z_tile, tile, lane);
    cuda::fence_proxy_async();
  }

  // TMA does not write the part of the tile that is outside of the tensor.
  __device__ __forceinline__ void send(const SmemTile<kStateRows>& tile, int chunk) const {
    cuda::tma_store_tile(p_.out_descriptor, state_tile_.first_row, state_tile_.head,
                         static_cast<int>(at_.start) + chunk * kChunk, static_cast<int>(at_.batch), &tile,
                         state_tile_.is_there() && thread() == 0);
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
  static __device__ __forceinline__ void wait_for_sent() { cuda::tma_store_wait_read<0>(); }

 private:
  static __device__ __forceinline__ int thread() { return threadIdx.x % kWarpgroupThreads; }

  const SsdFwdParams& p_;
  float2 D_;
  const WorkSpan& at_;
  const StateTile& state_tile_;
};

}  // namespace ssm_kernels::ssd
