// Mamba-3's rotation by the kernels of rotation.cuh and rotation_bwd.cuh.

#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "mamba3/cuda/rotation.h"

#include "common/integers.h"
#include "cuda/scalar_types.h"
#include "mamba3/rotation.h"
#include "mamba3/scan.h"
#include "torch/allocation.h"
#include "torch/checks.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::mamba3 {
namespace {

int64_t sequence_count(const Inputs& in) { return is_present(in.cu_seqlens) ? in.cu_seqlens->size(0) - 1 : in.x.size(0); }

GateView gate_view(const at::Tensor& tensor, bool has_angles) {
  GateView view;
  view.data = const_cast<void*>(tensor.const_data_ptr());
  view.stride_batch = tensor.stride(0);
  view.stride_step = tensor.stride(1);
  if (!has_angles || tensor.dim() == 4) view.stride_head = tensor.stride(2);
  if (has_angles) view.stride_angle = tensor.stride(-1);
  view.kind = scalar_kind(tensor.scalar_type());
  return view;
}

RowView row_view(const at::Tensor& rows) {
  return {rows.const_data_ptr(), rows.stride(0), rows.stride(1), rows.dim() == 5 ? rows.stride(2) : 0, rows.stride(-2)};
}

bool begins_between_vectors(const at::Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 != 0; }
bool has_aligned_rows(const at::Tensor& rows) {
  if (begins_between_vectors(rows) || rows.size(-1) % 8 != 0) return false;
  for (int64_t axis = 0; axis + 1 < rows.dim(); ++axis) {
    if (rows.size(axis) > 1 && rows.stride(axis) % 8 != 0) return false;
  }
  return true;
}

// The parameters of a launch and the tensors that they point to.
template <typename Params>
struct KernelCall {
  Params params;
  at::Tensor initial, B, C, B_bias, C_bias;
  bool is_aligned = true;

  KernelCall(const Inputs& in, const Rotation& rotation) {
    params.batch = in.x.size(0);
    params.seqlen = in.x.size(1);
    params.chunks = ceil_div(params.seqlen, int64_t(kPhaseChunk));
    params.heads = in.x.size(2);
    params.angles = in.angles.size(-1);
    params.sequences = sequence_count(in);
    params.sizes = gate_view(in.dt, /*has_angles=*/false);
    params.rates = gate_view(in.angles, /*has_angles=*/true);
    if (rotation.resets.defined()) params.resets = rotation.resets.const_data_ptr<int>();
    if (rotation.ends.defined()) params.ends = rotation.ends.const_data_ptr<int>();
    if (is_present(in.initial_angle)) {
      initial = in.initial_angle->contiguous();
      params.initial = initial.const_data_ptr<float>();
      params.initial_turns = rotation.initial_turns.data_ptr<float>();
    }
    params.has_reset = rotation.has_reset.data_ptr<uint8_t>();
    if (rotation.rates.defined()) params.rates_of_heads = rotation.rates.data_ptr<float>();
    params.starts = rotation.starts.data_ptr<float>();
    if constexpr (!std::is_same_v<Params, PhaseParams>) set_rows(in, rotation);
  }

