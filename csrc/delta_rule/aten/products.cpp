#include "delta_rule/aten/products.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/linalg_solve_triangular.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mul.h>

#include <utility>
#include <vector>

#include "torch/allocation.h"

namespace ssm_kernels::delta_rule {
namespace {

at::Tensor transposed(const at::Tensor& matrices) { return matrices.transpose(-2, -1); }

// (chunks, rows, heads, ...) as matrices of a batch, and those of each chunk.
at::Tensor matrices(const at::Tensor& tensor) { return tensor.flatten(0, 2); }
std::vector<at::Tensor> by_chunk(const at::Tensor& tensor) { return tensor.flatten(1, 2).unbind(0); }

at::Tensor scaled(const at::Tensor& tensor, const at::Tensor& factor) { return factor.defined() ? tensor * factor : tensor; }

// A copy without the steps where the mask is true; the tensor itself without a mask.
at::Tensor without(const at::Tensor& tensor, const at::Tensor& mask) {
  return mask.defined() ? zero_steps_where_(tensor.clone(), mask) : tensor;
}

// The same for the matrices of one chunk.
at::Tensor without(const at::Tensor& tensor, const Chunks& chunks, const at::Tensor& mask, int64_t chunk) {
  if (!mask.defined()) return tensor;
  const at::Tensor of_heads = tensor.unflatten(0, {chunks.run.rows, -1}).unsqueeze(0);
  return without(of_heads, mask.narrow(0, chunk, 1)).flatten(0, 2);
}

// (I + A)^-1 of strictly lower triangular matrices, by substitution: its error does not grow with powers of A, as that of
// Neumann series does.
at::Tensor inverse(const at::Tensor& A) {
  const at::Tensor identity = at::eye(A.size(-1), A.options()).expand_as(A);
  return at::linalg_solve_triangular(A, identity, /*upper=*/false, /*left=*/true, /*unitriangular=*/true);
}

// The factors, (rows * heads, 1, 1 or key_dim), by which each chunk decays the state before it and the gradient of the state
// after it; empty if nothing decays. A chunk in which a sequence begins has the factor zero, and a mask, as 0 times NaN is NaN.
std::vector<at::Tensor> factors_of_chunks(const Decays& decays) {
  return decays.all.defined() ? by_chunk(decays.all) : std::vector<at::Tensor>();
}
void clear_cut_(const at::Tensor& state, const Chunks& chunks, int64_t chunk) {
  if (!chunks.is_cut.defined()) return;
  state.unflatten(0, {chunks.run.rows, -1}).masked_fill_(chunks.is_cut.select(0, chunk).unsqueeze(-1).unsqueeze(-1), 0);
}

at::Tensor reading_mask(const Chunks& chunks) {
  return chunks.sequence.defined() ? chunks.vectors.reading(chunks.is_after_beginning, 2) : at::Tensor();
}

at::Tensor output(const Chunks& chunks, const Computed& of) {
  const at::Tensor S = of.states.narrow(0, 0, chunks.run.chunks);
  const at::Tensor out = zero_steps_where_(at::matmul(of.q_in, transposed(S)), reading_mask(chunks));
  matrices(out).baddbmm_(matrices(of.pairs.P), matrices(of.U));
  return out;
}

// Y, and the gradients of the states before each chunk and after the last, like the states.
std::pair<at::Tensor, at::Tensor> chain(const Chunks& chunks, const Computed& of, const at::Tensor& grad_out,
                                        const at::Tensor& last, const AddChosen& add_chosen) {
  const int64_t count = chunks.run.chunks;
  const at::Tensor grad_U = at::matmul(transposed(of.pairs.P), grad_out), Y = empty_contiguous_like(grad_U),
                   grads = empty_contiguous_like(of.states);
  at::Tensor before = matrices(grads.narrow(0, 0, count));
  at::bmm_out(before, matrices(transposed(without(grad_out, reading_mask(chunks)))), matrices(of.q_in));
  grads.select(0, count).copy_(last);
  add_chosen(grads);
  const std::vector<at::Tensor> of_states = by_chunk(grads), read = by_chunk(of.k_read), k_out = by_chunk(of.k_out),
                                M = by_chunk(of.M), factors = factors_of_chunks(of.pairs.decays);
  std::vector<at::Tensor> of_U = by_chunk(grad_U), of_Y = by_chunk(Y);
  for (int64_t i = count; i-- > 0;) {
    const at::Tensor after = of_states[i + 1];
    if (chunks.sequence.defined()) {
      of_U[i].add_(without(at::bmm(k_out[i], transposed(after)), chunks, chunks.is_before_beginning, i));
    } else {
      of_U[i].baddbmm_(k_out[i], transposed(after));
    }
    at::bmm_out(of_Y[i], transposed(M[i]), of_U[i]);
    if (factors.empty()) {
      of_states[i].add_(after);
    } else if (chunks.sequence.defined()) {
      const at::Tensor decayed = after * factors[i];
      clear_cut_(decayed, chunks, i);
      of_states[i].add_(decayed);
    } else {
      of_states[i].addcmul_(after, factors[i]);
    }
    of_states[i].baddbmm_(transposed(without(of_Y[i], chunks, chunks.is_after_beginning, i)), read[i], 1, -1);
  }
  return {Y, grads};
}

Computed compute_by_matmuls(const Chunks& chunks, const at::Tensor& first, bool needs_out) {
  Computed of;
  const Vectors& vectors = chunks.vectors;
  of.pairs = make_pairs(vectors, chunks.log_decay, chunks.sequence);
  const Decays& decays = of.pairs.decays;
  const at::Tensor k = vectors.of_value_heads(vectors.k);
  of.k_in = scaled(k, decays.from_start);
  of.k_out = scaled(k, decays.to_end);
  of.q_in = scaled(vectors.of_value_heads(vectors.q),
                   decays.from_start.defined() ? vectors.reading(decays.from_start, 3) : at::Tensor());
  of.M = inverse(of.pairs.kk * chunks.beta);

  of.k_read = of.k_in * chunks.beta;

  const int64_t count = chunks.run.chunks;
  of.U = empty_contiguous_like(chunks.v);
  of.states = empty_tensor({count + 1, first.size(0), first.size(1), first.size(2), first.size(3)}, first.options());
  of.states.select(0, 0).copy_(first);
  // Few operations in the loop: on a device, each takes longer to launch than to run.
  const std::vector<at::Tensor> states = by_chunk(of.states), written = by_chunk(chunks.v * chunks.beta),
                                read = by_chunk(of.k_read), k_out = by_chunk(of.k_out), M = by_chunk(of.M),
                                factors = factors_of_chunks(decays);
  std::vector<at::Tensor> U = by_chunk(of.U);
  for (int64_t i = 0; i < count; ++i) {
    at::Tensor difference = written[i], next = states[i + 1];
    if (chunks.sequence.defined()) {
      difference.sub_(without(at::bmm(read[i], transposed(states[i])), chunks, chunks.is_after_beginning, i));
    } else {
      difference.baddbmm_(read[i], transposed(states[i]), 1, -1);
    }
    at::bmm_out(U[i], M[i], difference);
    const at::Tensor kept = transposed(without(U[i], chunks, chunks.is_before_beginning, i));
    if (factors.empty()) {
      at::baddbmm_out(next, states[i], kept, k_out[i]);
      continue;
    }
    at::mul_out(next, states[i], factors[i]);
    clear_cut_(next, chunks, i);
    next.baddbmm_(kept, k_out[i]);
  }
  if (needs_out) of.out = output(chunks, of);
  return of;
}

RunGrads adjoint_by_matmuls(const Chunks& chunks, const Computed& of, const at::Tensor& grad_out, const at::Tensor& grad_last,
                            const AddChosen& add_chosen, const NeededGrads& needs) {
  const Vectors& vectors = chunks.vectors;
  const Decays& decays = of.pairs.decays;
  const int64_t count = chunks.run.chunks;
  const auto [Y, grad_states] = chain(chunks, of, grad_out, grad_last, add_chosen);
  const at::Tensor S = of.states.narrow(0, 0, count), D = grad_states.narrow(0, 1, count);

  RunGrads grads;
  grads.first_state = grad_states.select(0, 0);
  if (needs.v) grads.v = Y * chunks.beta;
  const at::Tensor YS = zero_steps_where_(at::matmul(Y, S), chunks.is_after_beginning);
  const at::Tensor grad_A = at::matmul(Y, transposed(of.U)).neg_().tril_(-1);
  if (needs.beta) {
    grads.beta = (Y * chunks.v).sum(-1).sub_((YS * of.k_in).sum(-1)).add_((grad_A * of.pairs.kk).sum(-1));
  }
  if (!needs.q && !needs.k && !needs.gate) return grads;

  const at::Tensor grad_P = at::matmul(grad_out, transposed(of.U));
  const at::Tensor grad_q_in = zero_steps_where_(at::matmul(grad_out, S), reading_mask(chunks));
  const at::Tensor grad_k_in = YS * -chunks.beta;
  const at::Tensor grad_k_out = zero_steps_where_(at::matmul(of.U, D), chunks.is_before_beginning);
  const PairGrads pairs = pairs_adjoint(vectors, of.pairs, chunks.log_decay, chunks.sequence, grad_A * chunks.beta,
                                        clear_unread_(vectors, grad_P), needs.gate);
  if (needs.q) {
    const at::Tensor from_state =
        scaled(grad_q_in, decays.from_start.defined() ? vectors.reading(decays.from_start, 3) : at::Tensor());
    grads.q = pairs.q + vectors.sum_of_heads(from_state);
  }
  if (needs.k) {
    const at::Tensor from_states = scaled(grad_k_in, decays.from_start) + scaled(grad_k_out, decays.to_end);
    grads.k = pairs.k + vectors.sum_of_heads(from_states);
  }
  if (needs.gate) {
    at::Tensor to_start = grad_k_in * of.k_in;
    vectors.reading(to_start, 3).add_(grad_q_in * of.q_in);
    at::Tensor to_end = grad_k_out * of.k_out, all = (S * D).sum(-2, /*keepdim=*/true) * decays.all;
    if (chunks.is_cut.defined()) zero_steps_where_(all, chunks.is_cut);
    if (chunks.log_decay.dim() == 4) {
      to_start = to_start.sum(-1, /*keepdim=*/true);
      to_end = to_end.sum(-1, /*keepdim=*/true);
      all = all.sum(-1, /*keepdim=*/true);
    }
    const at::Tensor through = boundary_adjoint(to_start, to_end, all);
    grads.log_decay = through.add_(pairs.log_decay.view_as(through));
  }
  return grads;
}

}  // namespace

const Products kMatmuls{&compute_by_matmuls, &adjoint_by_matmuls};

}  // namespace ssm_kernels::delta_rule
