// Matrix products of a warpgroup (four warps, of which the first has a multiple of four as its number) on fp16 or bf16 operands
// with fp32 accumulation: D (64 x n) = A (64 x 16) B (16 x n), or D += A B. They run asynchronously (wgmma, compute capability
// 9.0a).
//
// Warp w holds rows 16 w to 16 w + 15 of D and, in registers, of A, distributed over its lanes as in cuda/ptx/mma_sm80.cuh;
// d[i] is column block i. An operand in shared memory consists of panels with rows of 128 bytes in the 128-byte swizzle: vector
// v (16 bytes) of row r is stored at v ^ r % 8. A panel begins at a multiple of 1024 bytes. If a panel's rows do not run along
// the summed dimension, the operand is called transposed.
//
// Registers of a product must not be read or written from the warpgroup_arrive() before it to the warpgroup_wait() after it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/mma_sm80.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SSM_KERNELS_HAS_WGMMA 1
#else
#define SSM_KERNELS_HAS_WGMMA 0
#endif

namespace ssm_kernels::cuda {

// Describes an operand in shared memory. `panel_bytes` is the distance of panels, for a transposed operand of more than 64
// columns.
__device__ __forceinline__ uint64_t make_wgmma_descriptor(const void* operand, int panel_bytes) {
  constexpr uint64_t kEightRowsBytes = 1024, kSwizzle128B = uint64_t(1) << 62;
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(operand));
  return kSwizzle128B | (kEightRowsBytes >> 4) << 32 | static_cast<uint64_t>(panel_bytes >> 4) << 16 |
         ((address & 0x3ffff) >> 4);
}

// Describes a transposed operand B in blocks of 8 rows and columns. A block has rows of 16 bytes, one after the other, and no
// swizzle. The arguments are the distances of neighboring blocks.
__device__ __forceinline__ uint64_t make_wgmma_block_descriptor(const void* operand, int column_block_bytes,
                                                                int row_block_bytes) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(operand));
  return static_cast<uint64_t>(column_block_bytes >> 4) << 32 | static_cast<uint64_t>(row_block_bytes >> 4) << 16 |
         ((address & 0x3ffff) >> 4);
}

