#include "runtime/kv_cache.h"

#include <algorithm>
#include <cstring>

namespace lily {

namespace {
constexpr uint64_t growth = 4096;  // positions
}

Slot KvCache::slot(uint32_t plane) const {
  const size_t bytes = plane_bytes(rows_->capacity);
  return {rows_->buffer.get(), plane * bytes, bytes};
}

// The sole owner may write anywhere; others only rows that nobody has written.
bool KvCache::claim(uint32_t position, uint32_t end) {
  if (!rows_ || end > rows_->capacity) return false;
  std::lock_guard lock(rows_->mutex);
  if (rows_.use_count() == 1)  // what others wrote beyond is nobody's any more
    rows_->written = end;
  else if (position < rows_->written)
    return false;
  else
    rows_->written = std::max(rows_->written, end);
  return true;
}

void KvCache::release(uint32_t position, uint32_t end) {
  if (!rows_) return;
  std::lock_guard lock(rows_->mutex);
  if (rows_->written == end) rows_->written = position;
}

void KvCache::reserve(uint32_t position, uint32_t end, uint32_t limit) {
  if (claim(position, end)) return;
  grow(position, end, limit);
  claim(position, end);
}

void KvCache::make_room(uint32_t position, uint32_t end, uint32_t limit) {
  if (end > capacity()) grow(position, end, limit);
}

void KvCache::grow(uint32_t position, uint32_t end, uint32_t limit) {
  uint64_t wanted = end;
  if (end > capacity()) wanted = std::max<uint64_t>(end, 2 * uint64_t{capacity()});
  wanted = (wanted + growth - 1) / growth * growth;
  move_to(std::min(rounded(wanted), rounded(std::max(limit, end))), position);
}

KvCache KvCache::trimmed(uint32_t rows) const {
  KvCache copy = *this;
  if (rows == 0)
    copy.rows_ = nullptr;
  else
    copy.move_to(rounded(rows), rows);
  return copy;
}

void KvCache::visit(uint32_t rows, const Visit& visit) const {
  if (rows == 0) return;
  std::byte* at = rows_->buffer->data;
  for (uint32_t plane = 0; plane < planes(); ++plane)
    for (size_t bytes : {shape_.row_bytes(), shape_.scale_bytes})
      for (uint32_t head = 0; bytes && head < shape_.heads; ++head) {
        visit({at, rows * bytes});
        at += rows_->capacity * bytes;
      }
}

void KvCache::move_to(uint32_t capacity, uint32_t rows) {
  auto next = std::make_shared<Rows>();
  next->capacity = capacity;
  next->buffer =
      device_->allocate(std::max<size_t>(planes() * plane_bytes(capacity), 1), "kv cache");
  if (rows_) {
    const std::byte* from = rows_->buffer->data;
    std::byte* to = next->buffer->data;
    for (uint32_t plane = 0; plane < planes(); ++plane)
      for (size_t bytes : {shape_.row_bytes(), shape_.scale_bytes})  // of each position
        for (uint32_t head = 0; head < shape_.heads; ++head) {
          std::memcpy(to, from, rows * bytes);
          from += rows_->capacity * bytes;
          to += capacity * bytes;
        }
  }
  next->written = rows;
  rows_ = std::move(next);
}

}  // namespace lily
