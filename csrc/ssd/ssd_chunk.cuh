// What the SSD kernels share: where a unit of work lies, a chunk's tiles in shared memory, and the tables of its step sizes.
#pragma once

#include "common/activations.h"
#include "cuda/async_copy.cuh"
#include "cuda/mma.cuh"
#include "cuda/vector_io.cuh"
#include "cuda/wgmma.cuh"
#include "ssd/ssd_cuda.h"

namespace ssm_kernels::ssd {

constexpr int kWarpSize = 32;
constexpr unsigned kWholeWarp = 0xffffffffu;
constexpr int kUnitWarps = 4;
constexpr int kUnitThreads = kUnitWarps * kWarpSize;
static_assert(kChunk == 2 * kWarpSize, "a lane of the warp that makes the tables has two steps");
static_assert(kUnitRows == kUnitWarps * 16, "each warp of a unit has the 16 rows of one matrix product");

// What operands of cuda/wgmma.cuh in shared memory begin at multiples of.
constexpr int kOperandAlignment = 1024;
template <typename Shared>
constexpr int aligned_shared_bytes() {
  return static_cast<int>(sizeof(Shared)) + kOperandAlignment;
}
template <typename Shared>
__device__ __forceinline__ Shared& align_shared(unsigned char* memory) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  return *reinterpret_cast<Shared*>(memory + (kOperandAlignment - address % kOperandAlignment) % kOperandAlignment);
}

// kChunk rows of 16-bit elements in shared memory, in parts of 64 columns: rows of 128 bytes, whose pieces of 16 bytes change
// places by the row's number, so that eight rows' pieces of one column lie in different banks. This is also the layout that
// cuda/wgmma.cuh describes.
template <int columns>
struct Tile {
  static constexpr int kPieceElements = 8, kPartPieces = 8;
  static constexpr int kPieces = columns / kPieceElements;
  static_assert(kPieces % kPartPieces == 0, "a tile is made of whole parts");
  uint4 parts[kPieces / kPartPieces][kChunk][kPartPieces];
  static constexpr int kRowBytes = sizeof(uint4) * kPartPieces, kPartBytes = kChunk * kRowBytes;  // a row's of a part

  __device__ __forceinline__ uint4* piece(int row, int column_piece) {
    return &parts[column_piece / kPartPieces][row][column_piece % kPartPieces ^ (row & 7)];
  }

  // The address that a lane gives for load_matrices: 16 rows from `row`, 16 columns from column_piece; the four matrices run
  // down the rows first, or along the columns first.
  __device__ __forceinline__ uint4* rows_first(int row, int column_piece, int lane) {
    return piece(row + lane % 16, column_piece + lane / 16);
  }
  __device__ __forceinline__ uint4* columns_first(int row, int column_piece, int lane) {
    return piece(row + lane / 16 * 8 + lane % 8, column_piece + lane / 8 % 2);
  }
};

// A tile as an operand of cuda/wgmma.cuh, and from an operand on, that of the given group of 16 columns or rows.
template <int columns>
__device__ __forceinline__ uint64_t describe(const Tile<columns>& tile) {
  return cuda::describe_operand(&tile, Tile<columns>::kPartBytes);
}
__device__ __forceinline__ uint64_t columns_of(uint64_t operand, int group) {
  constexpr int kGroupsOfPart = 4, kColumnBytes = 32;
  return operand + (group / kGroupsOfPart * Tile<kChunk>::kPartBytes + group % kGroupsOfPart * kColumnBytes) / 16;
}
__device__ __forceinline__ uint64_t rows_of(uint64_t operand, int group) {
  return operand + group * 16 * Tile<kChunk>::kRowBytes / 16;
}

