// CUDA entry points of the selective scan: allocate, cut the work, launch on the current stream. Nothing waits for the device
// or is read from it, so that a call can be captured in a CUDA graph.

#ifdef SSM_KERNELS_WITH_CUDA

#include "selective_scan/selective_scan_cuda.h"

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "selective_scan/selective_scan_op.h"
#include "torch/checks.h"

namespace ssm_kernels::selective_scan {
namespace {

constexpr int64_t divide_up(int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor; }
constexpr int64_t round_up(int64_t n, int64_t multiple) { return divide_up(n, multiple) * multiple; }

template <typename Visitor>
void visit_scalar(ScalarKind kind, const Visitor& visit) {
  switch (kind) {
    case ScalarKind::kFloat:
      return visit(float{});
    case ScalarKind::kDouble:
      return visit(double{});
    case ScalarKind::kHalf:
      return visit(__half{});
    case ScalarKind::kBFloat16:
      return visit(__nv_bfloat16{});
  }
}

int64_t bytes_of(ScalarKind kind) {
  int64_t bytes = 0;
  visit_scalar(kind, [&](auto scalar) { bytes = sizeof(scalar); });
  return bytes;
}

// What the cut depends on.
struct Device {
  int64_t multiprocessors, shared_bytes, shared_bytes_per_block;
  bool has_clusters;

