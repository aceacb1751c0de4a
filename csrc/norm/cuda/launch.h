// Interface between the CUDA entry points (entry.cpp) and the kernels: plans and launchers.
//
// A team of threads normalizes one group of one row. A team of up to a warp has a power of two of lanes, and a block has
// several such teams. A larger team is a whole number of warps and fills a block. Lane l owns vectors l, l + lanes, ... of the
// group, up to kThreadColumns columns. A longer group is cut into chunks. In backward, and in RMSNorm's forward, the blocks of
// a cluster take a chunk each and add their sums. Otherwise, or with more chunks than a cluster has blocks, a block takes
// several, which every pass reads again.
//
// Forward: a work unit is a group of a row; a team keeps its unit in registers.
// Backward: a block keeps its columns and takes every row_blocks-th row, so that its sums over rows stay in registers. The
// teams of a block take group_teams neighboring groups of row_teams rows. They write row_blocks * row_teams rows of partial
// sums, which a second kernel adds in order.
//
// Every kernel has a variant for aligned groups, whose vectors all start at multiples of 16 bytes, and one for groups that
// start and end at any element. Columns belong to the same threads in both, and equally many blocks share the rows, so that
// results have the same bits. The variants for any groups also take float64, one element at a time; those of the RMSNorm
// kernels (rms.h) alone take clusters. The RMSNorm kernels are compiled for one case each, without options in their loops.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "common/kernel_abi.h"
#include "common/macros.h"
#include "cuda/constants.h"
#include "norm/norm.h"

namespace ssm_kernels::norm {

using cuda::kWarpSize, cuda::kVectorBytes, cuda::kAllLanes;
// Columns per thread, in registers: forward keeps their values, backward their sums over rows. In float64 a thread has one.
constexpr int kThreadColumns = 16;
// Backward: 640 threads with 96 registers each, for groups of up to 10240 columns. Forward: two blocks of 512 threads with 64
// registers each, for up to 8192 columns. Longer groups take clusters or chunks.
constexpr int kFwdMaxThreads = 512, kBwdMaxThreads = 640, kFwdRegisters = 64, kBwdRegisters = 96;
// Limit of the groups of all rows in a call of the aligned and the RMSNorm kernels, which count rows, with those they prefetch,
// in 32 bits.
constexpr int64_t kMaxNarrowRows = int64_t(1) << 30;
// Threads per block of several teams.
constexpr int kSharedBlockThreads = 128;
// Pipeline stages of backward, a row each: one in use, the others being copied.
constexpr int kBwdStages = 3;

struct Teams {
  bool is_aligned = false;  // whether each vector of each tensor starts at a multiple of 16 bytes
  int lanes = kWarpSize;    // per team; of a team that is a cluster: per block
  int count = 1;            // teams per block
  int chunks = 1;           // per group
  int cluster = 1;          // blocks of a team, a chunk each

  SSM_HOST_DEVICE int threads() const { return lanes * count; }
};

// The cases that RMSNorm kernels exist for. kGateBefore and kGateAfter: a silu gate before or after the norm. kNoGateWide: no
// gate, and a float32 residual beside fp16 or bf16 activations. kNone selects the general kernels.
enum class RmsCase : int { kNone, kGateBefore, kGateAfter, kNoGate, kNoGateWide };

// An RMSNorm kernel has groups * row_blocks blocks. Each takes one group of every row_blocks-th row.
struct RmsPlan {
  RmsCase rms_case = RmsCase::kNone;
  bool is_any = false;  // rows start and end at any element, or a cluster shares a group
  int warps = 1;        // per block
  int cluster = 1;      // blocks of a group of a row
  int shared_bytes = 0;
  int row_blocks = 1;
};

struct FwdPlan {
  Teams teams;
  int64_t units = 0, blocks = 0;
  int shared_bytes = 0;  // images of rows that start and end at any element
  RmsPlan rms;
};

// Shared memory of a cluster's sums in the general backward: two buffers of two sums for each of its warps.
constexpr int kBwdClusterBytes = 2 * 2 * cuda::kMaxClusterBlocks * 32 * static_cast<int>(sizeof(float));

struct BwdPlan {
  Teams teams;
  int group_teams = 1, row_teams = 1;
  int column_blocks = 1, row_blocks = 1;
  int partials = 1;  // row_blocks * row_teams
  RmsPlan rms;
  // A thread's shared memory: the 16-byte accesses of each stage, then those of its sums for grad_bias. Their number is odd, so
  // that the same access of neighboring threads falls into different banks.
  int stage_accesses = 0, record_bytes = 0;
  // Rows that start and end at any element: pipeline stages, of which one alone is filled and read in turn, shared memory of
  // the images in a stage, and of a thread's sums for grad_bias.
  int stages = 0, stage_bytes = 0, sum_bytes = 0;
  // A team's image of grad_out and of x; where the blocks' images of x and of the third input begin.
  int narrow_image = 0, x_image = 0, x_images = 0, third_images = 0;

