// Backward of the selective scan of up to 16 complex states, with B and C per step, by the rules zoh and exp_trapezoidal, in
// types of at most 32 bits. complex_bwd.cuh has the kernel for everything else; complex_scan.cuh the recurrence.
//
// With a_t = e^(delta_t A), and the state before step t and the sample before it as one number,
//
//   H_t = h_{t-1} + delta_t (1 - lam_t) v_{t-1}        h_t = a_t H_t + delta_t lam_t v_t        v_t = B_t u_t
//
// (zoh: lam = 1, H_t = h_{t-1}), the adjoint g_t and the gradients need no derivative of a rule:
//
//   g_t = w conj(C_t) dy_t + conj(a_{t+1}) g_{t+1}      b_t = conj(a_t) g_t         q_t = conj(H_t) b_t
//   grad_A       = sum_t delta_t q_t
//   grad_delta_t = sum_n Re(conj(A) q_t + lam_t conj(v_t) g_t + (1 - lam_t) conj(v_{t-1}) b_t)
//   grad_lam_t   = delta_t sum_n Re(conj(v_t) g_t - conj(v_{t-1}) b_t)
//   grad v_t     = s_t = delta_t lam_t g_t + delta_{t+1} (1 - lam_{t+1}) b_{t+1}
//   grad_B_t     = sum_d u_t s_t           grad_C_t = w sum_d dy_t conj(h_t)         grad_u_t = sum_n Re(conj(B_t) s_t) + D
//   dy_t
//
// A block has 64 channels of one row, two a lane, and a warp two of the states of all channels. Chunks are visited from last to
// first. All threads stage the chunk in shared memory: delta, the input and dy in rows of steps of one channel, B and C in rows
// of states of one step, which all lanes of a warp read at one address. A first pass over the chunk keeps the thread's states
// before each eight steps in shared memory. Then, for eight steps at a time from the last, a thread computes the decays and
// states of one of its four pairs of channel and state in registers and runs the adjoint through them: a decay is computed once
// in each pass. The lanes of a warp add the gradients of B_t and C_t over the channels by a butterfly that halves the values of
// a lane, and one lane stores each sum. Sums over the states are added in the thread, then over the warps in shared memory, in
// the order of the warps, and take the place of the steps' inputs. At the end of a chunk all threads write its gradients.
//
// Adjoints and the gradient of A stay in registers for the whole row. Steps past the end have a step size, an input and a dy of
// zero; states that do not exist are skipped, and channels that do not exist have zeros and the rates of the last channel.
#pragma once

#include "selective_scan/cuda/complex_chunk_block.cuh"

namespace ssm_kernels::selective_scan::complex_scan {

// The rate of a state, and e^(delta A). Types of 16 bits take the instructions for the sine and the cosine.
template <typename Scalar>
struct ChunkRate {
  Complex<float> value;
  std::conditional_t<sizeof(Scalar) == 2, float, ComplexRate<float>> exponent;

  ChunkRate() = default;
  __device__ __forceinline__ explicit ChunkRate(const Complex<float>& A) : value(A) {
    if constexpr (sizeof(Scalar) == 2) {
      exponent = A.re * static_cast<float>(kLog2E);
    } else {
      exponent = ComplexRate<float>(A.re, A.im);
    }
  }
  __device__ __forceinline__ Complex<float> decay(float delta) const {
    if constexpr (sizeof(Scalar) == 2) {
      const float size = Math<float>::exp2(delta * exponent), angle = delta * value.im;
      return {size * __cosf(angle), size * __sinf(angle)};
    } else {
      return exp_of_step(delta, exponent);
    }
  }
};

template <typename Scalar, typename Rule>
struct ChunkBackward : ChunkBlock<Scalar, Rule> {
  using Block = ChunkBlock<Scalar, Rule>;
  using Block::Block, Block::channels, Block::chunk_length, Block::kG, Block::kS, Block::kTwo, Block::lane, Block::p,
      Block::place, Block::plan, Block::shared, Block::states, Block::two, Block::warp, Block::warps, Block::weight;
  using Number = Complex<float>;

