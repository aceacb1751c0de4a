#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/core/Tensor.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <vector>

#include "common/integers.h"
#include "cuda/device.h"
#include "cuda/scalar_types.h"
#include "delta_rule/aten/gates.h"
#include "delta_rule/cuda/fwd_cuda.h"
#include "delta_rule/cuda/kda.h"
#include "delta_rule/cuda/launch.h"
#include "delta_rule/cuda/plain_calls.h"
#include "delta_rule/cuda/segments.h"
#include "delta_rule/cuda/sm80.h"
#include "delta_rule/cuda/step_factors.h"
#include "delta_rule/cuda/tensors.h"
#include "torch/allocation.h"
#include "torch/checks.h"
#include "torch/debug_options.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::delta_rule {
namespace {

// The most bytes of chunk matrices at a time, with a gate per channel also of scaled rows. A call that needs more runs over its
// steps in several spans.
constexpr int64_t kMaxWorkspaceBytes = int64_t{1} << 30;

// The tensors that a kernel reads and writes.
struct Operands {
  at::Tensor q, k, v, out, log_decay, beta, row_factors, initial_states, final_states, cu_seqlens, resets;
};

// The operands of `steps` steps from `first` on, of which a row of q, out and log decays has one or more. Packed sequences that
// have none of these steps become empty. A later span starts from the final states of the one before.
Operands span_of(const Operands& operands, int64_t first, int64_t steps) {
  Operands result = operands;
  if (steps == operands.v.size(1)) return result;
  const int64_t updates = operands.v.size(1) / operands.q.size(1);
  for (at::Tensor* tensor : {&result.k, &result.v, &result.beta, &result.row_factors, &result.resets}) {
    if (tensor->defined()) *tensor = tensor->narrow(1, first, steps);
  }
  for (at::Tensor* tensor : {&result.q, &result.out, &result.log_decay}) {
    if (tensor->defined()) *tensor = tensor->narrow(1, first / updates, steps / updates);
  }
  // The kernels find the flags of a row of the batch by the number of steps.
  if (result.resets.defined()) result.resets = result.resets.contiguous();
  if (operands.cu_seqlens.defined()) result.cu_seqlens = operands.cu_seqlens.sub(first).clamp(0, steps);
  if (first > 0) result.initial_states = operands.final_states;
  return result;
}

Operands prepare(const Inputs& in, const FwdOutputs& outputs) {
  Operands result;
  const auto vectors = [&](const at::Tensor& rows) {
    if (!has_normalized_rows(in)) return as_vectors(rows);
    return as_vectors(normalized(in, rows.to(at::kFloat)).rows.to(rows.scalar_type()));
  };
  result.q = vectors(in.q);
  result.k = in.k.is_same(in.q) ? result.q : vectors(in.k);
  result.v = as_vectors(in.v);
  result.out = are_vectors(outputs.out) ? outputs.out : empty_vectors(outputs.out);
  const bool keeps_beta = fwd_kernels_for(in) == Kernels::kSm90;
  const StepFactors factors = step_factors(in, result.q, result.k, keeps_beta);
  result.log_decay = factors.log_decay;
  result.beta = factors.beta;
  result.row_factors = factors.rows;
  if (is_present(in.initial_states)) result.initial_states = as_states(*in.initial_states);
  result.final_states = as_states(outputs.final_states);
  if (is_present(in.cu_seqlens)) result.cu_seqlens = in.cu_seqlens->to(at::kLong).contiguous();
  if (is_present(in.seq_idx)) result.resets = resets_of(in);
  return result;
}

// The kernels of one gate a head and those of gates of channels have these parameters in common.
template <typename Params>
Params common_parameters_of(const Inputs& in, const Operands& operands) {
  Params params;
  params.batch = operands.final_states.size(0);
  params.seqlen = operands.v.size(1);
  params.heads = params.groups = in.v.size(2);
  params.headdim = static_cast<int>(in.v.size(3));
  params.dstate = static_cast<int>(in.q.size(3));
  params.state_columns = static_cast<int>(operands.final_states.size(3));
  params.value_heads_per_key_head = static_cast<int>(in.v.size(2) / in.q.size(2));
  params.scale = static_cast<float>(scale_of(in));
  params.log2_updates = log2_updates(in);
  const auto of_steps = [](const at::Tensor& tensor) { return view_of(tensor.unsqueeze(3)); };
  if (operands.log_decay.defined()) {
    params.log_decay = in.has_gate_per_channel() ? view_of(operands.log_decay) : of_steps(operands.log_decay);
  }
  params.beta = of_steps(operands.beta);
  if (operands.row_factors.defined()) params.row_factors = view_of(operands.row_factors);
  if (operands.cu_seqlens.defined()) params.cu_seqlens = operands.cu_seqlens.const_data_ptr<int64_t>();
  if (operands.resets.defined()) params.resets = static_cast<const uint8_t*>(operands.resets.const_data_ptr());
  if (operands.initial_states.defined()) params.initial_states = operands.initial_states.const_data_ptr<float>();
  params.final_states = operands.final_states.data_ptr<float>();
  params.states_stride_entry = operands.final_states.stride(0);
  return params;
}

DeltaRuleFwdParams parameters_of(const Inputs& in, const Operands& operands) {
  auto params = common_parameters_of<DeltaRuleFwdParams>(in, operands);
  params.out = view_of(operands.out);
  const int64_t rows = kChunk / in.num_householder;
  describe_tiles(params.q_descriptor, operands.q, rows);
  describe_tiles(params.k_descriptor, operands.k);
  describe_tiles(params.v_descriptor, operands.v);
  describe_tiles(params.out_descriptor, operands.out, rows);
  return params;
}

DeltaRuleMatricesParams matrices_parameters_of(const DeltaRuleFwdParams& fwd, void* inverses, int multiprocessors) {
  DeltaRuleMatricesParams params;
  static_cast<ChunkedGeometry&>(params) = fwd;
  params.value_heads_per_key_head = fwd.value_heads_per_key_head;
  params.log2_updates = fwd.log2_updates;
  params.log_decay = fwd.log_decay;
  params.beta = fwd.beta;
  params.row_factors = fwd.row_factors;
  params.cu_seqlens = fwd.cu_seqlens;
  params.resets = fwd.resets;
  params.multiprocessors = multiprocessors;
  params.k_descriptor = fwd.k_descriptor;
  params.inverses = inverses;
  return params;
}

// The parameters of the kernel that makes the matrices of keys with more than kStateColumns columns.
DeltaRuleBwdParams wide_matrices_parameters_of(const DeltaRuleFwdParams& fwd, bool beta_is_fp32, void* matrices) {
  DeltaRuleBwdParams params;
  static_cast<ChunkedGeometry&>(params) = fwd;
  params.value_heads_per_key_head = fwd.value_heads_per_key_head;
  params.scale = fwd.scale;
  params.log_decay = fwd.log_decay;
  params.beta = fwd.beta;
  params.beta_is_fp32 = beta_is_fp32;
  params.row_factors = fwd.row_factors;
  params.cu_seqlens = fwd.cu_seqlens;
  params.resets = fwd.resets;
  params.matrices = matrices;
  params.q_descriptor = fwd.q_descriptor;
  params.k_descriptor = fwd.k_descriptor;
  return params;
}

// A schedule and the memory that it points to.
struct Work {
  Schedule schedule;
  at::Tensor states, flags;
};

// Divides the work tiles among blocks. Packed sequences: each work tile is the range of a block. Others: ranges of whole work
// tiles, equally many in each block, if they take at most an eighth longer than equal ranges, because blocks then take
// neighboring heads at the same time; else ranges of equally many chunks, if none is shorter than a work tile; else ranges of
// whole work tiles.
Work divide(DeltaRuleFwdParams& params, const at::TensorOptions& options) {
  Work work;
  Schedule& schedule = work.schedule;
  static_cast<WorkPartition&>(schedule) = partition_states(params);
  if (params.cu_seqlens != nullptr) schedule.chunks = 1;
  const int64_t multiprocessors = cuda::multiprocessor_count(options.device().index()),
                chunks = schedule.work_tiles * schedule.chunks;
  TORCH_CHECK_VALUE(chunks <= std::numeric_limits<int32_t>::max(),
                    "delta_rule_scan: expected fewer than 2^31 chunks of all heads, got ", chunks);
  const int64_t equal = ceil_div(chunks, multiprocessors), of_block = ceil_div(schedule.work_tiles, multiprocessors),
                whole = of_block * schedule.chunks;
  if (params.cu_seqlens != nullptr) {
    schedule.length = 1;
  } else if (of_block > 1 && schedule.work_tiles % of_block == 0 && 8 * whole <= 9 * equal) {
    schedule.length = whole;
    params.work_tiles_of_block = static_cast<int>(of_block);
  } else {
    schedule.length = equal >= schedule.chunks && equal + 1 < whole ? equal : whole;
  }
  schedule.blocks = ceil_div(chunks, schedule.length);
  if (schedule.length % schedule.chunks == 0) return work;
  const int64_t cuts = schedule.blocks * kWarpgroups;
  work.states = empty_tensor({cuts, kStateRows * state_tile_columns(params.dstate)}, options.dtype(at::kFloat));
  work.flags = at::zeros({cuts + 1}, options.dtype(at::kInt));
  schedule.states = work.states.data_ptr<float>();
  schedule.ready = work.flags.data_ptr<int>();
  schedule.ticket_counter = schedule.ready + cuts;
  return work;
}

// The bytes of the matrices of a chunk of a head.
int64_t matrices_bytes(const Inputs& in) {
  if (fwd_kernels_for(in) == Kernels::kSm80) return sm80_matrices_bytes(in.q.element_size());
  if (is_wide(in.q.size(3))) return kWideMatricesBytes;
  return kChunkMatrixBytes + (in.has_gate_per_channel() ? kKdaChunkBytes : 0);
}

// The steps of a span: as many whole chunks as have matrices of at most kMaxWorkspaceBytes, but at least one, and as many as
// there are packed sequences, each of which may begin a chunk.
int64_t steps_of_span(const Inputs& in) {
  const int64_t heads = in.v.size(2), sequences = is_present(in.cu_seqlens) ? in.cu_seqlens->size(0) - 1 : 0,
                bytes = matrices_bytes(in), chunks = kMaxWorkspaceBytes / bytes / heads - sequences;
  return std::max({int64_t{1}, sequences, chunks / in.q.size(0)}) * kChunk;
}

cudaError_t launch_matrices(at::ScalarType dtype, const DeltaRuleMatricesParams& params, cudaStream_t stream) {
  return dtype == at::kHalf ? launch_delta_rule_chunk_matrices<__half>(params, stream)
                            : launch_delta_rule_chunk_matrices<__nv_bfloat16>(params, stream);
}

// Queues forward's kernel; launch.h describes states_only and follows_matrices.
void launch_scan(at::ScalarType dtype, const DeltaRuleFwdParams& params, const Work& work, bool states_only,
                 bool follows_matrices, cudaStream_t stream) {
  const auto launch = dtype == at::kHalf ? launch_delta_rule_fwd<__half> : launch_delta_rule_fwd<__nv_bfloat16>;
  C10_CUDA_CHECK(launch(params, work.schedule, states_only, follows_matrices, stream));
}

// Queues the kernel that computes the chunk matrices and sets params.inverses. Returns the matrices' memory.
std::vector<at::Tensor> make_matrices(const Inputs& in, const Operands&, DeltaRuleFwdParams& params, cudaStream_t stream) {
  const int64_t count = chunk_numbers(params.batch, params.seqlen, params.cu_seqlens != nullptr) * params.heads;
  at::Tensor inverses = empty_tensor({count * kChunkMatrixBytes}, in.q.options().dtype(at::kByte));
  params.inverses = inverses.data_ptr();
  const int multiprocessors = cuda::multiprocessor_count(in.q.device().index());
  DeltaRuleMatricesParams of_matrices = matrices_parameters_of(params, inverses.data_ptr(), multiprocessors);
  of_matrices.beta_is_fp32 = in.beta.scalar_type() == at::kFloat || in.beta_sigmoid;
  C10_CUDA_CHECK(launch_matrices(in.q.scalar_type(), of_matrices, stream));
  return {inverses};
}

// The same for gates of channels of the key: the operands of all chunks, and the scan. Returns the operands' memory.
std::vector<at::Tensor> make_matrices(const Inputs& in, const Operands& operands, KdaFwdParams& params, cudaStream_t stream) {
  const int64_t count = chunk_numbers(params.batch, params.seqlen, params.cu_seqlens != nullptr) * params.heads;
  const at::TensorOptions bytes = in.q.options().dtype(at::kByte);
  const at::Tensor inverses = empty_tensor({count * kChunkMatrixBytes}, bytes),
                   chunks = empty_tensor({count * kKdaChunkBytes}, bytes);
  params.inverses = inverses.data_ptr();
  KdaChunksParams of_chunks;
  static_cast<ChunkedGeometry&>(of_chunks) = params;
  of_chunks.value_heads_per_key_head = params.value_heads_per_key_head;
  of_chunks.scale = params.scale;
  const GateParameters parameters(in);
  of_chunks.arguments = kda_arguments(in, parameters);
  of_chunks.arguments.q = view_of(operands.q);
  of_chunks.arguments.k = view_of(operands.k);
  of_chunks.log_decay = params.log_decay;
  of_chunks.beta = params.beta;
  of_chunks.cu_seqlens = params.cu_seqlens;
  of_chunks.resets = params.resets;
  of_chunks.inverses = inverses.data_ptr();
  params.chunks = of_chunks.chunks = chunks.data_ptr();
  C10_CUDA_CHECK(in.q.scalar_type() == at::kHalf ? launch_kda_chunks<__half>(of_chunks, stream)
                                                 : launch_kda_chunks<__nv_bfloat16>(of_chunks, stream));
  return {inverses, chunks};
}

void launch_scan(at::ScalarType dtype, const KdaFwdParams& params, const Work& work, bool states_only, bool follows_chunks,
                 cudaStream_t stream) {
  const auto launch = dtype == at::kHalf ? launch_kda_fwd<__half> : launch_kda_fwd<__nv_bfloat16>;
  C10_CUDA_CHECK(launch(params, work.schedule, states_only, follows_chunks, stream));
}

// The chunks of a segment of the call, 0 if it is not cut (segments.h).
int64_t chunks_of_segment(const Inputs& in, const Operands& operands, const SegmentTimes& times) {
  if (operands.resets.defined() || in.q.size(3) % 4 != 0) return 0;
  const bool are_packed = operands.cu_seqlens.defined();
  const int64_t sequences = operands.final_states.size(0), seqlen = operands.v.size(1);
  if (sequences == 0) return 0;
  const SegmentedWork work{sequences * in.v.size(2), ceil_div(seqlen, are_packed ? sequences * kChunk : int64_t{kChunk}),
                           are_packed, in.v.size(3), in.q.size(3)};
  return chunks_of_segment(work, times, cuda::multiprocessor_count(in.q.device().index()));
}

// The tensors with all rows of the batch as one. Undefined tensors if strides do not allow such views.
Operands rows_as_one(const Operands& operands) {
  Operands result = operands;
  for (at::Tensor* tensor :
       {&result.q, &result.k, &result.v, &result.out, &result.log_decay, &result.beta, &result.row_factors}) {
    if (!tensor->defined()) continue;
    if (!is_one_row(*tensor)) return {};
    *tensor = as_one_row(*tensor);
  }
  return result;
}

// The kernels of a call of `operands`, which the constructor prepares: it queues the kernel of the matrices of all chunks.
// queue_maps() then queues the kernel of the maps of segments, which are packed sequences (segment_fold.cuh), and queue_scan()
// the scan. `Params` are those of the scan.
template <typename Params>
class ChunkedKernels {
 public:
  static SegmentTimes times(const Inputs&) { return kFwdTimes; }

