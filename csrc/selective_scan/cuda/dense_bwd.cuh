// Backward of selective_scan_dense, as dense.h says, for the states rotated by Q^T.
//
// Blocks, channels and lanes are those of forward. A chunk of steps, the last one first, is computed twice: forward from its
// saved state, which leaves h, x and the rotated C of each step in shared memory, then the adjoint from the last step to the
// first. A lane sums its rows of X, the gradient of A, in registers over all rows of its slot. Q q and Q h of a step, in the
// given basis, lead to the gradients of B, C and u, and to the output before the gate. The gradients of B and C are summed over
// the channels of a warp by shuffles, and over the warps at the end of a chunk: one part for each tile, which the host adds.
#pragma once

#include "cuda/launch.cuh"
#include "selective_scan/cuda/dense_shared.cuh"

namespace ssm_kernels::selective_scan::dense {

template <typename L>
struct BwdShared {
  using Acc = typename L::Acc;
  Tile<L> tile;
  Acc grad_y[L::kSteps][L::kChannels];  // before the gate
  // Gradients of the states' part alone, and <C, h>.
  Acc grad_u[L::kSteps][L::kChannels], grad_delta[L::kSteps][L::kChannels], y[L::kSteps][L::kChannels];
  Acc grad_B[L::kWarps][L::kSteps][L::kStates], grad_C[L::kWarps][L::kSteps][L::kStates];
  struct Channel {
    Acc h[L::kSteps + 1][L::kStates], x[L::kSteps][L::kStates], C[L::kSteps][L::kStates];
    Acc vectors[2][L::kStates];
    Acc padding[L::kLanes];  // the channels of a warp begin in different banks
  };
  Channel channels[L::kChannels];
};

// s2, s1 and w of each step of rk4, after the others.
template <typename L>
using Stages = typename L::Acc[L::kChannels][L::kSteps][3][L::kStates];

// X += factor q b^T, of a published b.
template <typename L>
__device__ __forceinline__ void add_outer(typename L::Acc (&X)[L::kRows][L::kStates], const typename L::Acc (&q)[L::kRows],
                                          typename L::Acc factor, const typename L::Acc* b) {
  using Acc = typename L::Acc;
#pragma unroll
  for (int j = 0; j < L::kStates; j += L::kVector) {
    const Part<Acc> part = *reinterpret_cast<const Part<Acc>*>(b + j);
#pragma unroll
    for (int v = 0; v < L::kVector; ++v) {
#pragma unroll
      for (int r = 0; r < L::kRows; ++r) X[r][j + v] = Math<Acc>::fma(factor * q[r], part.values[v], X[r][j + v]);
    }
  }
}

// Stores the sums over the channels of a warp.
template <typename L>
__device__ __forceinline__ void store_warp_sums(typename L::Acc* sums, const Place<L>& place,
                                                typename L::Acc (&values)[L::kRows]) {
#pragma unroll
  for (int r = 0; r < L::kRows; ++r) {
    if (!place.is_active) values[r] = 0;
#pragma unroll
    for (int distance = L::kLanes; distance < kWarpSize; distance *= 2) {
      values[r] += __shfl_xor_sync(kAllLanes, values[r], distance);
    }
    if (threadIdx.x % kWarpSize < L::kLanes) sums[place.state(r)] = values[r];
  }
}

template <typename L>
__global__ __launch_bounds__(L::kThreads, L::kBlocks) void dense_bwd_kernel(const __grid_constant__ SelectiveScanBwdParams p,
                                                                            const __grid_constant__ DenseParams dense,
                                                                            const __grid_constant__ DenseSums sums,
                                                                            ScalarKind kind) {
  using Acc = typename L::Acc;
  extern __shared__ __align__(16) unsigned char memory[];
  BwdShared<L>& shared = *reinterpret_cast<BwdShared<L>*>(memory);
  Stages<L>& all_stages = *reinterpret_cast<Stages<L>*>(memory + sizeof(BwdShared<L>));
  const int64_t tile = blockIdx.x % dense.tiles.tiles, slot = blockIdx.x / dense.tiles.tiles;
  const int64_t first = dense.tiles.first_channel(tile);
  const int count = static_cast<int>(dense.tiles.count(tile)), warp = threadIdx.x / kWarpSize;
  const Place<L> place(dense, tile);
  const int channel = place.channel;
  typename BwdShared<L>::Channel& own = shared.channels[channel];
  Acc* const vector = own.vectors[0];
  Acc* const second = own.vectors[1];
  const Acc alpha = Acc(dense.alpha), current = Acc(dense.current), previous = Acc(dense.previous);

  Acc X[L::kRows][L::kStates] = {}, constant_grad_B[L::kRows] = {}, constant_grad_C[L::kRows] = {};
  Acc grad_D = 0, grad_bias = 0;  // of the thread's channel as one of the tile
  for (int64_t index = slot; index < p.rows; index += dense.tiles.slots) {
    const ScanRow row = p.row(index);
    Acc g[L::kRows], next[L::kRows] = {};
    {
      Rotation<L, true> rotation;
      rotation.load(dense, place);
      load_state<L>(p, place, row.last < 0 ? nullptr : p.grad_last_state.data,
                    row.last * p.grad_last_state.stride_batch + place.d * p.grad_last_state.stride_dim,
                    p.grad_last_state.stride_state, g);
      publish<L>(vector, place, g);
      rotation.apply(vector, g);
    }
    const int64_t chunks = (row.end - row.begin + L::kSteps - 1) / L::kSteps;
#pragma unroll 1
    for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
      const int64_t begin = row.begin + chunk * L::kSteps;
      const int steps = static_cast<int>(row.end - begin < L::kSteps ? row.end - begin : L::kSteps);
      __syncthreads();
      shared.tile.load(p, dense, kind, row, begin, steps, first, count);
      visit_elements<Acc>(kind, [&](auto scalar) {
        using Scalar = decltype(scalar);
        const SequenceView &view = p.grad_out, &gate = p.z;
        const Scalar* const gates = static_cast<const Scalar*>(gate.data) + row.batch * gate.stride_batch +
                                    first * gate.stride_dim + begin * gate.stride_step;
        const Scalar* const from = static_cast<const Scalar*>(view.data) + row.batch * view.stride_batch +
                                   first * view.stride_dim + begin * view.stride_step;
        for_each_of_tile<L, L::kChannels>(steps, count, is_along_steps(view.stride_step), [&](int t, int c) {
          Acc value = view.data == nullptr ? Acc(0) : cuda::to_accumulate(from[c * view.stride_dim + t * view.stride_step]);
          if (gate.data != nullptr) value *= silu(cuda::to_accumulate(gates[c * gate.stride_dim + t * gate.stride_step]));
          shared.grad_y[t][c] = value;
        });
      });
      __syncthreads();

      // The states of the chunk.
      {
        Stepper<L> stepper;
        stepper.load(p, dense, place, vector);
        Acc h[L::kRows], before[L::kRows], x[L::kRows], C[L::kRows];
        if (p.saves_chunk_state(row, chunk)) {
          load_state<L>(p, place, p.chunk_states, (p.chunk_state(row, chunk) * p.dim + place.d) * p.dstate, 1, h);
        } else {
          load_state<L>(p, place, row.initial < 0 ? nullptr : p.initial_state.data,
                        row.initial * p.initial_state.stride_batch + place.d * p.initial_state.stride_dim,
                        p.initial_state.stride_state, h);
          publish<L>(vector, place, h);
          stepper.rotation.apply(vector, h);
        }
        if (!p.C.per_step) {
          load_constant<L>(p, place, p.C, C);
          publish<L>(vector, place, C);
          stepper.rotation.apply(vector, C);
        }
        stepper.load_before(p, dense, shared.tile, place, before);
#pragma unroll
        for (int r = 0; r < L::kRows; ++r) own.h[0][place.state(r)] = h[r];
#pragma unroll 1
        for (int s = 0; s < steps; ++s) {
          const Acc delta = shared.tile.delta[s][channel];
          Acc* const stages = dense.is_rk4 ? &all_stages[channel][s][0][0] : nullptr;
          stepper.respond(p, dense, shared.tile, place, s, delta, h, before, vector, stages, x);
          if (p.C.per_step) stepper.rotation.apply(shared.tile.C[s], C);
#pragma unroll
          for (int r = 0; r < L::kRows; ++r) {
            h[r] = Math<Acc>::fma(delta, x[r], h[r]);
            own.h[s + 1][place.state(r)] = h[r];
            own.x[s][place.state(r)] = x[r];
            own.C[s][place.state(r)] = C[r];
          }
        }
      }
      __syncwarp();

      // The adjoint.
      Diagonal<L> diagonal;
      diagonal.load(dense, place);
      Triangle<L, true> T;
      T.load(dense, place, diagonal);
      Rotation<L, false> back;
      back.load(dense, place);
      Acc own_B[L::kRows], own_C[L::kRows];
      if (!p.B.per_step) load_constant<L>(p, place, p.B, own_B);
      if (!p.C.per_step) load_constant<L>(p, place, p.C, own_C);
#pragma unroll 1
      for (int s = steps - 1; s >= 0; --s) {
        const Acc delta = shared.tile.delta[s][channel];
        const Acc u = shared.tile.u[s + 1][channel];
        const Acc grad_y = shared.grad_y[s][channel];
        Acc output[L::kRows];
        back.apply(own.h[s + 1], output);
        if (p.grad_z.data != nullptr) {
          Acc y = Acc(0);
#pragma unroll
          for (int r = 0; r < L::kRows; ++r) {
            y = Math<Acc>::fma(p.C.per_step ? shared.tile.C[s][place.state(r)] : own_C[r], output[r], y);
          }
          y = sum_over_channel<L>(y);
          if (place.lane == 0) shared.y[s][channel] = y;
        }
#pragma unroll
        for (int r = 0; r < L::kRows; ++r) {
          output[r] *= grad_y;
          g[r] = Math<Acc>::fma(own.C[s][place.state(r)], grad_y, g[r]);
        }
        if (p.C.per_step) {
          if (sums.C.data != nullptr) store_warp_sums<L>(shared.grad_C[warp][s], place, output);
        } else {
#pragma unroll
          for (int r = 0; r < L::kRows; ++r) constant_grad_C[r] += output[r];
        }

        // q, its product with T^T, and the gradient of delta.
        Acc q[L::kRows], product[L::kRows], grad_delta = Acc(0);
        if (!dense.is_rk4) {
          Acc middle[L::kRows], x[L::kRows];
#pragma unroll
          for (int r = 0; r < L::kRows; ++r) {
            q[r] = g[r];
            product[r] = Acc(0);
            x[r] = own.x[s][place.state(r)];
            middle[r] = Math<Acc>::fma(alpha * delta, x[r], own.h[s][place.state(r)]);
          }
          if (dense.alpha != 0) solve(T, diagonal, place, alpha * delta, vector, q);
#pragma unroll
          for (int r = 0; r < L::kRows; ++r) q[r] *= delta;
          publish<L>(vector, place, q);
          publish<L>(second, place, middle);
          add_product(T, diagonal, place, vector, Acc(1), product);
          add_outer<L>(X, q, Acc(1), second);
#pragma unroll
          for (int r = 0; r < L::kRows; ++r) grad_delta += Math<Acc>::fma(alpha, product[r], g[r]) * x[r];
        } else {
          const Acc(&stages)[3][L::kStates] = all_stages[channel][s];
          Acc a[L::kRows];
#pragma unroll
          for (int r = 0; r < L::kRows; ++r) {
            a[r] = q[r] = delta * g[r];
            grad_delta += g[r] * own.x[s][place.state(r)];
          }
#pragma unroll 1
          for (int stage = 0; stage < 3; ++stage) {
            const Acc part = Acc(1) / Acc(stage + 2);
            publish<L>(vector, place, a);
            add_outer<L>(X, a, delta * part, stages[stage]);
#pragma unroll
            for (int r = 0; r < L::kRows; ++r) product[r] = Acc(0);
            add_product(T, diagonal, place, vector, Acc(1), product);
#pragma unroll
            for (int r = 0; r < L::kRows; ++r) {
              grad_delta += part * product[r] * stages[stage][place.state(r)];
              a[r] = delta * part * product[r];
              q[r] += a[r];
              product[r] = Acc(0);
            }
          }
          publish<L>(vector, place, q);
          add_outer<L>(X, q, Acc(1), own.h[s]);
          add_product(T, diagonal, place, vector, Acc(1), product);
        }

        // The gradient of the step's sample, and in `next` that of the sample before it.
        Acc sample[L::kRows], grad_u = Acc(0);
        back.apply(vector, sample);
        const bool is_own_previous = previous != 0 && begin + s == row.begin && dense.repeats_first &&
                                     (dense.previous_u.data == nullptr || row.initial < 0);
        const Acc factor = is_own_previous ? current + previous : current;
#pragma unroll
        for (int r = 0; r < L::kRows; ++r) {
          g[r] += product[r];
          const Acc value = Math<Acc>::fma(factor, sample[r], next[r]);
          next[r] = previous == 0 ? Acc(0) : previous * sample[r];
          grad_u = Math<Acc>::fma(p.B.per_step ? shared.tile.B[s + 1][place.state(r)] : own_B[r], value, grad_u);
          sample[r] = u * value;
        }
        if (p.B.per_step) {
          if (sums.B.data != nullptr) store_warp_sums<L>(shared.grad_B[warp][s], place, sample);
        } else {
#pragma unroll
          for (int r = 0; r < L::kRows; ++r) constant_grad_B[r] += sample[r];
        }
        grad_u = sum_over_channel<L>(grad_u);
        grad_delta = sum_over_channel<L>(grad_delta);
        if (place.lane == 0) {
          shared.grad_u[s][channel] = grad_u;
          shared.grad_delta[s][channel] = grad_delta;
        }
      }
      __syncthreads();

      visit_elements<Acc>(kind, [&](auto scalar) {
        using Scalar = decltype(scalar);
        const auto offset = [&](const SequenceView& view, int t, int c) {
          return row.batch * view.stride_batch + (first + c) * view.stride_dim + (begin + t) * view.stride_step;
        };
        const auto given = [&](const SequenceView& view, int t, int c) {
          return cuda::to_accumulate(static_cast<const Scalar*>(view.data)[offset(view, t, c)]);
        };
        const auto store = [&](const SequenceView& view, const auto& value) {
          if (view.data == nullptr) return;
          for_each_of_tile<L, L::kChannels>(steps, count, is_along_steps(view.stride_step), [&](int t, int c) {
            static_cast<Scalar*>(view.data)[offset(view, t, c)] = cuda::from_accumulate<Scalar>(value(t, c));
          });
        };
        const auto with_skip = [&](const Acc(*values)[L::kChannels], const Acc* other, int t, int c) {
          return Math<Acc>::fma(of_channel<Acc>(p.D, first + c), other[c], values[t][c]);
        };
        store(p.grad_u, [&](int t, int c) { return with_skip(shared.grad_u, shared.grad_y[t], t, c); });
        store(p.grad_z, [&](int t, int c) {
          if (p.grad_out.data == nullptr) return Acc(0);
          const Acc z = shared.tile.z[t][c];
          return given(p.grad_out, t, c) * with_skip(shared.y, shared.tile.u[t + 1], t, c) * silu_derivative(z, sigmoid(z));
        });
        if (p.delta_softplus) {
          for_each_of_tile<L, L::kChannels>(steps, count, is_along_steps(p.delta.stride_step), [&](int t, int c) {
            shared.grad_delta[t][c] *= softplus_derivative(given(p.delta, t, c) + of_channel<Acc>(p.delta_bias, first + c));
          });
          __syncthreads();
        }
        store(p.grad_delta, [&](int t, int c) { return shared.grad_delta[t][c]; });
      });
      if (threadIdx.x < count) {
        for (int t = 0; t < steps; ++t) {
          grad_bias += shared.grad_delta[t][threadIdx.x];
          grad_D = Math<Acc>::fma(shared.grad_y[t][threadIdx.x], shared.tile.u[t + 1][threadIdx.x], grad_D);
        }
      }
      const auto store_parts = [&](const MatrixView& view, int64_t stride_tile, const MatrixView& input,
                                   const Acc(*values)[L::kSteps][L::kStates]) {
        if (view.data == nullptr) return;
        const int64_t group = first / (p.dim / input.groups), tiles = dense.tiles.tiles / input.groups;
        Acc* const to = static_cast<Acc*>(view.data) + tile % tiles * stride_tile + row.batch * view.stride_batch +
                        group * view.stride_channel + begin * view.stride_step;
        for_each_of_tile<L, L::kStates>(steps, static_cast<int>(p.dstate), true, [&](int t, int i) {
          Acc sum = values[0][t][i];
#pragma unroll
          for (int w = 1; w < L::kWarps; ++w) sum += values[w][t][i];
          to[i * view.stride_state + t * view.stride_step] = sum;
        });
      };
      store_parts(sums.B, sums.stride_tile_B, p.B, shared.grad_B);
      store_parts(sums.C, sums.stride_tile_C, p.C, shared.grad_C);
    }
    if (p.grad_initial_state != nullptr && row.initial >= 0) {
      Rotation<L, false> back;
      back.load(dense, place);
      publish<L>(vector, place, g);
      back.apply(vector, g);
      store_state<L>(p, place, p.grad_initial_state, row.initial, g);
    }
    if (sums.grad_previous != nullptr && row.initial >= 0) store_state<L>(p, place, sums.grad_previous, row.initial, next);
  }

