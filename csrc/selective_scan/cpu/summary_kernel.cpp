// The summary of a span of steps, and the gradient of the state before it, on the CPU.
//
//   h_t = Abar(z_t) h_{t-1} + delta_t k(z_t) B_t u_t, z = delta A        decay = product of Abar(z_t)
//   e_{t-1} = Abar(z_t) (e_t + C_t g_t)
//
// h begins with zero and its last value is the last state; e, with g the gradient of <C, h>, begins with zero after the last
// step and its value before the first step is the gradient of the state there. With z, g is grad_out silu(z). Where Abar is an
// exponential, decay is that of A times the sum of delta, in double.
//
// A SIMD lane is a channel, as in forward. Nothing is written for a step, so that states need no order among each other: the
// inner loop runs over the steps of a tile, with one state of each lane in a register. In float32 exponentials are most of the
// work: where no exponent of a tile's state is large, they take 11 instructions instead of 16. This file is compiled once per
// instruction set.

#include "selective_scan/cpu/summary_kernels.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "common/integers.h"
#include "selective_scan/cpu/kernel.h"

namespace ssm_kernels::selective_scan::summary {
inline namespace CPU_CAPABILITY {
namespace {

// Steps of a tile: rows of a tensor that is contiguous along time are read in long pieces, and the tiles stay in the
// first-level cache, or in the second-level one if there are many states.
int64_t tile_steps(const SelectiveScanParams& p) { return p.dstate <= kMaxStatesOfShortChunk ? 128 : 64; }

template <typename Acc>
struct Tiles {
  Acc *u, *delta, *z;                   // [step][lane]
  Acc* B_steps;                         // [step][padded state]
  Acc *A, *B_constant, *state, *decay;  // [block][state][lane]
  double* sums;                         // [block][lane]: of delta
  int64_t states_per_block;

  Tiles(Scratch& scratch, const SelectiveScanSummaryParams& p, const Blocking& blocking) {
    states_per_block = blocking.padded_dstate * blocking.lanes;
    const int64_t states = blocking.blocks_per_task * states_per_block, steps = tile_steps(p);
    u = scratch.allocate<Acc>(steps * blocking.lanes);
    delta = scratch.allocate<Acc>(steps * blocking.lanes);
    z = scratch.allocate<Acc>(p.z.data != nullptr ? steps * blocking.lanes : 0);
    B_steps = scratch.allocate<Acc>(p.B.per_step ? steps * blocking.padded_dstate : 0);
    A = scratch.allocate<Acc>(states);
    B_constant = scratch.allocate<Acc>(p.B.per_step ? 0 : states);
    state = scratch.allocate<Acc>(states);
    decay = scratch.allocate<Acc>(states);
    sums = scratch.allocate<double>(blocking.blocks_per_task * blocking.lanes);
  }
};

// 2^x for |x| <= kLargestExponent, within 2 ulp, exactly 1 for 0. With n the integer nearest to x, 2^(x - n) is a polynomial of
// degree 5, fitted to minimize the relative error (9e-8), and n is added to its exponent field.
constexpr float kLargestExponent = 125;
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
constexpr bool kHasShortExp2 = true;
inline __attribute__((always_inline)) Vec<float> short_exp2(const Vec<float>& x) {
  using V = Vec<float>;
  const V shift(12582912.0f);  // 1.5 * 2^23: the sum's low mantissa bits are n
  const V shifted = x + shift;
  const V f = x - (shifted - shift);
  V p = at::vec::fmadd(f, V(0.001326472731307149f), V(0.009671512991189957f));
  p = at::vec::fmadd(p, f, V(0.05550733581185341f));
  p = at::vec::fmadd(p, f, V(0.24022242426872253f));
  p = at::vec::fmadd(p, f, V(0.6931470036506653f));
  p = at::vec::fmadd(p, f, V(1.0f));
#if defined(CPU_CAPABILITY_AVX512)
  const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
  return V(_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), n)));
#else
  const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  return V(_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), n)));
#endif
}
#else
constexpr bool kHasShortExp2 = false;
inline Vec<float> short_exp2(const Vec<float>& x) { return x; }
#endif

// The steps of one tile of one block.
template <typename Acc>
struct Steps {
  int64_t count, dstate;
  const Acc *A, *u, *delta;  // [state][lane], [step][lane], [step][lane]
  Vec<Acc> largest_delta;    // the largest absolute value of each lane
  Operand<Acc> B;
  Acc *state, *decay;  // [state][lane], updated
};

