// The last kernel of the delta rule's backward with a gate per channel of the key: all gradients of the steps, of all chunks in
// any order, from the states S before each chunk and their gradients D after it (kda_bwd_states.cuh). With g the gradient of
// out, U = diag(beta) E the additions to the state, c_i the sum of log decays from the chunk's start to step i, l its last
// step, and products of vectors by channel:
//
//   dv = diag(beta) Y         dbeta_i = Y_i . E_i
//   F  = scale tril(g U^T)    B = -diag(beta) tril(Y U^T, -1)         gradients of A / beta and P / scale, of kda_chunks.cuh
//   dq_i = scale e^(c_i) (g S)_i + sum over j of F(i, j) e^(c_i - c_j) k_j
//   dk_i = -e^(c_i) beta_i (Y S)_i + sum over j of B(i, j) e^(c_i - c_j) k_j
//          + e^(c_l - c_i) beta_i (E D)_i + sum over j of e^(c_j - c_i) (F(j, i) q_j + B(j, i) k_j)
//
// The first two terms of dq and dk, as rows of pairs or of reads from the state, and the others, as columns of pairs or of
// additions to the state, are summed apart: the gradient of a log decay is, per channel, the sum of everything that passes over
// its step t. With `reads` = q . dq + k . dk of the row terms and `adds` = k . dk of the column terms,
//
//   dg_t = sum over i >= t of reads from the state    + sum over j < t of additions to the state    + e^(c_l) sum(S D)
//        + sum over pairs j < t <= i
//
// and nothing is subtracted. Pairs of different blocks of 16 steps are products by tensor cores (TF32), scaled as in
// kda_chunks.cuh, whose sums pass over steps of the later block as suffix sums of its row terms, over those of the earlier
// block as prefix sums of its column terms, and over blocks in between as a whole. Pairs of one block are taken one by one in
// fp32.
//
// A block of four warpgroups takes a chunk of a value head. The first three multiply with the states; the terms of all channels
// pass through shared memory.
#pragma once

#include "cuda/lane_sums.cuh"
#include "cuda/mma_tf32x3.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "delta_rule/cuda/bwd_workspace.cuh"
#include "delta_rule/cuda/kda_chunk.cuh"

namespace ssm_kernels::delta_rule {

struct KdaBwdChunksShared {
  static constexpr int kStages = 2, kBlocks = kChunk / 16, kParts = 8;
  // The lengths of rows put pairs of elements in eight rows into different banks.
  using Terms = float[kChunk][kStateColumns + 8];
  struct alignas(kOperandAlignment) Stage {
    StatesOfChunk<kStateColumns> states;
    SmemTile<kStateRows> grad_out;
  };
  union {
    Stage stages[kStages];
    Terms terms[3];  // after the products: the row terms of dq and of dk, and the column terms of dk
  };
  KdaRows rows;
  KdaSums log2_cumsum;
  float2 pairs[kChunk][kChunk + 8];  // F and B
  float beta[kChunk];
  KdaRowFactors factors;
  float states_products[kParts][kStateColumns];                       // parts of the sum over rows of V of S D
  float reads[kBlocks][kStateColumns], adds[kBlocks][kStateColumns];  // through the state, of blocks of 16 steps
  float over_blocks[3][kStateColumns];                                // pairs of blocks 2 and 0; 3 and 0; 3 and 0 or 1
  Mbarrier full[kStages];

  static constexpr int bytes() { return kOperandAlignment + static_cast<int>(sizeof(KdaBwdChunksShared)); }
};

template <typename Scalar>
struct KdaBwdChunks {
  using Shared = KdaBwdChunksShared;
  static constexpr int kThreads = 4 * kWarpgroupThreads, kBlockRows = 16, kColumnBlocks = kStateColumns / 8;
  static_assert(kThreads == kStateColumns * Shared::kBlocks, "a thread has a channel of a block of 16 steps");
  enum { kQueryRows, kKeyRows, kKeyColumns, kTerms };  // the terms, and the warpgroups that multiply them with the states

  const KdaBwdParams& p;
  Shared& shared;
  const ChunkOfHead& at;

