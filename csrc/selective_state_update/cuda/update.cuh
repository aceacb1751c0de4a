// Selective state update on CUDA: one step of the scan, the state updated in place.
//
//   h = Abar(z) h + delta k(z) B x, z = delta A        out = (<C, h> + D x) silu(gate)
//
// h: (batch, heads, headdim, dstate); x, dt, gate, out: (batch, heads, headdim); B, C: (batch, groups, dstate). The time is one
// read and one write of the state, so other work stays off that path:
// * launch.h describes rows, lanes and tiles. kRowsInFlight rows are loaded before the first is used, the first of them
// together
//   with the inputs of the step sizes.
// * The row's owner computes what does not depend on the state (softplus, gate, and Abar and the gain if A is tied) once and
//   broadcasts it by shuffles.
// * The sums <C, h> of kRowsInFlight rows are reduced together: each exchange between lanes halves the rows per lane, until
// every
//   owner has its own. The order of additions is fixed.
// The state bypasses the first-level cache; A, B and C stay in it.
//
// A second kernel of the same code serves rows of several tokens, and slots to read from and to write to: it keeps the states
// of kRowsInFlight rows in registers from token to token, rounded to their type, as calls of one token leave them.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "common/activations.h"
#include "common/discretization.h"
#include "cuda/index_math.cuh"
#include "cuda/launch.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/vector_io.cuh"
#include "selective_state_update/cuda/launch.h"
#include "selective_state_update/cuda/rows.cuh"

namespace ssm_kernels::selective_state_update {

using cuda::from_accumulate;
using cuda::to_accumulate;
using cuda::Vector;

// One element of a tensor of the input type or the accumulation type. Conversion is separate, so that a row's loads are issued
// back to back.
template <typename Input, typename Acc = cuda::AccumulateType<Input>>
struct Parameter {
  Input as_input;
  Acc as_accumulate;

  __device__ __forceinline__ void load(const void* data, int64_t offset, bool is_input_kind) {
    if (is_input_kind) {
      as_input = static_cast<const Input*>(data)[offset];
    } else {
      as_accumulate = static_cast<const Acc*>(data)[offset];
    }
  }
  __device__ __forceinline__ Acc value(bool is_input_kind) const {
    return is_input_kind ? to_accumulate(as_input) : as_accumulate;
  }
};
template <typename Acc>
struct Parameter<Acc, Acc> {
  Acc loaded;

  __device__ __forceinline__ void load(const void* data, int64_t offset, bool) {
    loaded = static_cast<const Acc*>(data)[offset];
  }
  __device__ __forceinline__ Acc value(bool) const { return loaded; }
};

template <int size, typename Scalar>
__device__ __forceinline__ Vector<Scalar, size> load_if(bool condition, const Scalar* source) {
  return condition ? Vector<Scalar, size>::load(source) : Vector<Scalar, size>::zero();
}

// A warp's batch row, group and channels.
template <typename Index>
struct Tile {
  Index batch, group;
  Index first_channel;  // of this lane's group of lanes
  int rows;             // of this lane's group of lanes; may be 0 at the end of a group of channels

  __device__ __forceinline__ Tile(const Tiling& tiling, Index index, int lane_group) {
    Index channel_tile;
    if (tiling.batch_fastest) {
      channel_tile = tiling.batch.divide(index);
      batch = index - channel_tile * tiling.batch.value<Index>();
    } else {
      batch = tiling.tiles_per_batch.divide(index);
      channel_tile = index - batch * tiling.tiles_per_batch.value<Index>();
    }
    group = tiling.tiles_per_group.divide(channel_tile);
    const Index tile_in_group = channel_tile - group * tiling.tiles_per_group.value<Index>();
    const Index first_in_group = tile_in_group * tiling.rows_per_tile() + lane_group * tiling.rows;
    const Index channels_per_group = static_cast<Index>(tiling.channels_per_group);
    first_channel = group * channels_per_group + first_in_group;
    const Index left = channels_per_group > first_in_group ? channels_per_group - first_in_group : 0;
    rows = left > Index(tiling.rows) ? tiling.rows : static_cast<int>(left);
  }
};

// The offset of `index` steps of `stride` elements.
template <typename Index>
__device__ __forceinline__ auto times(Index index, int64_t stride) {
  return cuda::widening_multiply(index, static_cast<Index>(stride));
}

// The row that a lane owns: the offsets of its inputs, of its output and of its state.
template <typename Index, bool fast>
struct OwnedRow {
  const Tile<Index>& tile;
  const Index &head, &dim;

