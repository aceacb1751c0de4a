// Selective scan, forward, on CUDA, of short sequences.
//
//   delta_t = softplus?(delta_raw_t + delta_bias)                       u, delta, z, out: (batch, dim, seqlen)
//   h_t     = Abar(delta_t A) h_{t-1} + delta_t k(delta_t A) B_t u_t    h: (batch, dim, dstate)
//   out_t   = (<C_t, h_t> + D u_t) silu(z_t)
//
// Saved for backward: the initial and the last state. short_scan.h describes blocks and lanes. A block loads all its inputs
// into shared memory at once. The lanes of a channel compute its step sizes, kStateLanes steps at a time, advance their states
// step by step, and add their partial sums of <C_t, h_t> by shuffles, a group of steps at a time. The block then writes its
// outputs. The time is one launch, one round of loads and the chain of states.
#pragma once

#include "common/activations.h"
#include "cuda/lane_sums.cuh"
#include "selective_scan/cuda/position.cuh"
#include "selective_scan/cuda/short_scan.h"
#include "selective_scan/cuda/states.cuh"
#include "selective_scan/cuda/transition.cuh"

namespace ssm_kernels::selective_scan::short_scan {

constexpr int kGroupSteps = 8;  // outputs that the lanes of a channel sum at a time
static_assert(kMaxSteps % kGroupSteps == 0 && kGroupSteps % kStateLanes == 0, "lanes share the steps of a group equally");
static_assert(kMaxSteps <= kShortChunk, "the only chunk boundaries are before the first step and after the last");

// Calls visit(row, step) for each of `rows` channels or states and kMaxSteps steps; neighboring threads visit neighbors in
// memory.
template <int rows, typename Visitor>
__device__ __forceinline__ void for_each_element(int64_t stride_row, int64_t stride_step, const Visitor& visit) {
  const bool steps_are_closer = are_steps_closer(stride_step, stride_row);
  static_assert(rows * kMaxSteps % kThreads == 0, "each thread has as many elements");
#pragma unroll 4
  for (int first = 0; first < rows * kMaxSteps; first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    visit(steps_are_closer ? i / kMaxSteps : i % rows, steps_are_closer ? i % kMaxSteps : i / rows);
  }
}

// A tensor's elements at all steps; zero for rows and steps that do not exist.
template <typename Scalar, int rows>
struct Tile {
  Scalar elements[kMaxSteps][rows];