__device__ __forceinline__ void warpgroup_arrive() {
#if SSM_KERNELS_HAS_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
// Commits the products since the last commit, as a group.
__device__ __forceinline__ void warpgroup_commit() {
#if SSM_KERNELS_HAS_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Waits for all groups except the last `pending`, whose results nothing reads yet: registers of operands A of the others are
// free.
template <int pending>
__device__ __forceinline__ void warpgroup_wait_for_earlier() {
#if SSM_KERNELS_HAS_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
#endif
}
// Makes this thread's writes to shared memory visible to wgmma and TMA after the next barrier.
__device__ __forceinline__ void fence_proxy_async() {
#if SSM_KERNELS_HAS_WGMMA
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// Waits for all groups except the last `pending`. `d` belongs to a group that is complete: the compiler reads it after the
// wait.
template <int pending, int blocks>
__device__ __forceinline__ void warpgroup_wait(float (&d)[blocks][4]) {
#if SSM_KERNELS_HAS_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
#endif
#pragma unroll
  for (int n = 0; n < blocks; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[n][i])::"memory");
  }
}

// The instruction for one type and width. `a_and_b` names the operands A and B in assembly; `flags` says which are transposed.
#define SSM_WGMMA(n, type, registers, a_and_b, predicate, flags) \
  "{\n.reg .pred adds;\nsetp.ne.b32 adds, " predicate            \
  ", 0;\n"                                                       \
  "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" registers "}, " a_and_b ", adds, 1, 1, " flags ";\n}\n"
#if SSM_KERNELS_HAS_WGMMA
#define SSM_WGMMA_ASM(...) asm volatile(__VA_ARGS__)
#else
#define SSM_WGMMA_ASM(...)
#endif
// gemm() for one width: with both operands in shared memory, and with A in registers. The arguments name the operands that
// follow D's in assembly.
#define SSM_WGMMA_GEMM(blocks, n, registers, outputs, a_and_b, predicate, flags, a_in_registers_and_b, predicate_b, flag_b) \
  template <typename Scalar, bool a_is_transposed, bool b_is_transposed>                                                    \
  __device__ __forceinline__ void gemm(float (&d)[blocks][4], uint64_t a, uint64_t b, bool adds) {                          \
    if constexpr (std::is_same_v<Scalar, __half>) {                                                                         \
      SSM_WGMMA_ASM(SSM_WGMMA(n, "f16", registers, a_and_b, predicate, flags) : outputs : "l"(a), "l"(b), "r"(int(adds)),   \
                    "n"(int(a_is_transposed)), "n"(int(b_is_transposed)));                                                  \
    } else {                                                                                                                \
      SSM_WGMMA_ASM(SSM_WGMMA(n, "bf16", registers, a_and_b, predicate, flags) : outputs : "l"(a), "l"(b), "r"(int(adds)),  \
                    "n"(int(a_is_transposed)), "n"(int(b_is_transposed)));                                                  \
    }                                                                                                                       \
  }                                                                                                                         \
  template <typename Scalar, bool b_is_transposed>                                                                          \
  __device__ __forceinline__ void gemm(float (&d)[blocks][4], const uint32_t (&a)[4], uint64_t b, bool adds) {              \
    if constexpr (std::is_same_v<Scalar, __half>) {                                                                         \
      SSM_WGMMA_ASM(SSM_WGMMA(n, "f16", registers, a_in_registers_and_b, predicate_b, flag_b) : outputs : "r"(a[0]),        \
                    "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(adds)), "n"(int(b_is_transposed)));                    \
    } else {                                                                                                                \
      SSM_WGMMA_ASM(SSM_WGMMA(n, "bf16", registers, a_in_registers_and_b, predicate_b, flag_b) : outputs : "r"(a[0]),       \
                    "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(adds)), "n"(int(b_is_transposed)));                    \
    }                                                                                                                       \
  }
#define SSM_WGMMA_D_32                                                                                                    \
  "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), \
      "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
#define SSM_WGMMA_D_64                                                                                                        \
  SSM_WGMMA_D_32, "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]),    \
      "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), \
      "+f"(d[7][3])
#define SSM_WGMMA_D_128                                                                                                    \
  SSM_WGMMA_D_64, "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), \
      "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]),       \
      "+f"(d[11][2]), "+f"(d[11][3]), "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]),      \
      "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]),      \
      "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
#define SSM_WGMMA_REGISTERS_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define SSM_WGMMA_REGISTERS_64 \
  SSM_WGMMA_REGISTERS_32       \
  ", "                         \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SSM_WGMMA_REGISTERS_128                                                                                         \
  SSM_WGMMA_REGISTERS_64                                                                                                \
  ", "                                                                                                                  \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, " \
  "%55, %56, %57, %58, %59, %60, %61, %62, %63"
SSM_WGMMA_GEMM(4, "32", SSM_WGMMA_REGISTERS_32, SSM_WGMMA_D_32, "%16, %17", "%18", "%19, %20", "{%16, %17, %18, %19}, %20",
               "%21", "%22")
SSM_WGMMA_GEMM(8, "64", SSM_WGMMA_REGISTERS_64, SSM_WGMMA_D_64, "%32, %33", "%34", "%35, %36", "{%32, %33, %34, %35}, %36",
               "%37", "%38")
SSM_WGMMA_GEMM(16, "128", SSM_WGMMA_REGISTERS_128, SSM_WGMMA_D_128, "%64, %65", "%66", "%67, %68", "{%64, %65, %66, %67}, %68",
               "%69", "%70")
#undef SSM_WGMMA
#undef SSM_WGMMA_ASM
#undef SSM_WGMMA_GEMM
#undef SSM_WGMMA_D_32
#undef SSM_WGMMA_REGISTERS_32
#undef SSM_WGMMA_D_64
#undef SSM_WGMMA_REGISTERS_64
#undef SSM_WGMMA_D_128
#undef SSM_WGMMA_REGISTERS_128

}  // namespace ssm_kernels::cuda
