// Parameters of delta_rule_scan's CPU kernels, and the table of kernels of one instruction set. products.cpp is compiled once,
// kernel.cpp once per instruction set. aten/chunked_scan.cpp begins with the formulas and the names.
//
// A call of a kernel computes the matrices of one chunk of a value head, or takes some rows of a head's state through all
// chunks of a run.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/integers.h"
#include "common/kernel_abi.h"
#include "common/scalar_kind.h"

namespace ssm_kernels::delta_rule {

enum class CpuGate : int { kNone, kHead, kChannel };

// Tensors of a run are contiguous: (chunks, rows, heads or value_heads, steps, ...), matrices of pairs (..., steps, steps). q,
// out and P have one row for `updates` steps: q reads after the last of these. All are fp32 or fp64 (`kind`), except where a
// type is named.
struct CpuRunParams {
  int64_t chunks = 0, rows = 0, heads = 0, value_heads = 0, steps = 0, updates = 1, key_dim = 0, value_dim = 0;
  int64_t chain_rows = 0;  // of the state, in a call for a chain
  ScalarKind kind = ScalarKind::kFloat;
  CpuGate gate = CpuGate::kNone;
  const void *q = nullptr, *k = nullptr;     // of key heads, scaled
  const void *v = nullptr, *beta = nullptr;  // (..., value_dim), (...)
  const void* log_decay = nullptr;           // fp64 (...) with a gate a head, else `kind` (..., key_dim)
  const int64_t* sequence = nullptr;         // (chunks, rows, steps): begun in the chunk up to a step; null: none begins

  // These tensors have value heads. pairs.h defines the decays and `between`, which a call without a gate lacks.
  void *kk = nullptr, *P = nullptr, *M = nullptr, *between = nullptr;
  void *from_start = nullptr, *to_end = nullptr, *all = nullptr;
  void *q_in = nullptr, *k_in = nullptr, *k_out = nullptr, *k_read = nullptr;
  void *U = nullptr, *states = nullptr;  // states: (chunks + 1, ...), the first one is set
  void* out = nullptr;                   // null: not needed

  const void* grad_out = nullptr;
  void *Y = nullptr, *grad_states = nullptr;  // backward adds to grad_states
  // These gradients have value heads; null: not needed. grad_log_decay is fp64 with one gate a head.
  void *grad_v = nullptr, *grad_beta = nullptr, *grad_q = nullptr, *grad_k = nullptr, *grad_log_decay = nullptr;

  int64_t matrices() const { return chunks * rows * value_heads; }
  int64_t chains_of_head() const { return ceil_div(value_dim, chain_rows); }
  int64_t chains() const { return rows * value_heads * chains_of_head(); }
};

// A multiple of each instruction set's vectors.
constexpr int64_t kCpuPadding = 16;
constexpr int64_t power_of_two_from(int64_t n) {
  int64_t result = 1;
  while (result < n) result *= 2;
  return result;
}

// An upper bound of the scratch memory of any kernel.
inline int64_t cpu_scratch_bytes(const CpuRunParams& p) {
  const int64_t steps = round_up(power_of_two_from(p.steps), kCpuPadding), keys = round_up(p.key_dim, kCpuPadding);
  const int64_t values = round_up(p.value_dim, kCpuPadding);
  const int64_t elements = 16 * steps * keys + 8 * steps * steps + 4 * steps * values + 3 * keys * values + 16 * keys;
  return elements * (p.kind == ScalarKind::kDouble ? 8 : 4);
}

// The kernels of one instruction set. `scratch` has cpu_scratch_bytes, aligned to 64.
struct CpuKernels {
  // Writes the tensors from kk to k_read.
  void (*chunk_matrices)(const CpuRunParams&, int64_t matrix, std::byte* scratch);
  // Writes U, states and out.
  void (*chain)(const CpuRunParams&, int64_t chain, std::byte* scratch);
  // Writes Y and grad_states.
  void (*chain_adjoint)(const CpuRunParams&, int64_t chain, std::byte* scratch);
  // Writes the other gradients.
  void (*chunk_adjoint)(const CpuRunParams&, int64_t matrix, std::byte* scratch);
};

SSM_KERNEL_STRUCT(CpuRunParams, 304);
SSM_KERNEL_STRUCT(CpuKernels, 32);

}  // namespace ssm_kernels::delta_rule
