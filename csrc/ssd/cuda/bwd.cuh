// SSD backward on CUDA: the adjoint (ssd/aten/chunked_scan.cpp) with chunks of kChunk steps, as matrix products by wgmma or
// mma.sync (cuda/mma_policy.cuh), for fp32 always mma.sync. In the terms of fwd.cuh, with g the gradient of y, U = x g^T, and
// the decays inside a chunk D_ji = e^(s_i - s_j) for j <= i, else 0:
//
//   grad x_j    = c_j (sum_i (B C^T)_ji D_ji g_i + e^(s_l - s_j) T B_j) + D g_j
//   W^T_ji      = U_ji D_ji c_j
//   grad C_i    = sum over heads of (sum_j W_ij B_j + e^(s_i) S^T g_i)
//   grad B_j    = sum over heads of (sum_i W^T_ji C_i + c_j e^(s_l - s_j) T^T x_j)
//   grad c_j    = sum_i V_ji + e^(s_l - s_j) x_j . T B_j,      V = U (B C^T) D, elementwise
//   grad zeta_t = sum_{j < t <= i} c_j V_ji + sum_{i >= t} e^(s_i) g_i . S C_i + sum_{j < t} c_j e^(s_l - s_j) x_j . T B_j
//                 + e^(s_l) <S, T>
//
// With a gain on the diagonal (fwd.cuh), d_t: s_i of an output is s_{i-1}, so that V_ji = U_ji (B C^T)_ji e^(s_{i-1} - s_j) for
// j < i. The pair (i, i) has d_i in place of c_i D_ii, and belongs to grad d_i = U_ii (B C^T)_ii, not to grad c_i. The sums of
// grad zeta_t over i >= t are over i > t.
//
// where S is the state before the chunk and T the gradient of the state after it. There are two kernels, besides the gate's
// (bwd_gate.cuh):
//
//   state_passing.cuh scans along time, forward for S and backward for T, and stores both for each chunk, rounded to the
//   inputs' type. Together they have 2 dstate / kChunk elements for each element of x: with dstate 128, S and T each take twice
//   the memory of x. Where there are few work tiles, these are split into segments along time, and an earlier launch of the
//   kernel computes the segments' summaries.
//
//   bwd_chunks.cuh processes all chunks at once, and the heads of a group together, so that the gradients of B and C are summed
//   on chip. If there are too few chunks for the device, several blocks share a group's heads, and their sums are added in
//   order afterwards. There are no atomic additions.
//
// The kernels take up to kStateColumns columns of a state, or as many as shared memory allows (backward_columns). With more
// they run for one block of columns of B, C, S and T after another (launch_bwd.cpp): everything above but D g_j is a sum over
// these columns, or belongs to one of them.
//
// The first sum of grad zeta is a running sum: with each step t its own pairs (t, i > t) are added and (j < t, t) are
// subtracted. It is in fp32, and so are the differences (in double for fp32 inputs). After a step that leaves less of it than
// its rounding error, it restarts from zero.
#pragma once

#include "ssd/cuda/bwd_chunks.cuh"
#include "ssd/cuda/bwd_gate.cuh"
#include "ssd/cuda/discretized_gates.cuh"
#include "ssd/cuda/log_gates.cuh"
#include "ssd/cuda/state_operands.cuh"

namespace ssm_kernels::ssd {

template <typename Gates>
cudaError_t launch_ssd_bwd_of(const typename Gates::BwdParams& params, const WorkPartition& partition, Products products,
                              int max_shared_bytes, cudaStream_t stream) {
  using Scalar = typename Gates::Scalar;
  constexpr bool kRoundsFp32 = !kHasDiagonalGain<Gates>;
  const auto launch = [&](auto columns, auto mma) -> cudaError_t {
    using Mma = decltype(mma);
    constexpr int kColumns = decltype(columns)::value;
    using Chunks = BwdChunks<Scalar, kColumns, Mma, Gates>;
    using States = SsdStatePassing<Scalar, kColumns, StatesPass::kBwd, Mma, Gates>;
    using Summaries = SsdStatePassing<Scalar, kColumns, StatesPass::kBwdSummary, Mma, Gates>;
    using SharedOfChunks = typename Chunks::Shared;
    using SharedOfStates = typename States::Shared;
    constexpr int kCertain = certain_shared_bytes<Scalar, Mma>(kColumns, /*is_backward=*/true);
    static_assert(SharedOfChunks::bytes(Mma::kIsAsync ? SharedOfChunks::kMaxStages : 1) <= kCertain &&
                      SharedOfStates::bytes(Mma::kIsAsync ? SharedOfStates::kMaxStages : 1) <= kCertain,
                  "a launch needs no more; with wgmma it has all stages");
    const int available = Mma::kIsAsync ? kSm90SharedBytes : max_shared_bytes;
    const int64_t blocks = partition.work_tiles * kDirections;  // for one segment of each work tile
    const bool has_summaries = partition.segments > 1;
    if (has_summaries) {
      const cudaError_t error =
          launch_state_passing<Summaries>(blocks * (partition.segments - 1), available, stream, params, partition);
      if (error != cudaSuccess) return error;
    }
    // Devices with wgmma have PDL, too.
    const cudaError_t error = launch_state_passing<States>(blocks * partition.segments, available, stream, params, partition,
                                                           /*uses_pdl=*/has_summaries && Mma::kIsAsync);
    if (error != cudaSuccess) return error;
    return launch_staged(ssd_bwd_chunks_kernel<Scalar, kColumns, Mma, Gates>, params.num_chunks * params.groups * params.splits,
                         Chunks::kThreads, SharedOfChunks::kMaxStages, &SharedOfChunks::bytes, available, stream, params,
                         partition, /*uses_pdl=*/Mma::kIsAsync);
  };
  return visit_kernels<Scalar, kStateColumns, kRoundsFp32>(params.dstate, products, launch);
}
template <typename Scalar>
cudaError_t launch_ssd_bwd(const SsdBwdParams& params, const WorkPartition& partition, Products products, int max_shared_bytes,
                           cudaStream_t stream) {
  check_known(params.discretization);
  return launch_ssd_bwd_of<DiscretizedGates<Scalar>>(params, partition, products, max_shared_bytes, stream);
}
template <typename Scalar>
cudaError_t launch_ssd_bwd(const SsdLogBwdParams& params, const WorkPartition& partition, Products products,
                           int max_shared_bytes, cudaStream_t stream) {
  return launch_ssd_bwd_of<LogGates<Scalar>>(params, partition, products, max_shared_bytes, stream);
}
template <typename Scalar>
cudaError_t launch_ssd_bwd(const SsdDiagonalBwdParams& params, const WorkPartition& partition, Products products,
                           int max_shared_bytes, cudaStream_t stream) {
  return launch_ssd_bwd_of<DiagonalGates<Scalar>>(params, partition, products, max_shared_bytes, stream);
}

template <typename Scalar>
cudaError_t launch_ssd_bwd_gate(const GateBwdParams& params, int blocks, cudaStream_t stream) {
  ssd_bwd_gate_kernel<Scalar><<<blocks, kGateThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace ssm_kernels::ssd
