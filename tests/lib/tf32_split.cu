// Splits floats into two TF32 numbers as the kernels do, on the host, and prints a line for each fact that does not hold. For
// tests/ssd/test_tf32_split.py, without a GPU.
#include <cmath>
#include <cstdio>
#include <cstring>

#include "cuda/mma_tf32x3.cuh"

namespace {

float as_float(uint32_t bits) {
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

int failures = 0;
void expect(bool holds, const char* fact, uint32_t bits) {
  if (holds || ++failures > 20) return;
  std::printf("%a (0x%08x): %s\n", as_float(bits), bits, fact);
}

void check(uint32_t bits) {
  constexpr uint32_t kLowDigits = 0x1fff, kHalf = 0x1000;
  const float x = as_float(bits);
  const uint32_t high_bits = ssm_kernels::cuda::tf32_high(bits), rounded = (bits + kHalf) & ~kLowDigits;
  const float high = as_float(high_bits), low = x - high;
  if (std::isnan(x)) {
    expect(std::isnan(high) || std::isnan(low), "a NaN stays one", bits);
    return;
  }
  expect((high_bits & kLowDigits) == 0, "the high part is a TF32 number", bits);
  if (std::isinf(x)) {
    expect(high == x, "the high part of Inf is Inf", bits);
    return;
  }
  expect(std::isfinite(high) && std::isfinite(low), "both parts of a finite number are finite", bits);
  expect(high + low == x, "the sum of both parts is the number", bits);
  expect(!std::isfinite(as_float(rounded)) || !std::isnormal(x) || high_bits == rounded,
         "a normal number is rounded, half away from zero, where that is finite", bits);
}

}  // namespace

int main() {
  // All of the largest exponents, Inf and NaN, and of the others each 251st.
  for (uint32_t bits = 0;; ++bits) {
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude < 0x7f000000u && bits % 251 != 0) continue;
    check(bits);
    if (bits == 0xffffffffu) break;
  }
  return failures == 0 ? 0 : 1;
}
