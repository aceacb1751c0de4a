// The products of a run of chunks by the kernels of cpu/kernel.cpp.
#pragma once

#include "delta_rule/aten/products.h"

namespace ssm_kernels::delta_rule {

extern const Products kCpuProducts;

}  // namespace ssm_kernels::delta_rule
