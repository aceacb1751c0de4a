#include "torch/choices.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cctype>
#include <numeric>
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

// The number of insertions, deletions and replacements of letters between two names (Levenshtein's distance).
size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t(0));
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row.back();
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
    const size_t distance = edit_distance(name, std::string(choice));
    if (distance >= least) continue;
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

}  // namespace ssm_kernels
