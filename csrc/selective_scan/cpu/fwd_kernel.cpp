// Selective scan, forward, on the CPU.
//
//   h_t = Abar(z) h_{t-1} + delta_t k(z) B_t u_t, z = delta_t A        out_t = (<C_t, h_t> + D u_t) silu(z_t)
//
// A SIMD lane is a channel. u, delta and out are read and written as [step][lane] tiles (tile_io.h transposes if time is
// contiguous); a per-step B_t[n] or C_t[n] is one number for all lanes. The recurrences of a lane's states are independent, so
// neither the sum over states nor the loop over time waits for one chain. The state stays in the first-level cache. A task
// (kernels.h) is one thread's work: it scans all chunks in order and saves the state at their boundaries. This file is compiled
// once per instruction set.

#include "selective_scan/cpu/complex_kernel.h"
#include "selective_scan/cpu/kernel.h"
#include "selective_scan/cpu/two_sample_kernel.h"

namespace ssm_kernels::selective_scan {
inline namespace CPU_CAPABILITY {
namespace {

template <typename Acc>
struct FwdTiles {
  Acc *u, *delta, *z, *y, *lam, *delta_A;    // [step][lane]
  Acc *B_steps, *C_steps;                    // [step][padded state]
  Acc *A, *B_constant, *C_constant, *state;  // [block][state][lane]
  int64_t states_per_block;

  FwdTiles(Scratch& scratch, const SelectiveScanParams& p, const Blocking& blocking) {
    const int64_t sequence = p.chunk_length * blocking.lanes;
    // Square tiles are transposed whole, so there are as many rows as padded states.
    states_per_block = blocking.padded_dstate * blocking.lanes;
    const int64_t states = blocking.blocks_per_task * states_per_block;
    u = rows_of_samples<Acc>(scratch, blocking, blocking.lanes);
    delta = scratch.allocate<Acc>(sequence);
    z = scratch.allocate<Acc>(sequence);
    y = scratch.allocate<Acc>(sequence);
    lam = scratch.allocate<Acc>(has_lam(blocking) ? sequence : 0);
    delta_A = scratch.allocate<Acc>(has_delta_A(blocking) ? sequence : 0);
    B_steps = p.B.per_step ? rows_of_samples<Acc>(scratch, blocking, blocking.padded_dstate) : nullptr;
    C_steps = scratch.allocate<Acc>(p.C.per_step ? p.chunk_length * blocking.padded_dstate : 0);
    A = scratch.allocate<Acc>(states);
    state = scratch.allocate<Acc>(states);
    B_constant = scratch.allocate<Acc>(p.B.per_step ? 0 : states);
    C_constant = scratch.allocate<Acc>(p.C.per_step ? 0 : states);
  }
};

template <typename Scalar>
void run_task(const SelectiveScanFwdParams& p, const Blocking& blocking, int64_t index, std::byte* memory) {
  using Acc = AccumulateType<Scalar>;
  using V = Vec<Acc>;
  constexpr int64_t kLanes = V::size();
  static_assert(kShortChunk % kLanes == 0, "a chunk's tile has whole square tiles");
  Scratch scratch(memory);
  const FwdTiles<Acc> tiles(scratch, p, blocking);
  const Task task(p, blocking, index);
  const int64_t chunks = (task.steps() + p.chunk_length - 1) / p.chunk_length;

  const auto channel_of = [&](int64_t block) { return task.first_channel + block * kLanes; };
  const auto channels_of = [&](int64_t block) { return std::min(kLanes, task.end_channel - channel_of(block)); };
  const auto save_state = [&](int64_t boundary, int64_t block) {
    if (p.chunk_states == nullptr || !p.saves_chunk_state(task.row, boundary)) return;
    const int64_t row = p.chunk_state(task.row, boundary) * p.dim + channel_of(block);
    store_tile(static_cast<Acc*>(p.chunk_states) + row * p.dstate, p.dstate, 1, tiles.state + block * tiles.states_per_block,
               kLanes, channels_of(block), p.dstate);
  };

  for (int64_t block = 0; block < task.blocks; ++block) {
    const int64_t channel = channel_of(block), channels = channels_of(block), at = block * tiles.states_per_block;
    load_states(tiles.A + at, p.A.data, channel * p.A.stride_dim, p.A.stride_dim, p.A.stride_state, channels, p.dstate);
    load_constant(tiles.B_constant + at, p.B, channel, channels, p.dstate);
    load_constant(tiles.C_constant + at, p.C, channel, channels, p.dstate);
    if (!p.C.per_step) conjugate_rows(tiles.C_constant + at, blocking, p.dstate);
    if (p.initial_state.data != nullptr && task.row.initial >= 0) {
      const int64_t offset = task.row.initial * p.initial_state.stride_batch + channel * p.initial_state.stride_dim;
      load_states(tiles.state + at, p.initial_state.data, offset, p.initial_state.stride_dim, p.initial_state.stride_state,
                  channels, p.dstate);
    } else {
      std::fill_n(tiles.state + at, p.dstate * kLanes, Acc(0));
    }
  }

  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t start = chunk * p.chunk_length, steps = std::min(p.chunk_length, task.steps() - start);
    if (p.B.per_step) load_samples_of_B<Acc, Scalar>(tiles.B_steps, p, blocking, task, start, steps);
    if (p.C.per_step) load_steps_of_C<Acc, Scalar>(tiles.C_steps, p, blocking, task, start, steps);
    for (int64_t block = 0; block < task.blocks; ++block) {
      const int64_t channel = channel_of(block), channels = channels_of(block), at = block * tiles.states_per_block;
      save_state(chunk, block);
      load_samples_of_u<Acc, Scalar>(tiles.u, p, blocking, task.row, channel, channels, start, steps);
      load_sequence<Acc, Scalar>(tiles.delta, p.delta, task.row, channel, channels, start, steps);
      finish_delta(tiles.delta, tiles.delta, load_channels<Acc>(p.delta_bias, channel, channels), p.delta_softplus, steps);

      const ScanChunk<Acc> scanned{steps,
                                   p.dstate,
                                   tiles.A + at,
                                   tiles.u,
                                   tiles.delta,
                                   operand(p.B, tiles.B_steps, tiles.B_constant + at, blocking),
                                   operand(p.C, tiles.C_steps, tiles.C_constant + at, blocking),
                                   tiles.state + at,
                                   tiles.y,
                                   nullptr};
      if (blocking.two_samples != nullptr) {
        load_lam<Acc, Scalar>(tiles.lam, blocking, task.row, channel, channels, start, steps);
        load_delta_A<Acc, Scalar>(tiles.delta_A, blocking, task.row, channel, channels, start, steps);
        if (has_complex_states(blocking)) {
          visit_complex_rule(p.discretization,
                             [&](auto rule) { scan_complex_chunk<Acc, decltype(rule), false>(rule, scanned, tiles.lam); });
        } else {
          visit_rule(blocking, p.discretization, [&](auto rule) {
            scan_two_sample_chunk<Acc, decltype(rule), false>(rule, scanned, tiles.lam, tiles.delta_A);
          });
        }
      } else {
        visit_discretization(p.discretization, blocking.method,
                             [&](auto rule) { scan_chunk<Acc, decltype(rule), false>(rule, scanned); });
      }

      if (p.D.data != nullptr) {
        const V D = load_channels<Acc>(p.D, channel, channels);
        for (int64_t i = 0; i < steps * kLanes; i += kLanes) {
          at::vec::fmadd(D, V::loadu(tiles.u + i), V::loadu(tiles.y + i)).store(tiles.y + i);
        }
      }
      if (p.z.data != nullptr) {
        load_sequence<Acc, Scalar>(tiles.z, p.z, task.row, channel, channels, start, steps);
        for (int64_t i = 0; i < steps * kLanes; i += kLanes) {
          (V::loadu(tiles.y + i) * silu(V::loadu(tiles.z + i))).store(tiles.y + i);
        }
      }
      store_sequence<Acc, Scalar>(p.out, tiles.y, task.row, channel, channels, start, steps);
    }
  }

  for (int64_t block = 0; block < task.blocks; ++block) {
    save_state(chunks, block);
    if (task.row.last < 0) continue;
    Acc* last = static_cast<Acc*>(p.last_state) + (task.row.last * p.dim + channel_of(block)) * p.dstate;
    store_tile(last, p.dstate, 1, tiles.state + block * tiles.states_per_block, kLanes, channels_of(block), p.dstate);
  }
}

}  // namespace

int64_t vector_bytes() { return Vec<float>::size() * int64_t(sizeof(float)); }

int64_t fwd_scratch_bytes(const SelectiveScanParams& p, const Blocking& blocking, ScalarKind kind) {
  int64_t bytes = 0;
  visit_scalar(kind, [&](auto scalar) {
    Scratch scratch(nullptr);
    FwdTiles<AccumulateType<decltype(scalar)>>(scratch, p, blocking);
    bytes = scratch.used();
  });
  return bytes;
}

void fwd_task(const SelectiveScanFwdParams& p, const Blocking& blocking, ScalarKind kind, int64_t task, std::byte* scratch) {
  visit_scalar(kind, [&](auto scalar) { run_task<decltype(scalar)>(p, blocking, task, scratch); });
}

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::selective_scan
