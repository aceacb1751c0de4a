// Warp scan, backward: a block's shared memory, and how a tile of a call with shifted vectors moves.
#pragma once

#include "selective_scan/cuda/shared_arrays.cuh"
#include "selective_scan/cuda/warp_scan_matrix.cuh"

namespace ssm_kernels::selective_scan::warp_scan {

template <typename Scalar>
using BwdTileConfig =
    TileConfig<Scalar, BwdSizes::log2_warps(std::is_same_v<Scalar, double>), BwdSizes::kLog2TimeLanes, BwdSizes::kLog2Steps>;

// The arrays in a block's shared memory.
template <typename TileConfig>
struct BwdShared {
  using Scalar = typename TileConfig::Scalar;
  using Acc = typename TileConfig::Acc;
  static constexpr int kMaxSlice = BwdSizes::kMaxSlice;
  // Per state and warp: sums for the gradients of B and C, (2, steps of a tile).
  static constexpr int kSums = 2 * TileConfig::kTileSteps, kSumsPerState = TileConfig::kWarps * kSums;

  // Per channel and state: scaled A, the state before the tile, the adjoint from after it, and the gradient of A.
  static constexpr int kA = 0, kBefore = 1, kAdjoint = 2, kGradA = 3, kPerState = 4;

  Scalar *u, *delta, *z, *grad_out;
  Acc* states;  // (channels, dstate, kPerState)
  Acc *decay, *grad_constant_B, *grad_constant_C;
  Acc *B, *C;
  Acc* zeros;      // B and C for lanes without a channel: zero times an infinite B would be NaN
  Acc* warp_sums;  // (states of a slice, warps, kSums)
  // Each thread's terms of the gradients of D and delta_bias.
  Acc* grad_channel;
  Position* position;
  BwdRows<Scalar>* rows;
  Arguments<SelectiveScanBwdParams>* arguments;
  int64_t bytes;

  // per_step: known at compile time of Pass::kPerStep, whose addresses then depend on fewer parameters.
  SSM_HOST_DEVICE BwdShared(unsigned char* memory, const SelectiveScanParams& p, const ScanPlan& plan, bool per_step = false) {
    const int count = state_rows<TileConfig>(plan) * state_pitch(p);
    const bool carry_pass = !per_step && plan.carry_pass;
    const bool has_B_steps = per_step || p.B.per_step, has_C_steps = per_step || p.C.per_step;
    const bool sums = !carry_pass && (has_B_steps || has_C_steps);
    SharedAllocator shared(memory);
    // Arrays of constant size first: their addresses are known at compile time.
    grad_channel = shared.allocate<Acc>(2 * TileConfig::kThreads);
    position = shared.allocate<Position>(1);
    rows = shared.allocate<BwdRows<Scalar>>(1);
    zeros = shared.allocate<Acc>(TileConfig::kSteps);
    delta = shared.allocate<Scalar>(SequenceTile<TileConfig>::kCapacity);
    grad_out = shared.allocate<Scalar>(SequenceTile<TileConfig>::kCapacity);
    u = shared.allocate<Scalar>(carry_pass ? 0 : SequenceTile<TileConfig>::kCapacity);
    z = shared.allocate<Scalar>(p.z.data != nullptr ? SequenceTile<TileConfig>::kCapacity : 0);
    B = shared.allocate<Acc>(has_B_steps && !carry_pass ? kMaxSlice * MatrixSlice<TileConfig, kMaxSlice>::kPitch : 0);
    C = shared.allocate<Acc>(has_C_steps ? kMaxSlice * MatrixSlice<TileConfig, kMaxSlice>::kPitch : 0);
    warp_sums = shared.allocate<Acc>(sums ? plan.slice * kSumsPerState : 0);
    states = shared.allocate<Acc>(kPerState * count);
    decay = shared.allocate<Acc>(carry_pass ? count : 0);
    grad_constant_B = shared.allocate<Acc>(has_B_steps || carry_pass ? 0 : count);
    grad_constant_C = shared.allocate<Acc>(has_C_steps || carry_pass ? 0 : count);
    arguments = shared.allocate<Arguments<SelectiveScanBwdParams>>(plan.has_shifted_vectors ? 1 : 0);
    bytes = shared.bytes();
  }
};

// How a tile of a call with shifted vectors moves.
template <typename TileConfig>
struct AnyBwdTile {
  using Scalar = typename TileConfig::Scalar;
  using Sequence = SequenceTile<TileConfig>;

  // Calls visit(p, plan, shared, at, rows) with what bwd_block has.
  template <typename Visitor>
  __device__ __forceinline__ static void visit(int arguments, const Visitor& visit) {
    extern __shared__ __align__(kVectorBytes) unsigned char memory[];
    const auto& [p, plan] = Arguments<SelectiveScanBwdParams>::at(memory, arguments);
    const BwdShared<TileConfig> shared(memory, p, plan);
    if constexpr (kHasShiftedVectors<Scalar>) visit(p, plan, shared, *shared.position, *shared.rows);
  }

