// CUDA entry points of the linear recurrences: partition the work, allocate the carries between tiles and launch on the current
// stream. They wait for the device only to check the values of cu_seqlens on the host, unless a CUDA graph is being captured.

#ifdef SSM_KERNELS_WITH_CUDA

#include "linear_scan/cuda/launch.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <limits>

#include "common/integers.h"
#include "cuda/device.h"
#include "cuda/scalar_types.h"
#include "linear_scan/linear_scan_op.h"
#include "torch/checks.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::linear_scan {
namespace {

// Whether each row can be moved in vectors of kVectorBytes.
bool has_vector_rows(const SequenceView& view, int64_t channels, int64_t element_bytes, int64_t vector_elements) {
  const auto is_aligned = [](int64_t bytes) { return bytes % kVectorBytes == 0; };
  return view.data != nullptr && view.stride_channel == 1 && channels % vector_elements == 0 &&
         is_aligned(reinterpret_cast<int64_t>(view.data)) && is_aligned(view.stride_batch * element_bytes) &&
         is_aligned(view.stride_step * element_bytes);
}

// The partition of one call's work, and the memory for the carries between its tiles.
class Plan {
 public:
  Plan(const LinearScanParams& p, const char* op, int64_t scalar_bytes, int thread_steps, const at::Tensor& like)
      : channels_(p.channels), scalar_bytes_(scalar_bytes), accumulate_bytes_(scalar_bytes == 8 ? 8 : 4) {
    const int64_t channel_blocks = ceil_div(p.channels, kTileChannels), chains = p.batch * channel_blocks;
    partition.tiles = ceil_div(p.seqlen, tile_steps(static_cast<int>(scalar_bytes), thread_steps));
    constexpr int64_t kMaxTiles = std::numeric_limits<int32_t>::max();
    TORCH_CHECK_VALUE(chains <= kMaxTiles && chains * partition.tiles <= kMaxTiles, op, ": expected at most ", kMaxTiles,
                      " tiles of ", kTileChannels, " channels, got ", chains, " times ", partition.tiles);
    partition.tiles_in_all = static_cast<uint32_t>(chains * partition.tiles);
    if (partition.tiles_in_all == 0) return;
    partition.chains = cuda::Divisor(chains);
    partition.channel_blocks = cuda::Divisor(channel_blocks);
    partition.multiprocessors = cuda::multiprocessor_count(like.get_device());
    partition.is_plain = p.sequence_of_step == nullptr && p.reset.data == nullptr;
    for (size_t i = 0; i < kMaxRecurrenceInputs; ++i) add_view(Partition::kInputs + i, p.inputs[i]);
    add_view(Partition::kH, p.h);
    if (partition.tiles > 1) {
      // A block reaches the next tile of a chain after one tile of every other chain. With many chains the state before the
      // tile is published by then, and no maps are needed.
      const bool has_many_chains = chains >= partition.multiprocessors;
      const int64_t words_per_value = accumulate_bytes_ / 4;
      const int64_t state_words = partition.tiles * chains * kTileChannels * words_per_value;
      constexpr int64_t kTicketWords = 2;  // keeps what follows at multiples of 16 bytes
      words_ = at::empty({kTicketWords + (has_many_chains ? 1 : 3) * state_words}, like.options().dtype(at::kLong));
      auto* const words = static_cast<uint64_t*>(words_.data_ptr());
      partition.ticket_counter = reinterpret_cast<uint32_t*>(words);
      partition.state_words = words + kTicketWords;
      if (!has_many_chains) partition.tile_words = partition.state_words + state_words;
    }
  }

  void add_view(size_t bit, const SequenceView& view) {
    const int64_t element_bytes = view.is_accumulate ? accumulate_bytes_ : scalar_bytes_;
    if (has_vector_rows(view, channels_, element_bytes, kVectorBytes / scalar_bytes_)) {
      partition.vector_views |= 1u << bit;
    } else if (view.data != nullptr) {
      partition.is_plain = false;
    }
  }

  bool is_empty() const { return partition.tiles_in_all == 0; }

  void clear_words(cudaStream_t stream) const {
    if (words_.defined()) C10_CUDA_CHECK(cudaMemsetAsync(words_.data_ptr(), 0, words_.nbytes(), stream));
  }

  Partition partition;

 private:
  int64_t channels_, scalar_bytes_, accumulate_bytes_;
  at::Tensor words_;
};

FwdOutputs fwd_cuda(const Inputs& in) {
  const Member member = check_inputs(in);
  const at::Tensor& first = in.tensors[0];
  const c10::cuda::CUDAGuard guard(first.device());
  if (is_present(in.cu_seqlens) && !cuda::is_capturing()) {
    check_cu_seqlens_values(in.recurrence, in.cu_seqlens->cpu(), first.size(1));
  }
  FwdOutputs outputs = allocate_fwd(in);
  const at::Tensor sequences = sequence_of_step(in);
  const LinearScanFwdParams params = make_fwd_params(in, member, sequences, outputs);
  const Plan plan(params, member.name, first.element_size(), fwd_thread_steps(static_cast<int>(member.row->inputs)), first);
  if (plan.is_empty()) return outputs;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  plan.clear_words(stream);
  C10_CUDA_CHECK(cuda::visit_scalar(scalar_kind(first.scalar_type()), [&](auto scalar) {
    return launch_linear_scan_fwd<decltype(scalar)>(params, plan.partition, stream);
  }));
  return outputs;
}

GradTensors bwd_cuda(const BwdInputs& bwd) {
  const Member member = check_inputs(bwd.in);
  const at::Tensor& first = bwd.in.tensors[0];
  const c10::cuda::CUDAGuard guard(first.device());
  GradTensors grads = allocate_bwd(bwd);
  const at::Tensor sequences = sequence_of_step(bwd.in);
  LinearScanBwdParams params = make_bwd_params(bwd, member, sequences, grads);
  at::Tensor& grad_h0 = grads[kMaxRecurrenceInputs];
  at::Tensor of_beginnings;  // the gradient of h0 from each step that begins with it, zero at other steps
  if (params.reset.data != nullptr && params.grad_initial_state.data != nullptr) {
    of_beginnings = at::zeros({params.batch, params.seqlen, params.channels}, grad_h0.options());
    params.grad_initial_state = {of_beginnings.data_ptr(), params.channels, 1};
  }
  Plan plan(params, member.name, first.element_size(), kBwdThreadSteps, first);
  for (size_t i = 0; i < kMaxRecurrenceInputs; ++i) plan.add_view(Partition::kGradInputs + i, params.grad_inputs[i]);
  plan.add_view(Partition::kGradH, params.grad_h);
  if (plan.is_empty()) return grads;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  plan.clear_words(stream);
  C10_CUDA_CHECK(cuda::visit_scalar(scalar_kind(first.scalar_type()), [&](auto scalar) {
    return launch_linear_scan_bwd<decltype(scalar)>(params, plan.partition, stream);
  }));
  if (of_beginnings.defined()) at::sum_out(grad_h0, of_beginnings, 1);
  return grads;
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CUDA, m) { register_kernels<&fwd_cuda, &bwd_cuda>(m); }

}  // namespace ssm_kernels::linear_scan

#endif
