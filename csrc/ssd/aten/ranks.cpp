#include "ssd/aten/ranks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>

#include "torch/checks.h"

namespace ssm_kernels::ssd {
namespace {

// (chunks, rows, steps, ranks, groups, heads of a group, headdim).
struct Samples {
  at::Tensor scale, normed, outputs;  // 1 / rms(y), y over rms(y), and u
  at::Tensor z, gates;                // z by step, and silu(z z^r); undefined without z

  Samples(const Scan& scan, const Run& run, const at::Tensor& y) {
    const Ranks& ranks = *scan.in.ranks;
    outputs = scan.by_rank(y);
    if (is_present(ranks.norm_weight)) {
      scale = (outputs.square().mean(-1, /*keepdim=*/true) + ranks.norm_eps).rsqrt_();
      normed = outputs * scale;
      outputs = normed * scan.split(*ranks.norm_weight);
    }
    if (!is_present(scan.in.z)) return;
    z = scan.by_step(*scan.in.z, run);
    gates = scan.times_factor(z, ranks.z);
  }
};

// Adds the sums over all steps, (ranks, groups, heads of a group, headdim), to a gradient (heads, ranks, headdim).
void add_sums(const at::Tensor& grad, const at::Tensor& values) {
  if (!grad.defined()) return;
  grad.add_(values.sum(at::IntArrayRef({0, 1, 2}), /*keepdim=*/false, at::kDouble).flatten(1, 2).transpose(0, 1));
}

}  // namespace

at::Tensor sum_of_ranks(const Scan& scan, const Run& run, const at::Tensor& y) {
  const Samples samples(scan, run, y);
  at::Tensor gated = samples.outputs;
  if (samples.z.defined()) gated = gated * at::silu(samples.gates);
  if (is_present(scan.in.ranks->out)) gated = gated * scan.rank_factor(*scan.in.ranks->out);
  return gated.sum(3);
}

at::Tensor sum_of_ranks_adjoint(const Scan& scan, const Run& run, const at::Tensor& y, const at::Tensor& grad_out,
                                const at::Tensor& grad_z, const RankGrads& grads) {
  const Ranks& ranks = *scan.in.ranks;
  const Samples samples(scan, run, y);
  const at::Tensor gates = samples.z.defined() ? at::silu(samples.gates) : at::Tensor();
  if (grads.out.defined()) {
    add_sums(grads.out, grad_out.unsqueeze(3) * (gates.defined() ? samples.outputs * gates : samples.outputs));
  }
  at::Tensor grad = scan.times_factor(grad_out, ranks.out);
  if (gates.defined()) {
    if (grads.z.defined() || grad_z.numel() > 0) {
      const at::Tensor grad_gates = at::silu_backward(grad * samples.outputs, samples.gates);
      add_sums(grads.z, grad_gates * samples.z.unsqueeze(3));
      if (grad_z.numel() > 0) {
        const at::Tensor of_ranks = is_present(ranks.z) ? grad_gates * scan.rank_factor(*ranks.z) : grad_gates;
        scan.write_by_step(grad_z, run, of_ranks.sum(3));
      }
    }
    grad = grad * gates;
  }
  if (is_present(ranks.norm_weight)) {
    if (grads.norm_weight.defined()) {
      const at::Tensor of_samples = grad * samples.normed;
      grads.norm_weight.add_(of_samples.sum(at::IntArrayRef({0, 1, 2, 3}), /*keepdim=*/false, at::kDouble).flatten(0, 1));
    }
    grad = grad * scan.split(*ranks.norm_weight);
    const at::Tensor along = (grad * samples.normed).mean(-1, /*keepdim=*/true);
    grad = (grad - samples.normed * along) * samples.scale;
  }
  return grad.flatten(2, 3);
}

at::Tensor input_of_ranks_adjoint(const Scan& scan, const Run& run, const at::Tensor& grad_v, const RankGrads& grads) {
  const Ranks& ranks = *scan.in.ranks;
  const at::Tensor grad = scan.by_rank(grad_v);
  if (grads.x.defined()) add_sums(grads.x, grad * scan.by_step(scan.in.x, run).unsqueeze(3));
  return (is_present(ranks.x) ? grad * scan.rank_factor(*ranks.x) : grad).sum(3);
}

}  // namespace ssm_kernels::ssd
