// Forward of the selective scan of complex states (complex_scan.cuh).
//
// A block has 32 channels, one a lane. A thread keeps four complex states in registers, so that four independent chains of
// multiply-adds hide the latency of each other, and a warp has the same four states of all channels. Up to eight warps take up
// to 32 states in one pass; more states take several passes over each tile of steps, with the states in shared memory between.
#pragma once

#include "selective_scan/cuda/complex_scan.cuh"

namespace ssm_kernels::selective_scan::complex_scan {

constexpr int kFwdStates = 4, kFwdWarps = 8, kFwdColumns = 2 * kFwdStates;
// Rows of shared tiles of [step][channel] have an odd length: neighboring steps and neighboring channels are in other banks.
constexpr int kFwdRow = kWarpSize + 1;
template <typename Acc>
constexpr int kFwdSteps = sizeof(Acc) == 8 ? 8 : 32;
// Doubles of 128 states fit the 99 KB of shared memory of the smallest devices.
template <typename Acc>
constexpr int kMostFwdWarps = sizeof(Acc) == 8 ? kFwdWarps / 2 : kFwdWarps;
static_assert(kShortChunk % kFwdSteps<float> == 0 && kShortChunk % kFwdSteps<double> == 0, "a chunk begins with a tile");

struct FwdPlan {
  SelectiveScanFwdParams p;
  TwoSampleParams two;
  Tiles tiles;
};

template <typename Acc>
struct FwdShared {
  Acc *delta, *u, *lam, *y, *B, *C, *states;
  int bytes;

