// nvcc includes this file before each CUDA source. A template's instance for a hidden type is hidden in spite of its
// SSM_KERNEL_API, and with -fvisibility=hidden so are CUDA's half types unless their headers are read like this.
#pragma once

#pragma GCC visibility push(default)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#pragma GCC visibility pop
