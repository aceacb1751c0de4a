// The block of the backward of a chunk of complex states (complex_chunk_bwd.cuh): its shared memory, and its threads' work on
// elements, which does not depend on the states.
#pragma once

#include "cuda/ptx/prefetch.cuh"
#include "selective_scan/cuda/complex_bwd_shared.cuh"

namespace ssm_kernels::selective_scan::complex_scan {

constexpr int kChunkWarpStates = 2, kChunkWarps = 8, kChunkGroup = 8;
constexpr int kMostChunkStates = kChunkWarpStates * kChunkWarps;
static_assert(kShortChunk % kWarpSize == 0 && kLongChunk % kWarpSize == 0, "lanes stage whole rows of steps");
static_assert(kChunkGroup * 4 == kWarpSize, "the butterfly adds four numbers of each step of a group");

// Sums over the states; the last is that of two samples.
enum ChunkSum { kChunkInput, kChunkStep, kChunkOutput, kChunkLam, kNumChunkSums };

struct ChunkShared {
  // The rows of B and C are as long for all numbers of states, so that addresses of steps are constants.
  static constexpr int kPitchMatrix = 2 * kMostChunkStates + 4;
  // Before the steps of `u` and B there is the sample before the chunk. parts: (warps, sums, channels, kChunkGroup).
  // channel_sums: (warps, D and delta_bias, channels). states: (groups, two channels, threads).
  float *delta, *u, *dy, *lam, *B, *C, *parts, *channel_sums, *bias, *skip;
  float4* states;
  int pitch, pitch_u, sums, bytes;

  SSM_HOST_DEVICE ChunkShared(int warps, int chunk, bool has_lam, unsigned char* memory) {
    float* next = reinterpret_cast<float*>(memory);
    const auto allocate = [&](int count) {
      float* const array = next;
      next += (count + 3) / 4 * 4;
      return array;
    };
    // Rows of steps are an odd number of vectors, so that eight neighboring channels are in different banks.
    pitch = chunk + 4;
    pitch_u = chunk + 12;
    sums = has_lam ? kNumChunkSums : kChunkLam;
    states = reinterpret_cast<float4*>(allocate(chunk / kChunkGroup * 2 * warps * kWarpSize * 4));
    delta = allocate(kBwdChannels * pitch);
    dy = allocate(kBwdChannels * pitch);
    lam = allocate(has_lam ? kBwdChannels * pitch : 0);
    u = allocate(kBwdChannels * pitch_u) + 4;
    B = allocate((chunk + 1) * kPitchMatrix) + kPitchMatrix;
    C = allocate(chunk * kPitchMatrix);
    parts = allocate(warps * sums * kBwdChannels * kChunkGroup);
    channel_sums = allocate(warps * 2 * kBwdChannels);
    bias = allocate(kBwdChannels);
    skip = allocate(kBwdChannels);
    bytes = static_cast<int>(reinterpret_cast<unsigned char*>(next) - memory);
  }
  // The place of four steps of a channel in `parts`: halves of neighboring fours of channels alternate, so that eight
  // neighboring channels are in different banks.
  SSM_HOST_DEVICE float* part(int warp, int sum, int channel, int half) const {
    return parts + ((warp * sums + sum) * kBwdChannels + channel) * kChunkGroup + 4 * (half ^ (channel >> 2 & 1));
  }
};

template <typename Scalar, typename Rule>
struct ChunkBlock {
  static constexpr bool kTwo = Rule::kHasLam;  // whether the rule reads two samples
  static constexpr int kG = kChunkGroup, kS = kChunkWarpStates;

  const BwdPlan& plan;
  const SelectiveScanBwdParams& p;
  const TwoSampleParams& two;
  const ChunkShared shared;
  const Place place;
  const int lane, warp, warps, chunk_length, channels, states;
  const bool steps_are_neighbors, repeats;
  const float weight;

  __device__ __forceinline__ ChunkBlock(const BwdPlan& plan_, unsigned char* memory)
      : plan(plan_),
        p(plan_.p),
        two(plan_.two),
        shared(blockDim.x / kWarpSize, static_cast<int>(p.chunk_length), kTwo, memory),
        place(p, plan_.tiles, kBwdChannels),
        lane(threadIdx.x % kWarpSize),
        warp(threadIdx.x / kWarpSize),
        warps(blockDim.x / kWarpSize),
        chunk_length(static_cast<int>(p.chunk_length)),
        channels(static_cast<int>(place.end - place.channel)),
        states(static_cast<int>(p.dstate / 2)),
        steps_are_neighbors(p.u.stride_dim != 1),
        repeats(two.repeats_first && (two.previous_u.data == nullptr || place.row.initial < 0)),
        weight(two.conjugate_pairs ? 2.0f : 1.0f) {}

