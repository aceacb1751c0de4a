// Two strided tensors share a byte where a sum of multiples of their strides, each multiple bounded by a size, equals the
// distance between them. The search for such a sum takes the strides in descending order and, for each, only the multiples from
// which the remaining strides can still reach the rest: one or two, where strides are nested as views of one buffer have them.

#include "torch/memory_overlap.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdint>
#include <numeric>

namespace ssm_kernels {
namespace {

// One summand: stride times a number from 0 to `most`.
struct Term {
  int64_t stride, most;
};

using Terms = c10::SmallVector<Term, 16>;

// In bytes, of the elements' first bytes, and of the bytes of an element.
void append_terms(Terms& terms, const at::Tensor& tensor) {
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    const int64_t stride = tensor.stride(dim) * tensor.element_size();
    if (tensor.size(dim) > 1 && stride > 0) terms.push_back({stride, tensor.size(dim) - 1});
  }
  terms.push_back({1, tensor.element_size() - 1});
}

// Searches sums of terms[0], terms[1], ..., in descending order of their strides.
class SumSearch {
 public:
  explicit SumSearch(Terms terms) : terms_(std::move(terms)), reach_(terms_.size() + 1), divisor_(terms_.size() + 1) {
    std::sort(terms_.begin(), terms_.end(), [](const Term& a, const Term& b) { return a.stride > b.stride; });
    for (size_t i = terms_.size(); i-- > 0;) {
      reach_[i] = reach_[i + 1] + terms_[i].stride * terms_[i].most;
      divisor_[i] = std::gcd(divisor_[i + 1], terms_[i].stride);
    }
  }

  // Whether a sum is `total`. Strides that only as_strided can make may take exponential time: true, to be safe, after
  // kMaxSteps.
  bool finds(int64_t total) {
    steps_ = 0;
    return finds(0, total);
  }

 private:
  static constexpr int64_t kMaxSteps = 100000;

  bool finds(size_t term, int64_t total) {
    if (total == 0 || ++steps_ > kMaxSteps) return true;
    if (total < 0 || total > reach_[term] || total % divisor_[term] != 0) return false;
    const auto [stride, most] = terms_[term];
    const int64_t beyond = std::max<int64_t>(total - reach_[term + 1], 0);
    for (int64_t multiple = std::min(total / stride, most); multiple * stride >= beyond; --multiple) {
      if (finds(term + 1, total - multiple * stride)) return true;
    }
    return false;
  }

  Terms terms_;
  c10::SmallVector<int64_t, 17> reach_, divisor_;  // of the terms from each on
  int64_t steps_ = 0;
};

int64_t address(const at::Tensor& tensor) { return reinterpret_cast<int64_t>(tensor.const_data_ptr()); }

// From the first byte to the last.
int64_t extent(const at::Tensor& tensor) {
  int64_t elements = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) elements += (tensor.size(dim) - 1) * tensor.stride(dim);
  return (elements + 1) * tensor.element_size() - 1;
}

}  // namespace

bool has_internal_overlap(const at::Tensor& tensor) {
  if (tensor.numel() <= 1 || tensor.is_non_overlapping_and_dense()) return false;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) == 0) return true;
  }
  // Of two elements that overlap, let `leading` be the first axis on which their indices differ, by 1 + m. The other axes
  // differ by d, from 1 - size to size - 1, and the bytes by at most their number less 1, in both directions. Shifted to begin
  // at zero, these differences are the terms of a sum.
  const int64_t element = tensor.element_size();
  for (int64_t leading = 0; leading < tensor.dim(); ++leading) {
    if (tensor.size(leading) <= 1) continue;
    Terms terms;
    terms.push_back({tensor.stride(leading) * element, tensor.size(leading) - 2});
    int64_t total = element - 1 - tensor.stride(leading) * element;
    terms.push_back({1, 2 * (element - 1)});
    for (int64_t dim = leading + 1; dim < tensor.dim(); ++dim) {
      const int64_t stride = tensor.stride(dim) * element, most = tensor.size(dim) - 1;
      if (most == 0) continue;
      terms.push_back({stride, 2 * most});
      total += stride * most;
    }
    if (SumSearch(std::move(terms)).finds(total)) return true;
  }
  return false;
}

bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  const int64_t first_a = address(a), first_b = address(b), last_b = first_b + extent(b);
  if (last_b < first_a || first_a + extent(a) < first_b) return false;
  // first_a + (what a's terms add) = last_b - (what b's terms leave).
  Terms terms;
  append_terms(terms, a);
  append_terms(terms, b);
  return SumSearch(std::move(terms)).finds(last_b - first_a);
}

}  // namespace ssm_kernels
