// CUDA entry points of the linear recurrences: partition the work, allocate the carries between tiles and launch on the current
// stream. They wait for the device only to check the values of cu_seqlens on the host, unless a CUDA graph is being captured.

#ifdef SSM_KERNELS_WITH_CUDA

#include "linear_scan/cuda/launch.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "common/integers.h"
#include "cuda/device.h"
#include "cuda/scalar_types.h"
#include "linear_scan/linear_scan_op.h"
#include "torch/allocation.h"
#include "torch/checks.h"
#include "torch/debug_options.h"
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

// Whether each row starts and ends at a multiple of two elements.
bool has_pair_rows(const SequenceView& view, int64_t channels, int64_t element_bytes) {
  return reinterpret_cast<int64_t>(view.data) % (2 * element_bytes) == 0 && view.stride_batch % 2 == 0 &&
         view.stride_step % 2 == 0 && channels % 2 == 0;
}

// Whether each row begins with a sector of memory.
bool has_sector_rows(const SequenceView& view, int64_t element_bytes) {
  constexpr int64_t kSectorBytes = 32;
  return reinterpret_cast<int64_t>(view.data) % kSectorBytes == 0 && view.stride_batch * element_bytes % kSectorBytes == 0 &&
         view.stride_step * element_bytes % kSectorBytes == 0;
}

// The partition of one call's work, and the memory for the carries between its tiles.
class Plan {
 public:
  Plan(const LinearScanParams& p, const char* op, const at::Tensor& like)
      : params_(p), op_(op), like_(like), scalar_bytes_(like.element_size()), accumulate_bytes_(scalar_bytes_ == 8 ? 8 : 4) {
    is_whole_ = p.sequence_of_step == nullptr && p.reset.data == nullptr;
    for (size_t i = 0; i < kMaxRecurrenceInputs; ++i) add_view(Partition::kInputs + i, p.inputs[i]);
    add_view(Partition::kH, p.h);
  }

  void add_view(size_t bit, const SequenceView& view) {
    const int64_t element_bytes = view.is_accumulate ? accumulate_bytes_ : scalar_bytes_;
    if (view.data != nullptr && !has_pair_rows(view, params_.channels, element_bytes)) unpaired_views_ |= 1u << bit;
    has_sectors_ &= view.data == nullptr || has_sector_rows(view, element_bytes);
    if (has_vector_rows(view, params_.channels, element_bytes, kVectorBytes / scalar_bytes_)) {
      vector_views_ |= 1u << bit;
    } else if (view.data != nullptr) {
      has_vectors_ = false;
      has_contiguous_channels_ &= view.stride_channel == 1 || params_.channels == 1;
    }
  }

  bool is_empty() const { return params_.batch == 0 || params_.seqlen == 0 || params_.channels == 0; }

  // Whether the sequential kernels take the call, of a recurrence with `inputs` inputs, whose rows may start at any element.
  bool is_sequential(bool is_forward, size_t inputs) const {
    const auto kernel = static_cast<KernelChoice>(debug_option(DebugOption::kLinearScanKernel));
    const bool has_kernels =
        is_whole_ && has_contiguous_channels_ && scalar_bytes_ < 8 && chains() <= kMost && params_.seqlen <= kMost;
    if (!has_kernels || kernel == KernelChoice::kTiles) return false;
    const double least = least_sequential_chains(is_forward, inputs) / slowdown_of_tiles(is_forward);
    return kernel == KernelChoice::kSequential || static_cast<double>(chains()) >= least;
  }

