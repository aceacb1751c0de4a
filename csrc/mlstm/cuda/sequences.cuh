// Packed sequences, step by step, for the kernels of mlstm_scan.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "mlstm/mlstm.h"

namespace ssm_kernels::mlstm {

// The sequence of a step: a row of the batch, or one of those that cu_seqlens packs into the only row. Steps are visited in
// either direction. For any values of cu_seqlens the sequence's number is a valid index.
class SequenceCursor {
 public:
  __device__ __forceinline__ SequenceCursor(const SequenceParams& p, int64_t row, int64_t step) : p_(p), number_(row) {
    if (p.cu_seqlens == nullptr) {
      end_ = p.seqlen;
      return;
    }
    int64_t low = 0, high = p.sequences - 1;  // the last sequence that begins at the step or before it
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (p.cu_seqlens[middle] <= step) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    set(low);
  }

  __device__ __forceinline__ void move_to(int64_t step) {
    if (p_.cu_seqlens == nullptr) return;
    while (step >= end_ && number_ + 1 < p_.sequences) set(number_ + 1);
    while (step < begin_ && number_ > 0) set(number_ - 1);
  }

  __device__ __forceinline__ int64_t number() const { return number_; }
  __device__ __forceinline__ bool begins_at(int64_t step) const { return step == begin_; }
  __device__ __forceinline__ bool ends_at(int64_t step) const { return step + 1 == end_; }

 private:
  __device__ __forceinline__ void set(int64_t number) {
    number_ = number;
    begin_ = p_.cu_seqlens[number];
    end_ = p_.cu_seqlens[number + 1];
  }

  const SequenceParams& p_;
  int64_t number_, begin_ = 0, end_ = 0;
};

// The sequences that end in a chunk, one after another. For any values of cu_seqlens their numbers are valid indices.
class SequenceEnds {
 public:
  // Steps [begin, end) of the only row.
  __device__ __forceinline__ SequenceEnds(const int64_t* cu_seqlens, int sequences, int begin, int end)
      : ends_(cu_seqlens + 1), sequences_(sequences), begin_(begin), end_(end) {
    int high = sequences;  // the first sequence that ends after the first step
    while (number_ < high) {
      const int middle = (number_ + high) / 2;
      if (ends_[middle] > begin) {
        high = middle;
      } else {
        number_ = middle + 1;
      }
    }
  }

  // Moves to the next sequence with steps that ends before the chunk does, and returns whether there is one.
  __device__ __forceinline__ bool find_inside() {
    for (; number_ < sequences_ && ends_[number_] < end_; ++number_) {
      if (ends_[number_] > begin_ && has_steps()) return true;
    }
    return false;
  }
  // After that: whether a sequence with steps ends with the chunk.
  __device__ __forceinline__ bool ends_with_chunk() const {
    return number_ < sequences_ && ends_[number_] == end_ && has_steps();
  }
  __device__ __forceinline__ void advance() { ++number_; }
  __device__ __forceinline__ int number() const { return number_; }
  // The sequence's last step, counted from the chunk's first.
  __device__ __forceinline__ int last_step() const { return static_cast<int>(ends_[number_]) - begin_ - 1; }

 private:
  __device__ __forceinline__ bool has_steps() const { return ends_[number_ - 1] < ends_[number_]; }

  const int64_t* ends_;
  int sequences_, begin_, end_, number_ = 0;
};

}  // namespace ssm_kernels::mlstm
