// Selective scan, backward, on CUDA, sequential: the producer warps. sequential_bwd.cuh describes the whole kernel.
//
// Before the consumers scan a tile, producers store each element's delta = softplus?(raw + bias), the input (a multiple of u
// or of delta u: sequential_step.cuh) and dy = grad_out silu(z) in shared memory in the accumulation type, with the tile's rows
// of B and C. Afterwards they read the same tensors again and combine them with the consumers' sums over states (y, and `input`
// and `step` of GradientSums) into the gradients of u, delta and z and, if they are wanted, forward's outputs. The terms of the
// gradients of D and delta_bias are added over the lanes of a channel by shuffles, over tiles in shared memory, and over warps
// at the end.
#pragma once

#include "common/activations.h"
#include "selective_scan/cuda/sequential_bwd_shared.cuh"
#include "selective_scan/cuda/sequential_step.cuh"
#include "selective_scan/cuda/shared_arrays.cuh"
#include "selective_scan/cuda/two_sample_step.cuh"

namespace ssm_kernels::selective_scan::sequential {

// Global memory -> delta, the input, dy, B and C; sums over states -> gradients. `access` is along the channels, which are
// whole tiles unless they are shifted; along the steps, shifted or not; or along descending steps.
template <typename TileConfig, typename Method, VectorAccess access>
struct BwdProducer {
  static constexpr bool along_channels = is_along_channels(access);
  using Scalar = typename TileConfig::Scalar;
  using Acc = typename TileConfig::Acc;
  using Shared = BwdShared<TileConfig, kIsTwoSample<Method>>;
  using Step = sequential::Step<Method, Scalar>;
  using Vectors = ThreadVectors<TileConfig, access>;
  static constexpr int kVector = kVectorSize<Scalar>, kCount = Vectors::kCount, kPart = Vectors::kPart;

  const SelectiveScanBwdParams& p;
  const ScanPlan& plan;
  const PartialSums& partial_sums;
  const Shared& shared;
  const Position& at;
  const BwdRows<Scalar>& rows;
  Acc scale_of_step_sum;
  const TwoSampleParams* two;  // null for methods that read one sample

  __device__ __forceinline__ BwdProducer(const SelectiveScanBwdParams& p_, const ScanPlan& plan_,
                                         const PartialSums& partial_sums_, const Shared& shared_,
                                         const TwoSampleParams* two_ = nullptr)
      : p(p_),
        plan(plan_),
        partial_sums(partial_sums_),
        shared(shared_),
        at(*shared_.position),
        rows(*shared_.rows),
        two(two_) {
    visit_method<Method>(p, [&](auto method) {
      using Visited = sequential::Step<decltype(method), Scalar>;
      static_assert(Visited::kInputHasDelta == Step::kInputHasDelta && Visited::kInputScale == Step::kInputScale,
                    "the methods of a kernel have the same input");
      scale_of_step_sum = Visited::kScaleOfStepSum;
    });
  }

  // The thread's number among the producers.
  __device__ __forceinline__ static int thread() { return opaque_thread() - TileConfig::kConsumers; }

  __device__ __forceinline__ void put(int64_t t0, int tile) const {
    using M = Matrices<TileConfig>;
    using Load = std::conditional_t<is_shifted(access), typename M::Pieces, typename M::Raw>;
    Load loads[M::kCount];
#pragma unroll
    for (int i = 0; i < M::kCount; ++i) {
      const typename M::ThreadVector vector(plan, i);
      const Scalar* const first = M::address(p, plan, rows.B, rows.C, i) + t0 * (vector.is_B ? p.B : p.C).stride_step;
      if constexpr (is_shifted(access)) {
        loads[i] = M::load_pieces(p, vector, first, steps_left(t0));
      } else {
        loads[i] = M::load(p, vector, first, steps_left(t0));
      }
    }
    if constexpr (kIsTwoSample<Method>) {
      const Scalar before = load_sample_before(t0);
      put_vectors(Vectors{thread()}, t0, tile);
      put_sample_before(before, tile);
    } else {
      put_vectors(Vectors{thread()}, t0, tile);
    }
#pragma unroll
    for (int i = 0; i < M::kCount; ++i) {
      const typename M::ThreadVector vector(plan, i);
      Acc* const target = shared.matrices(tile).B + vector.target();
      if constexpr (is_shifted(access)) {
        M::put(target, vector.access, loads[i].vector());
      } else {
        M::put(target, vector.access, loads[i]);
      }
    }
  }

