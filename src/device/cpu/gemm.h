// out[T, N] = A[T, K] · Wᵀ over packed weights: the body of every prefill projection and expert.
//
// A chunk of rows of A is copied into tiles. A panel of weights, some strips of 32 outputs, is
// expanded once (w = s · c + b, rounded to bf16 where bf16 is multiplied) and meets all tiles while
// it sits in the L2 cache. Threads take panels. What becomes of the sums is for a sink to say.
//
// A sum takes its products in the order of the columns, in a way that only K and the machine
// determine: neither the number of rows nor the place of a row, a tile or a thread matters.
//
// Words: a cell is a number of A or W in the form that is multiplied, bf16 or float. A step is four
// bytes of a row of A (two bf16 or one float) times a vector of 16 outputs. A line is 16 steps.
#pragma once

#include <algorithm>
#include <span>
#include <stdexcept>
#include <type_traits>

#include "device/cpu/kernels.h"
#include "device/cpu/packed.h"
#include "device/cpu/scratch.h"
#include "device/cpu/vec.h"

namespace lily::cpu::LILY_ISA {

#if defined(__AVX512BF16__)
template <class ACT>
using Cell = ACT;
#else
template <class ACT>
using Cell = float;
#endif

constexpr uint32_t line_steps = 16;
struct alignas(64) Line {
  uint32_t steps[line_steps];
};
template <class C>
constexpr uint32_t line_cells = sizeof(Line) / sizeof(C);

// Rows of a tile. The vector registers hold the sums of micro_rows of them, or of micro_few if fewer
// are left, times micro_blocks blocks of 16 outputs.
#if defined(__AVX512F__)
template <class C>
constexpr uint32_t tile_rows = sizeof(C) == 2 ? 16 : 12;  // 16 is what the matrix unit takes
template <class C>
constexpr uint32_t micro_rows = sizeof(C) == 2 ? 8 : 12;
constexpr uint32_t micro_few = 4, micro_blocks = 2;
#elif defined(__AVX2__)
template <class C>
constexpr uint32_t tile_rows = 6;
template <class C>
constexpr uint32_t micro_rows = 6;
constexpr uint32_t micro_few = 2, micro_blocks = 1;
#else
template <class C>
constexpr uint32_t tile_rows = 4;
template <class C>
constexpr uint32_t micro_rows = 4;
constexpr uint32_t micro_few = 2, micro_blocks = 1;
#endif

constexpr uint32_t strip_columns = 2 * block_rows;
constexpr uint32_t max_strips = 16;   // of a panel
constexpr uint32_t chunk_rows = 512;  // many, since panels are expanded again for each chunk

// ---- Which columns a kernel makes ----

// Sixteen rows of a weight: sixteen columns of the result, fewer at a segment's end.
struct Block {
  const std::byte* records;
  uint32_t bits, column, count;  // count 0: no block
};

// Two blocks that the inner loops make side by side: neighbours in a segment or, for
// silu(gate) ⊙ up, the same block of two segments.
struct Strip {
  Block left, right;
  bool paired;
};

// All strips of a weight, in order.
class Strips {
 public:
  // The first `plain` segments, one below the other, are columns 0, 1, … of the result. Two more, if
  // there are, make a pair with columns 0, 1, … of its own.
  Strips(const std::byte* packed, uint32_t plain) : header_(packed_header(packed)) {
    for (uint32_t i = 0; i < plain; ++i) {
      const PackedSegment& s = header_.segments[i];
      add({i, i, columns_, 0, (s.blocks + 1) / 2});
      columns_ += s.rows;
    }
    if (header_.n_segments == plain) return;
    if (header_.n_segments != plain + 2) refuse();
    paired_columns_ = header_.segments[plain].rows;
    add({plain, plain + 1, 0, 0, header_.segments[plain].blocks});
  }

  static Strips all_plain(const std::byte* packed) {
    return {packed, packed_header(packed).n_segments};
  }

