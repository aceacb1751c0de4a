// The decoding step of xLSTM's matrix memory on the CPU: the memory of one head is updated in place, row by row. A SIMD lane
// has a column. Each row of C is read and written once. This file is compiled once per instruction set.

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "common/integers.h"
#include "common/mlstm_gates.h"
#include "cpu/scalar_types.h"
#include "cpu/tile_io.h"
#include "cpu/vec_math.h"
#include "mlstm/cpu/step_kernels.h"

namespace ssm_kernels::mlstm::step {
inline namespace CPU_CAPABILITY {
namespace {

// Loads a row, followed by zeros up to a whole vector.
template <typename Acc, typename Scalar>
void load_columns(Acc* target, const Scalar* source, int64_t stride, int64_t columns) {
  if (stride == 1) {
    load_row(target, source, columns);
  } else {
    for (int64_t c = 0; c < columns; ++c) target[c] = static_cast<Acc>(source[c * stride]);
    std::fill(target + columns, target + round_up(columns, Vec<Acc>::size()), Acc(0));
  }
}

template <typename Input, typename State>
void run(const StepParams& p, int64_t row, int64_t head, std::byte* scratch) {
  using Acc = AccumulateType<Input>;
  using V = Vec<Acc>;
  constexpr int64_t kSize = V::size();
  const int64_t columns = p.key_dim, padded = round_up(columns, kSize), slot = p.slot(row);
  Input* const out = static_cast<Input*>(p.out.data) + p.out.offset(row, head);
  if (slot < 0) {
    for (int64_t r = 0; r < p.value_dim; ++r) out[r * p.out.stride_column] = Input(0);
    return;
  }
  Acc *const k = reinterpret_cast<Acc*>(scratch), *const q = k + kMaxKeyDim, *const gathered = q + kMaxKeyDim;
  const auto token = [&](const TokenView& view) { return static_cast<const Input*>(view.data) + view.offset(row, head); };
  const auto gate = [&](const TokenView& view) {
    return view.is_input_kind ? static_cast<Acc>(*token(view)) : static_cast<const Acc*>(view.data)[view.offset(row, head)];
  };
  load_columns(k, token(p.k), p.k.stride_column, columns);
  load_columns(q, token(p.q), p.q.stride_column, columns);

  Acc* const m = static_cast<Acc*>(p.m.data) + p.m.offset(slot, head);
  const Acc i = gate(p.i), log_forget = log_sigmoid(gate(p.f)), unit = unit_after(*m, i, log_forget, p.is_exp);
  const Acc decay = Math<Acc>::exp(log_decay_between(*m, unit, log_forget)), gain = input_gain(i, unit, p.is_exp);
  *m = unit;
  Acc factor = static_cast<Acc>(p.scale);
  if (p.normalize) {
    Acc* const n = static_cast<Acc*>(p.n.data) + p.n.offset(slot, head);
    Acc product = 0;
    for (int64_t c = 0; c < columns; ++c) {
      Acc& value = n[c * p.n.stride_column];
      // An empty memory may hold anything.
      value = (decay == Acc(0) ? Acc(0) : decay * value) + gain * k[c];
      product = std::fma(value, q[c], product);
    }
    const Acc size = std::abs(factor * product), floor = Math<Acc>::exp(-unit);
    factor /= (size > floor || size != size ? size : floor) + static_cast<Acc>(p.eps);
  }

  const Input* const v = token(p.v);
  for (int64_t r = 0; r < p.value_dim; ++r) {
    State* const states = static_cast<State*>(p.C.data) + p.C.offset(slot, head) + r * p.C.stride_row;
    const Acc added = gain * static_cast<Acc>(v[r * p.v.stride_column]);
    V sums(Acc(0));
    if (p.C.stride_column == 1) {
      for (int64_t c = 0; c < columns; c += kSize) {
        const int64_t count = std::min(kSize, columns - c);
        const V old = decay == Acc(0) ? V(Acc(0)) : V(decay) * load_as<Acc>(states + c, count);
        const V value = at::vec::fmadd(V(added), V::loadu(k + c), old);
        store_as<Acc>(states + c, value, count);
        sums = at::vec::fmadd(value, V::loadu(q + c), sums);
      }
    } else {
      load_columns(gathered, states, p.C.stride_column, columns);
      for (int64_t c = 0; c < padded; c += kSize) {
        const V old = decay == Acc(0) ? V(Acc(0)) : V(decay) * V::loadu(gathered + c);
        const V value = at::vec::fmadd(V(added), V::loadu(k + c), old);
        value.store(gathered + c);
        sums = at::vec::fmadd(value, V::loadu(q + c), sums);
      }
      for (int64_t c = 0; c < columns; ++c) states[c * p.C.stride_column] = static_cast<State>(gathered[c]);
    }
    const Acc sum = at::vec::vec_reduce_all<Acc>([](V& a, V& b) { return a + b; }, sums);
    out[r * p.out.stride_column] = static_cast<Input>(sum * factor);
  }
}

}  // namespace

void update_head(const StepParams& p, int64_t row, int64_t head, void* scratch) {
  visit_scalar(p.input_kind, [&](auto input) {
    using Input = decltype(input);
    std::byte* const memory = static_cast<std::byte*>(scratch);
    if (p.state_kind == p.input_kind) return run<Input, Input>(p, row, head, memory);
    if constexpr (!std::is_same_v<Input, AccumulateType<Input>>) run<Input, float>(p, row, head, memory);
  });
}

SSM_KERNEL_API const CpuKernels& kernels() {
  static constexpr CpuKernels kKernels{&update_head};
  return kKernels;
}

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::mlstm::step
