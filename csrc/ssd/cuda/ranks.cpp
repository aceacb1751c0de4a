// Scans with ranks by the kernels of one sample a step: a step has a row for each rank, and rows of zeros up to a power of two
// (Inputs::rank_shift). The kernels of ranks.cuh make the rows of x, and the outputs from those of y.

#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <limits>

#include "common/integers.h"
#include "cuda/device.h"
#include "cuda/scalar_types.h"
#include "ssd/cuda/host_launch.h"
#include "ssd/cuda/ranks.h"
#include "torch/allocation.h"

namespace ssm_kernels::ssd {
namespace {

int rank_shift(const Inputs& in) {
  int shift = 0;
  while (int64_t(1) << shift < in.ranks->count) ++shift;
  return shift;
}
int64_t rows_of_step(const Inputs& in) { return int64_t(1) << rank_shift(in); }

// (batch, seqlen, ranks, ...) as rows (batch, rows, ...), with zeros in those that have no rank.
at::Tensor as_rank_rows(const Inputs& in, const at::Tensor& tensor) {
  const int64_t missing = rows_of_step(in) - tensor.size(2);
  if (missing == 0) return tensor.flatten(1, 2);
  std::vector<int64_t> padding(2 * (tensor.dim() - 2), 0);
  padding.back() = missing;
  return at::constant_pad_nd(tensor, padding).flatten(1, 2);
}
// Values of steps, (batch, seqlen, ...), for each of their rows.
at::Tensor repeat_rows(const Inputs& in, const at::Tensor& tensor) {
  std::vector<int64_t> shape = tensor.sizes().vec();
  shape.insert(shape.begin() + 2, rows_of_step(in));
  return tensor.unsqueeze(2).expand(shape).flatten(1, 2);
}
at::Tensor by_steps(const Inputs& in, const at::Tensor& rows) { return rows.unflatten(1, {in.x.size(1), rows_of_step(in)}); }

at::Tensor empty_rank_rows(const Inputs& in) {
  return empty_tensor({in.x.size(0), in.x.size(1) * rows_of_step(in), in.x.size(2), in.x.size(3)}, in.x.options());
}

// The scan of the rows, whose x is v.
Inputs scan_of_rows(const Inputs& in, const at::Tensor& v) {
  Inputs rows = in;
  rows.ranks = nullptr;
  rows.rank_shift = rank_shift(in);
  rows.chunk_size.reset();
  rows.z.reset();
  rows.x = v;
  rows.B = as_rank_rows(in, in.B);
  rows.C = as_rank_rows(in, in.C);
  rows.log_decay = as_rank_rows(in, in.log_decay->unsqueeze(2));
  rows.gain = repeat_rows(in, *in.gain);
  rows.diagonal_gain = repeat_rows(in, *in.diagonal_gain);
  if (is_present(in.seq_idx)) rows.seq_idx = repeat_rows(in, *in.seq_idx);
  if (is_present(in.cu_seqlens)) rows.cu_seqlens = *in.cu_seqlens * rows_of_step(in);
  return rows;
}

// The parameters of the kernels, and the tensors that they point to.
template <typename Params>
class RankCall {
 public:
  Params params;

  explicit RankCall(const Inputs& in) : in_(in) {
    const Ranks& ranks = *in.ranks;
    params.batch = in.x.size(0);
    params.seqlen = in.x.size(1);
    params.heads = in.x.size(2);
    params.headdim = static_cast<int>(in.x.size(3));
    params.ranks = static_cast<int>(ranks.count);
    params.rows_of_step = static_cast<int>(rows_of_step(in));
    params.are_vectors = params.headdim % kRankElements == 0;
    params.norm_eps = static_cast<float>(ranks.norm_eps);
    const auto factor = [&](const OptionalTensor& tensor) -> const float* {
      if (!is_present(tensor)) return nullptr;
      kept_.push_back(tensor->to(at::kFloat).contiguous());
      return kept_.back().const_data_ptr<float>();
    };
    params.x_factor = factor(ranks.x);
    params.z_factor = factor(ranks.z);
    params.out_factor = factor(ranks.out);
    params.norm_weight = factor(ranks.norm_weight);
    // Blocks that fill the device some times over: their sums over steps are added afterwards.
    constexpr int64_t kBlocksOfMultiprocessor = 16, kStepsOfBlock = 16;
    const int64_t blocks = kBlocksOfMultiprocessor * cuda::multiprocessor_count(in.x.get_device());
    const int64_t most = ceil_div(params.batch * params.seqlen, kStepsOfBlock);
    params.parts = static_cast<int>(std::max<int64_t>(1, std::min(ceil_div(blocks, params.heads), most)));
    check_count(params.parts * params.heads, "blocks");
  }

