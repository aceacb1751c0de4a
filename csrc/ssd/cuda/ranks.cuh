// The inputs and outputs of the ranks of a scan (Ranks in ssd_op.h), elementwise, and their adjoint. With r the rank:
//
//   v^r = x * x^r       u^r = y^r, or rms(y^r) w       out = sum_r out^r * u^r * s(z * z^r),   s(a) = a sigmoid(a)
//
// and, with g the gradient of out, n = y / rms(y), h = out^r g the gradient of u s:
//
//   grad out^r = sum over steps of g u s        grad z^r = sum of z h u s'(z z^r)        grad z = sum_r z^r h u s'(z z^r)
//   grad w     = sum of h s n, over ranks too   grad y   = (w h s - n mean(w h s n)) / rms(y), or h s
//   grad x     = sum_r x^r grad v^r             grad x^r = sum of x grad v^r
//
// The scan has v and y in rows, several for each step (SsdDiagonalFwdParams::rank_shift): those of the ranks, and zeros up to a
// power of two. A block has one head and some of the steps, one batch of kSteps after another. A group of lanes has the row of
// a step: each lane kRankElements elements of it, or twice as many of rows that are longer than a warp's. The loop over ranks
// is outside of the loop over a batch, so that a factor is loaded once for several steps. The sums of a thread over its steps
// are in shared memory, in places of its own; the block's lanes of the same elements are added in order, and the sums of the
// blocks afterwards. Nothing is saved: the adjoint reads y again. Everything is computed in fp32.
#pragma once

#include "common/activations.h"
#include "cuda/constants.h"
#include "cuda/launch.cuh"
#include "cuda/vector_io.cuh"
#include "ssd/cuda/ranks.h"

namespace ssm_kernels::ssd {

using cuda::chunked::RowsView;

// Steps of a batch, and the quads of a row that a lane has.
template <int quads>
struct RankBatch {
  static constexpr int kSteps = 4 / quads;
};

struct Quad {
  float values[kRankElements];

  static __device__ __forceinline__ Quad of(float value) { return {{value, value, value, value}}; }
  template <typename Scalar>
  static __device__ __forceinline__ Quad load(const Scalar* source, int count, bool is_vector) {
    struct alignas(kRankElements * sizeof(Scalar)) Elements {
      Scalar values[kRankElements];
    };
    Quad result = of(0);
    if (is_vector && count >= kRankElements) {
      const Elements elements = *reinterpret_cast<const Elements*>(source);
#pragma unroll
      for (int i = 0; i < kRankElements; ++i) result.values[i] = cuda::to_accumulate(elements.values[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kRankElements; ++i) {
        if (i < count) result.values[i] = cuda::to_accumulate(source[i]);
      }
    }
    return result;
  }
  template <typename Scalar>
  __device__ __forceinline__ void store(Scalar* target, int count, bool is_vector) const {
    struct alignas(kRankElements * sizeof(Scalar)) Elements {
      Scalar values[kRankElements];
    };
    Elements elements;
#pragma unroll
    for (int i = 0; i < kRankElements; ++i) elements.values[i] = cuda::from_accumulate<Scalar>(values[i]);
    if (is_vector && count >= kRankElements) {
      *reinterpret_cast<Elements*>(target) = elements;
    } else {
#pragma unroll
      for (int i = 0; i < kRankElements; ++i) {
        if (i < count) target[i] = elements.values[i];
      }
    }
  }
  __device__ __forceinline__ float inner_product(const Quad& other) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kRankElements; ++i) sum = fmaf(values[i], other.values[i], sum);
    return sum;
  }
};
template <typename Body>
__device__ __forceinline__ Quad for_elements(const Body& body) {
  Quad result;
#pragma unroll
  for (int i = 0; i < kRankElements; ++i) result.values[i] = body(i);
  return result;
}

// A thread's elements and steps.
template <typename Scalar, int quads>
struct RankWork {
  static constexpr int kSteps = RankBatch<quads>::kSteps;
  const RankParams& p;
  int lanes, lane, group, groups;  // of a row's lanes
  int head, part;

