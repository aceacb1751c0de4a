// The causal convolution of channels-first tensors, whose steps are contiguous, with one sequence per batch row. kernel.cpp
// has the formulas.
//
// A task takes its channels one by one; a SIMD lane is a step. It converts a chunk of kChunkSteps steps to the accumulation
// type, into scratch memory behind the width - 1 elements before the chunk, so that tap j is a load at offset j. Chunks fit
// into the L1 cache. Forward writes its results directly to the tensor. Backward makes one pass over the chunk for g, one for
// the gradient of x and one per tap for its sum. In float32 the loops are compiled for each width of 2 to 4, with the taps in
// registers.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "causal_conv1d/cpu/task_view.h"
#include "common/activations.h"
#include "cpu/vec_math.h"

namespace ssm_kernels::causal_conv1d {
inline namespace CPU_CAPABILITY {
namespace {

constexpr int64_t kChunkSteps = 512;

template <typename V>
inline __attribute__((always_inline)) V activate(const V& pre, bool has_silu) {
  return has_silu ? silu(pre) : pre;
}

template <typename V>
inline __attribute__((always_inline)) V grad_pre(const V& grad_out, const V& pre, bool has_silu) {
  return has_silu ? grad_out * silu_derivative(pre, sigmoid(pre)) : grad_out;
}

// Whether these functions take the call; `others` are the outputs, and in backward the gradients.
inline bool is_channels_first(const ConvParams& p, std::initializer_list<const SequenceView*> others) {
  const auto is_along_time = [](const SequenceView* view) { return view->data == nullptr || view->stride_step == 1; };
  return p.ids.data == nullptr && p.seqlen >= 2 * kMaxLanes && p.x.stride_step == 1 && p.x.stride_channel != 1 &&
         std::all_of(others.begin(), others.end(), is_along_time);
}

// The steps of one channel in a tensor. load() and store() convert steps [from, from + count).
template <typename Acc, typename Scalar>
struct ChannelRow {
  Scalar* data;

  ChannelRow(const SequenceView& view, const TaskView<Acc>& task, int64_t lane)
      : data(view.data == nullptr ? nullptr
                                  : static_cast<Scalar*>(view.data) + view.offset(task.batch, 0, task.first_channel + lane)) {}

  // Pads with zeros to a whole vector. An absent tensor gives zeros.
  void load(Acc* values, int64_t from, int64_t count) const {
    if (data == nullptr) return void(std::fill_n(values, round_up(count, Vec<Acc>::size()), Acc(0)));
    load_row(values, data + from, count);
  }
  void store(const Acc* values, int64_t from, int64_t count) const {
    if (data != nullptr) store_row(data + from, values, count);
  }
};

// Calls visitor(std::integral_constant<int64_t, w>()), where w is the width if loops are compiled for it, else 0.
template <typename Acc, typename Visitor>
void visit_width(int64_t width, const Visitor& visitor) {
  if constexpr (std::is_same_v<Acc, float>) {
    if (width == 4) return visitor(std::integral_constant<int64_t, 4>());
    if (width == 3) return visitor(std::integral_constant<int64_t, 3>());
    if (width == 2) return visitor(std::integral_constant<int64_t, 2>());
  }
  visitor(std::integral_constant<int64_t, 0>());
}

// The parameters of one channel, in registers if the width is a compile-time constant.
template <typename Acc, int64_t kWidth>
struct Taps {
  Vec<Acc> in_registers[kWidth > 0 ? kWidth : 1];
  const Acc* weight;
  Vec<Acc> bias;
  int64_t width;

  // Gathers one channel's parameters from the task's rows.
  Taps(const ConvParams& p, const Rows<Acc>& parameters, int64_t lane, Acc* memory)
      : weight(memory), bias(parameters[p.width][lane]), width(kWidth > 0 ? kWidth : p.width) {
    for (int64_t j = 0; j < width; ++j) memory[j] = parameters[j][lane];
    for (int64_t j = 0; j < kWidth; ++j) in_registers[j] = Vec<Acc>(memory[j]);
  }

  __attribute__((always_inline)) Vec<Acc> operator[](int64_t j) const {
    return kWidth > 0 ? in_registers[j] : Vec<Acc>(weight[j]);
  }

  __attribute__((always_inline)) Vec<Acc> pre(const Acc* e) const {
    Vec<Acc> sum = bias;
    for (int64_t j = 0; j < width; ++j) sum = Math<Vec<Acc>>::fma((*this)[j], Vec<Acc>::loadu(e + j), sum);
    return sum;
  }
};

// Allocates `past` elements followed by a chunk, which is aligned to a vector.
template <typename Acc>
Acc* allocate_chunk(ScratchRows<Acc>& memory, int64_t past) {
  const int64_t before = round_up(past, kMaxLanes);
  return memory.values(before + kChunkSteps) + before - past;
}

template <typename Acc, typename Scalar, int64_t kWidth>
void fwd_channels_first(const ConvFwdParams& p, const TaskView<Acc>& view, ScratchRows<Acc>& memory) {
  using V = Vec<Acc>;
  constexpr int64_t kSize = V::size();
  const int64_t past = (kWidth > 0 ? kWidth : p.width) - 1;
  const bool has_silu = p.has_silu;
  const Rows<Acc> parameters = view.load_parameters(memory, p), state = memory.tile(past);
  Acc* const weight = memory.values(p.width);
  Acc* const e = allocate_chunk(memory, past);
  view.load_state(state, p.initial_state, true, view.batch, past);
  for (int64_t lane = 0; lane < view.lanes; ++lane) {
    const Taps<Acc, kWidth> taps(p, parameters, lane, weight);
    const auto result = [&](int64_t t) __attribute__((always_inline)) { return activate(taps.pre(e + t), has_silu); };
    const ChannelRow<Acc, Scalar> x_row(p.x, view, lane), out_row(p.out, view, lane);
    for (int64_t i = 0; i < past; ++i) e[i] = state[i][lane];
    for (int64_t t0 = 0; t0 < p.seqlen; t0 += kChunkSteps) {
      const int64_t steps = std::min(kChunkSteps, p.seqlen - t0);
      x_row.load(e + past, t0, steps);
      Scalar* const out = out_row.data + t0;
      int64_t t = 0;
      for (; t + 2 * kSize <= steps; t += 2 * kSize) store_pair_as<Acc>(out + t, result(t), result(t + kSize));
      for (; t < steps; t += kSize) store_as<Acc>(out + t, result(t), std::min(kSize, steps - t));
      for (int64_t i = 0; i < past; ++i) e[i] = e[steps + i];
    }
    for (int64_t i = 0; i < past; ++i) state[i][lane] = e[i];
  }
  view.store_state(p.final_state, view.batch, state, past);
}

// sum_t a_t b_t, in an order that depends on the count alone.
template <typename Acc>
Acc dot(const Acc* a, const Acc* b, int64_t count) {
  using V = Vec<Acc>;
  constexpr int64_t kSize = V::size();
  V sums[4] = {V(Acc(0)), V(Acc(0)), V(Acc(0)), V(Acc(0))};
  int64_t t = 0;
  for (; t + 4 * kSize <= count; t += 4 * kSize) {
    for (int64_t i = 0; i < 4; ++i) {
      sums[i] = Math<V>::fma(V::loadu(a + t + i * kSize), V::loadu(b + t + i * kSize), sums[i]);
    }
  }
  for (; t < count; t += kSize) {
    const int64_t rest = std::min(kSize, count - t);
    sums[0] = Math<V>::fma(load_as<Acc>(a + t, rest), load_as<Acc>(b + t, rest), sums[0]);
  }
  alignas(64) Acc lanes[kSize];
  ((sums[0] + sums[1]) + (sums[2] + sums[3])).store(lanes);
  for (int64_t half = kSize / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

template <typename Acc, typename Scalar, int64_t kWidth>
void bwd_channels_first(const ConvBwdParams& p, const TaskView<Acc>& view, ScratchRows<Acc>& memory, const Rows<Acc>& sums) {
  using V = Vec<Acc>;
  constexpr int64_t kSize = V::size();
  const int64_t past = p.width - 1;
  const Rows<Acc> parameters = view.load_parameters(memory, p), state = memory.tile(past), grad_final = memory.tile(past);
  const Rows<Acc> grad_initial = memory.tile(past);
  Acc* const weight = memory.values(p.width);
  Acc* const e = allocate_chunk(memory, past);
  Acc* const g = allocate_chunk(memory, past);
  Acc* const grad = memory.values(kChunkSteps + past);
  Acc* const ones = memory.values(kChunkSteps);
  std::fill_n(ones, kChunkSteps, Acc(1));
  view.load_state(state, p.initial_state, true, view.batch, past);
  view.load_state(grad_final, p.grad_final_state, true, view.batch, past);
  for (int64_t lane = 0; lane < view.lanes; ++lane) {
    const Taps<Acc, kWidth> taps(p, parameters, lane, weight);
    const ChannelRow<Acc, Scalar> x_row(p.x, view, lane), grad_out_row(p.grad_out, view, lane),
        grad_x_row(p.grad_x, view, lane);
    // Stores elements [t0, t0 + count) of grad e from `grad`.
    const auto store_grad = [&](int64_t t0, int64_t count) {
      int64_t i = 0;
      for (; i < count && t0 + i < past; ++i) grad_initial[t0 + i][lane] = grad[i];
      if (i < count) grad_x_row.store(grad + i, t0 + i - past, count - i);
    };
    for (int64_t i = 0; i < past; ++i) e[i] = state[i][lane];
    std::fill_n(g, past, Acc(0));
    for (int64_t t0 = 0; t0 < p.seqlen; t0 += kChunkSteps) {
      const int64_t steps = std::min(kChunkSteps, p.seqlen - t0);
      x_row.load(e + past, t0, steps);
      grad_out_row.load(g + past, t0, steps);
      for (int64_t t = 0; p.has_silu && t < steps; t += kSize) {
        grad_pre(V::loadu(g + past + t), taps.pre(e + t), true).store(g + past + t);
      }
      for (int64_t t = 0; t < steps; t += kSize) {
        V sum(Acc(0));
        for (int64_t j = 0; j < taps.width; ++j) sum = Math<V>::fma(taps[j], V::loadu(g + past + t - j), sum);
        sum.store(grad + t);
      }
      store_grad(t0, steps);
      if (sums.data != nullptr) {
        for (int64_t j = 0; j < p.width; ++j) sums[j][lane] += dot(g + past, e + j, steps);
        sums[p.width][lane] += dot(g + past, ones, steps);
      }
      std::copy_n(e + steps, past, e);
      std::copy_n(g + steps, past, g);
    }
    // The last width - 1 elements of grad e: every g that they depend on is known.
    for (int64_t i = 0; i < past; ++i) {
      grad[i] = grad_final[i][lane];
      for (int64_t j = i + 1; j < p.width; ++j) grad[i] += weight[j] * g[past + i - j];
    }
    store_grad(p.seqlen, past);
  }
  view.store_state(p.grad_initial_state, view.batch, grad_initial, past);
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::causal_conv1d
