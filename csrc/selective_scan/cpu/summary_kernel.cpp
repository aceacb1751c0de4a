// The summary of a span of steps, and the gradient of the state before it, on the CPU.
//
//   h_t = Abar(z_t) h_{t-1} + delta_t k(z_t) B_t u_t, z = delta A        decay = product of Abar(z_t)
//   e_{t-1} = Abar(z_t) (e_t + C_t g_t)
//
// h begins with zero and its last value is the last state; e, with g the gradient of <C, h>, begins with zero after the last
// step and its value before the first step is the gradient of the state there. Where Abar is an exponential, decay is that of A
// times the sum of delta, in double.
//
// A SIMD lane is a channel, as in forward. Nothing is written for a step, so that states need no order among each other: the
// inner loop runs over the steps of a tile, with one state of each lane in a register. This file is compiled once per
// instruction set.

#include "selective_scan/cpu/summary_kernels.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "selective_scan/cpu/kernel.h"

namespace ssm_kernels::selective_scan::summary {
inline namespace CPU_CAPABILITY {
namespace {

template <typename Acc>
struct Tiles {
  Acc *u, *delta;                       // [step][lane]
  Acc* B_steps;                         // [step][padded state]
  Acc *A, *B_constant, *state, *decay;  // [block][state][lane]
  double* sums;                         // [block][lane]: of delta
  int64_t states_per_block;

  Tiles(Scratch& scratch, const SelectiveScanSummaryParams& p, const Blocking& blocking) {
    states_per_block = blocking.padded_dstate * blocking.lanes;
    const int64_t states = blocking.blocks_per_task * states_per_block;
    u = scratch.allocate<Acc>(p.chunk_length * blocking.lanes);
    delta = scratch.allocate<Acc>(p.chunk_length * blocking.lanes);
    B_steps = scratch.allocate<Acc>(p.B.per_step ? p.chunk_length * blocking.padded_dstate : 0);
    A = scratch.allocate<Acc>(states);
    B_constant = scratch.allocate<Acc>(p.B.per_step ? 0 : states);
    state = scratch.allocate<Acc>(states);
    decay = scratch.allocate<Acc>(states);
    sums = scratch.allocate<double>(blocking.blocks_per_task * blocking.lanes);
  }
};

// The steps of one tile of one block.
template <typename Acc>
struct Steps {
  int64_t count, dstate;
  const Acc *A, *u, *delta;  // [state][lane], [step][lane], [step][lane]
  Operand<Acc> B;
  Acc *state, *decay;  // [state][lane], updated
};

template <typename Acc, typename Method, bool is_adjoint>
void scan_steps(const Steps<Acc>& c) {
  using V = Vec<Acc>;
  constexpr int64_t kLanes = V::size();
  constexpr bool multiplies = !is_adjoint && !Method::kExponential;
  for (int64_t n = 0; n < c.dstate; ++n) {
    const V A = V::loadu(c.A + n * kLanes);
    V state = V::loadu(c.state + n * kLanes);
    V decay = multiplies ? V::loadu(c.decay + n * kLanes) : V(Acc(1));
    for (int64_t i = 0; i < c.count; ++i) {
      const int64_t t = is_adjoint ? c.count - 1 - i : i;
      const V z = V::loadu(c.delta + t * kLanes) * A;
      const V basis = Method::basis(z), abar = Method::abar(z, basis);
      const V u = V::loadu(c.u + t * kLanes);
      if constexpr (is_adjoint) {
        state = abar * at::vec::fmadd(u, c.B.at(t, n), state);
      } else {
        V scaled = u;
        if constexpr (!Method::kUnitGain) scaled = scaled * current_gain(Method(), z, basis);
        state = at::vec::fmadd(abar, state, scaled * c.B.at(t, n));
      }
      if constexpr (multiplies) decay = decay * abar;
    }
    state.store(c.state + n * kLanes);
    if constexpr (multiplies) {
      // Denormal numbers are slow, and a product that rounds up to the smallest of them never becomes zero.
      const auto is_small = Math<V>::less(Math<V>::abs(decay), V(std::numeric_limits<Acc>::min()));
      Math<V>::select(is_small, V(Acc(0)), decay).store(c.decay + n * kLanes);
    }
  }
}

// Adds the steps of a tile to the sums of its lanes, and multiplies u by delta.
template <typename Acc>
void sum_and_scale(double* sums, Acc* u, const Acc* delta, int64_t steps) {
  constexpr int64_t kLanes = Vec<Acc>::size();
  for (int64_t t = 0; t < steps; ++t) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      sums[lane] += delta[t * kLanes + lane];
      u[t * kLanes + lane] *= delta[t * kLanes + lane];
    }
  }
}

template <typename Scalar>
void run_task(const SelectiveScanSummaryParams& p, const Blocking& blocking, int64_t index, std::byte* memory) {
  using Acc = AccumulateType<Scalar>;
  constexpr int64_t kLanes = Vec<Acc>::size();
  static_assert(kShortChunk % kLanes == 0, "a chunk's tile has whole square tiles");
  Scratch scratch(memory);
  const Tiles<Acc> tiles(scratch, p, blocking);
  const int64_t segment = index / blocking.tasks_per_segment, batch = segment / blocking.segments;
  const int64_t first_block = index % blocking.tasks_per_segment * blocking.blocks_per_task;
  const int64_t blocks = std::min(blocking.blocks_per_task, blocking.blocks_per_segment - first_block);
  const int64_t begin = segment % blocking.segments * blocking.segment, end = begin + blocking.segment;
  const auto channel_of = [&](int64_t block) { return begin + (first_block + block) * kLanes; };
  const auto channels_of = [&](int64_t block) { return std::min(kLanes, end - channel_of(block)); };
  const auto load = [&](Acc* tile, const SequenceView& view, int64_t block, int64_t start, int64_t steps) {
    const Scalar* source = static_cast<const Scalar*>(view.data) + batch * view.stride_batch +
                           channel_of(block) * view.stride_dim + start * view.stride_step;
    load_tile<Acc>(tile, kLanes, source, view.stride_dim, view.stride_step, channels_of(block), steps);
  };

  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t channel = channel_of(block), channels = channels_of(block), at = block * tiles.states_per_block;
    load_states(tiles.A + at, p.A.data, channel * p.A.stride_dim, p.A.stride_dim, p.A.stride_state, channels, p.dstate);
    load_constant(tiles.B_constant + at, p.B, channel, channels, p.dstate);
    std::fill_n(tiles.state + at, tiles.states_per_block, Acc(0));
    std::fill_n(tiles.decay + at, tiles.states_per_block, Acc(1));
    std::fill_n(tiles.sums + block * kLanes, kLanes, 0.0);
  }

