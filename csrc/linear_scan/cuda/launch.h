// Between the linear scan's CUDA entry points (entry.cpp) and its kernels: how the work is cut.
//
// A tile is kTileChannels channels of one batch entry over tile_steps steps; blocks work at one tile after another. Time is cut
// everywhere, so that few channels fill a device as well as many. Tiles along time are a chain: each hands the state on to the
// next (carry.cuh). Tiles are counted with the chains running fastest.
//
// A position counts the steps in the order in which a scan takes them: forward position t is step t, backward it is step
// seqlen - 1 - t.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/constants.h"
#include "cuda/divisor.h"
#include "linear_scan/linear_scan.h"

namespace ssm_kernels::linear_scan {

constexpr int kTileChannels = 64;
using cuda::kVectorBytes;
constexpr int kThreads = 128;  // of a block, three of which a multiprocessor holds
// Consecutive steps of one thread. More inputs leave room for fewer steps, in shared memory and for the gates in registers.
constexpr int fwd_thread_steps(int inputs) { return inputs <= 2 ? 8 : 4; }
constexpr int kBwdThreadSteps = 4;
constexpr int tile_steps(int scalar_bytes, int thread_steps) {
  return kThreads / (kTileChannels * scalar_bytes / kVectorBytes) * thread_steps;
}
// Tiles whose maps one of them may have to apply.
constexpr int kGroupTiles = 10;

struct Partition {
  uint32_t tiles_in_all = 0;  // below 2^31
  int64_t tiles = 0;          // along time
  cuda::Divisor chains;
  cuda::Divisor channel_blocks;  // chains of one batch entry
  int multiprocessors = 0;
  // Whether a view's rows are moved as vectors, bit by bit: kInputs + i, kGradInputs + i, kH, kGradH.
  uint32_t vector_views = 0;
  bool is_plain = false;  // all of them, and sequences are not packed
  // Null if there is one tile along time; else zero at first: the number of tiles that blocks have taken, and the state after
  // each tile, (tiles, chains, kTileChannels).
  uint32_t* taken = nullptr;
  uint64_t* state_words = nullptr;
  // The same of what each tile does to a state, (tiles, chains, kTileChannels, 2), where there are few chains; else null.
  uint64_t* tile_words = nullptr;

  static constexpr int kInputs = 0, kGradInputs = kMaxRecurrenceInputs, kH = 2 * kMaxRecurrenceInputs, kGradH = kH + 1;
};

// Queue a kernel on the stream. Instantiated for float, double, __half and __nv_bfloat16.
template <typename Scalar>
cudaError_t launch_linear_scan_fwd(const LinearScanFwdParams& params, const Partition& partition, cudaStream_t stream);
template <typename Scalar>
cudaError_t launch_linear_scan_bwd(const LinearScanBwdParams& params, const Partition& partition, cudaStream_t stream);

}  // namespace ssm_kernels::linear_scan
