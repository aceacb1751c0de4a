#ifdef SSM_KERNELS_WITH_CUDA

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <limits>

#include "common/integers.h"
#include "cuda/device.h"
#include "delta_rule/aten/gates.h"
#include "delta_rule/cuda/bwd_cuda.h"
#include "delta_rule/cuda/bwd_launches.h"
#include "delta_rule/cuda/bwd_pieces.h"
#include "delta_rule/cuda/fwd_cuda.h"
#include "delta_rule/cuda/kda.h"
#include "delta_rule/cuda/launch.h"
#include "delta_rule/cuda/plain_calls.h"
#include "delta_rule/cuda/segments.h"
#include "delta_rule/cuda/sm80.h"
#include "delta_rule/cuda/step_factors.h"
#include "delta_rule/cuda/tensors.h"
#include "torch/allocation.h"
#include "torch/checks.h"
#include "torch/debug_options.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::delta_rule {
namespace {

class Backward {
 public:
  // `resets` are those of resets_of(), of a call without seq_idx. With reverses_rows the gradients of q, k and v have the steps
  // in the opposite order.
  Backward(const BwdInputs& bwd, const GradTensors& grads, bool reverses_rows, const at::Tensor& resets = {})
      : bwd_(bwd),
        in_(bwd.in),
        grads_(grads),
        heads_per_key_head_(in_.v.size(2) / in_.q.size(2)),
        is_sm80_(fwd_kernels_for(in_) == Kernels::kSm80),
        reverses_rows_(reverses_rows) {
    has_fp32_rows_ = applies_norms() || has_parts_of_key_heads() || heads_at_once() < heads_per_key_head_;
    of_.resets = resets;
    load();
    allocate();
  }

  void run() {
    for_each_range([&](const Range& range) { run_part(range); });
    finish();
  }

 private:
  bool needs(Grad grad) const { return grads_[grad].numel() > 0; }
  bool needs_gate() const { return needs(kGradG) || needs(kGradALog) || needs(kGradDtBias); }
  // Whether the host applies the norms to gradients: the last kernel has some columns of wide rows at a time.
  bool applies_norms() const { return in_.qk_l2norm && (is_wide() || is_sm80_ || has_normalized_rows()); }
  bool has_normalized_rows() const { return delta_rule::has_normalized_rows(in_); }
  // Whether the kernels write the gradient of beta in the inputs' type.
  bool rounds_grad_beta() const {
    return needs(kGradBeta) && !in_.beta_sigmoid && !has_channels() && !is_sm80_ &&
           grads_[kGradBeta].scalar_type() == in_.q.scalar_type();
  }
  bool is_packed() const { return is_present(in_.cu_seqlens); }
  bool has_channels() const { return in_.has_gate_per_channel(); }
  // Whether the kernels write gradients of q and k of value heads, which the host adds up.
  bool takes_value_heads() const { return has_channels() || is_sm80_; }
  bool has_parts_of_key_heads() const { return takes_value_heads() && heads_per_key_head_ > 1; }
  at::TensorOptions fp32() const { return in_.q.options().dtype(at::kFloat); }
  int64_t seqlen() const { return in_.v.size(1); }  // in updates
  at::Tensor zeros_like_out() const {
    return at::zeros({in_.q.size(0), in_.q.size(1), in_.v.size(2), in_.v.size(3)}, in_.v.options());
  }

  // The kernel of the states with gates of a head writes the gradients of v by TMA, which has no opposite order: finish() has.
  bool reverses_values() const { return reverses_rows_ && (has_channels() || is_sm80_); }
  // Whether the last kernel writes gradients of q and k in the opposite order; finish_key_heads() does so for fp32 rows.
  bool reverses_key_rows() const { return reverses_rows_ && !has_fp32_rows_; }

  void load() {
    const auto vectors = [&](const at::Tensor& rows, NormalizedRows& of) {
      if (!has_normalized_rows()) return as_vectors(rows);
      of = normalized(in_, rows.to(at::kFloat));
      return as_vectors(of.rows.to(rows.scalar_type()));
    };
    of_.q = vectors(in_.q, of_.normalized_q);
    of_.k = vectors(in_.k, of_.normalized_k);
    of_.v = as_vectors(in_.v);
    of_.grad_out = as_vectors(is_present(bwd_.grad_out) ? *bwd_.grad_out : zeros_like_out());
    const StepFactors factors = step_factors(in_, of_.q, of_.k, /*keeps_beta=*/!is_sm80_);
    of_.log_decay = factors.log_decay;
    of_.beta = factors.beta;
    of_.row_factors = factors.rows;
    if (is_present(in_.initial_states)) of_.initial_states = as_states(*in_.initial_states);
    if (is_present(bwd_.grad_final_states)) of_.grad_final_states = as_states(*bwd_.grad_final_states);
    if (is_packed()) of_.cu_seqlens = in_.cu_seqlens->to(at::kLong).contiguous();
    if (is_present(in_.seq_idx)) of_.resets = resets_of(in_);
  }

