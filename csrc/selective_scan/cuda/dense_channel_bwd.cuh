// Backward of selective_scan_dense in fp32 with up to 16 states, as dense.h says, for the states rotated by Q^T, with a channel
// to a thread (dense_channel.cuh): the rules of the gbt family, with B and C per step.
//
// A chunk is computed as two halves of kSteps steps, the last one first. A thread computes the states of a half from those at
// the begin of the chunk, which leaves h of each step in shared memory, then the adjoint from the last step to the first. With
// m = h_{t-1} + alpha delta x = (1 - alpha) h_{t-1} + alpha h_t, s = (I - alpha Z)^-T g and r = T^T s
//
//   q = delta s        X += q m^T        grad_delta = s . x = r . m + s . w        g_{t-1} = g + delta r
//
// where w is that of dense.h without A h. The vectors q and u times the gradient of the sample replace the rotated C and B of
// their steps. From these and from h the warp then computes, on tensor cores in 3xTF32, Q times the gradients of B and C,
// summed over the channels of the tile, and the half's part of X for each channel. X is summed in global memory: a chunk's part
// is the work of one warp, in order, so that sums are deterministic.
#pragma once

#include "cuda/launch.cuh"
#include "selective_scan/cuda/dense_channel.cuh"

namespace ssm_kernels::selective_scan::dense::channel {

struct BwdShared {
  Part B[(kSteps + 1) * kChannels * kParts];  // row 0 is the step before; later u times the gradients of samples
  Part C[kSteps * kChannels * kParts];        // later q
  union {
    Part h[(kSteps + 1) * kChannels * kParts];  // row 0 is the state before
    struct {
      Raw B, C;
    } raw;  // dead once a half is rotated
  };
  float u[kSteps][kChannels], delta[kSteps][kChannels];  // later their gradients
  float grad_y[kSteps][kChannels];                       // before the gate
  float y[kSteps][kChannels];                            // the output before the gate
};
// Four blocks of 32 channels on a multiprocessor of 228 KiB, of which each block takes 1 KiB more.
static_assert(4 * (sizeof(BwdShared) + 1024) <= 228 * 1024, "four blocks should be resident");

// Where the parts of the gradient of B or C of a tile go.
__device__ __forceinline__ void store_sums(const SelectiveScanParams& p, const DenseParams& dense, const MatrixView& view,
                                           int64_t stride_tile, const MatrixView& input, int64_t tile, const Place& place,
                                           int64_t batch, int64_t begin, int steps, const float (&sums)[2][2]) {
  const int step = place.lane / 4;
  if (view.data == nullptr || step >= steps) return;
  const int64_t group = place.first / (p.dim / input.groups), tiles = dense.tiles.tiles / input.groups;
  float* const to = static_cast<float*>(view.data) + tile % tiles * stride_tile + batch * view.stride_batch +
                    group * view.stride_channel + (begin + step) * view.stride_step;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int state = 8 * n + place.lane % 4 * 2 + j;
      if (state < p.dstate) to[state * view.stride_state] = sums[n][j];
    }
  }
}

// X of a channel += the sum of q m^T over the steps of a half.
__device__ __forceinline__ void add_outer_products(const SelectiveScanParams& p, float* X, const Vectors& q, const Vectors& h,
                                                   float alpha, int lane, int channel) {
  const int row = lane / 4, step = lane % 4;
  float old[2][4];
  const auto visit = [&](const auto& body) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int state = row + 8 * i, column = 8 * n + 2 * step;
        float* const at = X + state * p.dstate + column;
        if (p.dstate == kStates) {
          body(reinterpret_cast<float2*>(at), n, 2 * i);
        } else {
          if (state < p.dstate && column < p.dstate) body(at, n, 2 * i);
          if (state < p.dstate && column + 1 < p.dstate) body(at + 1, n, 2 * i + 1);
        }
      }
    }
  };
  visit([&](auto* at, int n, int i) {
    if constexpr (std::is_same_v<decltype(at), float2*>) {
      const float2 pair = *at;
      old[n][i] = pair.x;
      old[n][i + 1] = pair.y;
    } else {
      old[n][i] = *at;
    }
  });
  cuda::Tf32A a;
  const float rows[4] = {q.at(step, channel, row), q.at(step, channel, row + 8), q.at(step + 4, channel, row),
                         q.at(step + 4, channel, row + 8)};
  a.prepare(rows);
  cuda::Tf32B b[2];
  float d[2][4] = {};
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    float columns[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float previous = h.at(step + 4 * i, channel, row + 8 * n), next = h.at(step + 4 * i + 1, channel, row + 8 * n);
      columns[i] = Math<float>::fma(alpha, next - previous, previous);
    }
    b[n].prepare(columns);
  }
  cuda::mma_tf32x3(d, a, b);
  visit([&](auto* at, int n, int i) {
    if constexpr (std::is_same_v<decltype(at), float2*>) {
      *at = {old[n][i] + d[n][i], old[n][i + 1] + d[n][i + 1]};
    } else {
      *at = old[n][i] + d[n][i];
    }
  });
}