  template <typename View>
  __device__ __forceinline__ auto offset_in(const View& view) const {
    return times(tile.batch, view.stride_batch) + times(head, view.stride_head) + times(dim, view.stride_dim);
  }
  // The offset of the row of a state inside a slot; in the fast kernel, of the lane group's first row.
  __device__ __forceinline__ auto row_in(const StateView& view, int64_t stride_row) const {
    return fast ? times(tile.first_channel, stride_row) : times(head, view.stride_head) + times(dim, view.stride_dim);
  }
};

// In place of TokenParams in the kernel of one token.
struct OneToken {};

// Stores the outputs of a row whose slot is not in the state: zeros for a negative slot, else NaN.
template <typename Input, typename Tokens>
__device__ __forceinline__ void store_without_state(Input* out, bool owner, int64_t slot, const TokenRange& range,
                                                    const Tokens& tokens) {
  using Acc = cuda::AccumulateType<Input>;
  const Input value = from_accumulate<Input>(slot < 0 ? Acc(0) : static_cast<Acc>(nan("")));
  if constexpr (std::is_same_v<Tokens, TokenParams>) {
    for (int64_t t = 0; owner && t < range.count; ++t) out[t * tokens.out] = value;
  } else {
    if (owner) *out = value;
  }
}

// Computes what a step of the owner's row needs besides the state: Abar (`first`) and the input's factor (`second`) if A is
// tied, else delta and delta x; D x and the gate.
template <bool tied_A, typename Input, typename Method, typename Acc>
__device__ __forceinline__ void prepare_row(const StateUpdateParams& p, const Method& method, const Input& x_in,
                                            const Input& dt_in, const Input& z_in, const Parameter<Input>& dt_bias,
                                            const Parameter<Input>& skip, const Parameter<Input>& tied, Acc& first, Acc& second,
                                            Acc& skipped, Acc& gate) {
  const Acc x = to_accumulate(x_in);
  Acc delta = to_accumulate(dt_in);
  if (p.dt_bias.data != nullptr) delta += dt_bias.value(p.dt_bias_is_input_kind);
  if (p.dt_softplus) delta = softplus(delta);
  delta = clamp(delta, static_cast<Acc>(p.dt_min), static_cast<Acc>(p.dt_max));
  first = delta;
  second = delta * x;
  if constexpr (std::is_same_v<Method, FurtherMethod>) {
    visit_method(method, [&](const auto& method) { second = method.kInputHasDelta ? second : x; });
  }
  if constexpr (tied_A) {
    Acc row_A = tied.value(p.A_is_input_kind);
    if (p.A_is_log) row_A = -Math<Acc>::exp(row_A);
    visit_method(method, [&](const auto& method) {
      const Acc z = delta * row_A, basis = method.basis(z);
      first = method.abar(z, basis);
      second *= current_gain(method, z, basis);
    });
  }
  if (p.D.data != nullptr) skipped = skip.value(p.D_is_input_kind) * x;
  if (p.z.data != nullptr) gate = silu(to_accumulate(z_in));
}

template <typename Input, typename State, typename Method, bool fast, bool tied_A, typename Tokens>
__device__ __forceinline__ void update_tile(const StateUpdateParams& p, const Tiling& tiling, const Tokens& tokens,
                                            const MethodParameters& parameters = {}) {
  constexpr bool has_tokens = std::is_same_v<Tokens, TokenParams>;
  using Acc = cuda::AccumulateType<Input>;
  using Index = std::conditional_t<fast, uint32_t, int64_t>;
  constexpr int kVectorSize = vector_elements(sizeof(State), tied_A);
  const Index warp = Index(tiling.first_tile) + Index(blockIdx.x) * tiling.warps_per_block + Index(threadIdx.x / kWarpSize);
  if (warp >= Index(tiling.tiles)) return;
  const Method method = make_method<Method>(p.discretization, parameters);
  const int lanes = tiling.lanes();
  const int lane = threadIdx.x & (lanes - 1);
  const Tile<Index> tile(tiling, warp, (threadIdx.x & (kWarpSize - 1)) >> tiling.log2_lanes);

  const bool owner = lane < tile.rows;
  const Index channel = tile.first_channel + (owner ? lane : 0);
  const Index head = tiling.headdim.divide(channel);
  const Index dim = channel - head * tiling.headdim.value<Index>();
  const OwnedRow<Index, fast> row{tile, head, dim};
  Input* out = static_cast<Input*>(p.out.data) + row.offset_in(p.out);

  int64_t slot;
  TokenRange range;
  if constexpr (has_tokens) {
    slot = tokens.rows.read_slot(tile.batch);
    range = tokens.rows.tokens_of(tile.batch);
    out += range.first * tokens.out;
  } else {
    slot = p.indices.at(tile.batch);
  }
  if (slot < 0 || slot >= p.slots) {
    store_without_state(out, owner, slot, range, tokens);
    return;
  }

  const int dstate = static_cast<int>(p.dstate);
  int n = lane * kVectorSize;
  const auto in_matrix = [&](const GroupView& view) {
    return static_cast<const Input*>(view.data) + times(tile.batch, view.stride_batch) + times(tile.group, view.stride_group);
  };
  const Input* const B = in_matrix(p.B);
  const Input* const C = in_matrix(p.C);
  const auto rows_of_slot = [&](int64_t slot) {
    return static_cast<State*>(p.state.data) + times(Index(slot), p.state.stride_batch) +
           row.row_in(p.state, tiling.state_stride_row);
  };
  State* const state = rows_of_slot(slot);
  // In elements: the offset of the lane's own value if A is tied, else of a row.
  const auto A_offset = tied_A ? row.offset_in(p.A) : row.row_in(p.A, tiling.A_stride_row);

  // Loads only, up to the next comment, so that their latencies overlap.
  Input x_in, dt_in, z_in;
  Parameter<Input> dt_bias, skip, tied;
  const auto load_inputs = [&](int64_t token) {
    int64_t x_token = 0, dt_token = 0, z_token = 0;
    if constexpr (has_tokens) {
      x_token = token * tokens.x;
      dt_token = token * tokens.dt;
      z_token = token * tokens.z;
    }
    if (owner) {
      dt_in = static_cast<const Input*>(p.dt.data)[row.offset_in(p.dt) + dt_token];
      x_in = static_cast<const Input*>(p.x.data)[row.offset_in(p.x) + x_token];
      if (p.dt_bias.data != nullptr) dt_bias.load(p.dt_bias.data, row.offset_in(p.dt_bias), p.dt_bias_is_input_kind);
      if (p.D.data != nullptr) skip.load(p.D.data, row.offset_in(p.D), p.D_is_input_kind);
      if (p.z.data != nullptr) z_in = static_cast<const Input*>(p.z.data)[row.offset_in(p.z) + z_token];
      if constexpr (tied_A) tied.load(p.A.data, A_offset, p.A_is_input_kind);
    }
  };
  if constexpr (!has_tokens) load_inputs(0);
  int first_row = 0;
  const auto is_active = [&](int r) { return first_row + r < tile.rows && n < dstate; };
  const auto of_row = [&](auto owned, int r) { return shuffle(owned, first_row + r, lanes); };
  // Element n of row r in flight.
  const auto element = [&](auto* rows, int r, int64_t stride_row, int64_t stride_state) {
    if constexpr (fast) {
      return rows + times(Index(first_row + r), stride_row) + n;
    } else {
      return of_row(rows, r) + times(Index(n), stride_state);
    }
  };
  // Elements of the lane's vector that are inside of an active row.
  const auto count = [&](bool active) { return active ? dstate - n : 0; };
  const auto load_group = [&](const Input* row, int64_t stride_state) {
    if constexpr (fast) {
      return load_if<kVectorSize>(n < dstate, row + n);
    } else {
      return load_elements<kVectorSize>(count(n < dstate), row + times(Index(n), stride_state), stride_state);
    }
  };
  Vector<State, kVectorSize> h[kRowsInFlight];
  Vector<Acc, kVectorSize> A_n[tied_A ? 1 : kRowsInFlight];
  const auto load_A = [&](const auto* A) {
#pragma unroll
    for (int r = 0; r < kRowsInFlight; ++r) {
      const auto* const source = element(A, r, tiling.A_stride_row, p.A.stride_state);
      const auto loaded = [&] {
        if constexpr (fast) {
          return load_if<kVectorSize>(is_active(r), source);
        } else {
          return load_elements<kVectorSize>(count(is_active(r)), source, p.A.stride_state);
        }
      }();
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) A_n[r].set(i, loaded.accumulate(i));
    }
  };
  const auto load_states = [&] {
#pragma unroll
    for (int r = 0; r < kRowsInFlight; ++r) {
      const State* const source = element(state, r, tiling.state_stride_row, p.state.stride_state);
      if constexpr (fast) {
        h[r] = is_active(r) ? Vector<State, kVectorSize>::load_once(source) : Vector<State, kVectorSize>::zero();
      } else {
        h[r] = load_elements<kVectorSize>(count(is_active(r)), source, p.state.stride_state);
      }
    }
  };
  const auto store_state = [&](State* target, int r, int64_t stride_state) {
    if constexpr (fast) {
      if (is_active(r)) h[r].store_once(target);
    } else {
      store_elements(h[r], count(is_active(r)), target, stride_state);
    }
  };
  const auto load_rows_of_A = [&] {
    if constexpr (!tied_A) {
      if (!std::is_same_v<Input, Acc> && p.A_is_input_kind) {
        load_A(static_cast<const Input*>(p.A.data) + A_offset);
      } else {
        load_A(static_cast<const Acc*>(p.A.data) + A_offset);
      }
      if (p.A_is_log) {
#pragma unroll
        for (int r = 0; r < kRowsInFlight; ++r) {
#pragma unroll
          for (int i = 0; i < kVectorSize; ++i) A_n[r].set(i, -Math<Acc>::exp(A_n[r][i]));
        }
      }
    }
  };
  Vector<Input, kVectorSize> B_n, C_n;
  const auto load_groups = [&](int64_t token) {
    if constexpr (has_tokens) {
      B_n = load_group(B + token * tokens.B, p.B.stride_state);
      C_n = load_group(C + token * tokens.C, p.C.stride_state);
    } else {
      B_n = load_group(B, p.B.stride_state);
      C_n = load_group(C, p.C.stride_state);
    }
  };
  if constexpr (!has_tokens) {
    load_states();
    load_rows_of_A();
    load_groups(0);
  }