  ChunkedKernels(const Inputs& in, const Operands& operands) : in_(in) {
    static_cast<DeltaRuleFwdParams&>(params_) = parameters_of(in, operands);
    // It queues a fill of flags, which the scan reads before it waits for the first kernel: they come between.
    work_ = divide(params_, in.q.options());
    memory_ = make_matrices(in, operands, params_, c10::cuda::getCurrentCUDAStream());
  }
  void queue_maps(const Segments& segments, const at::Tensor& starts, const at::Tensor& maps) {
    Params of_maps = params_;
    of_maps.headdim = static_cast<int>(maps.size(2));
    of_maps.first_segments = segments.first.const_data_ptr<int64_t>();
    of_maps.sequences = segments.sequences;
    of_maps.initial_states = starts.const_data_ptr<float>();
    of_maps.final_states = maps.data_ptr<float>();
    of_maps.states_stride_entry = maps.stride(0);
    // Other kernels than that of the matrices come before.
    follows_matrices_ = false;
    launch_scan(in_.q.scalar_type(), of_maps, divide(of_maps, in_.q.options()), /*states_only=*/true, follows_matrices_,
                c10::cuda::getCurrentCUDAStream());
  }
  void queue_scan() {
    launch_scan(in_.q.scalar_type(), params_, work_, /*states_only=*/false, follows_matrices_,
                c10::cuda::getCurrentCUDAStream());
  }

