// Selective scan, backward, on CUDA, sequential, for the methods of two_sample_forms.cuh: the consumer warps.
// two_sample_sequential_bwd.cuh describes the whole kernel.
#pragma once

#include "selective_scan/cuda/sequential_bwd_consumer.cuh"
#include "selective_scan/cuda/two_sample_step.cuh"

namespace ssm_kernels::selective_scan::sequential {

// delta, u, lam, dy, B, C and saved states -> gradients of u (without D's part), delta and lam, y, sums over channels, and
// adjoints.
template <typename TileConfig, typename Method>
struct TwoSampleBwdConsumer : BwdConsumer<TileConfig, Method> {
  using Base = BwdConsumer<TileConfig, Method>;
  using Base::adjoint, Base::grad_A, Base::h, Base::A, Base::needs_y, Base::lane, Base::shared, Base::at, Base::p, Base::plan,
      Base::partial_sums, Base::states_before, Base::kG, Base::kBytes, Base::kFromBToC;
  using typename Base::Acc, typename Base::Scalar, typename Base::Shared, typename Base::Step, typename Base::Rate,
      typename Base::Input, typename Base::Group, typename Base::Tile;
  using Pair = Vector<Acc, 2>;
  static constexpr int kGroupBytes = kLaneChannels * TileConfig::kConsumers * sizeof(typename Shared::LaneStates);
  static_assert(TileConfig::kTileSteps / kGroupSteps == 8, "the sums of a group are swizzled by XOR with its number");

  const TwoSampleParams& two;
  // The terms that the step after the group adds, zero at first: to the gradient of B, summed over the thread's channels; and,
  // in lanes with the group's later steps, to that of u.
  Acc carry_of_B[kLaneStates], carry_of_u;

  __device__ __forceinline__ TwoSampleBwdConsumer(const SelectiveScanBwdParams& params, const TwoSampleParams& two_,
                                                  const Method& method, const ScanPlan& scan_plan, const PartialSums& sums,
                                                  const Shared& shared_)
      : Base(params, method, scan_plan, sums, shared_), two(two_), carry_of_B{}, carry_of_u(0) {}

  // u of a channel of the lane before step t of the tile, a multiple of kGroupSteps.
  __device__ __forceinline__ uint32_t u_before(const Tile& addresses, int tile, int k, int t) const {
    const Acc* const before = shared.u_before + tile % Shared::kBuffers * kTileChannels + lane.channel(k);
    return t > 0 ? addresses.group(Shared::kInput, k, t - kG) + (kG - 1) * kBytes : cuda::shared_address(before);
  }
  __device__ __forceinline__ static Acc load(uint32_t address) {
    Acc value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
    return value;
  }

  // A channel's group of steps: the step sizes, and the factors of B_t and of B_{t-1}.
  struct Samples {
    Group delta, a, w;

    __device__ __forceinline__ Samples(const TwoSampleBwdConsumer& consumer, const Tile& addresses, int tile, int k, int t) {
      delta = Group::load_shared(addresses.group(Shared::kDelta, k, t));
      const Group u = Group::load_shared(addresses.group(Shared::kInput, k, t));
      [[maybe_unused]] Group lam;
      if constexpr (Method::kHasLam) lam = Group::load_shared(addresses.group(Shared::kWeight, k, t));
      Acc earlier = load(consumer.u_before(addresses, tile, k, t));
#pragma unroll
      for (int j = 0; j < kG; ++j) {
        const SampleSteps<Acc> sizes = consumer.sizes(delta[j], [&] { return lam[j]; });
        a.set(j, sizes.current * u[j]);
        w.set(j, sizes.previous * earlier);
        earlier = u[j];
      }
    }
  };
  template <typename Lam>
  __device__ __forceinline__ Acc weight(const Lam& lam) const {
    if constexpr (Method::kHasLam) {
      return lam();
    } else if constexpr (Method::kIsWeighted) {
      return this->method().template weight<Acc>();
    } else {
      return 1;
    }
  }
  template <typename Lam>
  __device__ __forceinline__ SampleSteps<Acc> sizes(Acc delta, const Lam& lam) const {
    return {Method::kIsWeighted, Step::kSamplesHaveDelta ? delta : Acc(1), weight(lam)};
  }

  // B of the lane's state i before step t of the tile; the row's padding has that before the tile.
  __device__ __forceinline__ Acc b_before(const Tile& addresses, int i, int t) const {
    return load(addresses.B(i, t) - kBytes);
  }

