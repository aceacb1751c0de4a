// CUDA entry points of mlstm_scan: allocate the gates and workspaces and launch on the current stream. The host does not wait.

#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <limits>

#include "cuda/constants.h"
#include "cuda/scalar_types.h"
#include "mlstm/cuda/launch.h"
#include "mlstm/mlstm_op.h"
#include "torch/allocation.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::mlstm {
namespace {

GateView gate_view(const at::Tensor& tensor, at::ScalarType input) {
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2), tensor.scalar_type() == input};
}

KeyView key_view(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  // Kernels write gradients alone.
  return {const_cast<void*>(tensor.const_data_ptr()), tensor.stride(0), tensor.stride(1), tensor.stride(2), tensor.stride(3)};
}

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % cuda::kVectorBytes == 0; }

// Whether the rows of a (batch, seqlen, heads, key_dim) tensor consist of aligned vectors.
bool has_vectors(const at::Tensor& tensor) {
  if (!tensor.defined()) return true;
  const int64_t elements = cuda::kVectorBytes / tensor.element_size();
  bool result = tensor.size(3) % elements == 0 && tensor.stride(3) == 1 && is_aligned(tensor.const_data_ptr());
  for (int64_t axis = 0; axis < 3; ++axis) result &= tensor.stride(axis) % elements == 0 || tensor.size(axis) == 1;
  return result;
}

// The values of cu_seqlens as int64, contiguous; undefined without it.
at::Tensor bounds_of(const Inputs& in) {
  return is_present(in.cu_seqlens) ? in.cu_seqlens->to(at::kLong).contiguous() : at::Tensor();
}

void fill(SequenceParams& params, const Inputs& in, const at::Tensor& bounds) {
  params.batch = in.q.size(0);
  params.seqlen = in.q.size(1);
  params.heads = in.q.size(2);
  params.sequences = bounds.defined() ? bounds.size(0) - 1 : params.batch;
  if (bounds.defined()) params.cu_seqlens = bounds.const_data_ptr<int64_t>();
}

// Writes the states of sequences without steps, if there may be any: `initial` or, without it, `empty`.
void fill_empty_sequences(const Inputs& in, const at::Tensor& states, const OptionalTensor& initial, double empty) {
  if (!is_present(in.cu_seqlens) && in.q.size(1) > 0) return;
  at::Tensor target = states;
  if (is_present(initial)) {
    target.copy_(*initial);
  } else {
    target.fill_(empty);
  }
}

at::Tensor contiguous(const OptionalTensor& tensor) { return is_present(tensor) ? tensor->contiguous() : at::Tensor(); }
const void* data_of(const at::Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; }

template <typename Launch>
void launch_for(const at::Tensor& tensor, const Launch& launch) {
  C10_CUDA_CHECK(cuda::visit_scalar(scalar_kind(tensor.scalar_type()), launch));
}

// The arguments that the normalizer's kernels of both directions have, with the tensors that they point to.
struct NormalizerCall {
  at::Tensor bounds, initial_n, states, grad_states, decays;

  NormalizerCall(const Inputs& in, const Gates& gates, NormalizerParams& params, bool is_backward)
      : bounds(bounds_of(in)), initial_n(contiguous(in.initial_n)) {
    fill(params, in, bounds);
    params.key_dim = in.q.size(3);
    params.scale = scale_of(in);
    params.eps = in.eps;
    params.q = key_view(in.q);
    params.k = key_view(in.k);
    params.log_decay = gates.log_decay.const_data_ptr();
    params.gain = gates.gain.const_data_ptr();
    params.initial_n = data_of(initial_n);
    const int64_t chunks = normalizer_chunks(params.seqlen);
    if (chunks <= 1 && !params.only_states) return;
    // Forward of float32 sums in float64 (normalizer.cuh).
    const bool sums_wide = !is_backward && in.q.scalar_type() == at::kFloat;
    const at::TensorOptions options = sums_wide ? gates.gain.options().dtype(at::kDouble) : gates.gain.options();
    states = empty_tensor({params.batch, chunks, params.heads, params.key_dim}, options);
    decays = empty_tensor({params.batch, chunks, params.heads}, options);
    params.states = states.mutable_data_ptr();
    params.decays = decays.mutable_data_ptr();
    if (!is_backward) return;
    grad_states = empty_tensor_like(states);
    params.grad_states = grad_states.mutable_data_ptr();
  }
};

}  // namespace