  ChunkRate<Scalar> A[2][kS];
  // `of_previous`: the gradient of the sample before the step.
  Number g[2][kS], grad_A[2][kS], of_previous[2][kS];
  // Where the lane stores its sum of the gradients of B and C, at the row's first step. Null: nowhere.
  float* matrix_sums;
  float matrix_scale;

  __device__ __forceinline__ int state(int s) const { return warp * kS + s; }
  __device__ __forceinline__ bool exists(int s) const { return state(s) < states; }
  __device__ __forceinline__ int own_channel(int c) const { return lane + c * kWarpSize; }
  __device__ __forceinline__ int64_t channel_of(int c) const { return place.channel + min(own_channel(c), channels - 1); }
  __device__ __forceinline__ bool is_live(int c) const { return own_channel(c) < channels; }
  __device__ __forceinline__ static Number number_at(const void* data, int64_t offset, int64_t stride) {
    const float* const source = static_cast<const float*>(data) + offset;
    return Number(source[0], source[stride]);
  }
  __device__ __forceinline__ Number number_of(const StateView& view, int64_t batch, int c, int s) const {
    return number_at(view.data, batch * view.stride_batch + channel_of(c) * view.stride_dim + 2 * state(s) * view.stride_state,
                     view.stride_state);
  }
  // Visits 0 and 1 as constants of the type: an index that becomes one by unrolling would keep the arrays in local memory.
  template <typename Visitor>
  __device__ __forceinline__ static void visit_both(const Visitor& visitor) {
    visitor(std::integral_constant<int, 0>());
    visitor(std::integral_constant<int, 1>());
  }
  static_assert(kS == 2, "a thread has two states of two channels");
  template <typename Visitor>
  __device__ __forceinline__ static void visit_pairs(const Visitor& visitor) {
    visit_both([&](auto s) { visit_both([&](auto c) { visitor(c, s); }); });
  }

  __device__ __forceinline__ void load_parameters() {
    visit_pairs([&](auto c, auto s) {
      Number rate(0.0f);
      g[c][s] = grad_A[c][s] = of_previous[c][s] = Number(0.0f);
      if (exists(s)) {
        rate = number_of(p.A, 0, c, s);
        // A step of zero keeps the state also at a rate of minus infinity.
        if (rate.re < -kLargestRate<float>) rate.re = -kLargestRate<float>;
        if (p.grad_last_state.data != nullptr && place.row.last >= 0 && is_live(c)) {
          g[c][s] = number_of(p.grad_last_state, place.row.last, c, s);
        }
      }
      A[c][s] = ChunkRate<Scalar>(rate);
    });
  }
  __device__ __forceinline__ void load_state_before(int64_t chunk, Number (&h)[2][kS]) const {
    visit_pairs([&](auto c, auto s) {
      h[c][s] = Number(0.0f);
      if (!is_live(c) || !exists(s)) return;
      if (p.saves_chunk_state(place.row, chunk)) {
        h[c][s] =
            number_at(p.chunk_states, (p.chunk_state(place.row, chunk) * p.dim + channel_of(c)) * p.dstate + 2 * state(s), 1);
      } else if (p.initial_state.data != nullptr && place.row.initial >= 0) {
        h[c][s] = number_of(p.initial_state, place.row.initial, c, s);
      }
    });
  }
  // Stores the thread's numbers in a (rows, dim, dstate) tensor.
  __device__ __forceinline__ void store_numbers(void* data, int64_t row, const Number (&values)[2][kS]) const {
    if (data == nullptr) return;
    visit_pairs([&](auto c, auto s) {
      if (!is_live(c) || !exists(s)) return;
      float* const target = static_cast<float*>(data) + (row * p.dim + channel_of(c)) * p.dstate + 2 * state(s);
      target[0] = values[c][s].re;
      target[1] = values[c][s].im;
    });
  }

  // The steps of a group of one of the thread's channels.
  struct Steps {
    float values[kG];

