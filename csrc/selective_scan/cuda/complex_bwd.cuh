// Backward of the selective scan of complex states (complex_scan.cuh; the formulas are those of cpu/complex_kernel.h).
//
// A block has 64 channels, two a lane: the gradients of B_t and C_t, sums over channels, are added in the thread first. A warp
// has one complex state of all channels, and a block up to 16 warps; more states take several passes over each chunk. Chunks
// are visited from last to first. A pass runs forward from the saved state before the chunk and keeps the state every few steps
// in shared memory; then, for these few steps at a time from the last, it runs forward once more with the states in registers,
// and backward. No state is found by a division. The adjoint, and the gradients of A and of constant B and C, are carried from
// chunk to chunk in memory that each thread has for itself.
//
// The lanes of a warp add 4 numbers of 8 steps by a butterfly that halves what a lane has, and one lane stores each sum. Sums
// over the states, those of u, delta and lam and the output for the gradient of z, are sums over warps in shared memory.
#pragma once

#include "selective_scan/cuda/complex_chunk_bwd.cuh"

namespace ssm_kernels::selective_scan {

// bwd_reduce.cuh, which bwd_f32.cu and bwd_f64.cu instantiate.
template <typename Scalar>
cudaError_t launch_bwd_reduce(const SelectiveScanBwdParams& params, const PartialSums& partial_sums, cudaStream_t stream);

namespace complex_scan {

constexpr int kBwdWarps = 16;
constexpr int kBwdRow = kBwdChannels + 2;  // the rows of pairs of channels begin in different banks
// Steps whose states a thread has in registers.
template <typename Acc>
constexpr int kBwdSteps = sizeof(Acc) == 8 ? 4 : 8;
template <typename Acc>
constexpr int kMostBwdWarps = sizeof(Acc) == 8 ? kBwdWarps / 2 : kBwdWarps;
enum Sum { kSumU, kSumDelta, kSumY, kSumLam, kNumSums };

SSM_HOST_DEVICE bool has_constant(const SelectiveScanParams& p) { return !p.B.per_step || !p.C.per_step; }

template <typename Acc>
struct BwdShared {
  // constants: B, C and the sums of their gradients, two numbers a channel of each thread, where one of them is constant.
  Acc *delta, *u, *dy, *lam, *B, *C, *sums[kNumSums], *states, *constants;
  int64_t bytes;