  // `stored`: a bit for each view that the call writes.
  SequentialPartition sequential(bool is_forward, uint32_t stored) const {
    const cudaDeviceProp& device = cuda::device_properties(like_.get_device());
    SequentialPartition partition;
    partition.chains = static_cast<uint32_t>(chains());
    partition.is_shifted = !has_vectors_;
    partition.reads_pairs = (unpaired_views_ & ~stored) == 0;
    partition.stores_pairs = (unpaired_views_ & stored) == 0;
    partition.channel_blocks = cuda::Divisor(channel_blocks());
    partition.multiprocessors = device.multiProcessorCount;
    partition.multiprocessor_bytes = static_cast<int>(device.sharedMemPerMultiprocessor);
    partition.block_bytes = static_cast<int>(device.sharedMemPerBlockOptin);
    // Chains that have a multiprocessor each stay together in forward without waiting for one another.
    const bool drift = !is_forward || chains() > device.multiProcessorCount;
    partition.keeps_step = !has_sectors_ && device.major >= 9 && channel_blocks() > 1 && drift;
    return partition;
  }

  // Tiles of thread_steps steps a thread. `words` becomes the memory for the carries, which the launch clears.
  Partition tiles(int thread_steps, at::Tensor& words) const {
    Partition partition;
    partition.tiles = ceil_div(params_.seqlen, tile_steps(static_cast<int>(scalar_bytes_), thread_steps));
    fill(partition, partition.tiles, chains());
    partition.chains = cuda::Divisor(chains());
    partition.multiprocessors = cuda::multiprocessor_count(like_.get_device());
    if (partition.tiles > 1) {
      // A block reaches the next tile of a chain after one tile of every other chain. With many chains the state before the
      // tile is published by then, and no maps are needed.
      const bool has_maps = chains() < partition.multiprocessors;
      if (has_maps) partition.group_log2 = group_tiles_log2(static_cast<int>(accumulate_bytes_));
      const int64_t groups = ceil_div(partition.tiles, int64_t(1) << partition.group_log2);
      const int64_t values = chains() * kTileChannels;
      const int64_t state_words = groups * values * state_words_of(accumulate_bytes_);
      const int64_t map_words = has_maps ? partition.tiles * values * map_words_of(accumulate_bytes_) : 0;
      constexpr int64_t kTicketWords = 2;  // keeps what follows at multiples of 16 bytes
      words = empty_tensor({kTicketWords + state_words + map_words}, like_.options().dtype(at::kLong));
      auto* const data = static_cast<uint64_t*>(words.data_ptr());
      partition.ticket_counter = reinterpret_cast<uint32_t*>(data);
      partition.state_words = data + kTicketWords;
      if (has_maps) partition.map_words = partition.state_words + state_words;
      partition.words = words.numel();
    }
    return partition;
  }

  // Tiles of the summary. `bounds` are those of SummaryPartition, undefined if sequences are not packed. `maps` and `resets`
  // become its workspaces.
  SummaryPartition summary(const at::Tensor& bounds, at::Tensor& maps, at::Tensor& resets) const {
    SummaryPartition partition;
    const int64_t steps = tile_steps(static_cast<int>(scalar_bytes_), kSummaryThreadSteps);
    partition.tiles = ceil_div(params_.seqlen, steps);
    partition.sequence_tiles = cuda::Divisor(partition.tiles);
    partition.sequences = params_.batch;
    int64_t tiles = params_.batch * partition.tiles;
    if (bounds.defined()) {
      partition.sequences = bounds.numel() - 1;
      partition.bounds = bounds.const_data_ptr<int64_t>();
      tiles = params_.seqlen / steps + partition.sequences;
    }
    fill(partition, tiles, channel_blocks());
    partition.is_plain &= has_vectors_;
    if (partition.tiles > 1) {
      maps = empty_tensor({partition.tiles_in_all, kTileChannels, 2},
                          like_.options().dtype(accumulate_bytes_ == 8 ? at::kDouble : at::kFloat));
      partition.maps = maps.data_ptr();
      if (params_.reset.data != nullptr) {
        resets = empty_tensor({partition.tiles_in_all}, like_.options().dtype(at::kBool));
        partition.resets = resets.data_ptr<bool>();
      }
    }
    return partition;
  }

 private:
  static constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

