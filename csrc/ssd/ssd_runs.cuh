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

#include "ssd/ssd_chunk.cuh"

namespace ssm_kernels::ssd {

// A walk, by its first chunk and number of chunks among those of all walks, fewer than 2^31. One without steps has a chunk
// nonetheless.
struct Walk {
  int index, first, chunks;

  // The one that has that chunk.
  template <typename Params>
  __device__ __forceinline__ Walk(const Params& p, const Runs& runs, int chunk) {
    const int walks_per_entry = runs.walks_per_entry;
    int entry = 0, before = 0;
    chunks = static_cast<int>(runs.chunks);
    if (is_packed(p)) {
      int high = static_cast<int>(p.batch);
      while (high - entry > 1) {
        const int middle = (entry + high) / 2;
        (runs.chunk_starts[middle] * walks_per_entry <= chunk ? entry : high) = middle;
      }
      before = runs.chunk_starts[entry] * walks_per_entry;
      chunks = runs.chunk_starts[entry + 1] - runs.chunk_starts[entry];
    }
    const int walk = (chunk - before) / chunks;
    index = entry * walks_per_entry + walk;
    first = before + walk * chunks;
  }
};

// The number of the block's run, kept in shared memory so that it takes no register.
__device__ __forceinline__ int& run_of_block() {
  __shared__ int run;
  return run;
}
constexpr int kRunBytes = 128;  // with what the alignment of the memory after it leaves

// Thread 0 takes the block's run: a ticket, or blockIdx where no block waits. Call __syncthreads() before using it.
template <bool states_only>
__device__ __forceinline__ void take_run(const Runs& runs) {
  if (threadIdx.x != 0) return;
  run_of_block() = states_only || runs.tickets == nullptr ? static_cast<int>(blockIdx.x) : atomicAdd(runs.tickets, 1);
}

// The pieces of the block's run, from the last to the first. All but where the one at hand ends is
// found anew when it is asked for: between, registers are few.
template <typename Params>
class Pieces {
 public:
  __device__ __forceinline__ Pieces(const Params& p, const Runs& runs) : p_(p), runs_(runs) {
    end_ = first() + min(length(), chunks() - first());
  }

  __device__ __forceinline__ bool is_done() const { return end_ == first(); }
  __device__ __forceinline__ Walk walk() const { return Walk(p_, runs_, end_ - 1); }
  // Of the piece at hand, which is of that walk.
  __device__ __forceinline__ bool begins(const Walk& walk) const { return begin(walk) == walk.first; }
  __device__ __forceinline__ bool ends(const Walk& walk) const { return end_ == walk.first + walk.chunks; }
  __device__ __forceinline__ bool is_long(const Walk& walk) const { return walk.chunks > length(); }
  __device__ __forceinline__ int run_of(int chunk) const { return chunk / length(); }
  __device__ __forceinline__ Place place() const {
    const Walk walk = this->walk();
    Place at(p_, runs_, walk.index);
    at.narrow(begin(walk) - walk.first, end_ - begin(walk));
    return at;
  }
  __device__ __forceinline__ void go_on() { end_ = begin(walk()); }

 private:
  __device__ __forceinline__ int chunks() const {
    if (!is_packed(p_)) return static_cast<int>(runs_.walks * runs_.chunks);
    return runs_.chunk_starts[p_.batch] * runs_.walks_per_entry;
  }
  __device__ __forceinline__ int begin(const Walk& walk) const { return max(first(), walk.first); }
  // Of each run.
  __device__ __forceinline__ int length() const {
    if (!is_packed(p_)) return static_cast<int>(runs_.length);
    return (chunks() + gridDim.x - 1) / gridDim.x;
  }
  __device__ __forceinline__ int first() const { return min(run_of_block() * length(), chunks()); }

  const Params& p_;
  const Runs& runs_;
  int end_;
};

// body(pieces, place) for each piece of the block's run; where only states are to be found, for the one, if there is one, that
// other runs fold.
template <bool states_only, typename Params, typename Body>
__device__ __forceinline__ void for_each_piece(const Params& p, const Runs& runs, const Body& body) {
  Pieces<Params> pieces(p, runs);
#pragma unroll 1
  while (!pieces.is_done()) {
    if constexpr (states_only) {
      const Walk walk = pieces.walk();
      if (pieces.ends(walk) || !pieces.is_long(walk)) return;
    }
    body(pieces, pieces.place());
    if (states_only) return;
    pieces.go_on();
  }
}

constexpr int kChunkStartsThreads = 1024;

// One block writes Runs::chunk_starts, each thread for some neighboring sequences, and clears the flags and the ticket counter.
static __global__ void __launch_bounds__(kChunkStartsThreads)
    ssd_chunk_starts_kernel(const __grid_constant__ SsdFwdParams p, const __grid_constant__ Runs runs) {
  constexpr int kWarps = kChunkStartsThreads / kWarpSize;
  __shared__ int64_t of_warps[kWarps];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  for (int64_t i = threadIdx.x; i < runs.blocks * kUnits; i += kChunkStartsThreads) runs.ready[i] = 0;
  if (threadIdx.x == 0) *runs.tickets = 0;

  // Exceeded where cu_seqlens, which nobody has checked where a graph is captured, is wrong.
  const int64_t most = max_packed_chunks(p.seqlen, p.batch);
  const int64_t count = (p.batch + kChunkStartsThreads - 1) / kChunkStartsThreads;
  const int64_t first = min(threadIdx.x * count, p.batch), end = min(first + count, p.batch);
  const auto chunks_of = [&](int64_t entry) { return max(1, Span(p, entry).chunks); };
  int64_t own = 0;
  for (int64_t entry = first; entry < end; ++entry) own += chunks_of(entry);
  const auto sum_of_earlier_lanes = [&](int64_t value) {
    int64_t sum = value;
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int64_t earlier = __shfl_up_sync(kWholeWarp, sum, distance);
      if (lane >= distance) sum += earlier;
    }
    return sum - value;
  };
  int64_t before = sum_of_earlier_lanes(own);
  if (lane == kWarpSize - 1) of_warps[warp] = before + own;
  __syncthreads();
  static_assert(kWarps == kWarpSize, "a lane of each warp has the sum of one");
  before += __shfl_sync(kWholeWarp, sum_of_earlier_lanes(of_warps[lane]), warp);
  if (threadIdx.x == 0) runs.chunk_starts[0] = 0;
  for (int64_t entry = first; entry < end; ++entry) {
    before += chunks_of(entry);
    runs.chunk_starts[entry + 1] = static_cast<int>(min(before, most));
  }
}

}  // namespace ssm_kernels::ssd
