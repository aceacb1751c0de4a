// How forward's blocks share the walks: in runs of equal length, whatever the lengths of the sequences.
//
// The chunks of all walks, one walk after another, are cut into at most as many runs as there are multiprocessors; a block
// takes one. What a run has of a walk is a piece. Where a piece ends before its walk does, the next run needs the state there:
//
//   A walk no longer than a run is cut once at most. Its first piece is the last of a run, its second the first of the next. A
//   block takes its pieces from the last to the first, so that the state is there, in fp32, mostly long before the next block
//   asks, and the results are those of a walk that was not cut. A block waits for none but the block of the run before. CUDA
//   promises no order of blocks, so that each takes its run by a ticket: the block waited for has begun, and comes to the
//   state in question, in its first piece, without waiting for anybody.
//
//   A longer walk has pieces that fill their runs. A kernel before forward's finds what each piece but the last does to a state
//   (the state after it, begun with zero, and its decay); who begins inside the walk folds these in order.
#pragma once

#include "ssd/cuda/chunk_cumsum.cuh"

namespace ssm_kernels::ssd {

// A walk, by its first chunk and number of chunks among those of all walks, fewer than 2^31. One without steps has a chunk
// nonetheless.
struct WorkTile {
  int index, first, chunks;

  // The one that has that chunk.
  template <typename Params>
  __device__ __forceinline__ WorkTile(const Params& p, const Schedule& schedule, int chunk) {
    const int work_tiles_per_entry = schedule.work_tiles_per_entry;
    int entry = 0, before = 0;
    chunks = static_cast<int>(schedule.chunks);
    if (is_packed(p)) {
      int high = static_cast<int>(p.batch);
      while (high - entry > 1) {
        const int middle = (entry + high) / 2;
        (schedule.chunk_starts[middle] * work_tiles_per_entry <= chunk ? entry : high) = middle;
      }
      before = schedule.chunk_starts[entry] * work_tiles_per_entry;
      chunks = schedule.chunk_starts[entry + 1] - schedule.chunk_starts[entry];
    }
    const int work_tile = (chunk - before) / chunks;
    index = entry * work_tiles_per_entry + work_tile;
    first = before + work_tile * chunks;
  }
};

// The number of the block's run, kept in shared memory so that it takes no register.
__device__ __forceinline__ int& ticket_of_block() {
  __shared__ int ticket;
  return ticket;
}
constexpr int kTicketBytes = 128;  // with what the alignment of the memory after it leaves

// Thread 0 takes the block's run: a ticket, or blockIdx where no block waits. Call __syncthreads() before using it.
template <bool states_only>
__device__ __forceinline__ void take_ticket(const Schedule& schedule) {
  if (threadIdx.x != 0) return;
  ticket_of_block() =
      states_only || schedule.tickets == nullptr ? static_cast<int>(blockIdx.x) : atomicAdd(schedule.tickets, 1);
}

// The pieces of the block's run, from the last to the first. All but where the one at hand ends is
// computed again when it is asked for: between, registers are few.
template <typename Params>
class TileScheduler {
 public:
  __device__ __forceinline__ TileScheduler(const Params& p, const Schedule& schedule) : p_(p), schedule_(schedule) {
    end_ = first() + min(length(), chunks() - first());
  }

  __device__ __forceinline__ bool is_done() const { return end_ == first(); }
  __device__ __forceinline__ WorkTile work_tile() const { return WorkTile(p_, schedule_, end_ - 1); }
  // Of the piece at hand, which is of that walk.
  __device__ __forceinline__ bool begins(const WorkTile& work_tile) const { return begin(work_tile) == work_tile.first; }
  __device__ __forceinline__ bool ends(const WorkTile& work_tile) const { return end_ == work_tile.first + work_tile.chunks; }
  __device__ __forceinline__ bool is_long(const WorkTile& work_tile) const { return work_tile.chunks > length(); }
  __device__ __forceinline__ int block_of_chunk(int chunk) const { return chunk / length(); }
  __device__ __forceinline__ WorkSpan place() const {
    const WorkTile work_tile = this->work_tile();
    WorkSpan at(p_, schedule_, work_tile.index);
    at.narrow(begin(work_tile) - work_tile.first, end_ - begin(work_tile));
    return at;
  }
  __device__ __forceinline__ void go_on() { end_ = begin(work_tile()); }