  // The thread's element of u or B of the step before a tile, and its place.
  __device__ __forceinline__ Scalar load_sample_before(int64_t t0) const {
    const int i = thread();
    static_assert(TileConfig::kProducers >= kTileChannels + kStates, "a thread has one element");
    const Scalar* element = nullptr;
    if (i < at.channels) {
      element = u_address_before<Scalar>(p, *two, at, plan.sequences, rows.u, i, t0);
    } else if (const int state = i - kTileChannels; state >= 0 && state < static_cast<int>(p.dstate)) {
      element = B_address_before<Scalar>(p, *two, at, plan.B, rows.B, state, t0);
    }
    return load_or_zero(element);
  }
  __device__ __forceinline__ void put_sample_before(Scalar element, int tile) const {
    const int i = thread();
    if (i < kTileChannels) {
      shared.u_before[tile % Shared::kBuffers * kTileChannels + i] = to_accumulate(element);
    } else if (const int state = i - kTileChannels; state < kStates) {
      shared.matrices(tile).B[state * Matrices<TileConfig>::kPitch - 1] = to_accumulate(element);
    }
  }
  // Loads lam of vector i. Elements that do not exist have any value.
  using Weights = cuda::ShiftedPieces<Scalar, kVector>;
  __device__ __forceinline__ Weights load_weights(Vectors thread_vectors, int i, int64_t t0) const {
    const int64_t stride = along_channels ? two->lam.stride_dim : two->lam.stride_step;
    const Scalar* const first = first_row<Scalar>(two->lam, at) + thread_vectors.channel(i) * two->lam.stride_dim +
                                (t0 + thread_vectors.step(i)) * two->lam.stride_step;
    const int left = elements_left(thread_vectors, i, t0);
    Weights weights(first, stride == 1 ? left : 0);
    if (stride != 1) {
      auto vector = Vector<Scalar, kVector>::zero();
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (left > 0) vector.set(j, first[min(j, left - 1) * stride]);
      }
      weights = Weights(vector);
    }
    return weights;
  }
  __device__ __forceinline__ void put_weights(Vectors thread_vectors, const Weights& weights, int i, int tile) const {
    Acc lam[kVector];
    const auto raw = weights.vector();
#pragma unroll
    for (int j = 0; j < kVector; ++j) lam[j] = raw.accumulate(j);
    if (two->lam_sigmoid) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) lam[j] = sigmoid(lam[j]);
    }
    thread_vectors.put(shared.array(tile, Shared::kWeight), i, 0, lam);
  }
  // Stores the gradient of lam of vector i from the tile.
  __device__ __forceinline__ void write_weights(Vectors thread_vectors, int i, int64_t t0, int tile) const {
    Acc of_lam[kVector];
    thread_vectors.get(shared.array(tile, Shared::kWeight), i, 0, of_lam);
    const int64_t stride = along_channels ? two->grad_lam.stride_dim : two->grad_lam.stride_step;
    Scalar* const first = first_row<Scalar>(two->grad_lam, at) + thread_vectors.channel(i) * two->grad_lam.stride_dim +
                          (t0 + thread_vectors.step(i)) * two->grad_lam.stride_step;
    const int left = elements_left(thread_vectors, i, t0);
    if (stride == 1) {
      Vector<Scalar, kVector> raw;
#pragma unroll
      for (int j = 0; j < kVector; ++j) raw.set(j, from_accumulate<Scalar>(of_lam[j]));
      if (reinterpret_cast<uint64_t>(first) % kVectorBytes == 0 && left >= kVector) {
        raw.store_once(first);
      } else {
        cuda::store_shifted(first, raw, left);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (j < left) first[j * stride] = from_accumulate<Scalar>(of_lam[j]);
      }
    }
  }

  // Steps of the tile that starts at t0.
  __device__ __forceinline__ int steps_left(int64_t t0) const { return at.steps_from(t0, TileConfig::kTileSteps); }

  // The number of elements of a vector and after it in its row, in the tile.
  __device__ __forceinline__ int elements_left(Vectors thread_vectors, int i, int64_t t0) const {
    return thread_vectors.left(i, at.channels, steps_left(t0));
  }

  // The address of vector i. Along ascending aligned rows, one that does not exist has the address of another, so that loads
  // need no condition: its values are not used.
  __device__ __forceinline__ Scalar* address(Vectors thread_vectors, int i, const SequenceView& view, Scalar* row,
                                             int64_t t0) const {
    if constexpr (access == VectorAccess::kAlongChannels) {
      const int64_t step = min(t0 + thread_vectors.step(i), at.end - 1);
      return row + step * view.stride_step + min(thread_vectors.channel(i), at.channels - kVector);
    } else if constexpr (access == VectorAccess::kAlongSteps) {
      const int64_t step = min(t0 + thread_vectors.step(i), at.end - kVector);
      return row + step + min(thread_vectors.channel(i), at.channels - 1) * view.stride_dim;
    } else {
      return thread_vectors.address(view, row, t0) + i * thread_vectors.stride(view);
    }
  }

  __device__ __forceinline__ void put_vectors(Vectors thread_vectors, int64_t t0, int tile) const {
    const bool has_grad = p.grad_out.data != nullptr, has_gate = has_grad && p.z.data != nullptr;
#pragma unroll(access == VectorAccess::kAlongSteps ? 2 : 1)
    for (int i = 0; i < kCount; ++i) {
      const int left = elements_left(thread_vectors, i, t0);
      using Loaded = Vector<Scalar, kVector>;
      const auto load = [&](const SequenceView& view, Scalar* row) {
        return Vectors::template load<kVector>(address(thread_vectors, i, view, row, t0), left);
      };
      // All loads are in flight before the first is waited for.
      const auto finish = [](const auto& load) { return Vectors::template vector_of<kVector>(load); };
      const auto load_delta = load(p.delta, rows.delta), load_u = load(p.u, rows.u);
      typename Vectors::template Load<kVector> load_grad_out, load_z;
      if (has_grad) load_grad_out = load(p.grad_out, rows.grad_out);
      if (has_gate) load_z = load(p.z, rows.z);
      [[maybe_unused]] std::conditional_t<kIsTwoSample<Method>, Weights, int> raw_lam;
      if constexpr (kIsTwoSample<Method>) {
        if (two->lam.data != nullptr) raw_lam = load_weights(thread_vectors, i, t0);
      }
      const Loaded raw_delta = finish(load_delta), raw_u = finish(load_u);
      Loaded raw_grad_out, raw_z;
      if (has_grad) raw_grad_out = finish(load_grad_out);
      if (has_gate) raw_z = finish(load_z);
#pragma unroll
      for (int part = 0; part < kVector; part += kPart) {
        Acc delta[kPart], u[kPart], dy[kPart] = {};
        thread_vectors.get_steps(raw_delta, raw_u, part, shared.bias, p.delta_softplus, i, part, delta, u);
        thread_vectors.put(shared.delta(tile), i, part, delta);
#pragma unroll
        for (int j = 0; j < kPart; ++j) u[j] = input_of<Step>(delta[j], u[j]);
        thread_vectors.put(shared.input(tile), i, part, u);
        if (has_grad) thread_vectors.widen(raw_grad_out, part, dy);
        if (has_gate) {
          Acc z[kPart];
          thread_vectors.widen(raw_z, part, z);
#pragma unroll
          for (int j = 0; j < kPart; ++j) dy[j] *= silu(z[j]);
        }
        thread_vectors.put(shared.dy(tile), i, part, dy);
      }
      if constexpr (kIsTwoSample<Method>) {
        if (two->lam.data != nullptr) put_weights(thread_vectors, raw_lam, i, tile);
      }
    }
  }

  // Makes forward's outputs of `count` elements from <C, h>.
  template <int count>
  __device__ __forceinline__ void make_outputs(const Acc (&u)[count], const Acc (&z)[count], const Acc (&skip)[count],
                                               const Acc (&y)[count], Acc (&out)[count]) const {
#pragma unroll
    for (int j = 0; j < count; ++j) {
      out[j] = Math<Acc>::fma(skip[j], u[j], y[j]);
      if (p.z.data != nullptr) out[j] *= silu(z[j]);
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
      input[j] *= Step::kInputScale;
      step[j] *= scale_of_step_sum;
      if constexpr (Step::kInputHasDelta) step[j] = Math<Acc>::fma(u[j], input[j], step[j]);
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
      input[j] = Math<Acc>::fma(Step::kInputHasDelta ? delta[j] : Acc(1), input[j], skip[j] * grad_out[j]);
      grad_out[j] *= u[j];
    }
  }

  // Writes the gradients of the tile that starts at t0.
  __device__ __forceinline__ void write(int64_t t0, int tile) const { write_vectors(Vectors{thread()}, t0, tile); }

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

  __device__ __forceinline__ void write_vectors(Vectors thread_vectors, int64_t t0, int tile) const {
    const bool has_grad = p.grad_out.data != nullptr, has_gate = p.z.data != nullptr, needs_grad_z = p.grad_z.data != nullptr;
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kIsTwoSample<Method>) {
        if (two->grad_lam.data != nullptr) write_weights(thread_vectors, i, t0, tile);
      }
      Acc sum_D = 0, sum_bias = 0;
      // kPart elements at a time, to save registers.