  SSM_HOST_DEVICE FwdShared(const Tiles& tiles, bool has_lam, unsigned char* memory) {
    constexpr int kSteps = kFwdSteps<Acc>;
    Acc* next = reinterpret_cast<Acc*>(memory);
    const auto allocate = [&](int count) {
      Acc* const array = next;
      next += (count + 3) / 4 * 4;
      return array;
    };
    const int columns = tiles.warps * kFwdColumns;
    B = allocate((kSteps + 1) * columns);
    C = allocate(kSteps * columns);
    states = allocate(tiles.passes > 1 ? tiles.passes * tiles.warps * kWarpSize * kFwdColumns : 0);
    delta = allocate(kSteps * kFwdRow);
    u = allocate((kSteps + 1) * kFwdRow);
    lam = allocate(has_lam ? kSteps * kFwdRow : 0);
    y = allocate(tiles.warps * kSteps * kFwdRow);
    bytes = static_cast<int>(reinterpret_cast<unsigned char*>(next) - memory);
  }
};

template <typename Scalar, typename Rule>
__device__ __forceinline__ void scan_tiles(const FwdPlan& plan, const Rule& rule) {
  using Acc = cuda::AccumulateType<Scalar>;
  using Number = Complex<Acc>;
  using Method = std::decay_t<decltype(rule.step(Number(Acc(0))))>;
  constexpr int kSteps = kFwdSteps<Acc>;
  extern __shared__ __align__(16) unsigned char memory[];
  const SelectiveScanFwdParams& p = plan.p;
  const TwoSampleParams& two = plan.two;
  const Tiles& tiles = plan.tiles;
  const FwdShared<Acc> shared(tiles, Rule::kHasLam, memory);
  const Place place(p, tiles, kWarpSize);
  const ScanRow& row = place.row;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, columns = tiles.warps * kFwdColumns;
  const int dstate = static_cast<int>(p.dstate), channels = static_cast<int>(place.end - place.channel);
  const int64_t steps = row.end - row.begin;
  const bool is_live = lane < channels;
  const int64_t channel = place.channel + min(lane, channels - 1);
  const int64_t group_B = p.B.per_step ? place.channel / (p.dim / p.B.groups) : 0;
  const int64_t group_C = p.C.per_step ? place.channel / (p.dim / p.C.groups) : 0;
  const Acc weight = two.conjugate_pairs ? Acc(2) : Acc(1);
  const bool steps_are_neighbors = p.u.stride_dim != 1;

  ComplexRate<Acc> A[kFwdStates];
  Number rate[kFwdStates], h[kFwdStates], B[kFwdStates], C[kFwdStates];
  const auto state_of = [&](int pass, int s) { return (pass * tiles.warps + warp) * kFwdStates + s; };
  const auto number_at = [&](const void* data, int64_t offset, int64_t stride) {
    const Acc* const source = static_cast<const Acc*>(data) + offset;
    return Number(source[0], source[stride]);
  };
  const auto load_parameters = [&](int pass) {
#pragma unroll
    for (int s = 0; s < kFwdStates; ++s) {
      const int n = 2 * min(state_of(pass, s), dstate / 2 - 1);
      rate[s] = number_at(p.A.data, channel * p.A.stride_dim + n * p.A.stride_state, p.A.stride_state);
      A[s] = ComplexRate<Acc>(rate[s].re, rate[s].im);
      if (!p.B.per_step) {
        B[s] = number_at(p.B.data, channel * p.B.stride_channel + n * p.B.stride_state, p.B.stride_state);
      }
      if (!p.C.per_step) {
        const Number value = number_at(p.C.data, channel * p.C.stride_channel + n * p.C.stride_state, p.C.stride_state);
        const Acc own = state_of(pass, s) < dstate / 2 ? weight : Acc(0);
        C[s] = Number(own * value.re, -own * value.im);
      }
    }
  };
  // Stores the states of a pass as (row of states, dim, dstate).
  const auto store_states = [&](void* target, int64_t at, int pass) {
    if (!is_live) return;
    Acc* const states = static_cast<Acc*>(target) + (at * p.dim + channel) * p.dstate;
#pragma unroll
    for (int s = 0; s < kFwdStates; ++s) {
      const int n = state_of(pass, s);
      if (n >= dstate / 2) break;
      states[2 * n] = h[s].re;
      states[2 * n + 1] = h[s].im;
    }
  };
  const auto load_first_states = [&](int pass) {
#pragma unroll
    for (int s = 0; s < kFwdStates; ++s) {
      const int n = 2 * min(state_of(pass, s), dstate / 2 - 1);
      const StateView& first = p.initial_state;
      h[s] = Number(Acc(0));
      if (first.data == nullptr || row.initial < 0) continue;
      h[s] = number_at(first.data, row.initial * first.stride_batch + channel * first.stride_dim + n * first.stride_state,
                       first.stride_state);
    }
  };

  if (tiles.passes == 1) {
    load_parameters(0);
    load_first_states(0);
  }
  for (int64_t start = 0; start < steps; start += kSteps) {
    const int count = static_cast<int>(steps - start < kSteps ? steps - start : kSteps);
    const auto visit = [&](const auto& visitor) {
      for (int e = threadIdx.x; e < kSteps * kWarpSize; e += blockDim.x) {
        const int t = steps_are_neighbors ? e % kSteps : e / kWarpSize, c = steps_are_neighbors ? e / kSteps : e % kWarpSize;
        if (t < count && c < channels) visitor(t, c);
      }
    };
    visit([&](int t, int c) {
      const int64_t d = place.channel + c;
      Acc delta = load<Scalar>(p.delta, row, d, start + t);
      if (p.delta_bias.data != nullptr) delta += static_cast<const Acc*>(p.delta_bias.data)[d * p.delta_bias.stride];
      shared.delta[t * kFwdRow + c] = p.delta_softplus ? softplus(delta) : delta;
      shared.u[(t + 1) * kFwdRow + c] = load<Scalar>(p.u, row, d, start + t);
      if constexpr (Rule::kHasLam) {
        const Acc lam = load<Scalar>(two.lam, row, d, start + t);
        shared.lam[t * kFwdRow + c] = two.lam_sigmoid ? sigmoid(lam) : lam;
      }
    });
    if constexpr (Method::kUsesPreviousInput) {
      if (warp == 0) shared.u[lane] = sample_before<Scalar>(p, two, row, channel, start);
    }
    for (int pass = 0; pass < tiles.passes; ++pass) {
      const int first = pass * tiles.warps * kFwdStates;
      if (p.B.per_step) {
        stage_rows<Acc>(shared.B + columns, p.B, row, group_B, start, 0, count, columns, first, dstate,
                        [](Acc value, bool, bool) { return value; });
        if constexpr (Method::kUsesPreviousInput) {
          for (int i = threadIdx.x; i < columns; i += blockDim.x) {
            const int n = min(first + i / 2, dstate / 2 - 1);
            shared.B[i] = matrix_before<Acc>(p, two, row, group_B, start, 2 * n + i % 2);
          }
        }
      }
      if (p.C.per_step) {
        stage_rows<Acc>(shared.C, p.C, row, group_C, start, 0, count, columns, first, dstate,
                        [&](Acc value, bool is_imaginary, bool is_copy) {
                          return is_copy ? Acc(0) : is_imaginary ? -weight * value : weight * value;
                        });
      }
      Acc* const kept = shared.states + (pass * tiles.warps * kWarpSize + threadIdx.x) * kFwdColumns;
      if (tiles.passes > 1) {
        load_parameters(pass);
        if (start == 0) {
          load_first_states(pass);
        } else {
#pragma unroll
          for (int s = 0; s < kFwdStates; ++s) h[s] = Number(kept[2 * s], kept[2 * s + 1]);
        }
      }
      if (p.chunk_states != nullptr && start % p.chunk_length == 0 && p.saves_chunk_state(row, start / p.chunk_length)) {
        store_states(p.chunk_states, p.chunk_state(row, start / p.chunk_length), pass);
      }
      __syncthreads();

      const auto read_row = [&](Number(&numbers)[kFwdStates], const Acc* source) {
#pragma unroll
        for (int s = 0; s < kFwdStates; ++s) numbers[s] = Number(source[2 * s], source[2 * s + 1]);
      };
      const int column = warp * kFwdColumns;
      Number before[kFwdStates];
      if constexpr (Method::kUsesPreviousInput) {
        if (p.B.per_step) {
          read_row(before, shared.B + column);
        } else {
#pragma unroll
          for (int s = 0; s < kFwdStates; ++s) before[s] = B[s];
        }
      }
      for (int t = 0; t < count; ++t) {
        const int at = t * kFwdRow + lane;
        const Acc delta = shared.delta[at], input = delta * shared.u[at + kFwdRow];
        const auto method = rule.step(Number(Rule::kHasLam ? shared.lam[at] : Acc(0), Acc(0)));
        if (p.B.per_step) read_row(B, shared.B + (t + 1) * columns + column);
        if (p.C.per_step) read_row(C, shared.C + t * columns + column);
        Acc y = 0;
#pragma unroll
        for (int s = 0; s < kFwdStates; ++s) {
          const Number z = scaled(delta, rate[s]), basis = basis_of<Scalar>(method, delta, z, A[s]);
          Number inputs = scaled(input, B[s]);
          if constexpr (Method::kUsesPreviousInput) {
            const auto gain = method.gain(z, basis);
            inputs = multiply_add(gain.previous, scaled(delta * shared.u[at], before[s]), gain.current * inputs);
            before[s] = B[s];
          } else if constexpr (!Method::kUnitGain) {
            inputs = method.gain(z, basis).current * inputs;
          }
          h[s] = multiply_add(method.abar(z, basis), h[s], inputs);
          y = dot_add(h[s], C[s], y);
        }
        Acc& sum = shared.y[(warp * kSteps + t) * kFwdRow + lane];
        sum = pass == 0 ? y : sum + y;
      }
      if (tiles.passes > 1) {
#pragma unroll
        for (int s = 0; s < kFwdStates; ++s) {
          kept[2 * s] = h[s].re;
          kept[2 * s + 1] = h[s].im;
        }
        if (start + kSteps >= steps && row.last >= 0) store_states(p.last_state, row.last, pass);
      }
      __syncthreads();
    }
    visit([&](int t, int c) {
      const int64_t d = place.channel + c;
      Acc y = 0;
      for (int w = 0; w < tiles.warps; ++w) y += shared.y[(w * kSteps + t) * kFwdRow + c];
      if (p.D.data != nullptr) {
        y = Math<Acc>::fma(static_cast<const Acc*>(p.D.data)[d * p.D.stride], shared.u[(t + 1) * kFwdRow + c], y);
      }
      if (p.z.data != nullptr) y *= silu(load<Scalar>(p.z, row, d, start + t));
      store<Scalar>(p.out, row, d, start + t, y);
    });
    __syncthreads();
  }
  for (int pass = 0; pass < tiles.passes; ++pass) {
    if (tiles.passes > 1) {
      if (steps > 0) break;
      load_first_states(pass);
    }
    const int64_t boundary = (steps + p.chunk_length - 1) / p.chunk_length;
    if (tiles.passes == 1 && p.chunk_states != nullptr && p.saves_chunk_state(row, boundary)) {
      store_states(p.chunk_states, p.chunk_state(row, boundary), pass);
    }
    if (row.last >= 0) store_states(p.last_state, row.last, pass);
  }
}

// `exponential`: of the rules whose gains are numbers or e^z. The others need more registers, and so fewer blocks are resident.
template <typename Scalar, bool exponential>
__global__ void __launch_bounds__(kMostFwdWarps<cuda::AccumulateType<Scalar>>* kWarpSize,
                                  exponential && sizeof(Scalar) < 8 ? 2 : 1)
    complex_scan_fwd_kernel(const __grid_constant__ FwdPlan plan) {
  visit_rule<exponential>(plan.p.discretization, [&](auto rule) { scan_tiles<Scalar>(plan, rule); });
}

}  // namespace ssm_kernels::selective_scan::complex_scan

namespace ssm_kernels::selective_scan {

template <typename Scalar>
cudaError_t launch_complex_fwd(const SelectiveScanFwdParams& params, const TwoSampleParams& two, cudaStream_t stream) {
  using namespace complex_scan;
  const FwdPlan plan{params, two, Tiles(params, kWarpSize, kFwdStates, kMostFwdWarps<cuda::AccumulateType<Scalar>>)};
  const int64_t blocks = params.rows * plan.tiles.tiles;
  if (blocks == 0) return cudaSuccess;
  const bool has_lam = params.discretization == Discretization::kExpTrapezoidal;
  const int bytes = FwdShared<cuda::AccumulateType<Scalar>>(plan.tiles, has_lam, nullptr).bytes;
  const auto kernel = has_exponential_gain(params.discretization) ? complex_scan_fwd_kernel<Scalar, true>
                                                                  : complex_scan_fwd_kernel<Scalar, false>;
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, bytes); error != cudaSuccess) return error;
  return cuda::launch(kernel, blocks, plan.tiles.warps * kWarpSize, bytes, stream, false, plan);
}

}  // namespace ssm_kernels::selective_scan