 private:
  const Inputs& in_;
  Params params_;
  Work work_;
  std::vector<at::Tensor> memory_;
  bool follows_matrices_ = true;
};

// Those for keys of more than kStateColumns columns. Backward's kernel of the states computes maps.
class WideKernels {
 public:
  static SegmentTimes times(const Inputs&) { return kFwdWideTimes; }

  WideKernels(const Inputs& in, const Operands& operands)
      : operands_(operands),
        value_dim_(in.v.size(3)),
        is_half_(in.q.scalar_type() == at::kHalf),
        beta_is_fp32_(operands.beta.scalar_type() == at::kFloat),
        params_(parameters_of(in, operands)) {
    const int64_t chunks = chunk_numbers(params_.batch, params_.seqlen, params_.cu_seqlens != nullptr) * params_.heads;
    matrices_ = empty_tensor({chunks * kWideMatricesBytes}, in.q.options().dtype(at::kByte));
    params_.matrices = matrices_.data_ptr();
    work_ = divide(params_, in.q.options());
    const DeltaRuleBwdParams of_matrices = wide_matrices_parameters_of(params_, beta_is_fp32_, params_.matrices);
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    C10_CUDA_CHECK(is_half_ ? launch_delta_rule_wide_matrices<__half>(of_matrices, stream)
                            : launch_delta_rule_wide_matrices<__nv_bfloat16>(of_matrices, stream));
  }
  void queue_maps(const Segments& segments, const at::Tensor& starts, const at::Tensor& maps) {
    DeltaRuleBwdParams of_maps = wide_matrices_parameters_of(params_, beta_is_fp32_, params_.matrices);
    describe_maps(of_maps, segments, value_dim_, starts, maps);
    describe_tiles(of_maps.v_descriptor, operands_.v);
    WorkPartition partition = partition_states(of_maps);
    partition.directions = Directions::kForward;
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    C10_CUDA_CHECK(is_half_ ? launch_delta_rule_bwd_wide_states<__half>(of_maps, partition, stream)
                            : launch_delta_rule_bwd_wide_states<__nv_bfloat16>(of_maps, partition, stream));
  }
  void queue_scan() {
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    C10_CUDA_CHECK(is_half_ ? launch_delta_rule_fwd_wide<__half>(params_, work_.schedule, stream)
                            : launch_delta_rule_fwd_wide<__nv_bfloat16>(params_, work_.schedule, stream));
  }

