// Tasks of the CPU's selective scan, and the table of kernels of one instruction set. entry.cpp is compiled once, the kernels
// (*kernel.cpp) once per instruction set.
//
// A block is a vector of channels, one per SIMD lane, inside one group of B and of C. A task is up to kMaxBlocksPerTask
// consecutive blocks of one row with the same groups, so that B and C are loaded once for all of them. A row is a batch row or
// one of its packed sequences (selective_scan.h). The division depends on the shape and the vector length only, never on the
// number of threads, and so do all sums.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>

#include "common/kernel_abi.h"
#include "common/scalar_kind.h"
#include "selective_scan/selective_scan.h"

namespace ssm_kernels::selective_scan {

constexpr int64_t kMaxBlocksPerTask = 8;
// Chunks per sweep of backward. All tasks finish a sweep before its gradients of B and C are added: threads wait less often in
// long sweeps, and short sweeps need less memory.
constexpr int64_t kMaxChunksPerSweep = 8;
// Packed sequences that backward scans at a time, which bounds its workspace.
constexpr int64_t kRowsPerPass = 64;

struct Blocking {
  int64_t lanes;               // channels per block: the vector length
  int64_t segment;             // channels that share their groups of B and C
  int64_t blocks_per_segment;  // the last block of a segment may be partly empty
  int64_t blocks_per_task;
  int64_t tasks_per_segment;
  int64_t segments;
  int64_t padded_dstate;  // dstate rounded up to whole vectors
  int64_t chunk_length;
  int64_t chunks_per_sweep;
  MethodParameters method;
  const TwoSampleParams* two_samples;  // null for methods that read one

  Blocking(const SelectiveScanParams& p, const MethodParameters& method, int64_t lanes,
           const TwoSampleParams* two_samples = nullptr)
      : lanes(lanes), method(method), two_samples(two_samples) {
    segment = std::gcd(p.B.per_step ? p.dim / p.B.groups : p.dim, p.C.per_step ? p.dim / p.C.groups : p.dim);
    segments = segment == 0 ? 0 : p.dim / segment;
    blocks_per_segment = (segment + lanes - 1) / lanes;
    // At least eight tasks per segment if it has as many blocks, so that one batch row fills several cores.
    blocks_per_task = std::clamp<int64_t>(blocks_per_segment / 8, 1, kMaxBlocksPerTask);
    tasks_per_segment = (blocks_per_segment + blocks_per_task - 1) / blocks_per_task;
    padded_dstate = (p.dstate + lanes - 1) / lanes * lanes;
    chunk_length = p.chunk_length;
    // Bounds the tasks' partial gradients of B and C to chunk_length values per state and channel.
    const int64_t channels_per_task = p.dim / std::max<int64_t>(1, tasks_per_row());
    chunks_per_sweep = std::clamp<int64_t>(std::min(p.chunk_boundaries - 1, channels_per_task), 1, kMaxChunksPerSweep);
  }

  int64_t tasks_per_row() const { return segments * tasks_per_segment; }
  int64_t blocks_per_row() const { return segments * blocks_per_segment; }

  // The offset of a task's partial gradient of B or C for one chunk; tasks are numbered over the rows of a pass.
  int64_t part_offset(int64_t task, int64_t chunk) const {
    return (task * chunks_per_sweep + chunk % chunks_per_sweep) * part_size();
  }
  int64_t part_size() const { return chunk_length * padded_dstate; }
  // The rows of a tile of steps in front of those of a chunk. The last of them is the sample before the chunk; as many as
  // lanes, so that the tile has whole square tiles.
  int64_t rows_before() const { return two_samples == nullptr ? 0 : lanes; }
};

// A task's row, channels and blocks.
struct Task {
  ScanRow row;
  int64_t row_index;
  int64_t first_channel;  // of its first block
  int64_t end_channel;    // of its segment: blocks end there
  int64_t first_block;    // counted over the row
  int64_t blocks;

  Task(const SelectiveScanParams& p, const Blocking& blocking, int64_t index) {
    row_index = index / blocking.tasks_per_row();
    row = p.row(row_index);
    const int64_t in_row = index % blocking.tasks_per_row();
    const int64_t segment = in_row / blocking.tasks_per_segment;
    const int64_t block = in_row % blocking.tasks_per_segment * blocking.blocks_per_task;
    first_channel = segment * blocking.segment + block * blocking.lanes;
    end_channel = (segment + 1) * blocking.segment;
    first_block = segment * blocking.blocks_per_segment + block;
    blocks = std::min(blocking.blocks_per_task, blocking.blocks_per_segment - block);
  }

  int64_t steps() const { return row.end - row.begin; }
};

// Sums that backward carries from one chunk to the next, in the accumulation type. [rows] are those of a pass. Null for
// gradients that are not needed.
struct BwdWorkspace {
  int64_t first_row;  // of the pass
  void* grad_state;   // [rows][blocks][dstate][lanes]: dL/dh at the chunk's end, then at its start
  void* grad_A;       // [rows][blocks][dstate][lanes]
  void* grad_B;       // the same, for a constant B; else [rows][tasks][chunks_per_sweep][chunk_length][padded_dstate], parts
  void* grad_C;       // as grad_B
  void* grad_D;       // [rows][blocks][lanes]
  void* grad_delta_bias;  // [rows][blocks][lanes]
  void* grad_previous;  // [rows][blocks][dstate][lanes], of methods that read two samples: dL/dv of the sample before the chunk
};

// The kernels of one instruction set. `scratch` is scratch_bytes() of 64-byte aligned memory of the calling thread's own.
struct CpuKernels {
  int64_t (*vector_bytes)();
  int64_t (*fwd_scratch_bytes)(const SelectiveScanParams&, const Blocking&, ScalarKind);
  int64_t (*bwd_scratch_bytes)(const SelectiveScanBwdParams&, const Blocking&, ScalarKind);
  // One task, all chunks.
  void (*fwd_task)(const SelectiveScanFwdParams&, const Blocking&, ScalarKind, int64_t task, std::byte* scratch);
  // One task, one chunk, nothing if its row has fewer; chunks are visited from last to first.
  void (*bwd_task)(const SelectiveScanBwdParams&, const Blocking&, const BwdWorkspace&, ScalarKind, int64_t task, int64_t chunk,
                   std::byte* scratch);
  // Adds up the tasks' parts of the gradients of a per-step B and C for one chunk of one row.
  void (*bwd_reduce)(const SelectiveScanBwdParams&, const Blocking&, const BwdWorkspace&, ScalarKind, int64_t row,
                     int64_t chunk, std::byte* scratch);
};

SSM_KERNEL_STRUCT(Blocking, 88);
SSM_KERNEL_STRUCT(BwdWorkspace, 64);
SSM_KERNEL_STRUCT(CpuKernels, 48);

}  // namespace ssm_kernels::selective_scan
