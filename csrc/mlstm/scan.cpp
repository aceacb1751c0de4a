// mlstm_scan as a composition: the gates of all steps, two chunked scans with given gates, and a division.
//
// With m_t = max(log sigmoid(f_t) + m_{t-1}, i_t), C and n in units of e^m decay by e^(log sigmoid(f_t) + m_{t-1} - m_t) <= 1
// and take in k_t with the gain e^(i_t - m_t) <= 1. ssd_chunk_scan computes the numerators C q, with the keys as B and the
// queries as C, and the products n q, with a column of ones in place of the values. Blocks of kMaxHeaddim rows of a head's C
// are heads of their own, which share k and q as a group.
//
// Backward holds m constant: the results depend on it through eps alone. The gradient of a step's divisor is that of out times
// out, summed; this sum is q times the gradient of q through the numerators, so that backward reads neither out nor numerators.
// The gradient of q is rounded to the inputs' dtype before this product.

#include <ATen/ScalarOps.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>

#include <limits>

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

Gates make_gates(const Inputs& in) {
#ifdef SSM_KERNELS_WITH_CUDA
  if (in.q.is_cuda()) return gates_cuda(in);
#endif
  return gates_cpu(in);
}

// The factor of each row, (batch, seqlen, heads, 1).
at::Tensor row_factors(const Inputs& in, const at::Tensor& divisor, const at::Tensor& m) {
  return (at::maximum(divisor.abs(), m.neg().exp()) + in.eps).reciprocal().mul_(scale_of(in)).unsqueeze(3);
}

// Writes rows times their factors. With `products`, the divisor is made of them first.
void scale_rows(const Inputs& in, const at::Tensor& rows, const at::Tensor& products, const at::Tensor& divisor,
                const at::Tensor& m, at::Tensor& out) {
#ifdef SSM_KERNELS_WITH_CUDA
  if (rows.is_cuda() && in.normalize && scale_rows_cuda(in, rows, products, divisor, m, out)) return;
#endif
  if (!in.normalize) {
    at::mul_out(out, rows, c10::scalar_to_tensor(scale_of(in)));  // not rounded to the dtype of the rows
    return;
  }
  if (products.defined()) divisor.copy_(products).mul_(scale_of(in));
  at::mul_out(out, rows, row_factors(in, divisor, m));
}

// The gradient of the products n q, (batch, seqlen, heads, 1), in the dtype of q. grad_q is the gradient of q through the
// numerators.
at::Tensor grad_products(const Inputs& in, const at::Tensor& grad_q, const at::Tensor& divisor, const at::Tensor& m) {
  at::Tensor result = empty_tensor({in.q.size(0), in.q.size(1), in.q.size(2), 1}, in.q.options());
#ifdef SSM_KERNELS_WITH_CUDA
  if (in.q.is_cuda() && grad_products_cuda(in, grad_q, divisor, m, result)) return result;
#endif
  // q times grad_q equals the sum of grad_out * out, to which the gradient of the divisor is proportional.
  const at::Tensor sums = in.q.to(divisor.scalar_type()).mul(grad_q).sum(3, /*keepdim=*/true);
  const at::Tensor size = divisor.abs(), floor = m.neg().exp();
  const at::Tensor factor = divisor.sign().mul_(size.gt(floor)).mul_(-scale_of(in)).div_(at::maximum(size, floor).add_(in.eps));
  // The factor is zero where the divisor or e^-m is infinite.
  return result.copy_(sums.mul_(factor.unsqueeze(3)));
}

at::Tensor sum_of(const at::Tensor& a, const at::Tensor& b) { return !a.defined() ? b : !b.defined() ? a : a + b; }

at::Tensor in_layout_of(const at::Tensor& allocated, const at::Tensor& value) {
  if (allocated.numel() == 0 || value.is_same(allocated)) return allocated;
  return allocated.copy_(value);
}

}  // namespace

FwdOutputs fwd(const Inputs& in) {
  check_inputs(in);
  FwdOutputs outputs = allocate_fwd(in);
  if (in.q.is_meta()) return outputs;
  const Gates gates = make_gates(in);
  const Split split(in);
  const ssd::FwdOutputs numerators = ssd::fwd(numerator_scan(in, gates, split));
  outputs.final_C = split.whole_states(numerators.final_states);
  outputs.final_m = gates.final_m;
  at::Tensor products;
  if (in.normalize) {
    const ssd::FwdOutputs scanned = ssd::fwd(product_scan(in, gates));
    outputs.final_n = scanned.final_states.squeeze(2);
    products = scanned.out.squeeze(3);
  } else if (is_present(in.initial_n)) {
    outputs.final_n.copy_(*in.initial_n);
  } else {
    outputs.final_n.zero_();
  }
  if (outputs.out.numel() > 0) {
    scale_rows(in, split.whole_values(numerators.out), products, outputs.divisor, gates.m, outputs.out);
  }
  return outputs;
}

