// Backward of calls with states_at in terms of calls without.
#pragma once

#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/core/Tensor.h>

#include <functional>

#include "delta_rule/delta_rule_op.h"

namespace ssm_kernels::delta_rule {

// Runs backward of a piece and writes its gradients. `resets` are the piece's of resets_of() (tensors.h), undefined without
// seq_idx, which a piece does not have.
using RunPiece = std::function<void(const BwdInputs& piece, const GradTensors& grads, const at::Tensor& resets)>;

// Writes the gradients of a plain call (plain_calls.h) with states_at. Calls `run` for the pieces between these positions, from
// the last to the first one. Forward computes the state before each piece once more; the gradient of the state after a piece is
// that of the state before the next one, and of the result at this position.
void bwd_of_pieces(const BwdInputs& bwd, const GradTensors& grads, const RunPiece& run);

}  // namespace ssm_kernels::delta_rule

#endif
