// The selective scan of complex states on CUDA (common/complex.h): what its forward and backward share.
//
//   h_t = Abar(z_t) h_{t-1} + delta_t (k(z_t) B_t u_t + m(z_t) B_{t-1} u_{t-1})       out_t = (Re <w C_t, h_t> + D u_t)
//   silu(z_t)
//
// with w = 2 for one of each conjugate pair. A block takes a tile of neighboring channels of one row through time. A lane is a
// channel (backward: two), a warp some of the states, and the step is a loop: B_t and C_t are the same for all lanes, which
// read them from shared memory at one address. Sequences come in tiles of steps through shared memory, in the accumulation
// type. Sums over the states are sums over warps, in shared memory, in the order of the warps.
//
// Where a warp has more states than the row, the others are copies of its last state with a C of zero: no branch, and no NaN
// that the row does not have.
#pragma once

#include <algorithm>
#include <numeric>

#include "common/activations.h"
#include "common/complex.h"
#include "cuda/launch.cuh"
#include "cuda/vector_io.cuh"
#include "selective_scan/cuda/complex_launch.h"

namespace ssm_kernels::selective_scan::complex_scan {

// Blocks of a launch: tiles of channels of each row. No tile crosses a group of B or C.
struct Tiles {
  int64_t group_channels = 0, tiles_per_group = 0, tiles = 0;
  int warps = 1;
  int passes = 1;  // over the states, each of warps * states of a thread

  Tiles(const SelectiveScanParams& p, int channels, int states_per_thread, int most_warps) {
    group_channels = std::gcd(p.B.per_step ? p.dim / p.B.groups : p.dim, p.C.per_step ? p.dim / p.C.groups : p.dim);
    tiles_per_group = (group_channels + channels - 1) / channels;
    tiles = group_channels == 0 ? 0 : p.dim / group_channels * tiles_per_group;
    const int64_t states = p.dstate / 2;
    warps = static_cast<int>(std::min<int64_t>((states + states_per_thread - 1) / states_per_thread, most_warps));
    passes = static_cast<int>((states + warps * states_per_thread - 1) / (warps * states_per_thread));
  }
};

// The row and the channels of a block.
struct Place {
  ScanRow row;
  int64_t row_index, tile, channel, end;  // the first channel, and the one after the last