  explicit Device(c10::DeviceIndex index) {
    const cudaDeviceProp& properties = *at::cuda::getDeviceProperties(index);
    multiprocessors = properties.multiProcessorCount;
    shared_bytes = static_cast<int64_t>(properties.sharedMemPerMultiprocessor);
    shared_bytes_per_block = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
    has_clusters = properties.major >= 9;
  }
};

// Whether vectors that start at multiples of their size within each of these strides are aligned in memory.
bool is_aligned(const void* data, int64_t bytes, std::initializer_list<int64_t> strides) {
  const auto aligned = [](int64_t offset) { return offset % kVectorBytes == 0; };
  return aligned(reinterpret_cast<int64_t>(data)) &&
         std::all_of(strides.begin(), strides.end(), [&](int64_t stride) { return aligned(stride * bytes); });
}

Access access_of(const SequenceView& view, const SelectiveScanParams& p, const ScanPlan& plan, int64_t bytes) {
  if (view.stride_step == 1 && is_aligned(view.data, bytes, {view.stride_batch, view.stride_dim})) return Access::kAlongSteps;
  // A tile's first channel must be a multiple of the vector's size too.
  const bool spans_fit = plan.span == p.dim || plan.span * bytes % kVectorBytes == 0;
  if (view.stride_dim == 1 && spans_fit && plan.channels() * bytes % kVectorBytes == 0 &&
      is_aligned(view.data, bytes, {view.stride_batch, view.stride_step})) {
    return Access::kAlongChannels;
  }
  return Access::kSingly;
}

Access access_of(const MatrixView& view, const SelectiveScanParams& p, const ScanPlan& plan, int64_t bytes) {
  if (view.stride_step == 1 && is_aligned(view.data, bytes, {view.stride_batch, view.stride_channel, view.stride_state})) {
    return Access::kAlongSteps;
  }
  if (view.stride_state == 1 && p.dstate * bytes % kVectorBytes == 0 && (bytes << plan.log2_slice) >= kVectorBytes &&
      is_aligned(view.data, bytes, {view.stride_batch, view.stride_channel, view.stride_step})) {
    return Access::kAlongChannels;
  }
  return Access::kSingly;
}

void set_accesses(ScanPlan& plan, const SelectiveScanParams& p, int64_t bytes) {
  plan.u = access_of(p.u, p, plan, bytes);
  plan.delta = access_of(p.delta, p, plan, bytes);
  plan.z = access_of(p.z, p, plan, bytes);
  plan.B = access_of(p.B, p, plan, bytes);
  plan.C = access_of(p.C, p, plan, bytes);
}

// Cuts the channels, given the warps and lanes of a block.
void set_tiles(ScanPlan& plan, const SelectiveScanParams& p) {
  plan.span = std::gcd(p.dim / p.B.groups, p.dim / p.C.groups);
  plan.tiles_per_span = p.dim == 0 ? 0 : round_up(divide_up(plan.span, plan.channels()), plan.cluster);
  plan.tiles = p.dim == 0 ? 0 : p.dim / plan.span * plan.tiles_per_span;
}

// Cuts time into at most `segments` segments of whole tiles.
void set_segments(ScanPlan& plan, const SelectiveScanParams& p, int64_t segments, int64_t tile_steps) {
  const int64_t tiles = divide_up(p.seqlen, tile_steps);
  const int64_t tiles_per_segment = divide_up(std::max<int64_t>(1, tiles), std::max<int64_t>(1, segments));
  plan.segments = std::max<int64_t>(1, divide_up(tiles, tiles_per_segment));
  plan.segment_steps = tiles_per_segment * tile_steps;
}

void check_grid(const SelectiveScanParams& p, const ScanPlan& plan) {
  TORCH_CHECK(p.batch * plan.segments * plan.tiles <= std::numeric_limits<int32_t>::max(),
              "selective_scan: expected batch and dim of fewer than 2^31 blocks of channels, got batch = ", p.batch,
              ", dim = ", p.dim);
}

constexpr int64_t kResidentWarps = 16;  // of a multiprocessor, by the registers that the kernels take

ScanPlan plan_fwd(const SelectiveScanFwdParams& p, ScalarKind kind, const Device& device) {
  const int64_t steps = kind == ScalarKind::kDouble ? kFwdSteps<double> : kFwdSteps<float>;
  constexpr int kMinLog2TimeLanes = 3, kMaxLog2TimeLanes = 5, kMaxLog2Warps = 3;
  static_assert(1 << kMaxLog2Warps == kFwdMaxWarps, "a block's largest size is fixed when compiling");
  ScanPlan plan;
  plan.log2_time_lanes = kMinLog2TimeLanes;
  // Work for the device's warps comes first from more lanes per channel, as long as there are steps for them.
  const auto warps = [&] { return p.batch * divide_up(p.dim << plan.log2_time_lanes, kWarpSize); };
  while (plan.log2_time_lanes < kMaxLog2TimeLanes && warps() < device.multiprocessors * kResidentWarps * 3 / 4 &&
         p.seqlen > steps << plan.log2_time_lanes) {
    ++plan.log2_time_lanes;
  }
  plan.log2_warps = kMaxLog2Warps;
  while (plan.log2_warps > 0 && warps() >> plan.log2_warps < device.multiprocessors * 2) --plan.log2_warps;

  // Large states crowd out other blocks of the multiprocessor: then fewer states are staged at a time, or fewer channels taken.
  plan.log2_slice = 4;
  const auto shared_bytes = [&] {
    size_t bytes = 0;
    visit_scalar(kind, [&](auto scalar) { bytes = fwd_shared_bytes<decltype(scalar)>(p, plan); });
    return static_cast<int64_t>(bytes);
  };
  const auto wanted = [&] {
    const int64_t blocks = kind == ScalarKind::kDouble ? 1 : kResidentWarps >> plan.log2_warps;
    return std::min(device.shared_bytes / blocks - 1024, device.shared_bytes_per_block);
  };
  while (plan.log2_slice > 3 && shared_bytes() > wanted()) --plan.log2_slice;
  while (plan.log2_warps > 0 && shared_bytes() > device.shared_bytes_per_block) --plan.log2_warps;

  set_tiles(plan, p);
  const int64_t tile_steps = steps << plan.log2_time_lanes, resident = device.multiprocessors * kResidentWarps;
  int64_t segments = 1;
  // The carry pass takes as long as a whole one: a few segments gain nothing.
  if (warps() > 0 && warps() * 8 < resident) segments = std::min(resident / warps(), divide_up(p.seqlen, 4 * tile_steps));
  set_segments(plan, p, segments >= 4 ? segments : 1, tile_steps);
  const int64_t bytes = bytes_of(kind);
  set_accesses(plan, p, bytes);
  plan.out = access_of(p.out, p, plan, bytes);
  return plan;
}

ScanPlan plan_bwd(const SelectiveScanBwdParams& p, ScalarKind kind, const Device& device) {
  ScanPlan plan;
  set_tiles(plan, p);
  if (device.has_clusters) {
    const int64_t tiles = plan.tiles_per_span;
    for (int cluster = kMaxClusterBlocks; cluster > 1; cluster /= 2) {
      // Tiles that only fill up the last cluster may be few.
      if (tiles >= cluster && round_up(tiles, cluster) * 8 <= tiles * 9) {
        plan.cluster = cluster;
        break;
      }
    }
    set_tiles(plan, p);
  }
  const int64_t blocks = p.batch * plan.tiles;
  const int64_t resident = device.multiprocessors * kResidentWarps >> kBwdLog2Warps;
  int64_t segments = 1;
  if (blocks > 0 && blocks * 2 < resident) segments = std::min(resident / blocks, divide_up(p.seqlen, 4 * kChunkLength));
  set_segments(plan, p, segments, kChunkLength);
  const int64_t bytes = bytes_of(kind);
  set_accesses(plan, p, bytes);
  plan.grad_out = access_of(p.grad_out, p, plan, bytes);
  plan.grad_u = access_of(p.grad_u, p, plan, bytes);
  plan.grad_delta = access_of(p.grad_delta, p, plan, bytes);
  plan.grad_z = access_of(p.grad_z, p, plan, bytes);
  return plan;
}

// One allocation, handed out in pieces.
class Workspace {
 public:
  // Reserves memory for `count` values; its address is in `*place` once allocated.
  void reserve(void** place, int64_t count) {
    if (count == 0) return;
    places_.emplace_back(place, count_);
    count_ += round_up(count, kVectorBytes);
  }

