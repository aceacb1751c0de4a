// Given gates of SSD (cuda/chunked/gates.cuh): the log decay and the gain of each step and head are inputs.
#pragma once

#include "cuda/chunked/chunk_tables.cuh"
#include "cuda/vector_io.cuh"
#include "ssd/cuda/toolkit.cuh"

namespace ssm_kernels::ssd {

// A number in the inputs' type or in fp32, which only a parameter of the kernel tells apart. A load has no conversion, so that
// no instruction waits for it.
template <typename Scalar>
struct GateValue {
  uint32_t bits;

  static __device__ __forceinline__ GateValue load(const unsigned char* source, bool is_fp32) {
    if (kIsFp32<Scalar> || is_fp32) return {*reinterpret_cast<const uint32_t*>(source)};
    return {*reinterpret_cast<const uint16_t*>(source)};
  }
  __device__ __forceinline__ float get(bool is_fp32) const {
    if (kIsFp32<Scalar> || is_fp32) return __uint_as_float(bits);
    Scalar value;
    memcpy(&value, &bits, sizeof(value));
    return cuda::to_accumulate(value);
  }
  static __device__ __forceinline__ void store(unsigned char* target, float value, bool is_fp32) {
    if (kIsFp32<Scalar> || is_fp32) {
      *reinterpret_cast<float*>(target) = value;
    } else {
      *reinterpret_cast<Scalar*>(target) = cuda::from_accumulate<Scalar>(value);
    }
  }
};

template <typename Scalar_>
struct LogGates {
  using Scalar = Scalar_;
  using FwdParams = SsdLogFwdParams;
  using BwdParams = SsdLogBwdParams;
  using Value = GateValue<Scalar>;
  static constexpr bool kHasOutFactors = !kIsFp32<Scalar>;
  struct Loaded {
    Value log_decay, gain;
    float out_factor;
  };
  using Source = const unsigned char*;  // of the log decay
  struct Kept {
    float log_decay, gain;
  };

  LogGates() = default;
  template <typename Params>
  __device__ __forceinline__ LogGates(const Params&, int64_t) {}

  template <typename Params>
  static __device__ __forceinline__ Source source(const Params& p, const ChunkSpan& span, int64_t head, int chunk) {
    return span.rows<const unsigned char>(p.gates.log_decay, head, chunk);
  }
  template <typename Params>
  static __device__ __forceinline__ Source later(const Params& p, Source source, int chunks) {
    return source + first_step(chunks) * p.gates.log_decay.stride_step;
  }
  template <typename Params>
  static __device__ __forceinline__ void load(const Params& p, Source source, int step, Loaded& loaded) {
    source += step * p.gates.log_decay.stride_step;
    loaded.log_decay = Value::load(source, p.gates.are_fp32);
    if (p.gates.has_gain) loaded.gain = Value::load(source + p.gates.gain_offset, p.gates.are_fp32);
    if constexpr (kHasOutFactors && std::is_same_v<Params, FwdParams>) {
      if (p.gates.has_out_factor) loaded.out_factor = *reinterpret_cast<const float*>(source + p.gates.out_factor_offset);
    }
  }

  template <typename Params>
  static __device__ __forceinline__ Kept keep(const Params& p, const Loaded& loaded) {
    return {loaded.log_decay.get(p.gates.are_fp32), p.gates.has_gain ? loaded.gain.get(p.gates.are_fp32) : 1.0f};
  }

  template <typename Params>
  __device__ __forceinline__ float gain(const Params&, const Kept& kept) const {
    return kept.gain;
  }
  template <typename Sum>
  __device__ __forceinline__ Sum log_decay(const Kept& kept, float) const {
    return kept.log_decay;
  }
  template <typename Params, int count>
  __device__ __forceinline__ void scale_gains(const Params&, const float (&)[count][2], float (&)[count][2]) const {}

  // With L' = L + log2 r and the gain c r, the decay between two steps times the gain is r_i c_j 2^(L_i - L_j).
  __device__ __forceinline__ void scale_output(const SsdLogFwdParams& p, const Loaded& loaded, float& log2_cumsum, float& gain,
                                               float& exp_cumsum) const {
    if (!p.gates.has_out_factor) return;
    // Finite logarithms, because the sum is that of a source too. An output of a factor that is NaN is NaN itself.
    constexpr float kLeast = 0x1p-126f, kMost = 0x1p126f;
    const float factor = fminf(fmaxf(loaded.out_factor, kLeast), kMost);
    log2_cumsum += __log2f(factor);
    gain *= factor;
    exp_cumsum *= factor;
  }

  __device__ __forceinline__ void write_gradients(const SsdLogBwdParams& p, const ChunkSpan& span, int steps, int64_t,
                                                  int64_t head, const Kept (&kept)[kChunk], const FragmentLane& lane,
                                                  const GateGradients& gradients) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int step = 2 * lane.index + i;
      if (step >= steps) break;
      const auto write = [&](const RowsView& view, float value, bool is_fp32) {
        if (view.data == nullptr) return;
        Value::store(span.rows<unsigned char>(view, head, 0) + step * view.stride_step, value, is_fp32);
      };
      // Below this log decay the tables have another one, whose decay is zero too, and no rounding error counts.
      const bool is_zero = kept[step].log_decay * static_cast<float>(kLog2E) < kLowestLog2Decay;
      write(p.grad_log_decay, is_zero ? 0.0f : gradients.log_decay[i], p.gates.are_fp32);
      write(p.grad_gain, gradients.gain[i], p.gates.are_fp32);
      write(p.out_products, gradients.outputs[i], /*is_fp32=*/true);
    }
  }
  static __device__ __forceinline__ void clear_gradients(const SsdLogBwdParams&, int64_t, int64_t) {}
};

// The same with a gain on the diagonal.
template <typename Scalar_>
struct DiagonalGates : LogGates<Scalar_> {
  using Base = LogGates<Scalar_>;
  using FwdParams = SsdDiagonalFwdParams;
  using BwdParams = SsdDiagonalBwdParams;
  using typename Base::Kept;
  using typename Base::Source;
  using typename Base::Value;
  static constexpr bool kHasOutFactors = false, kHasDiagonalGain = true;
  struct Loaded : Base::Loaded {
    Value diagonal_gain;
  };

  using Base::Base;

  template <typename Params>
  static __device__ __forceinline__ void load(const Params& p, Source source, int step, Loaded& loaded) {
    Base::load(p, source, step, loaded);
    loaded.diagonal_gain =
        Value::load(source + step * p.gates.log_decay.stride_step + p.diagonal_gain_offset, p.gates.are_fp32);
  }
  template <typename Params>
  static __device__ __forceinline__ float diagonal_gain(const Params& p, const Loaded& loaded) {
    return loaded.diagonal_gain.get(p.gates.are_fp32);
  }

  __device__ __forceinline__ void write_gradients(const SsdDiagonalBwdParams& p, const ChunkSpan& span, int steps,
                                                  int64_t chunk, int64_t head, const Kept (&kept)[kChunk],
                                                  const FragmentLane& lane, const GateGradients& gradients) const {
    Base::write_gradients(p, span, steps, chunk, head, kept, lane, gradients);
    const RowsView& view = p.grad_diagonal_gain;
    if (view.data == nullptr) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int step = 2 * lane.index + i;
      if (step >= steps) break;
      Value::store(span.rows<unsigned char>(view, head, 0) + step * view.stride_step, gradients.diagonal_gain[i],
                   p.gates.are_fp32);
    }
  }
};

}  // namespace ssm_kernels::ssd
