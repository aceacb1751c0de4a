// Passes enumerators to the switches of the kernel libraries: those of the tables do nothing here, and one behind the last must
// throw. Prints the messages.

#include <cstdio>
#include <stdexcept>
#include <vector>

#include "common/discretization.h"
#include "common/recurrences.h"
#include "common/two_sample_discretization.h"
#include "norm/gate_activation.h"

using namespace ssm_kernels;

namespace {

template <typename Enum, typename Call>
bool throws_at_the_end(int count, const Call& call) {
  for (int i = 0; i < count; ++i) call(static_cast<Enum>(i));
  try {
    call(static_cast<Enum>(count));
  } catch (const std::runtime_error& error) {
    std::puts(error.what());
    return true;
  }
  return false;
}

}  // namespace

int main() {
  const int discretizations = static_cast<int>(std::size(kDiscretizationTable));
  const auto visit_two_sample = [](auto method) { visit_two_sample_discretization(method, {}, [](auto) {}); };
  for (int i = kOneSampleDiscretizations; i < discretizations; ++i) visit_two_sample(static_cast<Discretization>(i));
  const int recurrences = static_cast<int>(std::size(kRecurrenceTable));
  const int gates = static_cast<int>(norm::GateActivation::kNone) + 1, candidates = static_cast<int>(Activation::kTanh) + 1;
  const std::vector<bool> all = {
      throws_at_the_end<Discretization>(kOneSampleDiscretizations,
                                        [](auto method) { visit_discretization(method, [](auto) {}); }),
      throws_at_the_end<Discretization>(kOneSampleDiscretizations, [](auto method) { check_known(method); }),
      throws_at_the_end<Recurrence>(recurrences, [](auto row) { visit_default_recurrence(row, [](auto) {}); }),
      throws_at_the_end<Recurrence>(recurrences, [](auto row) { visit_recurrence_at_run_time(row, [](auto) {}); }),
      throws_at_the_end<Activation>(candidates, [](auto activation) { check_known(activation); }),
      throws_at_the_end<norm::GateActivation>(gates, [](auto gate) { norm::visit_activation(gate, [](auto) {}); }),
      throws_at_the_end<norm::GateActivation>(gates, [](auto gate) { norm::check_known(gate); }),
  };
  for (const bool throws : all) {
    if (!throws) return 1;
  }
  return 0;
}
