// Keys of 129 to 256 columns. A block has 128 rows of V, as with fewer columns: each of its two consumer warpgroups holds 64
// rows and all columns of the state as accumulators, half of its registers. The operand A of a product with the state is
// therefore made a few columns at a time, and a kernel before the chain over chunks computes all matrices of pairs of steps
// (bwd_matrices.cuh), in forward too.
#pragma once

#include "cuda/chunked/barriers.cuh"
#include "cuda/chunked/state.cuh"
#include "delta_rule/cuda/bwd_workspace.cuh"

namespace ssm_kernels::delta_rule {

constexpr int kWideColumns = kMaxKernelDstate;
constexpr int kConsumerThreadsOfBlock = kWarpgroups * kWarpgroupThreads;
constexpr int kClearBarrier = kPartialOutIsRead + 1;  // after those of cuda/chunked/barriers.cuh

// A buffer of `stages` stages that one thread fills by TMA. Uses are numbered from the start of the kernel.
template <int stages>
struct TmaBuffer {
  Mbarrier full[stages], empty[stages];

  // Run by one thread before a __syncthreads(). Both consumer warpgroups read each stage.
  __device__ __forceinline__ void init() {
    for (int stage = 0; stage < stages; ++stage) {
      full[stage].init(1);
      empty[stage].init(kConsumerThreadsOfBlock);
    }
  }
  // Waits until the stage is empty, and expects `bytes` bytes there; returns the barrier at which they arrive.
  __device__ __forceinline__ Mbarrier& expect(int use, int bytes) {
    if (use >= stages) empty[use % stages].wait(use / stages - 1);
    full[use % stages].arrive_and_expect_tx(bytes);
    return full[use % stages];
  }
  __device__ __forceinline__ void wait(int use) { full[use % stages].wait(use / stages); }
  __device__ __forceinline__ void release(int use) { empty[use % stages].arrive(); }
};

// Loads a chunk's keys or queries. Run by one thread.
__device__ __forceinline__ void load_wide_rows(SmemTile<kWideColumns>& target, const cuda::TmaDescriptor& descriptor,
                                               int key_head, int step, int batch, Mbarrier& full) {
  constexpr int kTileColumns = 64;
#pragma unroll
  for (int panel = 0; panel < kWideColumns / kTileColumns; ++panel) {
    cuda::tma_load_tile(&target.panels[panel], descriptor, panel * kTileColumns, key_head, step, batch, full);
  }
}

// Calls body(k, s) for each 16 columns k of the state, with s their operand A, and commits the products that it starts. At most
// `pending` earlier k are then in flight, so that few operands are in registers.
template <typename Scalar, int pending, typename Body>
__device__ __forceinline__ void multiply_state(const State<kWideColumns>& state, const Body& body) {
#pragma unroll
  for (int k = 0; k < kWideColumns / 16; ++k) {
    uint32_t s[4];
    state.template pack<Scalar>(k, s);
    cuda::warpgroup_arrive();
    body(k, s);
    cuda::warpgroup_commit();
    cuda::warpgroup_wait_for_earlier<pending>();
  }
}

// Keeps the compiler from moving what computes accumulators behind the start of later products.
template <int blocks>
__device__ __forceinline__ void make_opaque(float (&d)[blocks][4]) {
#pragma unroll
  for (auto& block : d) {
#pragma unroll
    for (float& value : block) value = cuda::opaque(value);
  }
}

// state += a rows, of 16 steps; a is in registers or in shared memory. Without `adds` the product replaces the state.
template <typename Scalar, typename Operand>
__device__ __forceinline__ void add_to_state(State<kWideColumns>& state, const Operand& a, uint64_t rows, bool adds) {
  constexpr int kHalfBlocks = kStateColumns / 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    auto& columns = reinterpret_cast<float (&)[kHalfBlocks][4]>(state.values[half * kHalfBlocks]);
    const uint64_t rows_of_half = columns_of(rows, half * kStateColumns / 16);
    if constexpr (std::is_array_v<Operand>) {
      cuda::gemm<Scalar, true>(columns, a, rows_of_half, adds);
    } else {
      cuda::gemm<Scalar, false, true>(columns, a, rows_of_half, adds);
    }
  }
}

}  // namespace ssm_kernels::delta_rule
