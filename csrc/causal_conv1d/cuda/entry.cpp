// CUDA entry points of the causal convolution: choose the kernels and the tiling, allocate the workspace and launch on the
// current stream. They never wait for the device and therefore do not check the values of cu_seqlens: for any values, each step
// belongs to one of the sequences.

#ifdef SSM_KERNELS_WITH_CUDA

#include "causal_conv1d/cuda/launch.h"

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "causal_conv1d/causal_conv1d_op.h"
#include "common/integers.h"
#include "cuda/device.h"
#include "cuda/scalar_types.h"
#include "torch/allocation.h"
#include "torch/checks.h"
#include "torch/debug_options.h"

namespace ssm_kernels::causal_conv1d {
namespace {

// The channels-last kernels count steps, and bytes between steps, in 32 bits; they look fewer than 1024 steps ahead.
constexpr int64_t kMaxNarrow = (int64_t(1) << 31) - 1024;

// Steps per warp of the channels-last kernels are a multiple of the steps of an iteration.
constexpr int64_t kStepGroup = 8, kLeastSteps = 4;

// Whether `rows` rows of `size` elements in each batch entry consist of aligned vectors of `vector` elements. The stride of an
// axis of one element does not matter.
bool has_aligned_vectors(const ConvParams& p, const SequenceView& view, int64_t vector, int64_t size, int64_t rows,
                         int64_t row_stride) {
  return size % vector == 0 && reinterpret_cast<int64_t>(view.data) % (vector * cuda::element_bytes(p.kind)) == 0 &&
         (p.batch == 1 || view.stride_batch % vector == 0) && (rows == 1 || row_stride % vector == 0);
}

KernelSet choose_kernels(const ConvParams& p, std::initializer_list<SequenceView> views) {
  if (p.kind == ScalarKind::kDouble || p.width > kMaxVectorWidth) return KernelSet::kGeneral;
  const int64_t bytes = cuda::element_bytes(p.kind);
  // Absent tensors fit.
  const auto all = [&](const auto& fits) {
    return std::all_of(views.begin(), views.end(),
                       [&](const SequenceView& view) { return view.data == nullptr || fits(view); });
  };
  const auto are_narrow = [&](const SequenceView& view) {
    return p.seqlen <= kMaxNarrow && std::abs(view.stride_step) <= kMaxNarrow / bytes;
  };
  const int64_t most_channels_last_blocks =
      p.batch * ceil_div(p.channels, int64_t(kLaneChannels) * kWarpSize) * ceil_div(p.seqlen, kLeastSteps * kWarps);
  const bool is_channels_last = most_channels_last_blocks <= kMaxNarrow &&
                                all([&](const SequenceView& view) { return are_narrow(view) && view.stride_channel == 1; });
  const bool is_channels_first = p.ids.data == nullptr &&
                                 p.batch * p.channels * ceil_div(p.seqlen, int64_t(kWarpSize)) <= kMaxNarrow &&
                                 all([&](const SequenceView& view) { return view.stride_step == 1; });
  if (is_channels_last && all([&](const SequenceView& view) {
        return has_aligned_vectors(p, view, kLaneChannels, p.channels, p.seqlen, view.stride_step);
      })) {
    return KernelSet::kChannelsLast;
  }
  if (is_channels_first && all([&](const SequenceView& view) {
        return has_aligned_vectors(p, view, kVectorBytes / bytes, p.seqlen, p.channels, view.stride_channel);
      })) {
    return KernelSet::kChannelsFirst;
  }
  return is_channels_last    ? KernelSet::kChannelsLastShifted
         : is_channels_first ? KernelSet::kChannelsFirstShifted
                             : KernelSet::kGeneral;
}

// Up to this many elements per multiprocessor, one thread per element finishes sooner than one lane per channel.
constexpr int64_t kFewElements = 1024;

// Whether conv_fwd_channels_last_run_kernel takes a call of aligned channels-last rows.
bool has_runs(const ConvFwdParams& p) {
  const auto has_vectors = [&](const ParameterView& view, int64_t size) {
    const int64_t bytes = view.is_input_kind ? cuda::element_bytes(p.kind) : sizeof(float);
    return view.stride_channel == size &&
           reinterpret_cast<int64_t>(view.data) % std::min(kVectorBytes, kLaneChannels * size * bytes) == 0;
  };
  return is_specialized(p) && p.channels <= kMaxNarrow && p.seqlen <= kMostGridBlocks * kWarps * kLongRun &&
         p.weight.stride_tap == 1 && has_vectors(p.weight, kMaxVectorWidth) &&
         (p.bias.data == nullptr || has_vectors(p.bias, 1));
}

KernelSet choose_fwd_kernels(const ConvFwdParams& p, int device) {
  const KernelSet set = choose_kernels(p, {p.x, p.out});
  if (set != KernelSet::kChannelsLast && set != KernelSet::kChannelsLastShifted) return set;
  if (set == KernelSet::kChannelsLast && has_runs(p)) return KernelSet::kChannelsLastRuns;
  const int64_t multiprocessors = cuda::multiprocessor_count(device), elements = p.batch * p.seqlen * p.channels;
  const bool has_few = elements <= kFewElements * multiprocessors;
  return debug_option(DebugOption::kCausalConv1dKernel) == 0 && has_few ? KernelSet::kGeneral : set;
}

KernelSet choose_bwd_kernels(const ConvBwdParams& p) { return choose_kernels(p, {p.x, p.grad_out, p.grad_out_2, p.grad_x}); }

// Cost of a channels-last warp apart from its steps, in steps: weights, halo and partial sums.
constexpr int64_t kStepsOverhead = 12;
constexpr int64_t kMinSteps = 16, kMaxSteps = 256;
// Latency decides backward of up to kFewSteps steps: its warps may have as few as kLeastSteps.
constexpr int64_t kFewSteps = 256;
constexpr int64_t kMaxWaves = 8;

// Fewer tiles read less halo and write fewer partial sums; more tiles fill the last wave of blocks. Backward is bound by
// arithmetic, so its time is a whole number of waves; forward is bound by memory, so blocks of a partial wave run faster.
Tiling make_tiling(const ConvParams& p, KernelSet set, int64_t blocks_of_multiprocessor, bool has_whole_waves, int device) {
  const int64_t multiprocessors = cuda::multiprocessor_count(device);
  Tiling tiling;
  if (set == KernelSet::kChannelsLastRuns) {
    tiling.channel_blocks = ceil_div(p.channels, int64_t(kLaneChannels) * kWarpSize);
    const auto blocks_of = [&](int64_t steps) { return p.batch * tiling.channel_blocks * ceil_div(p.seqlen, steps * kWarps); };
    // Two chunks a run, the second loaded while the first is computed, or less where latency decides: where blocks of longer
    // runs do not fill the device. More only where a grid has too few blocks.
    tiling.steps = 2 * run_steps(cuda::element_bytes(p.kind));
    while (tiling.steps > kLeastRun && blocks_of(tiling.steps) <= multiprocessors) tiling.steps /= 2;
    while (tiling.steps < kLongRun && ceil_div(p.seqlen, tiling.steps * kWarps) > kMostGridBlocks) tiling.steps *= 2;
    tiling.tiles = ceil_div(p.seqlen, tiling.steps * kWarps);
  } else if (set == KernelSet::kChannelsLast || set == KernelSet::kChannelsLastShifted) {
    tiling.channel_blocks = ceil_div(p.channels, int64_t(kLaneChannels) * kWarpSize);
    const int64_t rows = p.batch * tiling.channel_blocks, resident = blocks_of_multiprocessor * multiprocessors;
    const bool has_few = has_whole_waves && p.seqlen <= kFewSteps;
    const int64_t most_tiles = ceil_div(p.seqlen, (has_few ? kLeastSteps : kMinSteps) * kWarps);
    const int64_t group = has_few ? kLeastSteps : kStepGroup;
    tiling.steps = group;
    double least = 0;
    for (int64_t tiles = std::max<int64_t>(1, ceil_div(p.seqlen, kMaxSteps * kWarps)); tiles <= most_tiles; ++tiles) {
      const int64_t steps = ceil_div(ceil_div(p.seqlen, tiles * kWarps), group) * group;
      const double waves = static_cast<double>(rows * tiles) / static_cast<double>(resident);
      const double found = (has_whole_waves ? std::ceil(waves) : waves + 0.5) * static_cast<double>(steps + kStepsOverhead);
      if (least == 0 || found < least) {
        least = found;
        tiling.steps = steps;
      }
      // After several waves the last one hardly matters.
      if (rows * tiles > kMaxWaves * resident) break;
    }
    tiling.tiles = ceil_div(p.seqlen, tiling.steps * kWarps);
  } else if (set == KernelSet::kChannelsFirst || set == KernelSet::kChannelsFirstShifted) {
    const int64_t warp_steps = kWarpSize * kVectorBytes / cuda::element_bytes(p.kind);
    // One tile per channel, or more if there are too few channels to fill the device. Tiles of kLongSteps and more are so long
    // that several waves of them end more evenly than one.
    constexpr int64_t kWaveBlocks = 5, kMostBlocks = 16, kLongSteps = 2048;
    const int64_t rows = std::max<int64_t>(1, p.batch * p.channels), of_blocks = multiprocessors * kWarps;
    const int64_t wanted_tiles = std::max(ceil_div(kWaveBlocks * of_blocks, rows),
                                          std::min(ceil_div(kMostBlocks * of_blocks, rows), ceil_div(p.seqlen, kLongSteps)));
    tiling.steps = std::max(warp_steps, ceil_div(ceil_div(p.seqlen, wanted_tiles), warp_steps) * warp_steps);
    tiling.tiles = ceil_div(p.seqlen, tiling.steps);
    tiling.tiles_divisor = cuda::Divisor(tiling.tiles);
    tiling.channels_divisor = cuda::Divisor(p.channels);
    if (tiling.tiles == 1) {
      const bool is_shifted = set == KernelSet::kChannelsFirstShifted;
      const int64_t vector = kVectorBytes / cuda::element_bytes(p.kind);
      const int64_t vectors = ceil_div(p.seqlen, vector);
      tiling.log_row_lanes = is_shifted ? kLeastLogShiftedLanes : 0;
      while (vectors > int64_t(1) << tiling.log_row_lanes && tiling.log_row_lanes < kLogWarpSize) ++tiling.log_row_lanes;
    }
  } else {
    constexpr int64_t kGeneralSteps = 64;
    tiling.steps = kGeneralSteps;
    tiling.tiles = ceil_div(p.seqlen, tiling.steps);
  }
  return tiling;
}

struct Cuda {
  struct Guard {
    c10::cuda::CUDAGuard device;