  __device__ __forceinline__ void scan_forward(int t, const Tile& addresses, int tile) {
    using Advance = typename Step::Advance;
    const auto read = [&](int k) {
      Samples samples(*this, addresses, tile, k, t);
      if constexpr (Step::kAdvancesByInverse) {
#pragma unroll
        for (int j = 0; j < kG; ++j) samples.delta.set(j, Math<Acc>::reciprocal(samples.delta[j]));
      }
      return samples;
    };
    const Samples samples[kLaneChannels] = {read(0), read(1)};
#pragma unroll
    for (int k = 0; k < kLaneChannels; ++k) this->save_states_before(t, k);
#pragma unroll
    for (int i = 0; i < kLaneStates; ++i) {
      const Group b = Group::load_shared(addresses.B(i, t));
      const Acc first = b_before(addresses, i, t);
#pragma unroll
      for (int k = 0; k < kLaneChannels; ++k) {
        const Rate rate(A[k][i]);
#pragma unroll
        for (int j = 0; j < kG; ++j) {
          const Advance advance(this->method(), samples[k].delta[j], samples[k].a[j], samples[k].w[j]);
          h[k][i] = advance(rate, h[k][i], b[j], j > 0 ? b[j > 0 ? j - 1 : 0] : first);
        }
      }
    }
  }

  // Sums over states, of a channel and a group of steps.
  struct Sums {
    Acc current[kG], previous[kG], step[kG], y[kG];
  };

  // As BwdConsumer::scan_backward, one channel after the other. After the lanes' second channel they exchange its sums: that is
  // the first channel of the state lane one apart.
  template <bool is_full>
  __device__ __forceinline__ void scan_backward(int64_t t0, int t, int count, const Tile& addresses, int tile) {
    Acc to_B[kLaneStates][kG] = {}, to_C[kLaneStates][kG] = {};
    Sums sums = {};
    const bool begins_row = !is_full && t0 + t == 0;
#pragma unroll
    for (int i = 0; i < kLaneStates; ++i) {
      to_B[i][kG - 1] = carry_of_B[i];
      carry_of_B[i] = 0;
    }
#pragma unroll
    for (int k = kLaneChannels - 1; k >= 0; --k) {
      const Samples samples(*this, addresses, tile, k, t);
      const Group dy = Group::load_shared(addresses.group(Shared::kDy, k, t)), before = Group::load_shared(states_before(t, k));
#pragma unroll
      for (int i = 0; i < kLaneStates; ++i) {
        if (!is_full && !(lane.channel(k) < at.channels && lane.state(i) < static_cast<int>(p.dstate))) continue;
        const Group b = Group::load_shared(addresses.B(i, t)), c = Group::load_shared(addresses.B(i, t) + kFromBToC);
        const Acc first = b_before(addresses, i, t);
        const Acc h_before = before[i];
        const Rate rate(A[k][i]);
        const auto input_at = [&](int j) { return Input(this->method(), samples.delta[j], samples.a[j], samples.w[j]); };
        Step step[kG] = {};
        Acc states[kG], state = h_before;
#pragma unroll
        for (int j = 0; j < kG; ++j) {
          if (!is_full && j >= count) continue;
          const Input input = input_at(j);
          step[j] = Step(input, rate);
          state = states[j] = step[j].advance(input, rate, state, b[j], j > 0 ? b[j > 0 ? j - 1 : 0] : first);
        }
#pragma unroll
        for (int j = kG - 1; j >= 0; --j) {
          if (!is_full && j >= count) continue;
          const Acc g = Math<Acc>::fma(dy[j], c[j], adjoint[k][i]);
          const Acc earlier = j > 0 ? states[j > 0 ? j - 1 : 0] : h_before;
          const SampleSums<Acc> targets{
              sums.current[j], sums.previous[j], sums.step[j], to_B[i][j], j > 0 ? to_B[i][j > 0 ? j - 1 : 0] : carry_of_B[i],
              grad_A[k][i]};
          Acc of_previous;
          adjoint[k][i] = step[j].add_gradients(targets, input_at(j), rate, b[j], j > 0 ? b[j > 0 ? j - 1 : 0] : first, g,
                                                earlier, states[j], of_previous);
          to_C[i][j] = Math<Acc>::fma(dy[j], states[j], to_C[i][j]);
          if (needs_y) sums.y[j] = Math<Acc>::fma(c[j], states[j], sums.y[j]);
          if (j == 0 && begins_row) store_first(tile, k, i, of_previous);
        }
      }
      if (k > 0) {
#pragma unroll
        for (int j = 0; j < kG; ++j) {
          const auto exchange = [&](Acc& sum) { sum = __shfl_xor_sync(kAllLanes, sum, 1); };
          exchange(sums.current[j]);
          exchange(sums.previous[j]);
          exchange(sums.step[j]);
          if (needs_y) exchange(sums.y[j]);
        }
      }
    }
    if (begins_row && repeats_first(two, at)) {
#pragma unroll
      for (int i = 0; i < kLaneStates; ++i) to_B[i][0] += carry_of_B[i];
    }
    store_sums_over_channels(to_B, to_C, t);
    store_sums_over_states(sums, begins_row, is_full ? kG : count, t, addresses, tile);
  }

