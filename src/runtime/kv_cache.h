// Keys and values of a session's attention layers: append-only rows that forks share.
#pragma once

#include <memory>
#include <mutex>

#include "device/device.h"

namespace lily {

struct KvShape {
  uint32_t layers, heads, head_dim;
  size_t element_bytes, scale_bytes;  // of a row's elements; of its scale, where it has one

  size_t row_bytes() const { return head_dim * element_bytes; }
  size_t position_bytes() const { return 2 * layers * heads * (row_bytes() + scale_bytes); }
};

// A value: copying it shares the rows. Whoever would overwrite rows that another owner may see,
// copies them first.
class KvCache {
 public:
  KvCache(Device& device, KvShape shape) : device_(&device), shape_(shape) {}

  // True if rows [position, end) may be written where they are, and notes that they will be.
  bool claim(uint32_t position, uint32_t end);
  // Makes rows [position, end) writable, moving the rows below if need be; `limit` is the most that
  // will ever be asked for. Moving is not allowed while device work on this cache is in flight.
  void reserve(uint32_t position, uint32_t end, uint32_t limit);
  // Gives back the claim on the last rows, from `position` on.
  void release(uint32_t position, uint32_t end);

  uint32_t capacity() const { return rows_ ? rows_->capacity : 0; }
  Slot keys(uint32_t layer) const { return slot(2 * layer); }
  Slot values(uint32_t layer) const { return slot(2 * layer + 1); }
  size_t bytes() const { return rows_ ? rows_->buffer->bytes : 0; }

 private:
  // Layout: [layer][keys, values] of [head][capacity][head_dim] elements, then [head][capacity]
  // scales.
  struct Rows {
    std::shared_ptr<Buffer> buffer;
    uint32_t capacity;
    std::mutex mutex;
    uint32_t written = 0;  // rows below may belong to any owner's history
  };

  Slot slot(uint32_t plane) const;
  size_t plane_bytes(uint32_t capacity) const {
    return size_t{shape_.heads} * capacity * (shape_.row_bytes() + shape_.scale_bytes);
  }
  void move_to(uint32_t capacity, uint32_t rows);

  Device* device_;
  KvShape shape_;
  std::shared_ptr<Rows> rows_;
};

}  // namespace lily
