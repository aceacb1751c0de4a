// Mamba-3's rotation on CUDA: k and q of each head from B and C,
//
//   k_t = R(theta_t) (B_t + B_bias)       q_t = R(theta_t) (C_t + C_bias)
//
// for B and C (batch, seqlen, ranks, groups, dstate), biases (ranks, heads, dstate), and k and q (batch, seqlen, ranks, heads,
// dstate). R rotates the pairs of columns that have an angle; the other columns take their bias alone.
//
// A block has a chunk of kPhaseChunk steps, kBlockPairs pairs of columns, one rank and kRotateHeads heads. kRowLanes threads
// have a head, each kLanePairs pairs of it, and go through the steps in order; so the block's heads read a row of B together.
// The rates of the chunk are shared by its heads and are evaluated once. The phases begin with those in memory (phases.cuh).
// The thread that has the last step of a sequence writes its phases and its k, in float32, as states.
#pragma once

#include "mamba3/cuda/phases.cuh"

namespace ssm_kernels::mamba3 {

constexpr int kRotateThreads = kRowLanes * kRotateHeads;
constexpr int kRotateBlocks = 5;  // resident on a multiprocessor: the registers allow them

// The columns of a lane's pairs.
struct LanePairs {
  int64_t dstate, first;  // first: the lane's first pair
  bool is_adjacent;

  __device__ __forceinline__ LanePairs(const RotateParams& p, int64_t block, int lane)
      : dstate(p.dstate), first(block * kBlockPairs + lane * kLanePairs), is_adjacent(p.is_pairs) {}

