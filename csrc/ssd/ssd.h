// Parameters of the SSD kernels: plain data without torch types, so that CUDA sources compile without torch headers.
#pragma once

#include <cstdint>

#include "common/discretization.h"
#include "common/kernel_abi.h"
#include "cuda/chunked/geometry.h"
#include "cuda/tma_descriptor.h"

namespace ssm_kernels::ssd {

// SSD is one of the chunked scans.
using namespace cuda::chunked;

// x and z have rows of heads, B and C rows of groups. The order of all members decides the machine code: ptxas schedules the
// loads of parameters by their addresses.
struct SsdParams : ChunkedGeometry {
  Discretization discretization = Discretization::kZoh;  // one whose transition is e^zeta
  bool dt_softplus = false;
  float dt_min = 0, dt_max = 0;
  RowsView x, z, B, C;
  RowsView dt;                     // rows of one element
  const float* A = nullptr;        // (heads,)
  const float* dt_bias = nullptr;  // (heads,) or null
  const float* D = nullptr;        // (heads, headdim), or null
  int64_t D_stride_head = 0, D_stride_row = 0;
  const int64_t* cu_seqlens = nullptr;
  const uint8_t* resets = nullptr;
  const float* initial_states = nullptr;
  int64_t states_stride_entry = 0;
};

// Backward's workspace per chunk is indexed by a chunk number; first_chunk_index(sequence) is a sequence's first. Packed
// sequences need not begin on a chunk boundary, so some numbers are unused, but none is shared.
struct SsdBwdParams : SsdParams {
  RowsView grad_out;                               // the gradient of y if there is a gate: these kernels do not read z
  const float* grad_final_states = nullptr;        // as initial_states, or null: zero
  RowsView grad_x, grad_dt, grad_B, grad_C;        // null if not needed
  float* grad_initial_states = nullptr;            // as initial_states, or null
  int64_t num_chunks = 0, state_tiles = 0;         // chunks of all sequences; state tiles of all heads
  int64_t splits = 1, heads_per_split = 0;         // blocks that share a group's heads; the last may have fewer heads
  void *states = nullptr, *grad_states = nullptr;  // (num_chunks, state_tiles), swizzled tiles of the inputs' type
  RowsView grad_B_parts, grad_C_parts;             // (splits, batch, seqlen, groups, row), padded, if not written in place
  int64_t parts_stride_split = 0;
  // Partial sums (num_chunks, heads), and (num_chunks, heads, padded headdim) or null, of tensors with parts_heads heads.
  float *grad_A_parts = nullptr, *grad_bias_parts = nullptr, *grad_D_parts = nullptr;
  int64_t parts_heads = 0;
};

struct SsdFwdParams : SsdParams {
  // Its rows are vectors of 16 bytes, possibly with some elements more than headdim.
  RowsView out;
  cuda::TmaDescriptor out_descriptor = {};  // of out, for TMA stores: epilogue.cuh
  float* final_states = nullptr;            // as initial_states
  // The states after chunk_states_every chunks of a row of the batch, after twice as many, and so on: chunk_states_count of
  // them, each (heads, headdim, state_columns); those of the next row begin chunk_states_row states later. Null if none are
  // asked for, if sequences are packed, and for the short scan.
  float* chunk_states = nullptr;
  int chunk_states_every = 1, chunk_states_count = 0;
  int64_t chunk_states_row = 0;
};

// Gates that are given, in place of dt, A and the discretization: the log decay and the gain of each step, both of the inputs'
// type or both of fp32, and of equal strides. Forward calls in C++ may multiply the output of each step by a factor, of fp32
// and of the same strides in bytes as the log decays, if the inputs are of fp16 or bf16, without D and z.
struct GivenGates {
  RowsView log_decay;                              // rows of one element; strides in bytes
  int64_t gain_offset = 0, out_factor_offset = 0;  // from a log decay to its gain and to its factor, in bytes
  bool has_gain = false;                           // else every gain is one
  bool are_fp32 = false;
  bool has_out_factor = false;  // else every factor is one
};
struct SsdLogFwdParams : SsdFwdParams {
  GivenGates gates;
};
// With a gain on the diagonal (Inputs::diagonal_gain), of the gates' type and strides. A step may have 2 to the power
// rank_shift consecutive rows (Inputs::rank_shift), at most eight.
struct SsdDiagonalFwdParams : SsdLogFwdParams {
  int64_t diagonal_gain_offset = 0;  // from a log decay to its diagonal gain, in bytes
  int rank_shift = 0;
};
// Mamba-3's bias and rotation of B and C, which make rows of heads from rows of groups: k_t = R(theta_t) (B_t + B_bias), q_t =
// R(theta_t) (C_t + C_bias), where R rotates the pairs of columns (2 i, 2 i + 1), or (i, i + dstate / 2), for i < angles, by
// the phases theta. Phases are in turns; step t adds tanh(angles_t) dt_t / 2.
struct RowRotation {
  const float* phases = nullptr;  // before each chunk, (batch, chunks, heads, angles)
  RowsView angles;                // rows of `angles_count` elements, of fp32 or of the inputs' type; strides in elements
  const float* dt = nullptr;      // (batch, seqlen, heads)
  const float *B_bias = nullptr, *C_bias = nullptr;  // (heads, dstate), or null
  // Results: k of the last step, (batch, heads, dstate), and its phases in radians, (batch, heads, angles).
  float *final_k = nullptr, *final_angle = nullptr;
  int angles_count = 0;
  bool are_angles_fp32 = false, is_pairs = true;
};
constexpr int kRotatedTileSteps = 8;
struct SsdRotatedFwdParams : SsdDiagonalFwdParams {
  RowRotation rotation;
  // Tiles of kRotatedTileSteps steps of x, and of kChunk steps of z, for TMA loads.
  cuda::TmaDescriptor x_descriptor = {}, z_descriptor = {};
};
struct SsdLogBwdParams : SsdBwdParams {
  GivenGates gates;
  RowsView grad_log_decay, grad_gain;  // of the gates' type; strides in bytes; null if not needed
  RowsView out_products;               // of fp32; strides in bytes; null if not needed: BwdInputs::out_products
};
struct SsdDiagonalBwdParams : SsdLogBwdParams {
  int64_t diagonal_gain_offset = 0;
  RowsView grad_diagonal_gain;  // as grad_gain
  int rank_shift = 0;
};

SSM_KERNEL_STRUCT(SsdFwdParams, 640);
SSM_KERNEL_STRUCT(SsdBwdParams, 624);
SSM_KERNEL_STRUCT(SsdLogFwdParams, 640);
SSM_KERNEL_STRUCT(SsdLogBwdParams, 776);
SSM_KERNEL_STRUCT(SsdDiagonalFwdParams, 640);
SSM_KERNEL_STRUCT(SsdDiagonalBwdParams, 824);
SSM_KERNEL_STRUCT(SsdRotatedFwdParams, 1024);

}  // namespace ssm_kernels::ssd
