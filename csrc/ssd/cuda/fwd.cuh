// SSD forward on CUDA: S_t = a_t S_{t-1} + c_t x_t B_t^T, y_t = S_t C_t + D x_t, out = y silu(z), with the scalar decay a =
// e^zeta, zeta = d A, and gain c = d k(zeta) of each head (Dao and Gu 2024, section 6). It takes one pass over memory.
// mamba_ssm calls the whole mamba_chunk_scan_combined; here its five stages are parts of one kernel.
// Where log decays and gains are given (log_gates.cuh), they are zeta and c. With a gain on the diagonal, d_t, the output reads
// the state before the step: y_t = S_{t-1} C_t + d_t (B_t . C_t) x_t + D x_t. Below, e^(s_i) is then e^(s_{i-1}), the decays of
// the pairs j < i are e^(s_{i-1} - s_j), and the pair j = i has d_i in place of its decay and gain, by a selection.
//
// Within a chunk of kChunk steps everything is a matrix product. s is the cumulative sum of zeta from the chunk's start, l the
// chunk's last step, S the state before the chunk. All products are transposed, so that the state stays in registers:
//
//   s, c                                                              chunk_cumsum
//   M^T (j, i) = (B C^T)(j, i) e^(s_i - s_j) c_j for j <= i, else 0   bmm_chunk, decays and gains
//   y^T = (S C^T) e^(s_i) + x^T M^T + D x^T                           chunk_scan
//   S' = e^(s_l) S + (x_j c_j e^(s_l - s_j))^T B                      state_passing, chunk_state
//
// For fp16 and bf16 M^T is a hi/lo split: rounding M^T alone would cause most of the error of out. S and the scaled x are
// rounded. In fp32 nothing is rounded.
//
// A consumer warpgroup holds a state tile: up to 64 rows (headdim) and 128 columns of one head's state. Warp w has rows 16 w to
// 16 w + 15 of S and of y^T. A block has two state tiles. They have different rows and share B and C, or with more columns the
// same rows (warpgroup_layout.cuh). The block processes the chunks of one sequence after another, while x, z, B and C of the
// next chunks are copied. Where that saves time, sequences are cut so that all blocks have equally many chunks (scheduler.cuh).
// Nothing is saved for backward.
//
// A call may ask for the states between chunks (SsdFwdParams::chunk_states). At the end of each of these chunks a consumer
// warpgroup stores its state tile from its registers, as it stores the final state. With wgmma other calls take a kernel
// without this code, with mma.sync they have one branch for it a chunk.
//
// Rows of x, z, B and C are vectors of 16 bytes, the last filled up with zeros. Tiles have zeros beyond them.
//
// Three files have the kernels: fwd_sm90.cuh for fp16 and bf16 on devices with wgmma, fwd_sm80.cuh for fp32, other
// devices and reverse scans, and short_scan_fwd.cuh, a sequential scan of fp32 sequences of up to kShortSteps steps.
#pragma once

#include "cuda/chunked/chunk_starts.cuh"
#include "cuda/chunked/state_passing.cuh"
#include "ssd/cuda/discretized_gates.cuh"
#include "ssd/cuda/fwd_sm80.cuh"
#include "ssd/cuda/fwd_sm90.cuh"
#include "ssd/cuda/log_gates.cuh"
#include "ssd/cuda/state_operands.cuh"

