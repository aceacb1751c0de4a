#include "mlstm/cuda/gates.cuh"
#include "mlstm/cuda/rows.cuh"

namespace ssm_kernels::mlstm {

template cudaError_t launch_mlstm_gates<__nv_bfloat16>(const GateParams&, cudaStream_t);
template cudaError_t launch_mlstm_scale_rows<__nv_bfloat16>(const RowParams&, bool, cudaStream_t);
template cudaError_t launch_mlstm_grad_products<__nv_bfloat16>(const ProductGradParams&, cudaStream_t);

}  // namespace ssm_kernels::mlstm
