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

// Loads a per-step B or C of a task for steps [start, start + steps).
template <typename Acc, typename Scalar>
void load_matrix_steps(Acc* tile, const MatrixView& matrix, const SelectiveScanParams& p, const Blocking& blocking,
                       const Task& task, int64_t start, int64_t steps) {
  const int64_t group = task.first_channel / (p.dim / matrix.groups);
  const Scalar* source = static_cast<const Scalar*>(matrix.data) + task.batch * matrix.stride_batch +
                         group * matrix.stride_channel + start * matrix.stride_step;
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

template <typename Acc, typename Scalar>
void load_sequence(Acc* tile, const SequenceView& view, int64_t batch, int64_t channel, int64_t channels, int64_t start,
                   int64_t steps) {
  const Scalar* source =
      static_cast<const Scalar*>(view.data) + batch * view.stride_batch + channel * view.stride_dim + start * view.stride_step;
  load_tile<Acc>(tile, Vec<Acc>::size(), source, view.stride_dim, view.stride_step, channels, steps);
}

template <typename Acc, typename Scalar>
void store_sequence(const SequenceView& view, const Acc* tile, int64_t batch, int64_t channel, int64_t channels, int64_t start,
                    int64_t steps) {
  Scalar* target =
      static_cast<Scalar*>(view.data) + batch * view.stride_batch + channel * view.stride_dim + start * view.stride_step;
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
