// The gates of the delta rule (cuda/chunked/gates.cuh): a given log decay, or none. The gain is the factor of the key, 1
// without a norm. The writing strength beta is not a gain: it scales the correction of a step, which later steps of the chunk
// depend on.
//
// `Params` is the parameters of a kernel of the delta rule: they have log_decay, beta and row_factors.
#pragma once

#include "cuda/chunked/chunk_tables.cuh"
#include "delta_rule/delta_rule.h"

namespace ssm_kernels::delta_rule {

template <typename Scalar_>
struct DecayGates {
  using Scalar = Scalar_;
  using FwdParams = DeltaRuleFwdParams;
  struct Loaded {
    float log_decay, beta, key_factor, query_factor;
  };
  struct Source {
    const float *log_decay, *beta;
    const float2* row_factors;
  };
  using Kept = Loaded;

  DecayGates() = default;
  __device__ __forceinline__ DecayGates(const DeltaRuleFwdParams&, int64_t) {}

  template <typename Params>
  static __device__ __forceinline__ Source source(const Params& p, const ChunkSpan& span, int64_t head, int chunk) {
    const auto of_step = [&](const RowsView& view, int64_t of_head) {
      return view.data == nullptr ? nullptr : span.rows<const float>(view, of_head, chunk);
    };
    const int64_t key_head = static_cast<unsigned>(head) / static_cast<unsigned>(p.value_heads_per_key_head);
    return {of_step(p.log_decay, head), of_step(p.beta, head),
            reinterpret_cast<const float2*>(of_step(p.row_factors, key_head))};
  }
  template <typename Params>
  static __device__ __forceinline__ Source later(const Params& p, Source source, int chunks) {
    return {source.log_decay == nullptr ? nullptr : source.log_decay + first_step(chunks) * p.log_decay.stride_step,
            source.beta + first_step(chunks) * p.beta.stride_step,
            source.row_factors == nullptr ? nullptr : source.row_factors + first_step(chunks)};
  }
  template <typename Params>
  static __device__ __forceinline__ void load(const Params& p, Source source, int step, Loaded& loaded) {
    loaded.log_decay = source.log_decay == nullptr ? 0.0f : source.log_decay[step * p.log_decay.stride_step];
    loaded.beta = source.beta[step * p.beta.stride_step];
    const float2 factors = source.row_factors == nullptr ? float2{1, 1} : source.row_factors[step];
    loaded.key_factor = factors.x;
    loaded.query_factor = factors.y;
  }
  template <typename Params>
  static __device__ __forceinline__ Kept keep(const Params&, const Loaded& loaded) {
    return loaded;
  }

  template <typename Params>
  __device__ __forceinline__ float gain(const Params&, const Kept& kept) const {
    return kept.key_factor;
  }
  template <typename Sum>
  __device__ __forceinline__ Sum log_decay(const Kept& kept, float) const {
    return Sum(kept.log_decay);
  }
  template <int count, typename Params>
  __device__ __forceinline__ void scale_gains(const Params&, const float (&)[count][2], float (&)[count][2]) const {}
};

}  // namespace ssm_kernels::delta_rule