  // Stores the gradient of the sample before the row, of one channel and state.
  __device__ __forceinline__ void store_first(int tile, int k, int i, Acc of_previous) const {
    const int channel = lane.channel(k), state = lane.state(i);
    if (two.grad_previous == nullptr || at.initial < 0 || channel >= at.channels || state >= static_cast<int>(p.dstate)) return;
    const Acc size =
        sizes(*shared.delta(tile).at(channel, 0), [&] { return *shared.array(tile, Shared::kWeight).at(channel, 0); }).previous;
    static_cast<Acc*>(two.grad_previous)[state_offset(p, at.initial, at.first_channel + channel, state)] = size * of_previous;
  }

  // The place of a warp's sums over channels of a group, of row `row`: kStates of B and kStates of C.
  __device__ __forceinline__ Acc* sums_of_group(int warp, int group, int row) const {
    auto* const base = reinterpret_cast<unsigned char*>(shared.states) + group * kGroupBytes;
    return reinterpret_cast<Acc*>(base + (warp * kWarpSize + (row ^ group)) * sizeof(Group));
  }

  // Exchanges between rows one, two and four apart leave each lane with one state, half of the lanes with B and half with C.
  // They take the place of the warp's states before the group, of the first channels.
  __device__ __forceinline__ void store_sums_over_channels(const Acc (&to_B)[kLaneStates][kG],
                                                           const Acc (&to_C)[kLaneStates][kG], int t) const {
    const bool has_C = lane.row & 4;
    Group sum;
#pragma unroll
    for (int j = 0; j < kG; ++j) {
      const auto of_half = [&](const Acc(&of_state)[kLaneStates][kG], int half) {
        return of_state[2 * half][j] + __shfl_xor_sync(kAllLanes, of_state[2 * half + 1][j], kStateLanes);
      };
      const Acc of_B = of_half(to_B, 0) + __shfl_xor_sync(kAllLanes, of_half(to_B, 1), 2 * kStateLanes);
      const Acc of_C = of_half(to_C, 0) + __shfl_xor_sync(kAllLanes, of_half(to_C, 1), 2 * kStateLanes);
      sum.set(j, (has_C ? of_C : of_B) + __shfl_xor_sync(kAllLanes, has_C ? of_B : of_C, 4 * kStateLanes));
    }
    __syncwarp();
    const int row = (has_C ? kStates : 0) + lane.state(0);
    sum.store(sums_of_group(static_cast<int>(threadIdx.x) / kWarpSize, t / kG, row));
  }

