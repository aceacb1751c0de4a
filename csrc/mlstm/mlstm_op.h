// Shared by the dispatcher's side of mlstm_scan (mlstm_op.cpp), the composition of its kernels (scan.cpp) and its devices:
// arguments and results of its operators, checks and allocation.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

#include "torch/checks.h"

namespace ssm_kernels::mlstm {

using OptionalTensor = std::optional<at::Tensor>;

// The largest key_dim, which is ssd_chunk_scan's largest dstate.
constexpr int64_t kMaxKeyDim = 256;

enum class InputGate { kExp, kSigmoid };
// Raises a ValueError unless it is "exp" or "sigmoid".
InputGate parse_input_gate(const char* op, std::string_view name);
// The checks of options that scan and step share.
void check_options(const char* op, std::optional<double> scale, double eps, std::string_view input_gate, bool normalize);

struct Inputs {
  at::Tensor q, k;  // (batch, seqlen, heads, key_dim)
  at::Tensor v;     // (batch, seqlen, heads, value_dim)
  at::Tensor i, f;  // (batch, seqlen, heads), before their activations
  std::optional<double> scale;
  double eps = 1e-6;
  std::string_view input_gate;
  bool normalize = true;
  // (batch or sequences, heads, value_dim, key_dim), (.., heads, key_dim) and (.., heads): all or none.
  OptionalTensor initial_C, initial_n, initial_m;
  OptionalTensor cu_seqlens, seq_idx;
  bool reverse = false;  // in time: the first step of the scan is the last one of the tensors

  auto fields() {
    return std::tie(q, k, v, i, f, scale, eps, input_gate, normalize, initial_C, initial_n, initial_m, cu_seqlens, seq_idx,
                    reverse);
  }
};

// The argument scale, by default key_dim^-1/2.
double scale_of(const Inputs& in);

// Raises unless the inputs are as ssm_kernels.mlstm_scan documents, the values of cu_seqlens apart.
void check_inputs(const Inputs& in);

struct Outputs {
  at::Tensor out, final_C, final_n, final_m;

  auto fields() { return std::tie(out, final_C, final_n, final_m); }
};
struct FwdOutputs : Outputs {
  // scale n q of each step in units of e^m, (batch, seqlen, heads), for backward; without `normalize` no elements.
  at::Tensor divisor;

  auto fields() { return std::tuple_cat(Outputs::fields(), std::tie(divisor)); }
};
// Uninitialized, on the device of q (the Meta device included).
FwdOutputs allocate_fwd(const Inputs& in);

enum Grad { kGradQ, kGradK, kGradV, kGradI, kGradF, kGradC, kGradN, kGradM, kNumGrads };
using NeedsGrad = std::array<bool, kNumGrads>;
using GradTensors = std::array<at::Tensor, kNumGrads>;

struct BwdInputs {
  OptionalTensor grad_out, grad_final_C, grad_final_n;
  OptionalTensor divisor;
  Inputs in;
  NeedsGrad needs_grad = {};

  auto grads() { return std::tie(grad_out, grad_final_C, grad_final_n); }
  auto saved() { return std::tie(divisor); }
  auto fields() { return std::tuple_cat(grads(), saved(), in.fields(), std::tie(needs_grad)); }
};

// Checks the arguments of backward alone and allocates as allocate_fwd does. The gradient of a sequence has its layout, those
// of states are contiguous, and those absent or not needed have no elements.
GradTensors allocate_bwd(const BwdInputs& bwd);

// Units, log decays and gains of all steps, (batch, seqlen, heads), and the units after the last steps, (sequences, heads). All
// have the accumulation type.
struct Gates {
  at::Tensor m, log_decay, gain, final_m;
};
Gates gates_cpu(const Inputs& in);  // reads the values of cu_seqlens, which must be checked
Gates gates_cuda(const Inputs& in);

// On CUDA, out = rows * scale / (max(|divisor|, e^-m) + eps), with a row for each step and head. Returns false, and writes
// nothing, unless all tensors are contiguous.
bool scale_rows_cuda(const Inputs& in, const at::Tensor& rows, const at::Tensor& divisor, const at::Tensor& m,
                     const at::Tensor& out);
// Write the divisor and the final n.
void normalizer_cpu(const Inputs& in, const Gates& gates, const at::Tensor& divisor, const at::Tensor& final_n);
void normalizer_cuda(const Inputs& in, const Gates& gates, const at::Tensor& divisor, const at::Tensor& final_n);
// On CUDA, of sequences that are not packed, writes the final n and returns n before every kNormalizerChunk steps, (batch,
// normalizer_chunks(seqlen), heads, key_dim), but for those before the first step.
at::Tensor normalizer_states_cuda(const Inputs& in, const Gates& gates, const at::Tensor& final_n);
// The gradients through the divisor and n, on CUDA. `out_products`: the sum over value_dim of the gradient of out times out, in
// parts, (batch, seqlen, heads, parts), or undefined: zero.
struct NormalizerGrads {
  at::Tensor q, k;             // that the gradients are added to, or undefined
  at::Tensor log_decay, gain;  // (batch, seqlen, heads), which the function allocates
  at::Tensor initial_n;        // written, or undefined
};
void normalizer_bwd_cuda(const Inputs& in, const Gates& gates, const at::Tensor& divisor, const at::Tensor& out_products,
                         const OptionalTensor& grad_final_n, NormalizerGrads& grads);

// mlstm_scan's own chunked kernels (cuda/chunks.cpp), and whether they take a call: bfloat16 on compute capability 9.0, key_dim
// 256, value_dim a multiple of 256, sequences neither packed nor numbered. chunks_fwd writes out, final_C and, with
// `normalize`, the divisor and final_n. chunks_bwd, which needs grad_out, writes the needed gradients of q, k, v and initial_C
// through the numerators.
bool takes_chunks(const Inputs& in);
void chunks_fwd(const Inputs& in, const Gates& gates, FwdOutputs& outputs);
struct ChunkGrads {
  at::Tensor log_decay, gain_times_grad;  // (batch, seqlen, heads); the second is the gain times its gradient
  at::Tensor out_products;                // the sum over value_dim of the gradient of out times out, (batch, seqlen, heads, 1)
};
ChunkGrads chunks_bwd(const BwdInputs& bwd, const Inputs& in, const Gates& gates, const GradTensors& grads);

// Forward and backward of checked inputs that run forward in time (scan.cpp), and of a reverse scan by means of these
// (reverse.cpp).
FwdOutputs scan(const Inputs& in);
GradTensors scan_bwd(const BwdInputs& bwd);
FwdOutputs reverse_scan(const Inputs& in);
GradTensors reverse_scan_bwd(const BwdInputs& bwd);

// Forward and backward without the dispatcher, on any device and on Meta.
FwdOutputs fwd(const Inputs& in);
GradTensors bwd(const BwdInputs& bwd);

}  // namespace ssm_kernels::mlstm
