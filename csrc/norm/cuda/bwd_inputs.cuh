// The inputs of the general backward kernels (bwd.cuh): a thread's or a team's share of a group, in stages of shared memory.
//
// BwdInputs takes vectors that start at multiples of 16 bytes, each copied by the thread that reads it, or reads global memory.
// StagedBwdInputs takes rows that start at any element: a team copies a group as one span of aligned pieces, each lane moves
// its vectors within the stage, and gradients pass through the places of inputs.
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "norm/cuda/device.cuh"
#include "norm/cuda/rms_bwd.cuh"
#include "norm/cuda/spans.cuh"
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

  __device__ __forceinline__ BwdInputs(const NormBwdParams& p, const BwdPlan& plan, char* record, const TeamPlace&, int)
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

// The groups of a warp's teams of less than a warp: those of neighboring teams follow each other, in a row or in neighboring
// rows of few groups. The functions are short, and spare registers.
class WarpGroups {
 public:
  __device__ __forceinline__ WarpGroups(const NormBwdParams& p, const BwdPlan& plan, int team, int group)
      : p_(p), plan_(plan), team_(team), group_(group) {}

  __device__ __forceinline__ bool is_small() const { return plan_.teams.lanes < kWarpSize; }
  // Of the warp.
  __device__ __forceinline__ int first_team() const { return team_ - place(); }
  __device__ __forceinline__ int first_group() const { return rows() > 1 ? 0 : group_ - place(); }
  // How many rows the teams take, and which of these the team takes.
  __device__ __forceinline__ int rows() const { return plan_.warp_rows; }
  __device__ __forceinline__ int row() const { return rows() > 1 ? place() >> plan_.group_teams_log2 : 0; }
  // The team's group among those of the warp.
  __device__ __forceinline__ int own() const { return rows() > 1 ? row() * static_cast<int>(p_.groups) + group_ : place(); }
  // How many groups the warp has if `left` rows are left.
  __device__ __forceinline__ int count(int64_t left) const {
    const int groups = static_cast<int>(p_.groups);
    if (rows() > 1) return static_cast<int>(left < rows() ? left : rows()) * groups;
    return left > 0 ? min(groups - first_group(), plan_.warp_teams) : 0;
  }

 private:
  __device__ __forceinline__ int place() const { return team_ & (plan_.warp_teams - 1); }

  const NormBwdParams& p_;
  const BwdPlan& plan_;
  int team_, group_;
};

// The same of rows that start and end at any element, and the gradients, which take the places of inputs: grad_x that of
// grad_out, and the second one that of x. Teams of less than a warp move the groups of the warp as one span (spans.cuh) where
// these follow each other in memory.
template <typename Scalar, bool is_add>
class StagedBwdInputs {
 public:
  using Input = BwdInput;
  using Acc = AccumulateType<Scalar>;
  static constexpr int kSize = kVectorSize<Scalar>, kVectors = kVectorsOfThread<Scalar>;

  // A team's group or chunk: `count` columns from first_column of the group on.
  struct Place {
    int64_t row;
    GroupIndex<int64_t> index;
    int first_column, count;
  };

  __device__ __forceinline__ StagedBwdInputs(const NormBwdParams& p, const BwdPlan& plan, char* memory, const TeamPlace& team,
                                             int group)
      : p_(p), plan_(plan), team_(team), warp_(p, plan, team.index, group), stages_(memory) {
    select(0);
  }

