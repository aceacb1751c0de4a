// Causal convolution on the CPU, forward and backward, and its decoding step. Compiled once per instruction set.
//
//   pre_t = bias + sum_j weight_j e_{t+j},  j = 0 .. width - 1        out_t = act(pre_t)
//
// where e is a sequence's initial state (or zeros), width - 1 elements, followed by its steps. With g_t = grad_out_t
// act'(pre_t), which is zero outside the sequence, the adjoint is
//
//   grad e_t = sum_j weight_j g_{t-j} + grad_final_state        grad weight_j = sum_t g_t e_{t+j}        grad bias = sum_t g_t
//
// The first width - 1 elements of grad e are the gradient of the initial state, the others that of x. grad e_t depends on g_t
// and earlier g only. Backward therefore advances in time too, and its gradients of x are width - 1 steps behind. It recomputes
// pre_t from x; forward saves nothing.
//
// A task takes its channels of one batch row, sequence by sequence, in tiles of kTileSteps steps; a SIMD lane is a channel.
// Scratch memory keeps the last width - 1 steps of x and g between tiles. A tensor of the accumulation type with contiguous
// channels is read and written in place. Any other tensor passes through scratch memory, transposed if its steps are
// contiguous. For widths of 2 to 4 in float32, fwd_groups and bwd_groups compute kGroupSteps steps at a time in registers. All
// other steps are computed one by one, with the same operations in the same order. channels_first.h has the loops for
// channels-first tensors.

#include <algorithm>
#include <type_traits>

#include "causal_conv1d/cpu/channels_first.h"
#include "causal_conv1d/cpu/task_view.h"
#include "common/activations.h"
#include "cpu/scalar_types.h"
#include "cpu/tile_io.h"
#include "cpu/vec_math.h"

