#include "ssd/aten/layout.h"

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "common/integers.h"
#include "torch/allocation.h"
#include "torch/checks.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::ssd {
namespace {

constexpr int64_t kDefaultChunkLength = 64, kMaxChunkLength = 256;

// Steps of a block of cumsum_of_steps.
constexpr int64_t kSumBlock = 128;

at::Tensor contiguous_product(const at::Tensor& a, const at::Tensor& b) {
  at::Tensor result = empty_tensor(c10::fromIntArrayRefSlow(at::infer_size(a.sizes(), b.sizes())), b.options());
  return at::mul_out(result, a, b);
}

int64_t count_ranks(const Inputs& in) { return in.ranks == nullptr ? 1 : in.ranks->count; }

// The steps of a chunk. Its matrices are quadratic in its length, and each chunk has a state. On a CPU the two cost about the
// same where the length is the root of the state's elements. With ranks its matrices have a row for each sample.
int64_t choose_chunk_length(const Inputs& in) {
  int64_t by_default = kDefaultChunkLength, most = kMaxChunkLength;
  if (in.x.is_cpu()) {
    const int64_t state_elements = in.x.size(3) * in.B.size(-1);
    by_default = 16;
    while (by_default < 128 && 4 * by_default * by_default <= state_elements) by_default *= 2;
    most = std::max(by_default, kDefaultChunkLength);
  }
  const int64_t ranks = count_ranks(in), length = in.chunk_size.has_value() ? in.chunk_size->expect_int() : by_default / ranks;
  return std::max<int64_t>(std::min(length, most / ranks), 1);
}

// Approximate bytes of the temporaries of a chunk of one row; zero without heads.
int64_t bytes_per_chunk(const Inputs& in) {
  const int64_t headdim = in.x.size(3), length = choose_chunk_length(in) * count_ranks(in);
  const int64_t per_head = 2 * headdim * in.B.size(-1) + 4 * length * length + 8 * length * headdim;
  return in.x.size(2) * per_head * static_cast<int64_t>(wide_options(in.x).dtype().itemsize());
}

}  // namespace

// PyTorch's cumsum over an axis that is not the innermost has a thread of a GPU for each column. A long run has few columns:
// its sums are those of blocks of steps, all blocks at once, plus the sums of the blocks before.
at::Tensor cumsum_of_steps(const at::Tensor& values) {
  const int64_t steps = values.size(2);
  if (steps <= 2 * kSumBlock) return values.cumsum(2);
  std::vector<int64_t> padding(2 * (values.dim() - 2));
  padding.back() = round_up(steps, kSumBlock) - steps;
  const at::Tensor sums = at::constant_pad_nd(values, padding).unflatten(2, {-1, kSumBlock}).cumsum(3);
  const at::Tensor of_blocks = sums.select(3, kSumBlock - 1).cumsum(2);
  sums.narrow(2, 1, sums.size(2) - 1).add_(of_blocks.narrow(2, 0, of_blocks.size(2) - 1).unsqueeze(3));
  return sums.flatten(2, 3).narrow(2, 0, steps);
}

Scan::Scan(const Inputs& in, Discretization method)
    : ChunkRuns(in.x, choose_chunk_length(in), bytes_per_chunk(in), in.reverse),
      in(in),
      method(method),
      options(wide_options(in.x)),
      heads(in.x.size(2)),
      headdim(in.x.size(3)),
      groups(in.B.size(-2)),
      dstate(in.B.size(-1)),
      heads_per_group(heads / groups),
      ranks(count_ranks(in)) {
  if (is_present(in.seq_idx)) starts_ = sequence_starts(in.reverse ? in.seq_idx->flip(1) : *in.seq_idx);
}

