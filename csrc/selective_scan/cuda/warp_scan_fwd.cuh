// Selective scan, forward, on CUDA: a warp scan, parallel in time.
//
//   h_t = Abar(delta_t A) h_{t-1} + delta_t k(delta_t A) B_t u_t          out_t = (<C_t, h_t> + D u_t) silu(z_t)
//
// Methods that read two samples add a term in B_{t-1} u_{t-1} (two_sample_forms.cuh, warp_scan_two_sample.cuh).
//
// u, delta, z, out: (batch, dim, seqlen); h: (batch, dim, dstate). Saved for backward: the state at every chunk boundary.
// warp_scan.h describes tiles and lanes. A block loops over its tiles in time. It loads u, delta and z into shared memory, and
// each lane keeps the step sizes, delta u and the partial outputs of its steps in registers. Then, for each state:
// * the lane computes Abar and the input of its steps, once, and composes them into the affine map from the state before its
// steps
//   to the state after them (for exponential methods the product of Abar is the exponential of the sum of z);
// * the lanes of a channel scan these maps;
// * the lane repeats its steps from the state that it now knows, with one multiply-add a step, and adds C h to its outputs.
// Both passes run on two halves of the lane's steps at once, which halves the chain of dependent instructions. The state passes
// from tile to tile through shared memory, which also holds the states at chunk boundaries until the block writes them
// together.
//
// The limit is the special function unit, one exponential per state and step at 16 a clock and multiprocessor; the issue rate
// is close.
#pragma once

#include "common/activations.h"
#include "cuda/ptx/pdl.cuh"
#include "selective_scan/cuda/shared_arrays.cuh"
#include "selective_scan/cuda/states.cuh"
#include "selective_scan/cuda/transition.cuh"
#include "selective_scan/cuda/warp_scan_matrix.cuh"
#include "selective_scan/cuda/warp_scan_two_sample.cuh"

namespace ssm_kernels::selective_scan::warp_scan {

// The arrays in a block's shared memory.
template <typename TileConfig, int slice>
struct FwdShared {
  using Scalar = typename TileConfig::Scalar;
  using Acc = typename TileConfig::Acc;

  // Scaled A, and the state at the end of the previous tile.
  using Pair = Vector<Acc, 2>;

  Scalar *u, *delta, *z;
  Acc* pairs;
  Acc* ends;  // (chunks of a tile but the last, channels, dstate)
  Acc* decay;
  Acc *B, *C;
  Position* position;
  FwdRows<Scalar>* rows;
  Arguments<SelectiveScanFwdParams>* arguments;
  int chunks;  // of a tile
  int64_t bytes;

  SSM_HOST_DEVICE FwdShared(unsigned char* memory, const SelectiveScanFwdParams& p, const ScanPlan& plan) {
    const int states = state_rows<TileConfig>(plan) * state_pitch(p);
    chunks = TileConfig::kTileSteps / static_cast<int>(p.chunk_length);
    SharedAllocator shared(memory);
    // Arrays of constant size first: their addresses are known at compile time.
    position = shared.allocate<Position>(1);
    rows = shared.allocate<FwdRows<Scalar>>(1);
    u = shared.allocate<Scalar>(SequenceTile<TileConfig>::kCapacity);
    delta = shared.allocate<Scalar>(SequenceTile<TileConfig>::kCapacity);
    B = shared.allocate<Acc>(plan.slice * MatrixSlice<TileConfig, slice>::kPitch);
    C = shared.allocate<Acc>(plan.slice * MatrixSlice<TileConfig, slice>::kPitch);
    z = shared.allocate<Scalar>(p.z.data != nullptr ? SequenceTile<TileConfig>::kCapacity : 0);
    pairs = shared.allocate<Acc>(2 * states);
    ends = shared.allocate<Acc>(p.chunk_states != nullptr ? states * (chunks - 1) : 0);
    decay = shared.allocate<Acc>(plan.carry_pass ? states : 0);
    arguments = shared.allocate<Arguments<SelectiveScanFwdParams>>(plan.has_shifted_vectors ? 1 : 0);
    bytes = shared.bytes();
  }
};

// How a tile of a call with shifted vectors moves.
template <typename TileConfig, int slice>
struct AnyFwdTile {
  using Scalar = typename TileConfig::Scalar;
  using Sequence = SequenceTile<TileConfig>;

