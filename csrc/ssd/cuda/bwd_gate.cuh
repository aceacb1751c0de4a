// The gate's adjoint. For out = y silu(z) and h the gradient of out, the gradients of y and z are h silu(z) and h y silu'(z).
// The kernel makes one pass over memory. A block processes one step of a sequence after another, a thread 8 elements of a head
// at a time. y and grad_y are workspaces with padded rows; the other rows may begin at any element. Nothing is saved.
#pragma once

#include "common/activations.h"
#include "cuda/shifted_io.cuh"
#include "cuda/vector_io.cuh"
#include "ssd/cuda/launch.h"

namespace ssm_kernels::ssd {

constexpr int kGateThreads = 256;

template <typename Scalar>
__global__ void __launch_bounds__(kGateThreads) ssd_bwd_gate_kernel(const __grid_constant__ GateBwdParams p) {
  using Vector8 = cuda::Vector<Scalar, kRowElements>;
  const uint32_t vectors = static_cast<uint32_t>(p.heads * p.vectors_per_head.value<int64_t>());
  for (int64_t at = blockIdx.x; at < p.batch * p.seqlen; at += gridDim.x) {
    const int64_t batch = at / p.seqlen, step = at % p.seqlen;
    for (uint32_t i = threadIdx.x; i < vectors; i += kGateThreads) {
      const uint32_t head = p.vectors_per_head.divide(i), vector = i - head * p.vectors_per_head.value<uint32_t>();
      const auto address = [&](const RowsView& view) {
        return static_cast<Scalar*>(view.data) + batch * view.stride_batch + step * view.stride_step + head * view.stride_head +
               vector * kRowElements;
      };
      const int count = p.headdim - static_cast<int>(vector) * kRowElements;
      Vector8 incoming, z;
      if (p.are_shifted) {
        const cuda::ShiftedLoad<Scalar, kRowElements> first(address(p.grad_out), count), second(address(p.z), count);
        incoming = first.vector();
        z = second.vector();
      } else {
        incoming = Vector8::load_once(address(p.grad_out));
        z = Vector8::load_once(address(p.z));
      }
      Vector8 y = Vector8::zero(), grad_y, grad_z;
      if (p.grad_z.data != nullptr) y = Vector8::load_once(address(p.y));
#pragma unroll
      for (int k = 0; k < kRowElements; ++k) {
        const float h = incoming.accumulate(k), gate = z.accumulate(k), s = sigmoid(gate);
        grad_y.set(k, cuda::from_accumulate<Scalar>(h * (gate * s)));
        grad_z.set(k, cuda::from_accumulate<Scalar>(h * y.accumulate(k) * silu_derivative(gate, s)));
      }
      grad_y.store_once(address(p.grad_y));
      if (p.grad_z.data == nullptr) continue;
      if (p.are_shifted) {
        cuda::store_shifted(address(p.grad_z), grad_z, count);
      } else {
        grad_z.store_once(address(p.grad_z));
      }
    }
  }
}

}  // namespace ssm_kernels::ssd
