// Forward of selective_scan_dense: the recurrence of dense.h, for the states rotated by Q^T.
//
// A block takes a tile of channels that share their groups of B and C, through all steps of the rows of its slot. It stages
// kDenseChunk steps of u, delta, z, B and C in shared memory. kLanes lanes take a channel (dense_shared.cuh): they rotate B and
// C of a step, solve for x, and add <Q^T C, h>. States at the chunk boundaries are saved as they are, rotated; the initial and
// the last state are rotated at the borders of the call.
#pragma once

#include "cuda/launch.cuh"
#include "selective_scan/cuda/dense_shared.cuh"

namespace ssm_kernels::selective_scan::dense {

template <typename L>
struct FwdShared {
  using Acc = typename L::Acc;
  Tile<L> tile;
  Acc out[L::kSteps][L::kChannels];
  Acc vectors[L::kChannels][L::kStates + L::kLanes];  // the channels of a warp begin in different banks
};

template <typename L>
__global__ __launch_bounds__(L::kThreads, L::kBlocks) void dense_fwd_kernel(const __grid_constant__ SelectiveScanFwdParams p,
                                                                            const __grid_constant__ DenseParams dense,
                                                                            ScalarKind kind) {
  using Acc = typename L::Acc;
  extern __shared__ __align__(16) unsigned char memory[];
  FwdShared<L>& shared = *reinterpret_cast<FwdShared<L>*>(memory);
  const int64_t tile = blockIdx.x % dense.tiles.tiles, slot = blockIdx.x / dense.tiles.tiles;
  const int64_t first = dense.tiles.first_channel(tile);
  const int count = static_cast<int>(dense.tiles.count(tile));
  const Place<L> place(dense, tile);
  Acc* const vector = shared.vectors[place.channel];
  Stepper<L> stepper;
  stepper.load(p, dense, place, vector);
  Acc constant_C[L::kRows];
  if (!p.C.per_step) {
    load_constant<L>(p, place, p.C, constant_C);
    publish<L>(vector, place, constant_C);
    stepper.rotation.apply(vector, constant_C);
  }

  for (int64_t index = slot; index < p.rows; index += dense.tiles.slots) {
    const ScanRow row = p.row(index);
    Acc h[L::kRows], before[L::kRows], x[L::kRows];
    load_state<L>(p, place, row.initial < 0 ? nullptr : p.initial_state.data,
                  row.initial * p.initial_state.stride_batch + place.d * p.initial_state.stride_dim,
                  p.initial_state.stride_state, h);
    publish<L>(vector, place, h);
    stepper.rotation.apply(vector, h);
    const auto save = [&](int64_t chunk) {
      if (p.chunk_states == nullptr || !p.saves_chunk_state(row, chunk)) return;
      store_state<L>(p, place, p.chunk_states, p.chunk_state(row, chunk), h);
    };
    int64_t chunk = 0;
    for (int64_t begin = row.begin; begin < row.end; begin += L::kSteps, ++chunk) {
      const int steps = static_cast<int>(row.end - begin < L::kSteps ? row.end - begin : L::kSteps);
      __syncthreads();
      shared.tile.load(p, dense, kind, row, begin, steps, first, count);
      __syncthreads();
      save(chunk);
      stepper.load_before(p, dense, shared.tile, place, before);
#pragma unroll 1
      for (int s = 0; s < steps; ++s) {
        const Acc delta = shared.tile.delta[s][place.channel];
        stepper.respond(p, dense, shared.tile, place, s, delta, h, before, vector, nullptr, x);
        Acc C[L::kRows], y = Acc(0);
        if (p.C.per_step) {
          stepper.rotation.apply(shared.tile.C[s], C);
        } else {
#pragma unroll
          for (int r = 0; r < L::kRows; ++r) C[r] = constant_C[r];
        }
#pragma unroll
        for (int r = 0; r < L::kRows; ++r) {
          h[r] = Math<Acc>::fma(delta, x[r], h[r]);
          y = Math<Acc>::fma(C[r], h[r], y);
        }
        y = sum_over_channel<L>(y);
        if (place.lane == 0) shared.out[s][place.channel] = y;
      }
      __syncthreads();
      visit_elements<Acc>(kind, [&](auto scalar) {
        using Scalar = decltype(scalar);
        Scalar* const to = static_cast<Scalar*>(p.out.data) + row.batch * p.out.stride_batch + first * p.out.stride_dim +
                           begin * p.out.stride_step;
        for_each_of_tile<L, L::kChannels>(steps, count, is_along_steps(p.out.stride_step), [&](int t, int c) {
          Acc y = shared.out[t][c] + of_channel<Acc>(p.D, first + c) * shared.tile.u[t + 1][c];
          if (p.z.data != nullptr) y *= silu(shared.tile.z[t][c]);
          to[c * p.out.stride_dim + t * p.out.stride_step] = cuda::from_accumulate<Scalar>(y);
        });
      });
    }
    save(chunk);
    if (row.last < 0) continue;
    Rotation<L, false> back;
    back.load(dense, place);
    publish<L>(vector, place, h);
    back.apply(vector, h);
    store_state<L>(p, place, p.last_state, row.last, h);
  }
}

template <typename L>
cudaError_t launch_fwd_kernel(const SelectiveScanFwdParams& params, const DenseParams& dense, ScalarKind kind,
                              cudaStream_t stream) {
  const int bytes = static_cast<int>(sizeof(FwdShared<L>));
  const auto kernel = &dense_fwd_kernel<L>;
  const cudaError_t error = cuda::allow_shared_bytes(kernel, bytes);
  if (error != cudaSuccess) return error;
  return cuda::launch(kernel, dense.tiles.tiles * dense.tiles.slots, L::kThreads, bytes, stream, /*uses_pdl=*/false, params,
                      dense, kind);
}

}  // namespace ssm_kernels::selective_scan::dense
