// Keys and values of a session's attention layers: append-only rows that forks share.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <span>

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
  // Makes room for rows [position, end) without claiming them, under the same conditions.
  void make_room(uint32_t position, uint32_t end, uint32_t limit);

  // The first `rows` rows alone, in memory of just their size.
  KvCache trimmed(uint32_t rows) const;
  // Calls `visit` with the bytes of the first `rows` rows, in an order that the shape gives.
  using Visit = std::function<void(std::span<std::byte>)>;
  void visit(uint32_t rows, const Visit& visit) const;

  uint32_t capacity() const { return rows_ ? rows_->capacity : 0; }
  Slot keys(uint32_t layer) const { return slot(2 * layer); }
  Slot values(uint32_t layer) const { return slot(2 * layer + 1); }
  size_t bytes() const { return rows_ ? rows_->buffer->bytes : 0; }
  size_t bytes_of(uint32_t rows) const { return rows ? planes() * plane_bytes(rounded(rows)) : 0; }
  // Names the memory that caches share: equal for two caches just if they do; 0 for an empty one.
  uintptr_t identity() const { return reinterpret_cast<uintptr_t>(rows_.get()); }
  long owners() const { return rows_.use_count(); }

 private:
  // Layout: [layer][keys, values] of [head][capacity][head_dim] elements, then [head][capacity]
  // scales.
  struct Rows {
    std::shared_ptr<Buffer> buffer;
    uint32_t capacity;
    std::mutex mutex;
    uint32_t written = 0;  // rows below may belong to any owner's history
  };

  static uint32_t rounded(uint64_t rows) { return static_cast<uint32_t>((rows + 63) / 64 * 64); }
  uint32_t planes() const { return 2 * shape_.layers; }
  Slot slot(uint32_t plane) const;
  size_t plane_bytes(uint32_t capacity) const {
    return size_t{shape_.heads} * capacity * (shape_.row_bytes() + shape_.scale_bytes);
  }
  void grow(uint32_t position, uint32_t end, uint32_t limit);
  void move_to(uint32_t capacity, uint32_t rows);

  Device* device_;
  KvShape shape_;
  std::shared_ptr<Rows> rows_;
};

}  // namespace lily