  // Where the sums of a cluster begin.
  SSM_HOST_DEVICE int sums_offset() const {
    return stage_bytes == 0 ? teams.threads() * record_bytes : stages * stage_bytes + teams.threads() * sum_bytes;
  }
  int shared_bytes() const { return sums_offset() + (teams.cluster > 1 ? kBwdClusterBytes : 0); }
};

// Whether norm_rms_short_bwd_kernel takes a call with these teams: RMSNorm in fp16 or bf16 before a silu or sigmoid gate, of
// aligned rows of one group that the lanes of a part of a warp have.
inline bool takes_short_rows(const NormBwdParams& p, const Teams& teams) {
  const bool has_type = p.kind == ScalarKind::kHalf || p.kind == ScalarKind::kBFloat16;
  const bool has_gate = !p.is_add && p.z.data != nullptr && p.norm_before_gate &&
                        (p.activation == GateActivation::kSilu || p.activation == GateActivation::kSigmoid);
  const bool is_plain = !p.subtract_mean && p.bias.data == nullptr && p.sums == nullptr && p.group_mean == nullptr;
  const bool has_one_stride = p.outer == 1 && p.groups == 1;
  return has_type && has_gate && is_plain && has_one_stride && teams.is_aligned && teams.lanes < kWarpSize && teams.chunks == 1;
}

// 16-byte accesses that backward copies per thread and row. With a float32 residual, a vector of a float32 tensor takes twice
// as many as one of an fp16 or bf16 tensor.
inline int bwd_accesses(const NormBwdParams& p, int vectors) {
  const bool is_wide = p.x.is_accumulate && (p.kind == ScalarKind::kHalf || p.kind == ScalarKind::kBFloat16);
  const int third = p.is_add ? p.grad_new_residual.data != nullptr : p.z.data != nullptr;
  return vectors * (1 + (1 + third) * (is_wide ? 2 : 1));
}

// Bytes of shared memory that a team's columns of one tensor take if rows start and end at any element.
SSM_HOST_DEVICE constexpr int image_bytes(int lanes, int element_bytes) {
  return lanes * kThreadColumns * element_bytes + kVectorBytes;
}

// 16-byte accesses to a vector of sums. In float64 a sum uses a part of one.
template <typename Acc, int size>
constexpr int kSumAccesses = std::max<int>(1, size * sizeof(Acc) / kVectorBytes);

// Instantiated in instantiations/, for float, double, __half and __nv_bfloat16.
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_norm_fwd(const NormFwdParams& params, const FwdPlan& plan, cudaStream_t stream);
template <typename Scalar>
SSM_KERNEL_API cudaError_t launch_norm_bwd(const NormBwdParams& params, const BwdPlan& plan, cudaStream_t stream);
// How many clusters are resident on the current device, 0 if the query fails. Instantiated for the same types but double.
template <typename Scalar>
SSM_KERNEL_API int count_norm_bwd_clusters(const NormBwdParams& params, const BwdPlan& plan);
// For float and double.
template <typename Acc>
SSM_KERNEL_API cudaError_t launch_norm_sum(const NormBwdParams& params, cudaStream_t stream);

SSM_KERNEL_STRUCT(FwdPlan, 72);
SSM_KERNEL_STRUCT(BwdPlan, 100);
SSM_KERNEL_STRUCT(RmsPlan, 24);

}  // namespace ssm_kernels::norm