  // Calls visit(p, plan, shared, at, rows) with what fwd_block has.
  template <typename Visitor>
  __device__ __forceinline__ static void visit(int arguments, const Visitor& visit) {
    extern __shared__ __align__(kVectorBytes) unsigned char memory[];
    const auto& [p, plan] = Arguments<SelectiveScanFwdParams>::at(memory, arguments);
    const FwdShared<TileConfig, slice> shared(memory, p, plan);
    if constexpr (kHasShiftedVectors<Scalar>) visit(p, plan, shared, *shared.position, *shared.rows);
  }

  __device__ __noinline__ static void load(int arguments, int64_t t0) {
    visit(arguments, [&](const auto& p, const auto& plan, const auto& shared, const Position& at, const FwdRows<Scalar>& rows) {
      const int steps = at.steps_from(t0, TileConfig::kTileSteps);
      const int64_t left = p.dim - at.first_channel;
      for_each_input(p, plan, shared, rows, [&](const Sequence& tile, const SequenceView& view, const Scalar* row) {
        tile.load_any(view, row, t0, at.channels, steps);
      });
      const SequenceView z_view = plan.carry_pass ? SequenceView() : p.z;
      const Sequence delta{shared.delta, plan.delta}, u{shared.u, plan.u}, z{shared.z, plan.z};
      constexpr bool kAllInFlight = sizeof(Scalar) < 4;  // registers allow it
      typename Sequence::ChannelLoads of_delta, of_u, of_z;
      delta.load_channels_any(p.delta, rows.delta, t0, at.channels, steps, left, of_delta);
      if (!kAllInFlight) delta.store_loads_any(p.delta, of_delta);
      u.load_channels_any(p.u, rows.u, t0, at.channels, steps, left, of_u);
      if (!kAllInFlight) u.store_loads_any(p.u, of_u);
      z.load_channels_any(z_view, rows.z, t0, at.channels, steps, left, of_z);
      if (kAllInFlight) delta.store_loads_any(p.delta, of_delta);
      if (kAllInFlight) u.store_loads_any(p.u, of_u);
      z.store_loads_any(z_view, of_z);
    });
  }
  __device__ __noinline__ static void finish_load(int arguments, int64_t t0) {
    visit(arguments, [&](const auto& p, const auto& plan, const auto& shared, const Position&, const FwdRows<Scalar>& rows) {
      for_each_input(p, plan, shared, rows, [&](const Sequence& tile, const SequenceView& view, const Scalar* row) {
        tile.finish_load_any(view, row, t0);
      });
    });
  }
  __device__ __noinline__ static void stage(int arguments, int first_state, int64_t t0) {
    visit(arguments, [&](const auto& p, const auto& plan, const auto& shared, const Position& at, const FwdRows<Scalar>& rows) {
      using Slice = MatrixSlice<TileConfig, slice>;
      const int states = min(plan.slice, static_cast<int>(p.dstate) - first_state);
      for_each_tensor(plan.carry_pass ? 1 : 2, [&](int i) {
        const bool is_B = i == 0;
        Slice{is_B ? shared.B : shared.C}.stage_any(p, at, is_B ? plan.B : plan.C, is_B ? p.B : p.C, is_B ? rows.B : rows.C,
                                                    first_state, t0, states);
      });
    });
  }
  __device__ __noinline__ static void store(int arguments, int64_t t0) {
    visit(arguments, [&](const auto& p, const auto& plan, const auto& shared, const Position& at, const FwdRows<Scalar>& rows) {
      const int steps = at.steps_from(t0, TileConfig::kTileSteps);
      Sequence{shared.u, plan.out}.store_any(p.out, rows.out, t0, at.channels, steps);
    });
  }