template <typename Acc, typename Method, bool is_adjoint>
constexpr bool kMultiplies = !is_adjoint && !Method::kExponential;

// The steps of the n-th state.
template <typename Acc, typename Method, bool is_adjoint, bool takes_short_exp2>
inline __attribute__((always_inline)) void scan_state(const Method& method, const Steps<Acc>& c, int64_t n, Vec<Acc>& state,
                                                      Vec<Acc>& decay) {
  using V = Vec<Acc>;
  constexpr int64_t kLanes = V::size();
  const V A = V::loadu(c.A + n * kLanes), scaled_A = A * V(Acc(kLog2E));
  for (int64_t i = 0; i < c.count; ++i) {
    const int64_t t = is_adjoint ? c.count - 1 - i : i;
    const V delta = V::loadu(c.delta + t * kLanes), z = delta * A;
    V basis(Acc(0));
    if constexpr (takes_short_exp2) {
      basis = short_exp2(delta * scaled_A);
    } else {
      basis = method.basis(z);
    }
    const V abar = method.abar(z, basis), u = V::loadu(c.u + t * kLanes);
    if constexpr (is_adjoint) {
      state = abar * at::vec::fmadd(u, c.B.at(t, n), state);
    } else {
      V scaled = u;
      if constexpr (!Method::kUnitGain) scaled = scaled * current_gain(method, z, basis);
      state = at::vec::fmadd(abar, state, scaled * c.B.at(t, n));
    }
    if constexpr (kMultiplies<Acc, Method, is_adjoint>) decay = decay * abar;
  }
}

template <typename Acc, typename Method, bool is_adjoint>
void scan_steps(const Method& method, const Steps<Acc>& c) {
  using V = Vec<Acc>;
  constexpr int64_t kLanes = V::size();
  for (int64_t n = 0; n < c.dstate; ++n) {
    V state = V::loadu(c.state + n * kLanes), decay = V::loadu(c.decay + n * kLanes);
    bool is_scanned = false;
    if constexpr (kHasShortExp2 && std::is_same_v<Acc, float> && Method::kExponential) {
      const V largest = c.largest_delta * Math<V>::abs(V::loadu(c.A + n * kLanes)) * V(static_cast<float>(kLog2E));
      if (Math<V>::less(largest, V(kLargestExponent)).zero_mask() == 0) {  // in every lane; not for NaN
        scan_state<Acc, Method, is_adjoint, true>(method, c, n, state, decay);
        is_scanned = true;
      }
    }
    if (!is_scanned) scan_state<Acc, Method, is_adjoint, false>(method, c, n, state, decay);
    state.store(c.state + n * kLanes);
    if constexpr (kMultiplies<Acc, Method, is_adjoint>) {
      // Denormal numbers are slow, and a product that rounds up to the smallest of them never becomes zero.
      const auto is_small = Math<V>::less(Math<V>::abs(decay), V(std::numeric_limits<Acc>::min()));
      Math<V>::select(is_small, V(Acc(0)), decay).store(c.decay + n * kLanes);
    }
  }
}

template <typename Acc>
Vec<Acc> largest_of(const Acc* values, int64_t steps) {
  using V = Vec<Acc>;
  V largest(Acc(0));
  for (int64_t t = 0; t < steps; ++t) largest = at::vec::maximum(largest, V::loadu(values + t * V::size()).abs());
  return largest;
}

// Adds the steps of a tile to the sums of its lanes. The copy of the sums lets the compiler keep them in registers.
template <typename Acc>
void add_to_sums(double* sums, const Acc* delta, int64_t steps) {
  constexpr int64_t kLanes = Vec<Acc>::size();
  double total[kLanes];
  std::copy_n(sums, kLanes, total);
  for (int64_t t = 0; t < steps; ++t) {
    for (int64_t lane = 0; lane < kLanes; ++lane) total[lane] += double(delta[t * kLanes + lane]);
  }
  std::copy_n(total, kLanes, sums);
}

// values *= silu(z).
template <typename Acc>
void apply_gate(Acc* values, const Acc* z, int64_t count) {
  using V = Vec<Acc>;
  for (int64_t i = 0; i < count; i += V::size()) (V::loadu(values + i) * silu(V::loadu(z + i))).store(values + i);
}

