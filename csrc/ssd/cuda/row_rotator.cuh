// The producer warpgroup that makes k and q of Mamba-3 for SSD's forward kernel with wgmma (fwd_sm90.cuh): rows of heads from
// the rows B and C of groups,
//
//   k_t = R(theta_t) (B_t + B_bias)       q_t = R(theta_t) (C_t + C_bias)       theta_t = theta_{t-1} + tanh(angles_t) dt_t / 2
//
// with phases theta in turns. R rotates a pair of columns for each angle (RowRotation, ssd.h); other columns get the bias
// alone. k and q are rounded once, and only ever are in shared memory.
//
// A slot holds k and q of one chunk and one head. The block's two heads take turns: the warpgroup fills slot after slot, in a
// ring, and each consumer warpgroup waits for every second one. A thread has kSteps neighboring steps, and in the rows of these
// the vectors (16 bytes) `column` and column + kColumns: with halves, these are the two columns of eight pairs; with pairs,
// four pairs each. It copies these vectors of B and C into the slot (cp.async), adds bias and rotates them in place. No other
// thread reads them before the slot is full, so that a thread waits for its own copies only. The copies for the next slot start
// before the current one is rotated, if that slot is empty by then.
//
// A phase is the given one before the chunk plus a sum over the chunk's steps: those of earlier warps, whose totals are in
// shared memory, those of earlier lanes, by shuffles, and the thread's own.
#pragma once

#include "cuda/ptx/tma.cuh"
#include "ssd/cuda/log_gates.cuh"

namespace ssm_kernels::ssd {

// Given gates with a gain on the diagonal, of a kernel that rotates B and C. angle_sets: 1 for pairs and at most dstate / 4
// angles, else 2.
template <typename Scalar, int angle_sets>
struct RotatedGates : DiagonalGates<Scalar> {
  using FwdParams = SsdRotatedFwdParams;
  static constexpr int kAngleSets = angle_sets;

  using DiagonalGates<Scalar>::DiagonalGates;
};
template <typename Gates, typename = void>
constexpr bool kRotatesRows = false;
template <typename Gates>
constexpr bool kRotatesRows<Gates, std::void_t<decltype(Gates::kAngleSets)>> = true;

template <int dstate>
struct RotatedShared {
  static constexpr int kSlots = dstate > 64 ? 2 : 3;
  static constexpr int kColumns = dstate / 16;  // vectors of half a row
  struct Tiles {
    SmemTile<dstate> k, q;
  };
  struct Slot : Tiles {
    Tiles lo;  // what rounding k and q left, for their products in a chunk
  };
  Slot slots[kSlots];
  float4 totals[2][kWarpgroupWarps][2][kColumns];  // of the phases over a warp's steps, for every second slot
  alignas(16) float bias[kWarpgroups][2][dstate];  // of k and of q
  Mbarrier full[kSlots], empty[kSlots];

  __device__ __forceinline__ void init(int thread) {
    if (thread >= kSlots) return;
    full[thread].init(kWarpgroupThreads);
    empty[thread].init(kWarpgroupThreads);
  }
};

// A consumer warpgroup's place in the ring of slots.
template <int dstate>
class RotatedRows {
 public:
  using Shared = RotatedShared<dstate>;

  __device__ __forceinline__ RotatedRows(Shared& shared, int index) : shared_(shared) { at_.stage = index; }
  __device__ __forceinline__ void wait() { shared_.full[at_.stage].wait(at_.phase); }
  __device__ __forceinline__ typename Shared::Slot& slot() const { return shared_.slots[at_.stage]; }
  __device__ __forceinline__ void release() {
    shared_.empty[at_.stage].arrive();
    at_.stage += kWarpgroups;
    if (at_.stage >= Shared::kSlots) {
      at_.stage -= Shared::kSlots;
      ++at_.phase;
    }
  }

 private:
  static_assert(Shared::kSlots >= kWarpgroups, "a warpgroup's next slot is in the same turn of the ring or in the next");

  Shared& shared_;
  PipelineState at_;
};
struct NoRotatedRows {
  __device__ __forceinline__ NoRotatedRows(Empty&, int) {}
};

// tanh with an absolute error of about 2e-7.
__device__ __forceinline__ float tanh_of_angle(float angle) {
  return 1.0f - __fdividef(2.0f, 1.0f + Math<float>::exp2(angle * static_cast<float>(2 * kLog2E)));
}

// The angle from -pi to pi.
__device__ __forceinline__ float radians_of(float turns) { return (turns - rintf(turns)) * 6.28318531f; }

struct CosAndSin {
  float cos, sin;