  // The block calls the functions together.
  __device__ __forceinline__ void copy(int stage, const Place& at) const {
    char* const images = stages_ + stage * plan_.stage_bytes;
    const auto copy_one = [&](Input input) {
      const RowsView& view = view_of<is_add>(p_, input);
      if (view.data == nullptr) return;
      if (!warp_.is_small()) return tensor(input, images).copy(view.data, offset_of(view, at), at.count, team_);
      visit_width(input, [&](auto* element) {
        using Element = std::decay_t<decltype(*element)>;
        const bool is_flat = plan_.is_flat[input];
        Span<Element>::copy(small_image(input, images, is_flat),
                            static_cast<const Element*>(view.data) + start(view, at, is_flat), small_count(at, is_flat),
                            small_lane(is_flat));
      });
    };
    copy_one(kGradOut);
    copy_one(kX);
    copy_one(kThird);
  }
  // The other functions are about this stage.
  __device__ __forceinline__ void select(int stage) { images_ = stages_ + stage * plan_.stage_bytes; }
  // Moves the lanes' vectors to where read() finds them. What has been copied is visible to the team.
  __device__ __forceinline__ void align(const Place& at) const {
    const bool has_third = view_of<is_add>(p_, kThird).data != nullptr;
    int past[3];
    const auto set_past = [&](Input input) {
      const RowsView& view = view_of<is_add>(p_, input);
      const int bytes = static_cast<int>(offset_of(view, at)) * (is_wide(input) ? sizeof(Acc) : sizeof(Scalar));
      past[input] = static_cast<int>(reinterpret_cast<uintptr_t>(view.data) + bytes) & (kVectorBytes - 1);
    };
    set_past(kGradOut);
    set_past(kX);
    set_past(kThird);
    if (!has_third) past[kThird] = 0;
    if (!warp_.is_small() && (past[kGradOut] | past[kX] | past[kThird]) == 0) return;
    const auto load = [&](auto image, Input input, auto& values) {
      using Image = decltype(image);
      if (warp_.is_small()) return load_small<Image>(input, at, values);
      Image::load(values, place(input, images_), past[input], team_);
    };
    if constexpr (sizeof(Scalar) == 2) {
      if (!is_wide()) {
        typename Narrow::Values grad_out[kVectors], x[kVectors], third[kVectors];
        load(Narrow(), kGradOut, grad_out);
        load(Narrow(), kX, x);
        if (has_third) load(Narrow(), kThird, third);
        team_.sync();
        Narrow::store_own(grad_out, place(kGradOut, images_), team_);
        Narrow::store_own(x, place(kX, images_), team_);
        if (has_third) Narrow::store_own(third, place(kThird, images_), team_);
        return;
      }
    }
    // fp32 vectors of several tensors at once would take too many registers.
    const auto move = [&](auto image, Input input) {
      typename decltype(image)::Values values[kVectors];
      load(image, input, values);
      team_.sync();
      image.store_own(values, place(input, images_), team_);
    };
    using Image = std::conditional_t<kMayBeWide, typename StagedTensor<Scalar>::Wide, Narrow>;
    move(Narrow(), kGradOut);
    move(Image(), kX);
    if (has_third) move(Image(), kThird);
  }
  template <typename OffsetOf>
  __device__ __forceinline__ void read(Acc (&values)[kSize], Input input, int, int i, const OffsetOf&) const {
    tensor(input, images_).own(i, values, team_);
  }
  __device__ __forceinline__ void replace(Input input, int i, const Acc (&values)[kSize]) const {
    tensor(input, images_).replace(i, values, team_);
  }
  // Stores grad_x and the second gradient, each of which has the type of the input whose place it takes, where the lanes have
  // put their vectors. Its data may be null.
  __device__ __forceinline__ void store(const RowsView& grad_x, const RowsView& second, const Place& at) const {
    if (warp_.is_small()) {
      const auto store_one = [&](Input input, const RowsView& view, bool is_flat) {
        if (view.data == nullptr) return;
        visit_width(input, [&](auto* element) { store_small(element, input, view, at, is_flat); });
      };
      store_one(kGradOut, grad_x, plan_.is_flat[BwdPlan::kGradX]);
      store_one(kX, second, plan_.is_flat[BwdPlan::kSecondGrad]);
      return;
    }
    team_.sync();
    if (grad_x.data != nullptr) tensor(kGradOut, images_).store(grad_x.data, offset_of(grad_x, at), at.count, team_);
    if (second.data != nullptr) tensor(kX, images_).store(second.data, offset_of(second, at), at.count, team_);
  }
  // Whether the second gradient has the type of x.
  __device__ __forceinline__ bool stages_second(const RowsView& view) const {
    return std::is_same_v<Scalar, Acc> || view.is_accumulate == is_wide();
  }

 private:
  static constexpr bool kMayBeWide = is_add && !std::is_same_v<Scalar, Acc>;

  using Narrow = typename StagedTensor<Scalar>::Narrow;

