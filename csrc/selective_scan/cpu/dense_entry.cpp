// CPU entry points of selective_scan_dense.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>

#include "cpu/capability.h"
#include "cpu/thread_scratch.h"
#include "selective_scan/cpu/dense_kernels.h"
#include "selective_scan/dense_op.h"
#include "torch/allocation.h"
#include "torch/checks.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::selective_scan::dense {

SSM_DEFINE_CPU_KERNELS()

namespace {

// At least this many tiles of a group's channels, so that one batch row fills several cores; and slots of rows at most.
constexpr int64_t kTilesPerGroup = 8, kSlots = 16;

PackedRows checked_rows(const Inputs& in) {
  if (is_present(in.cu_seqlens)) check_cu_seqlens_values("selective_scan", *in.cu_seqlens, in.u.size(2));
  return make_packed_rows(in);
}

at::Tensor reduce_matrices(const at::Tensor& A, ScalarKind kind) {
  const int64_t matrices = A.size(0), dstate = A.size(1);
  const at::Tensor schur = empty_tensor({2, matrices, dstate, dstate}, A.options());
  const CpuKernels& kernels = cpu_kernels();
  at::parallel_for(0, matrices, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const at::Tensor matrix = A.select(0, i);
      kernels.reduce(matrix.const_data_ptr(), matrix.stride(0), matrix.stride(1), dstate, kind == ScalarKind::kDouble,
                     schur.select(0, 0).select(0, i).mutable_data_ptr(), schur.select(0, 1).select(0, i).mutable_data_ptr());
    }
  });
  return schur;
}

int64_t tile_channels(const Inputs& in) {
  const auto groups = [](const at::Tensor& matrix) { return matrix.dim() == 4 ? matrix.size(1) : 1; };
  return std::max<int64_t>(1, in.u.size(1) / (kTilesPerGroup * std::max(groups(in.B), groups(in.C))));
}

template <typename Params, typename Run>
void run_tasks(const Params& params, const DenseParams& dense, ScalarKind kind, const Run& run) {
  ThreadScratch threads(cpu_kernels().scratch_bytes(kind));
  const int64_t work = dense.tiles.channels * params.dstate * params.dstate * std::max<int64_t>(1, params.seqlen);
  threads.parallel_for(dense.tiles.tiles * dense.tiles.slots, work, run);
}

FwdOutputs fwd_cpu(const DenseFwdInputs& in) {
  const Discretization method = check_dense_inputs(in);
  const PackedRows rows = checked_rows(in);
  FwdOutputs outputs = allocate_fwd(in);
  const SelectiveScanFwdParams params = make_fwd_params(in, method, rows, outputs);
  const ScalarKind kind = scalar_kind(in.u.scalar_type());
  const at::Tensor schur = reduce_matrices(in.A, kind);
  const DenseParams dense = make_dense_params(in, method, params, schur, tile_channels(in), kSlots);
  run_tasks(params, dense, kind,
            [&](int64_t task, std::byte* scratch) { cpu_kernels().fwd_task(params, dense, kind, task, scratch); });
  return outputs;
}

DenseGrads bwd_cpu(const DenseBwdInputs& inputs) {
  const DenseInputs& in = inputs.in;
  const Discretization method = check_dense_inputs(in);
  DenseBwd bwd(inputs);
  const PackedRows rows = checked_rows(bwd.two.scan.in);
  const at::Tensor states = inputs.chunk_states.contiguous();
  const SelectiveScanBwdParams params = bwd.make_params(method, rows, states);
  const ScalarKind kind = scalar_kind(in.u.scalar_type());
  const at::Tensor schur = reduce_matrices(in.A, kind);
  const DenseParams dense = make_dense_params(in, method, params, schur, tile_channels(in), kSlots);
  const DenseSums sums = bwd.allocate_sums(in, params, dense);
  run_tasks(params, dense, kind,
            [&](int64_t task, std::byte* scratch) { cpu_kernels().bwd_task(params, dense, sums, kind, task, scratch); });
  return std::move(bwd).finish(in, schur);
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CPU, m) { register_dense_kernels<&fwd_cpu, &bwd_cpu>(m); }

}  // namespace ssm_kernels::selective_scan::dense