  __device__ __forceinline__ explicit CosAndSin(float turns) {
    const float radians = radians_of(turns);
    cos = __cosf(radians);
    sin = __sinf(radians);
  }
  __device__ __forceinline__ void rotate(float& first, float& second) const {
    const float rotated = cos * first - sin * second;
    second = sin * first + cos * second;
    first = rotated;
  }
};

// `fill_stage` has FillStage's interface: see FwdSm90.
template <typename Gates, int dstate, typename Order>
class RowRotator {
 public:
  using Scalar = typename Gates::Scalar;
  using Params = typename Gates::FwdParams;
  using Shared = RotatedShared<dstate>;

  __device__ __forceinline__ RowRotator(const Params& p, Shared& shared) : p_(p), shared_(shared) {
    const int thread = cuda::opaque(static_cast<int>(threadIdx.x) % kWarpgroupThreads);
    warp_ = __shfl_sync(kAllLanes, thread / kWarpSize, 0);
    column_ = thread % kColumns;
    first_step_ = thread / kColumns * kSteps;
    swizzled_ = column_ ^ first_step_ % kBlockSteps;
  }

  // fill_stages(chunk) fills this warp's part of the stages up to that of the chunk, and later ones if they are empty.
  template <typename FillStages>
  __device__ __forceinline__ void rotate_segment(const WorkSpan& at, int first_head, int second_head,
                                                 const FillStages& fill_stages) {
    load_biases(first_head, second_head);
    const int count = kWarpgroups * at.chunks;
    if (count == 0) return;
    wait_until_empty(at_);
    start_copies(at, 0, at_);
#pragma unroll
    for (int r = 0; r < kSteps; ++r) fetch_step(at, 0, first_head, r, true);
    fetch_phases(at, 0, first_head);
    bool are_fresh = true;  // whether rates_ are angles yet
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const int chunk = i / kWarpgroups, index = i % kWarpgroups, head = index == 0 ? first_head : second_head;
      const int next_chunk = (i + 1) / kWarpgroups, next_head = index == 0 ? second_head : first_head;
      PipelineState next = at_;
      next.advance(Shared::kSlots);
      const bool has_next = i + 1 < count;
      const bool starts_early = has_next && __all_sync(kAllLanes, is_empty(next));
      if (starts_early) {
        start_copies(at, next_chunk, next);
      } else {
        cuda::cp_async_commit();
      }
      fill_stages(chunk);
      if (are_fresh) make_rates();
      sum_phases(index);
      are_fresh = index != 0 || p_.rotation.angles.stride_head != 0;
      cuda::cp_async_wait<1>();
#pragma unroll
      for (int r = 0; r < kSteps; ++r) {
        rotate_step(at, chunk, head, index, r);
        if (has_next) fetch_step(at, next_chunk, next_head, r, are_fresh);
      }
      if (has_next) fetch_phases(at, next_chunk, next_head);
      cuda::fence_proxy_async();
      shared_.full[at_.stage].arrive();
      if (has_next && !starts_early) {
        wait_until_empty(next);
        start_copies(at, next_chunk, next);
      }
      at_ = next;
    }
  }

 private:
  static constexpr int kColumns = Shared::kColumns, kRowGroups = kWarpgroupThreads / kColumns, kSteps = kChunk / kRowGroups;
  // A thread's angles: kOfSet of them, consecutive, in each set.
  static constexpr int kSets = Gates::kAngleSets, kOfSet = 4, kAngles = kSets * kOfSet;
  static_assert(kWarpSize % kColumns == 0 && kBlockSteps % kSteps == 0, "a thread's steps are neighbors in every order");

  __device__ __forceinline__ bool is_pairs() const { return kSets == 1 || p_.rotation.is_pairs; }
  __device__ __forceinline__ int first_angle(int set) const {
    return is_pairs() ? kOfSet * (column_ + kColumns * set) : 2 * kOfSet * column_ + kOfSet * set;
  }
  __device__ __forceinline__ bool has_angles(int set) const { return first_angle(set) < p_.rotation.angles_count; }

  __device__ __forceinline__ bool is_empty(const PipelineState& at) const {
    return at.phase == 0 || shared_.empty[at.stage].is_complete(at.phase - 1);
  }

  __device__ __forceinline__ void wait_until_empty(const PipelineState& at) {
    if (at.phase > 0) shared_.empty[at.stage].wait(at.phase - 1);
  }

