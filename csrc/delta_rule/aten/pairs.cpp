#include "delta_rule/aten/pairs.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <limits>
#include <vector>

#include "torch/chunk_runs.h"

namespace ssm_kernels::delta_rule {
namespace {

at::Tensor transpose_last(const at::Tensor& matrices) { return matrices.transpose(-2, -1); }

// Whether the row of q reads before the step: the part of (reading steps, steps) that P leaves out.
at::Tensor is_above(const Vectors& vectors, const at::Tensor& like) {
  const int64_t steps = vectors.k.size(3);
  return vectors.reading(at::ones({steps, steps}, like.options().dtype(at::kBool)).triu_(1), 0);
}

// q at the steps of k, zero at those after which it does not read.
at::Tensor at_steps(const Vectors& vectors, const at::Tensor& tensor) {
  if (vectors.updates == 1) return tensor;
  std::vector<int64_t> shape = tensor.sizes().vec();
  shape[3] *= vectors.updates;
  const at::Tensor result = at::zeros(shape, tensor.options());
  vectors.reading(result, 3).copy_(tensor);
  return result;
}

// ----- one gate a head

void make_head_decays(const at::Tensor& log_decay, const at::Tensor& sequence, const at::TensorOptions& options, Pairs& pairs) {
  const at::ScalarType type = options.dtype().toScalarType();
  const at::Tensor g = log_decay.clamp_min(kLowestLogDecay), cs = g.cumsum(3);
  const at::Tensor last = cs.narrow(3, cs.size(3) - 1, 1);
  pairs.between = exp_of_differences(cs, options);
  at::Tensor to_end;
  if (sequence.defined()) {
    const at::Tensor of_step = sequence.unsqueeze(2);
    pairs.between.masked_fill_(of_step.unsqueeze(-1).ne(of_step.unsqueeze(-2)), 0);
    // Summed from the end: a NaN before the last beginning of a sequence would spoil a difference of sums from the start.
    to_end = g.flip(3).cumsum(3).flip(3) - g;
  } else {
    to_end = last - cs;
  }
  pairs.decays = {cs.exp().to(type).unsqueeze(-1), to_end.exp_().to(type).unsqueeze(-1), last.exp().to(type).unsqueeze(-1)};
}

void make_head_pairs(const Vectors& vectors, const at::Tensor& log_decay, const at::Tensor& sequence, Pairs& pairs) {
  const at::Tensor kk = at::matmul(vectors.k, transpose_last(vectors.k));
  const at::Tensor qk = at::matmul(vectors.q, transpose_last(vectors.k));
  if (log_decay.defined()) {
    make_head_decays(log_decay, sequence, vectors.k.options(), pairs);
    pairs.kk = vectors.of_value_heads(kk).mul(pairs.between).tril_(-1);
    pairs.P = clear_unread_(vectors, vectors.of_value_heads(qk).mul(vectors.reading(pairs.between, 3)));
  } else {
    pairs.kk = vectors.of_value_heads(kk.tril_(-1));
    pairs.P = vectors.of_value_heads(clear_unread_(vectors, qk));
  }
}

PairGrads head_pairs_adjoint(const Vectors& vectors, const Pairs& pairs, const at::Tensor& grad_kk, const at::Tensor& grad_P,
                             bool needs_log_decay) {
  PairGrads grads;
  if (needs_log_decay) {
    const at::Tensor W = grad_kk * pairs.kk;
    vectors.reading(W, 3).add_(grad_P * pairs.P);
    grads.log_decay = sum_across(W);
  }
  const bool decays = pairs.between.defined();
  const at::Tensor E = vectors.sum_of_heads(decays ? grad_kk * pairs.between : grad_kk);
  const at::Tensor F = vectors.sum_of_heads(decays ? grad_P * vectors.reading(pairs.between, 3) : grad_P);
  grads.q = at::matmul(F, vectors.k);
  grads.k = at::matmul(E + transpose_last(E), vectors.k).add_(at::matmul(transpose_last(F), vectors.q));
  return grads;
}

// ----- one gate a channel

int64_t next_power_of_two(int64_t n) {
  int64_t result = 1;
  while (result < n) result *= 2;
  return result;
}

// (matrices, steps, channels), with steps of zeros at the end up to a power of two.
at::Tensor padded(const at::Tensor& tensor) {
  const at::Tensor matrices = tensor.reshape({-1, tensor.size(-2), tensor.size(-1)});
  return at::constant_pad_nd(matrices, {0, 0, 0, next_power_of_two(matrices.size(1)) - matrices.size(1)});
}

// Matrices of pairs (i, j), with rows and columns of zeros.
at::Tensor padded_pairs(const at::Tensor& tensor) {
  const at::Tensor matrices = tensor.reshape({-1, tensor.size(-2), tensor.size(-1)});
  const int64_t added = next_power_of_two(matrices.size(1)) - matrices.size(1);
  return at::constant_pad_nd(matrices, {0, added, 0, added});
}

// Blocks of 2 * half steps in which pairs of the later and the earlier half meet.
class Halves {
 public:
  explicit Halves(const at::Tensor& log_decay) : since_(log_decay.clone()), until_(at::zeros_like(log_decay)) {}

