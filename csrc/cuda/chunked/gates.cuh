// The gates of a chunked scan: the log decay and the gain of each step. In forward
//
//   S_t = e^(log decay_t) S_{t-1} + gain_t x_t B_t^T
//
// and SSD's kernels know nothing else about a step; those of the delta rule also read beta from `Loaded`, write the gradients
// themselves and need no backward part. Where these two come from is a type, `Gates`, a parameter of the kernels. To add a gate
// is to write such a type; ssd/cuda/log_gates.cuh is the simplest. It describes the gates of one head, is default-constructible
// and trivially copyable. A warp evaluates it: a lane has two steps of a chunk. It provides:
//
//   Scalar                 type of the inputs in memory: float, __half or __nv_bfloat16.
//   FwdParams, BwdParams   parameters of the kernels of each direction. They derive from ChunkedGeometry, with the members for
//                          sequences and states that geometry.h lists, and have the inputs of the gates.
//   Gates(p, head)         reads what belongs to the head.
//
// for the inputs:
//
//   Loaded                 inputs of a step, as they are in memory: no instruction waits for them yet.
//   Source                 where the inputs of a chunk are: source(p, span, head, chunk), and later(p, source, chunks) for a
//                          later chunk. load(p, source, step, loaded) starts to load those of a step.
//   Kept, keep(p, loaded)  the inputs of a step in fp32. In backward they wait in shared memory for write_gradients().
//
// for forward, and for the passes over the states (chunk_tables.cuh calls them in this order):
//
//   gain(p, kept)          the gain of a step, or a factor of it.
//   log_decay<Sum>(kept, gain)
//                          the log decay of a step, given what gain() returned. `Sum` is float, and double for fp32 inputs.
//   scale_gains(p, log_decay, gain)
//                          applies the rest of the gain, if any, to the two steps of each of `count` chunks.
//
// optionally, to multiply the outputs of each step of forward by a factor, of fp16 and bf16 inputs:
//
//   kHasOutFactors, scale_output(p, loaded, log2_cumsum, gain, exp_cumsum)
//                          changes a step's entries of the tables that the outputs are made with, not those of the state.
//
//   kHasDiagonalGain, diagonal_gain(p, loaded)
//                          the gain of a step's own input in its output. The output then reads the state before the step,
//                          without its decay: y_t = S_{t-1} C_t + diagonal_gain_t (B_t . C_t) x_t.
//                          The parameters then have rank_shift: what the tables call a step is a row, and a step of the
//                          recurrence has 2^rank_shift consecutive rows, at most eight. All of them read the state before
//                          the first one, and the diagonal is the block of all pairs of them. The first row has the log
//                          decay, the others have 0; each has a gain and a diagonal gain.
//
// and for backward:
//
//   write_gradients(p, span, steps, chunk, head, kept, lane, gradients)
//                          turns the gradients of the log decays and the gains of a chunk (GateGradients) into gradients of the
//                          inputs, and writes these. Sums over the steps are parts, one for each chunk number.
//   clear_gradients(p, chunk, head)
//                          clears the parts of a chunk number that belongs to no sequence.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/chunked/geometry.h"
#include "cuda/constants.h"

namespace ssm_kernels::cuda::chunked {

// Calls body(k, i) for the lane's step i of each chunk k.
template <int count, typename Body>
__device__ __forceinline__ void for_each_step(const Body& body) {
#pragma unroll
  for (int k = 0; k < count; ++k) {
#pragma unroll
    for (int i = 0; i < 2; ++i) body(k, i);
  }
}

// Whether gates multiply the outputs by factors, in forward.
template <typename Gates, typename Params, typename = void>
constexpr bool kScalesOutputs = false;
template <typename Gates, typename Params>
constexpr bool kScalesOutputs<Gates, Params, std::void_t<decltype(Gates::kHasOutFactors)>> =
    Gates::kHasOutFactors && std::is_same_v<Params, typename Gates::FwdParams>;

// Whether gates have a gain on the diagonal.
template <typename Gates, typename = void>
constexpr bool kHasDiagonalGain = false;
template <typename Gates>
constexpr bool kHasDiagonalGain<Gates, std::void_t<decltype(Gates::kHasDiagonalGain)>> = Gates::kHasDiagonalGain;

// The binary logarithm of the rows of a step: 0, known to the compiler, without a gain on the diagonal.
template <typename Gates, typename Params>
__device__ __forceinline__ int rank_shift_of(const Params& p) {
  if constexpr (kHasDiagonalGain<Gates>) {
    return p.rank_shift;
  } else {
    return 0;
  }
}

// A lane's two steps of a chunk, loaded ahead.
template <typename Gates>
struct FetchedSteps {
  typename Gates::Loaded loaded[2];
  uint8_t resets[2];
  int steps;  // that exist in the chunk

  template <typename Params>
  __device__ __forceinline__ void fetch(const Params& p, typename Gates::Source source, const uint8_t* resets_source,
                                        int steps_of_chunk) {
    steps = steps_of_chunk;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (is_there(i)) {
        Gates::load(p, source, step(i), loaded[i]);
      } else {
        loaded[i] = {};
      }
      resets[i] = resets_source != nullptr && is_there(i) ? resets_source[step(i)] : 0;
    }
  }

  static __device__ __forceinline__ int step(int i) { return 2 * (threadIdx.x % kWarpSize) + i; }
  __device__ __forceinline__ bool is_there(int i) const { return step(i) < steps; }
};

// Gradients of the log decays, the gains and the diagonal gains of a lane's two steps, and the inner products of the outputs
// before D x and the gate with their gradients.
struct GateGradients {
  float log_decay[2], gain[2], outputs[2], diagonal_gain[2];
};

}  // namespace ssm_kernels::cuda::chunked
