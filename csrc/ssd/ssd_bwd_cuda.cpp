#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/ceil_div.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <atomic>

#include "cuda/device.h"
#include "ssd/ssd_kernel_calls.h"
#include "torch/checks.h"

namespace ssm_kernels::ssd {
namespace {

// Of states and their gradients: entries of the batch are taken in turns, but never less than one.
std::atomic<int64_t> workspace_limit{int64_t(1) << 30};

OptionalTensor rows_of(const OptionalTensor& tensor, int64_t begin, int64_t count) {
  return is_present(tensor) ? OptionalTensor(tensor->narrow(0, begin, count)) : OptionalTensor();
}

// Some entries of the batch.
struct Entries {
  Entries(const BwdInputs& bwd, const GradTensors& grads, int64_t begin, int64_t count)
      : x(bwd.in.x.narrow(0, begin, count)),
        dt(bwd.in.dt.narrow(0, begin, count)),
        B(bwd.in.B.narrow(0, begin, count)),
        C(bwd.in.C.narrow(0, begin, count)),
        z(rows_of(bwd.in.z, begin, count)),
        initial_states(rows_of(bwd.in.initial_states, begin, count)),
        seq_idx(rows_of(bwd.in.seq_idx, begin, count)),
        grad_out(rows_of(bwd.grad_out, begin, count)),
        grad_final_states(rows_of(bwd.grad_final_states, begin, count)),
        grads(grads),
        bwd{grad_out, grad_final_states, bwd.in.with(x, dt, B, C, z, initial_states, seq_idx), bwd.needs_grad} {
    for (const Grad grad : {kGradX, kGradDt, kGradB, kGradC, kGradZ, kGradInitialStates}) {
      if (bwd.needs_grad[grad]) this->grads[grad] = grads[grad].narrow(0, begin, count);
    }
  }

  const at::Tensor x, dt, B, C;
  const OptionalTensor z, initial_states, seq_idx, grad_out, grad_final_states;
  GradTensors grads;
  const BwdInputs bwd;
};

// One call of the kernels.
class Backward {
 public:
  Backward(const BwdInputs& bwd, Discretization method, const GradTensors& grads, bool may_use_wgmma)
      : bwd_(bwd), grads_(grads), inputs_(bwd.in, method), partition_(inputs_.partition()), may_use_wgmma_(may_use_wgmma) {
    inputs_.fill(params_);
  }

  // The sums over the batch, for A, dt_bias and, (heads, headdim), D.
  struct Sums {
    at::Tensor A, dt_bias, D;
  };
  Sums run() {
    const at::TensorOptions options = bwd_.in.A.options();
    const at::Tensor grad_y = gate();
    params_.grad_out = const_rows_view(grad_y);
    const at::Tensor grad_final_states =
        is_present(bwd_.grad_final_states) ? inputs_.as_states(*bwd_.grad_final_states) : at::Tensor();
    if (grad_final_states.defined()) params_.grad_final_states = grad_final_states.const_data_ptr<float>();

    std::optional<KernelResult> grad_x, grad_initial_states;
    if (needs(kGradX)) {
      grad_x.emplace(result_as_rows(grads_[kGradX], inputs_.x));
      params_.grad_x = rows_view(grad_x->written);
    }
    if (needs(kGradDt)) params_.grad_dt = rows_view(grads_[kGradDt]);
    if (needs(kGradInitialStates)) {
      grad_initial_states.emplace(inputs_.result_as_states(grads_[kGradInitialStates]));
      params_.grad_initial_states = grad_initial_states->written.data_ptr<float>();
    }
    cut();
    const at::Tensor piece_states = cut_along_time();
    const at::Tensor states = empty_images(), grad_states = empty_images();
    params_.states = states.data_ptr();
    params_.grad_states = grad_states.data_ptr();
    const at::Tensor parts_B = place_group_grad(kGradB, params_.grad_B, params_.grad_B_parts),
                     parts_C = place_group_grad(kGradC, params_.grad_C, params_.grad_C_parts);
    const at::Tensor parts_A = at::empty({params_.slots, params_.heads}, options), parts_bias = at::empty_like(parts_A);
    params_.grad_A_parts = parts_A.data_ptr<float>();
    params_.grad_bias_parts = parts_bias.data_ptr<float>();
    at::Tensor parts_D;
    if (needs(kGradD)) {
      parts_D = at::empty({params_.slots, params_.heads, params_.headdim}, options);
      params_.grad_D_parts = parts_D.data_ptr<float>();
    }

    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    const int max_shared_bytes = cuda::max_shared_bytes(bwd_.in.x.get_device());
    launch_for(bwd_.in.x, [&](auto scalar) {
      return launch_ssd_bwd<decltype(scalar)>(params_, partition_, may_use_wgmma_, max_shared_bytes, stream);
    });

    if (grad_x.has_value()) grad_x->finish();
    if (grad_initial_states.has_value()) grad_initial_states->finish();
    finish_group_grad(kGradB, parts_B);
    finish_group_grad(kGradC, parts_C);
    Sums sums;
    if (needs(kGradA)) sums.A = parts_A.sum(0);
    if (needs(kGradDtBias)) sums.dt_bias = parts_bias.sum(0);
    if (needs(kGradD)) sums.D = parts_D.sum(0).narrow(1, 0, bwd_.in.x.size(3));
    return sums;
  }