__global__ __launch_bounds__(kWarpSize) void dense_channel_bwd_kernel(const __grid_constant__ SelectiveScanBwdParams p,
                                                                      const __grid_constant__ DenseParams dense,
                                                                      const __grid_constant__ DenseSums sums, ScalarKind kind) {
  extern __shared__ __align__(16) unsigned char memory[];
  BwdShared& shared = *reinterpret_cast<BwdShared*>(memory);
  const Vectors B{shared.B}, C{shared.C}, states{shared.h};
  const int64_t tile = blockIdx.x % dense.tiles.tiles, slot = blockIdx.x / dense.tiles.tiles;
  const Place place(dense, tile);
  const int lane = place.lane;
  const bool has_low = kind == ScalarKind::kFloat;
  const float D = of_channel<float>(p.D, place.d), bias = of_channel<float>(p.delta_bias, place.d);
  const float alpha = static_cast<float>(dense.alpha), current = static_cast<float>(dense.current),
              previous = static_cast<float>(dense.previous);
  Transition transition;
  transition.load(dense, place);
  float grad_D = 0, grad_bias = 0;

  for (int64_t index = slot; index < p.rows; index += dense.tiles.slots) {
    const ScanRow row = p.row(index);
    float g[kStates], next[kStates] = {};
    const bool has_last = row.last >= 0 && p.grad_last_state.data != nullptr;
    load_state(p, has_last ? p.grad_last_state.data : nullptr,
               row.last * p.grad_last_state.stride_batch + place.d * p.grad_last_state.stride_dim,
               p.grad_last_state.stride_state, g);
    if (has_last) apply(dense.Q_columns, place, g);
    const int64_t halves = (row.end - row.begin + kSteps - 1) / kSteps;
#pragma unroll 1
    for (int64_t half = halves - 1; half >= 0; --half) {
      const int64_t chunk = half / 2;
      float before = 0;
#pragma unroll 1
      for (int64_t part = 2 * chunk; part <= half; ++part) {
        const bool is_first = part == 2 * chunk, is_last = part == half;
        const int64_t begin = row.begin + part * kSteps;
        const int steps = static_cast<int>(row.end - begin < kSteps ? row.end - begin : kSteps);
        __syncwarp();
        float h[kStates];
        if (is_first) {
          if (p.saves_chunk_state(row, chunk)) {
            load_state(p, p.chunk_states, (p.chunk_state(row, chunk) * p.dim + place.d) * p.dstate, 1, h);
          } else {
            load_state(p, row.initial < 0 ? nullptr : p.initial_state.data,
                       row.initial * p.initial_state.stride_batch + place.d * p.initial_state.stride_dim,
                       p.initial_state.stride_state, h);
            if (row.initial >= 0 && p.initial_state.data != nullptr) apply(dense.Q_columns, place, h);
          }
          if (previous != 0) {
            visit_elements<float>(
                kind, [&](auto scalar) { before = load_before<decltype(scalar)>(p, dense, place, row, begin, B, has_low); });
          }
        } else {
          states.visit(kSteps, lane, [&](int i, float value) { h[i] = value; });
          if (previous != 0) {
            before = shared.u[kSteps - 1][lane];
            float last[kStates];
            B.visit(kSteps, lane, [&](int i, float value) { last[i] = value; });
            B.store(0, lane, [&](int i) { return last[i]; });
          }
        }
        __syncwarp();
        visit_elements<float>(kind, [&](auto scalar) {
          using Scalar = decltype(scalar);
          float u[kSteps], delta[kSteps], grad[kSteps] = {}, z[kSteps];
          load_steps<Scalar>(p.u, row.batch, place.d, begin, steps, u);
          load_steps<Scalar>(p.delta, row.batch, place.d, begin, steps, delta);
          if (is_last && p.grad_out.data != nullptr) {
            load_steps<Scalar>(p.grad_out, row.batch, place.d, begin, steps, grad);
            if (p.z.data != nullptr) load_steps<Scalar>(p.z, row.batch, place.d, begin, steps, z);
          }
          shared.raw.B.load<Scalar>(p, p.B, row.batch, place.first, begin, steps);
          shared.raw.C.load<Scalar>(p, p.C, row.batch, place.first, begin, steps);
#pragma unroll
          for (int s = 0; s < kSteps; ++s) {
            float value = delta[s] + bias;
            if (p.delta_softplus) value = softplus(value);
            if (p.z.data != nullptr && is_last && p.grad_out.data != nullptr) grad[s] *= silu(z[s]);
            shared.u[s][lane] = u[s];
            shared.delta[s][lane] = s < steps ? value : 0.0f;  // such a step keeps the state
            shared.grad_y[s][lane] = grad[s];
          }
        });
        __syncwarp();
        const Part own_B = shared.raw.B.part(), own_C = shared.raw.C.part();
        __syncwarp();
        rotate(dense, place, own_B, own_C, has_low, B, 1, true, C, is_last);
        __syncwarp();

        states.store(0, lane, [&](int i) { return h[i]; });
        float u_before = before;
#pragma unroll 1
        for (int s = 0; s < kSteps; ++s) {
          const float u = shared.u[s][lane];
          float w[kStates];
          load_sample(dense, B, lane, s, u, u_before, w);
          u_before = u;
          step<false>(dense, transition, shared.delta[s][lane], w, h);
          states.store(s + 1, lane, [&](int i) { return h[i]; });
        }
      }

      const int64_t begin = row.begin + half * kSteps;
      const int steps = static_cast<int>(row.end - begin < kSteps ? row.end - begin : kSteps);
#pragma unroll 1
      for (int s = kSteps - 1; s >= 0; --s) {
        const float u = shared.u[s][lane], delta = shared.delta[s][lane], grad_y = shared.grad_y[s][lane];
        const float u_before = s > 0 ? shared.u[s - 1][lane] : before;
        float x[kStates], y = 0;
        if (p.grad_z.data != nullptr) states.visit(s + 1, lane, [&](int i, float value) { x[i] = value; });
        C.visit(s, lane, [&](int i, float value) {
          g[i] = Math<float>::fma(value, grad_y, g[i]);
          if (p.grad_z.data != nullptr) y = Math<float>::fma(value, x[i], y);
        });
        shared.y[s][lane] = Math<float>::fma(D, u, y);
        grad_D = Math<float>::fma(grad_y, u, grad_D);
#pragma unroll
        for (int i = 0; i < kStates; ++i) x[i] = g[i];
        if (alpha != 0) transition.solve<true>(alpha * delta, x);

        // s . w, the gradient of the sample, and in `next` that of the sample before it.
        const bool is_own_previous = previous != 0 && begin + s == row.begin && dense.repeats_first &&
                                     (dense.previous_u.data == nullptr || row.initial < 0);
        const float factor = is_own_previous ? current + previous : current;
        float grad_u = 0, dot = 0, dot_before = 0;
        if (previous != 0)
          B.visit(s, lane, [&](int i, float value) { dot_before = Math<float>::fma(value, x[i], dot_before); });
        float matrix[kStates];
        B.visit(s + 1, lane, [&](int i, float value) { matrix[i] = value; });
#pragma unroll
        for (int i = 0; i < kStates; ++i) {
          const float q = delta * x[i], value = Math<float>::fma(factor, q, next[i]);
          next[i] = previous * q;
          dot = Math<float>::fma(matrix[i], x[i], dot);
          grad_u = Math<float>::fma(matrix[i], value, grad_u);
          matrix[i] = u * value;
        }
        B.store(s + 1, lane, [&](int i) { return matrix[i]; });
        C.store(s, lane, [&](int i) { return delta * x[i]; });
        transition.multiply_transposed(x);
        float grad_delta = current * u * dot + previous * u_before * dot_before;
        float sum = 0, difference = 0;
        states.visit(s, lane, [&](int i, float value) {
          sum = Math<float>::fma(x[i], (1 - alpha) * value, sum);
          g[i] = Math<float>::fma(delta, x[i], g[i]);
        });
        if (alpha != 0)
          states.visit(s + 1, lane, [&](int i, float value) { difference = Math<float>::fma(x[i], value, difference); });
        grad_delta += Math<float>::fma(alpha, difference, sum);
        shared.u[s][lane] = Math<float>::fma(D, grad_y, grad_u);
        shared.delta[s][lane] = grad_delta;
      }

      visit_elements<float>(kind, [&](auto scalar) {
        using Scalar = decltype(scalar);
        float values[kSteps], other[kSteps];
        const auto store = [&](const SequenceView& view) {
          if (view.data != nullptr && place.is_active) store_steps<Scalar>(view, row.batch, place.d, begin, steps, values);
        };
#pragma unroll
        for (int s = 0; s < kSteps; ++s) values[s] = shared.u[s][lane];
        store(p.grad_u);
        if (p.delta_softplus) load_steps<Scalar>(p.delta, row.batch, place.d, begin, steps, other);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          values[s] = shared.delta[s][lane];
          if (p.delta_softplus) values[s] *= softplus_derivative(other[s] + bias);
          if (s < steps) grad_bias += values[s];
        }
        store(p.grad_delta);
        if (p.grad_z.data == nullptr) return;
        float grad[kSteps] = {};
        if (p.grad_out.data != nullptr) load_steps<Scalar>(p.grad_out, row.batch, place.d, begin, steps, grad);
        load_steps<Scalar>(p.z, row.batch, place.d, begin, steps, other);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          values[s] = grad[s] * shared.y[s][lane] * silu_derivative(other[s], sigmoid(other[s]));
        }
        store(p.grad_z);
      });

      // Sums over the channels, and over the steps.
      __syncwarp();
      const int own_row = lane / 4, own_part = lane % 4;
      float sums_B[2][2] = {}, sums_C[2][2] = {};
      MatrixParts ahead;
      ahead.load(dense.Q, dense, place, 0);
#pragma unroll 1
      for (int c = 0; c < place.count; ++c) {
        if (sums.B.data != nullptr || sums.C.data != nullptr) {
          cuda::Tf32A a[2];
          cuda::Tf32B b[2][2];
          Part outputs = states.part(own_row + 1, c, own_part);
          const float grad_y = shared.grad_y[own_row][c];
#pragma unroll
          for (float& value : outputs.values) value *= grad_y;
          prepare_rows(B.part(own_row + 1, c, own_part), outputs, a);
          prepare_matrix(ahead.parts[0], b[0]);
          prepare_matrix(ahead.parts[1], b[1]);
          ahead.load(dense.Q, dense, place, c + 1);
          float d[2][2][4] = {};
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const cuda::Tf32B columns[2] = {b[0][k], b[1][k]};
            cuda::mma_tf32x3(d[k], a[k], columns);
          }
#pragma unroll
          for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              sums_B[n][j] += d[0][n][j] + d[1][n][j];
              sums_C[n][j] += d[0][n][j + 2] + d[1][n][j + 2];
            }
          }
        }
        if (sums.A != nullptr) {
          float* const X = static_cast<float*>(sums.A) + (slot * p.dim + place.first + c) * p.dstate * p.dstate;
          add_outer_products(p, X, C, states, alpha, lane, c);
        }
      }
      store_sums(p, dense, sums.B, sums.stride_tile_B, p.B, tile, place, row.batch, begin, steps, sums_B);
      store_sums(p, dense, sums.C, sums.stride_tile_C, p.C, tile, place, row.batch, begin, steps, sums_C);
    }
    if (p.grad_initial_state != nullptr && row.initial >= 0) {
      apply(dense.Q, place, g);
      store_state(p, place, p.grad_initial_state, row.initial, g);
    }
    if (sums.grad_previous != nullptr && row.initial >= 0) {
      apply(dense.Q, place, next);
      store_state(p, place, sums.grad_previous, row.initial, next);
    }
  }
  if (!place.is_active) return;
  if (sums.D != nullptr) static_cast<float*>(sums.D)[slot * p.dim + place.d] = grad_D;
  if (sums.delta_bias != nullptr) static_cast<float*>(sums.delta_bias)[slot * p.dim + place.d] = grad_bias;
}

inline cudaError_t launch_channel_bwd_kernel(const SelectiveScanBwdParams& params, const DenseParams& dense,
                                             const DenseSums& sums, ScalarKind kind, cudaStream_t stream) {
  const int bytes = static_cast<int>(sizeof(BwdShared));
  const auto kernel = &dense_channel_bwd_kernel;
  const cudaError_t error = cuda::allow_shared_bytes(kernel, bytes);
  if (error != cudaSuccess) return error;
  return cuda::launch(kernel, dense.tiles.tiles * dense.tiles.slots, kWarpSize, bytes, stream, /*uses_pdl=*/false, params,
                      dense, sums, kind);
}

}  // namespace ssm_kernels::selective_scan::dense::channel
