// The normalizer n_t = e^(g_t) n_{t-1} + c_t k_t of mlstm_scan on CUDA, its products n_t q_t, and their adjoint.
//
// A warp has a chunk of kNormalizerChunk steps of a row and head, and a lane up to kLaneChannels channels of these. There are
// three kernels: the first computes what each chunk adds to n and, in backward, to the gradient of n before it; the second
// scans these along the chunks; the third starts each chunk from the result. Sums have the accumulation type, and those of fp32
// inputs in forward fp64: n q is a sum of terms that cancel, and gradients divide by it.
//
// Backward has the gradient d_t of each product and, with u_t the gradient of n_t:
//
//   u_t = d_t q_t + e^(g_{t+1}) u_{t+1}     grad q_t = d_t n_t     grad k_t = c_t u_t
//   grad c_t = k_t . u_t                    grad g_t = e^(g_t) n_{t-1} . u_t
//
// The warp first computes n before every kPieceSteps steps, which stay in shared memory. From the last of these pieces to the
// first it computes n_t of a piece again, in registers, and then u_t back in time.
#pragma once

#include <cuda_runtime.h>

#include "common/math.h"
#include "cuda/lane_sums.cuh"
#include "mlstm/cuda/launch.h"
#include "mlstm/cuda/sequences.cuh"
#include "mlstm/cuda/warps.cuh"

namespace ssm_kernels::mlstm {

constexpr int kLaneChannels = 8, kPieceSteps = 4, kPieces = kNormalizerChunk / kPieceSteps;
constexpr int kSumsWarps = 4, kScanThreads = 64, kMaxScanSegments = 8, kLeastSegmentChunks = 32;
static_assert(kNormalizerChunk == 2 * cuda::kWarpSize, "a lane keeps the gates of two steps");

// A row of key_dim elements in the lanes of a warp, in vectors of `size`.
template <typename Scalar, int size>
struct LaneRow {
  using Acc = cuda::AccumulateType<Scalar>;
  using Values = cuda::Vector<Scalar, size>;
  static constexpr int kVectors = kLaneChannels / size;
  Values vectors[kVectors];

  static __device__ __forceinline__ int channel(int vector) {
    return (vector * cuda::kWarpSize + static_cast<int>(threadIdx.x) % cuda::kWarpSize) * size;
  }
  // Calls body(channel's index in the lane, channel) for the lane's channels.
  template <typename Body>
  static __device__ __forceinline__ void for_each(int64_t key_dim, const Body& body) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int j = 0; j < size; ++j) {
        if (channel(v) < key_dim) body(v * size + j, channel(v) + j);
      }
    }
  }

  __device__ __forceinline__ Acc operator[](int i) const { return vectors[i / size].accumulate(i % size); }
  __device__ __forceinline__ void load(const Scalar* row, int64_t stride_column, int64_t key_dim) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      vectors[v] = Values::zero();
      if (channel(v) < key_dim) vectors[v] = Values::load_once(row + channel(v) * (size == 1 ? stride_column : 1));
    }
  }
  __device__ __forceinline__ void add_and_store(const Acc (&added)[kLaneChannels], Scalar* row, int64_t stride_column,
                                                int64_t key_dim) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Acc sums[size];
#pragma unroll
      for (int j = 0; j < size; ++j) sums[j] = (*this)[v * size + j] + added[v * size + j];
      if (channel(v) < key_dim) Values::round(sums).store_once(row + channel(v) * (size == 1 ? stride_column : 1));
    }
  }
};

// The type of sums, and of the workspace.
template <typename Scalar, typename Params>
using SumType = std::conditional_t<std::is_same_v<Scalar, float> && std::is_same_v<Params, NormalizerParams>, double,
                                   cuda::AccumulateType<Scalar>>;

// A warp's chunk.
template <typename Scalar, int size, typename Params>
struct NormalizerChunk {
  using Acc = cuda::AccumulateType<Scalar>;
  using Sum = SumType<Scalar, Params>;
  using Row = LaneRow<Scalar, size>;
  using Channels = Sum[kLaneChannels];

  const NormalizerParams& p;
  int64_t chunks, row, chunk, head, begin;
  int steps;
  Sum decay[2], gain[2];  // of the lane's steps, `lane` and `lane` + 32

