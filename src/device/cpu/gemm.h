// out[T, N] = A[T, K] · Wᵀ over packed weights: the body of every prefill projection and expert.
//
// A chunk of rows of A is copied into tiles. A panel of weights, some strips of 32 outputs, is
// expanded once (w = s · c + b, rounded to bf16 where bf16 is multiplied) and meets all tiles while
// it sits in the L2 cache. Threads take panels. What becomes of the sums is for a sink to say.
//
// A sum takes its products in the order of the columns, in a way that only K and the machine
// determine: neither the number of rows nor the place of a row, a tile or a thread matters.
#pragma once

#include <algorithm>
#include <span>
#include <type_traits>

#include "device/cpu/gemm_cells.h"
#include "device/cpu/gemm_columns.h"
#include "device/cpu/gemm_engines.h"
#include "device/cpu/kernels.h"
#include "device/cpu/scratch.h"

namespace lily::cpu::LILY_ISA {

constexpr uint32_t max_strips = 16;   // of a panel
constexpr uint32_t chunk_rows = 512;  // many, since panels are expanded again for each chunk

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
      const uint32_t n = std::min(per_panel, strips.size() - first);
      expand_panel<C>(strips, group.expert, first, n, panel);
      multiply_panel<C>(engine, tiles, lines, group, panel, sink);
    }
  });
}

template <class ACT, class TilesOf, class Sink>
void multiply_groups(const KernelCall& call, const Strips& strips, std::span<const Group> groups,
                     const TilesOf& tiles_of, const Sink& sink) {
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<ACT, bf16>)
    if (tiles_usable())
      return multiply_groups<TileEngine, bf16>(call, strips, groups, tiles_of, sink);
#endif
  multiply_groups<VectorEngine<Cell<ACT>>, Cell<ACT>>(call, strips, groups, tiles_of, sink);
}

template <class ACT>
uint32_t tiles_for(uint32_t rows) {
  return (rows + tile_rows<Cell<ACT>> - 1) / tile_rows<Cell<ACT>>;
}
template <class ACT>
Line* room_for_tiles(uint32_t rows, uint32_t lines) {
  return memory().tiles.room<Line>(size_t{tiles_for<ACT>(rows)} * tile_rows<Cell<ACT>> * lines);
}

// Fills tiles begin … end - 1 of a group; row_at(r) is where row r of A begins.
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
    const uint32_t n = tiles_for<ACT>(group.rows);
    Line* tiles = room_for_tiles<ACT>(group.rows, lines);
    call.pool.parallel_for(n, 1, [&](uint32_t begin, uint32_t end, uint32_t) {
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