  __device__ __forceinline__ void run() {
    const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
    const int blocks = static_cast<int>(row_blocks(p.headdim));
    if (threadIdx.x == 0) {
      for (int block = 0; block < min(blocks, Shared::kStages); ++block) load_stage(block);
    }
    load_kda_rows<Scalar, kThreads>(p, at, at.chunk, at.head, sequence_begins(p, at, at.chunk), shared.rows, shared.log2_cumsum,
                                    shared.beta);
    __syncthreads();
    make_row_factors<Scalar, kThreads>(shared.rows, p.arguments.qk_l2norm, shared.factors);
    {
      float of_state[kColumnBlocks][4];  // g S, Y S, or E D
      float products[kStepBlocks][4];    // g E^T, or Y E^T
      multiply(warpgroup, blocks, of_state, products);
      if (warpgroup <= kKeyRows) write_pairs(warpgroup, products);
      if (warpgroup < kTerms) put_terms(warpgroup, of_state);
    }
    __syncthreads();
    sum_blocks();
    __syncthreads();
    add_pairs_of_blocks();
    __syncthreads();
    finish();
    __syncthreads();
    write_rows(p.grad_q, kQueryRows, shared.rows.q, shared.factors.of_queries);
    write_rows(p.grad_k, kKeyRows, shared.rows.k, shared.factors.of_keys);
    write_gate_sums();
    write_grad_beta();
  }

 private:
  static constexpr int kWarps = kThreads / kWarpSize;

  static __device__ __forceinline__ float exp2(float x) { return Math<float>::exp2(x); }

  // Run by one thread.
  __device__ __forceinline__ void load_stage(int block) {
    auto& stage = shared.stages[block % Shared::kStages];
    Mbarrier& full = shared.full[block % Shared::kStages];
    full.arrive_and_expect_tx(sizeof(stage.states) + sizeof(stage.grad_out));
    cuda::tma_load(&stage.states, states_of_chunk<kStateColumns>(p, at.number, at.head, block), sizeof(stage.states), full);
    cuda::tma_load_tile(&stage.grad_out, p.grad_out_descriptor, block * kStateRows, at.head, at.first(),
                        static_cast<int>(at.batch), full);
  }

  __device__ __forceinline__ void multiply(int warpgroup, int blocks, float (&of_state)[kColumnBlocks][4],
                                           float (&products)[kStepBlocks][4]) {
    float2 sum = {0, 0};
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      auto& stage = shared.stages[block % Shared::kStages];
      shared.full[block % Shared::kStages].wait(block / Shared::kStages);
      if (is_packed(p) && at.steps() < kChunk) {
        // The next sequence's may be NaN.
        if (warpgroup == 0) clear_steps(stage.grad_out.panels, at.steps());
        __syncthreads();
      }
      const uint64_t s = make_operand(stage.states.s), d = make_operand(stage.states.d), e = make_operand(stage.states.e),
                     y = make_operand(stage.states.y), g = make_operand(stage.grad_out);
      if (warpgroup == kQueryRows) {
        cuda::warpgroup_arrive();
#pragma unroll
        for (int v = 0; v < kStateRows / 16; ++v) {
          cuda::gemm<Scalar, false, true>(of_state, columns_of(g, v), rows_of(s, v), block > 0 || v > 0);
          cuda::gemm<Scalar, false, true>(products, columns_of(g, v), rows_of(e, v), block > 0 || v > 0);
        }
      } else if (warpgroup == kKeyRows) {
        cuda::warpgroup_arrive();
#pragma unroll
        for (int v = 0; v < kStateRows / 16; ++v) {
          cuda::gemm<Scalar, true, true>(of_state, rows_of(y, v), rows_of(s, v), block > 0 || v > 0);
          cuda::gemm<Scalar, true, true>(products, rows_of(y, v), rows_of(e, v), block > 0 || v > 0);
        }
      } else if (warpgroup == kKeyColumns) {
        cuda::warpgroup_arrive();
#pragma unroll
        for (int v = 0; v < kStateRows / 16; ++v) {
          cuda::gemm<Scalar, true, true>(of_state, rows_of(e, v), rows_of(d, v), block > 0 || v > 0);
        }
      }
      cuda::warpgroup_commit();
      add_states_products(stage.states, sum);
      write_grad_v(stage.states.y, block);
      cuda::warpgroup_wait<0>(of_state);
      cuda::warpgroup_wait<0>(products);
      __syncthreads();
      if (threadIdx.x == 0 && block + Shared::kStages < blocks) load_stage(block + Shared::kStages);
    }
    constexpr int kPairs = kStateColumns / 2;
    *reinterpret_cast<float2*>(&shared.states_products[threadIdx.x / kPairs][2 * (threadIdx.x % kPairs)]) = sum;
  }