GradTensors bwd(const BwdInputs& bwd) {
  const Inputs& in = bwd.in;
  check_inputs(in);
  GradTensors grads = allocate_bwd(bwd);
  if (in.q.is_meta()) return grads;
  const Gates gates = make_gates(in);
  const Split split(in);
  const NeedsGrad& needs = bwd.needs_grad;
  const bool needs_gates = needs[kGradI] || needs[kGradF];
  const bool has_out = is_present(bwd.grad_out) && bwd.grad_out->numel() > 0;

  // Through the numerators and C.
  ssd::BwdInputs numerators;
  numerators.in = numerator_scan(in, gates, split);
  if (has_out) {
    at::Tensor grad = at::empty_like(*bwd.grad_out, at::MemoryFormat::Contiguous);
    scale_rows(in, *bwd.grad_out, {}, in.normalize ? *bwd.divisor : at::Tensor(), gates.m, grad);
    numerators.grad_out = split.values(grad);
  }
  numerators.grad_final_states = map(bwd.grad_final_C, [&](const at::Tensor& grad) { return split.states(grad); });
  const bool has_products = in.normalize && (has_out || is_present(bwd.grad_final_n)) &&
                            (needs[kGradQ] || needs[kGradK] || needs_gates || needs[kGradN]);
  numerators.needs_grad[ssd::kGradX] = needs[kGradV];
  numerators.needs_grad[ssd::kGradB] = needs[kGradK];
  numerators.needs_grad[ssd::kGradC] = needs[kGradQ] || (has_out && has_products);
  numerators.needs_grad[ssd::kGradInitialStates] = needs[kGradC];
  numerators.needs_grad[ssd::kGradLogDecay] = needs[kGradF];
  numerators.needs_grad[ssd::kGradGain] = needs[kGradI];
  ssd::GradTensors of_numerators = ssd::bwd(numerators);

  // Through the products n q and n.
  ssd::GradTensors of_products;
  if (has_products) {
    ssd::BwdInputs products;
    products.in = product_scan(in, gates);
    if (has_out) products.grad_out = grad_products(in, of_numerators[ssd::kGradC], *bwd.divisor, gates.m);
    products.grad_final_states = map(bwd.grad_final_n, [](const at::Tensor& grad) { return grad.unsqueeze(2); });
    products.needs_grad[ssd::kGradB] = needs[kGradK];
    products.needs_grad[ssd::kGradC] = needs[kGradQ];
    products.needs_grad[ssd::kGradInitialStates] = needs[kGradN];
    products.needs_grad[ssd::kGradLogDecay] = needs[kGradF];
    products.needs_grad[ssd::kGradGain] = needs[kGradI];
    of_products = ssd::bwd(products);
  }

  const auto through_both = [&](ssd::Grad grad) { return sum_of(of_numerators[grad], of_products[grad]); };
  const auto of_gate = [&](ssd::Grad grad) { return sum_of(split.sum_of_gates(of_numerators[grad]), of_products[grad]); };
  if (needs[kGradQ]) grads[kGradQ] = in_layout_of(grads[kGradQ], through_both(ssd::kGradC));
  if (needs[kGradK]) grads[kGradK] = in_layout_of(grads[kGradK], through_both(ssd::kGradB));
  if (needs[kGradV]) grads[kGradV] = in_layout_of(grads[kGradV], split.whole_values(of_numerators[ssd::kGradX]));
  if (needs[kGradI]) {
    // The derivative of e^(i - m), or of sigmoid(i).
    const bool is_exp = parse_input_gate("mlstm_scan", in.input_gate) == InputGate::kExp;
    at::Tensor grad = of_gate(ssd::kGradGain) * gates.gain;
    if (!is_exp) grad = grad * (1 - gates.gain);
    in_layout_of(grads[kGradI], grad);
  }
  if (needs[kGradF]) {
    const at::Tensor closed = in.f.to(gates.m.scalar_type()).neg().sigmoid_();
    in_layout_of(grads[kGradF], of_gate(ssd::kGradLogDecay) * closed);
  }
  if (needs[kGradC] && is_present(in.initial_C)) {
    in_layout_of(grads[kGradC], split.whole_states(of_numerators[ssd::kGradInitialStates]));
  }
  if (needs[kGradN] && is_present(in.initial_n)) {
    if (has_products) {
      in_layout_of(grads[kGradN], of_products[ssd::kGradInitialStates].squeeze(2));
    } else if (!in.normalize && is_present(bwd.grad_final_n)) {
      grads[kGradN].copy_(*bwd.grad_final_n);
    } else {
      grads[kGradN].zero_();
    }
  }
  if (needs[kGradM] && is_present(in.initial_m)) grads[kGradM].zero_();
  return grads;
}

}  // namespace ssm_kernels::mlstm
