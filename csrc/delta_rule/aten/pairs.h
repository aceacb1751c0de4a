// The decays of a run of chunks, and the products of pairs of steps inside each chunk that they weight. With c_i the sum of the
// log decays g of a chunk up to step i, a number or one for each channel of the key,
//
//   kk_ij = sum_d k_id k_jd e^(c_id - c_jd), j < i          P_ij = sum_d q_id k_jd e^(c_id - c_jd), j <= i
//
// One gate a head: c is fp64, and its differences are rounded once. One gate a channel: the exponent would have to stay below
// the sum over d, and neither e^c nor e^-c alone is finite. Blocks of steps are halved down to one step: between the halves of
// a block with the boundary m, e^(c_i - c_m) and e^(c_m - c_j) are decays of later and of earlier steps, both at most 1, and
// scale the rows and the columns of one product. Their exponents are sums of g over steps, never differences of sums.
//
// The gradient of g_t adds up what passes over t: all pairs with j < t <= i. It subtracts nothing either, in both cases.
//
// Tensors are (chunks, rows, heads, steps, ...); steps are those of k, and `updates` of them make a step of q, which reads
// after the last one.
#pragma once

#include <ATen/core/Tensor.h>

#include "delta_rule/delta_rule_op.h"

namespace ssm_kernels::delta_rule {

// The vectors of a run.
struct Vectors {
  at::Tensor q, k;  // of key heads; q is scaled
  int64_t updates, value_heads;

  int64_t heads() const { return k.size(2); }
  // The same of value heads: head h reads key head h / (value_heads / heads).
  at::Tensor of_value_heads(const at::Tensor& tensor) const;
  // The sum over the value heads of a key head.
  at::Tensor sum_of_heads(const at::Tensor& tensor) const;
  // The steps of k after which q reads.
  at::Tensor reading(const at::Tensor& tensor, int64_t axis) const;
};

struct Decays {
  // From before a chunk's first step to after step i, and from after step j to the chunk's end, (..., value_heads, steps, 1 or
  // key_dim); of the whole chunk, (..., value_heads, 1, 1 or key_dim). Undefined if nothing decays.
  at::Tensor from_start, to_end, all;
};

struct Pairs {
  Decays decays;
  at::Tensor between;  // e^(c_i - c_j) of one gate a head; undefined if nothing decays
  at::Tensor kk, P;    // matrices (i, j) of value heads
};

// Sets pairs that q does not read to zero: those above the diagonal of P.
at::Tensor clear_unread_(const Vectors& vectors, at::Tensor P);

// log_decay of one gate a channel, but minus infinity for the steps that begin a sequence, which drop the state before them.
at::Tensor with_beginnings(const at::Tensor& log_decay, const at::Tensor& sequence);

// log_decay: (chunks, rows, value_heads, steps) or (..., key_dim); undefined if nothing decays. With sequences that begin in a
// chunk, sequence counts them up to a step, (chunks, rows, steps): the decay across a beginning is zero.
Pairs make_pairs(const Vectors& vectors, const at::Tensor& log_decay, const at::Tensor& sequence);

// The gradients of q and k, of key heads, and of log_decay, from those of kk (zero from the diagonal on) and P (zero above it).
struct PairGrads {
  at::Tensor q, k, log_decay;
};
PairGrads pairs_adjoint(const Vectors& vectors, const Pairs& pairs, const at::Tensor& log_decay, const at::Tensor& sequence,
                        const at::Tensor& grad_kk, const at::Tensor& grad_P, bool needs_log_decay);

// The gradient of log_decay through the decays between steps and chunk boundaries: from sums over the channels, or of each, of
// from_start times its gradient, by step, of the same for to_end, and for all, (..., 1, 1 or key_dim).
at::Tensor boundary_adjoint(const at::Tensor& from_start, const at::Tensor& to_end, const at::Tensor& all);

}  // namespace ssm_kernels::delta_rule
