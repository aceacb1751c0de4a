// Mamba-3's phases on CUDA. A step of a head adds half a turn times rate times size to each of its phases, with the rate
// tanh(angles) and the size dt:
//
//   theta_t = theta_{t-1} + tanh(angles_t) dt_t / 2      in turns
//
// and phases begin anew, with zero or a sequence's initial phases, before steps that `resets` names. Memory has the phases
// before the first step of each chunk of kPhaseChunk steps, and whoever needs those of a step sums from there (RunningPhase).
//
// 1. phase_sums_kernel: a block has a chunk, and the sizes of kSumHeads heads at a time in shared memory; a thread has a phase
//    of one head at a time. It writes the chunk's sum in float64.
// 2. phase_scan_kernel: a block has 32 phases of a row of the batch, a warp a run of its chunks, a lane one phase. The warps
//    sum their runs, then each begins with the sum of those before it and writes the phases at its chunks' first steps.
//
// Sums are float64 and reduced to half a turn around zero after each chunk, so that their error does not grow with the number
// of turns. The adjoint runs the second kernel backward, over the gradients of the phases, without the reduction.
#pragma once

#include "cuda/constants.h"
#include "cuda/launch.cuh"
#include "cuda/vector_io.cuh"
#include "mamba3/cuda/rotation.h"

namespace ssm_kernels::mamba3 {

constexpr int kPhaseThreads = 256, kSumHeads = 32, kScanWarps = 16, kScanThreads = kScanWarps * cuda::kWarpSize;
constexpr double kTurn = 6.283185307179586;

__device__ __forceinline__ float load_gate(const GateView& view, int64_t offset) {
  switch (view.kind) {
    case ScalarKind::kHalf:
      return cuda::to_accumulate(static_cast<const __half*>(view.data)[offset]);
    case ScalarKind::kBFloat16:
      return cuda::to_accumulate(static_cast<const __nv_bfloat16*>(view.data)[offset]);
    default:
      return static_cast<const float*>(view.data)[offset];
  }
}

__device__ __forceinline__ void store_gate(const GateView& view, int64_t offset, float value) {
  switch (view.kind) {
    case ScalarKind::kHalf:
      static_cast<__half*>(view.data)[offset] = __float2half_rn(value);
      return;
    case ScalarKind::kBFloat16:
      static_cast<__nv_bfloat16*>(view.data)[offset] = __float2bfloat16_rn(value);
      return;
    default:
      static_cast<float*>(view.data)[offset] = value;
  }
}

__device__ __forceinline__ int64_t gate_offset(const GateView& view, int64_t row, int64_t step, int64_t head,
                                               int64_t angle = 0) {
  return row * view.stride_batch + step * view.stride_step + head * view.stride_head + angle * view.stride_angle;
}

// The nearest integer, for |x| < 2^22; a larger x has no more than one fractional bit and loses that.
__device__ __forceinline__ float nearest(float x) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23
  return fabsf(x) < 4194304.0f ? __fadd_rn(__fadd_rn(x, kMagic), -kMagic) : rintf(x);
}

// A phase in turns as the sum of two floats, so that the roundings of a chunk's steps do not add up.
struct RunningPhase {
  float high = 0, low = 0;

  __device__ __forceinline__ void begin(float turns) {
    high = turns;
    low = 0;
  }
  __device__ __forceinline__ void add(float turns) {
    const float sum = __fadd_rn(high, turns), rounded = __fsub_rn(sum, high);
    low += __fadd_rn(__fsub_rn(high, __fsub_rn(sum, rounded)), __fsub_rn(turns, rounded));
    high = __fsub_rn(sum, nearest(sum));
  }
  __device__ __forceinline__ float turns() const { return high + low; }
};

// The rotation by a phase from -1/2 to 1/2 turns. Rows of 16 bits take the fast functions, whose error of 4e-7 is far below
// their rounding.
template <typename Scalar>
__device__ __forceinline__ void rotation_of(float turns, float& cosine, float& sine) {
  if constexpr (sizeof(Scalar) == 2) {
    __sincosf(static_cast<float>(kTurn) * turns, &sine, &cosine);
  } else {
    sincospif(2 * turns, &sine, &cosine);
  }
}

