// Selective state update on the CPU: one step of the scan, the state updated in place.
//
//   h = Abar(z) h + delta k(z) B x, z = delta A        out = (<C, h> + D x) silu(gate)
//
// The parts that do not depend on the state (softplus, gate, and Abar and the gain if A is tied) are computed for a block of
// rows at once, with a SIMD lane per row. The state is then updated row by row, with a SIMD lane per state. Rows of the state
// or of A that are not contiguous, and rows of A in the inputs' type, are copied through scratch memory. With several tokens,
// or other slots to write to, scratch memory carries the states of a block from token to token. This file is compiled once per
// instruction set.

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "common/activations.h"
#include "common/complex.h"
#include "common/discretization.h"
#include "common/separate_step.h"
#include "cpu/scalar_types.h"
#include "cpu/tile_io.h"
#include "cpu/vec_math.h"
#include "selective_state_update/cpu/kernels.h"

namespace ssm_kernels::selective_state_update {
inline namespace CPU_CAPABILITY {
namespace {

// The rows of one block, and B and C of their group.
template <typename Acc>
struct Rows {
  static constexpr int64_t kMaxRows = Vec<Acc>::size();

  int64_t count;
  int64_t slot;
  int64_t head[kMaxRows], dim[kMaxRows];
  alignas(64) Acc delta[kMaxRows];
  alignas(64) Acc input[kMaxRows];  // delta x
  alignas(64) Acc y[kMaxRows];      // <C, h>
  alignas(64) Acc B[kMaxDstate];
  alignas(64) Acc C[kMaxDstate];
  // Methods that read two samples use these: the previous sample, and the weights of the step.
  alignas(64) Acc x_before[kMaxRows];
  alignas(64) Acc input_before[kMaxRows];  // delta x_before
  alignas(64) Acc lam[kMaxRows];
  alignas(64) Acc B_before[kMaxDstate];
  alignas(64) Acc delta_A[kMaxRows];  // the steps of A
  void* carried = nullptr;            // if not null, kMaxDstate states of each row take the place of the slot
};

// States of a block's rows, of at most the size of Acc each.
template <typename Acc>
struct CarriedStates {
  alignas(64) std::byte memory[Rows<Acc>::kMaxRows * kMaxDstate * sizeof(Acc)];
};

// The first values of a row of A.
template <typename Acc>
void gather_A(const StateUpdateParams& p, int64_t row, int64_t count, Acc* target) {
  const auto gather = [&](const auto* A) {
    for (int64_t n = 0; n < count; ++n) target[n] = static_cast<Acc>(A[row + n * p.A.stride_state]);
  };
  if (!p.A_is_input_kind) return gather(static_cast<const Acc*>(p.A.data));
  visit_scalar(p.input_kind, [&](auto input) { gather(static_cast<const decltype(input)*>(p.A.data)); });
}

// The factors of a step: Abar, and those of the current and of the previous sample. `s` is delta_A A of methods with a step of
// its own for A, and z of others.
template <typename V>
struct StepFactors {
  V abar, current, previous;
};
template <typename Method, typename V>
StepFactors<V> factors_of(const Method& method, const V& z, const V& s, const V& input, const V& input_before) {
  const V basis = method.basis(s);
  if constexpr (Method::kUsesPreviousInput) {
    const auto gain = method.gain(z, basis);
    return {method.abar(z, basis), input * gain.current, input_before * gain.previous};
  } else {
    return {method.abar(z, basis), input * current_gain(method, z, basis), input};
  }
}

// Updates the state of the rows and sets their y. `method_of` returns the method of a vector of weights lam.
template <typename Acc, typename State, bool reads_two, bool separate, typename MethodOf>
void update_rows(const StateUpdateParams& p, const MethodOf& method_of, Rows<Acc>& rows) {
  using V = Vec<Acc>;
  constexpr int64_t kSize = V::size();
  const auto row_of = [&](const StateView& view, int64_t r) {
    return view.stride_batch * rows.slot + view.stride_head * rows.head[r] + view.stride_dim * rows.dim[r];
  };
  State* const state = static_cast<State*>(p.state.data);
  const auto value_of_A = [&](const V& A) { return p.A_is_log ? Math<V>::exp(A).neg() : A; };

  alignas(64) Acc tied_abar[kSize] = {}, tied_factor[kSize] = {}, tied_previous[kSize] = {};
  if (p.tied_A()) {
    alignas(64) Acc row_A[kSize] = {};
    for (int64_t r = 0; r < rows.count; ++r) gather_A(p, row_of(p.A, r), 1, row_A + r);
    const V A = value_of_A(V::loadu(row_A)), z = V::loadu(rows.delta) * A;
    const StepFactors<V> tied = factors_of(method_of(V::loadu(rows.lam)), z, separate ? V::loadu(rows.delta_A) * A : z,
                                           V::loadu(rows.input), V::loadu(rows.input_before));
    tied.abar.store(tied_abar);
    tied.current.store(tied_factor);
    tied.previous.store(tied_previous);
  }

  alignas(64) State gathered_state[kMaxDstate];
  alignas(64) Acc gathered_A[kMaxDstate];
  for (int64_t r = 0; r < rows.count; ++r) {
    State* const strided_h = state + row_of(p.state, r);
    State* h = strided_h;
    if (rows.carried != nullptr) {
      h = static_cast<State*>(rows.carried) + r * kMaxDstate;
    } else if (p.state.stride_state != 1) {
      for (int64_t n = 0; n < p.dstate; ++n) gathered_state[n] = strided_h[n * p.state.stride_state];
      h = gathered_state;
    }
    const Acc* row_A = gathered_A;
    if (!p.tied_A()) {
      if (p.A.stride_state == 1 && !p.A_is_input_kind) {
        row_A = static_cast<const Acc*>(p.A.data) + row_of(p.A, r);
      } else {
        gather_A(p, row_of(p.A, r), p.dstate, gathered_A);
      }
    }

    const V delta(rows.delta[r]), input(rows.input[r]), input_before(rows.input_before[r]);
    const auto method = method_of(V(rows.lam[r]));
    StepFactors<V> factors = {V(tied_abar[r]), V(tied_factor[r]), V(tied_previous[r])};
    V sum(Acc(0));
    for (int64_t n = 0; n < p.dstate; n += kSize) {
      const int64_t count = std::min(kSize, p.dstate - n);
      if (!p.tied_A()) {
        const V A = value_of_A(load_as<Acc>(row_A + n, count)), z = delta * A;
        factors = factors_of(method, z, separate ? V(rows.delta_A[r]) * A : z, input, input_before);
      }
      V inputs = factors.current * V::loadu(rows.B + n);
      if constexpr (reads_two) inputs = at::vec::fmadd(factors.previous, V::loadu(rows.B_before + n), inputs);
      V value = at::vec::fmadd(factors.abar, load_as<Acc>(h + n, count), inputs);
      // A step size of inf makes even a zero state NaN.
      if (count < kSize) value = V::set(V(Acc(0)), value, count);
      sum = at::vec::fmadd(value, V::loadu(rows.C + n), sum);
      store_as<Acc>(h + n, value, count);
    }
    rows.y[r] = at::vec::vec_reduce_all<Acc>([](V& a, V& b) { return a + b; }, sum);
    if (h == gathered_state) {
      for (int64_t n = 0; n < p.dstate; ++n) strided_h[n * p.state.stride_state] = gathered_state[n];
    }
  }
}

inline bool has_complex_states(const Blocking& blocking) {
  return blocking.two_samples != nullptr && blocking.two_samples->is_complex;
}

// The same of complex states, pairs of neighbors of a row, whose dtype is Acc. rows.C holds weight conj(C). The arithmetic is
// that of one number at a time.
template <typename Acc, typename Rule>
void update_complex_rows(const StateUpdateParams& p, const Rule& rule, Rows<Acc>& rows) {
  using C = Complex<Acc>;
  for (int64_t r = 0; r < rows.count; ++r) {
    const auto row_of = [&](const StateView& view) {
      return static_cast<Acc*>(view.data) + view.stride_batch * rows.slot + view.stride_head * rows.head[r] +
             view.stride_dim * rows.dim[r];
    };
    Acc* h = row_of(p.state);
    int64_t stride = p.state.stride_state;
    if (rows.carried != nullptr) {
      h = static_cast<Acc*>(rows.carried) + r * kMaxDstate;
      stride = 1;
    }
    const Acc* const row_A = row_of(p.A);
    const auto method = rule.step(C(rows.lam[r], Acc(0)));
    using Method = std::decay_t<decltype(method)>;
    const Acc delta = rows.delta[r];
    Acc y = 0;
    for (int64_t n = 0; n < p.dstate; n += 2) {
      const C A(row_A[n * p.A.stride_state], row_A[(n + 1) * p.A.stride_state]), z = scaled(delta, A);
      const C basis = complex_basis(method, delta, z, ComplexRate<Acc>(A.re, A.im));
      const auto gain = method.gain(z, basis);
      C inputs = gain.current * scaled(rows.input[r], C(rows.B[n], rows.B[n + 1]));
      if constexpr (Method::kUsesPreviousInput) {
        inputs = multiply_add(gain.previous, scaled(rows.input_before[r], C(rows.B_before[n], rows.B_before[n + 1])), inputs);
      }
      const C value = multiply_add(method.abar(z, basis), C(h[n * stride], h[(n + 1) * stride]), inputs);
      h[n * stride] = value.re;
      h[(n + 1) * stride] = value.im;
      y = dot_add(value, C(rows.C[n], rows.C[n + 1]), y);
    }
    rows.y[r] = y;
  }
}

inline bool has_dt_A(const Blocking& blocking) {
  return blocking.two_samples != nullptr && blocking.two_samples->dt_A.data != nullptr;
}

template <typename Acc>
void update_rows(const StateUpdateParams& p, const Blocking& blocking, Rows<Acc>& rows) {
  using V = Vec<Acc>;
  visit_scalar(p.state_kind, [&](auto state) {
    using State = decltype(state);
    if constexpr (std::is_same_v<AccumulateType<State>, Acc>) {
      if (has_complex_states(blocking)) {
        if constexpr (std::is_same_v<State, Acc>) {
          visit_complex_rule(p.discretization, [&](auto rule) { update_complex_rows<Acc>(p, rule, rows); });
        }
      } else if (has_dt_A(blocking)) {
        visit_separate_step(p.discretization, [&](auto rule) {
          constexpr bool kReadsTwo = decltype(rule)::kUsesPreviousInput;
          update_rows<Acc, State, kReadsTwo, true>(p, [&](const V& lam) { return rule.step(lam); }, rows);
        });
      } else if (blocking.two_samples != nullptr) {
        visit_two_sample_discretization(p.discretization, blocking.method, [&](auto rule) {
          update_rows<Acc, State, true, false>(p, [&](const V& lam) { return rule.step(lam); }, rows);
        });
      } else {
        visit_discretization(p.discretization, blocking.method, [&](auto method) {
          update_rows<Acc, State, false, false>(p, [&](const V&) { return method; }, rows);
        });
      }
    }
  });
}

// Calls visitor(state, carried) with each element of the rows' states, whose first is `offset` elements from that of a tensor,
// and its place in the carried states.
template <typename Acc, typename Visitor>
void visit_states(const StateUpdateParams& p, const StateView& view, int64_t offset, const Rows<Acc>& rows,
                  const Visitor& visitor) {
  visit_scalar(p.state_kind, [&](auto kind) {
    using State = decltype(kind);
    State* const states = static_cast<State*>(view.data) + offset;
    for (int64_t r = 0; r < rows.count; ++r) {
      State* const row = states + view.stride_head * rows.head[r] + view.stride_dim * rows.dim[r];
      State* const carried = static_cast<State*>(rows.carried) + r * kMaxDstate;
      for (int64_t n = 0; n < p.dstate; ++n) visitor(row[n * view.stride_state], carried[n]);
    }
  });
}

// The params whose views begin at a token.
template <typename Input, typename Matrix>
StateUpdateParams at_token(const StateUpdateParams& p, const TokenParams& tokens, int64_t token) {
  StateUpdateParams shifted = p;
  const auto shift = [&](auto& view, int64_t stride) {
    if (view.data != nullptr) view.data = static_cast<Input*>(view.data) + token * stride;
  };
  shift(shifted.x, tokens.x);
  shift(shifted.dt, tokens.dt);
  shift(shifted.z, tokens.z);
  shift(shifted.out, tokens.out);
  shifted.B.data = static_cast<Matrix*>(shifted.B.data) + token * tokens.B;
  shifted.C.data = static_cast<Matrix*>(shifted.C.data) + token * tokens.C;
  return shifted;
}

// Matrix: the type of B and C.
template <typename Input, typename Matrix>
void run(const StateUpdateParams& params, const TokenParams* tokens, const Blocking& blocking, int64_t begin, int64_t end) {
  using Acc = AccumulateType<Input>;
  using V = Vec<Acc>;
  constexpr int64_t kSize = V::size();
  Rows<Acc> rows = {};
  const Matrix *loaded_B = nullptr, *loaded_C = nullptr;
  const TwoSampleParams* const two_samples = blocking.two_samples;
  bool input_has_delta = true;
  if (is_one_sample(params.discretization)) {
    visit_discretization(params.discretization, [&](auto method) { input_has_delta = decltype(method)::kInputHasDelta; });
  }

  const auto offset_in = [&](const ChannelView& view, int64_t b, int64_t r) {
    return b * view.stride_batch + rows.head[r] * view.stride_head + rows.dim[r] * view.stride_dim;
  };
  const auto clear_out = [&](const StateUpdateParams& p, int64_t b) {
    for (int64_t r = 0; r < rows.count; ++r) static_cast<Input*>(p.out.data)[offset_in(p.out, b, r)] = Input(0);
  };
  // The samples in a slot.
  const auto load_previous = [&](int64_t slot, int64_t group) {
    if (two_samples == nullptr || two_samples->previous_x.data == nullptr || slot < 0) return;
    const ChannelView& x = two_samples->previous_x;
    const GroupView& B = two_samples->previous_B;
    for (int64_t r = 0; r < rows.count; ++r) {
      rows.x_before[r] = static_cast<Acc>(static_cast<const Input*>(x.data)[offset_in(x, slot, r)]);
    }
    const Matrix* const source = static_cast<const Matrix*>(B.data) + slot * B.stride_batch + group * B.stride_group;
    for (int64_t n = 0; n < params.dstate; ++n) rows.B_before[n] = static_cast<Acc>(source[n * B.stride_state]);
  };
  // One token of the rows.
  const auto step = [&](const StateUpdateParams& p, int64_t b, int64_t group, const ChannelView& lam_of_token,
                        const ChannelView& dt_A_of_token) {
    const auto group_of = [&](const GroupView& view) {
      return static_cast<const Matrix*>(view.data) + b * view.stride_batch + group * view.stride_group;
    };
    if (group_of(p.B) != loaded_B || group_of(p.C) != loaded_C) {
      const auto load_group = [&](Acc* target, const GroupView& view) {
        const Matrix* source = group_of(view);
        for (int64_t n = 0; n < p.dstate; ++n) target[n] = static_cast<Acc>(source[n * view.stride_state]);
      };
      load_group(rows.B, p.B);
      load_group(rows.C, p.C);
      if (has_complex_states(blocking)) {
        const Acc weight = two_samples->conjugate_pairs ? Acc(2) : Acc(1);
        for (int64_t n = 0; n < p.dstate; ++n) rows.C[n] *= n % 2 == 0 ? weight : -weight;
      }
      loaded_B = group_of(p.B);
      loaded_C = group_of(p.C);
    }
    // A vector of the rows' elements, zero where there is no row or no tensor.
    const auto load = [&](const ChannelView& view, bool is_input_kind) {
      alignas(64) Acc values[kSize] = {};
      for (int64_t r = 0; view.data != nullptr && r < rows.count; ++r) {
        const int64_t offset = offset_in(view, b, r);
        values[r] = is_input_kind ? static_cast<Acc>(static_cast<const Input*>(view.data)[offset])
                                  : static_cast<const Acc*>(view.data)[offset];
      }
      return V::loadu(values);
    };
    const V x = load(p.x, true);
    V delta = load(p.dt, true);
    if (p.dt_bias.data != nullptr) delta = delta + load(p.dt_bias, p.dt_bias_is_input_kind);
    if (p.dt_softplus) delta = softplus(delta);
    delta = clamp(delta, V(static_cast<Acc>(p.dt_min)), V(static_cast<Acc>(p.dt_max)));
    delta.store(rows.delta);
    (input_has_delta ? delta * x : x).store(rows.input);
    if (two_samples != nullptr) {
      (delta * V::loadu(rows.x_before)).store(rows.input_before);
      V lam = load(lam_of_token, true);
      if (two_samples->lam_sigmoid) lam = sigmoid(lam);
      lam.store(rows.lam);
      at::vec::minimum(load(dt_A_of_token, true), V(kLargestRate<Acc>)).store(rows.delta_A);
    }
    update_rows(p, blocking, rows);
    if (two_samples != nullptr) {
      x.store(rows.x_before);
      std::copy_n(rows.B, p.dstate, rows.B_before);
    }

    V y = V::loadu(rows.y);
    if (p.D.data != nullptr) y = at::vec::fmadd(load(p.D, p.D_is_input_kind), x, y);
    if (p.z.data != nullptr) y = y * silu(load(p.z, true));
    alignas(64) Acc results[kSize];
    y.store(results);
    Input* const out = static_cast<Input*>(p.out.data);
    for (int64_t r = 0; r < rows.count; ++r) out[offset_in(p.out, b, r)] = static_cast<Input>(results[r]);
  };
  // All tokens of the rows.
  const auto step_tokens = [&](int64_t b, int64_t group) {
    const DecodingRows& decoding = tokens->rows;
    const TokenRange range = decoding.tokens_of(b);
    const int64_t read = decoding.read_slot(b), entry = decoding.intermediate_entry(b);
    CarriedStates<Acc> carried;
    rows.carried = carried.memory;
    if (read >= 0) {
      visit_states(params, params.state, read * params.state.stride_batch, rows, [](auto& state, auto& h) { h = state; });
    }
    load_previous(read, group);
    ChannelView lam = two_samples == nullptr ? ChannelView() : two_samples->lam;
    ChannelView dt_A = two_samples == nullptr ? ChannelView() : two_samples->dt_A;
    const auto advance = [&](int64_t count) {
      if (lam.data != nullptr) lam.data = static_cast<Input*>(lam.data) + count * two_samples->lam_token;
      if (dt_A.data != nullptr) dt_A.data = static_cast<Input*>(dt_A.data) + count * two_samples->dt_A_token;
    };
    advance(range.first);
    for (int64_t t = 0; t < range.count; ++t) {
      const StateUpdateParams p = at_token<Input, Matrix>(params, *tokens, range.first + t);
      if (read < 0) {
        clear_out(p, b);
        continue;
      }
      step(p, b, group, lam, dt_A);
      advance(1);
      const auto store = [](auto& state, auto& h) { state = h; };
      const int64_t write = decoding.write_slot(b, t, range.count);
      if (write >= 0) visit_states(params, params.state, write * params.state.stride_batch, rows, store);
      if (entry < 0) continue;
      const StateView& buffer = tokens->intermediate;
      visit_states(params, buffer, entry * buffer.stride_batch + t * tokens->intermediate_token, rows, store);
    }
  };

  for (int64_t index = begin; index < end; ++index) {
    const int64_t group_index = index / blocking.blocks_per_group, b = group_index / params.groups,
                  group = group_index % params.groups;
    const int64_t first_in_group = index % blocking.blocks_per_group * kSize;
    const int64_t first_channel = group * blocking.channels_per_group + first_in_group;
    rows.count = std::min(kSize, blocking.channels_per_group - first_in_group);
    for (int64_t r = 0; r < rows.count; ++r) {
      rows.head[r] = (first_channel + r) / params.headdim;
      rows.dim[r] = (first_channel + r) % params.headdim;
    }
    if (tokens != nullptr) {
      step_tokens(b, group);
      continue;
    }
    rows.slot = params.indices.at(b);
    if (rows.slot < 0) {
      clear_out(params, b);
    } else {
      load_previous(rows.slot, group);
      step(params, b, group, two_samples == nullptr ? ChannelView() : two_samples->lam,
           two_samples == nullptr ? ChannelView() : two_samples->dt_A);
    }
  }
}

}  // namespace

int64_t vector_size(const StateUpdateParams& p) {
  return p.input_kind == ScalarKind::kDouble ? Vec<double>::size() : Vec<float>::size();
}

void update_blocks(const StateUpdateParams& p, const TokenParams* tokens, const Blocking& blocking, int64_t begin,
                   int64_t end) {
  visit_scalar(p.input_kind, [&](auto input) {
    using Input = decltype(input);
    if (has_complex_states(blocking)) return run<Input, AccumulateType<Input>>(p, tokens, blocking, begin, end);
    run<Input, Input>(p, tokens, blocking, begin, end);
  });
}

SSM_KERNEL_API const CpuKernels& kernels() {
  static constexpr CpuKernels kKernels{&vector_size, &update_blocks};
  return kKernels;
}

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::selective_state_update