  int64_t half = 1;

  at::Tensor later(const at::Tensor& tensor) const { return split(tensor).select(2, 1); }
  at::Tensor earlier(const at::Tensor& tensor) const { return split(tensor).select(2, 0); }
  // The decay from the boundary to after each later step, and from after each earlier step to the boundary.
  at::Tensor decay_of_later() const { return later(since_).exp(); }
  at::Tensor decay_of_earlier() const { return earlier(until_).exp(); }

  // Pairs of a later and an earlier step, (matrices, blocks, half, half), a view of (matrices, steps, steps).
  at::Tensor pairs(const at::Tensor& matrices) const {
    const int64_t blocks = matrices.size(1) / (2 * half);
    return matrices.unflatten(1, {blocks, 2 * half})
        .unflatten(3, {blocks, 2 * half})
        .diagonal(0, 1, 3)
        .movedim(3, 1)
        .narrow(2, half, half)
        .narrow(3, 0, half);
  }

  void join() {
    const at::Tensor of_earlier = earlier(since_).narrow(2, half - 1, 1),
                     of_later = later(since_).narrow(2, half - 1, 1).clone();
    later(since_).add_(of_earlier);
    earlier(until_).add_(of_later);
    half *= 2;
  }

  // The sums of log decays of the whole chunk, once all blocks are joined.
  const at::Tensor& from_start() const { return since_; }
  const at::Tensor& to_end() const { return until_; }

 private:
  at::Tensor split(const at::Tensor& tensor) const { return tensor.unflatten(1, {tensor.size(1) / (2 * half), 2, half}); }