  // A thread has two channels, and an eighth of the rows.
  __device__ __forceinline__ void add_states_products(StatesOfChunk<kStateColumns>& states, float2& sum) const {
    constexpr int kPairs = kStateColumns / 2, kRows = kStateRows / Shared::kParts;
    const int pair = threadIdx.x % kPairs, first = threadIdx.x / kPairs * kRows;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = first + i;
      const float2 s = cuda::unpack<Scalar>(reinterpret_cast<const uint32_t*>(states.s.vector(row, pair / 4))[pair % 4]),
                   d = cuda::unpack<Scalar>(reinterpret_cast<const uint32_t*>(states.d.vector(row, pair / 4))[pair % 4]);
      sum.x = fmaf(s.x, d.x, sum.x);
      sum.y = fmaf(s.y, d.y, sum.y);
    }
  }

  __device__ __forceinline__ void write_grad_v(SmemTile<kChunk>& y, int block) const {
    static_assert(kThreads == kChunk * kStateRows / kRowElements, "a thread has a vector of a step");
    const int step = threadIdx.x % kChunk, vector = threadIdx.x / kChunk, column = block * kStateRows + vector * kRowElements;
    if (step >= at.steps() || column >= p.headdim) return;
    const float beta = shared.beta[step];
    float values[kRowElements];
#pragma unroll
    for (int i = 0; i < kRowElements; ++i) values[i] = beta * element(y, vector * kRowElements + i, step);
    Scalar* const target = at.template rows<Scalar>(p.grad_v, at.head, at.chunk) + step * p.grad_v.stride_step + column;
    *reinterpret_cast<uint4*>(target) = {cuda::pack<Scalar>(values[0], values[1]), cuda::pack<Scalar>(values[2], values[3]),
                                         cuda::pack<Scalar>(values[4], values[5]), cuda::pack<Scalar>(values[6], values[7])};
  }

  // F, and B, of which nothing is read above the diagonals. The diagonal of B is that of Y E^T, the gradient of beta.
  __device__ __forceinline__ void write_pairs(int warpgroup, const float (&products)[kStepBlocks][4]) {
    const FragmentLane lane;
#pragma unroll
    for (int n = 0; n < kStepBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane.row + 8 * (i / 2), column = 8 * n + 2 * lane.pair + i % 2;
        const float product = products[n][i] * shared.beta[column];
        if (warpgroup == kQueryRows) {
          shared.pairs[row][column].x = row >= column ? p.scale * product : 0.0f;
        } else {
          shared.pairs[row][column].y = row > column ? -shared.beta[row] * product : products[n][i];
        }
      }
    }
  }

  __device__ __forceinline__ void write_grad_beta() const {
    const int step = threadIdx.x;
    if (step >= at.steps() || p.grad_beta.data == nullptr) return;
    const KdaArguments& arguments = p.arguments;
    float grad = shared.pairs[step][step].y;
    if (arguments.options.beta_sigmoid) {
      const float beta = shared.beta[step];
      grad *= beta * (1.0f - (arguments.options.allow_neg_eigval ? 0.5f * beta : beta));
    }
    put_argument<Scalar>(p.grad_beta, arguments.beta_is_fp32, at.batch, at.first() + step, at.head, grad);
  }

  // Puts the terms of the states' products into shared memory.
  __device__ __forceinline__ void put_terms(int warpgroup, const float (&of_state)[kColumnBlocks][4]) {
    const FragmentLane lane;
    float factors[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float beta = shared.beta[lane.row + 8 * half];
      factors[half] = warpgroup == kQueryRows ? p.scale : warpgroup == kKeyRows ? -beta : beta;
    }
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
      const int channel = 8 * n + 2 * lane.pair;
      const float2 last = *reinterpret_cast<const float2*>(&shared.log2_cumsum[kChunk - 1][channel]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane.row + 8 * half;
        float2 log2 = *reinterpret_cast<const float2*>(&shared.log2_cumsum[row][channel]);
        if (warpgroup == kKeyColumns) log2 = {last.x - log2.x, last.y - log2.y};
        *reinterpret_cast<float2*>(&shared.terms[warpgroup][row][channel]) = {
            factors[half] * exp2(log2.x) * of_state[n][2 * half], factors[half] * exp2(log2.y) * of_state[n][2 * half + 1]};
      }
    }
  }

  template <int columns>
  static __device__ __forceinline__ float element(SmemTile<columns>& tile, int row, int column) {
    return cuda::unpack<Scalar>(reinterpret_cast<const uint16_t*>(tile.vector(row, column / 8))[column % 8]).x;
  }

  // An element of a key or a query, with its norm applied.
  __device__ __forceinline__ float key_at(int row, int channel) const {
    return shared.factors.of_keys[row] * element(shared.rows.k, row, channel);
  }
  __device__ __forceinline__ float query_at(int row, int channel) const {
    return shared.factors.of_queries[row] * element(shared.rows.q, row, channel);
  }

  // The sums of reads and additions through the state, of a thread's channel and block of 16 steps.
  __device__ __forceinline__ void sum_blocks() {
    const int channel = threadIdx.x % kStateColumns, block = threadIdx.x / kStateColumns;
    float reads = 0, adds = 0;
#pragma unroll 8
    for (int row = kBlockRows * block; row < kBlockRows * (block + 1); ++row) {
      const float k = key_at(row, channel), q = query_at(row, channel);
      reads += q * shared.terms[kQueryRows][row][channel] + k * shared.terms[kKeyRows][row][channel];
      adds += k * shared.terms[kKeyColumns][row][channel];
    }
    shared.reads[block][channel] = reads;
    shared.adds[block][channel] = adds;
  }

  // Adds the pairs of different blocks of 16 steps. A warp has the rows, and the columns, of one block and a fourth of the
  // channels. Of its six products with 8 steps the first ones are its rows' with earlier blocks, the others its columns' with
  // later ones.
  __device__ __forceinline__ void add_pairs_of_blocks() {
    using Operand = cuda::Tf32Rounded<4>;
    constexpr int kProducts = kChunk / 8 - 2, kBlocksOfWarp = kColumnBlocks / 4;
    FragmentLane lane;
    const int part = threadIdx.x / kWarpgroupThreads, own = lane.warp, first = kBlockRows * own;
    lane.row = first + lane.quad;
    Operand f[kProducts], b[kProducts];
#pragma unroll
    for (int m = 0; m < kProducts; ++m) {
      // They have the factors of the rows that they multiply.
      float of_f[4], of_b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane.row + 8 * (i % 2), step = 8 * (m < 2 * own ? m : m + 2) + 2 * lane.pair + i / 2;
        const float2 pair = m < 2 * own ? shared.pairs[row][step] : shared.pairs[step][row];
        of_f[i] = pair.x * (m < 2 * own ? shared.factors.of_keys : shared.factors.of_queries)[step];
        of_b[i] = pair.y * shared.factors.of_keys[step];
      }
      f[m].prepare(of_f);
      b[m].prepare(of_b);
    }
    const int before = max(first - 1, 0), last = first + kBlockRows - 1;
