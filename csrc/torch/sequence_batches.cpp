#include "torch/sequence_batches.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <map>

#include "torch/allocation.h"
#include "torch/checks.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels {

at::Tensor SequenceRows::take(const at::Tensor& tensor) const {
  const at::Tensor rows = are_steps ? tensor.select(0, 0) : tensor;
  const at::Tensor taken = indices.defined() ? rows.index_select(0, indices) : rows.narrow(0, first, sequences * length);
  return are_steps ? taken.unflatten(0, {sequences, length}) : taken;
}

std::optional<at::Tensor> SequenceRows::take(const std::optional<at::Tensor>& tensor) const {
  return is_present(tensor) ? std::optional<at::Tensor>(take(*tensor)) : std::nullopt;
}

at::Tensor SequenceRows::place(const at::Tensor& result) const {
  if (!indices.defined()) return take(result);
  std::vector<int64_t> sizes = result.sizes().vec();
  sizes[0] = sequences;
  if (are_steps) sizes[1] = length;
  return empty_tensor(c10::fromIntArrayRefSlow(sizes), result.options());
}

void SequenceRows::put(const at::Tensor& values, const at::Tensor& result) const {
  if (!indices.defined()) return;
  if (are_steps) {
    result.select(0, 0).index_copy_(0, indices, values.flatten(0, 1));
  } else {
    result.index_copy_(0, indices, values);
  }
}

std::vector<SequencesOfLength> sequences_by_length(std::string_view op, const at::Tensor& cu_seqlens, int64_t seqlen,
                                                   at::Device device, at::IntArrayRef positions) {
  const at::Tensor bounds = cu_seqlens.to(at::Device(at::kCPU), at::kLong).contiguous();
  check_cu_seqlens_values(op, bounds, seqlen);
  const int64_t* const begins = bounds.const_data_ptr<int64_t>();
  std::map<int64_t, std::vector<int64_t>> by_length;
  std::vector<SequencesOfLength> result;
  for (int64_t i = 0; i + 1 < bounds.numel(); ++i) {
    const int64_t begin = begins[i], length = begins[i + 1] - begin;
    const auto has = [&](int64_t position) { return is_in_sequence(position, begin, length); };
    if (std::any_of(positions.begin(), positions.end(), has)) {
      result.push_back({{true, begin, 1, length, {}}, {false, i, 1, 1, {}}});
    } else {
      by_length[length].push_back(i);
    }
  }
  for (const auto& [length, sequences] : by_length) {
    const int64_t count = static_cast<int64_t>(sequences.size()), first = sequences.front();
    SequencesOfLength of{{true, begins[first], count, length, {}}, {false, first, count, 1, {}}};
    if (sequences.back() - first + 1 != count) {
      const at::Tensor on_host = at::tensor(sequences, at::kLong);
      of.states.indices = on_host.to(device);
      of.steps.indices = bounds.index_select(0, on_host).unsqueeze(1).add(at::arange(length)).flatten().to(device);
    }
    result.push_back(of);
  }
  return result;
}

}  // namespace ssm_kernels
