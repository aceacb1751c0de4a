// The last of the delta rule's kernels of backward with mma.sync: all gradients of the steps, of all chunks at once, by the
// formulas of bwd_chunks.cuh, from the states that sm80_states.cuh has written. A block of one warpgroup takes a chunk of a
// value head and a part of the keys' columns; its accumulators have steps as rows. It takes the blocks of 64 rows of V three
// times: for the pairs F and B and for dv, for what steps read from the state, and for what they add to it. Tiles have one
// stage: other blocks of the multiprocessor work while a block waits for its copies.
//
// The kernel writes gradients of q and k of value heads, and terms of those of log decays for each part of the columns. The
// host adds up both. The blocks of the first part also write the gradients of v and beta.
#pragma once

#include "cuda/lane_sums.cuh"
#include "cuda/vector_io.cuh"
#include "delta_rule/cuda/bwd_decay_sums.cuh"
#include "delta_rule/cuda/sm80_chunk.cuh"

namespace ssm_kernels::delta_rule {

template <typename Scalar, int columns>
struct alignas(128) Sm80GradientsShared {
  using RowTile = TileOf<Scalar, columns>;
  RowTile q, k;
  RowTile state;                    // S or D
  StepTile<Scalar> grad_out, y, e;  // rows of grad_out are steps, of Y^T and E^T rows of V
  StepTile<Scalar> f, b;
  DeltaRuleTablesOf<Scalar> tables;
  DecaySums sums;
};

// For each step t the sum over the warp's rows i >= t of the elements in columns before t, as sum_pairs(), but with products
// of TF32 numbers with ones, in two parts that have 22 of fp32's 24 bits.
__device__ __forceinline__ void sum_pairs_of_fp32(const float (&terms)[kStepBlocks][4], float (&target)[kChunk],
                                                  const FragmentLane& lane) {
  constexpr uint32_t kOne = 0x3f800000;
  cuda::Tf32A parts[kStepBlocks];
#pragma unroll
  for (int k = 0; k < kStepBlocks; ++k) {
    const float in_order[4] = {terms[k][0], terms[k][2], terms[k][1], terms[k][3]};
    parts[k].prepare(in_order);
  }
  const uint32_t ones[2] = {kOne, kOne},
                 before[2] = {2 * lane.pair < lane.quad ? kOne : 0, 2 * lane.pair + 1 < lane.quad ? kOne : 0};
  float sums[kStepBlocks][2];
#pragma unroll
  for (int n = 0; n < kStepBlocks; ++n) {
    float of_rows[4] = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k <= n; ++k) {
      cuda::mma_tf32(of_rows, parts[k].low, k < n ? ones : before);
      cuda::mma_tf32(of_rows, parts[k].high, k < n ? ones : before);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int distance = lane.row - (kBlockSteps * n + 2 * lane.pair + i);
      sums[n][i] = (distance >= 0 ? of_rows[i] : 0.0f) + (distance + 8 >= 0 ? of_rows[2 + i] : 0.0f);
    }
  }
#pragma unroll
  for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int distance = 4; distance < kWarpSize; distance *= 2) {
        sums[n][i] += __shfl_xor_sync(kAllLanes, sums[n][i], distance);
      }
    }
    if (lane.quad == n) *reinterpret_cast<float2*>(&target[kBlockSteps * n + 2 * lane.pair]) = {sums[n][0], sums[n][1]};
  }
}

template <typename Scalar, int columns>
struct Sm80Gradients {
  using Shared = Sm80GradientsShared<Scalar, columns>;
  using RowTile = typename Shared::RowTile;
  using Tables = DeltaRuleTablesOf<Scalar>;
  static constexpr int kThreads = kWarpgroupThreads, kColumnBlocks = columns / 8;

  const DeltaRuleSm80Params& p;
  Shared& shared;
  const ChunkOfHead& at;
  int part;

