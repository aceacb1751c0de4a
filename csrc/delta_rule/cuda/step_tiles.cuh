// Tiles of q, of out and of its gradient with several updates a step (step_updates.cuh). A chunk of kChunk updates has
// kChunk >> log2_updates rows of these, one after another in the first rows of a tile. The gradients' kernel has them in the
// rows of the last updates instead, among zeros (load_update_tile).
#pragma once

#include "cuda/chunked/epilogue.cuh"
#include "cuda/ptx/tma_5d.cuh"
#include "delta_rule/cuda/step_pairs.cuh"
#include "delta_rule/cuda/step_updates.cuh"

namespace ssm_kernels::delta_rule {

// The values of a table for the lane's two rows of q in a block of columns.
template <bool has_updates, typename Params>
__device__ __forceinline__ float2 query_pair(const Params& p, const StepTable& table, int block, const FragmentLane& lane) {
  if constexpr (!has_updates) {
    return column_pair(table, block, lane);
  } else {
    const int row = kBlockSteps * block + 2 * lane.pair;
    return {table[last_update(p, row)], table[last_update(p, row + 1)]};
  }
}

// P = scale (Q K^T G) of a chunk with several updates a step, of which rows are those of q and columns updates; rows past the
// chunk's last one are zeros. By one warpgroup, whose warps hold 16 keys each of the transposed products.
template <typename Scalar, int columns, typename Params>
__device__ __forceinline__ void make_query_matrix(const Params& p, const SmemTile<columns>& q, const SmemTile<columns>& k,
                                                  const ScanTables& tables, SmemTile<kChunk>& target, int updates,
                                                  const FragmentLane& lane) {
  constexpr int kBlocks = kChunkRows<true> / kBlockSteps;
  const uint64_t q_operand = make_operand(q), k_operand = make_operand(k);
  float products[kBlocks][4];
  cuda::warpgroup_arrive();
#pragma unroll
  for (int i = 0; i < columns / 16; ++i) {
    cuda::gemm<Scalar, false, false>(products, columns_of(k_operand, i), columns_of(q_operand, i), i > 0);
  }
  cuda::warpgroup_commit();
  cuda::warpgroup_wait<0>(products);
  const int rows = rows_of_updates(p, updates);
  const float log2_of_keys[2] = {tables.log2_cumsum[lane.row], tables.log2_cumsum[lane.row + 8]};
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = kBlockSteps * n + 2 * lane.pair + i % 2, key = lane.row + 8 * (i / 2), update = last_update(p, row);
      const int first = has_reset(p, tables) ? tables.first[update] : 0;
      // For later keys the decay may be Inf, and rows past the last one are uninitialized: products are selected.
      const float decay = tables.query_factor[update] * Math<float>::exp2(tables.log2_cumsum[update] - log2_of_keys[i / 2]);
      products[n][i] = row < rows && key <= update && key >= first ? products[n][i] * decay : 0.0f;
    }
  }
#pragma unroll
  for (int group = 0; group < kBlocks / 2; ++group) {
    uint32_t rounded[4];
    pack_operand<Scalar>(products, group, rounded);
    cuda::stmatrix_transposed(target.ldmatrix_row(16 * group, 2 * lane.warp, lane.index), rounded);
  }
}

// Starts the load of a tile of kChunk updates, of which the last one of each step has the step's row and the others zeros. With
// several updates TMA describes the tensor with a dimension of size 1 before that of steps: the tile has all updates of a step
// in it and begins before it, so that the last one is inside the tensor.
template <typename Params>
__device__ __forceinline__ void load_update_tile(void* tile, const Params& p, const cuda::TmaDescriptor& of_steps,
                                                 const cuda::TmaDescriptor& of_updates, int column, int head, int first,
                                                 int batch, Mbarrier& barrier) {
  if (p.log2_updates == 0) {
    cuda::tma_load_tile(tile, of_steps, column, head, first, batch, barrier);
  } else {
    cuda::tma_load_tile(tile, of_updates, column, head, 1 - (1 << p.log2_updates), first >> p.log2_updates, batch, barrier);
  }
}

// TmaEpilogue (cuda/chunked/epilogue.cuh) for chunks with several updates a step, whose out has kChunkRows<true> columns of y
// or fewer.
template <typename Scalar, typename Finish, typename Params>
class UpdatesEpilogue {
 public:
  __device__ __forceinline__ UpdatesEpilogue(const Params& p, const WorkSpan& at, const StateTile& state_tile,
                                             const FragmentLane& lane)
      : p_(p), finish_(p, state_tile, lane), at_(at), state_tile_(state_tile) {}

  template <int blocks>
  __device__ __forceinline__ void write(const float (&y)[blocks][4], const uint32_t (&x)[kStepGroups][4],
                                        SmemTile<kStateRows>* z_tile, SmemTile<kStateRows>& tile,
                                        const FragmentLane& lane) const {
    finish_.template round<Scalar, InOrder>(y, x, z_tile, tile, lane);
    cuda::fence_proxy_async();
  }
  __device__ __forceinline__ void send(const SmemTile<kStateRows>& tile, int chunk) const {
    const auto first = static_cast<int>((at_.start + first_step(chunk)) >> p_.log2_updates);
    cuda::tma_store_tile(p_.out_descriptor, state_tile_.first_row, state_tile_.head, first, static_cast<int>(at_.batch), &tile,
                         state_tile_.is_there() && thread() == 0);
  }
  __device__ __forceinline__ void send_last(SmemTile<kStateRows>& tile) const {
    const int chunk = at_.chunks - 1, updates = at_.steps_of(chunk);
    if (!state_tile_.is_there() || chunk < 0 || updates <= 0) return;
    if (updates == kChunk || !is_packed(p_)) {
      send(tile, chunk);
      return;
    }
    constexpr int kVectors = SmemTile<kStateRows>::kVectors;
    Scalar* const target = step_rows<Scalar>(p_, at_, p_.out, state_tile_.head, chunk) + state_tile_.first_row;
    for (int i = thread(); i < rows_of_updates(p_, updates) * kVectors; i += kWarpgroupThreads) {
      const int row = i / kVectors, vector = i % kVectors, column = vector * SmemTile<kStateRows>::kVectorElements;
      if (column < state_tile_.rows) {
        __stcg(reinterpret_cast<uint4*>(target + row * p_.out.stride_step + column), *tile.vector(row, vector));
      }
    }
  }
  static __device__ __forceinline__ void wait_for_sent() { cuda::tma_store_wait_read<0>(); }

 private:
  static __device__ __forceinline__ int thread() { return threadIdx.x % kWarpgroupThreads; }

  const Params& p_;
  Finish finish_;
  const WorkSpan& at_;
  const StateTile& state_tile_;
};

}  // namespace ssm_kernels::delta_rule
