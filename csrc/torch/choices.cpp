#include "torch/choices.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <cctype>
#include <numeric>
#include <utility>
#include <vector>

namespace ssm_kernels {
namespace {

// In lower case, with `_` for dashes and spaces.
std::string normalized(std::string_view name) {
  std::string result(name);
  for (char& letter : result) {
    letter = letter == '-' || letter == ' ' ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  }
  return result;
}

// The number of insertions, deletions, replacements and swaps of neighboring letters between two names: the optimal string
// alignment distance, Levenshtein's with swaps.
size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> before, last, row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t(0));
  for (size_t i = 1; i <= a.size(); ++i) {
    before = std::exchange(last, row);
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      const bool is_swap = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (is_swap) row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row.back();
}

std::string nearest_choice_op(std::string_view given, const std::vector<std::string>& choices) {
  const std::vector<std::string_view> views(choices.begin(), choices.end());
  return nearest_choice(given, views);
}

}  // namespace

std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kHalf:
      return "float16";
    case at::kByte:
      return "uint8";
    case at::kChar:
      return "int8";
    case at::kShort:
      return "int16";
    case at::kInt:
      return "int32";
    case at::kLong:
      return "int64";
    case at::kComplexHalf:
      return "complex32";
    case at::kComplexFloat:
      return "complex64";
    case at::kComplexDouble:
      return "complex128";
    default:  // bfloat16, bool, float8_e4m3fn, qint8, ...
      return normalized(c10::toString(dtype));
  }
}

std::string nearest_choice(std::string_view given, c10::ArrayRef<std::string_view> choices) {
  constexpr size_t kLongestName = 64;  // of a typing error: the distance takes quadratic time
  if (given.empty() || given.size() > kLongestName) return "";
  const std::string name = normalized(given);
  size_t least = std::max<size_t>(1, name.size() / 3) + 1;
  std::string_view nearest;
  for (const std::string_view choice : choices) {
    const size_t distance = edit_distance(name, normalized(choice));
    // A name of which no letter is left is another name.
    if (distance >= least || distance >= std::max(name.size(), choice.size())) continue;
    least = distance;
    nearest = choice;
  }
  return nearest.empty() ? "" : "; did you mean '" + std::string(nearest) + "'?";
}

void raise_unknown_choice(std::string_view op, std::string_view argument, std::string_view given,
                          c10::ArrayRef<std::string_view> choices) {
  std::string known;
  for (const std::string_view choice : choices) known += (known.empty() ? "" : ", ") + std::string(choice);
  C10_THROW_ERROR(ValueError, c10::str(op, ": unknown ", argument, " '", given, "', expected one of: ", known,
                                       nearest_choice(given, choices)));
}

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) { m.impl("_nearest_choice", &nearest_choice_op); }

}  // namespace ssm_kernels