 private:
  // Calls visit(tile, view, row) for delta, u and, but for a carry pass, z.
  template <typename Shared, typename Visitor>
  __device__ __forceinline__ static void for_each_input(const SelectiveScanFwdParams& p, const ScanPlan& plan,
                                                        const Shared& shared, const FwdRows<Scalar>& rows,
                                                        const Visitor& visit) {
    for_each_tensor(plan.carry_pass ? 2 : 3, [&](int i) {
      const Sequence tile{i == 0 ? shared.delta : i == 1 ? shared.u : shared.z, i == 0 ? plan.delta : i == 1 ? plan.u : plan.z};
      visit(tile, i == 0 ? p.delta : i == 1 ? p.u : p.z, i == 0 ? rows.delta : i == 1 ? rows.u : rows.z);
    });
  }
};

template <typename TileConfig, int slice, typename Method, Pass pass>
__device__ __forceinline__ void fwd_block(const SelectiveScanFwdParams& p, const ScanPlan& plan, unsigned char* memory,
                                          const MethodParameters& parameters = {},
                                          const TwoSampleBlock<TileConfig>& samples = {}) {
  using Scalar = typename TileConfig::Scalar;
  using Acc = typename TileConfig::Acc;
  using Shared = FwdShared<TileConfig, slice>;
  using AnyTile = AnyFwdTile<TileConfig, slice>;
  using Pair = typename Shared::Pair;
  constexpr int K = TileConfig::kSteps, kHalf = K / 2;
  const Shared shared(memory, p, plan);
  const Position& at = *shared.position;
  const FwdRows<Scalar>& rows = *shared.rows;
  const int arguments = place_arguments<Scalar, TileConfig::kThreads>(shared.arguments, memory, p, plan);
  const Lane<TileConfig> lane;
  const int dstate = static_cast<int>(p.dstate), pitch = state_pitch(p);
  const bool carry_pass = pass == Pass::kCarry || (pass == Pass::kAny && kAnyCarries<Scalar, Method> && plan.carry_pass);
  const bool has_B_steps = pass == Pass::kPerStep || p.B.per_step, has_C_steps = pass == Pass::kPerStep || p.C.per_step;

  const int rows_of_states = state_rows<TileConfig>(plan);
  clear<TileConfig>(shared.pairs, 2 * rows_of_states * pitch);
  // The code above writes shared memory only.
  cuda::grid_dependency_sync();
  if (threadIdx.x == 0) {
    *shared.position = Position(p, plan, blockIdx.x);
    *shared.rows = FwdRows<Scalar>(p, at);
  }
  __syncthreads();
  for_each_state<TileConfig>(p, plan, at.channels, [&](int index, int, int channel, int state) {
    const int64_t d = at.first_channel + channel;
    Acc h = 0;
    if (carry_pass) {
      shared.decay[index] = 1;
    } else {
      h = load_optional_state<Acc>(p.initial_state, at.initial, d, state);
      for (int64_t s = 0; s < at.segment; ++s) {
        h = fold_segment(plan, state_offset(p, at.row * plan.segments + s, d, state), h);
      }
      if (p.chunk_states != nullptr && at.segment == 0 && !p.is_packed()) {
        static_cast<Acc*>(p.chunk_states)[state_offset(p, at.chunk_states, d, state)] = h;
      }
    }
    shared.pairs[2 * index] = load_state<Acc>(p.A, 0, d, state) * scale_of_A<Method, Acc>(p);
    shared.pairs[2 * index + 1] = h;
  });

  const bool is_channel = lane.channel < at.channels;
  const int64_t d = at.first_channel + lane.channel;
  const auto of_channel = [&](const ChannelView& view) {
    return is_channel && view.data != nullptr ? static_cast<const Acc*>(view.data)[d * view.stride] : Acc(0);
  };
  const Acc skip = of_channel(p.D), bias = of_channel(p.delta_bias);
  const int first_step = lane.time * K, row = min(lane.channel, rows_of_states - 1);
  const bool is_first = lane.is_first();
  // Whether this lane's steps end a chunk inside the tile, and which chunk.
  const int lanes_per_chunk = TileConfig::kTimeLanes / shared.chunks, chunk_of_lane = lane.time / lanes_per_chunk;
  const bool ends_chunk =
      !carry_pass && p.chunk_states != nullptr && is_channel && (lane.time + 1) % lanes_per_chunk == 0 && !lane.is_last();
  const MatrixSlice<TileConfig, slice> B{shared.B}, C{shared.C};

  const auto read_B_or_C = [&](const MatrixView& view, const Acc* staged, int state) {
    return read_matrix<pass, K>(view, staged, at.first_channel + lane.channel, is_channel, state);
  };
  const SequenceTile<TileConfig> u_tile{shared.u, plan.u}, delta_tile{shared.delta, plan.delta}, z_tile{shared.z, plan.z};
  [[maybe_unused]] Acc u_before = 0;  // the tile, of the lane's channel
  if constexpr (kIsTwoSample<Method>) {
    if (is_channel && at.begin < at.end) u_before = samples.u_before(p, plan, at, rows.u, lane.channel, at.begin);
  }
  for (int64_t t0 = at.begin; t0 < at.end; t0 += TileConfig::kTileSteps) {
    const int steps = at.steps_from(t0, TileConfig::kTileSteps);
    if (has_shifted_vectors<Scalar>(plan)) {
      AnyTile::load(arguments, t0);
    } else {
      delta_tile.load(p.delta, rows.delta, t0, at.channels, steps);
      u_tile.load(p.u, rows.u, t0, at.channels, steps);
      if (p.z.data != nullptr && !carry_pass) z_tile.load(p.z, rows.z, t0, at.channels, steps);
    }

    const int valid = is_channel ? steps - first_step : 0;
    Acc delta[K], delta_u[K], out[K];
    [[maybe_unused]] Acc of_previous[K];  // the factors of B_{t-1}, of methods with two samples
    [[maybe_unused]] Acc own[K];          // the steps of the input, where `delta` has those of A
    Acc early_sum = 0, late_sum = 0;      // of delta over the two halves
    for (int first_state = 0; first_state < dstate; first_state += plan.slice) {
      const int slice_states = min(plan.slice, dstate - first_state);
      if (first_state > 0) __syncthreads();
      if (has_shifted_vectors<Scalar>(plan)) {
        AnyTile::stage(arguments, first_state, t0);
      } else {
        const bool has_states = pass == Pass::kPerStep && is_access(plan.B, VectorAccess::kAlongChannels) &&
                                is_access(plan.C, VectorAccess::kAlongChannels);
        if (has_states) {
          if constexpr (pass == Pass::kPerStep) {
            MatrixSlice<TileConfig, slice>::stage_states({B, C}, {&p.B, &p.C}, {rows.B, rows.C}, first_state, t0, slice_states,
                                                         steps);
          }
        } else {
          if (has_B_steps) B.stage(plan.B, p.B, rows.B, first_state, t0, slice_states, steps);
          if (has_C_steps && !carry_pass) C.stage(plan.C, p.C, rows.C, first_state, t0, slice_states, steps);
        }
      }
      if constexpr (kIsTwoSample<Method>) {
        if (has_B_steps) samples.stage_B_before(p, plan, at, rows.B, first_state, slice_states, t0);
      }
      if (first_state == 0) {
        cuda::cp_async_wait();
        if (has_shifted_vectors<Scalar>(plan)) {
          AnyTile::finish_load(arguments, t0);
        } else {
          delta_tile.finish_load();
          u_tile.finish_load();
          if (p.z.data != nullptr && !carry_pass) z_tile.finish_load();
        }
      }
      __syncthreads();

      if (first_state == 0) {
        const bool has_delta = input_has_delta<Method>(p);
        u_tile.read(lane.channel, first_step, out);
        delta_tile.read(lane.channel, first_step, delta);
        make_step_sizes(delta, bias, p.delta_softplus, valid);
        if constexpr (kHasDeltaA<Method>) {
          samples.read_delta_A(at, lane.channel, t0 + first_step, valid, has_delta, delta, own);
        }
#pragma unroll
        for (int j = 0; j < K; ++j) {
          if constexpr (kIsSeparate<Method>) {
            delta_u[j] = own[j] * out[j];
          } else if constexpr (!kIsTwoSample<Method>) {
            delta_u[j] = has_delta ? delta[j] * out[j] : out[j];
          }
          if constexpr (!kIsTwoSample<Method>) out[j] *= skip;
          (j < kHalf ? early_sum : late_sum) += delta[j];
        }
        if constexpr (kIsTwoSample<Method>) {
          samples.weigh(p, at, lane, t0 + first_step, valid, kHasDeltaA<Method> ? own : delta, out, u_before, delta_u,
                        of_previous);
#pragma unroll
          for (int j = 0; j < K; ++j) out[j] *= skip;
        }
      }

      const auto run_states = [&](auto tail, auto method) {
        using Known = decltype(method);
        const Acc *B_steps = B.lane(0, lane.time), *C_steps = C.lane(0, lane.time);
        Acc* pair = shared.pairs + 2 * (row * pitch + first_state);
        for (int s = 0; s < slice_states; ++s, B_steps += B.kPitch, C_steps += C.kPitch, pair += 2) {
          const bool is_tail = tail();
          const int state = first_state + s;
          const auto A_and_state = Pair::load(pair);
          const Acc A = A_and_state[0], h_first = A_and_state[1];
          Acc early_decay = 1, late_decay = 1;
          if (Known::kExponential && !is_tail) {
            early_decay = Math<Acc>::exp2(A * early_sum);
            late_decay = Math<Acc>::exp2(A * late_sum);
          }
          Acc abar[K], input[K];
          const auto b = read_B_or_C(p.B, B_steps, state);
#pragma unroll
          for (int j = 0; j < K; ++j) {
            const Acc A_of_step = !is_tail || j < valid ? A : Acc(0);
            const Transition<Known, Acc> transition(method, delta[j], A_of_step);
            abar[j] = transition.abar();
            if constexpr (Known::kUsesPreviousInput) {
              const Acc b_before = j > 0 ? b[j > 0 ? j - 1 : 0] : has_B_steps ? samples.B_before(B_steps, s, is_first) : b[0];
              input[j] = transition.inputs(delta_u[j] * b[j], of_previous[j] * b_before);
            } else if constexpr (kIsSeparate<Method> && !Known::kUnitGain) {
              input[j] = delta_u[j] * method.own_gain(own[j] * A_of_step) * b[j];
            } else {
              input[j] = transition.input(delta_u[j]) * b[j];
            }
            if (!Known::kExponential || is_tail) (j < kHalf ? early_decay : late_decay) *= abar[j];
          }
          Acc early = input[0], late = input[kHalf];
#pragma unroll
          for (int j = 1; j < kHalf; ++j) {
            early = Math<Acc>::fma(abar[j], early, input[j]);
            late = Math<Acc>::fma(abar[kHalf + j], late, input[kHalf + j]);
          }
          Acc decay = early_decay * late_decay;
          Acc h = Math<Acc>::fma(late_decay, early, late);
          if (is_first) h = Math<Acc>::fma(decay, h_first, h);
          scan_lanes<TileConfig>(decay, h);
          const Acc h_before = shuffle_earlier(h, TileConfig::kLanesPerStep);
          __syncwarp();
          if (lane.is_last() && is_channel) {
            pair[1] = h;
            if (carry_pass) shared.decay[row * pitch + state] *= decay;
          }
          if (ends_chunk) shared.ends[(chunk_of_lane * rows_of_states + row) * pitch + state] = h;
          if (carry_pass) continue;

          const auto c = read_B_or_C(p.C, C_steps, state);
          h = is_first ? h_first : h_before;
          Acc h_late = Math<Acc>::fma(early_decay, h, early);
#pragma unroll
          for (int j = 0; j < kHalf; ++j) {
            h = Math<Acc>::fma(abar[j], h, input[j]);
            out[j] = Math<Acc>::fma(c[j], h, out[j]);
            h_late = Math<Acc>::fma(abar[kHalf + j], h_late, input[kHalf + j]);
            out[kHalf + j] = Math<Acc>::fma(c[kHalf + j], h_late, out[kHalf + j]);
          }
        }
      };
      visit_tile<TileConfig, Method, pass>(p, parameters, steps, run_states);
    }

    if (!carry_pass) {
      if (p.z.data != nullptr) {
        Acc gate[K];
        z_tile.read(lane.channel, first_step, gate);
#pragma unroll
        for (int j = 0; j < K; ++j) out[j] *= silu(gate[j]);
      }
      // The output overwrites u, which every lane has read by now.
      __syncthreads();
      const SequenceTile<TileConfig> out_tile{shared.u, plan.out};
      out_tile.write(lane.channel, first_step, out);
      __syncthreads();
      if (has_shifted_vectors<Scalar>(plan)) {
        AnyTile::store(arguments, t0);
      } else {
        out_tile.store(p.out, rows.out, t0, at.channels, steps);
      }
      if (p.chunk_states != nullptr) {
#pragma unroll 1
        for (int chunk = 0; chunk < shared.chunks; ++chunk) {
          const int64_t boundary = t0 / TileConfig::kTileSteps * shared.chunks + chunk + 1;
          if (boundary >= at.saved_states) break;
          Acc* const target =
              static_cast<Acc*>(p.chunk_states) + state_offset(p, at.chunk_states + boundary, at.first_channel, 0);
          for_each_state<TileConfig>(p, plan, at.channels, [&](int index, int offset, int, int) {
            target[offset] =
                chunk + 1 == shared.chunks ? shared.pairs[2 * index + 1] : shared.ends[chunk * rows_of_states * pitch + index];
          });
        }
      }
    }
    __syncthreads();
  }

  if (at.begin >= at.end) __syncthreads();
  for_each_state<TileConfig>(p, plan, at.channels, [&](int index, int, int channel, int state) {
    const Acc h = shared.pairs[2 * index + 1];
    if (carry_pass) {
      const int64_t target = state_offset(p, at.row * plan.segments + at.segment, at.first_channel + channel, state);
      static_cast<Acc*>(plan.decay)[target] = shared.decay[index];
      static_cast<Acc*>(plan.offset)[target] = h;
    } else if (at.segment + 1 == plan.segments && at.last >= 0) {
      static_cast<Acc*>(p.last_state)[state_offset(p, at.last, at.first_channel + channel, state)] = h;
    }
  });
}

template <typename Scalar, FwdConfig config>
using FwdTileConfig = TileConfig<Scalar, FwdSizes<config>::kLog2Warps, FwdSizes<config>::kLog2TimeLanes,
                                 FwdSizes<config>::log2_steps(std::is_same_v<Scalar, double>)>;

// Warps per multiprocessor: 16 allow a thread 128 registers; doubles need more.
template <typename Scalar>
constexpr int kFwdResidentWarps = std::is_same_v<Scalar, double> ? 8 : 16;

template <typename Scalar, typename Method, FwdConfig config, Pass pass>
__global__ void __launch_bounds__(FwdTileConfig<Scalar, config>::kThreads,
                                  kFwdResidentWarps<Scalar> / FwdTileConfig<Scalar, config>::kWarps)
    warp_scan_fwd_kernel(const __grid_constant__ SelectiveScanFwdParams params, const __grid_constant__ ScanPlan plan) {
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  fwd_block<FwdTileConfig<Scalar, config>, FwdSizes<config>::kSlice, Method, pass>(params, plan, memory);
}

template <typename Scalar>
__global__ void __launch_bounds__(FwdTileConfig<Scalar, FwdConfig::kFewChannels>::kThreads,
                                  kFwdResidentWarps<Scalar> / FwdTileConfig<Scalar, FwdConfig::kFewChannels>::kWarps)
    warp_scan_further_fwd_kernel(const __grid_constant__ SelectiveScanFwdParams params, const __grid_constant__ ScanPlan plan,
                                 const __grid_constant__ MethodParameters parameters) {
  constexpr FwdConfig kConfig = FwdConfig::kFewChannels;
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  fwd_block<FwdTileConfig<Scalar, kConfig>, FwdSizes<kConfig>::kSlice, FurtherMethod, Pass::kAny>(params, plan, memory,
                                                                                                  parameters);
}

template <typename Scalar>
__global__ void __launch_bounds__(FwdTileConfig<Scalar, FwdConfig::kFewChannels>::kThreads, 1)
    warp_scan_two_sample_fwd_kernel(const __grid_constant__ SelectiveScanFwdParams params,
                                    const __grid_constant__ ScanPlan plan, const __grid_constant__ TwoSampleParams two) {
  using C = FwdTileConfig<Scalar, FwdConfig::kFewChannels>;
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  __shared__ typename C::Acc before[FwdSizes<FwdConfig::kFewChannels>::kSlice];
  fwd_block<C, FwdSizes<FwdConfig::kFewChannels>::kSlice, TwoSampleMethod, Pass::kAny>(params, plan, memory, two.method,
                                                                                       {&two, before});
}

template <typename Scalar>
__global__ void __launch_bounds__(FwdTileConfig<Scalar, FwdConfig::kFewChannels>::kThreads, 1)
    warp_scan_separate_fwd_kernel(const __grid_constant__ SelectiveScanFwdParams params, const __grid_constant__ ScanPlan plan,
                                  const __grid_constant__ TwoSampleParams two) {
  using C = FwdTileConfig<Scalar, FwdConfig::kFewChannels>;
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  fwd_block<C, FwdSizes<FwdConfig::kFewChannels>::kSlice, SeparateMethod, Pass::kAny>(params, plan, memory, {}, {&two});
}

template <typename Scalar>
__global__ void __launch_bounds__(FwdTileConfig<Scalar, FwdConfig::kFewChannels>::kThreads, 1)
    warp_scan_separate_two_sample_fwd_kernel(const __grid_constant__ SelectiveScanFwdParams params,
                                             const __grid_constant__ ScanPlan plan,
                                             const __grid_constant__ TwoSampleParams two) {
  using C = FwdTileConfig<Scalar, FwdConfig::kFewChannels>;
  constexpr int kSlice = FwdSizes<FwdConfig::kFewChannels>::kSlice;
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  __shared__ typename C::Acc before[kSlice];
  fwd_block<C, kSlice, SeparateTwoSampleMethod, Pass::kAny>(params, plan, memory, {}, {&two, before});
}

template <typename Scalar>
int64_t shared_bytes(const SelectiveScanFwdParams& params, const ScanPlan& plan) {
  const auto of = [&](auto config) {
    return FwdShared<FwdTileConfig<Scalar, config()>, FwdSizes<config()>::kSlice>(nullptr, params, plan).bytes;
  };
  switch (plan.config) {
    case FwdConfig::kManyChannels:
      return of(std::integral_constant<FwdConfig, FwdConfig::kManyChannels>());
    case FwdConfig::kSmallBlocks:
      return of(std::integral_constant<FwdConfig, FwdConfig::kSmallBlocks>());
    default:
      return of(std::integral_constant<FwdConfig, FwdConfig::kFewChannels>());
  }
}

template <typename Scalar, typename Method>
cudaError_t launch_fwd(const SelectiveScanFwdParams& params, const ScanPlan& plan, cudaStream_t stream) {
  // The plan has few channels for constant B or C, rare methods, segments and doubles.
  constexpr FwdConfig kMany = FwdConfig::kManyChannels, kFew = FwdConfig::kFewChannels, kSmall = FwdConfig::kSmallBlocks;
  const bool many = plan.config == kMany, small = plan.config == kSmall;
  auto* kernel = warp_scan_fwd_kernel<Scalar, RuntimeMethod, kFew, Pass::kAny>;
  if constexpr (kHasCommonPasses<Scalar>) {
    if constexpr (kIsCommon<Method>) {
      if (params.B.per_step && params.C.per_step) {
        kernel = many ? warp_scan_fwd_kernel<Scalar, Method, kMany, Pass::kPerStep>
                      : warp_scan_fwd_kernel<Scalar, Method, kFew, Pass::kPerStep>;
        if constexpr (kHasSmallBlocks<Method>) {
          if (small) kernel = warp_scan_fwd_kernel<Scalar, Method, kSmall, Pass::kPerStep>;
        }
      }
    }
    if (plan.carry_pass) kernel = warp_scan_fwd_kernel<Scalar, RuntimeMethod, kFew, Pass::kCarry>;
  }
  const int threads = many    ? FwdTileConfig<Scalar, kMany>::kThreads
                      : small ? FwdTileConfig<Scalar, kSmall>::kThreads
                              : FwdTileConfig<Scalar, kFew>::kThreads;
  const int64_t bytes = shared_bytes<Scalar>(params, plan);
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, bytes); error != cudaSuccess) return error;
  return cuda::launch(kernel, params.rows * plan.launched_segments * plan.tiles, threads, static_cast<int>(bytes), stream,
                      /*uses_pdl=*/cuda::has_pdl(kernel), params, plan);
}

