// A memory allocator for PyTorch (torch.cuda.memory.CUDAPluggableAllocator): each tensor is an allocation of its own, which
// ends with the last 16-byte vector that has an element of the tensor. Kernels read such a vector whole, as rows may start and
// end anywhere in it; compute-sanitizer reports every access beyond. The bytes of the vector behind the tensor are NaN.
#include <sys/types.h>

extern "C" void* allocate_vectors(ssize_t bytes, int, cudaStream_t) {
  constexpr ssize_t kVector = 16;
  void* memory = nullptr;
  const ssize_t tail = bytes / kVector * kVector;
  if (cudaMalloc(&memory, tail + kVector * (bytes > tail)) != cudaSuccess) return nullptr;
  if (bytes > tail) cudaMemset(static_cast<char*>(memory) + tail, 0xff, kVector);
  return memory;
}

extern "C" void free_vectors(void* memory, ssize_t, int, cudaStream_t) { cudaFree(memory); }