  // An exchange between state lanes two apart leaves each lane with all sums of two steps of its first channel. It makes the
  // gradients of u, delta and lam of them.
  __device__ __forceinline__ void store_sums_over_states(const Sums& sums, bool begins_row, int count, int t,
                                                         const Tile& addresses, int tile) {
    const bool is_late = lane.state_lane & 2;
    const uint32_t to_steps = is_late ? 2 * kBytes : 0;
    const auto both = [&](const Acc(&of_steps)[kG], int j) {
      return (is_late ? of_steps[2 + j] : of_steps[j]) + __shfl_xor_sync(kAllLanes, is_late ? of_steps[j] : of_steps[2 + j], 2);
    };
    const auto load_pair = [&](int array) {
      return Pair::load(static_cast<const Acc*>(__cvta_shared_to_generic(addresses.group(array, 0, t) + to_steps)));
    };
    [[maybe_unused]] Pair delta, u, lam;
    [[maybe_unused]] Acc earlier;
    if constexpr (Step::kSamplesHaveDelta) {
      delta = load_pair(Shared::kDelta);
      u = load_pair(Shared::kInput);
      earlier = load(is_late ? addresses.group(Shared::kInput, 0, t) + kBytes : u_before(addresses, tile, 0, t));
    }
    if constexpr (Method::kHasLam) lam = load_pair(Shared::kWeight);
    Acc of_u[2], to_before[2];
    Pair of_delta, of_lam, y;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const Acc current = both(sums.current, j), previous = both(sums.previous, j), step = both(sums.step, j);
      const Acc share = weight([&] { return lam[j]; });
      const SampleSteps<Acc> sizes = this->sizes(delta[j], [&] { return share; });
      of_u[j] = sizes.current * current;
      // A step that does not exist has any size.
      to_before[j] = (is_late ? 2 : 0) + j < count ? sizes.previous * previous : Acc(0);
      if constexpr (Step::kSamplesHaveDelta) {
        const Acc of_current = u[j] * current, of_previous = earlier * previous, difference = of_current - of_previous;
        earlier = u[j];
        const Acc of_samples = Method::kIsWeighted ? Math<Acc>::fma(share, difference, of_previous) : of_current + of_previous;
        of_delta.set(j, Math<Acc>::fma(step, Step::kScaleOfSampleStepSum, of_samples));
        if constexpr (Method::kHasLam) {
          const Acc slope = two.lam_sigmoid ? share * (Acc(1) - share) : Acc(1);
          of_lam.set(j, delta[j] * difference * slope);
        }
      } else {
        of_delta.set(j, step);
      }
      if (needs_y) y.set(j, both(sums.y, j));
    }
    // The first of the two steps adds to the step before: the other lane's second step, or that of the group before.
    const Acc other = __shfl_xor_sync(kAllLanes, to_before[0], 2);
    of_u[0] += to_before[1];
    of_u[1] += is_late ? carry_of_u : other;
    carry_of_u = other;
    if (begins_row && !is_late && repeats_first(two, at)) of_u[0] += to_before[0];
    Pair grad_u;
#pragma unroll
    for (int j = 0; j < 2; ++j) grad_u.set(j, of_u[j]);
    __syncwarp();  // the gradients overwrite arrays that the other state lanes have read
    const auto store = [&](int array, const Pair& pair) { pair.store_shared(addresses.group(array, 0, t) + to_steps); };
    store(Shared::kInput, grad_u);
    store(Shared::kStep, of_delta);
    if constexpr (Method::kHasLam) store(Shared::kWeight, of_lam);
    if (needs_y) store(Shared::kY, y);
  }

  // Adds the warps' sums over channels and stores the block's partial sums.
  __device__ __forceinline__ void write_sums_over_channels(int64_t t0, int steps) const {
    if (!p.grad_B.per_step && !p.grad_C.per_step) return;
    constexpr int kPerRow = TileConfig::kTileSteps / kG;
    for (int i = threadIdx.x; i < 2 * kStates * kPerRow; i += TileConfig::kConsumers) {
      const int row = i / kPerRow, group = i % kPerRow, step = group * kG, state = row % kStates;
      if (state >= static_cast<int>(p.dstate)) continue;
      Group sum = Group::load(sums_of_group(0, group, row));
#pragma unroll
      for (int warp = 1; warp < kConsumerWarps; ++warp) {
        const Group part = Group::load(sums_of_group(warp, group, row));
#pragma unroll
        for (int j = 0; j < kG; ++j) sum.set(j, sum[j] + part[j]);
      }
      store_matrix_sum<Scalar>(p, partial_sums, at, row < kStates, state, t0 + step, steps - step, sum);
    }
  }

  // Whether a group's values in padding states stay finite: so must be u before it.
  __device__ __forceinline__ bool is_finite_group(const Tile& addresses, int tile, int t, bool with_dy) const {
    Acc sum = 0;
#pragma unroll
    for (int k = 0; k < kLaneChannels; ++k) sum = Math<Acc>::fma(load(u_before(addresses, tile, k, t)), Acc(0), sum);
    bool finite = __all_sync(kAllLanes, sum == 0);
    finite &= is_finite(shared.delta(tile), lane, t) & is_finite(shared.input(tile), lane, t);
    if (with_dy) finite &= is_finite(shared.dy(tile), lane, t);
    return finite;
  }

