// Every contract, for the devices' tables, the docs and the tests.
#pragma once

#include <span>

#include "attend.h"
#include "attend_merge.h"
#include "attend_project.h"
#include "delta_project.h"
#include "delta_step.h"
#include "embed.h"
#include "expand_weight.h"
#include "experts_down.h"
#include "experts_down_add.h"
#include "experts_project.h"
#include "experts_up.h"
#include "gated_product.h"
#include "head.h"
#include "prefill_attend.h"
#include "prefill_attend_prep.h"
#include "prefill_attend_project.h"
#include "prefill_combine.h"
#include "prefill_delta_prep.h"
#include "prefill_delta_project.h"
#include "prefill_delta_scan.h"
#include "prefill_experts_down.h"
#include "prefill_experts_up.h"
#include "prefill_gated_norm.h"
#include "prefill_head.h"
#include "prefill_norm.h"
#include "prefill_project_add.h"
#include "prefill_ring.h"
#include "prefill_route.h"
#include "prefill_scatter.h"
#include "prefill_topk.h"
#include "project_add.h"
#include "route_shared.h"
#include "sample.h"
#include "sample_greedy.h"

namespace lily {

inline std::span<const Contract* const> all_contracts() {
  static constexpr const Contract* contracts[] = {
      &Embed::contract,
      &DeltaProject::contract,
      &DeltaStep::contract,
      &ProjectAdd::contract,
      &AttendProject::contract,
      &Attend::contract,
      &AttendMerge::contract,
      &RouteShared::contract,
      &ExpertsUp::contract,
      &ExpertsDownAdd::contract,
      &ExpertsProject::contract,
      &GatedProduct::contract,
      &ExpertsDown::contract,
      &Head::contract,
      &SampleGreedy::contract,
      &Sample::contract,
      &PrefillNorm::contract,
      &PrefillDeltaProject::contract,
      &PrefillDeltaPrep::contract,
      &PrefillRing::contract,
      &PrefillDeltaScan::contract,
      &PrefillGatedNorm::contract,
      &PrefillProjectAdd::contract,
      &PrefillAttendProject::contract,
      &PrefillAttendPrep::contract,
      &PrefillAttend::contract,
      &PrefillRoute::contract,
      &PrefillTopk::contract,
      &PrefillScatter::contract,
      &PrefillExpertsUp::contract,
      &PrefillExpertsDown::contract,
      &PrefillCombine::contract,
      &PrefillHead::contract,
      &ExpandWeight::contract,
  };
  return contracts;
}

}  // namespace lily