  const int64_t sum_row = slot * p.dim + place.d;
  if (sums.A != nullptr && place.is_active) {
    Acc* const to = static_cast<Acc*>(sums.A) + sum_row * p.dstate * p.dstate;
#pragma unroll
    for (int r = 0; r < L::kRows; ++r) {
#pragma unroll
      for (int j = 0; j < L::kStates; ++j) {
        if (place.state(r) < p.dstate && j < p.dstate) to[place.state(r) * p.dstate + j] = X[r][j];
      }
    }
  }
  if (sums.constant_B != nullptr) store_state<L>(p, place, sums.constant_B, slot, constant_grad_B);
  if (sums.constant_C != nullptr) store_state<L>(p, place, sums.constant_C, slot, constant_grad_C);
  if (threadIdx.x < count) {
    const int64_t place_of_sum = slot * p.dim + first + threadIdx.x;
    if (sums.D != nullptr) static_cast<Acc*>(sums.D)[place_of_sum] = grad_D;
    if (sums.delta_bias != nullptr) static_cast<Acc*>(sums.delta_bias)[place_of_sum] = grad_bias;
  }
}

template <typename L>
cudaError_t launch_bwd_kernel(const SelectiveScanBwdParams& params, const DenseParams& dense, const DenseSums& sums,
                              ScalarKind kind, cudaStream_t stream) {
  const int bytes = static_cast<int>(sizeof(BwdShared<L>) + (dense.is_rk4 ? sizeof(Stages<L>) : 0));
  const auto kernel = &dense_bwd_kernel<L>;
  const cudaError_t error = cuda::allow_shared_bytes(kernel, bytes);
  if (error != cudaSuccess) return error;
  return cuda::launch(kernel, dense.tiles.tiles * dense.tiles.slots, L::kThreads, bytes, stream, /*uses_pdl=*/false, params,
                      dense, sums, kind);
}

}  // namespace ssm_kernels::selective_scan::dense
