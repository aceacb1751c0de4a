#include "delta_rule/aten/layout.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "torch/checks.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::delta_rule {
namespace {

// Updates of a chunk. Its matrices are quadratic in their number, and each chunk has a state.
constexpr int64_t kChunkUpdates = 64;

int64_t choose_chunk_length(const Inputs& in) { return std::max<int64_t>(1, kChunkUpdates / in.num_householder); }

// Approximate bytes of the temporaries of a chunk of one row; zero without heads.
int64_t bytes_per_chunk(const Inputs& in) {
  const int64_t key_dim = in.q.size(3), value_dim = in.v.size(-1), steps = choose_chunk_length(in) * in.num_householder;
  const int64_t per_head = 2 * key_dim * value_dim + 6 * steps * steps + 6 * steps * (key_dim + value_dim);
  const int64_t bytes = accumulate_type(in.q.scalar_type()) == at::kDouble ? 8 : 4;
  return in.v.size(-2) * per_head * bytes;
}

}  // namespace

Inputs by_update(const Inputs& call) {
  Inputs in = call;
  const std::vector<int64_t> steps = {call.q.size(1), call.num_householder};
  for (at::Tensor* tensor : {&in.k, &in.v, &in.beta}) *tensor = tensor->unflatten(1, steps);
  return in;
}

at::Tensor zero_steps_where_(at::Tensor values, const at::Tensor& mask) {
  if (!mask.defined()) return values;
  return values.masked_fill_(mask.unsqueeze(2).unsqueeze(-1), 0);
}

Scan::Scan(const Inputs& in)
    : ChunkRuns(in.q, choose_chunk_length(in), bytes_per_chunk(in), in.reverse),
      in(in),
      options(in.q.options().dtype(accumulate_type(in.q.scalar_type()))),
      updates(in.num_householder),
      heads(in.q.size(2)),
      value_heads(in.v.size(3)),
      key_dim(in.q.size(3)),
      value_dim(in.v.size(4)) {
  if (is_present(in.seq_idx)) starts_ = sequence_starts(in.reverse ? in.seq_idx->flip(1) : *in.seq_idx);
}

at::Tensor Scan::by_head(const at::Tensor& argument, const Run& run, bool has_updates) const {
  const at::Tensor by_step = read(argument, run);
  if (!has_updates) return by_step.transpose(2, 3);
  // Steps and their updates are one axis, after the heads.
  const at::Tensor moved = by_step.movedim(4, 2);
  return moved.flatten(3, 4);
}

// A copy on the CPU even of a contiguous tensor: MKL sums in another order for another alignment.
at::Tensor Scan::copied(const at::Tensor& tensor) const {
  return tensor.to(options.dtype().toScalarType(), /*non_blocking=*/false, /*copy=*/in.q.is_cpu(),
                   at::MemoryFormat::Contiguous);
}

void Scan::write_by_head(const at::Tensor& result, const Run& run, const at::Tensor& values, bool has_updates) const {
  if (has_updates) {
    write(result, run, values.unflatten(3, {run.length, updates}).movedim(2, 4));
  } else {
    write(result, run, values.transpose(2, 3));
  }
}

Chunks Scan::load(const Run& run) const {
  Chunks chunks;
  chunks.run = run;
  chunks.q = normalized(in, copied(by_head(in.q, run, false)));
  chunks.k = normalized(in, copied(by_head(in.k, run, true)));
  chunks.vectors = {chunks.q.rows * scale_of(in), chunks.k.rows, updates, value_heads};
  chunks.v = copied(by_head(in.v, run, true));
  chunks.raw_beta = by_head(in.beta, run, true);
  chunks.beta = betas(in, chunks.raw_beta).contiguous().unsqueeze(-1);
  if (starts_.defined()) {
    const at::Tensor count = run_of(starts_, run).cumsum(2);
    chunks.sequence = updates == 1 ? count : count.repeat_interleave(updates, 2);
    const at::Tensor last = chunks.sequence.narrow(2, chunks.sequence.size(2) - 1, 1);
    chunks.is_after_beginning = chunks.sequence.ne(0);
    chunks.is_before_beginning = chunks.sequence.ne(last);
    chunks.is_cut = last.ne(0);
  }
  at::Tensor log_decay;  // of each step
  if (is_present(in.g)) {
    chunks.raw_g = read(*in.g, run);
    log_decay = log_decays(in, chunks.raw_g).transpose(2, 3);
  } else if (starts_.defined()) {
    log_decay = at::zeros({run.chunks, run.rows, value_heads, run.length}, options.dtype(at::kDouble));
  }
  if (log_decay.defined() && updates > 1) {
    // Only the first update of a step decays.
    std::vector<int64_t> padding(2 * (log_decay.dim() - 3));
    padding[padding.size() - 1] = updates - 1;
    log_decay = at::constant_pad_nd(log_decay.unsqueeze(4), padding).flatten(3, 4);
  }
  chunks.log_decay = log_decay;
  return chunks;
}

at::Tensor Scan::load_states(const OptionalTensor& states, const Part& part) const {
  if (!is_present(states)) return at::zeros({part.rows, value_heads, value_dim, key_dim}, options);
  return states->narrow(0, part.row, part.rows).clone(at::MemoryFormat::Contiguous);
}

}  // namespace ssm_kernels::delta_rule
