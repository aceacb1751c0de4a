// mlstm_scan as a composition: the gates of all steps, a chunked scan with given gates, the normalizer, and a division.
//
// With m_t = max(log sigmoid(f_t) + m_{t-1}, i_t), C and n in units of e^m decay by e^(log sigmoid(f_t) + m_{t-1} - m_t) <= 1
// and take in k_t with the gain e^(i_t - m_t) <= 1. ssd_chunk_scan computes the numerators C q, with the keys as B and the
// queries as C. Blocks of kMaxHeaddim rows of a head's C are heads of their own, which share k and q as a group. The normalizer
// and the products n q are kernels of their own (cuda/normalizer.cuh, cpu/normalizer_kernel.cpp). Their adjoint on the CPU is
// that of one more chunked scan, with a column of ones in place of the values. The CPU computes fp16 and bf16 inputs as fp32.
//
// Calls that takes_chunks() names go to this operator's own chunked kernels (cuda/chunks.cpp) for numerators, division and
// their gradients, and for the divisor of forward unless sequences are packed; the gates and the rest of the normalizer are the
// same.
//
// Kernels of fp16 and bf16 take the reciprocal of the divisor as a factor of each output: numerators are not rounded.
//
// Backward holds m constant: the results depend on it through eps alone. The gradient of a step's divisor is that of out times
// out, summed. This sum is that of the numerators times their gradient, which SSD's kernels of backward compute in fp32, or q
// times the gradient of q through the numerators: backward reads neither out nor numerators.

#include <ATen/ScalarOps.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>

#include <limits>
#include <vector>

#include "mlstm/mlstm_op.h"
#include "ssd/ssd_op.h"
#include "torch/allocation.h"

namespace ssm_kernels::mlstm {
namespace {

// A head's value_dim rows as `parts` heads of `rows` rows, the last ones of which may be padding.
struct Split {
  int64_t heads, value_dim, parts, rows;

  explicit Split(const Inputs& in)
      : heads(in.v.size(2)),
        value_dim(in.v.size(3)),
        parts((value_dim + ssd::kMaxHeaddim - 1) / ssd::kMaxHeaddim),
        rows((value_dim + parts - 1) / parts) {}

  int64_t padding() const { return parts * rows - value_dim; }