  // Throws unless the weight is what the kernel's constants say.
  void expect(uint32_t experts, uint32_t K, uint32_t columns, uint32_t paired_columns = 0) const {
    bool same = header_.experts == experts && columns_ == columns && paired_columns_ == paired_columns;
    if (paired_columns) same &= header_.segments[header_.n_segments - 1].rows == paired_columns;
    for (uint32_t i = 0; i < header_.n_segments; ++i) same &= header_.segments[i].cols == K;
    if (!same) refuse();
  }

  uint32_t size() const { return size_; }
  uint32_t K() const { return header_.segments[0].cols; }
  uint32_t experts() const { return header_.experts; }
  uint64_t expert_bytes() const { return header_.expert_bytes; }

  Strip at(uint32_t expert, uint32_t index) const {
    const Range* r = ranges_;
    while (index >= r->first + r->count) ++r;
    const uint32_t i = index - r->first;
    if (r->left != r->right)
      return {block(expert, *r, r->left, i), block(expert, *r, r->right, i), true};
    return {block(expert, *r, r->left, 2 * i), block(expert, *r, r->left, 2 * i + 1), false};
  }

 private:
  [[noreturn]] static void refuse() {
    throw std::logic_error("the weight has other dimensions than the kernel");
  }

  struct Range {
    uint32_t left, right;   // segments
    uint32_t column;        // of the segment's first row
    uint32_t first, count;  // strips
  };

  void add(Range r) {
    r.first = size_;
    size_ += r.count;
    ranges_[n_ranges_++] = r;
  }

  Block block(uint32_t expert, const Range& r, uint32_t segment, uint32_t i) const {
    const PackedSegment& s = header_.segments[segment];
    if (i >= s.blocks) return {nullptr, 0, 0, 0};
    const uint32_t row = i * block_rows;
    return {header_.block(expert, segment, i), s.bits, r.column + row,
            std::min(block_rows, s.rows - row)};
  }

  const PackedHeader& header_;
  Range ranges_[max_segments];
  uint32_t n_ranges_ = 0, size_ = 0, columns_ = 0, paired_columns_ = 0;
};

// ---- Sinks: called with a strip and its sums [rows][32] for rows `row` … of the result ----

template <class T>
LILY_INLINE F get(const T* p, uint32_t n) {
  return n == lanes ? load(p) : load_first(p, static_cast<int>(n));
}
template <class T>
LILY_INLINE void put(T* p, F a, uint32_t n) {
  if (n == lanes) return store(p, a);
  store_first(p, a, static_cast<int>(n));
}

// Columns first … end - 1 of a result, in an array of their own.
template <class T>
struct Columns {
  T* out;
  uint64_t stride;
  uint32_t first, end;

  void operator()(const Strip& strip, uint64_t row, uint32_t rows, const float* sums) const {
    const Part left = part(strip.left), right = part(strip.right);
    T* to = out + row * stride;
    for (uint32_t r = 0; r < rows; ++r, to += stride, sums += strip_columns) {
      if (left.n) put(to + left.to, load(sums + left.from), left.n);
      if (right.n) put(to + right.to, load(sums + block_rows + right.from), right.n);
    }
  }

 private:
  struct Part {
    uint32_t from, to, n;  // lanes from … of a block are columns to … of the array
  };
  Part part(const Block& b) const {
    const uint32_t low = std::max(b.column, first), high = std::min(b.column + b.count, end);
    if (low >= high) return {0, 0, 0};
    return {low - b.column, low - first, high - low};
  }
};

// x += the sums.
struct AddTo {
  float* x;
  uint64_t stride;

  void operator()(const Strip& strip, uint64_t row, uint32_t rows, const float* sums) const {
    float* to = x + row * stride;
    for (uint32_t r = 0; r < rows; ++r, to += stride, sums += strip_columns) {
      add(to + strip.left.column, sums, strip.left.count);
      if (strip.right.count) add(to + strip.right.column, sums + block_rows, strip.right.count);
    }
  }