Chunks Scan::load(const Run& run) const {
  const at::ScalarType accumulate = options.dtype().toScalarType();
  const auto matrices = [&](const at::Tensor& tensor) {
    const at::Tensor steps = read(tensor, run);
    const at::Tensor by_group = (in.ranks == nullptr ? steps : steps.flatten(2, 3)).transpose(2, 3);
    // A copy on the CPU: MKL sums in another order for another alignment or row stride.
    const at::Tensor converted =
        by_group.to(accumulate, /*non_blocking=*/false, /*copy=*/in.x.is_cpu(), at::MemoryFormat::Contiguous);
    return converted.reshape({-1, samples(run), dstate});
  };
  const auto factor = [&](const at::Tensor& tensor) { return of_samples(split_heads(tensor.to(accumulate)).unsqueeze(-1)); };
  Chunks chunks;
  chunks.run = run;
  chunks.steps = make_steps(in, method, [&](const at::Tensor& tensor) { return read(tensor, run); });
  const at::Tensor zeta = chunks.steps.zeta.clamp_min(kLowestLogDecay);
  chunks.cs = cumsum_of_steps(zeta);
  const at::Tensor cs_last = chunks.cs.narrow(2, run.length - 1, 1);
  if (is_present(in.diagonal_gain)) {
    chunks.read_cs = at::constant_pad_nd(chunks.cs.narrow(2, 0, run.length - 1), {0, 0, 1, 0});
    chunks.diagonal = factor(read(*in.diagonal_gain, run));
  } else {
    chunks.read_cs = chunks.cs;
  }
  const at::Tensor from_start = chunks.read_cs.exp();
  at::Tensor to_end, decay = cs_last.exp();
  if (starts_.defined()) {
    chunks.sequence = run_of(starts_, run).cumsum(2);
    const at::Tensor last = chunks.sequence.narrow(2, run.length - 1, 1);
    chunks.is_after_beginning = of_samples(chunks.sequence.ne(0));
    chunks.is_before_beginning = of_samples(chunks.sequence.ne(last));
    chunks.is_cut = last.ne(0);
    zero_where_(decay, chunks.is_cut);
    // Summed from the end: a NaN before the last beginning of a sequence would spoil a difference of sums from the start.
    to_end = (cumsum_of_steps(zeta.flip(2)).flip(2) - zeta).exp_();
  } else {
    to_end = (cs_last - chunks.cs).exp_();
  }
  chunks.x = in.ranks == nullptr ? by_step(in.x, run) : times_factor(by_step(in.x, run), in.ranks->x).flatten(2, 3);
  chunks.B = matrices(in.B);
  if (in.C.defined()) chunks.C = matrices(in.C);
  chunks.gain = factor(chunks.steps.gain);
  chunks.exp_cumsum = factor(from_start);
  chunks.decay_to_chunk_end = factor(to_end);
  chunks.decay = decay.to(accumulate).squeeze(2).unsqueeze(-1).unsqueeze(-1);
  return chunks;
}

at::Tensor Scan::times_factor(const at::Tensor& steps, const OptionalTensor& factor) const {
  if (!is_present(factor)) return steps.unsqueeze(3).expand({-1, -1, -1, ranks, -1, -1, -1});
  return steps.unsqueeze(3) * rank_factor(*factor);
}

at::Tensor Scan::of_samples(const at::Tensor& steps) const {
  if (ranks == 1) return steps;
  std::vector<int64_t> shape = steps.sizes().vec();
  shape.insert(shape.begin() + 3, ranks);
  return steps.unsqueeze(3).expand(shape).flatten(2, 3);
}

at::Tensor Scan::of_steps(const at::Tensor& samples) const { return ranks == 1 ? samples : by_rank(samples).sum(3); }

at::Tensor Scan::D() const {
  const at::Tensor D = in.D->unflatten(0, {groups, heads_per_group});
  return D.dim() == 2 ? D.unsqueeze(-1) : D;
}

at::Tensor Scan::load_states(const OptionalTensor& states, const Part& part) const {
  if (!is_present(states)) return at::zeros({part.rows, heads, headdim, dstate}, options);
  return states->narrow(0, part.row, part.rows).clone(at::MemoryFormat::Contiguous);
}

at::Tensor Scan::across(const at::Tensor& states, const Chunks& chunks, int64_t chunk) {
  return chunks.is_cut.defined() ? zero_where_(states.clone(), chunks.is_cut.select(0, chunk)) : states;
}

