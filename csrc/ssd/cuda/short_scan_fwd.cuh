// SSD chunk-scan, forward, for short fp32 sequences: a sequential scan. See fwd.cuh for what is computed.
//
//   S_t = a_t S_{t-1} + c_t x_t B_t^T        out_t = (S_t C_t + D x_t) silu(z_t)
//
// The matrix products of the other kernels take a whole chunk of kChunk steps, however few of them exist. Up to
// kShortSteps steps, the recurrence itself needs less arithmetic.
//
// A block has kShortRows rows (headdim) of one head's state. kStateLanes neighboring lanes share a row; each keeps
// lane_states of its columns in registers, four neighboring ones out of every 4 kStateLanes. The block copies B and C of all
// steps and its rows of x into shared memory; a lane of the first warp computes the decay and the gain of one step. The lanes
// of a row add up their parts of S_t C_t by shuffles, kStateLanes steps at a time. Nothing is saved for backward. Sequences of
// less than a chunk have no chunk states.
#pragma once

#include "cuda/lane_sums.cuh"
#include "cuda/launch.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "ssd/cuda/discretized_gates.cuh"

namespace ssm_kernels::ssd {

constexpr int kStateLanes = 8, kShortWarps = 4, kShortThreads = kShortWarps * kWarpSize;
static_assert(kShortRows == kShortThreads / kStateLanes, "each row has its lanes");
static_assert(kShortSteps == kWarpSize, "a lane computes the decay and the gain of one step");
static_assert(kShortSteps % kStateLanes == 0, "each lane of a row sums up one step of a group");

template <int lane_states>
struct ShortShared {
  static constexpr int kColumns = kStateLanes * lane_states;
  alignas(16) float B[kShortSteps][kColumns];
  alignas(16) float C[kShortSteps][kColumns];
  float x[kShortSteps][kShortRows], y[kShortSteps][kShortRows];
  float2 decay_and_gain[kShortSteps];
  unsigned resets;  // a bit for each step before which the state becomes zero
};

template <int lane_states>
__global__ void __launch_bounds__(kShortThreads, lane_states > 16 ? 3 : 4)
    ssd_short_scan_fwd_kernel(const __grid_constant__ SsdFwdParams p) {
  using Shared = ShortShared<lane_states>;
  constexpr int kVector = 4, kVectors = lane_states / kVector;
  constexpr int kElements = kShortSteps * kShortRows / kShortThreads;  // of x and of out, for each thread
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);

  const int steps = static_cast<int>(p.seqlen), heads = static_cast<int>(p.heads);
  const int row_blocks = (p.headdim + kShortRows - 1) / kShortRows;
  const int64_t entry_and_head = blockIdx.x / row_blocks, b = entry_and_head / heads;
  const int head = static_cast<int>(entry_and_head - b * heads), group = head / (heads / static_cast<int>(p.groups));
  const int first_row = static_cast<int>(blockIdx.x % row_blocks) * kShortRows;
  const auto rows_of = [&](const RowsView& view, int64_t head_or_group) {
    return static_cast<float*>(view.data) + b * view.stride_batch + head_or_group * view.stride_head;
  };

  // Copy whole groups of steps; steps past the end become zeros.
  const int padded_steps = (steps + kStateLanes - 1) / kStateLanes * kStateLanes;
  for (int i = threadIdx.x; i < padded_steps * (Shared::kColumns / kVector); i += kShortThreads) {
    const int t = i / (Shared::kColumns / kVector), column = i % (Shared::kColumns / kVector) * kVector;
    const int bytes = t < steps && column < p.dstate ? cuda::kCpAsyncBytes : 0;
    cuda::cp_async(&shared.B[t][column], rows_of(p.B, group) + t * p.B.stride_step + column, bytes);
    cuda::cp_async(&shared.C[t][column], rows_of(p.C, group) + t * p.C.stride_step + column, bytes);
  }
  // The thread's elements of x and z are in one row, kStepsBetween steps apart.
  const int element_row = threadIdx.x % kShortRows, first_step = threadIdx.x / kShortRows;
  constexpr int kStepsBetween = kShortThreads / kShortRows;
  const bool has_elements = first_row + element_row < p.headdim;
  const auto load_elements = [&](const RowsView& view, float (&values)[kElements]) {
    const float* const source = rows_of(view, head) + first_row + element_row;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int t = first_step + i * kStepsBetween;
      values[i] = has_elements && t < steps ? source[t * view.stride_step] : 0.0f;
    }
  };
  float x[kElements], z[kElements] = {};
  load_elements(p.x, x);
  if (p.z.data != nullptr) load_elements(p.z, z);
  const float D =
      p.D != nullptr && has_elements ? p.D[head * p.D_stride_head + (first_row + element_row) * p.D_stride_row] : 0.0f;

  const int row = threadIdx.x / kStateLanes, first_column = threadIdx.x % kStateLanes * kVector;
  const bool has_row = first_row + row < p.headdim;
  const int64_t state_row = (entry_and_head * p.headdim + first_row + row) * p.state_columns;
  // Calls visit(vector of the state, its first column) for the columns that exist.
  const auto for_each_vector = [&](const auto& visit) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int column = first_column + k * kStateLanes * kVector;
      if (has_row && column < p.state_columns) visit(k, column);
    }
  };
  float state[kVectors][kVector];
  const auto clear_state = [&] {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) state[k][i] = 0;
    }
  };
  clear_state();
  if (p.initial_states != nullptr) {
    for_each_vector([&](int k, int column) {
      const auto vector = cuda::Vector<float, kVector>::load(p.initial_states + state_row + column);
#pragma unroll
      for (int i = 0; i < kVector; ++i) state[k][i] = vector[i];
    });
  }

  if (threadIdx.x < kShortSteps) {
    const int t = threadIdx.x;
    const bool is_reset = p.resets != nullptr && t < steps && p.resets[b * p.seqlen + t] != 0;
    const unsigned resets = __ballot_sync(kAllLanes, is_reset);
    float decay = 1, gain = 0;
    if (t < steps) {
      const DiscretizedGates<float> gates(p, head);
      gain = gates.gain(p, rows_of(p.dt, head)[t * p.dt.stride_step]);
      const float zeta = gain * gates.A;
      decay = is_reset ? 0.0f : Math<float>::exp2(static_cast<float>(double(gain) * double(gates.A) * kLog2E));
      visit_exponential(p.discretization, [&](auto method) {
        using Method = decltype(method);
        if constexpr (!Method::kUnitGain) gain *= current_gain(Method(), zeta, Method::basis(zeta));
      });
    }
    shared.decay_and_gain[t] = {decay, gain};
    if (t == 0) shared.resets = resets;
  }