  __device__ __forceinline__ NormalizerChunk(const NormalizerParams& p, int64_t number)
      : p(p), chunks(normalizer_chunks(p.seqlen)) {
    const int64_t of_chunks = number / p.heads;
    head = number - of_chunks * p.heads;
    row = of_chunks / chunks;
    chunk = of_chunks - row * chunks;
    begin = chunk * kNormalizerChunk;
    steps = static_cast<int>(min(p.seqlen - begin, int64_t(kNormalizerChunk)));
    load(p.log_decay, decay);
    load(p.gain, gain);
#pragma unroll
    for (int i = 0; i < 2; ++i) decay[i] = Math<Sum>::exp(decay[i]);
  }

  static __device__ __forceinline__ int lane() { return threadIdx.x % cuda::kWarpSize; }
  // Returns the index of a step in a (batch, seqlen, heads) tensor.
  __device__ __forceinline__ int64_t place(int step) const { return (row * p.seqlen + begin + step) * p.heads + head; }
  // The lane's two numbers of a (batch, seqlen, heads) tensor, and that of a step from the lane which has it.
  __device__ __forceinline__ void load(const void* source, Sum (&of_lane)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int step = lane() + i * cuda::kWarpSize;
      of_lane[i] = step < steps ? Sum(static_cast<const Acc*>(source)[place(step)]) : Sum(0);
    }
  }
  static __device__ __forceinline__ Sum at(const Sum (&of_lanes)[2], int step) {
    return __shfl_sync(cuda::kAllLanes, step < cuda::kWarpSize ? of_lanes[0] : of_lanes[1], step % cuda::kWarpSize);
  }

  __device__ __forceinline__ Scalar* row_of(const KeyView& view, int step) const {
    return static_cast<Scalar*>(view.data) + row * view.stride_batch + (begin + step) * view.stride_step +
           head * view.stride_head;
  }
  // Rows of `count` steps from a step on; those past the chunk's end are zero.
  template <int count>
  __device__ __forceinline__ void load_rows(const KeyView& view, int first, Row (&values)[count]) const {
#pragma unroll
    for (int j = 0; j < count; ++j)
      values[j].load(row_of(view, first + j), view.stride_column, first + j < steps ? p.key_dim : 0);
  }

  // The chunk's row of a workspace, and a sequence's of (sequences, heads, key_dim). An absent one is zero.
  __device__ __forceinline__ Sum* of_workspace(void* data) const {
    return static_cast<Sum*>(data) + ((row * chunks + chunk) * p.heads + head) * p.key_dim;
  }
  template <typename Data>
  __device__ __forceinline__ auto of_sequence(Data* data, const SequenceCursor& sequence) const {
    using Pointer = std::conditional_t<std::is_const_v<Data>, const Acc*, Acc*>;
    return data == nullptr ? nullptr : static_cast<Pointer>(data) + (sequence.number() * p.heads + head) * p.key_dim;
  }
  template <typename Number>
  __device__ __forceinline__ void read(const Number* source, Channels& values) const {
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) values[i] = 0;
    if (source != nullptr) Row::for_each(p.key_dim, [&](int i, int channel) { values[i] = source[channel]; });
  }
  template <typename Number>
  __device__ __forceinline__ void write(Number* target, const Channels& values) const {
    if (target != nullptr) {
      Row::for_each(p.key_dim, [&](int i, int channel) { target[channel] = static_cast<Number>(values[i]); });
    }
  }

  // n after a step, from n before it. Whatever an empty memory holds is zero.
  __device__ __forceinline__ void advance(Channels& n, const Row& k, int step) const {
    const Sum of_step = at(decay, step), gain_of_step = at(gain, step);
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i)
      n[i] = Math<Sum>::fma(gain_of_step, k[i], of_step == Sum(0) ? Sum(0) : of_step * n[i]);
  }
  static __device__ __forceinline__ Sum dot(const Channels& a, const Row& b) {
    Sum sum = 0;
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) sum = Math<Sum>::fma(a[i], b[i], sum);
    return cuda::sum_over_warp(sum);
  }
};

// The gradients of the products of the lane's steps: -scale sign(d) [|d| > e^-m] grad out . out / (max(|d|, e^-m) + eps).
template <typename Chunk, typename Acc>
__device__ __forceinline__ void product_gradients(const NormalizerBwdParams& p, const Chunk& chunk, Acc (&gradients)[2]) {
  Acc divisor[2], m[2];
  chunk.load(p.read_divisor, divisor);
  chunk.load(p.m, m);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int step = chunk.lane() + i * cuda::kWarpSize;
    gradients[i] = 0;
    if (step >= chunk.steps || p.out_products == nullptr) continue;
    const Acc* const parts = static_cast<const Acc*>(p.out_products) + chunk.place(step) * p.parts;
    Acc sum = 0;
    for (int64_t part = 0; part < p.parts; ++part) sum += parts[part];
    const Acc size = Math<Acc>::abs(divisor[i]), floor = Math<Acc>::exp(-m[i]);
    const Acc scale = static_cast<Acc>(divisor[i] < 0 ? p.scale : -p.scale);
    if (size > floor || size != size) gradients[i] = scale * sum / (size + static_cast<Acc>(p.eps));
  }
}