    explicit Guard(const Inputs& in) : device(in.x.device()) {}
  };

  static void run(const ConvFwdParams& params, const at::Tensor& x) {
    const KernelSet set = choose_fwd_kernels(params, x.get_device());
    const Tiling tiling = make_tiling(params, set, kFwdBlocks, /*has_whole_waves=*/false, x.get_device());
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    C10_CUDA_CHECK(cuda::visit_scalar(params.kind,
                                      [&](auto scalar) { return launch_fwd<decltype(scalar)>(params, set, tiling, stream); }));
  }

  static bool adds_grads(const ConvBwdParams& params) {
    return params.grad_x.data != nullptr && params.grad_initial_state.data == nullptr && is_specialized(params) &&
           choose_bwd_kernels(params) == KernelSet::kChannelsLast;
  }

  static void run(const ConvBwdParams& params, const at::Tensor& x) {
    if (params.channels == 0) return;
    // Without grad_out only the states have gradients, which concern a few steps.
    const KernelSet set = params.grad_out.data == nullptr ? KernelSet::kGeneral : choose_bwd_kernels(params);
    const Tiling tiling = make_tiling(params, set, kBwdBlocks, /*has_whole_waves=*/true, x.get_device());
    const at::TensorOptions options = x.options().dtype(accumulate_type(x.scalar_type()));
    BwdWorkspace workspace;
    at::Tensor sums, grad_pre;
    if (params.grad_weight != nullptr || params.grad_bias != nullptr) {
      // At least one row: an empty tensor has a null pointer, which means that no sums are needed.
      const int64_t rows = std::max<int64_t>(1, params.batch * tiling.tiles);
      sums = empty_tensor({rows, params.width + 1, params.channels}, options);
      workspace.sums = sums.mutable_data_ptr();
    }
    if (set == KernelSet::kGeneral) {
      grad_pre = empty_tensor({params.batch, params.seqlen, params.channels}, options);
      workspace.grad_pre = {grad_pre.mutable_data_ptr(), grad_pre.stride(0), grad_pre.stride(1), grad_pre.stride(2)};
    }
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    C10_CUDA_CHECK(cuda::visit_scalar(
        params.kind, [&](auto scalar) { return launch_bwd<decltype(scalar)>(params, set, tiling, workspace, stream); }));
  }

