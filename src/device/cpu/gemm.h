// out[T, N] = A[T, K] · Wᵀ over packed weights: the body of every prefill projection and expert.
//
// A chunk of rows of A is copied into tiles. A panel of weights, some strips of 32 outputs, is
// expanded once into what an engine multiplies, and meets all tiles while it sits in the L2 cache.
// Threads take panels. What becomes of the sums is for a sink to say.
//
// A sum takes its products in the order of the columns, in a way that only K and the machine
// determine: neither the number of rows nor the place of a row, a tile or a thread matters. Weights
// are exact: they are not rounded to the form of the activations.
#pragma once

#include <algorithm>
#include <span>
#include <type_traits>

#include "device/cpu/gemm_columns.h"
#include "device/cpu/gemm_tiles.h"
#include "device/cpu/gemm_vectors.h"
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

template <class Engine>
struct Panel {
  uint32_t n = 0;
  Strip strips[max_strips];
  typename Engine::Weights left[max_strips], right[max_strips];  // the latter may be missing
};

// Strips first … first + n - 1 of an expert.
template <class Engine>
void expand_panel(const Strips& strips, uint32_t expert, uint32_t first, uint32_t n,
                  Panel<Engine>& panel) {
  const uint32_t K = strips.K(), block_lines = Engine::block_lines(K);
  Line* to = memory().panel.room<Line>(size_t{2} * n * block_lines);
  panel.n = n;
  for (uint32_t s = 0; s < n; ++s, to += 2 * block_lines) {
    const Strip& strip = panel.strips[s] = strips.at(expert, first + s);
    panel.left[s] = Engine::expand(strip.left, K, to);
    panel.right[s] = {};
    if (strip.right.count) panel.right[s] = Engine::expand(strip.right, K, to + block_lines);
  }
}

// All tiles of a group times a panel.
template <class Engine, class Sink>
void multiply_panel(const Engine& engine, const Line* tiles, uint32_t K, const Group& group,
                    const Panel<Engine>& panel, const Sink& sink) {
  // Sinks load whole vectors.
  float* sums = memory().sums.room<float>(Engine::sum_floats(max_strips) + lanes);
  const uint32_t lines = Engine::tile_lines(K);
  for (uint32_t row = 0; row < group.rows; row += Engine::run_rows) {
    const uint32_t rows = std::min(Engine::run_rows, group.rows - row);
    engine.multiply(tiles + size_t{row} * lines, rows, K, panel.left, panel.right, panel.n, sums,
                    [&](uint32_t s, const float* of_strip) {
                      sink(panel.strips[s], group.first + row, rows, of_strip);
                    });
  }
}

// Threads take panels. `tiles_of(group)` gives a group's tiles to the thread that calls it.
template <class Engine, class TilesOf, class Sink>
void multiply_groups(const KernelCall& call, const Strips& strips, std::span<const Group> groups,
                     const TilesOf& tiles_of, const Sink& sink) {
  const uint64_t all = uint64_t{strips.size()} * groups.size();
  const uint64_t shares = uint64_t{call.pool.size()} * 8;  // so many keep the threads balanced
  const uint64_t fit =
      Engine::panel_bytes / (size_t{2} * Engine::block_lines(strips.K()) * sizeof(Line));
  const uint32_t per_panel = static_cast<uint32_t>(
      std::clamp<uint64_t>(std::min(fit, all / shares), 1, max_strips));
  const uint32_t panels = (strips.size() + per_panel - 1) / per_panel;
  const uint32_t items = panels * static_cast<uint32_t>(groups.size());
  const uint32_t grain = std::min<uint32_t>(panels / 2, items / shares);
  call.count(strips.expert_bytes() * groups.size());
  call.pool.parallel_for(items, grain, [&](uint32_t begin, uint32_t end, uint32_t) {
    const Engine engine;
    Panel<Engine> panel;
    const Line* tiles = nullptr;
    for (uint32_t item = begin; item < end; ++item) {
      const Group& group = groups[item / panels];
      const uint32_t first = item % panels * per_panel;
      if (item == begin || first == 0) tiles = tiles_of(group);
      expand_panel(strips, group.expert, first, std::min(per_panel, strips.size() - first), panel);
      multiply_panel(engine, tiles, strips.K(), group, panel, sink);
    }
  });
}

// Calls body with the engine for a type of activations.
template <class ACT, class Body>
void with_engine(const Body& body) {
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<ACT, bf16>)
    if (tiles_usable()) return body(std::type_identity<TileEngine>{});
#endif
  body(std::type_identity<VectorEngine>{});
}

template <class Engine>
uint32_t tiles_for(uint32_t rows) {
  return (rows + Engine::tile_rows - 1) / Engine::tile_rows;
}
template <class Engine>
Line* room_for_tiles(uint32_t rows, uint32_t K) {
  return memory().tiles.room<Line>(size_t{tiles_for<Engine>(rows)} * Engine::tile_rows *
                                   Engine::tile_lines(K));
}

// Fills tiles begin … end - 1 of a group; row_at(r) is where row r of A begins.
template <class ACT, class Engine, class RowAt>
void fill_tiles(Line* tiles, uint32_t K, const Group& group, uint32_t begin, uint32_t end,
                const RowAt& row_at) {
  const size_t lines = size_t{Engine::tile_rows} * Engine::tile_lines(K);
  for (uint32_t i = begin; i < end; ++i) {
    const uint32_t first = i * Engine::tile_rows;
    Engine::template fill_tile<ACT>(tiles + i * lines, K, group.rows - first,
                                    [&](uint32_t r) { return row_at(group.first + first + r); });
  }
}

// Rows of a [T, K]: threads fill the tiles of a chunk together.
template <class ACT, class Sink>
void multiply_dense(const KernelCall& call, const ACT* a, uint32_t T, const Strips& strips,
                    const Sink& sink) {
  with_engine<ACT>([&]<class Engine>(std::type_identity<Engine>) {
    const uint32_t K = strips.K();
    for (uint32_t first = 0; first < T; first += chunk_rows) {
      const Group group{0, std::min(chunk_rows, T - first), first};
      Line* tiles = room_for_tiles<Engine>(group.rows, K);
      call.pool.parallel_for(tiles_for<Engine>(group.rows), 1,
                             [&](uint32_t begin, uint32_t end, uint32_t) {
                               fill_tiles<ACT, Engine>(tiles, K, group, begin, end,
                                                       [&](uint64_t r) { return a + r * K; });
                             });
      multiply_groups<Engine>(call, strips, {&group, 1}, [&](const Group&) { return tiles; }, sink);
    }
  });
}

// Rows offsets[e] … offsets[e + 1] - 1 of the result meet expert e. Each thread fills tiles of its
// own.
template <class ACT, class RowAt, class Sink>
void multiply_grouped(const KernelCall& call, const uint32_t* offsets, const Strips& strips,
                      const RowAt& row_at, const Sink& sink) {
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
  with_engine<ACT>([&]<class Engine>(std::type_identity<Engine>) {
    const auto tiles_of = [&](const Group& group) {
      Line* tiles = room_for_tiles<Engine>(group.rows, strips.K());
      fill_tiles<ACT, Engine>(tiles, strips.K(), group, 0, tiles_for<Engine>(group.rows), row_at);
      return tiles;
    };
    multiply_groups<Engine>(call, strips, {groups, n_groups}, tiles_of, sink);
  });
}

}  // namespace lily::cpu::LILY_ISA
