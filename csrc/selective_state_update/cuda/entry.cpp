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

#include "cuda/device.h"
#include "cuda/scalar_types.h"
#include "selective_state_update/selective_state_update_op.h"
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
  // it runs at a time keep the multiprocessors' shares even (docs/tuning.md).
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

cudaError_t launch(const StateUpdateParams& params, const TokenParams* tokens, const Tiling& tiling, cudaStream_t stream) {
  return cuda::visit_scalar(params.input_kind, [&](auto input) {
    using Input = decltype(input);
    // The state has the type of the inputs or, beside fp16 and bf16 inputs, is float32.
    if constexpr (sizeof(Input) == 2) {
      if (params.input_kind != params.state_kind) {
        return launch_selective_state_update<Input, float>(params, tokens, tiling, stream);
      }
    }
    return launch_selective_state_update<Input, Input>(params, tokens, tiling, stream);
  });
}

void run(const StateUpdateParams& params, TokenParams* tokens, const at::Tensor& x) {
  if (tokens != nullptr) tokens->intermediate_row = row_stride(params, tokens->intermediate).value_or(0);
  const Tiling tiling = make_tiling(params, tokens, cuda::multiprocessor_count(x.get_device()));
  C10_CUDA_CHECK(launch(params, tokens, tiling, c10::cuda::getCurrentCUDAStream()));
}

NoResult cuda_out(const OutInputs& in) {
  const Discretization method = check_out_inputs(in);
  const c10::cuda::CUDAGuard guard(in.x.device());
  TokenParams tokens;
  const StateUpdateParams params = make_out_params(in, method, tokens);
  if (in.out.numel() > 0) run(params, in.is_one_step() ? nullptr : &tokens, in.x);
  return {};
}

at::Tensor cuda(const Inputs& in) {
  const Discretization method = check_inputs(in);
  const c10::cuda::CUDAGuard guard(in.x.device());
  at::Tensor out = allocate_out(in);
  if (!in.is_one_step()) {
    cuda_out(OutInputs(in, out));
  } else if (out.numel() > 0) {
    run(make_params(in, method, out), /*tokens=*/nullptr, in.x);
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CUDA, m) {
  implement<&cuda>(m, "selective_state_update");
  implement<&cuda_out>(m, "selective_state_update_out");
}

}  // namespace ssm_kernels::selective_state_update

#endif