  // Abar and the input's factor if A is tied; otherwise delta and delta x, from which they are computed.
  Acc first = 0, second = 0, skipped = 0, gate = 1;
  const auto prepare = [&] {
    if (owner) prepare_row<tied_A>(p, method, x_in, dt_in, z_in, dt_bias, skip, tied, first, second, skipped, gate);
  };
  // Updates row r in flight and returns the lane's part of <C, h>.
  const auto update_row = [&](int r) {
    const Acc row_first = of_row(first, r), row_second = of_row(second, r);
    Acc sum = 0;
    const auto update = [&](int i, Acc abar, Acc factor) {
      const Acc value = Math<Acc>::fma(abar, to_accumulate(h[r][i]), factor * to_accumulate(B_n[i]));
      // A step size of inf makes even a zero state NaN.
      if (fast || n + i < dstate) sum = Math<Acc>::fma(value, to_accumulate(C_n[i]), sum);
      h[r].set(i, from_accumulate<State>(value));
    };
    if constexpr (tied_A) {
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) update(i, row_first, row_second);
    } else {
      visit_method(method, [&](const auto& method) {
#pragma unroll
        for (int i = 0; i < kVectorSize; ++i) {
          const Acc z = row_first * A_n[r][i], basis = method.basis(z);
          update(i, method.abar(z, basis), row_second * current_gain(method, z, basis));
        }
      });
    }
    return sum;
  };

  if constexpr (has_tokens) {
    // All values of a row, kBlocks vectors a lane: one in the fast kernel. The general kernel keeps them in local memory, where
    // an unrolled loop would have the code of all methods for each of 32 values.
    constexpr int kBlocks = fast ? 1 : static_cast<int>(kMaxDstate) / (kWarpSize * kVectorSize);
    Vector<State, kVectorSize> states[kBlocks][kRowsInFlight];
    const auto for_each_block = [&](const auto& visitor) {
#pragma unroll 1
      for (int block = 0; block < kBlocks; ++block) {
        n = (lane + block * lanes) * kVectorSize;
        if (block == 0 || block * lanes * kVectorSize < dstate) visitor(block);
      }
    };
    const int64_t entry = tokens.rows.intermediate_entry(tile.batch);
    const bool has_entry = entry >= 0 && entry < tokens.rows.intermediate_count;
    for (; first_row < tiling.rows; first_row += kRowsInFlight) {
      for_each_block([&](int block) {
        load_states();
#pragma unroll
        for (int r = 0; r < kRowsInFlight; ++r) states[block][r] = h[r];
      });
      if constexpr (kBlocks == 1) load_rows_of_A();
      for (int64_t t = 0; t < range.count; ++t) {
        const int64_t token = range.first + t;
        // The inputs of a single token stay in registers for all rows of the state.
        const bool is_new = range.count > 1 || first_row == 0;
        if (is_new) {
          load_inputs(token);
          if constexpr (kBlocks == 1) load_groups(token);
          prepare();
        }
        const int64_t write = tokens.rows.write_slot(tile.batch, t, range.count);
        const auto store = [&](State* rows, int64_t stride_row, int64_t stride_state) {
#pragma unroll
          for (int r = 0; r < kRowsInFlight; ++r) {
            State* const target = element(rows, r, stride_row, stride_state);
            store_state(target, r, stride_state);
          }
        };
        Acc partial[kRowsInFlight] = {};
        for_each_block([&](int block) {
          if constexpr (kBlocks > 1) {
            load_groups(token);
            load_rows_of_A();
          }
#pragma unroll
          for (int r = 0; r < kRowsInFlight; ++r) {
            h[r] = states[block][r];
            const Acc sum = update_row(r);
            // A step size of inf makes even a zero state NaN.
            if (is_active(r)) partial[r] += sum;
            states[block][r] = h[r];
          }
          if (write >= 0 && write < p.slots) store(rows_of_slot(write), tiling.state_stride_row, p.state.stride_state);
          if (has_entry && t < tokens.rows.intermediate_tokens) {
            State* const rows = static_cast<State*>(tokens.intermediate.data) + entry * tokens.intermediate.stride_batch +
                                t * tokens.intermediate_token + row.row_in(tokens.intermediate, tokens.intermediate_row);
            store(rows, tokens.intermediate_row, tokens.intermediate.stride_state);
          }
        });
        const Acc sum = reduce_rows(partial, lane, lanes);
        if (owner && (lane & ~(kRowsInFlight - 1)) == first_row) {
          out[t * tokens.out] = from_accumulate<Input>((sum + skipped) * gate);
        }
      }
    }
  } else {
    prepare();
    Acc sum = 0;
    for (;;) {
      Acc partial[kRowsInFlight];
#pragma unroll
      for (int r = 0; r < kRowsInFlight; ++r) {
        partial[r] = update_row(r);
        State* const target = element(state, r, tiling.state_stride_row, p.state.stride_state);
        store_state(target, r, p.state.stride_state);
        // A step size of inf makes even a zero state NaN.
        if (!is_active(r)) partial[r] = 0;
      }
      const Acc reduced = reduce_rows(partial, lane, lanes);
      if ((lane & ~(kRowsInFlight - 1)) == first_row) sum += reduced;

      first_row += kRowsInFlight;
      if (first_row >= tiling.rows) {
        first_row = 0;
        n += lanes * kVectorSize;
        if (n - lane * kVectorSize >= dstate) break;
        load_groups(0);
      }
      load_states();
      load_rows_of_A();
    }

    if (owner) *out = from_accumulate<Input>((sum + skipped) * gate);
  }
}

