// Loads of tiles by TMA from rows that are no vectors of 16 bytes: they begin at any element, because TMA's coordinates do.
// Only the distance of steps has to be a multiple of 16 bytes (tensors.h, describe_rows).
//
// In forward, the rows of all heads of a step are one row of the tensor that TMA reads. A tile of x or z may therefore have
// elements of the next head after its own. They only get into rows of states and of out that nobody stores. Tiles of B and C,
// whose columns are summed, have zeros there: with several groups, only rows that fill their tiles are loaded. Backward sums
// over the elements of x and of the gradient of y, and loads them by head (HeadTiles).
#pragma once

#include "cuda/ptx/tma.cuh"
#include "ssd/cuda/chunk_cumsum.cuh"

namespace ssm_kernels::ssd {

// Where TMA finds the rows of a head.
struct HeadPlace {
  const cuda::TmaDescriptor& descriptor;
  int first, entry;  // coordinates: the row's first element, and the head among those of its descriptor

  __device__ __forceinline__ HeadPlace(const HeadTiles& tiles, const RowsView& view, int head)
      : descriptor(tiles.descriptors[head & ((1 << tiles.log2_classes) - 1)]),
        first((tiles.first + head * static_cast<int>(view.stride_head)) & (kRowElements - 1)),
        entry(head >> tiles.log2_classes) {}
};

// Starts to load a chunk's rows of one head, from `row` on, to a tile. Called by one thread, which arrives at the barrier
// later.
__device__ __forceinline__ void load_head_tile(SmemTile<kStateRows>& tile, const HeadTiles& tiles, const RowsView& view,
                                               int head, int row, const ChunkSpan& at, int chunk, Mbarrier& full) {
  const HeadPlace at_head(tiles, view, head);
  full.expect_tx(sizeof(tile));
  cuda::tma_load_tile(&tile, at_head.descriptor, at_head.first + row, at_head.entry,
                      static_cast<int>(at.start) + chunk * kChunk, static_cast<int>(at.batch), full);
}

constexpr int kLoadedSteps = cuda::kBlockSteps;  // of a load: steps that are neighbors in a tile of any order

// Starts to load a chunk's rows of one head or group, from `column` on, to a tile. Called by `threads` threads, which arrive at
// the barrier later; one of each warp starts loads.
template <int threads, typename Order, int columns>
__device__ __forceinline__ void load_tile(SmemTile<columns>& tile, const RowTiles& rows, int head, int column,
                                          const ChunkSpan& at, int chunk, Mbarrier& full, int thread) {
  using Tile = SmemTile<columns>;
  constexpr int kBlocks = kChunk / kLoadedSteps, kPanelColumns = columns / Tile::kPanels;
  const int first = rows.first + head * rows.stride_head + column, step = static_cast<int>(at.start) + chunk * kChunk;
  if (thread == 0) full.expect_tx(sizeof(tile));
  if (thread % kWarpSize != 0) return;
#pragma unroll 1
  for (int load = thread / kWarpSize; load < Tile::kPanels * kBlocks; load += threads / kWarpSize) {
    const int panel = load / kBlocks, block = load % kBlocks;
    cuda::tma_load_tile(tile.panels[panel][kLoadedSteps * Order::position_of(block)], rows.descriptor,
                        first + panel * kPanelColumns, step + block * kLoadedSteps, static_cast<int>(at.batch), 0, full);
  }
}

}  // namespace ssm_kernels::ssd