  // The tensor that the kernels write: the gradient itself if its rows are whole vectors, else one with padded rows, which
  // finish() copies.
  at::Tensor place(Grad grad, const at::Tensor& input) const {
    return needs(grad) && are_vectors(grads_[grad]) ? grads_[grad] : empty_vectors(input);
  }
  void allocate() {
    if (!has_fp32_rows_) {
      of_.grad_q = place(kGradQ, in_.q);
      of_.grad_k = place(kGradK, in_.k);
    }
    of_.grad_v = reverses_rows_ && !reverses_values() ? empty_vectors(in_.v) : place(kGradV, in_.v);
    // The gradient itself if the kernels can write it, else what finish_gate_grads() makes it of.
    const auto of_steps = [&](Grad grad, bool is_argument, int64_t steps) {
      if (is_argument && needs(grad) && grads_[grad].scalar_type() == at::kFloat) return grads_[grad];
      return empty_tensor({in_.v.size(0), steps, in_.v.size(2)}, fp32());
    };
    if (has_channels()) {
      allocate_channels();
    } else {
      if (needs_gate()) of_.grad_log_decay = of_steps(kGradG, !in_.has_raw_gate(), in_.q.size(1));
      if (rounds_grad_beta()) {
        of_.grad_beta = grads_[kGradBeta];
      } else if (needs(kGradBeta)) {
        of_.grad_beta = of_steps(kGradBeta, !in_.beta_sigmoid, seqlen());
      }
    }
    if (needs(kGradInitialStates)) {
      const at::Tensor& target = grads_[kGradInitialStates];
      of_.grad_initial_states =
          empty_tensor({target.size(0), target.size(1), target.size(2), round_up(in_.q.size(3), 2)}, fp32());
    }
  }

  // The kernels write the gradients of the arguments g and beta. Rows of channels are contiguous.
  void allocate_channels() {
    if (needs(kGradG)) {
      const at::Tensor& grad = grads_[kGradG];
      of_.grad_log_decay =
          grad.stride(3) == 1 ? grad : empty_tensor({grad.size(0), grad.size(1), grad.size(2), grad.size(3)}, grad.options());
    }
    if (needs(kGradBeta)) of_.grad_beta = grads_[kGradBeta];
  }

  int64_t chunks_of(int64_t entries) const {
    return chunk_numbers(is_packed() ? in_.cu_seqlens->size(0) - 1 : entries, seqlen(), is_packed());
  }
  bool is_wide() const { return delta_rule::is_wide(in_.q.size(3)); }
  int64_t matrices_bytes() const {
    if (is_sm80_) return sm80_matrices_bytes(in_.q.element_size());
    if (has_channels()) return kKdaBwdChunkBytes;
    return is_wide() ? kWideMatricesBytes : kBwdMatricesBytes;
  }
  int64_t states_bytes() const {
    if (is_sm80_) {
      return row_blocks(in_.v.size(3)) * sm80_states_bytes(state_tile_columns(in_.q.size(3)), in_.q.element_size());
    }
    const int64_t columns = has_channels() ? kStateColumns : tile_columns(in_.q.size(3));
    return row_blocks(in_.v.size(3)) * (bwd_states_bytes(columns) + (is_wide() ? kBwdStatePartBytes : 0));
  }

  // The most value heads of a row whose workspace takes at most the bytes of the debug option.
  int64_t most_heads() const {
    const int64_t rows_bytes = 2 * kChunk * round_up(in_.q.size(3), kRowElements) * int64_t(sizeof(float)),
                  bytes = chunks_of(1) *
                          (matrices_bytes() + states_bytes() + (applies_norms() || has_parts_of_key_heads() ? rows_bytes : 0));
    return debug_option(DebugOption::kSsdWorkspaceBytes) / bytes;
  }
  // How many of `count` a part takes. The smallest part is one value head of a row, whatever it takes.
  int64_t at_once(int64_t count, int64_t heads_of_each) const {
    return ceil_div(count, ceil_div(count, std::max<int64_t>(1, most_heads() / heads_of_each)));
  }
  int64_t heads_at_once() const { return at_once(heads_per_key_head_, 1); }

