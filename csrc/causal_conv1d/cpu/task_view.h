// A task's channels and scratch memory, and its loads and stores of tensors of any strides and element type. Included only by
// kernel.cpp and channels_first.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "causal_conv1d/cpu/kernels.h"
#include "cpu/scalar_types.h"
#include "cpu/tile_io.h"

namespace ssm_kernels::causal_conv1d {
inline namespace CPU_CAPABILITY {
namespace {

constexpr int64_t kMaxLanes = 16;  // per vector; the transposes of tile_io.h round steps up to whole vectors

// Values [steps][channels] in the accumulation type: the memory of a tensor, or a tile.
template <typename Acc>
struct Rows {
  Acc* data;
  int64_t stride;

  Acc* operator[](int64_t step) const { return data + step * stride; }
};

// `count` rows of the past, followed by the rows of a tile.
template <typename Acc>
struct Continued {
  Rows<Acc> past;
  int64_t count;
  Rows<Acc> tile;

  Acc* operator[](int64_t i) const { return i < count ? past[i] : tile[i - count]; }

  // Moves the past forward by `steps` steps of the tile.
  void advance(int64_t steps, int64_t lanes) const {
    if (steps == 0) return;
    for (int64_t i = 0; i < count; ++i) std::copy_n((*this)[i + steps], round_up(lanes, Vec<Acc>::size()), past[i]);
  }
};

// Allocates scratch memory in rows of a task's channels.
template <typename Acc>
class ScratchRows {
 public:
  ScratchRows(std::byte* scratch, int64_t row) : next_(reinterpret_cast<Acc*>(scratch)), row_(row) {}

  Rows<Acc> rows(int64_t count) {
    const Rows<Acc> rows{next_, row_};
    next_ += count * row_;
    return rows;
  }
  // `count` values and at least a vector more.
  Acc* values(int64_t count) { return rows((count + kMaxLanes + row_ - 1) / row_).data; }
  // Rows of a tile, with room for the steps that a transpose rounds up.
  Rows<Acc> tile(int64_t steps) { return rows(steps + kMaxLanes); }

 private:
  Acc* next_;
  int64_t row_;
};

// The channels of one task, and its loads and stores. Loops are compiled for the accumulation type; the element type of a
// tensor is a run-time choice per tile.
template <typename Acc>
struct TaskView {
  static_assert(kMinTaskChannels % Vec<Acc>::size() == 0 && Vec<Acc>::size() <= kMaxLanes,
                "a task's channels are whole vectors, and tiles have room for steps rounded up to one");

  ScalarKind kind;
  int64_t batch, first_channel, lanes, row;

  TaskView(const ConvParams& p, const Tasks& tasks, int64_t task) : kind(p.kind), row(tasks.channels) {
    batch = task / tasks.blocks;
    first_channel = task % tasks.blocks * tasks.channels;
    lanes = std::min(tasks.channels, p.channels - first_channel);
  }

  // Calls visitor(Element()) with a tensor's element type: that of the inputs or the accumulation type.
  template <typename Visitor>
  void visit_element(bool is_input_kind, const Visitor& visitor) const {
    if (!is_input_kind || kind == ScalarKind::kFloat || kind == ScalarKind::kDouble) return visitor(Acc());
    if constexpr (std::is_same_v<Acc, float>) {
      if (kind == ScalarKind::kHalf) return visitor(c10::Half());
      visitor(c10::BFloat16());
    }
  }

  __attribute__((noinline)) void load(const Rows<Acc>& rows, const void* data, bool is_input_kind, int64_t offset,
                                      int64_t stride_lane, int64_t stride_step, int64_t steps) const {
    visit_element(is_input_kind, [&](auto element) {
      load_tile(rows.data, row, static_cast<const decltype(element)*>(data) + offset, stride_lane, stride_step, lanes, steps);
    });
  }

  __attribute__((noinline)) void store(void* data, int64_t offset, int64_t stride_lane, int64_t stride_step,
                                       const Rows<Acc>& rows, int64_t steps) const {
    visit_element(true, [&](auto element) {
      store_tile(static_cast<decltype(element)*>(data) + offset, stride_lane, stride_step, rows.data, row, lanes, steps);
    });
  }

  void clear(const Rows<Acc>& rows, int64_t count) const { std::fill_n(rows.data, count * row, Acc(0)); }

  bool is_in_place(const SequenceView& view) const {
    return (kind == ScalarKind::kFloat || kind == ScalarKind::kDouble) && view.data != nullptr && view.stride_channel == 1 &&
           lanes % Vec<Acc>::size() == 0;
  }

  Rows<Acc> in_place(const SequenceView& view, int64_t t) const {
    return {static_cast<Acc*>(view.data) + view.offset(batch, t, first_channel), view.stride_step};
  }

  // Loads steps [t, t + steps). An absent tensor gives zeros.
  Rows<Acc> load(const Rows<Acc>& tile, const SequenceView& view, int64_t t, int64_t steps) const {
    if (is_in_place(view)) return in_place(view, t);
    if (view.data == nullptr) {
      clear(tile, steps);
    } else {
      load(tile, view.data, true, view.offset(batch, t, first_channel), view.stride_channel, view.stride_step, steps);
    }
    return tile;
  }

  // Returns the rows to write steps from t on to: the tensor itself or, if store() has to convert them, the tile.
  Rows<Acc> target(const Rows<Acc>& tile, const SequenceView& view, int64_t t) const {
    return is_in_place(view) ? in_place(view, t) : tile;
  }

  void store(const SequenceView& view, const Rows<Acc>& tile, int64_t t, int64_t steps) const {
    if (view.data == nullptr || steps <= 0 || is_in_place(view)) return;
    store(view.data, view.offset(batch, t, first_channel), view.stride_channel, view.stride_step, tile, steps);
  }

  // Stores zeros to steps [begin, end). The tile has kTileSteps rows.
  void store_zeros(const SequenceView& view, const Rows<Acc>& tile, int64_t begin, int64_t end) const {
    if (view.data == nullptr) return;
    clear(tile, kTileSteps);
    for (int64_t t = begin; t < end; t += kTileSteps) {
      const int64_t steps = std::min(kTileSteps, end - t);
      for (int64_t i = 0; is_in_place(view) && i < steps; ++i) std::fill_n(in_place(view, t)[i], lanes, Acc(0));
      store(view, tile, t, steps);
    }
  }

  // Loads a sequence's state. An absent tensor, and a sequence without a state, give zeros.
  void load_state(const Rows<Acc>& rows, const StateView& view, bool is_input_kind, int64_t sequence, int64_t steps) const {
    if (view.data == nullptr || sequence < 0) return clear(rows, steps);
    load(rows, view.data, is_input_kind, view.offset(sequence, first_channel, 0), view.stride_channel, view.stride_step, steps);
  }

  void store_state(const StateView& view, int64_t sequence, const Rows<Acc>& rows, int64_t steps) const {
    if (view.data == nullptr || sequence < 0) return;
    store(view.data, view.offset(sequence, first_channel, 0), view.stride_channel, view.stride_step, rows, steps);
  }

  // Loads the taps, and the bias or zeros.
  Rows<Acc> load_parameters(ScratchRows<Acc>& memory, const ConvParams& p) const {
    const Rows<Acc> rows = memory.tile(p.width + 1);
    const auto load_parameter = [&](const Rows<Acc>& target, const ParameterView& view, int64_t taps) {
      load(target, view.data, view.is_input_kind, first_channel * view.stride_channel, view.stride_channel, view.stride_tap,
           taps);
    };
    load_parameter(rows, p.weight, p.width);
    const Rows<Acc> bias{rows[p.width], row};
    clear(bias, 1);
    if (p.bias.data != nullptr) load_parameter(bias, p.bias, 1);
    return rows;
  }
};

// Calls visitor(begin, end) for each sequence of a batch row.
template <typename Visitor>
void for_each_sequence(const ConvParams& p, int64_t batch, const Visitor& visitor) {
  for (int64_t begin = 0; begin < p.seqlen;) {
    int64_t last = p.ids.data == nullptr ? p.seqlen - 1 : begin;
    while (!p.is_last_step(batch, last)) ++last;
    visitor(begin, last + 1);
    begin = last + 1;
  }
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::causal_conv1d
