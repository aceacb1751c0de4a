// CUDA entry points of the norms: choose the kernel and its plan, and launch on the current stream. They read nothing from the
// device and never wait for it, so that calls can be captured in a CUDA graph.

#ifdef SSM_KERNELS_WITH_CUDA

#include "norm/cuda/launch.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <initializer_list>
#include <limits>

#include "common/integers.h"
#include "cuda/device.h"
#include "cuda/scalar_types.h"
#include "norm/cuda/rms.h"
#include "norm/norm_op.h"

namespace ssm_kernels::norm {
namespace {

bool is_aligned(int64_t bytes) { return bytes % kVectorBytes == 0; }

// Whether the vector kernels take the call: each vector of each tensor must begin at a multiple of 16 bytes.
bool can_use_vectors(const NormParams& p, std::initializer_list<RowsView> views) {
  if (p.kind == ScalarKind::kDouble || p.rows() * p.groups >= kMaxNarrowRows) return false;
  if (!is_aligned(p.group_size * cuda::element_bytes(p.kind))) return false;
  for (const ParameterView& view : {p.weight, p.bias}) {
    if (!is_aligned(reinterpret_cast<int64_t>(view.data))) return false;
  }
  return std::all_of(views.begin(), views.end(), [&](const RowsView& view) {
    const int bytes = bytes_of(p, view.is_accumulate);
    return is_aligned(reinterpret_cast<int64_t>(view.data)) && is_aligned(view.stride_outer * bytes) &&
           is_aligned(view.stride_inner * bytes);
  });
}

// Teams of at most max_lanes threads for groups of p.group_size columns.
Teams make_teams(const NormParams& p, bool use_vectors, int max_lanes) {
  Teams teams;
  teams.use_vectors = use_vectors;
  const int64_t columns = use_vectors ? kThreadColumns : 1;
  const int64_t needed = ceil_div(p.group_size, columns);
  if (needed <= kWarpSize) {
    teams.lanes = 1;
    while (teams.lanes < needed) teams.lanes *= 2;
    teams.count = kSharedBlockThreads / teams.lanes;
    return teams;
  }
  teams.chunks = static_cast<int>(ceil_div(needed, max_lanes));
  teams.lanes = static_cast<int>(ceil_div(ceil_div(needed, teams.chunks), kWarpSize)) * kWarpSize;
  // Rounding up to whole warps may leave fewer chunks.
  teams.chunks = static_cast<int>(ceil_div(needed, teams.lanes));
  return teams;
}

// How many blocks are resident on the device at a time.
int64_t resident_blocks(int device, int warps, int registers, int shared_bytes) {
  // CUDA reserves kReservedBytes of shared memory per block; a multiprocessor has that much more than one block may ask for.
  constexpr int kReservedBytes = 1024, kMaxBlocks = 32;
  // A multiprocessor has four partitions of 16384 registers, and spreads the warps of a block over them.
  constexpr int kPartitions = 4, kPartitionRegisters = 16384;
  const int by_registers = kPartitions * (kPartitionRegisters / (registers * kWarpSize)) / warps;
  const int by_memory = (cuda::max_shared_bytes(device) + kReservedBytes) / (shared_bytes + kReservedBytes);
  const int per_multiprocessor = std::clamp(std::min(by_registers, by_memory), 1, kMaxBlocks);
  return static_cast<int64_t>(cuda::multiprocessor_count(device)) * per_multiprocessor;
}

// The RMSNorm kernel for a call that the vector kernels take. The choice does not depend on the number of rows or on the needed
// gradients, so that a row has the same bits in every batch.
RmsCase choose_rms_case(const NormParams& p) {
  if (p.subtract_mean || p.bias.data != nullptr) return RmsCase::kNone;
  if (p.is_add || p.z.data == nullptr) {
    return bytes_of(p, p.x.is_accumulate) == bytes_of(p, false) ? RmsCase::kNoGate : RmsCase::kNoGateWide;
  }
  if (p.activation != GateActivation::kSilu) return RmsCase::kNone;
  return p.norm_before_gate ? RmsCase::kGateAfter : RmsCase::kGateBefore;
}

// Forward has an add_norm RMSNorm kernel for float32 residuals only.
RmsCase choose_fwd_rms_case(const NormFwdParams& p) {
  if (!p.is_add) return p.z.data == nullptr ? RmsCase::kNone : choose_rms_case(p);
  const auto is_float = [&](const RowsView& view) { return view.data != nullptr && bytes_of(p, view.is_accumulate) == 4; };
  const bool fits = !p.subtract_mean && p.bias.data == nullptr && is_float(p.residual) && is_float(p.new_residual);
  return fits ? RmsCase::kNoGateWide : RmsCase::kNone;
}

// One block per group of each row. The case is kNone for groups of at most half a warp's columns or more than a block's.
RmsPlan plan_rms(const NormParams& p, RmsCase rms_case, int max_threads) {
  constexpr int64_t kWarpColumns = kWarpSize * kThreadColumns;
  RmsPlan plan;
  const int64_t warps = ceil_div(p.group_size, kWarpColumns);
  if (p.group_size <= kWarpColumns / 2 || warps * kWarpSize > max_threads) return plan;
  plan.warps = static_cast<int>(warps);
  plan.row_blocks = static_cast<int>(p.rows());
  plan.rms_case = rms_case;
  return plan;
}

// Persistent blocks: as many as are resident, with the pipeline stages in shared memory. The case is also kNone if these exceed
// a block's shared memory.
RmsPlan plan_persistent_rms(const NormParams& p, RmsCase rms_case, int column_bytes, int row_bytes, int max_threads,
                            int registers) {
  RmsPlan plan = plan_rms(p, rms_case, max_threads);
  plan.shared_bytes = rms_shared_bytes(plan.warps, column_bytes, row_bytes);
  if (plan.rms_case == RmsCase::kNone || plan.shared_bytes > cuda::max_shared_bytes(p.device)) return {};
  const int64_t resident = resident_blocks(p.device, plan.warps, registers, plan.shared_bytes);
  // More blocks than are resident would write more partial sums.
  plan.row_blocks = static_cast<int>(std::clamp<int64_t>(resident / p.groups, 1, p.rows()));
  return plan;
}

FwdPlan plan_fwd(const NormFwdParams& p) {
  FwdPlan plan;
  plan.units = p.rows() * p.groups;
  const bool use_vectors = can_use_vectors(p, {p.x, p.z, p.residual, p.out, p.new_residual});
  const RmsCase rms_case = choose_fwd_rms_case(p);
  if (use_vectors && rms_case == RmsCase::kNoGateWide) {
    plan.rms = plan_rms(p, rms_case, kFwdMaxThreads);
  } else if (use_vectors && rms_case != RmsCase::kNone) {
    plan.rms = plan_persistent_rms(p, rms_case, 2 * bytes_of(p, false), /*row_bytes=*/0, kFwdMaxThreads, kFwdRegisters);
  }
  plan.teams = make_teams(p, use_vectors, kFwdMaxThreads);
  plan.blocks = std::min<int64_t>(ceil_div(plan.units, plan.teams.count), std::numeric_limits<int32_t>::max());
  return plan;
}

BwdPlan plan_bwd(const NormBwdParams& p) {
  BwdPlan plan;
  const int vector_size = kVectorBytes / cuda::element_bytes(p.kind);
  const int stage_accesses = bwd_accesses(p, kThreadColumns / vector_size);
  // Accesses for the grad_bias sums: one per thread of a scalar kernel, else those of all its columns.
  const auto record_bytes = [&](int accesses, int sums) {
    return ((kBwdStages * accesses + (p.grad_bias.data != nullptr ? sums : 0)) | 1) * kVectorBytes;
  };
  const int vector_record = record_bytes(stage_accesses, kThreadColumns * 4 / kVectorBytes);
  // Sums of the teams, in static shared memory.
  constexpr int kStaticBytes = 2048;
  const int available = cuda::max_shared_bytes(p.device) - kStaticBytes;

  bool use_vectors = can_use_vectors(p, {p.x, p.z, p.grad_out, p.grad_new_residual, p.grad_x, p.grad_z, p.grad_residual});
  const RmsCase rms_case = choose_rms_case(p);
  if (use_vectors && rms_case != RmsCase::kNone) {
    const int column_bytes = bytes_of(p, false) + 2 * bytes_of(p, p.x.is_accumulate);
    plan.rms = plan_persistent_rms(p, rms_case, column_bytes, kRmsBwdRowBytes, kBwdMaxThreads, kBwdRegisters);
    plan.partials = plan.rms.row_blocks;
    if (plan.rms.rms_case != RmsCase::kNone) return plan;
  }
  plan.teams = make_teams(p, use_vectors, kBwdMaxThreads);
  if (use_vectors && (plan.teams.chunks > 1 || plan.teams.threads() * vector_record > available)) {
    use_vectors = false;
    plan.teams = make_teams(p, use_vectors, kBwdMaxThreads);
  }
  plan.stage_accesses = use_vectors ? stage_accesses : 0;
  plan.record_bytes = use_vectors ? vector_record : record_bytes(0, 1);

  while (plan.group_teams < plan.teams.count && plan.group_teams < p.groups) plan.group_teams *= 2;
  plan.row_teams = plan.teams.count / plan.group_teams;
  plan.column_blocks = static_cast<int>(ceil_div(p.groups, plan.group_teams));
  // More blocks than are resident would write more partial sums.
  const int threads = plan.teams.threads();
  const int64_t resident =
      resident_blocks(p.device, threads / kWarpSize, kBwdRegisters, plan.record_bytes * threads + kStaticBytes);
  const int64_t most = ceil_div(p.rows(), plan.row_teams);
  plan.row_blocks = static_cast<int>(std::clamp<int64_t>(resident / plan.column_blocks, 1, most));
  plan.partials = plan.row_blocks * plan.row_teams;
  return plan;
}

c10::cuda::CUDAGuard device_guard(const NormParams& p) { return c10::cuda::CUDAGuard(static_cast<c10::DeviceIndex>(p.device)); }

void fwd_cuda(const NormFwdParams& p) {
  const auto guard = device_guard(p);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const FwdPlan plan = plan_fwd(p);
  C10_CUDA_CHECK(cuda::visit_scalar(p.kind, [&](auto scalar) { return launch_norm_fwd<decltype(scalar)>(p, plan, stream); }));
}

int64_t count_partials_cuda(const NormBwdParams& p) { return plan_bwd(p).partials; }

void bwd_cuda(const NormBwdParams& p) {
  const auto guard = device_guard(p);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const BwdPlan plan = plan_bwd(p);
  C10_CUDA_CHECK(cuda::visit_scalar(p.kind, [&](auto scalar) { return launch_norm_bwd<decltype(scalar)>(p, plan, stream); }));
  C10_CUDA_CHECK(p.kind == ScalarKind::kDouble ? launch_norm_sum<double>(p, stream) : launch_norm_sum<float>(p, stream));
}

}  // namespace

const DeviceKernels kCuda{&fwd_cuda, &count_partials_cuda, &bwd_cuda};

}  // namespace ssm_kernels::norm

#endif