  // The waves of blocks that compute the states, of all parts of so many rows and key heads each.
  int64_t waves(int64_t entries, int64_t key_heads) const {
    const int64_t parts = ceil_div(in_.q.size(0), entries) * ceil_div(in_.q.size(2), key_heads),
                  pairs_of_row_blocks = ceil_div(row_blocks(in_.v.size(3)), int64_t{kWarpgroups}),
                  blocks = kDirections * entries * key_heads * heads_per_key_head_ * pairs_of_row_blocks;
    return parts * ceil_div(blocks, int64_t{cuda::multiprocessor_count(in_.q.get_device())});
  }

  // Calls body(range) for the parts of the call.
  template <typename Body>
  void for_each_range(const Body& body) const {
    const int64_t batch = in_.q.size(0), heads = in_.v.size(2), key_heads = in_.q.size(2);
    int64_t entries = at_once(batch, heads), key_heads_at_once = at_once(key_heads, heads_per_key_head_);
    const int64_t heads_at_once = this->heads_at_once();
    // Some heads of all rows instead of all heads of some rows, if the blocks of the states then come in fewer waves.
    const int64_t of_all_rows = is_wide() ? std::min(key_heads, most_heads() / (batch * heads_per_key_head_)) : 0;
    for (int64_t count = of_all_rows; count > 0; --count) {
      if (waves(batch, count) >= waves(entries, key_heads_at_once)) continue;
      entries = batch;
      key_heads_at_once = count;
    }
    for (int64_t entry = 0; entry < batch; entry += entries) {
      for (int64_t key_head = 0; key_head < key_heads; key_head += key_heads_at_once) {
        const int64_t count = std::min(key_heads_at_once, key_heads - key_head);
        for (int64_t head = 0; head < heads_per_key_head_; head += heads_at_once) {
          const int64_t of_each = std::min(heads_at_once, heads_per_key_head_ - head);
          body(Range{entry, std::min(entries, batch - entry), key_head * heads_per_key_head_ + head, count * of_each, key_head,
                     count, head == 0, head + of_each == heads_per_key_head_});
        }
      }
    }
  }

  // The chunks of a segment of a part's sequences, 0 if they are not cut (segments.h).
  int64_t chunks_of_segment(const Range& range) const {
    if (of_.resets.defined() || in_.q.size(3) % 4 != 0) return 0;
    if (reverses_rows_ && range.entries > 1) return 0;  // not the order of all rows as one
    for (const at::Tensor* tensor : {&of_.q, &of_.k, &of_.v, &of_.grad_out, &of_.log_decay, &of_.beta, &of_.row_factors,
                                     &of_.grad_q, &of_.grad_k, &of_.grad_v, &of_.grad_log_decay, &of_.grad_beta}) {
      if (tensor->defined() && !is_one_row(*tensor)) return 0;
    }
    const SegmentTimes times = is_sm80_    ? sm80_times(in_.q.size(3), in_.q.element_size(), /*is_backward=*/true)
                               : is_wide() ? kBwdWideTimes
                                           : kBwdTimes;
    const int64_t sequences = is_packed() ? in_.cu_seqlens->size(0) - 1 : range.entries;
    if (sequences == 0) return 0;
    // The kernels with mma.sync take one direction in time after the other.
    const SegmentedWork work{(is_sm80_ ? 1 : kDirections) * sequences * range.heads,
                             ceil_div(seqlen(), is_packed() ? sequences * kChunk : int64_t{kChunk}), is_packed(), in_.v.size(3),
                             in_.q.size(3)};
    return delta_rule::chunks_of_segment(work, times, cuda::multiprocessor_count(in_.q.get_device()));
  }

