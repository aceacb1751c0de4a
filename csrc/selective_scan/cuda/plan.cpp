#ifdef SSM_KERNELS_WITH_CUDA

#include "selective_scan/cuda/plan.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <type_traits>

#include "common/integers.h"
#include "selective_scan/cuda/scan_times.h"

namespace ssm_kernels::selective_scan {
namespace {

// Whether the data and each of these strides are multiples of kVectorBytes.
bool is_aligned(const void* data, int64_t bytes, std::initializer_list<int64_t> strides) {
  const auto aligned = [](int64_t offset) { return offset % kVectorBytes == 0; };
  return aligned(reinterpret_cast<int64_t>(data)) &&
         std::all_of(strides.begin(), strides.end(), [&](int64_t stride) { return aligned(stride * bytes); });
}

// An absent tensor has every layout.
bool is_along_steps(const SequenceView& view, int64_t bytes) {
  return view.data == nullptr || (view.stride_step == 1 && is_aligned(view.data, bytes, {view.stride_batch, view.stride_dim}));
}
bool is_along_channels(const SequenceView& view, int64_t bytes) {
  return view.data == nullptr || (view.stride_dim == 1 && is_aligned(view.data, bytes, {view.stride_batch, view.stride_step}));
}
// The steps descend, and the vectors that end at the row's first step and before other steps are aligned and whole.
template <typename View>
bool is_descending(const View& view, const SelectiveScanParams& p, int64_t bytes, std::initializer_list<int64_t> strides) {
  return view.stride_step == -1 && p.seqlen * bytes % kVectorBytes == 0 &&
         is_aligned(static_cast<const char*>(view.data) + bytes, bytes, strides);
}
bool is_descending(const SequenceView& view, const SelectiveScanParams& p, int64_t bytes) {
  return view.data == nullptr || (!p.is_packed() && is_descending(view, p, bytes, {view.stride_batch, view.stride_dim}));
}
bool is_descending(const MatrixView& view, const SelectiveScanParams& p, int64_t bytes) {
  return !p.is_packed() && is_descending(view, p, bytes, {view.stride_batch, view.stride_channel, view.stride_state});
}
// Rows may start at any element.
bool has_rows_of_steps(const SequenceView& view, int64_t) { return view.data == nullptr || view.stride_step == 1; }
bool has_rows_of_channels(const SequenceView& view, int64_t) { return view.data == nullptr || view.stride_dim == 1; }
// Whether every tile's first channel is a multiple of the vector's size.
bool has_aligned_tiles(const SelectiveScanParams& p, const ChannelPartition& partition, int64_t bytes) {
  return (partition.group_channels == p.dim || partition.group_channels * bytes % kVectorBytes == 0) &&
         partition.block_channels * bytes % kVectorBytes == 0;
}

// How vectors of rows that start at any element are accessed; those of doubles are not.
VectorAccess shifted_access(bool along_steps, bool along_channels, int64_t bytes) {
  if (bytes > 4) return VectorAccess::kSingly;
  return along_steps ? VectorAccess::kShifted : along_channels ? VectorAccess::kShiftedChannels : VectorAccess::kSingly;
}

// A packed sequence may begin at any step, so that its vectors along the steps are not aligned.
VectorAccess access_of(const SequenceView& view, const SelectiveScanParams& p, const ChannelPartition& partition,
                       int64_t bytes) {
  if (!p.is_packed() && is_along_steps(view, bytes)) return VectorAccess::kAlongSteps;
  if (is_along_channels(view, bytes) && has_aligned_tiles(p, partition, bytes)) return VectorAccess::kAlongChannels;
  return shifted_access(view.stride_step == 1, view.stride_dim == 1, bytes);
}

VectorAccess access_of(const MatrixView& view, const SelectiveScanParams& p, int64_t bytes) {
  if (!p.is_packed() && view.stride_step == 1 &&
      is_aligned(view.data, bytes, {view.stride_batch, view.stride_channel, view.stride_state})) {
    return VectorAccess::kAlongSteps;
  }
  if (view.stride_state == 1 && p.dstate * bytes % kVectorBytes == 0 &&
      is_aligned(view.data, bytes, {view.stride_batch, view.stride_channel, view.stride_step})) {
    return VectorAccess::kAlongChannels;
  }
  return shifted_access(view.stride_step == 1, view.stride_state == 1, bytes);
}

// Divides time into at most `segments` segments, each a multiple of a tile.
void set_segments(ChannelPartition& partition, const SelectiveScanParams& p, int64_t segments, int64_t tile_steps) {
  const int64_t tiles = ceil_div(p.seqlen, tile_steps);
  const int64_t tiles_per_segment = ceil_div(std::max<int64_t>(1, tiles), std::max<int64_t>(1, segments));
  partition.segments = std::max<int64_t>(1, ceil_div(tiles, tiles_per_segment));
  partition.segment_steps = tiles_per_segment * tile_steps;
  partition.launched_segments = partition.segments;
}

// Shared memory of a block: the larger of the carry pass and the main pass.
template <typename Scalar, typename Params>
int64_t warp_scan_shared_bytes(const Params& p, warp_scan::ScanPlan plan) {
  const auto of_pass = [&](bool carry_pass) {
    plan.carry_pass = carry_pass;
    return warp_scan::shared_bytes<Scalar>(p, plan);
  };
  return std::max(of_pass(false), of_pass(true));
}

// Halves `block_channels` until a block's states fit into shared memory. If one channel's do not fit, halves the slice, down to
// a vector of states.
template <typename Scalar, typename Params>
void set_tiles_that_fit(warp_scan::ScanPlan& plan, const Params& p, int block_channels, const DeviceLimits& device) {
  plan.dstate = cuda::Divisor(p.dstate);
  plan.block_channels = block_channels;
  const auto fits = [&] { return warp_scan_shared_bytes<Scalar>(p, plan) <= device.shared_bytes_per_block; };
  while (plan.block_channels > 1 && !fits()) plan.block_channels /= 2;
  while (plan.slice * static_cast<int>(sizeof(Scalar)) > kVectorBytes && !fits()) plan.slice /= 2;
  set_tiles(plan, p, plan.block_channels);
}

// The same for the warp scan, which moves descending vectors, too.
VectorAccess warp_scan_access_of(const SequenceView& view, const SelectiveScanParams& p, const ChannelPartition& partition,
                                 int64_t bytes) {
  const bool descends = view.data != nullptr && is_descending(view, p, bytes);
  return descends ? VectorAccess::kDescending : access_of(view, p, partition, bytes);
}

VectorAccess warp_scan_access_of(const MatrixView& view, const SelectiveScanParams& p, int64_t bytes) {
  return is_descending(view, p, bytes) ? VectorAccess::kDescending : access_of(view, p, bytes);
}

// Sets the accesses of the warp scan and of the short scan. The short scan moves the elements of descending vectors singly.
template <typename ScanPlan>
void set_accesses(ScanPlan& plan, const SelectiveScanParams& p, int64_t bytes) {
  plan.u = warp_scan_access_of(p.u, p, plan, bytes);
  plan.delta = warp_scan_access_of(p.delta, p, plan, bytes);
  plan.z = warp_scan_access_of(p.z, p, plan, bytes);
  plan.B = warp_scan_access_of(p.B, p, bytes);
  plan.C = warp_scan_access_of(p.C, p, bytes);
}

// Whether any tensor of a call has shifted vectors. `others` are the accesses of those that set_accesses leaves.
bool has_shifted_vectors(const warp_scan::ScanPlan& plan, const SelectiveScanParams& p,
                         std::initializer_list<VectorAccess> others) {
  const auto shifted = [](VectorAccess access) { return is_shifted(access); };
  const auto of_matrix = [](const MatrixView& view, VectorAccess access) { return view.per_step && is_shifted(access); };
  return is_shifted(plan.u) || is_shifted(plan.delta) || is_shifted(plan.z) || of_matrix(p.B, plan.B) ||
         of_matrix(p.C, plan.C) || std::any_of(others.begin(), others.end(), shifted);
}

// Moves shifted vectors element by element where a block has no memory left for the arguments of the functions that move them:
// the tiles do not depend on where rows start.
template <typename Scalar, typename Params>
void drop_shifted_vectors_that_do_not_fit(warp_scan::ScanPlan& plan, const Params& p, const DeviceLimits& device) {
  if (!plan.has_shifted_vectors || warp_scan_shared_bytes<Scalar>(p, plan) <= device.shared_bytes_per_block) return;
  for (VectorAccess* access : {&plan.u, &plan.delta, &plan.z, &plan.out, &plan.grad_out, &plan.grad_u, &plan.grad_delta,
                               &plan.grad_z, &plan.B, &plan.C}) {
    if (is_shifted(*access)) *access = VectorAccess::kSingly;
  }
  plan.has_shifted_vectors = false;
}

// Plans small blocks where more than two of them, but no more than reside, fall to a multiprocessor: kFewChannels, whose blocks
// have as many channels, then needs a second wave, and kManyChannels, whose blocks have four times as many, leaves
// multiprocessors with half of their warps.
template <typename Scalar>
bool plan_small_blocks(warp_scan::ScanPlan& plan, const SelectiveScanFwdParams& p, const DeviceLimits& device) {
  using Small = warp_scan::FwdSizes<warp_scan::FwdConfig::kSmallBlocks>;
  bool is_compiled = false;
  visit_discretization(p.discretization, [&](auto method) { is_compiled = warp_scan::kHasSmallBlocks<decltype(method)>; });
  if (!is_compiled) return false;
  warp_scan::ScanPlan small = plan;
  small.config = warp_scan::FwdConfig::kSmallBlocks;
  for (small.slice = Small::kSlice; small.slice >= Small::kSlice / 2; small.slice /= 2) {
    set_tiles_that_fit<Scalar>(small, p, Small::kTileChannels, device);
    const int64_t bytes = warp_scan_shared_bytes<Scalar>(p, small) + device.reserved_shared_bytes_per_block;
    const int64_t resident = std::min(device.shared_bytes / bytes, kWarpScanResidentWarps >> Small::kLog2Warps);
    const int64_t blocks = p.rows * small.tiles;
    if (small.block_channels == Small::kTileChannels && blocks > 2 * device.multiprocessors &&
        blocks <= resident * device.multiprocessors) {
      plan = small;
      return true;
    }
  }
  return false;
}

// carry_pass: a carry pass that no main pass follows.
template <typename Scalar>
warp_scan::ScanPlan plan_warp_scan(const SelectiveScanFwdParams& p, const DeviceLimits& device, bool carry_pass = false) {
  using warp_scan::FwdConfig, warp_scan::FwdSizes;
  using Many = FwdSizes<FwdConfig::kManyChannels>;
  using Few = FwdSizes<FwdConfig::kFewChannels>;
  using Small = FwdSizes<FwdConfig::kSmallBlocks>;
  constexpr bool kIsDouble = std::is_same_v<Scalar, double>;
  const auto warps = [&](int log2_time_lanes) { return p.rows * ceil_div(p.dim << log2_time_lanes, kWarpSize); };
  const int64_t few = warps(Few::kLog2TimeLanes);
  const int64_t resident = device.multiprocessors * kWarpScanResidentWarps;

  // Enough channels fill the device with fewer lanes each. Pass::kAny, which takes other methods, constant B or C and doubles,
  // does not have that shape.
  warp_scan::ScanPlan plan;
  plan.carry_pass = carry_pass;
  const bool fills = has_many_channels(p, device) || steps_of_row(p) <= Many::tile_steps(kIsDouble);
  const bool is_any = !is_common(p.discretization) || !p.B.per_step || !p.C.per_step;
  plan.config = FwdConfig::kFewChannels;
  const bool is_long = steps_of_row(p) > Many::tile_steps(kIsDouble);
  bool is_small = false;
  if constexpr (warp_scan::kHasCommonPasses<Scalar>) {
    is_small = is_long && !is_any && !carry_pass && plan_small_blocks<Scalar>(plan, p, device);
  }
  if (warp_scan::kHasCommonPasses<Scalar> && !is_small && fills && !is_any && !carry_pass) {
    plan.config = FwdConfig::kManyChannels;
    plan.slice = Many::kSlice;
    set_tiles_that_fit<Scalar>(plan, p, Many::kTileChannels, device);
    if (plan.block_channels < Many::kTileChannels) plan.config = FwdConfig::kFewChannels;
  }
  int64_t segments = 1;
  if (plan.config == FwdConfig::kFewChannels) {
    plan.slice = Few::kSlice;
    set_tiles_that_fit<Scalar>(plan, p, Few::kTileChannels, device);
    // The carry pass takes as long as the main pass, so before one a few segments gain nothing.
    if (few > 0 && few * (carry_pass ? 2 : 8) < resident && !p.is_packed()) {
      segments = std::min(resident / few, ceil_div(p.seqlen, 4 * Few::tile_steps(kIsDouble)));
      if (segments < 4 && !carry_pass) segments = 1;
    }
  }
  const int64_t tile_steps = plan.config == FwdConfig::kManyChannels  ? Many::tile_steps(kIsDouble)
                             : plan.config == FwdConfig::kFewChannels ? Few::tile_steps(kIsDouble)
                                                                      : Small::tile_steps(kIsDouble);
  set_segments(plan, p, segments, tile_steps);
  set_accesses(plan, p, sizeof(Scalar));
  plan.out = warp_scan_access_of(p.out, p, plan, sizeof(Scalar));
  plan.has_shifted_vectors = has_shifted_vectors(plan, p, {plan.out});
  drop_shifted_vectors_that_do_not_fit<Scalar>(plan, p, device);
  return plan;
}

// Backward has as many segments as fill the device.
template <typename Scalar>
warp_scan::ScanPlan plan_warp_scan(const SelectiveScanBwdParams& p, const DeviceLimits& device, bool carry_pass = false) {
  using Sizes = warp_scan::BwdSizes;
  constexpr bool kIsDouble = std::is_same_v<Scalar, double>;
  warp_scan::ScanPlan plan;
  plan.carry_pass = carry_pass;
  plan.slice = Sizes::kMaxSlice;
  set_tiles_that_fit<Scalar>(plan, p, Sizes::tile_channels(kIsDouble), device);
  set_accesses(plan, p, sizeof(Scalar));
  // With half as many states in a slice, the block synchronizes twice as often. A slice is whole vectors of states.
  const int64_t fewest = is_along_channels(plan.B) || is_along_channels(plan.C) ? kVectorBytes / sizeof(Scalar) : 1;
  const auto fit_together = [&](int slice) {
    plan.slice = slice;
    const int64_t bytes = warp_scan_shared_bytes<Scalar>(p, plan) + device.reserved_shared_bytes_per_block;
    return std::min(device.shared_bytes / bytes, kWarpScanResidentWarps >> Sizes::log2_warps(kIsDouble));
  };
  const int most = plan.slice, half = most / 2;
  plan.slice = half >= fewest && fit_together(half) > fit_together(most) ? half : most;
  const int64_t blocks = p.rows * plan.tiles;
  const int64_t resident = device.multiprocessors * kWarpScanResidentWarps >> Sizes::log2_warps(kIsDouble);
  int64_t segments = 1;
  if (blocks > 0 && blocks * 2 < resident && !p.is_packed()) {
    segments = std::min(resident / blocks, ceil_div(p.seqlen, 4 * Sizes::kTileSteps));
  }
  set_segments(plan, p, segments, Sizes::kTileSteps);
  plan.grad_out = warp_scan_access_of(p.grad_out, p, plan, sizeof(Scalar));
  plan.grad_u = warp_scan_access_of(p.grad_u, p, plan, sizeof(Scalar));
  plan.grad_delta = warp_scan_access_of(p.grad_delta, p, plan, sizeof(Scalar));
  plan.grad_z = warp_scan_access_of(p.grad_z, p, plan, sizeof(Scalar));
  plan.has_shifted_vectors = has_shifted_vectors(plan, p, {plan.grad_out, plan.grad_u, plan.grad_delta, plan.grad_z});
  drop_shifted_vectors_that_do_not_fit<Scalar>(plan, p, device);
  return plan;
}

// The kind of rows, and with it the choice of the kernel and the order of its sums, does not depend on where rows start: only
// whether they are shifted does. writes_dense: the kernel also writes dense (batch, dim, seqlen) tensors of the same layout
// that may not be in `sequences`.
void set_accesses(sequential::ScanPlan& plan, const SelectiveScanParams& p, int64_t bytes,
                  std::initializer_list<const SequenceView*> sequences, bool writes_dense) {
  const auto all = [&](const auto& holds) {
    return std::all_of(sequences.begin(), sequences.end(), [&](const SequenceView* view) { return holds(*view, bytes); });
  };
  const auto is_dense_aligned = [&](int64_t row) { return !writes_dense || row * bytes % kVectorBytes == 0; };
  const bool has_channels = all(has_rows_of_channels);
  if (all(has_rows_of_steps) && !(has_channels && p.seqlen == 1)) {
    const bool is_aligned = !p.is_packed() && all(is_along_steps) && is_dense_aligned(p.seqlen);
    plan.sequences = is_aligned ? VectorAccess::kAlongSteps : VectorAccess::kShifted;
  } else if (has_channels) {
    const bool is_aligned = all(is_along_channels) && is_dense_aligned(p.dim) && has_aligned_tiles(p, plan, bytes);
    plan.sequences = is_aligned ? VectorAccess::kAlongChannels : VectorAccess::kShiftedChannels;
  } else {
    const bool descends = std::all_of(sequences.begin(), sequences.end(),
                                      [&](const SequenceView* view) { return is_descending(*view, p, bytes); });
    plan.sequences = descends ? VectorAccess::kDescending : VectorAccess::kSingly;
  }
  const auto access_of_matrix = [&](const MatrixView& view) {
    if (view.per_step && is_descending(view, p, bytes)) return VectorAccess::kDescending;
    return access_of(view, p, bytes);
  };
  plan.B = access_of_matrix(p.B);
  plan.C = access_of_matrix(p.C);
}

// Whether the short scan supports a call. It has no doubles.
bool is_short(const SelectiveScanParams& p, const DeviceLimits& device) {
  return short_scan::kSharedBytes <= device.shared_bytes_per_block && is_basic(p.discretization) && p.B.per_step &&
         p.C.per_step && p.dstate <= short_scan::kStates && p.seqlen > 0 && p.seqlen <= short_scan::kMaxSteps &&
         !p.is_packed() && p.dim <= std::numeric_limits<int32_t>::max();
}

// Whether the sequential scan supports a call that needs `shared_bytes` per block, if it can move the sequences. It has no
// doubles.
bool can_be_sequential(const SelectiveScanParams& p, const DeviceLimits& device, int64_t shared_bytes) {
  return p.B.per_step && p.C.per_step && p.dstate <= sequential::kStates && shared_bytes <= device.shared_bytes_per_block;
}

// Whether the sequential scan is efficient: enough states and channels per tile, and kResidentBlocks blocks per multiprocessor.
bool suits_sequential(const SelectiveScanParams& p, const sequential::ScanPlan& plan, const DeviceLimits& device,
                      int64_t shared_bytes) {
  const int64_t bytes = sequential::kResidentBlocks * (shared_bytes + device.reserved_shared_bytes_per_block);
  return p.dstate * 4 > sequential::kStates * 3 && plan.tiles * sequential::kTileChannels * 2 <= p.dim * 3 &&
         bytes <= device.shared_bytes;
}

// Kernels of methods that read two samples have static shared memory besides (warp_scan_two_sample.cuh).
DeviceLimits without_static_memory(const SelectiveScanParams& p, DeviceLimits device) {
  if (is_two_sample(p.discretization)) device.shared_bytes_per_block -= warp_scan::kTwoSampleStaticBytes;
  return device;
}

}  // namespace

template <typename Scalar>
Plan plan_fwd(const SelectiveScanFwdParams& p, const DeviceLimits& limits, KernelChoice choice) {
  Plan plan;
  const DeviceLimits device = without_static_memory(p, limits);
  if constexpr (kHasAllScans<Scalar>) {
    const int64_t shared_bytes = sequential::shared_bytes<Scalar>(p);
    if (choice != KernelChoice::kWarpScan && can_be_sequential(p, device, shared_bytes)) {
      set_tiles(plan.sequential, p, sequential::kTileChannels);
      set_accesses(plan.sequential, p, sizeof(Scalar), {&p.u, &p.delta, &p.z, &p.out}, /*writes_dense=*/false);
      const int64_t blocks = p.rows * plan.sequential.tiles;
      // The short scan is faster than either; fewer states than kStates take longer than the model says.
      const bool is_slow = is_short(p, device) || p.dstate != sequential::kStates;
      const bool is_faster = is_slow ? blocks * 2 >= device.multiprocessors * 3
                                     : is_sequential_fwd_faster(p, plan.sequential.sequences, sizeof(Scalar), device);
      const bool is_chosen = is_faster && suits_sequential(p, plan.sequential, device, shared_bytes);
      plan.is_sequential =
          plan.sequential.sequences != VectorAccess::kSingly && (choice == KernelChoice::kSequential || is_chosen);
      if (plan.is_sequential) plan.shared_bytes = shared_bytes;
    }
    if (choice == KernelChoice::kFaster && !plan.is_sequential && is_short(p, device)) {
      plan.is_short = true;
      plan.shared_bytes = short_scan::kSharedBytes;
      set_tiles(plan.short_scan, p, short_scan::kTileChannels);
      set_accesses(plan.short_scan, p, sizeof(Scalar));
      return plan;
    }
  }
  if (!plan.is_sequential) {
    plan.warp_scan = plan_warp_scan<Scalar>(p, device);
    plan.shared_bytes = warp_scan_shared_bytes<Scalar>(p, plan.warp_scan);
  }
  return plan;
}

template <typename Scalar>
Plan plan_bwd(const SelectiveScanBwdParams& p, const DeviceLimits& limits, KernelChoice choice) {
  Plan plan;
  const DeviceLimits device = without_static_memory(p, limits);
  plan.warp_scan = plan_warp_scan<Scalar>(p, device);
  plan.shared_bytes = warp_scan_shared_bytes<Scalar>(p, plan.warp_scan);
  if constexpr (kHasAllScans<Scalar>) {
    const int64_t shared_bytes = sequential::shared_bytes<Scalar>(p);
    if (choice != KernelChoice::kWarpScan && can_be_sequential(p, device, shared_bytes)) {
      constexpr int64_t kTileSteps = warp_scan::BwdSizes::kTileSteps;  // the carry pass's; a multiple of the sequential tile
      set_tiles(plan.sequential, p, sequential::kTileChannels);
      // The plan, and with it every bit of a gradient, does not depend on which of the others are needed.
      set_accesses(plan.sequential, p, sizeof(Scalar), {&p.u, &p.delta, &p.z, &p.grad_u, &p.grad_delta, &p.grad_z},
                   /*writes_dense=*/true);
      const int64_t blocks = p.rows * plan.sequential.tiles, resident = device.multiprocessors * sequential::kResidentBlocks;
      const int64_t segments =
          blocks > 0 && !p.is_packed() ? std::min(resident / blocks, ceil_div(p.seqlen, 2 * kTileSteps)) : 1;
      set_segments(plan.sequential, p, segments, kTileSteps);
      const bool is_faster = is_sequential_bwd_faster(p, plan.sequential, sizeof(Scalar), device);
      const bool is_chosen = is_faster && suits_sequential(p, plan.sequential, device, shared_bytes);
      plan.is_sequential =
          plan.sequential.sequences != VectorAccess::kSingly && (choice == KernelChoice::kSequential || is_chosen);
      if (plan.is_sequential) plan.shared_bytes = std::max(plan.shared_bytes, shared_bytes);
    }
  }
  if (plan.is_sequential) {
    plan.warp_scan.segments = plan.sequential.segments;
    plan.warp_scan.segment_steps = plan.sequential.segment_steps;
  }
  return plan;
}

namespace {

// The fewest tiles of a span, times dstate. On an H200 such a span takes 0.5 ms with 64 states and 0.8 ms with 256. Each span
// costs 18 us (16 states) to 58 us (256) for each round of blocks: launches, the states that a block loads and stores, and
// multiprocessors that wait for the last block.
constexpr int64_t kStatesOfSpan = 512;
// A thirty-second of the partial sums is little beside the gradients themselves.
constexpr int64_t kMaxSpans = 32;

template <typename Scalar, typename View>
View from_step(View view, int64_t step) {
  if (view.data != nullptr) view.data = static_cast<Scalar*>(view.data) + step * view.stride_step;
  return view;
}

}  // namespace

int64_t span_steps(const SelectiveScanBwdParams& p, const Plan& plan) {
  const ChannelPartition& partition = plan.partition();
  // Independent of the gradients that are needed, because their bits depend on the spans.
  const auto has_partial_sums = [&](const MatrixView& matrix) { return matrix.per_step && partition.tiles != matrix.groups; };
  // The gradient of a sample has terms of two steps, which may not be in two spans.
  if (is_two_sample(p.discretization)) return p.seqlen;
  if (p.is_packed() || partition.segments > 1 || !(has_partial_sums(p.B) || has_partial_sums(p.C))) return p.seqlen;
  constexpr int64_t kTileSteps = warp_scan::BwdSizes::kTileSteps;
  static_assert(kTileSteps % sequential::kBwdTileSteps == 0, "a span is whole tiles of both scans");
  const int64_t tiles = ceil_div(p.seqlen, kTileSteps), least = ceil_div(kStatesOfSpan, p.dstate);
  const int64_t spans = std::clamp<int64_t>(tiles / least, 1, kMaxSpans);
  return spans == 1 ? p.seqlen : ceil_div(tiles, spans) * kTileSteps;
}

bool can_reuse_chunk_states(const SelectiveScanBwdParams& p, const Plan& plan) {
  return plan.is_sequential && !p.is_packed() && plan.sequential.group_channels % plan.sequential.block_channels == 0 &&
         is_aligned(p.chunk_states, sizeof(float), {});
}

template <typename Scalar>
SelectiveScanBwdParams span_params(const SelectiveScanBwdParams& p, int64_t begin, int64_t steps, void* carry) {
  using Acc = std::conditional_t<std::is_same_v<Scalar, double>, double, float>;
  SelectiveScanBwdParams span = p;
  span.seqlen = steps;
  for (SequenceView* view : {&span.u, &span.delta, &span.z, &span.grad_out, &span.grad_u, &span.grad_delta, &span.grad_z}) {
    *view = from_step<Scalar>(*view, begin);
  }
  for (MatrixView* view : {&span.B, &span.C, &span.grad_B, &span.grad_C}) *view = from_step<Scalar>(*view, begin);
  const int64_t states = p.dim * p.dstate;
  span.chunk_states = static_cast<const Acc*>(p.chunk_states) + begin / p.chunk_length * states;
  if (begin + steps < p.seqlen) span.grad_last_state = {carry, states, p.dstate, 1};
  if (begin > 0) span.grad_initial_state = carry;
  return span;
}

template <typename Scalar, typename Params>
Plan plan_carry_pass(const Params& p, const DeviceLimits& device) {
  Plan plan;
  plan.warp_scan = plan_warp_scan<Scalar>(p, device, /*carry_pass=*/true);
  plan.shared_bytes = warp_scan_shared_bytes<Scalar>(p, plan.warp_scan);
  return plan;
}

namespace {

// Calls visit(view, access) for each tensor that the warp scan moves in tiles.
template <typename Visitor>
void for_each_tile(SelectiveScanParams& p, warp_scan::ScanPlan& plan, const Visitor& visit) {
  visit(p.u, plan.u);
  visit(p.delta, plan.delta);
  visit(p.z, plan.z);
  visit(p.B, plan.B);
  visit(p.C, plan.C);
}
template <typename Visitor>
void for_each_tile(SelectiveScanFwdParams& p, warp_scan::ScanPlan& plan, const Visitor& visit) {
  for_each_tile(static_cast<SelectiveScanParams&>(p), plan, visit);
  visit(p.out, plan.out);
}
template <typename Visitor>
void for_each_tile(SelectiveScanBwdParams& p, warp_scan::ScanPlan& plan, const Visitor& visit) {
  for_each_tile(static_cast<SelectiveScanParams&>(p), plan, visit);
  visit(p.grad_out, plan.grad_out);
  visit(p.grad_u, plan.grad_u);
  visit(p.grad_delta, plan.grad_delta);
  visit(p.grad_z, plan.grad_z);
}

}  // namespace

template <typename Scalar, typename Params>
void point_at_vectors(Params& p, Plan& plan) {
  const auto sequential_access_of = [&](const auto& view) {
    if constexpr (std::is_same_v<std::decay_t<decltype(view)>, MatrixView>) {
      return &view == &p.B ? plan.sequential.B : plan.sequential.C;
    } else {
      return plan.sequential.sequences;
    }
  };
  for_each_tile(p, plan.warp_scan, [&](auto& view, VectorAccess& access) {
    const VectorAccess main_access = plan.is_sequential ? sequential_access_of(view) : access;
    if (main_access == VectorAccess::kDescending && view.data != nullptr) {
      view.data = static_cast<Scalar*>(view.data) - (kVectorBytes / static_cast<int64_t>(sizeof(Scalar)) - 1);
    } else if (access == VectorAccess::kDescending) {
      access = VectorAccess::kSingly;
    }
  });
}

template <typename Scalar>
bool has_layout(const SequenceView& view, const SelectiveScanParams& p, const sequential::ScanPlan& plan) {
  switch (plan.sequences) {
    case VectorAccess::kAlongSteps:
      return is_along_steps(view, sizeof(Scalar));
    case VectorAccess::kAlongChannels:
      return is_along_channels(view, sizeof(Scalar));
    case VectorAccess::kShifted:
      return has_rows_of_steps(view, sizeof(Scalar));
    case VectorAccess::kShiftedChannels:
      return has_rows_of_channels(view, sizeof(Scalar));
    case VectorAccess::kDescending:
      return is_descending(view, p, sizeof(Scalar));
    case VectorAccess::kSingly:
      break;
  }
  return true;
}

#define SSM_PLANS(Scalar)                                                                                      \
  template SelectiveScanBwdParams span_params<Scalar>(const SelectiveScanBwdParams&, int64_t, int64_t, void*); \
  template Plan plan_fwd<Scalar>(const SelectiveScanFwdParams&, const DeviceLimits&, KernelChoice);            \
  template Plan plan_bwd<Scalar>(const SelectiveScanBwdParams&, const DeviceLimits&, KernelChoice);            \
  template Plan plan_carry_pass<Scalar>(const SelectiveScanFwdParams&, const DeviceLimits&);                   \
  template Plan plan_carry_pass<Scalar>(const SelectiveScanBwdParams&, const DeviceLimits&);                   \
  template void point_at_vectors<Scalar>(SelectiveScanFwdParams&, Plan&);                                      \
  template void point_at_vectors<Scalar>(SelectiveScanBwdParams&, Plan&);                                      \
  template bool has_layout<Scalar>(const SequenceView&, const SelectiveScanParams&, const sequential::ScanPlan&);
SSM_PLANS(float)
SSM_PLANS(double)
SSM_PLANS(__half)
SSM_PLANS(__nv_bfloat16)
#undef SSM_PLANS

}  // namespace ssm_kernels::selective_scan

#endif