 private:
  bool needs(Grad grad) const { return bwd_.needs_grad[grad]; }

  // The gradient of y, as rows; writes that of z.
  at::Tensor gate() const {
    if (!is_present(bwd_.grad_out)) {
      if (needs(kGradZ)) grads_[kGradZ].zero_();
      return at::zeros(inputs_.x.sizes(), inputs_.x.options());
    }
    const at::Tensor grad_out = as_rows(*bwd_.grad_out);
    if (!is_present(bwd_.in.z)) return grad_out;
    const at::Tensor z = as_rows(*bwd_.in.z), grad_y = at::empty(inputs_.x.sizes(), inputs_.x.options());
    GateBwdParams params;
    params.batch = inputs_.x.size(0);
    params.seqlen = params_.seqlen;
    params.heads = params_.heads;
    params.pieces_of_head = cuda::Divisor(params_.headdim / kRowElements);
    params.grad_out = const_rows_view(grad_out);
    params.z = const_rows_view(z);
    params.grad_y = rows_view(grad_y);
    at::Tensor y;
    std::optional<KernelResult> grad_z;
    if (needs(kGradZ)) {
      y = at::empty(inputs_.x.sizes(), inputs_.x.options());
      run_forward(inputs_, /*z=*/{}, y, inputs_.empty_states(), may_use_wgmma_);
      params.y = const_rows_view(y);
      grad_z.emplace(result_as_rows(grads_[kGradZ], inputs_.x));
      params.grad_z = rows_view(grad_z->written);
    }
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    constexpr int64_t kBlocksPerMultiprocessor = 32;
    const int64_t most = kBlocksPerMultiprocessor * cuda::multiprocessor_count(inputs_.x.get_device());
    const int blocks = static_cast<int>(std::min(most, params.batch * params.seqlen));
    launch_for(inputs_.x, [&](auto scalar) { return launch_ssd_bwd_gate<decltype(scalar)>(params, blocks, stream); });
    if (grad_z.has_value()) grad_z->finish();
    return grad_y;
  }

  // Numbers the chunks, and shares the heads of a group out to as few blocks as fill the device: in rounds of one block a
  // multiprocessor, of its units' time and that of beginning and ending.
  void cut() {
    const int64_t chunks = at::ceil_div<int64_t>(params_.seqlen, kChunk);
    params_.slots = params_.cu_seqlens == nullptr ? params_.batch * chunks : max_packed_chunks(params_.seqlen, params_.batch);
    params_.units = params_.heads * partition_.row_blocks;
    const int64_t heads_per_group = partition_.heads_per_group, blocks = params_.slots * params_.groups;
    const int64_t multiprocessors = cuda::multiprocessor_count(inputs_.x.get_device());
    constexpr int64_t kUnitsOfOverhead = 4;
    const auto time = [&](int64_t splits) {
      const int64_t units = at::ceil_div<int64_t>(heads_per_group, splits) * partition_.row_blocks + kUnitsOfOverhead;
      return at::ceil_div<int64_t>(blocks * splits, multiprocessors) * units;
    };
    int64_t best = 1;
    for (int64_t splits = 2; splits <= std::min<int64_t>(heads_per_group, multiprocessors); ++splits) {
      if (time(splits) < time(best)) best = splits;
    }
    params_.heads_per_split = at::ceil_div<int64_t>(heads_per_group, best);
    params_.splits = at::ceil_div<int64_t>(heads_per_group, params_.heads_per_split);
    check_count(std::max(kDirections * partition_.walks, blocks * params_.splits), "blocks");
  }

