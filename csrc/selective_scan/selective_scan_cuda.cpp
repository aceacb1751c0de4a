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
#include <initializer_list>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

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
  int64_t multiprocessors, shared_bytes_per_block;

  explicit Device(c10::DeviceIndex index) {
    const cudaDeviceProp& properties = *at::cuda::getDeviceProperties(index);
    multiprocessors = properties.multiProcessorCount;
    shared_bytes_per_block = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
  }
};

// A tile's size, in channels, steps and bytes of a scalar.
struct Tiling {
  int64_t channels, steps, scalar_bytes;
};

// Whether vectors that start at multiples of their size within each of these strides are aligned in memory.
bool is_aligned(const void* data, int64_t bytes, std::initializer_list<int64_t> strides) {
  const auto aligned = [](int64_t offset) { return offset % kVectorBytes == 0; };
  return aligned(reinterpret_cast<int64_t>(data)) &&
         std::all_of(strides.begin(), strides.end(), [&](int64_t stride) { return aligned(stride * bytes); });
}

Access access_of(const SequenceView& view, const SelectiveScanParams& p, const ScanPlan& plan, const Tiling& tiling) {
  const int64_t bytes = tiling.scalar_bytes;
  if (view.stride_step == 1 && is_aligned(view.data, bytes, {view.stride_batch, view.stride_dim})) return Access::kAlongSteps;
  // A tile's first channel must be a multiple of the vector's size too.
  const bool spans_fit = plan.span == p.dim || plan.span * bytes % kVectorBytes == 0;
  if (view.stride_dim == 1 && spans_fit && plan.block_channels * bytes % kVectorBytes == 0 &&
      is_aligned(view.data, bytes, {view.stride_batch, view.stride_step})) {
    return Access::kAlongChannels;
  }
  return Access::kSingly;
}

Access access_of(const MatrixView& view, const SelectiveScanParams& p, const Tiling& tiling) {
  const int64_t bytes = tiling.scalar_bytes;
  if (view.stride_step == 1 && is_aligned(view.data, bytes, {view.stride_batch, view.stride_channel, view.stride_state})) {
    return Access::kAlongSteps;
  }
  if (view.stride_state == 1 && p.dstate * bytes % kVectorBytes == 0 &&
      is_aligned(view.data, bytes, {view.stride_batch, view.stride_channel, view.stride_step})) {
    return Access::kAlongChannels;
  }
  return Access::kSingly;
}

void set_accesses(ScanPlan& plan, const SelectiveScanParams& p, const Tiling& tiling) {
  plan.u = access_of(p.u, p, plan, tiling);
  plan.delta = access_of(p.delta, p, plan, tiling);
  plan.z = access_of(p.z, p, plan, tiling);
  plan.B = access_of(p.B, p, tiling);
  plan.C = access_of(p.C, p, tiling);
}