// Blocks per multiprocessor. They allow a thread 128 registers in the general kernel, 64 for a tied A with a float state, else
// 80 (vectors of fp16 and bf16 states hold twice as many values). With fewer registers the kernels spill.
template <typename State, bool fast, bool tied_A>
constexpr int kMinBlocks = !fast                ? 4
                           : sizeof(State) == 2 ? 6
                                                : (tied_A ? 8 : 6);

template <typename Input, typename State, typename Method, bool fast, bool tied_A>
__global__ void __launch_bounds__(kMaxWarpsPerBlock* kWarpSize, kMinBlocks<State, fast, tied_A>)
    selective_state_update_kernel(const __grid_constant__ StateUpdateParams params, const __grid_constant__ Tiling tiling) {
  cuda::launch_dependents();
  cuda::grid_dependency_sync();
  update_tile<Input, State, Method, fast, tied_A>(params, tiling, OneToken());
}

// 128 registers a thread in the fast kernel, 168 in the general one.
template <bool fast>
constexpr int kMinTokenBlocks = fast ? 4 : 3;

template <typename Input, typename State, typename Method, bool fast, bool tied_A>
__global__ void __launch_bounds__(kMaxWarpsPerBlock* kWarpSize, kMinTokenBlocks<fast>)
    selective_state_update_tokens_kernel(const __grid_constant__ StateUpdateParams params,
                                         const __grid_constant__ Tiling tiling, const __grid_constant__ TokenParams tokens) {
  cuda::launch_dependents();
  cuda::grid_dependency_sync();
  update_tile<Input, State, Method, fast, tied_A>(params, tiling, tokens);
}

