// Allocates the tensors of a run, chooses the instruction set and distributes matrices and chains over threads.

#include "delta_rule/cpu/products.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "cpu/capability.h"
#include "cpu/thread_scratch.h"
#include "delta_rule/cpu/kernels.h"
#include "torch/allocation.h"
#include "torch/tensor_data.h"

namespace ssm_kernels::delta_rule {

SSM_DEFINE_CPU_KERNELS()

namespace {

using Kernel = void (*)(const CpuRunParams&, int64_t index, std::byte* scratch);

void run_kernel(const CpuRunParams& params, Kernel kernel, int64_t count) {
  ThreadScratch scratch(cpu_scratch_bytes(params));
  const int64_t work = params.steps * params.key_dim * params.value_dim;
  scratch.parallel_for(count, work, [&](int64_t index, std::byte* memory) { kernel(params, index, memory); });
}

void run_chains(CpuRunParams params, Kernel kernel) {
  // Threads that have no chain would be idle.
  params.chain_rows = 64;
  while (params.chain_rows > kCpuPadding && params.chains() < at::get_num_threads()) params.chain_rows /= 2;
  run_kernel(params, kernel, params.chains());
}

CpuGate gate_of(const Chunks& chunks) {
  if (!chunks.log_decay.defined()) return CpuGate::kNone;
  return chunks.log_decay.dim() == 5 ? CpuGate::kChannel : CpuGate::kHead;
}

// Pointers to tensors, which it keeps.
class RunTensors {
 public:
  RunTensors(const Chunks& chunks, int64_t key_dim) {
    const Vectors& vectors = chunks.vectors;
    const Run& run = chunks.run;
    params.chunks = run.chunks;
    params.rows = run.rows;
    params.heads = vectors.heads();
    params.value_heads = vectors.value_heads;
    params.updates = vectors.updates;
    params.steps = run.length * vectors.updates;
    params.key_dim = key_dim;
    params.value_dim = chunks.v.size(-1);
    params.kind = chunks.v.scalar_type() == at::kDouble ? ScalarKind::kDouble : ScalarKind::kFloat;
    params.gate = gate_of(chunks);
    params.q = read(vectors.q);
    params.k = read(vectors.k);
    params.v = read(chunks.v);
    params.beta = read(chunks.beta);
    if (params.gate == CpuGate::kChannel) {
      params.log_decay = read(with_beginnings(chunks.log_decay, chunks.sequence));
    } else if (params.gate == CpuGate::kHead) {
      params.log_decay = read(chunks.log_decay);
    }
    if (chunks.sequence.defined()) params.sequence = static_cast<const int64_t*>(read(chunks.sequence));
  }

  const void* read(const at::Tensor& tensor) {
    kept_.push_back(tensor.contiguous());
    return kept_.back().const_data_ptr();
  }

  // A tensor (chunks, rows, heads, ...).
  at::Tensor allocate(int64_t heads, at::IntArrayRef sizes, const at::TensorOptions& options) const {
    c10::SymDimVector shape = {params.chunks, params.rows, heads};
    shape.append(sizes.begin(), sizes.end());
    return empty_tensor(shape, options);
  }
  at::Tensor of_value_heads(at::IntArrayRef sizes, const at::TensorOptions& options) const {
    return allocate(params.value_heads, sizes, options);
  }

  CpuRunParams params;