  SSM_HOST_DEVICE BwdShared(const Tiles& tiles, int64_t chunk_length, bool has_lam, bool has_constant, unsigned char* memory) {
    constexpr int kSteps = kBwdSteps<Acc>;
    Acc* next = reinterpret_cast<Acc*>(memory);
    const auto allocate = [&](int64_t count) {
      Acc* const array = next;
      next += (count + 3) / 4 * 4;
      return array;
    };
    constants = allocate(has_constant ? tiles.warps * kWarpSize * 16 : 0);
    states = allocate((chunk_length / kSteps - 1) * tiles.warps * kWarpSize * 4);
    B = allocate((kSteps + 1) * 2 * tiles.warps);
    C = allocate(kSteps * 2 * tiles.warps);
    delta = allocate(kSteps * kBwdRow);
    u = allocate((kSteps + 1) * kBwdRow);
    dy = allocate(kSteps * kBwdRow);
    lam = allocate(has_lam ? kSteps * kBwdRow : 0);
    for (int i = 0; i < kNumSums; ++i) {
      sums[i] = allocate(i != kSumLam || has_lam ? tiles.warps * kSteps * kBwdRow : 0);
    }
    bytes = reinterpret_cast<unsigned char*>(next) - memory;
  }
};

template <typename Scalar, typename Rule>
__device__ __forceinline__ void scan_tiles_backward(const BwdPlan& plan, const Rule& rule) {
  using Acc = cuda::AccumulateType<Scalar>;
  using Number = Complex<Acc>;
  using Method = std::decay_t<decltype(rule.step(Number(Acc(0))))>;
  constexpr int kSteps = kBwdSteps<Acc>, kValues = 4 * kSteps;
  extern __shared__ __align__(16) unsigned char memory[];
  const SelectiveScanBwdParams& p = plan.p;
  const TwoSampleParams& two = plan.two;
  const Tiles& tiles = plan.tiles;
  const BwdShared<Acc> shared(tiles, p.chunk_length, Rule::kHasLam, has_constant(p), memory);
  const Place place(p, tiles, kBwdChannels);
  const ScanRow& row = place.row;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, columns = 2 * tiles.warps;
  const int dstate = static_cast<int>(p.dstate), channels = static_cast<int>(place.end - place.channel);
  const int64_t steps = row.end - row.begin;
  const int64_t group_B = p.B.per_step ? place.channel / (p.dim / p.B.groups) : 0;
  const int64_t group_C = p.C.per_step ? place.channel / (p.dim / p.C.groups) : 0;
  const Acc weight = two.conjugate_pairs ? Acc(2) : Acc(1);
  const bool steps_are_neighbors = p.u.stride_dim != 1;
  const bool sums_B = p.grad_B.per_step, sums_C = p.grad_C.per_step;
  const bool repeats = two.repeats_first && (two.previous_u.data == nullptr || row.initial < 0);
  const auto channel_of = [&](int i) { return place.channel + min(2 * lane + i, channels - 1); };
  const auto is_live = [&](int i) { return 2 * lane + i < channels; };

  Number rate[2], h[2], g[2], of_previous[2], grad_A[2];
  // A thread's constants: B, C, and the sums of their gradients.
  enum Constant { kB, kC, kGradB, kGradC };
  Acc* const own = shared.constants + threadIdx.x * 16;
  const auto constant = [&](Constant which, int i) { return own + which * 4 + 2 * i; };
  ComplexRate<Acc> A[2];
  bool is_copy = false;
  int n = 0;  // twice the thread's state
  const auto number_at = [&](const void* data, int64_t offset, int64_t stride) {
    const Acc* const source = static_cast<const Acc*>(data) + offset;
    return Number(source[0], source[stride]);
  };
  // A number of the thread in a (rows, dim, dstate) tensor.
  const auto slot = [&](void* data, int64_t at, int i) {
    return static_cast<Acc*>(data) + (at * p.dim + channel_of(i)) * p.dstate + n;
  };
  const auto put = [&](void* data, int64_t at, const Number(&values)[2]) {
    if (data == nullptr || is_copy) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!is_live(i)) break;
      Acc* const target = slot(data, at, i);
      target[0] = values[i].re;
      target[1] = values[i].im;
    }
  };
  const auto get = [&](void* data, Number(&values)[2], bool is_first) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      values[i] = Number(Acc(0));
      if (is_first || data == nullptr || is_copy) continue;
      const Acc* const source = slot(data, place.row_index, i);
      values[i] = Number(source[0], source[1]);
    }
  };
  const auto first_adjoint = [&]() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const StateView& last = p.grad_last_state;
      g[i] = Number(Acc(0));
      if (last.data == nullptr || row.last < 0 || is_copy || !is_live(i)) continue;
      g[i] = number_at(last.data, row.last * last.stride_batch + channel_of(i) * last.stride_dim + n * last.stride_state,
                       last.stride_state);
    }
  };
  const auto load_parameters = [&](int pass) {
    const int state = pass * tiles.warps + warp;
    is_copy = state >= dstate / 2;
    n = 2 * min(state, dstate / 2 - 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rate[i] = number_at(p.A.data, channel_of(i) * p.A.stride_dim + n * p.A.stride_state, p.A.stride_state);
      // Steps past the end keep the state also at a rate of minus infinity, and steps up to 1e8 have a finite z.
      constexpr Acc kLowest = Acc(-1e-8) * kLargestRate<Acc>;
      if (rate[i].re < kLowest) rate[i].re = kLowest;
      A[i] = ComplexRate<Acc>(rate[i].re, rate[i].im);
      if (!p.B.per_step) {
        const Number value = number_at(p.B.data, channel_of(i) * p.B.stride_channel + n * p.B.stride_state, p.B.stride_state);
        constant(kB, i)[0] = value.re, constant(kB, i)[1] = value.im;
      }
      if (!p.C.per_step) {
        const Number value = number_at(p.C.data, channel_of(i) * p.C.stride_channel + n * p.C.stride_state, p.C.stride_state);
        const Acc scale = is_copy ? Acc(0) : weight;
        constant(kC, i)[0] = scale * value.re, constant(kC, i)[1] = -scale * value.im;
      }
    }
  };
  const auto load_state_before = [&](int64_t chunk) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      h[i] = Number(Acc(0));
      if (!is_live(i)) continue;
      if (p.saves_chunk_state(row, chunk)) {
        h[i] = number_at(p.chunk_states, (p.chunk_state(row, chunk) * p.dim + channel_of(i)) * p.dstate + n, 1);
      } else if (p.initial_state.data != nullptr && row.initial >= 0) {
        const StateView& first = p.initial_state;
        h[i] =
            number_at(first.data, row.initial * first.stride_batch + channel_of(i) * first.stride_dim + n * first.stride_state,
                      first.stride_state);
      }
    }
  };
  // Visits the elements of a tile of sequences; `first` is its first step.
  const auto visit = [&](const auto& visitor) {
#pragma unroll 1
    for (int e = threadIdx.x; e < kSteps * kBwdChannels; e += blockDim.x) {
      const int t = steps_are_neighbors ? e % kSteps : e / kBwdChannels;
      visitor(t, steps_are_neighbors ? e / kSteps : e % kBwdChannels);
    }
  };
  const auto bias_of = [&](int64_t d) {
    return p.delta_bias.data == nullptr ? Acc(0) : static_cast<const Acc*>(p.delta_bias.data)[d * p.delta_bias.stride];
  };
  // Steps past the end, and channels past the last, have zero: they keep the state and the adjoint.
  const auto stage = [&](int64_t first, int count, int pass, bool is_backward) {
    visit([&](int t, int c) {
      const bool is_inside = t < count && c < channels;
      const int at = t * kBwdRow + c;
      const int64_t d = place.channel + c;
      Acc delta = 0, u = 0, dy = 0, lam = 0;
      if (is_inside) {
        delta = load<Scalar>(p.delta, row, d, first + t) + bias_of(d);
        if (p.delta_softplus) delta = softplus(delta);
        u = load<Scalar>(p.u, row, d, first + t);
        if (is_backward && p.grad_out.data != nullptr) {
          dy = load<Scalar>(p.grad_out, row, d, first + t);
          if (p.z.data != nullptr) dy *= silu(load<Scalar>(p.z, row, d, first + t));
        }
        if constexpr (Rule::kHasLam) {
          lam = load<Scalar>(two.lam, row, d, first + t);
          if (two.lam_sigmoid) lam = sigmoid(lam);
        }
      }
      shared.delta[at] = delta;
      shared.u[at + kBwdRow] = u;
      shared.dy[at] = dy;
      if constexpr (Rule::kHasLam) shared.lam[at] = lam;
    });
    const int first_state = pass * tiles.warps;
    if constexpr (Method::kUsesPreviousInput) {
#pragma unroll 1
      for (int c = threadIdx.x; c < kBwdChannels; c += blockDim.x) {
        shared.u[c] = c < channels ? sample_before<Scalar>(p, two, row, place.channel + c, first) : Acc(0);
      }
#pragma unroll 1
      for (int i = threadIdx.x; p.B.per_step && i < columns; i += blockDim.x) {
        shared.B[i] = matrix_before<Acc>(p, two, row, group_B, first, 2 * min(first_state + i / 2, dstate / 2 - 1) + i % 2);
      }
    }
    const auto stage_matrix = [&](Acc* target, const MatrixView& matrix, int64_t group, bool is_C) {
#pragma unroll 1
      for (int e = threadIdx.x; matrix.per_step && e < kSteps * columns; e += blockDim.x) {
        const int t = e / columns, i = e % columns, state = first_state + i / 2;
        Acc value = 0;
        if (t < count) value = matrix_at<Acc>(matrix, row, group, first + t, 2 * min(state, dstate / 2 - 1) + i % 2);
        if (is_C) value *= state >= dstate / 2 ? Acc(0) : i % 2 != 0 ? -weight : weight;
        target[e] = value;
      }
    };
    stage_matrix(shared.B + columns, p.B, group_B, false);
    if (is_backward) stage_matrix(shared.C, p.C, group_C, true);
  };
  const auto B_at = [&](int t, int i) {
    const Acc* const source = p.B.per_step ? shared.B + (t + 1) * columns + 2 * warp : constant(kB, i);
    return Number(source[0], source[1]);
  };
  const auto C_at = [&](int t, int i) {
    const Acc* const source = p.C.per_step ? shared.C + t * columns + 2 * warp : constant(kC, i);
    return Number(source[0], source[1]);
  };
  const auto method_at = [&](int t, int i) {
    return rule.step(Number(Rule::kHasLam ? shared.lam[t * kBwdRow + 2 * lane + i] : Acc(0), Acc(0)));
  };
  // One step of one of the two channels.
  const auto step = [&](int t, int i, const Number& state, Number& basis) {
    const int at = t * kBwdRow + 2 * lane + i;
    const Acc delta = shared.delta[at];
    const auto method = method_at(t, i);
    const Number z = scaled(delta, rate[i]);
    basis = basis_of<Scalar>(method, delta, z, A[i]);
    Number inputs = scaled(delta * shared.u[at + kBwdRow], B_at(t, i));
    if constexpr (Method::kUsesPreviousInput) {
      const auto gain = method.gain(z, basis);
      inputs = multiply_add(gain.previous, scaled(delta * shared.u[at], B_at(t - 1, i)), gain.current * inputs);
    } else if constexpr (!Method::kUnitGain) {
      inputs = method.gain(z, basis).current * inputs;
    }
    return multiply_add(method.abar(z, basis), state, inputs);
  };

  Acc sum_D = 0, sum_bias = 0;  // of channel threadIdx.x of the tile
  const int64_t chunks = (steps + p.chunk_length - 1) / p.chunk_length;