template <typename Acc>
void multiply(Acc* values, const Acc* factors, int64_t count) {
  using V = Vec<Acc>;
  for (int64_t i = 0; i < count; i += V::size()) (V::loadu(values + i) * V::loadu(factors + i)).store(values + i);
}

template <typename Scalar>
void run_task(const SelectiveScanSummaryParams& p, const Blocking& blocking, int64_t index, std::byte* memory) {
  using Acc = AccumulateType<Scalar>;
  constexpr int64_t kLanes = Vec<Acc>::size();
  static_assert(64 % kLanes == 0, "a tile has whole square tiles");
  Scratch scratch(memory);
  const Tiles<Acc> tiles(scratch, p, blocking);
  const Task task(p, blocking, index);
  const auto channel_of = [&](int64_t block) { return task.first_channel + block * kLanes; };
  const auto channels_of = [&](int64_t block) { return std::min(kLanes, task.end_channel - channel_of(block)); };

  for (int64_t block = 0; block < task.blocks; ++block) {
    const int64_t channel = channel_of(block), channels = channels_of(block), at = block * tiles.states_per_block;
    load_states(tiles.A + at, p.A.data, channel * p.A.stride_dim, p.A.stride_dim, p.A.stride_state, channels, p.dstate);
    load_constant(tiles.B_constant + at, p.B, channel, channels, p.dstate);
    std::fill_n(tiles.state + at, tiles.states_per_block, Acc(0));
    std::fill_n(tiles.decay + at, tiles.states_per_block, Acc(1));
    std::fill_n(tiles.sums + block * kLanes, kLanes, 0.0);
  }

  bool input_has_delta = true;
  visit_discretization(p.discretization, [&](auto rule) { input_has_delta = decltype(rule)::kInputHasDelta; });
  const int64_t most = tile_steps(p), count = ceil_div(p.seqlen, most);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t start = (p.is_adjoint ? count - 1 - i : i) * most, steps = std::min(most, p.seqlen - start);
    if (p.B.per_step) load_matrix_steps<Acc, Scalar>(tiles.B_steps, p.B, p, blocking, task, start, steps);
    for (int64_t block = 0; block < task.blocks; ++block) {
      const int64_t at = block * tiles.states_per_block;
      load_sequence<Acc, Scalar>(tiles.u, p.u, task.row, channel_of(block), channels_of(block), start, steps);
      load_sequence<Acc, Scalar>(tiles.delta, p.delta, task.row, channel_of(block), channels_of(block), start, steps);
      const Vec<Acc> bias = load_channels<Acc>(p.delta_bias, channel_of(block), channels_of(block));
      finish_delta(tiles.delta, tiles.delta, bias, p.delta_softplus, steps);
      if (!p.is_adjoint) {
        add_to_sums(tiles.sums + block * kLanes, tiles.delta, steps);
        if (input_has_delta) multiply(tiles.u, tiles.delta, steps * kLanes);
      }
      if (p.z.data != nullptr) {
        load_sequence<Acc, Scalar>(tiles.z, p.z, task.row, channel_of(block), channels_of(block), start, steps);
        apply_gate(tiles.u, tiles.z, steps * kLanes);
      }
      const Steps<Acc> c{steps,
                         p.dstate,
                         tiles.A + at,
                         tiles.u,
                         tiles.delta,
                         largest_of(tiles.delta, steps),
                         operand(p.B, tiles.B_steps, tiles.B_constant + at, blocking),
                         tiles.state + at,
                         tiles.decay + at};
      visit_discretization(p.discretization, blocking.method, [&](auto rule) {
        using Rule = decltype(rule);
        p.is_adjoint ? scan_steps<Acc, Rule, true>(rule, c) : scan_steps<Acc, Rule, false>(rule, c);
      });
    }
  }

  bool is_exponential = false;
  visit_discretization(p.discretization, [&](auto rule) { is_exponential = decltype(rule)::kExponential; });
  for (int64_t block = 0; block < task.blocks; ++block) {
    const int64_t at = block * tiles.states_per_block, offset = (task.row.batch * p.dim + channel_of(block)) * p.dstate;
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

SSM_KERNEL_API const CpuKernels& kernels() {
  static constexpr CpuKernels kKernels{&vector_bytes, &scratch_bytes, &task};
  return kKernels;
}

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::selective_scan::summary