// The plan has few channels for these methods.
template <typename Scalar>
cudaError_t launch_further_fwd(const SelectiveScanFwdParams& params, const MethodParameters& parameters, const ScanPlan& plan,
                               cudaStream_t stream) {
  return launch_blocks(warp_scan_further_fwd_kernel<Scalar>, FwdTileConfig<Scalar, FwdConfig::kFewChannels>::kThreads,
                       shared_bytes<Scalar>(params, plan), stream, params, plan, parameters);
}

template <typename Scalar>
cudaError_t launch_two_sample_fwd(const SelectiveScanFwdParams& params, const TwoSampleParams& two, const ScanPlan& plan,
                                  cudaStream_t stream) {
  return launch_blocks(warp_scan_two_sample_fwd_kernel<Scalar>, FwdTileConfig<Scalar, FwdConfig::kFewChannels>::kThreads,
                       shared_bytes<Scalar>(params, plan), stream, params, plan, two);
}

template <typename Scalar>
cudaError_t launch_separate_fwd(const SelectiveScanFwdParams& params, const TwoSampleParams& two, const ScanPlan& plan,
                                cudaStream_t stream) {
  const auto kernel = params.discretization == Discretization::kExpTrapezoidal
                          ? warp_scan_separate_two_sample_fwd_kernel<Scalar>
                          : warp_scan_separate_fwd_kernel<Scalar>;
  return launch_blocks(kernel, FwdTileConfig<Scalar, FwdConfig::kFewChannels>::kThreads, shared_bytes<Scalar>(params, plan),
                       stream, params, plan, two);
}

}  // namespace ssm_kernels::selective_scan::warp_scan
