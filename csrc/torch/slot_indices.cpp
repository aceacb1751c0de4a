// The checks of state_batch_indices and of the other tensors that choose slots.

#include "torch/slot_indices.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <utility>
#include <vector>

#include "torch/packed_sequences.h"

namespace ssm_kernels {

void check_slot_indices(const char* op, const std::optional<at::Tensor>& indices, int64_t slots) {
  if (!is_present(indices)) return;
  const at::Tensor contiguous = indices->to(at::kLong).contiguous();
  const int64_t* const values = contiguous.const_data_ptr<int64_t>();
  using SlotAndRow = std::pair<int64_t, int64_t>;
  std::vector<SlotAndRow> used;
  used.reserve(contiguous.numel());
  for (int64_t b = 0; b < contiguous.numel(); ++b) {
    TORCH_CHECK_VALUE(values[b] < slots, op, ": expected state_batch_indices below the number of slots, ", slots, ", got ",
                      values[b], " at position ", b);
    if (values[b] >= 0) used.emplace_back(values[b], b);
  }
  std::sort(used.begin(), used.end());
  const auto repeated =
      std::adjacent_find(used.begin(), used.end(), [](const SlotAndRow& a, const SlotAndRow& b) { return a.first == b.first; });
  TORCH_CHECK_VALUE(repeated == used.end(), op, ": expected distinct state_batch_indices, got ", repeated->first,
                    " at positions ", repeated->second, " and ", (repeated + 1)->second);
}

bool has_other_slots(const std::optional<at::Tensor>& state_batch_indices,
                     const std::optional<at::Tensor>& dst_state_batch_indices, std::optional<int64_t> pad_slot_id) {
  if (pad_slot_id.has_value() && *pad_slot_id >= 0) return true;
  if (!is_present(dst_state_batch_indices)) return false;
  return !is_present(state_batch_indices) || !dst_state_batch_indices->is_same(*state_batch_indices);
}

c10::SymInt count_rows(const ArgumentChecks& checks, const std::optional<at::Tensor>& cu_seqlens, const at::Tensor& x) {
  if (!is_present(cu_seqlens)) return x.sym_size(0);
  const c10::SymIntArrayRef shape = cu_seqlens->sym_sizes();
  TORCH_CHECK_VALUE(shape.size() == 1 && shape[0] >= 1, checks.op(), ": expected cu_seqlens of shape (sequences + 1,), got ",
                    shape);
  checks.indices("cu_seqlens", cu_seqlens, "(sequences + 1,)", shape);
  return shape[0] - 1;
}

void check_decoding_options(const ArgumentChecks& checks, const DecodingOptions& options, const c10::SymInt& rows,
                            const std::optional<c10::SymInt>& tokens, bool has_columns) {
  const bool is_packed = is_present(options.cu_seqlens);
  const char* const axes = is_packed ? "(sequences,)" : "(batch,)";
  const auto check_table = [&](const char* name, const std::optional<at::Tensor>& table, bool is_written) {
    if (!is_present(table)) return;
    if (!has_columns || table->dim() < 2) return checks.indices(name, table, axes, {rows});
    TORCH_CHECK_VALUE(table->dim() == 2 && table->sym_size(1) >= 1, checks.op(), ": expected ", name, " of shape ", axes,
                      " or ", is_packed ? "(sequences, tokens)" : "(batch, tokens)", ", got ", table->sym_sizes());
    const c10::SymInt columns = table->sym_size(1);
    checks.indices(name, table, is_packed ? "(sequences, tokens)" : "(batch, tokens)", {rows, columns});
    TORCH_CHECK_VALUE(!is_written || !tokens.has_value() || columns >= *tokens, checks.op(), ": expected ", name,
                      " with a column for each of ", *tokens, " tokens, got ", table->sym_sizes());
  };
  const bool has_destination = is_present(options.dst_state_batch_indices);
  check_table("state_batch_indices", options.state_batch_indices, !has_destination && !options.disable_state_update);
  check_table("dst_state_batch_indices", options.dst_state_batch_indices, !options.disable_state_update);
  checks.indices("num_accepted_tokens", options.num_accepted_tokens, axes, {rows});
  if (has_columns) {
    TORCH_CHECK_VALUE(!is_present(options.num_accepted_tokens) ||
                          (is_present(options.state_batch_indices) && options.state_batch_indices->dim() == 2),
                      checks.op(),
                      ": expected state_batch_indices of two axes with num_accepted_tokens, which chooses a column");
  }
  checks.indices("intermediate_state_indices", options.intermediate_state_indices, axes, {rows});
  TORCH_CHECK_VALUE(is_present(options.intermediate) || !is_present(options.intermediate_state_indices), checks.op(),
                    ": expected no intermediate_state_indices without a buffer of intermediate states");
}

void check_intermediate(const ArgumentChecks& checks, const BufferNames& names, const DecodingOptions& options,
                        c10::SymIntArrayRef state_shape, at::ScalarType dtype, const c10::SymInt& rows,
                        const std::optional<c10::SymInt>& tokens) {
  if (!is_present(options.intermediate)) return;
  const at::Tensor& buffer = *options.intermediate;
  checks.rank(names.name, buffer, static_cast<int64_t>(state_shape.size()) + 2, names.axes);
  c10::SymDimVector shape{buffer.sym_size(0), buffer.sym_size(1)};
  shape.append(state_shape.begin(), state_shape.end());
  checks.tensor(names.name, buffer, names.axes, shape, dtype);
  TORCH_CHECK_VALUE(!tokens.has_value() || buffer.sym_size(1) >= *tokens, checks.op(), ": expected ", names.name, " for ",
                    *tokens, " tokens, got ", buffer.sym_sizes());
  TORCH_CHECK_VALUE(is_present(options.intermediate_state_indices) || buffer.sym_size(0) >= rows, checks.op(), ": expected ",
                    names.name, " with an entry for each of ", rows, " rows, or intermediate_state_indices, got ",
                    buffer.sym_sizes());
}

void check_writes(const char* op, std::initializer_list<NamedTensor> written, at::ArrayRef<NamedTensor> arguments,
                  const DecodingOptions& options) {
  c10::SmallVector<NamedTensor, 24> read(arguments.begin(), arguments.end());
  for (const NamedTensor& index :
       {NamedTensor("dst_state_batch_indices", options.dst_state_batch_indices),
        NamedTensor("num_accepted_tokens", options.num_accepted_tokens), NamedTensor("cu_seqlens", options.cu_seqlens),
        NamedTensor("intermediate_state_indices", options.intermediate_state_indices)}) {
    read.push_back(index);
  }
  const auto others = static_cast<std::ptrdiff_t>(read.size());
  for (const NamedTensor* each = written.begin(); each != written.end(); ++each) {
    if (each->tensor == nullptr || !each->tensor->defined()) continue;
    read.erase(read.begin() + others, read.end());
    read.append(each + 1, written.end());
    check_in_place(op, each->name, *each->tensor, read);
  }
}

IndexTable index_table(const std::optional<at::Tensor>& indices) {
  if (!is_present(indices)) return {};
  const bool has_columns = indices->dim() == 2;
  return {indices->const_data_ptr(), indices->scalar_type() == at::kLong, has_columns ? indices->size(1) : 1,
          indices->stride(0), has_columns ? indices->stride(1) : 0};
}

namespace {

// A row's use of a slot, or of an entry of a buffer.
struct Use {
  int64_t slot, row;
  bool is_written;
};

// Raises if a row uses what another row writes to.
void check_uses(const char* op, const char* name, std::vector<Use>& uses) {
  std::sort(uses.begin(), uses.end(), [](const Use& a, const Use& b) {
    return std::tie(a.slot, b.is_written, a.row) < std::tie(b.slot, a.is_written, b.row);
  });
  const Use* first = nullptr;  // of the slot: a write, if there is one
  for (const Use& use : uses) {
    if (first == nullptr || first->slot != use.slot) first = &use;
    TORCH_CHECK_VALUE(!first->is_written || first->row == use.row, op, ": expected no ", name,
                      " that one row writes to and another row uses, got ", use.slot, " for rows ",
                      std::min(first->row, use.row), " and ", std::max(first->row, use.row));
  }
}

}  // namespace

DecodingRows make_decoding_rows(const DecodingOptions& options, int64_t rows, int64_t tokens) {
  DecodingRows result;
  result.rows = rows;
  result.tokens = tokens;
  result.cu_seqlens = index_table(options.cu_seqlens);
  const bool has_destination = is_present(options.dst_state_batch_indices);
  const std::optional<at::Tensor>& written = has_destination ? options.dst_state_batch_indices : options.state_batch_indices;
  result.read_slots = index_table(options.state_batch_indices);
  result.write_slots = index_table(written);
  result.writes_each_token = is_present(written) && written->dim() == 2;
  result.num_accepted_tokens = index_table(options.num_accepted_tokens);
  result.updates_state = !options.disable_state_update;
  result.pad_slot = options.pad_slot_id.value_or(-1);
  if (is_present(options.intermediate)) {
    result.has_intermediate = true;
    result.intermediate_entries = index_table(options.intermediate_state_indices);
    result.intermediate_count = options.intermediate->size(0);
    result.intermediate_tokens = options.intermediate->size(1);
  }
  return result;
}

int64_t tokens_per_row(const DecodingRows& rows) {
  const int64_t divisor = rows.cu_seqlens.data == nullptr ? 1 : std::max<int64_t>(1, rows.rows);
  return std::max<int64_t>(1, rows.tokens / divisor);
}

void check_decoding_values(const char* op, const DecodingOptions& options, const DecodingRows& rows, int64_t slots,
                           int64_t most_accepted) {
  if (is_present(options.cu_seqlens)) check_cu_seqlens_values(op, *options.cu_seqlens, rows.tokens, /*has_padding=*/true);
  std::vector<Use> used_slots, used_entries;
  const auto add = [&](std::vector<Use>& uses, const char* name, const char* what, int64_t slot, int64_t count, int64_t row,
                       bool is_written) {
    TORCH_CHECK_VALUE(slot < count, op, ": expected ", name, " below the number of ", what, ", ", count, ", got ", slot,
                      " for row ", row);
    if (slot >= 0) uses.push_back({slot, row, is_written});
  };
  const char* const written = is_present(options.dst_state_batch_indices) ? "dst_state_batch_indices" : "state_batch_indices";
  for (int64_t b = 0; b < rows.rows; ++b) {
    if (rows.num_accepted_tokens.data != nullptr) {
      const int64_t accepted = rows.num_accepted_tokens.at(b);
      TORCH_CHECK_VALUE(accepted >= 0 && accepted <= most_accepted, op, ": expected num_accepted_tokens from 0 to ",
                        most_accepted, ", got ", accepted, " for row ", b);
    }
    const int64_t read = rows.read_slot(b), count = rows.tokens_of(b).count;
    add(used_slots, "state_batch_indices", "slots", read, slots, b, false);
    if (read < 0) continue;
    TORCH_CHECK_VALUE(!rows.updates_state || !rows.writes_each_token || count <= rows.write_slots.columns, op, ": expected ",
                      written, " with a column for each token, got ", rows.write_slots.columns, " columns for ", count,
                      " tokens of row ", b);
    for (int64_t t = 0; t < count; ++t) add(used_slots, written, "slots", rows.write_slot(b, t, count), slots, b, true);
    if (!rows.has_intermediate) continue;
    add(used_entries, "intermediate_state_indices", "entries", rows.intermediate_entry(b), rows.intermediate_count, b, true);
    TORCH_CHECK_VALUE(count <= rows.intermediate_tokens, op, ": expected a buffer of intermediate states for ", count,
                      " tokens of row ", b, ", got ", rows.intermediate_tokens);
  }
  check_uses(op, "slot", used_slots);
  check_uses(op, "entry of intermediate_state_indices", used_entries);
}

}  // namespace ssm_kernels