at::Tensor Scan::boundary_states(const Chunks& chunks, const at::Tensor& first) const {
  const int64_t count = chunks.run.chunks;
  at::Tensor states = empty_tensor({count + 1, chunks.run.rows, heads, headdim, dstate}, options);
  states.select(0, 0).copy_(first);
  at::Tensor increments = state_matrices(states, 1, count);
  at::bmm_out(increments, weighted_input(chunks).transpose(1, 2), without(chunks.B, chunks.is_before_beginning, chunks.run));
  for (int64_t k = 0; k < count; ++k) {
    states.select(0, k + 1).addcmul_(across(states.select(0, k), chunks, k), chunks.decay.select(0, k));
  }
  return states;
}

at::Tensor Scan::state_matrices(const at::Tensor& states, int64_t begin, int64_t count) const {
  return states.narrow(0, begin, count).view({-1, heads_per_group * headdim, dstate});
}

at::Tensor Scan::without(const at::Tensor& matrices, const at::Tensor& mask, const Run& run) const {
  if (!mask.defined()) return matrices;
  const at::Tensor result = matrices.clone();
  zero_where_(matrices_by_step(result, run), mask);
  return result;
}

at::Tensor Scan::decayed(const at::Tensor& g, const Chunks& chunks) const {
  const at::Tensor result = by_group(g, chunks.exp_cumsum);
  zero_where_(matrices_by_step(result, chunks.run), chunks.is_after_beginning);
  return result;
}

at::Tensor Scan::weighted_input(const Chunks& chunks) const {
  const at::Tensor result = by_group(chunks.x, chunks.gain * chunks.decay_to_chunk_end);
  zero_where_(matrices_by_step(result, chunks.run), chunks.is_before_beginning);
  return result;
}

at::Tensor Scan::decay_between(const Chunks& chunks) const {
  const auto by_head = [](const at::Tensor& cs) { return cs.transpose(2, 3).contiguous(); };
  at::Tensor result = chunks.diagonal.defined() ? exp_of_differences(by_head(chunks.read_cs), by_head(chunks.cs), options)
                                                : exp_of_differences(by_head(chunks.cs), options);
  if (chunks.sequence.defined()) {
    result.masked_fill_(chunks.sequence.unsqueeze(-1).ne(chunks.sequence.unsqueeze(-2)).unsqueeze(2), 0);
  }
  return result.view({-1, heads_per_group, chunks.run.length, 1, chunks.run.length, 1});
}

at::Tensor Scan::by_step(const at::Tensor& argument, const Run& run) const {
  return split_heads(read(argument, run)).to(options.dtype().toScalarType());
}

void Scan::write_by_step(const at::Tensor& result, const Run& run, const at::Tensor& values) const {
  write(result.unflatten(2, {groups, heads_per_group}), run, values);
}

at::Tensor Scan::by_group(const at::Tensor& tensor, const at::Tensor& factor) const {
  return contiguous_product(tensor.transpose(2, 3), factor.transpose(2, 3))
      .view({-1, tensor.size(2), heads_per_group * headdim});
}

at::Tensor Scan::by_head(const at::Tensor& tensor, const at::Tensor& factor) const {
  return contiguous_product(tensor.movedim(2, 4), factor.movedim(2, 4)).view({-1, tensor.size(2), headdim});
}

at::Tensor Scan::by_head(const at::Tensor& tensor) const { return tensor.movedim(2, 4).reshape({-1, tensor.size(2), headdim}); }

at::Tensor Scan::matrices_by_step(const at::Tensor& matrices, const Run& run) const {
  return matrices.view({run.chunks, run.rows, groups, samples(run), matrices.size(-1)}).transpose(2, 3);
}

at::Tensor Scan::group_by_step(const at::Tensor& product, const Run& run) const {
  return product.view({run.chunks, run.rows, groups, samples(run), heads_per_group, headdim}).transpose(2, 3);
}

at::Tensor Scan::head_by_step(const at::Tensor& product, const Run& run) const {
  return product.view({run.chunks, run.rows, groups, heads_per_group, samples(run), headdim}).movedim(4, 2);
}

}  // namespace ssm_kernels::ssd
