// The number of the boundary with which libssm_kernels_cpu.so is compiled.

#include "common/kernel_libraries.h"

int ssm_kernels_cpu_abi() { return ssm_kernels::kKernelLibraryAbi; }
