#include "mlstm/cuda/gates.cuh"
#include "mlstm/cuda/normalizer.cuh"
#include "mlstm/cuda/rows.cuh"

namespace ssm_kernels::mlstm {

template cudaError_t launch_mlstm_gates<double>(const GateParams&, cudaStream_t);
template cudaError_t launch_mlstm_scale_rows<double>(const RowParams&, bool, cudaStream_t);
template cudaError_t launch_mlstm_normalizer<double>(const NormalizerParams&, bool, cudaStream_t);
template cudaError_t launch_mlstm_normalizer<double>(const NormalizerBwdParams&, bool, cudaStream_t);

}  // namespace ssm_kernels::mlstm