#pragma unroll
  for (int i = 0; i < kElements; ++i) shared.x[first_step + i * kStepsBetween][element_row] = x[i];
  cuda::cp_async_wait();
  __syncthreads();

  const auto run = [&](auto has_resets) {
#pragma unroll 1
    for (int first = 0; first < padded_steps; first += kStateLanes) {
      float y[kStateLanes];
#pragma unroll
      for (int j = 0; j < kStateLanes; ++j) {
        const int t = first + j;
        const auto [decay, gain] = shared.decay_and_gain[t];
        const float input = gain * shared.x[t][row];
        // Zero times an infinite state would be NaN.
        if (has_resets && (shared.resets >> t & 1) != 0) clear_state();
        float parts[kVector] = {};
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
          const int column = first_column + k * kStateLanes * kVector;
          const auto B = cuda::Vector<float, kVector>::load(&shared.B[t][column]);
          const auto C = cuda::Vector<float, kVector>::load(&shared.C[t][column]);
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            state[k][i] = fmaf(decay, state[k][i], input * B[i]);
            parts[i] = fmaf(C[i], state[k][i], parts[i]);
          }
        }
        y[j] = (parts[0] + parts[1]) + (parts[2] + parts[3]);
      }
      cuda::sum_over_lanes<kStateLanes>(y);
      shared.y[first + threadIdx.x % kStateLanes][row] = y[0];
    }
  };
  shared.resets == 0 ? run(std::false_type()) : run(std::true_type());
  if (p.final_states != nullptr) {
    for_each_vector([&](int k, int column) {
      *reinterpret_cast<float4*>(p.final_states + state_row + column) = {state[k][0], state[k][1], state[k][2], state[k][3]};
    });
  }
  __syncthreads();
  if (!has_elements) return;

  float* const out = rows_of(p.out, head) + first_row + element_row;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const int t = first_step + i * kStepsBetween;
    if (t >= steps) break;
    float value = fmaf(D, x[i], shared.y[t][element_row]);
    if (p.z.data != nullptr) value *= silu(z[i]);
    out[t * p.out.stride_step] = value;
  }
}

cudaError_t launch_ssd_short_scan_fwd(const SsdFwdParams& params, cudaStream_t stream) {
  check_known(params.discretization);
  const auto launch = [&](auto lane_states) -> cudaError_t {
    constexpr int kLaneStates = decltype(lane_states)::value;
    const auto kernel = ssd_short_scan_fwd_kernel<kLaneStates>;
    constexpr int kBytes = sizeof(ShortShared<kLaneStates>);
    if (const cudaError_t error = cuda::allow_shared_bytes(kernel, kBytes); error != cudaSuccess) return error;
    kernel<<<static_cast<unsigned>(short_blocks(params)), kShortThreads, kBytes, stream>>>(params);
    return cudaGetLastError();
  };
  static_assert(sizeof(ShortShared<kMaxKernelDstate / kStateLanes>) <= kMinSharedBytes, "every supported device has that much");
  if (params.dstate <= 64) return launch(std::integral_constant<int, 64 / kStateLanes>());
  if (params.dstate <= kStateColumns) return launch(std::integral_constant<int, kStateColumns / kStateLanes>());
  return launch(std::integral_constant<int, kMaxKernelDstate / kStateLanes>());
}

}  // namespace ssm_kernels::ssd
