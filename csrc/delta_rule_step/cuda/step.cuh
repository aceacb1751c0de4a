// The step kernel: the delta rule's decoding step with the state in registers, read and written once, in vectors of 16 bytes.
//
//   S <- S diag(e^g);  d = beta (v - S k);  out = S q + d <k, q>;  S <- S + d k^T
//
// A warp brings e^g, k and q of its head to shared memory once. For each of kRowsInFlight rows a lane makes its parts of S k
// and S q; one exchange sums all of them over the group, and leaves the sum of row r in lanes r (S k) and r + 4 (S q) of
// each 8. Lane r computes d of its row, which the group's lanes get by shuffles, and lane r + 4 writes the output. The rows are
// loaded before k, q and the gates are waited for. The kernel starts while the previous one ends (PDL). With several tokens or
// updates the rows stay in registers, rounded to their type after each update.
#pragma once

#include "cuda/opaque.cuh"
#include "delta_rule_step/cuda/rows.cuh"

namespace ssm_kernels::delta_rule_step {

template <typename Input, typename State, int vectors, typename Tokens>
__device__ __forceinline__ void step_tile(const StepParams& p, const Tiling& tiling, const Tokens& tokens) {
  using Acc = cuda::AccumulateType<Input>;
  constexpr int kSize = kVectorBytes / static_cast<int>(sizeof(State)), kBatches = batches_at_once(vectors);
  constexpr bool has_tokens = std::is_same_v<Tokens, TokenParams>;
  using States = Vector<State, kSize>;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  const int warp = threadIdx.x / kWarpSize, warp_lane = threadIdx.x % kWarpSize, lanes = tiling.lanes();
  const uint32_t index = blockIdx.x * tiling.warps_per_block + warp;
  if (index >= tiling.tiles) return;
  const Tile tile = make_tile(tiling, index);
  const Slots slots = slots_of(p, tokens, tile.row);
  if (slots.read < 0 || slots.read >= p.slots) return fill_out<Input>(p, tiling, tile, slots, warp_lane);

  const int lane = warp_lane & (lanes - 1), key_dim = static_cast<int>(p.key_dim), padded = vectors * lanes * kSize;
  const int left = rows_of_tile(p, tiling, tile);
  int first_batch = 0;
  const auto column = [&](int m) { return (m * lanes + lane) * kSize; };
  // The place of row r of a batch in the tile.
  const auto row_of = [&](int batch, int r) {
    return ((first_batch + batch) * tiling.groups() + (warp_lane >> tiling.log2_lanes)) * kRowsInFlight + r;
  };
  const int own_row = lane & (kRowsInFlight - 1);  // of each batch
  States h[kBatches][kRowsInFlight][vectors];
  Acc v[kBatches];
  // Calls visitor(vector of the state, its offset from the tile's first row) for each of this lane's vectors that exist.
  const auto for_each_vector = [&](int stride_row, const auto& visitor) {
#pragma unroll
    for (int j = 0; j < kBatches; ++j) {
#pragma unroll
      for (int r = 0; r < kRowsInFlight; ++r) {
#pragma unroll
        for (int m = 0; m < vectors; ++m) {
          const int64_t offset = static_cast<int64_t>(row_of(j, r)) * stride_row + column(m);
          if (row_of(j, r) < left && column(m) < key_dim) visitor(h[j][r][m], offset);
        }
      }
    }
  };
  const State* const source = static_cast<const State*>(p.state.data) + slots.read * p.state.stride_slot +
                              tile.head * p.state.stride_head + tile.first * p.state.stride_row;
  const auto load_states = [&] {
#pragma unroll
    for (int j = 0; j < kBatches; ++j) {
#pragma unroll
      for (int r = 0; r < kRowsInFlight; ++r) {
#pragma unroll
        for (int m = 0; m < vectors; ++m) h[j][r][m] = States::zero();
      }
    }
    for_each_vector(static_cast<int>(p.state.stride_row),
                    [&](States& states, int64_t offset) { states = States::load_once(source + offset); });
  };
  const auto load_values = [&](int64_t entry) {
    const Input* const values =
        static_cast<const Input*>(p.v.data) + p.v.offset(tile.row, entry, tile.head) + tile.first * p.v.stride_column;
#pragma unroll
    for (int j = 0; j < kBatches; ++j) {
      const int own = row_of(j, own_row);
      v[j] = own < left ? to_accumulate(values[own * p.v.stride_column]) : Acc(0);
    }
  };

  Acc* const shared = reinterpret_cast<Acc*>(shared_bytes) + warp * 3 * padded;
  Update<Input, Acc> update(p, tile, warp_lane, padded, shared);
  // Updates the rows that are loaded, and writes their output if that is wanted.
  const auto apply_update = [&](int64_t token, bool has_output) {
    Input* const out =
        static_cast<Input*>(p.out.data) + p.out.offset(tile.row, token, tile.head) + tile.first * p.out.stride_column;
#pragma unroll
    for (int j = 0; j < kBatches; ++j) {
      Acc sums[kMinLanes] = {}, corrections[kRowsInFlight];
#pragma unroll
      for (int m = 0; m < vectors; ++m) {
        add_products<kSize>(update, column(m), sums, [&](int r) { return h[j][r][m]; });
      }
      const Acc sum = sum_of_each(sums, lane, lanes), correction = update.correction(v[j], sum);
#pragma unroll
      for (int r = 0; r < kRowsInFlight; ++r) corrections[r] = __shfl_sync(kAllLanes, correction, r, lanes);
#pragma unroll
      for (int m = 0; m < vectors; ++m) {
        apply<kSize>(update, column(m), corrections, [&](int r) -> States& { return h[j][r][m]; });
      }
      const Acc result = update.result(__shfl_sync(kAllLanes, correction, own_row, lanes), sum);
      const bool is_owner = (lane & ~(kRowsInFlight - 1)) == kRowsInFlight && row_of(j, own_row) < left;
      if (is_owner && has_output) out[row_of(j, own_row) * p.out.stride_column] = from_accumulate<Input>(result);
    }
  };
  const auto store_after = [&](int64_t t) {
    store_states<State>(p, tokens, tile, slots, t, [&](State* head, const StateView& view) {
      State* const target = head + tile.first * view.stride_row;
      // Opaque: the offsets of the loads would stay in registers until here.
      for_each_vector(cuda::opaque(static_cast<int>(view.stride_row)),
                      [&](States& states, int64_t offset) { states.store_once(target + offset); });
    });
  };

  load_states();
  if constexpr (has_tokens) {
#pragma unroll 1
    for (int64_t t = 0; t < slots.range.count; ++t) {
      const int64_t token = slots.range.first + t;
#pragma unroll 1
      for (int64_t i = 0; i < p.updates; ++i) {
        load_values(token * p.updates + i);
        update.template load<2>(token, i, p.updates);
        apply_update(token, i == p.updates - 1);
      }
      store_after(t);
    }
  } else {
    load_values(0);
    update.template load<4>(0, 0, 1);
    for (;;) {
      apply_update(0, true);
      store_after(0);
      first_batch += kBatches;
      if (first_batch * tiling.groups() * kRowsInFlight >= left) return;
      load_states();
      load_values(0);
    }
  }
}

// Takes one token and one update a row of the call, with one vector a lane.
template <typename Input, typename State>
__global__ void __launch_bounds__(kMaxWarpsPerBlock* kWarpSize, 4)
    delta_rule_step_kernel(const __grid_constant__ StepParams params, const __grid_constant__ Tiling tiling) {
  cuda::launch_dependents();
  cuda::grid_dependency_sync();
  step_tile<Input, State, 1>(params, tiling, OneToken());
}

template <typename Input, typename State, int vectors>
__global__ void __launch_bounds__(kMaxWarpsPerBlock* kWarpSize, 3)
    delta_rule_step_tokens_kernel(const __grid_constant__ StepParams params, const __grid_constant__ Tiling tiling,
                                  const __grid_constant__ TokenParams tokens) {
  cuda::launch_dependents();
  cuda::grid_dependency_sync();
  step_tile<Input, State, vectors>(params, tiling, tokens);
}

}  // namespace ssm_kernels::delta_rule_step