// Computes for each chunk its decay, the sum that it adds to n after it and, in backward, the sum that it adds to the gradient
// of n before it.
template <typename Scalar, int size, typename Params>
__global__ void __launch_bounds__(kSumsWarps* cuda::kWarpSize)
    mlstm_normalizer_sums_kernel(const __grid_constant__ Params p, int64_t first) {
  using Chunk = NormalizerChunk<Scalar, size, Params>;
  using Sum = typename Chunk::Sum;
  constexpr bool kIsBackward = std::is_same_v<Params, NormalizerBwdParams>;
  constexpr int kAtOnce = 4;
  const int64_t number = warp_number<kSumsWarps>(first);
  if (number >= p.batch * normalizer_chunks(p.seqlen) * p.heads) return;
  const Chunk chunk(p, number);
  Sum products[2] = {};
  if constexpr (kIsBackward) product_gradients(p, chunk, products);
  SequenceCursor sequence(p, chunk.row, chunk.begin);
  Sum decay = 1;  // from before the chunk, zero once a sequence has begun
  typename Chunk::Channels n = {}, grad = {};
#pragma unroll 1
  for (int step = 0; step < chunk.steps; step += kAtOnce) {
    typename Chunk::Row k[kAtOnce], q[kIsBackward ? kAtOnce : 1];
    chunk.load_rows(p.k, step, k);
    if constexpr (kIsBackward) chunk.load_rows(p.q, step, q);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (step + j >= chunk.steps) break;
      sequence.move_to(chunk.begin + step + j);
      if (sequence.begins_at(chunk.begin + step + j)) {
        decay = 0;
        chunk.read(chunk.of_sequence(p.initial_n, sequence), n);
      }
      chunk.advance(n, k[j], step + j);
      if (decay != Sum(0)) decay *= chunk.at(chunk.decay, step + j);
      if constexpr (kIsBackward) {
        const Sum weight = decay * chunk.at(products, step + j);
        // Beyond a step that forgets, a gradient does not count, infinite ones included.
        if (decay != Sum(0)) {
#pragma unroll
          for (int i = 0; i < kLaneChannels; ++i) grad[i] = Math<Sum>::fma(weight, q[j][i], grad[i]);
          if (p.grad_final_n != nullptr && sequence.ends_at(chunk.begin + step + j)) {
            const Sum* const of_final = chunk.of_sequence(p.grad_final_n, sequence);
            Chunk::Row::for_each(p.key_dim,
                                 [&](int i, int channel) { grad[i] = Math<Sum>::fma(decay, of_final[channel], grad[i]); });
          }
        }
      }
    }
  }
  chunk.write(chunk.of_workspace(p.states), n);
  if constexpr (kIsBackward) chunk.write(chunk.of_workspace(p.grad_states), grad);
  if (chunk.lane() == 0) static_cast<Sum*>(p.decays)[number] = decay;
}