  __device__ __forceinline__ float lam_of(float raw) const { return two.lam_sigmoid ? sigmoid(raw) : raw; }

  // A (batch, dim, seqlen) tensor's chunk as rows along the dimension whose elements are neighbors. A warp has every row of so
  // many, and a lane every 32nd element of it.
  struct Rows {
    Scalar* data;
    int64_t stride, part_stride;

    __device__ __forceinline__ Rows(const ChunkBlock& block, const SequenceView& view, int64_t begin)
        : data(static_cast<Scalar*>(view.data)) {
      const bool along = block.steps_are_neighbors;
      const int64_t row_stride = along ? view.stride_dim : view.stride_step;
      const int64_t lane_stride = along ? view.stride_step : view.stride_dim;
      data += block.place.row.batch * view.stride_batch + block.place.channel * view.stride_dim +
              (block.place.row.begin + begin) * view.stride_step + block.warp * row_stride + block.lane * lane_stride;
      stride = block.warps * row_stride;
      part_stride = kWarpSize * lane_stride;
    }
    // Element `j` of those that a thread visits together.
    __device__ __forceinline__ Scalar* at(int j) const { return data + j / kMostParts * stride + j % kMostParts * part_stride; }
    __device__ __forceinline__ void advance(int rows) { data += rows * stride; }
  };
  // Visits the chunk's elements, `kRows` rows of a warp at a time: load(j) of all, then finish(j, t, c, is_inside), then
  // end(j, row) for each row, then advance(). A thread visits the same ones each time.
  template <int kRows, typename Load, typename Finish, typename End, typename Advance>
  __device__ __forceinline__ void visit_elements(int length, const Load& load, const Finish& finish, const End& end,
                                                 const Advance& advance) const {
    const int rows = steps_are_neighbors ? kBwdChannels : chunk_length;
    const int parts = (steps_are_neighbors ? chunk_length : kBwdChannels) / kWarpSize;
#pragma unroll 1
    for (int first = warp; first < rows; first += kRows * warps) {
      const auto visit = [&](const auto& visitor) {
#pragma unroll
        for (int j = 0; j < kRows; ++j) {
          const int row = first + j * warps;
#pragma unroll
          for (int part = 0; part < kMostParts; ++part) {
            const int column = part * kWarpSize + lane;
            const int t = steps_are_neighbors ? column : row, c = steps_are_neighbors ? row : column;
            if (row < rows && part < parts) visitor(j * kMostParts + part, t, c, t < length && c < channels);
          }
        }
      };
      visit([&](int j, int, int, bool is_inside) {
        if (is_inside) load(j);
      });
      visit(finish);
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        if (first + j * warps < rows) end(j, first + j * warps);
      }
      advance();
    }
  }
  template <typename... Tensors>
  __device__ __forceinline__ static void advance_all(int rows, Tensors&... tensors) {
    (tensors.advance(rows), ...);
  }
  static constexpr int kMostParts = kLongChunk / kWarpSize;
  static_assert(kBwdChannels == kMostParts * kWarpSize, "both kinds of rows have at most so many elements of a lane");

