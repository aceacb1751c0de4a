// Norms on the CPU, forward and backward. Compiled once per instruction set. norm.h has the formulas of forward. With
// y = norm(v) and gy the gradient of y weight:
//
//   grad_v = rstd (gy weight - mean(gy weight) - y mean(gy weight y)),  the first mean for LayerNorm only
//   grad_weight = sum over rows of gy y,  grad_bias = sum over rows of gy
//
// A SIMD lane is a column. The loops convert a group of a row to the accumulation type once and keep it in scratch memory.
// Forward saves rstd and mean; backward recomputes everything else from the inputs.

#include <algorithm>
#include <type_traits>

#include "cpu/scalar_types.h"
#include "cpu/tile_io.h"
#include "cpu/vec_math.h"
#include "norm/cpu/kernels.h"

namespace ssm_kernels::norm {
inline namespace CPU_CAPABILITY {
namespace {

template <typename Scalar>
struct Row {
  using Acc = AccumulateType<Scalar>;
  using V = Vec<Acc>;

  int64_t outer, inner, first_column;

  Row(const NormParams& p, int64_t row, int64_t group)
      : outer(row / p.inner), inner(row % p.inner), first_column(group * p.group_size) {}

  int64_t offset(const RowsView& view) const { return outer * view.stride_outer + inner * view.stride_inner + first_column; }

  V load(const RowsView& view, int64_t column, int64_t count) const { return load_at(view, offset(view) + column, count); }
  void store(const RowsView& view, int64_t column, int64_t count, V value) const {
    if (view.is_accumulate) return store_as(static_cast<Acc*>(view.data) + offset(view) + column, value, count);
    store_as(static_cast<Scalar*>(view.data) + offset(view) + column, value, count);
  }
  // `absent` where there is no parameter.
  V load(const ParameterView& view, int64_t column, int64_t count, Acc absent) const {
    if (view.data == nullptr) return V(absent);
    return load_at(view, first_column + column, count);
  }

 private:
  template <typename View>
  static V load_at(const View& view, int64_t offset, int64_t count) {
    if (view.is_accumulate) return load_as<Acc>(static_cast<const Acc*>(view.data) + offset, count);
    return load_as<Acc>(static_cast<const Scalar*>(view.data) + offset, count);
  }
};

// Calls body(column, count) for each vector of a group; the last one may have fewer than V::size() values.
template <typename V, typename Body>
void for_each_vector(int64_t group_size, const Body& body) {
  for (int64_t column = 0; column < group_size; column += V::size()) {
    body(column, std::min<int64_t>(V::size(), group_size - column));
  }
}

template <typename Acc>
Acc sum_of_lanes(const Vec<Acc>& value) {
  Acc lanes[Vec<Acc>::size()], sum = 0;
  value.store(lanes);
  for (const Acc lane : lanes) sum += lane;
  return sum;
}

// Zero in the lanes beyond `count`.
template <typename V>
V first_lanes(const V& value, int64_t count) {
  return count == V::size() ? value : V::set(V(0), value, count);
}

// Not inlined, so that one copy of every activation serves all dtypes of the same accumulation type.
template <typename V>
__attribute__((noinline)) V gate_value(GateActivation activation, const V& z) {
  V result;
  visit_activation(activation, [&](auto gate) { result = gate.value(z); });
  return result;
}

template <typename V>
__attribute__((noinline)) Gate<V> gate_with_derivative(GateActivation activation, const V& z) {
  Gate<V> result;
  visit_activation(activation, [&](auto gate) { result = gate.with_derivative(z); });
  return result;
}

template <typename Scalar>
void fwd_group(const NormFwdParams& p, int64_t row_index, int64_t group, AccumulateType<Scalar>* v_row) {
  using Acc = AccumulateType<Scalar>;
  using V = Vec<Acc>;
  const Row<Scalar> row(p, row_index, group);
  const bool gate_before = p.z.data != nullptr && !p.norm_before_gate, gate_after = p.z.data != nullptr && p.norm_before_gate;
  const Acc size = static_cast<Acc>(p.group_size);
  const int64_t statistic = row_index * p.groups + group;

  V sum(0);
  for_each_vector<V>(p.group_size, [&](int64_t column, int64_t count) {
    V v = row.load(p.x, column, count);
    if (p.residual.data != nullptr) v = v + row.load(p.residual, column, count);
    if (gate_before) v = v * gate_value(p.activation, row.load(p.z, column, count));
    if (p.is_add) {
      row.store(p.new_residual, column, count, v);
      v = row.load(p.new_residual, column, count);  // as rounded
    }
    v = first_lanes(v, count);
    v.store(v_row + column);
    sum = p.subtract_mean ? sum + v : Math<V>::fma(v, v, sum);
  });
  if (p.sums != nullptr) {
    static_cast<Acc*>(p.sums)[statistic] = sum_of_lanes<Acc>(sum);
    return;
  }
  Acc mean = 0, square = sum_of_lanes<Acc>(sum) / size;
  if (p.group_mean != nullptr) {
    square = static_cast<const Acc*>(p.group_mean)[statistic];
  } else if (p.subtract_mean) {
    mean = square;
    sum = V(0);
    for_each_vector<V>(p.group_size, [&](int64_t column, int64_t count) {
      const V centered = first_lanes(V::loadu(v_row + column) - V(mean), count);
      sum = Math<V>::fma(centered, centered, sum);
    });
    square = sum_of_lanes<Acc>(sum) / size;
    static_cast<Acc*>(p.mean)[statistic] = mean;
  }
  const Acc rstd = Acc(1) / Math<Acc>::sqrt(square + static_cast<Acc>(p.eps));
  static_cast<Acc*>(p.rstd)[statistic] = rstd;

  for_each_vector<V>(p.group_size, [&](int64_t column, int64_t count) {
    const V y = (V::loadu(v_row + column) - V(mean)) * V(rstd);
    V out = Math<V>::fma(y, row.load(p.weight, column, count, 1), row.load(p.bias, column, count, 0));
    if (gate_after) out = out * gate_value(p.activation, row.load(p.z, column, count));
    row.store(p.out, column, count, out);
  });
}

template <typename Scalar>
void bwd_group(const NormBwdParams& p, int64_t row_index, int64_t group, int64_t task, bool is_first,
               AccumulateType<Scalar>* scratch) {
  using Acc = AccumulateType<Scalar>;
  using V = Vec<Acc>;
  const Row<Scalar> row(p, row_index, group);
  const bool has_gate = p.z.data != nullptr, gate_before = has_gate && !p.norm_before_gate;
  const int64_t statistic = row_index * p.groups + group;
  const Acc rstd = static_cast<const Acc*>(p.rstd)[statistic];
  const Acc mean = p.subtract_mean ? static_cast<const Acc*>(p.mean)[statistic] : Acc(0);
  const int64_t padded = p.group_size + kScratchPadding;
  Acc *const y_row = scratch, *const gy_row = scratch + padded;
  Acc *const gate_row = scratch + 2 * padded, *const slope_row = scratch + 3 * padded;
  const auto partial = [&](void* sums) { return static_cast<Acc*>(sums) + task * p.columns() + row.first_column; };

  V sum_gw(0), sum_gwy(0);
  for_each_vector<V>(p.group_size, [&](int64_t column, int64_t count) {
    V v = row.load(p.x, column, count), gy = row.load(p.grad_out, column, count);
    if (has_gate) {
      const Gate<V> gate = gate_with_derivative(p.activation, row.load(p.z, column, count));
      gate.value.store(gate_row + column);
      gate.derivative.store(slope_row + column);
      if (gate_before) {
        v = v * gate.value;
      } else {
        gy = gy * gate.value;
      }
    }
    const V y = (v - V(mean)) * V(rstd), gw = gy * row.load(p.weight, column, count, 1);
    y.store(y_row + column);
    gy.store(gy_row + column);
    sum_gw = sum_gw + first_lanes(gw, count);
    sum_gwy = sum_gwy + first_lanes(gw * y, count);
    const auto add = [&](void* sums, const V& term) {
      if (sums == nullptr) return;
      Acc* const target = partial(sums) + column;
      (is_first ? term : V::loadu(target, count) + term).store(target, count);
    };
    add(p.partial_weight, gy * y);
    add(p.partial_bias, gy);
  });
  const Acc size = static_cast<Acc>(p.group_size);
  if (p.sums != nullptr) {
    static_cast<Acc*>(p.sums)[statistic] = sum_of_lanes<Acc>(sum_gwy);
    return;
  }
  const Acc mean_gwy =
      p.group_mean != nullptr ? static_cast<const Acc*>(p.group_mean)[statistic] : sum_of_lanes<Acc>(sum_gwy) / size;
  const Acc mean_gw = p.subtract_mean ? sum_of_lanes<Acc>(sum_gw) / size : Acc(0);

  for_each_vector<V>(p.group_size, [&](int64_t column, int64_t count) {
    const V y = V::loadu(y_row + column), weight = row.load(p.weight, column, count, 1);
    V grad_v = V(rstd) * (V::loadu(gy_row + column) * weight - V(mean_gw) - y * V(mean_gwy));
    if (p.grad_new_residual.data != nullptr) grad_v = grad_v + row.load(p.grad_new_residual, column, count);
    if (p.grad_residual.data != nullptr) row.store(p.grad_residual, column, count, grad_v);
    const V gate = has_gate ? V::loadu(gate_row + column) : V(1);
    if (p.out.data != nullptr) {
      const V out = Math<V>::fma(y, weight, row.load(p.bias, column, count, 0));
      row.store(p.out, column, count, gate_before ? out : out * gate);
    }
    if (p.grad_x.data != nullptr) row.store(p.grad_x, column, count, gate_before ? grad_v * gate : grad_v);
    if (p.grad_z.data == nullptr) return;
    const V factor = gate_before
                         ? grad_v * row.load(p.x, column, count)
                         : row.load(p.grad_out, column, count) * Math<V>::fma(y, weight, row.load(p.bias, column, count, 0));
    row.store(p.grad_z, column, count, factor * V::loadu(slope_row + column));
  });
}

}  // namespace

void fwd_row(const NormFwdParams& p, int64_t row, std::byte* scratch) {
  visit_scalar(p.kind, [&](auto scalar) {
    using Scalar = decltype(scalar);
    auto* const v_row = reinterpret_cast<AccumulateType<Scalar>*>(scratch);
    for (int64_t group = 0; group < p.groups; ++group) fwd_group<Scalar>(p, row, group, v_row);
  });
}

void bwd_rows(const NormBwdParams& p, const RowTasks& tasks, int64_t task, std::byte* scratch) {
  visit_scalar(p.kind, [&](auto scalar) {
    using Scalar = decltype(scalar);
    auto* const rows = reinterpret_cast<AccumulateType<Scalar>*>(scratch);
    for (int64_t row = tasks.begin(task); row < tasks.end(task); ++row) {
      const bool is_first = row == tasks.begin(task);
      for (int64_t group = 0; group < p.groups; ++group) bwd_group<Scalar>(p, row, group, task, is_first, rows);
    }
  });
}

void sum_partials(const NormBwdParams& p) {
  visit_scalar(p.kind, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Acc = AccumulateType<Scalar>;
    const auto sum = [&](const ParameterView& target, const void* partial) {
      if (target.data == nullptr) return;
      for_each_vector<Vec<Acc>>(p.columns(), [&](int64_t column, int64_t count) {
        Vec<Acc> total(0);
        for (int64_t i = 0; i < p.partials; ++i) {
          total = total + Vec<Acc>::loadu(static_cast<const Acc*>(partial) + i * p.columns() + column, count);
        }
        if (target.is_accumulate) return store_as(static_cast<Acc*>(target.data) + column, total, count);
        store_as(static_cast<Scalar*>(target.data) + column, total, count);
      });
    };
    sum(p.grad_weight, p.partial_weight);
    sum(p.grad_bias, p.partial_bias);
  });
}

SSM_KERNEL_API const CpuKernels& kernels() {
  static constexpr CpuKernels kKernels{&fwd_row, &bwd_rows, &sum_partials};
  return kKernels;
}

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::norm
