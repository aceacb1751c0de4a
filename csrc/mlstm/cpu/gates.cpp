// The gates of mlstm_scan on the CPU: log decays and gains of all steps from the pre-activations, and m, their running unit.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/log_sigmoid.h>

#include <limits>

#include "common/mlstm_gates.h"
#include "mlstm/mlstm_op.h"
#include "torch/allocation.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::mlstm {
namespace {

// Sequence `sequence` has the steps from `begin` to before `end` of the packed steps or of all rows of the batch, one after
// another. `resets`, null for none, marks those before which the memory is emptied, but for the first. `decay` has log
// sigmoid(f) and becomes the log decays; `gain` has i and becomes the gains.
template <typename T>
void scan_units(T* decay, T* gain, T* m, T* unit, const bool* resets, int64_t begin, int64_t end, int64_t heads, bool is_exp) {
  constexpr T kNone = -std::numeric_limits<T>::infinity();
  for (int64_t t = begin; t < end; ++t) {
    const bool is_reset = resets != nullptr && t > begin && resets[t];
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t at = t * heads + h;
      const T before = is_reset ? kNone : unit[h], next = unit_after(before, gain[at], decay[at], is_exp);
      decay[at] = log_decay_between(before, next, decay[at]);
      gain[at] = input_gain(gain[at], next, is_exp);
      m[at] = unit[h] = next;
    }
  }
}

}  // namespace

Gates gates_cpu(const Inputs& in) {
  const bool is_exp = parse_input_gate("mlstm_scan", in.input_gate) == InputGate::kExp;
  const int64_t batch = in.q.size(0), seqlen = in.q.size(1), heads = in.q.size(2);
  const at::ScalarType dtype = accumulate_type(in.q.scalar_type());
  const at::Tensor bounds = is_present(in.cu_seqlens) ? in.cu_seqlens->to(at::kLong).contiguous() : at::Tensor();
  const at::Tensor resets = is_present(in.seq_idx) ? sequence_starts(*in.seq_idx).contiguous() : at::Tensor();
  const int64_t sequences = bounds.defined() ? bounds.size(0) - 1 : batch;

  Gates gates;
  gates.log_decay = at::log_sigmoid(in.f.to(dtype).contiguous());
  gates.gain = in.i.to(dtype, /*non_blocking=*/false, /*copy=*/true, at::MemoryFormat::Contiguous);
  gates.m = empty_tensor({batch, seqlen, heads}, gates.gain.options());
  gates.final_m = empty_tensor({sequences, heads}, gates.gain.options());
  if (is_present(in.initial_m)) {
    gates.final_m.copy_(*in.initial_m);
  } else {
    gates.final_m.fill_(-std::numeric_limits<double>::infinity());
  }
  AT_DISPATCH_FLOATING_TYPES(dtype, "mlstm_gates", [&] {
    scalar_t* const decay = gates.log_decay.mutable_data_ptr<scalar_t>();
    scalar_t* const gain = gates.gain.mutable_data_ptr<scalar_t>();
    scalar_t* const m = gates.m.mutable_data_ptr<scalar_t>();
    scalar_t* const unit = gates.final_m.mutable_data_ptr<scalar_t>();
    const bool* const is_reset = resets.defined() ? resets.const_data_ptr<bool>() : nullptr;
    at::parallel_for(0, sequences, 1, [&](int64_t first, int64_t last) {
      for (int64_t sequence = first; sequence < last; ++sequence) {
        const int64_t* const at = bounds.defined() ? bounds.const_data_ptr<int64_t>() + sequence : nullptr;
        const int64_t begin = at == nullptr ? sequence * seqlen : at[0], end = at == nullptr ? begin + seqlen : at[1];
        scan_units(decay, gain, m, unit + sequence * heads, is_reset, begin, end, heads, is_exp);
      }
    });
  });
  return gates;
}

}  // namespace ssm_kernels::mlstm