  void run_part(const Range& range) {
    DeltaRuleBwdParams params;
    const int64_t seqlen = this->seqlen(), chunks_of_each = chunks_of_segment(range);
    const bool has_segments = chunks_of_each > 0;
    // Segments are packed sequences of one row.
    const auto rows = [&](const at::Tensor& tensor) { return has_segments ? as_one_row(tensor) : tensor; };
    Segments segments;
    if (has_segments) segments = cut_sequences(of_.cu_seqlens, range.entries, seqlen, chunks_of_each, in_.q.options());
    const at::Tensor cu_seqlens = has_segments ? segments.bounds : of_.cu_seqlens;
    params.batch = cu_seqlens.defined() ? cu_seqlens.size(0) - 1 : range.entries;
    params.seqlen = has_segments ? range.entries * seqlen : seqlen;
    params.heads = params.groups = range.heads;
    params.headdim = static_cast<int>(in_.v.size(3));
    params.dstate = static_cast<int>(in_.q.size(3));
    params.state_columns = static_cast<int>(round_up(in_.q.size(3), 2));
    params.value_heads_per_key_head = static_cast<int>(range.heads / range.key_heads);
    params.scale = static_cast<float>(scale_of(in_));
    params.log2_updates = log2_updates(in_);
    const auto of_heads = [&](const at::Tensor& tensor) { return rows(range.of_heads(tensor)); };
    const auto of_key_heads = [&](const at::Tensor& tensor) { return rows(range.of_key_heads(tensor)); };
    const auto of_steps = [&](const at::Tensor& tensor) {
      const at::Tensor heads = of_heads(tensor);
      return view_of(heads.dim() == 4 ? heads : heads.unsqueeze(3));
    };
    if (of_.log_decay.defined()) params.log_decay = of_steps(of_.log_decay);
    params.beta = of_steps(of_.beta);
    params.beta_is_fp32 = of_.beta.scalar_type() == at::kFloat;
    if (of_.row_factors.defined()) params.row_factors = view_of(of_key_heads(of_.row_factors));
    if (cu_seqlens.defined()) params.cu_seqlens = cu_seqlens.const_data_ptr<int64_t>();
    if (of_.resets.defined()) params.resets = static_cast<const uint8_t*>(range.of_entries(of_.resets).const_data_ptr());
    if (!is_sm80_) {
      const int64_t updates = in_.num_householder;
      describe_tiles(params.q_descriptor, of_key_heads(of_.q), kChunk / updates);
      describe_tiles(params.k_descriptor, of_key_heads(of_.k));
      describe_tiles(params.v_descriptor, of_heads(of_.v));
      describe_tiles(params.grad_out_descriptor, of_heads(of_.grad_out), kChunk / updates);
      describe_tiles(params.grad_v_descriptor, of_heads(of_.grad_v));
      if (updates > 1) {
        describe_update_tiles(params.q_of_updates, of_key_heads(of_.q), updates);
        describe_update_tiles(params.grad_out_of_updates, of_heads(of_.grad_out), updates);
      }
    }

    params.states_stride_entry = in_.v.size(2) * in_.v.size(3) * params.state_columns;
    const auto of_states = [&](const at::Tensor& states) -> float* {
      if (!states.defined()) return nullptr;
      const int64_t entry = is_packed() ? 0 : range.entry;
      return static_cast<float*>(const_cast<void*>(states.const_data_ptr())) + entry * states.stride(0) +
             range.head * states.stride(1);
    };
    params.initial_states = of_states(of_.initial_states);
    params.grad_final_states = of_states(of_.grad_final_states);
    params.grad_initial_states = of_states(of_.grad_initial_states);

    params.grad_v = rows_view(of_heads(of_.grad_v), reverses_values());
    if (of_.grad_log_decay.defined()) params.grad_log_decay = of_steps(of_.grad_log_decay);
    if (of_.grad_beta.defined()) params.grad_beta = of_steps(of_.grad_beta);
    params.rounds_grad_beta = rounds_grad_beta();
    at::Tensor parts_q, parts_k, grad_q, grad_k;
    params.has_fp32_rows = has_fp32_rows_;
    if (has_fp32_rows_) {
      const int64_t heads = takes_value_heads() ? range.heads : range.key_heads,
                    columns = round_up(in_.q.size(3), kRowElements);
      parts_q = empty_tensor({range.entries, in_.q.size(1), heads, columns}, fp32());
      parts_k = empty_tensor({range.entries, seqlen, heads, columns}, fp32());
      grad_q = rows(parts_q);
      grad_k = rows(parts_k);
    } else {
      grad_q = of_key_heads(of_.grad_q);
      grad_k = of_key_heads(of_.grad_k);
    }
    params.grad_q = rows_view(grad_q, reverses_key_rows());
    params.grad_k = rows_view(grad_k, reverses_key_rows());
    if (!has_fp32_rows_ && !has_channels() && !is_sm80_) {
      describe_tiles(params.grad_q_descriptor, grad_q);
      describe_tiles(params.grad_k_descriptor, grad_k);
    }

    const int64_t chunks = chunk_numbers(params.batch, params.seqlen, cu_seqlens.defined()) * range.heads;
    TORCH_CHECK_VALUE(chunks <= std::numeric_limits<int32_t>::max(),
                      "delta_rule_scan: expected fewer than 2^31 chunks of all heads, got ", chunks);
    const at::TensorOptions bytes = in_.q.options().dtype(at::kByte);
    const at::Tensor matrices = empty_tensor({chunks, matrices_bytes()}, bytes);
    params.matrices = matrices.data_ptr();
    at::Tensor sums;
    if (params.value_heads_per_key_head > 1 && !takes_value_heads()) {
      const int multiprocessors = cuda::multiprocessor_count(in_.q.get_device());
      sums = empty_tensor({multiprocessors, kWarpgroups, kChunk, tile_columns(in_.q.size(3))}, fp32());
      params.sums = sums.data_ptr<float>();
    }
    StatesOfSegments of_segments;
    if (has_segments) of_segments = start_segments(range, segments, params);
    const at::Tensor states = empty_tensor({chunks, states_bytes()}, bytes);
    params.states = states.data_ptr();
    launch(params, range, {grad_q, grad_k, reverses_key_rows()}, has_segments);
    if (of_segments.grad_starts.defined()) {
      states_of_range(range, of_.grad_initial_states)
          .copy_(of_segments.grad_starts.index_select(0, segments.first.narrow(0, 0, segments.sequences)));
    }
    if (!has_fp32_rows_) return;
    if (takes_value_heads()) {
      const auto sum_of_value_heads = [&](const at::Tensor& parts) {
        return parts.unflatten(2, {range.key_heads, range.heads / range.key_heads}).sum(3);
      };
      parts_q = sum_of_value_heads(parts_q);
      parts_k = sum_of_value_heads(parts_k);
    }
    finish_key_heads(range, kGradQ, parts_q, of_.normalized_q, sum_of_q_);
    finish_key_heads(range, kGradK, parts_k, of_.normalized_k, sum_of_k_);
  }

