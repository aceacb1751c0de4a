// The tables of C++ for Python: discretizations and recurrences.

#include <ATen/core/Dict.h>
#include <torch/library.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "common/discretization.h"
#include "common/recurrences.h"

namespace ssm_kernels {
namespace {

template <bool (*is_listed)(Discretization)>
std::vector<std::string> discretizations() {
  std::vector<std::string> names;
  for (const DiscretizationRow& row : kDiscretizationTable) {
    if (is_listed(row.method)) names.emplace_back(row.name);
  }
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

using Names = std::vector<std::string>;

// For each recurrence: the name of its scan, the names of its inputs, the first input that broadcasts, and the options.
std::tuple<Names, std::vector<Names>, std::vector<int64_t>, std::vector<Names>> recurrences() {
  Names names;
  std::vector<Names> inputs, options;
  std::vector<int64_t> first_broadcast;
  for (const RecurrenceRow& row : kRecurrenceTable) {
    names.emplace_back(row.name);
    inputs.emplace_back(row.input_names, row.input_names + row.inputs);
    first_broadcast.push_back(static_cast<int64_t>(row.first_broadcast));
    Names& own = options.emplace_back();
    if (row.has_candidate_activation) own.emplace_back("candidate_activation");
    if (row.has_gate_is_logit) own.emplace_back("gate_is_logit");
  }
  return {names, inputs, first_broadcast, options};
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) {
  m.impl("_discretizations", &discretizations<&is_basic>);
  m.impl("_two_sample_discretizations", &discretizations<&is_two_sample>);
  m.impl("_discretization_aliases", &discretization_aliases);
  m.impl("_recurrences", &recurrences);
}

}  // namespace ssm_kernels