  // A tensor that a kernel reads.
  RowsView read(const at::Tensor& tensor) {
    kept_.push_back(has_contiguous_rows(tensor) ? tensor : tensor.contiguous());
    return view(kept_.back());
  }
  // A tensor that a kernel writes; finish() copies it if its rows are not contiguous.
  RowsView write(const at::Tensor& tensor) {
    if (has_contiguous_rows(tensor)) return view(tensor);
    copies_.emplace_back(tensor, empty_tensor(tensor.sym_sizes(), tensor.options()));
    return view(copies_.back().second);
  }
  // Sums (heads, ranks, headdim) of each block, or null.
  float* parts(const at::Tensor& sum) {
    if (!sum.defined()) return nullptr;
    const at::Tensor result = empty_tensor({params.parts, params.heads, params.ranks, params.headdim}, wide_options(in_.x));
    sums_.emplace_back(sum, result);
    return result.data_ptr<float>();
  }

  template <typename Launch>
  void launch(const Launch& launch) {
    C10_CUDA_CHECK(cuda::visit_scalar_but_double(scalar_kind(in_.x.scalar_type()), [&](auto scalar) {
      return launch(scalar, params, c10::cuda::getCurrentCUDAStream());
    }));
    for (const auto& [target, written] : copies_) target.copy_(written);
    for (const auto& [target, written] : sums_) {
      const at::Tensor sum = written.sum(0, /*keepdim=*/false, at::kDouble);
      target.add_(target.dim() == 2 ? sum.sum(1) : sum);
    }
  }

 private:
  RowsView view(const at::Tensor& tensor) {
    const int64_t bytes = kRankElements * tensor.element_size();
    bool has_vectors = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % bytes == 0;
    for (int64_t axis = 0; axis < 3; ++axis) has_vectors &= tensor.stride(axis) % kRankElements == 0;
    params.are_vectors &= has_vectors;
    return const_rows_view(tensor);
  }

