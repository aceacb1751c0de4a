// The library, and its operators that no operator's folder has. Each folder registers its own: <operator>_op.cpp the schemas,
// Autograd, Autocast and Meta, cpu/entry.cpp and cuda/entry.cpp the devices' kernels, or <operator>_op.cpp if one function
// serves both devices.

#include "torch/schemas.h"

TORCH_LIBRARY(ssm_kernels, library) {
  const ssm_kernels::Schemas schemas(library);

  // Sets a process-wide option of torch/debug_options.h and returns its previous value. For tests and measurements.
  schemas.def("_set_debug_option(str name, int value) -> int");

  // The values of `discretization` in the first table of common/discretization.h, and the other names of some of them.
  schemas.def("_discretizations() -> str[]");
  schemas.def("_discretization_aliases() -> Dict(str, str)");
  // Those of its third table.
  schemas.def("_two_sample_discretizations() -> str[]");

  // The rows of common/recurrences.h: scans, inputs, the first input that broadcasts, options.
  schemas.def("_recurrences() -> (str[] names, str[][] inputs, int[] first_broadcast, str[][] options)");

  // "; did you mean 'zoh'?" for the choice nearest to a misspelt name, or "".
  schemas.def("_nearest_choice(str given, str[] choices) -> str");
}