  // Cuts walks where there are fewer than the device has room for. A piece takes about as long for each before it as for a
  // chunk of its own: more pieces than each has chunks would take longer again, and those of a few chunks as long as what they
  // spare. Of packed sequences, whose lengths the host does not ask for, each might be almost all. Returns the workspace.
  at::Tensor cut_along_time() {
    constexpr int64_t kLeastChunks = 4;
    const int64_t blocks = std::max<int64_t>(1, kDirections * partition_.walks);
    const int64_t room = cuda::multiprocessor_count(inputs_.x.get_device()) / blocks;
    int64_t pieces = std::max<int64_t>(1, room);
    while (pieces > 1 && pieces * std::max(kLeastChunks, pieces) > partition_.chunks) --pieces;
    params_.pieces = static_cast<int>(pieces);
    if (pieces == 1) return {};
    const int64_t places = (pieces - 1) * blocks * kUnits, elements = kUnitRows * image_columns(params_.dstate);
    const at::Tensor result = at::empty({places, elements + 1}, bwd_.in.A.options());
    params_.piece_states = result.data_ptr<float>();
    params_.piece_decays = params_.piece_states + places * elements;
    return result;
  }

  at::Tensor empty_images() const {
    return at::empty({params_.slots, params_.units, kUnitRows, image_columns(params_.dstate)}, inputs_.x.options());
  }

  // Where the kernels write that of B or C: in place, or as parts, which are returned.
  at::Tensor place_group_grad(Grad grad, RowsView& in_place, float*& parts) const {
    if (!needs(grad)) return {};
    if (params_.splits == 1 && has_rows(grads_[grad])) {
      in_place = rows_view(grads_[grad]);
      return {};
    }
    const at::Tensor& B = inputs_.B;
    const at::Tensor result = at::empty({params_.splits, B.size(0), B.size(1), B.size(2), B.size(3)}, bwd_.in.A.options());
    parts = result.data_ptr<float>();
    return result;
  }
  void finish_group_grad(Grad grad, const at::Tensor& parts) const {
    if (!parts.defined()) return;
    const at::Tensor sum = params_.splits == 1 ? parts.squeeze(0) : parts.sum(0);
    grads_[grad].copy_(without_padding(sum, grads_[grad]));
  }

  const BwdInputs& bwd_;
  const GradTensors& grads_;
  const KernelInputs inputs_;
  Partition partition_;
  const bool may_use_wgmma_;
  SsdBwdParams params_;
};

}  // namespace

int64_t limit_backward_workspace(int64_t bytes) {
  TORCH_CHECK_VALUE(bytes > 0, "_limit_ssd_workspace_bytes: expected a positive number, got ", bytes);
  return workspace_limit.exchange(bytes);
}

void run_backward(const BwdInputs& bwd, Discretization method, GradTensors& grads, bool may_use_wgmma) {
  const Inputs& in = bwd.in;
  const int64_t batch = in.x.size(0), chunks = at::ceil_div<int64_t>(in.x.size(1), kChunk);
  const int64_t bytes_of_entry =
      2 * chunks * in.x.size(2) * row_blocks(in.x.size(3)) * kUnitRows * image_columns(in.B.size(3)) * in.x.element_size();
  const int64_t turns = std::min(batch, at::ceil_div<int64_t>(batch * bytes_of_entry, workspace_limit));
  const int64_t entries_of_turn = at::ceil_div<int64_t>(batch, turns);
  Backward::Sums sums;
  if (turns == 1) {
    sums = Backward(bwd, method, grads, may_use_wgmma).run();
  } else {
    const auto add = [](at::Tensor& sum, const at::Tensor& more) {
      if (more.defined()) sum = sum.defined() ? sum.add_(more) : more;
    };
    for (int64_t begin = 0; begin < batch; begin += entries_of_turn) {
      const Entries entries(bwd, grads, begin, std::min(entries_of_turn, batch - begin));
      const Backward::Sums more = Backward(entries.bwd, method, entries.grads, may_use_wgmma).run();
      add(sums.A, more.A);
      add(sums.dt_bias, more.dt_bias);
      add(sums.D, more.D);
    }
  }
  if (bwd.needs_grad[kGradA]) grads[kGradA] = sums.A;
  if (bwd.needs_grad[kGradDtBias]) grads[kGradDtBias] = sums.dt_bias;
  if (bwd.needs_grad[kGradD]) grads[kGradD] = in.D->dim() == 1 ? sums.D.sum(1) : sums.D.contiguous();
}

}  // namespace ssm_kernels::ssd

#endif