 private:
  static void add(float* to, const float* sums, uint32_t n) { put(to, get(to, n) + load(sums), n); }
};

// silu(left) ⊙ right of paired strips.
template <class T>
struct Gated {
  T* out;
  uint64_t stride;

  void operator()(const Strip& strip, uint64_t row, uint32_t rows, const float* sums) const {
    T* to = out + row * stride + strip.left.column;
    for (uint32_t r = 0; r < rows; ++r, to += stride, sums += strip_columns)
      put(to, silu(load(sums)) * load(sums + block_rows), strip.left.count);
  }
};

// ---- Rows of A as tiles: [lines][tile_rows] lines, rows beyond the last one zero ----

LILY_INLINE void copy_line(Line* to, const float* from) { store(reinterpret_cast<float*>(to), load(from)); }
LILY_INLINE void copy_line(Line* to, const bf16* from) {
#if defined(__AVX512BF16__)
  std::memcpy(to, from, sizeof(Line));
#else
  store(reinterpret_cast<float*>(to), load(from));
#endif
}

// `row_at(r)` is where row r begins.
template <class ACT, class RowAt>
void fill_tile(Line* tile, uint32_t lines, uint32_t rows, const RowAt& row_at) {
  using C = Cell<ACT>;
  for (uint32_t r = 0; r < tile_rows<C>; ++r) {
    Line* to = tile + r;
    if (r >= rows) {
      for (uint32_t l = 0; l < lines; ++l) to[l * tile_rows<C>] = Line{};
      continue;
    }
    const ACT* from = row_at(r);
    for (uint32_t l = 0; l < lines; ++l) copy_line(to + l * tile_rows<C>, from + l * line_cells<C>);
  }
}

// ---- Weights as cells: for each block [steps] lines, a line for 16 outputs ----

template <uint32_t bits>
LILY_INLINE F code(U words, int shift) {
  if constexpr (bits == 4) return code4(words, shift);
  if constexpr (bits == 8) return code8(words, shift);
  return shift == 0 ? low_half(words) : high_half(words);
}

// An even column and the odd one after it: 32 cells.
LILY_INLINE void store_cells(float* to, F even, F odd) {
  store(to, even);
  store(to + lanes, odd);
}
#if defined(__AVX512BF16__)
LILY_INLINE void store_cells(bf16* to, F even, F odd) { store_pairs(to, even, odd); }
#endif

template <uint32_t bits, class C>
void expand(const std::byte* record, uint32_t groups, C* to) {
  constexpr uint32_t words = group_cols * bits / 32, pairs = 16 / bits;
  for (uint32_t g = 0; g < groups; ++g, record += record_bytes(bits)) {
    const bf16* scales = reinterpret_cast<const bf16*>(record + words * sizeof(Line));
    const F scale = bits == 16 ? zero() : load(scales);
    const F bias = bits == 16 ? zero() : load(scales + block_rows);
#pragma GCC unroll 8
    for (uint32_t j = 0; j < words; ++j, to += pairs * 2 * lanes) {
      const std::byte* word = record + j * sizeof(Line);
      __builtin_prefetch(word + 2048);  // farther than the processor looks ahead by itself
      const U w = load_words(word);
#pragma GCC unroll 4
      for (uint32_t i = 0; i < pairs; ++i) {
        const int shift = static_cast<int>(i * bits);
        F even = code<bits>(w, shift), odd = code<bits>(w, shift + 16);
        if constexpr (bits != 16) {
          even = fma(even, scale, bias);
          odd = fma(odd, scale, bias);
        }
        store_cells(to + i * 2 * lanes, even, odd);
      }
    }
  }
}

// A block's cells: in `memory` or, where its packed form is just that, in place.
template <class C>
const Line* cells(const Block& b, uint32_t groups, Line* memory) {
  if constexpr (std::is_same_v<C, bf16>)
    if (b.bits == 16) return reinterpret_cast<const Line*>(b.records);
  C* to = reinterpret_cast<C*>(memory);
  if (b.bits == 4) expand<4>(b.records, groups, to);
  if (b.bits == 8) expand<8>(b.records, groups, to);
  if constexpr (std::is_same_v<C, float>)
    if (b.bits == 16) expand<16>(b.records, groups, to);
  return memory;
}

// ---- The products ----

// Some lines of a few rows times the same columns of a strip.
struct Run {
  const Line* tile;     // the first row's tile, at the run's first line
  size_t tile_lines;    // from one tile to the next
  uint32_t rows;
  const Line* left;     // the blocks, at the run's first step
  const Line* right;    // or nullptr
  uint32_t lines;
  bool first;   // sums begin here
  float* sums;  // [rows][32]
};

LILY_INLINE F weights(const float* p) { return load(p); }
LILY_INLINE F spread(const float* p) { return set1(*p); }
LILY_INLINE F multiply_add(F a, F w, F sum) { return fma(a, w, sum); }
#if defined(__AVX512BF16__)
LILY_INLINE P weights(const bf16* p) { return as_pairs(load_words(p).v); }
LILY_INLINE P spread(const bf16* p) { return set1_pair(p); }
LILY_INLINE F multiply_add(P a, P w, F sum) { return dot(a, w, sum); }
#endif

// n_rows rows, their sums in registers. Each run sums up by itself before it joins the others: long
// sums in float32 stay exact to less than 1e-6 that way.
template <class C, uint32_t n_rows>
LILY_INLINE void multiply_micro(const Line* tile, const Line* const* blocks, uint32_t lines,
                                bool first, float* sums) {
  F sum[n_rows][micro_blocks];
  for (auto& row : sum)
    for (F& s : row) s = zero();
  for (uint32_t l = 0; l < lines; ++l) {
    for (uint32_t step = 0; step < line_steps; ++step) {
      decltype(weights(static_cast<const C*>(nullptr))) w[micro_blocks];
      for (uint32_t b = 0; b < micro_blocks; ++b)
        w[b] = weights(reinterpret_cast<const C*>(blocks[b] + l * line_steps + step));
#pragma GCC unroll 12
      for (uint32_t r = 0; r < n_rows; ++r) {
        const auto a = spread(reinterpret_cast<const C*>(tile[l * tile_rows<C> + r].steps + step));
        for (uint32_t b = 0; b < micro_blocks; ++b) sum[r][b] = multiply_add(a, w[b], sum[r][b]);
      }
    }
  }
  for (uint32_t r = 0; r < n_rows; ++r)
    for (uint32_t b = 0; b < micro_blocks; ++b) {
      float* to = sums + r * strip_columns + b * block_rows;
      store(to, first ? sum[r][b] : load(to) + sum[r][b]);
    }
}

template <class C>
struct VectorEngine {
  static constexpr uint32_t rows = tile_rows<C>;  // of a run
  static constexpr uint32_t lines = 8;            // of a run: a tile's stay in the L1 cache
  static constexpr size_t panel_bytes = size_t{512} << 10;