#pragma unroll 1
  for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
    const int64_t begin = chunk * p.chunk_length, left = steps - begin;
    const int length = static_cast<int>(left < p.chunk_length ? left : p.chunk_length), parts = (length + kSteps - 1) / kSteps;
    const bool is_first = chunk == chunks - 1;
#pragma unroll 1
    for (int pass = 0; pass < tiles.passes; ++pass) {
      load_parameters(pass);
      if (is_first) {
        first_adjoint();
      } else {
        get(plan.workspace.adjoint, g, false);
      }
      if constexpr (Method::kUsesPreviousInput) get(plan.workspace.previous, of_previous, is_first);
      get(plan.partial.grad_A, grad_A, is_first);
      const auto get_constant = [&](void* data, Constant which) {
        if (data == nullptr) return;
        Number values[2];
        get(data, values, is_first);
#pragma unroll
        for (int i = 0; i < 2; ++i) constant(which, i)[0] = values[i].re, constant(which, i)[1] = values[i].im;
      };
      get_constant(plan.partial.grad_constant_B, kGradB);
      get_constant(plan.partial.grad_constant_C, kGradC);

      load_state_before(chunk);
      const auto kept = [&](int part) { return shared.states + ((part - 1) * blockDim.x + threadIdx.x) * 4; };
#pragma unroll 1
      for (int part = 0; part + 1 < parts; ++part) {
        stage(begin + part * kSteps, kSteps, pass, false);
        __syncthreads();
#pragma unroll
        for (int t = 0; t < kSteps; ++t) {
          Number basis;
#pragma unroll
          for (int i = 0; i < 2; ++i) h[i] = step(t, i, h[i], basis);
        }
        Acc* const target = kept(part + 1);
        target[0] = h[0].re, target[1] = h[0].im, target[2] = h[1].re, target[3] = h[1].im;
        __syncthreads();
      }
#pragma unroll 1
      for (int part = parts - 1; part >= 0; --part) {
        const int64_t first = begin + part * kSteps;
        const int count = min(kSteps, length - part * kSteps);
        stage(first, count, pass, true);
        if (part > 0) {
          const Acc* const source = kept(part);
          h[0] = Number(source[0], source[1]), h[1] = Number(source[2], source[3]);
        } else {
          load_state_before(chunk);
        }
        __syncthreads();

        Number states[kSteps + 1][2], basis;
        states[0][0] = h[0], states[0][1] = h[1];
#pragma unroll
        for (int t = 0; t < kSteps; ++t) {
#pragma unroll
          for (int i = 0; i < 2; ++i) states[t + 1][i] = step(t, i, states[t][i], basis);
        }
        Acc values[kValues];
#pragma unroll
        for (int t = kSteps - 1; t >= 0; --t) {
          Number of_B(Acc(0)), of_C(Acc(0));
          Acc sums[kNumSums][2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int at = t * kBwdRow + 2 * lane + i;
            const Acc delta = shared.delta[at], u = shared.u[at + kBwdRow], dy = shared.dy[at];
            const auto method = method_at(t, i);
            const Number B = B_at(t, i), C = C_at(t, i), z = scaled(delta, rate[i]), v = scaled(u, B);
            Number v_before(Acc(0));
            if constexpr (Method::kUsesPreviousInput) v_before = scaled(shared.u[at], B_at(t - 1, i));
            const Number own_basis = basis_of<Scalar>(method, delta, z, A[i]);
            const auto derivative = method.derivatives(z, own_basis);
            sums[kSumY][i] = dot_add(states[t + 1][i], C, Acc(0));
            const Number own_C = scaled(dy, states[t + 1][i]);
            g[i] = g[i] + scaled(dy, C);
            const Number of_delta = scaled(delta, g[i]);
            Number of_sample = of_delta;
            if constexpr (!Method::kUnitGain) {
              const auto gain = method.gain(z, own_basis);
              of_sample = conjugate_times(gain.current, of_delta);
              if constexpr (Method::kUsesPreviousInput) {
                of_sample = of_sample + of_previous[i];
                of_previous[i] = conjugate_times(gain.previous, of_delta);
                if (repeats && first + t == 0) {
                  of_sample = of_sample + of_previous[i];
                  of_previous[i] = Number(Acc(0));
                }
              }
            }
            const Number own_B = scaled(u, of_sample);
            sums[kSumU][i] = dot_add(of_sample, B, Acc(0));
            const Number of_state = derivative.abar * states[t][i];
            Number direct = v, of_z = of_state;
            if constexpr (!Method::kUnitGain) {
              Number of_inputs = derivative.gain * v;
              direct = derivative.z_gain * v;
              if constexpr (Method::kUsesPreviousInput) {
                of_inputs = multiply_add(derivative.previous, v_before, of_inputs);
                direct = multiply_add(derivative.z_previous, v_before, direct);
              }
              of_z = of_state + scaled(delta, of_inputs);
            }
            sums[kSumDelta][i] = dot_add(multiply_add(rate[i], of_state, direct), g[i], Acc(0));
            grad_A[i] = conjugate_times_add(of_z, of_delta, grad_A[i]);
            if constexpr (Rule::kHasLam) sums[kSumLam][i] = dot_add(v - own_basis * v_before, of_delta, Acc(0));
            g[i] = conjugate_times(method.abar(z, own_basis), g[i]);
            of_B = of_B + own_B;
            of_C = of_C + own_C;
            const auto add = [&](Constant which, const Number& value) {
              constant(which, i)[0] += value.re;
              constant(which, i)[1] += value.im;
            };
            if (plan.partial.grad_constant_B != nullptr) add(kGradB, own_B);
            if (plan.partial.grad_constant_C != nullptr) add(kGradC, Number(weight * own_C.re, -weight * own_C.im));
          }
          values[t] = of_B.re;
          values[kSteps + t] = of_B.im;
          values[2 * kSteps + t] = weight * of_C.re;
          values[3 * kSteps + t] = -weight * of_C.im;
          const int at = (warp * kSteps + t) * kBwdRow + 2 * lane;
          const Acc counts = is_copy ? Acc(0) : Acc(1);
#pragma unroll
          for (int s = 0; s < kNumSums; ++s) {
            if (s == kSumLam && !Rule::kHasLam) continue;
            shared.sums[s][at] = counts * sums[s][0];
            shared.sums[s][at + 1] = counts * sums[s][1];
          }
        }
        if (sums_B || sums_C) {
          const Acc total = sum_over_lanes<kValues>(values, lane);
          const int kind = lane % kValues / kSteps, t = lane % kSteps;
          const bool is_C = kind >= 2;
          if (lane < kValues && t < count && !is_copy && (is_C ? sums_C : sums_B)) {
            Acc* const target = static_cast<Acc*>(is_C ? plan.partial.grad_C : plan.partial.grad_B);
            target[plan.partial.offset(row.batch, place.tile, n + kind % 2, row.begin + first + t)] = total;
          }
        }
        __syncthreads();
        visit([&](int t, int c) {
          const int at = t * kBwdRow + c;
          const int64_t d = place.channel + c;
          Acc of_bias = 0, of_D = 0;
          if (t < count && c < channels) {
            Acc totals[kNumSums] = {};
            for (int w = 0; w < tiles.warps; ++w) {
#pragma unroll
              for (int s = 0; s < kNumSums; ++s) {
                if (s == kSumLam && !Rule::kHasLam) continue;
                totals[s] += shared.sums[s][w * kSteps * kBwdRow + at];
              }
            }
            if (tiles.passes > 1) {
              Acc* const kept_sums =
                  static_cast<Acc*>(plan.workspace.sums) + (row.batch * p.dim + d) * p.seqlen + row.begin + first + t;
              const int64_t count_of_sums = p.batch * p.dim * p.seqlen;
#pragma unroll
              for (int s = 0; s < kNumSums; ++s) {
                if (s == kSumLam && !Rule::kHasLam) continue;
                if (pass > 0) totals[s] += kept_sums[s * count_of_sums];
                if (pass + 1 < tiles.passes) kept_sums[s * count_of_sums] = totals[s];
              }
            }
            if (pass + 1 == tiles.passes) {
              const int64_t step_at = first + t;
              const Acc u = shared.u[at + kBwdRow], dy = shared.dy[at];
              const Acc D = p.D.data == nullptr ? Acc(0) : static_cast<const Acc*>(p.D.data)[d * p.D.stride];
              of_D = dy * u;
              of_bias = totals[kSumDelta];
              if (p.delta_softplus) {
                of_bias *= softplus_derivative(load<Scalar>(p.delta, row, d, step_at) + bias_of(d));
              }
              if (p.grad_u.data != nullptr) store<Scalar>(p.grad_u, row, d, step_at, Math<Acc>::fma(D, dy, totals[kSumU]));
              if (p.grad_delta.data != nullptr) store<Scalar>(p.grad_delta, row, d, step_at, of_bias);
              if (p.grad_z.data != nullptr) {
                const Acc z = load<Scalar>(p.z, row, d, step_at);
                const Acc grad_out = p.grad_out.data == nullptr ? Acc(0) : load<Scalar>(p.grad_out, row, d, step_at);
                const Acc y = Math<Acc>::fma(D, u, totals[kSumY]);
                store<Scalar>(p.grad_z, row, d, step_at, grad_out * y * silu_derivative(z, sigmoid(z)));
              }
              if constexpr (Rule::kHasLam) {
                const Acc lam = shared.lam[at], slope = two.lam_sigmoid ? lam * (Acc(1) - lam) : Acc(1);
                if (two.grad_lam.data != nullptr) store<Scalar>(two.grad_lam, row, d, step_at, totals[kSumLam] * slope);
              }
            }
          }
          shared.delta[at] = of_bias;
          shared.dy[at] = of_D;
        });
        __syncthreads();
        for (int c = threadIdx.x, k = 0; c < kBwdChannels; c += blockDim.x, ++k) {
          if (k > 0) break;
#pragma unroll
          for (int t = 0; t < kSteps; ++t) {
            sum_bias += shared.delta[t * kBwdRow + c];
            sum_D += shared.dy[t * kBwdRow + c];
          }
        }
        __syncthreads();
      }
      put(plan.workspace.adjoint, place.row_index, g);
      if constexpr (Method::kUsesPreviousInput) put(plan.workspace.previous, place.row_index, of_previous);
      put(plan.partial.grad_A, place.row_index, grad_A);
      const auto put_constant = [&](void* data, Constant which) {
        if (data == nullptr) return;
        const Number values[2] = {Number(constant(which, 0)[0], constant(which, 0)[1]),
                                  Number(constant(which, 1)[0], constant(which, 1)[1])};
        put(data, place.row_index, values);
      };
      put_constant(plan.partial.grad_constant_B, kGradB);
      put_constant(plan.partial.grad_constant_C, kGradC);
    }
  }
  // The adjoint before the first step. A row without steps has that after its last one, and adds nothing to sums.
