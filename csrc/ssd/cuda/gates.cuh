// The gates of a step: its log decay and its gain, from dt, A and the discretization.
#pragma once

#include "common/activations.h"
#include "ssd/cuda/toolkit.cuh"

namespace ssm_kernels::ssd {

// The lowest binary logarithm of a step's decay; 2^-160 is zero in fp32. Lower ones would make the sums so large that
// differences between later, weaker decays lose their accuracy.
constexpr float kLowestLog2Decay = -160;

// Calls visitor with the discretization as a type.
template <typename Visitor>
__device__ __forceinline__ void visit_exponential(Discretization discretization, const Visitor& visitor) {
  switch (discretization) {
#define SSM_ROW(enumerator, name, type)                \
  case Discretization::enumerator:                     \
    if constexpr (type::kExponential) visitor(type()); \
    break;
    SSM_DISCRETIZATIONS(SSM_ROW)
#undef SSM_ROW
  }
}

// The parameters of one head that turn dt into step sizes.
struct HeadSteps {
  float A, dt_bias;

  HeadSteps() = default;
  __device__ __forceinline__ HeadSteps(const SsdParams& p, int64_t head)
      : A(p.A[head]), dt_bias(p.dt_bias != nullptr ? p.dt_bias[head] : 0.0f) {}

  // The step size d: dt with bias, softplus and limits.
  __device__ __forceinline__ float step_size(const SsdParams& p, float dt) const {
    return clamp(before_limits(p, dt), p.dt_min, p.dt_max);
  }
  __device__ __forceinline__ float before_limits(const SsdParams& p, float dt) const {
    const float biased = dt + dt_bias;
    return p.dt_softplus ? softplus(biased) : biased;
  }
};

// A lane's two steps of a chunk, loaded ahead. They keep the input's type, so that no instruction waits for them yet.
template <typename Scalar>
struct FetchedSteps {
  Scalar dt[2];
  uint8_t resets[2];
  int steps;  // that exist in the chunk

  __device__ __forceinline__ void fetch(const SsdParams& p, const Scalar* source, const uint8_t* resets_source,
                                        int steps_of_chunk) {
    steps = steps_of_chunk;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      dt[i] = is_there(i) ? source[step(i) * p.dt.stride_step] : Scalar{};
      resets[i] = resets_source != nullptr && is_there(i) ? resets_source[step(i)] : 0;
    }
  }

  static __device__ __forceinline__ int step(int i) { return 2 * (threadIdx.x % kWarpSize) + i; }
  __device__ __forceinline__ bool is_there(int i) const { return step(i) < steps; }
};

}  // namespace ssm_kernels::ssd
