// The interface between the linear scan's CUDA entry points (entry.cpp) and its kernels: how blocks share the work.
//
// A tile is kTileChannels channels of one row of the batch over tile_steps steps. Blocks are persistent and take one tile after
// another. Time is always split, so that few channels fill a device as well as many do. The tiles along time form a chain, in
// which each passes the state to the next (carry.cuh). Tile numbers run over the chains first, then over time.
//
// A position is a step in scan order: position t is step t in forward, and step seqlen - 1 - t in backward.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/constants.h"
#include "cuda/divisor.h"
#include "linear_scan/linear_scan.h"

namespace ssm_kernels::linear_scan {

constexpr int kTileChannels = 64;
using cuda::kVectorBytes;
constexpr int kThreads = 128;  // of a block; a multiprocessor holds three blocks
// Consecutive steps of one thread. More inputs leave room for fewer steps, in shared memory and in the registers of gates.
constexpr int fwd_thread_steps(int inputs) { return inputs <= 2 ? 8 : 4; }
constexpr int kBwdThreadSteps = 4;
constexpr int tile_steps(int scalar_bytes, int thread_steps) {
  return kThreads / (kTileChannels * scalar_bytes / kVectorBytes) * thread_steps;
}
// Tiles of a group: a tile applies the maps of at most the earlier tiles of its group.
constexpr int kGroupTiles = 10;

struct Partition {
  uint32_t tiles_in_all = 0;  // below 2^31
  int64_t tiles = 0;          // along time
  cuda::Divisor chains;
  cuda::Divisor channel_blocks;  // chains of one batch row
  int multiprocessors = 0;
  // Bit i: whether the rows of view i are loaded and stored as vectors. Views: kInputs + i, kGradInputs + i, kH, kGradH.
  uint32_t vector_views = 0;
  bool is_plain = false;  // all views have vectors, sequences are not packed, and there is no reset mask
  // The ticket counter, and the state after each tile, (tiles, chains, kTileChannels). Zero before the kernel; null if there is
  // one tile along time.
  uint32_t* ticket_counter = nullptr;
  uint64_t* state_words = nullptr;
  // The map of each tile, (tiles, chains, kTileChannels, 2). Zero before the kernel; null if there is one tile along time, or
  // many chains.
  uint64_t* tile_words = nullptr;

  static constexpr int kInputs = 0, kGradInputs = kMaxRecurrenceInputs, kH = 2 * kMaxRecurrenceInputs, kGradH = kH + 1;
};

// Queue a kernel on the stream. Instantiated for float, double, __half and __nv_bfloat16.
template <typename Scalar>
cudaError_t launch_linear_scan_fwd(const LinearScanFwdParams& params, const Partition& partition, cudaStream_t stream);
template <typename Scalar>
cudaError_t launch_linear_scan_bwd(const LinearScanBwdParams& params, const Partition& partition, cudaStream_t stream);

}  // namespace ssm_kernels::linear_scan