  struct Steps {
    using Inputs = UpdateInputs;
    using TokenParams = ConvTokenParams;
    struct Guard {
      c10::cuda::CUDAGuard device;

      explicit Guard(const UpdateInputs& in) : device(in.x.device()) {}
    };

    // The kernels do not follow slots outside of the cache.
    template <typename... Arguments>
    static void check_values(const Arguments&...) {}

    static void run(const UpdateInputs&, ConvUpdateParams params, const ConvTokenParams* tokens) {
      const auto are_vectors = [&](const void* data, bool is_input_kind, int64_t size, int64_t stride, auto... outer_strides) {
        const int64_t bytes = is_input_kind ? cuda::element_bytes(params.kind) : sizeof(float);
        const bool is_aligned = reinterpret_cast<int64_t>(data) % (kMaxVectorWidth * bytes) == 0;
        return params.kind != ScalarKind::kDouble && size == kMaxVectorWidth && stride == 1 && is_aligned &&
               ((outer_strides % kMaxVectorWidth == 0) && ...);
      };
      params.has_state_vectors =
          are_vectors(params.state.data, params.state_is_input_kind, params.state_length, params.state.stride_step,
                      params.state.stride_channel, params.state.stride_sequence);
      params.has_weight_vectors =
          params.weight.stride_channel == kMaxVectorWidth &&
          are_vectors(params.weight.data, params.weight.is_input_kind, params.width, params.weight.stride_tap);
      const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
      C10_CUDA_CHECK(cuda::visit_scalar(params.kind,
                                        [&](auto scalar) { return launch_update<decltype(scalar)>(params, tokens, stream); }));
    }
  };
};

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CUDA, m) { Kernels<Cuda>::register_in(m); }

}  // namespace ssm_kernels::causal_conv1d

#endif
