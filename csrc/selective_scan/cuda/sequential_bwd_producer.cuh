// Selective scan, backward, on CUDA, sequential: the producer warps. sequential_bwd.cuh describes the whole kernel.
//
// Before the consumers scan a tile, producers store each element's delta = softplus?(raw + bias), the input (a multiple of u
// or of delta u: sequential_step.cuh) and dy = grad_out silu(z) in shared memory in the accumulation type, with the tile's rows
// of B and C. Afterwards they read the same tensors again and combine them with the consumers' sums over states (y, and `input`
// and `step` of GradientSums) into the gradients of u, delta and z and, if they are wanted, forward's outputs. The terms of the
// gradients of D and delta_bias are added over the lanes of a channel by shuffles, over tiles in shared memory, and over warps
// at the end.
#pragma once

#include "selective_scan/cuda/sequential_bwd_shared.cuh"
#include "selective_scan/cuda/sequential_step.cuh"

namespace ssm_kernels::selective_scan::sequential {

// Global memory -> delta, the input, dy, B and C; sums over states -> gradients. `access` is along the channels, where partial
// tiles are moved element by element, and so is every tile of tensors without contiguous steps or channels; along the steps,
// shifted or not; or along descending steps.
template <typename TileConfig, typename Method, VectorAccess access>
struct BwdProducer {
  static constexpr bool along_channels = access == VectorAccess::kAlongChannels;
  using Scalar = typename TileConfig::Scalar;
  using Acc = typename TileConfig::Acc;
  using Shared = BwdShared<TileConfig>;
  using Step = sequential::Step<Method, Scalar>;
  using Whole = ThreadVectors<TileConfig, access>;
  using Shifted = ThreadVectors<TileConfig, VectorAccess::kShifted>;
  using Raw = typename Whole::Raw;
  static constexpr int kVector = kVectorSize<Scalar>, kCount = Whole::kCount, kPart = Whole::kPart;

  const SelectiveScanBwdParams& p;
  const ScanPlan& plan;
  const PartialSums& partial_sums;
  const Shared& shared;
  const Position& at;
  const BwdRows<Scalar>& rows;

  __device__ __forceinline__ BwdProducer(const SelectiveScanBwdParams& p_, const ScanPlan& plan_,
                                         const PartialSums& partial_sums_, const Shared& shared_)
      : p(p_), plan(plan_), partial_sums(partial_sums_), shared(shared_), at(*shared_.position), rows(*shared_.rows) {}

  // The thread's number among the producers.
  __device__ __forceinline__ static int thread() { return opaque_thread() - TileConfig::kConsumers; }

  __device__ __forceinline__ void put(int64_t t0, int tile) const {
    using M = Matrices<TileConfig>;
    typename M::Raw raw_matrices[M::kCount];
#pragma unroll
    for (int i = 0; i < M::kCount; ++i) {
      const typename M::ThreadVector vector(plan, i);
      const Scalar* const first = M::address(p, plan, rows.B, rows.C, i);
      raw_matrices[i] = M::load(p, vector, first + t0 * (vector.is_B ? p.B : p.C).stride_step, steps_left(t0));
    }
    by_access(t0, [&](auto thread_vectors) { put_vectors(thread_vectors, t0, tile); }, [&] { put_elements(t0, tile); });
#pragma unroll
    for (int i = 0; i < M::kCount; ++i) {
      const typename M::ThreadVector vector(plan, i);
      M::put(shared.matrices(tile).B + vector.target(), vector.access, raw_matrices[i]);
    }
  }

  // Steps from t0 to the end of the block's segment, which is the end of a partial tile. Shifted loads read past a whole tile
  // that is not the segment's last.
  __device__ __forceinline__ int steps_left(int64_t t0) const { return at.steps_from(t0, 2 * TileConfig::kTileSteps); }

  // Calls visit(ThreadVectors) for the tile that starts at t0, or visit_elements() if it is not moved in vectors.
  template <typename Visitor, typename ElementsVisitor>
  __device__ __forceinline__ void by_access(int64_t t0, const Visitor& visit, const ElementsVisitor& visit_elements) const {
    const bool is_whole = sequential::is_whole<TileConfig>(at, t0);
    if constexpr (along_channels) {
      if (is_whole && plan.sequences == VectorAccess::kAlongChannels) {
        visit(Whole{thread()});
      } else {
        visit_elements();
      }
    } else if constexpr (Whole::kMayBePartial) {
      visit(Whole{thread()});
    } else if (is_whole && plan.sequences == VectorAccess::kAlongSteps) {
      visit(Whole{thread()});
    } else {
      visit(Shifted{thread()});
    }
  }