#pragma unroll 1
  for (int pass = 0; pass < tiles.passes; ++pass) {
    load_parameters(pass);
    if (chunks == 0) {
      first_adjoint();
    } else {
      get(plan.workspace.adjoint, g, false);
    }
    if constexpr (Method::kUsesPreviousInput) get(plan.workspace.previous, of_previous, chunks == 0);
    if (p.grad_initial_state != nullptr && row.initial >= 0) put(p.grad_initial_state, row.initial, g);
    if constexpr (Method::kUsesPreviousInput) {
      if (two.grad_previous != nullptr && row.initial >= 0) put(two.grad_previous, row.initial, of_previous);
    }
    if (chunks == 0) {
      const Number zeros[2] = {Number(Acc(0)), Number(Acc(0))};
      put(plan.partial.grad_A, place.row_index, zeros);
      put(plan.partial.grad_constant_B, place.row_index, zeros);
      put(plan.partial.grad_constant_C, place.row_index, zeros);
    }
  }
  if (static_cast<int>(threadIdx.x) < channels) {
    const int64_t at = place.row_index * p.dim + place.channel + threadIdx.x;
    if (plan.partial.grad_D != nullptr) static_cast<Acc*>(plan.partial.grad_D)[at] = sum_D;
    if (plan.partial.grad_delta_bias != nullptr) static_cast<Acc*>(plan.partial.grad_delta_bias)[at] = sum_bias;
  }
}

