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

#include <type_traits>

#include "cuda/launch.cuh"
#include "ssd/cuda/bwd_chunks.cuh"
#include "ssd/cuda/bwd_gate.cuh"

namespace ssm_kernels::ssd {

// Threads is StatePassing or BwdChunks, the class that has the code of a kernel's threads. With mma.sync there are as many
// stages as fit in shared memory.
template <typename Threads, typename Mma, typename Kernel>
cudaError_t launch_ssd_bwd_kernel(Kernel kernel, int64_t blocks, bool uses_pdl, SsdBwdParams params,
                                  const WorkPartition& partition, int max_shared_bytes, cudaStream_t stream) {
  using Shared = typename Threads::Shared;
  params.stages = Mma::kIsAsync ? Shared::kMaxStages : fit_stages(Shared::kMaxStages, max_shared_bytes, &Shared::bytes);
  const int bytes = Shared::bytes(params.stages);
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, bytes); error != cudaSuccess) return error;
  return cuda::launch(kernel, blocks, Threads::kThreads, bytes, stream, uses_pdl, params, partition);
}

template <typename Scalar, int dstate, typename Mma>
cudaError_t launch_ssd_bwd_kernels(const SsdBwdParams& params, const WorkPartition& partition, int max_shared_bytes,
                                   cudaStream_t stream) {
  const auto launch_states = [&](auto pass, int segments, bool uses_pdl) {
    constexpr StatesPass kPass = decltype(pass)::value;
    return launch_ssd_bwd_kernel<StatePassing<Scalar, dstate, kPass, Mma>, Mma>(
        ssd_state_passing_kernel<Scalar, dstate, kPass, Mma>, partition.work_tiles * kDirections * segments, uses_pdl, params,
        partition, max_shared_bytes, stream);
  };
  const bool has_summaries = params.segments > 1;
  if (has_summaries) {
    const std::integral_constant<StatesPass, StatesPass::kBwdSummary> pass;
    if (const cudaError_t error = launch_states(pass, params.segments - 1, false); error != cudaSuccess) return error;
  }
  // Devices with wgmma have PDL, too.
  const std::integral_constant<StatesPass, StatesPass::kBwd> pass;
  const cudaError_t error = launch_states(pass, params.segments, has_summaries && Mma::kIsAsync);
  if (error != cudaSuccess) return error;
  return launch_ssd_bwd_kernel<BwdChunks<Scalar, dstate, Mma>, Mma>(ssd_bwd_chunks_kernel<Scalar, dstate, Mma>,
                                                                    params.num_chunks * params.groups * params.splits,
                                                                    Mma::kIsAsync, params, partition, max_shared_bytes, stream);
}

template <typename Scalar>
cudaError_t launch_ssd_bwd(const SsdBwdParams& params, const WorkPartition& partition, bool may_use_wgmma, int max_shared_bytes,
                           cudaStream_t stream) {
  const auto launch = [&](auto dstate) -> cudaError_t {
    constexpr int kDstate = decltype(dstate)::value;
    constexpr int kMin = least_shared_bytes(kDstate, kIsFp32<Scalar>, /*is_backward=*/true);
    static_assert(ChunksShared<Scalar, kDstate, Sm80Mma>::bytes(1) <= kMin &&
                      StatesShared<Scalar, kDstate, StatesPass::kBwd, Sm80Mma>::bytes(1) <= kMin,
                  "a call comes here only if a block can have that much");
    if constexpr (!kIsFp32<Scalar>) {
      using SharedOfChunks = ChunksShared<Scalar, kDstate, Sm90Wgmma>;
      using SharedOfStates = StatesShared<Scalar, kDstate, StatesPass::kBwd, Sm90Wgmma>;
      static_assert(SharedOfChunks::bytes(SharedOfChunks::kMaxStages) <= 227 * 1024 &&
                        SharedOfStates::bytes(SharedOfStates::kMaxStages) <= 227 * 1024,
                    "a block of compute capability 9.0 has that much shared memory");
      if (may_use_wgmma &&
          cuda::is_compiled_for_threads(ssd_state_passing_kernel<Scalar, kDstate, StatesPass::kBwd, Sm90Wgmma>,
                                        StatePassing<Scalar, kDstate, StatesPass::kBwd, Sm90Wgmma>::kThreads)) {
        return launch_ssd_bwd_kernels<Scalar, kDstate, Sm90Wgmma>(params, partition, max_shared_bytes, stream);
      }
    }
    return launch_ssd_bwd_kernels<Scalar, kDstate, Sm80Mma>(params, partition, max_shared_bytes, stream);
  };
  if (params.dstate <= 64) return launch(std::integral_constant<int, 64>());
  return launch(std::integral_constant<int, kStateColumns>());
}

template <typename Scalar>
cudaError_t launch_ssd_bwd_gate(const GateBwdParams& params, int blocks, cudaStream_t stream) {
  ssd_bwd_gate_kernel<Scalar><<<blocks, kGateThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace ssm_kernels::ssd
