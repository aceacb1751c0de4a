// Instantiates the backward kernels of one dtype, `Scalar` in the enclosing namespace, for every discretization.
#pragma once

#include "selective_scan/cuda/bwd_reduce.cuh"
#include "selective_scan/cuda/sequential_bwd.cuh"
#include "selective_scan/cuda/warp_scan_bwd.cuh"

#define SSM_INSTANTIATE_METHOD(enumerator, name, Method)                                                                  \
  template cudaError_t warp_scan::launch_bwd<Scalar, Method>(const SelectiveScanBwdParams&, const warp_scan::ScanPlan&,   \
                                                             const PartialSums&, cudaStream_t);                           \
  template cudaError_t sequential::launch_bwd<Scalar, Method>(const SelectiveScanBwdParams&, const sequential::ScanPlan&, \
                                                              const PartialSums&, cudaStream_t);

#define SSM_INSTANTIATE_BWD                                                                                        \
  template size_t warp_scan::bwd_shared_bytes<Scalar>(const SelectiveScanBwdParams&, const warp_scan::ScanPlan&);  \
  template size_t sequential::bwd_shared_bytes<Scalar>();                                                          \
  template cudaError_t launch_bwd_reduce<Scalar>(const SelectiveScanBwdParams&, const PartialSums&, cudaStream_t); \
  SSM_DISCRETIZATIONS(SSM_INSTANTIATE_METHOD)
