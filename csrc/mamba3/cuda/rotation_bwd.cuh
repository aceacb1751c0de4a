// The adjoint of Mamba-3's rotation on CUDA (rotation.cuh has the rotation). With dk and dq the gradients of k and q,
//
//   dB' = R(-theta) dk         the gradient of the biased row of a head: dB is the sum over the heads of a group, dB_bias over
//                              batch and time; C likewise with dq
//   dtheta = sum of b dB'_second - b_second dB'_first over the rows of B and C of all ranks, b the biased row before R
//   dphi_t = dtheta_t + dtheta_{t+1} + ... until the sequence ends or phases begin anew      the gradient of what a step adds
//   d angles = pi (1 - rate^2) sum of dt dphi over the heads        d dt = pi sum of rate dphi over the angles
//
// dphi is a sum over later steps, which unrotate_kernel has only of its own chunk. d angles and d dt are linear in dphi, so it
// writes them without the later chunks and the chunk's own sum of dtheta, and the last kernel adds what the later chunks give.
//
// 1. unrotate_kernel reads dk and dq, fp32, once. A block has a chunk, kBlockPairs pairs of columns, one rank and up to
//    kUnrotateHeads heads of a group, one after another. Eight lanes have a slot of kSlotSteps steps, each kLanePairs pairs;
//    registers keep the sums over the heads. Phases before each slot are in shared memory for kTileHeads heads; a slot's sum of
//    dtheta takes the place of its phases there, and after these heads the sums of later slots are added to d angles and d dt.
// 2. phase_scan_kernel in reverse: the sums of dtheta of all later chunks.
// 3. gate_grads_kernel adds these and writes d angles and d dt: where heads share their angles, products of tiles in shared
//    memory, over the heads and over the angles; row_grads_kernel sums the slabs' dB and dC.
//
// Partial sums are in a fixed order: there are no atomics. Sums over a chunk are fp32, over chunks fp64.
#pragma once

#include "cuda/lane_sums.cuh"
#include "mamba3/cuda/rotation.cuh"

namespace ssm_kernels::mamba3 {

constexpr int kSlotSteps = 2, kSlots = kPhaseChunk / kSlotSteps;
constexpr int kUnrotateThreads = kSlots * kRowLanes, kUnrotateWarps = kUnrotateThreads / cuda::kWarpSize;
constexpr int kTileHeads = 8;
constexpr int kBlockColumns = 2 * kBlockPairs;
static_assert(kTileHeads * kBlockPairs == kUnrotateThreads, "a thread has one phase of a tile's heads");
static_assert(kUnrotateHeads % kTileHeads == 0, "a slab is whole tiles of heads");
static_assert(kSlotSteps == 2, "the sums of a slot are written for two steps");

struct UnrotateShared {
  StepTable<kTileHeads> table;
  alignas(16) float phases[kSlots][kTileHeads][kBlockPairs];  // before each slot, then the slot's sums of dtheta
  float bias_sums[kTileHeads][kUnrotateWarps][2][kRowLanes][2 * kLanePairs];  // of a warp's steps, of B and of C
  float size_sums[kPhaseChunk][kTileHeads];
  int resets[kPhaseChunk];
};

// Where a lane's 2 kLanePairs values end after they are summed over the warp's four slots: each thread has a quarter.
__device__ __forceinline__ void sum_over_slots(const PairValues& values, int lane_of_warp, float (&quarter)[2]) {
  static_assert(2 * kLanePairs == 8 && kRowLanes == 8, "two exchanges halve 8 values twice");
  const bool upper = lane_of_warp & 16, odd = lane_of_warp & 8;
  float half[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float given = upper ? values[i] : values[i + 4], kept = upper ? values[i + 4] : values[i];
    half[i] = kept + __shfl_xor_sync(cuda::kAllLanes, given, 16);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float given = odd ? half[i] : half[i + 2], kept = odd ? half[i + 2] : half[i];
    quarter[i] = kept + __shfl_xor_sync(cuda::kAllLanes, given, 8);
  }
}

// The sum over the eight lanes of a slot.
__device__ __forceinline__ float sum_over_lanes(float value) {
#pragma unroll
  for (int mask = 1; mask < kRowLanes; mask *= 2) value += __shfl_xor_sync(cuda::kAllLanes, value, mask);
  return value;
}

// Rotates by minus the phases.
__device__ __forceinline__ void unrotate_pairs(PairValues& values, const float (&cosine)[kLanePairs],
                                               const float (&sine)[kLanePairs]) {
#pragma unroll
  for (int j = 0; j < kLanePairs; ++j) {
    const float first = values[2 * j], second = values[2 * j + 1];
    values[2 * j] = cosine[j] * first + sine[j] * second;
    values[2 * j + 1] = cosine[j] * second - sine[j] * first;
  }
}

// Adds the gradients of the phases, of a biased row and the gradient of that row.
__device__ __forceinline__ void add_phase_grads(const PairValues& row, const PairValues& grad, float (&sums)[kLanePairs]) {
#pragma unroll
  for (int j = 0; j < kLanePairs; ++j) {
    sums[j] += row[2 * j] * grad[2 * j + 1] - row[2 * j + 1] * grad[2 * j];
  }
}

// A lane's pairs of a row of gradients, as they are in memory until they are used.
template <bool is_aligned>
struct HeldPairs {
  using All = cuda::Vector<float, 2 * kLanePairs>;
  using Half = cuda::Vector<float, kLanePairs>;
  std::conditional_t<is_aligned, All, PairValues> values;

