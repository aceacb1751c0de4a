// The products of a run of chunks, forward and backward: as PyTorch matmuls, or by the CPU's kernels (cpu/products.h).
// chunked_scan.cpp begins with the formulas.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "delta_rule/aten/layout.h"
#include "delta_rule/aten/pairs.h"

namespace ssm_kernels::delta_rule {

// Forward computes these tensors of a run, and backward recomputes them.
struct Computed {
  Pairs pairs;
  at::Tensor q_in, k_in, k_out;  // e^c . Q, e^c . K and e^(c_last - c) . K, of value heads
  at::Tensor k_read;             // diag(beta) (e^c . K)
  at::Tensor M, U;
  at::Tensor states;  // before each chunk and after the last, (chunks + 1, rows, value_heads, value_dim, key_dim)
  at::Tensor out;     // of value heads; undefined unless asked for
};

// The gradients that a call needs. `gate` is that of log decays.
struct NeededGrads {
  bool q, k, v, beta, gate;
};

// Gradients of a run; those that are not needed may be undefined.
struct RunGrads {
  at::Tensor first_state;
  at::Tensor q, k;       // of key heads; q of the scaled vectors
  at::Tensor v, beta;    // of value heads
  at::Tensor log_decay;  // (chunks, rows, value_heads, steps, 1 or key_dim)
};

// Adds the gradients of chosen states to those of the states before each chunk and after the last.
using AddChosen = std::function<void(const at::Tensor& grads)>;

struct Products {
  // `first` is the state before the run, (rows, value_heads, value_dim, key_dim).
  Computed (*compute)(const Chunks& chunks, const at::Tensor& first, bool needs_out);
  // grad_out: (chunks, rows, value_heads, steps of q, value_dim), contiguous. grad_last: of the state after the run.
  RunGrads (*adjoint)(const Chunks& chunks, const Computed& of, const at::Tensor& grad_out, const at::Tensor& grad_last,
                      const AddChosen& add_chosen, const NeededGrads& needs);
};
extern const Products kMatmuls;

}  // namespace ssm_kernels::delta_rule
