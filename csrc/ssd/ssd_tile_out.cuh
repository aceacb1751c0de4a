// How a unit's out leaves shared memory: a chunk's tile as one copy, which runs beside everything else. Stores from registers
// would keep these for as long as they wait behind the loads of the chunks ahead.
#pragma once

#include "cuda/bulk_copy.cuh"
#include "ssd/ssd_fragments.cuh"

namespace ssm_kernels::ssd {

// By all threads of a unit, for each chunk of a piece: write(), then a barrier of the unit, then send(), or for the piece's
// last chunk send_last(), with no products under way; before the next write() wait_for_sent() and a barrier. At the end of the
// kernel wait_for_sent().
template <typename Scalar, typename Order>
class TileOut {
 public:
  __device__ __forceinline__ TileOut(const SsdFwdParams& p, const Place& at, const Unit& unit, const Lane& lane)
      : p_(p), rounder_(p, unit, lane), at_(at), unit_(unit) {}

  __device__ __forceinline__ void write(const float (&y)[kStepBlocks][4], const uint32_t (&x)[kStepGroups][4],
                                        Tile<kUnitRows>* z_tile, Tile<kUnitRows>& tile, const Lane& lane) const {
    rounder_.round(y, x, z_tile, tile, lane);
    cuda::publish_to_products();
  }

  // What the tensor does not have of the tile is not written.
  __device__ __forceinline__ void send(const Tile<kUnitRows>& tile, int chunk) const {
    cuda::tensor_store(p_.out_map, unit_.first_row, unit_.head, static_cast<int>(at_.start) + chunk * kChunk,
                       static_cast<int>(at_.batch), &tile, unit_.is_there() && thread() == 0);
  }
  // Of the last chunk of a packed sequence, the steps that follow are the next one's: its own are stored.
  __device__ __forceinline__ void send_last(Tile<kUnitRows>& tile) const {
    const int chunk = at_.chunks - 1, steps = at_.steps_of(chunk);
    if (!unit_.is_there() || chunk < 0 || steps <= 0) return;
    if (steps == kChunk || !is_packed(p_)) {
      send(tile, chunk);
      return;
    }
    constexpr int kPieces = Tile<kUnitRows>::kPieces;
    Scalar* const target = at_.template rows<Scalar>(p_.out, unit_.head, chunk) + unit_.first_row;
    for (int i = thread(); i < steps * kPieces; i += kUnitThreads) {
      const int row = i / kPieces, piece = i % kPieces, column = piece * Tile<kUnitRows>::kPieceElements;
      if (column < unit_.rows) {
        __stcg(reinterpret_cast<uint4*>(target + row * p_.out.stride_step + column), *tile.piece(row, piece));
      }
    }
  }
  static __device__ __forceinline__ void wait_for_sent() { cuda::wait_for_bulk_reads<0>(); }

 private:
  static __device__ __forceinline__ int thread() { return threadIdx.x % kUnitThreads; }

  const SsdFwdParams& p_;
  OutRounder<Scalar, Order> rounder_;
  const Place& at_;
  const Unit& unit_;
};

}  // namespace ssm_kernels::ssd
