// The persistent tile scheduler of the forward kernels: every block processes a range of equally many chunks, whatever the
// lengths of the sequences.
//
// A work tile is one sequence of one group's pair of state tiles, all its chunks. The scheduler concatenates all work tiles and
// cuts them into ranges, at most as many as there are multiprocessors; each block processes one range. The part of a work tile
// in one range is a segment. Where a segment ends before its work tile does, the next block needs the state:
//
//   A work tile no longer than a range is cut at most once: its first segment is the last of a range, its second the first of
//   the next. A block processes its segments from the last to the first. The state is therefore in global memory, in fp32,
//   mostly long before the next block looks back for it, and the results equal those of an uncut work tile. A block takes its
//   range by a ticket (cuda/carry.cuh) and waits only for the block of the range before, which stores the state after its own
//   first segment, for which it waits for no other block.
//
//   A longer work tile has segments that fill their ranges. A kernel before forward's computes the summary of each segment but
//   the last: the state after the segment, begun with zero, and the segment's decay. A block that begins inside the work tile
//   folds the earlier segments' summaries, in order.
#pragma once

#include "cuda/carry.cuh"
#include "cuda/chunked/span.cuh"

namespace ssm_kernels::cuda::chunked {

// Whether the parameters have `work_tiles_of_block`, which divides the number of work tiles: positions in the order of ranges
// then count through every (work_tiles / work_tiles_of_block)-th work tile first. Blocks with ranges of that many whole work
// tiles take neighboring ones at the same time.
template <typename Params>
constexpr bool kAreStrided = false;

// A work tile: its number, and its first chunk and number of chunks among the chunks of all work tiles, fewer than 2^31. A
// sequence without steps counts as one chunk.
struct WorkTile {
  int index, first, chunks;

  // The work tile that contains a chunk.
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
    if constexpr (kAreStrided<Params>) {
      const int blocks = static_cast<int>(schedule.work_tiles) / p.work_tiles_of_block;
      index = index % p.work_tiles_of_block * blocks + index / p.work_tiles_of_block;
    }
  }
};

// The number of the block's range, in shared memory so that it takes no register.
__device__ __forceinline__ int& ticket_of_block() {
  __shared__ int ticket;
  return ticket;
}
constexpr int kTicketBytes = 128;  // with the padding that aligns the memory after it

// Thread 0 takes the block's range: the given one, or one by a ticket if blocks wait for one another, else by blockIdx. Call
// __syncthreads() before using it.
__device__ __forceinline__ void take_range(int range) {
  if (threadIdx.x == 0) ticket_of_block() = range;
}
__device__ __forceinline__ void take_range(const Schedule& schedule) {
  if (threadIdx.x != 0) return;
  ticket_of_block() = schedule.ticket_counter == nullptr ? static_cast<int>(blockIdx.x) : take_ticket(schedule.ticket_counter);
}

// Iterates over the segments of the block's range, from the last to the first. It keeps the end of the current segment and
// recomputes all else at each use, because registers are few.
template <typename Params>
class TileScheduler {
 public:
  __device__ __forceinline__ TileScheduler(const Params& p, const Schedule& schedule) : p_(p), schedule_(schedule) {
    end_ = first() + min(length(), chunks() - first());
  }

  // The end of the current segment, among the chunks of all work tiles.
  __device__ __forceinline__ int end() const { return end_; }
  __device__ __forceinline__ bool is_done() const { return end_ == first(); }
  __device__ __forceinline__ WorkTile work_tile() const { return WorkTile(p_, schedule_, end_ - 1); }
  // Whether the current segment, which is part of that work tile, begins it or ends it.
  __device__ __forceinline__ bool begins(const WorkTile& work_tile) const { return begin(work_tile) == work_tile.first; }
  __device__ __forceinline__ bool ends(const WorkTile& work_tile) const { return end_ == work_tile.first + work_tile.chunks; }
  __device__ __forceinline__ bool is_long(const WorkTile& work_tile) const { return work_tile.chunks > length(); }
  __device__ __forceinline__ int block_of_chunk(int chunk) const { return chunk / length(); }
  __device__ __forceinline__ WorkSpan span() const {
    const WorkTile work_tile = this->work_tile();
    WorkSpan at(p_, schedule_, work_tile.index);
    at.narrow(begin(work_tile) - work_tile.first, end_ - begin(work_tile));
    return at;
  }
  // Whether later segments fold this one's summary. Only the first one, which is a range's last in time, may have one.
  __device__ __forceinline__ bool has_summary() const {
    if (is_done()) return false;
    const WorkTile work_tile = this->work_tile();
    return !ends(work_tile) && is_long(work_tile);
  }
  __device__ __forceinline__ void advance() { end_ = begin(work_tile()); }

 private:
  __device__ __forceinline__ int chunks() const {
    if (!is_packed(p_)) return static_cast<int>(schedule_.work_tiles * schedule_.chunks);
    return schedule_.chunk_starts[p_.batch] * schedule_.work_tiles_per_entry;
  }
  __device__ __forceinline__ int begin(const WorkTile& work_tile) const { return max(first(), work_tile.first); }
  // Chunks of each range.
  __device__ __forceinline__ int length() const {
    if (!is_packed(p_)) return static_cast<int>(schedule_.length);
    return (chunks() + gridDim.x - 1) / gridDim.x;
  }
  __device__ __forceinline__ int first() const { return min(ticket_of_block() * length(), chunks()); }

  const Params& p_;
  const Schedule& schedule_;
  int end_;
};

// Calls body(scheduler, span) for each segment of the block's range.
template <typename Params, typename Body>
__device__ __forceinline__ void for_each_segment(const Params& p, const Schedule& schedule, const Body& body) {
  TileScheduler<Params> scheduler(p, schedule);
#pragma unroll 1
  while (!scheduler.is_done()) {
    body(scheduler, scheduler.span());
    scheduler.advance();
  }
}

}  // namespace ssm_kernels::cuda::chunked