  void multiply(const Run& run) const {
    for (uint32_t b = 0; b < (run.right ? 2 : 1); b += micro_blocks) {
      const Line* blocks[] = {b == 0 ? run.left : run.right, run.right ? run.right : run.left};
      float* sums = run.sums + b * block_rows;
      uint32_t r = 0;
      for (; r + micro_rows<C> <= run.rows; r += micro_rows<C>)
        multiply_micro<C, micro_rows<C>>(run.tile + r, blocks, run.lines, run.first,
                                         sums + r * strip_columns);
      for (; r < run.rows; r += micro_few)
        multiply_micro<C, micro_few>(run.tile + r, blocks, run.lines, run.first,
                                     sums + r * strip_columns);
    }
  }
};

}  // namespace lily::cpu::LILY_ISA

#include "device/cpu/gemm_amx.h"

namespace lily::cpu::LILY_ISA {

// ---- Panels, groups, threads ----

// Rows first … of A that meet the weights of one expert.
struct Group {
  uint32_t expert, rows;
  uint64_t first;
};

struct Memory {
  Scratch groups, tiles, panel, sums;
};
inline Memory& memory() {
  thread_local Memory of_thread;
  return of_thread;
}

struct Panel {
  uint32_t n = 0;
  Strip strips[max_strips];
  const Line* left[max_strips];
  const Line* right[max_strips];  // or nullptr
};

// Strips first … first + n - 1 of an expert.
template <class C>
void expand_panel(const Strips& strips, uint32_t expert, uint32_t first, uint32_t n, Panel& panel) {
  const uint32_t groups = strips.K() / group_cols;
  const size_t block_lines = size_t{strips.K()} * sizeof(C) / 4;
  Line* to = memory().panel.room<Line>(2 * n * block_lines);
  panel.n = n;
  for (uint32_t s = 0; s < n; ++s, to += 2 * block_lines) {
    const Strip& strip = panel.strips[s] = strips.at(expert, first + s);
    panel.left[s] = cells<C>(strip.left, groups, to);
    panel.right[s] = strip.right.count ? cells<C>(strip.right, groups, to + block_lines) : nullptr;
  }
}

// All tiles of a group times a panel.
template <class C, class Engine, class Sink>
void multiply_panel(const Engine& engine, const Line* tiles, uint32_t lines, const Group& group,
                    const Panel& panel, const Sink& sink) {
  constexpr size_t strip_sums = Engine::rows * strip_columns;
  float* sums = memory().sums.room<float>(max_strips * strip_sums + lanes);  // sinks load vectors
  for (uint32_t row = 0; row < group.rows; row += Engine::rows) {
    const uint32_t rows = std::min(Engine::rows, group.rows - row);
    for (uint32_t line = 0; line < lines; line += Engine::lines)
      for (uint32_t s = 0; s < panel.n; ++s) {
        const size_t step = size_t{line} * line_steps;
        const Run run{tiles + size_t{row} * lines + line * tile_rows<C>,
                      size_t{tile_rows<C>} * lines,
                      rows,
                      panel.left[s] + step,
                      panel.right[s] ? panel.right[s] + step : nullptr,
                      std::min(Engine::lines, lines - line),
                      line == 0,
                      sums + s * strip_sums};
        engine.multiply(run);
        if (line + run.lines == lines) sink(panel.strips[s], group.first + row, rows, run.sums);
      }
  }
}

// Threads take panels. `tiles_of(group)` gives a group's tiles to the thread that calls it.
template <class Engine, class C, class TilesOf, class Sink>
void multiply_groups(const KernelCall& call, const Strips& strips, std::span<const Group> groups,
                     const TilesOf& tiles_of, const Sink& sink) {
  const uint32_t lines = strips.K() / line_cells<C>;
  const uint64_t all = uint64_t{strips.size()} * groups.size();
  const uint64_t shares = uint64_t{call.pool.size()} * 8;  // so many keep the threads balanced
  const uint64_t fit = Engine::panel_bytes / (size_t{lines} * line_steps * 2 * sizeof(Line));
  const uint32_t per_panel = static_cast<uint32_t>(
      std::clamp<uint64_t>(std::min(fit, all / shares), 1, max_strips));
  const uint32_t panels = (strips.size() + per_panel - 1) / per_panel;
  const uint32_t items = panels * static_cast<uint32_t>(groups.size());
  const uint32_t grain = std::min<uint32_t>(panels / 2, items / shares);
  call.count(strips.expert_bytes() * groups.size());
  call.pool.parallel_for(items, grain, [&](uint32_t begin, uint32_t end, uint32_t) {
    const Engine engine;
    Panel panel;
    const Line* tiles = nullptr;
    for (uint32_t item = begin; item < end; ++item) {
      const Group& group = groups[item / panels];
      const uint32_t first = item % panels * per_panel;
      if (item == begin || first == 0) tiles = tiles_of(group);
      expand_panel<C>(strips, group.expert, first, std::min(per_panel, strips.size() - first), panel);
      multiply_panel<C>(engine, tiles, lines, group, panel, sink);
    }
  });
}

template <class ACT, class TilesOf, class Sink>
void multiply_groups(const KernelCall& call, const Strips& strips, std::span<const Group> groups,
                     const TilesOf& tiles_of, const Sink& sink) {
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<ACT, bf16>)
    if (tiles_usable()) return multiply_groups<TileEngine, bf16>(call, strips, groups, tiles_of, sink);
#endif
  multiply_groups<VectorEngine<Cell<ACT>>, Cell<ACT>>(call, strips, groups, tiles_of, sink);
}

