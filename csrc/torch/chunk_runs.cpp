#include "torch/chunk_runs.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#include <algorithm>

namespace ssm_kernels {
namespace {

// Approximate size of a run's temporaries: large enough to amortize the calls of matmuls, and small enough for a CPU's caches.
constexpr int64_t kCpuRunBytes = int64_t(8) << 20, kDeviceRunBytes = int64_t(1) << 30;

}  // namespace

at::Tensor zero_where_(at::Tensor values, const at::Tensor& mask) {
  if (!mask.defined()) return values;
  std::vector<int64_t> shape = mask.sizes().vec();
  shape.resize(values.dim(), 1);
  return values.masked_fill_(mask.view(shape), 0);
}

at::Tensor sum_across(const at::Tensor& V) {
  const int64_t length = V.size(-1);
  const at::Tensor is_later = at::ones({length, length}, V.options()).triu_(1);
  return at::mm(V.view({-1, length}), is_later).view(V.sizes()).tril_().sum(-2);
}

// Above the diagonal the exponential may overflow: callers overwrite the result there, and do not multiply it by zero.
static at::Tensor exp_of_all_differences(const at::Tensor& a, const at::Tensor& b, const at::TensorOptions& options) {
  const at::ScalarType dtype = options.dtype().toScalarType();
  const at::Tensor high_a = a.to(dtype), high_b = b.to(dtype);
  at::Tensor result = high_a.unsqueeze(-1) - high_b.unsqueeze(-2);
  if (dtype != at::kDouble) {
    result.add_((a - high_a).to(dtype).unsqueeze(-1)).sub_((b - high_b).to(dtype).unsqueeze(-2));
  }
  return result.exp_();
}

at::Tensor exp_of_differences(const at::Tensor& cs, const at::TensorOptions& options) {
  return exp_of_all_differences(cs, cs, options).tril_();
}

at::Tensor exp_of_differences(const at::Tensor& a, const at::Tensor& b, const at::TensorOptions& options) {
  return exp_of_all_differences(a, b, options).tril_(-1);
}

ChunkRuns::ChunkRuns(const at::Tensor& like, int64_t chunk_length, int64_t bytes_per_chunk, bool reverse)
    : batch(like.size(0)),
      seqlen(like.size(1)),
      chunk_length(chunk_length),
      reverse(reverse),
      chunks_per_run_(
          std::max<int64_t>(1, (like.is_cpu() ? kCpuRunBytes : kDeviceRunBytes) / std::max<int64_t>(1, bytes_per_chunk))),
      is_empty_(bytes_per_chunk == 0) {}

std::vector<Part> ChunkRuns::parts() const {
  std::vector<Part> result;
  for (int64_t row = 0; row < batch; row += chunks_per_run_) result.push_back({row, std::min(chunks_per_run_, batch - row)});
  return result;
}

std::vector<Run> ChunkRuns::runs(const Part& part, at::IntArrayRef bounds) const {
  std::vector<Run> result;
  if (is_empty_) return result;
  const int64_t most = std::max<int64_t>(1, chunks_per_run_ / part.rows);
  for (int64_t begin = 0; begin < seqlen; begin += result.back().steps()) {
    const auto* bound = std::find_if(bounds.begin(), bounds.end(), [&](int64_t position) {
      return position > begin && (position - begin) % chunk_length != 0;
    });
    const int64_t steps = (bound == bounds.end() ? seqlen : *bound) - begin, length = std::min(chunk_length, steps);
    result.push_back({part.row, part.rows, begin, std::min(most, steps / length), length});
  }
  return result;
}

std::vector<Run> ChunkRuns::long_runs(const Part& part) const {
  std::vector<Run> result;
  if (is_empty_) return result;
  const int64_t most = std::max<int64_t>(1, chunks_per_run_ / part.rows) * chunk_length;
  for (int64_t begin = 0; begin < seqlen; begin += most) {
    result.push_back({part.row, part.rows, begin, 1, std::min(most, seqlen - begin)});
  }
  return result;
}

at::Tensor ChunkRuns::run_of(const at::Tensor& tensor, const Run& run) {
  return tensor.narrow(0, run.row, run.rows)
      .narrow(1, run.begin, run.steps())
      .unflatten(1, {run.chunks, run.length})
      .transpose(0, 1);
}

Run ChunkRuns::mirrored(const Run& run) const {
  Run result = run;
  result.begin = seqlen - run.begin - run.steps();
  return result;
}

at::Tensor ChunkRuns::read(const at::Tensor& argument, const Run& run) const {
  return reverse ? run_of(argument, mirrored(run)).flip({0, 2}) : run_of(argument, run);
}

void ChunkRuns::write(const at::Tensor& result, const Run& run, const at::Tensor& values) const {
  if (reverse) {
    run_of(result, mirrored(run)).copy_(values.flip({0, 2}));
  } else {
    run_of(result, run).copy_(values);
  }
}

}  // namespace ssm_kernels
