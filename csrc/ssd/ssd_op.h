// Shared by the dispatcher's side of ssd_chunk_scan (ssd_op.cpp) and its devices: arguments and results of its operators,
// checks and allocation.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "common/discretization.h"
#include "torch/checks.h"

namespace ssm_kernels::ssd {

using OptionalTensor = std::optional<at::Tensor>;

// The largest headdim. (dstate's: common/limits.h.)
constexpr int64_t kMaxHeaddim = 256;

// Several samples a step: with `count` rows of B and C a step, (batch, seqlen, count, groups, dstate), and v^r = x * x^r, a
// step adds sum_r v^r (B^r)^T to the state and has the outputs y^r = S C^r + D v^r. Each is normalized if there is a weight and
// gated by z * z^r, and `out` is the sum of the results times out^r. Factors are (heads, count, headdim) and are 1 if absent.
struct Ranks {
  int64_t count = 1;
  OptionalTensor x, z, out, norm_weight;  // norm_weight: (heads, headdim)
  double norm_eps = 0;
};
// The gradients of the tensors, float64 sums in their shapes; undefined if they are not needed.
struct RankGrads {
  at::Tensor x, z, out, norm_weight;
};

// A rotation that makes the rows of heads from B and C, the rows of groups: RowRotation, ssd.h. Tensors are on CUDA.
struct Rotation {
  at::Tensor phases;      // (batch, chunks of 64 steps, heads, angles), fp32, contiguous
  at::Tensor angles, dt;  // (batch, seqlen, angles) or (batch, seqlen, heads, angles); (batch, seqlen, heads)
  OptionalTensor B_bias, C_bias;
  bool is_pairs = true;
  at::Tensor final_angle, final_k;  // results, (batch, heads, angles) and (batch, heads, dstate), fp32, contiguous
};

// A call gives dt and A, or in their place the log decays and, optionally, the gains of all steps.
struct Inputs {
  at::Tensor x;
  OptionalTensor dt, A;
  at::Tensor B, C;
  std::optional<c10::SymInt> chunk_size;
  OptionalTensor D, z, dt_bias;
  bool dt_softplus = false;
  double dt_min = 0, dt_max = 0;  // of parse_dt_limit; kernels read kernel_dt_limit of them
  OptionalTensor initial_states, seq_idx, cu_seqlens;
  std::string_view discretization;  // of the caller's string
  bool reverse = false;             // in time: the first step of the scan is the last one of the tensors
  OptionalTensor log_decay, gain;   // (batch, seqlen, heads); an absent gain is 1
  // The members below are set by callers in C++; no schema has them.
  // A factor of each step's outputs, (batch, seqlen, heads), fp32 like the given gates, without D and z. For forward of calls
  // that takes_out_factors() names. Log decays, gains and factors are contiguous.
  OptionalTensor out_factor;
  bool are_cu_seqlens_checked = false;  // the values
  // The gain on the diagonal, (batch, seqlen, heads), like the given gates. The output of a step then reads the state before
  // the step, without its decay, and the step's own input by this gain: y_t = S_{t-1} C_t + diagonal_gain_t (B_t . C_t) x_t.
  // Rules with two input samples (two_sample_op.cpp) have their shifted weights as gains: no division by a decay.
  OptionalTensor diagonal_gain;
  // Calls with ranks have given gates and a gain on the diagonal.
  const Ranks* ranks = nullptr;
  // For calls with a gain on the diagonal that CUDA kernels take: a step is 2^rank_shift consecutive rows of x, B, C and the
  // gates, at most eight. All of them read the state before the step, and the diagonal is the block of all pairs of rows of a
  // step. The first row has the log decay and receives its gradient; the others have a log decay of 0.
  int rank_shift = 0;
  // For forward of calls with given gates and a gain on the diagonal that takes_rotation() names.
  const Rotation* rotation = nullptr;

