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

// Whether the kernels with vectors and rows that are counted in 32 bits take the call.
bool is_narrow(const NormParams& p) { return p.kind != ScalarKind::kDouble && p.rows() * p.groups < kMaxNarrowRows; }

// Whether each vector of each tensor begins at a multiple of 16 bytes.
bool is_aligned(const NormParams& p, std::initializer_list<RowsView> views) {
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

// How many blocks share a group that needs `needed` threads, more than the max_threads of a block: the fewest that need at most
// preferred_threads each, or all that a cluster may have. A device without clusters has 1.
int choose_cluster(const NormParams& p, int64_t needed, int preferred_threads) {
  if (cuda::device_properties(p.device).major < 9) return 1;
  int cluster = 2;
  while (cluster < cuda::kMaxClusterBlocks && needed > int64_t(cluster) * preferred_threads) cluster *= 2;
  return cluster;
}

// Teams of at most max_lanes threads for groups of p.group_size columns, or clusters of such teams unless preferred_lanes is 0.
Teams make_teams(const NormParams& p, int max_lanes, int preferred_lanes) {
  Teams teams;
  const int64_t columns = p.kind == ScalarKind::kDouble ? 1 : kThreadColumns;
  const int64_t needed = ceil_div(p.group_size, columns);
  if (needed <= kWarpSize) {
    teams.lanes = 1;
    while (teams.lanes < needed) teams.lanes *= 2;
    teams.count = kSharedBlockThreads / teams.lanes;
    return teams;
  }
  if (needed > max_lanes && preferred_lanes > 0 && p.kind != ScalarKind::kDouble)
    teams.cluster = choose_cluster(p, needed, preferred_lanes);
  const int64_t chunks = std::max<int64_t>(ceil_div(needed, max_lanes), teams.cluster);
  teams.lanes = static_cast<int>(ceil_div(ceil_div(needed, chunks), kWarpSize)) * kWarpSize;
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

// The RMSNorm kernel for a call with narrow rows. The choice does not depend on the number of rows or on the needed
// gradients or on alignment, so that a row has the same bits in every batch.
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

// One block or cluster per group of each row. The case is kNone for groups of at most half a warp's columns, and for those that
// are too long.
RmsPlan plan_rms(const NormParams& p, RmsCase rms_case, bool is_aligned, int max_threads, int preferred_threads) {
  constexpr int64_t kWarpColumns = kWarpSize * kThreadColumns;
  RmsPlan plan;
  const int64_t warps = ceil_div(p.group_size, kWarpColumns);
  if (p.group_size <= kWarpColumns / 2) return plan;
  if (warps * kWarpSize > max_threads) plan.cluster = choose_cluster(p, warps * kWarpSize, preferred_threads);
  if (ceil_div(warps, plan.cluster) * kWarpSize > max_threads) return {};
  plan.warps = static_cast<int>(ceil_div(warps, plan.cluster));
  plan.is_any = !is_aligned || plan.cluster > 1;
  plan.row_blocks = static_cast<int>(p.rows());
  plan.rms_case = rms_case;
  return plan;
}

// Persistent blocks: as many as are resident, with the pipeline stages in shared memory. The case is also kNone if these exceed
// a block's shared memory. count_clusters(plan) says how many clusters of a plan are resident.
template <typename CountClusters>
void make_persistent(RmsPlan& plan, const NormParams& p, int registers, const CountClusters& count_clusters) {
  if (plan.rms_case == RmsCase::kNone) return;
  if (plan.shared_bytes > cuda::max_shared_bytes(p.device)) {
    plan = {};
    return;
  }
  const int64_t resident =
      plan.cluster > 1 ? count_clusters(plan) : resident_blocks(p.device, plan.warps, registers, plan.shared_bytes);
  if (resident == 0) {
    plan = {};
    return;
  }
  // More blocks than are resident would write more partial sums.
  plan.row_blocks = static_cast<int>(std::clamp<int64_t>(resident / p.groups, 1, p.rows()));
}

// Calls visit(Scalar()) for the element types of the RMSNorm kernels.
template <typename Visit>
int visit_rms_scalar(ScalarKind kind, const Visit& visit) {
  return kind == ScalarKind::kHalf ? visit(__half()) : kind == ScalarKind::kBFloat16 ? visit(__nv_bfloat16()) : visit(0.0f);
}

RmsPlan plan_rms_fwd(const NormFwdParams& p, bool is_aligned) {
  const RmsCase rms_case = choose_fwd_rms_case(p);
  if (rms_case == RmsCase::kNone) return {};
  // Two blocks of kFwdMaxThreads are resident.
  RmsPlan plan = plan_rms(p, rms_case, is_aligned, kFwdMaxThreads, /*preferred_threads=*/kFwdMaxThreads);
  const int shifted_bytes = plan.is_any ? 2 * kShiftedInputBytes : 0;
  if (rms_case == RmsCase::kNoGateWide) {
    // One stage of x and the residual; the sums are in static shared memory.
    const int column_bytes = bytes_of(p, false) + static_cast<int>(sizeof(float));
    if (plan.is_any) plan.shared_bytes = plan.warps * (kWarpSize * kThreadColumns * column_bytes + shifted_bytes);
    return plan;
  }
  const int column_bytes = 2 * bytes_of(p, false);
  plan.shared_bytes = rms_shared_bytes(plan.warps, column_bytes, /*row_bytes=*/0) +
                      plan.warps * rms_stages(column_bytes) * shifted_bytes + (plan.cluster > 1 ? kClusterSumBytes : 0);
  make_persistent(plan, p, kFwdRegisters, [&](const RmsPlan& launched) {
    return visit_rms_scalar(p.kind, [&](auto scalar) { return count_norm_rms_fwd_clusters<decltype(scalar)>(launched); });
  });
  return plan;
}

RmsPlan plan_rms_bwd(const NormBwdParams& p, bool is_aligned) {
  const RmsCase rms_case = choose_rms_case(p);
  if (rms_case == RmsCase::kNone) return {};
  // A block with half of the registers leaves room for a second one.
  RmsPlan plan = plan_rms(p, rms_case, is_aligned, kBwdMaxThreads, /*preferred_threads=*/kBwdMaxThreads / 2);
  const int column_bytes = bytes_of(p, false) + 2 * bytes_of(p, p.x.is_accumulate);
  // Kernels for any rows need no more, and so their sums over rows have the same order.
  plan.shared_bytes = rms_shared_bytes(plan.warps, column_bytes, kRmsBwdRowBytes) + (plan.cluster > 1 ? kClusterSumBytes : 0);
  make_persistent(plan, p, kBwdRegisters, [&](const RmsPlan& launched) {
    return visit_rms_scalar(p.kind, [&](auto scalar) { return count_norm_rms_bwd_clusters<decltype(scalar)>(launched); });
  });
  return plan;
}

// Bytes of shared memory that a block's images of one tensor take in the kernels for any rows.
int tensor_bytes(const NormParams& p, const Teams& teams, bool is_accumulate) {
  return teams.count * image_bytes(teams.lanes, bytes_of(p, is_accumulate));
}

FwdPlan plan_fwd(const NormFwdParams& p) {
  FwdPlan plan;
  plan.units = p.rows() * p.groups;
  const bool narrow = is_narrow(p), aligned = is_aligned(p, {p.x, p.z, p.residual, p.out, p.new_residual});
  if (narrow) plan.rms = plan_rms_fwd(p, aligned);
  plan.teams = make_teams(p, kFwdMaxThreads, /*preferred_lanes=*/0);
  plan.teams.is_aligned = narrow && aligned;
  if (!plan.teams.is_aligned && p.kind != ScalarKind::kDouble) {
    plan.shared_bytes = tensor_bytes(p, plan.teams, false);
    if (p.is_add || p.z.data != nullptr) {
      const bool is_wide = p.is_add && (p.residual.is_accumulate || p.new_residual.is_accumulate);
      plan.shared_bytes += tensor_bytes(p, plan.teams, is_wide);
    }
  }
  plan.blocks = std::min<int64_t>(ceil_div(plan.units, plan.teams.count), std::numeric_limits<int32_t>::max());
  return plan;
}

// Sums of the teams in the general backward, in static shared memory.
constexpr int kBwdStaticBytes = 2048;

// As many pipeline stages as leave `resident` blocks resident, or only one. Returns whether its shared memory is available.
bool choose_stages(BwdPlan& plan, const NormBwdParams& p, int64_t resident) {
  const int third = p.is_add ? p.grad_new_residual.data != nullptr : p.z.data != nullptr;
  plan.narrow_image = image_bytes(plan.teams.lanes, bytes_of(p, false));
  plan.x_image = image_bytes(plan.teams.lanes, bytes_of(p, p.x.is_accumulate));
  plan.x_images = plan.teams.count * plan.narrow_image;
  plan.third_images = plan.x_images + plan.teams.count * plan.x_image;
  plan.stage_bytes = plan.third_images + third * plan.teams.count * plan.x_image;
  const int warps = plan.teams.threads() / kWarpSize, available = cuda::max_shared_bytes(p.device) - kBwdStaticBytes;
  for (plan.stages = plan.teams.chunks > plan.teams.cluster ? 1 : kBwdStages;; --plan.stages) {
    const int bytes = plan.shared_bytes();
    if (plan.stages == 1) return bytes <= available;
    if (bytes > available) continue;
    if (resident_blocks(p.device, warps, kBwdRegisters, bytes + kBwdStaticBytes) >= resident) return true;
  }
}

BwdPlan plan_bwd(const NormBwdParams& p) {
  BwdPlan plan;
  const bool narrow = is_narrow(p),
             aligned = is_aligned(p, {p.x, p.z, p.grad_out, p.grad_new_residual, p.grad_x, p.grad_z, p.grad_residual, p.out});
  if (narrow) {
    plan.rms = plan_rms_bwd(p, aligned);
    plan.partials = plan.rms.row_blocks;
    if (plan.rms.rms_case != RmsCase::kNone) return plan;
  }
  const int vector_size = kVectorBytes / cuda::element_bytes(p.kind);
  const int stage_accesses = bwd_accesses(p, kThreadColumns / vector_size);
  // Accesses for the grad_bias sums: one per thread of the float64 kernels, else those of all its columns.
  const int sums = p.grad_bias.data == nullptr ? 0 : p.kind == ScalarKind::kDouble ? 1 : kThreadColumns * 4 / kVectorBytes;
  const auto record_bytes = [&](int accesses) { return ((kBwdStages * accesses + sums) | 1) * kVectorBytes; };
  const int available = cuda::max_shared_bytes(p.device) - kBwdStaticBytes;

  // The same plan for rows that start and end at any element. Returns whether its shared memory is available.
  const auto make_staged = [&](BwdPlan& staged, int64_t resident) {
    staged.teams.is_aligned = false;
    staged.stage_accesses = 0;
    staged.record_bytes = record_bytes(0);
    staged.sum_bytes = sums * kVectorBytes;
    return choose_stages(staged, p, resident);
  };

  int64_t resident = 0;
  for (int max_lanes = kBwdMaxThreads;; max_lanes /= 2) {
    plan.teams = make_teams(p, max_lanes, /*preferred_lanes=*/kBwdMaxThreads / 2);
    const bool is_cluster = plan.teams.cluster > 1;
    const int threads = plan.teams.threads(), warps = threads / kWarpSize;
    // Whether the stages of the aligned kernel fit. If so, the others have as many blocks: their sums over rows have the same
    // order.
    const int aligned_bytes = threads * record_bytes(stage_accesses) + (is_cluster ? kBwdClusterBytes : 0);
    // In clusters, float32 rows take the kernel for any rows, which is faster: 216 against 338 us for add_layer_norm of 12,288
    // columns.
    const int most_chunks = p.kind == ScalarKind::kFloat ? 1 : plan.teams.cluster;
    const bool has_stages = narrow && plan.teams.chunks <= most_chunks && aligned_bytes <= available;
    plan.teams.is_aligned = has_stages && aligned;
    plan.stage_accesses = has_stages ? stage_accesses : 0;
    plan.record_bytes = record_bytes(plan.stage_accesses);
    const int planned_bytes = is_cluster ? 0 : plan.record_bytes * threads + kBwdStaticBytes;
    resident = resident_blocks(p.device, warps, kBwdRegisters, planned_bytes);
    if (p.kind == ScalarKind::kDouble || (plan.teams.is_aligned && !is_cluster)) break;
    BwdPlan staged = plan;
    // With less shared memory than a block of kBwdMaxThreads needs, groups are cut into more chunks.
    if (!make_staged(staged, resident) && max_lanes > 2 * kWarpSize) continue;
    if (is_cluster) {
      const auto count = [&](const BwdPlan& launched) -> int64_t {
        return visit_rms_scalar(p.kind, [&](auto scalar) { return count_norm_bwd_clusters<decltype(scalar)>(p, launched); });
      };
      BwdPlan vectors = plan;
      vectors.teams.is_aligned = true;
      const int64_t aligned_clusters = has_stages ? count(vectors) : 0;
      resident = count(staged);
      if (aligned_clusters > 0) resident = std::min(resident, aligned_clusters);
      if (aligned_clusters == 0) plan.teams.is_aligned = false;
    }
    if (!plan.teams.is_aligned) plan = staged;
    break;
  }

  while (plan.group_teams < plan.teams.count && plan.group_teams < p.groups) plan.group_teams *= 2;
  plan.row_teams = plan.teams.count / plan.group_teams;
  plan.column_blocks = static_cast<int>(ceil_div(p.groups, plan.group_teams));
  // More blocks than are resident would write more partial sums.
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

// The RMSNorm kernels for aligned rows with a gate do, and that for short rows.
bool bwd_writes_out_cuda(const NormBwdParams& p) {
  const BwdPlan whole = plan_bwd(p);
  const RmsPlan& plan = whole.rms;
  if (plan.rms_case == RmsCase::kNone) return takes_short_rows(p, whole.teams);
  return !plan.is_any && (plan.rms_case == RmsCase::kGateBefore || plan.rms_case == RmsCase::kGateAfter);
}

void bwd_cuda(const NormBwdParams& p) {
  const auto guard = device_guard(p);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const BwdPlan plan = plan_bwd(p);
  C10_CUDA_CHECK(cuda::visit_scalar(p.kind, [&](auto scalar) { return launch_norm_bwd<decltype(scalar)>(p, plan, stream); }));
  C10_CUDA_CHECK(p.kind == ScalarKind::kDouble ? launch_norm_sum<double>(p, stream) : launch_norm_sum<float>(p, stream));
}

}  // namespace

const DeviceKernels kCuda{&fwd_cuda, &count_partials_cuda, &bwd_cuda, &bwd_writes_out_cuda};

}  // namespace ssm_kernels::norm

#endif