  __device__ __forceinline__ void load(const LanePairs& pairs, bool is_there, const float* row) {
    if constexpr (is_aligned) {
      values = All::zero();
      if (!is_there) return;
      if (pairs.is_adjacent) {
        values = All::load_once(row + 2 * pairs.first);
      } else {
        const Half first = Half::load_once(row + pairs.first), second = Half::load_once(row + pairs.first + pairs.dstate / 2);
        memcpy(values.accesses, first.accesses, Half::kBytes);
        memcpy(reinterpret_cast<char*>(values.accesses) + Half::kBytes, second.accesses, Half::kBytes);
      }
    } else if (is_there) {
      load_pairs<false>(pairs, row, values);
    } else {
      memset(values, 0, sizeof(values));
    }
  }
  __device__ __forceinline__ void get(const LanePairs& pairs, PairValues& result) const {
#pragma unroll
    for (int i = 0; i < 2 * kLanePairs; ++i) {
      if constexpr (is_aligned) {
        result[i] = pairs.is_adjacent ? values.accumulate(i) : values.accumulate(i / 2 + i % 2 * kLanePairs);
      } else {
        result[i] = values[i];
      }
    }
  }
};

// A block's work.
struct UnrotateWork {
  int64_t pair_block, rank, slab, group, chunk, row, first_step, first_head, end_head, first_angle;
  int steps;

  __device__ __forceinline__ explicit UnrotateWork(const UnrotateParams& p) {
    const int64_t pair_blocks = ((p.dstate + 1) / 2 + kBlockPairs - 1) / kBlockPairs, heads_of_group = p.heads / p.groups;
    int64_t rest = blockIdx.x;
    pair_block = rest % pair_blocks;
    rest /= pair_blocks;
    slab = rest % p.slabs;
    rest /= p.slabs;
    group = rest % p.groups;
    rest /= p.groups;
    rank = rest % p.ranks;
    rest /= p.ranks;
    chunk = rest % p.chunks;
    row = rest / p.chunks;
    first_step = chunk * kPhaseChunk;
    steps = static_cast<int>(min(int64_t(kPhaseChunk), p.seqlen - first_step));
    first_head = group * heads_of_group + slab * kUnrotateHeads;
    end_head = min(first_head + kUnrotateHeads, (group + 1) * heads_of_group);
    first_angle = pair_block * kBlockPairs;
  }
};

// Writes the phases before each slot, of a tile's heads.
__device__ __forceinline__ void fill_phases(const UnrotateParams& p, const UnrotateWork& work, int64_t tile_head, int heads,
                                            UnrotateShared& shared) {
  const int of_head = threadIdx.x / kBlockPairs, pair = threadIdx.x % kBlockPairs;
  const int64_t head = tile_head + of_head, angle = work.first_angle + pair;
  const bool is_there = of_head < heads && angle < p.angles;
  RunningPhase phase;
  if (is_there) phase.begin(p.starts[((work.row * p.chunks + work.chunk) * p.heads + head) * p.angles + angle]);
  for (int slot = 0; slot < kSlots; ++slot) {
    shared.phases[slot][of_head][pair] = phase.turns();
    if (!is_there) continue;
#pragma unroll
    for (int s = slot * kSlotSteps; s < (slot + 1) * kSlotSteps; ++s) {
      if (s >= work.steps) break;
      const int reset = shared.resets[s];
      if (begins_anew(reset)) phase.begin(rounded_initial_turns(p, reset, head * p.angles + angle));
      phase.add(shared.table.rate(p, work.row, work.first_step, s, head, work.first_angle, pair) *
                shared.table.half_sizes[s][of_head]);
    }
  }
}

// Replaces the slots' sums of dtheta by the sums of the later slots of the chunk, and writes the chunk's sum. A thread has one
// phase of a tile's heads.
__device__ __forceinline__ void sum_later_slots(const UnrotateParams& p, const UnrotateWork& work, int64_t tile_head, int heads,
                                                UnrotateShared& shared) {
  const int of_head = threadIdx.x / kBlockPairs, pair = threadIdx.x % kBlockPairs;
  const int64_t phase = (tile_head + of_head) * p.angles + work.first_angle + pair;
  if (of_head >= heads || work.first_angle + pair >= p.angles) return;
  float later = 0;
  for (int slot = kSlots - 1; slot >= 0; --slot) {
    const float own = shared.phases[slot][of_head][pair];
    shared.phases[slot][of_head][pair] = later;
    const int first = shared.resets[slot * kSlotSteps], second = shared.resets[slot * kSlotSteps + 1];
    const int last = begins_anew(second) ? second : first;  // the slot's last reset
    if (last >= 0 && p.initial_parts != nullptr) {
      p.initial_parts[(work.rank * p.sequences + last) * p.heads * p.angles + phase] += later;
    }
    later = begins_anew(last) ? own : own + later;
  }
  p.chunk_parts[((work.rank * p.batch + work.row) * p.chunks + work.chunk) * p.heads * p.angles + phase] = later;
}

// Writes the sums over the chunk's steps of a tile's heads.
__device__ __forceinline__ void write_bias_sums(const UnrotateParams& p, const UnrotateWork& work, int64_t tile_head, int heads,
                                                const UnrotateShared& shared) {
  for (int i = threadIdx.x; i < heads * 2 * kBlockColumns; i += kUnrotateThreads) {
    const int h = i / (2 * kBlockColumns), which = i / kBlockColumns % 2, lane = i % kBlockColumns / (2 * kLanePairs),
              value = i % (2 * kLanePairs);
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kUnrotateWarps; ++warp) sum += shared.bias_sums[h][warp][which][lane][value];
    const LanePairs pairs(p, work.pair_block, lane);
    if (!pairs.has(value / 2, value % 2)) continue;
    const int64_t part = (((work.row * p.chunks + work.chunk) * 2 + which) * p.ranks + work.rank) * p.heads + tile_head + h;
    p.bias_parts[part * p.dstate + pairs.column(value / 2, value % 2)] = sum;
  }
}

