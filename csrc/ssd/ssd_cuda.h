// Between the SSD chunk-scan's CUDA entry points (ssd_cuda.cpp) and its kernels: how the work is cut.
#pragma once

#include <cstdint>

#include "cuda/divisor.h"
#include "ssd/ssd.h"

struct CUstream_st;

namespace ssm_kernels::ssd {

constexpr int kChunk = 64;     // steps
constexpr int kUnitRows = 64;  // of a head's state, at most, that four warps carry

constexpr int kRowElements = 8;  // rows are moved in pieces of as many

constexpr int kUnits = 2;      // of a block
constexpr int kMaxStages = 3;  // chunks that a block of forward has in shared memory
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

// Rows as those of x; y and grad_z are null where the gradient of z is not needed.
struct GateBwdParams {
  int64_t batch = 0, seqlen = 0, heads = 0;
  cuda::Divisor pieces_of_head;
  RowsView grad_out, z, y, grad_y, grad_z;
};

// Queue the kernels on the stream; return a cudaError_t. Instantiated for __half and __nv_bfloat16.
template <typename Scalar>
int launch_ssd_fwd(const SsdFwdParams& params, const Partition& partition, int max_shared_bytes, CUstream_st* stream);
template <typename Scalar>
int launch_ssd_bwd(const SsdBwdParams& params, const Partition& partition, CUstream_st* stream);
template <typename Scalar>
int launch_ssd_bwd_gate(const GateBwdParams& params, int blocks, CUstream_st* stream);

// Whether the current device has the products of backward's kernels.
template <typename Scalar>
bool has_ssd_bwd_kernels();

}  // namespace ssm_kernels::ssd