 private:
  const Operands& operands_;
  const int64_t value_dim_;
  const bool is_half_, beta_is_fp32_;
  DeltaRuleFwdParams params_;
  Work work_;
  at::Tensor matrices_;
};

// Those with mma.sync. Backward's kernel of the states computes maps.
class Sm80Kernels {
 public:
  static SegmentTimes times(const Inputs& in) { return sm80_times(in.q.size(3), in.q.element_size(), /*is_backward=*/false); }

  Sm80Kernels(const Inputs& in, const Operands& operands)
      : kind_(scalar_kind(in.q.scalar_type())),
        value_dim_(in.v.size(3)),
        available_(sm80_shared_bytes(in)),
        params_(common_parameters_of<DeltaRuleSm80Params>(in, operands)) {
    params_.q = view_of(operands.q);
    params_.k = view_of(operands.k);
    params_.v = view_of(operands.v);
    params_.out = view_of(operands.out);
    params_.multiprocessors = cuda::multiprocessor_count(in.q.get_device());
    partition_ = partition_states(params_);
    const int64_t chunks = chunk_numbers(params_.batch, params_.seqlen, params_.cu_seqlens != nullptr) * params_.heads;
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    TORCH_CHECK_VALUE(chunks <= kMost && kWarpgroups * partition_.work_tiles <= kMost,
                      "delta_rule_scan: expected fewer than 2^31 chunks, and pairs of state tiles, of all heads, got ", chunks,
                      " and ", partition_.work_tiles);
    matrices_ = empty_tensor({chunks * sm80_matrices_bytes(in.q.element_size())}, in.q.options().dtype(at::kByte));
    params_.matrices = matrices_.data_ptr();
    visit([&](auto scalar, cudaStream_t stream) { return launch_delta_rule_sm80_matrices<decltype(scalar)>(params_, stream); });
  }
  void queue_maps(const Segments& segments, const at::Tensor& starts, const at::Tensor& maps) {
    DeltaRuleSm80Params of_maps = params_;
    describe_maps(of_maps, segments, value_dim_, starts, maps);
    WorkPartition partition = partition_states(of_maps);
    partition.directions = Directions::kForward;
    visit([&](auto scalar, cudaStream_t stream) {
      return launch_delta_rule_sm80_bwd<decltype(scalar)>(of_maps, partition, available_, stream);
    });
  }
  void queue_scan() {
    visit([&](auto scalar, cudaStream_t stream) {
      return launch_delta_rule_sm80_fwd<decltype(scalar)>(params_, partition_, available_, stream);
    });
  }

