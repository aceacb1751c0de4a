// Mamba-3's decoding step on the CPU: the states of one head are updated in place. A SIMD lane has a column of the state; each
// row of the state is read and written once, by all ranks. The phase is reduced to half a turn around zero in float64. This
// file is compiled once per instruction set.

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "common/integers.h"
#include "cpu/scalar_types.h"
#include "cpu/tile_io.h"
#include "mamba3/cpu/rotations.h"
#include "mamba3/cpu/step_kernels.h"

namespace ssm_kernels::mamba3::step {
inline namespace CPU_CAPABILITY {
namespace {

template <typename Input>
using AccOf = AccumulateType<Input>;

// An element of a row of the inputs' type or of the accumulation type.
template <typename Input>
AccOf<Input> at(const TokenView& view, int64_t offset) {
  if (view.is_input_kind) return static_cast<AccOf<Input>>(static_cast<const Input*>(view.data)[offset]);
  return static_cast<const AccOf<Input>*>(view.data)[offset];
}

template <typename Visitor>
void visit_state(const StateView& view, int64_t offset, Visitor&& visitor) {
  visit_scalar(view.kind, [&](auto scalar) { visitor(static_cast<decltype(scalar)*>(view.data) + offset); });
}

template <typename Input>
class Head {
  using Acc = AccOf<Input>;
  using V = Vec<Acc>;
  static constexpr int64_t kSize = V::size();

 public:
  Head(const StepParams& p, int64_t row, int64_t head, void* scratch)
      : p_(p),
        row_(row),
        head_(head),
        slot_(p.slot(row)),
        padded_(round_up(p.dstate, kSize)),
        phases_(static_cast<double*>(scratch)),
        c_(reinterpret_cast<Acc*>(phases_ + p.angles)),
        s_(c_ + p.angles),
        k_(s_ + p.angles),
        q_(k_ + p.ranks * padded_),
        before_(q_ + p.ranks * padded_),
        row_of_state_(before_ + p.ranks * padded_),
        sum_(row_of_state_ + padded_),
        y_(sum_ + p.headdim) {}

  void update() {
    if (slot_ < 0) {
      for (int64_t i = 0; i < p_.headdim; ++i) out(i) = Input(0);
      return;
    }
    const double dt = gate(p_.dt), weight = 1 / (1 + std::exp(-gate(p_.trap))), decay = std::exp(gate(p_.A) * dt);
    turn(dt);
    for (int64_t rank = 0; rank < p_.ranks; ++rank) {
      rotate(p_.B, p_.B_bias, rank, k_ + rank * padded_);
      rotate(p_.C, p_.C_bias, rank, q_ + rank * padded_);
      exchange_k(rank);
    }
    step_states(static_cast<Acc>(decay), static_cast<Acc>((1 - weight) * dt * decay), static_cast<Acc>(weight * dt));
    write_out();
  }

 private:
  int64_t offset(const TokenView& view) const { return row_ * view.stride_row + head_ * view.stride_head; }
  int64_t offset(const StateView& view) const { return slot_ * view.stride_slot + head_ * view.stride_head; }
  double gate(const TokenView& view) const { return static_cast<double>(at<Input>(view, offset(view))); }
  Acc factor(const TokenView& view, int64_t rank, int64_t i) const {
    return view.data == nullptr ? Acc(1) : at<Input>(view, offset(view) + rank * view.stride_rank + i * view.stride_column);
  }
  Acc x(int64_t i) const { return at<Input>(p_.x, offset(p_.x) + i * p_.x.stride_column); }
  Input& out(int64_t i) const { return static_cast<Input*>(p_.out.data)[offset(p_.out) + i * p_.out.stride_column]; }

  // Advances the phases, which the state has in radians.
  void turn(double dt) {
    constexpr double kTurn = 2 * kPi;
    visit_state(p_.angle, offset(p_.angle), [&](auto* angle) {
      using Angle = std::decay_t<decltype(*angle)>;
      for (int64_t i = 0; i < p_.angles; ++i) {
        Angle& radians = angle[i * p_.angle.stride_column];
        const double rate = std::tanh(static_cast<double>(at<Input>(p_.rates, offset(p_.rates) + i * p_.rates.stride_column)));
        const double turns = static_cast<double>(radians) / kTurn + 0.5 * rate * dt;
        phases_[i] = turns - std::rint(turns);
        radians = static_cast<Angle>(kTurn * phases_[i]);
      }
    });
    cosines_and_sines(phases_, c_, s_, p_.angles);
  }

  void rotate(const TokenView& view, const TokenView& bias, int64_t rank, Acc* rotated) {
    const int64_t group = head_ / (p_.heads / p_.groups);
    const int64_t begin = row_ * view.stride_row + rank * view.stride_rank + group * view.stride_head;
    const int64_t of_bias = offset(bias) + rank * bias.stride_rank;
    for (int64_t n = 0; n < p_.dstate; ++n) row_of_state_[n] = at<Input>(view, begin + n * view.stride_column);
    if (bias.data != nullptr) {
      for (int64_t n = 0; n < p_.dstate; ++n) row_of_state_[n] += at<Input>(bias, of_bias + n * bias.stride_column);
    }
    rotate_row(Pairs{p_.is_pairs, p_.angles, p_.dstate}, row_of_state_, rotated, c_, s_, Acc(1));
    std::fill(rotated + p_.dstate, rotated + padded_, Acc(0));
  }

  // Takes the last k from the state, and leaves the new one there.
  void exchange_k(int64_t rank) {
    const Acc* const k = k_ + rank * padded_;
    Acc* const before = before_ + rank * padded_;
    visit_state(p_.k, offset(p_.k) + rank * p_.k.stride_row, [&](auto* state) {
      using State = std::decay_t<decltype(*state)>;
      for (int64_t n = 0; n < p_.dstate; ++n) {
        State& value = state[n * p_.k.stride_column];
        before[n] = static_cast<Acc>(value);
        value = static_cast<State>(k[n]);
      }
    });
    std::fill(before + p_.dstate, before + padded_, Acc(0));
  }

  void step_states(Acc decay, Acc of_before, Acc of_now) {
    visit_state(p_.ssm, offset(p_.ssm), [&](auto* states) {
      using State = std::decay_t<decltype(*states)>;
      // States of other types than these do not occur, and at::vec does not convert them.
      if constexpr (std::is_same_v<State, Acc> || (sizeof(State) == 2 && std::is_same_v<Acc, float>)) {
        visit_state(p_.previous_x, offset(p_.previous_x), [&](auto* previous_x) {
          for (int64_t i = 0; i < p_.headdim; ++i) {
            auto& last = previous_x[i * p_.previous_x.stride_column];
            const Acc before = of_before * static_cast<Acc>(last), now = of_now * x(i);
            State* const row = states + i * p_.ssm.stride_row;
            if (p_.ranks == 1) {
              const Acc v = factor(p_.mimo_x, 0, i);
              y_[i] = step_row(row, V(decay), V(before * v), V(now * v));
            } else {
              step_row_of_ranks(row, V(decay), before, now, i);
            }
            last = static_cast<std::decay_t<decltype(last)>>(x(i));
          }
        });
      }
    });
  }

  // Updates a row of the state; returns its product with q.
  template <typename State>
  Acc step_row(State* states, const V& decay, const V& before, const V& now) {
    const int64_t stride = p_.ssm.stride_column;
    V sums(Acc(0));
    if (stride != 1) {
      for (int64_t n = 0; n < p_.dstate; ++n) row_of_state_[n] = static_cast<Acc>(states[n * stride]);
      std::fill(row_of_state_ + p_.dstate, row_of_state_ + padded_, Acc(0));
    }
    for (int64_t n = 0; n < p_.dstate; n += kSize) {
      const int64_t count = std::min(kSize, p_.dstate - n);
      V value = stride == 1 ? load_as<Acc>(states + n, count) : V::loadu(row_of_state_ + n);
      value = at::vec::fmadd(before, V::loadu(before_ + n), decay * value);
      value = at::vec::fmadd(now, V::loadu(k_ + n), value);
      if (stride == 1) {
        store_as<Acc>(states + n, value, count);
      } else {
        value.store(row_of_state_ + n);
      }
      sums = at::vec::fmadd(value, V::loadu(q_ + n), sums);
    }
    if (stride != 1) {
      for (int64_t n = 0; n < p_.dstate; ++n) states[n * stride] = static_cast<State>(row_of_state_[n]);
    }
    return at::vec::vec_reduce_all<Acc>([](V& a, V& b) { return a + b; }, sums);
  }

  // Updates row i of the state with all ranks, and writes its products with their q.
  template <typename State>
  void step_row_of_ranks(State* states, const V& decay, Acc before, Acc now, int64_t i) {
    const int64_t stride = p_.ssm.stride_column;
    for (int64_t n = 0; n < p_.dstate; ++n) row_of_state_[n] = static_cast<Acc>(states[n * stride]);
    std::fill(row_of_state_ + p_.dstate, row_of_state_ + padded_, Acc(0));
    for (int64_t n = 0; n < p_.dstate; n += kSize) (decay * V::loadu(row_of_state_ + n)).store(row_of_state_ + n);
    for (int64_t rank = 0; rank < p_.ranks; ++rank) {
      const Acc v = factor(p_.mimo_x, rank, i);
      const V of_before(before * v), of_now(now * v);
      const Acc *const last = before_ + rank * padded_, *const k = k_ + rank * padded_;
      for (int64_t n = 0; n < p_.dstate; n += kSize) {
        const V value = at::vec::fmadd(of_before, V::loadu(last + n), V::loadu(row_of_state_ + n));
        at::vec::fmadd(of_now, V::loadu(k + n), value).store(row_of_state_ + n);
      }
    }
    for (int64_t rank = 0; rank < p_.ranks; ++rank) {
      V sums(Acc(0));
      for (int64_t n = 0; n < p_.dstate; n += kSize) {
        sums = at::vec::fmadd(V::loadu(row_of_state_ + n), V::loadu(q_ + rank * padded_ + n), sums);
      }
      y_[rank * p_.headdim + i] = at::vec::vec_reduce_all<Acc>([](V& a, V& b) { return a + b; }, sums);
    }
    for (int64_t n = 0; n < p_.dstate; ++n) states[n * stride] = static_cast<State>(row_of_state_[n]);
  }

  void write_out() {
    for (int64_t rank = 0; rank < p_.ranks; ++rank) add_out(rank, y_ + rank * p_.headdim);
    for (int64_t i = 0; i < p_.headdim; ++i) out(i) = static_cast<Input>(sum_[i]);
  }

  // Adds the output of a rank, with y = S q, to the sum, or sets the sum to the first.
  void add_out(int64_t rank, Acc* y) {
    if (p_.D.data != nullptr) {
      for (int64_t i = 0; i < p_.headdim; ++i) {
        y[i] += at<Input>(p_.D, offset(p_.D) + i * p_.D.stride_column) * (x(i) * factor(p_.mimo_x, rank, i));
      }
    }
    Acc scale = 1;
    if (p_.norm_weight.data != nullptr) {
      double squares = 0;
      for (int64_t i = 0; i < p_.headdim; ++i) squares += static_cast<double>(y[i]) * static_cast<double>(y[i]);
      scale = static_cast<Acc>(1 / std::sqrt(squares / static_cast<double>(p_.headdim) + p_.norm_eps));
    }
    for (int64_t i = 0; i < p_.headdim; ++i) {
      Acc value = y[i];
      if (p_.norm_weight.data != nullptr) {
        value *= scale * at<Input>(p_.norm_weight, offset(p_.norm_weight) + i * p_.norm_weight.stride_column);
      }
      if (p_.z.data != nullptr) {
        const Acc z = at<Input>(p_.z, offset(p_.z) + i * p_.z.stride_column) * factor(p_.mimo_z, rank, i);
        value *= z / (Acc(1) + std::exp(-z));
      }
      value *= factor(p_.mimo_out, rank, i);
      sum_[i] = rank == 0 ? value : sum_[i] + value;
    }
  }

  const StepParams& p_;
  const int64_t row_, head_, slot_, padded_;
  double* const phases_;
  Acc *const c_, *const s_, *const k_, *const q_, *const before_, *const row_of_state_, *const sum_, *const y_;
};

}  // namespace

void update_head(const StepParams& p, int64_t row, int64_t head, void* scratch) {
  visit_scalar(p.input_kind, [&](auto input) { Head<decltype(input)>(p, row, head, scratch).update(); });
}

SSM_KERNEL_API const CpuKernels& kernels() {
  static constexpr CpuKernels kKernels{&update_head};
  return kKernels;
}

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::mamba3::step
