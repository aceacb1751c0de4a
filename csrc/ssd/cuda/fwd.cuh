// SSD forward on CUDA: S_t = a_t S_{t-1} + c_t x_t B_t^T, y_t = S_t C_t + D x_t, out = y silu(z), with the scalar decay a =
// e^zeta, zeta = d A, and gain c = d k(zeta) of each head (Dao and Gu 2024, section 6). It takes one pass over memory.
// mamba_ssm calls the whole mamba_chunk_scan_combined; here its five stages are parts of one kernel.
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
// Three files have the kernels: fwd_sm90.cuh for fp16 and bf16 on devices with wgmma, fwd_sm80.cuh for fp32 and other devices,
// and short_scan_fwd.cuh, a sequential scan of fp32 sequences of up to kShortSteps steps.
#pragma once

#include "ssd/cuda/chunk_starts.cuh"
#include "ssd/cuda/fwd_sm80.cuh"
#include "ssd/cuda/fwd_sm90.cuh"
#include "ssd/cuda/state_passing.cuh"

namespace ssm_kernels::ssd {

// Launches a kernel with as many stages as fit in shared memory: bytes_of(stages).
template <typename Kernel, typename Params, typename BytesOf>
cudaError_t launch_staged(Kernel kernel, int threads, int max_stages, const BytesOf& bytes_of, const Params& params,
                          const Schedule& schedule, int max_shared_bytes, cudaStream_t stream) {
  Schedule staged = schedule;
  staged.stages = fit_stages(max_stages, max_shared_bytes - kTicketBytes, bytes_of);
  const int bytes = bytes_of(staged.stages);
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, bytes); error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(schedule.blocks), threads, bytes, stream>>>(params, staged);
  return cudaGetLastError();
}

// Launches the kernel that computes the summaries of segments, if work tiles have several.
template <typename Scalar, int dstate>
cudaError_t launch_ssd_fwd_summary(const SsdFwdParams& params, const Schedule& schedule, int max_shared_bytes,
                                   cudaStream_t stream) {
  constexpr StatesPass kPass = StatesPass::kFwdSummary;
  if constexpr (!kIsFp32<Scalar>) {
    using States = StatePassing<Scalar, dstate, kPass, Sm90Wgmma>;
    const auto kernel = ssd_state_passing_kernel<Scalar, dstate, kPass, Sm90Wgmma>;
    if (schedule.may_use_wgmma && cuda::is_compiled_for_threads(kernel, States::kThreads)) {
      return launch_staged(kernel, States::kThreads, States::Shared::kMaxStages, &States::Shared::bytes, params, schedule,
                           max_shared_bytes, stream);
    }
  }
  using States = StatePassing<Scalar, dstate, kPass, Sm80Mma>;
  static_assert(States::Shared::bytes(1) + kTicketBytes <= least_shared_bytes(dstate, kIsFp32<Scalar>, /*is_backward=*/false),
                "every device that takes the call has that much shared memory");
  return launch_staged(ssd_state_passing_kernel<Scalar, dstate, kPass, Sm80Mma>, States::kThreads, States::Shared::kMaxStages,
                       &States::Shared::bytes, params, schedule, max_shared_bytes, stream);
}

template <typename Scalar, int dstate>
cudaError_t launch_ssd_fwd_kernel(const SsdFwdParams& params, const Schedule& schedule, int max_shared_bytes,
                                  cudaStream_t stream) {
  const bool has_gate = params.z.data != nullptr;
  if constexpr (!kIsFp32<Scalar>) {
    const auto kernel =
        params.resets != nullptr ? ssd_fwd_sm90_kernel<Scalar, dstate, true> : ssd_fwd_sm90_kernel<Scalar, dstate, false>;
    using Shared = Sm90Shared<dstate>;
    constexpr int kThreads = FwdSm90<Scalar, dstate, true>::kThreads;
    if (schedule.may_use_wgmma && cuda::is_compiled_for_threads(kernel, kThreads)) {
      const auto bytes_of = [&](int stages) { return Shared::bytes(stages, has_gate); };
      return launch_staged(kernel, kThreads, Shared::kMaxStages, bytes_of, params, schedule, max_shared_bytes, stream);
    }
  }
  using Shared = Sm80Shared<Scalar, dstate>;
  static_assert(Shared::bytes(1, true) + kTicketBytes <= least_shared_bytes(dstate, kIsFp32<Scalar>, /*is_backward=*/false),
                "every device that takes the call has that much shared memory");
  const auto launch = [&](const auto& call_params) {
    using Params = std::decay_t<decltype(call_params)>;
    const auto bytes_of = [&](int stages) { return Shared::bytes(stages, has_gate); };
    return launch_staged(ssd_fwd_sm80_kernel<Scalar, dstate, Params>, kWarpgroups * kWarpgroupThreads, Shared::kMaxStages,
                         bytes_of, call_params, schedule, max_shared_bytes, stream);
  };
  if constexpr (kKnowsWhetherPacked<Scalar, dstate>) {
    return params.cu_seqlens != nullptr ? launch(PackedFwdParams{params}) : launch(UnpackedFwdParams{params});
  } else {
    return launch(params);
  }
}

static_assert(Sm90Shared<kMaxKernelDstate>::bytes(1, true) + kTicketBytes <=
                  least_shared_bytes(kMaxKernelDstate, /*is_fp32=*/false, /*is_backward=*/false),
              "every device that takes the call has that much shared memory");

template <typename Scalar>
cudaError_t launch_ssd_fwd(const SsdFwdParams& params, const Schedule& schedule, int max_shared_bytes, cudaStream_t stream) {
  if (params.cu_seqlens != nullptr) {
    ssd_chunk_starts_kernel<<<1, kChunkStartsThreads, 0, stream>>>(params, schedule);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  const auto launch = [&](auto dstate) -> cudaError_t {
    constexpr int kDstate = decltype(dstate)::value;
    if (schedule.splits_work_tiles) {
      const cudaError_t error = launch_ssd_fwd_summary<Scalar, kDstate>(params, schedule, max_shared_bytes, stream);
      if (error != cudaSuccess) return error;
    }
    return launch_ssd_fwd_kernel<Scalar, kDstate>(params, schedule, max_shared_bytes, stream);
  };
  if (params.dstate <= 64) return launch(std::integral_constant<int, 64>());
  if (params.dstate <= kStateColumns) return launch(std::integral_constant<int, kStateColumns>());
  return launch(std::integral_constant<int, kMaxKernelDstate>());
}

}  // namespace ssm_kernels::ssd
