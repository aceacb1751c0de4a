// The inputs of the general backward kernels (bwd.cuh): a thread's or a team's share of a group, in stages of shared memory.
//
// BwdInputs takes vectors that start at multiples of 16 bytes, each copied by the thread that reads it, or reads global memory.
// StagedBwdInputs takes rows that start at any element: a team copies a group as one span of aligned pieces, each lane moves
// its vectors within the stage, and gradients pass through the places of inputs.
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "norm/cuda/rms_bwd.cuh"
#include "norm/cuda/row_values.cuh"
#include "norm/cuda/staged_rows.cuh"

namespace ssm_kernels::norm {

// grad_out comes first in a stage, because the positions of the others depend on their width.
enum BwdInput { kGradOut, kX, kThird };

template <bool is_add>
__device__ __forceinline__ const RowsView& view_of(const NormBwdParams& p, BwdInput input) {
  return input == kGradOut ? p.grad_out : input == kX ? p.x : is_add ? p.grad_new_residual : p.z;
}

// A thread's inputs of a group: grad_out, x, and z or grad_new_residual. In add_norm, x and grad_new_residual may be wide, that
// is, of the accumulation type. Float64 reads them from global memory.
template <typename Scalar, bool is_aligned, bool is_add>
class BwdInputs {
 public:
  using Input = BwdInput;
  using Acc = AccumulateType<Scalar>;
  static constexpr int kSize = kVectorSize<Scalar>, kVectors = kVectorsOfThread<Scalar>;
  static constexpr bool kMayBeWide = is_add && !std::is_same_v<Scalar, Acc>;

  __device__ __forceinline__ BwdInputs(const NormBwdParams& p, const BwdPlan& plan, char* record, const TeamPlace&)
      : p_(p), plan_(plan), record_(record) {}

  // Starts the copies of a group into a stage; is_valid(i) says whether vector i exists.
  template <typename IsValid, typename OffsetOf>
  __device__ __forceinline__ void copy(int stage, const IsValid& is_valid, const OffsetOf& offset_of) {
    if constexpr (is_aligned) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (!is_valid(i)) continue;
        copy_vector(stage, kGradOut, i, offset_of);
        copy_vector(stage, kX, i, offset_of);
        if (view(kThird).data != nullptr) copy_vector(stage, kThird, i, offset_of);
      }
    }
  }

  // Reads vector i from a stage or, unless is_aligned, from global memory.
  template <typename OffsetOf>
  __device__ __forceinline__ void read(Acc (&values)[kSize], Input input, int stage, int i, const OffsetOf& offset_of) const {
    if constexpr (is_aligned) {
      const char* const source = access(stage, input, i);
      if constexpr (kMayBeWide) {
        static_assert(kSize * sizeof(Acc) == 2 * kVectorBytes, "a wide vector takes two accesses");
        if (input != kGradOut && is_wide()) {
          Vector<Acc, kSize> vector;
          vector.accesses[0] = *reinterpret_cast<const uint4*>(source);
          vector.accesses[1] = *reinterpret_cast<const uint4*>(source + kVectorBytes);
          return to_values(vector, values);
        }
      }
      to_values(Vector<Scalar, kSize>::load(reinterpret_cast<const Scalar*>(source)), values);
    } else {
      load_values<Scalar>(view(input).data, view(input).is_accumulate, offset_of(view(input), i), values);
    }
  }

 private:
  __device__ __forceinline__ const RowsView& view(Input input) const { return view_of<is_add>(p_, input); }
  __device__ __forceinline__ bool is_wide() const { return kMayBeWide && p_.x.is_accumulate; }

  // The first 16-byte access of vector i.
  __device__ __forceinline__ char* access(int stage, Input input, int i) const {
    const int width = is_wide() ? 2 : 1;
    const int index = input == kGradOut ? i : kVectors + ((input == kThird ? kVectors : 0) + i) * width;
    return record_ + (stage * plan_.stage_accesses + index) * kVectorBytes;
  }

  template <typename OffsetOf>
  __device__ __forceinline__ void copy_vector(int stage, Input input, int i, const OffsetOf& offset_of) {
    char* const target = access(stage, input, i);
    const int64_t offset = offset_of(view(input), i);
    if (input != kGradOut && is_wide()) {
      const Acc* const source = static_cast<const Acc*>(view(input).data) + offset;
      cuda::cp_async(target, source, kVectorBytes);
      cuda::cp_async(target + kVectorBytes, source + kVectorBytes / sizeof(Acc), kVectorBytes);
    } else {
      cuda::cp_async(target, static_cast<const Scalar*>(view(input).data) + offset, kVectorBytes);
    }
  }

  const NormBwdParams& p_;
  const BwdPlan& plan_;
  char* record_;
};

// The same of rows that start and end at any element, and the gradients, which take the places of inputs: grad_x that of
// grad_out, and the second one that of x.
template <typename Scalar, bool is_add>
class StagedBwdInputs {
 public:
  using Input = BwdInput;
  using Acc = AccumulateType<Scalar>;
  static constexpr int kSize = kVectorSize<Scalar>, kVectors = kVectorsOfThread<Scalar>;