 private:
  template <typename Launch>
  void visit(const Launch& launch) const {
    C10_CUDA_CHECK(
        cuda::visit_scalar_but_double(kind_, [&](auto scalar) { return launch(scalar, c10::cuda::getCurrentCUDAStream()); }));
  }

  const ScalarKind kind_;
  const int64_t value_dim_;
  const int available_;
  DeltaRuleSm80Params params_;
  WorkPartition partition_;
  at::Tensor matrices_;
};

// Queues the kernels of a call. Long sequences of few heads take four instead of two: the matrices; the maps of all segments at
// once; the fold, which computes the state before each segment; the scan of all segments at once.
template <typename KernelsOfCall>
void launch_with(const Inputs& in, const Operands& operands) {
  const int64_t chunks = chunks_of_segment(in, operands, KernelsOfCall::times(in));
  Operands rows = chunks > 0 ? rows_as_one(operands) : Operands();
  if (!rows.q.defined()) return KernelsOfCall(in, operands).queue_scan();
  const int64_t heads = in.v.size(2), value_dim = in.v.size(3), key_dim = in.q.size(3);
  const Segments segments = cut_sequences(operands.cu_seqlens, operands.v.size(0), operands.v.size(1), chunks, in.q.options());
  const at::TensorOptions fp32 = operands.final_states.options();
  rows.cu_seqlens = segments.bounds;
  rows.initial_states = empty_tensor({segments.places, heads, value_dim, key_dim}, fp32);
  rows.final_states = empty_tensor({segments.places, heads, value_dim, key_dim}, fp32);
  KernelsOfCall kernels(in, rows);
  const at::Tensor starts =
                       map_starts(segments, heads, value_dim, key_dim, operands.initial_states, /*is_reverse=*/false, fp32),
                   maps = empty_tensor_like(starts);
  kernels.queue_maps(segments, starts, maps);
  fold_maps(segments, maps, operands.initial_states, /*is_reverse=*/false, rows.initial_states);
  kernels.queue_scan();
  at::Tensor target = operands.final_states;
  at::index_select_out(target, rows.final_states, 0, segments.last);
}

void launch(const Inputs& in, const Operands& operands) {
  if (fwd_kernels_for(in) == Kernels::kSm80) return launch_with<Sm80Kernels>(in, operands);
  if (in.has_gate_per_channel()) return launch_with<ChunkedKernels<KdaFwdParams>>(in, operands);
  if (is_wide(in.q.size(3))) return launch_with<WideKernels>(in, operands);
  launch_with<ChunkedKernels<DeltaRuleFwdParams>>(in, operands);
}

}  // namespace