  // Queues the kernels of gates of a channel of the key.
  void launch_channels(const DeltaRuleBwdParams& params, const Range& range, bool has_matrices) {
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    const WorkPartition partition = bwd_partition_of(params);
    KdaBwdParams of_channels;
    static_cast<DeltaRuleBwdParams&>(of_channels) = params;
    const GateParameters parameters(in_);
    of_channels.arguments = kda_arguments(in_, parameters);
    DeltaRuleGateOptions& options = of_channels.arguments.options;
    if (options.A_log != nullptr) options.A_log += range.head;
    if (options.dt_bias != nullptr) options.dt_bias += range.head * in_.q.size(3);
    of_channels.arguments.q = view_of(rows_for(params, range.of_key_heads(of_.q)));
    of_channels.arguments.k = view_of(rows_for(params, range.of_key_heads(of_.k)));
    at::Tensor sums;
    if ((needs(kGradALog) || needs(kGradDtBias)) && params.states != nullptr) {
      const bool are_packed = params.cu_seqlens != nullptr;
      const int64_t numbers = chunk_numbers(params.batch, params.seqlen, are_packed);
      sums = empty_tensor({numbers, range.heads, 2, in_.q.size(3)}, fp32());
      if (are_packed) sums.zero_();  // some chunk numbers belong to no sequence
      of_channels.gate_sums = sums.data_ptr<float>();
    }
    C10_CUDA_CHECK(in_.q.scalar_type() == at::kHalf
                       ? launch_kda_bwd<__half>(of_channels, partition, has_matrices, stream)
                       : launch_kda_bwd<__nv_bfloat16>(of_channels, partition, has_matrices, stream));
    if (sums.defined()) add_gate_sums(range, sums.sum(0, false, at::kDouble));
  }

  void add_gate_sums(const Range& range, const at::Tensor& sums) {
    if (!gate_sums_.defined() && range.heads == in_.v.size(2)) {
      gate_sums_ = sums;
      return;
    }
    if (!gate_sums_.defined()) gate_sums_ = at::zeros({in_.v.size(2), 2, in_.q.size(3)}, sums.options());
    gate_sums_.narrow(0, range.head, range.heads).add_(sums);
  }

