// The interface between mamba3_state_update's CUDA entry point (step_entry.cpp) and its kernel (step.cuh): how warps share the
// work. A block takes one head of one row of the call.
#pragma once

#include <cuda_runtime_api.h>

#include "common/integers.h"
#include "common/kernel_abi.h"
#include "cuda/constants.h"
#include "cuda/divisor.h"
#include "mamba3/mamba3_step.h"

namespace ssm_kernels::mamba3::step {

// Columns and rows of the state that a lane holds at a time. A group of `lanes` lanes has kLaneRows rows.
constexpr int kLaneColumns = 4, kLaneRows = 8;
constexpr int kMinLog2Lanes = 3;  // sum_of_each takes 8 lanes
constexpr int kMaxRanks = 1024;   // shared memory takes fewer
constexpr int kMinWarps = 4, kMaxWarps = 8, kMaxThreads = kMaxWarps * cuda::kWarpSize;

// Whether tiles of the state are copied to shared memory: cp.async has no copy of 2 bytes.
constexpr bool is_state_copied(size_t element_bytes, bool has_vectors) { return has_vectors || element_bytes >= 4; }
// Bytes of the copied tiles, one for each warp.
constexpr int state_bytes(int warps, size_t element_bytes) {
  return warps * cuda::kWarpSize * kLaneRows * kLaneColumns * static_cast<int>(element_bytes);
}

struct StepTiling {
  int log2_lanes = 5;
  int warps = kMaxWarps;
  int columns = 0;  // of a row in shared memory: whole chunks of a group's columns
  int rows = 0;     // of the head in shared memory: whole tiles of a warp
  // Floats of an array (ranks, columns), of one (ranks, rows) and of one (angles,) in shared memory.
  int column_floats = 0, row_floats = 0, angle_floats = 0;
  int state_bytes = 0;  // of the copied tiles, at the beginning of shared memory
  float reciprocal_headdim = 1;
  cuda::Divisor heads, heads_per_group, angles, columns_divisor, rows_divisor;

  StepTiling() = default;
  explicit StepTiling(const StepParams& p)
      : heads(p.heads), heads_per_group(p.heads / p.groups), angles(p.angles > 0 ? p.angles : 1) {
    while (log2_lanes > kMinLog2Lanes && chunk_columns() / 2 >= p.dstate) --log2_lanes;
    columns = static_cast<int>(round_up(p.dstate, chunk_columns()));
    rows = static_cast<int>(round_up(p.headdim, warp_rows()));
    warps = rows / warp_rows();
    warps = warps <= kMinWarps ? kMinWarps : kMaxWarps;
    reciprocal_headdim = 1.0f / static_cast<float>(p.headdim);
    column_floats = static_cast<int>(p.ranks * columns);
    row_floats = static_cast<int>(p.ranks * rows);
    angle_floats = static_cast<int>(round_up(p.angles, kLaneColumns));
    columns_divisor = cuda::Divisor(columns);
    rows_divisor = cuda::Divisor(rows);
  }

  // Cosines and sines; k, the previous k and q; the factors of both k, the result and its factor.
  int64_t shared_bytes() const {
    return state_bytes + static_cast<int64_t>(sizeof(float)) * (2 * angle_floats + 3 * column_floats + 4 * row_floats);
  }
  SSM_HOST_DEVICE int chunk_columns() const { return kLaneColumns << log2_lanes; }
  SSM_HOST_DEVICE int warp_rows() const { return kLaneRows * (cuda::kWarpSize >> log2_lanes); }
};

// Whether the kernel takes a call: its arrays fit shared memory; rows, slots, strides and offsets inside of a row or a slot fit
// 31 bits.
inline bool is_supported(const StepParams& p, int64_t max_shared_bytes) {
  constexpr int64_t kMost = (int64_t(1) << 31) - 1;
  const int64_t columns = p.headdim > p.dstate ? p.headdim : p.dstate;
  const auto has_token = [&](const TokenView& view) {
    return view.stride_row <= kMost &&
           p.heads * view.stride_head + p.ranks * view.stride_rank + columns * view.stride_column <= kMost;
  };
  const auto has_state = [&](const StateView& view) {
    const int64_t rows = p.headdim > p.ranks ? p.headdim : p.ranks;
    return view.stride_slot <= kMost &&
           p.heads * view.stride_head + rows * view.stride_row + columns * view.stride_column <= kMost;
  };
  if (p.rows > kMost || p.slots > kMost || p.heads > kMost || p.ranks > kMaxRanks) return false;
  if (StepTiling(p).shared_bytes() + state_bytes(kMaxWarps, sizeof(float)) > max_shared_bytes) return false;
  for (const TokenView* view : {&p.x, &p.dt, &p.A, &p.B, &p.C, &p.trap, &p.rates, &p.B_bias, &p.C_bias, &p.D, &p.z,
                                &p.norm_weight, &p.out, &p.mimo_x, &p.mimo_z, &p.mimo_out}) {
    if (!has_token(*view)) return false;
  }
  return has_state(p.angle) && has_state(p.ssm) && has_state(p.k) && has_state(p.previous_x);
}

// Input is the type of x, B, C, z, out and previous_x; State that of ssm. Instantiated in instantiations/.
template <typename Input, typename State>
SSM_KERNEL_API cudaError_t launch_mamba3_step(const StepParams& params, cudaStream_t stream);

}  // namespace ssm_kernels::mamba3::step
