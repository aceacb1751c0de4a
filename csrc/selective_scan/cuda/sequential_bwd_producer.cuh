// Selective scan, backward, on CUDA, sequential: the producer warps. sequential_bwd.cuh describes the whole kernel.
//
// Before the consumers scan a tile, producers store each element's delta = softplus?(raw + bias), delta u (or u, if the
// method's gain is not one) and dy = grad_out silu(z) in shared memory in the accumulation type, with the tile's rows of B and
// C. Afterwards they read the same tensors again and combine them with the consumers' sums over states (y, p k and A q + u p (z
// k)') into the gradients of u, delta and z. The terms of the gradients of D and delta_bias are added over the lanes of a
// channel by shuffles, over tiles in shared memory, and over warps at the end.
#pragma once

#include "selective_scan/cuda/sequential_bwd_shared.cuh"

namespace ssm_kernels::selective_scan::sequential {

// Global memory -> delta, delta_u, dy, B and C; sums over states -> gradients.
template <typename TileConfig, typename Method, bool along_channels>
struct BwdProducer {
  using Scalar = typename TileConfig::Scalar;
  using Acc = typename TileConfig::Acc;
  using Shared = BwdShared<TileConfig>;
  using Vectors = ThreadVectors<TileConfig, along_channels>;
  static constexpr int kVector = Vectors::kVector, kCount = Vectors::kCount, kPart = Vectors::kPart;

  const SelectiveScanBwdParams& p;
  const ScanPlan& plan;
  const PartialSums& partial_sums;
  Shared& shared;
  const Position& at;
  const BwdRows<Scalar>& rows;

  __device__ __forceinline__ BwdProducer(const SelectiveScanBwdParams& p_, const ScanPlan& plan_,
                                         const PartialSums& partial_sums_, Shared& shared_)
      : p(p_), plan(plan_), partial_sums(partial_sums_), shared(shared_), at(shared_.position), rows(shared_.rows) {}

  // The thread's number among the producers.
  __device__ __forceinline__ static int thread() { return opaque_thread() - TileConfig::kConsumers; }

  // The address of `size` elements of vector i, from `first` on. More than one are contiguous.
  template <int size>
  __device__ __forceinline__ static Scalar* address(const Vectors& vectors, const SequenceView& view, Scalar* row, int64_t t0,
                                                    int i, int first) {
    return vectors.address(view, row, t0) + i * vectors.stride(view) + first * (size > 1 ? 1 : vectors.element_stride(view));
  }

  __device__ __forceinline__ void put(int64_t t0, int tile) const {
    const Scalar* matrices[Matrices<TileConfig>::kCount];
#pragma unroll
    for (int i = 0; i < Matrices<TileConfig>::kCount; ++i)
      matrices[i] = Matrices<TileConfig>::address(p, plan, rows.B, rows.C, i);
    typename Matrices<TileConfig>::Raw raw_matrices[Matrices<TileConfig>::kCount];
    Matrices<TileConfig>::load(p, plan, matrices, t0, at.steps_from(t0, TileConfig::kTileSteps), raw_matrices);
    if (has_vectors<TileConfig>(plan, at, t0)) {
      put_sequences<kVector>(t0, tile);
    } else {
      put_sequences<1>(t0, tile);
    }
    shared.matrices(tile).put(plan, raw_matrices);
  }