  // Vectors are still in flight when this returns.
  __device__ __forceinline__ void load(VectorAccess access, const Scalar* source, int64_t stride_row, int64_t stride_step,
                                       int valid_rows, int steps) {
    if (access == VectorAccess::kAlongChannels) {
      constexpr int kVector = kVectorSize<Scalar>, kRowVectors = rows / kVector;
      constexpr int kVectors = kMaxSteps * kRowVectors;
      static_assert(rows % kVector == 0, "a step is whole vectors");
#pragma unroll
      for (int first = 0; first < kVectors; first += kThreads) {
        const int i = first + static_cast<int>(threadIdx.x), step = i / kRowVectors, row = i % kRowVectors * kVector;
        if (kVectors % kThreads != 0 && i >= kVectors) break;
        const int valid = step < steps ? max(0, min(kVector, valid_rows - row)) : 0;
        cuda::cp_async(&elements[step][row], valid > 0 ? source + row + step * stride_step : source,
                       valid * static_cast<int>(sizeof(Scalar)));
      }
    } else {
      for_each_element<rows>(stride_row, stride_step, [&](int row, int step) {
        elements[step][row] = row < valid_rows && step < steps ? source[row * stride_row + step * stride_step] : Scalar{};
      });
    }
  }
};

template <typename Scalar>
struct Shared {
  alignas(kVectorBytes) Tile<Scalar, kStates> B, C;
  alignas(kVectorBytes) Tile<Scalar, kTileChannels> u, delta, z;
  float y[kMaxSteps][kTileChannels];
  float2 size_and_input[kMaxSteps][kTileChannels];  // the step size, and its product with u
  float D[kTileChannels];
};

static_assert(sizeof(Shared<float>) <= kSharedBytes, "the plan reserves kSharedBytes per block");

template <typename Scalar>
__global__ void __launch_bounds__(kThreads)
    short_scan_fwd_kernel(const __grid_constant__ SelectiveScanFwdParams p, const __grid_constant__ ScanPlan plan) {
  __shared__ Shared<Scalar> shared;
  // is_short() bounds the sizes to 32 bits: 64-bit divisions would take longer than a round of loads.
  const unsigned tiles = static_cast<unsigned>(plan.tiles), batch = blockIdx.x / tiles, tile = blockIdx.x - batch * tiles;
  const unsigned group = tile / static_cast<unsigned>(plan.tiles_per_group);
  const unsigned in_group = (tile - group * static_cast<unsigned>(plan.tiles_per_group)) * kTileChannels;
  const unsigned first_channel = group * static_cast<unsigned>(plan.group_channels) + in_group,
                 dim = static_cast<unsigned>(p.dim);
  const int channels =
      static_cast<int>(min(static_cast<unsigned>(plan.group_channels) - in_group, static_cast<unsigned>(kTileChannels)));
  const int steps = static_cast<int>(p.seqlen), dstate = static_cast<int>(p.dstate);
  const auto rows_of = [&](const auto& view, int64_t stride_row, unsigned row) {
    return static_cast<Scalar*>(view.data) + batch * view.stride_batch + row * stride_row;
  };
  const auto load_sequence = [&](VectorAccess access, const SequenceView& view, Tile<Scalar, kTileChannels>& target) {
    target.load(access, rows_of(view, view.stride_dim, first_channel), view.stride_dim, view.stride_step, channels, steps);
  };
  const auto load_matrix = [&](VectorAccess access, const MatrixView& view, Tile<Scalar, kStates>& target) {
    const unsigned group = first_channel / (dim / static_cast<unsigned>(view.groups));
    target.load(access, rows_of(view, view.stride_channel, group), view.stride_state, view.stride_step, dstate, steps);
  };
  const bool has_gate = p.z.data != nullptr;
  load_sequence(plan.delta, p.delta, shared.delta);
  load_sequence(plan.u, p.u, shared.u);
  load_matrix(plan.B, p.B, shared.B);
  load_matrix(plan.C, p.C, shared.C);
  if (has_gate) load_sequence(plan.z, p.z, shared.z);

  const int channel = threadIdx.x / kStateLanes, lane = threadIdx.x % kStateLanes, first_state = lane * kLaneStates;
  const int64_t d = first_channel + channel;
  const int states = channel < channels ? max(0, min(kLaneStates, dstate - first_state)) : 0;
  const auto of_channel = [](const ChannelView& view, int64_t index) {
    return view.data != nullptr ? static_cast<const float*>(view.data)[index * view.stride] : 0.0f;
  };
  const float bias = channel < channels ? of_channel(p.delta_bias, d) : 0.0f;
  if (lane == 0 && channel < channels) shared.D[channel] = of_channel(p.D, d);
  float A[kLaneStates] = {}, state[kLaneStates] = {};
#pragma unroll
  for (int n = 0; n < kLaneStates; ++n) {
    if (n >= states) break;
    A[n] = load_state<float>(p.A, 0, d, first_state + n);
    if (p.initial_state.data != nullptr) state[n] = load_state<float>(p.initial_state, batch, d, first_state + n);
  }
  const auto save_states = [&](void* target, int64_t row) {
    if (target == nullptr) return;
    float* const saved = static_cast<float*>(target) + state_offset(p, row, d, first_state);
#pragma unroll
    for (int n = 0; n < kLaneStates; ++n) {
      if (n < states) saved[n] = state[n];
    }
  };
  save_states(p.chunk_states, batch * p.chunk_boundaries);
  cuda::cp_async_wait();
  __syncthreads();

  // Steps past the end have size zero.
#pragma unroll
  for (int t = lane; t < kMaxSteps; t += kStateLanes) {
    float size = to_accumulate(shared.delta.elements[t][channel]) + bias;
    if (p.delta_softplus) size = softplus(size);
    if (t >= steps) size = 0;
    shared.size_and_input[t][channel] = {size, size * to_accumulate(shared.u.elements[t][channel])};
  }
  __syncwarp();

  visit_method<RuntimeMethod>(p, [&](auto method) {
    using Method = decltype(method);
    float scaled_A[kLaneStates];
#pragma unroll
    for (int n = 0; n < kLaneStates; ++n) scaled_A[n] = A[n] * kScaleOfA<Method, float>;
#pragma unroll 1
    for (int first = 0; first < steps; first += kGroupSteps) {
      float y[kGroupSteps];
#pragma unroll
      for (int j = 0; j < kGroupSteps; ++j) {
        const int t = first + j;
        const auto [size, input] = shared.size_and_input[t][channel];
        const auto B = Vector<Scalar, kLaneStates>::load(&shared.B.elements[t][first_state]);
        const auto C = Vector<Scalar, kLaneStates>::load(&shared.C.elements[t][first_state]);
        y[j] = 0;
#pragma unroll
        for (int n = 0; n < kLaneStates; ++n) {
          // Past the end A is zero: a size of zero times an infinite A would be NaN.
          const Transition<Method, float> transition(method, size, t < steps ? scaled_A[n] : 0.0f);
          const float next = fmaf(transition.abar(), state[n], transition.input(input) * B.accumulate(n));
          // An infinite input times a zero of B would make a padding state, and the channel's output, NaN.
          state[n] = n < states ? next : 0.0f;
          y[j] = fmaf(C.accumulate(n), state[n], y[j]);
        }
      }
      cuda::sum_over_lanes<kStateLanes>(y);
#pragma unroll
      for (int i = 0; i < kGroupSteps / kStateLanes; ++i) {
        shared.y[first + lane * (kGroupSteps / kStateLanes) + i][channel] = y[i];
      }
    }
  });
  save_states(p.last_state, batch);
  save_states(p.chunk_states, batch * p.chunk_boundaries + 1);
  __syncthreads();

  Scalar* const out = rows_of(p.out, p.out.stride_dim, first_channel);
  for_each_element<kTileChannels>(p.out.stride_dim, p.out.stride_step, [&](int row, int step) {
    if (row >= channels || step >= steps) return;
    const float u = to_accumulate(shared.u.elements[step][row]);
    float value = fmaf(shared.D[row], u, shared.y[step][row]);
    if (has_gate) value *= silu(to_accumulate(shared.z.elements[step][row]));
    out[row * p.out.stride_dim + step * p.out.stride_step] = from_accumulate<Scalar>(value);
  });
}

template <typename Scalar>
cudaError_t launch_fwd(const SelectiveScanFwdParams& params, const ScanPlan& plan, cudaStream_t stream) {
  return launch_blocks(short_scan_fwd_kernel<Scalar>, kThreads, 0, stream, params, plan);
}

}  // namespace ssm_kernels::selective_scan::short_scan