  __device__ __forceinline__ Place(const SelectiveScanParams& p, const Tiles& t, int channels) {
    row_index = blockIdx.x / t.tiles;
    tile = blockIdx.x % t.tiles;
    row = p.row(row_index);
    const int64_t group = tile / t.tiles_per_group;
    channel = group * t.group_channels + tile % t.tiles_per_group * channels;
    end = (group + 1) * t.group_channels;
    if (end > channel + channels) end = channel + channels;
  }
};

// Rules whose gains are numbers or e^z, and the others: each of them has kernels of its own.
inline bool has_exponential_gain(Discretization method) {
  return method == Discretization::kZoh || method == Discretization::kExpTrapezoidal;
}
template <bool exponential, typename Visitor>
__device__ __forceinline__ void visit_rule(Discretization method, const Visitor& visitor) {
  if constexpr (exponential) {
    if (method == Discretization::kZoh) return visitor(OfOneSample<Zoh>{});
    visitor(ExpTrapezoidalRule{});
  } else {
    if (method == Discretization::kZohExact) return visitor(OfOneSample<ZohExact>{});
    if (method == Discretization::kBilinear) return visitor(OfOneSample<Bilinear>{});
    visitor(Trapezoidal{});
  }
}

// e^(delta A). Types of 16 bits take the instructions for the sine and the cosine, whose error is 5e-7.
template <typename Scalar, typename Acc>
__device__ __forceinline__ Complex<Acc> exponential(Acc delta, const ComplexRate<Acc>& A) {
  if constexpr (sizeof(Scalar) > 2) {
    return exp_of_step(delta, A);
  } else {
    const float bounded = Math<float>::min(delta, 1e18f), turns = bounded * A.turns;
    const float angle = (turns - round_to_integer(turns)) * 6.2831853f, size = Math<float>::exp(bounded * A.re);
    return {size * __cosf(angle), size * __sinf(angle)};
  }
}

template <typename Scalar, typename Method, typename Acc>
__device__ __forceinline__ Complex<Acc> basis_of(const Method& method, Acc delta, const Complex<Acc>& z,
                                                 const ComplexRate<Acc>& A) {
  if constexpr (Method::kExponential) {
    return exponential<Scalar>(delta, A);
  } else {
    return method.basis(z);
  }
}

template <typename Scalar>
__device__ __forceinline__ const Scalar* address(const SequenceView& view, const ScanRow& row, int64_t channel, int64_t step) {
  return static_cast<const Scalar*>(view.data) + row.batch * view.stride_batch + channel * view.stride_dim +
         (row.begin + step) * view.stride_step;
}
template <typename Scalar>
__device__ __forceinline__ cuda::AccumulateType<Scalar> load(const SequenceView& view, const ScanRow& row, int64_t channel,
                                                             int64_t step) {
  return cuda::to_accumulate(*address<Scalar>(view, row, channel, step));
}
template <typename Scalar>
__device__ __forceinline__ void store(const SequenceView& view, const ScanRow& row, int64_t channel, int64_t step,
                                      cuda::AccumulateType<Scalar> value) {
  *const_cast<Scalar*>(address<Scalar>(view, row, channel, step)) = cuda::from_accumulate<Scalar>(value);
}

// The sample of u before step `start` of a row.
template <typename Scalar>
__device__ __forceinline__ cuda::AccumulateType<Scalar> sample_before(const SelectiveScanParams& p, const TwoSampleParams& two,
                                                                      const ScanRow& row, int64_t channel, int64_t start) {
  if (start > 0) return load<Scalar>(p.u, row, channel, start - 1);
  if (two.previous_u.data != nullptr && row.initial >= 0) {
    return cuda::to_accumulate(static_cast<const Scalar*>(
        two.previous_u.data)[row.initial * two.previous_u.stride_batch + channel * two.previous_u.stride_dim]);
  }
  return two.repeats_first ? load<Scalar>(p.u, row, channel, 0) : cuda::AccumulateType<Scalar>(0);
}

// Element `i` of B or C of a row's step.
template <typename Acc>
__device__ __forceinline__ Acc matrix_at(const MatrixView& matrix, const ScanRow& row, int64_t group, int64_t step, int i) {
  return static_cast<const Acc*>(matrix.data)[row.batch * matrix.stride_batch + group * matrix.stride_channel +
                                              i * matrix.stride_state + (row.begin + step) * matrix.stride_step];
}

// Copies rows of a per-step matrix for `count` of the states of a pass, from `first` on, to [step][2 * count] in shared memory.
// `row_of(e)` is the element of the matrix, or a negative number for zero.
template <typename Acc, typename Rows>
__device__ __forceinline__ void stage_rows(Acc* target, const MatrixView& matrix, const ScanRow& row, int64_t group,
                                           int64_t start, int first_row, int rows, int columns, int first, int dstate,
                                           const Rows& transform) {
  for (int e = threadIdx.x; e < (rows - first_row) * columns; e += blockDim.x) {
    const int t = e / columns + first_row, column = e % columns, state = min(first + column / 2, dstate / 2 - 1);
    const bool is_copy = first + column / 2 >= dstate / 2;
    const Acc value = matrix_at<Acc>(matrix, row, group, start + t, 2 * state + column % 2);
    target[t * columns + column] = transform(value, column % 2 != 0, is_copy);
  }
}

// The element of B of the sample before step `start` of a row.
template <typename Acc>
__device__ __forceinline__ Acc matrix_before(const SelectiveScanParams& p, const TwoSampleParams& two, const ScanRow& row,
                                             int64_t group, int64_t start, int i) {
  if (start > 0) return matrix_at<Acc>(p.B, row, group, start - 1, i);
  if (two.previous_u.data != nullptr && row.initial >= 0) {
    const StateView& B = two.previous_B;
    return static_cast<const Acc*>(B.data)[row.initial * B.stride_batch + group * B.stride_dim + i * B.stride_state];
  }
  return two.repeats_first ? matrix_at<Acc>(p.B, row, group, 0, i) : Acc(0);
}

}  // namespace ssm_kernels::selective_scan::complex_scan
