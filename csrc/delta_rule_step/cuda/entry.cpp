// CUDA entry point of delta_rule_step: chooses the kernel and the cut of the work, and launches on the current stream without
// waiting for it or reading anything from the device, so that it can be captured in a CUDA graph.

#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>

#include "cuda/device.h"
#include "cuda/scalar_types.h"
#include "delta_rule_step/cuda/launch.h"
#include "delta_rule_step/delta_rule_step_op.h"
#include "torch/decoding_op.h"
#include "torch/dispatch.h"

namespace ssm_kernels::delta_rule_step {
namespace {

constexpr int64_t kTilesPerMultiprocessor = 80;  // four for each warp that is resident
constexpr int kMostRowsOfTile = 32;

// Whether the step kernel takes the states of a view, whose tokens are `token` elements apart: whole vectors, and offsets of
// rows that fit 32 bits.
bool has_vectors(const StateView& view, int64_t element_bytes, int64_t token = 0) {
  const auto aligned = [&](int64_t stride) { return stride * element_bytes % kVectorBytes == 0; };
  return view.stride_column == 1 && reinterpret_cast<int64_t>(view.data) % kVectorBytes == 0 && aligned(view.stride_slot) &&
         aligned(view.stride_head) && aligned(view.stride_row) && aligned(token) && view.stride_row >= 0 &&
         view.stride_row < int64_t(1) << 31;
}

// Whether the kernel of one token and one update takes a call of one token a row.
bool takes_one_token(const StepParams& p, const Tiling& tiling) {
  return !tiling.staged && tiling.vectors == 1 && p.updates == 1;
}

Tiling make_tiling(const StepParams& p, const TokenParams* tokens, int64_t multiprocessors, int64_t max_shared_bytes) {
  Tiling tiling;
  const int64_t state_bytes = cuda::element_bytes(p.state_kind);
  const int64_t size = kVectorBytes / state_bytes, row_vectors = (p.key_dim + size - 1) / size;
  tiling.vectors = row_vectors <= kWarpSize ? 1 : most_vectors(state_bytes);
  while (tiling.lanes() > kMinLanes && tiling.lanes() / 2 * tiling.vectors >= row_vectors) --tiling.log2_lanes;
  const bool has_intermediate = tokens != nullptr && tokens->rows.has_intermediate;
  tiling.staged = p.input_kind == ScalarKind::kDouble || p.key_dim % size != 0 || !has_vectors(p.state, state_bytes) ||
                  (has_intermediate && !has_vectors(tokens->intermediate, state_bytes, tokens->intermediate_token));
  tiling.rows_are_contiguous = p.state.stride_column != 1 && std::abs(p.state.stride_row) < std::abs(p.state.stride_column);

  int64_t tiles_per_head = 0;
  // Returns the number of tiles of the call.
  const auto set_batches = [&](int batches) {
    tiling.batches = batches;
    tiles_per_head = (p.value_dim + tiling.rows_per_tile() - 1) / tiling.rows_per_tile();
    return p.rows * p.value_heads * tiles_per_head;
  };
  int64_t tiles = 0;
  if (tiling.staged) {
    const int rows = static_cast<int>(kStagedRowBytes / state_bytes);
    tiles = set_batches(std::max(1, rows / (kRowsInFlight * tiling.groups())));
  } else {
    tiles = set_batches(batches_at_once(tiling.vectors));
    // Long tiles load the inputs of a head once for many rows; short ones spread over the device.
    while (tokens == nullptr && takes_one_token(p, tiling) && tiles > multiprocessors * kTilesPerMultiprocessor &&
           tiling.rows_per_tile() < kMostRowsOfTile && tiling.rows_per_tile() < p.value_dim) {
      tiles = set_batches(2 * tiling.batches);
    }
  }
  const int64_t warp_bytes =
      shared_bytes_of_warp(tiling, state_bytes, p.input_kind == ScalarKind::kDouble ? sizeof(double) : sizeof(float));
  while (tiling.warps_per_block > 1 &&
         (tiles < multiprocessors * tiling.warps_per_block || tiling.warps_per_block * warp_bytes > max_shared_bytes)) {
    tiling.warps_per_block /= 2;
  }
  tiling.tiles_per_head = cuda::Divisor(tiles_per_head);
  tiling.heads = cuda::Divisor(p.value_heads);
  tiling.heads_per_key = cuda::Divisor(p.heads_per_key());
  return tiling;
}

void run(const StepParams& params, const TokenParams* tokens, const at::Tensor& q) {
  const Tiling tiling =
      make_tiling(params, tokens, cuda::multiprocessor_count(q.get_device()), cuda::max_shared_bytes(q.get_device()));
  TokenParams one_token;
  if (tokens == nullptr && !takes_one_token(params, tiling)) {
    one_token.rows.rows = params.rows;
    one_token.rows.read_slots = one_token.rows.write_slots = params.slot_of_row;
    tokens = &one_token;
  }
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(cuda::visit_scalar(params.input_kind, [&](auto input) {
    using Input = decltype(input);
    if constexpr (sizeof(Input) == 2) {
      if (params.input_kind != params.state_kind) {
        return launch_delta_rule_step<Input, float>(params, tokens, tiling, stream);
      }
    }
    return launch_delta_rule_step<Input, Input>(params, tokens, tiling, stream);
  }));
}

struct Cuda {
  using Inputs = delta_rule_step::Inputs;
  using TokenParams = delta_rule_step::TokenParams;
  struct Guard {
    c10::cuda::CUDAGuard device;

    explicit Guard(const Inputs& in) : device(in.q.device()) {}
  };

  // The kernels do not follow slots outside of the cache.
  template <typename... Arguments>
  static void check_values(const Arguments&...) {}

  static void run(const Inputs& in, const StepParams& params, const TokenParams* tokens) {
    delta_rule_step::run(params, tokens, in.q);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CUDA, m) {
  implement<&DecodingKernels<Cuda>::step>(m, "delta_rule_step");
  implement<&DecodingKernels<Cuda>::out>(m, "delta_rule_step_out");
}

}  // namespace ssm_kernels::delta_rule_step

#endif