template <typename Scalar, bool exponential>
__global__ void __launch_bounds__(kMostBwdWarps<cuda::AccumulateType<Scalar>>* kWarpSize, 1)
    complex_scan_bwd_kernel(const __grid_constant__ BwdPlan plan) {
  visit_rule<exponential>(plan.p.discretization, [&](auto rule) { scan_tiles_backward<Scalar>(plan, rule); });
}

}  // namespace complex_scan

// The tiles of backward on the current device: as many warps as shared memory allows. A block has two warps at least, whose
// threads add the gradients of D and delta_bias of its 64 channels.
template <typename Scalar>
complex_scan::Tiles complex_bwd_tiles(const SelectiveScanParams& p, int64_t shared_bytes) {
  using namespace complex_scan;
  using Acc = cuda::AccumulateType<Scalar>;
  for (int warps = kMostBwdWarps<Acc>;; warps /= 2) {
    Tiles tiles(p, kBwdChannels, 1, warps);
    tiles.warps = std::max(tiles.warps, 2);
    const bool has_lam = p.discretization == Discretization::kExpTrapezoidal;
    if (warps == 2 || BwdShared<Acc>(tiles, p.chunk_length, has_lam, has_constant(p), nullptr).bytes <= shared_bytes)
      return tiles;
  }
}