 private:
  __device__ __forceinline__ int chunks() const {
    if (!is_packed(p_)) return static_cast<int>(schedule_.work_tiles * schedule_.chunks);
    return schedule_.chunk_starts[p_.batch] * schedule_.work_tiles_per_entry;
  }
  __device__ __forceinline__ int begin(const WorkTile& work_tile) const { return max(first(), work_tile.first); }
  // Of each run.
  __device__ __forceinline__ int length() const {
    if (!is_packed(p_)) return static_cast<int>(schedule_.length);
    return (chunks() + gridDim.x - 1) / gridDim.x;
  }
  __device__ __forceinline__ int first() const { return min(ticket_of_block() * length(), chunks()); }

  const Params& p_;
  const Schedule& schedule_;
  int end_;
};

// body(pieces, place) for each piece of the block's run; where only states are to be found, for the one, if there is one, that
// other runs fold.
template <bool states_only, typename Params, typename Body>
__device__ __forceinline__ void for_each_segment(const Params& p, const Schedule& schedule, const Body& body) {
  TileScheduler<Params> scheduler(p, schedule);
#pragma unroll 1
  while (!scheduler.is_done()) {
    if constexpr (states_only) {
      const WorkTile work_tile = scheduler.work_tile();
      if (scheduler.ends(work_tile) || !scheduler.is_long(work_tile)) return;
    }
    body(scheduler, scheduler.place());
    if (states_only) return;
    scheduler.go_on();
  }
}

constexpr int kChunkStartsThreads = 1024;

// One block writes Schedule::chunk_starts, each thread for some neighboring sequences, and clears the flags and the ticket
// counter.
static __global__ void __launch_bounds__(kChunkStartsThreads)
    ssd_chunk_starts_kernel(const __grid_constant__ SsdFwdParams p, const __grid_constant__ Schedule schedule) {
  constexpr int kWarps = kChunkStartsThreads / kWarpSize;
  __shared__ int64_t of_warps[kWarps];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  for (int64_t i = threadIdx.x; i < schedule.blocks * kWarpgroups; i += kChunkStartsThreads) schedule.ready[i] = 0;
  if (threadIdx.x == 0) *schedule.tickets = 0;

  // Exceeded where cu_seqlens, which nobody has checked where a graph is captured, is wrong.
  const int64_t most = max_packed_chunks(p.seqlen, p.batch);
  const int64_t count = (p.batch + kChunkStartsThreads - 1) / kChunkStartsThreads;
  const int64_t first = min(threadIdx.x * count, p.batch), end = min(first + count, p.batch);
  const auto chunks_of = [&](int64_t entry) { return max(1, ChunkSpan(p, entry).chunks); };
  int64_t own = 0;
  for (int64_t entry = first; entry < end; ++entry) own += chunks_of(entry);
  const auto sum_of_earlier_lanes = [&](int64_t value) {
    int64_t sum = value;
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int64_t earlier = __shfl_up_sync(kAllLanes, sum, distance);
      if (lane >= distance) sum += earlier;
    }
    return sum - value;
  };
  int64_t before = sum_of_earlier_lanes(own);
  if (lane == kWarpSize - 1) of_warps[warp] = before + own;
  __syncthreads();
  static_assert(kWarps == kWarpSize, "a lane of each warp has the sum of one");
  before += __shfl_sync(kAllLanes, sum_of_earlier_lanes(of_warps[lane]), warp);
  if (threadIdx.x == 0) schedule.chunk_starts[0] = 0;
  for (int64_t entry = first; entry < end; ++entry) {
    before += chunks_of(entry);
    schedule.chunk_starts[entry + 1] = static_cast<int>(min(before, most));
  }
}

}  // namespace ssm_kernels::ssd