// Replaces what each chunk adds by n before it, or by the gradient of n after it. A thread has a channel of a segment of the
// chunks; segments after the first begin with the composition of those before, which their threads leave in shared memory.
template <typename Sum, typename Acc>
__global__ void __launch_bounds__(kScanThreads* kMaxScanSegments)
    mlstm_normalizer_scan_kernel(const __grid_constant__ NormalizerParams p, int64_t blocks_of_direction) {
  // Loads in flight; float64 takes twice the registers.
  constexpr int kAtOnce = sizeof(Sum) == 8 ? 8 : 32;
  __shared__ Sum sums[kMaxScanSegments][kScanThreads], decays_of_segments[kMaxScanSegments][kScanThreads];
  const bool is_reverse = blockIdx.x >= blocks_of_direction;
  const int64_t chunks = normalizer_chunks(p.seqlen), channels = p.heads * p.key_dim;
  const int segments = blockDim.x / kScanThreads, segment = threadIdx.x / kScanThreads, lane = threadIdx.x % kScanThreads;
  const int64_t place = (blockIdx.x - (is_reverse ? blocks_of_direction : 0)) * kScanThreads + lane;
  const int64_t row = place / channels, channel = place - row * channels, head = channel / p.key_dim;
  const bool has_channel = row < p.batch;
  const int64_t length = (chunks + segments - 1) / segments, begin = min(segment * length, chunks),
                end = has_channel ? min(begin + length, chunks) : begin;
  Sum* const states = static_cast<Sum*>(is_reverse ? p.grad_states : p.states) + row * chunks * channels + channel;
  const Sum* const decays = static_cast<const Sum*>(p.decays) + row * chunks * p.heads + head;
  const auto chunk_at = [&](int64_t position) { return is_reverse ? chunks - 1 - position : position; };
  const auto after = [](Sum carried, Sum decay, Sum added) {
    return decay == Sum(0) ? added : Math<Sum>::fma(decay, carried, added);
  };
  // Calls body(place in `states`, what the chunk adds, its decay) in the order of the scan.
  const auto visit = [&](const auto& body) {
    for (int64_t first = begin; first < end; first += kAtOnce) {
      Sum added[kAtOnce], decay[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= end) break;
        added[i] = states[chunk_at(first + i) * channels];
        decay[i] = decays[chunk_at(first + i) * p.heads];
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= end) break;
        body(chunk_at(first + i) * channels, added[i], decay[i]);
      }
    }
  };
  Sum carried = 0;
  if (segments > 1) {
    Sum decay_of_segment = 1;
    if (segment + 1 < segments) {
      visit([&](int64_t, Sum added, Sum decay) {
        carried = after(carried, decay, added);
        decay_of_segment *= decay;
      });
    }
    sums[segment][lane] = carried;
    decays_of_segments[segment][lane] = decay_of_segment;
    __syncthreads();
    carried = 0;
    for (int i = 0; i < segment; ++i) carried = after(carried, decays_of_segments[i][lane], sums[i][lane]);
  }
  visit([&](int64_t at, Sum added, Sum decay) {
    states[at] = carried;
    carried = after(carried, decay, added);
  });
  if (p.only_states && has_channel && segment + 1 == segments) static_cast<Acc*>(p.final_n)[place] = static_cast<Acc>(carried);
}

template <typename Scalar, int size>
__global__ void __launch_bounds__(kSumsWarps* cuda::kWarpSize)
    mlstm_normalizer_fwd_kernel(const __grid_constant__ NormalizerParams p, int64_t first) {
  using Chunk = NormalizerChunk<Scalar, size, NormalizerParams>;
  using Acc = typename Chunk::Acc;
  using Sum = typename Chunk::Sum;
  constexpr int kAtOnce = 4;
  const int64_t number = warp_number<kSumsWarps>(first);
  if (number >= p.batch * normalizer_chunks(p.seqlen) * p.heads) return;
  const Chunk chunk(p, number);
  SequenceCursor sequence(p, chunk.row, chunk.begin);
  typename Chunk::Channels n = {};
  if (p.states != nullptr) chunk.read(chunk.of_workspace(p.states), n);
#pragma unroll 1
  for (int step = 0; step < chunk.steps; step += kAtOnce) {
    typename Chunk::Row k[kAtOnce], q[kAtOnce];
    chunk.load_rows(p.k, step, k);
    chunk.load_rows(p.q, step, q);
    Sum product_of_lane = 0;  // of the lane-th step
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (step + j >= chunk.steps) break;
      sequence.move_to(chunk.begin + step + j);
      if (sequence.begins_at(chunk.begin + step + j)) chunk.read(chunk.of_sequence(p.initial_n, sequence), n);
      chunk.advance(n, k[j], step + j);
      const Sum product = chunk.dot(n, q[j]);
      product_of_lane = chunk.lane() == j ? product : product_of_lane;
      if (sequence.ends_at(chunk.begin + step + j)) chunk.write(chunk.of_sequence(p.final_n, sequence), n);
    }
    if (const int of_lane = step + chunk.lane(); chunk.lane() < kAtOnce && of_lane < chunk.steps) {
      static_cast<Acc*>(p.divisor)[chunk.place(of_lane)] = static_cast<Acc>(static_cast<Sum>(p.scale) * product_of_lane);
    }
  }
}