  template <typename P>
  __device__ __forceinline__ void put_vectors(P thread_vectors, int64_t t0, int tile) const {
    const bool has_grad = p.grad_out.data != nullptr, has_gate = has_grad && p.z.data != nullptr;
#pragma unroll(along_channels || P::kMayBePartial ? 1 : 2)
    for (int i = 0; i < kCount; ++i) {
      const int left = thread_vectors.left(i, at.channels, steps_left(t0));
      const auto load = [&](const SequenceView& view, Scalar* row) {
        return P::template load<kVector>(thread_vectors.address(view, row, t0) + i * thread_vectors.stride(view), left);
      };
      const auto finish = [](const auto& load) { return P::template vector_of<kVector>(load); };
      const Raw raw_delta = finish(load(p.delta, rows.delta)), raw_u = finish(load(p.u, rows.u));
      Raw raw_grad_out, raw_z;
      if (has_grad) raw_grad_out = finish(load(p.grad_out, rows.grad_out));
      if (has_gate) raw_z = finish(load(p.z, rows.z));
#pragma unroll
      for (int first = 0; first < kVector; first += kPart) {
        Acc delta[kPart], u[kPart], dy[kPart] = {};
        thread_vectors.get_steps(raw_delta, raw_u, shared.bias, p.delta_softplus, i, first, delta, u);
        thread_vectors.put(shared.delta(tile), i, first, delta);
#pragma unroll
        for (int j = 0; j < kPart; ++j) u[j] = input_of<Step>(delta[j], u[j]);
        thread_vectors.put(shared.input(tile), i, first, u);
        if (has_grad) thread_vectors.widen(raw_grad_out, first, dy);
        if (has_gate) {
          Acc z[kPart];
          thread_vectors.widen(raw_z, first, z);
#pragma unroll
          for (int j = 0; j < kPart; ++j) dy[j] *= silu(z[j]);
        }
        thread_vectors.put(shared.dy(tile), i, first, dy);
      }
    }
  }

  __device__ __forceinline__ void put_elements(int64_t t0, int tile) const {
    const int steps = at.steps_from(t0, TileConfig::kTileSteps);
    Whole{thread()}.for_each_element([&](int channel, int step) {
      const bool exists = channel < at.channels && step < steps;
      const Acc delta = put_step_size(shared.delta(tile), p, rows.delta, shared.bias, channel, step, t0, exists);
      const Acc u = load_element(p.u, rows.u, channel, t0 + step, exists);
      *shared.input(tile).at(channel, step) = input_of<Step>(delta, u);
      Acc dy = load_element(p.grad_out, rows.grad_out, channel, t0 + step, exists && p.grad_out.data != nullptr);
      if (exists && p.grad_out.data != nullptr && p.z.data != nullptr) {
        dy *= silu(load_element(p.z, rows.z, channel, t0 + step, true));
      }
      *shared.dy(tile).at(channel, step) = dy;
    });
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
      step[j] *= Step::kScaleOfStepSum;
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
  __device__ __forceinline__ void write(int64_t t0, int tile) const {
    by_access(t0, [&](auto thread_vectors) { write_vectors(thread_vectors, t0, tile); }, [&] { write_elements(t0, tile); });
  }

  // Adds the terms of grad_D and grad_delta_bias of the lanes with the same channel to the channel's sums in shared memory.
  // Called by the whole warp.
  __device__ __forceinline__ void add_to_channel(int channel, Acc to_D, Acc to_bias) const {
    // Lanes with the same channel differ by multiples of kFrom below kTo.
    constexpr int kFrom = along_channels ? Whole::kPerStep : 1, kTo = along_channels ? kWarpSize : Whole::kPerRow;
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

  template <typename P>
  __device__ __forceinline__ void write_vectors(P thread_vectors, int64_t t0, int tile) const {
    const bool has_grad = p.grad_out.data != nullptr, has_gate = p.z.data != nullptr, needs_grad_z = p.grad_z.data != nullptr;
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) {
      Acc sum_D = 0, sum_bias = 0;
      // kPart elements at a time, to save registers.
#pragma unroll
      for (int first = 0; first < kVector; first += kPart) {
        using Part = Vector<Scalar, kPart>;
        const int left = thread_vectors.left(i, at.channels, steps_left(t0)) - first;
        const auto address = [&](const SequenceView& view, Scalar* row) {
          return thread_vectors.address(view, row, t0) + i * thread_vectors.stride(view) +
                 P::template part_offset<kPart>(first);
        };
        const auto load = [&](const SequenceView& view, Scalar* row) {
          return P::template load<kPart>(address(view, row), left);
        };
        const auto finish = [&](const auto& load, Acc(&values)[kPart]) {
          const Part part = P::template vector_of<kPart>(load);
#pragma unroll
          for (int j = 0; j < kPart; ++j) values[j] = part.accumulate(j);
        };
        const auto store = [&](const SequenceView& view, Scalar* row, const Acc(&values)[kPart]) {
          Part part;
#pragma unroll
          for (int j = 0; j < kPart; ++j) part.set(j, from_accumulate<Scalar>(values[j]));
          P::store(part, address(view, row), left);
        };
        Acc u[kPart], delta[kPart], z[kPart] = {}, grad_out[kPart] = {};
        Acc skip[kPart], bias[kPart], y[kPart] = {}, of_u[kPart], of_delta[kPart];
        const auto load_u = load(p.u, rows.u);
        const auto load_delta = load(p.delta, rows.delta);
        typename P::template Load<kPart> load_grad_out, load_z;
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
          if constexpr (along_channels) {
            add_to_channel(thread_vectors.channel(i) + first + j, grad_out[j], of_delta[j]);
          } else {
            const bool exists = !P::kMayBePartial || j < left;
            sum_D += exists ? grad_out[j] : Acc(0);
            sum_bias += exists ? of_delta[j] : Acc(0);
          }
        }
      }
      if constexpr (!along_channels) add_to_channel(thread_vectors.channel(i), sum_D, sum_bias);
    }
  }

