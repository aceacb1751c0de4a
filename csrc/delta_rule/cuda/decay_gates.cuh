// The gates of the delta rule (cuda/chunked/gates.cuh): a given log decay, or none. The gain is the factor of the key, 1
// without a norm. The writing strength beta is not a gain: it scales the correction of a step, which later steps of the chunk
// depend on.
//
// `Params` is the parameters of a kernel of the delta rule: they have log_decay, beta, row_factors and
// log2_updates.
#pragma once

#include "cuda/chunked/chunk_tables.cuh"
#include "cuda/vector_io.cuh"
#include "delta_rule/cuda/step_updates.cuh"

namespace ssm_kernels::delta_rule {

template <typename Scalar_>
struct DecayGates {
  using Scalar = Scalar_;
  using FwdParams = DeltaRuleFwdParams;
  struct Loaded {
    float log_decay, beta, key_factor, query_factor;
  };
  struct Source {
    const float* log_decay;
    const void* beta;
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
    const void* const beta = beta_is_fp32(p) ? static_cast<const void*>(span.rows<const float>(p.beta, head, chunk))
                                             : span.rows<const Scalar>(p.beta, head, chunk);
    return {p.log_decay.data == nullptr ? nullptr : step_rows<const float>(p, span, p.log_decay, head, chunk), beta,
            reinterpret_cast<const float2*>(of_step(p.row_factors, key_head))};
  }
  // The scan does not read beta, which is in the chunk matrices.
  static __device__ __forceinline__ Source later(const DeltaRuleFwdParams& p, Source source, int chunks) {
    return {source.log_decay == nullptr ? nullptr
                                        : source.log_decay + (first_step(chunks) >> p.log2_updates) * p.log_decay.stride_step,
            nullptr, source.row_factors == nullptr ? nullptr : source.row_factors + first_step(chunks)};
  }
  template <typename Params>
  static __device__ __forceinline__ void load(const Params& p, Source source, int step, Loaded& loaded) {
    const bool has_decay = source.log_decay != nullptr && is_first_update(p, step);
    loaded.log_decay = has_decay ? source.log_decay[(step >> p.log2_updates) * p.log_decay.stride_step] : 0.0f;
    const int64_t beta_offset = step * p.beta.stride_step;
    if constexpr (std::is_same_v<Params, DeltaRuleFwdParams>) {
      loaded.beta = 0;
    } else if (beta_is_fp32(p)) {
      loaded.beta = static_cast<const float*>(source.beta)[beta_offset];
    } else {
      loaded.beta = cuda::to_accumulate(static_cast<const Scalar*>(source.beta)[beta_offset]);
    }
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

 private:
  // Whether beta is fp32, not of the inputs' type.
  static __device__ __forceinline__ bool beta_is_fp32(const DeltaRuleMatricesParams& p) { return p.beta_is_fp32; }
  static __device__ __forceinline__ bool beta_is_fp32(const DeltaRuleBwdParams& p) { return p.beta_is_fp32; }
  template <typename Params>
  static __device__ __forceinline__ constexpr bool beta_is_fp32(const Params&) {
    return true;
  }
};

}  // namespace ssm_kernels::delta_rule