namespace ssm_kernels::ssd {

template <typename Scalar, int dstate, typename Mma, typename Gates>
cudaError_t launch_ssd_fwd_kernel(const typename Gates::FwdParams& params, const Schedule& schedule, int available,
                                  cudaStream_t stream) {
  using Shared = std::conditional_t<Mma::kIsAsync, Sm90Shared<dstate, Gates>, Sm80Shared<Scalar, dstate, Gates>>;
  static_assert(Shared::bytes(1, true) + kTicketBytes <=
                    certain_shared_bytes<Scalar, Mma>(dstate, /*is_backward=*/false, kHasDiagonalGain<Gates>),
                "a launch needs no more");
  const auto launch = [&](auto kernel, int threads, const auto& call_params) {
    const auto bytes_of = [&](int stages) { return Shared::bytes(stages, params.z.data != nullptr); };
    return launch_staged(kernel, schedule.blocks, threads, Shared::kMaxStages, bytes_of, available, stream, call_params,
                         schedule);
  };
  if constexpr (Mma::kIsAsync) {
    constexpr int kThreads = FwdSm90<Scalar, dstate, false, Gates>::kThreads;
    if constexpr (kRotatesRows<Gates>) {
      return launch(ssd_fwd_sm90_kernel<Scalar, dstate, false, Gates>, kThreads, params);
    } else {
      const bool has_options = params.resets != nullptr || params.chunk_states != nullptr;
      const auto kernel =
          has_options ? ssd_fwd_sm90_kernel<Scalar, dstate, true, Gates> : ssd_fwd_sm90_kernel<Scalar, dstate, false, Gates>;
      return launch(kernel, kThreads, params);
    }
  } else {
    const auto launch_sm80 = [&](const auto& call_params) {
      using Params = std::decay_t<decltype(call_params)>;
      return launch(ssd_fwd_sm80_kernel<Scalar, dstate, Params, Mma, Gates>, kWarpgroups * kWarpgroupThreads, call_params);
    };
    if constexpr (kKnowsWhetherPacked<Scalar, dstate>) {
      return params.cu_seqlens != nullptr ? launch_sm80(Packed<typename Gates::FwdParams>{params})
                                          : launch_sm80(Unpacked<typename Gates::FwdParams>{params});
    } else {
      return launch_sm80(params);
    }
  }
}

template <typename Gates>
cudaError_t launch_ssd_fwd_of(const typename Gates::FwdParams& params, const Schedule& schedule, Products products,
                              int max_shared_bytes, cudaStream_t stream) {
  using Scalar = typename Gates::Scalar;
  if (params.cu_seqlens != nullptr) {
    const SsdFwdParams& without_gates = params;
    chunk_starts_kernel<<<1, kChunkStartsThreads, 0, stream>>>(without_gates, schedule);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  constexpr bool kRoundsFp32 = !kHasDiagonalGain<Gates>;
  const auto launch = [&](auto columns, auto mma) -> cudaError_t {
    using Mma = decltype(mma);
    constexpr int kColumns = decltype(columns)::value;
    // The states do not depend on the gain on the diagonal.
    using StateGates = std::conditional_t<kHasDiagonalGain<Gates>, LogGates<Scalar>, Gates>;
    using Summaries = SsdStatePassing<Scalar, kColumns, StatesPass::kFwdSummary, Mma, StateGates>;
    static_assert(
        Summaries::Shared::bytes(1) + kTicketBytes <= certain_shared_bytes<Scalar, Mma>(kColumns, /*is_backward=*/false),
        "a launch needs no more");
    const int available = max_shared_bytes - kTicketBytes;
    if (schedule.splits_work_tiles) {
      const typename StateGates::FwdParams& state_params = params;
      const cudaError_t error = launch_state_passing<Summaries>(schedule.blocks, available, stream, state_params, schedule);
      if (error != cudaSuccess) return error;
    }
    return launch_ssd_fwd_kernel<Scalar, kColumns, Mma, Gates>(params, schedule, available, stream);
  };
  return visit_kernels<Scalar, kMaxKernelDstate, kRoundsFp32>(params.dstate, products, launch);
}
template <typename Scalar>
cudaError_t launch_ssd_fwd(const SsdFwdParams& params, const Schedule& schedule, Products products, int max_shared_bytes,
                           cudaStream_t stream) {
  check_known(params.discretization);
  return launch_ssd_fwd_of<DiscretizedGates<Scalar>>(params, schedule, products, max_shared_bytes, stream);
}
template <typename Scalar>
cudaError_t launch_ssd_fwd(const SsdLogFwdParams& params, const Schedule& schedule, Products products, int max_shared_bytes,
                           cudaStream_t stream) {
  return launch_ssd_fwd_of<LogGates<Scalar>>(params, schedule, products, max_shared_bytes, stream);
}
template <typename Scalar>
cudaError_t launch_ssd_fwd(const SsdDiagonalFwdParams& params, const Schedule& schedule, Products products,
                           int max_shared_bytes, cudaStream_t stream) {
  return launch_ssd_fwd_of<DiagonalGates<Scalar>>(params, schedule, products, max_shared_bytes, stream);
}
template <typename Scalar>
cudaError_t launch_ssd_rotated_fwd(const SsdRotatedFwdParams& params, const Schedule& schedule, int max_shared_bytes,
                                   cudaStream_t stream) {
  const int available = max_shared_bytes - kTicketBytes;
  const auto launch = [&](auto columns) {
    constexpr int kColumns = decltype(columns)::value;
    if (params.rotation.is_pairs && 4 * params.rotation.angles_count <= kColumns) {
      return launch_ssd_fwd_kernel<Scalar, kColumns, Sm90Wgmma, RotatedGates<Scalar, 1>>(params, schedule, available, stream);
    }
    return launch_ssd_fwd_kernel<Scalar, kColumns, Sm90Wgmma, RotatedGates<Scalar, 2>>(params, schedule, available, stream);
  };
  if (params.dstate == 64) return launch(std::integral_constant<int, 64>());
  return params.dstate == 128 ? launch(std::integral_constant<int, 128>()) : cudaErrorInvalidValue;
}

}  // namespace ssm_kernels::ssd