#pragma unroll 1
    for (int n = kBlocksOfWarp * part; n < kBlocksOfWarp * (part + 1); ++n) {
      const int channels = 8 * n + 2 * lane.pair, channel = 8 * n + lane.quad;  // of accumulators, and of operands B
      const float start = shared.log2_cumsum[before][channel] + kTruncatedLog2,
                  end = shared.log2_cumsum[last][channel] - kTruncatedLog2;
      float2 from_start[2], to_end[2], q[2], k[2];
      {
        const float2 starts = *reinterpret_cast<const float2*>(&shared.log2_cumsum[before][channels]),
                     ends = *reinterpret_cast<const float2*>(&shared.log2_cumsum[last][channels]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = lane.row + 8 * half;
          const float2 log2 = *reinterpret_cast<const float2*>(&shared.log2_cumsum[row][channels]);
          from_start[half] = {exp2(log2.x - starts.x), exp2(log2.y - starts.y)};
          to_end[half] = {exp2(ends.x - log2.x), exp2(ends.y - log2.y)};
          k[half] = pair_of(shared.rows.k, row, channels, shared.factors.of_keys);
          q[half] = pair_of(shared.rows.q, row, channels, shared.factors.of_queries);
        }
      }
      float q_rows[4] = {}, k_rows[4] = {}, k_columns[4] = {};
#pragma unroll
      for (int m = 0; m < kProducts; ++m) {
        if (m < 2 * own) {
          uint32_t keys[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int step = 8 * m + 2 * lane.pair + i;
            keys[i] = __float_as_uint(element(shared.rows.k, step, channel) * exp2(start - shared.log2_cumsum[step][channel]));
          }
          cuda::mma_tf32(q_rows, f[m].values, keys);
          cuda::mma_tf32(k_rows, b[m].values, keys);
          // After all pairs with the first block, or the first two.
          if (m % 2 == 1 && m / 2 + 1 < own) {
            float sums[2] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              sums[0] += from_start[half].x * (q[half].x * q_rows[2 * half] + k[half].x * k_rows[2 * half]);
              sums[1] += from_start[half].y * (q[half].y * q_rows[2 * half + 1] + k[half].y * k_rows[2 * half + 1]);
            }
#pragma unroll
            for (int distance = 4; distance < kWarpSize; distance *= 2) {
#pragma unroll
              for (float& sum : sums) sum += __shfl_xor_sync(kAllLanes, sum, distance);
            }
            if (lane.quad == 0) {
              *reinterpret_cast<float2*>(&shared.over_blocks[own - 2 + m / 2][channels]) = {sums[0], sums[1]};
            }
          }
        } else {
          uint32_t keys[2], queries[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int step = 8 * (m + 2) + 2 * lane.pair + i;
            const float decay = exp2(shared.log2_cumsum[step][channel] - end);
            keys[i] = __float_as_uint(decay * element(shared.rows.k, step, channel));
            queries[i] = __float_as_uint(decay * element(shared.rows.q, step, channel));
          }
          cuda::mma_tf32(k_columns, f[m].values, queries);
          cuda::mma_tf32(k_columns, b[m].values, keys);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane.row + 8 * half;
        const auto add = [&](Shared::Terms& terms, const float (&values)[4], float2 factor) {
          float2& target = *reinterpret_cast<float2*>(&terms[row][channels]);
          target = {fmaf(factor.x, values[2 * half], target.x), fmaf(factor.y, values[2 * half + 1], target.y)};
        };
        if (own > 0) {
          add(shared.terms[kQueryRows], q_rows, from_start[half]);
          add(shared.terms[kKeyRows], k_rows, from_start[half]);
        }
        if (own < Shared::kBlocks - 1) add(shared.terms[kKeyColumns], k_columns, to_end[half]);
      }
    }
  }

  static __device__ __forceinline__ float2 pair_of(SmemTile<kStateColumns>& tile, int row, int channel,
                                                   const float (&factors)[kChunk]) {
    const float2 pair = cuda::unpack<Scalar>(reinterpret_cast<const uint32_t*>(tile.vector(row, channel / 8))[channel % 8 / 2]);
    return {factors[row] * pair.x, factors[row] * pair.y};
  }

  // Returns the sum of the terms of one channel that pass over all steps of a block of 16.
  __device__ __forceinline__ float passing(int block, int channel) const {
    float sum = 0;
#pragma unroll
    for (int part = 0; part < Shared::kParts; ++part) sum += shared.states_products[part][channel];
    sum *= exp2(shared.log2_cumsum[kChunk - 1][channel]);
#pragma unroll
    for (int other = 0; other < Shared::kBlocks; ++other) {
      if (other > block) sum += shared.reads[other][channel];
      if (other < block) sum += shared.adds[other][channel];
    }
    if (block == 1) sum += shared.over_blocks[0][channel] + shared.over_blocks[1][channel];
    if (block == 2) sum += shared.over_blocks[2][channel];
    return sum;
  }

  // Adds the pairs of one block of 16 steps. The gradients of q and k then are terms in shared memory; finish() writes those of
  // gates. A thread has a channel of a block.
  __device__ __forceinline__ void finish() {
    const int channel = threadIdx.x % kStateColumns;
    const int block = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kStateColumns, 0), first = kBlockRows * block;
    auto& terms = shared.terms;
    float k[kBlockRows], decay[kBlockRows], columns[kBlockRows], grad_log_decay[kBlockRows], rows[kBlockRows];
    {
      float over = passing(block, channel);
#pragma unroll
      for (int i = 0; i < kBlockRows; ++i) {
        k[i] = key_at(first + i, channel);
        columns[i] = terms[kKeyColumns][first + i][channel];
        grad_log_decay[i] = over;
        over = fmaf(k[i], columns[i], over);
      }
    }
    float before = 0;
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      const int row = first + i;
      const float q = query_at(row, channel), log2 = shared.log2_cumsum[row][channel],
                  decay_of_step = i == 0 ? 1.0f : exp2(log2 - before);
      before = log2;
      float of_query = terms[kQueryRows][row][channel], of_key = terms[kKeyRows][row][channel], over = 0;
      rows[i] = q * of_query + k[i] * of_key;
      const auto add_pair = [&](int j, float f, float b) {
        decay[j] *= decay_of_step;
        const float key = decay[j] * k[j], of_pair = fmaf(f, q, b * k[i]);
        of_query = fmaf(f, key, of_query);
        of_key = fmaf(b, key, of_key);
        columns[j] = fmaf(decay[j], of_pair, columns[j]);
        over = fmaf(key, of_pair, over);
        grad_log_decay[j + 1] += over;
      };
