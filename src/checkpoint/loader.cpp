#include "checkpoint/loader.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <tuple>

#include "base/bf16.h"
#include "base/error.h"
#include "checkpoint/file.h"

namespace lily {

namespace {

constexpr size_t alignment = 256;
constexpr size_t piece_bytes = 8u << 20;  // raw bytes that one thread holds at a time, about

size_t aligned(size_t bytes) { return (bytes + alignment - 1) / alignment * alignment; }

float half_to_float(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
  if (exponent) return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  const float tiny = std::ldexp(static_cast<float>(mantissa), -24);
  return sign ? -tiny : tiny;
}

float to_float(FileType type, const std::byte* p) {
  uint32_t word = 0;
  std::memcpy(&word, p, file_type_bytes(type));
  if (type == FileType::f32) return std::bit_cast<float>(word);
  if (type == FileType::bf16) return std::bit_cast<float>(word << 16);
  return half_to_float(static_cast<uint16_t>(word));
}

void expect(const std::string& name, const TableEntry& e, bool type_ok, const char* type,
            const std::vector<uint64_t>& shape) {
  if (!type_ok)
    throw CheckpointError(name + ": dtype " + file_type_name(e.type) + ", expected " + type);
  if (e.shape != shape)
    throw CheckpointError(name + ": shape " + shape_text(e.shape) + ", expected " +
                          shape_text(shape));
}

}  // namespace

void Loader::buffer(const std::string& label) {
  current_ = placing_ ? current_ + 1 : labels_.size();
  if (placing_) {
    LILY_CHECK(current_ < labels_.size() && labels_[current_] == label);
    return;
  }
  labels_.push_back(label);
  sizes_.push_back(0);
}

size_t Loader::bytes() const {
  size_t total = 0;
  for (size_t s : sizes_) total += s;
  return total;
}

void Loader::allocate() {
  for (size_t i = 0; i < labels_.size(); ++i)
    buffers_.push_back(device_.allocate(sizes_[i], labels_[i]));
  used_.assign(sizes_.size(), 0);
  placing_ = true;
  current_ = SIZE_MAX;  // the next buffer() is the first
}

Tensor Loader::place(size_t bytes, SlotType type, Shape shape) {
  Tensor t;
  t.place = Tensor::Place::buffer;
  t.type = type;
  t.shape = shape;
  t.bytes = bytes;
  if (!placing_) {
    sizes_.back() += aligned(bytes);
    return t;
  }
  t.buffer = buffers_[current_].get();
  t.offset = used_[current_];
  used_[current_] += aligned(bytes);
  LILY_CHECK(used_[current_] <= sizes_[current_]);
  return t;
}

std::vector<float> Loader::read_floats(const std::string& name) const {
  const TableEntry& e = table_.at(name);
  std::vector<std::byte> raw(e.bytes);
  File(table_.files[e.file]).read(e.offset, raw.data(), raw.size());
  const size_t width = file_type_bytes(e.type);
  std::vector<float> values(raw.size() / width);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = to_float(e.type, raw.data() + i * width);
    if (!std::isfinite(values[i]))
      throw CheckpointError(name + ": value " + std::to_string(i) + " is not finite");
  }
  return values;
}

Tensor Loader::floats(const std::vector<std::string>& names, uint32_t n_each, Shape shape,
                      Fill fill) {
  Tensor t = place(shape.count() * sizeof(float), SlotType::f32, shape);
  if (!placing()) return t;
  for (const std::string& name : names) {
    const TableEntry& e = table_.at(name);
    if (e.type == FileType::u32)
      throw CheckpointError(name + ": dtype U32, expected BF16, F16 or F32");
    if (e.bytes / file_type_bytes(e.type) != n_each)
      throw CheckpointError(name + ": shape " + shape_text(e.shape) + ", expected " +
                            std::to_string(n_each) + " values");
  }
  float* out = reinterpret_cast<float*>(t.buffer->data + t.offset);
  small_.push_back([this, names, fill, out] {
    std::vector<std::vector<float>> inputs;
    for (const std::string& name : names) inputs.push_back(read_floats(name));
    fill(inputs, out);
  });
  return t;
}