  __device__ __forceinline__ void run() {
    const FragmentLane lane = FragmentLane::opaque_thread();
    copy_bytes<sizeof(Tables)>(&shared.tables, &sm80_matrices_of<Scalar>(p, at.number, at.head)->tables, threadIdx.x, kThreads);
    copy_keys(shared.k, p.k);
    copy_keys(shared.q, p.q);
    make_pairs(lane.opaque());

    float dq[kColumnBlocks][4] = {}, dk[kColumnBlocks][4] = {};
    for_each_block([&](int block) { copy_state(block, 0); },
                   [&](int) {
                     const auto g = operand_of(shared.grad_out, lane), y = operand_of(shared.y, lane),
                                s = operand_of(shared.state, lane);
#pragma unroll kUnrolledGroups < Scalar>
                     for (int k = 0; k < kStepGroups; ++k) {
                       cuda::gemm<Scalar, false, true>(dq, columns_of(g, k), rows_of(s, k), true);
                       cuda::gemm<Scalar, true, true>(dk, rows_of(y, k), rows_of(s, k), true);
                     }
                   });
    write_queries(dq, lane.opaque());
    scale_rows(
        dk, [&](int row) { return -shared.tables.beta[row] * shared.tables.exp_cumsum[row]; }, shared.k, shared.sums.reads[1],
        lane.opaque());

    float added[kColumnBlocks][4] = {}, of_states = 0;
    for_each_block([&](int block) { copy_state(block, 1); },
                   [&](int block) {
                     const auto e = operand_of(shared.e, lane), d = operand_of(shared.state, lane);
#pragma unroll kUnrolledGroups < Scalar>
                     for (int k = 0; k < kStepGroups; ++k) {
                       cuda::gemm<Scalar, true, true>(added, rows_of(e, k), rows_of(d, k), true);
                     }
                     of_states += dot(*state_of(block, 0), shared.state);
                   });
    of_states = cuda::sum_over_warp(of_states);
    if (lane.index == 0) shared.sums.states[lane.warp] = of_states;
    scale_rows(
        added, [&](int row) { return shared.tables.beta[row] * shared.tables.gain_to_chunk_end[row]; }, shared.k,
        shared.sums.adds, lane.opaque());
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dk[n][i] += added[n][i];
    }
    write_keys(dk, lane.opaque());
    if (p.grad_log_decay.data == nullptr) return;
    __syncthreads();
    if (lane.warp != 0) return;
    RowsView terms = p.grad_log_decay;
    terms.data = static_cast<float*>(terms.data) + part * p.grad_log_decay_stride_part;
    write_grad_log_decay(p, terms, at, shared.sums, shared.tables, lane);
  }

 private:
  __device__ __forceinline__ int first_column() const { return part * columns; }
  __device__ __forceinline__ int blocks_of_rows() const { return static_cast<int>(row_blocks(p.headdim)); }

  __device__ __forceinline__ void copy_keys(RowTile& tile, const RowsView& view) const {
    const Scalar* const source =
        at.template rows<Scalar>(view, at.head / p.value_heads_per_key_head, at.chunk) + first_column();
    copy_rows<Scalar, columns>(tile, source, view.stride_step, p.dstate - first_column(), at.steps(), threadIdx.x, kThreads);
  }

  // The workspace of a block of rows of V: S and D, of all columns, then E^T and Y^T.
  __device__ __forceinline__ unsigned char* workspace_of(int block) const {
    const int64_t place = (int64_t(at.number) * p.heads + at.head) * row_blocks(p.headdim) + block;
    return static_cast<unsigned char*>(p.states) + place * sm80_states_bytes(state_tile_columns(p.dstate), sizeof(Scalar));
  }
  __device__ __forceinline__ const RowTile* state_of(int block, int index) const {
    const int64_t bytes = kStateRows * state_tile_columns(p.dstate) * static_cast<int64_t>(sizeof(Scalar));
    return reinterpret_cast<const RowTile*>(workspace_of(block) + index * bytes) + part;
  }
  __device__ __forceinline__ const StepTile<Scalar>* steps_of_block(int block) const {
    const int64_t bytes = kStateRows * state_tile_columns(p.dstate) * static_cast<int64_t>(sizeof(Scalar));
    return reinterpret_cast<const StepTile<Scalar>*>(workspace_of(block) + 2 * bytes);
  }
  __device__ __forceinline__ void copy_steps(StepTile<Scalar>& tile, int block, int index) const {
    copy_bytes<sizeof(tile)>(&tile, steps_of_block(block) + index, threadIdx.x, kThreads);
  }
  __device__ __forceinline__ void copy_grad_out(int block) const {
    const Scalar* const source = at.template rows<Scalar>(p.grad_out, at.head, at.chunk) + block * kStateRows;
    copy_rows<Scalar, kStateRows>(shared.grad_out, source, p.grad_out.stride_step, p.headdim - block * kStateRows, at.steps(),
                                  threadIdx.x, kThreads);
  }
  // S with g and Y, which they multiply, or D with E.
  __device__ __forceinline__ void copy_state(int block, int index) const {
    copy_bytes<sizeof(RowTile)>(&shared.state, state_of(block, index), threadIdx.x, kThreads);
    if (blocks_of_rows() == 1) return;  // the steps of the only block are there
    if (index == 0) {
      copy_grad_out(block);
      copy_steps(shared.y, block, 1);
    } else {
      copy_steps(shared.e, block, 0);
    }
  }

  // Calls copy(block), and multiply(block) once the copies are there.
  template <typename Copy, typename Multiply>
  __device__ __forceinline__ void for_each_block(const Copy& copy, const Multiply& multiply) const {
#pragma unroll 1
    for (int block = 0; block < blocks_of_rows(); ++block) {
      __syncthreads();  // all warps have read the tiles before
      copy(block);
      cuda::cp_async_commit();
      cuda::cp_async_wait<0>();
      __syncthreads();
      multiply(block);
    }
  }

  // F, B, the gradients of v and beta, and the sums over pairs for those of log decays.
  __device__ __forceinline__ void make_pairs(const FragmentLane& lane) {
    const Tables& tables = shared.tables;
    const FragmentPairs<sizeof(Scalar)> pairs(lane);
    float f[kStepBlocks][4] = {}, b[kStepBlocks][4] = {};
    for_each_block(
        [&](int block) {
          copy_grad_out(block);
          copy_steps(shared.e, block, 0);
          copy_steps(shared.y, block, 1);
        },
        [&](int block) {
          const auto g = operand_of(shared.grad_out, lane), y = operand_of(shared.y, lane), e = operand_of(shared.e, lane);
#pragma unroll kUnrolledGroups < Scalar>
          for (int k = 0; k < kStepGroups; ++k) {
            cuda::gemm<Scalar, false, true>(f, columns_of(g, k), rows_of(e, k), true);
            cuda::gemm<Scalar, true, true>(b, rows_of(y, k), rows_of(e, k), true);
          }
          if (part == 0 && p.grad_v.data != nullptr) write_values(block);
        });
    if (part == 0 && p.grad_beta.data != nullptr) write_beta(b, lane);
    const bool may_reset = has_reset(p, tables);
    const auto beta = [&](int n) { return column_pair(tables.beta, n, lane); };
    float factors[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane.row + 8 * half;
      factors[0][half] = tables.query_factor[row];
      factors[1][half] = -key_row_factor(tables, row, tables.beta[row]);
    }
    scale_pairs<true>(may_reset, f, factors[0], beta, tables, lane);
    scale_pairs<false>(may_reset, b, factors[1], beta, tables, lane);
    put_tile<Scalar>(shared.f, f, pairs);
    put_tile<Scalar>(shared.b, b, pairs);
    if (p.grad_log_decay.data == nullptr) return;
    multiply_by_products(f, shared.q, lane);
    multiply_by_products(b, shared.k, lane);
#pragma unroll
    for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) f[n][i] += b[n][i];
    }
    if constexpr (kIsFp32<Scalar>) {
      sum_pairs_of_fp32(f, shared.sums.pairs[lane.warp], lane);
    } else {
      sum_pairs<Scalar>(f, shared.sums.pairs[lane.warp], lane);
    }
  }

  // Multiplies elements by those of rows k^T. Elements that are zero stay zero.
  __device__ __forceinline__ void multiply_by_products(float (&d)[kStepBlocks][4], const RowTile& rows,
                                                       const FragmentLane& lane) const {
    const auto row_operand = operand_of(rows, lane), keys = operand_of(shared.k, lane);
    float products[kStepBlocks][4] = {};
#pragma unroll kUnrolledGroups < Scalar>
    for (int k = 0; k < columns / 16; ++k) {
      cuda::gemm<Scalar, false, false>(products, columns_of(row_operand, k), columns_of(keys, k), true);
    }
#pragma unroll
    for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) d[n][i] = d[n][i] == 0.0f ? 0.0f : d[n][i] * products[n][i];
    }
  }

  // The diagonal of Y E^T.
  __device__ __forceinline__ void write_beta(const float (&products)[kStepBlocks][4], const FragmentLane& lane) const {
    float* const target = at.template rows<float>(p.grad_beta, at.head, at.chunk);
#pragma unroll
    for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane.row + 8 * (i / 2), column = kBlockSteps * n + 2 * lane.pair + i % 2;
        if (row == column && row < at.steps()) target[row * p.grad_beta.stride_step] = products[n][i];
      }
    }
  }

  // Y^T has rows of V; steps times beta become rows.
  __device__ __forceinline__ void write_values(int block) const {
    using Vector = cuda::Vector<Scalar, StepTile<Scalar>::kVectorElements>;
    constexpr int kVectors = StepTile<Scalar>::kVectors, kElements = StepTile<Scalar>::kVectorElements;
    Scalar* const target = at.template rows<Scalar>(p.grad_v, at.head, at.chunk) + block * kStateRows;
#pragma unroll 1
    for (int i = threadIdx.x; i < kChunk * kVectors; i += kThreads) {
      const int step = i % kChunk, column = i / kChunk * kElements;
      if (step >= at.steps() || block * kStateRows + column >= p.headdim) continue;
      float values[kElements];
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        const auto* const vector = reinterpret_cast<const Scalar*>(shared.y.vector(column + j, step / kElements));
        values[j] = shared.tables.beta[step] * cuda::to_accumulate(vector[step % kElements]);
      }
      Vector::round(values).store(target + step * p.grad_v.stride_step + column);
    }
  }

  // Scales rows by factor(row); sums over their columns the products with the tile's rows.
  template <typename Factor>
  __device__ __forceinline__ void scale_rows(float (&d)[kColumnBlocks][4], const Factor& factor, RowTile& tile,
                                             float (&target)[kChunk], const FragmentLane& lane) const {
    const FragmentPairs<sizeof(Scalar)> pairs(lane);
    float sums[2] = {0, 0};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float by = factor(lane.row + 8 * half);
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
        const float2 row = cuda::unpack<Scalar>(pairs.at(tile, n, half));
        float &low = d[n][2 * half], &high = d[n][2 * half + 1];
        low = decayed(low, by);
        high = decayed(high, by);
        sums[half] = fmaf(low, row.x, fmaf(high, row.y, sums[half]));
      }
    }
    put_row_sums(sums, target, lane);
  }

  __device__ __forceinline__ void write_queries(float (&dq)[kColumnBlocks][4], const FragmentLane& lane) {
    scale_rows(dq, [&](int row) { return shared.tables.query_decay[row]; }, shared.q, shared.sums.reads[0], lane);
    const auto f = operand_of(shared.f, lane), k = operand_of(shared.k, lane);
#pragma unroll kUnrolledGroups < Scalar>
    for (int j = 0; j < kStepGroups; ++j) cuda::gemm<Scalar, false, true>(dq, columns_of(f, j), rows_of(k, j), true);
    write_rows(p.grad_q, dq, lane);
  }
  __device__ __forceinline__ void write_keys(float (&dk)[kColumnBlocks][4], const FragmentLane& lane) const {
    const auto f = operand_of(shared.f, lane), b = operand_of(shared.b, lane), q = operand_of(shared.q, lane),
               k = operand_of(shared.k, lane);
#pragma unroll kUnrolledGroups < Scalar>
    for (int j = 0; j < kStepGroups; ++j) {
      cuda::gemm<Scalar, false, true>(dk, columns_of(b, j), rows_of(k, j), true);
      cuda::gemm<Scalar, true, true>(dk, rows_of(b, j), rows_of(k, j), true);
      cuda::gemm<Scalar, true, true>(dk, rows_of(f, j), rows_of(q, j), true);
    }
    write_rows(p.grad_k, dk, lane);
  }
  // Rows have an even number of elements.
  __device__ __forceinline__ void write_rows(const RowsView& view, const float (&d)[kColumnBlocks][4],
                                             const FragmentLane& lane) const {
    const auto store = [&](auto* first_row) {
      using Element = std::decay_t<decltype(*first_row)>;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane.row + 8 * half, column = 2 * lane.pair;
        auto* const target = first_row + row * view.stride_step + first_column() + column;
#pragma unroll
        for (int n = 0; n < kColumnBlocks; ++n) {
          if (row < at.steps() && first_column() + 8 * n + column < p.dstate) {
            *reinterpret_cast<cuda::Packed<Element>*>(target + 8 * n) = cuda::pack<Element>(d[n][2 * half], d[n][2 * half + 1]);
          }
        }
      }
    };
    if (p.has_fp32_rows || kIsFp32<Scalar>) {
      store(at.template rows<float>(view, at.head, at.chunk));
    } else if constexpr (!kIsFp32<Scalar>) {
      store(at.template rows<Scalar>(view, at.head, at.chunk));
    }
  }

  // This thread's share of <S, D>.
  static __device__ __forceinline__ float dot(const RowTile& s, const RowTile& d) {
    constexpr int kVectors = sizeof(RowTile) / sizeof(uint4), kElements = RowTile::kVectorElements;
    using Vector = cuda::Vector<Scalar, kElements>;
    float sum = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < kVectors; i += kThreads) {
      const Vector s_vector = Vector::load_once(reinterpret_cast<const Scalar*>(&s) + i * kElements),
                   d_vector = Vector::load(reinterpret_cast<const Scalar*>(&d) + i * kElements);
#pragma unroll
      for (int j = 0; j < kElements; ++j) sum = fmaf(s_vector.accumulate(j), d_vector.accumulate(j), sum);
    }
    return sum;
  }
};

template <typename Scalar, int columns>
__global__ void __launch_bounds__(Sm80Gradients<Scalar, columns>::kThreads)
    delta_rule_sm80_gradients_kernel(const __grid_constant__ DeltaRuleSm80Params p) {
  extern __shared__ __align__(128) unsigned char memory[];
  const int parts = (p.dstate + columns - 1) / columns, place = static_cast<int>(blockIdx.x) / parts;
  const ChunkOfHead at(p, place);
  if (!at.is_there()) return;
  auto& shared = *reinterpret_cast<Sm80GradientsShared<Scalar, columns>*>(memory);
  Sm80Gradients<Scalar, columns>{p, shared, at, static_cast<int>(blockIdx.x) - place * parts}.run();
}

}  // namespace ssm_kernels::delta_rule