  __device__ __forceinline__ bool is_wide() const { return kMayBeWide && p_.x.is_accumulate; }
  __device__ __forceinline__ bool is_wide(Input input) const { return input != kGradOut && is_wide(); }
  // Calls the function with a null pointer to the type of an input's elements.
  template <typename Function>
  __device__ __forceinline__ void visit_width(Input input, const Function& function) const {
    if constexpr (kMayBeWide) {
      if (is_wide(input)) return function(static_cast<Acc*>(nullptr));
    }
    function(static_cast<Scalar*>(nullptr));
  }
  __device__ __forceinline__ char* image(Input input, char* images, int team) const {
    if (input == kGradOut) return images + team * plan_.narrow_image;
    return images + (input == kX ? plan_.x_images : plan_.third_images) + team * plan_.x_image;
  }
  __device__ __forceinline__ char* place(Input input, char* images) const { return image(input, images, team_.index); }
  __device__ __forceinline__ StagedTensor<Scalar> tensor(Input input, char* images) const {
    return StagedTensor<Scalar>(place(input, images), is_wide(input));
  }
  __device__ __forceinline__ int64_t offset_of(const RowsView& view, const Place& at) const {
    return at.index.offset(view) + at.first_column;
  }

  // The span that a lane of a small team helps to move: that of its warp, or of its team.
  __device__ __forceinline__ char* small_image(Input input, char* images, bool is_flat) const {
    return image(input, images, is_flat ? warp_.first_team() : team_.index);
  }
  __device__ __forceinline__ int64_t start(const RowsView& view, const Place& at, bool is_flat) const {
    if (!is_flat) return offset_of(view, at);
    return ((at.row - warp_.row()) * p_.groups + warp_.first_group()) * p_.group_size;
  }
  __device__ __forceinline__ int small_count(const Place& at, bool is_flat) const {
    if (!is_flat) return at.count;
    return warp_.count(p_.rows() - (at.row - warp_.row())) * static_cast<int>(p_.group_size);
  }
  __device__ __forceinline__ SpanLane small_lane(bool is_flat) const {
    return is_flat ? SpanLane{static_cast<int>(threadIdx.x % kWarpSize), kWarpSize} : SpanLane{team_.lane, team_.lanes};
  }
  // The lane's first vector of a tensor in the image of its span.
  template <typename Element>
  __device__ __forceinline__ char* small_vectors(Input input, const RowsView& view, const Place& at, bool is_flat) const {
    const auto* const first = static_cast<const Element*>(view.data) + start(view, at, is_flat);
    const int column = (is_flat ? warp_.own() * static_cast<int>(p_.group_size) : 0) + team_.lane * kSize;
    return small_image(input, images_, is_flat) + cuda::bytes_past_multiple<kVectorBytes>(first) +
           column * static_cast<int>(sizeof(Element));
  }
  __device__ __forceinline__ int left(const Place& at, int i) const {
    return at.count - (i * team_.lanes + team_.lane) * kSize;
  }
  template <typename Image>
  __device__ __forceinline__ void load_small(Input input, const Place& at, typename Image::Values (&values)[kVectors]) const {
    using Element = std::decay_t<decltype(values[0][0])>;
    const char* const first = small_vectors<Element>(input, view_of<is_add>(p_, input), at, plan_.is_flat[input]);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      values[i] = Span<Element>::template load<kSize>(first + i * team_.lanes * Image::kLaneBytes);
      if (left(at, i) >= kSize) continue;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        if (j >= left(at, i)) values[i].set(j, from_accumulate<Element>(Acc(0)));
      }
    }
  }
  // A group's last vector may be written beyond its end, before the first vector of the next group is (staged_fwd.cuh).
  template <typename Element>
  __device__ __forceinline__ void store_small(Element*, Input input, const RowsView& view, const Place& at,
                                              bool is_flat) const {
    constexpr int kLaneBytes = kSize * static_cast<int>(sizeof(Element));
    Vector<Element, kSize> values[kVectors];
    char* const own = place(input, images_) + team_.lane * kLaneBytes;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      values[i] = Vector<Element, kSize>::load(reinterpret_cast<const Element*>(own + i * team_.lanes * kLaneBytes));
    }
    char* const first = small_vectors<Element>(input, view, at, is_flat);
#pragma unroll
    for (int i = kVectors - 1; i >= 0; --i) {
      __syncwarp();
      if (left(at, i) > 0) Span<Element>::write(first + i * team_.lanes * kLaneBytes, values[i]);
    }
    __syncwarp();
    Span<Element>::store(static_cast<Element*>(view.data) + start(view, at, is_flat), small_image(input, images_, is_flat),
                         small_count(at, is_flat), small_lane(is_flat));
  }

  const NormBwdParams& p_;
  const BwdPlan& plan_;
  TeamPlace team_;
  WarpGroups warp_;
  char *stages_, *images_;  // the first stage, the selected one
};

}  // namespace ssm_kernels::norm
