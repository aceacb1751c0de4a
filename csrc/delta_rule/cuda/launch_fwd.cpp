#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <array>
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
  const bool keeps_beta = fwd_kernels_for(in) == Kernels::kSm90 && !is_wide(in.q.size(3));
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
DeltaRuleBwdParams wide_matrices_parameters_of(const DeltaRuleFwdParams& fwd, void* matrices) {
  DeltaRuleBwdParams params;
  static_cast<ChunkedGeometry&>(params) = fwd;
  params.value_heads_per_key_head = fwd.value_heads_per_key_head;
  params.scale = fwd.scale;
  params.log_decay = fwd.log_decay;
  params.beta = fwd.beta;
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
at::Tensor make_matrices(const Inputs& in, const Operands&, DeltaRuleFwdParams& params, cudaStream_t stream) {
  const int64_t count = chunk_numbers(params.batch, params.seqlen, params.cu_seqlens != nullptr) * params.heads;
  at::Tensor inverses = empty_tensor({count * kChunkMatrixBytes}, in.q.options().dtype(at::kByte));
  params.inverses = inverses.data_ptr();
  const int multiprocessors = cuda::multiprocessor_count(in.q.device().index());
  DeltaRuleMatricesParams of_matrices = matrices_parameters_of(params, inverses.data_ptr(), multiprocessors);
  of_matrices.beta_is_fp32 = in.beta.scalar_type() == at::kFloat || in.beta_sigmoid;
  C10_CUDA_CHECK(launch_matrices(in.q.scalar_type(), of_matrices, stream));
  return inverses;
}

// The same for gates of channels of the key: the operands of all chunks, and the scan. Returns the operands' memory.
std::array<at::Tensor, 2> make_matrices(const Inputs& in, const Operands& operands, KdaFwdParams& params, cudaStream_t stream) {
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

// The chunks of a segment, if cutting each sequence into segments takes less time than not, else 0. On an H200 a chunk takes
// about 2 us, and 1.4 us in a map (segment_fold.cuh), whose blocks may run in several waves; folding a segment takes about 6
// us, and the additional launches about 40 us.
int64_t chunks_of_segment(const Inputs& in, const Operands& operands) {
  const int64_t multiprocessors = cuda::multiprocessor_count(in.q.device().index()),
                chunks = ceil_div(operands.v.size(1), int64_t{kChunk}),
                blocks = operands.q.size(0) * in.v.size(2) * ceil_div(row_blocks(in.v.size(3)), int64_t{kWarpgroups});
  if (operands.cu_seqlens.defined() || operands.resets.defined()) return 0;
  if (in.q.size(3) % 4 != 0 || is_wide(in.q.size(3))) return 0;
  const int64_t map_tiles = row_blocks(in.v.size(3)) + row_blocks(in.q.size(3)),
                map_blocks = operands.q.size(0) * in.v.size(2) * ceil_div(map_tiles, int64_t{kWarpgroups});
  int64_t best = 0, least = 16 * chunks;  // in 0.1 us; four fifths of the uncut time
  for (int64_t segments = 3; segments <= std::min(multiprocessors / blocks, chunks); ++segments) {
    const int64_t length = ceil_div(chunks, segments), waves = ceil_div(map_blocks * segments, multiprocessors),
                  time = 400 + (20 + 14 * waves) * length + 60 * segments;
    if (time < least) {
      least = time;
      best = length;
    }
  }
  return best;
}

// The same steps as packed sequences, which are the segments of `chunks` chunks. The states before and after each segment are
// uninitialized. Returns undefined tensors if strides do not allow a view of all rows as one.
Operands as_segments(const Operands& operands, int64_t chunks) {
  const int64_t batch = operands.v.size(0), seqlen = operands.v.size(1);
  Operands result = operands;
  for (at::Tensor* tensor :
       {&result.q, &result.k, &result.v, &result.out, &result.log_decay, &result.beta, &result.row_factors}) {
    if (!tensor->defined()) continue;
    if (!is_one_row(*tensor)) return {};
    *tensor = as_one_row(*tensor);
  }
  result.cu_seqlens = segment_bounds(batch, seqlen, chunks, operands.q.options());
  std::vector<int64_t> sizes = operands.final_states.sizes().vec();
  sizes[0] = result.cu_seqlens.size(0) - 1;
  result.initial_states = empty_tensor(c10::fromIntArrayRefSlow(sizes), operands.final_states.options());
  result.final_states = empty_tensor(c10::fromIntArrayRefSlow(sizes), operands.final_states.options());
  return result;
}

// Queues four kernels: the chunk matrices; the maps of all segments at once; the fold, which computes the state before each
// segment; forward of all segments at once.
template <typename Params>
void launch_segments(const Inputs& in, const Operands& operands, const Operands& segments) {
  const at::ScalarType dtype = in.q.scalar_type();
  const int64_t batch = operands.q.size(0), count = segments.final_states.size(0) / batch;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  // A segment's map has the rows of B, filled up to whole state tiles, and below them the rows of T, whose values are zero.
  const at::Tensor identities =
                       map_starts(batch * count, in.v.size(2), in.v.size(3), in.q.size(3), segments.final_states.options()),
                   maps = empty_tensor_like(identities);
  Params params;
  static_cast<DeltaRuleFwdParams&>(params) = parameters_of(in, segments);
  const auto memory = make_matrices(in, segments, params, stream);
  Params of_maps = params;
  of_maps.headdim = static_cast<int>(maps.size(2));
  of_maps.initial_states = identities.const_data_ptr<float>();
  of_maps.final_states = maps.data_ptr<float>();
  of_maps.states_stride_entry = maps.stride(0);
  const Work work_of_maps = divide(of_maps, in.q.options()), work = divide(params, in.q.options());
  launch_scan(dtype, of_maps, work_of_maps, /*states_only=*/true, /*follows_matrices=*/true, stream);
  DeltaRuleFoldParams fold = fold_of(maps, batch, in.v.size(3));
  if (operands.initial_states.defined()) fold.states = operands.initial_states.const_data_ptr<float>();
  fold.starts = segments.initial_states.data_ptr<float>();
  C10_CUDA_CHECK(launch_delta_rule_fold(fold, stream));
  launch_scan(dtype, params, work, /*states_only=*/false, /*follows_matrices=*/false, stream);
  operands.final_states.copy_(segments.final_states.unflatten(0, {batch, count}).select(1, count - 1));
}

// Queues the two kernels for keys of more than kStateColumns columns.
void launch_wide(const Inputs& in, const Operands& operands) {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  DeltaRuleFwdParams params = parameters_of(in, operands);
  const int64_t chunks = chunk_numbers(params.batch, params.seqlen, params.cu_seqlens != nullptr) * params.heads;
  const at::Tensor matrices = empty_tensor({chunks * kWideMatricesBytes}, in.q.options().dtype(at::kByte));
  params.matrices = matrices.data_ptr();
  const Work work = divide(params, in.q.options());
  const DeltaRuleBwdParams of_matrices = wide_matrices_parameters_of(params, params.matrices);
  const bool is_half = in.q.scalar_type() == at::kHalf;
  C10_CUDA_CHECK(is_half ? launch_delta_rule_wide_matrices<__half>(of_matrices, stream)
                         : launch_delta_rule_wide_matrices<__nv_bfloat16>(of_matrices, stream));
  C10_CUDA_CHECK(is_half ? launch_delta_rule_fwd_wide<__half>(params, work.schedule, stream)
                         : launch_delta_rule_fwd_wide<__nv_bfloat16>(params, work.schedule, stream));
}

// Queues forward's two kernels, or those of segments. `Params` are those of the scan.
template <typename Params>
void launch_chunked(const Inputs& in, const Operands& operands) {
  if (const int64_t chunks = chunks_of_segment(in, operands); chunks > 0) {
    const Operands segments = as_segments(operands, chunks);
    if (segments.q.defined()) return launch_segments<Params>(in, operands, segments);
  }
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  Params params;
  static_cast<DeltaRuleFwdParams&>(params) = parameters_of(in, operands);
  // It queues a fill of flags, which the scan reads before it waits for the first kernel: they come between.
  const Work work = divide(params, in.q.options());
  const auto memory = make_matrices(in, operands, params, stream);
  launch_scan(in.q.scalar_type(), params, work, /*states_only=*/false, /*follows_matrices=*/true, stream);
}

// Queues the two kernels with mma.sync: the matrices of all chunks, and the scan.
void launch_sm80(const Inputs& in, const Operands& operands) {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  auto params = common_parameters_of<DeltaRuleSm80Params>(in, operands);
  params.q = view_of(operands.q);
  params.k = view_of(operands.k);
  params.v = view_of(operands.v);
  params.out = view_of(operands.out);
  params.multiprocessors = cuda::multiprocessor_count(in.q.get_device());
  const WorkPartition partition = partition_states(params);
  const int64_t chunks = chunk_numbers(params.batch, params.seqlen, params.cu_seqlens != nullptr) * params.heads;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  TORCH_CHECK_VALUE(chunks <= kMost && kWarpgroups * partition.work_tiles <= kMost,
                    "delta_rule_scan: expected fewer than 2^31 chunks, and pairs of state tiles, of all heads, got ", chunks,
                    " and ", partition.work_tiles);
  const at::Tensor matrices =
      empty_tensor({chunks * sm80_matrices_bytes(in.q.element_size())}, in.q.options().dtype(at::kByte));
  params.matrices = matrices.data_ptr();
  const int available = sm80_shared_bytes(in);
  C10_CUDA_CHECK(cuda::visit_scalar_but_double(scalar_kind(in.q.scalar_type()), [&](auto scalar) {
    using Scalar = decltype(scalar);
    const cudaError_t error = launch_delta_rule_sm80_matrices<Scalar>(params, stream);
    return error == cudaSuccess ? launch_delta_rule_sm80_fwd<Scalar>(params, partition, available, stream) : error;
  }));
}

void launch(const Inputs& in, const Operands& operands) {
  if (fwd_kernels_for(in) == Kernels::kSm80) return launch_sm80(in, operands);
  if (in.has_gate_per_channel()) return launch_chunked<KdaFwdParams>(in, operands);
  if (is_wide(in.q.size(3))) return launch_wide(in, operands);
  launch_chunked<DeltaRuleFwdParams>(in, operands);
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

// Calls visit(outputs, i, states) with the states of all rows or packed sequences at the i-th of in.states_at; undefined states
// are zeros.
template <typename Visit>
FwdOutputs run_spans(const Inputs& in, const Visit& visit) {
  const FwdOutputs outputs = allocate_fwd(in);
  const Operands operands = prepare(in, outputs);
  // A span ends at each of the positions whose states are results.
  const int64_t seqlen = in.v.size(1), most_steps = steps_of_span(in);
  size_t stored = 0;
  for (int64_t first = 0;;) {
    for (; stored < in.states_at.size() && in.states_at[stored] == first; ++stored) {
      visit(outputs, stored, first > 0 ? operands.final_states.narrow(3, 0, in.q.size(3)) : or_undefined(in.initial_states));
    }
    if (first == seqlen) break;
    int64_t steps = std::min(most_steps, seqlen - first);
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
  return run_spans(in, [&](const FwdOutputs& outputs, size_t i, const at::Tensor& states) {
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
  const FwdOutputs outputs = run_spans(in, [&](const FwdOutputs&, size_t i, const at::Tensor& states) {
    if (states.defined()) result[i] = states.clone(at::MemoryFormat::Contiguous);
  });
  for (at::Tensor& states : result) {
    if (!states.defined()) states = at::zeros(outputs.final_states.sizes(), outputs.final_states.options());
  }
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
