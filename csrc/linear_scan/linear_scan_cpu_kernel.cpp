// Linear scan on the CPU, forward and backward.
//
//   h_t = a_t h_{t-1} + b_t          g_t = grad_h_t + e_{t+1},  e_t = a_t g_t
//
// A task walks through time tile by tile, backward from the last step: the inputs of a tile are brought into scratch memory,
// whatever their strides, and in each step a SIMD lane is a channel. Backward reads the states that forward returned; nothing
// else is saved. This file is compiled once per instruction set.

#include <algorithm>
#include <array>
#include <utility>

#include "common/recurrences.h"
#include "cpu/scalar_types.h"
#include "cpu/tile_io.h"
#include "cpu/vec_math.h"
#include "linear_scan/linear_scan_cpu.h"

namespace ssm_kernels::linear_scan {
inline namespace CPU_CAPABILITY {
namespace {

// The tiles, strides and states of one task.
template <typename Scalar>
struct TaskView {
  using Acc = AccumulateType<Scalar>;
  static_assert(kTaskChannels % Vec<Acc>::size() == 0 && kTileSteps % Vec<Acc>::size() == 0,
                "tiles are moved in squares of the vector length");

  int64_t batch, first_channel, lanes;

  TaskView(const LinearScanParams& p, int64_t task) {
    const Tasks tasks(p);
    batch = task / tasks.blocks;
    first_channel = task % tasks.blocks * kTaskChannels;
    lanes = std::min(kTaskChannels, p.channels - first_channel);
  }

  int64_t offset(const SequenceView& view, int64_t t) const {
    return batch * view.stride_batch + t * view.stride_step + first_channel * view.stride_channel;
  }

  // Steps [t, t + steps); zeros where there is no tensor.
  void load(Acc* tile, const SequenceView& view, int64_t t, int64_t steps) const {
    if (view.data == nullptr) {
      std::fill(tile, tile + steps * kTaskChannels, Acc(0));
    } else if (view.is_accumulate) {
      load_tile(tile, kTaskChannels, static_cast<const Acc*>(view.data) + offset(view, t), view.stride_channel,
                view.stride_step, lanes, steps);
    } else {
      load_tile(tile, kTaskChannels, static_cast<const Scalar*>(view.data) + offset(view, t), view.stride_channel,
                view.stride_step, lanes, steps);
    }
  }

  void store(const SequenceView& view, const Acc* tile, int64_t t, int64_t steps) const {
    if (view.data == nullptr) return;
    if (view.is_accumulate) {
      store_tile(static_cast<Acc*>(view.data) + offset(view, t), view.stride_channel, view.stride_step, tile, kTaskChannels,
                 lanes, steps);
    } else {
      store_tile(static_cast<Scalar*>(view.data) + offset(view, t), view.stride_channel, view.stride_step, tile, kTaskChannels,
                 lanes, steps);
    }
  }

  void load_state(Acc* row, const StateView& view, int64_t sequence) const {
    std::fill(row, row + kTaskChannels, Acc(0));
    if (view.data == nullptr) return;
    const Acc* source = static_cast<const Acc*>(view.data) + sequence * view.stride_sequence;
    for (int64_t lane = 0; lane < lanes; ++lane) row[lane] = source[(first_channel + lane) * view.stride_channel];
  }

  void store_state(const StateView& view, const Acc* row, int64_t sequence) const {
    if (view.data == nullptr) return;
    Acc* target = static_cast<Acc*>(view.data) + sequence * view.stride_sequence;
    for (int64_t lane = 0; lane < lanes; ++lane) target[(first_channel + lane) * view.stride_channel] = row[lane];
  }
};

template <typename Acc, size_t count>
std::array<Acc*, count> carve_tiles(Acc*& memory) {
  std::array<Acc*, count> tiles;
  for (Acc*& tile : tiles) tile = std::exchange(memory, memory + kTileSteps * kTaskChannels);
  return tiles;
}

template <typename Scalar, typename Variant>
void fwd(const LinearScanFwdParams& p, int64_t task, std::byte* scratch) {
  using Acc = AccumulateType<Scalar>;
  using V = Vec<Acc>;
  constexpr size_t kInputs = Variant::kNames.size();
  const TaskView<Scalar> view(p, task);
  Acc* memory = reinterpret_cast<Acc*>(scratch);
  const auto inputs = carve_tiles<Acc, kInputs>(memory);
  Acc* const h = carve_tiles<Acc, 1>(memory)[0];
  Acc* const state = memory;

  for (int64_t t0 = 0; t0 < p.seqlen; t0 += kTileSteps) {
    const int64_t steps = std::min(kTileSteps, p.seqlen - t0);
    for (size_t i = 0; i < kInputs; ++i) view.load(inputs[i], p.inputs[i], t0, steps);
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t t = t0 + step;
      if (p.begins(t)) view.load_state(state, p.initial_state, p.sequence(view.batch, t));
      for (int64_t lane = 0; lane < view.lanes; lane += V::size()) {
        V x[kInputs];
        for (size_t i = 0; i < kInputs; ++i) x[i] = V::loadu(inputs[i] + step * kTaskChannels + lane);
        const Step<V> coefficients = Variant::step(x);
        const V next = Math<V>::fma(coefficients.a, V::loadu(state + lane), coefficients.b);
        next.store(state + lane);
        next.store(h + step * kTaskChannels + lane);
      }
      if (p.ends(t)) view.store_state(p.last_state, state, p.sequence(view.batch, t));
    }
    view.store(p.h, h, t0, steps);
  }
}

template <typename Scalar, typename Variant>
void bwd(const LinearScanBwdParams& p, int64_t task, std::byte* scratch) {
  using Acc = AccumulateType<Scalar>;
  using V = Vec<Acc>;
  constexpr size_t kInputs = Variant::kNames.size();
  const TaskView<Scalar> view(p, task);
  Acc* memory = reinterpret_cast<Acc*>(scratch);
  const auto inputs = carve_tiles<Acc, kInputs>(memory), grads = carve_tiles<Acc, kInputs>(memory);
  const auto [h_before, grad_h] = carve_tiles<Acc, 2>(memory);
  Acc* const e = memory;
  Acc* const initial = memory + kTaskChannels;

  for (int64_t end = p.seqlen; end > 0;) {
    const int64_t t0 = (end - 1) / kTileSteps * kTileSteps, steps = end - t0;
    for (size_t i = 0; i < kInputs; ++i) view.load(inputs[i], p.inputs[i], t0, steps);
    view.load(grad_h, p.grad_h, t0, steps);
    const int64_t missing = t0 == 0 ? 1 : 0;  // there is no state before the first step
    view.load(h_before + missing * kTaskChannels, p.h, t0 - 1 + missing, steps - missing);
    for (int64_t step = steps - 1; step >= 0; --step) {
      const int64_t t = t0 + step;
      const bool begins = p.begins(t);
      if (p.ends(t)) view.load_state(e, p.grad_last_state, p.sequence(view.batch, t));
      if (begins) view.load_state(initial, p.initial_state, p.sequence(view.batch, t));
      const Acc* const before = begins ? initial : h_before + step * kTaskChannels;
      for (int64_t lane = 0; lane < view.lanes; lane += V::size()) {
        V x[kInputs], grad[kInputs];
        for (size_t i = 0; i < kInputs; ++i) x[i] = V::loadu(inputs[i] + step * kTaskChannels + lane);
        const V g = V::loadu(grad_h + step * kTaskChannels + lane) + V::loadu(e + lane);
        Variant::gradients(x, V::loadu(before + lane), g, grad);
        (Variant::step(x).a * g).store(e + lane);
        for (size_t i = 0; i < kInputs; ++i) grad[i].store(grads[i] + step * kTaskChannels + lane);
      }
      if (begins) view.store_state(p.grad_initial_state, e, p.sequence(view.batch, t));
    }
    for (size_t i = 0; i < kInputs; ++i) view.store(p.grad_inputs[i], grads[i], t0, steps);
    end = t0;
  }
}

}  // namespace

void fwd_task(const LinearScanFwdParams& p, ScalarKind kind, int64_t task, std::byte* scratch) {
  visit_scalar(kind, [&](auto scalar) {
    visit_recurrence(p.recurrence, p.options,
                     [&](auto variant) { fwd<decltype(scalar), decltype(variant)>(p, task, scratch); });
  });
}

void bwd_task(const LinearScanBwdParams& p, ScalarKind kind, int64_t task, std::byte* scratch) {
  visit_scalar(kind, [&](auto scalar) {
    visit_recurrence(p.recurrence, p.options,
                     [&](auto variant) { bwd<decltype(scalar), decltype(variant)>(p, task, scratch); });
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::linear_scan