// The kernels of SSM_FURTHER_DISCRETIZATIONS: `fast` for one token and an A of dstate values a row alone.
template <typename Input, typename State, bool fast, bool tied_A>
__global__ void __launch_bounds__(kMaxWarpsPerBlock* kWarpSize, kMinBlocks<State, fast, tied_A>)
    selective_state_update_further_kernel(const __grid_constant__ StateUpdateParams params,
                                          const __grid_constant__ Tiling tiling,
                                          const __grid_constant__ MethodParameters parameters) {
  cuda::launch_dependents();
  cuda::grid_dependency_sync();
  update_tile<Input, State, FurtherMethod, fast, tied_A>(params, tiling, OneToken(), parameters);
}
template <typename Input, typename State, bool tied_A>
__global__ void __launch_bounds__(kMaxWarpsPerBlock* kWarpSize, kMinTokenBlocks<false>)
    selective_state_update_further_tokens_kernel(const __grid_constant__ StateUpdateParams params,
                                                 const __grid_constant__ Tiling tiling,
                                                 const __grid_constant__ TokenParams tokens,
                                                 const __grid_constant__ MethodParameters parameters) {
  cuda::launch_dependents();
  cuda::grid_dependency_sync();
  update_tile<Input, State, FurtherMethod, false, tied_A>(params, tiling, tokens, parameters);
}

