#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/core/Tensor.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "common/integers.h"
#include "cuda/device.h"
#include "cuda/scalar_types.h"
#include "ssd/cuda/host_launch.h"
#include "torch/allocation.h"
#include "torch/checks.h"
#include "torch/debug_options.h"

namespace ssm_kernels::ssd {
namespace {

// A sub-batch of a call: some rows of the batch, or all packed sequences; a span of their steps; heads of whole groups, or some
// heads of one group; and some columns of their states.
struct Range {
  int64_t entry, entries, step, steps, head, heads, group, groups, column, columns;
  bool begins_groups = true, ends_groups = true;  // whether the heads include the first and the last of their groups

  bool is_whole(const Inputs& in) const {
    return entries == in.x.size(0) && steps == in.x.size(1) && heads == in.x.size(2) && columns == in.B.size(3);
  }

  at::Tensor of_heads(const at::Tensor& sequence) const { return of_steps(sequence).narrow(2, head, heads); }
  at::Tensor of_parameter(const at::Tensor& parameter) const { return parameter.narrow(0, head, heads); }
  at::Tensor of_groups(const at::Tensor& matrix) const {
    return of_steps(matrix).narrow(2, group, groups).narrow(3, column, columns);
  }
  at::Tensor of_steps(const at::Tensor& sequence) const { return of_entries(sequence).narrow(1, step, steps); }
  at::Tensor of_entries(const at::Tensor& tensor) const { return tensor.narrow(0, entry, entries); }
  // For (sequences, heads, ...). Packed sequences are one row of the batch.
  at::Tensor of_states(const at::Tensor& states, bool are_packed) const {
    return (are_packed ? states : of_entries(states)).narrow(1, head, heads).narrow(3, column, columns);
  }
};

// A call's tensors in a range, and the gradients that the kernels write there.
struct PartOfCall {
  BwdInputs bwd;
  GradTensors grads;
};
PartOfCall part_of(const BwdInputs& bwd, const GradTensors& grads, const Range& range) {
  PartOfCall part{bwd, grads};
  Inputs& in = part.bwd.in;
  if (range.is_whole(in)) return part;
  const bool is_packed = is_present(in.cu_seqlens);
  const auto of_states = [&](const at::Tensor& states) { return range.of_states(states, is_packed); };
  in.x = range.of_heads(in.x);
  for (OptionalTensor* sequence : {&in.dt, &in.z, &in.log_decay, &in.gain, &in.diagonal_gain}) {
    if (is_present(*sequence)) *sequence = range.of_heads(**sequence);
  }
  in.B = range.of_groups(in.B);
  in.C = range.of_groups(in.C);
  for (OptionalTensor* parameter : {&in.A, &in.D, &in.dt_bias}) {
    if (is_present(*parameter)) *parameter = range.of_parameter(**parameter);
  }
  if (is_present(in.initial_states)) in.initial_states = of_states(*in.initial_states);
  if (is_present(in.seq_idx)) in.seq_idx = range.of_steps(*in.seq_idx);
  if (is_present(bwd.grad_out)) part.bwd.grad_out = range.of_heads(*bwd.grad_out);
  for (OptionalTensor* result : {&part.bwd.out_products, &part.bwd.grad_diagonal_gain}) {
    if (is_present(*result)) *result = range.of_heads(**result);
  }
  if (is_present(bwd.grad_final_states)) part.bwd.grad_final_states = of_states(*bwd.grad_final_states);
  for (const Grad grad : {kGradX, kGradDt, kGradZ, kGradLogDecay, kGradGain}) {
    if (bwd.needs_grad[grad]) part.grads[grad] = range.of_heads(grads[grad]);
  }
  for (const Grad grad : {kGradB, kGradC}) {
    if (bwd.needs_grad[grad]) part.grads[grad] = range.of_groups(grads[grad]);
  }
  for (const Grad grad : {kGradA, kGradD, kGradDtBias}) {
    if (bwd.needs_grad[grad]) part.grads[grad] = range.of_parameter(grads[grad]);
  }
  if (bwd.needs_grad[kGradInitialStates]) part.grads[kGradInitialStates] = of_states(grads[kGradInitialStates]);
  return part;
}

// Returns the gradient of y, as rows; writes the gradient of z. Launches the copies.
at::Tensor gate(const BwdInputs& bwd, const KernelInputs& inputs, PendingCopies& copies, const GradTensors& grads) {
  const at::Tensor& x = inputs.x;
  const bool needs_grad_z = bwd.needs_grad[kGradZ];
  if (!is_present(bwd.grad_out)) {
    copies.launch();
    if (needs_grad_z) grads[kGradZ].zero_();
    return at::zeros({x.size(0), x.size(1), x.size(2), padded_row(x.size(3))}, x.options()).narrow(3, 0, x.size(3));
  }
  if (!is_present(bwd.in.z)) {
    const at::Tensor grad_y = copies.as_rows(*bwd.grad_out);
    copies.launch();
    return grad_y;
  }
  // The gate's kernel takes rows that begin at any element.
  const auto contiguous_rows = [&](const at::Tensor& rows) { return has_contiguous_rows(rows) ? rows : copies.as_rows(rows); };
  const at::Tensor grad_out = contiguous_rows(*bwd.grad_out), z = contiguous_rows(*bwd.in.z),
                   padded_grad_y = empty_padded_like(x);
  copies.launch();
  GateBwdParams params;
  params.batch = x.size(0);
  params.seqlen = x.size(1);
  params.heads = x.size(2);
  params.headdim = static_cast<int>(x.size(3));
  params.vectors_per_head = cuda::Divisor(static_cast<int>(padded_row(x.size(3)) / kRowElements));
  check_count(params.heads * params.vectors_per_head.value<int64_t>(), "vectors of a step");
  params.grad_out = const_rows_view(grad_out);
  params.z = const_rows_view(z);
  params.grad_y = rows_view(padded_grad_y);
  // Its vectors are of kRowElements, in fp32 too.
  params.are_shifted = x.size(3) % kRowElements != 0 || !has_vectors(grad_out) || !has_vectors(z);
  at::Tensor y;
  std::optional<KernelResult> grad_z;
  if (needs_grad_z) {
    y = empty_padded_like(x);
    launch_forward(inputs, copies, /*z=*/{}, y, inputs.empty_states());
    params.y = const_rows_view(y);
    const at::Tensor& target = grads[kGradZ];
    grad_z.emplace(target, has_contiguous_rows(target) ? target : empty_padded_like(x));
    params.grad_z = rows_view(grad_z->written);
    params.are_shifted |= !has_vectors(grad_z->written);
  }
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  constexpr int64_t kBlocksPerMultiprocessor = 32;
  const int64_t most = kBlocksPerMultiprocessor * cuda::multiprocessor_count(x.get_device());
  const int blocks = static_cast<int>(std::min(most, params.batch * params.seqlen));
  C10_CUDA_CHECK(cuda::visit_scalar_but_double(scalar_kind(x.scalar_type()), [&](auto scalar) {
    return launch_ssd_bwd_gate<decltype(scalar)>(params, blocks, stream);
  }));
  if (grad_z.has_value()) {
    grad_z->finish(copies);
    copies.launch();
  }
  return padded_grad_y.narrow(3, 0, x.size(3));
}

// Partial sums of the gradients of A, dt_bias and D, (chunks, heads), the last one (chunks, heads, headdim) and only if needed.
// All sub-batches of a call write theirs there, so that each gradient is one sum at the end.
struct ParameterParts {
  int64_t heads;
  at::Tensor A, dt_bias, D;

