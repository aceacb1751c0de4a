// Stores that bypass the caches, for results larger than the caches: an ordinary store first reads the line that it overwrites,
// a third of the memory traffic of a scan.
//
// Included only by cpu/*kernel.cpp files, which are compiled once per instruction set.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <cstdint>

namespace ssm_kernels {
inline namespace CPU_CAPABILITY {

// A result of fewer bytes may be in the second-level cache when the next operator reads it.
constexpr int64_t kMinStreamedBytes = int64_t(4) << 20;

#if defined(CPU_CAPABILITY_AVX512)
inline void stream(float* target, const at::vec::Vectorized<float>& value) { _mm512_stream_ps(target, value); }
inline void stream(double* target, const at::vec::Vectorized<double>& value) { _mm512_stream_pd(target, value); }
#elif defined(CPU_CAPABILITY_AVX2)
inline void stream(float* target, const at::vec::Vectorized<float>& value) { _mm256_stream_ps(target, value); }
inline void stream(double* target, const at::vec::Vectorized<double>& value) { _mm256_stream_pd(target, value); }
#else
template <typename Scalar>
void stream(Scalar* target, const at::vec::Vectorized<Scalar>& value) {
  value.store(target);
}
#endif

// Makes a thread's streamed stores visible to other threads, before it signals that it has finished.
inline void finish_streaming() {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  _mm_sfence();
#endif
}

// Whether each row of a tensor begins at a cache line. stream() requires aligned vectors. Memory would receive a line twice
// that two tasks stream in halves.
template <typename Scalar>
bool has_aligned_rows(const void* data, int64_t stride_row) {
  constexpr int64_t kLineBytes = 64, kLine = kLineBytes / static_cast<int64_t>(sizeof(Scalar));
  static_assert(kLine % at::vec::Vectorized<Scalar>::size() == 0, "a line is whole vectors");
  return reinterpret_cast<uintptr_t>(data) % kLineBytes == 0 && stride_row % kLine == 0;
}

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels
