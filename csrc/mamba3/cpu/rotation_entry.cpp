// CPU entry points of Mamba-3's rotation: choose the instruction set and distribute heads over threads.

#include <ATen/core/Tensor.h>

#include "cpu/capability.h"
#include "cpu/thread_scratch.h"
#include "mamba3/cpu/rotation_kernels.h"
#include "mamba3/rotation.h"
#include "torch/allocation.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::mamba3 {

SSM_DEFINE_CPU_KERNELS()

namespace {

// Parameters and the tensors that some of them point to.
struct Call {
  RotationParams params;
  at::Tensor bounds, resets, B, C, B_bias, C_bias;

  Call(const Inputs& in, const Rotation& rotation) {
    params.batch = in.x.size(0);
    params.seqlen = in.x.size(1);
    params.heads = in.x.size(2);
    params.ranks = in.ranks();
    params.groups = in.B.size(-2);
    params.dstate = in.B.size(-1);
    params.angles = rotation.turns.size(3);
    params.sequences = rotation.phases.size(0);
    params.input_kind = scalar_kind(in.B.scalar_type());
    params.is_pairs = in.is_pairs();
    params.has_angles_of_heads = rotation.rates.dim() == 4;
    if (is_present(in.cu_seqlens)) {
      bounds = in.cu_seqlens->to(at::kLong).contiguous();
      params.cu_seqlens = bounds.const_data_ptr<int64_t>();
    }
    if (is_present(in.seq_idx)) {
      resets = sequence_starts(*in.seq_idx).contiguous();
      params.resets = reinterpret_cast<const uint8_t*>(resets.const_data_ptr<bool>());
    }
    const auto view = [](const at::Tensor& tensor, at::Tensor& rows) {
      rows = tensor.stride(-1) == 1 || tensor.size(-1) == 1 ? tensor : tensor.contiguous();
      return RowView{rows.const_data_ptr(), rows.stride(0), rows.stride(1), rows.dim() == 5 ? rows.stride(2) : 0,
                     rows.stride(-2)};
    };
    params.B = view(in.B, B);
    params.C = view(in.C, C);
    const auto bias = [&](const OptionalTensor& tensor, at::Tensor& held) -> const void* {
      if (!is_present(tensor)) return nullptr;
      held = bias_of_ranks(in, *tensor).contiguous();
      return held.const_data_ptr();
    };
    params.B_bias = bias(in.B_bias, B_bias);
    params.C_bias = bias(in.C_bias, C_bias);
    params.rates = rotation.rates.const_data_ptr<double>();
    params.sizes = rotation.sizes.const_data_ptr<double>();
    params.phases = rotation.phases.mutable_data_ptr<double>();
    params.turns = rotation.turns.mutable_data_ptr();
    params.k = rotation.k.mutable_data_ptr();
    params.q = rotation.q.mutable_data_ptr();
  }

  template <typename Kernel>
  void run(Kernel kernel) const {
    ThreadScratch scratch(scratch_bytes(params));
    scratch.parallel_for(
        params.sequences * params.heads, params.seqlen * params.ranks * params.dstate,
        [&](int64_t index, std::byte* memory) { kernel(params, index / params.heads, index % params.heads, memory); });
  }
};

}  // namespace

Rotation rotate_cpu(const Inputs& in, Rotation rotation) {
  c10::SymDimVector shape = {in.x.size(0), in.x.size(1), in.x.size(2), in.B.size(-1)};
  if (in.has_ranks()) shape.insert(shape.begin() + 2, in.ranks());
  rotation.k = empty_tensor(shape, in.wide_options());
  rotation.q = empty_tensor(shape, in.wide_options());
  rotation.turns = empty_tensor({in.x.size(0), in.x.size(1), in.x.size(2), in.angles.size(-1)}, in.wide_options());
  Call(in, rotation).run(cpu_kernels().rotate_head);
  return rotation;
}

void rotate_adjoint_cpu(const Inputs& in, Rotation& rotation, const at::Tensor& grad_k, const at::Tensor& grad_q) {
  Call call(in, rotation);
  call.params.grad_k = grad_k.mutable_data_ptr();
  call.params.grad_q = grad_q.mutable_data_ptr();
  call.run(cpu_kernels().unrotate_head);
}

}  // namespace ssm_kernels::mamba3
