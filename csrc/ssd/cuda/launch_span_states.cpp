#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

#include "common/integers.h"
#include "cuda/device.h"
#include "cuda/scalar_types.h"
#include "cuda/span_decay.h"
#include "ssd/aten/step_sizes.h"
#include "ssd/cuda/host_launch.h"
#include "torch/allocation.h"
#include "torch/checks.h"
#include "torch/debug_options.h"

namespace ssm_kernels::ssd {
namespace {

// Segments of each work tile, for the least time in chunks: a round of one block per multiprocessor takes the time of a
// segment's chunks, and about that of kChunksOfOverhead to begin, and to store and fold its summary.
int64_t choose_segments(const WorkPartition& partition, int64_t multiprocessors) {
  constexpr int64_t kChunksOfOverhead = 8;
  const auto time = [&](int64_t segments) {
    return ceil_div(partition.work_tiles * segments, multiprocessors) *
           (ceil_div(partition.chunks, segments) + kChunksOfOverhead);
  };
  int64_t best = 1;
  for (int64_t segments = 2; segments <= std::min(partition.chunks, multiprocessors); ++segments) {
    if (time(segments) < time(best)) best = segments;
  }
  return best;
}

// A call whose states have at most as many columns as the kernels take.
void launch_part(const Inputs& in, Discretization method, Directions direction, const at::Tensor& states) {
  PendingCopies copies;
  const KernelInputs inputs(in, method, copies);
  copies.launch();
  SsdLogBwdParams params;
  inputs.fill(params);
  inputs.fill(params.gates);
  params.grad_out = params.x;
  WorkPartition partition = inputs.partition();
  partition.directions = direction;
  const int64_t segments = choose_segments(partition, cuda::multiprocessor_count(in.x.get_device()));
  partition.segments = static_cast<int>(segments);
  const int64_t columns = tile_columns(params.dstate), places = partition.work_tiles * segments * kWarpgroups,
                elements = kStateRows * columns;
  check_count(std::max(places, partition.work_tiles * kWarpgroups * columns), "blocks");
  const at::Tensor summaries = empty_tensor({places, elements + 1}, wide_options(in.x));
  partition.states = summaries.data_ptr<float>();
  partition.maps = partition.states + places * elements;

  const KernelResult result = inputs.result_as_states(states);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const int max_shared_bytes = ssd::max_shared_bytes(in.x);
  const Products products = choose_products(in.x, in.reverse);
  C10_CUDA_CHECK(cuda::visit_scalar_but_double(scalar_kind(in.x.scalar_type()), [&](auto scalar) {
    const auto launch = [&](const auto& call_params) {
      return launch_ssd_span_states<decltype(scalar)>(call_params, partition, result.written.data_ptr<float>(), products,
                                                      max_shared_bytes, stream);
    };
    return inputs.has_given_gates() ? launch(params) : launch(static_cast<const SsdBwdParams&>(params));
  }));
  result.finish(copies);
  copies.launch();
}

}  // namespace

// Some rows of the batch, and some columns of their states, at a time: the summaries of one segment take at most
// kWorkspaceBytes, or DebugOption::kSsdWorkspaceBytes if that is less.
void launch_span_states(const Inputs& in, Discretization method, bool is_reverse, const at::Tensor& states) {
  constexpr int64_t kWorkspaceBytes = int64_t(256) << 20;
  const Directions direction = is_reverse ? Directions::kReverse : Directions::kForward;
  const int64_t batch = in.x.size(0), dstate = in.B.size(3), columns = backward_columns_at_once(in);
  const int64_t row_elements = in.x.size(2) * row_blocks(in.x.size(3)) * kStateRows * tile_columns(columns);
  const int64_t most_bytes = std::min(debug_option(DebugOption::kSsdWorkspaceBytes), kWorkspaceBytes);
  const int64_t rows = std::max<int64_t>(1, most_bytes / (row_elements * static_cast<int64_t>(sizeof(float))));
  for (int64_t row = 0; row < batch; row += rows) {
    const auto of_rows = [&](const at::Tensor& tensor) { return tensor.narrow(0, row, std::min(rows, batch - row)); };
    Inputs part = in;
    part.x = of_rows(in.x);
    for (OptionalTensor* sequence : {&part.dt, &part.log_decay, &part.gain}) {
      if (is_present(*sequence)) *sequence = of_rows(**sequence);
    }
    if (is_present(in.seq_idx)) part.seq_idx = of_rows(*in.seq_idx);
    for (int64_t column = 0; column < dstate; column += columns) {
      const int64_t count = std::min(columns, dstate - column);
      part.B = part.C = of_rows(in.B).narrow(3, column, count);
      if (is_present(in.initial_states)) part.initial_states = of_rows(*in.initial_states).narrow(3, column, count);
      launch_part(part, method, direction, of_rows(states).narrow(3, column, count));
    }
  }
}

void launch_decay(const Inputs& in, const at::Tensor& decay) {
  if (decay.numel() == 0) return;
  if (is_present(in.log_decay)) {
    decay.copy_(log_decay_of_all_steps(in).exp());
    return;
  }
  const at::Tensor &dt = *in.dt, &A = *in.A;
  const auto [dt_min, dt_max] = kernel_dt_limit(in.dt_min, in.dt_max);
  cuda::SpanDecay span;
  span.batch = dt.size(0);
  span.seqlen = dt.size(1);
  span.channels = dt.size(2);
  span.delta = dt.const_data_ptr();
  span.stride_batch = dt.stride(0);
  span.stride_step = dt.stride(1);
  span.stride_channel = dt.stride(2);
  if (is_present(in.dt_bias)) {
    span.bias = in.dt_bias->const_data_ptr();
    span.bias_stride = in.dt_bias->stride(0);
  }
  span.apply_softplus = in.dt_softplus;
  span.dt_min = dt_min;
  span.dt_max = dt_max;
  span.A = A.const_data_ptr();
  span.A_stride_channel = A.stride(0);
  const at::Tensor sums = empty_tensor({span.batch, span.channels, span.parts()}, wide_options(in.x).dtype(at::kDouble));
  span.sums = sums.mutable_data_ptr<double>();
  span.decay = decay.mutable_data_ptr();
  C10_CUDA_CHECK(cuda::visit_scalar_but_double(scalar_kind(dt.scalar_type()), [&](auto scalar) {
    return cuda::launch_span_decay<decltype(scalar)>(span, c10::cuda::getCurrentCUDAStream());
  }));
}

}  // namespace ssm_kernels::ssd

#endif
