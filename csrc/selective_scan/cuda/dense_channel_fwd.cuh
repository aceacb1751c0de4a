// Forward of selective_scan_dense in fp32 with up to 16 states: the recurrence of dense.h, for the states rotated by Q^T, with
// a channel to a thread (dense_channel.cuh).
//
// For kSteps steps at once a warp rotates B and C for each of its channels. Then each thread takes its channel through the
// steps. For alpha >= 1/2 a step is one solve, for m = h + alpha delta x; other rules take products with T. States at the chunk
// boundaries are saved as they are, rotated; the initial and the last state are rotated at the borders of the call.
#pragma once

#include "cuda/launch.cuh"
#include "selective_scan/cuda/dense_channel.cuh"

namespace ssm_kernels::selective_scan::dense::channel {

struct FwdShared {
  Part B[(kSteps + 1) * kChannels * kParts];  // row 0 is the step before
  Part C[kSteps * kChannels * kParts];
  float u[kSteps][kChannels], z[kSteps][kChannels];
  float delta[kSteps][kChannels];  // after bias and softplus; once a step is done, its output
  Raw raw_B, raw_C;
};

__global__ __launch_bounds__(kWarpSize) void dense_channel_fwd_kernel(const __grid_constant__ SelectiveScanFwdParams p,
                                                                      const __grid_constant__ DenseParams dense,
                                                                      ScalarKind kind) {
  extern __shared__ __align__(16) unsigned char memory[];
  FwdShared& shared = *reinterpret_cast<FwdShared*>(memory);
  const Vectors B{shared.B}, C{shared.C};
  const int64_t tile = blockIdx.x % dense.tiles.tiles, slot = blockIdx.x / dense.tiles.tiles;
  const Place place(dense, tile);
  const int lane = place.lane;
  const bool has_low = kind == ScalarKind::kFloat;
  const float D = of_channel<float>(p.D, place.d), bias = of_channel<float>(p.delta_bias, place.d);
  Transition transition;
  transition.load(dense, place);
  const auto fill = [&](const MatrixView& view, const Vectors& to, int rows) {
    if (view.per_step) return;
    float x[kStates];
    load_state(p, view.data, place.d * view.stride_channel, view.stride_state, x);
    apply(dense.Q_columns, place, x);
#pragma unroll 1
    for (int s = 0; s < rows; ++s) to.store(s, lane, [&](int i) { return x[i]; });
  };
  fill(p.B, B, kSteps + 1);
  fill(p.C, C, kSteps);

  for (int64_t index = slot; index < p.rows; index += dense.tiles.slots) {
    const ScanRow row = p.row(index);
    float h[kStates];
    load_state(p, row.initial < 0 ? nullptr : p.initial_state.data,
               row.initial * p.initial_state.stride_batch + place.d * p.initial_state.stride_dim, p.initial_state.stride_state,
               h);
    if (row.initial >= 0 && p.initial_state.data != nullptr) apply(dense.Q_columns, place, h);
    const auto save = [&](int64_t chunk) {
      if (p.chunk_states == nullptr || !p.saves_chunk_state(row, chunk)) return;
      store_state(p, place, p.chunk_states, p.chunk_state(row, chunk), h);
    };
    float before = 0;
    if (dense.previous != 0 && row.begin < row.end) {
      __syncwarp();
      visit_elements<float>(
          kind, [&](auto scalar) { before = load_before<decltype(scalar)>(p, dense, place, row, row.begin, B, has_low); });
    }
    for (int64_t begin = row.begin; begin < row.end; begin += kSteps) {
      const int steps = static_cast<int>(row.end - begin < kSteps ? row.end - begin : kSteps);
      if ((begin - row.begin) % kDenseChunk == 0) save((begin - row.begin) / kDenseChunk);
      __syncwarp();
      visit_elements<float>(kind, [&](auto scalar) {
        using Scalar = decltype(scalar);
        float u[kSteps], delta[kSteps], z[kSteps] = {};
        load_steps<Scalar>(p.u, row.batch, place.d, begin, steps, u);
        load_steps<Scalar>(p.delta, row.batch, place.d, begin, steps, delta);
        if (p.z.data != nullptr) load_steps<Scalar>(p.z, row.batch, place.d, begin, steps, z);
        if (p.B.per_step) shared.raw_B.load<Scalar>(p, p.B, row.batch, place.first, begin, steps);
        if (p.C.per_step) shared.raw_C.load<Scalar>(p, p.C, row.batch, place.first, begin, steps);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          float value = delta[s] + bias;
          if (p.delta_softplus) value = softplus(value);
          shared.u[s][lane] = u[s];
          shared.z[s][lane] = z[s];
          shared.delta[s][lane] = s < steps ? value : 0.0f;  // such a step keeps the state
        }
      });
      __syncwarp();
      if (p.B.per_step || p.C.per_step) {
        rotate(dense, place, shared.raw_B.part(), shared.raw_C.part(), has_low, B, 1, p.B.per_step, C, p.C.per_step);
      }
      __syncwarp();
#pragma unroll 1
      for (int s = 0; s < kSteps; ++s) {
        const float u = shared.u[s][lane], delta = shared.delta[s][lane];
        float w[kStates], y[4] = {};
        load_sample(dense, B, lane, s, u, before, w);
        before = u;
        step<true>(dense, transition, delta, w, h);
        C.visit(s, lane, [&](int i, float value) { y[i % 4] = Math<float>::fma(value, h[i], y[i % 4]); });
        shared.delta[s][lane] = (y[0] + y[1]) + (y[2] + y[3]);
      }
      if (dense.previous != 0 && p.B.per_step) {
        float last[kStates];
        B.visit(kSteps, lane, [&](int i, float value) { last[i] = value; });
        B.store(0, lane, [&](int i) { return last[i]; });
      }
      if (!place.is_active) continue;
      visit_elements<float>(kind, [&](auto scalar) {
        float out[kSteps];
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          out[s] = Math<float>::fma(D, shared.u[s][lane], shared.delta[s][lane]);
          if (p.z.data != nullptr) out[s] *= silu(shared.z[s][lane]);
        }
        store_steps<decltype(scalar)>(p.out, row.batch, place.d, begin, steps, out);
      });
    }
    save((row.end - row.begin + kDenseChunk - 1) / kDenseChunk);
    if (row.last < 0) continue;
    apply(dense.Q, place, h);
    store_state(p, place, p.last_state, row.last, h);
  }
}

inline cudaError_t launch_channel_fwd_kernel(const SelectiveScanFwdParams& params, const DenseParams& dense, ScalarKind kind,
                                             cudaStream_t stream) {
  const int bytes = static_cast<int>(sizeof(FwdShared));
  const auto kernel = &dense_channel_fwd_kernel;
  const cudaError_t error = cuda::allow_shared_bytes(kernel, bytes);
  if (error != cudaSuccess) return error;
  return cuda::launch(kernel, dense.tiles.tiles * dense.tiles.slots, kWarpSize, bytes, stream, /*uses_pdl=*/false, params,
                      dense, kind);
}

}  // namespace ssm_kernels::selective_scan::dense::channel
