#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <limits>

#include "common/integers.h"
#include "common/limits.h"
#include "cuda/device.h"
#include "cuda/scalar_types.h"
#include "ssd/cuda/host_launch.h"
#include "torch/allocation.h"
#include "torch/checks.h"
#include "torch/debug_options.h"

namespace ssm_kernels::ssd {
namespace {

// Chunks of each block's range, such that all blocks end at about the same time. Compares two choices in units of a chunk's
// time: ranges of whole work tiles, whose last round may leave blocks idle, and equal ranges, which split work tiles. A split
// costs the load of a state and, if a work tile is longer than a range, the summary kernel and a fold for each earlier segment.
int64_t choose_range(const WorkPartition& partition, int64_t multiprocessors) {
  constexpr double kSummary = 0.3, kBeginInside = 1, kLaunch = 1, kFold = 0.4;
  const int64_t chunks = partition.chunks;
  const int64_t whole_tiles = ceil_div(partition.work_tiles, multiprocessors) * chunks;
  const int64_t equal = ceil_div(partition.work_tiles * chunks, multiprocessors);
  double time = static_cast<double>(equal) + kBeginInside;
  if (chunks > equal) {
    time += kSummary * static_cast<double>(equal) + kLaunch + kFold * static_cast<double>(ceil_div(chunks, equal));
  }
  return time < static_cast<double>(whole_tiles) ? equal : whole_tiles;
}

// A call: the parameters of its kernels, and the tensors that these point to.
struct ForwardCall {
  SsdRotatedFwdParams params;  // without a rotation, gains on the diagonal, or given gates, the kernels take a base of it
  bool has_given_gates = false, has_diagonal_gain = false;
  Schedule schedule;
  at::Tensor gate, states, flags, chunk_starts;
  at::Tensor angles, sizes, B_bias, C_bias;
  bool is_short = false;
  Products products = Products::kMma;
};

// Divides the work among blocks, and allocates their workspace.
void make_schedule(const at::TensorOptions& options, ForwardCall& call) {
  const SsdFwdParams& params = call.params;
  Schedule& schedule = call.schedule;
  const int64_t multiprocessors = cuda::multiprocessor_count(options.device().index());
  const bool is_packed = params.cu_seqlens != nullptr;
  if (is_packed) {
    const int64_t most = max_packed_chunks(params.seqlen, params.batch) * schedule.work_tiles_per_entry;
    check_count(most, "chunks");
    schedule.blocks = std::min(multiprocessors, most);
    schedule.splits_work_tiles = schedule.work_tiles_per_entry < schedule.blocks;
  } else {
    check_count(schedule.work_tiles * schedule.chunks, "chunks");
    schedule.length = choose_range(schedule, multiprocessors);
    schedule.blocks = ceil_div(schedule.work_tiles * schedule.chunks, schedule.length);
    schedule.splits_work_tiles = schedule.chunks > schedule.length;
    if (schedule.length % schedule.chunks == 0) return;
  }
  const int64_t cuts = schedule.blocks * kWarpgroups, elements = kStateRows * tile_columns(params.dstate);
  call.states = empty_tensor({cuts, elements + 1}, options.dtype(at::kFloat));
  schedule.states = call.states.data_ptr<float>();
  schedule.maps = schedule.states + cuts * elements;
  const at::TensorOptions of_ints = options.dtype(at::kInt);
  if (is_packed) {
    call.chunk_starts = empty_tensor({params.batch + 1}, of_ints);
    schedule.chunk_starts = call.chunk_starts.data_ptr<int>();
  }
  if (is_packed || !schedule.splits_work_tiles) {
    // For packed sequences, the kernel of chunk_starts.cuh clears the flags.
    call.flags = is_packed ? empty_tensor({cuts + 1}, of_ints) : at::zeros({cuts + 1}, of_ints);
    schedule.ready = call.flags.data_ptr<int>();
    schedule.ticket_counter = schedule.ready + cuts;
  }
}

// Makes the descriptor of TMA copies of tiles of so many steps.
bool describe_tiles(const at::Tensor& rows, uint32_t steps, cuda::TmaDescriptor& descriptor) {
  // TMA takes 32-bit coordinates, and a tile's first step is one.
  if (rows.size(1) > std::numeric_limits<int32_t>::max() - kChunk) return false;
  if (rows.numel() == 0) return true;
  const auto size = [&](int64_t dim) { return static_cast<uint64_t>(rows.size(dim)); };
  return cuda::make_tma_descriptor(descriptor, const_cast<void*>(rows.const_data_ptr()), {size(3), size(2), size(1), size(0)},
                                   {rows.stride(2), rows.stride(1), rows.stride(0)}, {kStateRows, 1, steps, 1}) == cudaSuccess;
}

// Fills the parameters of the rotation, of a call whose other parameters are there.
void prepare_rotation(const KernelInputs& inputs, const Rotation& rotation, ForwardCall& call) {
  RowRotation& params = call.params.rotation;
  const bool are_fp32 = rotation.angles.scalar_type() == at::kFloat;
  call.angles = are_fp32 ? rotation.angles : rotation.angles.to(inputs.x.scalar_type());
  const int64_t bytes = 4 * call.angles.element_size();
  bool are_vectors = call.angles.stride(-1) == 1 && reinterpret_cast<uintptr_t>(call.angles.const_data_ptr()) % bytes == 0;
  for (int64_t dim = 0; dim < call.angles.dim() - 1; ++dim) are_vectors &= call.angles.stride(dim) % 4 == 0;
  if (!are_vectors) call.angles = call.angles.contiguous();
  call.sizes = rotation.dt.to(at::kFloat).contiguous();
  params.angles.data = const_cast<void*>(call.angles.const_data_ptr());
  params.angles.stride_batch = call.angles.stride(0);
  params.angles.stride_step = call.angles.stride(1);
  params.angles.stride_head = call.angles.dim() == 4 ? call.angles.stride(2) : 0;
  params.are_angles_fp32 = are_fp32;
  params.angles_count = static_cast<int>(call.angles.size(-1));
  params.is_pairs = rotation.is_pairs;
  params.phases = rotation.phases.const_data_ptr<float>();
  params.dt = call.sizes.const_data_ptr<float>();
  const auto bias_of = [](const OptionalTensor& bias, at::Tensor& kept) -> const float* {
    if (!is_present(bias)) return nullptr;
    kept = bias->contiguous();
    return kept.const_data_ptr<float>();
  };
  params.B_bias = bias_of(rotation.B_bias, call.B_bias);
  params.C_bias = bias_of(rotation.C_bias, call.C_bias);
  params.final_k = rotation.final_k.data_ptr<float>();
  params.final_angle = rotation.final_angle.data_ptr<float>();
  const bool are_described = describe_tiles(inputs.x, kRotatedTileSteps, call.params.x_descriptor) &&
                             (!call.gate.defined() || describe_tiles(call.gate, kChunk, call.params.z_descriptor));
  TORCH_INTERNAL_ASSERT(are_described, "takes_rotation() names calls with tiles");
}

// Whether the short scan (short_scan_fwd.cuh) takes a call with dt and A.
bool is_short(const at::Tensor& out, const SsdFwdParams& params) {
  return out.scalar_type() == at::kFloat && params.cu_seqlens == nullptr && params.seqlen > 0 && params.seqlen <= kShortSteps &&
         short_blocks(params) <= std::numeric_limits<int32_t>::max();
}

ForwardCall prepare(const KernelInputs& inputs, PendingCopies& copies, const OptionalTensor& z, const at::Tensor& out,
                    const at::Tensor& final_states, const ChunkStates& chunk_states = {}) {
  ForwardCall call;
  inputs.fill(call.params);
  inputs.fill(call.params.gates);
  call.params.diagonal_gain_offset = inputs.diagonal_gain_offset();
  call.params.rank_shift = inputs.rank_shift();
  call.has_given_gates = inputs.has_given_gates();
  call.has_diagonal_gain = inputs.has_diagonal_gain();
  static_cast<WorkPartition&>(call.schedule) = inputs.partition();
  if (call.schedule.work_tiles == 0) return call;
  if (is_present(z)) {
    call.gate = copies.as_rows(*z);
    call.params.z = const_rows_view(call.gate, inputs.is_reverse());
  }
  call.params.out = rows_view(out, inputs.is_reverse());
  call.params.final_states = final_states.data_ptr<float>() + inputs.offset_of_first_states();
  call.is_short = !call.has_given_gates && is_short(out, call.params);
  if (call.is_short) return call;
  if (const at::Tensor& states = chunk_states.states; states.defined()) {
    call.params.chunk_states = states.data_ptr<float>();
    call.params.chunk_states_every = static_cast<int>(chunk_states.every);
    call.params.chunk_states_count = static_cast<int>(states.size(1));
    call.params.chunk_states_row = states.stride(0) / states.stride(1);
  }
  make_schedule(inputs.x.options(), call);
  call.products = choose_products(out, inputs.is_reverse());
  if (call.products == Products::kWgmma && !describe_tiles(out, kChunk, call.params.out_descriptor)) {
    call.products = Products::kMma;
  }
  if (inputs.rotation() != nullptr) {
    TORCH_INTERNAL_ASSERT(call.products == Products::kWgmma && !call.schedule.splits_work_tiles);
    prepare_rotation(inputs, *inputs.rotation(), call);
  }
  return call;
}

}  // namespace

bool have_kernels_for(const Inputs& in, bool is_backward) {
  const at::ScalarType dtype = in.x.scalar_type();
  if (dtype == at::kDouble) return false;
  const bool has_diagonal_gain = is_present(in.diagonal_gain);
  if (is_backward && (in.x.numel() == 0 || in.B.numel() == 0)) return false;
  const bool is_fp32 = dtype == at::kFloat;
  const int available = max_shared_bytes(in.x);
  static_assert(kMaxKernelDstate >= kMaxDstate, "dstate is checked before");
  // With a gate, backward recomputes y by the forward kernel on all columns; without one, it takes backward_columns at a time.
  int64_t columns = in.B.size(3);
  if (is_backward && is_fp32 && !is_present(in.z)) columns = std::min(columns, backward_columns(is_fp32, available));
  return available >= least_shared_bytes(columns, is_fp32, /*is_backward=*/false, has_diagonal_gain);
}

// Whether TMA tiles can be described, once rows begin at multiples of 16 bytes. An expanded axis has no step from one entry to
// the next; the step from a head to the next is the length of a row if there is one head.
static bool has_tiles(const at::Tensor& rows) {
  for (int64_t axis = 0; axis < 3; ++axis) {
    if (rows.size(axis) > 1 && rows.stride(axis) == 0) return false;
  }
  return rows.size(2) > 1 || rows.size(3) * rows.element_size() % 16 == 0;
}

bool takes_rotation(const Inputs& in, int64_t angles) {
  const int64_t dstate = in.B.size(3);
  if (!in.x.is_cuda() || in.x.element_size() != 2 || !use_wgmma(in.x, in.reverse)) return false;
  if (max_shared_bytes(in.x) < kSm90SharedBytes) return false;
  if ((dstate != 64 && dstate != 128) || angles % 4 != 0 || is_present(in.seq_idx) || is_present(in.cu_seqlens)) return false;
  if (in.x.numel() == 0 || in.x.size(1) > std::numeric_limits<int32_t>::max() - kChunk) return false;
  if (!has_tiles(in.x) || (is_present(in.z) && !has_tiles(*in.z))) return false;
  const WorkPartition partition =
      partition_work({in.x.size(0), in.x.size(1), in.x.size(2), in.B.size(2), in.x.size(3), dstate});
  const int64_t multiprocessors = cuda::multiprocessor_count(in.x.device().index());
  return partition.tiles_per_group >= kWarpgroups && choose_range(partition, multiprocessors) >= partition.chunks;
}

bool use_wgmma(const at::Tensor& x, bool reverse) {
  return !reverse && x.scalar_type() != at::kFloat && debug_option(DebugOption::kSsdMma) == 0 && has_wgmma_kernels();
}

Products choose_products(const at::Tensor& x, bool reverse) {
  if (use_wgmma(x, reverse)) return Products::kWgmma;
  if (x.scalar_type() != at::kFloat || at::NoTF32Guard::should_disable_tf32()) return Products::kMma;
  const bool allows_tf32 =
      at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) == at::Float32Precision::TF32;
  return allows_tf32 ? Products::kTf32 : Products::kMma;
}

