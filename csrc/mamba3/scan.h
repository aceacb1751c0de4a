// The scan of mamba3_chunk_scan: the arguments of the chunked scan with two input samples a step (ssd/two_sample_op.h) that
// follows the rotation, or that rotates itself.
#pragma once

#include <ATen/core/Tensor.h>

#include "mamba3/mamba3_op.h"
#include "mamba3/rotation.h"
#include "ssd/two_sample_op.h"

namespace ssm_kernels::mamba3 {

// The discretization of Mamba-3.
constexpr Discretization kRule = Discretization::kExpTrapezoidal;

enum class Pass { kForward, kBackward };

// The type of the scan's sequences, k and q included. On CUDA the forward of a call with ranks has that of x, and the backward
// of one without ranks, unless its output is wide: fp16 and bf16 have wgmma kernels. The gradients of k and q are wide, because
// those of angles and dt are small sums of large terms of them.
at::ScalarType scan_dtype(const Inputs& in, Pass pass);

// k and q of that type.
Rotation rotate_for_scan(const Inputs& in, Pass pass);

ssd::Ranks ranks_of(const Inputs& in);

// The scan that follows the rotation. `ranks` outlives it.
ssd::TwoSampleInputs scan_of(const Inputs& in, const Rotation& rotation, const ssd::Ranks& ranks, Pass pass);

// Whether the scan's kernel rotates (ssd/cuda/row_rotator.cuh), and forward then.
bool rotates_in_scan(const Inputs& in);
Outputs rotating_scan(const Inputs& in);

// Factors of ranks, and k of states, (..., heads, ranks, ...), with the ranks first.
at::Tensor ranks_first(const at::Tensor& tensor, int64_t axis);

// Which packed sequences have steps, as a factor of a tensor like `state`.
at::Tensor have_steps(const Inputs& in, const at::Tensor& state);

}  // namespace ssm_kernels::mamba3
