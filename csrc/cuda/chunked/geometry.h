// Chunked scans: the parameters that every such scan has, the sizes of chunks and state tiles, and how blocks share the work.
// Plain data for the host, which partitions a call, and for the kernels.
//
// A chunked scan takes a state (headdim, dstate) of each head through a sequence, a chunk of kChunk steps at a time. Within a
// chunk everything is a matrix product. Heads of a group share the rows that span the state's columns: B and C of SSD, keys and
// queries of attention.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/kernel_abi.h"
#include "common/macros.h"

namespace ssm_kernels::cuda::chunked {

// A tensor (batch, seqlen, heads, row) whose rows are contiguous: rows of heads have headdim elements; rows of groups, with
// groups in place of heads, have dstate elements. A reverse scan is a scan of views whose step 0 is the tensor's last:
// stride_step is negative, and steps are in the scan's order everywhere else.
struct RowsView {
  void* data = nullptr;
  int64_t stride_batch = 0, stride_step = 0, stride_head = 0;
};

// The parameters of a kernel derive from it. `Params` in this folder is such a type. It also has these members:
//
//   const int64_t* cu_seqlens    (batch + 1,) if sequences are packed, else null
//   const uint8_t* resets        (batch, seqlen), or null: steps before which the state becomes zero
//   const float* initial_states  (batch, heads, headdim, state_columns), as all states, or null: zero
//   int64_t states_stride_entry  of all states; negative for packed sequences in reverse, which begin with the last
struct ChunkedGeometry {
  int64_t batch = 0;   // rows of the batch, or packed sequences
  int64_t seqlen = 0;  // of each row, or of all packed sequences together
  int64_t heads = 0, groups = 0;
  int headdim = 0, dstate = 0;
  int state_columns = 0;  // of states in memory: dstate, rounded up to an even number, in fp32 to a multiple of 4
};

// The same parameters, as types of kernels that are compiled for packed sequences alone, or for others alone.
template <typename Params>
struct Packed : Params {};
template <typename Params>
struct Unpacked : Params {};
template <typename Params>
constexpr bool kAreKnownPacked = false;
template <typename Params>
constexpr bool kAreKnownPacked<Packed<Params>> = true;

constexpr int kChunk = 64;                                          // steps
constexpr int kStateRows = 64;                                      // rows of a state tile, which four warps hold
constexpr int kStepBlocks = kChunk / 8, kStepGroups = kChunk / 16;  // of a chunk's steps, as rows or columns of a product

constexpr int kRowElements = 8;  // of a vector of fp16 or bf16
// Workspaces have rows of headdim and dstate rounded up to it.
SSM_HOST_DEVICE constexpr int64_t padded_row(int64_t size) { return (size + kRowElements - 1) / kRowElements * kRowElements; }

constexpr int kWarpgroups = 2;      // consumer warpgroups of a block, with a state tile each
constexpr int kDirections = 2;      // in time, of backward's states
constexpr int kStateColumns = 128;  // columns of a state tile, at most
constexpr int kMaxKernelDstate = kWarpgroups * kStateColumns;
constexpr int kMinSharedBytes = 99 * 1024;  // a block can have it on every device from compute capability 8.0 on

constexpr int kSm90SharedBytes = 227 * 1024;  // on compute capability 9.0

// Columns of a state tile, of states with dstate columns. Those past dstate are zero.
constexpr int64_t tile_columns(int64_t dstate) { return dstate <= 64 ? 64 : kStateColumns; }
// State tiles with the same rows of a head. They belong to one block.
constexpr int column_blocks(int64_t dstate) { return dstate <= kStateColumns ? 1 : kWarpgroups; }
// Blocks of kStateRows rows of one head.
constexpr int64_t row_blocks(int64_t headdim) { return (headdim + kStateRows - 1) / kStateRows; }

template <typename Scalar>
constexpr bool kIsFp32 = std::is_same_v<Scalar, float>;

// The first step of a chunk, computed in 64 bits even if the chunk's number is an int.
SSM_HOST_DEVICE constexpr int64_t first_step(int64_t chunk) { return chunk * kChunk; }

// The most chunks of packed sequences: one of n steps has n / kChunk full chunks and at most one more.
SSM_HOST_DEVICE int64_t max_packed_chunks(int64_t seqlen, int64_t sequences) { return seqlen / kChunk + sequences; }

// The matrix products of a launch: by mma.sync, of fp32 as 3xTF32; by mma.sync of fp32 rounded to TF32; or by wgmma.
enum class Products : int { kMma, kTf32, kWgmma };

// The directions in time whose states a launch computes.
enum class Directions : int { kBoth, kForward, kReverse };

// How a call divides into work tiles. A state tile is kStateRows rows and up to kStateColumns columns of one head's state. A
// work tile is one sequence of one group's pair of state tiles, all its chunks.
struct WorkPartition {
  int heads_per_group = 0, row_blocks = 0, column_blocks = 1;  // the last two: state tiles of one head
  int tiles_per_group = 0;
  int work_tiles_per_group = 0, work_tiles_per_entry = 0;
  int64_t work_tiles = 0;
  int64_t chunks = 0;                         // of a work tile, if sequences are not packed
  int segments = 1;                           // of each work tile, in backward
  Directions directions = Directions::kBoth;  // of backward's states
  // If work tiles have several segments: for each of these, and for each state tile, the state at its end, in the order of the
  // threads' registers, (segments, kWarpgroups, tile_columns / 8, threads, 4), and the segment's map (span_map.cuh), (segments,
  // kWarpgroups). Forward has one for each block (scheduler.cuh), backward all but the last of a work tile, and the states
  // after a span (ssd/cuda/span_states.cuh) all.
  float *states = nullptr, *maps = nullptr;
  int stages = 1;  // of a kernel's pipeline, as many as fit in shared memory: set at its launch
};

// The partition of a call. The caller checks that there are fewer than 2^31 state tiles of a sequence, work tiles, and chunks
// of all work tiles, so that they fit an int.
struct CallSizes {
  int64_t sequences, seqlen, heads, groups, headdim, dstate;
};
inline int64_t tiles_per_entry(const CallSizes& sizes) {
  return sizes.heads * row_blocks(sizes.headdim) * column_blocks(sizes.dstate);
}
inline WorkPartition partition_work(const CallSizes& sizes) {
  const int64_t tiles_per_group = tiles_per_entry(sizes) / sizes.groups,
                work_tiles_per_group = (tiles_per_group + kWarpgroups - 1) / kWarpgroups;
  WorkPartition result;
  result.heads_per_group = static_cast<int>(sizes.heads / sizes.groups);
  result.row_blocks = static_cast<int>(row_blocks(sizes.headdim));
  result.column_blocks = column_blocks(sizes.dstate);
  result.tiles_per_group = static_cast<int>(tiles_per_group);
  result.work_tiles_per_group = static_cast<int>(work_tiles_per_group);
  result.work_tiles_per_entry = static_cast<int>(sizes.groups * work_tiles_per_group);
  result.work_tiles = sizes.sequences * sizes.groups * work_tiles_per_group;
  const int64_t chunks = (sizes.seqlen + kChunk - 1) / kChunk;
  result.chunks = chunks > 0 ? chunks : 1;
  return result;
}

// How forward's blocks share the work tiles: scheduler.cuh.
struct Schedule : WorkPartition {
  int64_t blocks = 0;
  int64_t length = 0;  // chunks of a block's range, if sequences are not packed
  // (sequences + 1,) if sequences are packed: the chunks of one work tile of each earlier sequence, summed.
  int* chunk_starts = nullptr;
  // Flags that are raised when the states at the end of ranges are stored, (blocks, kWarpgroups).
  int* ready = nullptr;
  int* ticket_counter = nullptr;   // if blocks wait for one another's states; zero before the kernel
  bool splits_work_tiles = false;  // whether a work tile may be longer than a range
};

SSM_KERNEL_STRUCT(Schedule, 120);
SSM_KERNEL_STRUCT(WorkPartition, 72);

}  // namespace ssm_kernels::cuda::chunked