  __device__ __noinline__ static void load(int arguments, int64_t t0) {
    visit(arguments, [&](const auto& p, const auto& plan, const auto& shared, const Position& at, const BwdRows<Scalar>& rows) {
      const int steps = at.steps_from(t0, TileConfig::kTileSteps);
      const int64_t left = p.dim - at.first_channel;
      for_each_input(p, plan, shared, rows, [&](const Sequence& tile, const SequenceView& view, const Scalar* row) {
        tile.load_any(view, row, t0, at.channels, steps);
      });
      const SequenceView u_view = plan.carry_pass ? SequenceView() : p.u;
      const Sequence delta{shared.delta, plan.delta}, grad_out{shared.grad_out, plan.grad_out}, z{shared.z, plan.z},
          u{shared.u, plan.u};
      typename Sequence::ChannelLoads of_delta, of_grad_out, of_z, of_u;
      delta.load_channels_any(p.delta, rows.delta, t0, at.channels, steps, left, of_delta);
      grad_out.load_channels_any(p.grad_out, rows.grad_out, t0, at.channels, steps, left, of_grad_out);
      if (sizeof(Scalar) == 4) delta.store_loads_any(p.delta, of_delta);  // registers for three tensors in flight
      z.load_channels_any(p.z, rows.z, t0, at.channels, steps, left, of_z);
      u.load_channels_any(u_view, rows.u, t0, at.channels, steps, left, of_u);
      if (sizeof(Scalar) < 4) delta.store_loads_any(p.delta, of_delta);
      grad_out.store_loads_any(p.grad_out, of_grad_out);
      z.store_loads_any(p.z, of_z);
      u.store_loads_any(u_view, of_u);
    });
  }
  __device__ __noinline__ static void finish_load(int arguments, int64_t t0) {
    visit(arguments, [&](const auto& p, const auto& plan, const auto& shared, const Position&, const BwdRows<Scalar>& rows) {
      for_each_input(p, plan, shared, rows, [&](const Sequence& tile, const SequenceView& view, const Scalar* row) {
        tile.finish_load_any(view, row, t0);
      });
    });
  }
  __device__ __noinline__ static void stage(int arguments, int first_state, int64_t t0) {
    visit(arguments, [&](const auto& p, const auto& plan, const auto& shared, const Position& at, const BwdRows<Scalar>& rows) {
      using Slice = MatrixSlice<TileConfig, BwdShared<TileConfig>::kMaxSlice>;
      const int states = min(plan.slice, static_cast<int>(p.dstate) - first_state);
      for_each_tensor(plan.carry_pass ? 1 : 2, [&](int i) {
        const bool is_C = i == 0;
        Slice{is_C ? shared.C : shared.B}.stage_any(p, at, is_C ? plan.C : plan.B, is_C ? p.C : p.B, is_C ? rows.C : rows.B,
                                                    first_state, t0, states);
      });
    });
  }
  __device__ __noinline__ static void store(int arguments, int64_t t0) {
    visit(arguments, [&](const auto& p, const auto& plan, const auto& shared, const Position& at, const BwdRows<Scalar>& rows) {
      const int steps = at.steps_from(t0, TileConfig::kTileSteps);
      for_each_tensor(p.replaces_grad_out ? 4 : 3, [&](int i) {
        Scalar* const data = i == 0 ? shared.u : i == 1 ? shared.delta : i == 2 ? shared.z : shared.grad_out;
        const VectorAccess access = i == 0 ? plan.grad_u : i == 1 ? plan.grad_delta : i == 2 ? plan.grad_z : plan.grad_out;
        const SequenceView& view = i == 0 ? p.grad_u : i == 1 ? p.grad_delta : i == 2 ? p.grad_z : p.grad_out;
        Scalar* const row = i == 0 ? rows.grad_u : i == 1 ? rows.grad_delta : i == 2 ? rows.grad_z : rows.grad_out;
        Sequence{data, access}.store_any(view, row, t0, at.channels, steps);
      });
    });
  }

 private:
  // Calls visit(tile, view, row) for delta, grad_out, z and, but for a carry pass, u.
  template <typename Visitor>
  __device__ __forceinline__ static void for_each_input(const SelectiveScanBwdParams& p, const ScanPlan& plan,
                                                        const BwdShared<TileConfig>& shared, const BwdRows<Scalar>& rows,
                                                        const Visitor& visit) {
    for_each_tensor(plan.carry_pass ? 3 : 4, [&](int i) {
      Scalar* const data = i == 0 ? shared.delta : i == 1 ? shared.grad_out : i == 2 ? shared.z : shared.u;
      const VectorAccess access = i == 0 ? plan.delta : i == 1 ? plan.grad_out : i == 2 ? plan.z : plan.u;
      const SequenceView& view = i == 0 ? p.delta : i == 1 ? p.grad_out : i == 2 ? p.z : p.u;
      const Scalar* const row = i == 0 ? rows.delta : i == 1 ? rows.grad_out : i == 2 ? rows.z : rows.u;
      visit(Sequence{data, access}, view, row);
    });
  }
};

}  // namespace ssm_kernels::selective_scan::warp_scan
