// The router's choice made by the host, for plans without gpu_routing: the same contracts as the
// device's kernels.
#pragma once

#include "metal/prefill_scatter.h"
#include "metal/prefill_topk.h"

namespace lily {

void choose_on_host(const PrefillTopk::Host<float>&);
void group_on_host(const PrefillScatter::Host<float>&);

}  // namespace lily
