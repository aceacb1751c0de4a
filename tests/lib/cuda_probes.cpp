// Probes of csrc/cuda/launch.cuh and tma_descriptor.h on a CUDA runtime that is made here, whose answers the test chooses:
// counts what is asked, and keeps a last error as CUDA does. Prints a line for each fact that does not hold. For
// tests/building/test_cuda_probes.py, without a GPU.
#include <cstdio>

#include "cuda/launch.cuh"
#include "cuda/tma_descriptor.h"

namespace {

int device = 0, queries = 0, lookups = 0, failures = 0;
cudaError_t answer = cudaSuccess, last_error = cudaSuccess;
cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSuccess;

cudaError_t answered() {
  if (answer != cudaSuccess) last_error = answer;
  return answer;
}

CUresult encode(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}

void kernel() {}
void other_kernel() {}

cudaError_t describe() {
  static uint16_t data[64];
  ssm_kernels::cuda::TmaDescriptor map;
  return ssm_kernels::cuda::make_tma_descriptor(map, data, {64, 1, 1, 1}, {64, 64, 64}, {64, 1, 1, 1});
}

void expect(bool holds, const char* fact) {
  if (holds) return;
  std::printf("%s\n", fact);
  ++failures;
}

}  // namespace

extern "C" {
cudaError_t cudaGetDevice(int* result) {
  *result = device;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  const cudaError_t result = last_error;
  last_error = cudaSuccess;
  return result;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  ++queries;
  *attributes = {};
  attributes->maxThreadsPerBlock = 384;
  return answered();
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 227 * 1024;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t look_up(void** function, cudaDriverEntryPointQueryResult* result) {
  ++lookups;
  *result = found;
  *function = found == cudaDriverEntryPointSuccess ? reinterpret_cast<void*>(&encode) : nullptr;
  return answered();
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  return look_up(function, result);
}
#if CUDART_VERSION < 13000
cudaError_t cudaGetDriverEntryPoint(const char*, void** function, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  return look_up(function, result);
}
#endif
}

int main() {
  using ssm_kernels::cuda::is_compiled_for_threads;
  answer = cudaErrorInvalidDeviceFunction;
  expect(!is_compiled_for_threads(&kernel, 384), "a kernel that the device does not have takes no threads");
  expect(last_error == cudaSuccess, "a query of a kernel that failed leaves no last error");
  answer = cudaSuccess;
  expect(is_compiled_for_threads(&kernel, 384), "a query that failed is made again");
  expect(queries == 2, "each of two queries asks the runtime");
  expect(is_compiled_for_threads(&kernel, 128) && !is_compiled_for_threads(&kernel, 385), "the answer is of any threads");
  expect(queries == 2, "a kernel is asked for once");
  expect(is_compiled_for_threads(&other_kernel, 384) && queries == 3, "another kernel is asked for by itself");
  device = 1;
  expect(is_compiled_for_threads(&kernel, 384) && queries == 4, "so is the same kernel on another device");

  answer = cudaErrorInvalidValue;
  expect(describe() == cudaErrorNotSupported, "without the driver's function nothing is described");
  expect(last_error == cudaSuccess, "a look-up that failed leaves no last error");
  answer = cudaSuccess;
  found = cudaDriverEntryPointSymbolNotFound;
  expect(describe() == cudaErrorNotSupported, "a driver without the function describes nothing");
  found = cudaDriverEntryPointSuccess;
  expect(describe() == cudaSuccess, "a look-up that failed is made again");
  expect(describe() == cudaSuccess && lookups == 3, "one that succeeded is kept");
  return failures == 0 ? 0 : 1;
}
