// Shared by both kernels of the delta rule's step: the tile of a warp, its tokens and slots, sums over the lanes of a group,
// and the inputs of an update, which all rows of a head share.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/delta_gates.h"
#include "cuda/either.cuh"
#include "cuda/lane_sums.cuh"
#include "cuda/launch.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/vector_io.cuh"
#include "delta_rule_step/cuda/launch.h"

namespace ssm_kernels::delta_rule_step {

using cuda::from_accumulate, cuda::sum_of_each, cuda::to_accumulate, cuda::Vector;

static_assert(kMinLanes == 8, "sum_of_each sums 8 values, over at least 8 lanes");

// In place of TokenParams where each row has one token and one slot.
struct OneToken {};

// A warp's part of the call.
struct Tile {
  int64_t row, head, key_head;  // of the call; of the state and v; of q and k
  int64_t first;                // row of the state
};

__device__ __forceinline__ Tile make_tile(const Tiling& tiling, uint32_t index) {
  const uint32_t row_and_head = tiling.tiles_per_head.divide(index), row = tiling.heads.divide(row_and_head);
  const uint32_t head = row_and_head - row * tiling.heads.value<uint32_t>();
  const uint32_t place = index - row_and_head * tiling.tiles_per_head.value<uint32_t>();
  return {tiling.first_row + row, head, tiling.heads_per_key.divide(head), int64_t(place) * tiling.rows_per_tile()};
}

// The rows of the state that the tile has.
__device__ __forceinline__ int rows_of_tile(const StepParams& p, const Tiling& tiling, const Tile& tile) {
  const int64_t left = p.value_dim - tile.first;
  return left < tiling.rows_per_tile() ? static_cast<int>(left) : tiling.rows_per_tile();
}

// The tokens and slots of a tile, for OneToken and TokenParams alike.
struct Slots {
  TokenRange range;
  int64_t read, entry;
};

__device__ __forceinline__ Slots slots_of(const StepParams& p, const OneToken&, int64_t row) { return {{}, p.slot(row), -1}; }
__device__ __forceinline__ Slots slots_of(const StepParams&, const TokenParams& tokens, int64_t row) {
  const int64_t entry = tokens.rows.intermediate_entry(row);
  return {tokens.rows.tokens_of(row), tokens.rows.read_slot(row), entry < tokens.rows.intermediate_count ? entry : -1};
}

// Calls store(head of a state, stride of its rows) for each state that is written after token t.
template <typename State, typename Store>
__device__ __forceinline__ void store_states(const StepParams& p, const TokenParams& tokens, const Tile& tile,
                                             const Slots& slots, int64_t t, const Store& store) {
  const int64_t slot = tokens.rows.write_slot(tile.row, t, slots.range.count);
  const auto store_to = [&](const StateView& view, int64_t offset) {
    store(static_cast<State*>(view.data) + offset + tile.head * view.stride_head, view);
  };
  if (slot >= 0 && slot < p.slots) store_to(p.state, slot * p.state.stride_slot);
  if (slots.entry >= 0 && t < tokens.rows.intermediate_tokens) {
    store_to(tokens.intermediate, slots.entry * tokens.intermediate.stride_slot + t * tokens.intermediate_token);
  }
}
template <typename State, typename Store>
__device__ __forceinline__ void store_states(const StepParams& p, const OneToken&, const Tile& tile, const Slots& slots,
                                             int64_t, const Store& store) {
  store(static_cast<State*>(p.state.data) + slots.read * p.state.stride_slot + tile.head * p.state.stride_head, p.state);
}

// The output of a row of the call without a state: zero for padding, NaN for a slot past the last one.
template <typename Input>
__device__ __forceinline__ void fill_out(const StepParams& p, const Tiling& tiling, const Tile& tile, const Slots& slots,
                                         int lane) {
  using Acc = cuda::AccumulateType<Input>;
  const Input value = from_accumulate<Input>(slots.read < 0 ? Acc(0) : Acc(__int_as_float(0x7fffffff)));
  const int rows = rows_of_tile(p, tiling, tile);
  for (int64_t t = 0; t < slots.range.count; ++t) {
    Input* const out = static_cast<Input*>(p.out.data) + p.out.offset(tile.row, slots.range.first + t, tile.head);
    for (int r = lane; r < rows; r += kWarpSize) out[(tile.first + r) * p.out.stride_column] = value;
  }
}

template <typename Acc>
__device__ __forceinline__ Acc sum_of_warp(Acc value) {
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
  return value;
}

// 1 / sqrt(squares + epsilon).
__device__ __forceinline__ float reciprocal_norm(float squares) { return rsqrtf(squares + static_cast<float>(kNormEpsilon)); }
__device__ __forceinline__ double reciprocal_norm(double squares) { return 1 / sqrt(squares + kNormEpsilon); }

// The inputs of an update. k, q and e^g of a head are in shared memory, as they come and zero from the last column on. The
// factors have the norms and the scale.
template <typename Input, typename Acc>
struct Update {
  const StepParams& p;
  const Tile& tile;
  int lane, padded;  // columns in shared memory
  Acc *k, *q, *decay;
  Acc beta = 0, k_factor = 1, q_factor = 1, kq = 0;