// Launches the kernel for all tiles: a grid has a limited size.
template <typename... Params, typename... Tokens>
cudaError_t launch_grids(void (*kernel)(Params...), const StateUpdateParams& params, Tiling tiling, cudaStream_t stream,
                         const Tokens&... tokens) {
  constexpr int64_t kMaxBlocks = std::numeric_limits<int32_t>::max();
  for (; tiling.first_tile < tiling.tiles; tiling.first_tile += kMaxBlocks * tiling.warps_per_block) {
    const int64_t blocks = (tiling.tiles - tiling.first_tile + tiling.warps_per_block - 1) / tiling.warps_per_block;
    const cudaError_t error = cuda::launch(kernel, std::min(blocks, kMaxBlocks), tiling.warps_per_block * kWarpSize, 0, stream,
                                           cuda::has_pdl(kernel), params, tiling, tokens...);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <typename Input, typename State>
cudaError_t launch_selective_state_update(const StateUpdateParams& params, const TokenParams* tokens, const Tiling& tiling,
                                          cudaStream_t stream) {
  check_known(params.discretization);
  // Whether rows with a tied A are cut into other vectors: the general kernel takes both, except for that.
  constexpr bool splits_A = vector_elements(sizeof(State), true) != vector_elements(sizeof(State), false);
  if (tokens != nullptr) {
    // Compiled for the fewest methods: the owner of a row with a tied A, and every lane with another, chooses at run time.
    auto* kernel = params.tied_A() ? selective_state_update_tokens_kernel<Input, State, RuntimeMethod, false, splits_A>
                                   : selective_state_update_tokens_kernel<Input, State, RuntimeMethod, false, false>;
    if constexpr (!std::is_same_v<Input, double>) {
      if (tiling.fast && params.tied_A()) {
        kernel = selective_state_update_tokens_kernel<Input, State, RuntimeMethod, true, true>;
      } else if (tiling.fast && params.discretization == Discretization::kZoh) {
        kernel = selective_state_update_tokens_kernel<Input, State, Zoh, true, false>;
      } else if (tiling.fast) {
        kernel = selective_state_update_tokens_kernel<Input, State, RuntimeMethod, true, false>;
      }
    }
    return launch_grids(kernel, params, tiling, stream, *tokens);
  }
  void (*kernel)(StateUpdateParams, Tiling) = params.tied_A()
                                                  ? selective_state_update_kernel<Input, State, RuntimeMethod, false, splits_A>
                                                  : selective_state_update_kernel<Input, State, RuntimeMethod, false, false>;
  if constexpr (!std::is_same_v<Input, double>) {
    // Rows with an A of dstate values mostly take the step kernel.
    if (tiling.fast && !params.tied_A()) {
      kernel = params.discretization == Discretization::kZoh
                   ? selective_state_update_kernel<Input, State, Zoh, true, false>
                   : selective_state_update_kernel<Input, State, RuntimeMethod, true, false>;
    } else if (tiling.fast) {
      visit_basic_discretization(params.discretization, [&](auto method) {
        kernel = selective_state_update_kernel<Input, State, decltype(method), true, true>;
      });
    }
  }
  return launch_grids(kernel, params, tiling, stream);
}

template <typename Input, typename State>
cudaError_t launch_further_state_update(const StateUpdateParams& params, const MethodParameters& parameters,
                                        const TokenParams* tokens, const Tiling& tiling, cudaStream_t stream) {
  constexpr bool splits_A = vector_elements(sizeof(State), true) != vector_elements(sizeof(State), false);
  if (tokens != nullptr) {
    auto* kernel = params.tied_A() ? selective_state_update_further_tokens_kernel<Input, State, splits_A>
                                   : selective_state_update_further_tokens_kernel<Input, State, false>;
    return launch_grids(kernel, params, tiling, stream, *tokens, parameters);
  }
  auto* kernel = params.tied_A() ? selective_state_update_further_kernel<Input, State, false, splits_A>
                                 : selective_state_update_further_kernel<Input, State, false, false>;
  if constexpr (!std::is_same_v<Input, double>) {
    if (tiling.fast && !params.tied_A()) kernel = selective_state_update_further_kernel<Input, State, true, false>;
  }
  return launch_grids(kernel, params, tiling, stream, parameters);
}

}  // namespace ssm_kernels::selective_state_update