  __device__ __forceinline__ void load_biases(int first_head, int second_head) {
    // All threads have read the biases of the segment before.
    cuda::barrier_sync(kRotationBarrier, kWarpgroupThreads);
    for (int i = threadIdx.x % kWarpgroupThreads; i < kWarpgroups * dstate; i += kWarpgroupThreads) {
      const int index = i / dstate, column = i % dstate, element = (index == 0 ? first_head : second_head) * dstate + column;
      shared_.bias[index][0][column] = p_.rotation.B_bias == nullptr ? 0.0f : p_.rotation.B_bias[element];
      shared_.bias[index][1][column] = p_.rotation.C_bias == nullptr ? 0.0f : p_.rotation.C_bias[element];
    }
    cuda::barrier_sync(kRotationBarrier, kWarpgroupThreads);
  }

  static __device__ __forceinline__ int row_of_k(int step) {
    return Order::position_of(step / kBlockSteps) * kBlockSteps + step % kBlockSteps;
  }

  // The thread's vector of a set, in its r-th row, of which the first is at `first_row`: tile.vector(first_row + r, column_ +
  // kColumns set). Its swizzle is an XOR of numbers with different bits.
  __device__ __forceinline__ uint4* vector_at(SmemTile<dstate>& tile, int first_row, int r, int set) const {
    constexpr int kPanel = SmemTile<dstate>::kPanelVectors;
    static_assert(kPanel == kBlockSteps && kPanel % kColumns == 0, "columns and sets are different bits of a vector's number");
    return &tile.panels[kColumns * set / kPanel][first_row][0] + (kPanel * r + (swizzled_ ^ r ^ kColumns * set % kPanel));
  }

  // Starts to copy the thread's vectors of B and C of a chunk. Steps after the last get zeros.
  __device__ __forceinline__ void start_copies(const WorkSpan& at, int chunk, const PipelineState& slot_at) {
    auto& slot = shared_.slots[slot_at.stage];
    const int steps = at.steps_of(chunk), first_row = row_of_k(first_step_), column = 8 * column_;
    const Scalar* B = at.template rows<Scalar>(p_.B, at.group, chunk) + first_step_ * p_.B.stride_step + column;
    const Scalar* C = at.template rows<Scalar>(p_.C, at.group, chunk) + first_step_ * p_.C.stride_step + column;
#pragma unroll
    for (int r = 0; r < kSteps; ++r) {
      const int bytes = first_step_ + r < steps ? cuda::kCpAsyncBytes : 0;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        cuda::cp_async(vector_at(slot.k, first_row, r, j), B + 8 * j * kColumns, bytes);
        cuda::cp_async(vector_at(slot.q, first_step_, r, j), C + 8 * j * kColumns, bytes);
      }
      B += p_.B.stride_step;
      C += p_.C.stride_step;
    }
    cuda::cp_async_commit();
  }

  // Starts to load the angles and the step size of the thread's r-th step. The angles may be those that are there.
  __device__ __forceinline__ void fetch_step(const WorkSpan& at, int chunk, int head, int r, bool loads_angles) {
    const RowRotation& rotation = p_.rotation;
    const int64_t step = at.start + first_step(chunk) + first_step_ + r;
    const bool is_there = first_step_ + r < at.steps_of(chunk);
    dt_[r] = is_there ? rotation.dt[(at.batch * p_.seqlen + step) * p_.heads + head] : 0.0f;
    if (!loads_angles) return;
#pragma unroll
    for (int j = 0; j < kSets; ++j) {
      uint4 loaded = {0, 0, 0, 0};
      if (is_there && has_angles(j)) {
        const int64_t element = at.batch * rotation.angles.stride_batch + step * rotation.angles.stride_step +
                                head * rotation.angles.stride_head + first_angle(j);
        if (rotation.are_angles_fp32) {
          loaded = *reinterpret_cast<const uint4*>(static_cast<const float*>(rotation.angles.data) + element);
        } else {
          const auto pairs = *reinterpret_cast<const uint2*>(static_cast<const Scalar*>(rotation.angles.data) + element);
          loaded.x = pairs.x;
          loaded.y = pairs.y;
        }
      }
      uint32_t* const words = rates_[r] + kOfSet * j;
      words[0] = loaded.x;
      words[1] = loaded.y;
      words[2] = loaded.z;
      words[3] = loaded.w;
    }
  }
  // Starts to load the phases before a chunk.
  __device__ __forceinline__ void fetch_phases(const WorkSpan& at, int chunk, int head) {
    const int64_t chunks = (p_.seqlen + kChunk - 1) / kChunk, number = at.batch * chunks + at.start / kChunk + chunk;
    const float* const phases = p_.rotation.phases + (number * p_.heads + head) * p_.rotation.angles_count;
#pragma unroll
    for (int j = 0; j < kSets; ++j) {
      const float4 loaded = has_angles(j) ? *reinterpret_cast<const float4*>(phases + first_angle(j)) : float4{0, 0, 0, 0};
      turns_[kOfSet * j] = loaded.x;
      turns_[kOfSet * j + 1] = loaded.y;
      turns_[kOfSet * j + 2] = loaded.z;
      turns_[kOfSet * j + 3] = loaded.w;
    }
  }

  // Makes half of tanh of the angles.
  __device__ __forceinline__ void make_rates() {
#pragma unroll
    for (int r = 0; r < kSteps; ++r) {
#pragma unroll
      for (int j = 0; j < kSets; ++j) {
        uint32_t* const words = rates_[r] + kOfSet * j;
        float angles[kOfSet];
        if (p_.rotation.are_angles_fp32) {
#pragma unroll
          for (int a = 0; a < kOfSet; ++a) angles[a] = __uint_as_float(words[a]);
        } else {
          const float2 low = cuda::unpack<Scalar>(words[0]), high = cuda::unpack<Scalar>(words[1]);
          angles[0] = low.x;
          angles[1] = low.y;
          angles[2] = high.x;
          angles[3] = high.y;
        }
#pragma unroll
        for (int a = 0; a < kOfSet; ++a) words[a] = __float_as_uint(0.5f * tanh_of_angle(angles[a]));
      }
    }
  }
  __device__ __forceinline__ float rate(int r, int a) const { return __uint_as_float(rates_[r][a]); }

  // Adds to the phases before the chunk those of the steps before the thread's first one.
  __device__ __forceinline__ void sum_phases(int parity) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    float before[kAngles];