// A phase of a sequence before its first step, or zero at a reset within one.
__device__ __forceinline__ double initial_turns(const PhaseParams& p, int64_t sequence, int64_t phase) {
  if (p.initial == nullptr || sequence < 0) return 0;
  const double turns = double(p.initial[sequence * p.heads * p.angles + phase]) / kTurn;
  return turns - rint(turns);
}
__device__ __forceinline__ float rounded_initial_turns(const PhaseParams& p, int64_t sequence, int64_t phase) {
  return p.initial_turns != nullptr && sequence >= 0 ? p.initial_turns[sequence * p.heads * p.angles + phase] : 0.0f;
}

// The entry of `resets` at a step.
__device__ __forceinline__ int reset_at(const PhaseParams& p, int64_t row, int64_t step) {
  return p.resets == nullptr ? -1 : p.resets[row * p.seqlen + step];
}
__device__ __forceinline__ bool begins_anew(int reset) { return reset != -1; }
// The sequence that ends with a step, or -1.
__device__ __forceinline__ int sequence_at_end(const PhaseParams& p, int64_t row, int64_t step) {
  if (p.ends != nullptr) return p.ends[step];
  return step == p.seqlen - 1 ? static_cast<int>(row) : -1;
}

template <bool has_angles_of_heads>
__global__ void __launch_bounds__(kPhaseThreads) phase_sums_kernel(const __grid_constant__ PhaseParams p) {
  extern __shared__ double rates_of_chunk[];  // [kPhaseChunk][angles], unless heads have their own
  const int64_t row = blockIdx.x / p.chunks, chunk = blockIdx.x % p.chunks, first = chunk * kPhaseChunk;
  const int steps = static_cast<int>(min(int64_t(kPhaseChunk), p.seqlen - first)), angles = static_cast<int>(p.angles);
  if constexpr (!has_angles_of_heads) {
    for (int i = threadIdx.x; i < steps * angles; i += kPhaseThreads) {
      const float angle = load_gate(p.rates, gate_offset(p.rates, row, first + i / angles, 0, i % angles));
      rates_of_chunk[i] = tanh(double(angle));
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    bool has_reset = false;
    for (int s = 0; s < steps; ++s) has_reset |= begins_anew(reset_at(p, row, first + s));
    p.has_reset[blockIdx.x] = has_reset;
  }
  if (p.initial_turns != nullptr) {
    for (int64_t i = int64_t(blockIdx.x) * kPhaseThreads + threadIdx.x; i < p.sequences * p.heads * p.angles;
         i += int64_t(gridDim.x) * kPhaseThreads) {
      p.initial_turns[i] = static_cast<float>(initial_turns(p, i / (p.heads * p.angles), i % (p.heads * p.angles)));
    }
  }
  constexpr int kUnrolled = has_angles_of_heads ? 2 : 4;
  __shared__ float half_sizes[kPhaseChunk][kSumHeads];
  __shared__ int resets[kPhaseChunk];
  for (int s = threadIdx.x; s < steps; s += kPhaseThreads) resets[s] = reset_at(p, row, first + s);
  for (int64_t first_head = 0; first_head < p.heads; first_head += kSumHeads) {
    const int heads = static_cast<int>(min(int64_t(kSumHeads), p.heads - first_head));
    __syncthreads();
    for (int i = threadIdx.x; i < steps * kSumHeads; i += kPhaseThreads) {
      const int s = i / kSumHeads, head = i % kSumHeads;
      if (head < heads)
        half_sizes[s][head] = 0.5f * load_gate(p.sizes, gate_offset(p.sizes, row, first + s, first_head + head));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < heads * angles; i += kPhaseThreads) {
      const int head = i / angles, angle = i % angles;
      const int64_t phase = first_head * angles + i;
      double sum = 0;
#pragma unroll kUnrolled
      for (int s = 0; s < steps; ++s) {
        if (begins_anew(resets[s])) sum = initial_turns(p, resets[s], phase);
        double rate;
        if constexpr (has_angles_of_heads) {
          rate = tanh(double(load_gate(p.rates, gate_offset(p.rates, row, first + s, first_head + head, angle))));
          p.rates_of_heads[(row * p.seqlen + first + s) * p.heads * p.angles + phase] = static_cast<float>(rate);
        } else {
          rate = rates_of_chunk[s * angles + angle];
        }
        sum = fma(rate, double(half_sizes[s][head]), sum);
      }
      p.sums[blockIdx.x * p.heads * p.angles + phase] = sum - rint(sum);
    }
  }
}

// Sums over the chunks before each one, or in reverse over those after it, that begin anew at chunks with a reset. `Sums` has
//
//   kReverse                            the direction
//   double first(row, phase)            what the first chunk begins with
//   double chunk(row, chunk, phase)     what a chunk adds, or if has_reset the sum after it
//   double reduce(sum)                  the sum as it is kept
//   void set(row, chunk, phase, sum)    takes the sum before each chunk
//   void set_last(row, phase, sum)      takes the sum after the last one
template <typename Sums>
__global__ void __launch_bounds__(kScanThreads)
    phase_scan_kernel(const __grid_constant__ Sums sums, int64_t chunks, int64_t phases, const uint8_t* has_reset) {
  __shared__ double run_sums[kScanWarps][cuda::kWarpSize];
  __shared__ bool run_resets[kScanWarps];
  const int lane = threadIdx.x % cuda::kWarpSize, warp = threadIdx.x / cuda::kWarpSize;
  const int64_t blocks = (phases + cuda::kWarpSize - 1) / cuda::kWarpSize, row = blockIdx.x / blocks,
                phase = blockIdx.x % blocks * cuda::kWarpSize + lane;
  const bool is_there = phase < phases;
  const int64_t length = (chunks + kScanWarps - 1) / kScanWarps, begin = min(warp * length, chunks),
                end = min(begin + length, chunks);
  const auto chunk_at = [&](int64_t i) { return Sums::kReverse ? chunks - 1 - i : i; };
  const auto after = [&](int64_t chunk, double sum) {
    const double added = sums.chunk(row, chunk, phase);
    return sums.reduce(has_reset[row * chunks + chunk] != 0 ? added : sum + added);
  };
  double sum = 0;
  bool has_any_reset = false;
  if (is_there) {
#pragma unroll 4
    for (int64_t i = begin; i < end; ++i) {
      sum = after(chunk_at(i), sum);
      has_any_reset |= has_reset[row * chunks + chunk_at(i)] != 0;
    }
  }
  run_sums[warp][lane] = sum;
  if (lane == 0) run_resets[warp] = has_any_reset;
  __syncthreads();
  if (!is_there) return;
  sum = sums.first(row, phase);
  for (int other = 0; other < warp; ++other) {
    sum = sums.reduce(run_resets[other] ? run_sums[other][lane] : sum + run_sums[other][lane]);
  }
#pragma unroll 4
  for (int64_t i = begin; i < end; ++i) {
    sums.set(row, chunk_at(i), phase, sum);
    sum = after(chunk_at(i), sum);
  }
  if (warp == kScanWarps - 1) sums.set_last(row, phase, sum);
}

template <typename Sums>
cudaError_t launch_phase_scan(const Sums& sums, const PhaseParams& p, cudaStream_t stream) {
  const int64_t phases = p.heads * p.angles, blocks = p.batch * ((phases + cuda::kWarpSize - 1) / cuda::kWarpSize);
  return cuda::launch(phase_scan_kernel<Sums>, blocks, kScanThreads, 0, stream, /*uses_pdl=*/false, sums, p.chunks, phases,
                      static_cast<const uint8_t*>(p.has_reset));
}

struct PhaseSums {
  static constexpr bool kReverse = false;
  PhaseParams p;

  __device__ __forceinline__ int64_t at(int64_t row, int64_t chunk, int64_t phase) const {
    return (row * p.chunks + chunk) * p.heads * p.angles + phase;
  }
  __device__ __forceinline__ double first(int64_t row, int64_t phase) const {
    return p.ends == nullptr ? initial_turns(p, row, phase) : 0;  // a packed row begins with a reset
  }
  __device__ __forceinline__ double chunk(int64_t row, int64_t chunk, int64_t phase) const {
    return p.sums[at(row, chunk, phase)];
  }
  __device__ __forceinline__ double reduce(double sum) const { return sum - rint(sum); }
  __device__ __forceinline__ void set(int64_t row, int64_t chunk, int64_t phase, double sum) const {
    p.starts[at(row, chunk, phase)] = static_cast<float>(sum);
  }
  __device__ __forceinline__ void set_last(int64_t, int64_t, double) const {}
};

}  // namespace ssm_kernels::mamba3
