// Prints how calls of ssd_chunk_scan, whose sizes are given six by six (sequences, seqlen, heads, groups, headdim, dstate), are
// partitioned: of each call a line "<state tiles of a sequence> <work tiles> <chunks of a work tile> <first step of the last
// chunk>". For tests/ssd/test_ssd_plan.py, without a GPU.
#include <cstdio>
#include <cstdlib>

#include "ssd/cuda/launch.h"

using namespace ssm_kernels::ssd;

int main(int count, char** arguments) {
  const auto number = [&](int i) { return static_cast<int64_t>(std::atoll(arguments[i])); };
  for (int i = 1; i + 5 < count; i += 6) {
    const CallSizes sizes{number(i), number(i + 1), number(i + 2), number(i + 3), number(i + 4), number(i + 5)};
    const WorkPartition partition = partition_work(sizes);
    // As ChunkSpan finds it: from a chunk's number, which is an int.
    const int last = static_cast<int>(partition.chunks - 1);
    std::printf("%lld %lld %lld %lld\n", static_cast<long long>(tiles_per_entry(sizes)),
                static_cast<long long>(partition.work_tiles), static_cast<long long>(partition.chunks),
                static_cast<long long>(first_step(last)));
  }
}