  explicit ParameterParts(const BwdInputs& bwd) : heads(bwd.in.x.size(2)) {
    const Inputs& in = bwd.in;
    const int64_t seqlen = in.x.size(1);
    const int64_t chunks = is_present(in.cu_seqlens) ? max_packed_chunks(seqlen, in.cu_seqlens->size(0) - 1)
                                                     : in.x.size(0) * ceil_div(seqlen, kChunk);
    if (is_present(in.A)) {
      A = empty_tensor({chunks, heads}, wide_options(in.x));
      dt_bias = empty_tensor_like(A);
    }
    if (bwd.needs_grad[kGradD]) D = empty_tensor({chunks, heads, padded_row(in.x.size(3))}, wide_options(in.x));
  }

  // Sets the pointers for a sub-batch, from its first chunk and head on.
  void fill(SsdBwdParams& params, int64_t chunk, int64_t head) const {
    const int64_t first = chunk * heads + head;
    if (A.defined()) {
      params.grad_A_parts = A.data_ptr<float>() + first;
      params.grad_bias_parts = dt_bias.data_ptr<float>() + first;
    }
    if (D.defined()) params.grad_D_parts = D.data_ptr<float>() + first * D.size(2);
    params.parts_heads = heads;
  }

  void write_sums(const BwdInputs& bwd, const GradTensors& grads, bool adds) const {
    const auto write = [&](Grad grad, const at::Tensor& parts, at::IntArrayRef summed) {
      if (!bwd.needs_grad[grad]) return;
      at::Tensor target = grads[grad];
      if (adds) {
        target.add_(parts.sum(summed));
      } else {
        at::sum_out(target, parts, summed);
      }
    };
    write(kGradA, A, {0});
    write(kGradDtBias, dt_bias, {0});
    if (!D.defined()) return;
    constexpr int64_t kChunksAndHeaddim[] = {0, 2};
    write(kGradD, D.narrow(2, 0, bwd.in.x.size(3)), at::IntArrayRef(kChunksAndHeaddim, bwd.in.D->dim() == 1 ? 2 : 1));
  }
};

// The sums over the heads of a group, in fp32, padded: from one sub-batch with some of these heads to the next.
struct GroupSums {
  at::Tensor B, C;
};

// One call of the kernels, for a sub-batch.
class Backward {
 public:
  // first_chunk: of the range, in parts.
  Backward(const BwdInputs& bwd, Discretization method, const GradTensors& grads, const Range& range,
           const ParameterParts& parts, int64_t first_chunk)
      : bwd_(bwd), grads_(grads), range_(range), inputs_(bwd.in, method, copies_), partition_(inputs_.partition()) {
    inputs_.fill(params_);
    inputs_.fill(params_.gates);
    params_.diagonal_gain_offset = inputs_.diagonal_gain_offset();
    params_.rank_shift = inputs_.rank_shift();
    parts.fill(params_, first_chunk, range.head);
  }

