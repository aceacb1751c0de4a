#include "ssd/aten/packed.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>

#include <map>

#include "torch/allocation.h"
#include "torch/checks.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::ssd {

at::Tensor SequenceRows::take(const at::Tensor& tensor) const {
  const at::Tensor rows = are_steps ? tensor.select(0, 0) : tensor;
  const at::Tensor taken = indices.defined() ? rows.index_select(0, indices) : rows.narrow(0, first, sequences * length);
  return are_steps ? taken.unflatten(0, {sequences, length}) : taken;
}

OptionalTensor SequenceRows::take(const OptionalTensor& tensor) const {
  return is_present(tensor) ? OptionalTensor(take(*tensor)) : OptionalTensor();
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

std::vector<SequencesOfLength> sequences_by_length(const Inputs& in) {
  const at::Tensor cu_seqlens = in.cu_seqlens->to(at::Device(at::kCPU), at::kLong).contiguous();
  check_cu_seqlens_values("ssd_chunk_scan", cu_seqlens, in.x.size(1));
  const int64_t* const begins = cu_seqlens.const_data_ptr<int64_t>();
  std::map<int64_t, std::vector<int64_t>> by_length;
  for (int64_t i = 0; i + 1 < cu_seqlens.numel(); ++i) by_length[begins[i + 1] - begins[i]].push_back(i);
  std::vector<SequencesOfLength> result;
  for (const auto& [length, sequences] : by_length) {
    const int64_t count = static_cast<int64_t>(sequences.size()), first = sequences.front();
    SequencesOfLength of{{true, begins[first], count, length, {}}, {false, first, count, 1, {}}};
    if (sequences.back() - first + 1 != count) {
      const at::Tensor on_host = at::tensor(sequences, at::kLong);
      of.states.indices = on_host.to(in.x.device());
      of.steps.indices = cu_seqlens.index_select(0, on_host).unsqueeze(1).add(at::arange(length)).flatten().to(in.x.device());
    }
    result.push_back(of);
  }
  return result;
}

Inputs packed_batch(const Inputs& call, const SequencesOfLength& of) {
  Inputs batch = call;
  for (at::Tensor* sequence : {&batch.x, &batch.B, &batch.C}) *sequence = of.steps.take(*sequence);
  for (OptionalTensor* sequence : {&batch.dt, &batch.z, &batch.log_decay, &batch.gain}) *sequence = of.steps.take(*sequence);
  batch.initial_states = of.states.take(call.initial_states);
  batch.seq_idx = of.steps.take(call.seq_idx);
  batch.cu_seqlens.reset();
  return batch;
}

}  // namespace ssm_kernels::ssd
