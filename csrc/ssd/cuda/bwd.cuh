// SSD chunk-scan, backward, on CUDA: the adjoint at the head of chunked_scan.cpp with chunks of kChunk steps, as matrix
// products: those of compute capability 9.0a, or of a warp (mma_policy.cuh), in fp32 always these. In the terms of fwd.cuh,
// with g the gradient of y, U = x g^T, and the decays inside a chunk D_ji = e^(s_i - s_j) for j <= i, else 0:
//
//   grad x_j    = c_j (sum_i (B C^T)_ji D_ji g_i + e^(s_l - s_j) T B_j) + D g_j
//   W^T_ji      = U_ji D_ji c_j
//   grad C_i    = sum over heads of (sum_j W_ij B_j + e^(s_i) S^T g_i)
//   grad B_j    = sum over heads of (sum_i W^T_ji C_i + c_j e^(s_l - s_j) T^T x_j)
//   grad c_j    = sum_i V_ji + e^(s_l - s_j) x_j . T B_j,      V = U (B C^T) D, elementwise
//   grad zeta_t = sum_{j < t <= i} c_j V_ji + sum_{i >= t} e^(s_i) g_i . S C_i + sum_{j < t} c_j e^(s_l - s_j) x_j . T B_j
//                 + e^(s_l) <S, T>
//
// where S is the state before the chunk and T the gradient of the one after it. Two kernels: the first (state_passing.cuh)
// walks along time, forward for S and backward for T, and writes them, rounded to the inputs' type, for each chunk: 2 dstate /
// kChunk elements for each of x, twice the size of x where dstate is 128 for each of the two. Where there are few walks they
// are cut along time, and another launch of the kernel, before, finds what their pieces do to a state. The second
// (bwd_chunks.cuh) takes all chunks at once, and the heads of a group together, so that gradients of B and C are summed on
// chip. Where a sequence's chunks are too few for the device, a group's heads are shared out to several blocks, whose sums are
// added in order afterwards. Empty is added atomically.
//
// They take up to kStateColumns states, or as many as there is shared memory for (backward_columns). With more they run for as
// many columns of B, C, S and T at a time: all of the above but D g_j is a sum over these columns, or of one of them
// (run_bwd.cpp).
//
// The first sum of grad zeta is a running one: with every step t its own pairs (t, i > t) come in and (j < t, t) go out. It is
// of fp32, and so are the differences (of doubles, where inputs are of fp32); after a step that leaves less of them than they
// are exact to, it is zero.
#pragma once

#include <type_traits>

#include "cuda/launch.cuh"
#include "cuda/ptx/pdl.cuh"
#include "ssd/cuda/bwd_chunks.cuh"
#include "ssd/cuda/bwd_gate.cuh"

namespace ssm_kernels::ssd {

// Threads: what they do, StatePassing or BwdChunks. Products of a warp have as many stages as there is shared memory for.
template <typename Threads, typename Mma, typename Kernel>
int launch_ssd_bwd_kernel(Kernel kernel, int64_t blocks, bool uses_pdl, SsdBwdParams params, const WorkPartition& partition,
                          int max_shared_bytes, cudaStream_t stream) {
  using Shared = typename Threads::Shared;
  params.stages = Mma::kIsAsync ? Shared::kMaxStages : fit_stages(Shared::kMaxStages, max_shared_bytes, &Shared::bytes);
  const int bytes = Shared::bytes(params.stages);
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, bytes); error != cudaSuccess) return error;
  return cuda::launch(kernel, blocks, Threads::kThreads, bytes, stream, uses_pdl, params, partition);
}

template <typename Scalar, int dstate, typename Mma>
int launch_ssd_bwd_kernels(const SsdBwdParams& params, const WorkPartition& partition, int max_shared_bytes,
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
    if (const int error = launch_states(pass, params.segments - 1, false); error != cudaSuccess) return error;
  }
  // Wherever there are asynchronous products, kernels may begin early.
  const std::integral_constant<StatesPass, StatesPass::kBwd> pass;
  const int error = launch_states(pass, params.segments, has_summaries && Mma::kIsAsync);
  if (error != cudaSuccess) return error;
  return launch_ssd_bwd_kernel<BwdChunks<Scalar, dstate, Mma>, Mma>(ssd_bwd_chunks_kernel<Scalar, dstate, Mma>,
                                                                    params.num_chunks * params.groups * params.splits,
                                                                    Mma::kIsAsync, params, partition, max_shared_bytes, stream);
}

template <typename Scalar>
int launch_ssd_bwd(const SsdBwdParams& params, const WorkPartition& partition, bool may_use_wgmma, int max_shared_bytes,
                   cudaStream_t stream) {
  const auto launch = [&](auto dstate) -> int {
    constexpr int kDstate = decltype(dstate)::value;
    constexpr int kLeast = least_shared_bytes(kDstate, kIsFp32<Scalar>, /*is_backward=*/true);
    static_assert(ChunksShared<Scalar, kDstate, Sm80Mma>::bytes(1) <= kLeast &&
                      StatesShared<Scalar, kDstate, StatesPass::kBwd, Sm80Mma>::bytes(1) <= kLeast,
                  "a block is only begun where there is as much");
    if constexpr (!kIsFp32<Scalar>) {
      using OfChunks = ChunksShared<Scalar, kDstate, Sm90Wgmma>;
      using OfStates = StatesShared<Scalar, kDstate, StatesPass::kBwd, Sm90Wgmma>;
      static_assert(OfChunks::bytes(OfChunks::kMaxStages) <= 227 * 1024 && OfStates::bytes(OfStates::kMaxStages) <= 227 * 1024,
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
int launch_ssd_bwd_gate(const GateBwdParams& params, int blocks, cudaStream_t stream) {
  ssd_bwd_gate_kernel<Scalar><<<blocks, kGateThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace ssm_kernels::ssd