  void run(GroupSums& sums) {
    const at::Tensor grad_final_states =
        is_present(bwd_.grad_final_states) ? inputs_.as_states(*bwd_.grad_final_states, copies_) : at::Tensor();
    const at::Tensor grad_y = gate(bwd_, inputs_, copies_, grads_);
    params_.grad_out = const_rows_view(grad_y, inputs_.is_reverse());
    if (grad_final_states.defined()) {
      params_.grad_final_states = grad_final_states.const_data_ptr<float>() + inputs_.offset_of_first_states();
    }

    std::optional<KernelResult> grad_x, grad_initial_states;
    if (needs(kGradX)) {
      grad_x.emplace(result_as_rows(grads_[kGradX], has_pairs(grads_[kGradX])));
      params_.grad_x = rows_view(grad_x->written, inputs_.is_reverse());
    }
    if (needs(kGradDt)) params_.grad_dt = rows_view(grads_[kGradDt], inputs_.is_reverse());
    const at::Tensor grad_log_decay = place_gate_grad(gate_grad(kGradLogDecay), params_.grad_log_decay),
                     grad_gain = place_gate_grad(gate_grad(kGradGain), params_.grad_gain),
                     grad_diagonal_gain = place_gate_grad(bwd_.grad_diagonal_gain, params_.grad_diagonal_gain);
    if (is_present(bwd_.out_products)) {
      params_.out_products = in_bytes(rows_view(*bwd_.out_products, inputs_.is_reverse()), *bwd_.out_products);
    }
    if (needs(kGradInitialStates)) {
      grad_initial_states.emplace(inputs_.result_as_states(grads_[kGradInitialStates]));
      params_.grad_initial_states = grad_initial_states->written.data_ptr<float>() + inputs_.offset_of_first_states();
    }
    share_work();
    const at::Tensor segment_states = split_along_time();
    const at::Tensor states = empty_swizzled_states(), grad_states = empty_swizzled_states();
    params_.states = states.data_ptr();
    params_.grad_states = grad_states.data_ptr();
    const at::Tensor parts_B = place_group_grad(kGradB, params_.grad_B, params_.grad_B_parts),
                     parts_C = place_group_grad(kGradC, params_.grad_C, params_.grad_C_parts);

    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    const int max_shared_bytes = ssd::max_shared_bytes(bwd_.in.x);
    const Products products = choose_products(bwd_.in.x, bwd_.in.reverse);
    C10_CUDA_CHECK(cuda::visit_scalar_but_double(scalar_kind(bwd_.in.x.scalar_type()), [&](auto scalar) {
      const auto launch = [&](const auto& params) {
        return launch_ssd_bwd<decltype(scalar)>(params, partition_, products, max_shared_bytes, stream);
      };
      if (inputs_.has_diagonal_gain()) return launch(params_);
      return inputs_.has_given_gates() ? launch(static_cast<const SsdLogBwdParams&>(params_))
                                       : launch(static_cast<const SsdBwdParams&>(params_));
    }));

    if (grad_x.has_value()) grad_x->finish(copies_);
    if (grad_initial_states.has_value()) grad_initial_states->finish(copies_);
    copies_.launch();
    finish_gate_grad(gate_grad(kGradLogDecay), grad_log_decay);
    finish_gate_grad(gate_grad(kGradGain), grad_gain);
    finish_gate_grad(bwd_.grad_diagonal_gain, grad_diagonal_gain);
    finish_group_grad(kGradB, parts_B, sums.B);
    finish_group_grad(kGradC, parts_C, sums.C);
  }

