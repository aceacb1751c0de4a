// The Python module _C: build information. It uses no torch header and no torch library and thus loads under any torch, so that
// the package can compare versions before it loads the operators. setup.py passes its facts as SSM_KERNELS_* strings.

#include <pybind11/pybind11.h>

#include <string>
#include <string_view>

#include "common/discretization.h"

namespace py = pybind11;

namespace {

// Splits "a;b;c" into a tuple of strings.
py::tuple split(std::string_view text) {
  py::list parts;
  while (!text.empty()) {
    const size_t end = text.find(';');
    const std::string_view part = text.substr(0, end);
    if (!part.empty()) parts.append(py::str(part.data(), part.size()));
    text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
  }
  return py::tuple(parts);
}

py::tuple discretizations() {
  py::list names;
  for (const ssm_kernels::DiscretizationRow& row : ssm_kernels::kDiscretizationTable)
    names.append(py::str(row.name.data(), row.name.size()));
  return py::tuple(names);
}

py::dict discretization_aliases() {
  py::dict aliases;
  for (const ssm_kernels::DiscretizationRow& alias : ssm_kernels::kDiscretizationAliases) {
    for (const ssm_kernels::DiscretizationRow& row : ssm_kernels::kDiscretizationTable) {
      if (row.method == alias.method)
        aliases[py::str(alias.name.data(), alias.name.size())] = py::str(row.name.data(), row.name.size());
    }
  }
  return aliases;
}

std::string compiler() {
#if defined(__clang__)
  return "Clang " __clang_version__;
#else
  return "GCC " __VERSION__;
#endif
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Build information: plain values, no operators.";
  m.attr("version") = SSM_KERNELS_VERSION;
  m.attr("torch") = SSM_KERNELS_TORCH;
  m.attr("cuda") = std::string_view(SSM_KERNELS_CUDA).empty() ? py::object(py::none()) : py::str(SSM_KERNELS_CUDA);
  m.attr("architectures") = split(SSM_KERNELS_ARCHITECTURES);
  m.attr("cpu_capabilities") = split(SSM_KERNELS_CPU_CAPABILITIES);
  m.attr("compiler") = compiler();
  m.attr("discretizations") = discretizations();
  m.attr("discretization_aliases") = discretization_aliases();
}
