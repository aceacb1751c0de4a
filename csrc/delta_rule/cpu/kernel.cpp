// delta_rule_scan's products on the CPU, in the caches of a core. This file is compiled once per instruction set.
//
// A SIMD lane has a column of the keys, of the values or of a matrix of pairs. Products take four rows of the left factor at a
// time, whose elements are broadcast, and keep their sums in registers. The matrices of a chunk and its gradients are of one
// chunk and head; the chain, which alone goes from chunk to chunk, is of some rows of a head's state, which do not depend on
// others.

#include "delta_rule/cpu/chain.h"
#include "delta_rule/cpu/chunk_adjoint.h"
#include "delta_rule/cpu/chunk_matrices.h"
#include "delta_rule/cpu/kernels.h"

namespace ssm_kernels::delta_rule {
inline namespace CPU_CAPABILITY {
namespace {

template <typename Body>
void with_type(const CpuRunParams& p, const Body& body) {
  p.kind == ScalarKind::kDouble ? body(double()) : body(float());
}

void matrices_of_chunk(const CpuRunParams& p, int64_t matrix, std::byte* scratch) {
  with_type(p, [&](auto type) { chunk_matrices<decltype(type)>(p, matrix, scratch); });
}
void chain_of_run(const CpuRunParams& p, int64_t chain, std::byte* scratch) {
  with_type(p, [&](auto type) { run_chain<decltype(type)>(p, chain, scratch); });
}
void adjoint_of_chain(const CpuRunParams& p, int64_t chain, std::byte* scratch) {
  with_type(p, [&](auto type) { run_chain_adjoint<decltype(type)>(p, chain, scratch); });
}
void adjoint_of_chunk(const CpuRunParams& p, int64_t matrix, std::byte* scratch) {
  with_type(p, [&](auto type) { ChunkAdjoint<decltype(type)>(p, matrix, scratch).run(); });
}

}  // namespace

SSM_KERNEL_API const CpuKernels& kernels() {
  static constexpr CpuKernels kKernels{&matrices_of_chunk, &chain_of_run, &adjoint_of_chain, &adjoint_of_chunk};
  return kKernels;
}

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::delta_rule