int sm80_shared_bytes(const Inputs& in) {
  return static_cast<int>(
      std::min<int64_t>(cuda::max_shared_bytes(in.q.get_device()), debug_option(DebugOption::kDeltaRuleSharedBytes)));
}

Kernels fwd_kernels_for(const Inputs& in) {
  if (in.q.dim() != 4 || in.v.dim() != 4) return Kernels::kNone;  // check_inputs() says so
  const at::ScalarType dtype = in.q.scalar_type();
  const bool has_channels = in.has_gate_per_channel(), is_half = dtype == at::kHalf || dtype == at::kBFloat16;
  const int64_t key_dim = in.q.size(3), element_bytes = in.q.element_size();
  if (in.q.numel() == 0 || in.v.numel() == 0) return Kernels::kNone;
  // TMA takes 32-bit coordinates, and a tile's first step is one.
  if (in.v.size(1) > std::numeric_limits<int32_t>::max() - kChunk) return Kernels::kNone;
  const c10::cuda::CUDAGuard guard(in.q.device());
  const bool may_use_wgmma = is_half && (has_channels || debug_option(DebugOption::kDeltaRuleMma) == 0) && has_wgmma_kernels();
  if (may_use_wgmma && key_dim <= (has_channels ? kStateColumns : kMaxKernelDstate)) return Kernels::kSm90;
  if (has_channels || (!is_half && dtype != at::kFloat) || key_dim > kMaxKernelDstate) return Kernels::kNone;
  if (cuda::device_properties(in.q.get_device()).major < 8) return Kernels::kNone;
  const int64_t columns = state_tile_columns(key_dim);
  return sm80_scan_bytes(columns, element_bytes, 1) <= sm80_shared_bytes(in) ? Kernels::kSm80 : Kernels::kNone;
}