void launch_forward(const KernelInputs& inputs, PendingCopies& copies, const OptionalTensor& z, const at::Tensor& out,
                    const at::Tensor& final_states, const ChunkStates& chunk_states) {
  const ForwardCall call = prepare(inputs, copies, z, out, final_states, chunk_states);
  if (call.schedule.work_tiles == 0) return;
  copies.launch();
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  if (call.is_short) {
    C10_CUDA_CHECK(launch_ssd_short_scan_fwd(call.params, stream));
    return;
  }
  const int max_shared_bytes = ssd::max_shared_bytes(out);
  if (inputs.rotation() != nullptr) {
    const auto launch = out.scalar_type() == at::kHalf ? launch_ssd_rotated_fwd<__half> : launch_ssd_rotated_fwd<__nv_bfloat16>;
    C10_CUDA_CHECK(launch(call.params, call.schedule, max_shared_bytes, stream));
    return;
  }
  C10_CUDA_CHECK(cuda::visit_scalar_but_double(scalar_kind(out.scalar_type()), [&](auto scalar) {
    const auto launch = [&](const auto& params) {
      return launch_ssd_fwd<decltype(scalar)>(params, call.schedule, call.products, max_shared_bytes, stream);
    };
    if (call.has_diagonal_gain) return launch(static_cast<const SsdDiagonalFwdParams&>(call.params));
    return call.has_given_gates ? launch(static_cast<const SsdLogFwdParams&>(call.params))
                                : launch(static_cast<const SsdFwdParams&>(call.params));
  }));
}

std::string describe_kernel(const at::Tensor& x, Products products) {
  const char* const name = products == Products::kTf32 ? "TF32" : x.scalar_type() == at::kFloat ? "3xTF32" : "16_bit";
  return c10::str("kernel=", products == Products::kWgmma ? "sm90" : "sm80", " products=", name, " chunk=", kChunk);
}

std::string describe_forward(const Inputs& in, Discretization method) {
  PendingCopies copies;
  const KernelInputs inputs(in, method, copies);
  const at::Tensor out = empty_tensor_like(in.x);
  const ForwardCall call = prepare(inputs, copies, in.z, result_as_rows(out, has_vectors(out)).written, inputs.empty_states());
  if (call.is_short) return "kernel=short";
  return c10::str(describe_kernel(in.x, call.products), " blocks=", call.schedule.blocks,
                  " splits_work_tiles=", call.schedule.splits_work_tiles);
}

}  // namespace ssm_kernels::ssd

#endif