// ---- What kernels call ----

template <class ACT>
uint32_t tiles_for(uint32_t rows) {
  return (rows + tile_rows<Cell<ACT>> - 1) / tile_rows<Cell<ACT>>;
}
template <class ACT>
Line* room_for_tiles(uint32_t rows, uint32_t lines) {
  return memory().tiles.room<Line>(size_t{tiles_for<ACT>(rows)} * tile_rows<Cell<ACT>> * lines);
}

// Fills the tiles of a group from tile `begin` to before `end`; row_at(r) is where row r of A begins.
template <class ACT, class RowAt>
void fill_tiles(Line* tiles, uint32_t lines, const Group& group, uint32_t begin, uint32_t end,
                const RowAt& row_at) {
  constexpr uint32_t of_tile = tile_rows<Cell<ACT>>;
  for (uint32_t i = begin; i < end; ++i)
    fill_tile<ACT>(tiles + size_t{i} * of_tile * lines, lines, group.rows - i * of_tile,
                   [&](uint32_t r) { return row_at(group.first + i * of_tile + r); });
}

// Rows of a [T, K]: threads fill the tiles of a chunk together.
template <class ACT, class Sink>
void multiply_dense(const KernelCall& call, const ACT* a, uint32_t T, const Strips& strips,
                    const Sink& sink) {
  const uint32_t K = strips.K(), lines = K / line_cells<Cell<ACT>>;
  for (uint32_t first = 0; first < T; first += chunk_rows) {
    const Group group{0, std::min(chunk_rows, T - first), first};
    Line* tiles = room_for_tiles<ACT>(group.rows, lines);
    call.pool.parallel_for(tiles_for<ACT>(group.rows), 1, [&](uint32_t begin, uint32_t end, uint32_t) {
      fill_tiles<ACT>(tiles, lines, group, begin, end, [&](uint64_t r) { return a + r * K; });
    });
    multiply_groups<ACT>(call, strips, {&group, 1}, [&](const Group&) { return tiles; }, sink);
  }
}