 private:
  std::vector<at::Tensor> kept_;
};

Computed compute_by_kernels(const Chunks& chunks, const at::Tensor& first, bool needs_out) {
  const int64_t key_dim = first.size(3);
  RunTensors run(chunks, key_dim);
  CpuRunParams& params = run.params;
  const at::TensorOptions options = chunks.v.options();
  const int64_t steps = params.steps, reads = steps / params.updates;
  Computed of;
  const auto make = [&](at::Tensor& tensor, void*& pointer, at::IntArrayRef sizes) {
    tensor = run.of_value_heads(sizes, options);
    pointer = tensor.mutable_data_ptr();
  };
  make(of.pairs.kk, params.kk, {steps, steps});
  make(of.pairs.P, params.P, {reads, steps});
  make(of.M, params.M, {steps, steps});
  if (params.gate == CpuGate::kHead) make(of.pairs.between, params.between, {steps, steps});
  if (params.gate != CpuGate::kNone) {
    const int64_t columns = params.gate == CpuGate::kChannel ? key_dim : 1;
    make(of.pairs.decays.from_start, params.from_start, {steps, columns});
    make(of.pairs.decays.to_end, params.to_end, {steps, columns});
    make(of.pairs.decays.all, params.all, {1, columns});
  }
  make(of.q_in, params.q_in, {reads, key_dim});
  make(of.k_in, params.k_in, {steps, key_dim});
  make(of.k_out, params.k_out, {steps, key_dim});
  make(of.k_read, params.k_read, {steps, key_dim});
  make(of.U, params.U, {steps, params.value_dim});
  if (needs_out) make(of.out, params.out, {reads, params.value_dim});
  of.states = empty_tensor({params.chunks + 1, params.rows, params.value_heads, params.value_dim, key_dim}, options);
  of.states.select(0, 0).copy_(first);
  params.states = of.states.mutable_data_ptr();

  const CpuKernels& kernels = cpu_kernels();
  run_kernel(params, kernels.chunk_matrices, params.matrices());
  run_chains(params, kernels.chain);
  return of;
}

RunGrads adjoint_by_kernels(const Chunks& chunks, const Computed& of, const at::Tensor& grad_out, const at::Tensor& grad_last,
                            const AddChosen& add_chosen, const NeededGrads& needs) {
  const int64_t key_dim = of.states.size(-1);
  RunTensors run(chunks, key_dim);
  CpuRunParams& params = run.params;
  const Decays& decays = of.pairs.decays;
  const auto keep = [](void*& pointer, const at::Tensor& tensor) {
    if (tensor.defined()) pointer = data_of(tensor, Access::kRead);
  };
  keep(params.kk, of.pairs.kk);
  keep(params.P, of.pairs.P);
  keep(params.M, of.M);
  keep(params.between, of.pairs.between);
  keep(params.from_start, decays.from_start);
  keep(params.to_end, decays.to_end);
  keep(params.all, decays.all);
  keep(params.q_in, of.q_in);
  keep(params.k_in, of.k_in);
  keep(params.k_out, of.k_out);
  keep(params.k_read, of.k_read);
  keep(params.U, of.U);
  keep(params.states, of.states);
  params.grad_out = run.read(grad_out);
  const at::TensorOptions options = chunks.v.options();
  const at::Tensor Y = empty_contiguous_like(of.U), grad_states = at::zeros(of.states.sizes(), options);
  grad_states.select(0, params.chunks).copy_(grad_last);
  add_chosen(grad_states);
  params.Y = Y.mutable_data_ptr();
  params.grad_states = grad_states.mutable_data_ptr();

  RunGrads grads;
  at::Tensor grad_q, grad_k;
  const auto make = [&](bool is_needed, at::Tensor& tensor, void*& pointer, at::IntArrayRef sizes,
                        const at::TensorOptions& of_result) {
    if (!is_needed) return;
    tensor = run.of_value_heads(sizes, of_result);
    pointer = tensor.mutable_data_ptr();
  };
  const int64_t steps = params.steps;
  make(needs.v, grads.v, params.grad_v, {steps, params.value_dim}, options);
  make(needs.beta, grads.beta, params.grad_beta, {steps}, options);
  make(needs.q, grad_q, params.grad_q, {steps / params.updates, key_dim}, options);
  make(needs.k, grad_k, params.grad_k, {steps, key_dim}, options);
  if (params.gate == CpuGate::kChannel) {
    make(needs.gate, grads.log_decay, params.grad_log_decay, {steps, key_dim}, options);
  } else if (params.gate == CpuGate::kHead) {
    make(needs.gate, grads.log_decay, params.grad_log_decay, {steps, 1}, options.dtype(at::kDouble));
  }

  const CpuKernels& kernels = cpu_kernels();
  run_chains(params, kernels.chain_adjoint);
  run_kernel(params, kernels.chunk_adjoint, params.matrices());
  grads.first_state = grad_states.select(0, 0);
  if (needs.q) grads.q = chunks.vectors.sum_of_heads(grad_q);
  if (needs.k) grads.k = chunks.vectors.sum_of_heads(grad_k);
  return grads;
}

}  // namespace

const Products kCpuProducts{&compute_by_kernels, &adjoint_by_kernels};

}  // namespace ssm_kernels::delta_rule