  __device__ __forceinline__ explicit RankWork(const RankParams& p) : p(p) {
    lanes = 1;
    while (lanes < cuda::kWarpSize && lanes * kRankElements < p.headdim) lanes *= 2;
    lane = threadIdx.x % lanes;
    group = threadIdx.x / lanes;
    groups = kRankThreads / lanes;
    head = static_cast<int>(blockIdx.x % p.heads);
    part = static_cast<int>(blockIdx.x / p.heads);
  }

  __device__ __forceinline__ int element(int quad) const { return (quad * cuda::kWarpSize + lane) * kRankElements; }
  __device__ __forceinline__ int count(int quad) const { return p.headdim - element(quad); }

  // Calls body(first) for the first step of each of the group's batches, as often in all groups of a block.
  template <typename Body>
  __device__ __forceinline__ void for_each_batch(const Body& body) const {
    const int64_t steps = p.batch * p.seqlen, stride = static_cast<int64_t>(groups) * kSteps;
    for (int64_t first = part * stride; first < steps; first += p.parts * stride) body(first + group * kSteps);
  }
  __device__ __forceinline__ bool is_there(int64_t step) const { return step < p.batch * p.seqlen; }

  __device__ __forceinline__ Scalar* at(const RowsView& view, int64_t step, int quad, int rows = 1, int row = 0) const {
    const int64_t entry = step / p.seqlen, row_of_entry = (step - entry * p.seqlen) * rows + row;
    return static_cast<Scalar*>(view.data) + entry * view.stride_batch + row_of_entry * view.stride_step +
           head * view.stride_head + element(quad);
  }
  __device__ __forceinline__ Quad load(const RowsView& view, int64_t step, int quad, int rows = 1, int row = 0) const {
    if (!is_there(step)) return Quad::of(0);
    return Quad::load<Scalar>(at(view, step, quad, rows, row), count(quad), p.are_vectors);
  }
  __device__ __forceinline__ void store(const Quad& value, const RowsView& view, int64_t step, int quad, int rows = 1,
                                        int row = 0) const {
    if (is_there(step)) value.store<Scalar>(at(view, step, quad, rows, row), count(quad), p.are_vectors);
  }
  __device__ __forceinline__ Quad factor(const float* factors, int rank, int quad) const {
    if (factors == nullptr) return Quad::of(1);
    const int64_t row = static_cast<int64_t>(head) * p.ranks + rank;
    return Quad::load<float>(factors + row * p.headdim + element(quad), count(quad), p.headdim % kRankElements == 0);
  }
  __device__ __forceinline__ Quad weight(int quad) const {
    if (p.norm_weight == nullptr) return Quad::of(1);
    return Quad::load<float>(p.norm_weight + static_cast<int64_t>(head) * p.headdim + element(quad), count(quad),
                             p.headdim % kRankElements == 0);
  }
  __device__ __forceinline__ float sum_over_row(float value) const {
    for (int distance = lanes / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(cuda::kAllLanes, value, distance);
    return value;
  }
  // 1 / rms(y), and 1 of a step that does not exist.
  __device__ __forceinline__ float scale(const Quad (&y)[quads], int64_t step) const {
    float squares = 0;
#pragma unroll
    for (int q = 0; q < quads; ++q) squares += y[q].inner_product(y[q]);
    const float scale = 1.0f / sqrtf(sum_over_row(squares) / static_cast<float>(p.headdim) + p.norm_eps);
    return is_there(step) ? scale : 1.0f;
  }
};

// A thread's sums over its steps, in shared memory: `kinds` sums for each rank and element.
template <int kinds, int quads>
class RankSums {
 public:
  static constexpr int bytes(int ranks) {
    return kinds * ranks * quads * kRankElements * kRankThreads * static_cast<int>(sizeof(float));
  }

  __device__ __forceinline__ RankSums(float* memory, int ranks) : memory_(memory), ranks_(ranks) {
    for (int i = threadIdx.x; i < kinds * ranks * quads * kRankElements * kRankThreads; i += kRankThreads) memory_[i] = 0;
    __syncthreads();
  }
  __device__ __forceinline__ void add(int kind, int rank, int quad, const Quad& values) const {
#pragma unroll
    for (int i = 0; i < kRankElements; ++i) place(kind, rank, quad, i, threadIdx.x) += values.values[i];
  }
  // Writes the sums of one kind over the block's groups, or their sum over the ranks too.
  template <typename Work>
  __device__ __forceinline__ void write(int kind, const Work& work, float* parts) const {
    if (parts == nullptr || work.group > 0) return;
    for (int rank = 0; rank < ranks_; ++rank) {
#pragma unroll
      for (int q = 0; q < quads; ++q) {
        const int64_t row = (static_cast<int64_t>(work.part) * work.p.heads + work.head) * ranks_ + rank;
#pragma unroll
        for (int i = 0; i < kRankElements; ++i) {
          float sum = 0;
          for (int group = 0; group < work.groups; ++group) sum += place(kind, rank, q, i, group * work.lanes + work.lane);
          if (i < work.count(q)) parts[row * work.p.headdim + work.element(q) + i] = sum;
        }
      }
    }
  }

