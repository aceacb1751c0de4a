// Between the CUDA entry points (entry.cpp) and the kernels: how the work is cut, and what is launched.
//
// A team of threads norms one group of one row. Up to a warp, a team has a power of two lanes and a block several teams; larger
// teams are whole warps, and one makes a block. Lane l owns vectors l, l + lanes, ... of the group, up to
// kThreadColumns columns. A longer group is cut into chunks, which are read again for each pass.
//
// Forward: each team takes a unit, a group of a row, and keeps it in registers.
// Backward: a block stays with its columns and takes every row_blocks-th row, so that the sums over rows are in registers. A
// block's teams take group_teams neighboring groups of row_teams rows; row_blocks * row_teams partial sums are left for the
// second kernel, which adds them in order.
//
// The vector kernels move 16 bytes at a time and want contiguous, aligned groups; the scalar kernels take any others, and
// float64. The RMSNorm kernels (rms.h) are vector kernels compiled for one case each, without options in their loops.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/constants.h"
#include "norm/norm.h"

namespace ssm_kernels::norm {

using cuda::kWarpSize, cuda::kVectorBytes, cuda::kAllLanes;
// Columns of a thread in registers, in vectors: forward keeps their values, backward the sums over rows. The scalar kernels,
// which have time for it, read one column at a time.
constexpr int kThreadColumns = 16;
// 640 threads leave backward 96 registers each, forward 64 in two blocks of 512. 10240 and 8192 columns fit; longer groups are
// read again for each pass, in backward by the scalar kernel.
constexpr int kFwdMaxThreads = 512, kBwdMaxThreads = 640, kFwdRegisters = 64, kBwdRegisters = 96;
// Rows of a call of the vector kernels, with room for those that they look ahead; groups of these rows are as few.
constexpr int64_t kMaxNarrowRows = int64_t(1) << 30;
// Threads of a block of several teams.
constexpr int kSharedBlockThreads = 128;
// Rows of backward in flight: one in use, the others being copied.
constexpr int kBwdStages = 3;

struct Teams {
  bool use_vectors = false;
  int lanes = kWarpSize;  // of a team
  int count = 1;          // of a block
  int chunks = 1;         // of a group

  int threads() const { return lanes * count; }
};

// The cases that RMSNorm kernels exist for: a silu gate before or after the norm, or no gate, where the residual may be float32
// beside 16-bit activations. kNone: the general kernels.
enum class RmsCase : int { kNone, kGateBefore, kGateAfter, kNoGate, kNoGateWide };

// The blocks of an RMSNorm kernel, groups * row_blocks: each takes one group of every row_blocks-th row.
struct RmsPlan {
  RmsCase rms_case = RmsCase::kNone;
  int warps = 1;  // of a block
  int shared_bytes = 0;
  int row_blocks = 1;
};

struct FwdPlan {
  Teams teams;
  int64_t units = 0, blocks = 0;
  RmsPlan rms;
};

struct BwdPlan {
  Teams teams;
  int group_teams = 1, row_teams = 1;
  int column_blocks = 1, row_blocks = 1;
  int partials = 1;  // row_blocks * row_teams
  RmsPlan rms;
  // A thread's shared memory: the pieces of each stage, and then its sums for grad_bias. An odd number of pieces, so that the
  // same piece of neighboring threads is in different banks.
  int stage_accesses = 0, record_bytes = 0;
};

// 16-byte pieces that backward copies for each thread and row. Vectors of 16-bit tensors stand beside vectors of float32 that
// are twice as long, where the residual is float32.
inline int bwd_accesses(const NormBwdParams& p, int vectors) {
  const bool is_wide = p.x.is_accumulate && (p.kind == ScalarKind::kHalf || p.kind == ScalarKind::kBFloat16);
  const int third = p.is_add ? p.grad_new_residual.data != nullptr : p.z.data != nullptr;
  return vectors * (1 + (1 + third) * (is_wide ? 2 : 1));
}

// 16-byte pieces of a vector of sums. The scalar kernels leave a part of the one piece unused.
template <typename Acc, int size>
constexpr int kSumAccesses = size * sizeof(Acc) <= kVectorBytes ? 1 : size * static_cast<int>(sizeof(Acc)) / kVectorBytes;

// Instantiated in instantiations/, for float, double, __half and __nv_bfloat16.
template <typename Scalar>
cudaError_t launch_norm_fwd(const NormFwdParams& params, const FwdPlan& plan, cudaStream_t stream);
template <typename Scalar>
cudaError_t launch_norm_bwd(const NormBwdParams& params, const BwdPlan& plan, cudaStream_t stream);
// For float and double.
template <typename Acc>
void launch_norm_sum(const NormBwdParams& params, cudaStream_t stream);

}  // namespace ssm_kernels::norm