 private:
  bool needs(Grad grad) const { return bwd_.needs_grad[grad]; }

  // Numbers the chunks, and splits the heads of a group among as few blocks as fill the device. Estimates the time in rounds of
  // one block per multiprocessor: a round takes the time of its state tiles and of the block's beginning and end.
  void share_work() {
    const int64_t chunks = ceil_div(params_.seqlen, kChunk);
    params_.num_chunks =
        params_.cu_seqlens == nullptr ? params_.batch * chunks : max_packed_chunks(params_.seqlen, params_.batch);
    params_.state_tiles = params_.heads * partition_.row_blocks;
    const int64_t heads_per_group = partition_.heads_per_group, blocks = params_.num_chunks * params_.groups;
    const int64_t multiprocessors = cuda::multiprocessor_count(inputs_.x.get_device());
    constexpr int64_t kTilesOfOverhead = 4;
    const auto time = [&](int64_t splits) {
      const int64_t state_tiles = ceil_div(heads_per_group, splits) * partition_.row_blocks + kTilesOfOverhead;
      return ceil_div(blocks * splits, multiprocessors) * state_tiles;
    };
    int64_t best = 1;
    for (int64_t splits = 2; splits <= std::min<int64_t>(heads_per_group, multiprocessors); ++splits) {
      if (time(splits) < time(best)) best = splits;
    }
    params_.heads_per_split = ceil_div(heads_per_group, best);
    params_.splits = ceil_div(heads_per_group, params_.heads_per_split);
    check_count(std::max(kDirections * partition_.work_tiles, blocks * params_.splits), "blocks");
  }