#pragma unroll
      for (int first = 0; first < kVector; first += kPart) {
        using Part = Vector<Scalar, kPart>;
        const int left = elements_left(thread_vectors, i, t0) - first;
        const auto address_of = [&](const SequenceView& view, Scalar* row) {
          return address(thread_vectors, i, view, row, t0) + Vectors::template part_offset<kPart>(first);
        };
        const auto load = [&](const SequenceView& view, Scalar* row) {
          return Vectors::template load<kPart>(address_of(view, row), left);
        };
        const auto finish = [&](const auto& load, Acc(&values)[kPart]) {
          const Part part = Vectors::template vector_of<kPart>(load);
#pragma unroll
          for (int j = 0; j < kPart; ++j) values[j] = part.accumulate(j);
        };
        const auto store = [&](const SequenceView& view, Scalar* row, const Acc(&values)[kPart]) {
          Part part;
#pragma unroll
          for (int j = 0; j < kPart; ++j) part.set(j, from_accumulate<Scalar>(values[j]));
          Vectors::store(part, address_of(view, row), left);
        };
        Acc u[kPart], delta[kPart], z[kPart] = {}, grad_out[kPart] = {};
        Acc skip[kPart], bias[kPart], y[kPart] = {}, of_u[kPart], of_delta[kPart];
        const auto load_u = load(p.u, rows.u);
        const auto load_delta = load(p.delta, rows.delta);
        typename Vectors::template Load<kPart> load_grad_out, load_z;
        if (has_grad) load_grad_out = load(p.grad_out, rows.grad_out);
        if (has_gate) load_z = load(p.z, rows.z);
        finish(load_u, u);
        finish(load_delta, delta);
        if (has_grad) finish(load_grad_out, grad_out);
        if (has_gate) finish(load_z, z);
        if (needs_grad_z || p.replaces_grad_out) thread_vectors.get(shared.array(tile, Shared::kY), i, first, y);
        thread_vectors.get_channels(shared.skip, i, first, skip);
        if (p.replaces_grad_out) {
          Acc out[kPart];
          make_outputs(u, z, skip, y, out);
          store(p.grad_out, rows.grad_out, out);
        }
        thread_vectors.get_channels(shared.bias, i, first, bias);
        thread_vectors.get(shared.array(tile, Shared::kInput), i, first, of_u);
        thread_vectors.get(shared.array(tile, Shared::kStep), i, first, of_delta);
#pragma unroll
        for (int j = 0; j < kPart; ++j) delta[j] += bias[j];
        make_gradients(u, delta, z, skip, grad_out, y, of_u, of_delta);
        if (needs_grad_z) store(p.grad_z, rows.grad_z, y);
        if (p.grad_u.data != nullptr) store(p.grad_u, rows.grad_u, of_u);
        if (p.grad_delta.data != nullptr) store(p.grad_delta, rows.grad_delta, of_delta);
#pragma unroll
        for (int j = 0; j < kPart; ++j) {
          const bool exists = access == VectorAccess::kAlongSteps || j < left;  // these vectors are whole
          const Acc to_D = exists ? grad_out[j] : Acc(0), to_bias = exists ? of_delta[j] : Acc(0);
          if constexpr (along_channels) {
            add_to_channel(thread_vectors.channel(i) + first + j, to_D, to_bias);
          } else {
            sum_D += to_D;
            sum_bias += to_bias;
          }
        }
      }
      if constexpr (!along_channels) {
        const bool exists = access != VectorAccess::kAlongSteps || elements_left(thread_vectors, i, t0) > 0;
        add_to_channel(thread_vectors.channel(i), exists ? sum_D : Acc(0), exists ? sum_bias : Acc(0));
      }
    }
  }

  // Adds the warps' sums of grad_D and grad_delta_bias and stores the block's partial sums.
  __device__ __forceinline__ void finish() const {
    for (int channel = thread(); channel < at.channels; channel += TileConfig::kProducers) {
      const int64_t target = (at.row * plan.segments + at.segment) * p.dim + at.first_channel + channel;
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