  auto fields() {
    return std::tie(x, dt, A, B, C, chunk_size, D, z, dt_bias, dt_softplus, dt_min, dt_max, initial_states, seq_idx, cu_seqlens,
                    discretization, reverse, log_decay, gain);
  }
};

// Options of tensors that have the accumulation type: parameters, states and partial sums.
inline at::TensorOptions wide_options(const at::Tensor& x) { return x.options().dtype(accumulate_type(x.scalar_type())); }

// Raises unless the inputs are as ssm_kernels.ssd_chunk_scan documents, the values of cu_seqlens apart; returns the method.
// Messages begin with `op`.
Discretization check_inputs_of(const char* op, const Inputs& in, bool (*is_supported)(Discretization));
// Raises an error that lists the rules of ssd_chunk_scan with one input sample and with two, unless it is one of them.
void check_decay(std::string_view discretization);
// Rules with two samples whose state decays by e^zeta.
bool is_exponential_two_sample(Discretization method);
// The same for the rules of ssd_chunk_scan with one input sample.
Discretization check_inputs_of(const char* op, const Inputs& in);
Discretization check_inputs(const Inputs& in);

struct FwdOutputs {
  at::Tensor out, final_states;

  auto fields() { return std::tie(out, final_states); }
};
// Uninitialized, on the device of x (the Meta device included).
FwdOutputs allocate_fwd(const Inputs& in);

// A scan of sequences that are not packed, not in reverse, with the states at ascending positions from 0 to seqlen.
struct StatesInputs : Inputs {
  std::vector<int64_t> states_at;

  auto fields() { return std::tuple_cat(Inputs::fields(), std::tie(states_at)); }
};
struct StatesOutputs : FwdOutputs {
  at::Tensor states;  // (batch, positions, heads, headdim, dstate)

  auto fields() { return std::tie(out, final_states, states); }
};
Discretization check_states_inputs(const StatesInputs& in);
StatesOutputs allocate_states(const StatesInputs& in);

enum Grad {
  kGradX,
  kGradDt,
  kGradA,
  kGradB,
  kGradC,
  kGradD,
  kGradZ,
  kGradDtBias,
  kGradInitialStates,
  kGradLogDecay,
  kGradGain,
  kNumGrads
};
using NeedsGrad = std::array<bool, kNumGrads>;
using GradTensors = std::array<at::Tensor, kNumGrads>;

struct BwdInputs {
  OptionalTensor grad_out, grad_final_states;
  Inputs in;
  NeedsGrad needs_grad = {};
  // Memory for the gradients of sequences, such as columns of a wider tensor; for those of B and C also of the accumulation
  // type. Callers in C++ set it; no schema has it.
  std::array<OptionalTensor, kNumGrads> targets;
  // Memory for the inner product of each step's output, before D x and the gate, with its gradient: (batch, seqlen, heads),
  // fp32. For calls with given gates that writes_out_products() names.
  OptionalTensor out_products;
  // Memory for the gradient of Inputs::diagonal_gain, likewise, of the accumulation type; absent if it is not needed.
  OptionalTensor grad_diagonal_gain;
  // The sums that the gradients of the ranks are added to, with Inputs::ranks.
  const RankGrads* rank_grads = nullptr;

  auto grads() { return std::tie(grad_out, grad_final_states); }
  auto saved() { return std::tie(); }
  auto fields() { return std::tuple_cat(grads(), in.fields(), std::tie(needs_grad)); }
};

struct StatesBwdInputs {
  OptionalTensor grad_out, grad_final_states, grad_states;
  StatesInputs in;
  NeedsGrad needs_grad = {};

  auto grads() { return std::tie(grad_out, grad_final_states, grad_states); }
  auto saved() { return std::tie(); }
  auto fields() { return std::tuple_cat(grads(), in.fields(), std::tie(needs_grad)); }