  // An odd row's last column is the first of a pair without a second.
  __device__ __forceinline__ bool is_there() const { return first < (dstate + 1) / 2; }
  __device__ __forceinline__ int64_t column(int j, int second) const {
    return is_adjacent ? 2 * (first + j) + second : first + j + second * (dstate / 2);
  }
  __device__ __forceinline__ bool has(int j, int second) const {
    return is_adjacent ? column(j, second) < dstate : first + j < dstate / 2;
  }
};

// The elements of a lane's pairs, first and second of each pair in turn, in float32.
using PairValues = float[2 * kLanePairs];

template <bool is_aligned, typename Scalar>
__device__ __forceinline__ void load_pairs(const LanePairs& pairs, const Scalar* row, PairValues& values) {
  if constexpr (is_aligned) {
    if (pairs.is_adjacent) {
      const auto all = cuda::Vector<Scalar, 2 * kLanePairs>::load(row + 2 * pairs.first);
#pragma unroll
      for (int i = 0; i < 2 * kLanePairs; ++i) values[i] = all.accumulate(i);
    } else {
      const auto first = cuda::Vector<Scalar, kLanePairs>::load(row + pairs.first),
                 second = cuda::Vector<Scalar, kLanePairs>::load(row + pairs.first + pairs.dstate / 2);
#pragma unroll
      for (int j = 0; j < kLanePairs; ++j) {
        values[2 * j] = first.accumulate(j);
        values[2 * j + 1] = second.accumulate(j);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2 * kLanePairs; ++i) {
      values[i] = pairs.has(i / 2, i % 2) ? cuda::to_accumulate(row[pairs.column(i / 2, i % 2)]) : 0.0f;
    }
  }
}

template <bool is_aligned, typename Scalar>
__device__ __forceinline__ void store_pairs(const LanePairs& pairs, Scalar* row, const PairValues& values) {
  if constexpr (is_aligned) {
    if (pairs.is_adjacent) {
      cuda::Vector<Scalar, 2 * kLanePairs>::round(values).store(row + 2 * pairs.first);
    } else {
      float first[kLanePairs], second[kLanePairs];
#pragma unroll
      for (int j = 0; j < kLanePairs; ++j) {
        first[j] = values[2 * j];
        second[j] = values[2 * j + 1];
      }
      cuda::Vector<Scalar, kLanePairs>::round(first).store(row + pairs.first);
      cuda::Vector<Scalar, kLanePairs>::round(second).store(row + pairs.first + pairs.dstate / 2);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2 * kLanePairs; ++i) {
      if (pairs.has(i / 2, i % 2)) row[pairs.column(i / 2, i % 2)] = cuda::from_accumulate<Scalar>(values[i]);
    }
  }
}

// A bias's pairs, or zeros.
template <bool is_aligned>
__device__ __forceinline__ void load_bias(const LanePairs& pairs, const float* bias, int64_t row, PairValues& values) {
  if (bias != nullptr) {
    load_pairs<is_aligned>(pairs, bias + row * pairs.dstate, values);
  } else {
#pragma unroll
    for (float& value : values) value = 0;
  }
}

template <typename Scalar>
__device__ __forceinline__ const Scalar* input_row(const RowView& view, int64_t row, int64_t step, int64_t rank,
                                                   int64_t group) {
  return static_cast<const Scalar*>(view.data) + row * view.stride_batch + step * view.stride_step + rank * view.stride_rank +
         group * view.stride_group;
}

__device__ __forceinline__ void rotate_pairs(PairValues& values, const float (&cosine)[kLanePairs],
                                             const float (&sine)[kLanePairs]) {
#pragma unroll
  for (int j = 0; j < kLanePairs; ++j) {
    const float first = values[2 * j], second = values[2 * j + 1];
    values[2 * j] = cosine[j] * first - sine[j] * second;
    values[2 * j + 1] = sine[j] * first + cosine[j] * second;
  }
}

// The rates of a chunk, and half of the sizes of kHeads heads, in shared memory: what a step adds in turns is their product.
template <int kHeads>
struct StepTable {
  alignas(16) float rates[kPhaseChunk][kBlockPairs];
  float half_sizes[kPhaseChunk][kHeads];

  // Rates of a block's pairs from `first_angle` on; those without an angle or a step are zero. All threads of the block call
  // it.
  __device__ __forceinline__ void load_rates(const PhaseParams& p, int64_t row, int64_t first_step, int steps,
                                             int64_t first_angle) {
    if (p.rates_of_heads != nullptr) return;
    for (int i = threadIdx.x; i < kPhaseChunk * kBlockPairs; i += blockDim.x) {
      const int step = i / kBlockPairs;
      const int64_t angle = first_angle + i % kBlockPairs;
      rates[step][i % kBlockPairs] = step < steps && angle < p.angles
                                         ? tanhf(load_gate(p.rates, gate_offset(p.rates, row, first_step + step, 0, angle)))
                                         : 0.0f;
    }
  }
  __device__ __forceinline__ void load_sizes(const PhaseParams& p, int64_t row, int64_t first_step, int steps,
                                             int64_t first_head, int heads) {
    for (int i = threadIdx.x; i < kPhaseChunk * kHeads; i += blockDim.x) {
      const int step = i / kHeads, head = i % kHeads;
      if (head >= heads) continue;
      half_sizes[step][head] =
          step < steps ? 0.5f * load_gate(p.sizes, gate_offset(p.sizes, row, first_step + step, first_head + head)) : 0.0f;
    }
  }
  // The rates of a lane's pairs.
  __device__ __forceinline__ void rates_of_lane(const PhaseParams& p, int64_t row, int64_t first_step, int step, int steps,
                                                int64_t head, int64_t first_angle, int lane,
                                                float (&result)[kLanePairs]) const {
    if (p.rates_of_heads == nullptr) {
      const auto all = cuda::Vector<float, kLanePairs>::load(&rates[step][lane * kLanePairs]);
#pragma unroll
      for (int j = 0; j < kLanePairs; ++j) result[j] = all[j];
    } else {
#pragma unroll
      for (int j = 0; j < kLanePairs; ++j) {
        result[j] = step < steps ? rate(p, row, first_step, step, head, first_angle, lane * kLanePairs + j) : 0.0f;
      }
    }
  }
  // The rate of pair `i` of the block.
  __device__ __forceinline__ float rate(const PhaseParams& p, int64_t row, int64_t first_step, int step, int64_t head,
                                        int64_t first_angle, int i) const {
    if (p.rates_of_heads == nullptr) return rates[step][i];
    if (first_angle + i >= p.angles) return 0;
    return p.rates_of_heads[((row * p.seqlen + first_step + step) * p.heads + head) * p.angles + first_angle + i];
  }
};

// The phases of a lane's pairs before the first step of a sequence, or zero at a reset within one.
__device__ __forceinline__ void begin_phases(const PhaseParams& p, const LanePairs& pairs, int reset, int64_t first_phase,
                                             RunningPhase (&phases)[kLanePairs]) {
#pragma unroll
  for (int j = 0; j < kLanePairs; ++j) {
    const bool has_angle = pairs.first + j < p.angles;
    phases[j].begin(has_angle ? rounded_initial_turns(p, reset, first_phase + j) : 0.0f);
  }
}

template <typename Scalar, bool is_aligned>
__global__ void __launch_bounds__(kRotateThreads, kRotateBlocks) rotate_kernel(const __grid_constant__ RotateParams p) {
  __shared__ StepTable<kRotateHeads> table;
  const int64_t pair_blocks = ((p.dstate + 1) / 2 + kBlockPairs - 1) / kBlockPairs,
                head_blocks = (p.heads + kRotateHeads - 1) / kRotateHeads;
  int64_t rest = blockIdx.x;
  const int64_t pair_block = rest % pair_blocks;
  rest /= pair_blocks;
  const int64_t first_head = rest % head_blocks * kRotateHeads;
  rest /= head_blocks;
  const int64_t rank = rest % p.ranks;
  rest /= p.ranks;
  const int64_t chunk = rest % p.chunks, row = rest / p.chunks, first_step = chunk * kPhaseChunk;
  const int steps = static_cast<int>(min(int64_t(kPhaseChunk), p.seqlen - first_step));
  const int64_t first_angle = pair_block * kBlockPairs;
  const bool has_angles = first_angle < p.angles;
  if (has_angles) {
    table.load_rates(p, row, first_step, steps, first_angle);
    table.load_sizes(p, row, first_step, steps, first_head, static_cast<int>(min(int64_t(kRotateHeads), p.heads - first_head)));
  }
  __syncthreads();

  const int lane = threadIdx.x % kRowLanes, slot = threadIdx.x / kRowLanes;
  const int64_t head = first_head + slot, group = head / (p.heads / p.groups);
  const LanePairs pairs(p, pair_block, lane);
  if (head >= p.heads || !pairs.is_there()) return;
  PairValues of_B, of_C;
  load_bias<is_aligned>(pairs, p.B_bias, rank * p.heads + head, of_B);
  load_bias<is_aligned>(pairs, p.C_bias, rank * p.heads + head, of_C);
  RunningPhase phases[kLanePairs];
  const int64_t first_phase = head * p.angles + pairs.first;  // of the lane, in a row (heads, angles)
  if (has_angles) {
    const float* const starts = p.starts + (row * p.chunks + chunk) * p.heads * p.angles + first_phase;
#pragma unroll
    for (int j = 0; j < kLanePairs; ++j) phases[j].begin(pairs.first + j < p.angles ? starts[j] : 0.0f);
  }
  const Scalar* B = input_row<Scalar>(p.B, row, first_step, rank, group);
  const Scalar* C = input_row<Scalar>(p.C, row, first_step, rank, group);
  const int64_t first_row = (((row * p.seqlen + first_step) * p.ranks + rank) * p.heads + head) * p.dstate;
  Scalar* k_rows = static_cast<Scalar*>(p.k) + first_row;
  Scalar* q_rows = static_cast<Scalar*>(p.q) + first_row;
#pragma unroll 1
  for (int s = 0; s < steps; ++s) {
    PairValues k, q;
    load_pairs<is_aligned>(pairs, B, k);
    load_pairs<is_aligned>(pairs, C, q);
    B += p.B.stride_step;
    C += p.C.stride_step;
    float cosine[kLanePairs], sine[kLanePairs];
    if (has_angles) {
      const int reset = reset_at(p, row, first_step + s);
      if (begins_anew(reset)) begin_phases(p, pairs, reset, first_phase, phases);
      const float half_size = table.half_sizes[s][slot];
#pragma unroll
      for (int j = 0; j < kLanePairs; ++j) {
        phases[j].add(table.rate(p, row, first_step, s, head, first_angle, lane * kLanePairs + j) * half_size);
        // A pair without an angle has the rate 0, which an infinite size would make NaN.
        const float turns = pairs.first + j < p.angles ? phases[j].turns() : 0.0f;
        rotation_of<Scalar>(turns, cosine[j], sine[j]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kLanePairs; ++i) {
      k[i] += of_B[i];
      q[i] += of_C[i];
    }
    if (has_angles) {
      rotate_pairs(k, cosine, sine);
      rotate_pairs(q, cosine, sine);
    }
    store_pairs<is_aligned>(pairs, k_rows, k);
    store_pairs<is_aligned>(pairs, q_rows, q);
    k_rows += p.ranks * p.heads * p.dstate;
    q_rows += p.ranks * p.heads * p.dstate;
    const int sequence = sequence_at_end(p, row, first_step + s);
    if (sequence < 0) continue;
    if (p.final_k != nullptr) {
      store_pairs<is_aligned>(pairs, p.final_k + ((sequence * p.heads + head) * p.ranks + rank) * p.dstate, k);
    }
    if (p.final_angle != nullptr && has_angles && rank == 0) {
#pragma unroll
      for (int j = 0; j < kLanePairs; ++j) {
        if (pairs.first + j >= p.angles) continue;
        p.final_angle[sequence * p.heads * p.angles + first_phase + j] = static_cast<float>(kTurn) * phases[j].turns();
      }
    }
  }
}

template <typename Scalar>
cudaError_t launch_rotate(const RotateParams& params, bool is_aligned, cudaStream_t stream) {
  const int64_t pair_blocks = ((params.dstate + 1) / 2 + kBlockPairs - 1) / kBlockPairs,
                head_blocks = (params.heads + kRotateHeads - 1) / kRotateHeads,
                blocks = params.batch * params.chunks * params.ranks * head_blocks * pair_blocks;
  const auto kernel = is_aligned ? rotate_kernel<Scalar, true> : rotate_kernel<Scalar, false>;
  return cuda::launch(kernel, blocks, kRotateThreads, 0, stream, /*uses_pdl=*/false, params);
}

}  // namespace ssm_kernels::mamba3
