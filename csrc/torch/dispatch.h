// Calls to registered operators from C++.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace ssm_kernels {

// The operator of that name, such as "ssm_kernels::selective_scan". To be kept in a static variable: the search takes a while.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace ssm_kernels