    __device__ __forceinline__ Steps(const float* source) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 v = reinterpret_cast<const float4*>(source)[half];
        values[4 * half] = v.x, values[4 * half + 1] = v.y, values[4 * half + 2] = v.z, values[4 * half + 3] = v.w;
      }
    }
    __device__ __forceinline__ float operator[](int t) const { return values[t]; }
  };
  // The inputs of one of the thread's channels in a group. `input`: delta u, or u for two samples, whose sample before the
  // group is `before`.
  struct Inputs {
    Steps delta, input, lam;
    float before;

    __device__ __forceinline__ Inputs(const ChunkShared& shared, int channel, int t)
        : delta(shared.delta + channel * shared.pitch + t),
          input(shared.u + channel * shared.pitch_u + t),
          lam(kTwo ? shared.lam + channel * shared.pitch + t : shared.delta),
          before(kTwo ? shared.u[channel * shared.pitch_u + t - 1] : 0.0f) {}
    __device__ __forceinline__ float u_before(int t) const { return t > 0 ? input[t > 0 ? t - 1 : 0] : before; }
    // The factors of B_t and of B_{t-1} in a step.
    __device__ __forceinline__ float of_B(int t) const { return kTwo ? delta[t] * lam[t] * input[t] : input[t]; }
    __device__ __forceinline__ float of_B_before(int t) const { return delta[t] * (1.0f - lam[t]) * u_before(t); }
  };
  __device__ __forceinline__ Number matrix(const float* array, int t, int s) const {
    const float2 v = *reinterpret_cast<const float2*>(array + t * ChunkShared::kPitchMatrix + 2 * state(s));
    return Number(v.x, v.y);
  }
  // H of a step.
  __device__ __forceinline__ Number with_sample_before(const Inputs& in, int first, int t, int s, const Number& h) const {
    if constexpr (!kTwo) return h;
    const Number B = matrix(shared.B, first + t - 1, s);
    const float factor = in.of_B_before(t);
    return {Math<float>::fma(factor, B.re, h.re), Math<float>::fma(factor, B.im, h.im)};
  }
  // The state after a step.
  __device__ __forceinline__ Number advance(const Inputs& in, int first, int t, int s, const Number& decay,
                                            const Number& H) const {
    const Number B = matrix(shared.B, first + t, s);
    return multiply_add(decay, H, scaled(in.of_B(t), B));
  }

  __device__ __forceinline__ float4* kept_states(int group, int c) const {
    return shared.states + (group * 2 + c) * blockDim.x + threadIdx.x;
  }
  // Keeps the states before each group.
  __device__ __forceinline__ void scan_forward(int groups, Number (&h)[2][kS]) const {
#pragma unroll 1
    for (int group = 0;; ++group) {
      visit_both([&](auto c) { *kept_states(group, c) = make_float4(h[c][0].re, h[c][0].im, h[c][1].re, h[c][1].im); });
      if (group + 1 >= groups) break;
      const int first = group * kG;
      visit_both([&](auto c) {
        const Inputs in(shared, own_channel(c), first);
        visit_both([&](auto s) {
#pragma unroll
          for (int t = 0; t < kG; ++t) {
            h[c][s] = advance(in, first, t, s, A[c][s].decay(in.delta[t]), with_sample_before(in, first, t, s, h[c][s]));
          }
        });
      });
    }
  }

  // Runs the adjoint of one state of one channel through a group, adds to the sums over states and over channels.
  template <int c, int s>
  __device__ __forceinline__ void scan_backward(const Inputs& in, const Steps& dy, int first, bool is_first_step,
                                                float (&sums)[kNumChunkSums][kG], float (&values)[4 * kG]) {
    const float4 kept = *kept_states(first / kG, c);
    const Number before = s == 0 ? Number(kept.x, kept.y) : Number(kept.z, kept.w);
    Number decay[kG], h[kG];
#pragma unroll
    for (int t = 0; t < kG; ++t) {
      decay[t] = A[c][s].decay(in.delta[t]);
      h[t] = advance(in, first, t, s, decay[t], with_sample_before(in, first, t, s, t > 0 ? h[t > 0 ? t - 1 : 0] : before));
    }
    Number adjoint = g[c][s], of_A = grad_A[c][s];
#pragma unroll
    for (int t = kG - 1; t >= 0; --t) {
      const Number B = matrix(shared.B, first + t, s), C = matrix(shared.C, first + t, s);
      sums[kChunkOutput][t] = dot_add(h[t], C, sums[kChunkOutput][t]);
      adjoint = {Math<float>::fma(dy[t], C.re, adjoint.re), Math<float>::fma(dy[t], C.im, adjoint.im)};
      const Number next = conjugate_times(decay[t], adjoint);
      const Number q = conjugate_times(with_sample_before(in, first, t, s, t > 0 ? h[t > 0 ? t - 1 : 0] : before), next);
      of_A = {Math<float>::fma(in.delta[t], q.re, of_A.re), Math<float>::fma(in.delta[t], q.im, of_A.im)};
      sums[kChunkStep][t] = dot_add(A[c][s].value, q, sums[kChunkStep][t]);
      Number of_B;
      if constexpr (kTwo) {
        const float lam = in.lam[t], u = in.input[t], own = in.delta[t] * lam, rest = in.delta[t] * (1.0f - lam);
        const float of_own = u * dot_add(B, adjoint, 0.0f);
        const float of_rest = in.u_before(t) * dot_add(matrix(shared.B, first + t - 1, s), next, 0.0f);
        sums[kChunkStep][t] += lam * of_own + (1.0f - lam) * of_rest;
        sums[kChunkLam][t] += of_own - of_rest;
        Number of_sample = {Math<float>::fma(own, adjoint.re, of_previous[c][s].re),
                            Math<float>::fma(own, adjoint.im, of_previous[c][s].im)};
        of_previous[c][s] = scaled(rest, next);
        if (t == 0 && is_first_step && this->repeats) {
          of_sample = of_sample + of_previous[c][s];
          of_previous[c][s] = Number(0.0f);
        }
        sums[kChunkInput][t] = dot_add(B, of_sample, sums[kChunkInput][t]);
        of_B = scaled(u, of_sample);
      } else {
        sums[kChunkInput][t] = dot_add(B, adjoint, sums[kChunkInput][t]);
        of_B = scaled(in.input[t], adjoint);
      }
      const Number of_C = scaled(dy[t], h[t]);
      values[t] = c == 0 ? of_B.re : values[t] + of_B.re;
      values[kG + t] = c == 0 ? of_B.im : values[kG + t] + of_B.im;
      values[2 * kG + t] = c == 0 ? of_C.re : values[2 * kG + t] + of_C.re;
      values[3 * kG + t] = c == 0 ? of_C.im : values[3 * kG + t] + of_C.im;
      adjoint = next;
    }
    g[c][s] = adjoint;
    grad_A[c][s] = of_A;
  }

  // Adds the lanes' gradients of B and C of a state and stores those of `count` steps from `step` on. Each lane adds four of
  // the values of eight lanes, which it reads in shared memory, and exchanges the sums with three other lanes.
  __device__ __forceinline__ void store_matrix_sums(const float (&values)[4 * kG], int64_t step, int count, int s) const {
    float* const rows = shared.parts + warp * shared.sums * kBwdChannels * kG;  // the warp's sums over states are not there yet
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kG; ++i) {
      *reinterpret_cast<float4*>(rows + lane * kMatrixRow + 4 * i) =
          make_float4(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
    }
    __syncwarp();
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < kG; ++i) {
      const float4 v = *reinterpret_cast<const float4*>(rows + (lane / kG * kG + i) * kMatrixRow + lane % kG * 4);
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    const bool upper = lane & 8, odd = lane & 16;
    const float x = (upper ? sum.z : sum.x) + __shfl_xor_sync(kAllLanes, upper ? sum.x : sum.z, 8);
    const float y = (upper ? sum.w : sum.y) + __shfl_xor_sync(kAllLanes, upper ? sum.y : sum.w, 8);
    const float total = (odd ? y : x) + __shfl_xor_sync(kAllLanes, odd ? x : y, 16);
    if (matrix_sums == nullptr || matrix_step() >= count) return;
    matrix_sums[step + s * (2 * plan.partial.state_stride)] = total * matrix_scale;
  }
  // The lane's sum of the gradients of B and C: two numbers of B and two of C, of each step of a group.
  __device__ __forceinline__ int matrix_sum() const { return lane % kG * 4 + (lane & 8 ? 2 : 0) + (lane & 16 ? 1 : 0); }
  __device__ __forceinline__ int matrix_step() const { return matrix_sum() % kG; }
  __device__ __forceinline__ void find_matrix_sums() {
    const int kind = matrix_sum() / kG;
    const bool is_C = kind >= 2;
    matrix_sums = nullptr;
    matrix_scale = is_C ? (kind == 3 ? -weight : weight) : 1.0f;
    if (!(is_C ? p.grad_C.per_step : p.grad_B.per_step)) return;
    matrix_sums = static_cast<float*>(is_C ? plan.partial.grad_C : plan.partial.grad_B) +
                  plan.partial.offset(place.row.batch, place.tile, 2 * state(0) + kind % 2, 0) + place.row.begin +
                  matrix_step();
  }
  static constexpr int kMatrixRow = 4 * kG + 4;  // an odd number of vectors: eight neighboring lanes are in different banks
  static_assert(kWarpSize * kMatrixRow <= kChunkLam * kBwdChannels * kG, "the lanes' values fit the warp's sums over states");

  __device__ __forceinline__ void scan_group(int64_t begin, int first, int length) {
    const bool needs_matrices = p.grad_B.per_step || p.grad_C.per_step;
    float sums[2][kNumChunkSums][kG];
    visit_both([&](auto c) {
#pragma unroll
      for (int i = 0; i < kNumChunkSums; ++i) {
#pragma unroll
        for (int t = 0; t < kG; ++t) sums[c][i][t] = 0;
      }
    });
    visit_both([&](auto s) {
      if (!exists(s)) return;
      float values[4 * kG];
      visit_both([&](auto c) {
        const Inputs in(shared, own_channel(c), first);
        const Steps dy(shared.dy + own_channel(c) * shared.pitch + first);
        scan_backward<c(), s()>(in, dy, first, begin + first == 0, sums[c], values);
      });
      if (needs_matrices) store_matrix_sums(values, begin + first, length - first, s);
    });
    __syncwarp();
    visit_both([&](auto c) {
#pragma unroll
      for (int i = 0; i < (kTwo ? kNumChunkSums : kChunkLam); ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* const v = sums[c][i] + 4 * half;
          *reinterpret_cast<float4*>(shared.part(warp, i, own_channel(c), half)) = make_float4(v[0], v[1], v[2], v[3]);
        }
      }
    });
    __syncthreads();
    constexpr int kSums = kTwo ? kNumChunkSums : kChunkLam;
    for (int e = threadIdx.x; e < kSums * kBwdChannels * 2; e += blockDim.x) {
      const int half = e % 2, c = e / 2 % kBwdChannels, i = e / (2 * kBwdChannels);
      const float4* const source = reinterpret_cast<const float4*>(shared.part(0, i, c, half));
      float4 total = source[0];
#pragma unroll
      for (int w = 1; w < kChunkWarps; ++w) {
        if (w >= warps) break;
        const float4 v = source[w * (kSums * kBwdChannels * kG / 4)];
        total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
      }
      *reinterpret_cast<float4*>(this->sum_of(i, c, first + 4 * half)) = total;
    }
    __syncthreads();
  }
  __device__ __forceinline__ void run() {
    load_parameters();
    find_matrix_sums();
    for (int i = threadIdx.x; i < warps * 2 * kBwdChannels; i += blockDim.x) shared.channel_sums[i] = 0;
    for (int c = threadIdx.x; c < kBwdChannels; c += blockDim.x) {
      const auto of_channel = [&](const ChannelView& view) {
        return view.data == nullptr || c >= channels ? 0.0f
                                                     : static_cast<const float*>(view.data)[(place.channel + c) * view.stride];
      };
      shared.bias[c] = of_channel(p.delta_bias);
      shared.skip[c] = of_channel(p.D);
    }
    __syncthreads();
    const int64_t steps = place.row.end - place.row.begin, chunks = (steps + chunk_length - 1) / chunk_length;
#pragma unroll 1
    for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
      const int64_t begin = chunk * chunk_length;
      const int length = static_cast<int>(min(steps - begin, static_cast<int64_t>(chunk_length)));
      const int groups = (length + kG - 1) / kG;
      this->stage_sequences(begin, length);
      this->stage_matrices(begin, length);
      Number h[2][kS];
      load_state_before(chunk, h);
      __syncthreads();
      if (chunk > 0) this->prefetch(begin - chunk_length);
      scan_forward(groups, h);
#pragma unroll 1
      for (int group = groups - 1; group >= 0; --group) scan_group(begin, group * kG, length);
      this->write(begin, length);
    }
    __syncthreads();
    store_numbers(plan.partial.grad_A, place.row_index, grad_A);
    if (place.row.initial >= 0) {
      store_numbers(p.grad_initial_state, place.row.initial, g);
      if constexpr (kTwo) store_numbers(two.grad_previous, place.row.initial, of_previous);
    }
    for (int c = threadIdx.x; c < channels; c += blockDim.x) {
      const int64_t at = place.row_index * p.dim + place.channel + c;
      float of_D = 0, of_bias = 0;
      for (int w = 0; w < warps; ++w) {
        of_D += shared.channel_sums[w * 2 * kBwdChannels + c];
        of_bias += shared.channel_sums[(w * 2 + 1) * kBwdChannels + c];
      }
      if (plan.partial.grad_D != nullptr) static_cast<float*>(plan.partial.grad_D)[at] = of_D;
      if (plan.partial.grad_delta_bias != nullptr) static_cast<float*>(plan.partial.grad_delta_bias)[at] = of_bias;
    }
  }
};

