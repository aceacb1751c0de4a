// The interface between mlstm_step's CUDA entry point (step_entry.cpp) and its kernels (step.cuh): how warps share the work.
#pragma once

#include <cuda_runtime_api.h>

#include "common/kernel_abi.h"
#include "mlstm/mlstm_step.h"

namespace ssm_kernels::mlstm::step {

// The gates kernel writes these numbers of each row and head, in the accumulation type, for the kernel of C.
constexpr int kDecay = 0, kGain = 1, kFactor = 2, kNumbers = 3;

constexpr int kStepWarps = 4, kStepThreads = 32 * kStepWarps;
// Rows of C that a warp holds at a time, and the batches of them that it takes.
constexpr int kRowsAtOnce = 4, kBatches = 2, kRowsOfWarp = kRowsAtOnce * kBatches;

// Input is the type of q, k, v and out. `numbers`: (rows, heads, kNumbers). `has_vectors`: rows of C are contiguous and consist
// of vectors of 16 bytes at multiples of 16 bytes. Instantiated in instantiations/.
template <typename Input, typename State>
SSM_KERNEL_API cudaError_t launch_mlstm_step(const StepParams& params, void* numbers, bool has_vectors, cudaStream_t stream);

}  // namespace ssm_kernels::mlstm::step
