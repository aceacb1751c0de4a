// CUDA entry point of the selective state update: chooses the kernel and the cut of the work, and launches on the current
// stream without waiting for it or reading anything from the device, so that it can be captured in a CUDA graph.

#ifdef SSM_KERNELS_WITH_CUDA

#include "selective_state_update/cuda/launch.h"

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/library.h>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <optional>
#include <type_traits>

#include "cuda/device.h"
#include "cuda/scalar_types.h"
#include "selective_state_update/selective_state_update_op.h"
#include "selective_state_update/two_sample_op.h"
#include "torch/decoding_op.h"
#include "torch/dispatch.h"

namespace ssm_kernels::selective_state_update {
namespace {

constexpr int64_t kWidestAccess = 16;   // bytes
constexpr int64_t kResidentWarps = 32;  // of a multiprocessor, at 64 registers a thread
constexpr int64_t kTilesPerWarp = 8;

// Whether every vector of `count` elements starts at a multiple of its size, or of 16 bytes if it is larger.
bool is_aligned(const void* data, int64_t element_bytes, int64_t count, std::initializer_list<int64_t> strides) {
  const int64_t alignment = std::min(element_bytes * count, kWidestAccess);
  const auto aligned = [&](int64_t offset) { return offset % alignment == 0; };
  return aligned(reinterpret_cast<int64_t>(data)) &&
         std::all_of(strides.begin(), strides.end(), [&](int64_t stride) { return aligned(stride * element_bytes); });
}

// The stride between the rows of neighboring channels, if there is one.
std::optional<int64_t> row_stride(const StateUpdateParams& p, const StateView& view) {
  if (p.heads == 1) return view.stride_dim;
  if (p.headdim == 1 || view.stride_head == p.headdim * view.stride_dim) return view.stride_head / p.headdim;
  return std::nullopt;
}

bool are_narrow(std::initializer_list<int64_t> values) {
  return std::all_of(values.begin(), values.end(), [](int64_t value) { return value >= 0 && value < int64_t(1) << 31; });
}

bool are_narrow(const ChannelView& view) { return are_narrow({view.stride_batch, view.stride_head, view.stride_dim}); }

// Whether the fast kernel's demands are met (launch.h), except that on the number of tiles.
bool can_be_fast(const StateUpdateParams& p) {
  if (p.input_kind == ScalarKind::kDouble) return false;
  constexpr int64_t kAccumulateBytes = 4;
  const int64_t state_bytes = cuda::element_bytes(p.state_kind), input_bytes = cuda::element_bytes(p.input_kind);
  const int64_t A_bytes = p.A_is_input_kind ? input_bytes : kAccumulateBytes;
  const int64_t vector_size = state_vector_bytes(state_bytes, p.tied_A()) / state_bytes;
  const auto fits = [&](const GroupView& view) {
    return view.stride_state == 1 && is_aligned(view.data, input_bytes, vector_size, {view.stride_batch, view.stride_group}) &&
           are_narrow({view.stride_batch, view.stride_group});
  };
  const std::optional<int64_t> state_row = row_stride(p, p.state), A_row = row_stride(p, p.A);
  if (p.dstate % vector_size != 0 || !fits(p.B) || !fits(p.C)) return false;
  if (p.state.stride_state != 1 || !state_row.has_value() || !are_narrow({p.state.stride_batch, *state_row}) ||
      !is_aligned(p.state.data, state_bytes, vector_size, {p.state.stride_batch, *state_row})) {
    return false;
  }
  if (!p.tied_A() && (p.A.stride_state != 1 || !A_row.has_value() || !are_narrow({*A_row}) ||
                      !is_aligned(p.A.data, A_bytes, vector_size, {*A_row}))) {
    return false;
  }
  return are_narrow({p.batch, p.slots, p.channels(), p.A.stride_head, p.A.stride_dim}) && are_narrow(p.x) && are_narrow(p.dt) &&
         are_narrow(p.z) && are_narrow(p.out) && are_narrow(p.D) && are_narrow(p.dt_bias);
}

// The same for what the kernel of several tokens demands beside.
bool can_be_fast(const StateUpdateParams& p, const TokenParams& tokens) {
  const int64_t state_bytes = cuda::element_bytes(p.state_kind), input_bytes = cuda::element_bytes(p.input_kind);
  const int64_t vector_size = state_vector_bytes(state_bytes, p.tied_A()) / state_bytes;
  const auto is_token_aligned = [&](const GroupView& view, int64_t stride) {
    return is_aligned(view.data, input_bytes, vector_size, {stride});
  };
  if (p.dstate > kWarpSize * vector_size || !is_token_aligned(p.B, tokens.B) || !is_token_aligned(p.C, tokens.C)) return false;
  if (!tokens.rows.has_intermediate) return true;
  const StateView& buffer = tokens.intermediate;
  const std::optional<int64_t> row = row_stride(p, buffer);
  return buffer.stride_state == 1 && row.has_value() && are_narrow({*row}) &&
         is_aligned(buffer.data, state_bytes, vector_size, {buffer.stride_batch, tokens.intermediate_token, *row});
}

Tiling make_tiling(const StateUpdateParams& p, const TokenParams* tokens, int64_t multiprocessors) {
  Tiling tiling;
  const int64_t state_bytes = cuda::element_bytes(p.state_kind);
  tiling.fast = can_be_fast(p) && (tokens == nullptr || can_be_fast(p, *tokens));
  while (tiling.lanes() < kWarpSize && tiling.lanes() * vector_elements(state_bytes, p.tied_A()) < p.dstate)
    ++tiling.log2_lanes;

  tiling.channels_per_group = p.channels() / p.groups;
  int64_t tiles_per_group = 0;
  const auto set_rows = [&](int rows) {
    tiling.rows = rows;
    tiles_per_group = (tiling.channels_per_group + tiling.rows_per_tile() - 1) / tiling.rows_per_tile();
    tiling.tiles = p.batch * p.groups * tiles_per_group;
  };
  // Long tiles do the work that is the same for many rows once; short ones spread over the device. Several for every warp that
  // it runs at a time keep the multiprocessors' shares even (docs/tuning/selective_state_update.md).
  set_rows(tiling.lanes());
  while (tiling.rows > kRowsInFlight && tiling.tiles < multiprocessors * kResidentWarps * kTilesPerWarp)
    set_rows(tiling.rows / 2);
  while (tiling.warps_per_block > 1 && tiling.tiles < multiprocessors * tiling.warps_per_block) tiling.warps_per_block /= 2;

  constexpr int64_t kMaxNarrowTiles = (int64_t(1) << 31) - kMaxWarpsPerBlock;
  tiling.fast = tiling.fast && tiling.tiles < kMaxNarrowTiles;
  tiling.batch_fastest = !p.tied_A();
  tiling.tiles_per_batch = cuda::Divisor(p.groups * tiles_per_group);
  tiling.tiles_per_group = cuda::Divisor(tiles_per_group);
  tiling.batch = cuda::Divisor(p.batch);
  tiling.headdim = cuda::Divisor(p.headdim);
  tiling.state_stride_row = row_stride(p, p.state).value_or(0);
  tiling.A_stride_row = row_stride(p, p.A).value_or(0);
  return tiling;
}

// The stride between neighboring channels, if there is one.
std::optional<int64_t> channel_stride(const StateUpdateParams& p, const ChannelView& view) {
  if (p.heads == 1) return view.stride_dim;
  if (p.headdim == 1 || view.stride_head == p.headdim * view.stride_dim) return view.stride_head / p.headdim;
  return std::nullopt;
}

// The strides of two axes of `sizes` entries, if all offsets of elements fit 32 bits.
std::optional<StepParams::Strides> step_strides(int64_t batch, int64_t batch_stride, int64_t channels,
                                                std::optional<int64_t> channel_stride) {
  constexpr int64_t kMost = int64_t(1) << 31;  // together with a row's elements below 2^32
  if (!channel_stride.has_value() || batch_stride < 0 || *channel_stride < 0) return std::nullopt;
  const auto extent = [&](int64_t size, int64_t stride) { return stride > kMost ? kMost : (size - 1) * stride; };
  if (batch >= kMost || channels >= kMost || extent(batch, batch_stride) + extent(channels, *channel_stride) >= kMost) {
    return std::nullopt;
  }
  return StepParams::Strides{static_cast<uint32_t>(batch > 1 ? batch_stride : 0),
                             static_cast<uint32_t>(channels > 1 ? *channel_stride : 0)};
}

struct StepCall {
  StepParams params;
  StepTiling tiling;
};

// The step kernel's call (launch.h), if it takes this one.
std::optional<StepCall> make_step(const StateUpdateParams& p, int64_t multiprocessors) {
  if (p.tied_A() || p.input_kind == ScalarKind::kDouble || !is_basic(p.discretization)) return std::nullopt;
  if (p.slots < 1 || p.dstate < 1) return std::nullopt;
  for (const int64_t stride : {p.state.stride_state, p.A.stride_state, p.B.stride_state, p.C.stride_state}) {
    if (stride != 1 && p.dstate > 1) return std::nullopt;
  }
  StepCall call;
  StepParams& step = call.params;
  StepTiling& tiling = call.tiling;
  const int64_t channels = p.channels(), channels_per_group = channels / p.groups;
  bool fits = true;
  const auto strides = [&](int64_t batch_stride, int64_t inner, std::optional<int64_t> inner_stride) {
    const auto found = step_strides(p.batch, batch_stride, inner, inner_stride);
    fits = fits && found.has_value();
    return found.value_or(StepParams::Strides());
  };
  const auto of_channels = [&](const ChannelView& view) {
    return view.data == nullptr ? StepParams::Strides() : strides(view.stride_batch, channels, channel_stride(p, view));
  };
  const auto of_groups = [&](const GroupView& view) { return strides(view.stride_batch, p.groups, view.stride_group); };
  step.dt_stride = of_channels(p.dt), step.x_stride = of_channels(p.x);
  step.z_stride = of_channels(p.z), step.out_stride = of_channels(p.out);
  step.B_stride = of_groups(p.B), step.C_stride = of_groups(p.C);
  step.bias_channel = of_channels(p.dt_bias).channel, step.skip_channel = of_channels(p.D).channel;
  step.state_channel = strides(0, channels, row_stride(p, p.state)).channel;
  step.A_channel = strides(0, channels, row_stride(p, p.A)).channel;
  const int64_t state_bytes = cuda::element_bytes(p.state_kind), input_bytes = cuda::element_bytes(p.input_kind);
  const int64_t slot_bytes = p.state.stride_batch * state_bytes;
  constexpr int64_t kMost = int64_t(1) << 32;
  fits = fits && p.slots < kMost && slot_bytes >= 0 && slot_bytes < kMost && p.indices.stride >= 0 &&
         p.indices.stride * p.batch < kMost && channels * step.state_channel * state_bytes < kMost;
  if (!fits) return std::nullopt;

  const auto aligned = [&](const void* data, int64_t bytes, const StepParams::Strides& stride) {
    return is_aligned(data, bytes, kStepVector, {stride.batch, stride.channel});
  };
  const bool row_vectors = p.dstate % kStepVector == 0 && aligned(p.state.data, state_bytes, {0, step.state_channel}) &&
                           is_aligned(p.state.data, state_bytes, kStepVector, {p.state.stride_batch}) &&
                           aligned(p.A.data, p.A_is_input_kind ? input_bytes : int64_t(sizeof(float)), {0, step.A_channel});
  const bool group_vectors = aligned(p.B.data, input_bytes, step.B_stride) && aligned(p.C.data, input_bytes, step.C_stride);
  constexpr int64_t kMostAtOnce = kWarpSize * kStepVector;
  if (row_vectors && group_vectors && p.dstate > kMostAtOnce) return std::nullopt;
  tiling.vectors = row_vectors && p.dstate <= kMostAtOnce;
  while ((kStepVector << step.log2_lanes) < std::min(p.dstate, kMostAtOnce)) ++step.log2_lanes;
  int64_t groups_per_tile = 0;
  const auto set_rows = [&](int rows) {
    // Each of a group's rows has an owner.
    while (rows > 1 << step.log2_lanes) ++step.log2_lanes;
    groups_per_tile = kWarpSize >> step.log2_lanes;
    tiling.rows = rows;
    return p.batch * ((channels + groups_per_tile * rows - 1) / (groups_per_tile * rows));
  };
  int64_t tiles = set_rows(1);
  // One row a lane where all warps run at once (docs/tuning/selective_state_update.md).
  constexpr int64_t kFewWarps = 16;  // of a multiprocessor
  const bool takes_one_row = tiling.vectors && group_vectors && p.discretization == Discretization::kZoh;
  if (!takes_one_row || tiles > multiprocessors * kFewWarps) {
    tiles = set_rows(kRowsInFlight);
    // The rows of a lane share B and C.
    if (p.groups > 1 && channels_per_group % (groups_per_tile * kRowsInFlight) != 0) return std::nullopt;
  }
  constexpr int64_t kMostTiles = int64_t(1) << 26;  // the number of threads fits 32 bits
  if (tiles > kMostTiles) return std::nullopt;
  tiling.tiles = static_cast<uint32_t>(tiles);
  while (tiling.warps_per_block > 1 && tiles < multiprocessors * tiling.warps_per_block) tiling.warps_per_block /= 2;

  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto set = [&](uint32_t flag, bool condition) { step.flags |= condition ? flag : 0; };
  const bool has_bias = p.dt_bias.data != nullptr, has_skip = p.D.data != nullptr;
  set(kHasSlots, p.indices.data != nullptr), set(kSlotsAreInt64, p.indices.is_int64), set(kHasGroups, p.groups > 1);
  set(kA_IsInput, p.A_is_input_kind && input_bytes == 2), set(kA_IsLog, p.A_is_log);
  const bool bias_is_input = p.dt_bias_is_input_kind && input_bytes == 2, skip_is_input = p.D_is_input_kind && input_bytes == 2;
  set(kBiasIsFloat, has_bias && !bias_is_input), set(kBiasIsInput, has_bias && bias_is_input);
  set(kSkipIsFloat, has_skip && !skip_is_input), set(kSkipIsInput, has_skip && skip_is_input);
  set(kHasGate, p.z.data != nullptr), set(kSoftplus, p.dt_softplus);
  set(kRowVectors, row_vectors), set(kGroupElements, !group_vectors);
  set(kClamps, p.dt_min > -kInfinity || p.dt_max < kInfinity);
  step.batch = static_cast<uint32_t>(p.batch), step.channels = static_cast<uint32_t>(channels);
  step.dstate = static_cast<uint32_t>(p.dstate), step.slots = static_cast<uint32_t>(p.slots);
  step.batch_divisor = cuda::Divisor(p.batch), step.group_divisor = cuda::Divisor(channels_per_group);
  step.dt = p.dt.data, step.dt_bias = p.dt_bias.data, step.state = p.state.data, step.A = p.A.data;
  step.B = p.B.data, step.C = p.C.data, step.x = p.x.data, step.D = p.D.data, step.z = p.z.data, step.out = p.out.data;
  step.slot_bytes = static_cast<uint32_t>(slot_bytes);
  step.state_row_bytes = static_cast<uint32_t>(groups_per_tile * step.state_channel * state_bytes);
  step.A_row = static_cast<uint32_t>(groups_per_tile * step.A_channel);
  step.dt_min = static_cast<float>(p.dt_min), step.dt_max = static_cast<float>(p.dt_max);
  step.discretization = p.discretization;
  step.slot_of_row = p.indices.data, step.slot_stride = static_cast<uint32_t>(p.indices.stride);
  return call;
}

// Calls launch(Input(), State()) with the types of the inputs and of the state: theirs or, beside fp16 and bf16 inputs, float.
template <typename Launch>
cudaError_t visit_types(const StateUpdateParams& params, const Launch& launch) {
  return cuda::visit_scalar(params.input_kind, [&](auto input) {
    if constexpr (sizeof(input) == 2) {
      if (params.input_kind != params.state_kind) return launch(input, float());
    }
    return launch(input, input);
  });
}

cudaError_t launch(const StateUpdateParams& params, const MethodParameters& parameters, const TokenParams* tokens,
                   const Tiling& tiling, cudaStream_t stream) {
  return visit_types(params, [&](auto input, auto state) {
    if (!is_basic(params.discretization)) {
      return launch_further_state_update<decltype(input), decltype(state)>(params, parameters, tokens, tiling, stream);
    }
    return launch_selective_state_update<decltype(input), decltype(state)>(params, tokens, tiling, stream);
  });
}

void run(const StateUpdateParams& params, const MethodParameters& parameters, TokenParams* tokens, const at::Tensor& x) {
  const int64_t multiprocessors = cuda::multiprocessor_count(x.get_device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  if (tokens != nullptr) {
    tokens->intermediate_row = row_stride(params, tokens->intermediate).value_or(0);
  } else if (const std::optional<StepCall> step = make_step(params, multiprocessors)) {
    C10_CUDA_CHECK(visit_types(params, [&](auto input, auto state) -> cudaError_t {
      if constexpr (std::is_same_v<decltype(input), double>) {
        return cudaErrorInvalidValue;
      } else {
        return launch_step<decltype(input), decltype(state)>(step->params, step->tiling, stream);
      }
    }));
    return;
  }
  C10_CUDA_CHECK(launch(params, parameters, tokens, make_tiling(params, tokens, multiprocessors), stream));
}

void run_two_samples(const StateUpdateParams& params, const TwoSampleParams& two, const TokenParams* tokens) {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(visit_types(params, [&](auto input, auto state) {
    using Input = decltype(input);
    using State = decltype(state);
    if (two.is_complex) return launch_complex_update<Input>(params, two, tokens, stream);
    if (is_one_sample(params.discretization)) return launch_separate_update<Input, State>(params, two, tokens, stream);
    return launch_two_sample_update<Input, State>(params, two, tokens, stream);
  }));
}

template <typename Step>
struct Cuda {
  using Inputs = Step;
  using TokenParams = selective_state_update::TokenParams;
  struct Guard {
    c10::cuda::CUDAGuard device;

    explicit Guard(const Inputs& in) : device(in.x.device()) {}
  };

  // The kernels do not follow slots outside of the cache.
  template <typename... Arguments>
  static void check_values(const Arguments&...) {}

  static void run(const Inputs& in, const StateUpdateParams& params, TokenParams* tokens) {
    if constexpr (std::is_same_v<Step, TwoSampleInputs>) {
      const bool is_packed = tokens != nullptr && tokens->rows.cu_seqlens.data != nullptr;
      run_two_samples(params, make_two_sample_params(in, is_packed), tokens);
    } else {
      selective_state_update::run(params, parse_method_parameters(in.discretization), tokens, in.x);
    }
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CUDA, m) {
  implement<&DecodingKernels<Cuda<Inputs>>::step>(m, "selective_state_update");
  implement<&DecodingKernels<Cuda<Inputs>>::out>(m, "selective_state_update_out");
  implement<&DecodingKernels<Cuda<TwoSampleInputs>>::step>(m, "selective_state_update_two_sample");
  implement<&DecodingKernels<Cuda<TwoSampleInputs>>::out>(m, "selective_state_update_two_sample_out");
}

}  // namespace ssm_kernels::selective_state_update

#endif
