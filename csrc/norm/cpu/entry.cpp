// CPU entry points of the norms: choose the instruction set and run rows on threads.

#include "norm/cpu/kernels.h"

#include "cpu/capability.h"
#include "cpu/thread_scratch.h"
#include "norm/norm_op.h"

namespace ssm_kernels::norm {

SSM_DEFINE_CPU_KERNELS()

namespace {

int64_t scratch_bytes(const NormParams& p) {
  return kScratchRows * (p.group_size + kScratchPadding) * static_cast<int64_t>(sizeof(double));
}

// The work of a row in the units of ThreadScratch: a column costs about as much as four steps of a scan.
int64_t work(const NormParams& p) { return 4 * p.columns(); }

void fwd_cpu(const NormFwdParams& p) {
  ThreadScratch(scratch_bytes(p)).parallel_for(p.rows(), work(p), [&](int64_t row, std::byte* scratch) {
    cpu_kernels().fwd_row(p, row, scratch);
  });
}

int64_t count_partials_cpu(const NormBwdParams& p) { return RowTasks(p.rows()).count; }

void bwd_cpu(const NormBwdParams& p) {
  const RowTasks tasks(p.rows());
  ThreadScratch(scratch_bytes(p))
      .parallel_for(tasks.count, work(p) * tasks.rows_per_task,
                    [&](int64_t task, std::byte* scratch) { cpu_kernels().bwd_rows(p, tasks, task, scratch); });
  cpu_kernels().sum_partials(p);
}

}  // namespace

const DeviceKernels kCpu{&fwd_cpu, &count_partials_cpu, &bwd_cpu, [](const NormBwdParams&) { return true; }};

}  // namespace ssm_kernels::norm
