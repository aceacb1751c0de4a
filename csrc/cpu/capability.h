// The hot CPU loops, cpu/*kernel.cpp, are compiled once per instruction set, each into the namespace of its name (at::vec's
// CPU_CAPABILITY). Here is which sets are built, and which of them this processor runs.
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
