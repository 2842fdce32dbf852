#include "device/metal/costs.h"

#include <algorithm>

#include "metal/prefill_attend.h"
#include "metal/prefill_attend_project.h"
#include "metal/prefill_delta_project.h"
#include "metal/prefill_delta_scan.h"
#include "metal/prefill_experts_down.h"
#include "metal/prefill_experts_up.h"
#include "metal/prefill_head.h"
#include "metal/prefill_project_add.h"
#include "metal/prefill_route.h"

namespace lily::metal {

namespace {

// Rows times the columns and rows of a weight.
double product(double rows, double cols, double outputs) { return 2 * rows * cols * outputs; }

double delta_project(const PrefillDeltaProject::Constants& c, const PrefillDeltaProject::Params& p) {
  return product(p.rows, c.D, c.CHANNELS + c.VALUES + 2 * c.HEADS);
}

double attend_project(const PrefillAttendProject::Constants& c,
                      const PrefillAttendProject::Params& p) {
  return product(p.rows, c.D, c.N);
}

double project_add(const PrefillProjectAdd::Constants& c, const PrefillProjectAdd::Params& p) {
  return product(p.rows, c.K, c.N);
}

double head(const PrefillHead::Constants& c, const PrefillHead::Params& p) {
  return product(p.rows, c.D, c.V);
}

double route(const PrefillRoute::Constants& c, const PrefillRoute::Params& p) {
  return product(p.rows, c.D, c.EXPERTS + 1 + 2 * c.SHARED);
}

double experts_up(const PrefillExpertsUp::Constants& c, const PrefillExpertsUp::Params& p) {
  return product(1.0 * p.rows * c.TOP, c.D, 2 * c.F);
}

double experts_down(const PrefillExpertsDown::Constants& c, const PrefillExpertsDown::Params& p) {
  return product(1.0 * p.rows * c.TOP, c.F, c.D) + product(p.rows, c.SHARED, c.D);
}

// Three products of each row with the state: S k, the update, S q.
double delta_scan(const PrefillDeltaScan::Constants& c, const PrefillDeltaScan::Params& p) {
  return 3 * product(p.rows, 1.0 * c.HEADS * c.DK, c.DV);
}

// Scores and sums of one row over the keys up to the middle row.
double row_of_attend(const PrefillAttend::Constants& c, const PrefillAttend::Params& p) {
  return 2 * product(c.HEADS, c.DH, p.position + p.rows / 2.0);
}

double attend(const PrefillAttend::Constants& c, const PrefillAttend::Params& p) {
  return p.rows * row_of_attend(c, p);
}

struct Entry {
  std::string_view kernel;
  double (*flops)(const void* constants, const void* params);
};

template <class Op, double (*f)(const typename Op::Constants&, const typename Op::Params&)>
double typed(const void* constants, const void* params) {
  return f(*static_cast<const typename Op::Constants*>(constants),
           *static_cast<const typename Op::Params*>(params));
}

constexpr Entry entries[] = {
    {"prefill_delta_project", &typed<PrefillDeltaProject, delta_project>},
    {"prefill_delta_scan", &typed<PrefillDeltaScan, delta_scan>},
    {"prefill_attend_project", &typed<PrefillAttendProject, attend_project>},
    {"prefill_attend", &typed<PrefillAttend, attend>},
    {"prefill_project_add", &typed<PrefillProjectAdd, project_add>},
    {"prefill_route", &typed<PrefillRoute, route>},
    {"prefill_experts_up", &typed<PrefillExpertsUp, experts_up>},
    {"prefill_experts_down", &typed<PrefillExpertsDown, experts_down>},
    {"prefill_head", &typed<PrefillHead, head>},
};

}  // namespace

double flops(const Contract& contract, const void* constants, const void* params) {
  for (const Entry& e : entries)
    if (e.kernel == contract.name) return e.flops(constants, params);
  return 0;
}

uint32_t attention_rows(const Budget& budget, const void* constants, const void* params) {
  const auto& p = *static_cast<const PrefillAttend::Params*>(params);
  const double row =
      row_of_attend(*static_cast<const PrefillAttend::Constants*>(constants), p);
  const double rows = std::max<double>(budget.attention_flops / std::max(row, 1.0),
                                       std::max(budget.attention_rows, 1u));
  return rows < p.rows ? static_cast<uint32_t>(rows) : p.rows;
}

}  // namespace lily::metal