 private:
  void set_rows(const Inputs& in, const Rotation& rotation) {
    const at::ScalarType dtype = rotation.dtype;
    params.ranks = in.ranks();
    params.groups = in.B.size(-2);
    params.dstate = in.B.size(-1);
    params.is_pairs = in.is_pairs();
    const auto rows = [&](const at::Tensor& tensor) {
      const at::Tensor cast = tensor.to(dtype);
      const at::Tensor result = cast.stride(-1) == 1 || cast.size(-1) == 1 ? cast : cast.contiguous();
      is_aligned = is_aligned && has_aligned_rows(result);
      return result;
    };
    B = rows(in.B);
    C = rows(in.C);
    params.B = row_view(B);
    params.C = row_view(C);
    const auto bias = [&](const OptionalTensor& tensor, at::Tensor& held) -> const float* {
      if (!is_present(tensor)) return nullptr;
      held = bias_of_ranks(in, *tensor).contiguous();
      is_aligned = is_aligned && !begins_between_vectors(held);
      return held.const_data_ptr<float>();
    };
    params.B_bias = bias(in.B_bias, B_bias);
    params.C_bias = bias(in.C_bias, C_bias);
    const int64_t pair_blocks = ceil_div(ceil_div(params.dstate, int64_t(2)), int64_t(kBlockPairs)),
                  blocks = params.batch * params.chunks * params.ranks * params.heads * pair_blocks;
    TORCH_CHECK_VALUE(blocks < int64_t(1) << 31, "mamba3_chunk_scan: expected fewer than 2^31 blocks of the rotation, got ",
                      blocks, " for k and q of (batch, seqlen, ranks, heads, dstate) = ",
                      at::IntArrayRef({params.batch, params.seqlen, params.ranks, params.heads, params.dstate}));
  }
};

template <typename Visitor>
void visit_row_type(at::ScalarType dtype, const Visitor& visitor) {
  C10_CUDA_CHECK(cuda::visit_scalar_but_double(scalar_kind(dtype), visitor));
}

// The tables of sequences that begin and end within a row of the batch (PhaseParams).
void make_bound_tables(const Inputs& in, Rotation& rotation) {
  const int64_t batch = in.x.size(0), seqlen = in.x.size(1);
  const at::TensorOptions ints = in.x.options().dtype(at::kInt);
  if (!is_present(in.seq_idx) && !is_present(in.cu_seqlens)) return;
  rotation.resets = at::full({batch, seqlen + 1}, -1, ints);
  if (is_present(in.seq_idx)) {
    // The first step of a row begins with the row's initial phases.
    const at::Tensor within = rotation.resets.narrow(1, 1, seqlen - 1);
    within.masked_fill_(sequence_starts(*in.seq_idx).narrow(1, 1, seqlen - 1), kFromZero);
  }
  if (is_present(in.cu_seqlens)) {
    const at::Tensor offsets = in.cu_seqlens->to(at::kLong), begin = offsets.slice(0, 0, -1), end = offsets.slice(0, 1);
    const at::Tensor has_steps = end.gt(begin), nowhere = at::full_like(begin, seqlen);
    const at::Tensor numbers = at::arange(begin.size(0), ints);
    rotation.resets.select(0, 0).index_put_({at::where(has_steps, begin, nowhere)}, numbers);
    const at::Tensor ends = at::full({seqlen + 1}, -1, ints);
    ends.index_put_({at::where(has_steps, end - 1, nowhere)}, numbers);
    rotation.ends = ends;
  }
  rotation.resets = rotation.resets.narrow(1, 0, seqlen).contiguous();
}

// A state's tensor for the kernels: those of sequences without steps are as they were, and no kernel writes them.
at::Tensor state_of_kernels(const Inputs& in, at::IntArrayRef shape, const OptionalTensor& initial) {
  const at::Tensor state = empty_tensor(c10::fromIntArrayRefSlow(shape), in.wide_options());
  if (!is_present(in.cu_seqlens)) return state;
  if (is_present(initial)) {
    state.copy_(*initial);
  } else {
    state.zero_();
  }
  return state;
}

}  // namespace

bool rotates_by_cuda_kernels(const Inputs& in) { return in.x.is_cuda() && in.x.scalar_type() != at::kDouble; }

Rotation phases_cuda(const Inputs& in, at::ScalarType dtype) {
  const c10::cuda::CUDAGuard guard(in.x.device());
  const int64_t batch = in.x.size(0), seqlen = in.x.size(1), heads = in.x.size(2), angles = in.angles.size(-1),
                dstate = in.B.size(-1), chunks = ceil_div(seqlen, int64_t(kPhaseChunk)), sequences = sequence_count(in);
  Rotation rotation;
  rotation.dtype = dtype;
  make_bound_tables(in, rotation);
  const at::TensorOptions options = in.wide_options();
  rotation.has_reset = empty_tensor({batch, chunks}, options.dtype(at::kByte));
  rotation.starts = empty_tensor({batch, chunks, heads, angles}, options);
  if (in.angles.dim() == 4) rotation.rates = empty_tensor({batch, seqlen, heads, angles}, options);
  if (is_present(in.initial_angle)) rotation.initial_turns = empty_tensor({sequences, heads, angles}, options);
  rotation.final_angle = state_of_kernels(in, {sequences, heads, angles}, in.initial_angle);
  if (is_present(in.cu_seqlens) && is_present(in.initial_angle)) {
    constexpr double kTurn = 2 * kPi;
    rotation.final_angle.sub_((rotation.final_angle * (1 / kTurn)).round_(), kTurn);  // from -pi to pi
  }
  rotation.final_k = state_of_kernels(
      in,
      in.has_ranks() ? at::IntArrayRef({sequences, heads, in.ranks(), dstate}) : at::IntArrayRef({sequences, heads, dstate}),
      in.initial_k);
  if (rotation.starts.numel() == 0) return rotation;
  const at::Tensor sums = empty_tensor({batch, chunks, heads, angles}, options.dtype(at::kDouble));
  KernelCall<PhaseParams> phases(in, rotation);
  phases.params.sums = sums.data_ptr<double>();
  C10_CUDA_CHECK(launch_phase_starts(phases.params, c10::cuda::getCurrentCUDAStream()));
  return rotation;
}

Rotation rotate_cuda(const Inputs& in, at::ScalarType dtype) {
  const c10::cuda::CUDAGuard guard(in.x.device());
  Rotation rotation = phases_cuda(in, dtype);
  c10::SymDimVector shape = {in.x.size(0), in.x.size(1), in.x.size(2), in.B.size(-1)};
  if (in.has_ranks()) shape.insert(shape.begin() + 2, in.ranks());
  const at::TensorOptions options = in.wide_options().dtype(dtype);
  rotation.k = empty_tensor(shape, options);
  rotation.q = empty_tensor(shape, options);
  if (rotation.k.numel() == 0) return rotation;
  KernelCall<RotateParams> call(in, rotation);
  call.params.k = rotation.k.data_ptr();
  call.params.q = rotation.q.data_ptr();
  call.params.final_angle = rotation.final_angle.data_ptr<float>();
  call.params.final_k = rotation.final_k.data_ptr<float>();
  visit_row_type(dtype, [&](auto scalar) {
    return launch_rotate<decltype(scalar)>(call.params, call.is_aligned, c10::cuda::getCurrentCUDAStream());
  });
  return rotation;
}