  const int64_t chunks = p.chunk_boundaries - 1;
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t start = (p.is_adjoint ? chunks - 1 - i : i) * p.chunk_length;
    const int64_t steps = std::min(p.chunk_length, p.seqlen - start);
    if (p.B.per_step) {
      const Scalar* source = static_cast<const Scalar*>(p.B.data) + batch * p.B.stride_batch +
                             begin / (p.dim / p.B.groups) * p.B.stride_channel + start * p.B.stride_step;
      load_tile<Acc>(tiles.B_steps, blocking.padded_dstate, source, p.B.stride_state, p.B.stride_step, p.dstate, steps);
    }
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t at = block * tiles.states_per_block;
      load(tiles.u, p.u, block, start, steps);
      load(tiles.delta, p.delta, block, start, steps);
      const Vec<Acc> bias = load_channels<Acc>(p.delta_bias, channel_of(block), channels_of(block));
      finish_delta(tiles.delta, tiles.delta, bias, p.delta_softplus, steps);
      if (!p.is_adjoint) sum_and_scale(tiles.sums + block * kLanes, tiles.u, tiles.delta, steps);
      const Steps<Acc> c{steps,
                         p.dstate,
                         tiles.A + at,
                         tiles.u,
                         tiles.delta,
                         operand(p.B, tiles.B_steps, tiles.B_constant + at, blocking),
                         tiles.state + at,
                         tiles.decay + at};
      visit_discretization(p.discretization, [&](auto rule) {
        p.is_adjoint ? scan_steps<Acc, decltype(rule), true>(c) : scan_steps<Acc, decltype(rule), false>(c);
      });
    }
  }

  bool is_exponential = false;
  visit_discretization(p.discretization, [&](auto rule) { is_exponential = decltype(rule)::kExponential; });
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t at = block * tiles.states_per_block, offset = (batch * p.dim + channel_of(block)) * p.dstate;
    store_tile(static_cast<Acc*>(p.state) + offset, p.dstate, 1, tiles.state + at, kLanes, channels_of(block), p.dstate);
    if (p.decay == nullptr) continue;
    for (int64_t j = 0; is_exponential && j < p.dstate * kLanes; ++j) {
      tiles.decay[at + j] = static_cast<Acc>(std::exp(double(tiles.A[at + j]) * tiles.sums[block * kLanes + j % kLanes]));
    }
    store_tile(static_cast<Acc*>(p.decay) + offset, p.dstate, 1, tiles.decay + at, kLanes, channels_of(block), p.dstate);
  }
}

}  // namespace

int64_t vector_bytes() { return Vec<float>::size() * int64_t(sizeof(float)); }

int64_t scratch_bytes(const SelectiveScanSummaryParams& p, const Blocking& blocking, ScalarKind kind) {
  int64_t bytes = 0;
  visit_scalar(kind, [&](auto scalar) {
    Scratch scratch(nullptr);
    Tiles<AccumulateType<decltype(scalar)>>(scratch, p, blocking);
    bytes = scratch.used();
  });
  return bytes;
}

void task(const SelectiveScanSummaryParams& p, const Blocking& blocking, ScalarKind kind, int64_t index, std::byte* scratch) {
  visit_scalar(kind, [&](auto scalar) { run_task<decltype(scalar)>(p, blocking, index, scratch); });
}

const CpuKernels& kernels() {
  static constexpr CpuKernels kKernels{&vector_bytes, &scratch_bytes, &task};
  return kKernels;
}

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::selective_scan::summary
