// Names of the toolkit in cuda/ that the delta rule's kernels use, and the operands that they make of accumulators.
#pragma once

#include "cuda/fragment.cuh"
#include "cuda/mma_policy.cuh"
#include "cuda/pipeline.cuh"
#include "delta_rule/delta_rule.h"

namespace ssm_kernels::delta_rule {

using cuda::align_shared, cuda::make_operand, cuda::columns_of, cuda::rows_of;
using cuda::kBlockSteps, cuda::kWarpSize, cuda::kAllLanes, cuda::kWarpgroupWarps, cuda::kWarpgroupThreads,
    cuda::kOperandAlignment;
using cuda::Mbarrier, cuda::PipelineState, cuda::WarpShare;
using cuda::SmemTile, cuda::InOrder, cuda::FragmentLane, cuda::FragmentPairs;

// The operand A of the group-th 16 columns of accumulators.
template <typename Scalar, int blocks>
__device__ __forceinline__ void pack_operand(const float (&d)[blocks][4], int group, uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = cuda::pack<Scalar>(d[2 * group + i / 2][i % 2 * 2], d[2 * group + i / 2][i % 2 * 2 + 1]);
}

}  // namespace ssm_kernels::delta_rule