Tensor Loader::norm(const std::string& name, uint32_t n) {
  const float one = table_.published ? 1.0f : 0.0f;
  return floats({name}, n, {n}, [one](auto in, float* out) {
    for (size_t i = 0; i < in[0].size(); ++i) out[i] = one + in[0][i];
  });
}

Tensor Loader::vector(const std::string& name, uint32_t n) {
  return floats({name}, n, {n},
                [](auto in, float* out) { std::copy(in[0].begin(), in[0].end(), out); });
}

// [C, K, 1] and [C, 1, K] have the same bytes.
Tensor Loader::conv(const std::string& name, uint32_t channels, uint32_t taps) {
  return floats({name}, channels * taps, {channels, taps},
                [](auto in, float* out) { std::copy(in[0].begin(), in[0].end(), out); });
}

Tensor Loader::decay(const std::string& a_log, const std::string& dt_bias, uint32_t heads) {
  return floats({a_log, dt_bias}, heads, {2, heads}, [heads](auto in, float* out) {
    for (uint32_t h = 0; h < heads; ++h) {
      out[h] = static_cast<float>(-std::exp(static_cast<double>(in[0][h])));
      out[heads + h] = in[1][h];
    }
  });
}

Tensor Loader::constants(std::vector<float> values) {
  const uint32_t n = static_cast<uint32_t>(values.size());
  Tensor t = place(n * sizeof(float), SlotType::f32, {n});
  if (placing()) std::memcpy(t.buffer->data + t.offset, values.data(), t.bytes);
  return t;
}

void Loader::check_matrix(const MatrixPart& part, const Format& f, uint32_t experts) const {
  std::vector<uint64_t> lead;
  if (experts > 1 || part.module.find("switch_mlp") != std::string::npos) lead = {experts};
  auto shape = [&](uint64_t last) {
    std::vector<uint64_t> s = lead;
    s.insert(s.end(), {part.rows, last});
    return s;
  };
  const TableEntry& w = table_.at(part.module + ".weight");
  if (f.bits == 16) {
    expect(part.module + ".weight", w, w.type == FileType::bf16, "BF16", shape(part.cols));
    return;
  }
  expect(part.module + ".weight", w, w.type == FileType::u32, "U32",
         shape(uint64_t{part.cols} * f.bits / 32));
  for (const char* suffix : {".scales", ".biases"}) {
    const TableEntry& e = table_.at(part.module + suffix);
    expect(part.module + suffix, e, e.type == FileType::bf16, "BF16", shape(part.cols / f.group));
  }
}

Tensor Loader::matrix(const std::vector<MatrixPart>& parts) { return packed(parts, 1, false); }

Tensor Loader::experts(const std::vector<MatrixPart>& parts, uint32_t experts) {
  return packed(parts, experts, table_.published);
}