  __device__ __forceinline__ StagedBwdInputs(const NormBwdParams& p, const BwdPlan& plan, char* memory, const TeamPlace& team)
      : p_(p), plan_(plan), team_(team), stages_(memory) {
    select(0);
  }

  // The block calls the functions together. `count`: columns of the chunk, offset_of(view): where it begins.
  template <typename OffsetOf>
  __device__ __forceinline__ void copy(int stage, int count, const OffsetOf& offset_of) const {
    char* const images = stages_ + stage * plan_.stage_bytes;
    const auto copy_one = [&](Input input) {
      const RowsView& view = view_of<is_add>(p_, input);
      if (view.data != nullptr) tensor(input, images).copy(view.data, offset_of(view), count, team_);
    };
    copy_one(kGradOut);
    copy_one(kX);
    copy_one(kThird);
  }
  // The other functions are about this stage.
  __device__ __forceinline__ void select(int stage) { images_ = stages_ + stage * plan_.stage_bytes; }
  // Moves the lanes' vectors to where read() finds them. What has been copied is visible to the team.
  template <typename OffsetOf>
  __device__ __forceinline__ void align(const OffsetOf& offset_of) const {
    const auto past = [&](Input input) {
      const RowsView& view = view_of<is_add>(p_, input);
      const int bytes = static_cast<int>(offset_of(view)) * (input != kGradOut && is_wide() ? sizeof(Acc) : sizeof(Scalar));
      return static_cast<int>(reinterpret_cast<uintptr_t>(view.data) + bytes) & (kVectorBytes - 1);
    };
    const bool has_third = view_of<is_add>(p_, kThird).data != nullptr;
    const int past_grad_out = past(kGradOut), past_x = past(kX), past_third = has_third ? past(kThird) : 0;
    bool moves = (past_grad_out | past_x | past_third) != 0;
    if (team_.lanes < kWarpSize) moves = __any_sync(kAllLanes, moves);
    if (!moves) return;
    if constexpr (sizeof(Scalar) == 2) {
      if (!is_wide()) {
        typename Narrow::Values grad_out[kVectors], x[kVectors], third[kVectors];
        Narrow::load(grad_out, place(kGradOut, images_), past_grad_out, team_);
        Narrow::load(x, place(kX, images_), past_x, team_);
        if (has_third) Narrow::load(third, place(kThird, images_), past_third, team_);
        team_.sync();
        Narrow::store_own(grad_out, place(kGradOut, images_), team_);
        Narrow::store_own(x, place(kX, images_), team_);
        if (has_third) Narrow::store_own(third, place(kThird, images_), team_);
        return;
      }
    }
    // fp32 vectors of several tensors at once would take too many registers.
    const auto move = [&](auto image, Input input, int bytes) {
      typename decltype(image)::Values values[kVectors];
      image.load(values, place(input, images_), bytes, team_);
      team_.sync();
      image.store_own(values, place(input, images_), team_);
    };
    using Image = std::conditional_t<kMayBeWide, typename StagedTensor<Scalar>::Wide, Narrow>;
    move(Narrow(), kGradOut, past_grad_out);
    move(Image(), kX, past_x);
    if (has_third) move(Image(), kThird, past_third);
  }
  template <typename OffsetOf>
  __device__ __forceinline__ void read(Acc (&values)[kSize], Input input, int, int i, const OffsetOf&) const {
    tensor(input, images_).own(i, values, team_);
  }
  __device__ __forceinline__ void replace(Input input, int i, const Acc (&values)[kSize]) const {
    tensor(input, images_).replace(i, values, team_);
  }
  // Stores the first `count` columns of a gradient, which has the type of the input whose place it takes.
  __device__ __forceinline__ void store(Input input, const RowsView& view, int64_t offset, int count) const {
    tensor(input, images_).store(view.data, offset, count, team_);
  }
  // Whether the second gradient has the type of x.
  __device__ __forceinline__ bool stages_second(const RowsView& view) const {
    return std::is_same_v<Scalar, Acc> || view.is_accumulate == is_wide();
  }

 private:
  static constexpr bool kMayBeWide = is_add && !std::is_same_v<Scalar, Acc>;

  using Narrow = typename StagedTensor<Scalar>::Narrow;

  __device__ __forceinline__ bool is_wide() const { return kMayBeWide && p_.x.is_accumulate; }
  __device__ __forceinline__ char* place(Input input, char* images) const {
    if (input == kGradOut) return images + team_.index * plan_.narrow_image;
    return images + (input == kX ? plan_.x_images : plan_.third_images) + team_.index * plan_.x_image;
  }
  __device__ __forceinline__ StagedTensor<Scalar> tensor(Input input, char* images) const {
    return StagedTensor<Scalar>(place(input, images), input != kGradOut && is_wide());
  }

  const NormBwdParams& p_;
  const BwdPlan& plan_;
  TeamPlace team_;
  char *stages_, *images_;  // the first stage, the selected one
};

}  // namespace ssm_kernels::norm
