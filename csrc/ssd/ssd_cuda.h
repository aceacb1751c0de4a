// Between the SSD chunk-scan's CUDA entry points (ssd_cuda.cpp) and its kernels: how the work is cut.
#pragma once

#include <cstdint>

#include "ssd/ssd.h"

struct CUstream_st;

namespace ssm_kernels::ssd {

constexpr int kChunk = 64;     // steps
constexpr int kUnitRows = 64;  // of a head's state, at most, that four warps carry

constexpr int kUnits = 2;      // of a block
constexpr int kMaxStages = 3;  // chunks that a block has in shared memory
constexpr int64_t kMaxKernelDstate = 128;

struct Partition {
  int64_t blocks = 0;
  int64_t blocks_per_group = 0;  // of one segment
  int64_t row_blocks = 0;        // units of one head
  int64_t segments = 1;          // of a sequence
  int64_t chunks_per_segment = 0;
  int stages = 1;  // as many as there is shared memory for
  bool may_use_wgmma = true;
  // With several segments, of each but the last what it does to a state: the state after it begun with zero, (batch,
  // segments, heads, headdim, dstate), and the decay, (batch, segments, heads).
  float* segment_states = nullptr;
  float* segment_decays = nullptr;
};

// Queue the kernels on the stream; return a cudaError_t. Instantiated for __half and __nv_bfloat16.
template <typename Scalar>
int launch_ssd_fwd(const SsdFwdParams& params, const Partition& partition, int max_shared_bytes, CUstream_st* stream);

}  // namespace ssm_kernels::ssd