#pragma unroll
      for (int j = 0; j < i; j += 2) {
        const float4 pairs = *reinterpret_cast<const float4*>(&shared.pairs[row][first + j]);
        add_pair(j, pairs.x, pairs.y);
        if (j + 1 < i) add_pair(j + 1, pairs.z, pairs.w);
      }
      decay[i] = 1;
      const float diagonal = shared.pairs[row][row].x;
      columns[i] = fmaf(diagonal, q, columns[i]);
      terms[kQueryRows][row][channel] = fmaf(diagonal, k[i], of_query);
      terms[kKeyRows][row][channel] = of_key;
    }
    float over = 0;
#pragma unroll
    for (int i = kBlockRows - 1; i >= 0; --i) {
      over += rows[i];
      terms[kKeyRows][first + i][channel] += columns[i];
      grad_log_decay[i] += over;
    }
    write_gates(block, channel, grad_log_decay);
  }

  // Writes the gradients of g, given those of log decays, and sums those of the parameters of raw gates.
  __device__ __forceinline__ void write_gates(int block, int channel, float (&grads)[kBlockRows]) {
    if (p.grad_log_decay.data == nullptr && p.gate_sums == nullptr) return;
    const int first = kBlockRows * block, count = channel < p.dstate ? at.steps() - first : 0;
    float sums[2] = {};
    if (p.arguments.gate_is_fp32) {
      write_gates_as<float>(first, channel, count, grads, sums);
    } else {
      write_gates_as<Scalar>(first, channel, count, grads, sums);
    }
    // They take the place of the thread's own terms.
#pragma unroll
    for (int of = 0; of < 2; ++of) shared.terms[kKeyColumns][first + of][channel] = sums[of];
  }
  template <typename Argument>
  __device__ __forceinline__ void write_gates_as(int first, int channel, int count, float (&grads)[kBlockRows],
                                                 float (&sums)[2]) const {
    const DeltaRuleGateOptions& options = p.arguments.options;
    if (options.has_raw_gate && count > 0) {
      const Argument* const source =
          at.template rows<const Argument>(p.log_decay, at.head, at.chunk) + first * p.log_decay.stride_step + channel;
      float raw[kBlockRows];
#pragma unroll
      for (int i = 0; i < kBlockRows; ++i) {
        raw[i] = i < count ? cuda::to_accumulate(source[i * p.log_decay.stride_step]) : 0.0f;
        if (i >= count) grads[i] = 0;
      }
      const GateOfHead gate(options, at.head, channel, p.dstate);
      visit_gate(options, [&](auto is_bounded) {
#pragma unroll
        for (int i = 0; i < kBlockRows; ++i) {
          const RawGateGrad grad = RawGateGrad::of<is_bounded>(options, gate, raw[i], grads[i]);
          grads[i] = grad.raw;
          sums[0] += grad.A_log;
          sums[1] += grad.raw;
        }
      });
    }
    if (p.grad_log_decay.data == nullptr) return;
    Argument* target =
        at.template rows<Argument>(p.grad_log_decay, at.head, at.chunk) + first * p.grad_log_decay.stride_step + channel;
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      if (i < count) *target = cuda::from_accumulate<Argument>(grads[i]);
      target += p.grad_log_decay.stride_step;
    }
  }

  __device__ __forceinline__ void write_gate_sums() const {
    const int channel = threadIdx.x % kStateColumns, of = threadIdx.x / kStateColumns;
    if (p.gate_sums == nullptr || of >= 2 || channel >= p.dstate) return;
    float sum = 0;
#pragma unroll
    for (int block = 0; block < Shared::kBlocks; ++block) sum += shared.terms[kKeyColumns][kBlockRows * block + of][channel];
    p.gate_sums[((int64_t{at.number} * p.heads + at.head) * 2 + of) * p.dstate + channel] = sum;
  }

  // Writes the gradients of rows of q or k, as fp32 or of the inputs' type, given terms that are the gradients of normalized
  // rows. With the factor r, the row x and its gradient d, that of the row is r d - r^3 x (x . d). A warp takes a row, of which
  // a lane has four columns.
  __device__ __forceinline__ void write_rows(const RowsView& view, int term, SmemTile<kStateColumns>& rows,
                                             const float (&factors)[kChunk]) {
    constexpr int kColumns = kStateColumns / kWarpSize, kRows = kChunk / kWarps;
    static_assert(kColumns == 4, "a lane has half of a vector of a row");
    const int warp = threadIdx.x / kWarpSize, column = threadIdx.x % kWarpSize * kColumns;
    float4 grads[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      grads[i] = *reinterpret_cast<const float4*>(&shared.terms[term][warp + i * kWarps][column]);
    }
    if (p.arguments.qk_l2norm) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = warp + i * kWarps;
        float4& grad = grads[i];
        const float2 low = pair_of(rows, row, column, factors), high = pair_of(rows, row, column + 2, factors);
        const float along = cuda::sum_over_warp(low.x * grad.x + low.y * grad.y + (high.x * grad.z + high.y * grad.w));
        const float factor = factors[row];
        grad = {factor * fmaf(-along, low.x, grad.x), factor * fmaf(-along, low.y, grad.y),
                factor * fmaf(-along, high.x, grad.z), factor * fmaf(-along, high.y, grad.w)};
      }
    }
    const int steps = column < p.dstate ? at.steps() - warp : 0;
    if (p.has_fp32_rows) {
      float* target = at.template rows<float>(view, at.head, at.chunk) + warp * view.stride_step + column;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (i * kWarps < steps) *reinterpret_cast<float4*>(target) = grads[i];
        target += kWarps * view.stride_step;
      }
    } else {
      Scalar* target = at.template rows<Scalar>(view, at.head, at.chunk) + warp * view.stride_step + column;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float4& grad = grads[i];
        if (i * kWarps < steps) {
          *reinterpret_cast<uint2*>(target) = {cuda::pack<Scalar>(grad.x, grad.y), cuda::pack<Scalar>(grad.z, grad.w)};
        }
        target += kWarps * view.stride_step;
      }
    }
  }
};

template <typename Scalar>
__global__ void __launch_bounds__(SSM_KERNELS_HAS_WGMMA ? KdaBwdChunks<Scalar>::kThreads : kWarpSize, 1)
    kda_bwd_chunks_kernel(const __grid_constant__ KdaBwdParams p) {
#if SSM_KERNELS_HAS_WGMMA
  extern __shared__ unsigned char unaligned_memory[];
  auto& shared = align_shared<KdaBwdChunksShared>(unaligned_memory);
  const ChunkOfHead at(p, static_cast<int>(blockIdx.x));
  if (!at.is_there()) return;
  if (threadIdx.x < KdaBwdChunksShared::kStages) shared.full[threadIdx.x].init(1);
  __syncthreads();
  KdaBwdChunks<Scalar>{p, shared, at}.run();
#endif
}

}  // namespace ssm_kernels::delta_rule
