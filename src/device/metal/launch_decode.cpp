// The grids of decode kernels; each kernel's head says the same.
#include <algorithm>

#include "device/metal/launch.h"
#include "metal/attend.h"
#include "metal/attend_merge.h"
#include "metal/attend_project.h"
#include "metal/delta_project.h"
#include "metal/delta_step.h"
#include "metal/experts_down.h"
#include "metal/experts_down_add.h"
#include "metal/experts_project.h"
#include "metal/experts_up.h"
#include "metal/gated_product.h"
#include "metal/grids.h"
#include "metal/head.h"
#include "metal/project_add.h"
#include "metal/route_shared.h"
#include "metal/sample.h"
#include "metal/sample_greedy.h"

namespace lily::metal {

namespace {

constexpr uint32_t lanes = 32;

uint32_t ceil_div(uint32_t n, uint32_t by) { return (n + by - 1) / by; }

// `per` of `n` rows or pairs for each simdgroup.
Launch shared_out(uint32_t n, uint32_t per, uint32_t simdgroups) {
  return {{ceil_div(ceil_div(n, per), simdgroups), 1, 1}, lanes * simdgroups};
}

Launch delta_project(const DeltaProject::Constants& c, const DeltaProject::Params&) {
  return shared_out(c.CHANNELS + c.VALUES + 2 * c.HEADS, LILY_ROWS(c.ROWS, DELTA_PROJECT_ROWS),
                    DELTA_PROJECT_SIMDGROUPS);
}

// A threadgroup for each part of a head's state.
Launch delta_step(const DeltaStep::Constants& c, const DeltaStep::Params&) {
  return {{c.HEADS, c.PARTIALS, 1}, lanes * DELTA_STEP_SIMDGROUPS};
}

Launch project_add(const ProjectAdd::Constants& c, const ProjectAdd::Params&) {
  return shared_out(c.N, LILY_ROWS(c.ROWS, PROJECT_ADD_ROWS), PROJECT_ADD_SIMDGROUPS);
}

Launch attend_project(const AttendProject::Constants& c, const AttendProject::Params&) {
  return shared_out(c.N, LILY_ROWS(c.ROWS, ATTEND_PROJECT_ROWS), ATTEND_PROJECT_SIMDGROUPS);
}

// Parts of each key/value head's query heads × blocks of keys.
Launch attend(const Attend::Constants& c, const Attend::Params& p) {
  const uint32_t heads = c.HEADS / c.KV_HEADS;
  const uint32_t parts = ceil_div(heads, std::min<uint32_t>(heads, c.APART ? 1 : ATTEND_HEADS));
  return {{c.KV_HEADS * parts, c.MERGE ? p.blocks : 1, 1}, lanes * ATTEND_SIMDGROUPS};
}

Launch attend_merge(const AttendMerge::Constants& c, const AttendMerge::Params&) {
  return {{c.HEADS, ceil_div(c.DH, ATTEND_MERGE_COLS), 1}, lanes * ATTEND_MERGE_SIMDGROUPS};
}

// Simdgroups for the logits, then others for the pairs of gate and up.
Launch route_shared(const RouteShared::Constants& c, const RouteShared::Params&) {
  const uint32_t rows = LILY_ROWS(c.ROWS, ROUTE_SHARED_ROWS);
  const uint32_t simdgroups = ceil_div(c.EXPERTS + 1, rows) + ceil_div(c.SHARED, rows / 2);
  return shared_out(simdgroups, 1, ROUTE_SHARED_SIMDGROUPS);
}

// Pairs of gate and up × choices.
Launch experts_up(const ExpertsUp::Constants& c, const ExpertsUp::Params&) {
  Launch launch = shared_out(c.F, LILY_ROWS(c.ROWS, EXPERTS_UP_ROWS) / 2, EXPERTS_UP_SIMDGROUPS);
  launch.groups[1] = c.TOP;
  return launch;
}

Launch experts_down_add(const ExpertsDownAdd::Constants& c, const ExpertsDownAdd::Params&) {
  return shared_out(c.D, LILY_ROWS(c.ROWS, EXPERTS_DOWN_ADD_ROWS), EXPERTS_DOWN_ADD_SIMDGROUPS);
}

// Outputs, which take two rows each if they are gated, × choices.
Launch experts_project(const ExpertsProject::Constants& c, const ExpertsProject::Params&) {
  const uint32_t rows = LILY_ROWS(c.ROWS, EXPERTS_UP_ROWS);
  Launch launch = shared_out(c.F, c.GATED ? rows / 2 : rows, EXPERTS_UP_SIMDGROUPS);
  launch.groups[1] = c.TOP;
  return launch;
}

// An element for each thread.
Launch gated_product(const GatedProduct::Constants& c, const GatedProduct::Params&) {
  return {{ceil_div(c.N, GATED_PRODUCT_THREADS), 1, 1}, GATED_PRODUCT_THREADS};
}

// Rows × choices and the shared expert.
Launch experts_down(const ExpertsDown::Constants& c, const ExpertsDown::Params&) {
  const uint32_t rows = LILY_ROWS(c.ROWS, EXPERTS_DOWN_ADD_ROWS);
  Launch launch = shared_out(c.D, rows, EXPERTS_DOWN_ADD_SIMDGROUPS);
  launch.groups[1] = c.TOP + 1;
  return launch;
}

// A threadgroup for each span of the vocabulary.
Launch head(const Head::Constants& c, const Head::Params&) {
  return {{ceil_div(c.V, HEAD_SPAN(c.V, c.MAXIMA)), 1, 1}, lanes * HEAD_SIMDGROUPS};
}

Launch sample_greedy(const SampleGreedy::Constants&, const SampleGreedy::Params&) {
  return {{1, 1, 1}, SAMPLE_GREEDY_THREADS};
}

Launch sample(const Sample::Constants&, const Sample::Params&) {
  return {{1, 1, 1}, SAMPLE_THREADS};
}

constexpr LaunchEntry launches[] = {
    {"delta_project", &typed<DeltaProject, delta_project>},
    {"delta_step", &typed<DeltaStep, delta_step>},
    {"project_add", &typed<ProjectAdd, project_add>},
    {"attend_project", &typed<AttendProject, attend_project>},
    {"attend", &typed<Attend, attend>},
    {"attend_merge", &typed<AttendMerge, attend_merge>},
    {"route_shared", &typed<RouteShared, route_shared>},
    {"experts_up", &typed<ExpertsUp, experts_up>},
    {"experts_down_add", &typed<ExpertsDownAdd, experts_down_add>},
    {"experts_project", &typed<ExpertsProject, experts_project>},
    {"gated_product", &typed<GatedProduct, gated_product>},
    {"experts_down", &typed<ExpertsDown, experts_down>},
    {"head", &typed<Head, head>},
    {"sample_greedy", &typed<SampleGreedy, sample_greedy>},
    {"sample", &typed<Sample, sample>},
};

}  // namespace

std::span<const LaunchEntry> decode_launches() { return launches; }

}  // namespace lily::metal