template <typename Scalar, bool is_aligned>
__global__ void __launch_bounds__(kUnrotateThreads, 2) unrotate_kernel(const __grid_constant__ UnrotateParams p) {
  extern __shared__ __align__(16) char shared_bytes[];
  UnrotateShared& shared = *reinterpret_cast<UnrotateShared*>(shared_bytes);
  const UnrotateWork work(p);
  const bool has_angles = work.first_angle < p.angles;
  const int lane = threadIdx.x % kRowLanes, slot = threadIdx.x / kRowLanes, first = slot * kSlotSteps;
  const int warp = threadIdx.x / cuda::kWarpSize, lane_of_warp = threadIdx.x % cuda::kWarpSize;
  const LanePairs pairs(p, work.pair_block, lane);
  const bool has_columns = pairs.is_there();
  const int lane_angles = static_cast<int>(max(int64_t(0), min(int64_t(kLanePairs), p.angles - pairs.first)));
  if (threadIdx.x < kPhaseChunk) {
    shared.resets[threadIdx.x] = threadIdx.x < work.steps ? reset_at(p, work.row, work.first_step + threadIdx.x) : -1;
  }
  if (has_angles) shared.table.load_rates(p, work.row, work.first_step, work.steps, work.first_angle);
  const int64_t row_of_steps = work.row * p.seqlen + work.first_step;  // of (batch, seqlen)
  const bool is_step[kSlotSteps] = {first < work.steps, first + 1 < work.steps};
  // The first step's rows of a rank and the block's first head, and how far apart those of the second step are.
  const int64_t grads_apart = p.ranks * p.heads * p.dstate,
                first_grad = (row_of_steps + first) * grads_apart + (work.rank * p.heads + work.first_head) * p.dstate;
  const float *k_rows = static_cast<const float*>(p.k) + first_grad, *q_rows = static_cast<const float*>(p.q) + first_grad;
  const Scalar *const B_rows = input_row<Scalar>(p.B, work.row, work.first_step + first, work.rank, work.group),
                      *const C_rows = input_row<Scalar>(p.C, work.row, work.first_step + first, work.rank, work.group);
  // The sums of a slot's gradients of rates, where heads have their own: (rank, row, step, head, angle).
  float* const own_rates =
      p.rates_of_heads == nullptr || lane_angles == 0
          ? nullptr
          : p.rate_parts + (work.rank * p.batch * p.seqlen + row_of_steps + first) * p.heads * p.angles + pairs.first;

  PairValues sums_B[kSlotSteps] = {}, sums_C[kSlotSteps] = {};
  float rate_sums[kSlotSteps][kLanePairs] = {};
  using LanePhases = cuda::Vector<float, kLanePairs>;
  for (int64_t tile_head = work.first_head; tile_head < work.end_head; tile_head += kTileHeads) {
    const int heads = static_cast<int>(min(int64_t(kTileHeads), work.end_head - tile_head));
    __syncthreads();
    if (has_angles) {
      shared.table.load_sizes(p, work.row, work.first_step, work.steps, tile_head, heads);
      __syncthreads();
      fill_phases(p, work, tile_head, heads, shared);
    }
    __syncthreads();
#pragma unroll 1
    for (int h = 0; h < heads; ++h, k_rows += p.dstate, q_rows += p.dstate) {
      const int64_t head = tile_head + h, first_phase = head * p.angles + pairs.first;
      HeldPairs<is_aligned> held[kSlotSteps];
#pragma unroll
      for (int s = 0; s < kSlotSteps; ++s) {
        held[s].load(pairs, is_step[s] && has_columns, k_rows + s * grads_apart);
      }
      float cosine[kSlotSteps][kLanePairs], sine[kSlotSteps][kLanePairs], grad_phases[kSlotSteps][kLanePairs] = {};
      float* const slot_phases = &shared.phases[slot][h][lane * kLanePairs];
      if (has_angles) {
        float turns[kLanePairs];
        const auto before = LanePhases::load(slot_phases);
#pragma unroll
        for (int j = 0; j < kLanePairs; ++j) turns[j] = before[j];
#pragma unroll
        for (int s = 0; s < kSlotSteps; ++s) {
          const int reset = shared.resets[first + s];
          if (begins_anew(reset)) {
#pragma unroll
            for (int j = 0; j < kLanePairs; ++j) {
              turns[j] = j < lane_angles ? rounded_initial_turns(p, reset, first_phase + j) : 0.0f;
            }
          }
          const float half_size = shared.table.half_sizes[first + s][h];
          float rates[kLanePairs];
          shared.table.rates_of_lane(p, work.row, work.first_step, first + s, work.steps, head, work.first_angle, lane, rates);
#pragma unroll
          for (int j = 0; j < kLanePairs; ++j) {
            // A pair without an angle has the rate 0, which an infinite size would make NaN.
            turns[j] = j < lane_angles ? turns[j] + half_size * rates[j] : 0.0f;
            turns[j] -= nearest(turns[j]);
            rotation_of<Scalar>(turns[j], cosine[s][j], sine[s][j]);
          }
        }
      }
      // Rotates the gradients of a row of B or C back and adds them to the sums.
      const auto add_rows = [&](int which, const Scalar* rows, int64_t rows_apart, const float* bias, const auto& held,
                                auto& sums) {
        PairValues of_bias = {}, of_head;
        if (has_angles) {
          if (has_columns) {
            load_bias<is_aligned>(pairs, bias, work.rank * p.heads + head, of_head);
          } else {
            memset(of_head, 0, sizeof(of_head));
          }
        }
#pragma unroll
        for (int s = 0; s < kSlotSteps; ++s) {
          PairValues grad;
          held[s].get(pairs, grad);
          const bool is_there = is_step[s] && has_columns;
          if (which == 0 && p.final_k != nullptr && is_there) {
            const int sequence = sequence_at_end(p, work.row, work.first_step + first + s);
            if (sequence >= 0) {
              PairValues of_state;
              load_pairs<is_aligned>(pairs, p.final_k + ((sequence * p.heads + head) * p.ranks + work.rank) * p.dstate,
                                     of_state);
#pragma unroll
              for (int i = 0; i < 2 * kLanePairs; ++i) grad[i] += of_state[i];
            }
          }
          if (has_angles && is_there) {
            PairValues values;
            load_pairs<is_aligned>(pairs, rows + s * rows_apart, values);
#pragma unroll
            for (int i = 0; i < 2 * kLanePairs; ++i) values[i] += of_head[i];
            // The sums of these gradients over k and q cancel for the rounded rows, which the scan had.
            rotate_pairs(values, cosine[s], sine[s]);
#pragma unroll
            for (float& value : values) value = cuda::to_accumulate(cuda::from_accumulate<Scalar>(value));
            add_phase_grads(values, grad, grad_phases[s]);
            unrotate_pairs(grad, cosine[s], sine[s]);
          }
#pragma unroll
          for (int i = 0; i < 2 * kLanePairs; ++i) {
            sums[s][i] += grad[i];
            of_bias[i] += grad[i];
          }
        }
        if (p.bias_parts == nullptr) return;
        float quarter[2];
        sum_over_slots(of_bias, lane_of_warp, quarter);
        const int place = (lane_of_warp & 16 ? 4 : 0) + (lane_of_warp & 8 ? 2 : 0);
        shared.bias_sums[h][warp][which][lane][place] = quarter[0];
        shared.bias_sums[h][warp][which][lane][place + 1] = quarter[1];
      };
      add_rows(0, B_rows, p.B.stride_step, p.B_bias, held, sums_B);
#pragma unroll
      for (int s = 0; s < kSlotSteps; ++s) held[s].load(pairs, is_step[s] && has_columns, q_rows + s * grads_apart);
      add_rows(1, C_rows, p.C.stride_step, p.C_bias, held, sums_C);
      if (!has_angles) continue;
      if (p.final_angle != nullptr && work.rank == 0) {
#pragma unroll
        for (int s = 0; s < kSlotSteps; ++s) {
          if (!is_step[s]) continue;
          const int sequence = sequence_at_end(p, work.row, work.first_step + first + s);
          if (sequence < 0) continue;
#pragma unroll
          for (int j = 0; j < kLanePairs; ++j) {
            if (j < lane_angles) grad_phases[s][j] += p.final_angle[sequence * p.heads * p.angles + first_phase + j];
          }
        }
      }
      // The sums within the slot.
      const int resets[kSlotSteps] = {shared.resets[first], shared.resets[first + 1]};
      float sums_of_slot[kLanePairs];
#pragma unroll
      for (int j = 0; j < kLanePairs; ++j) {
        if (!begins_anew(resets[1])) grad_phases[0][j] += grad_phases[1][j];
        sums_of_slot[j] = begins_anew(resets[0]) ? 0.0f : grad_phases[0][j];
      }
      LanePhases::round(sums_of_slot).store(slot_phases);
#pragma unroll
      for (int s = 0; s < kSlotSteps; ++s) {
        float rates[kLanePairs], of_sizes = 0;
        shared.table.rates_of_lane(p, work.row, work.first_step, first + s, work.steps, head, work.first_angle, lane, rates);
        const float size = 2 * shared.table.half_sizes[first + s][h];
#pragma unroll
        for (int j = 0; j < kLanePairs; ++j) {
          of_sizes += rates[j] * grad_phases[s][j];
          rate_sums[s][j] += size * grad_phases[s][j];
        }
        of_sizes = sum_over_lanes(of_sizes);
        if (lane == 0) shared.size_sums[first + s][h] = of_sizes;
        if (resets[s] >= 0 && p.initial_parts != nullptr && is_step[s]) {
#pragma unroll
          for (int j = 0; j < kLanePairs; ++j) {
            if (j >= lane_angles) continue;
            p.initial_parts[(work.rank * p.sequences + resets[s]) * p.heads * p.angles + first_phase + j] = grad_phases[s][j];
          }
        }
        if (own_rates == nullptr) continue;
        // The gradient of each head's rate is one value, not a sum.
#pragma unroll
        for (int j = 0; j < kLanePairs; ++j) {
          if (j < lane_angles && is_step[s]) own_rates[(s * p.heads + head) * p.angles + j] = rate_sums[s][j];
          rate_sums[s][j] = 0;
        }
      }
    }
    __syncthreads();
    if (p.bias_parts != nullptr) write_bias_sums(p, work, tile_head, heads, shared);
    if (!has_angles) continue;
    sum_later_slots(p, work, tile_head, heads, shared);
    __syncthreads();
    const int64_t part = work.rank * ((p.angles + kBlockPairs - 1) / kBlockPairs) + work.pair_block;
    float* const size_parts = p.size_parts + (part * p.batch * p.seqlen + row_of_steps + first) * p.heads + tile_head;
    // Later slots count up to the first step where phases begin anew.
    const bool is_first_reached = !begins_anew(shared.resets[first + 1]);
#pragma unroll 1
    for (int h = 0; h < heads; ++h) {
      const auto later = LanePhases::load(&shared.phases[slot][h][lane * kLanePairs]);
#pragma unroll
      for (int s = 0; s < kSlotSteps; ++s) {
        float rates[kLanePairs], of_sizes = 0;
        shared.table.rates_of_lane(p, work.row, work.first_step, first + s, work.steps, tile_head + h, work.first_angle, lane,
                                   rates);
        const float size = 2 * shared.table.half_sizes[first + s][h];
        if (s == kSlotSteps - 1 || is_first_reached) {
#pragma unroll
          for (int j = 0; j < kLanePairs; ++j) {
            if (j >= lane_angles || !is_step[s]) continue;
            of_sizes += rates[j] * later[j];
            if (own_rates == nullptr) {
              rate_sums[s][j] += size * later[j];
            } else {
              own_rates[(s * p.heads + tile_head + h) * p.angles + j] += size * later[j];
            }
          }
        }
        of_sizes = sum_over_lanes(of_sizes);
        if (lane == 0 && is_step[s]) size_parts[s * p.heads + h] = shared.size_sums[first + s][h] + of_sizes;
      }
    }
  }
#pragma unroll
  for (int s = 0; s < kSlotSteps; ++s) {
    if (first + s >= work.steps || !has_columns) continue;
    if (p.B_parts != nullptr) {
      const int64_t at =
          ((((row_of_steps + first + s) * p.ranks + work.rank) * p.groups + work.group) * p.slabs + work.slab) * p.dstate;
      store_pairs<is_aligned>(pairs, p.B_parts + at, sums_B[s]);
      store_pairs<is_aligned>(pairs, p.C_parts + at, sums_C[s]);
    }
    if (has_angles && p.rates_of_heads == nullptr) {
      const int64_t part = (work.rank * p.groups + work.group) * p.slabs + work.slab;
#pragma unroll
      for (int j = 0; j < kLanePairs; ++j) {
        if (j >= lane_angles) continue;
        p.rate_parts[(part * p.batch * p.seqlen + row_of_steps + first + s) * p.angles + pairs.first + j] = rate_sums[s][j];
      }
    }
  }
}

