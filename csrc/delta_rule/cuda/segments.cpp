#ifdef SSM_KERNELS_WITH_CUDA

#include "delta_rule/cuda/segments.h"

#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <vector>

#include "common/integers.h"
#include "delta_rule/cuda/launch.h"
#include "torch/allocation.h"

namespace ssm_kernels::delta_rule {

int64_t chunks_of_segment(const SegmentedWork& work, const SegmentTimes& times, int64_t multiprocessors) {
  const auto blocks_of = [&](int64_t tiles) { return work.lines * ceil_div(tiles, int64_t{kWarpgroups}); };
  const int64_t tiles = row_blocks(work.value_dim), blocks = blocks_of(tiles),
                map_blocks = blocks_of(tiles + row_blocks(work.key_dim)), rest = work.are_packed ? 1 : 0;
  int64_t best = 0, least = 4 * times.chunk * work.chunks / 5;
  // A packed sequence may have one more segment than the mean.
  for (int64_t segments = 3; segments <= std::min(multiprocessors / blocks - rest, work.chunks); ++segments) {
    // The first segment's maps have no T, and the last one has none (segment_maps.cuh).
    const int64_t length = ceil_div(work.chunks, segments),
                  waves = ceil_div(blocks + (segments + rest - 2) * map_blocks, multiprocessors),
                  busy = times.busy_chunk * blocks * segments / multiprocessors,
                  time = times.launches + (times.chunk + busy + times.map_chunk * waves) * length + times.fold * segments;
    if (time < least) {
      least = time;
      best = length;
    }
  }
  return best;
}

bool is_one_row(const at::Tensor& tensor) {
  return tensor.size(0) == 1 || tensor.stride(0) == tensor.size(1) * tensor.stride(1);
}

at::Tensor as_one_row(const at::Tensor& tensor) {
  std::vector<int64_t> sizes = tensor.sizes().vec(), strides = tensor.strides().vec();
  sizes[1] *= sizes[0];
  sizes[0] = 1;
  return tensor.as_strided(sizes, strides);
}

Segments cut_sequences(const at::Tensor& cu_seqlens, int64_t rows, int64_t seqlen, int64_t chunks,
                       const at::TensorOptions& options) {
  Segments result;
  const bool are_packed = cu_seqlens.defined();
  const int64_t steps = chunks * kChunk;
  result.sequences = are_packed ? cu_seqlens.size(0) - 1 : rows;
  result.places = are_packed ? seqlen / steps + result.sequences : rows * ceil_div(seqlen, steps);
  const at::Tensor memory = empty_tensor({result.places + 1 + 2 * result.sequences + 1}, options.dtype(at::kLong));
  result.bounds = memory.narrow(0, 0, result.places + 1);
  result.first = memory.narrow(0, result.places + 1, result.sequences + 1);
  result.last = memory.narrow(0, result.places + result.sequences + 2, result.sequences);
  DeltaRuleSegmentsParams params;
  params.sequences = result.sequences;
  params.places = result.places;
  params.segment_steps = steps;
  params.seqlen = seqlen;
  if (are_packed) params.cu_seqlens = cu_seqlens.const_data_ptr<int64_t>();
  params.bounds = result.bounds.data_ptr<int64_t>();
  params.first_segments = result.first.data_ptr<int64_t>();
  params.last_segments = result.last.data_ptr<int64_t>();
  C10_CUDA_CHECK(launch_delta_rule_segments(params, c10::cuda::getCurrentCUDAStream()));
  return result;
}

at::Tensor map_starts(const Segments& segments, int64_t heads, int64_t value_dim, int64_t key_dim, const at::Tensor& states,
                      bool is_reverse, const at::TensorOptions& options) {
  const int64_t first = round_up(value_dim, int64_t{kStateRows});
  const at::Tensor result = at::zeros({segments.places, heads, first + key_dim, key_dim}, options.dtype(at::kFloat));
  result.narrow(2, first, key_dim).diagonal(0, 2, 3).fill_(1);
  if (!states.defined()) return result;
  const at::Tensor places = is_reverse ? segments.last : segments.first.narrow(0, 0, segments.sequences);
  at::Tensor(result.narrow(2, 0, value_dim)).index_copy_(0, places, states);
  return result;
}

void describe_maps(DeltaRuleBwdParams& params, const Segments& segments, int64_t value_dim, const at::Tensor& starts,
                   const at::Tensor& maps) {
  params.headdim = static_cast<int>(maps.size(2));
  params.first_segments = segments.first.const_data_ptr<int64_t>();
  params.sequences = segments.sequences;
  params.value_rows = static_cast<int>(value_dim);
  params.initial_states = starts.const_data_ptr<float>();
  params.final_states = maps.data_ptr<float>();
  params.states_stride_entry = maps.stride(0);
}

void fold_maps(const Segments& segments, const at::Tensor& maps, const at::Tensor& states, bool is_reverse,
               const at::Tensor& starts) {
  const at::Tensor given = states.defined() ? states.contiguous() : states;
  DeltaRuleFoldParams params;
  params.sequences = segments.sequences;
  params.heads = starts.size(1);
  params.headdim = static_cast<int>(starts.size(2));
  params.dstate = static_cast<int>(starts.size(3));
  params.map_rows = static_cast<int>(maps.size(2));
  params.is_reverse = is_reverse;
  params.first_segments = segments.first.const_data_ptr<int64_t>();
  params.maps = maps.const_data_ptr<float>();
  if (given.defined()) params.states = given.const_data_ptr<float>();
  params.starts = starts.data_ptr<float>();
  C10_CUDA_CHECK(launch_delta_rule_fold(params, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace ssm_kernels::delta_rule

#endif
