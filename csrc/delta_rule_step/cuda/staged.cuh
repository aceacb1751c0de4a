// The staged kernel: the delta rule's decoding step (step.cuh) for states of any strides, columns and types.
//
// A warp copies its tile to shared memory along the axis of the state that is contiguous, the rows or the columns, so that
// neighboring lanes load and store neighboring elements wherever the rows start. Lanes then take the columns that they take in
// the step kernel, and add in the same order. The tile stays in shared memory from token to token, rounded to its type after
// each update.
#pragma once

#include "delta_rule_step/cuda/rows.cuh"

namespace ssm_kernels::delta_rule_step {

// Copies rows `first` to `first + rows` of a head's state to the tile in shared memory, or back. Along the columns each lane
// has a column of kUnrolled rows, along the rows a row of kUnrolled columns.
template <bool to_state, typename State>
__device__ __forceinline__ void copy_tile(const Tiling& tiling, const StateView& view, State* head, State* tile, int pitch,
                                          int rows, int columns, int lane) {
  constexpr int kUnrolled = 4;
  const bool across = tiling.rows_are_contiguous;
  const int tile_rows = tiling.rows_per_tile(), columns_at_once = kWarpSize / tile_rows;
  const int row_step = across ? 0 : 1, column_step = across ? columns_at_once : 0;
  const int64_t far_step = row_step * view.stride_row + column_step * view.stride_column;
  const int near_step = row_step * pitch + column_step;
#pragma unroll 1
  for (int r = across ? lane % tile_rows : 0; r < rows; r += across ? tile_rows : kUnrolled) {
#pragma unroll 1
    for (int c = across ? lane / tile_rows : lane; c < columns; c += across ? kUnrolled * columns_at_once : kWarpSize) {
      State* const far = head + r * view.stride_row + c * view.stride_column;
      State* const near = tile + r * pitch + c;
      const auto is_inside = [&](int u) { return r + u * row_step < rows && c + u * column_step < columns; };
      State values[kUnrolled];
#pragma unroll
      for (int u = 0; u < kUnrolled; ++u) {
        if (is_inside(u)) values[u] = to_state ? near[u * near_step] : far[u * far_step];
      }
#pragma unroll
      for (int u = 0; u < kUnrolled; ++u) {
        if (is_inside(u)) (to_state ? far[u * far_step] : near[u * near_step]) = values[u];
      }
    }
  }
}

template <typename Input, typename State>
__global__ void __launch_bounds__(kMaxWarpsPerBlock* kWarpSize, 3)
    delta_rule_step_staged_kernel(const __grid_constant__ StepParams p, const __grid_constant__ Tiling tiling,
                                  const __grid_constant__ TokenParams tokens) {
  using Acc = cuda::AccumulateType<Input>;
  constexpr int kSize = kVectorBytes / static_cast<int>(sizeof(State));
  using States = Vector<State, kSize>;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  cuda::launch_dependents();
  cuda::grid_dependency_sync();
  const int warp = threadIdx.x / kWarpSize, warp_lane = threadIdx.x % kWarpSize, lanes = tiling.lanes();
  const uint32_t index = blockIdx.x * tiling.warps_per_block + warp;
  if (index >= tiling.tiles) return;
  const Tile tile = make_tile(tiling, index);
  const Slots slots = slots_of(p, tokens, tile.row);
  if (slots.read < 0 || slots.read >= p.slots) return fill_out<Input>(p, tiling, tile, slots, warp_lane);

  const int lane = warp_lane & (lanes - 1), group = warp_lane >> tiling.log2_lanes, key_dim = static_cast<int>(p.key_dim);
  const int padded = tiling.vectors * lanes * kSize, pitch = padded + kSize, tile_rows = tiling.rows_per_tile();
  const int rows = rows_of_tile(p, tiling, tile);
  Acc* const shared = reinterpret_cast<Acc*>(shared_bytes + warp * shared_bytes_of_warp(tiling, sizeof(State), sizeof(Acc)));
  State* const h = reinterpret_cast<State*>(shared + 3 * padded);
  Update<Input, Acc> update(p, tile, warp_lane, padded, shared);

  // Columns after the last, and rows after the last, are zero.
#pragma unroll 1
  for (int i = warp_lane * kSize; i < tile_rows * pitch; i += kWarpSize * kSize) States::zero().store(h + i);
  __syncwarp();
  State* const source = static_cast<State*>(p.state.data) + slots.read * p.state.stride_slot + tile.head * p.state.stride_head;
  copy_tile<false>(tiling, p.state, source + tile.first * p.state.stride_row, h, pitch, rows, key_dim, warp_lane);
#pragma unroll 1
  for (int64_t t = 0; t < slots.range.count; ++t) {
    const int64_t token = slots.range.first + t;
    Input* const out = static_cast<Input*>(p.out.data) + p.out.offset(tile.row, token, tile.head);
#pragma unroll 1
    for (int64_t i = 0; i < p.updates; ++i) {
      const Input* const v = static_cast<const Input*>(p.v.data) + p.v.offset(tile.row, token * p.updates + i, tile.head);
      update.template load<2>(token, i, p.updates);
#pragma unroll 1
      for (int batch = 0; batch < tiling.batches; ++batch) {
        const int first_row = (batch * tiling.groups() + group) * kRowsInFlight, own = first_row + (lane & (kRowsInFlight - 1));
        const Acc value = own < rows ? to_accumulate(v[(tile.first + own) * p.v.stride_column]) : Acc(0);
        State* const places = h + first_row * pitch + lane * kSize;
        const int step = lanes * kSize;
        Acc sums[kMinLanes] = {}, corrections[kRowsInFlight];
#pragma unroll 1
        for (int m = 0; m < tiling.vectors; ++m) {
          add_products<kSize>(update, m * step + lane * kSize, sums,
                              [&](int r) { return States::load(places + r * pitch + m * step); });
        }
        const Acc sum = sum_of_each(sums, lane, lanes), correction = update.correction(value, sum);
#pragma unroll
        for (int r = 0; r < kRowsInFlight; ++r) corrections[r] = __shfl_sync(kAllLanes, correction, r, lanes);
#pragma unroll 1
        for (int m = 0; m < tiling.vectors; ++m) {
          States states[kRowsInFlight];
#pragma unroll
          for (int r = 0; r < kRowsInFlight; ++r) states[r] = States::load(places + r * pitch + m * step);
          apply<kSize>(update, m * step + lane * kSize, corrections, [&](int r) -> States& { return states[r]; });
#pragma unroll
          for (int r = 0; r < kRowsInFlight; ++r) states[r].store(places + r * pitch + m * step);
        }
        const Acc result = update.result(__shfl_sync(kAllLanes, correction, lane & (kRowsInFlight - 1), lanes), sum);
        const bool is_owner = (lane & ~(kRowsInFlight - 1)) == kRowsInFlight && own < rows;
        if (is_owner && i == p.updates - 1) out[(tile.first + own) * p.out.stride_column] = from_accumulate<Input>(result);
      }
    }
    __syncwarp();
    store_states<State>(p, tokens, tile, slots, t, [&](State* head, const StateView& view) {
      copy_tile<true>(tiling, view, head + tile.first * view.stride_row, h, pitch, rows, key_dim, warp_lane);
    });
    __syncwarp();
  }
}

}  // namespace ssm_kernels::delta_rule_step
