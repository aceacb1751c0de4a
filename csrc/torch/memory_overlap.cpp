// Two strided tensors share a byte where a sum of multiples of their strides, each multiple bounded by a size, equals the
// distance between them. The search for such a sum takes the strides in descending order and, for each, only the multiples from
// which the remaining strides can still reach the rest: one or two, where strides are nested as views of one buffer have them.

#include "torch/memory_overlap.h"

#include <c10/util/DimVector.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdint>
#include <numeric>

namespace ssm_kernels {
namespace {

// One summand: stride times a number from 0 to `most`.
struct Term {
  int64_t stride, most;
  int64_t reach = 0, divisor = 0;  // the largest sum, and the greatest common divisor of the strides, from this term on
};

using Terms = c10::SmallVector<Term, 16>;

// The elements of a tensor, or of a part of it.
struct Elements {
  int64_t address, bytes;
  at::IntArrayRef sizes, strides;

  explicit Elements(const at::Tensor& tensor)
      : Elements{reinterpret_cast<int64_t>(tensor.const_data_ptr()), tensor.element_size(), tensor.sizes(), tensor.strides()} {}
  Elements(int64_t address, int64_t bytes, at::IntArrayRef sizes, at::IntArrayRef strides)
      : address(address), bytes(bytes), sizes(sizes), strides(strides) {}

  int64_t last_byte() const {
    int64_t last = address + bytes - 1;
    for (size_t dim = 0; dim < sizes.size(); ++dim) last += strides[dim] * bytes * (sizes[dim] - 1);
    return last;
  }

  // Appends the terms whose sums are the distances of the bytes from the first.
  void append_terms(Terms& terms) const {
    terms.push_back({1, bytes - 1});
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      const Term term{strides[dim] * bytes, sizes[dim] - 1};
      if (term.stride > 0 && term.most > 0) terms.push_back(term);
    }
  }
};

// Whether a sum of the terms is `total`. Strides that only as_strided can make may take exponential time: true, to be safe,
// when `steps` reaches its limit.
bool is_sum(int64_t total, at::ArrayRef<Term> terms, int64_t& steps) {
  constexpr int64_t kMaxSteps = 100000;
  if (total == 0 || ++steps > kMaxSteps) return true;
  if (total < 0 || terms.empty() || total > terms[0].reach || total % terms[0].divisor != 0) return false;
  const Term& term = terms[0];
  const int64_t beyond = std::max<int64_t>(total - (term.reach - term.stride * term.most), 0);
  for (int64_t multiple = std::min(total / term.stride, term.most); multiple * term.stride >= beyond; --multiple) {
    if (is_sum(total - multiple * term.stride, terms.slice(1), steps)) return true;
  }
  return false;
}

// Whether two elements share a byte: the distance from the first byte of `a` to the last of `b` is then what the terms of `a`
// add to the one and those of `b` take from the other.
bool share_bytes(const Elements& a, const Elements& b) {
  const int64_t last_of_b = b.last_byte();
  if (last_of_b < a.address || a.last_byte() < b.address) return false;
  Terms terms;
  a.append_terms(terms);
  b.append_terms(terms);
  std::sort(terms.begin(), terms.end(), [](const Term& x, const Term& y) { return x.stride > y.stride; });
  int64_t reach = 0, divisor = 0, steps = 0;
  for (auto term = terms.rbegin(); term != terms.rend(); ++term) {
    reach = term->reach = reach + term->stride * term->most;
    divisor = term->divisor = std::gcd(divisor, term->stride);
  }
  return is_sum(last_of_b - a.address, terms, steps);
}

bool has_internal_overlap(const at::Tensor& tensor) {
  if (tensor.numel() <= 1 || tensor.is_non_overlapping_and_dense()) return false;
  const Elements all(tensor);
  c10::DimVector sizes(all.sizes);
  // Let `axis` be the first on which the indices of two elements differ. Moved together until the one has the index 0 on it and
  // on those before, the elements are as far apart.
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    if (--sizes[axis] == 0) continue;
    const Elements at_zero(all.address, all.bytes, all.sizes.slice(axis + 1), all.strides.slice(axis + 1));
    const Elements beyond(all.address + all.strides[axis] * all.bytes, all.bytes, at::IntArrayRef(sizes).slice(axis),
                          all.strides.slice(axis));
    if (share_bytes(at_zero, beyond)) return true;
  }
  return false;
}

}  // namespace

void check_in_place(const char* op, const char* name, const at::Tensor& written, at::ArrayRef<NamedTensor> inputs) {
  // Gives a lazy copy of another tensor memory of its own.
  written.mutable_data_ptr();
  TORCH_CHECK(!has_internal_overlap(written), op, ": expected ", name,
              ", which is updated in place, to have elements that share no memory, got strides ", written.strides(),
              " for shape ", written.sizes(), ": pass ", name, ".clone()");
  for (const auto& [input, tensor] : inputs) {
    if (tensor == nullptr || !tensor->defined() || tensor->numel() == 0 || written.numel() == 0) continue;
    TORCH_CHECK(!share_bytes(Elements(written), Elements(*tensor)), op, ": expected ", input, " to share no memory with ", name,
                ", which is updated in place, got overlapping memory: pass ", input, ".clone()");
  }
}

}  // namespace ssm_kernels
