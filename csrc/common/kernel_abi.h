// The boundary between `_ops` and the kernel libraries, libssm_kernels_cpu.so and libssm_kernels_cuda.so.
//
// `_ops` holds what includes PyTorch: checks, allocations, autograd, the choice of a kernel. The kernel libraries hold the
// kernels, use nothing of PyTorch but Sleef's functions, and serve every version of PyTorch. Functions marked SSM_KERNEL_API
// cross the boundary; their arguments are numbers, pointers and the structs that SSM_KERNEL_STRUCT lists.
#pragma once

#include <type_traits>

// An exported function of a kernel library. Libraries are compiled with -fvisibility=hidden, and their version scripts
// (csrc/kernels_*.exports) export what has this mark alone.
#define SSM_KERNEL_API __attribute__((visibility("default")))

// A struct that crosses the boundary, and its size. Both sides compile the same declaration, so an equal size of the same
// source is an equal layout; a bitwise copy is all that a kernel's parameters allow.
#define SSM_KERNEL_STRUCT(Struct, bytes)                                                                                 \
  static_assert(std::is_trivially_copyable_v<Struct>, #Struct " crosses the boundary of the kernel libraries as bytes"); \
  static_assert(sizeof(Struct) == (bytes), #Struct                                                                       \
                " changed: raise kKernelAbi in common/kernel_abi.h, and write the new"                                   \
                " size here, so that a kernel library of the old layout is refused")

namespace ssm_kernels {

// The number of the boundary. Raise it with every change of a function that crosses the boundary, of the fields of its structs,
// of an enumeration without a table, or of a constant by which both sides compute, such as a tile's steps. kernel_libraries.h
// adds the rows of SSM_DISCRETIZATIONS and SSM_RECURRENCES to it.
constexpr int kKernelAbi = 40;

}  // namespace ssm_kernels