// The sums of dtheta of later chunks, of all ranks. A row that is one sequence has the gradient of its initial phases then.
struct ChunkSums {
  static constexpr bool kReverse = true;
  UnrotateParams p;

  __device__ __forceinline__ int64_t at(int64_t row, int64_t chunk, int64_t phase) const {
    return (row * p.chunks + chunk) * p.heads * p.angles + phase;
  }
  __device__ __forceinline__ double first(int64_t, int64_t) const { return 0; }
  __device__ __forceinline__ double chunk(int64_t row, int64_t chunk, int64_t phase) const {
    double sum = 0;
    for (int64_t rank = 0; rank < p.ranks; ++rank) {
      sum += p.chunk_parts[rank * p.batch * p.chunks * p.heads * p.angles + at(row, chunk, phase)];
    }
    return sum;
  }
  __device__ __forceinline__ double reduce(double sum) const { return sum; }
  __device__ __forceinline__ void set(int64_t row, int64_t chunk, int64_t phase, double sum) const {
    p.later[at(row, chunk, phase)] = static_cast<float>(sum);
  }
  __device__ __forceinline__ void set_last(int64_t row, int64_t phase, double sum) const {
    if (p.ends == nullptr && p.initial_parts != nullptr) {
      p.initial_parts[row * p.heads * p.angles + phase] = static_cast<float>(sum);
    }
  }
};