template <typename Scalar, int size>
__global__ void __launch_bounds__(cuda::kWarpSize)
    mlstm_normalizer_bwd_kernel(const __grid_constant__ NormalizerBwdParams p, int64_t first) {
  using Chunk = NormalizerChunk<Scalar, size, NormalizerBwdParams>;
  using Acc = typename Chunk::Acc;
  using Channels = typename Chunk::Channels;
  // Rows of gradients that are loaded ahead: those of a piece, where registers allow.
  constexpr int kGradRows = sizeof(Scalar) == 2 ? kPieceSteps : 1;
  __shared__ Acc pieces[kPieces][kLaneChannels][cuda::kWarpSize];  // n before each piece
  const Chunk chunk(p, warp_number<1>(first));
  const int lane = chunk.lane(), used = (chunk.steps + kPieceSteps - 1) / kPieceSteps;
  Acc products[2];
  product_gradients(p, chunk, products);
  SequenceCursor sequence(p, chunk.row, chunk.begin);
  const auto begins = [&](int step) {
    sequence.move_to(chunk.begin + step);
    return sequence.begins_at(chunk.begin + step);
  };
  Channels n = {}, u = {};
  if (p.states != nullptr) chunk.read(chunk.of_workspace(p.states), n);
#pragma unroll 1
  for (int piece = 0; piece < used; ++piece) {
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) pieces[piece][i][lane] = n[i];
    if (piece + 1 == used) break;
    typename Chunk::Row k[kPieceSteps];
    chunk.load_rows(p.k, piece * kPieceSteps, k);
#pragma unroll
    for (int j = 0; j < kPieceSteps; ++j) {
      const int step = piece * kPieceSteps + j;
      if (begins(step)) chunk.read(chunk.of_sequence(p.initial_n, sequence), n);
      chunk.advance(n, k[j], step);
    }
  }

  if (p.grad_states != nullptr) chunk.read(chunk.of_workspace(p.grad_states), u);
  Acc grad_gain[2] = {}, grad_log_decay[2] = {};
#pragma unroll 1
  for (int piece = used - 1; piece >= 0; --piece) {
    typename Chunk::Row k[kPieceSteps], q[kPieceSteps], grad_q[kGradRows], grad_k[kGradRows];
    chunk.load_rows(p.k, piece * kPieceSteps, k);
    chunk.load_rows(p.q, piece * kPieceSteps, q);
    const auto load_grads = [&](int first) {
      if (p.grad_q.data != nullptr) chunk.load_rows(p.grad_q, first, grad_q);
      if (p.grad_k.data != nullptr) chunk.load_rows(p.grad_k, first, grad_k);
    };
    if constexpr (kGradRows > 1) load_grads(piece * kPieceSteps);
    Channels after[kPieceSteps + 1];  // n before the piece, and after each of its steps
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) after[0][i] = pieces[piece][i][lane];
#pragma unroll
    for (int j = 0; j < kPieceSteps; ++j) {
      const int step = piece * kPieceSteps + j;
#pragma unroll
      for (int i = 0; i < kLaneChannels; ++i) after[j + 1][i] = after[j][i];
      if (step >= chunk.steps) continue;
      if (begins(step)) chunk.read(chunk.of_sequence(p.initial_n, sequence), after[j + 1]);
      chunk.advance(after[j + 1], k[j], step);
    }
