// The table of discretizations for Python: names, and aliases with the name that each stands for.

#include <ATen/core/Dict.h>
#include <torch/library.h>

#include <string>
#include <vector>

#include "common/discretization.h"

namespace ssm_kernels {
namespace {

std::vector<std::string> discretizations() {
  std::vector<std::string> names;
  for (const DiscretizationRow& row : kDiscretizationTable) names.emplace_back(row.name);
  return names;
}

c10::Dict<std::string, std::string> discretization_aliases() {
  c10::Dict<std::string, std::string> aliases;
  for (const DiscretizationRow& alias : kDiscretizationAliases) {
    for (const DiscretizationRow& row : kDiscretizationTable) {
      if (row.method == alias.method) aliases.insert(std::string(alias.name), std::string(row.name));
    }
  }
  return aliases;
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) {
  m.impl("_discretizations", &discretizations);
  m.impl("_discretization_aliases", &discretization_aliases);
}

}  // namespace ssm_kernels