constexpr int kGateGradThreads = 256, kGateGradWarps = kGateGradThreads / cuda::kWarpSize;
constexpr int kGateGradSteps = 16, kGateGradHeads = 32, kGateGradAngles = 64;
static_assert(kPhaseChunk % kGateGradSteps == 0, "the steps of a block are of one chunk");
static_assert(kGateGradThreads % kGateGradAngles == 0 && kGateGradThreads % kGateGradHeads == 0,
              "all elements of a thread have the same angle, or the same head");

// What the later chunks give to kGateGradHeads heads and kGateGradAngles angles, and the rates and sizes that it is weighted
// by.
struct GateGradTile {
  float later[kGateGradHeads][kGateGradAngles + 1];  // rows begin in different banks
  float rates[kGateGradSteps][kGateGradAngles], sizes[kGateGradSteps][kGateGradHeads];
};

// A block's work.
struct GateGradWork {
  int64_t row, first_step;
  int steps;
  int64_t last_reset;  // the chunk's last step before which phases begin anew, or -1: later chunks count from it on
  const float* later;  // (heads, angles)
};

// Loads a tile, zero beyond the last head, angle and step and before the last reset. All threads of the block call it.
__device__ __forceinline__ void load_tile(const UnrotateParams& p, const GateGradWork& work, int64_t first_head,
                                          int64_t first_angle, GateGradTile& tile) {
  __syncthreads();
  for (int i = threadIdx.x; i < kGateGradHeads * kGateGradAngles; i += kGateGradThreads) {
    const int64_t head = first_head + i / kGateGradAngles, angle = first_angle + i % kGateGradAngles;
    tile.later[i / kGateGradAngles][i % kGateGradAngles] =
        head < p.heads && angle < p.angles ? work.later[head * p.angles + angle] : 0.0f;
  }
  const auto is_reached = [&](int step) { return step < work.steps && work.first_step + step >= work.last_reset; };
  for (int i = threadIdx.x; i < kGateGradSteps * kGateGradAngles; i += kGateGradThreads) {
    const int step = i / kGateGradAngles, of_tile = i % kGateGradAngles;
    const int64_t angle = first_angle + of_tile;
    const bool is_there = p.rates_of_heads == nullptr && angle < p.angles && is_reached(step);
    tile.rates[step][of_tile] =
        is_there ? tanhf(load_gate(p.rates, gate_offset(p.rates, work.row, work.first_step + step, 0, angle))) : 0.0f;
  }
  for (int i = threadIdx.x; i < kGateGradSteps * kGateGradHeads; i += kGateGradThreads) {
    const int step = i / kGateGradHeads, of_tile = i % kGateGradHeads;
    const int64_t head = first_head + of_tile;
    tile.sizes[step][of_tile] = head < p.heads && is_reached(step)
                                    ? load_gate(p.sizes, gate_offset(p.sizes, work.row, work.first_step + step, head))
                                    : 0.0f;
  }
  __syncthreads();
}

