// Selective scan, forward, on CUDA: the warps that move a tile's elements. walking_fwd.cuh says what is computed and how
// the work is shared.
//
// A tile is read by asynchronous copies two tiles ahead, each thread's pieces into places of its own, and put into place while
// the walkers are at the one before: delta = softplus?(raw + bias) and delta u of each element in the accumulation type, the
// rows of B and C widened. When the walkers are done with a tile, out = (sum of the parts + D u) silu(z) is written.
#pragma once

#include "selective_scan/walking_fwd_shared.cuh"

namespace ssm_kernels::selective_scan::walking {

// Movers: from memory to delta, delta_u, B and C; from the parts to out.
template <typename Cut>
struct FwdMover {
  using Scalar = typename Cut::Scalar;
  using Acc = typename Cut::Acc;
  using Shared = FwdShared<Cut>;
  static constexpr int kVector = kVectorSize<Scalar>, kPart = Pieces<Cut, false>::kPart, kCount = Pieces<Cut, false>::kCount;

  const SelectiveScanFwdParams& p;
  const ScanPlan& plan;
  const Shared& shared;
  const Position& at;
  const FwdRows<Scalar>& rows;
  int thread;
  // Of the next tile to read, and of the next to write.
  Scalar *delta, *u, *z, *out;
  const Scalar* matrices[Matrices<Cut>::kCount];

  __device__ __forceinline__ FwdMover(const SelectiveScanFwdParams& p_, const ScanPlan& plan_, const Shared& shared_)
      : p(p_),
        plan(plan_),
        shared(shared_),
        at(*shared_.position),
        rows(*shared_.rows),
        thread(static_cast<int>(threadIdx.x) - Cut::kWalkers) {
    by_layout([&](auto pieces) {
      delta = pieces.place(p.delta, rows.delta, 0);
      u = pieces.place(p.u, rows.u, 0);
      z = pieces.place(p.z, rows.z, 0);
      out = pieces.place(p.out, rows.out, 0);
    });
#pragma unroll
    for (int i = 0; i < Matrices<Cut>::kCount; ++i) {
      matrices[i] = Matrices<Cut>::place(p, plan, rows.B, rows.C, i);
    }
  }

  // visit(pieces) with those of vectors.
  template <typename Visitor>
  __device__ __forceinline__ void by_layout(const Visitor& visit) const {
    if (plan.along_channels) {
      visit(Pieces<Cut, true>{thread});
    } else {
      visit(Pieces<Cut, false>{thread});
    }
  }

  // Where this thread's pieces of a tile lie among the stages.
  template <int stages>
  __device__ __forceinline__ int place(int tile) const {
    return tile % stages * Shared::kStage + thread;
  }
  __device__ __forceinline__ int matrix_place(int tile) const { return tile % Shared::kStages * Shared::kMatrixStage + thread; }

  // Starts to read a tile, and the gates of the one before, which are needed last.
  __device__ __forceinline__ void read(int tile) {
    const int64_t t0 = int64_t(tile) * Cut::kTileSteps;
    if (tile > 0) read_gate(tile - 1);
    if (t0 < at.end) {
      if (has_vectors<Cut>(plan, at, t0)) {
        by_layout([&](auto pieces) {
          pieces.copy(p.delta, delta, shared.delta_raw + place<Shared::kStages>(tile));
          pieces.copy(p.u, u, shared.u + place<Shared::kStagesOfU>(tile));
        });
        delta += Cut::kTileSteps * p.delta.stride_step;
        u += Cut::kTileSteps * p.u.stride_step;
      }
      Matrices<Cut>::copy(p, plan, matrices, t0, at.steps_from(t0, Cut::kTileSteps), shared.raw_matrices + matrix_place(tile));
    }
    cuda::commit_async_copies();
  }
  __device__ __forceinline__ void read_gate(int tile) {
    if (p.z.data == nullptr || !has_vectors<Cut>(plan, at, int64_t(tile) * Cut::kTileSteps)) return;
    by_layout([&](auto pieces) { pieces.copy(p.z, z, shared.z + place<Shared::kStages>(tile)); });
    z += Cut::kTileSteps * p.z.stride_step;
  }

  template <typename P>
  __device__ __forceinline__ void put_vectors(P pieces, int tile) const {
    const TileArray<Cut> deltas = shared.delta(tile), delta_us = shared.delta_u(tile);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const auto raw_delta = shared.delta_raw[place<Shared::kStages>(tile) + i * Cut::kMovers];
      const auto raw_u = shared.u[place<Shared::kStagesOfU>(tile) + i * Cut::kMovers];
#pragma unroll
      for (int first = 0; first < kVector; first += kPart) {
        Acc bias[kPart], delta[kPart], u[kPart];
        pieces.of_channels(shared.bias, i, first, bias);
        pieces.widen(raw_delta, first, delta);
        pieces.widen(raw_u, first, u);
#pragma unroll
        for (int j = 0; j < kPart; ++j) delta[j] += bias[j];
        if (p.delta_softplus) {
#pragma unroll
          for (int j = 0; j < kPart; ++j) delta[j] = softplus(delta[j]);
        }
#pragma unroll
        for (int j = 0; j < kPart; ++j) u[j] *= delta[j];
        pieces.put(deltas, i, first, delta);
        pieces.put(delta_us, i, first, u);
      }
    }
  }