  // Loads `size` elements at a time: a vector, or one that may not exist.
  template <int size>
  __device__ __forceinline__ void put_sequences(int64_t t0, int tile) const {
    constexpr int kCounted = size < kPart ? size : kPart;
    const Vectors thread_vectors{thread()};
    const int steps = at.steps_from(t0, TileConfig::kTileSteps);
    const bool has_grad = p.grad_out.data != nullptr, has_gate = has_grad && p.z.data != nullptr;
#pragma unroll(size > 1 && !along_channels ? 2 : 1)
    for (int i = 0; i < kCount; ++i) {
#pragma unroll 1
      for (int loaded = 0; loaded < kVector; loaded += size) {
        const bool exists = size > 1 || thread_vectors.exists(i, loaded, at.channels, steps);
        using Loaded = Vector<Scalar, size>;
        const auto load = [&](const SequenceView& view, Scalar* row) {
          return exists ? Loaded::load_once(address<size>(thread_vectors, view, row, t0, i, loaded)) : Loaded::zero();
        };
        const Loaded raw_delta = load(p.delta, rows.delta);
        const Loaded raw_u = load(p.u, rows.u);
        Loaded raw_grad_out, raw_z;
        if (has_grad) raw_grad_out = load(p.grad_out, rows.grad_out);
        if (has_gate) raw_z = load(p.z, rows.z);
#pragma unroll
        for (int in_loaded = 0; in_loaded < size; in_loaded += kCounted) {
          const int first = loaded + in_loaded;
          Acc delta[kCounted], u[kCounted], dy[kCounted] = {};
          thread_vectors.widen(raw_delta, in_loaded, delta);
          thread_vectors.widen(raw_u, in_loaded, u);
          thread_vectors.make_step_sizes(shared.bias, p.delta_softplus, i, first, delta);
          thread_vectors.put(shared.delta(tile), i, first, delta);
          if constexpr (Method::kUnitGain) {
#pragma unroll
            for (int j = 0; j < kCounted; ++j) u[j] *= delta[j];
          }
          thread_vectors.put(shared.delta_u(tile), i, first, u);
          if (has_grad) thread_vectors.widen(raw_grad_out, in_loaded, dy);
          if (has_gate) {
            Acc z[kCounted];
            thread_vectors.widen(raw_z, in_loaded, z);
#pragma unroll
            for (int j = 0; j < kCounted; ++j) dy[j] *= silu(z[j]);
          }
          thread_vectors.put(shared.dy(tile), i, first, dy);
        }
      }
    }
  }