// Writes the gradient of one angle; `sum` is what later chunks give to its rate, in half turns.
__device__ __forceinline__ void write_rate_grad(const UnrotateParams& p, const GateGradWork& work, int step, int64_t head,
                                                int64_t angle, float sum) {
  constexpr float kHalfTurn = 3.14159265358979f;  // radians
  const int64_t heads = p.rates_of_heads != nullptr ? p.heads : 1, all_steps = p.batch * p.seqlen,
                at = work.row * p.seqlen + work.first_step + step;
  for (int64_t part = 0; part < p.rate_part_count; ++part) {
    sum += p.rate_parts[((part * all_steps + at) * heads + head) * p.angles + angle];
  }
  const float rate = tanhf(load_gate(p.rates, gate_offset(p.rates, work.row, work.first_step + step, head, angle)));
  store_gate(p.grad_rates, gate_offset(p.grad_rates, work.row, work.first_step + step, head, angle),
             sum * kHalfTurn * (1 - rate * rate));
}

// Writes the gradient of one size likewise.
__device__ __forceinline__ void write_size_grad(const UnrotateParams& p, const GateGradWork& work, int step, int64_t head,
                                                float sum) {
  constexpr float kHalfTurn = 3.14159265358979f;
  const int64_t all_steps = p.batch * p.seqlen, at = work.row * p.seqlen + work.first_step + step;
  for (int64_t part = 0; part < p.size_part_count; ++part) sum += p.size_parts[(part * all_steps + at) * p.heads + head];
  sum *= kHalfTurn;
  if (p.other_sizes.data != nullptr) {
    sum += load_gate(p.other_sizes, gate_offset(p.other_sizes, work.row, work.first_step + step, head));
  }
  store_gate(p.grad_sizes, gate_offset(p.grad_sizes, work.row, work.first_step + step, head), sum);
}