namespace {

// Runs the steps before `end`. Calls visit(outputs, i, states) with the states of all rows or packed sequences at the i-th of
// in.states_at; undefined states are zeros.
template <typename Visit>
FwdOutputs run_spans(const Inputs& in, int64_t end, const Visit& visit) {
  const FwdOutputs outputs = allocate_fwd(in);
  const Operands operands = prepare(in, outputs);
  // A span ends at each of the positions whose states are results.
  const int64_t most_steps = steps_of_span(in);
  size_t stored = 0;
  for (int64_t first = 0;;) {
    for (; stored < in.states_at.size() && in.states_at[stored] == first; ++stored) {
      visit(outputs, stored, first > 0 ? operands.final_states.narrow(3, 0, in.q.size(3)) : or_undefined(in.initial_states));
    }
    if (first == end) break;
    int64_t steps = std::min(most_steps, end - first);
    if (stored < in.states_at.size()) steps = std::min(steps, in.states_at[stored] - first);
    launch(in, span_of(operands, first, steps));
    first += steps;
  }
  if (!operands.out.is_same(outputs.out)) outputs.out.copy_(operands.out.narrow(3, 0, outputs.out.size(3)));
  if (!operands.final_states.is_same(outputs.final_states)) {
    outputs.final_states.copy_(operands.final_states.narrow(3, 0, outputs.final_states.size(3)));
  }
  return outputs;
}

FwdOutputs run_plain(const Inputs& in) {
  return run_spans(in, in.v.size(1), [&](const FwdOutputs& outputs, size_t i, const at::Tensor& states) {
    const at::Tensor target = outputs.states.select(1, static_cast<int64_t>(i));
    if (!states.defined()) {
      target.zero_();
    } else {
      target.copy_(is_present(in.cu_seqlens) ? states.index_select(0, sequence_before(in, in.states_at[i])) : states);
    }
  });
}

}  // namespace

at::Tensor sequence_before(const Inputs& in, int64_t position) {
  const int64_t step = std::max<int64_t>(position - 1, 0);
  // Nobody checks the values while a graph is captured: the last sequence may end before the step.
  const int64_t last = in.cu_seqlens->size(0) - 2;
  return in.cu_seqlens->slice(0, 1).le(step).sum(at::IntArrayRef{0}, /*keepdim=*/true).clamp_max(last);
}

std::vector<at::Tensor> states_at_positions(const Inputs& in) {
  std::vector<at::Tensor> result(in.states_at.size());
  const auto last = std::lower_bound(in.states_at.begin(), in.states_at.end(), in.v.size(1));
  if (last == in.states_at.begin()) return result;
  run_spans(in, *std::prev(last), [&](const FwdOutputs&, size_t i, const at::Tensor& states) {
    if (!states.defined()) return;
    result[i] = is_present(in.cu_seqlens) ? states.index_select(0, sequence_before(in, in.states_at[i]))
                                          : states.clone(at::MemoryFormat::Contiguous);
  });
  return result;
}

FwdOutputs fwd_cuda(const Inputs& in) {
  check_inputs(in);
  const c10::cuda::CUDAGuard guard(in.q.device());
  if (is_present(in.cu_seqlens) && !cuda::is_capturing()) {
    check_cu_seqlens_values("delta_rule_scan", in.cu_seqlens->cpu(), in.q.size(1));
  }
  return is_plain(in) ? run_plain(in) : results_of(in, run_plain(plain_call(in)));
}

}  // namespace ssm_kernels::delta_rule

#endif