  __device__ __forceinline__ Update(const StepParams& p, const Tile& tile, int lane, int padded, Acc* shared)
      : p(p), tile(tile), lane(lane), padded(padded), k(shared), q(shared + padded), decay(shared + 2 * padded) {}

  // Loads update i of `updates` of a token. All lanes of the warp take part, each with some of the columns, of which it loads
  // `kUnrolled` at a time.
  template <int kUnrolled>
  __device__ __forceinline__ void load(int64_t token, int64_t i, int64_t updates) {
    using One = cuda::Either<Input>;
    const int64_t entry = token * updates + i;
    const bool is_last = i == updates - 1, has_gate = i == 0 && p.g.data != nullptr;
    const bool has_bias = has_gate && p.dt_bias.data != nullptr, has_rate = has_gate && p.A_log.data != nullptr;
    const Input* const keys = static_cast<const Input*>(p.k.data) + p.k.offset(tile.row, entry, tile.key_head);
    const Input* const queries = static_cast<const Input*>(p.q.data) + p.q.offset(tile.row, token, tile.key_head);
    const int64_t gates = p.g.offset(tile.row, token, tile.head), biases = tile.head * p.dt_bias.stride_head;
    One strength, log_rate;
    strength.load(p.beta.data, p.beta.offset(tile.row, entry, tile.head), p.beta_is_input_kind);
    if (has_rate) log_rate.load(p.A_log.data, tile.head * p.A_log.stride_head, p.A_log.is_input_kind);
    Acc kk = 0, qq = 0;
    kq = 0;
    __syncwarp();  // all lanes have read the columns of the last update
#pragma unroll 1
    for (int begin = lane; begin < padded; begin += kUnrolled * kWarpSize) {
      Input key[kUnrolled], query[kUnrolled];
      One gate[kUnrolled], bias[kUnrolled];
#pragma unroll
      for (int u = 0; u < kUnrolled; ++u) {
        const int c = begin + u * kWarpSize;
        const bool is_inside = c < p.key_dim;
        key[u] = query[u] = from_accumulate<Input>(Acc(0));
        if (is_inside) key[u] = keys[c * p.k.stride_column];
        if (is_inside && is_last) query[u] = queries[c * p.q.stride_column];
        if (is_inside && has_gate) gate[u].load(p.g.data, gates + c * p.g.stride_column, p.g_is_input_kind);
        if (is_inside && has_bias) bias[u].load(p.dt_bias.data, biases + c * p.dt_bias.stride_column, p.dt_bias.is_input_kind);
      }
      // Otherwise the compiler converts one value, and so waits for it, before it issues the next load.
      asm volatile("" ::: "memory");
#pragma unroll
      for (int u = 0; u < kUnrolled; ++u) {
        const int c = begin + u * kWarpSize;
        const Acc key_value = to_accumulate(key[u]), query_value = to_accumulate(query[u]);
        kk = Math<Acc>::fma(key_value, key_value, kk);
        qq = Math<Acc>::fma(query_value, query_value, qq);
        kq = Math<Acc>::fma(key_value, query_value, kq);
        Acc decayed = 1;
        if (has_gate) {
          decayed = gate[u].value(p.g_is_input_kind);
          if (p.has_raw_gate) {
            if (has_bias) decayed += bias[u].value(p.dt_bias.is_input_kind);
            const Acc rate = has_rate ? Math<Acc>::exp(log_rate.value(p.A_log.is_input_kind)) : Acc(1);
            decayed =
                p.is_bounded ? bounded_gate(decayed, rate, static_cast<Acc>(p.gate_lower_bound)) : softplus_gate(decayed, rate);
          }
          decayed = Math<Acc>::exp(decayed);
        }
        if (c < padded) {
          k[c] = key_value;
          q[c] = query_value;
          decay[c] = c < p.key_dim ? decayed : Acc(0);
        }
      }
    }
    beta = write_strength(strength.value(p.beta_is_input_kind), p.beta_sigmoid, p.allow_neg_eigval);
    kq = sum_of_warp(kq);
    q_factor = static_cast<Acc>(p.scale);
    if (p.qk_l2norm) {
      k_factor = reciprocal_norm(sum_of_warp(kk));
      q_factor *= reciprocal_norm(sum_of_warp(qq));
    }
    __syncwarp();
  }