// d angles and d dt where heads share their angles: products of tiles of `later` with sizes and with rates.
__device__ __forceinline__ void write_grads_of_shared_rates(const UnrotateParams& p, const GateGradWork& work,
                                                            GateGradTile& tile) {
  if (p.grad_rates.data != nullptr) {
    constexpr int kElements = kGateGradSteps * kGateGradAngles / kGateGradThreads;
    const int of_tile = threadIdx.x % kGateGradAngles, first = threadIdx.x / kGateGradAngles;
    constexpr int kStepsApart = kGateGradThreads / kGateGradAngles;
    for (int64_t first_angle = 0; first_angle < p.angles; first_angle += kGateGradAngles) {
      float sums[kElements] = {};
      for (int64_t first_head = 0; first_head < p.heads; first_head += kGateGradHeads) {
        load_tile(p, work, first_head, first_angle, tile);
#pragma unroll 8
        for (int h = 0; h < kGateGradHeads; ++h) {
#pragma unroll
          for (int e = 0; e < kElements; ++e) sums[e] += tile.sizes[first + e * kStepsApart][h] * tile.later[h][of_tile];
        }
      }
      if (first_angle + of_tile >= p.angles) continue;
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const int step = first + e * kStepsApart;
        if (step < work.steps) write_rate_grad(p, work, step, 0, first_angle + of_tile, sums[e]);
      }
    }
  }
  if (p.grad_sizes.data == nullptr) return;
  constexpr int kElements = kGateGradSteps * kGateGradHeads / kGateGradThreads;
  const int of_tile = threadIdx.x % kGateGradHeads, first = threadIdx.x / kGateGradHeads;
  constexpr int kStepsApart = kGateGradThreads / kGateGradHeads;
  for (int64_t first_head = 0; first_head < p.heads; first_head += kGateGradHeads) {
    float sums[kElements] = {};
    for (int64_t first_angle = 0; first_angle < p.angles; first_angle += kGateGradAngles) {
      load_tile(p, work, first_head, first_angle, tile);
#pragma unroll 8
      for (int a = 0; a < kGateGradAngles; ++a) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) sums[e] += tile.rates[first + e * kStepsApart][a] * tile.later[of_tile][a];
      }
    }
    if (first_head + of_tile >= p.heads) continue;
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const int step = first + e * kStepsApart;
      if (step < work.steps) write_size_grad(p, work, step, first_head + of_tile, sums[e]);
    }
  }
}

// The same where heads have their own: a thread has a rate, then a warp a size, one after another.
__device__ __forceinline__ void write_grads_of_own_rates(const UnrotateParams& p, const GateGradWork& work) {
  if (p.grad_rates.data != nullptr) {
    for (int64_t i = threadIdx.x; i < work.steps * p.heads * p.angles; i += kGateGradThreads) {
      const int step = static_cast<int>(i / (p.heads * p.angles));
      const int64_t head = i / p.angles % p.heads, angle = i % p.angles;
      float sum = 0;
      if (work.first_step + step >= work.last_reset) {
        sum = load_gate(p.sizes, gate_offset(p.sizes, work.row, work.first_step + step, head)) *
              work.later[head * p.angles + angle];
      }
      write_rate_grad(p, work, step, head, angle, sum);
    }
  }
  if (p.grad_sizes.data == nullptr) return;
  const int lane = threadIdx.x % cuda::kWarpSize;
  for (int64_t i = threadIdx.x / cuda::kWarpSize; i < work.steps * p.heads; i += kGateGradWarps) {
    const int step = static_cast<int>(i / p.heads);
    const int64_t head = i % p.heads;
    float sum = 0;
    if (work.first_step + step >= work.last_reset) {
      const float* const rates =
          p.rates_of_heads + ((work.row * p.seqlen + work.first_step + step) * p.heads + head) * p.angles;
      for (int64_t angle = lane; angle < p.angles; angle += cuda::kWarpSize) {
        sum += rates[angle] * work.later[head * p.angles + angle];
      }
    }
    sum = cuda::sum_over_warp(sum);
    if (lane == 0) write_size_grad(p, work, step, head, sum);
  }
}