// A thread's share of copying a tensor's rows, chunk by chunk, to tiles of that many columns: of every kRows-th row one piece.
template <int columns, int threads>
class RowCopier {
 public:
  // From a chunk at `source`, rows of that many elements; a tile's other columns become zeros.
  __device__ __forceinline__ RowCopier(const void* source, int64_t stride_step, int elements, int thread)
      : column_(thread % kPieces),
        row_(thread / kPieces),
        is_there_(column_ * kPieceElements < elements),
        source_(static_cast<const unsigned short*>(source) + column_ * kPieceElements + row_ * stride_step) {}

  // Starts the copies of a chunk, of which only the first `steps` rows exist; the others become zeros. Then goes on to the
  // next, or the one before.
  __device__ __forceinline__ void copy(Tile<columns>& tile, int steps, int64_t stride_step, bool is_reverse = false) {
    const unsigned short* source = source_;
    if (steps == kChunk) {
      const int bytes = is_there_ ? cuda::kAsyncCopyBytes : 0;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        cuda::async_copy(tile.piece(row_ + i * kRows, column_), source, bytes);
        source += kRows * stride_step;
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kCopies; ++i) {
        const bool exists = is_there_ && row_ + i * kRows < steps;
        cuda::async_copy(tile.piece(row_ + i * kRows, column_), source, exists ? cuda::kAsyncCopyBytes : 0);
        source += kRows * stride_step;
      }
    }
    source_ += is_reverse ? -kChunk * stride_step : kChunk * stride_step;
  }

 private:
  static constexpr int kPieceElements = Tile<columns>::kPieceElements, kPieces = Tile<columns>::kPieces;
  static constexpr int kRows = threads / kPieces, kCopies = kChunk / kRows;
  static_assert(threads % kPieces == 0 && kChunk % kRows == 0, "a thread copies one column of pieces");

  int column_, row_;
  bool is_there_;
  const unsigned short* source_;
};

// Of a chunk's steps, for one head; l is the chunk's last step. Products of the decays a_t = e^zeta_t are exponentials of
// differences of `log2_decay`, their sums from the chunk's first step, begun anew where a sequence begins.
struct alignas(16) ChunkTables {
  float log2_decay[kChunk];
  float gain[kChunk];        // of the input: d k(zeta)
  float from_start[kChunk];  // the decay from before the chunk to the step; zero if a sequence begins between
  float to_end[kChunk];      // gain times the decay from the step to l; likewise
  int first[kChunk];         // the first step, in the chunk, of the step's sequence
  float whole;               // the decay from before the chunk to l; likewise
  bool has_begun;            // whether any sequence begins in the chunk
};

// Two to the power of it is zero. Sums of lower ones would cost the differences between weaker decays after them their
// accuracy.
constexpr float kLowestLog2Decay = -160;

// Calls visitor with the method as a type.
template <typename Visitor>
__device__ __forceinline__ void visit_exponential(Discretization discretization, const Visitor& visitor) {
  switch (discretization) {
#define SSM_ROW(enumerator, name, type)                \
  case Discretization::enumerator:                     \
    if constexpr (type::kExponential) visitor(type()); \
    break;
    SSM_DISCRETIZATIONS(SSM_ROW)
#undef SSM_ROW
  }
}

// What one head's step sizes are made of.
struct HeadSteps {
  float A, dt_bias;

  HeadSteps() = default;
  __device__ __forceinline__ HeadSteps(const SsdParams& p, int64_t head)
      : A(p.A[head]), dt_bias(p.dt_bias != nullptr ? p.dt_bias[head] : 0.0f) {}

  // d, from dt as it is given.
  __device__ __forceinline__ float step_size(const SsdParams& p, float dt) const {
    return clamp(before_limits(p, dt), p.dt_min, p.dt_max);
  }
  __device__ __forceinline__ float before_limits(const SsdParams& p, float dt) const {
    const float biased = dt + dt_bias;
    return p.dt_softplus ? softplus(biased) : biased;
  }
};

// A lane's two steps of a chunk, fetched before they are needed: as they are, so that nothing waits for them yet.
template <typename Scalar>
struct FetchedSteps {
  Scalar dt[2];
  uint8_t resets[2];
  bool is_there[2];