void rotate_adjoint_cuda(const Inputs& in, const Rotation& rotation, const RotationGrads& given, const GradTensors& grads) {
  const c10::cuda::CUDAGuard guard(in.x.device());
  const auto needs = [&](int grad) { return grads[grad].numel() > 0; };
  const int64_t batch = in.x.size(0), seqlen = in.x.size(1), heads = in.x.size(2), angles = in.angles.size(-1),
                dstate = in.B.size(-1), ranks = in.ranks(), groups = in.B.size(-2), sequences = sequence_count(in);
  const at::TensorOptions options = in.wide_options();
  if (rotation.k.numel() == 0) {
    for (const int grad : {kGradB, kGradC, kGradBBias, kGradCBias, kGradAngles, kGradDt, kGradInitialAngle}) {
      grads[grad].zero_();
    }
    return;
  }
  KernelCall<UnrotateParams> call(in, rotation);
  UnrotateParams& params = call.params;
  const at::Tensor grad_k = given.k.contiguous(), grad_q = given.q.contiguous();
  TORCH_INTERNAL_ASSERT(grad_k.scalar_type() == at::kFloat && grad_q.scalar_type() == at::kFloat, "the kernel reads fp32");
  call.is_aligned = call.is_aligned && !begins_between_vectors(grad_k) && !begins_between_vectors(grad_q);
  params.k = const_cast<void*>(grad_k.const_data_ptr());
  params.q = const_cast<void*>(grad_q.const_data_ptr());
  at::Tensor final_angle, final_k;
  if (is_present(given.final_angle)) {
    final_angle = given.final_angle->contiguous();
    params.final_angle = const_cast<float*>(final_angle.const_data_ptr<float>());
  }
  if (is_present(given.final_k)) {
    final_k = given.final_k->contiguous();
    call.is_aligned = call.is_aligned && !begins_between_vectors(final_k);
    params.final_k = const_cast<float*>(final_k.const_data_ptr<float>());
  }
  const auto workspace = [&](at::IntArrayRef shape) { return empty_tensor(c10::fromIntArrayRefSlow(shape), options); };
  params.slabs = ceil_div(heads / groups, int64_t(kUnrotateHeads));
  at::Tensor rows, biases, sums, targets[2];
  if (needs(kGradB) || needs(kGradC)) {
    rows = workspace({2, batch, seqlen, ranks, groups, params.slabs, dstate});
    params.B_parts = rows[0].data_ptr<float>();
    params.C_parts = rows[1].data_ptr<float>();
    const auto target = [&](int grad, at::Tensor& held) -> RowView {
      if (!needs(grad)) return {};
      held = grads[grad].scalar_type() == rotation.dtype && (grads[grad].stride(-1) == 1 || dstate == 1)
                 ? grads[grad]
                 : empty_tensor(grads[grad].sym_sizes(), options.dtype(rotation.dtype));
      return row_view(held);
    };
    params.grad_B = target(kGradB, targets[0]);
    params.grad_C = target(kGradC, targets[1]);
  }
  if (needs(kGradBBias) || needs(kGradCBias)) {
    biases = workspace({batch * params.chunks, 2, ranks, heads, dstate});
    params.bias_parts = biases.data_ptr<float>();
  }
  const bool is_shared = in.angles.dim() == 3;
  params.rate_part_count = is_shared ? ranks * groups * params.slabs : ranks;
  params.size_part_count = ranks * ceil_div(angles, int64_t(kBlockPairs));
  const at::Tensor rates = workspace({params.rate_part_count, batch, seqlen, is_shared ? 1 : heads, angles}),
                   sizes = workspace({params.size_part_count, batch, seqlen, heads}),
                   chunk_parts = workspace({ranks, batch, params.chunks, heads, angles}),
                   later = workspace({batch, params.chunks, heads, angles});
  params.rate_parts = rates.data_ptr<float>();
  params.size_parts = sizes.data_ptr<float>();
  params.chunk_parts = chunk_parts.data_ptr<float>();
  params.later = later.data_ptr<float>();
  if (needs(kGradInitialAngle)) {
    sums = at::zeros({ranks, sequences, heads, angles}, options);
    params.initial_parts = sums.data_ptr<float>();
  }
  if (needs(kGradAngles)) params.grad_rates = gate_view(grads[kGradAngles], /*has_angles=*/true);
  if (needs(kGradDt)) {
    params.grad_sizes = gate_view(grads[kGradDt], /*has_angles=*/false);
    params.other_sizes = gate_view(given.dt, /*has_angles=*/false);
  }
  visit_row_type(rotation.dtype, [&](auto scalar) {
    return launch_unrotate<decltype(scalar)>(params, call.is_aligned, c10::cuda::getCurrentCUDAStream());
  });
  if (angles == 0 && needs(kGradDt)) grads[kGradDt].copy_(given.dt);
  for (const auto& [grad, target] : {std::pair<int, const at::Tensor&>(kGradB, targets[0]), {kGradC, targets[1]}}) {
    if (needs(grad) && !target.is_same(grads[grad])) grads[grad].copy_(target);
  }
  const auto add_biases = [&](int grad, const OptionalTensor& bias, int64_t which) {
    if (!needs(grad)) return;
    const at::Tensor sum = biases.select(1, which).sum(0);  // (ranks, heads, dstate)
    const at::Tensor by_head = !in.has_ranks() ? sum[0] : bias->dim() == 3 ? sum.transpose(0, 1) : sum.sum(0);
    grads[grad].copy_(by_head);
  };
  add_biases(kGradBBias, in.B_bias, 0);
  add_biases(kGradCBias, in.C_bias, 1);
  if (!needs(kGradInitialAngle)) return;
  at::Tensor initial = ranks == 1 ? sums[0] : sums.sum(0);
  if (is_present(in.cu_seqlens) && is_present(given.final_angle)) {
    initial = at::where(have_steps(in, initial), initial, *given.final_angle);
  }
  grads[kGradInitialAngle].copy_(initial);
}

}  // namespace ssm_kernels::mamba3

#endif
