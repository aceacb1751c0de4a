// Which instruction sets the CPU kernels are built for, and which of them this processor runs. The build compiles each
// cpu/*kernel.cpp once per set, into the namespace of the set's name (at::vec's CPU_CAPABILITY).
#pragma once

#include <cstddef>

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

}  // namespace ssm_kernels