// In the published form the experts of a layer are one tensor [E, rows of all parts, cols] without
// ".weight": "…mlp.experts.gate_up_proj" for gate and up, "…mlp.experts.down_proj".
Tensor Loader::packed(const std::vector<MatrixPart>& parts, uint32_t experts, bool fused) {
  auto spec = std::make_shared<PackSpec>();
  spec->experts = experts;
  uint32_t rows = 0;
  for (const MatrixPart& p : parts) {
    const Format f = fused ? Format{} : table_.format(p.module);
    spec->segments.push_back({f.bits, p.rows, p.cols, f.group});
    rows += p.rows;
  }
  Tensor t = place(device_.packed_bytes(*spec), SlotType::packed, {experts, rows, parts[0].cols});
  t.form = spec;
  if (!placing()) return t;

  std::byte* out = t.buffer->data + t.offset;
  device_.pack_begin(*spec, out);
  std::string fused_name;
  if (fused) {
    fused_name = parts[0].module.substr(0, parts[0].module.find("switch_mlp")) + "experts." +
                 (parts.size() == 2 ? "gate_up_proj" : "down_proj");
    const TableEntry& e = table_.at(fused_name);
    expect(fused_name, e, e.type == FileType::bf16, "BF16", {experts, rows, parts[0].cols});
  }
  uint32_t first = 0;  // row of this part inside a fused expert
  for (uint32_t i = 0; i < parts.size(); ++i) {
    const MatrixPart& part = parts[i];
    const Format f = fused ? Format{} : table_.format(part.module);
    if (!fused) check_matrix(part, f, experts);
    Piece whole{};
    whole.spec = spec;
    whole.packed = out;
    whole.segment = i;
    whole.weight_row_bytes = size_t{part.cols} * f.bits / 8;
    whole.scales_row_bytes = f.bits == 16 ? 0 : part.cols / f.group * 2;
    const TableEntry& w = table_.at(fused ? fused_name : part.module + ".weight");
    const uint32_t rows_per_expert = fused ? rows : part.rows;
    const uint32_t step =
        static_cast<uint32_t>(std::max<size_t>(16, piece_bytes / whole.weight_row_bytes / 16 * 16));
    for (uint32_t e = 0; e < experts; ++e)
      for (uint32_t row = 0; row < part.rows; row += step) {
        Piece p = whole;
        p.expert = e;
        p.first_row = row;
        p.n_rows = std::min(step, part.rows - row);
        const uint64_t at = uint64_t{e} * rows_per_expert + first + row;
        p.file = w.file;
        p.weight = w.offset + at * p.weight_row_bytes;
        if (f.bits != 16) {
          const TableEntry& s = table_.at(part.module + ".scales");
          const TableEntry& b = table_.at(part.module + ".biases");
          p.scales_file = s.file;
          p.biases_file = b.file;
          p.scales = s.offset + at * p.scales_row_bytes;
          p.biases = b.offset + at * p.scales_row_bytes;
        }
        pieces_.push_back(std::move(p));
      }
    if (fused) first += part.rows;
  }
  return t;
}

void Loader::read(uint32_t threads, const Progress& progress) {
  for (const auto& fill : small_) fill();

  std::sort(pieces_.begin(), pieces_.end(), [](const Piece& a, const Piece& b) {
    return std::tie(a.file, a.weight) < std::tie(b.file, b.weight);
  });
  std::vector<std::unique_ptr<File>> files;
  for (const std::string& path : table_.files) files.push_back(std::make_unique<File>(path));
  uint64_t total = 0;
  for (const Piece& p : pieces_) total += p.bytes();

  std::atomic<size_t> next{0};
  std::atomic<uint64_t> done{0};
  std::mutex mutex;
  std::condition_variable finished;
  uint32_t running = std::max(threads, 1u);
  std::exception_ptr failure;

  auto work = [&] {
    std::vector<std::byte> raw;
    try {
      for (size_t i; (i = next.fetch_add(1)) < pieces_.size();) {
        const Piece& p = pieces_[i];
        const size_t weight = p.n_rows * p.weight_row_bytes, scales = p.n_rows * p.scales_row_bytes;
        raw.resize(weight + 2 * scales);
        files[p.file]->read(p.weight, raw.data(), weight);
        RawRows rows{raw.data()};
        if (scales) {
          files[p.scales_file]->read(p.scales, raw.data() + weight, scales);
          files[p.biases_file]->read(p.biases, raw.data() + weight + scales, scales);
          rows.scales = raw.data() + weight;
          rows.biases = raw.data() + weight + scales;
        }
        device_.pack_rows(*p.spec, p.packed, p.expert, p.segment, p.first_row, p.n_rows, rows);
        done += raw.size();
      }
    } catch (...) {
      next = pieces_.size();
      std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
    }
    std::lock_guard lock(mutex);
    --running;
    finished.notify_one();
  };
  std::vector<std::thread> pool;
  for (uint32_t i = running; i > 0; --i) pool.emplace_back(work);

  std::exception_ptr stopped;  // by `progress`
  {
    std::unique_lock lock(mutex);
    while (running) {
      finished.wait_for(lock, std::chrono::milliseconds(50), [&] { return running == 0; });
      if (!progress || stopped) continue;
      lock.unlock();
      try {
        progress(done, total);
      } catch (...) {
        stopped = std::current_exception();
        next = pieces_.size();
      }
      lock.lock();
    }
  }
  for (std::thread& t : pool) t.join();
  if (stopped) std::rethrow_exception(stopped);
  if (failure) std::rethrow_exception(failure);
  if (progress) progress(total, total);
  pieces_.clear();
  small_.clear();
}

}  // namespace lily
