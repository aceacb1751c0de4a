#ifdef SSM_KERNELS_WITH_CUDA

#include "delta_rule/cuda/segments.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "common/integers.h"

namespace ssm_kernels::delta_rule {

bool is_one_row(const at::Tensor& tensor) {
  return tensor.size(0) == 1 || tensor.stride(0) == tensor.size(1) * tensor.stride(1);
}

at::Tensor as_one_row(const at::Tensor& tensor) {
  std::vector<int64_t> sizes = tensor.sizes().vec(), strides = tensor.strides().vec();
  sizes[1] *= sizes[0];
  sizes[0] = 1;
  return tensor.as_strided(sizes, strides);
}

at::Tensor segment_bounds(int64_t batch, int64_t seqlen, int64_t chunks, const at::TensorOptions& options) {
  const at::TensorOptions longs = options.dtype(at::kLong);
  const at::Tensor of_row = at::arange(0, seqlen, chunks * kChunk, longs);
  return at::cat(
      {at::arange(0, batch * seqlen, seqlen, longs).unsqueeze(1).add(of_row).flatten(), at::full({1}, batch * seqlen, longs)});
}

at::Tensor map_starts(int64_t segments, int64_t heads, int64_t value_dim, int64_t key_dim, const at::TensorOptions& fp32) {
  const int64_t first = round_up(value_dim, int64_t{kStateRows});
  const at::Tensor result = at::zeros({segments, heads, first + key_dim, key_dim}, fp32);
  result.narrow(2, first, key_dim).diagonal(0, 2, 3).fill_(1);
  return result;
}

DeltaRuleFoldParams fold_of(const at::Tensor& maps, int64_t batch, int64_t value_dim) {
  DeltaRuleFoldParams params;
  params.batch = batch;
  params.heads = maps.size(1);
  params.segments = static_cast<int>(maps.size(0) / batch);
  params.headdim = static_cast<int>(value_dim);
  params.dstate = static_cast<int>(maps.size(3));
  params.map_rows = static_cast<int>(maps.size(2));
  params.maps = maps.const_data_ptr<float>();
  return params;
}

}  // namespace ssm_kernels::delta_rule

#endif