  const Inputs& in_;
  std::vector<at::Tensor> kept_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_, sums_;
};

at::Tensor make_inputs_of_ranks(const Inputs& in) {
  const at::Tensor v = empty_rank_rows(in);
  RankCall<RankParams> call(in);
  call.params.x = call.read(in.x);
  call.params.rows = call.write(v);
  call.launch([](auto scalar, const RankParams& params, cudaStream_t stream) {
    return launch_rank_inputs<decltype(scalar)>(params, stream);
  });
  return v;
}

}  // namespace

bool takes_rank_kernels(const Inputs& in, bool is_backward) {
  if (in.ranks->count > kMaxRanks || in.reverse || in.x.numel() == 0 || in.B.numel() == 0) return false;
  if (in.x.size(1) > std::numeric_limits<int32_t>::max() / kMaxRanks) return false;
  const c10::cuda::CUDAGuard guard(in.x.device());
  Inputs rows = in;
  rows.B = in.B.select(2, 0);
  rows.z.reset();
  return have_kernels_for(rows, is_backward) && have_kernels_for(rows, /*is_backward=*/false);
}

FwdOutputs fwd_ranks_cuda(const Inputs& in) {
  check_inputs(in);
  const c10::cuda::CUDAGuard guard(in.x.device());
  FwdOutputs outputs = allocate_fwd(in);
  const FwdOutputs of_rows = fwd_cuda(scan_of_rows(in, make_inputs_of_ranks(in)));
  RankCall<RankParams> call(in);
  if (is_present(in.z)) call.params.z = call.read(*in.z);
  call.params.rows = call.read(of_rows.out);
  call.params.out = call.write(outputs.out);
  call.launch([](auto scalar, const RankParams& params, cudaStream_t stream) {
    return launch_rank_outputs<decltype(scalar)>(params, stream);
  });
  outputs.final_states = of_rows.final_states;
  return outputs;
}

GradTensors bwd_ranks_cuda(const BwdInputs& bwd) {
  const Inputs& in = bwd.in;
  check_inputs(in);
  const c10::cuda::CUDAGuard guard(in.x.device());
  GradTensors grads = allocate_bwd(bwd);
  const RankGrads none, &rank_grads = bwd.rank_grads != nullptr ? *bwd.rank_grads : none;
  const auto needs = [&](Grad grad) { return grads[grad].numel() > 0; };
  const at::Tensor v = make_inputs_of_ranks(in);
  const Inputs rows = scan_of_rows(in, v);
  at::Tensor grad_rows;
  if (is_present(bwd.grad_out)) {
    const bool reads_y = is_present(in.z) || is_present(in.ranks->norm_weight) || rank_grads.out.defined();
    const at::Tensor y = reads_y ? fwd_cuda(rows).out : v;
    grad_rows = empty_rank_rows(in);
    RankCall<RankBwdParams> call(in);
    if (is_present(in.z)) call.params.z = call.read(*in.z);
    call.params.rows = call.read(y);
    call.params.out = call.read(*bwd.grad_out);
    call.params.grad_rows = call.write(grad_rows);
    if (needs(kGradZ)) call.params.grad_z = call.write(grads[kGradZ]);
    call.params.z_parts = call.parts(rank_grads.z);
    call.params.out_parts = call.parts(rank_grads.out);
    call.params.norm_parts = call.parts(rank_grads.norm_weight);
    call.launch([](auto scalar, const RankBwdParams& params, cudaStream_t stream) {
      return launch_rank_outputs_bwd<decltype(scalar)>(params, stream);
    });
  } else {
    grad_rows = at::zeros(v.sizes(), v.options());
    if (needs(kGradZ)) grads[kGradZ].zero_();
  }

  BwdInputs of_rows{grad_rows, bwd.grad_final_states, rows, bwd.needs_grad, {}, {}, {}};
  of_rows.needs_grad[kGradZ] = false;
  of_rows.needs_grad[kGradX] = needs(kGradX) || rank_grads.x.defined();
  const bool are_in_place = in.B.size(2) == rows_of_step(in);
  for (const Grad grad : {kGradB, kGradC}) {
    if (needs(grad) && are_in_place && grads[grad].is_contiguous()) of_rows.targets[grad] = grads[grad].flatten(1, 2);
  }
  at::Tensor grad_diagonal_gain;
  if (is_present(bwd.grad_diagonal_gain)) {
    grad_diagonal_gain = empty_tensor(rows.diagonal_gain->sym_sizes(), rows.diagonal_gain->options());
    of_rows.grad_diagonal_gain = grad_diagonal_gain;
  }
  const GradTensors found = bwd_cuda(of_rows);

  for (const Grad grad : {kGradB, kGradC}) {
    if (needs(grad) && !of_rows.targets[grad].has_value()) {
      grads[grad].copy_(by_steps(in, found[grad]).narrow(2, 0, in.ranks->count));
    }
  }
  for (const Grad grad : {kGradD, kGradInitialStates}) grads[grad] = found[grad];
  if (needs(kGradLogDecay)) grads[kGradLogDecay].copy_(by_steps(in, found[kGradLogDecay]).select(2, 0));
  if (needs(kGradGain)) grads[kGradGain].copy_(by_steps(in, found[kGradGain]).sum(2));
  if (grad_diagonal_gain.defined()) at::Tensor(*bwd.grad_diagonal_gain).copy_(by_steps(in, grad_diagonal_gain).sum(2));
  if (!of_rows.needs_grad[kGradX]) return grads;
  RankCall<RankBwdParams> call(in);
  call.params.x = call.read(in.x);
  call.params.grad_rows = call.read(found[kGradX]);
  if (needs(kGradX)) call.params.grad_x = call.write(grads[kGradX]);
  call.params.x_parts = call.parts(rank_grads.x);
  call.launch([](auto scalar, const RankBwdParams& params, cudaStream_t stream) {
    return launch_rank_inputs_bwd<decltype(scalar)>(params, stream);
  });
  return grads;
}

}  // namespace ssm_kernels::ssd

#endif
