// The memory before each chunk, or the gradient of the memory after it, of mlstm_scan with wgmma (compute capability 9.0a):
//
//   forward in time   S <- d S + sum_j c_j e^(s_l - s_j) v_j k_j^T      backward in time   T <- d T + sum_i e^(s_i) f_i g_i
//   q_i^T
//
// with s the sum of log decays from the chunk's start, l its last step, d the decay over it, c the gain, f the factor of the
// output and g its gradient. Before each chunk the state is rounded and stored as the tiles that the products of a chunk load.
// In backward in time the block also reads S of the chunk, and leaves sum(S T) for the gradients of the gates.
//
// A block has kStateValues values of a line and all its keys. Two consumer warpgroups keep 64 of the values each, as fp32 in
// registers. One thread of the third warpgroup loads the rows by TMA, 64 steps at a time. The scaled rows are split into hi and
// lo parts, so that a state is rounded only when it is stored.
//
// If there are fewer blocks than multiprocessors, a line's chunks are split into segments, with a block for each. A launch
// before (is_summary) computes the state after each segment, begun with zero, and the decay over it. Each block then begins
// with the composition of those before its own.
//
// Forward in time also leaves the memory after each packed sequence. A chunk in which sequences end before its last step
// is loaded once more for each of them, with other scales: the memory before the chunk counts for the first one alone.
#pragma once

#include "cuda/chunked/state.cuh"
#include "cuda/pipeline.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/setmaxnreg.cuh"
#include "cuda/ptx/tma.cuh"
#include "mlstm/cuda/chunks.h"
#include "mlstm/cuda/sequences.cuh"

namespace ssm_kernels::mlstm {

using cuda::FragmentLane;
using cuda::FragmentPairs;
using cuda::kWarpgroupThreads;
using cuda::kWarpgroupWarps;
using cuda::kWarpSize;
using cuda::Mbarrier;
using cuda::PipelineState;
using cuda::SmemTile;

constexpr int kTile = 64, kConsumers = 2, kStateValues = kConsumers * kTile, kHalfKeys = kMatrixKeys / 2;
constexpr int kChunkThreads = (kConsumers + 1) * kWarpgroupThreads, kConsumerWarps = kConsumers * kWarpgroupWarps;
constexpr int kChunkRegisters = 240,
              kLoaderRegisters = cuda::producer_registers<kConsumers * kWarpgroupThreads, kChunkRegisters, kWarpgroupThreads>();
constexpr int kStateTileElements = kTile * kMatrixKeys;

// 64 rows of a warpgroup and all keys, as accumulators.
using KeyAccumulator = float[2][kHalfKeys / 8][4];

// Calls body(low, high, half of the columns, block of 8 columns there, half of the warp's rows) for each pair of neighboring
// columns.
template <typename Body>
__device__ __forceinline__ void for_each_pair(KeyAccumulator& values, const Body& body) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int n = 0; n < kHalfKeys / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) body(values[h][n][2 * half], values[h][n][2 * half + 1], h, n, half);
    }
  }
}

__device__ __forceinline__ void sync_consumer(int index) { cuda::barrier_sync(1 + index, kWarpgroupThreads); }
// Arrives at a barrier for a warp that has read what the barrier protects.
__device__ __forceinline__ void release(Mbarrier& barrier, const FragmentLane& lane) {
  __syncwarp();
  barrier.arrive_if(lane.index == 0);
}

struct alignas(cuda::kOperandAlignment) StateStage {
  SmemTile<kTile> values[kConsumers];
  SmemTile<kHalfKeys> keys[2];
  float scales[kTile];
};
struct StatesShared {
  static constexpr int kStages = 3;
  StateStage stages[kStages];
  SmemTile<kMatrixKeys> rounded[kConsumers];
  Mbarrier full[kStages], empty[kStages], other_full[kConsumers];
};

struct ChunkStates {
  using Scalar = __nv_bfloat16;
  const ChunkParams& p;
  StatesShared& shared;
  bool is_reverse, is_summary;
  int64_t slice, line, segment;
  int begin, end;  // the segment's chunks, in the order of the scan

  __device__ __forceinline__ ChunkStates(const ChunkParams& p, StatesShared& shared, bool is_reverse, bool is_summary)
      : p(p), shared(shared), is_reverse(is_reverse), is_summary(is_summary) {
    const int64_t slices = p.value_dim / kStateValues, of_slices = blockIdx.x / slices;
    slice = blockIdx.x - of_slices * slices;
    segment = of_slices / p.lines();
    line = of_slices - segment * p.lines();
    const int64_t length = (p.chunks + p.segments - 1) / p.segments;
    begin = static_cast<int>(min(segment * length, p.chunks));
    end = static_cast<int>(min((segment + 1) * length, p.chunks));
  }