namespace ssm_kernels::causal_conv1d {
inline namespace CPU_CAPABILITY {
namespace {

constexpr int64_t kGroupSteps = 4;  // steps per pass over the channels

// The inputs of a tile, for forward and backward.
template <typename Acc>
struct TileInputs {
  int64_t width, lanes;
  bool has_silu;
  Rows<Acc> weight;  // a row per tap, then one for the bias
  Continued<Acc> x;
};

template <typename Acc>
struct TileGrads {
  Rows<Acc> grad_out;
  Continued<Acc> g;
  Rows<Acc> sums;  // a row per tap, then one for the bias; data null if no parameter needs a gradient
  bool needs_grad_e;
  Continued<Acc> grad_e;  // rows of the initial state's gradient, fewer with each tile, followed by rows of grad_x
};

template <typename V, typename Acc>
V pre_activation(const TileInputs<Acc>& in, int64_t step, int64_t lane) {
  V pre = V::loadu(in.weight[in.width] + lane);
  for (int64_t j = 0; j < in.width; ++j) {
    pre = Math<V>::fma(V::loadu(in.weight[j] + lane), V::loadu(in.x[step + j] + lane), pre);
  }
  return pre;
}

template <typename Acc>
void fwd_steps(const TileInputs<Acc>& in, const Rows<Acc>& out, int64_t begin, int64_t end) {
  using V = Vec<Acc>;
  for (int64_t step = begin; step < end; ++step) {
    for (int64_t lane = 0; lane < in.lanes; lane += V::size()) {
      activate(pre_activation<V>(in, step, lane), in.has_silu).store(out[step] + lane);
    }
  }
}

template <typename Acc>
void bwd_steps(const TileInputs<Acc>& in, const TileGrads<Acc>& grads, int64_t begin, int64_t end) {
  using V = Vec<Acc>;
  const auto add_to = [](Acc* sum, const V& a, const V& b) { Math<V>::fma(a, b, V::loadu(sum)).store(sum); };
  for (int64_t step = begin; step < end; ++step) {
    for (int64_t lane = 0; lane < in.lanes; lane += V::size()) {
      const V grad_out = V::loadu(grads.grad_out[step] + lane);
      const V g = in.has_silu ? grad_pre(grad_out, pre_activation<V>(in, step, lane), true) : grad_out;
      g.store(grads.g[step + in.width - 1] + lane);
      if (grads.needs_grad_e) {
        V grad = V::loadu(in.weight[0] + lane) * g;
        for (int64_t j = 1; j < in.width; ++j) {
          grad = Math<V>::fma(V::loadu(in.weight[j] + lane), V::loadu(grads.g[step + in.width - 1 - j] + lane), grad);
        }
        grad.store(grads.grad_e[step] + lane);
      }
      if (grads.sums.data != nullptr) {
        for (int64_t j = 0; j < in.width; ++j) add_to(grads.sums[j] + lane, g, V::loadu(in.x[step + j] + lane));
        add_to(grads.sums[in.width] + lane, g, V(Acc(1)));
      }
    }
  }
}

// Like fwd_steps, kGroupSteps at a time. Returns how many steps it computed.
template <int kWidth, typename Acc>
int64_t fwd_groups(const TileInputs<Acc>& in, const Rows<Acc>& out, int64_t steps) {
  using V = Vec<Acc>;
  constexpr int kSpan = kWidth - 1 + kGroupSteps;
  const int64_t lanes = in.lanes;
  const bool has_silu = in.has_silu;
  int64_t step = 0;
  for (; step + kGroupSteps <= steps; step += kGroupSteps) {
    const Acc* x_row[kSpan];
    Acc* out_row[kGroupSteps];
    for (int i = 0; i < kSpan; ++i) x_row[i] = in.x[step + i];
    for (int i = 0; i < kGroupSteps; ++i) out_row[i] = out[step + i];
    for (int64_t lane = 0; lane < lanes; lane += V::size()) {
      V weight[kWidth], x[kSpan];
      for (int j = 0; j < kWidth; ++j) weight[j] = V::loadu(in.weight[j] + lane);
      for (int i = 0; i < kSpan; ++i) x[i] = V::loadu(x_row[i] + lane);
      const V bias = V::loadu(in.weight[kWidth] + lane);
      for (int i = 0; i < kGroupSteps; ++i) {
        V pre = bias;
        for (int j = 0; j < kWidth; ++j) pre = Math<V>::fma(weight[j], x[i + j], pre);
        activate(pre, has_silu).store(out_row[i] + lane);
      }
    }
  }
  return step;
}

// Like bwd_steps, kGroupSteps at a time. Returns how many steps it computed.
template <int kWidth, typename Acc>
int64_t bwd_groups(const TileInputs<Acc>& in, const TileGrads<Acc>& grads, int64_t steps) {
  using V = Vec<Acc>;
  constexpr int kPast = kWidth - 1, kSpan = kPast + kGroupSteps;
  static_assert(kGroupSteps >= kPast, "the g of one group are all the past that the next group needs");
  int64_t step = 0;
  for (; step + kGroupSteps <= steps; step += kGroupSteps) {
    const Acc* x_row[kSpan];
    for (int i = 0; i < kSpan; ++i) x_row[i] = in.x[step + i];
    Acc *g_row[kSpan], *grad_row[kGroupSteps];
    for (int i = 0; i < kSpan; ++i) g_row[i] = grads.g[step + i];
    for (int i = 0; i < kGroupSteps; ++i) grad_row[i] = grads.needs_grad_e ? grads.grad_e[step + i] : nullptr;
    for (int64_t lane = 0; lane < in.lanes; lane += V::size()) {
      V weight[kWidth], x[kSpan], g[kSpan];
      for (int j = 0; j < kWidth; ++j) weight[j] = V::loadu(in.weight[j] + lane);
      for (int i = 0; i < kSpan; ++i) x[i] = V::loadu(x_row[i] + lane);
      for (int i = 0; i < kPast; ++i) g[i] = V::loadu(g_row[i] + lane);
      const V bias = V::loadu(in.weight[kWidth] + lane);
      for (int i = 0; i < kGroupSteps; ++i) {
        V pre = bias;
        for (int j = 0; j < kWidth; ++j) pre = Math<V>::fma(weight[j], x[i + j], pre);
        g[kPast + i] = grad_pre(V::loadu(grads.grad_out[step + i] + lane), pre, in.has_silu);
        g[kPast + i].store(g_row[kPast + i] + lane);
      }
      if (grads.needs_grad_e) {
        for (int i = 0; i < kGroupSteps; ++i) {
          V grad = weight[0] * g[kPast + i];
          for (int j = 1; j < kWidth; ++j) grad = Math<V>::fma(weight[j], g[kPast + i - j], grad);
          grad.store(grad_row[i] + lane);
        }
      }
      if (grads.sums.data != nullptr) {
        for (int j = 0; j < kWidth; ++j) {
          V sum = V::loadu(grads.sums[j] + lane);
          for (int i = 0; i < kGroupSteps; ++i) sum = Math<V>::fma(g[kPast + i], x[i + j], sum);
          sum.store(grads.sums[j] + lane);
        }
        V sum = V::loadu(grads.sums[kWidth] + lane);
        for (int i = 0; i < kGroupSteps; ++i) sum = sum + g[kPast + i];
        sum.store(grads.sums[kWidth] + lane);
      }
    }
  }
  return step;
}

template <typename Acc>
void fwd_tile(const TileInputs<Acc>& in, const Rows<Acc>& out, int64_t steps) {
  int64_t done = 0;
  visit_width<Acc>(in.width, [&](auto width) {
    if constexpr (width > 0) done = fwd_groups<width>(in, out, steps);
  });
  fwd_steps(in, out, done, steps);
}

template <typename Acc>
void bwd_tile(const TileInputs<Acc>& in, const TileGrads<Acc>& grads, int64_t steps) {
  int64_t done = 0;
  visit_width<Acc>(in.width, [&](auto width) {
    if constexpr (width > 0) done = bwd_groups<width>(in, grads, steps);
  });
  bwd_steps(in, grads, done, steps);
}

// Computes steps [begin, end). in.x.past has the width - 1 inputs before `begin`, and on return those before `end`.
template <typename Acc>
void convolve(const TaskView<Acc>& view, const ConvFwdParams& p, TileInputs<Acc>& in, const Rows<Acc>& x_tile,
              const Rows<Acc>& out_tile, int64_t begin, int64_t end) {
  for (int64_t t0 = begin; t0 < end; t0 += kTileSteps) {
    const int64_t steps = std::min(kTileSteps, end - t0);
    in.x.tile = view.load(x_tile, p.x, t0, steps);
    fwd_tile(in, view.target(out_tile, p.out, t0), steps);
    view.store(p.out, out_tile, t0, steps);
    in.x.advance(steps, view.lanes);
  }
}

template <typename Acc>
void fwd(const ConvFwdParams& p, const Tasks& tasks, int64_t task, std::byte* scratch) {
  const TaskView<Acc> view(p, tasks, task);
  ScratchRows<Acc> memory(scratch, view.row);
  if (is_channels_first(p, {&p.out})) {
    return view.visit_element(true, [&](auto element) {
      visit_width<Acc>(p.width, [&](auto width) { fwd_channels_first<Acc, decltype(element), width>(p, view, memory); });
    });
  }
  TileInputs<Acc> in{p.width, view.lanes, p.has_silu, view.load_parameters(memory, p), {}};
  const int64_t past = p.width - 1;
  in.x = {memory.tile(past), past, {}};
  const Rows<Acc> x_tile = memory.tile(kTileSteps), out_tile = memory.tile(kTileSteps);
  for_each_sequence(p, view.batch, [&](int64_t begin, int64_t end) {
    if (p.is_padding(view.batch, begin)) {
      view.clear(in.x.past, past);
      view.store_zeros(p.out, out_tile, begin, end);
    } else {
      view.load_state(in.x.past, p.initial_state, true, p.state_of_first_step(view.batch, begin), past);
      convolve(view, p, in, x_tile, out_tile, begin, end);
    }
    view.store_state(p.final_state, p.state_of_last_step(view.batch, end - 1), in.x.past, past);
  });
}

template <typename Acc>
void bwd(const ConvBwdParams& p, const Tasks& tasks, int64_t task, std::byte* scratch, std::byte* sums) {
  const TaskView<Acc> view(p, tasks, task);
  ScratchRows<Acc> memory(scratch, view.row);
  const Rows<Acc> task_sums{reinterpret_cast<Acc*>(sums), view.row};
  if (sums != nullptr) view.clear(task_sums, p.width + 1);
  if (is_channels_first(p, {&p.grad_out, &p.grad_x})) {
    return view.visit_element(true, [&](auto element) {
      visit_width<Acc>(p.width,
                       [&](auto width) { bwd_channels_first<Acc, decltype(element), width>(p, view, memory, task_sums); });
    });
  }
  TileInputs<Acc> in{p.width, view.lanes, p.has_silu, view.load_parameters(memory, p), {}};
  const int64_t past = p.width - 1;
  in.x = {memory.tile(past), past, {}};
  TileGrads<Acc> grads{};
  grads.g = {memory.rows(past), past, memory.rows(kTileSteps)};
  grads.sums = task_sums;
  grads.needs_grad_e = p.grad_x.data != nullptr || p.grad_initial_state.data != nullptr;
  const Rows<Acc> grad_initial = memory.tile(past), grad_final = memory.tile(past);
  const Rows<Acc> x_tile = memory.tile(kTileSteps), grad_out_tile = memory.tile(kTileSteps);
  const Rows<Acc> grad_x_tile = memory.tile(std::max(kTileSteps, past));

  for_each_sequence(p, view.batch, [&](int64_t begin, int64_t end) {
    const int64_t first_state = p.state_of_first_step(view.batch, begin),
                  last_state = p.state_of_last_step(view.batch, end - 1);
    if (p.is_padding(view.batch, begin)) {
      view.clear(grad_initial, past);
      view.store_zeros(p.grad_x, grad_x_tile, begin, end);
      return view.store_state(p.grad_initial_state, first_state, grad_initial, past);
    }
    view.load_state(in.x.past, p.initial_state, true, first_state, past);
    view.clear(grads.g.past, past);
    // Element i of the tile's grad_e belongs to the initial state for i < is_initial, else to step t0 + i - past of x.
    const auto grad_e_from = [&](int64_t t0) {
      const int64_t is_initial = std::clamp<int64_t>(begin + past - t0, 0, past);
      const Rows<Acc> initial{grad_initial[past - is_initial], view.row};
      const bool has_grad_x = p.grad_x.data != nullptr;
      const int64_t first_step = t0 + is_initial - past;
      return Continued<Acc>{initial, is_initial, has_grad_x ? view.target(grad_x_tile, p.grad_x, first_step) : grad_x_tile};
    };
    for (int64_t t0 = begin; t0 < end; t0 += kTileSteps) {
      const int64_t steps = std::min(kTileSteps, end - t0);
      in.x.tile = view.load(x_tile, p.x, t0, steps);
      grads.grad_out = view.load(grad_out_tile, p.grad_out, t0, steps);
      grads.grad_e = grad_e_from(t0);
      bwd_tile(in, grads, steps);
      view.store(p.grad_x, grad_x_tile, t0 + grads.grad_e.count - past, steps - grads.grad_e.count);
      in.x.advance(steps, view.lanes);
      grads.g.advance(steps, view.lanes);
    }
    if (!grads.needs_grad_e) return;
    // The last width - 1 elements of grad e: every g that they depend on is known.
    using V = Vec<Acc>;
    view.load_state(grad_final, p.grad_final_state, true, last_state, past);
    grads.grad_e = grad_e_from(end);
    for (int64_t i = 0; i < past; ++i) {
      for (int64_t lane = 0; lane < view.lanes; lane += V::size()) {
        V grad = V::loadu(grad_final[i] + lane);
        for (int64_t j = i + 1; j < p.width; ++j) {
          grad = Math<V>::fma(V::loadu(in.weight[j] + lane), V::loadu(grads.g.past[past + i - j] + lane), grad);
        }
        grad.store(grads.grad_e[i] + lane);
      }
    }
    view.store(p.grad_x, grad_x_tile, end + grads.grad_e.count - past, past - grads.grad_e.count);
    view.store_state(p.grad_initial_state, first_state, grad_initial, past);
  });
}

template <typename Acc>
void finish_sums(const ConvBwdParams& p, const Tasks& tasks, int64_t block, const std::byte* bytes) {
  const int64_t first_channel = block * tasks.channels, lanes = std::min(tasks.channels, p.channels - first_channel);
  const int64_t task_values = (p.width + 1) * tasks.channels;
  const Acc* const sums = reinterpret_cast<const Acc*>(bytes);
  const auto total = [&](int64_t j, int64_t lane) {
    Acc sum(0);
    for (int64_t b = 0; b < p.batch; ++b) sum += sums[(b * tasks.blocks + block) * task_values + j * tasks.channels + lane];
    return sum;
  };
  const auto write = [&](void* grad, bool is_input_kind, int64_t index, Acc value) {
    if (!is_input_kind) {
      static_cast<Acc*>(grad)[index] = value;
    } else {
      visit_scalar(p.kind,
                   [&](auto scalar) { static_cast<decltype(scalar)*>(grad)[index] = static_cast<decltype(scalar)>(value); });
    }
  };
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const int64_t c = first_channel + lane;
    if (p.grad_weight != nullptr) {
      for (int64_t j = 0; j < p.width; ++j) write(p.grad_weight, p.weight.is_input_kind, c * p.width + j, total(j, lane));
    }
    if (p.grad_bias != nullptr) write(p.grad_bias, p.bias.is_input_kind, c, total(p.width, lane));
  }
}

// Copies elements [begin, begin + count) of the first roll.end elements of the state followed by x, for a channel. They may be
// copied to the front of the state: an element is read before it is written to.
template <typename Input, typename State>
void copy_elements(const State* state, int64_t stride_state, const Input* x, int64_t stride_x, const Roll& roll, int64_t begin,
                   int64_t count, State* target, int64_t stride_target) {
  const int64_t kept = std::clamp<int64_t>(roll.end - begin, 0, count);
  for (int64_t i = 0; i < kept; ++i) target[i * stride_target] = state[(begin + i) * stride_state];
  for (int64_t i = kept; i < count; ++i) {
    target[i * stride_target] = static_cast<State>(x[(begin + i - roll.end) * stride_x]);
  }
}

// Stores the windows after each token, then the state.
template <typename Input, typename State>
void store_states(const ConvUpdateParams& p, const ConvTokenParams* tokens, const TaskView<AccumulateType<Input>>& view,
                  const TokenRange& range, const Roll& roll, int64_t read, int64_t write) {
  const int64_t b = view.batch, past = p.width - 1, entry = tokens == nullptr ? -1 : tokens->rows.intermediate_entry(b);
  for (int64_t c = view.first_channel; c < view.first_channel + view.lanes; ++c) {
    State* const states = static_cast<State*>(p.state.data);
    const State* const state = states + p.state.offset(read, c, 0);
    const Input* const x = static_cast<const Input*>(p.x.data) + p.x.offset(b, range.first, c);
    for (int64_t t = 0; entry >= 0 && past > 0 && t < range.count; ++t) {
      State* const window = static_cast<State*>(tokens->windows.data) + tokens->windows.offset(entry, c, 0);
      copy_elements(state, p.state.stride_step, x, p.x.stride_step, roll, roll.end + t + 1 - past, past,
                    window + t * tokens->windows_token, tokens->windows.stride_step);
    }
    if (write < 0) continue;
    copy_elements(state, p.state.stride_step, x, p.x.stride_step, roll, roll.shift, roll.count,
                  states + p.state.offset(write, c, 0), p.state.stride_step);
  }
}

template <typename Input>
void update(const ConvUpdateParams& p, const ConvTokenParams* tokens, const Tasks& tasks, int64_t task, std::byte* scratch) {
  using Acc = AccumulateType<Input>;
  const ConvFwdParams steps = conv_params(p);
  const TaskView<Acc> view(steps, tasks, task);
  const int64_t b = view.batch;
  TokenRange range{0, p.seqlen};
  int64_t read = p.slots_of_batch.data == nullptr ? b : p.slots_of_batch.at(b, 0), write = read;
  if (tokens != nullptr) {
    range = tokens->rows.tokens_of(b);
    read = tokens->rows.read_slot(b);
    write = tokens->rows.write_slot(b, range.count - 1, range.count);
  }
  if (range.count == 0) return;
  const int64_t end = range.first + range.count;
  if (read < 0) {
    for (int64_t t = range.first; t < end; ++t) {
      for (int64_t c = view.first_channel; c < view.first_channel + view.lanes; ++c) {
        static_cast<Input*>(p.out.data)[p.out.offset(b, t, c)] = Input(0);
      }
    }
    return;
  }
  const Roll roll = tokens == nullptr ? roll_of(p) : roll_of(p, tokens->rows, b, range.count);
  ScratchRows<Acc> memory(scratch, view.row);
  TileInputs<Acc> in{p.width, view.lanes, p.has_silu, view.load_parameters(memory, steps), {}};
  const int64_t past = p.width - 1;
  in.x = {memory.tile(past), past, {}};
  const Rows<Acc> x_tile = memory.tile(kTileSteps), out_tile = memory.tile(kTileSteps);
  if (past > 0) {
    view.load(in.x.past, p.state.data, p.state_is_input_kind, p.state.offset(read, view.first_channel, roll.end - past),
              p.state.stride_channel, p.state.stride_step, past);
  }
  convolve(view, steps, in, x_tile, out_tile, range.first, end);
  if (p.state_is_input_kind) {
    store_states<Input, Input>(p, tokens, view, range, roll, read, write);
  } else {
    store_states<Input, Acc>(p, tokens, view, range, roll, read, write);
  }
}

}  // namespace

int64_t scratch_bytes(int64_t width, int64_t channels) {
  // Backward needs the most. By tiles: parameters, the past of g, the past of x and the gradients of two states, and tiles of
  // g, x, grad_out and grad_x; the last also takes the width - 1 steps at the end of a sequence.
  const int64_t past = width - 1, tile = kTileSteps + kMaxLanes, states = 3 * (past + kMaxLanes);
  const int64_t parameters = width + 1 + kMaxLanes;
  const int64_t channels_last_rows = parameters + past + states + 3 * tile + std::max(tile, past + kMaxLanes);
  // Channels first: parameters, three states, and a channel's taps and chunks of x, g, the gradient and ones.
  const int64_t chunk_rows = (round_up(past, kMaxLanes) + kChunkSteps + kMaxLanes) / channels + 1;
  const int64_t channels_first_rows = parameters + states + (width + kMaxLanes) / channels + 1 + 4 * chunk_rows;
  return std::max(channels_last_rows, channels_first_rows) * channels * static_cast<int64_t>(sizeof(double));
}

int64_t sum_bytes(const ConvParams& p, const Tasks& tasks) {
  const size_t size = p.kind == ScalarKind::kDouble ? sizeof(double) : sizeof(float);
  return (p.width + 1) * tasks.channels * static_cast<int64_t>(size);
}

void fwd_task(const ConvFwdParams& p, const Tasks& tasks, int64_t task, std::byte* scratch) {
  p.kind == ScalarKind::kDouble ? fwd<double>(p, tasks, task, scratch) : fwd<float>(p, tasks, task, scratch);
}

void bwd_task(const ConvBwdParams& p, const Tasks& tasks, int64_t task, std::byte* scratch, std::byte* sums) {
  p.kind == ScalarKind::kDouble ? bwd<double>(p, tasks, task, scratch, sums) : bwd<float>(p, tasks, task, scratch, sums);
}

void finish(const ConvBwdParams& p, const Tasks& tasks, int64_t block, const std::byte* sums) {
  p.kind == ScalarKind::kDouble ? finish_sums<double>(p, tasks, block, sums) : finish_sums<float>(p, tasks, block, sums);
}

void update_task(const ConvUpdateParams& p, const ConvTokenParams* tokens, const Tasks& tasks, int64_t task,
                 std::byte* scratch) {
  visit_scalar(p.kind, [&](auto input) { update<decltype(input)>(p, tokens, tasks, task, scratch); });
}

SSM_KERNEL_API const CpuKernels& kernels() {
  static constexpr CpuKernels kKernels{&scratch_bytes, &sum_bytes, &fwd_task, &bwd_task, &finish, &update_task};
  return kKernels;
}

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::causal_conv1d
