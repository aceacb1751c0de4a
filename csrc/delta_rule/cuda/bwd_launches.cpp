#ifdef SSM_KERNELS_WITH_CUDA

#include "delta_rule/cuda/bwd_launches.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <limits>

#include "cuda/device.h"
#include "cuda/scalar_types.h"
#include "delta_rule/cuda/fwd_cuda.h"
#include "delta_rule/cuda/launch.h"
#include "delta_rule/cuda/segments.h"
#include "delta_rule/cuda/sm80.h"
#include "torch/allocation.h"

namespace ssm_kernels::delta_rule {

at::Tensor rows_for(const DeltaRuleBwdParams& params, const at::Tensor& rows) {
  return params.seqlen > rows.size(1) ? as_one_row(rows) : rows;
}

WorkPartition bwd_partition_of(const DeltaRuleBwdParams& params) {
  const WorkPartition result = partition_states(params);
  TORCH_CHECK_VALUE(kDirections * result.work_tiles <= std::numeric_limits<int32_t>::max(),
                    "delta_rule_scan: expected fewer than 2^30 pairs of state tiles, got ", result.work_tiles);
  return result;
}

void launch_bwd_sm80(const Inputs& in, const GradOperands& of, const DeltaRuleBwdParams& common, const Range& range,
                     bool has_matrices) {
  DeltaRuleSm80Params params;
  static_cast<DeltaRuleBwdParams&>(params) = common;
  const auto view_of_part = [&](const at::Tensor& rows) { return view_of(rows_for(common, rows)); };
  params.q = view_of_part(range.of_key_heads(of.q));
  params.k = view_of_part(range.of_key_heads(of.k));
  params.v = view_of_part(range.of_heads(of.v));
  params.grad_out = view_of_part(range.of_heads(of.grad_out));
  params.multiprocessors = cuda::multiprocessor_count(in.q.get_device());
  const int64_t parts = sm80_column_parts(params.dstate, in.q.element_size());
  at::Tensor terms;
  if (parts > 1 && of.grad_log_decay.defined() && params.states != nullptr) {
    terms = empty_tensor({parts, range.entries, in.q.size(1), range.heads}, in.q.options().dtype(at::kFloat));
    params.grad_log_decay = view_of_part(terms.select(0, 0).unsqueeze(3));
    params.grad_log_decay_stride_part = terms.stride(0);
  }
  const WorkPartition partition = bwd_partition_of(params);
  const int available = sm80_shared_bytes(in);
  C10_CUDA_CHECK(cuda::visit_scalar_but_double(scalar_kind(in.q.scalar_type()), [&](auto scalar) {
    using Scalar = decltype(scalar);
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    const cudaError_t error = has_matrices ? cudaSuccess : launch_delta_rule_sm80_matrices<Scalar>(params, stream);
    return error == cudaSuccess ? launch_delta_rule_sm80_bwd<Scalar>(params, partition, available, stream) : error;
  }));
  if (terms.defined()) range.of_heads(of.grad_log_decay).copy_(terms.sum(0));
}

void launch_bwd_wide(const Inputs& in, const GradOperands& of, const DeltaRuleBwdParams& params, const Range& range,
                     const KeyGrads& grads, bool has_matrices) {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const int multiprocessors = cuda::multiprocessor_count(in.q.get_device());
  const WorkPartition partition = bwd_partition_of(params);
  const bool is_half = in.q.scalar_type() == at::kHalf;
  if (!has_matrices) {
    C10_CUDA_CHECK(is_half ? launch_delta_rule_wide_matrices<__half>(params, stream)
                           : launch_delta_rule_wide_matrices<__nv_bfloat16>(params, stream));
  }
  C10_CUDA_CHECK(is_half ? launch_delta_rule_bwd_wide_states<__half>(params, partition, stream)
                         : launch_delta_rule_bwd_wide_states<__nv_bfloat16>(params, partition, stream));
  if (params.states == nullptr) return;
  DeltaRuleBwdParts parts;
  at::Tensor terms;
  for (int part = 0; part < kColumnParts; ++part) {
    const int64_t first = part * kStateColumns;
    const auto columns = [&](const at::Tensor& rows) {
      return rows.narrow(3, first, std::min<int64_t>(rows.size(3) - first, kStateColumns));
    };
    DeltaRuleBwdParams& of_part = parts.of[part] = params;
    of_part.dstate = static_cast<int>(std::min<int64_t>(in.q.size(3) - first, kStateColumns));
    describe_tiles(of_part.q_descriptor, columns(rows_for(params, range.of_key_heads(of.q))));
    describe_tiles(of_part.k_descriptor, columns(rows_for(params, range.of_key_heads(of.k))));
    of_part.grad_q = rows_view(columns(grads.q), grads.is_reversed);
    of_part.grad_k = rows_view(columns(grads.k), grads.is_reversed);
    if (!params.has_fp32_rows) {
      describe_tiles(of_part.grad_q_descriptor, columns(grads.q));
      describe_tiles(of_part.grad_k_descriptor, columns(grads.k));
    }
    if (part == 0) continue;
    of_part.grad_beta = {};
    if (!of.grad_log_decay.defined()) continue;
    terms = empty_tensor({range.entries, in.q.size(1), range.heads}, in.q.options().dtype(at::kFloat));
    of_part.grad_log_decay = view_of(rows_for(params, terms.unsqueeze(3)));
  }
  C10_CUDA_CHECK(is_half ? launch_delta_rule_bwd_wide_chunks<__half>(parts, multiprocessors, stream)
                         : launch_delta_rule_bwd_wide_chunks<__nv_bfloat16>(parts, multiprocessors, stream));
  if (terms.defined()) range.of_heads(of.grad_log_decay).add_(terms);
}

}  // namespace ssm_kernels::delta_rule

#endif