  __device__ __forceinline__ int chunk_at(int position) const {
    return is_reverse ? static_cast<int>(p.chunks) - 1 - position : position;
  }
  __device__ __forceinline__ int64_t number(int position) const { return line * p.chunks + chunk_at(position); }
  __device__ __forceinline__ int64_t entry() const { return p.first_entry + line / p.part_heads; }
  __device__ __forceinline__ int64_t head() const { return p.first_head + line % p.part_heads; }

  // Whether the memory after each packed sequence is to be written.
  __device__ __forceinline__ bool has_ends() const { return p.end_tables != nullptr && !is_reverse && !is_summary; }
  __device__ __forceinline__ SequenceEnds ends_in(int position) const {
    const int first = chunk_at(position) * kMatrixChunk, last = min(first + kMatrixChunk, static_cast<int>(p.seqlen));
    return SequenceEnds(p.cu_seqlens, has_ends() ? static_cast<int>(p.sequences) : 0, first, last);
  }
  __device__ __forceinline__ int64_t place_of_end(const SequenceEnds& ends) const { return line * p.sequences + ends.number(); }

  __device__ __forceinline__ void load() const {
    PipelineState at;
#pragma unroll 1
    for (int position = begin; position < end; ++position) {
      for (SequenceEnds ends = ends_in(position); ends.find_inside(); ends.advance()) {
        load_chunk(position, p.end_tables + place_of_end(ends) * kMatrixChunk, at);
      }
      load_chunk(position,
                 p.tables + (number(position) * kChunkTables + (is_reverse ? kTableFromStart : kTableToEnd)) * kMatrixChunk,
                 at);
    }
  }
  __device__ __forceinline__ void load_chunk(int position, const float* scales, PipelineState& at) const {
    const cuda::TmaDescriptor &values = is_reverse ? p.grad_out : p.v, &keys = is_reverse ? p.q : p.k;
    const int of_entry = static_cast<int>(entry()), of_head = static_cast<int>(head());
#pragma unroll 1
    for (int half = 0; half < kMatrixChunk / kTile; ++half) {
      StateStage& stage = shared.stages[at.stage];
      Mbarrier& full = shared.full[at.stage];
      if (at.phase > 0) shared.empty[at.stage].wait(at.phase - 1);
      full.arrive_and_expect_tx(sizeof(stage.values) + sizeof(stage.keys) + sizeof(stage.scales));
      const int step = chunk_at(position) * kMatrixChunk + half * kTile;
#pragma unroll
      for (int i = 0; i < kConsumers; ++i) {
        cuda::tma_load_tile(&stage.values[i], values, static_cast<int>(slice) * kStateValues + i * kTile, of_head, step,
                            of_entry, full);
      }
#pragma unroll
      for (int i = 0; i < kMatrixKeys / kTile; ++i) {
        cuda::tma_load_tile(reinterpret_cast<SmemTile<kTile>*>(stage.keys) + i, keys, i * kTile, of_head, step, of_entry, full);
      }
      cuda::tma_load(stage.scales, scales + half * kTile, sizeof(stage.scales), full);
      at.advance(StatesShared::kStages);
    }
  }

  // The tile of the workspace before a position, of a consumer warpgroup.
  __device__ __forceinline__ Scalar* tile_of(void* states, int position, int index) const {
    return static_cast<Scalar*>(states) +
           ((number(position) * (p.value_dim / kTile)) + slice * kConsumers + index) * kStateTileElements;
  }
  // The warpgroup's rows of a sequence in a (sequences, heads, value_dim, key_dim) tensor.
  template <typename Float>
  __device__ __forceinline__ Float* rows_of(Float* states, int64_t sequence, int index, const FragmentLane& lane) const {
    const int64_t row = (sequence * p.heads + head()) * p.value_dim + slice * kStateValues + index * kTile + lane.row;
    return states + row * kMatrixKeys + 2 * lane.pair;
  }
  static __device__ __forceinline__ int offset_in_rows(int h, int n, int half) {
    return half * 8 * kMatrixKeys + h * kHalfKeys + 8 * n;
  }
  // The registers of a thread in the workspace of segments.
  __device__ __forceinline__ float4* registers_of(int64_t of_segment, int index) const {
    const int64_t block = (of_segment * p.lines() + line) * (p.value_dim / kStateValues) + slice;
    return reinterpret_cast<float4*>(p.segment_states) + (block * kConsumers + index) * (kStateTileElements / 4) +
           threadIdx.x % kWarpgroupThreads;
  }
  __device__ __forceinline__ float& decay_of(int64_t of_segment) const {
    return p.segment_decays[(of_segment * p.lines() + line) * (p.value_dim / kStateValues) + slice];
  }