#pragma unroll
    for (int j = 0; j < kSets; ++j) {
      float sums[kOfSet];
#pragma unroll
      for (int a = 0; a < kOfSet; ++a) {
        float own = 0;
#pragma unroll
        for (int r = 0; r < kSteps; ++r) own = fmaf(rate(r, kOfSet * j + a), dt_[r], own);
        sums[a] = own;
#pragma unroll
        for (int distance = kColumns; distance < kWarpSize; distance *= 2) {
          const float earlier = __shfl_up_sync(kAllLanes, sums[a], distance);
          if (lane >= distance) sums[a] += earlier;
        }
        // Not the difference from `own`, which would let later steps reach earlier ones.
        const float of_earlier = __shfl_up_sync(kAllLanes, sums[a], kColumns);
        before[kOfSet * j + a] = lane >= kColumns ? of_earlier : 0.0f;
      }
      if (lane >= kWarpSize - kColumns) shared_.totals[parity][warp_][j][column_] = {sums[0], sums[1], sums[2], sums[3]};
    }
    cuda::barrier_sync(kRotationBarrier, kWarpgroupThreads);
#pragma unroll
    for (int j = 0; j < kSets; ++j) {
      float4 sum = {before[kOfSet * j], before[kOfSet * j + 1], before[kOfSet * j + 2], before[kOfSet * j + 3]};
#pragma unroll
      for (int warp = 0; warp < kWarpgroupWarps - 1; ++warp) {
        if (warp >= warp_) break;
        const float4 total = shared_.totals[parity][warp][j][column_];
        sum = {sum.x + total.x, sum.y + total.y, sum.z + total.z, sum.w + total.w};
      }
      turns_[kOfSet * j] += sum.x;
      turns_[kOfSet * j + 1] += sum.y;
      turns_[kOfSet * j + 2] += sum.z;
      turns_[kOfSet * j + 3] += sum.w;
    }
  }

  // Adds the bias to a vector of a row, and rounds it.
  static __device__ __forceinline__ void add_bias(const uint4& vector, const float* bias, float (&values)[8]) {
    const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
    const float4 low = *reinterpret_cast<const float4*>(bias), high = *reinterpret_cast<const float4*>(bias + 4);
    const float biases[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const float2 pair = cuda::unpack<Scalar>(words[word]);
      values[2 * word] = pair.x + biases[2 * word];
      values[2 * word + 1] = pair.y + biases[2 * word + 1];
    }
  }
  // Rounds a vector of k or q to its place; the low part is beside it.
  static __device__ __forceinline__ void store(const float (&values)[8], uint4* target) {
    const uint4 hi = {cuda::pack<Scalar>(values[0], values[1]), cuda::pack<Scalar>(values[2], values[3]),
                      cuda::pack<Scalar>(values[4], values[5]), cuda::pack<Scalar>(values[6], values[7])};
    *target = hi;
    constexpr int kVectors = sizeof(typename Shared::Tiles) / sizeof(uint4);
    target[kVectors] = {cuda::pack_lo<Scalar>(values[0], values[1], hi.x), cuda::pack_lo<Scalar>(values[2], values[3], hi.y),
                        cuda::pack_lo<Scalar>(values[4], values[5], hi.z), cuda::pack_lo<Scalar>(values[6], values[7], hi.w)};
  }

  // Rotates k and q of the thread's r-th step in their slot.
  __device__ __forceinline__ void rotate_step(const WorkSpan& at, int chunk, int head, int index, int r) {
    auto& slot = shared_.slots[at_.stage];
    const int first_row = row_of_k(first_step_);
    const bool is_last = at.start + first_step(chunk) + first_step_ + r == p_.seqlen - 1;
    const int64_t state = at.batch * p_.heads + head;
    const auto write_final = [&](const float (&values)[8], int vector) {
      float* const final_k = p_.rotation.final_k + state * dstate + 8 * vector;
#pragma unroll
      for (int i = 0; i < 8; ++i) final_k[i] = values[i];
    };
    const auto advance = [&](int a) {
      turns_[a] = fmaf(rate(r, a), dt_[r], turns_[a]);
      return CosAndSin(turns_[a]);
    };
    if (is_pairs()) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = column_ + j * kColumns;
        CosAndSin angles[kOfSet] = {CosAndSin(0), CosAndSin(0), CosAndSin(0), CosAndSin(0)};
        if (j < kSets) {
#pragma unroll
          for (int a = 0; a < kOfSet; ++a) angles[a] = advance(j % kSets * kOfSet + a);
        }
        const auto rotate = [&](uint4* target, int tensor, bool is_written) {
          float values[8];
          add_bias(*target, &shared_.bias[index][tensor][8 * column], values);
          if (j < kSets) {
#pragma unroll
            for (int a = 0; a < kOfSet; ++a) angles[a].rotate(values[2 * a], values[2 * a + 1]);
          }
          store(values, target);
          if (is_written) write_final(values, column);
        };
        rotate(vector_at(slot.k, first_row, r, j), 0, is_last);
        rotate(vector_at(slot.q, first_step_, r, j), 1, false);
      }
    } else {
      CosAndSin angles[8] = {CosAndSin(0), CosAndSin(0), CosAndSin(0), CosAndSin(0),
                             CosAndSin(0), CosAndSin(0), CosAndSin(0), CosAndSin(0)};
#pragma unroll
      for (int a = 0; a < kAngles; ++a) angles[a] = advance(a);
      const auto rotate = [&](uint4* first, uint4* second, int tensor, bool is_written) {
        float values[2][8];
        add_bias(*first, &shared_.bias[index][tensor][8 * column_], values[0]);
        add_bias(*second, &shared_.bias[index][tensor][8 * (column_ + kColumns)], values[1]);
#pragma unroll
        for (int a = 0; a < 8; ++a) angles[a].rotate(values[0][a], values[1][a]);
        store(values[0], first);
        store(values[1], second);
        if (is_written) {
          write_final(values[0], column_);
          write_final(values[1], column_ + kColumns);
        }
      };
      rotate(vector_at(slot.k, first_row, r, 0), vector_at(slot.k, first_row, r, 1), 0, is_last);
      rotate(vector_at(slot.q, first_step_, r, 0), vector_at(slot.q, first_step_, r, 1), 1, false);
    }
    if (is_last) {
#pragma unroll
      for (int j = 0; j < kSets; ++j) {
        if (!has_angles(j)) continue;
        float* const final_angle = p_.rotation.final_angle + state * p_.rotation.angles_count + first_angle(j);
#pragma unroll
        for (int a = 0; a < kOfSet; ++a) final_angle[a] = radians_of(turns_[kOfSet * j + a]);
      }
    }
  }

  const Params& p_;
  Shared& shared_;
  int warp_, column_, first_step_, swizzled_;
  PipelineState at_;
  uint32_t rates_[kSteps][kAngles];
  float dt_[kSteps], turns_[kAngles];
};

}  // namespace ssm_kernels::ssd
