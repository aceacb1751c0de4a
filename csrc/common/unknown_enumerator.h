// The error for an enumerator that the code does not know: a newer `_ops` passed it to an older kernel library, or the boundary
// (kernel_abi.h) is out of step. Without the error a switch would compute nothing and leave outputs unwritten.
#pragma once

#include "common/macros.h"

#if !defined(__CUDA_ARCH__)
#include <cstdio>
#include <stdexcept>

namespace ssm_kernels {

// Names the enumeration, the number of its rows in this library and the enumerator. PyTorch turns the exception into a
// RuntimeError. Internal linkage, and nothing of std::string: units of several instruction sets include it.
[[noreturn, maybe_unused]] __attribute__((noinline, cold)) static void throw_unknown_enumerator(const char* name, int count,
                                                                                                int got) {
  char message[192];
  std::snprintf(
      message, sizeof(message),
      "ssm_kernels: expected %s below %d, the number of those that this library knows, got %d: use _ops and the kernel "
      "libraries of one build",
      name, count, got);
  throw std::runtime_error(message);
}

}  // namespace ssm_kernels
#endif

// Placed after a switch whose cases return. Host code throws. Device code continues: the host has checked before the launch.
#if defined(__CUDA_ARCH__)
#define SSM_UNKNOWN_ENUMERATOR(name, count, got) static_cast<void>(got)
#else
#define SSM_UNKNOWN_ENUMERATOR(name, count, got) ::ssm_kernels::throw_unknown_enumerator(name, count, static_cast<int>(got))
#endif