  at::Tensor since_, until_;  // sums of a half's log decays up to a step and after it
};

void make_channel_pairs(const Vectors& vectors, const at::Tensor& log_decay, const at::Tensor& sequence, Pairs& pairs) {
  const at::Tensor g = with_beginnings(log_decay, sequence);
  const at::Tensor k = padded(vectors.of_value_heads(vectors.k)),
                   q = padded(vectors.of_value_heads(at_steps(vectors, vectors.q)));
  Halves halves(padded(g));
  const int64_t padded_steps = k.size(1), steps = g.size(3);
  const at::Tensor kk = at::zeros({k.size(0), padded_steps, padded_steps}, k.options()), qk = at::zeros_like(kk);
  for (; halves.half < padded_steps; halves.join()) {
    const at::Tensor of_later = halves.decay_of_later();
    const at::Tensor columns = transpose_last(halves.earlier(k) * halves.decay_of_earlier());
    halves.pairs(kk).copy_(at::matmul(halves.later(k) * of_later, columns));
    halves.pairs(qk).copy_(at::matmul(halves.later(q) * of_later, columns));
  }
  qk.diagonal(0, 1, 2).copy_((q * k).sum(-1));
  const auto of_chunk = [&](const at::Tensor& tensor, int64_t begin, int64_t count) {
    return tensor.narrow(1, begin, count).unflatten(0, {g.size(0), g.size(1), g.size(2)});
  };
  const auto matrices = [&](const at::Tensor& tensor) { return of_chunk(tensor, 0, steps).narrow(4, 0, steps); };
  pairs.kk = matrices(kk).contiguous();
  pairs.P = vectors.reading(matrices(qk), 3).contiguous();
  pairs.decays = {of_chunk(halves.from_start(), 0, steps).exp(), of_chunk(halves.to_end(), 0, steps).exp(),
                  of_chunk(halves.from_start(), padded_steps - 1, 1).exp()};
}

PairGrads channel_pairs_adjoint(const Vectors& vectors, const at::Tensor& log_decay, const at::Tensor& sequence,
                                const at::Tensor& grad_kk, const at::Tensor& grad_P) {
  const at::Tensor g = with_beginnings(log_decay, sequence);
  const at::Tensor k = padded(vectors.of_value_heads(vectors.k)),
                   q = padded(vectors.of_value_heads(at_steps(vectors, vectors.q)));
  const at::Tensor E = padded_pairs(grad_kk), F = padded_pairs(at_steps(vectors, grad_P));
  Halves halves(padded(g));
  const at::Tensor of_diagonal = F.diagonal(0, 1, 2).unsqueeze(-1);
  const at::Tensor grad_q = of_diagonal * k, grad_k = of_diagonal * q, grad_g = at::zeros_like(k);
  for (; halves.half < k.size(1); halves.join()) {
    const at::Tensor of_later = halves.decay_of_later(), of_earlier = halves.decay_of_earlier();
    const at::Tensor k_rows = halves.later(k) * of_later, q_rows = halves.later(q) * of_later;
    const at::Tensor columns = halves.earlier(k) * of_earlier;
    const at::Tensor kk = halves.pairs(E), qk = halves.pairs(F);
    const at::Tensor grad_k_rows = at::matmul(kk, columns), grad_q_rows = at::matmul(qk, columns);
    const at::Tensor grad_columns = at::matmul(transpose_last(kk), k_rows).add_(at::matmul(transpose_last(qk), q_rows));
    halves.later(grad_k).addcmul_(grad_k_rows, of_later);
    halves.later(grad_q).addcmul_(grad_q_rows, of_later);
    halves.earlier(grad_k).addcmul_(grad_columns, of_earlier);
    const at::Tensor ones = at::ones({halves.half, halves.half}, k.options());
    halves.later(grad_g).add_(at::matmul(ones.triu(), (k_rows * grad_k_rows).addcmul_(q_rows, grad_q_rows)));
    halves.earlier(grad_g).add_(at::matmul(ones.tril(-1), columns * grad_columns));
  }
  const auto of_steps = [&](const at::Tensor& tensor) {
    return tensor.narrow(1, 0, g.size(3)).unflatten(0, {g.size(0), g.size(1), g.size(2)});
  };
  return {vectors.sum_of_heads(vectors.reading(of_steps(grad_q), 3)), vectors.sum_of_heads(of_steps(grad_k)), of_steps(grad_g)};
}

}  // namespace

at::Tensor Vectors::of_value_heads(const at::Tensor& tensor) const {
  if (value_heads == heads()) return tensor;
  const at::Tensor repeated = tensor.unsqueeze(3);
  std::vector<int64_t> shape = repeated.sizes().vec();
  shape[3] = value_heads / heads();
  return repeated.expand(shape).flatten(2, 3);
}

at::Tensor Vectors::sum_of_heads(const at::Tensor& tensor) const {
  if (value_heads == heads()) return tensor;
  return tensor.unflatten(2, {heads(), value_heads / heads()}).sum(3);
}

at::Tensor Vectors::reading(const at::Tensor& tensor, int64_t axis) const {
  return updates == 1 ? tensor : tensor.slice(axis, updates - 1, std::nullopt, updates);
}

at::Tensor with_beginnings(const at::Tensor& log_decay, const at::Tensor& sequence) {
  if (!sequence.defined()) return log_decay;
  const int64_t others = sequence.size(2) - 1;
  at::Tensor begins = sequence.ne(0);  // of the first step
  begins.narrow(2, 1, others).copy_(sequence.narrow(2, 1, others).ne(sequence.narrow(2, 0, others)));
  return log_decay.masked_fill(begins.unsqueeze(2).unsqueeze(-1), -std::numeric_limits<double>::infinity());
}

at::Tensor clear_unread_(const Vectors& vectors, at::Tensor P) {
  return vectors.updates == 1 ? P.tril_() : P.masked_fill_(is_above(vectors, P), 0);
}

Pairs make_pairs(const Vectors& vectors, const at::Tensor& log_decay, const at::Tensor& sequence) {
  Pairs pairs;
  if (log_decay.defined() && log_decay.dim() == 5) {
    make_channel_pairs(vectors, log_decay, sequence, pairs);
  } else {
    make_head_pairs(vectors, log_decay, sequence, pairs);
  }
  if (sequence.defined()) {
    const at::Tensor of_step = sequence.unsqueeze(2).unsqueeze(-1), at_end = of_step.narrow(3, of_step.size(3) - 1, 1);
    pairs.decays.from_start.masked_fill_(of_step.ne(0), 0);
    pairs.decays.to_end.masked_fill_(of_step.ne(at_end), 0);
    pairs.decays.all.masked_fill_(at_end.ne(0), 0);
  }
  return pairs;
}

PairGrads pairs_adjoint(const Vectors& vectors, const Pairs& pairs, const at::Tensor& log_decay, const at::Tensor& sequence,
                        const at::Tensor& grad_kk, const at::Tensor& grad_P, bool needs_log_decay) {
  if (log_decay.defined() && log_decay.dim() == 5) {
    return channel_pairs_adjoint(vectors, log_decay, sequence, grad_kk, grad_P);
  }
  return head_pairs_adjoint(vectors, pairs, grad_kk, grad_P, needs_log_decay);
}

at::Tensor boundary_adjoint(const at::Tensor& from_start, const at::Tensor& to_end, const at::Tensor& all) {
  const at::Tensor ones = at::ones({from_start.size(-2), from_start.size(-2)}, from_start.options().dtype(at::kDouble));
  return at::matmul(ones.triu(), from_start.to(at::kDouble)).add_(at::matmul(ones.tril(-1), to_end.to(at::kDouble))).add_(all);
}

}  // namespace ssm_kernels::delta_rule
