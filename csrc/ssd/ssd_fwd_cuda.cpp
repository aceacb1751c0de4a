#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/ceil_div.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/device.h"
#include "ssd/ssd_kernel_calls.h"
#include "ssd/ssd_kernel_inputs.h"
#include "torch/checks.h"

namespace ssm_kernels::ssd {
namespace {

constexpr int64_t kMaxSegments = 16;

// How many segments to cut each sequence into, so that the device is full: with blocks running in rounds of one a
// multiprocessor, the time is that of the chunks in a row; finding what segments do to a state takes half as long as scanning
// them, and each fold and the second kernel some chunks' time.
int64_t choose_segments(int64_t blocks_of_a_segment, int64_t chunks, int64_t multiprocessors) {
  const auto time = [&](int64_t segments) {
    const int64_t chunks_per_segment = at::ceil_div<int64_t>(chunks, segments);
    const auto rounds = [&](int64_t count) {
      return static_cast<double>(at::ceil_div<int64_t>(blocks_of_a_segment * count, multiprocessors));
    };
    const double scan = rounds(segments) * static_cast<double>(chunks_per_segment);
    if (segments == 1) return scan;
    const double states = rounds(segments - 1) * static_cast<double>(chunks_per_segment) * 0.5;
    return scan + states + 2 + 0.1 * static_cast<double>(segments);
  };
  int64_t best = 1;
  for (int64_t segments = 2; segments <= std::min(kMaxSegments, chunks); ++segments) {
    if (time(segments) < time(best)) best = segments;
  }
  return best;
}

// The workspace of several segments, which the partition then points to.
at::Tensor cut(const KernelInputs& inputs, const SsdFwdParams& params, Partition& partition) {
  const int64_t chunks = partition.chunks_per_segment;
  partition.segments = choose_segments(partition.blocks, chunks, cuda::multiprocessor_count(inputs.x.get_device()));
  partition.chunks_per_segment = at::ceil_div<int64_t>(chunks, partition.segments);
  partition.blocks *= partition.segments;
  check_blocks(partition.blocks);
  if (partition.segments == 1 || partition.blocks == 0) return {};
  const int64_t states = params.batch * partition.segments * params.heads;
  const at::Tensor workspace =
      at::empty({states * (int64_t(params.headdim) * params.dstate + 1)}, inputs.x.options().dtype(at::kFloat));
  partition.segment_states = workspace.data_ptr<float>();
  partition.segment_decays = partition.segment_states + states * params.headdim * params.dstate;
  return workspace;
}

}  // namespace

void run_forward(const Inputs& in, Discretization method, const FwdOutputs& outputs, bool may_use_wgmma) {
  const KernelInputs inputs(in, method);
  SsdFwdParams params;
  inputs.fill(params);
  Partition partition = inputs.partition();
  partition.may_use_wgmma = may_use_wgmma;
  const at::Tensor workspace = cut(inputs, params, partition);
  if (partition.blocks == 0) return;

  const at::Tensor z = is_present(in.z) ? as_rows(*in.z) : at::Tensor();
  if (z.defined()) params.z = const_rows_view(z);
  // What is not written in place is copied there.
  const bool has_out = has_rows(outputs.out), has_states = !inputs.pads_states();
  const at::Tensor out = has_out ? outputs.out : at::empty(inputs.x.sizes(), inputs.x.options());
  const at::Tensor final_states = has_states ? outputs.final_states : inputs.empty_states();
  params.out = rows_view(out);
  params.final_states = final_states.data_ptr<float>();

  int max_shared_bytes = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&max_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, in.x.get_device()));
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const int error = in.x.scalar_type() == at::kHalf
                        ? launch_ssd_fwd<__half>(params, partition, max_shared_bytes, stream)
                        : launch_ssd_fwd<__nv_bfloat16>(params, partition, max_shared_bytes, stream);
  C10_CUDA_CHECK(static_cast<cudaError_t>(error));
  if (!has_out) outputs.out.copy_(without_padding(out, outputs.out));
  if (!has_states) outputs.final_states.copy_(without_padding(final_states, outputs.final_states));
}

}  // namespace ssm_kernels::ssd

#endif
