// Between the linear scan's CUDA entry points (linear_scan_cuda.cpp) and its kernels: how the work is cut.
//
// A block has a tile: kTileChannels channels of one batch entry over tile_steps steps. Time is cut everywhere, so that few
// channels fill a device as well as many. Where there are several tiles along time, blocks hand the state on
// (linear_scan_carry.cuh).
//
// A position counts the steps in the order in which a scan takes them: forward position t is step t, backward it is step
// seqlen - 1 - t.
#pragma once

#include <cstdint>

#include "linear_scan/linear_scan.h"

struct CUstream_st;

namespace ssm_kernels::linear_scan {

constexpr int kTileThreads = 256;
constexpr int kTileChannels = 64;
constexpr int kVectorBytes = 16;  // of a row, that a thread loads or stores at once
// Consecutive steps of one thread, for a kernel that keeps so many tensors of its tile in shared memory: 64 KiB of two or four.
constexpr int thread_steps(int tensors) { return tensors <= 2 ? 8 : 4; }
constexpr int tile_steps(int scalar_bytes, int tensors) {
  return kTileThreads / (kTileChannels * scalar_bytes / kVectorBytes) * thread_steps(tensors);
}
// Forward keeps the inputs that do not broadcast; backward also grad_h and h.
constexpr int fwd_tensors(int narrow_inputs) { return narrow_inputs; }
constexpr int bwd_tensors(int narrow_inputs) { return narrow_inputs + 2; }
// Tiles that pass their states on in one go.
constexpr int kGroupTiles = 16;

struct Partition {
  int64_t channel_blocks = 0;  // tiles side by side
  int64_t chains = 0;          // times the batch
  int64_t tiles = 0;           // along time
  // Whether a view's rows are read as vectors, bit by bit: kInputs + i, kGradInputs + i, kH, kGradH.
  uint32_t vector_views = 0;
  // Zero at first. What each tile does to a state, (tiles, chains, kTileChannels, 2), and the state after each group of tiles,
  // (groups, chains, kTileChannels); null if there is one tile along time.
  uint64_t* tile_words = nullptr;
  uint64_t* state_words = nullptr;

  static constexpr int kInputs = 0, kGradInputs = kMaxRecurrenceInputs, kH = 2 * kMaxRecurrenceInputs, kGradH = kH + 1;
};

// Queue a kernel on the stream; return a cudaError_t. Instantiated for float, double, __half and __nv_bfloat16.
template <typename Scalar>
int launch_linear_scan_fwd(const LinearScanFwdParams& params, const Partition& partition, CUstream_st* stream);
template <typename Scalar>
int launch_linear_scan_bwd(const LinearScanBwdParams& params, const Partition& partition, CUstream_st* stream);

}  // namespace ssm_kernels::linear_scan
