// Between the SSD chunk-scan's CUDA entry points (entry.cpp) and its kernels: how the work is cut.
#pragma once

#include <cstdint>

#include "cuda/divisor.h"
#include "ssd/ssd.h"

struct CUstream_st;

namespace ssm_kernels::ssd {

constexpr int kChunk = 64;      // steps
constexpr int kStateRows = 64;  // of a head's state, at most, that four warps carry

constexpr int kRowElements = 8;  // rows are whole multiples of as many: 16 bytes of 16 bits

constexpr int kWarpgroups = 2;      // of a block
constexpr int kDirections = 2;      // in time, of backward's walks
constexpr int kStateColumns = 128;  // of a head's state, at most, that a unit carries
constexpr int kMaxKernelDstate = kWarpgroups * kStateColumns;
constexpr int kLeastSharedBytes = 99 * 1024;  // that a block may have, from compute capability 8.0 on

// What a block of the kernels takes, at least, of those that take most; backward's are for up to a unit's columns.
constexpr int least_shared_bytes(int64_t dstate, bool is_fp32, bool is_backward) {
  if (!is_fp32) return dstate > kStateColumns ? 146 * 1024 : kLeastSharedBytes;
  return (dstate > kStateColumns || (is_backward && dstate > 64) ? 184 : 136) * 1024;
}

// Columns of a state that backward takes at a time, where a block has that much shared memory.
constexpr int64_t backward_columns(bool is_fp32, int max_shared_bytes) {
  return max_shared_bytes >= least_shared_bytes(kStateColumns, is_fp32, /*is_backward=*/true) ? kStateColumns : 64;
}

// Columns of a unit's state with that many in all; what is over is zero.
constexpr int64_t tile_columns(int64_t dstate) { return dstate <= 64 ? 64 : kStateColumns; }
// Units of the same rows: of one block.
constexpr int column_blocks(int64_t dstate) { return dstate <= kStateColumns ? 1 : kWarpgroups; }
// Of one head.
constexpr int64_t row_blocks(int64_t headdim) { return (headdim + kStateRows - 1) / kStateRows; }

// The sequential scan of short fp32 sequences, fwd_short.cuh: its most steps, and rows of a head's state of a block.
constexpr int kShortSteps = 32, kShortRows = 16;
inline int64_t short_blocks(const SsdParams& p) { return p.batch * p.heads * ((p.headdim + kShortRows - 1) / kShortRows); }

// The first step of a chunk, in 64 bits whatever the chunk's number has.
SSM_HOST_DEVICE constexpr int64_t first_step(int64_t chunk) { return chunk * kChunk; }

// Of packed sequences, at most: one of n steps has n / kChunk full chunks and one more, which may be all that it has.
SSM_HOST_DEVICE int64_t max_packed_chunks(int64_t seqlen, int64_t sequences) { return seqlen / kChunk + sequences; }

// A walk is a sequence's way through time for one block's units, of kStateRows rows and kStateColumns columns of one head's
// state each.
struct WorkPartition {
  int heads_per_group = 0, row_blocks = 0, column_blocks = 1;  // the last two: units of one head
  int tiles_per_group = 0;
  int work_tiles_per_group = 0, work_tiles_per_entry = 0;
  int64_t work_tiles = 0;
  int64_t chunks = 0;  // of a walk, where sequences are not packed
};

// The partition of a call, counted in 64 bits. Its `int`s are right if there are fewer than 2^31 units of each entry, walks,
// and chunks of all walks, which the caller checks.
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

// How forward's blocks share the walks: scheduler.cuh.
struct Schedule : WorkPartition {
  int64_t blocks = 0;
  int64_t length = 0;  // chunks of a block, where sequences are not packed
  // (sequences + 1,), where they are packed: the chunks of one walk of each of the sequences before, added up.
  int* chunk_starts = nullptr;
  // Where runs may begin inside walks: for each block its units' states where its run ends, in the order of their threads'
  // registers, (blocks, kWarpgroups, tile_columns / 8, threads, 4), the decays of the pieces that they are of, (blocks,
  // kWarpgroups), and whether they are there, (blocks, kWarpgroups).
  float* states = nullptr;
  float* decays = nullptr;
  int* ready = nullptr;
  // The blocks that have begun, where any waits for another's states. Zero before the kernel.
  int* tickets = nullptr;
  bool splits_work_tiles = false;  // or might have
  bool may_use_wgmma = true;
  int stages = 1;  // as many as there is shared memory for
};

// Rows as those of x; y and grad_z are null where the gradient of z is not needed.
struct GateBwdParams {
  int64_t batch = 0, seqlen = 0, heads = 0;
  cuda::Divisor vectors_per_head;
  RowsView grad_out, z, y, grad_y, grad_z;
};

// As many stages as a block has shared memory for, but at least one.
template <typename BytesOf>
int fit_stages(int most, int max_shared_bytes, const BytesOf& bytes_of) {
  while (most > 1 && bytes_of(most) > max_shared_bytes) --most;
  return most;
}

// Queue the kernels on the stream; return a cudaError_t. Instantiated for float, __half and __nv_bfloat16.
template <typename Scalar>
int launch_ssd_fwd(const SsdFwdParams& params, const Schedule& schedule, int max_shared_bytes, CUstream_st* stream);
int launch_ssd_fwd_short(const SsdFwdParams& params, CUstream_st* stream);  // of float
template <typename Scalar>
int launch_ssd_bwd(const SsdBwdParams& params, const WorkPartition& partition, bool may_use_wgmma, int max_shared_bytes,
                   CUstream_st* stream);
template <typename Scalar>
int launch_ssd_bwd_gate(const GateBwdParams& params, int blocks, CUstream_st* stream);

}  // namespace ssm_kernels::ssd