Gates gates_cuda(const Inputs& in) {
  const c10::cuda::CUDAGuard guard(in.q.device());
  const at::Tensor bounds = bounds_of(in), initial_m = contiguous(in.initial_m);
  const at::Tensor resets = is_present(in.seq_idx) ? sequence_starts(*in.seq_idx).contiguous() : at::Tensor();
  const at::TensorOptions options = in.q.options().dtype(accumulate_type(in.q.scalar_type()));
  GateParams params;
  fill(params, in, bounds);
  const auto of_steps = [&] { return empty_tensor({params.batch, params.seqlen, params.heads}, options); };
  Gates gates{of_steps(), of_steps(), of_steps(), empty_tensor({params.sequences, params.heads}, options)};
  fill_empty_sequences(in, gates.final_m, in.initial_m, -std::numeric_limits<double>::infinity());
  const at::Tensor maps = empty_tensor({gate_maps(params), 2}, options);
  params.is_exp = parse_input_gate("mlstm_scan", in.input_gate) == InputGate::kExp;
  params.i = gate_view(in.i, in.q.scalar_type());
  params.f = gate_view(in.f, in.q.scalar_type());
  params.resets = static_cast<const uint8_t*>(data_of(resets));
  params.initial_m = data_of(initial_m);
  params.m = gates.m.mutable_data_ptr();
  params.log_decay = gates.log_decay.mutable_data_ptr();
  params.gain = gates.gain.mutable_data_ptr();
  params.final_m = gates.final_m.mutable_data_ptr();
  params.maps = maps.mutable_data_ptr();
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  launch_for(in.q, [&](auto scalar) { return launch_mlstm_gates<decltype(scalar)>(params, stream); });
  return gates;
}

bool scale_rows_cuda(const Inputs& in, const at::Tensor& rows, const at::Tensor& divisor, const at::Tensor& m,
                     const at::Tensor& out) {
  if (!rows.is_contiguous() || !out.is_contiguous() || !divisor.is_contiguous()) return false;
  const c10::cuda::CUDAGuard guard(rows.device());
  RowParams params;
  params.count = m.numel();
  params.columns = rows.size(3);
  params.scale = scale_of(in);
  params.eps = in.eps;
  params.rows = rows.const_data_ptr();
  params.divisor = divisor.const_data_ptr();
  params.m = m.const_data_ptr();
  params.out = out.mutable_data_ptr();
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  launch_for(rows, [&](auto scalar) {
    return launch_mlstm_scale_rows<decltype(scalar)>(params, has_vectors(rows) && has_vectors(out), stream);
  });
  return true;
}

void normalizer_cuda(const Inputs& in, const Gates& gates, const at::Tensor& divisor, const at::Tensor& final_n) {
  const c10::cuda::CUDAGuard guard(in.q.device());
  fill_empty_sequences(in, final_n, in.initial_n, 0);
  if (in.q.numel() == 0) return;
  NormalizerParams params;
  const NormalizerCall call(in, gates, params, /*is_backward=*/false);
  params.divisor = divisor.mutable_data_ptr();
  params.final_n = final_n.mutable_data_ptr();
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  launch_for(in.q, [&](auto scalar) {
    return launch_mlstm_normalizer<decltype(scalar)>(params, has_vectors(in.q) && has_vectors(in.k), stream);
  });
}

at::Tensor normalizer_states_cuda(const Inputs& in, const Gates& gates, const at::Tensor& final_n) {
  const c10::cuda::CUDAGuard guard(in.q.device());
  NormalizerParams params;
  params.only_states = true;
  const NormalizerCall call(in, gates, params, /*is_backward=*/false);
  params.final_n = final_n.mutable_data_ptr();
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  launch_for(in.q, [&](auto scalar) {
    return launch_mlstm_normalizer<decltype(scalar)>(params, has_vectors(in.q) && has_vectors(in.k), stream);
  });
  return call.states;
}

void normalizer_bwd_cuda(const Inputs& in, const Gates& gates, const at::Tensor& divisor, const at::Tensor& out_products,
                         const OptionalTensor& grad_final_n, NormalizerGrads& grads) {
  const c10::cuda::CUDAGuard guard(in.q.device());
  if (grads.initial_n.defined()) fill_empty_sequences(in, grads.initial_n, grad_final_n, 0);
  grads.log_decay = empty_tensor_like(gates.log_decay);
  grads.gain = empty_tensor_like(gates.gain);
  if (in.q.numel() == 0) return;
  NormalizerBwdParams params;
  const NormalizerCall call(in, gates, params, /*is_backward=*/true);
  const at::Tensor of_final_n = contiguous(grad_final_n), contiguous_divisor = divisor.contiguous();
  params.read_divisor = contiguous_divisor.const_data_ptr();
  params.m = gates.m.const_data_ptr();
  params.out_products = data_of(out_products);
  if (out_products.defined()) params.parts = out_products.size(3);
  params.grad_final_n = data_of(of_final_n);
  if (grads.initial_n.defined()) params.grad_initial_n = grads.initial_n.mutable_data_ptr();
  params.grad_q = key_view(grads.q);
  params.grad_k = key_view(grads.k);
  params.grad_log_decay = grads.log_decay.mutable_data_ptr();
  params.grad_gain = grads.gain.mutable_data_ptr();
  const bool are_vectors = has_vectors(in.q) && has_vectors(in.k) && has_vectors(grads.q) && has_vectors(grads.k);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  launch_for(in.q, [&](auto scalar) { return launch_mlstm_normalizer<decltype(scalar)>(params, are_vectors, stream); });
}

}  // namespace ssm_kernels::mlstm

#endif
