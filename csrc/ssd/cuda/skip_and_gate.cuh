// The math of SSD's epilogue (cuda/chunked/epilogue.cuh): out = (y + D x) silu(z).
#pragma once

#include "common/activations.h"
#include "cuda/chunked/state.cuh"
#include "ssd/cuda/toolkit.cuh"

namespace ssm_kernels::ssd {

struct SkipAndGate {
  float2 D;  // for the lane's two rows

  __device__ __forceinline__ SkipAndGate(const SsdParams& p, const StateTile& state_tile, const FragmentLane& lane) {
    const auto load = [&](int row) {
      return p.D != nullptr && row < state_tile.rows
                 ? p.D[state_tile.head * p.D_stride_head + (state_tile.first_row + row) * p.D_stride_row]
                 : 0.0f;
    };
    D = {load(lane.row), load(lane.row + 8)};
  }

  template <typename Scalar, typename Order>
  __device__ __forceinline__ void round(const float (&y)[kStepBlocks][4], const uint32_t (&x)[kStepGroups][4],
                                        SmemTile<kStateRows>* z_tile, SmemTile<kStateRows>& tile,
                                        const FragmentLane& lane) const {
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
  __device__ __forceinline__ void round(const float (&y)[kStepBlocks][4], const float (&x)[kStepGroups][8],
                                        SmemTile<kStateRows, 4>* z_tile, SmemTile<kStateRows, 4>& tile,
                                        const FragmentLane& lane) const {
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
};

}  // namespace ssm_kernels::ssd
