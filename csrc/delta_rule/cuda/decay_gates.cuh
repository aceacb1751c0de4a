// The gates of the delta rule (cuda/chunked/gates.cuh): a given log decay, or none, and the gain 1. The writing strength beta
// is not a gain: it scales the correction of a step, which later steps of the chunk depend on.
//
// `Params` is the parameters of a kernel of the delta rule: they have log_decay and beta.
#pragma once

#include "cuda/chunked/chunk_tables.cuh"
#include "delta_rule/delta_rule.h"

namespace ssm_kernels::delta_rule {

template <typename Scalar_>
struct DecayGates {
  using Scalar = Scalar_;
  using FwdParams = DeltaRuleFwdParams;
  struct Loaded {
    float log_decay, beta;
  };
  struct Source {
    const float *log_decay, *beta;
  };
  using Kept = Loaded;

  DecayGates() = default;
  __device__ __forceinline__ DecayGates(const DeltaRuleFwdParams&, int64_t) {}

  template <typename Params>
  static __device__ __forceinline__ Source source(const Params& p, const ChunkSpan& span, int64_t head, int chunk) {
    return {p.log_decay.data == nullptr ? nullptr : span.rows<const float>(p.log_decay, head, chunk),
            span.rows<const float>(p.beta, head, chunk)};
  }
  template <typename Params>
  static __device__ __forceinline__ Source later(const Params& p, Source source, int chunks) {
    return {source.log_decay == nullptr ? nullptr : source.log_decay + first_step(chunks) * p.log_decay.stride_step,
            source.beta + first_step(chunks) * p.beta.stride_step};
  }
  template <typename Params>
  static __device__ __forceinline__ void load(const Params& p, Source source, int step, Loaded& loaded) {
    loaded.log_decay = source.log_decay == nullptr ? 0.0f : source.log_decay[step * p.log_decay.stride_step];
    loaded.beta = source.beta[step * p.beta.stride_step];
  }
  template <typename Params>
  static __device__ __forceinline__ Kept keep(const Params&, const Loaded& loaded) {
    return loaded;
  }

  template <typename Params>
  __device__ __forceinline__ float gain(const Params&, const Kept&) const {
    return 1;
  }
  template <typename Sum>
  __device__ __forceinline__ Sum log_decay(const Kept& kept, float) const {
    return Sum(kept.log_decay);
  }
  template <int count, typename Params>
  __device__ __forceinline__ void scale_gains(const Params&, const float (&)[count][2], float (&)[count][2]) const {}
};

}  // namespace ssm_kernels::delta_rule
