// selective_scan_dense on the CPU: the recurrence of dense.h for one channel at a time, with vectors along its states, in
// matrices of 32 rows that are stored by rows and by columns. This file is compiled once per instruction set.

#include "selective_scan/cpu/dense_kernels.h"

#include <algorithm>

#include "common/activations.h"
#include "common/schur.h"
#include "cpu/scalar_types.h"
#include "cpu/vec_math.h"

namespace ssm_kernels::selective_scan::dense {
inline namespace CPU_CAPABILITY {
namespace {

constexpr int64_t kRow = kMaxDenseDstate;
// Loops over states run to a multiple of this; the states above dstate are zero.
constexpr int64_t kPadding = 8;

template <typename Acc>
using Values = Acc[kRow];

// The matrices of a channel.
template <typename Acc>
struct Matrices {
  int64_t dstate, padded;
  Acc T[kRow][kRow], T_columns[kRow][kRow], Q[kRow][kRow], Q_columns[kRow][kRow];

  void load(const DenseParams& dense, int64_t count, int64_t channel) {
    dstate = count;
    padded = (count + kPadding - 1) / kPadding * kPadding;
    const int64_t offset = dense.matrix(channel) * count * count;  // of matrices without padding
    const auto read = [&](const void* data, Acc(&rows)[kRow][kRow], Acc(&columns)[kRow][kRow]) {
      const Acc* const from = static_cast<const Acc*>(data) + offset;
      for (int64_t i = 0; i < kRow; ++i) {
        for (int64_t j = 0; j < kRow; ++j) {
          rows[i][j] = columns[j][i] = i < count && j < count ? from[i * count + j] : Acc(0);
        }
      }
    };
    read(dense.T, T, T_columns);
    read(dense.Q, Q, Q_columns);
  }

  // result += factor * (the sum of x[k] times the k-th row of `rows`)
  void add_rows(const Acc (&rows)[kRow][kRow], const Acc* x, Acc factor, Acc* result) const {
    for (int64_t k = 0; k < dstate; ++k) {
      const Acc value = factor * x[k];
      for (int64_t i = 0; i < padded; ++i) result[i] += value * rows[k][i];
    }
  }
  void rotate_in(const Acc* x, Acc* result) const { rotate(Q, x, result); }           // Q^T x
  void rotate_out(const Acc* x, Acc* result) const { rotate(Q_columns, x, result); }  // Q x
  void multiply(const Acc* x, Acc* result) const { rotate(T_columns, x, result); }    // T x
  void multiply_transposed(const Acc* x, Acc* result) const { rotate(T, x, result); }

  // Whether rows k and k + 1 are a block.
  bool is_block(int64_t k) const { return k >= 0 && k + 1 < dstate && T[k + 1][k] != Acc(0); }

  // Solves (I - c T) y = x in place.
  void solve(Acc c, Acc* x) const {
    for (int64_t k = dstate - 1; k >= 0; --k) {
      if (is_block(k - 1)) {
        solve_block(c, k - 1, T[k - 1][k], T[k][k - 1], x);
        --k;
        for (int64_t i = 0; i < k; ++i) x[i] += c * x[k] * T_columns[k][i] + c * x[k + 1] * T_columns[k + 1][i];
      } else {
        x[k] /= 1 - c * T[k][k];
        const Acc value = c * x[k];
        for (int64_t i = 0; i < k; ++i) x[i] += value * T_columns[k][i];
      }
    }
  }

  // Solves (I - c T)^T y = x in place.
  void solve_transposed(Acc c, Acc* x) const {
    for (int64_t k = 0; k < dstate; ++k) {
      if (is_block(k)) {
        solve_block(c, k, T[k + 1][k], T[k][k + 1], x);
        ++k;
        for (int64_t i = k + 1; i < padded; ++i) x[i] += c * x[k - 1] * T[k - 1][i] + c * x[k] * T[k][i];
      } else {
        x[k] /= 1 - c * T[k][k];
        const Acc value = c * x[k];
        for (int64_t i = k + 1; i < padded; ++i) x[i] += value * T[k][i];
      }
    }
  }

 private:
  void rotate(const Acc (&rows)[kRow][kRow], const Acc* x, Acc* result) const {
    std::fill_n(result, padded, Acc(0));
    add_rows(rows, x, Acc(1), result);
  }

  // The two equations of rows k and k + 1, whose off-diagonal entries are -c upper and -c lower. Their product is negative, and
  // the diagonal entries are equal: the determinant is a sum of two squares.
  void solve_block(Acc c, int64_t k, Acc upper, Acc lower, Acc* x) const {
    const Acc first = 1 - c * T[k][k], second = 1 - c * T[k + 1][k + 1];
    const Acc determinant = first * second - (c * upper) * (c * lower);
    const Acc x0 = x[k], x1 = x[k + 1];
    x[k] = (second * x0 + c * upper * x1) / determinant;
    x[k + 1] = (first * x1 + c * lower * x0) / determinant;
  }
};

// One channel of one row, and the arrays of its steps.
template <typename Scalar, typename Acc>
class Channel {
 public:
  Matrices<Acc> matrices;
  Acc D, bias;
  Values<Acc> B, C;  // constant ones

  Channel(const SelectiveScanParams& p, const DenseParams& dense) : p_(p), dense_(dense) {}

  void load(int64_t channel) {
    d = channel;
    matrices.load(dense_, p_.dstate, d);
    const auto of_channel = [&](const ChannelView& view) {
      return view.data == nullptr ? Acc(0) : static_cast<const Acc*>(view.data)[d * view.stride];
    };
    D = of_channel(p_.D);
    bias = of_channel(p_.delta_bias);
    if (!p_.B.per_step) load_constant(p_.B, B);
    if (!p_.C.per_step) load_constant(p_.C, C);
  }

  static Acc at(const SequenceView& view, int64_t batch, int64_t d, int64_t t) {
    return Acc(static_cast<const Scalar*>(view.data)[batch * view.stride_batch + d * view.stride_dim + t * view.stride_step]);
  }
  static void put(const SequenceView& view, int64_t batch, int64_t d, int64_t t, Acc value) {
    static_cast<Scalar*>(view.data)[batch * view.stride_batch + d * view.stride_dim + t * view.stride_step] = Scalar(value);
  }
  void matrix_at(const MatrixView& view, const Acc* constant, const ScanRow& row, int64_t t, Acc* to) const {
    if (!view.per_step) {
      std::copy_n(constant, kRow, to);
      return;
    }
    const Scalar* const from = static_cast<const Scalar*>(view.data) + row.batch * view.stride_batch +
                               d / (p_.dim / view.groups) * view.stride_channel + t * view.stride_step;
    std::fill_n(to, kRow, Acc(0));
    for (int64_t i = 0; i < p_.dstate; ++i) to[i] = Acc(from[i * view.stride_state]);
  }
  Acc raw_delta(const ScanRow& row, int64_t t) const { return at(p_.delta, row.batch, d, t) + bias; }
  Acc delta_of(Acc raw) const { return p_.delta_softplus ? softplus(raw) : raw; }

  bool has_given_sample(const ScanRow& row) const { return dense_.previous_u.data != nullptr && row.initial >= 0; }

  // The sample before step `begin` of the row, not rotated.
  void sample_before(const ScanRow& row, int64_t begin, Acc* sample) const {
    std::fill_n(sample, kRow, Acc(0));
    if (dense_.previous == 0) return;
    Values<Acc> matrix;
    Acc u;
    if (begin > row.begin || (!has_given_sample(row) && dense_.repeats_first && row.begin < row.end)) {
      const int64_t t = begin > row.begin ? begin - 1 : row.begin;
      matrix_at(p_.B, B, row, t, matrix);
      u = at(p_.u, row.batch, d, t);
    } else if (has_given_sample(row)) {
      const StateView &u_view = dense_.previous_u, &B_view = dense_.previous_B;
      u = Acc(static_cast<const Scalar*>(u_view.data)[row.initial * u_view.stride_batch + d * u_view.stride_dim]);
      std::copy_n(B, kRow, matrix);
      if (B_view.data != nullptr) {
        const Scalar* const from = static_cast<const Scalar*>(B_view.data) + row.initial * B_view.stride_batch +
                                   d / (p_.dim / p_.B.groups) * B_view.stride_dim;
        std::fill_n(matrix, kRow, Acc(0));
        for (int64_t i = 0; i < p_.dstate; ++i) matrix[i] = Acc(from[i * B_view.stride_state]);
      }
    } else {
      return;
    }
    for (int64_t i = 0; i < kRow; ++i) sample[i] = u * matrix[i];
  }

  // w of a step from its sample and the one before, which becomes the step's.
  void weigh(Acc u, const Acc* matrix, Acc* before, const Acc* h, Acc* w) const {
    Values<Acc> sum;
    for (int64_t i = 0; i < kRow; ++i) {
      const Acc now = u * matrix[i];
      sum[i] = Acc(dense_.current) * now + (dense_.previous == 0 ? Acc(0) : Acc(dense_.previous) * before[i]);
      before[i] = now;
    }
    matrices.multiply(h, w);
    matrices.add_rows(matrices.Q, sum, Acc(1), w);
  }

  // x = R(delta T) w. rk4 leaves s1 and s2.
  void respond(Acc delta, const Acc* w, Acc* x, Acc* s1, Acc* s2) const {
    std::copy_n(w, kRow, x);
    if (!dense_.is_rk4) {
      if (dense_.alpha != 0) matrices.solve(Acc(dense_.alpha) * delta, x);
      return;
    }
    std::copy_n(w, kRow, s1);
    matrices.add_rows(matrices.T_columns, w, delta / 4, s1);
    std::copy_n(w, kRow, s2);
    matrices.add_rows(matrices.T_columns, s1, delta / 3, s2);
    matrices.add_rows(matrices.T_columns, s2, delta / 2, x);
  }

  // The state of `from`, or zero, rotated.
  void load_state(const void* from, int64_t offset, int64_t stride, bool is_rotated, Acc* h) const {
    std::fill_n(h, kRow, Acc(0));
    if (from == nullptr) return;
    Values<Acc> given = {};
    for (int64_t i = 0; i < p_.dstate; ++i) given[i] = static_cast<const Acc*>(from)[offset + i * stride];
    is_rotated ? void(std::copy_n(given, kRow, h)) : matrices.rotate_in(given, h);
  }
  void load_state(const StateView& view, int64_t row, Acc* h) const {
    load_state(row < 0 ? nullptr : view.data, row * view.stride_batch + d * view.stride_dim, view.stride_state, false, h);
  }
  // To a contiguous (rows, dim, dstate) tensor.
  void put_state(void* to, int64_t row, const Acc* state) const {
    std::copy_n(state, p_.dstate, static_cast<Acc*>(to) + (row * p_.dim + d) * p_.dstate);
  }
  void put_state_rotated_out(void* to, int64_t row, const Acc* h) const {
    Values<Acc> state;
    matrices.rotate_out(h, state);
    put_state(to, row, state);
  }

  int64_t d = 0;

 private:
  void load_constant(const MatrixView& view, Acc* to) const {
    std::fill_n(to, kRow, Acc(0));
    for (int64_t i = 0; i < p_.dstate; ++i) {
      to[i] = static_cast<const Acc*>(view.data)[d * view.stride_channel + i * view.stride_state];
    }
  }

  const SelectiveScanParams& p_;
  const DenseParams& dense_;
};

template <typename Scalar>
void run_fwd(const SelectiveScanFwdParams& p, const DenseParams& dense, int64_t task, std::byte* scratch) {
  using Acc = AccumulateType<Scalar>;
  auto& channel = *new (scratch) Channel<Scalar, Acc>(p, dense);
  const int64_t tile = task % dense.tiles.tiles, slot = task / dense.tiles.tiles;
  for (int64_t c = 0; c < dense.tiles.count(tile); ++c) {
    channel.load(dense.tiles.first_channel(tile) + c);
    const int64_t d = channel.d;
    for (int64_t index = slot; index < p.rows; index += dense.tiles.slots) {
      const ScanRow row = p.row(index);
      Values<Acc> h, w = {}, x = {}, s1 = {}, s2 = {}, B, C, before, output;
      channel.load_state(p.initial_state, row.initial, h);
      channel.sample_before(row, row.begin, before);
      const auto save = [&](int64_t chunk) {
        if (p.chunk_states == nullptr || !p.saves_chunk_state(row, chunk)) return;
        channel.put_state(p.chunk_states, p.chunk_state(row, chunk), h);
      };
      for (int64_t t = row.begin; t < row.end; ++t) {
        if ((t - row.begin) % kDenseChunk == 0) save((t - row.begin) / kDenseChunk);
        const Acc delta = channel.delta_of(channel.raw_delta(row, t)), u = channel.at(p.u, row.batch, d, t);
        channel.matrix_at(p.B, channel.B, row, t, B);
        channel.weigh(u, B, before, h, w);
        channel.respond(delta, w, x, s1, s2);
        for (int64_t i = 0; i < kRow; ++i) h[i] += delta * x[i];
        channel.matrix_at(p.C, channel.C, row, t, C);
        channel.matrices.rotate_out(h, output);
        Acc y = channel.D * u;
        for (int64_t i = 0; i < p.dstate; ++i) y += C[i] * output[i];
        if (p.z.data != nullptr) y *= silu(channel.at(p.z, row.batch, d, t));
        channel.put(p.out, row.batch, d, t, y);
      }
      save((row.end - row.begin + kDenseChunk - 1) / kDenseChunk);
      if (row.last >= 0) channel.put_state_rotated_out(p.last_state, row.last, h);
    }
  }
}

// The arrays of a chunk's steps.
template <typename Acc>
struct Steps {
  Values<Acc> h[kDenseChunk + 1], x[kDenseChunk], w[kDenseChunk], s1[kDenseChunk], s2[kDenseChunk], B[kDenseChunk];
  Values<Acc> X[kRow];
};

template <typename Scalar>
void run_bwd(const SelectiveScanBwdParams& p, const DenseParams& dense, const DenseSums& sums, int64_t task,
             std::byte* scratch) {
  using Acc = AccumulateType<Scalar>;
  auto& channel = *new (scratch) Channel<Scalar, Acc>(p, dense);
  auto& steps = *reinterpret_cast<Steps<Acc>*>(scratch + (sizeof(Channel<Scalar, Acc>) + 63) / 64 * 64);
  const int64_t tile = task % dense.tiles.tiles, slot = task / dense.tiles.tiles;
  const Acc current = Acc(dense.current), previous = Acc(dense.previous), alpha = Acc(dense.alpha);
  for (int64_t c = 0; c < dense.tiles.count(tile); ++c) {
    channel.load(dense.tiles.first_channel(tile) + c);
    const Matrices<Acc>& m = channel.matrices;
    const int64_t d = channel.d;
    std::fill_n(&steps.X[0][0], kRow * kRow, Acc(0));
    Acc grad_D = 0, grad_bias = 0;
    Values<Acc> grad_B = {}, grad_C = {};
    const auto outer = [&](const Acc* a, Acc factor, const Acc* b) {
      for (int64_t i = 0; i < p.dstate; ++i) {
        const Acc value = factor * a[i];
        for (int64_t j = 0; j < m.padded; ++j) steps.X[i][j] += value * b[j];
      }
    };
    // Adds to the sums of the tile's channels, of which this is the c-th.
    const auto add_matrix = [&](const MatrixView& view, int64_t stride_tile, const MatrixView& input, const ScanRow& row,
                                int64_t t, const Acc* values) {
      if (view.data == nullptr) return;
      const int64_t group = d / (p.dim / input.groups), tiles = dense.tiles.tiles / input.groups;
      Acc* const to = static_cast<Acc*>(view.data) + tile % tiles * stride_tile + row.batch * view.stride_batch +
                      group * view.stride_channel + t * view.stride_step;
      for (int64_t i = 0; i < p.dstate; ++i) {
        Acc& sum = to[i * view.stride_state];
        sum = c == 0 ? values[i] : sum + values[i];
      }
    };
    for (int64_t index = slot; index < p.rows; index += dense.tiles.slots) {
      const ScanRow row = p.row(index);
      Values<Acc> g, q = {}, r = {}, before, C, output, matrix, sample, next = {};
      channel.load_state(p.grad_last_state, row.last, g);
      const int64_t chunks = (row.end - row.begin + kDenseChunk - 1) / kDenseChunk;
      for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
        const int64_t begin = row.begin + chunk * kDenseChunk, end = std::min(begin + kDenseChunk, row.end);
        if (p.saves_chunk_state(row, chunk)) {
          channel.load_state(p.chunk_states, (p.chunk_state(row, chunk) * p.dim + d) * p.dstate, 1, true, steps.h[0]);
        } else {
          channel.load_state(p.initial_state, row.initial, steps.h[0]);
        }
        channel.sample_before(row, begin, before);
        for (int64_t t = begin; t < end; ++t) {
          const int64_t s = t - begin;
          const Acc delta = channel.delta_of(channel.raw_delta(row, t));
          channel.matrix_at(p.B, channel.B, row, t, steps.B[s]);
          channel.weigh(channel.at(p.u, row.batch, d, t), steps.B[s], before, steps.h[s], steps.w[s]);
          for (int64_t i = m.padded; i < kRow; ++i) steps.w[s][i] = 0;
          channel.respond(delta, steps.w[s], steps.x[s], steps.s1[s], steps.s2[s]);
          for (int64_t i = 0; i < kRow; ++i) steps.h[s + 1][i] = steps.h[s][i] + delta * steps.x[s][i];
        }
        for (int64_t t = end - 1; t >= begin; --t) {
          const int64_t s = t - begin;
          const Acc raw = channel.raw_delta(row, t), delta = channel.delta_of(raw), u = channel.at(p.u, row.batch, d, t);
          channel.matrix_at(p.C, channel.C, row, t, C);
          m.rotate_out(steps.h[s + 1], output);
          Acc grad_y = p.grad_out.data == nullptr ? Acc(0) : channel.at(p.grad_out, row.batch, d, t);
          if (p.z.data != nullptr) {
            const Acc z = channel.at(p.z, row.batch, d, t), gate = sigmoid(z);
            Acc y = channel.D * u;
            for (int64_t i = 0; i < p.dstate; ++i) y += C[i] * output[i];
            if (p.grad_z.data != nullptr) channel.put(p.grad_z, row.batch, d, t, grad_y * y * silu_derivative(z, gate));
            grad_y *= z * gate;
          }
          grad_D += grad_y * u;
          m.add_rows(m.Q, C, grad_y, g);
          for (int64_t i = 0; i < p.dstate; ++i) output[i] *= grad_y;
          if (p.C.per_step) {
            add_matrix(sums.C, sums.stride_tile_C, p.C, row, t, output);
          } else {
            for (int64_t i = 0; i < p.dstate; ++i) grad_C[i] += output[i];
          }

          Acc grad_delta = 0;
          const auto dot = [&](const Acc* a, Acc factor, const Acc* b) {
            for (int64_t i = 0; i < p.dstate; ++i) grad_delta += factor * a[i] * b[i];
          };
          dot(g, Acc(1), steps.x[s]);
          if (dense.is_rk4) {
            Values<Acc> a;
            const Acc* const stages[] = {steps.s2[s], steps.s1[s], steps.w[s]};
            const Acc parts[] = {Acc(1) / 2, Acc(1) / 3, Acc(1) / 4};
            for (int64_t i = 0; i < m.padded; ++i) a[i] = q[i] = delta * g[i];
            for (int stage = 0; stage < 3; ++stage) {
              outer(a, delta * parts[stage], stages[stage]);
              m.multiply_transposed(a, r);
              dot(r, parts[stage], stages[stage]);
              for (int64_t i = 0; i < m.padded; ++i) q[i] += a[i] = delta * parts[stage] * r[i];
            }
            outer(q, Acc(1), steps.h[s]);
            m.multiply_transposed(q, r);
          } else {
            std::copy_n(g, m.padded, q);
            if (alpha != 0) m.solve_transposed(alpha * delta, q);
            for (int64_t i = 0; i < m.padded; ++i) q[i] *= delta;
            m.multiply_transposed(q, r);
            dot(r, alpha, steps.x[s]);
            Values<Acc> middle;
            for (int64_t i = 0; i < m.padded; ++i) middle[i] = steps.h[s][i] + alpha * delta * steps.x[s][i];
            outer(q, Acc(1), middle);
          }
          for (int64_t i = 0; i < m.padded; ++i) g[i] += r[i];

          // The gradient of the step's sample, and in `next` that of the sample before it.
          m.rotate_out(q, sample);
          const bool is_own_previous = t == row.begin && dense.repeats_first && !channel.has_given_sample(row);
          Acc grad_u = channel.D * grad_y;
          for (int64_t i = 0; i < p.dstate; ++i) {
            const Acc both = is_own_previous ? current + previous : current, value = both * sample[i] + next[i];
            next[i] = previous * sample[i];
            grad_u += steps.B[s][i] * value;
            matrix[i] = u * value;
          }
          if (p.B.per_step) {
            add_matrix(sums.B, sums.stride_tile_B, p.B, row, t, matrix);
          } else {
            for (int64_t i = 0; i < p.dstate; ++i) grad_B[i] += matrix[i];
          }
          if (p.grad_u.data != nullptr) channel.put(p.grad_u, row.batch, d, t, grad_u);
          if (p.delta_softplus) grad_delta *= softplus_derivative(raw);
          grad_bias += grad_delta;
          if (p.grad_delta.data != nullptr) channel.put(p.grad_delta, row.batch, d, t, grad_delta);
        }
      }
      if (p.grad_initial_state != nullptr && row.initial >= 0) {
        channel.put_state_rotated_out(p.grad_initial_state, row.initial, g);
      }
      if (sums.grad_previous != nullptr && row.initial >= 0) channel.put_state(sums.grad_previous, row.initial, next);
    }
    const int64_t place = slot * p.dim + d;
    if (sums.A != nullptr) {
      Acc* const to = static_cast<Acc*>(sums.A) + place * p.dstate * p.dstate;
      for (int64_t i = 0; i < p.dstate; ++i) std::copy_n(steps.X[i], p.dstate, to + i * p.dstate);
    }
    if (sums.constant_B != nullptr) channel.put_state(sums.constant_B, slot, grad_B);
    if (sums.constant_C != nullptr) channel.put_state(sums.constant_C, slot, grad_C);
    if (sums.D != nullptr) static_cast<Acc*>(sums.D)[place] = grad_D;
    if (sums.delta_bias != nullptr) static_cast<Acc*>(sums.delta_bias)[place] = grad_bias;
  }
}

template <typename Acc>
void reduce_as(const void* A, int64_t stride_row, int64_t stride_column, int64_t dstate, void* T, void* Q) {
  const int n = static_cast<int>(dstate);
  double form[kRow * kRow], rotation[kRow * kRow];
  for (int i = 0; i < n * n; ++i) {
    form[i] = double(static_cast<const Acc*>(A)[i / n * stride_row + i % n * stride_column]);
  }
  reduce_to_schur<kMaxDenseDstate>(SchurForm{form, rotation, n, n}, OneThread());
  for (int i = 0; i < n * n; ++i) {
    static_cast<Acc*>(T)[i] = Acc(form[i]);
    static_cast<Acc*>(Q)[i] = Acc(rotation[i]);
  }
}

void reduce(const void* A, int64_t stride_row, int64_t stride_column, int64_t dstate, bool is_double, void* T, void* Q) {
  is_double ? reduce_as<double>(A, stride_row, stride_column, dstate, T, Q)
            : reduce_as<float>(A, stride_row, stride_column, dstate, T, Q);
}

int64_t scratch_bytes(ScalarKind kind) {
  int64_t bytes = 0;
  visit_scalar(kind, [&](auto scalar) {
    using Acc = AccumulateType<decltype(scalar)>;
    bytes = (sizeof(Channel<decltype(scalar), Acc>) + 63) / 64 * 64 + (sizeof(Steps<Acc>) + 63) / 64 * 64;
  });
  return bytes;
}

void fwd_task(const SelectiveScanFwdParams& p, const DenseParams& dense, ScalarKind kind, int64_t task, std::byte* scratch) {
  visit_scalar(kind, [&](auto scalar) { run_fwd<decltype(scalar)>(p, dense, task, scratch); });
}

void bwd_task(const SelectiveScanBwdParams& p, const DenseParams& dense, const DenseSums& sums, ScalarKind kind, int64_t task,
              std::byte* scratch) {
  visit_scalar(kind, [&](auto scalar) { run_bwd<decltype(scalar)>(p, dense, sums, task, scratch); });
}

}  // namespace

SSM_KERNEL_API const CpuKernels& kernels() {
  static constexpr CpuKernels kKernels{&reduce, &scratch_bytes, &fwd_task, &bwd_task};
  return kKernels;
}

}  // namespace CPU_CAPABILITY
}  // namespace ssm_kernels::selective_scan::dense