  // Splits work tiles into segments if there are fewer work tiles than the device has room for. Folding an earlier segment
  // takes about as long as a chunk, so that a segment has at least as many chunks as there are segments, and at least
  // kMinChunks. The host does not know the lengths of packed sequences: each may have almost all steps. Returns the
  // workspace.
  at::Tensor split_along_time() {
    constexpr int64_t kMinChunks = 4;
    const int64_t blocks = std::max<int64_t>(1, kDirections * partition_.work_tiles);
    const int64_t room = cuda::multiprocessor_count(inputs_.x.get_device()) / blocks;
    int64_t segments = std::max<int64_t>(1, room);
    while (segments > 1 && segments * std::max(kMinChunks, segments) > partition_.chunks) --segments;
    partition_.segments = static_cast<int>(segments);
    if (segments == 1) return {};
    const int64_t places = (segments - 1) * blocks * kWarpgroups, elements = kStateRows * tile_columns(params_.dstate);
    const at::Tensor result = empty_tensor({places, elements + 1}, wide_options(bwd_.in.x));
    partition_.states = result.data_ptr<float>();
    partition_.maps = partition_.states + places * elements;
    return result;
  }

  at::Tensor empty_swizzled_states() const {
    return empty_tensor({params_.num_chunks, params_.state_tiles, kStateRows, tile_columns(params_.dstate)},
                        inputs_.x.options());
  }

  OptionalTensor gate_grad(Grad grad) const { return needs(grad) ? OptionalTensor(grads_[grad]) : std::nullopt; }
  // Sets where the kernels write the gradient of a given gate, which it returns: in place, or in the kernels' dtype.
  at::Tensor place_gate_grad(const OptionalTensor& grad, RowsView& view) const {
    if (!is_present(grad)) return {};
    const at::Tensor& target = *grad;
    const at::ScalarType dtype = inputs_.dtype_of_given_gates();
    const at::Tensor written =
        target.scalar_type() == dtype ? target : empty_tensor(target.sym_sizes(), target.options().dtype(dtype));
    view = in_bytes(rows_view(written, inputs_.is_reverse()), written);
    return written;
  }
  void finish_gate_grad(const OptionalTensor& grad, const at::Tensor& written) const {
    if (written.defined() && !written.is_same(*grad)) at::Tensor(*grad).copy_(written);
  }

  // Sets where the kernels write the gradient of B or C: in place, or as partial sums, which it returns.
  at::Tensor place_group_grad(Grad grad, RowsView& in_place, RowsView& parts) {
    if (!needs(grad)) return {};
    if (params_.splits == 1 && range_.begins_groups && range_.ends_groups && has_pairs(grads_[grad])) {
      // Partial sums are fp32, too.
      const bool has_type_of_B = grads_[grad].scalar_type() == inputs_.B.scalar_type();
      (has_type_of_B ? in_place : parts) = rows_view(grads_[grad], inputs_.is_reverse());
      return {};
    }
    const at::Tensor& B = inputs_.B;
    const at::Tensor result =
        empty_tensor({params_.splits, B.size(0), B.size(1), B.size(2), padded_row(B.size(3))}, wide_options(bwd_.in.x));
    parts = rows_view(result[0], inputs_.is_reverse());
    params_.parts_stride_split = result.stride(0);
    return result;
  }
  // Writes the gradient of B or C, or passes its sum on if later sub-batches have other heads of the group.
  void finish_group_grad(Grad grad, const at::Tensor& parts, at::Tensor& sum_of_group) const {
    if (!parts.defined()) return;
    at::Tensor sum = params_.splits == 1 ? parts.squeeze(0) : parts.sum(0);
    if (!range_.begins_groups) sum.add_(sum_of_group);
    if (range_.ends_groups) {
      grads_[grad].copy_(without_padding(sum, grads_[grad]));
    } else {
      sum_of_group = sum;
    }
  }