 private:
  __device__ __forceinline__ float& place(int kind, int rank, int quad, int element, int thread) const {
    return memory_[(((kind * ranks_ + rank) * quads + quad) * kRankElements + element) * kRankThreads + thread];
  }

  float* memory_;
  int ranks_;
};

template <typename Scalar, int quads>
__global__ void __launch_bounds__(kRankThreads) rank_inputs_kernel(const __grid_constant__ RankParams p) {
  using Work = RankWork<Scalar, quads>;
  const Work work(p);
  work.for_each_batch([&](int64_t first) {
    Quad x[Work::kSteps][quads];
#pragma unroll
    for (int s = 0; s < Work::kSteps; ++s) {
#pragma unroll
      for (int q = 0; q < quads; ++q) x[s][q] = work.load(p.x, first + s, q);
    }
    for (int rank = 0; rank < p.rows_of_step; ++rank) {
#pragma unroll
      for (int q = 0; q < quads; ++q) {
        const Quad factor = rank < p.ranks ? work.factor(p.x_factor, rank, q) : Quad::of(0);
#pragma unroll
        for (int s = 0; s < Work::kSteps; ++s) {
          const Quad v = for_elements([&](int i) { return rank < p.ranks ? x[s][q].values[i] * factor.values[i] : 0.0f; });
          work.store(v, p.rows, first + s, q, p.rows_of_step, rank);
        }
      }
    }
  });
}

template <typename Scalar, int quads>
__global__ void __launch_bounds__(kRankThreads) rank_outputs_kernel(const __grid_constant__ RankParams p) {
  using Work = RankWork<Scalar, quads>;
  const Work work(p);
  const bool has_norm = p.norm_weight != nullptr, has_gate = p.z.data != nullptr;
  work.for_each_batch([&](int64_t first) {
    Quad sum[Work::kSteps][quads], z[Work::kSteps][quads];
#pragma unroll
    for (int s = 0; s < Work::kSteps; ++s) {
#pragma unroll
      for (int q = 0; q < quads; ++q) {
        sum[s][q] = Quad::of(0);
        z[s][q] = has_gate ? work.load(p.z, first + s, q) : Quad::of(0);
      }
    }
    for (int rank = 0; rank < p.ranks; ++rank) {
      Quad out_factor[quads], z_factor[quads];
#pragma unroll
      for (int q = 0; q < quads; ++q) {
        const Quad out = work.factor(p.out_factor, rank, q), weight = work.weight(q);
        out_factor[q] = for_elements([&](int i) { return out.values[i] * weight.values[i]; });
        z_factor[q] = work.factor(p.z_factor, rank, q);
      }
#pragma unroll
      for (int s = 0; s < Work::kSteps; ++s) {
        Quad y[quads];
#pragma unroll
        for (int q = 0; q < quads; ++q) y[q] = work.load(p.rows, first + s, q, p.rows_of_step, rank);
        const float scale = has_norm ? work.scale(y, first + s) : 1.0f;
#pragma unroll
        for (int q = 0; q < quads; ++q) {
          sum[s][q] = for_elements([&](int i) {
            const float gate = z[s][q].values[i] * z_factor[q].values[i];
            const float value = y[q].values[i] * scale * out_factor[q].values[i];
            return fmaf(value, has_gate ? gate * sigmoid(gate) : 1.0f, sum[s][q].values[i]);
          });
        }
      }
    }
#pragma unroll
    for (int s = 0; s < Work::kSteps; ++s) {
#pragma unroll
      for (int q = 0; q < quads; ++q) work.store(sum[s][q], p.out, first + s, q);
    }
  });
}

// The kinds of sums of the outputs' adjoint.
enum RankSum { kZFactor, kOutFactor, kNormWeight, kNumRankSums };

template <typename Scalar, int quads>
__global__ void __launch_bounds__(kRankThreads) rank_outputs_bwd_kernel(const __grid_constant__ RankBwdParams p) {
  using Work = RankWork<Scalar, quads>;
  extern __shared__ float memory[];
  const Work work(p);
  const RankSums<kNumRankSums, quads> sums(memory, p.ranks);
  const bool has_norm = p.norm_weight != nullptr, has_gate = p.z.data != nullptr;
  work.for_each_batch([&](int64_t first) {
    Quad g[Work::kSteps][quads], z[Work::kSteps][quads], grad_z[Work::kSteps][quads];
#pragma unroll
    for (int s = 0; s < Work::kSteps; ++s) {
#pragma unroll
      for (int q = 0; q < quads; ++q) {
        g[s][q] = work.load(p.out, first + s, q);
        z[s][q] = has_gate ? work.load(p.z, first + s, q) : Quad::of(0);
        grad_z[s][q] = Quad::of(0);
      }
    }
    for (int rank = 0; rank < p.ranks; ++rank) {
      Quad out_factor[quads], z_factor[quads], weight[quads];
#pragma unroll
      for (int q = 0; q < quads; ++q) {
        out_factor[q] = work.factor(p.out_factor, rank, q);
        z_factor[q] = work.factor(p.z_factor, rank, q);
        weight[q] = work.weight(q);
      }
#pragma unroll
      for (int s = 0; s < Work::kSteps; ++s) {
        Quad y[quads], grad[quads];
#pragma unroll
        for (int q = 0; q < quads; ++q) y[q] = work.load(p.rows, first + s, q, p.rows_of_step, rank);
        const float scale = has_norm ? work.scale(y, first + s) : 1.0f;
        float along = 0;
#pragma unroll
        for (int q = 0; q < quads; ++q) {
          Quad of_z, of_out, of_weight;
#pragma unroll
          for (int i = 0; i < kRankElements; ++i) {
            const float normed = y[q].values[i] * scale, u = normed * weight[q].values[i];
            const float argument = z[s][q].values[i] * z_factor[q].values[i], open = sigmoid(argument);
            const float gate = has_gate ? argument * open : 1.0f;
            const float slope = has_gate ? open * fmaf(argument, 1.0f - open, 1.0f) : 0.0f;
            const float h = g[s][q].values[i] * out_factor[q].values[i], of_gate = h * u * slope;
            of_out.values[i] = g[s][q].values[i] * u * gate;
            of_z.values[i] = of_gate * z[s][q].values[i];
            grad_z[s][q].values[i] = fmaf(of_gate, z_factor[q].values[i], grad_z[s][q].values[i]);
            of_weight.values[i] = h * gate * normed;
            grad[q].values[i] = h * gate * weight[q].values[i];
            along = fmaf(grad[q].values[i], normed, along);
          }
          if (p.z_parts != nullptr) sums.add(kZFactor, rank, q, of_z);
          if (p.out_parts != nullptr) sums.add(kOutFactor, rank, q, of_out);
          if (p.norm_parts != nullptr) sums.add(kNormWeight, rank, q, of_weight);
        }
        if (has_norm) {
          along = work.sum_over_row(along) / static_cast<float>(p.headdim);
#pragma unroll
          for (int q = 0; q < quads; ++q) {
            grad[q] = for_elements([&](int i) { return (grad[q].values[i] - y[q].values[i] * scale * along) * scale; });
          }
        }
#pragma unroll
        for (int q = 0; q < quads; ++q) work.store(grad[q], p.grad_rows, first + s, q, p.rows_of_step, rank);
      }
    }
    for (int rank = p.ranks; rank < p.rows_of_step; ++rank) {
#pragma unroll
      for (int s = 0; s < Work::kSteps; ++s) {
#pragma unroll
        for (int q = 0; q < quads; ++q) work.store(Quad::of(0), p.grad_rows, first + s, q, p.rows_of_step, rank);
      }
    }
    if (p.grad_z.data == nullptr) return;
#pragma unroll
    for (int s = 0; s < Work::kSteps; ++s) {
#pragma unroll
      for (int q = 0; q < quads; ++q) work.store(grad_z[s][q], p.grad_z, first + s, q);
    }
  });
  __syncthreads();
  sums.write(kZFactor, work, p.z_parts);
  sums.write(kOutFactor, work, p.out_parts);
  sums.write(kNormWeight, work, p.norm_parts);
}

template <typename Scalar, int quads>
__global__ void __launch_bounds__(kRankThreads, 4) rank_inputs_bwd_kernel(const __grid_constant__ RankBwdParams p) {
  using Work = RankWork<Scalar, quads>;
  extern __shared__ float memory[];
  const Work work(p);
  const RankSums<1, quads> sums(memory, p.ranks);
  work.for_each_batch([&](int64_t first) {
    Quad x[Work::kSteps][quads], grad_x[Work::kSteps][quads];
#pragma unroll
    for (int s = 0; s < Work::kSteps; ++s) {
#pragma unroll
      for (int q = 0; q < quads; ++q) {
        x[s][q] = p.x_parts != nullptr ? work.load(p.x, first + s, q) : Quad::of(0);
        grad_x[s][q] = Quad::of(0);
      }
    }
#pragma unroll 1
    for (int rank = 0; rank < p.ranks; ++rank) {
#pragma unroll
      for (int q = 0; q < quads; ++q) {
        const Quad factor = work.factor(p.x_factor, rank, q);
#pragma unroll
        for (int s = 0; s < Work::kSteps; ++s) {
          const Quad grad = work.load(p.grad_rows, first + s, q, p.rows_of_step, rank);
          grad_x[s][q] = for_elements([&](int i) { return fmaf(grad.values[i], factor.values[i], grad_x[s][q].values[i]); });
          if (p.x_parts != nullptr) {
            sums.add(0, rank, q, for_elements([&](int i) { return grad.values[i] * x[s][q].values[i]; }));
          }
        }
      }
    }
    if (p.grad_x.data == nullptr) return;
#pragma unroll
    for (int s = 0; s < Work::kSteps; ++s) {
#pragma unroll
      for (int q = 0; q < quads; ++q) work.store(grad_x[s][q], p.grad_x, first + s, q);
    }
  });
  __syncthreads();
  sums.write(0, work, p.x_parts);
}

// Launches the kernel for rows of the params' length.
template <typename Params, typename Kernel>
cudaError_t launch_ranks(Kernel short_rows, Kernel long_rows, int short_bytes, int long_bytes, const Params& params,
                         cudaStream_t stream) {
  const bool is_long = params.headdim > cuda::kWarpSize * kRankElements;
  const Kernel kernel = is_long ? long_rows : short_rows;
  const int bytes = is_long ? long_bytes : short_bytes;
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, bytes); error != cudaSuccess) return error;
  return cuda::launch(kernel, params.heads * params.parts, kRankThreads, bytes, stream, /*uses_pdl=*/false, params);
}