  // Queues backward's kernels: with has_matrices not the first, and without a workspace of states not the last.
  void launch(const DeltaRuleBwdParams& params, const Range& range, const KeyGrads& grads, bool has_matrices) {
    if (is_sm80_) return launch_bwd_sm80(in_, of_, params, range, has_matrices);
    if (is_wide()) return launch_bwd_wide(in_, of_, params, range, grads, has_matrices);
    if (has_channels()) return launch_channels(params, range, has_matrices);
    const WorkPartition partition = bwd_partition_of(params);
    const int multiprocessors = cuda::multiprocessor_count(in_.q.get_device());
    const auto launch_kernels =
        in_.q.scalar_type() == at::kHalf ? launch_delta_rule_bwd<__half> : launch_delta_rule_bwd<__nv_bfloat16>;
    C10_CUDA_CHECK(launch_kernels(params, partition, has_matrices, multiprocessors, c10::cuda::getCurrentCUDAStream()));
  }

  // (places, heads, value_dim, key_dim): the states before all segments, the gradients of those after, and of those before if
  // needed.
  struct StatesOfSegments {
    at::Tensor starts, grad_ends, grad_starts;
  };

  // The states of a part.
  at::Tensor states_of_range(const Range& range, const at::Tensor& states) const {
    if (!states.defined()) return states;
    return (is_packed() ? states : range.of_entries(states)).narrow(1, range.head, range.heads);
  }

  // Queues the kernels that compute the states before and the gradients of those after all segments of a part, and makes them
  // the initial states and the gradients of final states of params.
  StatesOfSegments start_segments(const Range& range, const Segments& segments, DeltaRuleBwdParams& params) {
    const int64_t value_dim = in_.v.size(3), key_dim = in_.q.size(3);
    const at::Tensor states = states_of_range(range, of_.initial_states), grads = states_of_range(range, of_.grad_final_states),
                     starts = map_starts(segments, range.heads, value_dim, key_dim, states, /*is_reverse=*/false, fp32()),
                     grad_ends = map_starts(segments, range.heads, value_dim, key_dim, grads, /*is_reverse=*/true, fp32()),
                     maps = empty_tensor_like(starts), maps_of_grads = empty_tensor_like(starts);
    DeltaRuleBwdParams of_maps = params;
    describe_maps(of_maps, segments, value_dim, starts, maps);
    of_maps.grad_final_states = grad_ends.const_data_ptr<float>();
    of_maps.grad_initial_states = maps_of_grads.data_ptr<float>();
    launch(of_maps, range, /*grads=*/{}, /*has_matrices=*/false);
    const auto fold = [&](const at::Tensor& of, const at::Tensor& given, bool is_reverse) {
      at::Tensor result = empty_tensor({segments.places, range.heads, value_dim, key_dim}, fp32());
      fold_maps(segments, of, given, is_reverse, result);
      return result;
    };
    StatesOfSegments result{fold(maps, states, /*is_reverse=*/false), fold(maps_of_grads, grads, /*is_reverse=*/true), {}};
    params.initial_states = result.starts.const_data_ptr<float>();
    params.grad_final_states = result.grad_ends.const_data_ptr<float>();
    params.states_stride_entry = result.starts.stride(0);
    if (params.grad_initial_states != nullptr) {
      result.grad_starts = empty_tensor_like(result.starts);
      params.grad_initial_states = result.grad_starts.data_ptr<float>();
    }
    return result;
  }

  // Adds the parts of a key head whose value heads are in several ranges, and writes the gradient with the last of them.
  void finish_key_heads(const Range& range, Grad grad, const at::Tensor& parts, const NormalizedRows& rows, at::Tensor& sum) {
    if (!needs(grad)) return;
    const at::Tensor of_part = parts.narrow(3, 0, in_.q.size(3));
    sum = range.begins_key_head ? of_part : sum.add_(of_part);
    if (!range.ends_key_head) return;
    if (of_.row_factors.defined()) return apply_norms(range, grad, sum);
    NormalizedRows of_range;
    if (has_normalized_rows()) of_range = {range.of_key_heads(rows.rows), range.of_key_heads(rows.factor)};
    const at::Tensor result = normalized_adjoint(of_range, sum);
    range.of_key_heads(grads_[grad]).copy_(reverses_rows_ ? result.flip(1) : result);
    sum.reset();
  }