  // Sets the fields of a partition of `tiles` times `others` tiles that forward, backward and the summary read.
  void fill(Partition& partition, int64_t tiles, int64_t others) const {
    TORCH_CHECK_VALUE(others <= kMost && tiles <= kMost && others * tiles <= kMost, op_, ": expected at most ", kMost,
                      " tiles of ", kTileChannels, " channels, got ", others, " times ", tiles);
    partition.tiles_in_all = static_cast<uint32_t>(others * tiles);
    partition.channel_blocks = cuda::Divisor(channel_blocks());
    partition.vector_views = vector_views_;
    partition.is_plain = is_whole_ && has_contiguous_channels_;
    partition.is_shifted = !has_vectors_;
  }

  // The number of chains from which on the sequential kernels are faster. Their time grows with the steps, as long as no
  // multiprocessor has two chains; that of tiles with chains times steps, and tiles take longer to begin. So it is a share of
  // the multiprocessors for many steps, less for few, but not below another share. Measured on an H200 with 24 to 128 chains of
  // 512, 2048 and 8192 steps.
  double least_sequential_chains(bool is_forward, size_t inputs) const {
    struct Shares {
      double of_many_steps, least, steps_to_begin;
    };
    const bool is_short = scalar_bytes_ == 2, is_pair = inputs <= 2;
    const Shares forward =
        has_vectors_ ? Shares{is_pair ? 0.52 : 0.46, 0.36, 32768} : Shares{is_short ? 0.42 : 0.45, 0.28, 32768};
    const Shares backward_of_vectors = !is_pair   ? Shares{0.41, 0.27, 16384}
                                       : is_short ? Shares{0.57, 0.36, 11600}
                                                  : Shares{0.43, 0.36, 4096};
    const Shares backward = has_vectors_ ? backward_of_vectors
                            : is_short   ? Shares{0.49, 0.27, 16384}
                                         : Shares{0.56, 0.36, 11600};
    const Shares& shares = is_forward ? forward : backward;
    const double multiprocessors = cuda::multiprocessor_count(like_.get_device());
    const double to_begin = shares.steps_to_begin / static_cast<double>(params_.seqlen);
    return std::max(shares.least * multiprocessors, shares.of_many_steps * multiprocessors - to_begin);
  }

  // The time of tiles over that of a tile kernel of the recurrence's own: on an H200, 1.7 and 2.2 for vectors at 16 chains of
  // 8192 steps, and up to 4 for other rows.
  double slowdown_of_tiles(bool is_forward) const {
    const TileRows plain = has_vectors_ ? TileRows::kVectors : TileRows::kShifted;
    const TileRows rows = params_.options.are_default() ? plain : TileRows::kAny;
    if (has_tile_kernel(params_.recurrence, scalar_kind(like_.scalar_type()), rows, is_forward)) return 1;
    return has_vectors_ ? 1.7 : 2.5;
  }

  int64_t channel_blocks() const { return ceil_div(params_.channels, kTileChannels); }
  int64_t chains() const { return params_.batch * channel_blocks(); }

  const LinearScanParams& params_;
  const char* op_;
  const at::Tensor& like_;
  int64_t scalar_bytes_, accumulate_bytes_;
  uint32_t vector_views_ = 0, unpaired_views_ = 0;
  bool is_whole_;                                             // neither packed sequences nor a reset mask
  bool has_vectors_ = true, has_contiguous_channels_ = true;  // all views
  bool has_sectors_ = true;                                   // all views' rows begin with sectors
};