  __device__ __forceinline__ void begin_state(KeyAccumulator& state, int index, const FragmentLane& lane) const {
    for_each_pair(state, [](float& low, float& high, int, int, int) { low = high = 0; });
    const float* const given = is_reverse ? p.grad_final_states : p.initial_states;
    if (given != nullptr && (segment == 0)) {
      const float* const rows = rows_of(given, entry(), index, lane);
      for_each_pair(state, [&](float& low, float& high, int h, int n, int half) {
        const float2 pair = *reinterpret_cast<const float2*>(rows + offset_in_rows(h, n, half));
        low = pair.x;
        high = pair.y;
      });
    }
    if (is_summary) return;
#pragma unroll 1
    for (int64_t earlier = 0; earlier < segment; ++earlier) {
      const float4* const source = registers_of(earlier, index);
      const float decay = decay_of(earlier);
      // A sequence that begins in the segment drops the state: zero times Inf would be NaN.
      if (decay == 0) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int n = 0; n < kHalfKeys / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) state[h][n][i] = 0;
          }
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int n = 0; n < kHalfKeys / 8; ++n) {
          const float4 more = __ldcg(source + (h * (kHalfKeys / 8) + n) * kWarpgroupThreads);
          float (&block)[4] = state[h][n];
          block[0] = fmaf(decay, block[0], more.x);
          block[1] = fmaf(decay, block[1], more.y);
          block[2] = fmaf(decay, block[2], more.z);
          block[3] = fmaf(decay, block[3], more.w);
        }
      }
    }
  }

  __device__ __forceinline__ void consume(int index) const {
    const FragmentLane lane;
    const FragmentPairs<> pairs(lane);
    KeyAccumulator state;
    begin_state(state, index, lane);
    SmemTile<kMatrixKeys>& rounded = shared.rounded[index];
    const bool starts_copies = threadIdx.x % kWarpgroupThreads == 0;
    const bool reads_other = is_reverse && !is_summary;
    const auto load_other = [&](int position) {
      if (starts_copies) {
        shared.other_full[index].arrive_and_expect_tx(sizeof(rounded));
        cuda::tma_load(&rounded, tile_of(p.states, position, index), sizeof(rounded), shared.other_full[index]);
      }
    };
    if (reads_other && begin < end) load_other(begin);
    float decay_of_segment = 1;
    PipelineState at;
#pragma unroll 1
    for (int position = begin; position < end; ++position) {
      const float decay = p.decays[number(position)];
      decay_of_segment *= decay;
      if (!is_summary) {
        if (reads_other) {
          shared.other_full[index].wait(position - begin);
          float product = 0;
          for_each_pair(state, [&](float& low, float& high, int h, int n, int half) {
            const float2 other = cuda::unpack<Scalar>(pairs.at(rounded, h * (kHalfKeys / 8) + n, half));
            product = fmaf(low, other.x, fmaf(high, other.y, product));
          });
#pragma unroll
          for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
            product += __shfl_xor_sync(cuda::kAllLanes, product, distance);
          }
          if (lane.index == 0) {
            p.products[number(position) * (p.value_dim / 16) + (slice * kConsumers + index) * kWarpgroupWarps + lane.warp] =
                product;
          }
        }
        for_each_pair(state, [&](float& low, float& high, int h, int n, int half) {
          pairs.at(rounded, h * (kHalfKeys / 8) + n, half) = cuda::pack<Scalar>(low, high);
        });
        cuda::fence_proxy_async();
        sync_consumer(index);
        cuda::tma_store(tile_of(is_reverse ? p.grad_states : p.states, position, index), &rounded, sizeof(rounded),
                        starts_copies);
      }
      SequenceEnds ends = ends_in(position);
      bool is_end;
#pragma unroll 1
      do {
        is_end = ends.find_inside();
        add_chunk(state, is_end ? p.end_decays[place_of_end(ends)] : decay, index, lane, at);
        if (is_end || ends.ends_with_chunk()) write(state, p.final_states, ends.number(), index, lane);
        ends.advance();
      } while (is_end);
      if (!is_summary) {
        // TMA has read the tile, which load_other() or the next chunk overwrites.
        cuda::tma_store_wait_read<0>();
        if (reads_other) {
          if (position + 1 < end) load_other(position + 1);
        } else {
          sync_consumer(index);
        }
      }
    }
    if (is_summary) {
      float4* const target = registers_of(segment, index);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int n = 0; n < kHalfKeys / 8; ++n) {
          const float (&block)[4] = state[h][n];
          __stcg(target + (h * (kHalfKeys / 8) + n) * kWarpgroupThreads, float4{block[0], block[1], block[2], block[3]});
        }
      }
      if (index == 0 && starts_copies) decay_of(segment) = decay_of_segment;
      return;
    }
    float* const final = is_reverse ? p.grad_initial_states : p.final_states;
    if (final != nullptr && segment + 1 == p.segments && !has_ends()) write(state, final, entry(), index, lane);
  }

  // Writes the state to a sequence's rows.
  __device__ __forceinline__ void write(KeyAccumulator& state, float* target, int64_t sequence, int index,
                                        const FragmentLane& lane) const {
    float* const rows = rows_of(target, sequence, index, lane);
    for_each_pair(state, [&](float& low, float& high, int h, int n, int half) {
      *reinterpret_cast<float2*>(rows + offset_in_rows(h, n, half)) = {low, high};
    });
  }

  // Moves the state over a loaded chunk: state <- decay state + the chunk's scaled products.
  __device__ __forceinline__ void add_chunk(KeyAccumulator& state, float decay, int index, const FragmentLane& lane,
                                            PipelineState& at) const {
    for_each_pair(state, [&](float& low, float& high, int, int, int) {
      low *= decay;
      high *= decay;
    });
#pragma unroll 1
    for (int half = 0; half < kMatrixChunk / kTile; ++half) {
      shared.full[at.stage].wait(at.phase);
      StateStage& stage = shared.stages[at.stage];
      uint32_t x[4][4], scaled[4][4], lo[4][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        cuda::chunked::load_inputs(x[j], stage.values[index], j, lane);
        cuda::chunked::scale_inputs<Scalar>(x[j], stage.scales, j, lane, scaled[j], lo[j]);
      }
      const uint64_t keys[2] = {cuda::make_operand(stage.keys[0]), cuda::make_operand(stage.keys[1])};
      // Without any decay left, the state is dropped: zero times Inf would be NaN.
      const bool adds = half > 0 || decay != 0;
      cuda::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) cuda::gemm<Scalar, true>(state[h], scaled[j], cuda::rows_of(keys[h], j), adds || j > 0);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) cuda::gemm<Scalar, true>(state[h], lo[j], cuda::rows_of(keys[h], j), true);
      }
      cuda::warpgroup_commit();
      cuda::warpgroup_wait<0>(state[0]);
      cuda::warpgroup_wait<0>(state[1]);
      release(shared.empty[at.stage], lane);
      at.advance(StatesShared::kStages);
    }
  }
};

__global__ void __launch_bounds__(SSM_KERNELS_HAS_WGMMA ? kChunkThreads : kWarpSize, 1)
    mlstm_chunk_states_kernel(const __grid_constant__ ChunkParams p, bool is_reverse, bool is_summary) {
#if SSM_KERNELS_HAS_WGMMA
  extern __shared__ unsigned char unaligned_memory[];
  StatesShared& shared = cuda::align_shared<StatesShared>(unaligned_memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < StatesShared::kStages; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(kConsumerWarps);
    }
    for (int i = 0; i < kConsumers; ++i) shared.other_full[i].init(1);
    cuda::fence_proxy_async();
  }
  __syncthreads();
  const ChunkStates states(p, shared, is_reverse, is_summary);
  // The shuffle tells the compiler that all lanes have the same value.
  const int warpgroup = __shfl_sync(cuda::kAllLanes, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
  if (warpgroup == kConsumers) {
    cuda::warpgroup_reg_dealloc<kLoaderRegisters>();
    if (threadIdx.x == kConsumers * kWarpgroupThreads) states.load();
  } else {
    cuda::warpgroup_reg_alloc<kChunkRegisters>();
    states.consume(warpgroup);
  }
#endif
}

}  // namespace ssm_kernels::mlstm
