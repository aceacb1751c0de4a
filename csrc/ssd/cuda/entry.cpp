// CUDA entry points of the chunked scan. Fused kernels (fwd.cuh, bwd.cuh, span_states.cuh) run on the current stream. The
// fallback, ATen matmuls (ssd/aten/chunked_scan.h), runs fp64 calls and calls whose tiles exceed a block's shared memory. The
// host waits for the device in two cases only: forward checks the values of cu_seqlens, unless a CUDA graph is being captured,
// and the fallback copies them to the host.
//
// States at chosen positions: the one pass of forward stores the states between chunks that the positions need. Those at
// multiples of kChunk are among them. For any other position, forward runs once more, on its steps since the multiple before.

#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <iterator>
#include <numeric>

#include "cuda/device.h"
#include "ssd/aten/chunked_scan.h"
#include "ssd/aten/summary.h"
#include "ssd/cuda/host_launch.h"
#include "torch/allocation.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::ssd {
namespace {

void run_forward(const Inputs& in, const KernelInputs& inputs, PendingCopies& copies, const FwdOutputs& outputs,
                 const ChunkStates& chunk_states = {}) {
  const KernelResult out = result_as_rows(outputs.out, has_vectors(outputs.out)),
                     final_states = inputs.result_as_states(outputs.final_states);
  launch_forward(inputs, copies, in.z, out.written, final_states.written, chunk_states);
  out.finish(copies);
  final_states.finish(copies);
  copies.launch();
}

// The chunk states at or before the positions in between 0 and seqlen, as few as equal distances allow. They are in `states`,
// (batch, positions, heads, headdim, dstate), if the positions are theirs and no others and rows have no padding.
ChunkStates allocate_chunk_states(const StatesInputs& in, const KernelInputs& inputs, const at::Tensor& states) {
  const std::vector<int64_t>& positions = in.states_at;
  const auto begin = std::upper_bound(positions.begin(), positions.end(), 0),
             end = std::lower_bound(begin, positions.end(), in.x.size(1));
  ChunkStates result;
  result.every = 0;
  for (auto at = begin; at != end; ++at) result.every = std::gcd(result.every, *at / kChunk);
  if (result.every == 0) return {};
  const int64_t count = *std::prev(end) / kChunk / result.every, headdim = in.x.size(3), columns = inputs.state_columns();
  bool is_in_place = end - begin == count && columns == in.B.size(3);
  for (auto at = begin; at != end; ++at) is_in_place &= *at == (at - begin + 1) * result.every * kChunk;
  result.states = is_in_place ? states.narrow(1, begin - positions.begin(), count)
                              : empty_tensor({in.x.size(0), count, in.x.size(2), headdim, columns}, states.options());
  return result;
}

// The states after the steps from `begin` to before `end`, from the states before them, absent at 0 if they are zero.
at::Tensor states_after(const Inputs& in, int64_t begin, int64_t end, OptionalTensor states) {
  const auto steps = [&](const at::Tensor& tensor) { return tensor.narrow(1, begin, end - begin); };
  Inputs piece = in;
  if (is_present(in.seq_idx)) {
    piece.seq_idx = steps(*in.seq_idx);
    if (begin > 0) {
      const at::Tensor is_reset = in.seq_idx->select(1, begin).ne(in.seq_idx->select(1, begin - 1));
      states = states->masked_fill(is_reset.view({in.x.size(0), 1, 1, 1}), 0);
    }
  }
  piece.x = steps(in.x);
  for (OptionalTensor* sequence : {&piece.dt, &piece.log_decay, &piece.gain}) {
    if (is_present(*sequence)) *sequence = steps(**sequence);
  }
  piece.B = piece.C = steps(in.B);  // nobody reads out
  piece.D = piece.z = piece.diagonal_gain = std::nullopt;
  piece.initial_states = states;
  return fwd_cuda(piece).final_states;
}

}  // namespace