// Cuts the channels: a tile's to a block, or fewer where their states do not fit into its shared memory, in the carry pass
// either. shared_bytes(plan) is what a block of that plan takes.
template <typename SharedBytes>
void set_tiles(ScanPlan& plan, const SelectiveScanParams& p, const Tiling& tiling, const Device& device,
               const SharedBytes& shared_bytes) {
  plan.dstate = cuda::Divisor(p.dstate);
  plan.block_channels = static_cast<int>(tiling.channels);
  const auto fits = [&](bool carry_pass) {
    ScanPlan pass = plan;
    pass.carry_pass = carry_pass;
    return shared_bytes(pass) <= device.shared_bytes_per_block;
  };
  while (plan.block_channels > 1 && !(fits(false) && fits(true))) plan.block_channels /= 2;
  plan.span = std::gcd(p.dim / p.B.groups, p.dim / p.C.groups);
  plan.tiles_per_span = divide_up(plan.span, plan.block_channels);
  plan.tiles = p.dim / plan.span * plan.tiles_per_span;
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

template <FwdCut cut>
Tiling fwd_tiling(ScalarKind kind) {
  return {FwdSizes<cut>::kTileChannels, FwdSizes<cut>::tile_steps(kind == ScalarKind::kDouble), bytes_of(kind)};
}

ScanPlan plan_fwd(const SelectiveScanFwdParams& p, ScalarKind kind, const Device& device) {
  const auto warps = [&](auto sizes) { return p.batch * divide_up(p.dim << decltype(sizes)::kLog2TimeLanes, kWarpSize); };
  const int64_t many = warps(FwdSizes<FwdCut::kManyChannels>{}), few = warps(FwdSizes<FwdCut::kFewChannels>{});
  const int64_t resident = device.multiprocessors * kResidentWarps;
  const Tiling many_tiling = fwd_tiling<FwdCut::kManyChannels>(kind), few_tiling = fwd_tiling<FwdCut::kFewChannels>(kind);
  const auto shared_bytes = [&](const ScanPlan& plan) {
    size_t bytes = 0;
    visit_scalar(kind, [&](auto scalar) { bytes = fwd_shared_bytes<decltype(scalar)>(p, plan); });
    return static_cast<int64_t>(bytes);
  };

  // Many channels need no more lanes each.
  ScanPlan plan;
  const bool fills = many >= resident * 3 / 8 || p.seqlen <= many_tiling.steps;
  const bool has_constants = !p.B.per_step || !p.C.per_step;
  plan.cut = fills && !has_constants ? FwdCut::kManyChannels : FwdCut::kFewChannels;
  set_tiles(plan, p, plan.cut == FwdCut::kManyChannels ? many_tiling : few_tiling, device, shared_bytes);
  if (plan.block_channels < many_tiling.channels && plan.cut == FwdCut::kManyChannels) {
    plan.cut = FwdCut::kFewChannels;
    set_tiles(plan, p, few_tiling, device, shared_bytes);
  }
  const Tiling tiling = plan.cut == FwdCut::kManyChannels ? many_tiling : few_tiling;
  // The carry pass takes as long as a whole one: a few segments gain nothing.
  int64_t segments = 1;
  if (plan.cut == FwdCut::kFewChannels && few > 0 && few * 8 < resident) {
    segments = std::min(resident / few, divide_up(p.seqlen, 4 * tiling.steps));
  }
  set_segments(plan, p, segments >= 4 ? segments : 1, tiling.steps);
  set_accesses(plan, p, tiling);
  plan.out = access_of(p.out, p, plan, tiling);
  return plan;
}

ScanPlan plan_bwd(const SelectiveScanBwdParams& p, ScalarKind kind, const Device& device) {
  const Tiling tiling{BwdSizes::kTileChannels, kChunkLength, bytes_of(kind)};
  ScanPlan plan;
  set_tiles(plan, p, tiling, device, [&](const ScanPlan& tried) {
    size_t bytes = 0;
    visit_scalar(kind, [&](auto scalar) { bytes = bwd_shared_bytes<decltype(scalar)>(p, tried); });
    return static_cast<int64_t>(bytes);
  });
  const int64_t blocks = p.batch * plan.tiles;
  const int64_t resident = device.multiprocessors * kResidentWarps >> BwdSizes::kLog2Warps;
  int64_t segments = 1;
  if (blocks > 0 && blocks * 2 < resident) segments = std::min(resident / blocks, divide_up(p.seqlen, 4 * kChunkLength));
  set_segments(plan, p, segments, tiling.steps);
  set_accesses(plan, p, tiling);
  plan.grad_out = access_of(p.grad_out, p, plan, tiling);
  plan.grad_u = access_of(p.grad_u, p, plan, tiling);
  plan.grad_delta = access_of(p.grad_delta, p, plan, tiling);
  plan.grad_z = access_of(p.grad_z, p, plan, tiling);
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

  // Of no channels: sums of nothing.
  if (params.dim == 0) {
    grads[kGradB].zero_();
    grads[kGradC].zero_();
    return as_tuple(grads);
  }
  const ScalarKind kind = scalar_kind(u.scalar_type());
  ScanPlan plan = plan_bwd(params, kind, Device(u.device().index()));
  check_grid(params, plan);
  PartialSums partial_sums;
  partial_sums.padded_steps = round_up(params.seqlen, kChunkLength);
  Workspace workspace;
  reserve_carries(workspace, plan, params);
  const int64_t rows = params.batch * plan.segments, states_per_row = params.dim * params.dstate;
  const auto reserve_matrix = [&](const MatrixView& matrix, void** per_step, void** constant) {
    if (!matrix.per_step) {
      workspace.reserve(constant, rows * states_per_row);
    } else if (plan.tiles != matrix.groups) {
      workspace.reserve(per_step, params.batch * plan.tiles * params.dstate * partial_sums.padded_steps);
    }
  };
  reserve_matrix(params.B, &partial_sums.grad_B, &partial_sums.grad_constant_B);
  reserve_matrix(params.C, &partial_sums.grad_C, &partial_sums.grad_constant_C);
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