  __device__ __forceinline__ void fetch(const SsdParams& p, const Scalar* source, const uint8_t* resets_source, int steps) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int step = 2 * lane + i;
      is_there[i] = step < steps;
      if (is_there[i]) dt[i] = source[step * p.dt.stride_step];
      resets[i] = resets_source != nullptr && is_there[i] ? resets_source[step] : 0;
    }
  }
};

// By one warp.
template <typename Scalar>
__device__ __forceinline__ void make_tables(const SsdParams& p, const HeadSteps& head, const FetchedSteps<Scalar>& steps,
                                            ChunkTables& tables) {
  const int lane = threadIdx.x % kWarpSize;
  float log2_decay[2], gain[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float d = steps.is_there[i] ? head.step_size(p, cuda::to_accumulate(steps.dt[i])) : 0.0f;
    const float zeta = steps.is_there[i] ? d * head.A : 0.0f;
    const float log2 = zeta * static_cast<float>(kLog2E);
    log2_decay[i] = log2 < kLowestLog2Decay ? kLowestLog2Decay : log2;
    gain[i] = d;
    visit_exponential(p.discretization, [&](auto method) {
      using Method = decltype(method);
      if constexpr (!Method::kUnitGain) gain[i] *= Method::gain(zeta, Method::basis(zeta));
    });
  }
  const bool begins[2] = {steps.resets[0] != 0, steps.resets[1] != 0};
  const unsigned begins_first = __ballot_sync(kWholeWarp, begins[0]);
  const unsigned begins_second = __ballot_sync(kWholeWarp, begins[1]);
  const bool has_begun = (begins_first | begins_second) != 0;

  // A sum ends with the first step, from the last, before which a sequence begins.
  float sum = begins[1] ? log2_decay[1] : log2_decay[0] + log2_decay[1];
  if (has_begun) {
    bool is_cut = begins[0] || begins[1];
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const float earlier = __shfl_up_sync(kWholeWarp, sum, distance);
      const bool earlier_is_cut = __shfl_up_sync(kWholeWarp, is_cut, distance);
      if (lane >= distance) {
        if (!is_cut) sum += earlier;
        is_cut |= earlier_is_cut;
      }
    }
  } else {
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const float earlier = __shfl_up_sync(kWholeWarp, sum, distance);
      if (lane >= distance) sum += earlier;
    }
  }
  const float before = __shfl_up_sync(kWholeWarp, sum, 1);
  const float last = __shfl_sync(kWholeWarp, sum, kWarpSize - 1);
  const float decay[2] = {begins[0] || lane == 0 ? log2_decay[0] : before + log2_decay[0], sum};
  float from_start[2], to_end[2];
  int first[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    from_start[i] = Math<float>::exp2(decay[i]);
    to_end[i] = gain[i] * Math<float>::exp2(last - decay[i]);
  }
  if (has_begun) {
    const unsigned earlier_lanes = (1u << lane) - 1, this_lane = 1u << lane;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned of_first = begins_first & (earlier_lanes | this_lane);
      const unsigned of_second = begins_second & (i == 0 ? earlier_lanes : earlier_lanes | this_lane);
      if ((of_first | of_second) != 0) from_start[i] = 0;
      if (of_first != begins_first || of_second != begins_second) to_end[i] = 0;
      first[i] = max(0, max(2 * (31 - __clz(of_first)), 2 * (31 - __clz(of_second)) + 1));
    }
  }
  const auto store = [&](auto& table, const auto& values) {
    table[2 * lane] = values[0];
    table[2 * lane + 1] = values[1];
  };
  store(tables.log2_decay, decay);
  store(tables.gain, gain);
  store(tables.from_start, from_start);
  store(tables.to_end, to_end);
  store(tables.first, first);
  if (lane == 0) {
    tables.has_begun = has_begun;
    tables.whole = has_begun ? 0.0f : Math<float>::exp2(last);
  }
}