  const BwdInputs& bwd_;
  const GradTensors& grads_;
  const Range& range_;
  PendingCopies copies_;
  const KernelInputs inputs_;
  WorkPartition partition_;
  SsdDiagonalBwdParams params_;  // without gains on the diagonal, or given gates, the kernels take a base of it
};

// Upper bound of the workspace for chunk states: max(kSmallWorkspaceBytes, 2 x bytes of x), capped by
// DebugOption::kSsdWorkspaceBytes. Small enough that saved activations, not this workspace, set the peak of a training step.
int64_t most_workspace_bytes(const Inputs& in) {
  constexpr int64_t kSmallWorkspaceBytes = int64_t(256) << 20;
  const int64_t x_bytes = in.x.numel() * in.x.element_size();
  return std::min(debug_option(DebugOption::kSsdWorkspaceBytes), std::max(kSmallWorkspaceBytes, 2 * x_bytes));
}

// The bytes of one head's states before one chunk, in both directions.
int64_t bytes_of_chunk(const Inputs& in) {
  return kDirections * row_blocks(in.x.size(3)) * kStateRows * tile_columns(in.B.size(3)) * in.x.element_size();
}

// Calls body(begin, steps) for spans of a call's steps, in the order of the scan, whose states take at most most_bytes for a
// row of the batch, from the last span to the first. All but the last have equally many whole chunks, at least one. The host
// does not know where packed sequences begin: they have one span.
template <typename Body>
void for_each_span(const Inputs& in, int64_t most_bytes, const Body& body) {
  const int64_t seqlen = in.x.size(1), chunks = ceil_div(seqlen, kChunk);
  int64_t length = chunks;
  if (!is_present(in.cu_seqlens)) {
    const int64_t most_chunks = std::max<int64_t>(1, most_bytes / (in.x.size(2) * bytes_of_chunk(in)));
    length = ceil_div(chunks, ceil_div(chunks, most_chunks));
  }
  for (int64_t chunk = (ceil_div(chunks, length) - 1) * length; chunk >= 0; chunk -= length) {
    body(first_step(chunk), std::min(first_step(length), seqlen - first_step(chunk)));
  }
}
Range range_of_span(const Inputs& in, int64_t begin, int64_t steps) {
  const int64_t step = in.reverse ? in.x.size(1) - begin - steps : begin;
  return {0, in.x.size(0), step, steps, 0, in.x.size(2), 0, in.B.size(2), 0, in.B.size(3)};
}

// Splits a call, or a span of one, into sub-batches whose states take at most most_bytes. A sub-batch has some rows of the
// batch; if one row is too large, some of its groups; if one group is, some of its heads. All have about as many heads.
template <typename Body>
void for_each_sub_batch(const Inputs& in, int64_t most_bytes, const Body& body) {
  const int64_t batch = in.x.size(0), groups = in.B.size(2), heads_per_group = in.x.size(2) / groups;
  const int64_t chunks =
      is_present(in.cu_seqlens) ? max_packed_chunks(in.x.size(1), in.cu_seqlens->size(0) - 1) : ceil_div(in.x.size(1), kChunk);
  const int64_t most_heads = most_bytes / (chunks * bytes_of_chunk(in));
  const auto at_once = [&](int64_t count, int64_t heads_of_each) {
    return ceil_div(count, ceil_div(count, std::max<int64_t>(1, most_heads / heads_of_each)));
  };
  const int64_t entries = at_once(batch, groups * heads_per_group), groups_at_once = at_once(groups, heads_per_group),
                heads_at_once = at_once(heads_per_group, 1);
  for (int64_t entry = 0; entry < batch; entry += entries) {
    for (int64_t group = 0; group < groups; group += groups_at_once) {
      const int64_t sub_batch_groups = std::min(groups_at_once, groups - group);
      for (int64_t head = 0; head < heads_per_group; head += heads_at_once) {
        const int64_t sub_batch_heads = sub_batch_groups * std::min(heads_at_once, heads_per_group - head);
        body(Range{entry, std::min(entries, batch - entry), 0, in.x.size(1), group * heads_per_group + head, sub_batch_heads,
                   group, sub_batch_groups, 0, in.B.size(3), head == 0, head + heads_at_once >= heads_per_group});
      }
    }
  }
}

// Runs a call, or a span of one. first_chunk: of the call's, in parts.
void run_in_sub_batches(const BwdInputs& bwd, Discretization method, const GradTensors& grads, int64_t most_bytes,
                        const ParameterParts& parts, int64_t first_chunk = 0) {
  GroupSums sums;
  for_each_sub_batch(bwd.in, most_bytes, [&](const Range& range) {
    const PartOfCall part = part_of(bwd, grads, range);
    const int64_t chunks_before = range.entry * ceil_div(bwd.in.x.size(1), kChunk);
    Backward(part.bwd, method, part.grads, range, parts, first_chunk + chunks_before).run(sums);
  });
}

// `begin` is the second span's first step, in the order of the scan. Clears the states before it, or their gradients, in the
// rows in which a sequence begins there.
void reset_states(const Inputs& in, int64_t begin, at::Tensor& states) {
  if (!is_present(in.seq_idx)) return;
  const auto sequence_of = [&](int64_t step) { return in.seq_idx->select(1, in.reverse ? in.x.size(1) - 1 - step : step); };
  states.masked_fill_(sequence_of(begin).ne(sequence_of(begin - 1)).view({in.x.size(0), 1, 1, 1}), 0);
}

// Runs a call whose states have at most as many columns as the kernels take. If those of one row of the batch take more than
// most_bytes, it runs in spans of the steps. A first pass computes the states before each span. The spans then run from the
// last to the first, and pass the gradients of these states on. Splitting the heads of a group instead would leave fewer blocks
// for each launch, and sums over the heads to add in memory.
void run_in_spans(const BwdInputs& bwd, Discretization method, const GradTensors& grads, int64_t most_bytes,
                  bool adds_parameters) {
  const Inputs& in = bwd.in;
  std::vector<std::pair<int64_t, int64_t>> spans;
  for_each_span(in, most_bytes, [&](int64_t begin, int64_t steps) { spans.emplace_back(begin, steps); });
  const ParameterParts parameter_parts(bwd);
  if (spans.size() == 1) {
    run_in_sub_batches(bwd, method, grads, most_bytes, parameter_parts);
    parameter_parts.write_sums(bwd, grads, adds_parameters);
    return;
  }
  std::vector<PartOfCall> parts;
  for (const auto& [begin, steps] : spans) parts.push_back(part_of(bwd, grads, range_of_span(in, begin, steps)));
  const auto empty_states = [&] {
    return empty_tensor({in.x.size(0), in.x.size(2), in.x.size(3), in.B.size(3)}, wide_options(in.x));
  };
  for (size_t i = spans.size() - 1; i > 0; --i) {
    at::Tensor states = empty_states();
    launch_span_states(parts[i].bwd.in, method, /*is_reverse=*/false, states);
    reset_states(in, spans[i - 1].first, states);
    parts[i - 1].bwd.in.initial_states = states;
  }
  OptionalTensor grad_states = bwd.grad_final_states;
  for (size_t i = 0; i < spans.size(); ++i) {
    PartOfCall& part = parts[i];
    part.bwd.grad_final_states = grad_states;
    const bool is_first = i + 1 == spans.size();  // in the order of the scan
    if (!is_first) {
      part.bwd.needs_grad[kGradInitialStates] = true;
      part.grads[kGradInitialStates] = empty_states();
    }
    run_in_sub_batches(part.bwd, method, part.grads, most_bytes, parameter_parts, in.x.size(0) * (spans[i].first / kChunk));
    if (is_first) break;
    reset_states(in, spans[i].first, part.grads[kGradInitialStates]);
    grad_states = part.grads[kGradInitialStates];
    part = {};
  }
  parameter_parts.write_sums(bwd, grads, adds_parameters);
}

// Runs a call with more columns. y is a sum over columns of B, C and the states, and so is each gradient except the gradients
// of the columns themselves. D x and the gate are not part of that sum: D x comes with the first columns.
void run_by_columns(const BwdInputs& bwd, Discretization method, const GradTensors& grads, int64_t most_bytes,
                    int64_t at_once) {
  constexpr Grad kSumsOverColumns[] = {kGradX, kGradDt, kGradLogDecay, kGradGain};
  const Inputs& in = bwd.in;
  const int64_t dstate = in.B.size(3);
  OptionalTensor grad_y = bwd.grad_out;
  if (is_present(in.z)) {
    PendingCopies copies;
    grad_y = gate(bwd, KernelInputs(in, method, copies), copies, grads);
  }
  for (int64_t column = 0; column < dstate; column += at_once) {
    const bool is_first = column == 0;
    BwdInputs ungated = bwd;
    ungated.grad_out = grad_y;
    ungated.in.z.reset();
    if (!is_first) ungated.in.D.reset();
    NeedsGrad& needs_grad = ungated.needs_grad;
    needs_grad[kGradZ] = false;
    needs_grad[kGradD] &= is_first;
    const bool needs_any = std::any_of(needs_grad.begin(), needs_grad.end(), [](bool needs) { return needs; });
    if (!needs_any && !is_present(bwd.out_products) && !is_present(bwd.grad_diagonal_gain)) continue;
    GradTensors targets = grads;
    for (const Grad grad : kSumsOverColumns) {
      if (needs_grad[grad] && !is_first) targets[grad] = empty_tensor_like(grads[grad]);
    }
    const auto place_more = [&](const OptionalTensor& result) {
      return is_present(result) && !is_first ? OptionalTensor(empty_tensor_like(*result)) : result;
    };
    ungated.out_products = place_more(bwd.out_products);
    ungated.grad_diagonal_gain = place_more(bwd.grad_diagonal_gain);
    Range range = range_of_span(in, 0, in.x.size(1));
    range.column = column;
    range.columns = std::min(at_once, dstate - column);
    const PartOfCall part = part_of(ungated, targets, range);
    run_in_spans(part.bwd, method, part.grads, most_bytes, /*adds_parameters=*/!is_first);
    for (const Grad grad : kSumsOverColumns) {
      if (needs_grad[grad] && !is_first) grads[grad].add_(targets[grad]);
    }
    const auto add_more = [&](const OptionalTensor& sum, const OptionalTensor& result) {
      if (is_present(sum) && !is_first) at::Tensor(*sum).add_(*result);
    };
    add_more(bwd.out_products, ungated.out_products);
    add_more(bwd.grad_diagonal_gain, ungated.grad_diagonal_gain);
  }
}

}  // namespace

int64_t backward_columns_at_once(const Inputs& in) {
  return std::min(in.B.size(3), backward_columns(in.x.scalar_type() == at::kFloat, max_shared_bytes(in.x)));
}

void launch_backward(const BwdInputs& bwd, Discretization method, const GradTensors& grads) {
  const int64_t columns = backward_columns_at_once(bwd.in), most_bytes = most_workspace_bytes(bwd.in);
  if (columns == bwd.in.B.size(3)) {
    run_in_spans(bwd, method, grads, most_bytes, /*adds_parameters=*/false);
  } else {
    run_by_columns(bwd, method, grads, most_bytes, columns);
  }
}

std::string describe_backward(const Inputs& in) {
  BwdInputs at_once;
  at_once.in = in;
  const int64_t columns = backward_columns_at_once(in), most_bytes = most_workspace_bytes(in);
  at_once.in.B = in.B.narrow(3, 0, columns);
  int spans = 0, sub_batches = 0;
  for_each_span(at_once.in, most_bytes, [&](int64_t begin, int64_t steps) {
    ++spans;
    const Inputs of_span = part_of(at_once, {}, range_of_span(at_once.in, begin, steps)).bwd.in;
    for_each_sub_batch(of_span, most_bytes, [&](const Range&) { ++sub_batches; });
  });
  return c10::str(describe_kernel(in.x, choose_products(in.x, in.reverse)), " columns=", columns, " spans=", spans,
                  " sub_batches=", sub_batches);
}

}  // namespace ssm_kernels::ssd

#endif
