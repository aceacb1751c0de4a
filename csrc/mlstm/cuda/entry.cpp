// CUDA entry points of mlstm_scan: allocates the gates and launches on the current stream. The host waits for the device only
// to check the values of cu_seqlens, unless a CUDA graph is being captured.

#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/constants.h"
#include "cuda/device.h"
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
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

bool is_aligned(const void* data) { return reinterpret_cast<int64_t>(data) % cuda::kVectorBytes == 0; }

}  // namespace

Gates gates_cuda(const Inputs& in) {
  const c10::cuda::CUDAGuard guard(in.q.device());
  const int64_t batch = in.q.size(0), seqlen = in.q.size(1), heads = in.q.size(2);
  if (is_present(in.cu_seqlens) && !cuda::is_capturing()) {
    check_cu_seqlens_values("mlstm_scan", in.cu_seqlens->cpu(), seqlen);
  }
  const at::Tensor bounds = is_present(in.cu_seqlens) ? in.cu_seqlens->to(at::kLong).contiguous() : at::Tensor();
  const at::Tensor initial_m = is_present(in.initial_m) ? in.initial_m->contiguous() : at::Tensor();
  const at::TensorOptions options = in.q.options().dtype(accumulate_type(in.q.scalar_type()));
  const int64_t sequences = bounds.defined() ? bounds.size(0) - 1 : batch;
  Gates gates{empty_tensor({batch, seqlen, heads}, options), empty_tensor({batch, seqlen, heads}, options),
              empty_tensor({batch, seqlen, heads}, options), empty_tensor({sequences, heads}, options)};

  GateParams params;
  params.sequences = sequences;
  params.seqlen = seqlen;
  params.heads = heads;
  params.is_exp = parse_input_gate("mlstm_scan", in.input_gate) == InputGate::kExp;
  params.i = gate_view(in.i, in.q.scalar_type());
  params.f = gate_view(in.f, in.q.scalar_type());
  if (bounds.defined()) params.cu_seqlens = bounds.const_data_ptr<int64_t>();
  if (initial_m.defined()) params.initial_m = initial_m.const_data_ptr();
  params.m = gates.m.mutable_data_ptr();
  params.log_decay = gates.log_decay.mutable_data_ptr();
  params.gain = gates.gain.mutable_data_ptr();
  params.final_m = gates.final_m.mutable_data_ptr();
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(cuda::visit_scalar(scalar_kind(in.q.scalar_type()),
                                    [&](auto scalar) { return launch_mlstm_gates<decltype(scalar)>(params, stream); }));
  return gates;
}

bool scale_rows_cuda(const Inputs& in, const at::Tensor& rows, const at::Tensor& products, const at::Tensor& divisor,
                     const at::Tensor& m, const at::Tensor& out) {
  if (!rows.is_contiguous() || !out.is_contiguous() || !divisor.is_contiguous() ||
      (products.defined() && !products.is_contiguous())) {
    return false;
  }
  const c10::cuda::CUDAGuard guard(rows.device());
  RowParams params;
  params.count = m.numel();
  params.columns = rows.size(3);
  params.scale = scale_of(in);
  params.eps = in.eps;
  params.rows = rows.const_data_ptr();
  if (products.defined()) params.products = products.const_data_ptr();
  params.divisor = products.defined() ? divisor.mutable_data_ptr() : const_cast<void*>(divisor.const_data_ptr());
  params.m = m.const_data_ptr();
  params.out = out.mutable_data_ptr();
  const bool has_vectors =
      params.columns * rows.element_size() % cuda::kVectorBytes == 0 && is_aligned(params.rows) && is_aligned(params.out);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(cuda::visit_scalar(scalar_kind(rows.scalar_type()), [&](auto scalar) {
    return launch_mlstm_scale_rows<decltype(scalar)>(params, has_vectors, stream);
  }));
  return true;
}

bool grad_products_cuda(const Inputs& in, const at::Tensor& grad_q, const at::Tensor& divisor, const at::Tensor& m,
                        const at::Tensor& grad_products) {
  const auto has_rows = [](const at::Tensor& tensor) { return tensor.stride(3) == 1 || tensor.size(3) == 1; };
  if (!has_rows(in.q) || !has_rows(grad_q) || !divisor.is_contiguous()) return false;
  const c10::cuda::CUDAGuard guard(in.q.device());
  ProductGradParams params;
  params.batch = in.q.size(0);
  params.seqlen = in.q.size(1);
  params.heads = in.q.size(2);
  params.key_dim = in.q.size(3);
  params.scale = scale_of(in);
  params.eps = in.eps;
  params.q = key_view(in.q);
  params.grad_q = key_view(grad_q);
  params.divisor = divisor.const_data_ptr();
  params.m = m.const_data_ptr();
  params.grad_products = grad_products.mutable_data_ptr();
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(cuda::visit_scalar(scalar_kind(in.q.scalar_type()),
                                    [&](auto scalar) { return launch_mlstm_grad_products<decltype(scalar)>(params, stream); }));
  return true;
}

}  // namespace ssm_kernels::mlstm

#endif
