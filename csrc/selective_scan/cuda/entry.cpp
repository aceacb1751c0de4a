// CUDA entry points of the selective scan: allocate, plan and launch on the current stream. They wait for the device in two
// cases only: forward checks the values of cu_seqlens, unless a CUDA graph is being captured; and seq_idx needs the number of
// sequences, so that such a call cannot be captured.

#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/StringUtil.h>
#include <torch/library.h>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>

#include "common/integers.h"
#include "cuda/device.h"
#include "cuda/scalar_types.h"
#include "cuda/span_decay.h"
#include "selective_scan/cuda/call.h"
#include "selective_scan/cuda/complex_entry.h"
#include "selective_scan/cuda/plan.h"
#include "selective_scan/cuda/segment_maps.h"
#include "selective_scan/cuda/summary.h"
#include "selective_scan/selective_scan_op.h"
#include "selective_scan/selective_scan_summary_op.h"
#include "selective_scan/two_sample_op.h"
#include "torch/allocation.h"
#include "torch/checks.h"
#include "torch/choices.h"
#include "torch/debug_options.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::selective_scan {
namespace {

KernelChoice preferred_kernel() { return static_cast<KernelChoice>(debug_option(DebugOption::kSelectiveScanKernel)); }

void check_plan(const SelectiveScanParams& p, const Plan& plan, const DeviceLimits& device, at::ScalarType dtype) {
  TORCH_CHECK(p.rows * plan.partition().segments * plan.partition().tiles <= std::numeric_limits<int32_t>::max(),
              "selective_scan: the problem is too large: expected fewer than 2^31 blocks of channels, got ", p.rows,
              p.is_packed() ? " sequences" : " batch rows", " and dim = ", p.dim);
  TORCH_CHECK(plan.shared_bytes <= device.shared_bytes_per_block, "selective_scan: expected a device with at least ",
              plan.shared_bytes, " bytes of shared memory per block for ", dtype_name(dtype), " and dstate = ", p.dstate,
              ", got one with ", device.shared_bytes_per_block);
}

// Memory for the maps that segments publish for the segments after them.
void reserve_carries(Workspace& workspace, ChannelPartition& partition, const SelectiveScanParams& p) {
  if (partition.segments == 1) return;
  const int64_t count = p.rows * partition.segments * p.dim * p.dstate;
  workspace.reserve(&partition.decay, count);
  workspace.reserve(&partition.offset, count);
}

// The maps of `launched` of a call's segments by the kernels of segment_maps.h, or nothing where they do not support the call,
// or the warp scan's carry pass is faster: with so few blocks that these fill less than half of the device.
template <typename Scalar, typename Params>
std::optional<segment_maps::Params> plan_segment_maps(const Params& p, const ChannelPartition& segments, int64_t first_segment,
                                                      int64_t launched) {
  segment_maps::Params maps;
  if constexpr (std::is_same_v<Params, SelectiveScanBwdParams>) {
    maps.is_adjoint = true;
    maps.input = p.grad_out;
    if (p.grad_out.data != nullptr) maps.z = p.z;
    maps.matrix = p.C;
  } else {
    maps.input = p.u;
    maps.matrix = p.B;
  }
  const KernelChoice choice = preferred_kernel();
  if (!segment_maps::supports<Scalar>(p, maps.matrix) || choice == KernelChoice::kWarpScan) return std::nullopt;
  maps.delta_softplus = p.delta_softplus;
  maps.batch = p.batch;
  maps.dim = p.dim;
  maps.seqlen = p.seqlen;
  maps.dstate = p.dstate;
  maps.delta = p.delta;
  maps.A = p.A;
  maps.delta_bias = p.delta_bias;
  maps.group_channels = p.dim / maps.matrix.groups;
  const auto access_of = [&](const SequenceView& view) {
    const auto are_whole = [&](int64_t elements, std::initializer_list<int64_t> counts) {
      const bool is_aligned = reinterpret_cast<int64_t>(view.data) % (elements * int64_t(sizeof(Scalar))) == 0;
      return is_aligned && std::all_of(counts.begin(), counts.end(), [&](int64_t count) { return count % elements == 0; });
    };
    if (view.stride_dim == 1 &&
        are_whole(segment_maps::kLaneChannels, {view.stride_batch, view.stride_step, maps.group_channels})) {
      return VectorAccess::kAlongChannels;
    }
    if (view.stride_step == 1 && are_whole(segment_maps::kVectorSteps<Scalar>, {view.stride_batch, view.stride_dim})) {
      return VectorAccess::kAlongSteps;
    }
    return VectorAccess::kSingly;
  };
  maps.delta_access = access_of(maps.delta);
  maps.input_access = access_of(maps.input);
  maps.z_access = access_of(maps.z);
  maps.tiles_per_group = ceil_div(maps.group_channels, segment_maps::kTileChannels);
  maps.tiles = maps.matrix.groups * maps.tiles_per_group;
  maps.state_tiles = ceil_div(p.dstate, segment_maps::kStates);
  maps.segments = segments.segments;
  maps.segment_steps = segments.segment_steps;
  maps.first_segment = first_segment;
  maps.launched_segments = launched;
  maps.decay = segments.decay;
  maps.offset = segments.offset;
  maps.channel_stride = p.dstate;
  maps.parts = std::max<int64_t>(1, ceil_div(segments.segment_steps, segment_maps::kPartSteps));
  const int64_t least = segment_maps::kBlocks * cuda::multiprocessor_count(c10::cuda::current_device()) / 2;
  const bool is_faster = choice == KernelChoice::kSequential || maps.blocks() >= least;
  if (!is_faster || maps.blocks() > std::numeric_limits<int32_t>::max()) return std::nullopt;
  return maps;
}

// Queues the kernels, with memory for the maps of parts: of all states, or of so many at a time that it is at most kMostBytes,
// but of one tile of states at least.
template <typename Scalar>
cudaError_t launch_segment_maps(segment_maps::Params maps, const at::TensorOptions& options, cudaStream_t stream) {
  constexpr int64_t kMostBytes = int64_t(256) << 20, kFloats = sizeof(double) / sizeof(float);
  const int64_t dstate = maps.dstate, rows = maps.parts > 1 ? maps.all_parts() * maps.dim : 0;
  int64_t states = dstate;
  if (rows > 0) {
    const int64_t tiles = std::max<int64_t>(1, kMostBytes / (rows * segment_maps::kStates * int64_t(sizeof(float))));
    states = std::min(dstate, tiles * segment_maps::kStates);
  }
  Workspace workspace;
  workspace.reserve(&maps.part_offset, rows * states);
  workspace.reserve(&maps.part_sum, rows * kFloats);
  workspace.allocate(options);
  cudaError_t error = cudaSuccess;
  for (int64_t first = 0; first < dstate && error == cudaSuccess; first += states) {
    segment_maps::Params some = maps;
    some.dstate = std::min(states, dstate - first);
    some.state_tiles = ceil_div(some.dstate, segment_maps::kStates);
    some.A.data = static_cast<const float*>(maps.A.data) + first * maps.A.stride_state;
    some.matrix.data = static_cast<Scalar*>(maps.matrix.data) + first * maps.matrix.stride_state;
    some.offset = static_cast<float*>(maps.offset) + first;
    if (maps.decay != nullptr) some.decay = static_cast<float*>(maps.decay) + first;
    error = segment_maps::launch<Scalar>(some, stream);
  }
  return error;
}

// Queues the carry pass of a plan with memory for its maps, if it is that of segment_maps.h: for all segments except the last,
// in backward except the first. To be called before point_at_vectors, after which tensors begin elsewhere.
template <typename Scalar, typename Params>
cudaError_t queue_segment_maps(const Params& p, Plan& plan, int64_t first_segment, const at::TensorOptions& options,
                               cudaStream_t stream) {
  if constexpr (kHasAllScans<Scalar>) {
    if (plan.warp_scan.segments == 1) return cudaSuccess;
    const auto maps = plan_segment_maps<Scalar>(p, plan.warp_scan, first_segment, plan.warp_scan.segments - 1);
    plan.has_segment_maps = maps.has_value();
    if (maps) return launch_segment_maps<Scalar>(*maps, options, stream);
  }
  return cudaSuccess;
}

// Reserves the partial sums; those for the gradients of B and C only if `for_matrices`.
void reserve_partial_sums(Workspace& workspace, const ChannelPartition& partition, PartialSums& sums,
                          const SelectiveScanBwdParams& p, int64_t span_steps, bool for_matrices) {
  sums.tiles = partition.tiles;
  sums.segments = partition.segments;
  constexpr int64_t kTileSteps = std::max(sequential::kBwdTileSteps, warp_scan::BwdSizes::kTileSteps);
  const int64_t padded_steps = round_up(span_steps, kTileSteps);
  sums.chunk_stride = kPartialSumSteps;
  sums.state_stride = padded_steps;
  sums.tile_stride = p.dstate * sums.state_stride;
  sums.batch_stride = partition.tiles * sums.tile_stride;
  const int64_t rows = p.rows * partition.segments, states_per_row = p.dim * p.dstate;
  const auto reserve_matrix = [&](const MatrixView& grad, void** per_step, void** constant) {
    if (grad.data == nullptr) return;
    if (!grad.per_step) {
      workspace.reserve(constant, rows * states_per_row);
    } else if (for_matrices && partition.tiles != grad.groups) {
      workspace.reserve(per_step, p.batch * sums.batch_stride);
    }
  };
  reserve_matrix(p.grad_B, &sums.grad_B, &sums.grad_constant_B);
  reserve_matrix(p.grad_C, &sums.grad_C, &sums.grad_constant_C);
  if (p.grad_A != nullptr) workspace.reserve(&sums.grad_A, rows * states_per_row);
  if (p.grad_D != nullptr) workspace.reserve(&sums.grad_D, rows * p.dim);
  if (p.grad_delta_bias != nullptr) workspace.reserve(&sums.grad_delta_bias, rows * p.dim);
}

// Puts the partial sums of the gradients of B and C over a span in the place of its chunk states: those of a tile of channels
// and a chunk, first of B, then of C, over the states before the chunk.
void reuse_chunk_states(PartialSums& sums, const ChannelPartition& partition, const SelectiveScanBwdParams& span) {
  sums.state_stride = kPartialSumSteps;
  sums.tile_stride = partition.block_channels * span.dstate;
  sums.chunk_stride = span.dim * span.dstate;
  sums.batch_stride = span.chunk_boundaries * sums.chunk_stride;
  float* const memory = static_cast<float*>(const_cast<void*>(span.chunk_states));
  const auto is_needed = [&](const MatrixView& grad) { return grad.per_step && partition.tiles != grad.groups; };
  if (is_needed(span.grad_B)) sums.grad_B = memory;
  if (is_needed(span.grad_C)) sums.grad_C = memory + span.dstate * kPartialSumSteps;
}

// A reverse scan moves rows of steps in vectors if they end at multiples of kVectorBytes. Replaces sequences whose rows could
// end there, but do not, by copies: a call then takes the kernels of its aligned copy, and has its bits.
void align_reverse_rows(Inputs& in) {
  const int64_t bytes = in.u.element_size();
  const auto is_aligned = [&](int64_t elements) { return elements * bytes % kVectorBytes == 0; };
  if (!in.reverse || in.is_packed() || bytes > 4 || !is_aligned(in.u.size(2))) return;
  const auto align = [&](at::Tensor& x) {
    const bool starts_aligned = reinterpret_cast<int64_t>(x.const_data_ptr()) % kVectorBytes == 0;
    if (x.stride(2) == 1 && !(starts_aligned && is_aligned(x.stride(0)) && is_aligned(x.stride(1)))) {
      x = empty_tensor(x.sym_sizes(), x.options()).copy_(x);
    }
  };
  align(in.u);
  align(in.delta);
  if (is_present(in.z)) align(*in.z);
}

// Forward of checked inputs. `launch(scalar, params, plan, stream)` queues the plan's kernels, of the type of `scalar`. The
// plan is one for `method`.
template <typename Launch>
FwdOutputs run_fwd(Inputs in, Discretization method, KernelChoice choice, const Launch& launch) {
  const c10::cuda::CUDAGuard guard(in.u.device());
  align_reverse_rows(in);
  check_cu_seqlens(in);
  const PackedRows rows = packed_rows(in);
  FwdOutputs outputs = allocate_fwd(in);
  SelectiveScanFwdParams params = make_fwd_params(in, method, rows, outputs);
  if (params.rows == 0 || params.dim == 0) return outputs;

  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(cuda::visit_scalar(scalar_kind(in.u.scalar_type()), [&](auto scalar) {
    using Scalar = decltype(scalar);
    const DeviceLimits device = limits_of(in.u);
    Plan plan = plan_fwd<Scalar>(params, device, choice);
    check_plan(params, plan, device, in.u.scalar_type());
    Workspace workspace;
    reserve_carries(workspace, plan.warp_scan, params);
    workspace.allocate(in.A.options());
    if (const cudaError_t error = queue_segment_maps<Scalar>(params, plan, 0, in.A.options(), stream); error != cudaSuccess) {
      return error;
    }
    point_at_vectors<Scalar>(params, plan);
    return launch(scalar, params, plan, stream);
  }));
  return outputs;
}

FwdOutputs fwd_cuda(const FwdInputs& in) {
  const Discretization method = check_inputs(in);
  return run_fwd(in, method, preferred_kernel(),
                 [&](auto scalar, const SelectiveScanFwdParams& params, const Plan& plan, cudaStream_t stream) {
                   using Scalar = decltype(scalar);
                   if (is_basic(method)) return launch_fwd<Scalar>(params, plan, stream);
                   return launch_further_fwd<Scalar>(params, parse_method_parameters(in.discretization), plan, stream);
                 });
}

// Whether the call has a step of its own for A, whose kernels are those of the warp scan.
bool has_separate_step(const TwoSampleInputs& in) { return is_present(in.delta_A); }

// The method for which a call of has_separate_step() is planned: one without kernels of segment_maps.h, and with one span.
constexpr Discretization kPlannedMethod = Discretization::kExpTrapezoidal;

template <typename Params>
Params with_method(Params params, Discretization method) {
  params.discretization = method;
  return params;
}

FwdOutputs two_sample_fwd_cuda(const TwoSampleFwdInputs& in) {
  const Discretization method = check_two_sample_inputs(in);
  const TwoSampleParams two = make_two_sample_params(in);
  if (in.is_complex) return complex_fwd_cuda(in, method, two);
  if (has_separate_step(in)) {
    return run_fwd(in, kPlannedMethod, KernelChoice::kWarpScan,
                   [&](auto scalar, const SelectiveScanFwdParams& params, const Plan& plan, cudaStream_t stream) {
                     return launch_separate_fwd<decltype(scalar)>(with_method(params, method), two, plan, stream);
                   });
  }
  return run_fwd(in, method, preferred_kernel(),
                 [&](auto scalar, const SelectiveScanFwdParams& params, const Plan& plan, cudaStream_t stream) {
                   return launch_two_sample_fwd<decltype(scalar)>(params, two, plan, stream);
                 });
}

// Backward of checked inputs, whose reverse rows are aligned, into `grads`. `launch(scalar, params, plan, partial_sums,
// stream)` queues the plan's kernels for a span of steps.
template <typename Launch>
void run_bwd(const BwdInputs& bwd, Discretization method, KernelChoice choice, const GradTensors& grads,
             const Launch& launch_span) {
  const Inputs& in = bwd.in;
  const at::Tensor states = bwd.chunk_states.contiguous();
  const PackedRows rows = packed_rows(in);
  SelectiveScanBwdParams params = make_bwd_params(bwd, method, rows, states, grads);

  // Without channels the gradients of B and C are sums of no terms: zero.
  if (params.dim == 0) {
    grads[kGradB].zero_();
    grads[kGradC].zero_();
    return;
  }
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  at::Tensor arranged_grad_out;
  C10_CUDA_CHECK(cuda::visit_scalar(scalar_kind(in.u.scalar_type()), [&](auto scalar) {
    using Scalar = decltype(scalar);
    const DeviceLimits device = limits_of(in.u);
    Plan plan = plan_bwd<Scalar>(params, device, choice);
    check_plan(params, plan, device, in.u.scalar_type());
    if (plan.is_sequential && !has_layout<Scalar>(params.grad_out, params, plan.sequential)) {
      arranged_grad_out = empty_tensor_like(in.u).copy_(*bwd.grad_out);
      params.grad_out = sequence_view(arranged_grad_out, Access::kWrite, in.reverse);
      plan = plan_bwd<Scalar>(params, device, choice);
    }
    Workspace workspace;
    PartialSums partial_sums;
    reserve_carries(workspace, plan.warp_scan, params);
    const int64_t span = span_steps(params, plan);
    // The graph of a captured backward may be replayed after one forward.
    const bool reuses = bwd.reuses_chunk_states && !cuda::is_capturing() && can_reuse_chunk_states(params, plan);
    reserve_partial_sums(workspace, plan.partition(), partial_sums, params, span, /*for_matrices=*/!reuses);
    void* carry = nullptr;
    if (span < params.seqlen) workspace.reserve(&carry, params.rows * params.dim * params.dstate);
    workspace.allocate(in.A.options());
    plan.sequential.decay = plan.warp_scan.decay;
    plan.sequential.offset = plan.warp_scan.offset;
    if (const cudaError_t error = queue_segment_maps<Scalar>(params, plan, 1, in.A.options(), stream); error != cudaSuccess) {
      return error;
    }
    point_at_vectors<Scalar>(params, plan);
    const auto launch = [&](const SelectiveScanBwdParams& of_span) {
      if (reuses) reuse_chunk_states(partial_sums, plan.partition(), of_span);
      return launch_span(scalar, of_span, plan, partial_sums, stream);
    };
    if (span == params.seqlen) return launch(params);
    cudaError_t error = cudaSuccess;
    for (int64_t end = params.seqlen; end > 0 && error == cudaSuccess;) {
      const int64_t begin = (end - 1) / span * span;
      partial_sums.adds = end < params.seqlen;
      error = launch(span_params<Scalar>(params, begin, end - begin, carry));
      end = begin;
    }
    return error;
  }));
  if (arranged_grad_out.defined() && is_present(bwd.out)) bwd.out->copy_(arranged_grad_out);
}

GradTensors bwd_cuda(const BwdInputs& inputs) {
  BwdInputs bwd = inputs;
  const Discretization method = check_inputs(bwd.in);
  const c10::cuda::CUDAGuard guard(bwd.in.u.device());
  align_reverse_rows(bwd.in);
  const GradTensors grads = allocate_bwd(bwd);
  run_bwd(
      bwd, method, preferred_kernel(), grads,
      [&](auto scalar, const SelectiveScanBwdParams& params, const Plan& plan, const PartialSums& sums, cudaStream_t stream) {
        using Scalar = decltype(scalar);
        if (is_basic(method)) return launch_bwd<Scalar>(params, plan, sums, stream);
        return launch_further_bwd<Scalar>(params, parse_method_parameters(bwd.in.discretization), plan, sums, stream);
      });
  return grads;
}

TwoSampleGrads two_sample_bwd_cuda(const TwoSampleBwdInputs& inputs) {
  TwoSampleBwdInputs in = inputs;
  const Discretization method = check_two_sample_inputs(in.in);
  if (in.in.is_complex) {
    TwoSampleBwd bwd(in);
    complex_bwd_cuda(bwd, in.in, method, make_two_sample_params(in.in, bwd));
    return std::move(bwd).finish(in.in);
  }
  const bool is_separate = has_separate_step(in.in);
  const c10::cuda::CUDAGuard guard(in.in.u.device());
  align_reverse_rows(in.in);
  TwoSampleBwd bwd(in);
  const TwoSampleParams two = make_two_sample_params(in.in, bwd);
  if (is_separate) {
    run_bwd(
        bwd.scan, kPlannedMethod, KernelChoice::kWarpScan, bwd.of_scan(),
        [&](auto scalar, const SelectiveScanBwdParams& params, const Plan& plan, const PartialSums& sums, cudaStream_t stream) {
          return launch_separate_bwd<decltype(scalar)>(with_method(params, method), two, plan, sums, stream);
        });
    return std::move(bwd).finish(in.in);
  }
  run_bwd(bwd.scan, method, preferred_kernel(), bwd.of_scan(),
          [&](auto scalar, const SelectiveScanBwdParams& params, const Plan& plan, const PartialSums& sums,
              cudaStream_t stream) { return launch_two_sample_bwd<decltype(scalar)>(params, two, plan, sums, stream); });
  return std::move(bwd).finish(in.in);
}

// As scan_all_steps, by the kernels of segment_maps.h; false where they do not support the call.
template <typename Params>
bool map_all_steps(const Params& params, at::ScalarType dtype, const at::Tensor& state, void* decay) {
  bool is_done = false;
  C10_CUDA_CHECK(cuda::visit_scalar(scalar_kind(dtype), [&](auto scalar) {
    using Scalar = decltype(scalar);
    if constexpr (kHasAllScans<Scalar>) {
      ChannelPartition all;
      all.segment_steps = params.seqlen;
      all.offset = state.data_ptr();
      all.decay = decay;
      const auto maps = plan_segment_maps<Scalar>(params, all, 0, 1);
      is_done = maps.has_value();
      if (maps) return launch_segment_maps<Scalar>(*maps, state.options(), c10::cuda::getCurrentCUDAStream());
    }
    return cudaSuccess;
  }));
  return is_done;
}

// Runs the carry pass over all steps. `state`, (batch, dim, dstate), becomes the last state from zero or, of backward's
// parameters, the gradient of the state before all steps from those of the outputs; `decay`, if it is not null, the product of
// all Abar.
template <typename Params>
void scan_all_steps(const Params& params, const MethodParameters& parameters, at::ScalarType dtype, const at::Tensor& state,
                    void* decay) {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(cuda::visit_scalar(scalar_kind(dtype), [&](auto scalar) {
    using Scalar = decltype(scalar);
    const DeviceLimits device = limits_of(state);
    Plan plan = plan_carry_pass<Scalar>(params, device);
    check_plan(params, plan, device, dtype);
    warp_scan::ScanPlan& pass = plan.warp_scan;
    // The map of a single segment is the result.
    const bool folds = pass.segments > 1;
    const int64_t count = state.numel() * pass.segments;
    pass.offset = state.data_ptr();
    pass.decay = decay;
    Workspace workspace;
    if (folds) workspace.reserve(&pass.offset, count);
    if (folds || decay == nullptr) workspace.reserve(&pass.decay, count);
    workspace.allocate(state.options());
    const cudaError_t error = is_basic(params.discretization)
                                  ? launch_carry_pass<Scalar>(params, plan, stream)
                                  : launch_further_carry_pass<Scalar>(params, parameters, plan, stream);
    if (error != cudaSuccess || !folds) return error;
    SegmentFold fold;
    fold.decay = pass.decay;
    fold.offset = pass.offset;
    fold.segments = pass.segments;
    fold.is_adjoint = std::is_same_v<Params, SelectiveScanBwdParams>;
    fold.state = state.data_ptr();
    fold.product = decay;
    using Acc = std::conditional_t<std::is_same_v<Scalar, double>, double, float>;
    return launch_fold<Acc>(params, fold, stream);
  }));
}

SummaryOutputs summary_cuda(const SummaryInputs& in) {
  const Discretization method = check_summary_inputs(in);
  const c10::cuda::CUDAGuard guard(in.u.device());
  SummaryOutputs outputs = allocate_summary(in);
  if (outputs.last_state.numel() == 0) return outputs;
  SelectiveScanFwdParams params;
  fill_params(params, in.scan(), method, PackedRows());
  void* const decay = outputs.decay.data_ptr();
  if (map_all_steps(params, in.u.scalar_type(), outputs.last_state, decay)) return outputs;
  const bool is_exponential = has_exponential_transition(method);
  scan_all_steps(params, parse_method_parameters(in.discretization), in.u.scalar_type(), outputs.last_state,
                 is_exponential ? nullptr : decay);
  if (!is_exponential) return outputs;
  cuda::SpanDecay span;
  span.batch = params.batch;
  span.channels = params.dim;
  span.seqlen = params.seqlen;
  span.states = params.dstate;
  span.delta = params.delta.data;
  span.stride_batch = params.delta.stride_batch;
  span.stride_channel = params.delta.stride_dim;
  span.stride_step = params.delta.stride_step;
  span.bias = params.delta_bias.data;
  span.bias_stride = params.delta_bias.stride;
  span.apply_softplus = params.delta_softplus;
  span.A = params.A.data;
  span.A_stride_channel = params.A.stride_dim;
  span.A_stride_state = params.A.stride_state;
  const at::Tensor sums = empty_tensor({span.batch, span.channels, span.parts()}, in.A.options().dtype(at::kDouble));
  span.sums = sums.mutable_data_ptr<double>();
  span.decay = decay;
  C10_CUDA_CHECK(cuda::visit_scalar(scalar_kind(in.u.scalar_type()), [&](auto scalar) {
    return cuda::launch_span_decay<decltype(scalar)>(span, c10::cuda::getCurrentCUDAStream());
  }));
  return outputs;
}

at::Tensor initial_gradient_cuda(const InitialGradientInputs& in) {
  const Discretization method = check_initial_gradient_inputs(in);
  const c10::cuda::CUDAGuard guard(in.grad_out.device());
  const at::Tensor grad = allocate_initial_gradient(in);
  if (grad.numel() == 0) return grad;
  SelectiveScanBwdParams params;
  fill_params(params, in.scan(), method, PackedRows());
  params.grad_out = params.u;
  if (map_all_steps(params, in.grad_out.scalar_type(), grad, /*decay=*/nullptr)) return grad;
  scan_all_steps(params, parse_method_parameters(in.discretization), in.grad_out.scalar_type(), grad, /*decay=*/nullptr);
  return grad;
}

// Backward as for all gradients, on which its plan does not depend.
KernelNames name_cuda_kernels(PlanInputs& in) {
  const Discretization method = check_inputs(in);
  if (in.u.size(0) == 0 || in.u.size(1) == 0) return {"none", "none"};
  const c10::cuda::CUDAGuard guard(in.u.device());
  align_reverse_rows(in);
  in.save_chunk_states = true;
  const FwdOutputs outputs = allocate_fwd(in);
  BwdInputs bwd;
  bwd.in = in;
  bwd.chunk_states = outputs.chunk_states;
  bwd.needs_grad.fill(true);
  const PackedRows rows = packed_rows(in);
  const SelectiveScanFwdParams fwd_params = make_fwd_params(in, method, rows, outputs);
  const GradTensors grads = allocate_bwd(bwd);
  const SelectiveScanBwdParams bwd_params = make_bwd_params(bwd, method, rows, outputs.chunk_states, grads);
  const auto name = [](const Plan& plan, int64_t spans) {
    const char* const kernel = plan.is_short ? "short_scan" : plan.is_sequential ? "sequential" : "warp_scan";
    return c10::str(kernel, ", ", plan.partition().block_channels, " channels, ", plan.partition().segments, " segments, ",
                    spans, " spans");
  };
  const DeviceLimits device = limits_of(in.u);
  return cuda::visit_scalar(scalar_kind(in.u.scalar_type()), [&](auto scalar) {
    using Scalar = decltype(scalar);
    const Plan bwd_plan = plan_bwd<Scalar>(bwd_params, device, preferred_kernel());
    const int64_t span = std::max<int64_t>(1, span_steps(bwd_params, bwd_plan));
    return KernelNames{name(plan_fwd<Scalar>(fwd_params, device, preferred_kernel()), 1),
                       name(bwd_plan, std::max<int64_t>(1, ceil_div(bwd_params.seqlen, span)))};
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CUDA, m) {
  register_kernels<&fwd_cuda, &bwd_cuda>(m);
  register_two_sample_kernels<&two_sample_fwd_cuda, &two_sample_bwd_cuda>(m);
  implement<&name_cuda_kernels>(m, "_selective_scan_plan");
  register_summary_kernels<&summary_cuda, &summary_adjoint, &initial_gradient_cuda>(m);
}

}  // namespace ssm_kernels::selective_scan

#endif
