// The interface between the linear scan's CUDA entry points (entry.cpp) and its kernels: how blocks share the work.
//
// There are two kinds of kernels, and those of the summary (summary.cuh). With many chains a block of the sequential kernels
// has one chain, over all of time (sequential.cuh). The tile kernels take all other calls: few chains, packed sequences,
// channels that are not contiguous, and doubles. Rows of the sequential kernels and of plain tiles may start at any element.
//
// A tile is kTileChannels channels of one row of the batch over tile_steps steps. Blocks are persistent and take one tile after
// another. Time is always split, so that few channels fill a device as well as many do. The tiles along time form a chain, in
// which each passes the state to the next (tile_carry.cuh). Tile numbers run over the chains first, then over time.
//
// A position is a step in scan order: position t is step t in forward, and step seqlen - 1 - t in backward.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "common/integers.h"
#include "common/kernel_abi.h"
#include "cuda/constants.h"
#include "cuda/divisor.h"
#include "linear_scan/linear_scan.h"

namespace ssm_kernels::linear_scan {

// The values of the debug option linear_scan_kernel.
enum class KernelChoice : int {
  kFaster,
  kTiles,
  kSequential,  // for all calls that the sequential kernels support
};

// The rows of a kernel's tiles. In plain tiles channels are contiguous and a sequence begins with the first step only, without
// resets; the loop then fits into the instruction cache.
enum class TileRows {
  kAny,
  kVectors,  // plain
  kShifted,  // plain; rows start at any element
};

// Whether a recurrence has a tile kernel of its own for such rows. Other calls take a kernel for several recurrences, options
// and rows (any_recurrence.cuh), which keeps the build short.
constexpr bool has_tile_kernel(Recurrence recurrence, ScalarKind kind, TileRows rows, bool is_forward) {
  if (kind != ScalarKind::kFloat && kind != ScalarKind::kBFloat16) return false;
  const bool is_linear = recurrence == Recurrence::kLinear, is_min_gru = recurrence == Recurrence::kMinGru;
  // Through the kernel for several recurrences, backward of packed minlstm_scan takes 1.2 to 1.3 times as long on an H200, and
  // that of liquid_scan with one time step, whose rows are not plain, 1.4 to 1.6 times.
  const bool is_large = recurrence == Recurrence::kMinLstm || recurrence == Recurrence::kLiquid;
  // It takes 1.2 to 1.6 times as long for few chains of the other recurrences, too. Shifted rows have kernels where rows of
  // vectors have them: both compute the same bits.
  if (is_large || rows != TileRows::kAny) return true;
  return kind == ScalarKind::kBFloat16 && (is_linear || (is_min_gru && is_forward));
}

constexpr int kTileChannels = 64;
using cuda::kVectorBytes;
constexpr int kThreads = 128;  // of a block; a multiprocessor holds two to four blocks
// Consecutive steps of one thread. More inputs leave room for fewer steps, in shared memory and in the registers of gates.
// Doubles have one kernel for all recurrences.
constexpr int fwd_thread_steps(int inputs, int scalar_bytes) { return inputs <= 2 && scalar_bytes < 8 ? 8 : 4; }
constexpr int kBwdThreadSteps = 4;
constexpr int kSummaryThreadSteps = 16;
constexpr int tile_steps(int scalar_bytes, int thread_steps) {
  return kThreads / (kTileChannels * scalar_bytes / kVectorBytes) * thread_steps;
}
// The tiles of a chain form groups. A tile reads the state after the previous group and the maps of the earlier tiles of its
// own group (tile_carry.cuh). Each thread holds the words of half a group in registers, so groups are shorter if words are
// longer.
constexpr uint32_t group_tiles_log2(int accumulate_bytes) { return accumulate_bytes == 8 ? 3 : 5; }

// 64-bit words of a published state, and of a published map.
constexpr int state_words_of(int64_t accumulate_bytes) { return accumulate_bytes == 8 ? 2 : 1; }
constexpr int map_words_of(int64_t accumulate_bytes) { return accumulate_bytes == 8 ? 4 : 1; }

// The number of inputs that pass through shared memory: those that do not broadcast, in backward without the one that is b,
// which is the last of them.
template <typename Variant, bool is_forward>
constexpr int staged_inputs() {
  constexpr int kNarrow = static_cast<int>(Variant::kFirstBroadcast);
  if (is_forward || Variant::kAdded == kNoInput) return kNarrow;
  static_assert(is_forward || Variant::kAdded == kNoInput || Variant::kAdded == kNarrow - 1, "the added input is the last");
  return kNarrow - 1;
}
template <typename Variant, bool is_forward>
constexpr int kStagedInputs = staged_inputs<Variant, is_forward>();

struct Partition {
  uint32_t tiles_in_all = 0;  // below 2^31
  int64_t tiles = 0;          // along time
  cuda::Divisor chains;
  cuda::Divisor channel_blocks;  // chains of one batch row
  int multiprocessors = 0;
  // Bit i: whether the rows of view i are loaded and stored as vectors. Views: kInputs + i, kGradInputs + i, kH, kGradH.
  uint32_t vector_views = 0;
  // Channels of all views are contiguous; the call has neither packed sequences nor a reset mask. Summaries: rows are vectors.
  bool is_plain = false;
  bool is_shifted = false;  // some view's rows are not vectors: in plain tiles they start at any element
  // The ticket counter, and the state after each group of 2^group_log2 tiles, (groups, chains, kTileChannels). Zero before the
  // kernel, by a kernel that the launcher queues; null if there is one tile along time.
  uint32_t* ticket_counter = nullptr;
  uint64_t* state_words = nullptr;
  // The map of each tile, (tiles, chains, kTileChannels). Zero before the kernel; null if there is one tile along time, or
  // groups are single tiles.
  uint64_t* map_words = nullptr;
  uint32_t group_log2 = 0;
  int64_t words = 0;  // of all three, from the ticket counter on