// d angles and d dt. A block has kGateGradSteps steps of a row.
template <int = 0>
__global__ void __launch_bounds__(kGateGradThreads) gate_grads_kernel(const __grid_constant__ UnrotateParams p) {
  __shared__ GateGradTile tile;
  const int64_t blocks = (p.seqlen + kGateGradSteps - 1) / kGateGradSteps;
  GateGradWork work;
  work.row = blockIdx.x / blocks;
  work.first_step = blockIdx.x % blocks * kGateGradSteps;
  work.steps = static_cast<int>(min(int64_t(kGateGradSteps), p.seqlen - work.first_step));
  const int64_t chunk = work.first_step / kPhaseChunk, end_of_chunk = min((chunk + 1) * kPhaseChunk, p.seqlen);
  work.later = p.later + (work.row * p.chunks + chunk) * p.heads * p.angles;
  work.last_reset = -1;
  if (p.resets != nullptr) {
    for (int64_t step = chunk * kPhaseChunk; step < end_of_chunk; ++step) {
      if (begins_anew(reset_at(p, work.row, step))) work.last_reset = step;
    }
  }
  const int64_t reset_of_block = work.last_reset - work.first_step;
  if (reset_of_block >= 0 && reset_of_block < work.steps && p.initial_parts != nullptr) {
    const int sequence = reset_at(p, work.row, work.last_reset);
    if (sequence >= 0) {
      for (int64_t phase = threadIdx.x; phase < p.heads * p.angles; phase += kGateGradThreads) {
        p.initial_parts[sequence * p.heads * p.angles + phase] += work.later[phase];
      }
    }
  }
  if (p.rates_of_heads == nullptr) {
    write_grads_of_shared_rates(p, work, tile);
  } else {
    write_grads_of_own_rates(p, work);
  }
}

constexpr int kRowGradThreads = 256;

// dB and dC: the sums over the slabs of a group. A thread has one element of both.
template <typename Scalar>
__global__ void __launch_bounds__(kRowGradThreads) row_grads_kernel(const __grid_constant__ UnrotateParams p) {
  const int64_t index = int64_t(blockIdx.x) * kRowGradThreads + threadIdx.x;
  if (index >= p.batch * p.seqlen * p.ranks * p.groups * p.dstate) return;
  const int64_t column = index % p.dstate, of_rows = index / p.dstate, group = of_rows % p.groups,
                rank = of_rows / p.groups % p.ranks, step = of_rows / (p.groups * p.ranks) % p.seqlen,
                row = of_rows / (p.groups * p.ranks * p.seqlen);
  const auto write = [&](const RowView& view, const float* parts) {
    if (view.data == nullptr) return;
    float sum = 0;
    for (int64_t slab = 0; slab < p.slabs; ++slab) sum += parts[(of_rows * p.slabs + slab) * p.dstate + column];
    const_cast<Scalar*>(input_row<Scalar>(view, row, step, rank, group))[column] = cuda::from_accumulate<Scalar>(sum);
  };
  write(p.grad_B, p.B_parts);
  write(p.grad_C, p.C_parts);
}

template <typename Scalar>
cudaError_t launch_unrotate(const UnrotateParams& params, bool is_aligned, cudaStream_t stream) {
  const int64_t pair_blocks = ((params.dstate + 1) / 2 + kBlockPairs - 1) / kBlockPairs,
                blocks = params.batch * params.chunks * params.ranks * params.groups * params.slabs * pair_blocks;
  const auto kernel = is_aligned ? unrotate_kernel<Scalar, true> : unrotate_kernel<Scalar, false>;
  constexpr int kBytes = sizeof(UnrotateShared);
  cudaError_t error = cuda::allow_shared_bytes(kernel, kBytes);
  if (error == cudaSuccess) {
    error = cuda::launch(kernel, blocks, kUnrotateThreads, kBytes, stream, /*uses_pdl=*/false, params);
  }
  if (error == cudaSuccess && params.angles > 0) {
    error = launch_phase_scan(ChunkSums{params}, params, stream);
    if (error == cudaSuccess) {
      const int64_t step_blocks = (params.seqlen + kGateGradSteps - 1) / kGateGradSteps;
      error = cuda::launch(gate_grads_kernel<>, params.batch * step_blocks, kGateGradThreads, 0, stream, /*uses_pdl=*/false,
                           params);
    }
  }
  if (error == cudaSuccess && params.B_parts != nullptr) {
    const int64_t elements = params.batch * params.seqlen * params.ranks * params.groups * params.dstate;
    error =
        cuda::launch(row_grads_kernel<Scalar>, (elements + kRowGradThreads - 1) / kRowGradThreads, kRowGradThreads, 0, stream,
                     /*uses_pdl=*/false, params);
  }
  return error;
}

}  // namespace ssm_kernels::mamba3