  // The inputs for backward of a scan without states.
  BwdInputs of_scan() const { return {grad_out, grad_final_states, in, needs_grad, {}, {}, {}}; }
};

// Checks the arguments of backward alone and allocates as allocate_fwd does. The gradient of a sequence is its target or has
// the layout of the sequence, those of parameters and states are contiguous, and those absent or not needed have no elements.
GradTensors allocate_bwd(const BwdInputs& bwd);
GradTensors allocate_states_bwd(const StatesBwdInputs& bwd);

// The summary of a span of steps: the map from the states before it to those after it.
struct SummaryInputs {
  at::Tensor x;
  OptionalTensor dt, A;
  at::Tensor B;
  OptionalTensor dt_bias;
  bool dt_softplus = false;
  double dt_min = 0, dt_max = 0;
  OptionalTensor seq_idx;
  std::string_view discretization;
  OptionalTensor log_decay, gain;

  auto fields() {
    return std::tie(x, dt, A, B, dt_bias, dt_softplus, dt_min, dt_max, seq_idx, discretization, log_decay, gain);
  }

  // The scan with these final states. It reads B as C, whose outputs nobody reads.
  Inputs scan() const;
};
struct SummaryOutputs {
  at::Tensor final_states;  // from zero, (batch, heads, headdim, dstate)
  at::Tensor decay;         // (batch, heads); zero where a sequence begins in the span

  auto fields() { return std::tie(final_states, decay); }
};

enum SummaryGrad {
  kSummaryGradX,
  kSummaryGradDt,
  kSummaryGradA,
  kSummaryGradB,
  kSummaryGradDtBias,
  kSummaryGradLogDecay,
  kSummaryGradGain,
  kNumSummaryGrads
};
using SummaryGrads = std::array<at::Tensor, kNumSummaryGrads>;

struct SummaryBwdInputs {
  OptionalTensor grad_final_states, grad_decay;
  SummaryInputs in;
  std::array<bool, kNumSummaryGrads> needs_grad = {};

  auto grads() { return std::tie(grad_final_states, grad_decay); }
  auto saved() { return std::tie(); }
  auto fields() { return std::tuple_cat(grads(), in.fields(), std::tie(needs_grad)); }
};

// For CUDA tensors (entry.cpp); for others chunked_scan.h has them. ssd_op.cpp registers both.
FwdOutputs fwd_cuda(const Inputs& in);
StatesOutputs states_cuda(const StatesInputs& in);
GradTensors bwd_cuda(const BwdInputs& bwd);
// The same with ranks, where takes_rank_kernels() (ranks.cpp).
bool takes_rank_kernels(const Inputs& in, bool is_backward);
FwdOutputs fwd_ranks_cuda(const Inputs& in);
GradTensors bwd_ranks_cuda(const BwdInputs& bwd);
// Whether backward of a call on CUDA runs kernels, which write BwdInputs::out_products.
bool writes_out_products(const Inputs& in);
// Whether forward of a call on CUDA runs kernels that take out_factor.
bool takes_out_factors(const Inputs& in);
// Whether forward of a call on CUDA runs the kernel that takes `rotation` (row_rotator.cuh), with B and C of groups: fp16 and
// bf16, on compute capability 9.0, a dstate of 64 or 128, a multiple of 4 angles, at least two state tiles in a group,
// sequences that are not packed, without resets, and enough of them or few enough steps that no block begins inside a long
// sequence.
bool takes_rotation(const Inputs& in, int64_t angles);
std::string plan_cuda(const Inputs& in, bool is_backward);
// Writes the states that a scan from zero leaves, or in reverse the gradient of the states before it, with the outputs'
// gradient in the place of x, and the decay of all steps if that is defined. B and C are the same tensor. Returns false, and
// writes nothing, if no kernels take the call.
bool span_states_cuda(const Inputs& in, Discretization method, bool is_reverse, const at::Tensor& states,
                      const at::Tensor& decay);

// Forward and backward without the dispatcher, for operators composed of this one, on any device and on Meta.
FwdOutputs fwd(const Inputs& in);
GradTensors bwd(const BwdInputs& bwd);

}  // namespace ssm_kernels::ssd