#pragma unroll
    for (int j = kPieceSteps - 1; j >= 0; --j) {
      const int step = piece * kPieceSteps + j;
      if (step >= chunk.steps) continue;
      if constexpr (kGradRows == 1) load_grads(step);
      const int row = kGradRows == 1 ? 0 : j;
      const bool is_first = begins(step);
      if (p.grad_final_n != nullptr && sequence.ends_at(chunk.begin + step)) {
        const Acc* const of_final = chunk.of_sequence(p.grad_final_n, sequence);
        Chunk::Row::for_each(p.key_dim, [&](int i, int channel) { u[i] += of_final[channel]; });
      }
      const Acc of_product = chunk.at(products, step), decay = chunk.at(chunk.decay, step), gain = chunk.at(chunk.gain, step);
      Channels grad;
      if (p.grad_q.data != nullptr) {
#pragma unroll
        for (int i = 0; i < kLaneChannels; ++i) grad[i] = of_product * after[j + 1][i];
        grad_q[row].add_and_store(grad, chunk.row_of(p.grad_q, step), p.grad_q.stride_column, p.key_dim);
      }
#pragma unroll
      for (int i = 0; i < kLaneChannels; ++i) u[i] = Math<Acc>::fma(of_product, q[j][i], u[i]);
      if (p.grad_k.data != nullptr) {
#pragma unroll
        for (int i = 0; i < kLaneChannels; ++i) grad[i] = gain * u[i];
        grad_k[row].add_and_store(grad, chunk.row_of(p.grad_k, step), p.grad_k.stride_column, p.key_dim);
      }
      const Acc of_gain = chunk.dot(u, k[j]);
      // n after the step before, or of the beginning of a sequence.
      Channels before;
#pragma unroll
      for (int i = 0; i < kLaneChannels; ++i) before[i] = after[j][i];
      if (is_first) chunk.read(chunk.of_sequence(p.initial_n, sequence), before);
      Acc of_decay = 0;
#pragma unroll
      for (int i = 0; i < kLaneChannels; ++i) {
        u[i] = decay == Acc(0) ? Acc(0) : decay * u[i];
        of_decay = Math<Acc>::fma(before[i], u[i], of_decay);
      }
      of_decay = decay == Acc(0) ? Acc(0) : cuda::sum_over_warp(of_decay);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (step != lane + i * cuda::kWarpSize) continue;
        grad_gain[i] = of_gain;
        grad_log_decay[i] = of_decay;
      }
      if (is_first) {
        chunk.write(chunk.of_sequence(p.grad_initial_n, sequence), u);
#pragma unroll
        for (int i = 0; i < kLaneChannels; ++i) u[i] = 0;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int step = lane + i * cuda::kWarpSize;
    if (step >= chunk.steps) break;
    static_cast<Acc*>(p.grad_gain)[chunk.place(step)] = grad_gain[i];
    static_cast<Acc*>(p.grad_log_decay)[chunk.place(step)] = grad_log_decay[i];
  }
}

// Computes p.states and, in backward, p.grad_states. A row of one chunk needs them only if they are the result, only_states.
template <typename Scalar, int size, typename Params>
cudaError_t launch_normalizer_states(const Params& p, int64_t warps, cudaStream_t stream) {
  if (normalizer_chunks(p.seqlen) <= 1 && !p.only_states) return cudaSuccess;
  cudaError_t error = launch_warps<kSumsWarps>(mlstm_normalizer_sums_kernel<Scalar, size, Params>, warps, stream, p);
  if (error != cudaSuccess) return error;
  const int64_t blocks = (p.batch * p.heads * p.key_dim + kScanThreads - 1) / kScanThreads;
  const int directions = std::is_same_v<Params, NormalizerBwdParams> ? 2 : 1;
  const int segments = normalizer_chunks(p.seqlen) >= kLeastSegmentChunks * kMaxScanSegments ? kMaxScanSegments : 1;
  return cuda::launch(mlstm_normalizer_scan_kernel<SumType<Scalar, Params>, cuda::AccumulateType<Scalar>>, directions * blocks,
                      segments * kScanThreads, 0, stream, false, static_cast<const NormalizerParams&>(p), blocks);
}

template <typename Scalar, int size, typename Params>
cudaError_t launch_normalizer(const Params& p, cudaStream_t stream) {
  const int64_t warps = p.batch * normalizer_chunks(p.seqlen) * p.heads;
  const cudaError_t error = launch_normalizer_states<Scalar, size>(p, warps, stream);
  if (error != cudaSuccess) return error;
  if constexpr (std::is_same_v<Params, NormalizerBwdParams>) {
    return launch_warps<1>(mlstm_normalizer_bwd_kernel<Scalar, size>, warps, stream, p);
  } else {
    if (p.only_states) return cudaSuccess;
    return launch_warps<kSumsWarps>(mlstm_normalizer_fwd_kernel<Scalar, size>, warps, stream, p);
  }
}

template <typename Scalar, typename Params>
cudaError_t launch_normalizer(const Params& params, bool has_vectors, cudaStream_t stream) {
  constexpr int kVector = cuda::Vector<Scalar, 16 / sizeof(Scalar)>::kSize;
  return has_vectors ? launch_normalizer<Scalar, kVector>(params, stream) : launch_normalizer<Scalar, 1>(params, stream);
}

template <typename Scalar>
cudaError_t launch_mlstm_normalizer(const NormalizerParams& params, bool has_vectors, cudaStream_t stream) {
  return launch_normalizer<Scalar>(params, has_vectors, stream);
}

template <typename Scalar>
cudaError_t launch_mlstm_normalizer(const NormalizerBwdParams& params, bool has_vectors, cudaStream_t stream) {
  return launch_normalizer<Scalar>(params, has_vectors, stream);
}

}  // namespace ssm_kernels::mlstm