  // Computes the gradients of `count` elements in place: y becomes grad_z, input grad_u, step grad_delta, and grad_out the
  // terms of grad_D. raw_delta includes the bias.
  template <int count>
  __device__ __forceinline__ void make_gradients(const Acc (&u)[count], const Acc (&raw_delta)[count], const Acc (&z)[count],
                                                 const Acc (&skip)[count], Acc (&grad_out)[count], Acc (&y)[count],
                                                 Acc (&input)[count], Acc (&step)[count]) const {
    if (p.z.data != nullptr) {
#pragma unroll
      for (int j = 0; j < count; ++j) {
        const Acc s = sigmoid(z[j]);
        y[j] = grad_out[j] * Math<Acc>::fma(skip[j], u[j], y[j]) * silu_derivative(z[j], s);
        grad_out[j] *= z[j] * s;
      }
    }
    Acc delta[count];
#pragma unroll
    for (int j = 0; j < count; ++j) {
      delta[j] = raw_delta[j];
      step[j] *= 1 / kScaleOfA<Method, Acc>;
      if constexpr (Method::kUnitGain) step[j] = Math<Acc>::fma(u[j], input[j], step[j]);
    }
    if (p.delta_softplus) {
#pragma unroll
      for (int j = 0; j < count; ++j) {
        step[j] *= softplus_derivative(delta[j]);
        delta[j] = softplus(delta[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < count; ++j) {
      input[j] = Math<Acc>::fma(delta[j], input[j], skip[j] * grad_out[j]);
      grad_out[j] *= u[j];
    }
  }

  // Writes the gradients of the tile that starts at t0.
  __device__ __forceinline__ void write(int64_t t0, int tile) const {
    if (has_vectors<TileConfig>(plan, at, t0)) {
      write_gradients<kPart>(t0, tile);
    } else {
      write_gradients<1>(t0, tile);
    }
  }

  // Adds the terms of grad_D and grad_delta_bias of the lanes with the same channel to the channel's sums in shared memory.
  // Called by the whole warp.
  __device__ __forceinline__ void add_to_channel(int channel, Acc to_D, Acc to_bias) const {
    // Lanes with the same channel differ by multiples of kFrom below kTo.
    constexpr int kFrom = along_channels ? Vectors::kPerStep : 1, kTo = along_channels ? kWarpSize : Vectors::kPerRow;
#pragma unroll
    for (int distance = kFrom; distance < kTo; distance *= 2) {
      to_D += __shfl_xor_sync(kAllLanes, to_D, distance);
      to_bias += __shfl_xor_sync(kAllLanes, to_bias, distance);
    }
    if (thread() % kWarpSize / kFrom % (kTo / kFrom) != 0) return;
    Acc* const sum = shared.channel_sums + thread() / kWarpSize * kTileChannels + channel;
    sum[0] += to_D;
    sum[kProducerWarps * kTileChannels] += to_bias;
  }

  // Takes `size` elements at a time, to save registers: part of a vector, or one that may not exist.
  template <int size>
  __device__ __forceinline__ void write_gradients(int64_t t0, int tile) const {
    const Vectors thread_vectors{thread()};
    const int steps = at.steps_from(t0, TileConfig::kTileSteps);
    const bool has_grad = p.grad_out.data != nullptr, has_gate = p.z.data != nullptr, needs_grad_z = p.grad_z.data != nullptr;
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) {
      Acc sum_D = 0, sum_bias = 0;
#pragma unroll(size > 1 ? kVector / size : 1)
      for (int first = 0; first < kVector; first += size) {
        Acc grad_out[size] = {}, of_delta[size] = {};
        if (size > 1 || thread_vectors.exists(i, first, at.channels, steps)) {
          using Part = Vector<Scalar, size>;
          const auto load = [&](const SequenceView& view, Scalar* row, Acc(&values)[size]) {
            thread_vectors.widen(Part::load_once(address<size>(thread_vectors, view, row, t0, i, first)), 0, values);
          };
          const auto store = [&](const SequenceView& view, Scalar* row, const Acc(&values)[size]) {
            Part part;
            thread_vectors.narrow(values, 0, part);
            part.store_once(address<size>(thread_vectors, view, row, t0, i, first));
          };
          Acc u[size], delta[size], z[size] = {}, skip[size], bias[size], y[size] = {}, of_u[size];
          load(p.u, rows.u, u);
          load(p.delta, rows.delta, delta);
          if (has_grad) load(p.grad_out, rows.grad_out, grad_out);
          if (has_gate) load(p.z, rows.z, z);
          if (needs_grad_z) thread_vectors.get(shared.sum(tile, Shared::kY), i, first, y);
          thread_vectors.get_channels(shared.skip, i, first, skip);
          thread_vectors.get_channels(shared.bias, i, first, bias);
          thread_vectors.get(shared.sum(tile, Shared::kInput), i, first, of_u);
          thread_vectors.get(shared.sum(tile, Shared::kStep), i, first, of_delta);
#pragma unroll
          for (int j = 0; j < size; ++j) delta[j] += bias[j];
          make_gradients(u, delta, z, skip, grad_out, y, of_u, of_delta);
          if (needs_grad_z) store(p.grad_z, rows.grad_z, y);
          if (p.grad_u.data != nullptr) store(p.grad_u, rows.grad_u, of_u);
          if (p.grad_delta.data != nullptr) store(p.grad_delta, rows.grad_delta, of_delta);
        }
#pragma unroll
        for (int j = 0; j < size; ++j) {
          if constexpr (along_channels) {
            if constexpr (size == 1) __syncwarp();
            add_to_channel(thread_vectors.channel(i) + first + j, grad_out[j], of_delta[j]);
          } else {
            sum_D += grad_out[j];
            sum_bias += of_delta[j];
          }
        }
      }
      if constexpr (!along_channels) {
        if constexpr (size == 1) __syncwarp();
        add_to_channel(thread_vectors.channel(i), sum_D, sum_bias);
      }
    }
  }

  // Adds the warps' sums of grad_D and grad_delta_bias and stores the block's partial sums.
  __device__ __forceinline__ void finish() const {
    for (int channel = thread(); channel < at.channels; channel += TileConfig::kProducers) {
      const int64_t target = (at.batch * plan.segments + at.segment) * p.dim + at.first_channel + channel;
      const auto store_sum = [&](const Acc* warp_sums, void* partial) {
        if (partial == nullptr) return;
        Acc total = 0;
#pragma unroll
        for (int warp = 0; warp < kProducerWarps; ++warp) total += warp_sums[warp * kTileChannels + channel];
        static_cast<Acc*>(partial)[target] = total;
      };
      store_sum(shared.channel_sums, partial_sums.grad_D);
      store_sum(shared.channel_sums + kProducerWarps * kTileChannels, partial_sums.grad_delta_bias);
    }
  }

  __device__ __forceinline__ void run() const {
    if (at.begin < at.end) {
      // While the consumers scan one tile, producers write the previous tile's gradients and store the next tile in its buffer.
      int64_t t0 = last_tile<TileConfig>(at);
      for (int tile = 0;; ++tile, t0 -= TileConfig::kTileSteps) {
        if (tile >= 2) write(t0 + 2 * TileConfig::kTileSteps, tile - 2);
        if (t0 + TileConfig::kTileSteps < at.begin) break;
        if (t0 >= at.begin) put(t0, tile);
        sync_roles<TileConfig>();
      }
    }
    sync_roles<TileConfig>();
    finish();
  }
};

}  // namespace ssm_kernels::selective_scan::sequential
