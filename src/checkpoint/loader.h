// Streams a checkpoint's tensors into device buffers: file → pack → place.
//
// The model declares its weights twice. The first time measures: every tensor has a size and no
// memory. Then allocate() makes one device buffer for each part of the model, and the second
// declaration hands out places in them and notes what to read. read() fills them.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/table.h"
#include "graph/tensor.h"

namespace lily {

struct MatrixPart {
  std::string module;
  uint32_t rows, cols;
};

class Loader {
 public:
  // To measure, the table needs only the modules' formats.
  Loader(Device& device, const TensorTable& table) : device_(device), table_(table) {}

  // The tensors declared next share one buffer.
  void buffer(const std::string& label);

  // float32 vectors. A norm weight is 1 + w in the published form.
  Tensor norm(const std::string& name, uint32_t n);
  Tensor vector(const std::string& name, uint32_t n);
  Tensor conv(const std::string& name, uint32_t channels, uint32_t taps);
  Tensor decay(const std::string& a_log, const std::string& dt_bias, uint32_t heads);
  Tensor constants(std::vector<float> values);

  // Matrices one below the other, each in its own format.
  Tensor matrix(const std::vector<MatrixPart>& parts);
  // The same for each of `experts` experts; gate and up (or down) of the published form are found
  // in its fused tensors.
  Tensor experts(const std::vector<MatrixPart>& parts, uint32_t experts);

  size_t bytes() const;  // of all buffers declared so far
  void allocate();

  using Progress = std::function<void(uint64_t done, uint64_t total)>;
  // Reads and packs everything with `threads` threads. `progress` is called now and then from the
  // calling thread; when it throws, reading stops and the exception passes on.
  void read(uint32_t threads, const Progress& progress);

  std::vector<std::shared_ptr<Buffer>> take_buffers() { return std::move(buffers_); }

 private:
  // Rows of one expert's segment: where they are in the files, and where they go.
  struct Piece {
    std::shared_ptr<const PackSpec> spec;
    std::byte* packed;
    uint32_t expert, segment, first_row, n_rows;
    uint32_t file, scales_file, biases_file;
    uint64_t weight, scales, biases;  // offsets; the last two are not used for 16 bits
    size_t weight_row_bytes, scales_row_bytes;

    size_t bytes() const { return n_rows * (weight_row_bytes + 2 * scales_row_bytes); }
  };
  using Fill = std::function<void(std::span<const std::vector<float>> inputs, float* out)>;

  Tensor place(size_t bytes, SlotType type, Shape shape);
  Tensor floats(const std::vector<std::string>& names, uint32_t n_each, Shape shape, Fill fill);
  Tensor packed(const std::vector<MatrixPart>& parts, uint32_t experts, bool fused);
  void check_matrix(const MatrixPart&, const Format&, uint32_t experts) const;
  std::vector<float> read_floats(const std::string& name) const;
  bool placing() const { return placing_; }

  Device& device_;
  const TensorTable& table_;
  bool placing_ = false;
  size_t current_ = 0;  // buffer being filled
  std::vector<std::string> labels_;
  std::vector<size_t> sizes_, used_;
  std::vector<std::shared_ptr<Buffer>> buffers_;
  std::vector<std::function<void()>> small_;  // vectors, read first
  std::vector<Piece> pieces_;
};

}  // namespace lily
