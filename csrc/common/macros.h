#pragma once

// Everything in common/ is compiled by the host compiler and by nvcc, and includes no torch header.
#if defined(__CUDACC__)
#define SSM_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define SSM_HOST_DEVICE inline __attribute__((always_inline))
#endif