  static constexpr int kInputs = 0, kGradInputs = kMaxRecurrenceInputs, kH = 2 * kMaxRecurrenceInputs, kGradH = kH + 1;
};

// How the kernels of the summary share the work (summary.cuh). The tiles of packed sequences are as many as there may be: some
// are empty. Packed sequences are plain here, because each has tiles of its own.
struct SummaryPartition : Partition {
  int64_t sequences = 0;
  // Where each packed sequence begins, in the order of the scan, and where the last ends. Null if sequences are not packed.
  const int64_t* bounds = nullptr;
  cuda::Divisor sequence_tiles;  // along time, if sequences are not packed
  // The decay and offset of each tile, (tiles_in_all, kTileChannels, 2), and, with a reset mask, whether it has a reset. Null
  // if every sequence is one tile.
  void* maps = nullptr;
  bool* resets = nullptr;
};
constexpr int kSummaryShares = 8, kSummaryFoldThreads = kSummaryShares * kTileChannels;

// How the sequential kernels share the work: a block for each chain, or for several chains that keep step. Channels of all
// views are contiguous, and sequences are not packed.
struct SequentialPartition {
  uint32_t chains = 0;
  bool is_shifted = false;  // some view's rows are not vectors: they start at any element
  // Whether rows that are read, and rows that are stored, start and end at even elements of pairs. Vectors do.
  bool reads_pairs = true, stores_pairs = true;
  cuda::Divisor channel_blocks;  // chains of one batch row
  int segments = 0;              // of a chain. The launcher sets it.
  int multiprocessors = 0;
  int multiprocessor_bytes = 0, block_bytes = 0;  // of shared memory, at most
  // Whether chains of neighboring channels write parts of the same sectors of memory, and the device has clusters.
  bool keeps_step = false;
  // The launcher sets these: warps of a chain, and, where chains go through time in step, the chains of a block and the blocks
  // of a cluster.
  int warps = 0, block_chains = 1, cluster = 1;
};

constexpr int kSequentialMaxWarps = 16;  // of a chain, and at 128 registers a thread of a multiprocessor
// A chain's shared memory begins with an mbarrier for each warp and the counters of its neighbors' segments (Chain::Neighbors).
constexpr int kNeighborsAt = kSequentialMaxWarps * 8, kSequentialBarrierBytes = kNeighborsAt + 16;

// The warps of a chain: the most with which all blocks are resident at once, because blocks of many warps copy far ahead. A
// multiprocessor has room for `most_warps`. Where blocks of two warps do not all fit, blocks run in waves, of two to four
// warps: those whose last wave is fullest.
inline int sequential_warps(const SequentialPartition& partition, int most_warps, int warp_bytes) {
  constexpr int64_t kReservedBytes = 1024;  // of each block
  const int64_t chains = partition.chains, multiprocessors = partition.multiprocessors;
  const auto limit = [&](int64_t warps) {
    const int64_t fit = std::max<int64_t>(1, (partition.block_bytes - kSequentialBarrierBytes) / warp_bytes);
    return static_cast<int>(std::min({warps, fit, int64_t(partition.segments)}));
  };
  const int64_t blocks = ceil_div(chains, multiprocessors);  // of a multiprocessor
  const int64_t bytes = partition.multiprocessor_bytes / blocks - kReservedBytes - kSequentialBarrierBytes;
  const int64_t resident = std::min(bytes / warp_bytes, most_warps / blocks);
  if (resident >= 2) return limit(resident);
  int64_t best = 0, best_places = 1;
  for (int64_t warps = 4; warps >= 2; --warps) {
    const int64_t block_bytes = kSequentialBarrierBytes + warps * warp_bytes + kReservedBytes;
    const int64_t places = multiprocessors * std::min(partition.multiprocessor_bytes / block_bytes, most_warps / warps);
    const int64_t in_waves = places == 0 ? std::numeric_limits<int64_t>::max() : ceil_div(chains, places) * places;
    if (best == 0 || in_waves < best_places) {
      best = warps;
      best_places = in_waves;
    }
  }
  return limit(best);
}

// Queues a kernel that sets the carry's words to zero. The next kernel may start by PDL if it waits for this one.
SSM_KERNEL_API cudaError_t launch_clear_words(const Partition& partition, cudaStream_t stream);

// Queue a kernel on the stream. Instantiated for float, double, __half and __nv_bfloat16; the sequential kernels not for
// double.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_linear_scan_fwd(const LinearScanFwdParams& params, const Partition& partition,
                                                  cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_linear_scan_bwd(const LinearScanBwdParams& params, const Partition& partition,
                                                  cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_linear_scan_sequential_fwd(const LinearScanFwdParams& params,
                                                             const SequentialPartition& partition, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_linear_scan_sequential_bwd(const LinearScanBwdParams& params,
                                                             const SequentialPartition& partition, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_linear_scan_summary(const LinearScanSummaryParams& params, const SummaryPartition& partition,
                                                      cudaStream_t stream);

SSM_KERNEL_STRUCT(Partition, 104);
SSM_KERNEL_STRUCT(SummaryPartition, 152);
SSM_KERNEL_STRUCT(SequentialPartition, 56);

}  // namespace ssm_kernels::linear_scan