  void allocate(const at::TensorOptions& options) {
    if (count_ == 0) return;
    memory_ = at::empty({count_}, options);
    for (const auto& [place, first] : places_) {
      *place = static_cast<char*>(memory_.data_ptr()) + first * static_cast<int64_t>(memory_.element_size());
    }
  }

 private:
  at::Tensor memory_;
  std::vector<std::pair<void**, int64_t>> places_;
  int64_t count_ = 0;
};

// What segments hand to each other.
void reserve_carries(Workspace& workspace, ScanPlan& plan, const SelectiveScanParams& p) {
  if (plan.segments == 1) return;
  const int64_t count = p.batch * plan.segments * p.dim * p.dstate;
  workspace.reserve(&plan.decay, count);
  workspace.reserve(&plan.carry, count);
}

// Calls launch(plan) for the carry pass, if there is one, and for the whole one.
template <typename Launch>
void launch_passes(ScanPlan plan, const Launch& launch) {
  if (plan.tiles == 0) return;
  if (plan.segments > 1) {
    plan.carry_pass = true;
    C10_CUDA_CHECK(launch(plan));
    plan.carry_pass = false;
  }
  C10_CUDA_CHECK(launch(plan));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> fwd_cuda(const at::Tensor& u, const at::Tensor& delta, const at::Tensor& A,
                                                        const at::Tensor& B, const at::Tensor& C, const OptionalTensor& D,
                                                        const OptionalTensor& z, const OptionalTensor& delta_bias,
                                                        const OptionalTensor& initial_state, std::string_view discretization,
                                                        bool delta_softplus, bool save_chunk_states) {
  const Inputs in{u, delta, A, B, C, D, z, delta_bias, initial_state};
  const Discretization method = check_inputs(in, discretization);
  const c10::cuda::CUDAGuard guard(u.device());
  const FwdOutputs outputs = allocate_fwd(in, save_chunk_states);
  const SelectiveScanFwdParams params = make_fwd_params(in, method, delta_softplus, outputs);
  if (params.batch == 0 || params.dim == 0) return {outputs.out, outputs.last_state, outputs.chunk_states};

  const ScalarKind kind = scalar_kind(u.scalar_type());
  ScanPlan plan = plan_fwd(params, kind, Device(u.device().index()));
  check_grid(params, plan);
  Workspace workspace;
  reserve_carries(workspace, plan, params);
  workspace.allocate(A.options());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  visit_scalar(kind, [&](auto scalar) {
    visit_discretization(method, [&](auto rule) {
      launch_passes(plan,
                    [&](const ScanPlan& pass) { return launch_fwd<decltype(scalar), decltype(rule)>(params, pass, stream); });
    });
  });
  return {outputs.out, outputs.last_state, outputs.chunk_states};
}

GradTuple bwd_cuda(const OptionalTensor& grad_out, const OptionalTensor& grad_last_state, const at::Tensor& u,
                   const at::Tensor& delta, const at::Tensor& A, const at::Tensor& B, const at::Tensor& C,
                   const OptionalTensor& D, const OptionalTensor& z, const OptionalTensor& delta_bias,
                   const at::Tensor& chunk_states, bool has_initial_state, std::string_view discretization,
                   bool delta_softplus) {
  const OptionalTensor no_initial_state;  // it is the first of chunk_states
  const Inputs in{u, delta, A, B, C, D, z, delta_bias, no_initial_state};
  const Discretization method = check_inputs(in, discretization);
  const c10::cuda::CUDAGuard guard(u.device());
  const GradTensors grads = allocate_bwd(in, grad_out, grad_last_state, chunk_states, has_initial_state);
  const at::Tensor states = chunk_states.contiguous();
  const SelectiveScanBwdParams params = make_bwd_params(in, method, delta_softplus, grad_out, grad_last_state, states, grads);

  const ScalarKind kind = scalar_kind(u.scalar_type());
  ScanPlan plan = plan_bwd(params, kind, Device(u.device().index()));
  check_grid(params, plan);
  PartialSums partial_sums;
  partial_sums.padded_steps = round_up(params.seqlen, kChunkLength);
  Workspace workspace;
  reserve_carries(workspace, plan, params);
  const int64_t rows = params.batch * plan.segments, states_per_row = params.dim * params.dstate;
  const int64_t matrix = params.batch * (plan.tiles / plan.cluster) * params.dstate * partial_sums.padded_steps;
  workspace.reserve(params.B.per_step ? &partial_sums.grad_B : &partial_sums.grad_constant_B,
                    params.B.per_step ? matrix : rows * states_per_row);
  workspace.reserve(params.C.per_step ? &partial_sums.grad_C : &partial_sums.grad_constant_C,
                    params.C.per_step ? matrix : rows * states_per_row);
  workspace.reserve(&partial_sums.grad_A, rows * states_per_row);
  if (params.D.data != nullptr) workspace.reserve(&partial_sums.grad_D, rows * params.dim);
  if (params.delta_bias.data != nullptr) workspace.reserve(&partial_sums.grad_delta_bias, rows * params.dim);
  workspace.allocate(A.options());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  visit_scalar(kind, [&](auto scalar) {
    using Scalar = decltype(scalar);
    visit_discretization(method, [&](auto rule) {
      if (params.batch == 0) return;
      launch_passes(
          plan, [&](const ScanPlan& pass) { return launch_bwd<Scalar, decltype(rule)>(params, pass, partial_sums, stream); });
    });
    C10_CUDA_CHECK(launch_bwd_finish<Scalar>(params, plan, partial_sums, stream));
  });
  return as_tuple(grads);
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CUDA, m) {
  m.impl("_selective_scan_fwd", &fwd_cuda);
  m.impl("_selective_scan_bwd", &bwd_cuda);
}

}  // namespace ssm_kernels::selective_scan

#endif
