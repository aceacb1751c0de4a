#include "mamba3/scan.h"

#include <ATen/TensorOperators.h>

#include <vector>

namespace ssm_kernels::mamba3 {
namespace {

// v of the sample before the sequences, (sequences, ranks, heads, headdim).
at::Tensor inputs_before(const Inputs& in) {
  const at::Tensor x = in.initial_x->to(in.wide()).unsqueeze(1);
  return is_present(in.mimo_x) ? x * ranks_first(*in.mimo_x, 0) : x.expand({-1, in.ranks(), -1, -1});
}

// The scan without x, z and the rows: gates, D, states and sequences.
ssd::TwoSampleInputs gates_of_scan(const Inputs& in) {
  ssd::TwoSampleInputs scan;
  scan.dt = in.dt.to(in.wide());
  scan.A = in.A.to(in.wide());
  scan.D = in.D;
  scan.initial_states = in.initial_ssm;
  scan.lam = in.trap.to(in.wide());
  scan.seq_idx = in.seq_idx;
  scan.cu_seqlens = in.cu_seqlens;
  scan.are_cu_seqlens_checked = true;
  scan.discretization = "exp_trapezoidal";
  scan.lam_sigmoid = true;
  scan.chunk_size = in.chunk_size;
  scan.premultiplied = in.premultiplied;
  const DtLimit limits = parse_dt_limit("mamba3_chunk_scan", std::nullopt);
  scan.dt_min = limits[0];
  scan.dt_max = limits[1];
  return scan;
}

}  // namespace

at::Tensor ranks_first(const at::Tensor& tensor, int64_t axis) { return tensor.transpose(axis, axis + 1); }

ssd::Ranks ranks_of(const Inputs& in) { return {in.ranks(), in.mimo_x, in.mimo_z, in.mimo_out, in.norm_weight, in.norm_eps}; }

at::ScalarType scan_dtype(const Inputs& in, Pass pass) {
  const bool is_narrow = pass == Pass::kForward ? in.has_ranks() : !in.has_ranks() && !in.wide_out;
  return is_narrow && in.x.is_cuda() ? in.x.scalar_type() : in.wide();
}

Rotation rotate_for_scan(const Inputs& in, Pass pass) {
  return rotates_by_cuda_kernels(in) ? rotate_cuda(in, scan_dtype(in, pass)) : rotate(in);
}

ssd::TwoSampleInputs scan_of(const Inputs& in, const Rotation& rotation, const ssd::Ranks& ranks, Pass pass) {
  const at::ScalarType dtype = scan_dtype(in, pass);
  const auto cast = [&](const OptionalTensor& tensor) {
    return is_present(tensor) ? OptionalTensor(tensor->to(dtype)) : OptionalTensor();
  };
  ssd::TwoSampleInputs scan = gates_of_scan(in);
  scan.x = in.x.to(dtype);
  scan.B = rotation.k;
  scan.C = rotation.q;
  scan.z = cast(in.z);
  if (in.has_ranks()) {
    scan.ranks = &ranks;
    if (is_present(in.initial_x)) {
      scan.previous_x = inputs_before(in);
      scan.previous_B = ranks_first(*in.initial_k, 1);
    }
  } else {
    scan.previous_x = cast(in.initial_x);
    scan.previous_B = in.initial_k;
  }
  return scan;
}

#ifdef SSM_KERNELS_WITH_CUDA

bool rotates_in_scan(const Inputs& in) {
  if (!in.x.is_cuda() || in.has_ranks() || in.wide_out || in.angles.size(-1) == 0) return false;
  ssd::Inputs scan;
  scan.x = in.x;
  scan.B = in.B;
  scan.C = in.C;
  scan.z = in.z;
  scan.seq_idx = in.seq_idx;
  scan.cu_seqlens = in.cu_seqlens;
  return ssd::takes_rotation(scan, in.angles.size(-1));
}

Outputs rotating_scan(const Inputs& in) {
  const Rotation phases = phases_cuda(in, in.x.scalar_type());
  const ssd::Rotation rotation = {phases.starts, in.angles,          in.dt,         in.B_bias, in.C_bias,
                                  in.is_pairs(), phases.final_angle, phases.final_k};
  ssd::TwoSampleInputs scan = gates_of_scan(in);
  scan.x = in.x;
  scan.B = in.B;
  scan.C = in.C;
  scan.z = in.z;
  scan.previous_x = in.initial_x;
  scan.previous_B = in.initial_k;
  scan.rotation = &rotation;
  const ssd::FwdOutputs found = ssd::two_sample_scan(scan, kRule);
  const at::Tensor final_x = ssd::last_steps(scan, in.x, in.initial_x).contiguous();
  return {found.out, phases.final_angle, found.final_states, phases.final_k, final_x};
}

#else

bool rotates_in_scan(const Inputs&) { return false; }
Outputs rotating_scan(const Inputs&) { return {}; }

#endif

at::Tensor have_steps(const Inputs& in, const at::Tensor& state) {
  const at::Tensor offsets = in.cu_seqlens->to(at::kLong);
  std::vector<int64_t> shape(state.dim(), 1);
  shape[0] = -1;
  return offsets.slice(0, 1).gt(offsets.slice(0, 0, -1)).view(shape);
}

}  // namespace ssm_kernels::mamba3
