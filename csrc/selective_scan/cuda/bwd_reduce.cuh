// The last kernel of a span of the selective scan's backward on CUDA: adds the blocks' partial sums over tiles, batch rows and
// segments in a fixed order, and writes the gradients in their own type and strides. Each launch but the first
// adds its sums over time to those of the launches before it, which are of later spans.
//
// One launch computes all sums, each in its own range of blocks. A thread computes one element; neighboring threads read
// neighboring elements of the partial sums.
#pragma once

#include <algorithm>

#include "cuda/vector_io.cuh"
#include "selective_scan/cuda/launch.h"

namespace ssm_kernels::selective_scan {

constexpr int kReduceThreads = 256;
// Larger sums loop over their blocks.
constexpr int64_t kReduceMaxBlocks = int64_t(1) << 20;

// grad_B or grad_C from partial sums of groups * parts tiles.
struct MatrixSum {
  const void* source = nullptr;
  MatrixView target;
  int64_t parts = 0, count = 0, first_block = 0, blocks = 0;
};

// The sum over rows of (rows, count).
struct RowSum {
  const void* source = nullptr;
  void* target = nullptr;
  int64_t count = 0, first_block = 0, blocks = 0;
};

struct ReducePlan {
  static constexpr int kMatrices = 2, kRowSums = 5;

  MatrixSum matrices[kMatrices];
  RowSum row_sums[kRowSums];
  PartialSums partial_sums;
  int64_t dstate = 0, seqlen = 0, rows = 0, blocks = 0;
};

// The sum of `count` values, `stride` apart, with four loads in flight.
template <typename Acc>
__device__ __forceinline__ Acc sum_strided(const Acc* source, int64_t count, int64_t stride) {
  Acc sum = 0;
#pragma unroll 4
  for (int64_t i = 0; i < count; ++i) sum += source[i * stride];
  return sum;
}

template <typename Scalar>
__global__ void __launch_bounds__(kReduceThreads) selective_scan_bwd_reduce_kernel(const __grid_constant__ ReducePlan plan) {
  using Acc = cuda::AccumulateType<Scalar>;
  const int64_t block = blockIdx.x;
  const auto visit = [&](const auto& sum, const auto& add) {
    if (block < sum.first_block || block >= sum.first_block + sum.blocks) return;
    const int64_t step = sum.blocks * kReduceThreads;
    for (int64_t i = (block - sum.first_block) * kReduceThreads + threadIdx.x; i < sum.count; i += step) add(sum, i);
  };
#pragma unroll
  for (int m = 0; m < ReducePlan::kMatrices; ++m) {
    visit(plan.matrices[m], [&](const MatrixSum& sum, int64_t i) {
      const int64_t step = i % plan.seqlen, row = i / plan.seqlen, state = row % plan.dstate, batch_group = row / plan.dstate;
      const MatrixView& target = sum.target;
      const int64_t batch = batch_group / target.groups, group = batch_group % target.groups;
      const Acc* const source =
          static_cast<const Acc*>(sum.source) + plan.partial_sums.offset(batch, group * sum.parts, state, step);
      const int64_t offset =
          batch * target.stride_batch + group * target.stride_channel + state * target.stride_state + step * target.stride_step;
      static_cast<Scalar*>(target.data)[offset] =
          cuda::from_accumulate<Scalar>(sum_strided(source, sum.parts, plan.partial_sums.tile_stride));
    });
  }
#pragma unroll
  for (int r = 0; r < ReducePlan::kRowSums; ++r) {
    visit(plan.row_sums[r], [&](const RowSum& sum, int64_t i) {
      Acc* const target = static_cast<Acc*>(sum.target);
      const Acc before = plan.partial_sums.adds ? target[i] : Acc(0);
      target[i] = before + sum_strided(static_cast<const Acc*>(sum.source) + i, plan.rows, sum.count);
    });
  }
}

template <typename Scalar>
cudaError_t launch_bwd_reduce(const SelectiveScanBwdParams& p, const PartialSums& partial_sums, cudaStream_t stream) {
  ReducePlan reduce;
  reduce.dstate = p.dstate;
  reduce.seqlen = p.seqlen;
  reduce.partial_sums = partial_sums;
  reduce.rows = p.rows * partial_sums.segments;
  const auto assign_blocks = [&](auto& sum) {
    sum.first_block = reduce.blocks;
    sum.blocks = std::min((sum.count + kReduceThreads - 1) / kReduceThreads, kReduceMaxBlocks);
    reduce.blocks += sum.blocks;
  };
  const auto add_matrix = [&](MatrixSum& sum, const MatrixView& target, const void* source) {
    if (source == nullptr) return;
    sum.source = source;
    sum.target = target;
    sum.parts = partial_sums.tiles / target.groups;
    sum.count = p.batch * target.groups * p.dstate * p.seqlen;
    assign_blocks(sum);
  };
  add_matrix(reduce.matrices[0], p.grad_B, partial_sums.grad_B);
  add_matrix(reduce.matrices[1], p.grad_C, partial_sums.grad_C);
  int sums = 0;
  const auto add_rows = [&](void* target, const void* source, int64_t count) {
    if (target == nullptr) return;
    RowSum& sum = reduce.row_sums[sums++];
    sum.source = source;
    sum.target = target;
    sum.count = count;
    assign_blocks(sum);
  };
  add_rows(p.grad_A, partial_sums.grad_A, p.dim * p.dstate);
  if (!p.grad_B.per_step) add_rows(p.grad_B.data, partial_sums.grad_constant_B, p.dim * p.dstate);
  if (!p.grad_C.per_step) add_rows(p.grad_C.data, partial_sums.grad_constant_C, p.dim * p.dstate);
  add_rows(p.grad_D, partial_sums.grad_D, p.dim);
  add_rows(p.grad_delta_bias, partial_sums.grad_delta_bias, p.dim);
  if (reduce.blocks == 0) return cudaSuccess;
  selective_scan_bwd_reduce_kernel<Scalar><<<static_cast<unsigned int>(reduce.blocks), kReduceThreads, 0, stream>>>(reduce);
  return cudaGetLastError();
}

}  // namespace ssm_kernels::selective_scan