  // (batch, seqlen, heads, value_dim) to (batch, seqlen, heads * parts, rows).
  at::Tensor values(const at::Tensor& values) const {
    if (parts == 1) return values;
    const at::Tensor padded = padding() == 0 ? values : at::constant_pad_nd(values, {0, padding()});
    return padded.contiguous().view({values.size(0), values.size(1), heads * parts, rows});
  }
  at::Tensor whole_values(const at::Tensor& parts_of) const {
    if (parts == 1) return parts_of;
    const at::Tensor joined = parts_of.view({parts_of.size(0), parts_of.size(1), heads, parts * rows});
    return padding() == 0 ? joined : joined.narrow(3, 0, value_dim);
  }
  // values() of a result, if it is a view.
  OptionalTensor target_of_values(const at::Tensor& values) const {
    if (parts == 1) return values;
    if (padding() != 0 || !values.is_contiguous()) return std::nullopt;
    return values.view({values.size(0), values.size(1), heads * parts, rows});
  }
  // (sequences, heads, value_dim, key_dim) likewise.
  at::Tensor states(const at::Tensor& states) const {
    if (parts == 1) return states;
    const at::Tensor padded = padding() == 0 ? states : at::constant_pad_nd(states, {0, 0, 0, padding()});
    return padded.contiguous().view({states.size(0), heads * parts, rows, states.size(3)});
  }
  at::Tensor whole_states(const at::Tensor& parts_of) const {
    if (parts == 1) return parts_of;
    const at::Tensor joined = parts_of.view({parts_of.size(0), heads, parts * rows, parts_of.size(3)});
    return padding() == 0 ? joined : joined.narrow(2, 0, value_dim).contiguous();
  }
  // (batch, seqlen, heads) for each part, and their sums.
  at::Tensor gates(const at::Tensor& gates) const {
    if (parts == 1) return gates;
    const int64_t batch = gates.size(0), seqlen = gates.size(1);
    return gates.unsqueeze(3).expand({batch, seqlen, heads, parts}).reshape({batch, seqlen, heads * parts});
  }
  at::Tensor sum_of_gates(const at::Tensor& of_parts) const {
    if (parts == 1) return of_parts;
    return of_parts.reshape({of_parts.size(0), of_parts.size(1), heads, parts}).sum(3);
  }
};

OptionalTensor map(const OptionalTensor& tensor, const auto& function) {
  return is_present(tensor) ? OptionalTensor(function(*tensor)) : std::nullopt;
}

// The arguments that the scans of the numerator and of the divisor share.
ssd::Inputs shared_scan(const Inputs& in) {
  ssd::Inputs scan;
  scan.B = in.k;
  scan.C = in.q;
  scan.dt_min = -std::numeric_limits<double>::infinity();
  scan.dt_max = std::numeric_limits<double>::infinity();
  scan.discretization = "zoh";
  scan.cu_seqlens = in.cu_seqlens;
  scan.are_cu_seqlens_checked = true;
  scan.seq_idx = in.seq_idx;
  return scan;
}

// The scan whose outputs are the numerators C q.
ssd::Inputs numerator_scan(const Inputs& in, const Gates& gates, const Split& split) {
  ssd::Inputs scan = shared_scan(in);
  scan.x = split.values(in.v);
  scan.log_decay = split.gates(gates.log_decay);
  scan.gain = split.gates(gates.gain);
  scan.initial_states = map(in.initial_C, [&](const at::Tensor& states) { return split.states(states); });
  return scan;
}

// The scan whose outputs are the products n q.
ssd::Inputs product_scan(const Inputs& in, const Gates& gates) {
  ssd::Inputs scan = shared_scan(in);
  scan.x = at::ones({1}, in.q.options()).expand({in.q.size(0), in.q.size(1), in.q.size(2), 1});
  scan.log_decay = gates.log_decay;
  scan.gain = gates.gain;
  scan.initial_states = map(in.initial_n, [](const at::Tensor& states) { return states.unsqueeze(2); });
  return scan;
}

bool is_on_cuda(const Inputs& in) {
#ifdef SSM_KERNELS_WITH_CUDA
  return in.q.is_cuda();
#else
  return false;
#endif
}

// Whether the chunked kernels of this operator take the call.
bool has_chunks(const Inputs& in) {
#ifdef SSM_KERNELS_WITH_CUDA
  return takes_chunks(in);
#else
  return false;
#endif
}

// The factor of each row of the numerators, scale / (max(|divisor|, e^-m) + eps), of each part.
at::Tensor out_factors(const Inputs& in, const at::Tensor& divisor, const at::Tensor& m) {
  return (at::maximum(divisor.abs(), m.neg().exp()) + in.eps).reciprocal_().mul_(scale_of(in));
}

// Gives a scan of the numerators these factors, if its kernels take them.
bool divide_inside(const Inputs& in, ssd::Inputs& scan, const Split& split, const at::Tensor& divisor, const at::Tensor& m) {
#ifdef SSM_KERNELS_WITH_CUDA
  if (!in.q.is_cuda() || !in.normalize || !ssd::takes_out_factors(scan)) return false;
  scan.out_factor = split.gates(out_factors(in, divisor, m));
  return true;
#else
  return false;
#endif
}

// The inputs in the dtypes that the kernels of their device take.
Inputs prepare(const Inputs& given) {
  Inputs in = given;
  if (is_present(in.cu_seqlens)) in.cu_seqlens = in.cu_seqlens->to(at::kLong).contiguous();
  if (!is_on_cuda(in)) {
    for (at::Tensor* tensor : {&in.q, &in.k, &in.v}) *tensor = tensor->to(accumulate_type(tensor->scalar_type()));
  }
  return in;
}

Gates make_gates(const Inputs& in) {
#ifdef SSM_KERNELS_WITH_CUDA
  if (in.q.is_cuda()) return gates_cuda(in);
#endif
  return gates_cpu(in);
}

// Writes rows * scale / (max(|divisor|, e^-m) + eps), or rows * scale without `normalize`.
void scale_rows(const Inputs& in, const at::Tensor& rows, const at::Tensor& divisor, const at::Tensor& m, at::Tensor& out) {
#ifdef SSM_KERNELS_WITH_CUDA
  if (rows.is_cuda() && in.normalize && scale_rows_cuda(in, rows, divisor, m, out)) return;
#endif
  if (!in.normalize) {
    at::mul_out(out, rows, c10::scalar_to_tensor(scale_of(in)));  // not rounded to the dtype of the rows
    return;
  }
  at::mul_out(out, rows, out_factors(in, divisor, m).unsqueeze(3));
}

// Writes the divisor and the final n.
void normalize(const Inputs& in, const Gates& gates, FwdOutputs& outputs) {
#ifdef SSM_KERNELS_WITH_CUDA
  if (in.q.is_cuda()) {
    normalizer_cuda(in, gates, outputs.divisor, outputs.final_n);
    return;
  }
#endif
  normalizer_cpu(in, gates, outputs.divisor, outputs.final_n);
}

// The sum over value_dim of the gradient of out times out, (batch, seqlen, heads, 1): q times its gradient through the
// numerators.
at::Tensor out_products(const Inputs& in, const at::Tensor& grad_q) {
  return in.q.to(accumulate_type(in.q.scalar_type())).mul(grad_q).sum(3, /*keepdim=*/true);
}

// The gradient of the products n q, (batch, seqlen, heads, 1).
at::Tensor grad_products(const Inputs& in, const at::Tensor& out_products, const at::Tensor& divisor, const at::Tensor& m) {
  const at::Tensor size = divisor.abs(), floor = m.neg().exp();
  const at::Tensor factor = divisor.sign().mul_(size.gt(floor)).mul_(-scale_of(in)).div_(at::maximum(size, floor).add_(in.eps));
  // The factor is zero where the divisor or e^-m is infinite.
  return out_products * factor.unsqueeze(3);
}

at::Tensor sum_of(const at::Tensor& a, const at::Tensor& b) { return !a.defined() ? b : !b.defined() ? a : a + b; }

at::Tensor in_strides(const at::Tensor& value, at::IntArrayRef strides) {
  return at::empty_strided(value.sizes(), strides, value.options()).copy_(value);
}

void write(const at::Tensor& target, const at::Tensor& value) {
  if (target.numel() > 0 && value.defined() && !value.is_same(target)) at::Tensor(target).copy_(value);
}

// The gradients through the divisor and n. Adds those of q and k to `grads`, where those through the numerators are.
NormalizerGrads normalizer_bwd(const Inputs& in, const BwdInputs& bwd, const Gates& gates, const at::Tensor& out_products,
                               const GradTensors& grads) {
  const NeedsGrad& needs = bwd.needs_grad;
  NormalizerGrads result;
#ifdef SSM_KERNELS_WITH_CUDA
  if (in.q.is_cuda()) {
    if (needs[kGradQ]) result.q = grads[kGradQ];
    if (needs[kGradK]) result.k = grads[kGradK];
    if (needs[kGradN] && is_present(in.initial_n)) result.initial_n = grads[kGradN];
    normalizer_bwd_cuda(in, gates, *bwd.divisor, out_products, bwd.grad_final_n, result);
    return result;
  }
#endif
  ssd::BwdInputs products;
  products.in = product_scan(in, gates);
  if (out_products.defined()) products.grad_out = grad_products(in, out_products, *bwd.divisor, gates.m);
  products.grad_final_states = map(bwd.grad_final_n, [](const at::Tensor& grad) { return grad.unsqueeze(2); });
  products.needs_grad[ssd::kGradB] = needs[kGradK];
  products.needs_grad[ssd::kGradC] = needs[kGradQ];
  products.needs_grad[ssd::kGradInitialStates] = needs[kGradN];
  products.needs_grad[ssd::kGradLogDecay] = needs[kGradF];
  products.needs_grad[ssd::kGradGain] = needs[kGradI];
  const ssd::GradTensors found = ssd::bwd(products);
  if (needs[kGradQ]) result.q = found[ssd::kGradC];
  if (needs[kGradK]) result.k = found[ssd::kGradB];
  if (needs[kGradN] && is_present(in.initial_n)) write(grads[kGradN], found[ssd::kGradInitialStates].squeeze(2));
  result.log_decay = found[ssd::kGradLogDecay];
  result.gain = found[ssd::kGradGain];
  return result;
}

// The gradient of i from that of the gain times the gain: through e^(i - m), or through sigmoid(i).
void write_grad_i(const Inputs& in, const Gates& gates, const GradTensors& grads, const at::Tensor& gain_times_grad) {
  const bool is_exp = parse_input_gate("mlstm_scan", in.input_gate) == InputGate::kExp;
  write(grads[kGradI], is_exp ? gain_times_grad : gain_times_grad * (1 - gates.gain));
}

// The gradient of f from that of the log decays.
void write_grad_f(const Inputs& in, const GradTensors& grads, const at::Tensor& log_decay) {
  write(grads[kGradF], log_decay * in.f.to(log_decay.scalar_type()).neg().sigmoid_());
}

// The gradients of initial states that no kernel writes.
void write_other_grads(const Inputs& in, const BwdInputs& bwd, const GradTensors& grads, bool has_normalizer) {
  if (bwd.needs_grad[kGradN] && is_present(in.initial_n) && !has_normalizer) {
    if (!in.normalize && is_present(bwd.grad_final_n)) {
      at::Tensor(grads[kGradN]).copy_(*bwd.grad_final_n);
    } else {
      at::Tensor(grads[kGradN]).zero_();
    }
  }
  if (bwd.needs_grad[kGradM] && is_present(in.initial_m)) at::Tensor(grads[kGradM]).zero_();
}

}  // namespace

FwdOutputs scan(const Inputs& given) {
  FwdOutputs outputs = allocate_fwd(given);
  const Inputs in = prepare(given);
  const Gates gates = make_gates(in);
  const Split split(in);
  outputs.final_m = gates.final_m;
  if (in.normalize) {
    // The chunked kernels compute the divisors of sequences that are not packed.
    if (!has_chunks(in) || is_present(in.cu_seqlens)) normalize(in, gates, outputs);
  } else if (is_present(in.initial_n)) {
    outputs.final_n.copy_(*in.initial_n);
  } else {
    outputs.final_n.zero_();
  }
#ifdef SSM_KERNELS_WITH_CUDA
  if (has_chunks(in)) {
    chunks_fwd(in, gates, outputs);
    return outputs;
  }
#endif
  ssd::Inputs numerator = numerator_scan(in, gates, split);
  const bool is_divided = outputs.out.numel() > 0 && divide_inside(in, numerator, split, outputs.divisor, gates.m);
  const std::vector<int64_t> strides = outputs.out.strides().vec();
  if (is_divided) outputs.out = at::Tensor();  // frees the memory before the scan allocates its own
  const ssd::FwdOutputs numerators = ssd::fwd(numerator);
  outputs.final_C = split.whole_states(numerators.final_states);
  const at::Tensor rows = split.whole_values(numerators.out);
  if (is_divided) {
    outputs.out = rows.strides() == at::IntArrayRef(strides) ? rows : in_strides(rows, strides);
  } else if (outputs.out.numel() > 0) {
    scale_rows(in, rows, outputs.divisor, gates.m, outputs.out);
  }
  return outputs;
}

GradTensors scan_bwd(const BwdInputs& bwd) {
  GradTensors grads = allocate_bwd(bwd);
  const Inputs in = prepare(bwd.in);
  const Gates gates = make_gates(in);
  const Split split(in);
  const NeedsGrad& needs = bwd.needs_grad;
  const bool needs_gates = needs[kGradI] || needs[kGradF];
  const bool has_out = is_present(bwd.grad_out) && bwd.grad_out->numel() > 0;
  const bool has_normalizer = in.normalize && (has_out || is_present(bwd.grad_final_n)) &&
                              (needs[kGradQ] || needs[kGradK] || needs_gates || needs[kGradN]);

#ifdef SSM_KERNELS_WITH_CUDA
  const bool has_final_gradients = is_present(in.cu_seqlens) && is_present(bwd.grad_final_C);
  if (has_out && has_chunks(in) && !has_final_gradients) {
    const ChunkGrads found = chunks_bwd(bwd, in, gates, grads);
    NormalizerGrads of_normalizer;
    if (has_normalizer) of_normalizer = normalizer_bwd(in, bwd, gates, found.out_products, grads);
    if (needs[kGradI]) {
      const at::Tensor& of_gain = of_normalizer.gain;
      write_grad_i(in, gates, grads, of_gain.defined() ? found.gain_times_grad + of_gain * gates.gain : found.gain_times_grad);
    }
    if (needs[kGradF]) write_grad_f(in, grads, sum_of(found.log_decay, of_normalizer.log_decay));
    write_other_grads(in, bwd, grads, has_normalizer);
    return grads;
  }
#endif

  // Through the numerators and C.
  ssd::BwdInputs numerators;
  numerators.in = numerator_scan(in, gates, split);
  if (has_out) {
    at::Tensor grad = at::empty(bwd.grad_out->sizes(), in.v.options());
    scale_rows(in, *bwd.grad_out, in.normalize ? *bwd.divisor : at::Tensor(), gates.m, grad);
    numerators.grad_out = split.values(grad);
  }
  numerators.grad_final_states = map(bwd.grad_final_C, [&](const at::Tensor& grad) { return split.states(grad); });
  at::Tensor products;  // of outputs and their gradients, (batch, seqlen, heads, parts)
#ifdef SSM_KERNELS_WITH_CUDA
  if (has_out && has_normalizer && in.q.is_cuda() && ssd::writes_out_products(numerators.in)) {
    products = empty_tensor({in.q.size(0), in.q.size(1), split.heads, split.parts}, gates.m.options());
    numerators.out_products = products.flatten(2);
  }
#endif
  numerators.needs_grad[ssd::kGradX] = needs[kGradV];
  numerators.needs_grad[ssd::kGradB] = needs[kGradK];
  numerators.needs_grad[ssd::kGradC] = needs[kGradQ] || (has_out && has_normalizer && !products.defined());
  numerators.needs_grad[ssd::kGradInitialStates] = needs[kGradC];
  numerators.needs_grad[ssd::kGradLogDecay] = needs[kGradF];
  numerators.needs_grad[ssd::kGradGain] = needs[kGradI];
  if (is_on_cuda(in)) {
    if (needs[kGradQ]) numerators.targets[ssd::kGradC] = grads[kGradQ];
    if (needs[kGradK]) numerators.targets[ssd::kGradB] = grads[kGradK];
    if (needs[kGradV]) numerators.targets[ssd::kGradX] = split.target_of_values(grads[kGradV]);
  }
  const ssd::GradTensors of_numerators = ssd::bwd(numerators);
  if (has_out && has_normalizer && !products.defined()) products = out_products(in, of_numerators[ssd::kGradC]);
  if (needs[kGradV] && !is_present(numerators.targets[ssd::kGradX])) {
    write(grads[kGradV], split.whole_values(of_numerators[ssd::kGradX]));
  }

  NormalizerGrads of_normalizer;
  if (is_on_cuda(in)) {
    if (needs[kGradQ]) write(grads[kGradQ], of_numerators[ssd::kGradC]);
    if (needs[kGradK]) write(grads[kGradK], of_numerators[ssd::kGradB]);
    if (has_normalizer) of_normalizer = normalizer_bwd(in, bwd, gates, products, grads);
  } else {
    if (has_normalizer) of_normalizer = normalizer_bwd(in, bwd, gates, products, grads);
    if (needs[kGradQ]) write(grads[kGradQ], sum_of(of_numerators[ssd::kGradC], of_normalizer.q));
    if (needs[kGradK]) write(grads[kGradK], sum_of(of_numerators[ssd::kGradB], of_normalizer.k));
  }
  if (needs[kGradI]) {
    write_grad_i(in, gates, grads, sum_of(split.sum_of_gates(of_numerators[ssd::kGradGain]), of_normalizer.gain) * gates.gain);
  }
  if (needs[kGradF]) {
    write_grad_f(in, grads, sum_of(split.sum_of_gates(of_numerators[ssd::kGradLogDecay]), of_normalizer.log_decay));
  }
  if (needs[kGradC] && is_present(in.initial_C)) {
    write(grads[kGradC], split.whole_states(of_numerators[ssd::kGradInitialStates]));
  }
  write_other_grads(in, bwd, grads, has_normalizer);
  return grads;
}

}  // namespace ssm_kernels::mlstm