  // The factor of k in the update of a row, from v and the sum of its products with k.
  __device__ __forceinline__ Acc correction(Acc v, Acc sum) const { return beta * (v - k_factor * sum) * k_factor; }
  // The output of a row, from its correction and the sum of its products with q.
  __device__ __forceinline__ Acc result(Acc correction, Acc sum) const {
    return q_factor * Math<Acc>::fma(correction, kq, sum);
  }
};

// The parts of both products of some rows that a lane's columns from `first` on make: with k in sums[r], with q behind them.
// rows(r) returns a vector of row r.
template <int size, typename Input, typename Acc, typename Rows>
__device__ __forceinline__ void add_products(const Update<Input, Acc>& update, int first, Acc (&sums)[kMinLanes],
                                             const Rows& rows) {
  const auto k = Vector<Acc, size>::load(update.k + first), q = Vector<Acc, size>::load(update.q + first),
             decay = Vector<Acc, size>::load(update.decay + first);
#pragma unroll
  for (int r = 0; r < kRowsInFlight; ++r) {
    const auto states = rows(r);
#pragma unroll
    for (int c = 0; c < size; ++c) {
      const Acc decayed = decay[c] * states.accumulate(c);
      sums[r] = Math<Acc>::fma(decayed, k[c], sums[r]);
      sums[r + kRowsInFlight] = Math<Acc>::fma(decayed, q[c], sums[r + kRowsInFlight]);
    }
  }
}

// The rows after the update, given the correction of each. rows(r) returns a reference to a vector of row r.
template <int size, typename Input, typename Acc, typename Rows>
__device__ __forceinline__ void apply(const Update<Input, Acc>& update, int first, const Acc (&corrections)[kRowsInFlight],
                                      const Rows& rows) {
  const auto k = Vector<Acc, size>::load(update.k + first), decay = Vector<Acc, size>::load(update.decay + first);
#pragma unroll
  for (int r = 0; r < kRowsInFlight; ++r) {
    auto& states = rows(r);
    Acc values[size];
#pragma unroll
    for (int c = 0; c < size; ++c) values[c] = Math<Acc>::fma(corrections[r], k[c], decay[c] * states.accumulate(c));
    states = std::remove_reference_t<decltype(states)>::round(values);
  }
}

// Launches the kernel for all rows of the call: a grid has a limited size.
template <typename Kernel, typename... Tokens>
cudaError_t launch_grids(Kernel* kernel, const StepParams& params, Tiling tiling, int bytes, cudaStream_t stream,
                         const Tokens&... tokens) {
  constexpr int64_t kMostTiles = (int64_t(1) << 31) - kMaxWarpsPerBlock;
  const int64_t tiles_of_row = params.value_heads * tiling.tiles_per_head.value<int64_t>();
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, bytes); error != cudaSuccess) return error;
  for (; tiling.first_row < params.rows; tiling.first_row += kMostTiles / tiles_of_row) {
    const int64_t left = (params.rows - tiling.first_row) * tiles_of_row, most = kMostTiles / tiles_of_row * tiles_of_row;
    tiling.tiles = static_cast<uint32_t>(left < most ? left : most);
    const int64_t blocks = (tiling.tiles + tiling.warps_per_block - 1) / tiling.warps_per_block;
    const cudaError_t error = cuda::launch(kernel, blocks, tiling.warps_per_block * kWarpSize, bytes, stream,
                                           cuda::has_pdl(kernel), params, tiling, tokens...);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ssm_kernels::delta_rule_step