  // Loads the sequences of a whole chunk, of which a line of the cache is a row, into the second-level cache.
  __device__ __forceinline__ void prefetch(int64_t begin) const {
    const SequenceView* const views[] = {&p.delta, &p.u, &p.grad_out, &p.z};
    const int rows = steps_are_neighbors ? channels : chunk_length;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const SequenceView& view = *views[i];
      if (view.data == nullptr) continue;
      // Rows of a scan in reverse descend.
      const bool descends = steps_are_neighbors && view.stride_step < 0;
      const Scalar* const first = address<Scalar>(view, place.row, place.channel, begin + (descends ? chunk_length - 1 : 0));
      const int64_t stride = steps_are_neighbors ? view.stride_dim : view.stride_step;
      for (int row = threadIdx.x; row < rows; row += blockDim.x) cuda::prefetch(first + row * stride);
    }
  }

  __device__ __forceinline__ void stage_sequences(int64_t begin, int length) const {
    constexpr int kRows = 4, kBatch = kRows * kMostParts;
    const bool has_grad = p.grad_out.data != nullptr, has_gate = has_grad && p.z.data != nullptr;
    Rows of_delta(*this, p.delta, begin), of_u(*this, p.u, begin), of_grad(*this, p.grad_out, begin);
    Rows of_z(*this, p.z, begin), of_lam(*this, two.lam, begin);
    Scalar raw_delta[kBatch], raw_u[kBatch], raw_grad[kBatch], raw_z[kBatch], raw_lam[kBatch];
    visit_elements<kRows>(
        length,
        [&](int j) {
          raw_delta[j] = *of_delta.at(j);
          raw_u[j] = *of_u.at(j);
          if (has_grad) raw_grad[j] = *of_grad.at(j);
          if (has_gate) raw_z[j] = *of_z.at(j);
          if constexpr (kTwo) raw_lam[j] = *of_lam.at(j);
        },
        [&](int j, int t, int c, bool is_inside) {
          float delta = 0, u = 0, dy = 0, lam = 0;
          if (is_inside) {
            delta = cuda::to_accumulate(raw_delta[j]) + shared.bias[c];
            if (p.delta_softplus) delta = softplus(delta);
            u = cuda::to_accumulate(raw_u[j]);
            if constexpr (!kTwo) u *= delta;
            // The angle of an infinite step size is not a number.
            delta = Math<float>::min(delta, 1e18f);
            if (has_grad) dy = cuda::to_accumulate(raw_grad[j]);
            if (has_gate) dy *= silu(cuda::to_accumulate(raw_z[j]));
            if constexpr (kTwo) lam = lam_of(cuda::to_accumulate(raw_lam[j]));
          }
          shared.delta[c * shared.pitch + t] = delta;
          shared.u[c * shared.pitch_u + t] = u;
          shared.dy[c * shared.pitch + t] = dy;
          if constexpr (kTwo) shared.lam[c * shared.pitch + t] = lam;
        },
        [](int, int) {}, [&]() { advance_all(kRows, of_delta, of_u, of_grad, of_z, of_lam); });
    if constexpr (kTwo) {
      for (int c = threadIdx.x; c < kBwdChannels; c += blockDim.x) {
        const float u = c < channels ? sample_before<Scalar>(p, two, place.row, place.channel + c, begin) : 0.0f;
        shared.u[c * shared.pitch_u - 1] = u;
      }
    }
  }

  __device__ __forceinline__ void stage_matrices(int64_t begin, int length) const {
    constexpr int kColumns = 2 * kS;  // of a warp
    const int columns = 2 * states;
    const int64_t group_B = place.channel / (p.dim / p.B.groups), group_C = place.channel / (p.dim / p.C.groups);
    const auto stage = [&](float* target, const MatrixView& matrix, int64_t group, bool is_C) {
      const float* const source = static_cast<const float*>(matrix.data) + place.row.batch * matrix.stride_batch +
                                  group * matrix.stride_channel + (place.row.begin + begin) * matrix.stride_step;
      const auto put = [&](int t, int i, float value) {
        target[t * ChunkShared::kPitchMatrix + i] = is_C ? value * (i % 2 != 0 ? -weight : weight) : value;
      };
      if (matrix.stride_state != 1) {
        float values[kColumns][kMostParts];
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          const int i = warp + j * warps;
#pragma unroll
          for (int part = 0; part < kMostParts; ++part) {
            const int t = part * kWarpSize + lane;
            values[j][part] = i < columns && t < length ? source[i * matrix.stride_state + t * matrix.stride_step] : 0.0f;
          }
        }
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
#pragma unroll
          for (int part = 0; part < kMostParts; ++part) {
            const int i = warp + j * warps, t = part * kWarpSize + lane;
            if (i < columns && t < chunk_length) put(t, i, values[j][part]);
          }
        }
      } else if (lane < columns) {
#pragma unroll 4
        for (int t = warp; t < chunk_length; t += warps) {
          put(t, lane, t < length ? source[lane + t * matrix.stride_step] : 0.0f);
        }
      }
    };
    static_assert(2 * kMostChunkStates <= kWarpSize, "a lane has at most one row of B and C");
    stage(shared.B, p.B, group_B, false);
    stage(shared.C, p.C, group_C, true);
    if constexpr (kTwo) {
      for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        shared.B[i - ChunkShared::kPitchMatrix] = matrix_before<float>(p, two, place.row, group_B, begin, i);
      }
    }
  }

  // The sums over states replace what the group has read.
  __device__ __forceinline__ float* sum_of(int sum, int c, int t) const {
    float* const array = sum == kChunkStep ? shared.delta : sum == kChunkOutput ? shared.dy : shared.lam;
    return sum == kChunkInput ? shared.u + c * shared.pitch_u + t : array + c * shared.pitch + t;
  }

  // Writes the chunk's gradients.
  __device__ __forceinline__ void write(int64_t begin, int length) const {
    constexpr int kRows = kTwo ? 2 : 4, kBatch = kRows * kMostParts;
    const bool has_grad = p.grad_out.data != nullptr, has_gate = p.z.data != nullptr;
    float* const own_sums = shared.channel_sums + warp * 2 * kBwdChannels;
    Rows of_delta(*this, p.delta, begin), of_u(*this, p.u, begin), of_grad(*this, p.grad_out, begin);
    Rows of_z(*this, p.z, begin), of_lam(*this, two.lam, begin), to_lam(*this, two.grad_lam, begin);
    Rows to_delta(*this, p.grad_delta, begin), to_u(*this, p.grad_u, begin), to_z(*this, p.grad_z, begin);
    Scalar raw_delta[kBatch], raw_u[kBatch], raw_grad[kBatch], raw_z[kBatch], raw_lam[kBatch];
    float row_D[kRows] = {}, row_bias[kRows] = {};
    visit_elements<kRows>(
        length,
        [&](int j) {
          raw_delta[j] = *of_delta.at(j);
          raw_u[j] = *of_u.at(j);
          if (has_grad) raw_grad[j] = *of_grad.at(j);
          if (has_gate) raw_z[j] = *of_z.at(j);
          if constexpr (kTwo) raw_lam[j] = *of_lam.at(j);
        },
        [&](int j, int t, int c, bool is_inside) {
          if (!is_inside) return;
          const float D = shared.skip[c], raw = cuda::to_accumulate(raw_delta[j]) + shared.bias[c];
          const float delta = p.delta_softplus ? softplus(raw) : raw, u = cuda::to_accumulate(raw_u[j]);
          const float sum_input = *sum_of(kChunkInput, c, t);
          float dy = has_grad ? cuda::to_accumulate(raw_grad[j]) : 0.0f;
          if (has_gate) {
            const float z = cuda::to_accumulate(raw_z[j]), slope = sigmoid(z);
            if (p.grad_z.data != nullptr) {
              const float y = Math<float>::fma(D, u, *sum_of(kChunkOutput, c, t));
              *to_z.at(j) = cuda::from_accumulate<Scalar>(dy * y * silu_derivative(z, slope));
            }
            dy *= z * slope;
          }
          float of_step = *sum_of(kChunkStep, c, t);
          if constexpr (!kTwo) of_step = Math<float>::fma(u, sum_input, of_step);
          if (p.delta_softplus) of_step *= softplus_derivative(raw);
          if (p.grad_u.data != nullptr) {
            *to_u.at(j) = cuda::from_accumulate<Scalar>(Math<float>::fma(D, dy, kTwo ? sum_input : delta * sum_input));
          }
          if (p.grad_delta.data != nullptr) *to_delta.at(j) = cuda::from_accumulate<Scalar>(of_step);
          if constexpr (kTwo) {
            const float lam = lam_of(cuda::to_accumulate(raw_lam[j])), slope = two.lam_sigmoid ? lam * (1.0f - lam) : 1.0f;
            if (two.grad_lam.data != nullptr) {
              *to_lam.at(j) = cuda::from_accumulate<Scalar>(delta * *sum_of(kChunkLam, c, t) * slope);
            }
          }
          if (steps_are_neighbors) {
            row_D[j / kMostParts] = Math<float>::fma(dy, u, row_D[j / kMostParts]);
            row_bias[j / kMostParts] += of_step;
          } else {
            own_sums[c] = Math<float>::fma(dy, u, own_sums[c]);
            own_sums[kBwdChannels + c] += of_step;
          }
        },
        [&](int j, int row) {
          if (!steps_are_neighbors) return;
#pragma unroll
          for (int distance = kWarpSize / 2; distance >= 1; distance /= 2) {
            row_D[j] += __shfl_xor_sync(kAllLanes, row_D[j], distance);
            row_bias[j] += __shfl_xor_sync(kAllLanes, row_bias[j], distance);
          }
          if (lane == 0) {
            own_sums[row] += row_D[j];
            own_sums[kBwdChannels + row] += row_bias[j];
          }
          row_D[j] = row_bias[j] = 0;
        },
        [&]() { advance_all(kRows, of_delta, of_u, of_grad, of_z, of_lam, to_lam, to_delta, to_u, to_z); });
  }
};

}  // namespace ssm_kernels::selective_scan::complex_scan
