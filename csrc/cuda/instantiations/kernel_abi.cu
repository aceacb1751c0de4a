// The number of the boundary with which libssm_kernels_cuda.so is compiled.

#include "common/kernel_libraries.h"

int ssm_kernels_cuda_abi() { return ssm_kernels::kKernelLibraryAbi; }
