// Which instruction sets the CPU kernels are built for, and which of them this processor runs. The build compiles each
// cpu/*kernel.cpp once per set, into the namespace of the set's name (at::vec's CPU_CAPABILITY).
#pragma once

#include <cstddef>

#include "common/kernel_abi.h"

namespace ssm_kernels {

// ROW(capability) for each set that is built, narrowest first.
#if defined(SSM_KERNELS_CPU_AVX512) && defined(SSM_KERNELS_CPU_AVX2)
#define SSM_CPU_CAPABILITIES(ROW) ROW(DEFAULT) ROW(AVX2) ROW(AVX512)
#elif defined(SSM_KERNELS_CPU_AVX2)
#define SSM_CPU_CAPABILITIES(ROW) ROW(DEFAULT) ROW(AVX2)
#else
#define SSM_CPU_CAPABILITIES(ROW) ROW(DEFAULT)
#endif

// Position in SSM_CPU_CAPABILITIES of the widest set that is built and that torch itself uses on this processor
// (ATEN_CPU_CAPABILITY lowers it).
size_t cpu_capability_index();

// In an operator's namespace: defines cpu_kernels(), the operator's CpuKernels for this processor. Each cpu/*kernel.cpp ends
// with `SSM_KERNEL_API const CpuKernels& kernels()` in the namespace of its instruction set, in libssm_kernels_cpu.so.
#define SSM_DECLARE_KERNELS(CAPABILITY)       \
  namespace CAPABILITY {                      \
  SSM_KERNEL_API const CpuKernels& kernels(); \
  }
#define SSM_KERNELS_OF(CAPABILITY) &CAPABILITY::kernels,
#define SSM_DEFINE_CPU_KERNELS()                                                               \
  SSM_CPU_CAPABILITIES(SSM_DECLARE_KERNELS)                                                    \
  static const CpuKernels& cpu_kernels() {                                                     \
    static constexpr const CpuKernels& (*kBuilt[])() = {SSM_CPU_CAPABILITIES(SSM_KERNELS_OF)}; \
    return kBuilt[cpu_capability_index()]();                                                   \
  }

}  // namespace ssm_kernels
