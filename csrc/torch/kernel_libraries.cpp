// Compares the kernel libraries beside this one with the boundary that it was compiled for, when it is loaded.

#include <stdexcept>
#include <string>

#include "common/kernel_libraries.h"

namespace ssm_kernels {
namespace {

void check_abi(const char* library, int got) {
  if (got == kKernelLibraryAbi) return;
  throw std::runtime_error(std::string("ssm_kernels: expected ") + library + " with kernel ABI " +
                           std::to_string(kKernelLibraryAbi) + ", got " + std::to_string(got) +
                           ": put the library of the same build beside _ops.abi3.so");
}

// A constructor cannot return an error, and dlopen passes no exception on: the program ends with the message. `import
// ssm_kernels` compares the numbers first and raises ImportError.
[[maybe_unused]] const bool kHasEqualAbi = [] {
  check_abi("libssm_kernels_cpu.so", ssm_kernels_cpu_abi());
#ifdef SSM_KERNELS_WITH_CUDA
  check_abi("libssm_kernels_cuda.so", ssm_kernels_cuda_abi());
#endif
  return true;
}();

}  // namespace
}  // namespace ssm_kernels
