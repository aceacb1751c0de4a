// Names of the toolkit in cuda/ that the SSD kernels use.
#pragma once

#include "cuda/fragment.cuh"
#include "cuda/mma_policy.cuh"
#include "cuda/pipeline.cuh"
#include "cuda/vector_io.cuh"
#include "ssd/cuda/launch.h"

namespace ssm_kernels::ssd {

using cuda::align_shared, cuda::make_operand, cuda::columns_of, cuda::rows_of;
using cuda::Empty, cuda::SmemTile, cuda::RowCopier, cuda::InOrder, cuda::FromBothEnds, cuda::FragmentLane, cuda::FragmentPairs;
using cuda::kWarpSize, cuda::kAllLanes, cuda::kWarpgroupWarps, cuda::kWarpgroupThreads, cuda::kOperandAlignment,
    cuda::kBlockSteps;
using cuda::Mbarrier, cuda::PipelineState, cuda::Sm80Mma, cuda::Sm90Wgmma, cuda::StagedShared, cuda::WarpShare;

}  // namespace ssm_kernels::ssd
