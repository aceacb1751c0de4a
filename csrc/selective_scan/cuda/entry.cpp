// CUDA entry points of the selective scan: allocate, cut the work, launch on the current stream. Nothing waits for the device
// or is read from it, so that a call can be captured in a CUDA graph.

#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "selective_scan/cuda/plan.h"
#include "selective_scan/selective_scan_op.h"
#include "torch/checks.h"
#include "torch/debug_options.h"

namespace ssm_kernels::selective_scan {
namespace {

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

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

DeviceLimits limits_of(const at::Tensor& tensor) {
  const cudaDeviceProp& properties = *at::cuda::getDeviceProperties(tensor.device().index());
  return {
      properties.multiProcessorCount,
      std::min(static_cast<int64_t>(properties.sharedMemPerBlockOptin), debug_option(DebugOption::kSelectiveScanSharedBytes)),
      static_cast<int64_t>(properties.sharedMemPerMultiprocessor), static_cast<int64_t>(properties.reservedSharedMemPerBlock)};
}

KernelChoice preferred_kernel() { return static_cast<KernelChoice>(debug_option(DebugOption::kSelectiveScanKernel)); }

void check_plan(const SelectiveScanParams& p, const Plan& plan, const DeviceLimits& device, at::ScalarType dtype) {
  TORCH_CHECK(p.batch * plan.partition().segments * plan.partition().tiles <= std::numeric_limits<int32_t>::max(),
              "selective_scan: the problem is too large: expected fewer than 2^31 blocks of channels, got batch = ", p.batch,
              ", dim = ", p.dim);
  TORCH_CHECK(plan.shared_bytes <= device.shared_bytes_per_block, "selective_scan: expected a device with at least ",
              plan.shared_bytes, " bytes of shared memory per block for ", dtype, " and dstate = ", p.dstate, ", got one with ",
              device.shared_bytes_per_block);
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
void reserve_carries(Workspace& workspace, ChannelPartition& partition, const SelectiveScanParams& p) {
  if (partition.segments == 1) return;
  const int64_t count = p.batch * partition.segments * p.dim * p.dstate;
  workspace.reserve(&partition.decay, count);
  workspace.reserve(&partition.carry, count);
}

void reserve_partial_sums(Workspace& workspace, const ChannelPartition& partition, PartialSums& sums,
                          const SelectiveScanBwdParams& p) {
  sums.tiles = partition.tiles;
  sums.segments = partition.segments;
  constexpr int64_t kTileSteps = std::max(sequential::kBwdTileSteps, warp_scan::BwdSizes::kTileSteps);
  sums.padded_steps = round_up(p.seqlen, kTileSteps);
  const int64_t rows = p.batch * partition.segments, states_per_row = p.dim * p.dstate;
  const auto reserve_matrix = [&](const MatrixView& grad, void** per_step, void** constant) {
    if (grad.data == nullptr) return;
    if (!grad.per_step) {
      workspace.reserve(constant, rows * states_per_row);
    } else if (partition.tiles != grad.groups) {
      workspace.reserve(per_step, p.batch * partition.tiles * p.dstate * sums.padded_steps);
    }
  };
  reserve_matrix(p.grad_B, &sums.grad_B, &sums.grad_constant_B);
  reserve_matrix(p.grad_C, &sums.grad_C, &sums.grad_constant_C);
  if (p.grad_A != nullptr) workspace.reserve(&sums.grad_A, rows * states_per_row);
  if (p.grad_D != nullptr) workspace.reserve(&sums.grad_D, rows * p.dim);
  if (p.grad_delta_bias != nullptr) workspace.reserve(&sums.grad_delta_bias, rows * p.dim);
}

// The carry pass, where there are segments: of all but that after which (in backward: before which) there is no other.
template <typename Launch>
void launch_carry_pass(warp_scan::ScanPlan plan, int64_t first_segment, const Launch& launch) {
  if (plan.segments == 1) return;
  plan.carry_pass = true;
  plan.first_segment = first_segment;
  plan.launched_segments = plan.segments - 1;
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

  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  visit_scalar(scalar_kind(u.scalar_type()), [&](auto scalar) {
    using Scalar = decltype(scalar);
    const DeviceLimits device = limits_of(u);
    Plan plan = plan_fwd<Scalar>(params, device, preferred_kernel());
    check_plan(params, plan, device, u.scalar_type());
    Workspace workspace;
    reserve_carries(workspace, plan.warp_scan, params);
    workspace.allocate(A.options());
    if constexpr (!std::is_same_v<Scalar, double>) {
      if (plan.is_short) {
        C10_CUDA_CHECK(short_scan::launch_fwd<Scalar>(params, plan.short_scan, stream));
        return;
      }
    }
    visit_discretization(method, [&](auto rule) {
      using Method = decltype(rule);
      if constexpr (!std::is_same_v<Scalar, double>) {
        if (plan.is_sequential) {
          C10_CUDA_CHECK((sequential::launch_fwd<Scalar, Method>(params, plan.sequential, stream)));
          return;
        }
      }
      const auto launch = [&](const warp_scan::ScanPlan& pass) {
        return warp_scan::launch_fwd<Scalar, Method>(params, pass, stream);
      };
      launch_carry_pass(plan.warp_scan, 0, launch);
      C10_CUDA_CHECK(launch(plan.warp_scan));
    });
  });
  return {outputs.out, outputs.last_state, outputs.chunk_states};
}

GradTensors compute_bwd_cuda(const BwdCall& call) {
  const Inputs& in = call.in;
  const at::Tensor& u = in.u;
  const Discretization method = check_inputs(in, call.discretization);
  const c10::cuda::CUDAGuard guard(u.device());
  const GradTensors grads =
      allocate_bwd(in, call.grad_out, call.grad_last_state, call.chunk_states, call.needs_grad, call.grad_z, call.grad_delta);
  const at::Tensor states = call.chunk_states.contiguous();
  SelectiveScanBwdParams params =
      make_bwd_params(in, method, call.delta_softplus, call.grad_out, call.grad_last_state, states, grads);

  // Of no channels: sums of nothing.
  if (params.dim == 0) {
    grads[kGradB].zero_();
    grads[kGradC].zero_();
    return grads;
  }
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  visit_scalar(scalar_kind(u.scalar_type()), [&](auto scalar) {
    using Scalar = decltype(scalar);
    const DeviceLimits device = limits_of(u);
    Plan plan = plan_bwd<Scalar>(params, device, preferred_kernel());
    check_plan(params, plan, device, u.scalar_type());
    at::Tensor arranged_grad_out;
    if (plan.is_sequential && !has_layout<Scalar>(params.grad_out, plan.sequential)) {
      arranged_grad_out = at::empty_like(u).copy_(*call.grad_out);
      params.grad_out = {arranged_grad_out.mutable_data_ptr(), arranged_grad_out.stride(0), arranged_grad_out.stride(1),
                         arranged_grad_out.stride(2)};
      plan = plan_bwd<Scalar>(params, device, preferred_kernel());
    }
    Workspace workspace;
    PartialSums partial_sums;
    reserve_carries(workspace, plan.warp_scan, params);
    reserve_partial_sums(workspace, plan.partition(), partial_sums, params);
    workspace.allocate(in.A.options());
    plan.sequential.decay = plan.warp_scan.decay;
    plan.sequential.carry = plan.warp_scan.carry;
    visit_discretization(method, [&](auto rule) {
      using Method = decltype(rule);
      if (params.batch == 0) return;
      const auto launch = [&](const warp_scan::ScanPlan& pass) {
        return warp_scan::launch_bwd<Scalar, Method>(params, pass, partial_sums, stream);
      };
      launch_carry_pass(plan.warp_scan, 1, launch);
      if constexpr (!std::is_same_v<Scalar, double>) {
        if (plan.is_sequential) {
          C10_CUDA_CHECK((sequential::launch_bwd<Scalar, Method>(params, plan.sequential, partial_sums, stream)));
          return;
        }
      }
      C10_CUDA_CHECK(launch(plan.warp_scan));
    });
    C10_CUDA_CHECK(launch_bwd_finish<Scalar>(params, partial_sums, stream));
  });
  return grads;
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CUDA, m) {
  m.impl("_selective_scan_fwd", &fwd_cuda);
  m.impl("_selective_scan_bwd", &BwdKernels<&compute_bwd_cuda>::bwd);
  m.impl("_selective_scan_bwd_out", &BwdKernels<&compute_bwd_cuda>::bwd_out);
}

}  // namespace ssm_kernels::selective_scan

#endif
