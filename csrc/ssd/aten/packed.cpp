#include "ssd/aten/packed.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>

#include <map>

#include "torch/checks.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::ssd {
namespace {

OptionalTensor take_steps_if_present(const SequencesOfLength& of, const OptionalTensor& tensor) {
  return is_present(tensor) ? OptionalTensor(of.take_steps(*tensor)) : OptionalTensor();
}

}  // namespace

at::Tensor SequencesOfLength::take_steps(const at::Tensor& tensor) const {
  const at::Tensor of_row = tensor.select(0, 0);
  const at::Tensor taken = are_neighbors ? of_row.narrow(0, begin, count * length) : of_row.index_select(0, steps);
  return taken.unflatten(0, {count, length});
}

at::Tensor SequencesOfLength::take_states(const at::Tensor& states) const {
  return are_neighbors ? states.narrow(0, first, count) : states.index_select(0, sequences);
}

void SequencesOfLength::put_steps(const at::Tensor& values, const at::Tensor& target) const {
  if (!are_neighbors) target.select(0, 0).index_copy_(0, steps, values.flatten(0, 1));
}

void SequencesOfLength::put_states(const at::Tensor& values, const at::Tensor& target) const {
  if (!are_neighbors) target.index_copy_(0, sequences, values);
}

std::vector<SequencesOfLength> sequences_by_length(const Inputs& in) {
  const at::Tensor cu_seqlens = in.cu_seqlens->to(at::Device(at::kCPU), at::kLong).contiguous();
  check_cu_seqlens_values("ssd_chunk_scan", cu_seqlens, in.x.size(1));
  const int64_t* const begins = cu_seqlens.const_data_ptr<int64_t>();
  std::map<int64_t, std::vector<int64_t>> numbers;
  for (int64_t i = 0; i + 1 < cu_seqlens.numel(); ++i) numbers[begins[i + 1] - begins[i]].push_back(i);
  std::vector<SequencesOfLength> result;
  for (const auto& [length, sequences] : numbers) {
    const int64_t count = static_cast<int64_t>(sequences.size()), first = sequences.front();
    SequencesOfLength of{length, count, first, begins[first], sequences.back() - first + 1 == count, {}, {}};
    if (!of.are_neighbors) {
      const at::Tensor on_host = at::tensor(sequences, at::kLong);
      of.sequences = on_host.to(in.x.device());
      of.steps = cu_seqlens.index_select(0, on_host).unsqueeze(1).add(at::arange(length)).flatten().to(in.x.device());
    }
    result.push_back(of);
  }
  return result;
}

Inputs packed_batch(const Inputs& call, const SequencesOfLength& of) {
  Inputs batch = call;
  batch.x = of.take_steps(call.x);
  batch.dt = of.take_steps(call.dt);
  batch.B = of.take_steps(call.B);
  batch.C = of.take_steps(call.C);
  batch.z = take_steps_if_present(of, call.z);
  if (is_present(call.initial_states)) batch.initial_states = of.take_states(*call.initial_states);
  batch.seq_idx.reset();
  batch.cu_seqlens.reset();
  return batch;
}

}  // namespace ssm_kernels::ssd
