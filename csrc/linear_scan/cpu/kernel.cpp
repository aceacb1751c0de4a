// Linear scan on the CPU: forward, backward, and the summary of all steps.
//
//   h_t = a_t h_{t-1} + b_t          g_t = grad_h_t + e_{t+1},  e_t = a_t g_t          decay = a_1 a_2 ... a_seqlen
//
// A task loops over time, backward from the last step; in each step a SIMD lane is a channel. A tensor of the accumulation type
// with contiguous channels is read and written in place; any other is copied through scratch memory, tile by tile, whatever its
// strides. Backward reads the states that forward returned; nothing else is saved. This file is compiled once per instruction
// set. Large results that are written in place bypass the caches.

#include <algorithm>
#include <array>
#include <limits>
#include <type_traits>
#include <utility>

#include "common/recurrences.h"
#include "cpu/scalar_types.h"
#include "cpu/streaming_store.h"
#include "cpu/tile_io.h"
#include "cpu/vec_math.h"
#include "linear_scan/cpu/kernels.h"
#include "linear_scan/cpu/vector_recurrences.h"

namespace ssm_kernels::linear_scan {
inline namespace CPU_CAPABILITY {
namespace {

// Values of [steps][lanes] in the accumulation type: a tensor's own memory, or a tile.
template <typename Acc>
struct Rows {
  Acc* data;
  int64_t stride;

  Acc* operator[](int64_t step) const { return data + step * stride; }

  // Fetches what a later iteration reads. Hardware prefetchers do not follow several rows at once.
  void prefetch(int64_t step, int64_t lane) const { __builtin_prefetch((*this)[step] + lane); }
};

// The lanes, tiles and states of one task. Scans are compiled for the accumulation type; a tensor's own type is a branch per
// tile.
template <typename Acc>
struct TaskView {
  static_assert(kMinTaskChannels % Vec<Acc>::size() == 0 && kTileSteps % Vec<Acc>::size() == 0,
                "tiles are transposed in squares of the vector length");

  ScalarKind kind;
  int64_t batch, first_channel, lanes;

  TaskView(const LinearScanParams& p, ScalarKind scalar_kind, const Tasks& tasks, int64_t task) : kind(scalar_kind) {
    batch = task / tasks.blocks;
    first_channel = task % tasks.blocks * tasks.channels;
    lanes = std::min(tasks.channels, p.channels - first_channel);
  }

  int64_t offset(const SequenceView& view, int64_t t) const {
    return batch * view.stride_batch + t * view.stride_step + first_channel * view.stride_channel;
  }

  // Prefetches reach kMaxTaskChannels lanes ahead: one step of a full task, more steps of narrow ones.
  int64_t steps_ahead() const { return std::min(kTileSteps, kMaxTaskChannels / lanes); }

  bool is_accumulate(const SequenceView& view) const {
    return view.is_accumulate || kind == ScalarKind::kFloat || kind == ScalarKind::kDouble;
  }

  // visitor(Element()) with the type of the tensor's elements.
  template <typename Visitor>
  void visit_element(const SequenceView& view, const Visitor& visitor) const {
    if (is_accumulate(view)) return visitor(Acc());
    if constexpr (std::is_same_v<Acc, float>) {
      if (kind == ScalarKind::kHalf) return visitor(c10::Half());
      visitor(c10::BFloat16());
    }
  }

  bool is_in_place(const SequenceView& view) const {
    return is_accumulate(view) && view.data != nullptr && view.stride_channel == 1 && lanes % Vec<Acc>::size() == 0;
  }

  Rows<Acc> in_place(const SequenceView& view, int64_t t) const {
    return {static_cast<Acc*>(view.data) + offset(view, t), view.stride_step};
  }

  // Steps [t, t + steps) to read; zeros where there is no tensor.
  __attribute__((noinline)) Rows<Acc> load(Acc* tile, const SequenceView& view, int64_t t, int64_t steps) const {
    if (is_in_place(view)) return in_place(view, t);
    if (view.data == nullptr) {
      std::fill(tile, tile + steps * kMaxTaskChannels, Acc(0));
    } else {
      visit_element(view, [&](auto element) {
        load_tile(tile, kMaxTaskChannels, static_cast<const decltype(element)*>(view.data) + offset(view, t),
                  view.stride_channel, view.stride_step, lanes, steps);
      });
    }
    return {tile, kMaxTaskChannels};
  }

  // Whether to stream the rows of target(): those of a tensor larger than the caches.
  bool streams(const LinearScanParams& p, const SequenceView& view) const {
    if (!is_in_place(view)) return false;
    const int64_t bytes = p.batch * p.seqlen * p.channels * static_cast<int64_t>(sizeof(Acc));
    return bytes >= kMinStreamedBytes && has_aligned_rows<Acc>(in_place(view, 0).data, view.stride_step);
  }

  // Where to write steps from t on: the tensor's own memory, or a tile that store() copies to the tensor.
  Rows<Acc> target(Acc* tile, const SequenceView& view, int64_t t) const {
    return is_in_place(view) ? in_place(view, t) : Rows<Acc>{tile, kMaxTaskChannels};
  }

  __attribute__((noinline)) void store(const SequenceView& view, const Acc* tile, int64_t t, int64_t steps) const {
    if (view.data == nullptr || is_in_place(view)) return;
    visit_element(view, [&](auto element) {
      store_tile(static_cast<decltype(element)*>(view.data) + offset(view, t), view.stride_channel, view.stride_step, tile,
                 kMaxTaskChannels, lanes, steps);
    });
  }

  __attribute__((noinline)) void load_state(Acc* row, const StateView& view, int64_t sequence) const {
    std::fill(row, row + kMaxTaskChannels, Acc(0));
    if (view.data == nullptr) return;
    const Acc* source = static_cast<const Acc*>(view.data) + sequence * view.stride_sequence;
    for (int64_t lane = 0; lane < lanes; ++lane) row[lane] = source[(first_channel + lane) * view.stride_channel];
  }

  __attribute__((noinline)) void store_state(const StateView& view, const Acc* row, int64_t sequence) const {
    if (view.data == nullptr) return;
    Acc* target = static_cast<Acc*>(view.data) + sequence * view.stride_sequence;
    for (int64_t lane = 0; lane < lanes; ++lane) target[(first_channel + lane) * view.stride_channel] = row[lane];
  }
};

template <typename Acc, size_t count>
std::array<Acc*, count> allocate_tiles(Acc*& memory) {
  std::array<Acc*, count> tiles;
  for (Acc*& tile : tiles) tile = std::exchange(memory, memory + kTileSteps * kMaxTaskChannels);
  return tiles;
}

// The tiles that a variant's formulas read: of each input, the last one replaced by what the variant prepares from it.
template <typename Acc, typename Variant>
class Values {
 public:
  static constexpr size_t kInputs = Variant::kNames.size(), kPrepared = Variant::kPrepared;
  static constexpr size_t kLoaded = kPrepared == 0 ? kInputs : kInputs - 1, kCount = kLoaded + kPrepared;
  static_assert(kPrepared <= kMaxPrepared, "scratch memory has room for this many tiles");

  explicit Values(Acc*& memory)
      : input_tiles_(allocate_tiles<Acc, kInputs>(memory)), prepared_tiles_(allocate_tiles<Acc, kPrepared>(memory)) {}

  void load(const TaskView<Acc>& view, const LinearScanParams& p, int64_t t, int64_t steps) {
    for (size_t i = 0; i < kLoaded; ++i) rows_[i] = view.load(input_tiles_[i], p.inputs[i], t, steps);
    if constexpr (kPrepared > 0) {
      const bool is_constant = p.inputs[kLoaded].stride_step == 0;
      if (is_constant && is_prepared_) return;
      prepare(view.load(input_tiles_[kLoaded], p.inputs[kLoaded], t, steps), view.lanes, is_constant ? 1 : steps);
      for (size_t i = 0; i < kPrepared; ++i) rows_[kLoaded + i] = {prepared_tiles_[i], is_constant ? 0 : kMaxTaskChannels};
      is_prepared_ = true;
    }
  }

  const Rows<Acc>& operator[](size_t i) const { return rows_[i]; }

 private:
  __attribute__((noinline)) void prepare(const Rows<Acc>& input, int64_t lanes, int64_t steps) {
    using V = Vec<Acc>;
    for (int64_t step = 0; step < steps; ++step) {
      for (int64_t lane = 0; lane < lanes; lane += V::size()) {
        V prepared[kPrepared];
        Variant::prepare(V::loadu(input[step] + lane), prepared);
        for (size_t i = 0; i < kPrepared; ++i) prepared[i].store(prepared_tiles_[i] + step * kMaxTaskChannels + lane);
      }
    }
  }

  std::array<Acc*, kInputs> input_tiles_;
  std::array<Acc*, kPrepared> prepared_tiles_;
  Rows<Acc> rows_[kCount];
  bool is_prepared_ = false;
};

template <typename Acc>
void store_row(const Vec<Acc>& value, Acc* target, bool streams) {
  if (streams) {
    stream(target, value);
  } else {
    value.store(target);
  }
}

template <typename Acc, typename Variant>
void fwd(const LinearScanFwdParams& p, ScalarKind kind, const Tasks& tasks, int64_t task, std::byte* scratch) {
  using V = Vec<Acc>;
  using Inputs = Values<Acc, Variant>;
  const Variant variant = make_variant<Variant>(p.options);
  const TaskView<Acc> view(p, kind, tasks, task);
  Acc* memory = reinterpret_cast<Acc*>(scratch);
  Inputs inputs(memory);
  Acc* const h_tile = allocate_tiles<Acc, 1>(memory)[0];
  Acc* const state = memory;
  const bool streams = view.streams(p, p.h);
  const int64_t ahead = view.steps_ahead();

  for (int64_t t0 = 0; t0 < p.seqlen; t0 += kTileSteps) {
    const int64_t steps = std::min(kTileSteps, p.seqlen - t0);
    inputs.load(view, p, t0, steps);
    const Rows<Acc> h = view.target(h_tile, p.h, t0);
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t t = t0 + step;
      if (p.begins(view.batch, t)) view.load_state(state, p.initial_state, p.sequence(view.batch, t));
      const Acc* input_row[Inputs::kCount];
      for (size_t i = 0; i < Inputs::kCount; ++i) input_row[i] = inputs[i][step];
      Acc* const h_row = h[step];
      for (int64_t lane = 0; lane < view.lanes; lane += V::size()) {
        V x[Inputs::kCount];
        for (size_t i = 0; i < Inputs::kCount; ++i) x[i] = V::loadu(input_row[i] + lane);
        for (size_t i = 0; i < Inputs::kLoaded; ++i) inputs[i].prefetch(step + ahead, lane);
        const Step<V> coefficients = variant.step(variant.gates(x), x);
        const V next = Math<V>::fma(coefficients.a, V::loadu(state + lane), coefficients.b);
        next.store(state + lane);
        store_row(next, h_row + lane, streams);
      }
      if (p.ends(t)) view.store_state(p.last_state, state, p.sequence(view.batch, t));
    }
    view.store(p.h, h_tile, t0, steps);
  }
  if (streams) finish_streaming();
}

// Takes `count` steps of the summary: the last state of a scan that begins with zero, and the product of all a.
template <int count, typename Acc, typename Variant>
void summarize(const Variant& variant, const Values<Acc, Variant>& inputs, int64_t step, int64_t lanes, Acc* state,
               Acc* decay) {
  using V = Vec<Acc>;
  using Inputs = Values<Acc, Variant>;
  for (int64_t lane = 0; lane < lanes; lane += V::size()) {
    V h = V::loadu(state + lane), product = V::loadu(decay + lane);
    for (int i = 0; i < count; ++i) {
      V x[Inputs::kCount];
      for (size_t k = 0; k < Inputs::kCount; ++k) x[k] = V::loadu(inputs[k][step + i] + lane);
      for (size_t k = 0; k < Inputs::kLoaded; ++k) inputs[k].prefetch(step + count + i, lane);
      const Step<V> coefficients = variant.step(variant.gates(x), x);
      h = Math<V>::fma(coefficients.a, h, coefficients.b);
      product = coefficients.a * product;
    }
    h.store(state + lane);
    // Denormal numbers are slow, and a product that rounds up to the smallest of them never becomes zero.
    const auto is_small = Math<V>::less(Math<V>::abs(product), V(std::numeric_limits<Acc>::min()));
    Math<V>::select(is_small, V(Acc(0)), product).store(decay + lane);
  }
}

// Forward without its output.
template <typename Acc, typename Variant>
void summary(const LinearScanSummaryParams& p, ScalarKind kind, const Tasks& tasks, int64_t task, std::byte* scratch) {
  constexpr int kGroup = 4;  // steps between a load and a store of the two sums
  const Variant variant = make_variant<Variant>(p.options);
  const TaskView<Acc> view(p, kind, tasks, task);
  Acc* memory = reinterpret_cast<Acc*>(scratch);
  Values<Acc, Variant> inputs(memory);
  Acc* const state = memory;
  Acc* const decay = memory + kMaxTaskChannels;
  bool has_reset = false;
  const auto begin = [&] {
    std::fill(state, state + kMaxTaskChannels, Acc(0));
    std::fill(decay, decay + kMaxTaskChannels, Acc(1));
  };
  const auto end = [&](int64_t sequence) {
    if (has_reset) std::fill(decay, decay + kMaxTaskChannels, Acc(0));
    view.store_state(p.last_state, state, sequence);
    view.store_state(p.decay, decay, sequence);
  };

  begin();
  for (int64_t t0 = 0; t0 < p.seqlen; t0 += kTileSteps) {
    const int64_t steps = std::min(kTileSteps, p.seqlen - t0);
    inputs.load(view, p, t0, steps);
    for (int64_t step = 0; step < steps;) {
      if (p.begins(view.batch, t0 + step)) begin();
      has_reset = has_reset || p.is_reset(view.batch, t0 + step);
      bool is_group = step + kGroup <= steps;
      for (int i = 1; is_group && i < kGroup; ++i) is_group = !p.begins(view.batch, t0 + step + i);
      if (is_group) {
        summarize<kGroup>(variant, inputs, step, view.lanes, state, decay);
      } else {
        summarize<1>(variant, inputs, step, view.lanes, state, decay);
      }
      step += is_group ? kGroup : 1;
      if (p.ends(t0 + step - 1)) end(p.sequence(view.batch, t0 + step - 1));
    }
  }
  if (p.seqlen == 0 && p.sequence_of_step == nullptr) end(view.batch);
}

template <typename Acc, typename Variant>
void bwd(const LinearScanBwdParams& p, ScalarKind kind, const Tasks& tasks, int64_t task, std::byte* scratch) {
  using V = Vec<Acc>;
  using Inputs = Values<Acc, Variant>;
  constexpr size_t kInputs = Inputs::kInputs;
  const Variant variant = make_variant<Variant>(p.options);
  const TaskView<Acc> view(p, kind, tasks, task);
  Acc* memory = reinterpret_cast<Acc*>(scratch);
  Inputs inputs(memory);
  const auto grad_tiles = allocate_tiles<Acc, kInputs>(memory);
  const auto [h_tile, grad_h_tile] = allocate_tiles<Acc, 2>(memory);
  Acc* const e = memory;
  Acc* const initial = memory + kMaxTaskChannels;
  Acc* const grad_initial = initial + kMaxTaskChannels;  // the sum over the beginnings, from the last to the first
  std::fill(grad_initial, grad_initial + kMaxTaskChannels, Acc(0));
  bool streams = true;
  for (size_t i = 0; i < kInputs; ++i) streams = streams && view.streams(p, p.grad_inputs[i]);
  const int64_t ahead = view.steps_ahead();

  for (int64_t end = p.seqlen; end > 0;) {
    const int64_t t0 = (end - 1) / kTileSteps * kTileSteps, steps = end - t0;
    inputs.load(view, p, t0, steps);
    Rows<Acc> grads[kInputs];
    for (size_t i = 0; i < kInputs; ++i) grads[i] = view.target(grad_tiles[i], p.grad_inputs[i], t0);
    const Rows<Acc> grad_h = view.load(grad_h_tile, p.grad_h, t0, steps);
    const int64_t missing = t0 == 0 ? 1 : 0;  // there is no state before the first step
    const Rows<Acc> h = view.load(h_tile, p.h, t0 - 1 + missing, steps - missing);
    for (int64_t step = steps - 1; step >= 0; --step) {
      const int64_t t = t0 + step;
      const bool begins = p.begins(view.batch, t);
      if (p.is_cut(view.batch, t)) {
        view.load_state(e, p.ends(t) ? p.grad_last_state : StateView(), p.sequence(view.batch, t));
      }
      if (begins) view.load_state(initial, p.initial_state, p.sequence(view.batch, t));
      const Acc* input_row[Inputs::kCount];
      Acc* grad_row[kInputs];
      for (size_t i = 0; i < Inputs::kCount; ++i) input_row[i] = inputs[i][step];
      for (size_t i = 0; i < kInputs; ++i) grad_row[i] = grads[i][step];
      const Acc* const grad_h_row = grad_h[step];
      const Acc* const before = begins ? initial : h[step - missing];
      for (int64_t lane = 0; lane < view.lanes; lane += V::size()) {
        V x[Inputs::kCount], grad[kInputs];
        for (size_t i = 0; i < Inputs::kCount; ++i) x[i] = V::loadu(input_row[i] + lane);
        for (size_t i = 0; i < Inputs::kLoaded; ++i) {
          if (static_cast<int>(i) != Variant::kAdded) inputs[i].prefetch(step - ahead, lane);
        }
        grad_h.prefetch(step - ahead, lane);
        h.prefetch(step - missing - ahead, lane);
        const V g = V::loadu(grad_h_row + lane) + V::loadu(e + lane);
        const auto gates = variant.gates(x);
        variant.gradients(gates, x, V::loadu(before + lane), g, grad);
        (variant.step(gates, x).a * g).store(e + lane);
        for (size_t i = 0; i < kInputs; ++i) store_row(grad[i], grad_row[i] + lane, streams);
      }
      if (!begins) continue;
      for (int64_t lane = 0; lane < view.lanes; ++lane) grad_initial[lane] += e[lane];
      if (p.is_reset(view.batch, t) && t > 0) continue;
      view.store_state(p.grad_initial_state, grad_initial, p.sequence(view.batch, t));
      std::fill(grad_initial, grad_initial + kMaxTaskChannels, Acc(0));
    }
    for (size_t i = 0; i < kInputs; ++i) view.store(p.grad_inputs[i], grad_tiles[i], t0, steps);
    end = t0;
  }
  if (streams) finish_streaming();
}

// Calls visit(Acc(), Variant()) for a call's accumulation type and recurrence.
template <typename Visitor>
void visit_call(const LinearScanParams& p, ScalarKind kind, const Visitor& visit) {
  check_known(p.options.candidate_activation);
  visit_recurrence_at_run_time(p.recurrence, [&](auto variant) {
    const OnVectors<decltype(variant)> on_vectors{};
    if (kind == ScalarKind::kDouble) return visit(double(), on_vectors);
    visit(float(), on_vectors);
  });
}

}  // namespace

void fwd_task(const LinearScanFwdParams& p, ScalarKind kind, const Tasks& tasks, int64_t task, std::byte* scratch) {
  visit_call(p, kind, [&](auto acc, auto variant) { fwd<decltype(acc), decltype(variant)>(p, kind, tasks, task, scratch); });
}

void bwd_task(const LinearScanBwdParams& p, ScalarKind kind, const Tasks& tasks, int64_t task, std::byte* scratch) {
  visit_call(p, kind, [&](auto acc, auto variant) { bwd<decltype(acc), decltype(variant)>(p, kind, tasks, task, scratch); });
}

void summary_task(const LinearScanSummaryParams& p, ScalarKind kind, const Tasks& tasks, int64_t task, std::byte* scratch) {
  visit_call(p, kind,
             [&](auto acc, auto variant) { summary<decltype(acc), decltype(variant)>(p, kind, tasks, task, scratch); });
}

SSM_KERNEL_API const CpuKernels& kernels() {
  static constexpr CpuKernels kKernels{&fwd_task, &bwd_task, &summary_task};
  return kKernels;
}

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::linear_scan
