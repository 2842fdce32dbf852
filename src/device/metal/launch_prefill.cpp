// The grids of prefill kernels; each kernel's head says the same.
#include <algorithm>

#include "device/metal/launch.h"
#include "metal/expand_weight.h"
#include "metal/grids.h"
#include "metal/prefill_attend.h"
#include "metal/prefill_attend_prep.h"
#include "metal/prefill_attend_project.h"
#include "metal/prefill_combine.h"
#include "metal/prefill_delta_prep.h"
#include "metal/prefill_delta_project.h"
#include "metal/prefill_delta_scan.h"
#include "metal/prefill_experts_down.h"
#include "metal/prefill_experts_up.h"
#include "metal/prefill_gated_norm.h"
#include "metal/prefill_head.h"
#include "metal/prefill_norm.h"
#include "metal/prefill_project_add.h"
#include "metal/prefill_ring.h"
#include "metal/prefill_route.h"
#include "metal/prefill_scatter.h"
#include "metal/prefill_topk.h"

namespace lily::metal {

namespace {

constexpr uint32_t lanes = 32;
constexpr uint32_t row_threads = lanes * PREFILL_SIMDGROUPS;
constexpr uint32_t tile_threads = lanes * PREFILL_TILE_SIMDGROUPS;

uint32_t ceil_div(uint32_t n, uint32_t by) { return (n + by - 1) / by; }

// A simdgroup for each of n.
Launch simdgroups(uint32_t n) { return {{ceil_div(n, PREFILL_SIMDGROUPS), 1, 1}, row_threads}; }

Launch norm(const PrefillNorm::Constants&, const PrefillNorm::Params& p) {
  return simdgroups(p.rows);
}

Launch gated_norm(const PrefillGatedNorm::Constants& c, const PrefillGatedNorm::Params& p) {
  return simdgroups(p.rows * c.HEADS);
}

Launch topk(const PrefillTopk::Constants&, const PrefillTopk::Params& p) {
  return simdgroups(p.rows);
}

// Experts, and one simdgroup for the last offset.
Launch scatter(const PrefillScatter::Constants& c, const PrefillScatter::Params&) {
  return simdgroups(c.EXPERTS + 1);
}

// Four columns for each thread × rows.
Launch combine(const PrefillCombine::Constants& c, const PrefillCombine::Params& p) {
  return {{ceil_div(c.D, 4 * PREFILL_COMBINE_THREADS), p.rows, 1}, PREFILL_COMBINE_THREADS};
}

// A channel for each thread.
Launch ring(const PrefillRing::Constants& c, const PrefillRing::Params&) {
  return {{ceil_div(c.CHANNELS, PREFILL_RING_THREADS), 1, 1}, PREFILL_RING_THREADS};
}

// Heads, then the steps × runs of tokens.
Launch delta_prep(const PrefillDeltaPrep::Constants& c, const PrefillDeltaPrep::Params& p) {
  return {{2 * c.KEY_HEADS + c.HEADS + 1,
           ceil_div(p.rows, PREFILL_DELTA_PREP_TOKENS * PREFILL_SIMDGROUPS), 1},
          row_threads};
}

// Rows of a head's state × heads.
Launch delta_scan(const PrefillDeltaScan::Constants& c, const PrefillDeltaScan::Params&) {
  return {{c.DV / (PREFILL_DELTA_SCAN_ROWS * PREFILL_DELTA_SCAN_SIMDGROUPS), c.HEADS, 1},
          lanes * PREFILL_DELTA_SCAN_SIMDGROUPS};
}

// Heads of queries, keys and values × rows.
Launch attend_prep(const PrefillAttendPrep::Constants& c, const PrefillAttendPrep::Params& p) {
  const uint32_t heads = (c.CACHE_ONLY ? 0 : c.HEADS) + 2 * c.KV_HEADS;
  return {{ceil_div(heads, PREFILL_SIMDGROUPS), p.rows, 1}, row_threads};
}

// Groups of query heads that share a key/value head × blocks of their query rows.
Launch attend(const PrefillAttend::Constants& c, const PrefillAttend::Params& p) {
  const uint32_t sharing = c.APART ? 1 : c.HEADS / c.KV_HEADS;
  return {{c.HEADS / sharing, ceil_div(p.rows * sharing, PREFILL_ATTEND_ROWS), 1},
          lanes * PREFILL_ATTEND_SIMDGROUPS};
}

// Tiles of a product of so many rows and outputs.
Launch tiles(uint32_t rows, uint32_t outputs, uint32_t tile_rows = PREFILL_TILE_ROWS) {
  return {{ceil_div(rows, tile_rows), ceil_div(outputs, PREFILL_TILE_OUTPUTS), 1},
          tile_threads};
}
// A gated tile has so many outputs.
constexpr uint32_t gated_outputs = PREFILL_TILE_OUTPUTS / 2;

Launch delta_project(const PrefillDeltaProject::Constants& c,
                     const PrefillDeltaProject::Params& p) {
  return tiles(p.rows, c.CHANNELS + c.VALUES + 2 * c.HEADS);
}

Launch attend_project(const PrefillAttendProject::Constants& c,
                      const PrefillAttendProject::Params& p) {
  return tiles(p.rows, c.N - c.FIRST / PREFILL_TILE_OUTPUTS * PREFILL_TILE_OUTPUTS);
}

Launch project_add(const PrefillProjectAdd::Constants& c, const PrefillProjectAdd::Params& p) {
  return tiles(p.rows, c.N);
}

Launch head(const PrefillHead::Constants& c, const PrefillHead::Params& p) {
  return tiles(p.rows, c.V);
}

// The logits, then the shared expert.
Launch route(const PrefillRoute::Constants& c, const PrefillRoute::Params& p) {
  Launch launch = tiles(p.rows, c.EXPERTS + 1);
  launch.groups[1] += ceil_div(c.SHARED, gated_outputs);
  return launch;
}

// Tiles of `rows` grouped rows, however the router spreads them: beyond what the rows fill, each
// expert that has some adds one that is not full.
uint32_t most_tiles(uint32_t rows, uint32_t experts, uint64_t tile_rows) {
  return static_cast<uint32_t>((rows + (tile_rows - 1) * std::min(experts, rows)) / tile_rows);
}

Launch experts_up(const PrefillExpertsUp::Constants& c, const PrefillExpertsUp::Params& p) {
  return {{most_tiles(p.rows * c.TOP, c.EXPERTS, c.TILE_ROWS), ceil_div(c.F, gated_outputs), 1},
          tile_threads};
}

// The shared expert's rows, then the grouped ones.
Launch experts_down(const PrefillExpertsDown::Constants& c, const PrefillExpertsDown::Params& p) {
  Launch launch = tiles(p.rows, c.D, c.TILE_ROWS);
  launch.groups[0] += most_tiles(p.rows * c.TOP, c.EXPERTS, c.TILE_ROWS);
  return launch;
}

// Sixteen columns for each thread × experts.
Launch expand_weight(const ExpandWeight::Constants& c, const ExpandWeight::Params&) {
  return {{ceil_div(c.N * (c.K / 16), EXPAND_WEIGHT_THREADS), c.EXPERTS, 1}, EXPAND_WEIGHT_THREADS};
}

constexpr LaunchEntry launches[] = {
    {"prefill_norm", &typed<PrefillNorm, norm>},
    {"prefill_delta_project", &typed<PrefillDeltaProject, delta_project>},
    {"prefill_delta_prep", &typed<PrefillDeltaPrep, delta_prep>},
    {"prefill_ring", &typed<PrefillRing, ring>},
    {"prefill_delta_scan", &typed<PrefillDeltaScan, delta_scan>},
    {"prefill_gated_norm", &typed<PrefillGatedNorm, gated_norm>},
    {"prefill_project_add", &typed<PrefillProjectAdd, project_add>},
    {"prefill_attend_project", &typed<PrefillAttendProject, attend_project>},
    {"prefill_attend_prep", &typed<PrefillAttendPrep, attend_prep>},
    {"prefill_attend", &typed<PrefillAttend, attend>},
    {"prefill_route", &typed<PrefillRoute, route>},
    {"prefill_topk", &typed<PrefillTopk, topk>},
    {"prefill_scatter", &typed<PrefillScatter, scatter>},
    {"prefill_experts_up", &typed<PrefillExpertsUp, experts_up>},
    {"prefill_experts_down", &typed<PrefillExpertsDown, experts_down>},
    {"prefill_combine", &typed<PrefillCombine, combine>},
    {"prefill_head", &typed<PrefillHead, head>},
    {"expand_weight", &typed<ExpandWeight, expand_weight>},
};

}  // namespace

std::span<const LaunchEntry> prefill_launches() { return launches; }

}  // namespace lily::metal