  __device__ __forceinline__ void scan_tile(int64_t t0, int tile, int steps) {
    const Tile addresses(lane, shared, tile);
    const int last = (steps - 1) / kG * kG;
    // The states before groups overwrite the sums of the tile before.
    if (tile > 0) shared.sums_are_read->wait(tile - 1);
#pragma unroll 1
    for (int t = 0; t < last; t += kG) {
      scan_forward(t, addresses, tile);
      if (p.dstate < kStates && !is_finite_group(addresses, tile, t, false)) this->zero_padding_states();
    }
#pragma unroll
    for (int k = 0; k < kLaneChannels; ++k) this->save_states_before(last, k);
    // The row's first group is not in the loop of full groups, without other code in it.
    const auto is_full = [&](int t) {
      bool full = at.channels == kTileChannels && t + kG <= steps && t0 + t > 0;
      if (p.dstate < kStates) full &= is_finite_group(addresses, tile, t, true);
      return full;
    };
#pragma unroll 1
    for (int t = last; t >= 0;) {
      const int first = t0 > 0 ? 0 : kG;                                         // of the full groups of a tile
      const int begin = is_full(t) ? (p.dstate < kStates ? t : first) : t + kG;  // of those down from t
      if (t < begin) {
        scan_backward<false>(t0, t, steps - t, addresses, tile);
        t -= kG;
      }
#pragma unroll 1
      for (; t >= begin; t -= kG) scan_backward<true>(t0, t, kG, addresses, tile);
    }
  }

  // Runs the adjoint through the first step of the next segment (warp_scan_two_sample.cuh says why).
  __device__ __forceinline__ void run_later_step() {
    const int64_t t = at.end;
    const BwdRows<Scalar>& rows = *shared.rows;
    Acc to_before[kLaneChannels] = {};
#pragma unroll
    for (int k = 0; k < kLaneChannels; ++k) {
      const int channel = lane.channel(k);
      if (channel >= at.channels) continue;
      const auto load_step = [&](const SequenceView& view, const Scalar* row, int64_t step) {
        return to_accumulate(row[first_element<Scalar>(plan.sequences) + channel * view.stride_dim + step * view.stride_step]);
      };
      Acc delta = load_step(p.delta, rows.delta, t) + shared.bias[channel], dy = 0;
      if (p.delta_softplus) delta = softplus(delta);
      if (p.grad_out.data != nullptr) {
        dy = load_step(p.grad_out, rows.grad_out, t);
        if (p.z.data != nullptr) dy *= silu(load_step(p.z, rows.z, t));
      }
      const SampleSteps<Acc> of_samples = sizes(delta, [&] {
        return load_lam(two, first_row<Scalar>(two.lam, at) + channel * two.lam.stride_dim + t * two.lam.stride_step);
      });
      const Input input(this->method(), delta, Acc(0), of_samples.previous * load_step(p.u, rows.u, t - 1));
      Acc previous = 0, unused[4] = {};
#pragma unroll
      for (int i = 0; i < kLaneStates; ++i) {
        const int state = lane.state(i);
        if (state >= static_cast<int>(p.dstate)) continue;
        const auto load_matrix = [&](const MatrixView& view, VectorAccess access, const Scalar* row, int64_t step) {
          return to_accumulate(row[first_element<Scalar>(access) + state * view.stride_state + step * view.stride_step]);
        };
        const Acc c = load_matrix(p.C, plan.C, rows.C, t), b_before = load_matrix(p.B, plan.B, rows.B, t - 1);
        const Rate rate(A[k][i]);
        Step step(input, rate);
        step.advance(input, rate, Acc(0), Acc(0), Acc(0));
        const SampleSums<Acc> sums{unused[0], previous, unused[1], unused[2], carry_of_B[i], unused[3]};
        Acc of_previous;
        adjoint[k][i] = step.add_gradients(sums, input, rate, Acc(0), b_before, Math<Acc>::fma(dy, c, adjoint[k][i]), Acc(0),
                                           Acc(0), of_previous);
      }
      to_before[k] = of_samples.previous * previous;
    }
    Acc sum = to_before[0] + __shfl_xor_sync(kAllLanes, to_before[1], 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    carry_of_u = sum;
  }

  __device__ __forceinline__ void run() {
    if (at.begin < at.end) {
      if (at.segment + 1 < plan.segments) run_later_step();
      // Computed on use, to save registers.
      const auto first_step = [&](int tile) { return last_tile<TileConfig>(at) - int64_t(tile) * TileConfig::kTileSteps; };
      this->load_saved_states(first_step(0));
      sync_roles<TileConfig>();
      for (int tile = 0; first_step(tile) >= at.begin; ++tile) {
        scan_tile(first_step(tile), tile, at.steps_from(first_step(tile), TileConfig::kTileSteps));
        // Also after the last tile: otherwise the states of each tile would live through its backward pass.
        this->load_saved_states(max(first_step(tile + 1), at.begin));
        sync_roles<TileConfig>();
        write_sums_over_channels(first_step(tile), at.steps_from(first_step(tile), TileConfig::kTileSteps));
        shared.sums_are_read->arrive();
      }
    }
    sync_roles<TileConfig>();  // for finish() of the producers
    this->store_sums();
  }
};

}  // namespace ssm_kernels::selective_scan::sequential