  // Writes the gradient of q or k, given the sums that the kernels write with row_factors.
  void apply_norms(const Range& range, Grad grad, at::Tensor& sums) {
    const at::Tensor target = range.of_key_heads(grads_[grad]), result = are_vectors(target) ? target : empty_vectors(target);
    DeltaRuleRowGradsParams params;
    params.batch = target.size(0);
    params.seqlen = target.size(1);
    params.heads = target.size(2);
    params.key_dim = static_cast<int>(target.size(3));
    params.are_queries = grad == kGradQ;
    params.rows = view_of(range.of_key_heads(params.are_queries ? of_.q : of_.k));
    params.sums = view_of(sums);
    params.grad = rows_view(result, reverses_rows_);
    // The factor of a query is in the row of the last of its step's updates.
    const int64_t updates = params.are_queries ? in_.num_householder : 1;
    params.row_factors = view_of(range.of_key_heads(of_.row_factors).slice(1, updates - 1, std::nullopt, updates));
    C10_CUDA_CHECK(launch_delta_rule_row_grads<__nv_bfloat16>(params, c10::cuda::getCurrentCUDAStream()));
    if (!result.is_same(target)) target.copy_(result.narrow(3, 0, target.size(3)));
    sums.reset();
  }

  void finish() {
    const auto write = [&](Grad grad, const at::Tensor& written, bool reverses = false) {
      if (!needs(grad) || !written.defined() || written.is_same(grads_[grad])) return;
      const at::Tensor result = written.narrow(-1, 0, grads_[grad].size(-1));
      grads_[grad].copy_(reverses ? result.flip(1) : result);
    };
    write(kGradQ, of_.grad_q);
    write(kGradK, of_.grad_k);
    write(kGradV, of_.grad_v, reverses_rows_ && !reverses_values());
    write(kGradInitialStates, of_.grad_initial_states);
    if (!has_channels()) return finish_gate_grads(in_, of_.grad_log_decay, of_.grad_beta, grads_);
    write(kGradG, of_.grad_log_decay);
    if (needs(kGradALog)) grads_[kGradALog].copy_(gate_sums_.select(1, 0).sum(1));
    if (needs(kGradDtBias)) grads_[kGradDtBias].copy_(gate_sums_.select(1, 1));
  }

  const BwdInputs& bwd_;
  const Inputs& in_;
  const GradTensors& grads_;
  const int64_t heads_per_key_head_;
  const bool is_sm80_;
  const bool reverses_rows_;
  bool has_fp32_rows_ = false;
  GradOperands of_;
  at::Tensor gate_sums_;            // with gates of channels, of A_log and dt_bias, (value_heads, 2, key_dim), double
  at::Tensor sum_of_q_, sum_of_k_;  // gradients of a key head's rows, summed over the value heads of earlier parts
};

}  // namespace

bool have_bwd_kernels_for(const BwdInputs& bwd) {
  const Inputs& in = bwd.in;
  const Kernels kernels = fwd_kernels_for(in);
  if (kernels != Kernels::kSm80) return kernels != Kernels::kNone;
  return sm80_gradients_bytes(in.q.size(3), in.q.element_size()) <= sm80_shared_bytes(in);
}

GradTensors bwd_cuda(const BwdInputs& bwd) {
  check_inputs(bwd.in);
  const GradTensors grads = allocate_bwd(bwd);
  const c10::cuda::CUDAGuard guard(bwd.in.q.device());
  const auto run = [&](const BwdInputs& plain, const GradTensors& plain_grads) {
    if (plain.in.states_at.empty()) return Backward(plain, plain_grads, reverses_rows(bwd.in)).run();
    bwd_of_pieces(plain, plain_grads, [](const BwdInputs& piece, const GradTensors& of_piece, const at::Tensor& resets) {
      Backward(piece, of_piece, /*reverses_rows=*/false, resets).run();
    });
  };
  if (is_plain(bwd.in)) {
    run(bwd, grads);
    return grads;
  }
  const BwdInputs plain = plain_call(bwd);
  const GradTensors plain_grads = allocate_plain(bwd, plain, grads);
  run(plain, plain_grads);
  write_grads(bwd, plain_grads, grads);
  return grads;
}

}  // namespace ssm_kernels::delta_rule

#endif