template <typename Scalar>
cudaError_t launch_rank_inputs(const RankParams& params, cudaStream_t stream) {
  return launch_ranks(rank_inputs_kernel<Scalar, 1>, rank_inputs_kernel<Scalar, 2>, 0, 0, params, stream);
}
template <typename Scalar>
cudaError_t launch_rank_outputs(const RankParams& params, cudaStream_t stream) {
  return launch_ranks(rank_outputs_kernel<Scalar, 1>, rank_outputs_kernel<Scalar, 2>, 0, 0, params, stream);
}
template <typename Scalar>
cudaError_t launch_rank_outputs_bwd(const RankBwdParams& params, cudaStream_t stream) {
  return launch_ranks(rank_outputs_bwd_kernel<Scalar, 1>, rank_outputs_bwd_kernel<Scalar, 2>,
                      RankSums<kNumRankSums, 1>::bytes(params.ranks), RankSums<kNumRankSums, 2>::bytes(params.ranks), params,
                      stream);
}
template <typename Scalar>
cudaError_t launch_rank_inputs_bwd(const RankBwdParams& params, cudaStream_t stream) {
  return launch_ranks(rank_inputs_bwd_kernel<Scalar, 1>, rank_inputs_bwd_kernel<Scalar, 2>, RankSums<1, 1>::bytes(params.ranks),
                      RankSums<1, 2>::bytes(params.ranks), params, stream);
}

}  // namespace ssm_kernels::ssd