FwdOutputs fwd_cuda(const Inputs& in) {
  const Discretization method = check_inputs(in);
  const c10::cuda::CUDAGuard guard(in.x.device());
  if (!have_kernels_for(in, /*is_backward=*/false)) return fwd_aten(in);
  if (is_present(in.cu_seqlens) && !in.are_cu_seqlens_checked && !cuda::is_capturing()) {
    check_cu_seqlens_values("ssd_chunk_scan", in.cu_seqlens->cpu(), in.x.size(1));
  }
  const FwdOutputs outputs = allocate_fwd(in);
  PendingCopies copies;
  const KernelInputs inputs(in, method, copies);
  run_forward(in, inputs, copies, outputs);
  return outputs;
}

StatesOutputs states_cuda(const StatesInputs& in) {
  const Discretization method = check_states_inputs(in);
  const c10::cuda::CUDAGuard guard(in.x.device());
  if (!have_kernels_for(in, /*is_backward=*/false)) return states_aten(in);
  const StatesOutputs outputs = allocate_states(in);
  PendingCopies copies;
  const KernelInputs inputs(in, method, copies);
  const ChunkStates chunk_states = allocate_chunk_states(in, inputs, outputs.states);
  run_forward(in, inputs, copies, outputs, chunk_states);
  const auto states_before = [&](int64_t chunks) -> OptionalTensor {
    if (chunks == 0) return in.initial_states;
    return without_padding(chunk_states.states.select(1, chunks / chunk_states.every - 1), outputs.final_states);
  };
  for (size_t i = 0; i < in.states_at.size(); ++i) {
    const int64_t position = in.states_at[i], chunks = position / kChunk;
    const at::Tensor target = outputs.states.select(1, static_cast<int64_t>(i));
    if (position > 0 && position == in.x.size(1)) {
      target.copy_(outputs.final_states);
      continue;
    }
    OptionalTensor found = states_before(chunks);
    if (position % kChunk != 0) found = states_after(in, chunks * kChunk, position, found);
    if (!is_present(found)) {
      target.zero_();
    } else if (found->const_data_ptr() != target.const_data_ptr()) {
      target.copy_(*found);
    }
  }
  return outputs;
}

GradTensors bwd_cuda(const BwdInputs& bwd) {
  const Discretization method = check_inputs(bwd.in);
  const c10::cuda::CUDAGuard guard(bwd.in.x.device());
  if (!have_kernels_for(bwd.in, /*is_backward=*/true)) return bwd_aten(bwd);
  const GradTensors grads = allocate_bwd(bwd);
  BwdInputs present = bwd;
  const Inputs& in = bwd.in;
  const std::pair<Grad, const OptionalTensor&> optional[] = {
      {kGradDt, in.dt},
      {kGradA, in.A},
      {kGradLogDecay, in.log_decay},
      {kGradGain, in.gain},
      {kGradDtBias, in.dt_bias},
      {kGradD, in.D},
      {kGradZ, in.z},
      {kGradInitialStates, in.initial_states},
  };
  for (const auto& [grad, input] : optional) present.needs_grad[grad] &= is_present(input);
  launch_backward(present, method, grads);
  return grads;
}

bool writes_out_products(const Inputs& in) {
  const c10::cuda::CUDAGuard guard(in.x.device());
  return have_kernels_for(in, /*is_backward=*/true);
}

bool takes_out_factors(const Inputs& in) {
  const c10::cuda::CUDAGuard guard(in.x.device());
  return in.x.element_size() == 2 && have_kernels_for(in, /*is_backward=*/false);
}

bool span_states_cuda(const Inputs& in, Discretization method, bool is_reverse, const at::Tensor& states,
                      const at::Tensor& decay) {
  const c10::cuda::CUDAGuard guard(in.x.device());
  if (!have_kernels_for(in, /*is_backward=*/true)) return false;
  launch_span_states(in, method, is_reverse, states);
  if (decay.defined()) {
    launch_decay(in, decay);
    zero_where_cut(decay, in.seq_idx);
  }
  return true;
}

std::string plan_cuda(const Inputs& in, bool is_backward) {
  const Discretization method = check_inputs(in);
  const c10::cuda::CUDAGuard guard(in.x.device());
  if (!have_kernels_for(in, is_backward)) return plan_aten(in);
  return is_backward ? describe_backward(in) : describe_forward(in, method);
}

}  // namespace ssm_kernels::ssd

#endif