  // Writes an element's gradients; returns its terms of grad_D and grad_delta_bias.
  __device__ __forceinline__ Vector<Acc, 2> write_element(int64_t t, int tile, int channel, int step) const {
    const bool has_grad = p.grad_out.data != nullptr, has_gate = p.z.data != nullptr, needs_grad_z = p.grad_z.data != nullptr;
    const Acc u[1] = {load_element(p.u, rows.u, channel, t, true)};
    const Acc raw_delta[1] = {load_element(p.delta, rows.delta, channel, t, true) + shared.bias[channel]};
    const Acc z[1] = {load_element(p.z, rows.z, channel, t, has_gate)}, skip[1] = {shared.skip[channel]};
    Acc grad_out[1] = {load_element(p.grad_out, rows.grad_out, channel, t, has_grad)};
    Acc y[1] = {needs_grad_z || p.replaces_grad_out ? *shared.array(tile, Shared::kY).at(channel, step) : Acc(0)};
    Acc of_u[1] = {*shared.array(tile, Shared::kInput).at(channel, step)};
    Acc of_delta[1] = {*shared.array(tile, Shared::kStep).at(channel, step)};
    if (p.replaces_grad_out) {
      Acc out[1];
      make_outputs(u, z, skip, y, out);
      store_element(p.grad_out, rows.grad_out, channel, t, out[0]);
    }
    make_gradients(u, raw_delta, z, skip, grad_out, y, of_u, of_delta);
    if (needs_grad_z) store_element(p.grad_z, rows.grad_z, channel, t, y[0]);
    if (p.grad_u.data != nullptr) store_element(p.grad_u, rows.grad_u, channel, t, of_u[0]);
    if (p.grad_delta.data != nullptr) store_element(p.grad_delta, rows.grad_delta, channel, t, of_delta[0]);
    Vector<Acc, 2> terms;
    terms.set(0, grad_out[0]);
    terms.set(1, of_delta[0]);
    return terms;
  }

  __device__ __forceinline__ void write_elements(int64_t t0, int tile) const {
    const Whole thread_vectors{thread()};
    const int steps = at.steps_from(t0, TileConfig::kTileSteps);
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) {
#pragma unroll 1
      for (int j = 0; j < kVector; ++j) {
        const int channel = thread_vectors.channel(i) + j, step = thread_vectors.step(i);
        auto terms = Vector<Acc, 2>::zero();
        if (channel < at.channels && step < steps) terms = write_element(t0 + step, tile, channel, step);
        __syncwarp();
        add_to_channel(channel, terms[0], terms[1]);
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
