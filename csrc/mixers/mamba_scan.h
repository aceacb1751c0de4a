// The selective scan of a Mamba mixer, whose sequences are (batch, seqlen, channels).
#pragma once

#include <ATen/core/Tensor.h>

#include "mixers/mixer_parameters_op.h"
#include "selective_scan/selective_scan_op.h"
#include "torch/checks.h"

namespace ssm_kernels::mixers {

// Between (batch, seqlen, channels) and the scan's (batch, channels, seqlen), either way, without a copy.
inline at::Tensor transposed(const at::Tensor& sequence) { return sequence.transpose(1, 2); }
inline OptionalTensor transposed(const OptionalTensor& sequence) {
  return is_present(sequence) ? OptionalTensor(transposed(*sequence)) : std::nullopt;
}

struct ScanSequences {
  at::Tensor x, delta, B, C;
  OptionalTensor z;
};

// Returns the scan's arguments, all but the initial state. `in` has the packing and the discretization.
template <typename Named>
selective_scan::Inputs scan_inputs(const ScanSequences& sequences, const Parameters& parameters, const Named& in) {
  selective_scan::Inputs scan;
  scan.u = transposed(sequences.x);
  scan.delta = transposed(sequences.delta);
  scan.A = parameters.A;
  scan.B = transposed(sequences.B);
  scan.C = transposed(sequences.C);
  scan.D = parameters.D;
  scan.z = transposed(sequences.z);
  scan.delta_bias = parameters.bias;
  scan.seq_idx = in.seq_idx;
  scan.cu_seqlens = in.cu_seqlens;
  scan.discretization = in.discretization;
  scan.delta_softplus = true;
  return scan;
}

}  // namespace ssm_kernels::mixers