  template <typename P>
  __device__ __forceinline__ void put_elements(P pieces, int tile) const {
    const TileArray<Cut> deltas = shared.delta(tile), delta_us = shared.delta_u(tile);
    const int64_t t0 = int64_t(tile) * Cut::kTileSteps;
    const int steps = at.steps_from(t0, Cut::kTileSteps);
    pieces.for_each_element([&](int channel, int step) {
      const bool exists = channel < at.channels && step < steps;
      Acc value = load_element(p.delta, rows.delta, channel, t0 + step, exists) + shared.bias[channel];
      if (p.delta_softplus) value = softplus(value);
      *deltas.at(channel, step) = value;
      *delta_us.at(channel, step) = value * load_element(p.u, rows.u, channel, t0 + step, exists);
    });
  }

  // Puts a tile that was read into place.
  __device__ __forceinline__ void put(int tile) const {
    const int64_t t0 = int64_t(tile) * Cut::kTileSteps;
    cuda::wait_for_async_copies<Shared::kStages - 1>();
    if (has_vectors<Cut>(plan, at, t0)) {
      by_layout([&](auto pieces) { put_vectors(pieces, tile); });
    } else {
      by_layout([&](auto pieces) { put_elements(pieces, tile); });
    }
    shared.matrices(tile).put(plan, shared.raw_matrices + matrix_place(tile));
  }

  template <typename P>
  __device__ __forceinline__ void write_vectors(P pieces, int tile) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const auto raw_u = shared.u[place<Shared::kStagesOfU>(tile) + i * Cut::kMovers];
      typename Shared::RawPiece raw_z, raw_out;
      if (p.z.data != nullptr) raw_z = shared.z[place<Shared::kStages>(tile) + i * Cut::kMovers];
#pragma unroll
      for (int first = 0; first < kVector; first += kPart) {
        Acc sum[kPart], skip[kPart], u[kPart];
        pieces.get(shared.part(tile, 0), i, first, sum);
#pragma unroll
        for (int part = 1; part < kStateLanes; ++part) {
          Acc other[kPart];
          pieces.get(shared.part(tile, part), i, first, other);
#pragma unroll
          for (int j = 0; j < kPart; ++j) sum[j] += other[j];
        }
        pieces.of_channels(shared.skip, i, first, skip);
        pieces.widen(raw_u, first, u);
#pragma unroll
        for (int j = 0; j < kPart; ++j) sum[j] = Math<Acc>::fma(skip[j], u[j], sum[j]);
        if (p.z.data != nullptr) {
          Acc z[kPart];
          pieces.widen(raw_z, first, z);
#pragma unroll
          for (int j = 0; j < kPart; ++j) sum[j] *= silu(z[j]);
        }
        pieces.narrow(sum, first, raw_out);
      }
      raw_out.store_once(out + i * pieces.stride(p.out));
    }
  }

  template <typename P>
  __device__ __forceinline__ void write_elements(P pieces, int tile) const {
    const int64_t t0 = int64_t(tile) * Cut::kTileSteps;
    const int steps = at.steps_from(t0, Cut::kTileSteps);
    pieces.for_each_element([&](int channel, int step) {
      if (channel >= at.channels || step >= steps) return;
      Acc sum = 0;
#pragma unroll
      for (int part = 0; part < kStateLanes; ++part) sum += *shared.part(tile, part).at(channel, step);
      sum = Math<Acc>::fma(shared.skip[channel], load_element(p.u, rows.u, channel, t0 + step, true), sum);
      if (p.z.data != nullptr) sum *= silu(load_element(p.z, rows.z, channel, t0 + step, true));
      store_element(p.out, rows.out, channel, t0 + step, sum);
    });
  }

  // Writes the outputs of a tile.
  __device__ __forceinline__ void write(int tile) {
    const int64_t t0 = int64_t(tile) * Cut::kTileSteps;
    if (has_vectors<Cut>(plan, at, t0)) {
      by_layout([&](auto pieces) { write_vectors(pieces, tile); });
      out += Cut::kTileSteps * p.out.stride_step;
    } else {
      by_layout([&](auto pieces) { write_elements(pieces, tile); });
    }
  }

  __device__ __forceinline__ void run() {
    const int tiles = static_cast<int>((at.end + Cut::kTileSteps - 1) / Cut::kTileSteps);
    if (tiles == 0) return;
    read(0);
    read(1);
    put(0);
    meet<Cut>();
    // While the walkers are at a tile, the one before is written out, and the next put into place. What is read takes the
    // place of what was just written.
    for (int tile = 0; tile < tiles; ++tile) {
      if (tile > 0) write(tile - 1);
      read(tile + 2);
      if (tile + 1 < tiles) put(tile + 1);
      meet<Cut>();
    }
    cuda::wait_for_async_copies<0>();
    write(tiles - 1);
  }
};

}  // namespace ssm_kernels::selective_scan::walking