template <typename Scalar>
ComplexBlocks complex_bwd_blocks(const SelectiveScanBwdParams& params, int64_t shared_bytes) {
  const complex_scan::Tiles tiles = complex_bwd_tiles<Scalar>(params, shared_bytes);
  return {tiles.tiles, tiles.passes};
}

template <typename Scalar>
cudaError_t launch_complex_bwd(const SelectiveScanBwdParams& params, const TwoSampleParams& two, const PartialSums& partial,
                               const ComplexWorkspace& workspace, int64_t shared_bytes, cudaStream_t stream) {
  using namespace complex_scan;
  using Acc = cuda::AccumulateType<Scalar>;
  const BwdPlan plan{params, two, partial, workspace, complex_bwd_tiles<Scalar>(params, shared_bytes)};
  const int64_t blocks = params.rows * plan.tiles.tiles;
  cudaError_t error = cudaSuccess;
  if (blocks > 0 && takes_chunk_bwd<Scalar>(params, partial, shared_bytes)) {
    if constexpr (sizeof(Scalar) <= 4) error = launch_chunk_bwd<Scalar>(plan, blocks, stream);
  } else if (blocks > 0) {
    const bool has_lam = params.discretization == Discretization::kExpTrapezoidal;
    const int64_t bytes = BwdShared<Acc>(plan.tiles, params.chunk_length, has_lam, has_constant(params), nullptr).bytes;
    const auto kernel = has_exponential_gain(params.discretization) ? complex_scan_bwd_kernel<Scalar, true>
                                                                    : complex_scan_bwd_kernel<Scalar, false>;
    error = cuda::allow_shared_bytes(kernel, bytes);
    if (error == cudaSuccess) {
      error = cuda::launch(kernel, blocks, plan.tiles.warps * kWarpSize, static_cast<int>(bytes), stream, false, plan);
    }
  }
  if (error != cudaSuccess) return error;
  return launch_bwd_reduce<Acc>(params, partial, stream);
}

}  // namespace ssm_kernels::selective_scan