// Rows offsets[e] … offsets[e + 1] - 1 of the result meet expert e. Each thread fills tiles of its
// own.
template <class ACT, class RowAt, class Sink>
void multiply_grouped(const KernelCall& call, const uint32_t* offsets, const Strips& strips,
                      const RowAt& row_at, const Sink& sink) {
  const uint32_t lines = strips.K() / line_cells<Cell<ACT>>;
  uint32_t n_groups = 0;
  for (uint32_t e = 0; e < strips.experts(); ++e)
    n_groups += (offsets[e + 1] - offsets[e] + chunk_rows - 1) / chunk_rows;
  Group* groups = memory().groups.room<Group>(n_groups);
  Group* group = groups;
  for (uint32_t e = 0; e < strips.experts(); ++e)
    for (uint32_t first = offsets[e]; first < offsets[e + 1]; ++group) {
      *group = {e, std::min(chunk_rows, offsets[e + 1] - first), first};
      first += group->rows;
    }
  const auto tiles_of = [&](const Group& group) {
    Line* tiles = room_for_tiles<ACT>(group.rows, lines);
    fill_tiles<ACT>(tiles, lines, group, 0, tiles_for<ACT>(group.rows), row_at);
    return tiles;
  };
  multiply_groups<ACT>(call, strips, {groups, n_groups}, tiles_of, sink);
}

}  // namespace lily::cpu::LILY_ISA