template <typename Scalar, typename Rule>
__global__ void __launch_bounds__(kChunkWarps* kWarpSize, 1) complex_chunk_bwd_kernel(const __grid_constant__ BwdPlan plan) {
  extern __shared__ __align__(16) unsigned char memory[];
  ChunkBackward<Scalar, Rule>(plan, memory).run();
}

SSM_HOST_DEVICE int chunk_bwd_warps(const SelectiveScanParams& p) {
  return static_cast<int>((p.dstate / 2 + kChunkWarpStates - 1) / kChunkWarpStates);
}
inline int64_t chunk_bwd_bytes(const SelectiveScanParams& p) {
  const bool has_lam = p.discretization == Discretization::kExpTrapezoidal;
  return ChunkShared(chunk_bwd_warps(p), static_cast<int>(p.chunk_length), has_lam, nullptr).bytes;
}
// Whether the kernel takes a call, whose partial sums of a state have to be one range, on a device whose blocks may have
// `shared_bytes`.
template <typename Scalar>
bool takes_chunk_bwd(const SelectiveScanBwdParams& p, const PartialSums& partial, int64_t shared_bytes) {
  return sizeof(Scalar) <= 4 && has_exponential_gain(p.discretization) && p.B.per_step && p.C.per_step &&
         p.dstate <= 2 * kMostChunkStates && partial.chunk_stride == kPartialSumSteps && chunk_bwd_bytes(p) <= shared_bytes;
}

template <typename Scalar>
cudaError_t launch_chunk_bwd(const BwdPlan& plan, int64_t blocks, cudaStream_t stream) {
  const auto kernel = plan.p.discretization == Discretization::kZoh ? complex_chunk_bwd_kernel<Scalar, OfOneSample<Zoh>>
                                                                    : complex_chunk_bwd_kernel<Scalar, ExpTrapezoidalRule>;
  const int bytes = static_cast<int>(chunk_bwd_bytes(plan.p));
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, bytes); error != cudaSuccess) return error;
  return cuda::launch(kernel, blocks, chunk_bwd_warps(plan.p) * kWarpSize, bytes, stream, false, plan);
}

}  // namespace ssm_kernels::selective_scan::complex_scan
