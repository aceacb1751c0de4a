// Shared by the forward and backward CPU kernels: scratch memory, and loads of a block's operands.
#pragma once

#include <cstddef>

#include "common/activations.h"
#include "common/discretization.h"
#include "cpu/scalar_types.h"
#include "cpu/tile_io.h"
#include "cpu/vec_math.h"
#include "selective_scan/cpu/kernels.h"

namespace ssm_kernels::selective_scan {
inline namespace CPU_CAPABILITY {

// Allocates consecutive 64-byte aligned arrays. With a null base it only counts bytes.
class Scratch {
 public:
  explicit Scratch(std::byte* data) : data_(data) {}

  template <typename Acc>
  Acc* allocate(int64_t count) {
    Acc* array = reinterpret_cast<Acc*>(data_ + used_);
    used_ += round_up(count * int64_t(sizeof(Acc)), 64);
    return array;
  }

  int64_t used() const { return used_; }

 private:
  std::byte* data_;
  int64_t used_ = 0;
};

// B or C of one block: per step, [step][state], the same for all lanes; or constant, [state][lane].
template <typename Acc>
struct Operand {
  const Acc* data;
  int64_t row;
  bool per_step;

  Vec<Acc> at(int64_t step, int64_t state) const {
    return per_step ? Vec<Acc>(data[step * row + state]) : Vec<Acc>::loadu(data + state * Vec<Acc>::size());
  }
};

template <typename Acc>
Operand<Acc> operand(const MatrixView& matrix, const Acc* steps, const Acc* constant, const Blocking& blocking) {
  return {matrix.per_step ? steps : constant, blocking.padded_dstate, matrix.per_step};
}

// One chunk of one block of the recurrence.
template <typename Acc>
struct ScanChunk {
  int64_t steps, dstate;
  const Acc* A;      // [state][lane]
  const Acc* u;      // [step][lane]
  const Acc* delta;  // [step][lane]
  Operand<Acc> B, C;
  Acc* state;  // [state][lane], updated; in backward the first of [step][state][lane], kept
  Acc* y;      // [step][lane]: <C_t, h_t>
  Acc* basis;  // [step][state][lane], in backward
};

// Runs the recurrence. Backward keeps each step's states, and the method's basis, which is its one expensive value.
template <typename Acc, typename Method, bool keeps>
void scan_chunk(const Method& method, const ScanChunk<Acc>& c) {
  using V = Vec<Acc>;
  constexpr int64_t kLanes = V::size();
  const int64_t row = c.dstate * kLanes;
  for (int64_t t = 0; t < c.steps; ++t) {
    const V delta = V::loadu(c.delta + t * kLanes);
    V input = V::loadu(c.u + t * kLanes);
    if constexpr (Method::kInputHasDelta) input = delta * input;
    const Acc* const before = c.state + (keeps ? t * row : 0);
    Acc* const after = c.state + (keeps ? (t + 1) * row : 0);
    V y(Acc(0));
    for (int64_t n = 0; n < c.dstate; ++n) {
      const V z = delta * V::loadu(c.A + n * kLanes);
      const V basis = method.basis(z);
      if constexpr (keeps) basis.store(c.basis + t * row + n * kLanes);
      V scaled = input;
      if constexpr (!Method::kUnitGain) scaled = scaled * current_gain(method, z, basis);
      const V h = at::vec::fmadd(method.abar(z, basis), V::loadu(before + n * kLanes), scaled * c.B.at(t, n));
      h.store(after + n * kLanes);
      y = at::vec::fmadd(h, c.C.at(t, n), y);
    }
    y.store(c.y + t * kLanes);
  }
}

// Loads a per-step B or C of a task for steps [start, start + steps) of its row.
template <typename Acc, typename Scalar>
void load_matrix_steps(Acc* tile, const MatrixView& matrix, const SelectiveScanParams& p, const Blocking& blocking,
                       const Task& task, int64_t start, int64_t steps) {
  const int64_t group = task.first_channel / (p.dim / matrix.groups);
  const Scalar* source = static_cast<const Scalar*>(matrix.data) + task.row.batch * matrix.stride_batch +
                         group * matrix.stride_channel + (task.row.begin + start) * matrix.stride_step;
  load_tile<Acc>(tile, blocking.padded_dstate, source, matrix.stride_state, matrix.stride_step, p.dstate, steps);
}

// Loads [state][lane] of a (..., dim, dstate) tensor.
template <typename Acc>
void load_states(Acc* tile, const void* data, int64_t offset, int64_t stride_dim, int64_t stride_state, int64_t channels,
                 int64_t dstate) {
  load_tile<Acc>(tile, Vec<Acc>::size(), static_cast<const Acc*>(data) + offset, stride_dim, stride_state, channels, dstate);
}

// Loads a constant B or C of a block; nothing for a per-step one.
template <typename Acc>
void load_constant(Acc* tile, const MatrixView& matrix, int64_t channel, int64_t channels, int64_t dstate) {
  if (matrix.per_step) return;
  load_states(tile, matrix.data, channel * matrix.stride_channel, matrix.stride_channel, matrix.stride_state, channels, dstate);
}

// The first of some channels at step `start` of a row.
template <typename Scalar>
Scalar* address_of(const SequenceView& view, const ScanRow& row, int64_t channel, int64_t start) {
  return static_cast<Scalar*>(view.data) + row.batch * view.stride_batch + channel * view.stride_dim +
         (row.begin + start) * view.stride_step;
}

template <typename Acc, typename Scalar>
void load_sequence(Acc* tile, const SequenceView& view, const ScanRow& row, int64_t channel, int64_t channels, int64_t start,
                   int64_t steps) {
  const Scalar* source = address_of<Scalar>(view, row, channel, start);
  load_tile<Acc>(tile, Vec<Acc>::size(), source, view.stride_dim, view.stride_step, channels, steps);
}

template <typename Acc, typename Scalar>
void store_sequence(const SequenceView& view, const Acc* tile, const ScanRow& row, int64_t channel, int64_t channels,
                    int64_t start, int64_t steps) {
  Scalar* target = address_of<Scalar>(view, row, channel, start);
  store_tile<Acc>(target, view.stride_dim, view.stride_step, tile, Vec<Acc>::size(), channels, steps);
}

// The block's lanes of a (dim,) tensor; zero where it is absent.
template <typename Acc>
Vec<Acc> load_channels(const ChannelView& view, int64_t channel, int64_t channels) {
  alignas(64) Acc lanes[Vec<Acc>::size()] = {};
  if (view.data != nullptr) {
    for (int64_t i = 0; i < channels; ++i) lanes[i] = static_cast<const Acc*>(view.data)[(channel + i) * view.stride];
  }
  return Vec<Acc>::loadu(lanes);
}

// delta = softplus?(raw + bias); raw becomes raw + bias. The two may be the same tile.
template <typename Acc>
void finish_delta(Acc* raw, Acc* delta, Vec<Acc> bias, bool use_softplus, int64_t steps) {
  for (int64_t t = 0; t < steps; ++t) {
    const Vec<Acc> x = Vec<Acc>::loadu(raw + t * Vec<Acc>::size()) + bias;
    x.store(raw + t * Vec<Acc>::size());
    (use_softplus ? softplus(x) : x).store(delta + t * Vec<Acc>::size());
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::selective_scan
