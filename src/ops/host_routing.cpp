#include "ops/host_routing.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace lily {

void choose_on_host(const PrefillTopk::Host<float>& a) {
  const uint32_t experts = a.c.EXPERTS, top = a.c.TOP;
  std::vector<float> keys(experts);
  std::vector<uint32_t> order(experts);
  for (size_t t = 0; t < a.p.rows; ++t) {
    const float* logits = a.logits + t * (experts + 1);
    uint32_t* ids = a.ids + t * top;
    float* shares = a.shares + t * (top + 1);
    for (uint32_t e = 0; e < experts; ++e)
      keys[e] = std::isnan(logits[e]) ? -INFINITY : logits[e];  // last
    std::iota(order.begin(), order.end(), 0u);
    std::partial_sort(order.begin(), order.begin() + top, order.end(), [&](uint32_t i, uint32_t j) {
      return keys[i] > keys[j] || (keys[i] == keys[j] && i < j);
    });
    std::copy_n(order.begin(), top, ids);
    float sum = 0;
    for (uint32_t i = 0; i < top; ++i) sum += shares[i] = std::exp(keys[ids[i]] - keys[ids[0]]);
    for (uint32_t i = 0; i < top; ++i) shares[i] /= sum;
    shares[top] = 1.0f / (1.0f + std::exp(-logits[experts]));
  }
}

void group_on_host(const PrefillScatter::Host<float>& a) {
  const uint32_t n = a.p.rows * a.c.TOP;
  std::vector<uint32_t> next(a.c.EXPERTS + 1);  // grouped row that an expert's next choice takes
  for (uint32_t i = 0; i < n; ++i) ++next[a.ids[i] + 1];
  std::partial_sum(next.begin(), next.end(), next.begin());
  std::copy(next.begin(), next.end(), a.offsets);
  for (uint32_t i = 0; i < n; ++i) {
    a.inv[i] = next[a.ids[i]]++;
    a.src[a.inv[i]] = i / a.c.TOP;
  }
}

}  // namespace lily