// The views that a call writes.
constexpr uint32_t kStoredByFwd = 1u << Partition::kH;
constexpr uint32_t kStoredByBwd = ((1u << kMaxRecurrenceInputs) - 1) << Partition::kGradInputs;

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
  const Plan plan(params, member.name, first);
  if (plan.is_empty()) return outputs;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const ScalarKind kind = scalar_kind(first.scalar_type());
  if (plan.is_sequential(/*is_forward=*/true, member.row->inputs)) {
    C10_CUDA_CHECK(cuda::visit_scalar_but_double(kind, [&](auto scalar) {
      return launch_linear_scan_sequential_fwd<decltype(scalar)>(params, plan.sequential(/*is_forward=*/true, kStoredByFwd),
                                                                 stream);
    }));
    return outputs;
  }
  at::Tensor words;
  const int steps = fwd_thread_steps(static_cast<int>(member.row->inputs), static_cast<int>(first.element_size()));
  const Partition partition = plan.tiles(steps, words);
  C10_CUDA_CHECK(cuda::visit_scalar(
      kind, [&](auto scalar) { return launch_linear_scan_fwd<decltype(scalar)>(params, partition, stream); }));
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
  Plan plan(params, member.name, first);
  for (size_t i = 0; i < kMaxRecurrenceInputs; ++i) plan.add_view(Partition::kGradInputs + i, params.grad_inputs[i]);
  plan.add_view(Partition::kGradH, params.grad_h);
  if (plan.is_empty()) return grads;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const ScalarKind kind = scalar_kind(first.scalar_type());
  if (plan.is_sequential(/*is_forward=*/false, member.row->inputs)) {
    C10_CUDA_CHECK(cuda::visit_scalar_but_double(kind, [&](auto scalar) {
      return launch_linear_scan_sequential_bwd<decltype(scalar)>(params, plan.sequential(/*is_forward=*/false, kStoredByBwd),
                                                                 stream);
    }));
    return grads;
  }
  at::Tensor words;
  const Partition partition = plan.tiles(kBwdThreadSteps, words);
  C10_CUDA_CHECK(cuda::visit_scalar(
      kind, [&](auto scalar) { return launch_linear_scan_bwd<decltype(scalar)>(params, partition, stream); }));
  if (of_beginnings.defined()) at::sum_out(grad_h0, of_beginnings, 1);
  return grads;
}

// Where packed sequences begin and end in the order of the scan, int64, (sequences + 1,). Undefined if sequences are not
// packed.
at::Tensor bounds_of_sequences(const Inputs& in) {
  if (!is_present(in.cu_seqlens)) return {};
  const int64_t seqlen = in.tensors[0].size(1);
  // A captured graph may run with any values: none leads out of bounds.
  const at::Tensor bounds = in.cu_seqlens->to(at::kLong).clamp(0, seqlen);
  return in.reverse ? bounds.flip(0).neg_().add_(seqlen) : bounds;
}

SummaryOutputs summary_cuda(const SummaryInputs& in) {
  const Member member = check_inputs(in);
  const at::Tensor& first = in.tensors[0];
  const c10::cuda::CUDAGuard guard(first.device());
  if (is_present(in.cu_seqlens) && !cuda::is_capturing()) {
    check_cu_seqlens_values(in.recurrence, in.cu_seqlens->cpu(), first.size(1));
  }
  SummaryOutputs outputs = allocate_summary(in);
  // Without the sequence of each step: the kernels find a tile's.
  LinearScanSummaryParams params = make_summary_params(in, member, at::Tensor(), outputs);
  const Plan plan(params, member.name, first);
  if (plan.is_empty()) {
    outputs.last_state.zero_();
    outputs.decay.fill_(1);
    return outputs;
  }
  const at::Tensor bounds = bounds_of_sequences(in);
  at::Tensor maps, resets;
  const SummaryPartition partition = plan.summary(bounds, maps, resets);
  if (bounds.defined() && in.reverse) {
    for (StateView* view : {&params.last_state, &params.decay}) {
      const int64_t offset = (partition.sequences - 1) * view->stride_sequence;
      view->data = static_cast<char*>(view->data) + offset * outputs.decay.element_size();
      view->stride_sequence = -view->stride_sequence;
    }
  }
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(cuda::visit_scalar(scalar_kind(first.scalar_type()), [&](auto scalar) {
    return launch_linear_scan_summary<decltype(scalar)>(params, partition, stream);
  }));
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CUDA, m) {
  register_kernels<&fwd_cuda, &bwd_cuda>(m);
  register_summary_kernels<&summary_cuda, &summary_adjoint>(m);
}

}  // namespace ssm_kernels::linear_scan

#endif
