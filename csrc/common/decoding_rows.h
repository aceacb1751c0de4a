// The rows of a decoding call, for kernels on CPU and CUDA: the tokens of each row, and the slots of a cache of states that it
// reads from and writes to.
//
// A row has one token, `tokens` of them, or those from cu_seqlens[b] to cu_seqlens[b + 1] - 1 of packed tokens. Packed
// tokens after the last row's are padding, which no kernel reads or writes. A negative slot, and the slot `pad_slot`, are
// padding.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace ssm_kernels {

// A (rows,) or (rows, columns) tensor of integers, data null if absent. Strides are in elements.
struct IndexTable {
  const void* data = nullptr;
  bool is_int64 = false;
  int64_t columns = 1;
  int64_t stride_row = 0, stride_column = 0;

  SSM_HOST_DEVICE int64_t at(int64_t row, int64_t column = 0) const {
    const int64_t offset = row * stride_row + column * stride_column;
    return is_int64 ? static_cast<const int64_t*>(data)[offset] : static_cast<const int32_t*>(data)[offset];
  }
};

// The tokens of a row: `count` of them, from `first` of its batch row or of the packed tokens.
struct TokenRange {
  int64_t first = 0, count = 1;
};

struct DecodingRows {
  int64_t rows = 0;
  int64_t tokens = 1;  // of each row; with cu_seqlens, of all rows
  IndexTable cu_seqlens;
  // Without a table, row b uses slot b.
  IndexTable read_slots, write_slots;
  IndexTable num_accepted_tokens;
  // Whether the state after each token is written, to the slot in the token's column; else the state after the last token is.
  bool writes_each_token = false;
  bool updates_state = true;
  int64_t pad_slot = -1;
  // The entry of a buffer of intermediate states that each row writes to; entry b without a table.
  bool has_intermediate = false;
  IndexTable intermediate_entries;
  int64_t intermediate_count = 0, intermediate_tokens = 0;  // sizes of the buffer

  // CUDA does not check the values of cu_seqlens: for any values, the range is inside the tokens.
  SSM_HOST_DEVICE TokenRange tokens_of(int64_t b) const {
    if (cu_seqlens.data == nullptr) return {0, tokens};
    const int64_t first = clamp(cu_seqlens.at(b), 0, tokens), end = clamp(cu_seqlens.at(b + 1), first, tokens);
    return {first, end - first};
  }
  SSM_HOST_DEVICE int64_t accepted(int64_t b, int64_t most) const {
    return num_accepted_tokens.data == nullptr ? 1 : clamp(num_accepted_tokens.at(b), 1, most);
  }
  // The slot of the state before the row's first token; negative for padding.
  SSM_HOST_DEVICE int64_t read_slot(int64_t b) const {
    if (read_slots.data == nullptr) return b;
    return without_padding(read_slots.at(b, read_slots.columns == 1 ? 0 : accepted(b, read_slots.columns) - 1));
  }
  // The slot for the state after token t of `count`; negative if it is not written.
  SSM_HOST_DEVICE int64_t write_slot(int64_t b, int64_t t, int64_t count) const {
    if (!updates_state || (writes_each_token ? t >= write_slots.columns : t != count - 1)) return -1;
    if (write_slots.data == nullptr) return b;
    return without_padding(write_slots.at(b, writes_each_token ? t : 0));
  }
  // The entry of the buffer for the states after the row's tokens; negative if they are not written.
  SSM_HOST_DEVICE int64_t intermediate_entry(int64_t b) const {
    if (!has_intermediate) return -1;
    return intermediate_entries.data == nullptr ? b : without_padding(intermediate_entries.at(b));
  }

 private:
  SSM_HOST_DEVICE static int64_t clamp(int64_t value, int64_t least, int64_t most) {
    return value < least ? least : value > most ? most : value;
  }
  SSM_HOST_DEVICE int64_t without_padding(int64_t slot) const { return slot == pad_slot ? -1 : slot; }
};

}  // namespace ssm_kernels