// Some chunks of a sequence, one after another.
struct Span {
  int64_t entry;  // of the batch, or of the packed sequences
  int64_t batch;
  int64_t start, length;  // of the sequence, in its batch entry
  int64_t first_chunk;    // in the sequence
  int chunks;

  // From that chunk on, at most so many.
  __device__ __forceinline__ Span(const SsdParams& p, int64_t entry, int64_t first_chunk, int64_t max_chunks)
      : entry(entry), first_chunk(first_chunk) {
    const bool is_packed = p.cu_seqlens != nullptr;
    start = is_packed ? sequence_start(p, entry) : 0;
    length = is_packed ? max(int64_t(0), sequence_start(p, entry + 1) - start) : p.seqlen;
    batch = is_packed ? 0 : entry;
    chunks = static_cast<int>(max(int64_t(0), min((length + kChunk - 1) / kChunk - first_chunk, max_chunks)));
  }

  // Within the tensors whatever cu_seqlens says, which nobody has checked where a graph is captured.
  static __device__ __forceinline__ int64_t sequence_start(const SsdParams& p, int64_t entry) {
    return max(int64_t(0), min(p.cu_seqlens[entry], p.seqlen));
  }

  // Of one of the chunks: its first step, in the sequence, and the steps that exist.
  __device__ __forceinline__ int64_t step_of(int chunk) const { return (first_chunk + chunk) * kChunk; }
  __device__ __forceinline__ int steps_of(int chunk) const {
    return static_cast<int>(min(int64_t(kChunk), length - step_of(chunk)));
  }

  template <typename Scalar>
  __device__ __forceinline__ Scalar* rows(const RowsView& view, int64_t head_or_group, int chunk) const {
    return static_cast<Scalar*>(view.data) + batch * view.stride_batch + (start + step_of(chunk)) * view.stride_step +
           head_or_group * view.stride_head;
  }
  __device__ __forceinline__ const uint8_t* resets(const SsdParams& p, int chunk) const {
    return p.resets == nullptr ? nullptr : p.resets + batch * p.seqlen + start + step_of(chunk);
  }
};

// Where a block's work lies: a segment of one sequence, and units of kUnitRows rows of one head's state, which share a group's
// B and C.
struct Place : Span {
  int64_t segment, group;
  int64_t first_unit;  // of the group's

  __device__ __forceinline__ Place(const SsdParams& p, const Partition& partition, int64_t block)
      : Place(p, partition, block, block / partition.blocks_per_group / p.groups) {}

  __device__ __forceinline__ bool is_last_segment(const Partition& partition) const {
    return segment + 1 == partition.segments;
  }

 private:
  __device__ __forceinline__ Place(const SsdParams& p, const Partition& partition, int64_t block, int64_t segment_in_all)
      : Span(p, segment_in_all / partition.segments, segment_in_all % partition.segments * partition.chunks_per_segment,
             partition.chunks_per_segment),
        segment(segment_in_all % partition.segments),
        group(block / partition.blocks_per_group % p.groups),
        first_unit(block % partition.blocks_per_group * kUnits) {}
};

// One of a block's units.
struct Unit {
  bool is_there;  // else the group has no more
  int64_t head;
  int first_row;  // of the head's
  int rows;       // from there on

  __device__ __forceinline__ Unit(const SsdParams& p, int64_t row_blocks, const Place& at, int index) {
    const int64_t heads_per_group = p.heads / p.groups, unit = at.first_unit + index;
    is_there = unit < heads_per_group * row_blocks;
    head = at.group * heads_per_group + (is_there ? unit / row_blocks : 0);
    first_row = is_there ? static_cast<int>(unit % row_blocks) * kUnitRows : 0;
    rows = p.headdim - first_row;
  }
};

}  // namespace ssm_kernels::ssd
