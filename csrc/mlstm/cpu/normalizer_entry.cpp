// The normalizer n of mlstm_scan on the CPU and the divisors scale n q: chooses the instruction set and distributes heads over
// threads.

#include <ATen/core/Tensor.h>

#include "cpu/capability.h"
#include "cpu/thread_scratch.h"
#include "mlstm/cpu/normalizer_kernels.h"
#include "mlstm/mlstm_op.h"
#include "torch/dispatch.h"

namespace ssm_kernels::mlstm {

SSM_DEFINE_CPU_KERNELS()

void normalizer_cpu(const Inputs& in, const Gates& gates, const at::Tensor& divisor, const at::Tensor& final_n) {
  const auto with_rows = [](const at::Tensor& tensor) { return tensor.stride(3) == 1 ? tensor : tensor.contiguous(); };
  const at::Tensor q = with_rows(in.q), k = with_rows(in.k);
  const at::Tensor bounds = is_present(in.cu_seqlens) ? in.cu_seqlens->to(at::kLong).contiguous() : at::Tensor();
  const auto view_of = [](const at::Tensor& tensor) {
    return KeyView{const_cast<void*>(tensor.const_data_ptr()), tensor.stride(0), tensor.stride(1), tensor.stride(2), 1};
  };
  NormalizerParams params;
  params.batch = q.size(0);
  params.seqlen = q.size(1);
  params.heads = q.size(2);
  params.sequences = bounds.defined() ? bounds.size(0) - 1 : params.batch;
  params.cu_seqlens = bounds.defined() ? bounds.const_data_ptr<int64_t>() : nullptr;
  params.key_dim = q.size(3);
  params.scale = scale_of(in);
  params.q = view_of(q);
  params.k = view_of(k);
  params.log_decay = gates.log_decay.const_data_ptr();
  params.gain = gates.gain.const_data_ptr();
  params.divisor = divisor.mutable_data_ptr();
  params.final_n = final_n.mutable_data_ptr();
  if (is_present(in.initial_n)) {
    at::Tensor(final_n).copy_(*in.initial_n);
  } else {
    at::Tensor(final_n).zero_();
  }
  const CpuKernels& kernel = cpu_kernels();
  const ScalarKind kind = scalar_kind(q.scalar_type());
  ThreadScratch scratch(params.key_dim * static_cast<int64_t>(sizeof(double)));
  scratch.parallel_for(params.sequences * params.heads, params.seqlen * params.key_dim, [&](int64_t index, std::byte* memory) {
    kernel.normalize_head(params, kind, index / params.heads, index % params.heads, memory);
  });
}

}  // namespace ssm_kernels::mlstm
