// The selective scan with a matrix A, (dstate, dstate), for each channel or one for all channels, on CPU and CUDA: plain data.
//
//   w_t = A h_{t-1} + current v_t + previous v_{t-1}, v = B u       x_t = R(delta_t A) w_t       h_t = h_{t-1} + delta_t x_t
//
// with R(Z) = (I - alpha Z)^-1 for the rules of the gbt family, which have Abar = (I - alpha Z)^-1 (I + (1 - alpha) Z), and
// R(Z) = I + Z/2 + Z^2/6 + Z^3/24 for rk4, the classical Runge-Kutta step of an input that is constant over it.
//
// Once a call, A = Q T Q^T is reduced to its real Schur form (common/schur.h). The scan's states are those of Q^T h: a solve
// with I - alpha Z is then one with a matrix that is triangular but for blocks of two rows on its diagonal. Kernels rotate B
// and C of each step, and the states at the borders of the call. No inverse of a matrix and no eigenvector exists, so that A
// may be defective.
//
// Backward, with g the gradient of h_t, r = A^T q, and X a sum of outer products:
//
//   gbt:  q = delta (I - alpha Z)^-T g            X += q (h_{t-1} + alpha delta x)^T        grad_delta = (g + alpha r) . x
//   rk4:  s1 = w + Z w / 4, s2 = w + Z s1 / 3, x = w + Z s2 / 2; a3 = delta g, a2 = Z^T a3 / 2, a1 = Z^T a2 / 3,
//         q = a3 + a2 + a1 + Z^T a1 / 4           X += q h_{t-1}^T + delta (a3 s2^T / 2 + a2 s1^T / 3 + a1 w^T / 4)
//         grad_delta = g . x + A^T a3 . s2 / 2 + A^T a2 . s1 / 3 + A^T a1 . w / 4
//
// q is the gradient of w_t, and g + r that of h_{t-1}. X of the rotated states is the gradient of A rotated: grad_A = Q X Q^T.
// This needs no derivative of the reduction, because rotating all states by a fixed Q changes nothing.
#pragma once

#include <cstdint>

#include "selective_scan/selective_scan.h"

namespace ssm_kernels::selective_scan {

constexpr int64_t kMaxDenseDstate = 32;

// Steps of a chunk. The states between chunks are saved for backward, which keeps those inside one in shared memory.
constexpr int64_t kDenseChunk = 16;

template <typename Int>
Int dense_chunk_boundary_count(const Int& seqlen) {
  return (seqlen + (kDenseChunk - 1)) / kDenseChunk + 1;
}

// The tiles of channels of a call. The channels of a tile share their groups of B and C. A task is a tile of the rows `slot`,
// `slot` + slots, ..., one after the other: its sums over rows are then few. No sum depends on the number of threads.
struct DenseTiles {
  int64_t segment = 0;  // channels that share their groups
  int64_t channels = 0, per_segment = 0, tiles = 0, slots = 0;

  SSM_HOST_DEVICE int64_t first_channel(int64_t tile) const {
    return tile / per_segment * segment + tile % per_segment * channels;
  }
  SSM_HOST_DEVICE int64_t count(int64_t tile) const {
    const int64_t left = segment - tile % per_segment * channels;
    return left < channels ? left : channels;
  }
};

struct DenseParams {
  // R(Z), and the factors of the two samples.
  bool is_rk4 = false, repeats_first = false;
  double alpha = 0, current = 1, previous = 0;
  // As TwoSampleParams.
  StateView previous_u, previous_B;
  // (matrices, stride, stride), contiguous, in the accumulation type: A = Q T Q^T, with zeros beyond dstate, and on CUDA also
  // the transposes. matrices is dim or 1.
  const void* T = nullptr;
  const void* Q = nullptr;
  const void* T_columns = nullptr;
  const void* Q_columns = nullptr;
  int64_t matrices = 0, stride = 0;
  DenseTiles tiles;

  SSM_HOST_DEVICE int64_t matrix(int64_t channel) const { return matrices == 1 ? 0 : channel; }
};

// Results of backward besides the gradients of u, delta, z and the initial state, contiguous and in the accumulation type,
// null where nothing needs it: sums of each slot, (slots, dim, dstate, dstate) of rotated states for A, (slots, dim, dstate)
// for constant B and C, (slots, dim) for D and delta_bias; and parts of the gradients of B and C per step, as views of those of
// the first tile of a group, with the stride between tiles. grad_previous is that of TwoSampleParams.
struct DenseSums {
  void* A = nullptr;
  void* constant_B = nullptr;
  void* constant_C = nullptr;
  void* D = nullptr;
  void* delta_bias = nullptr;
  void* grad_previous = nullptr;
  MatrixView B, C;
  int64_t stride_tile_B = 0, stride_tile_C = 0;
};

SSM_KERNEL_STRUCT(DenseTiles, 40);
SSM_KERNEL_STRUCT(DenseParams, 184);
SSM_KERNEL_STRUCT(DenseSums, 176);

}  // namespace ssm_kernels::selective_scan
