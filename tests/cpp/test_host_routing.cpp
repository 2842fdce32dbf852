// The router's choice made by the host.
#include <cmath>
#include <vector>

#include "check.h"
#include "ops/host_routing.h"

namespace lily {
namespace {

TEST(the_host_chooses_the_largest_logits) {
  constexpr uint32_t experts = 5, top = 3;
  const float logits[2][experts + 1] = {{1, 3, 3, -INFINITY, 2, 0}, {NAN, -1, NAN, NAN, -2, 4}};
  uint32_t ids[2][top];
  float shares[2][top + 1];
  void* slots[] = {const_cast<float*>(&logits[0][0]), ids, shares};
  const PrefillTopk::Constants constants{.EXPERTS = experts, .TOP = top};
  const PrefillTopk::Params params{.rows = 2};
  choose_on_host(PrefillTopk::Host<float>(slots, &constants, &params));
  CHECK(ids[0][0] == 1 && ids[0][1] == 2 && ids[0][2] == 4);  // of equals the lower first
  CHECK(ids[1][0] == 1 && ids[1][1] == 4 && ids[1][2] == 0);  // what is no number last
  const float share = 1 / (2 + std::exp(-1.0f));
  CHECK(std::abs(shares[0][0] - share) < 1e-6f && shares[0][1] == shares[0][0]);
  CHECK(std::abs(shares[0][2] - share * std::exp(-1.0f)) < 1e-6f && shares[0][top] == 0.5f);
  CHECK(shares[1][2] == 0 && std::abs(shares[1][top] - 1 / (1 + std::exp(-4.0f))) < 1e-6f);
}

TEST(the_host_groups_rows_by_expert) {
  uint32_t ids[] = {2, 0, 3, 2, 0, 2};  // two of each of three tokens
  uint32_t offsets[5], src[6], inv[6];
  void* slots[] = {ids, offsets, src, inv};
  const PrefillScatter::Constants constants{.EXPERTS = 4, .TOP = 2};
  const PrefillScatter::Params params{.rows = 3};
  group_on_host(PrefillScatter::Host<float>(slots, &constants, &params));
  const std::vector<uint32_t> begins(offsets, offsets + 5), tokens(src, src + 6), rows(inv, inv + 6);
  CHECK((begins == std::vector<uint32_t>{0, 2, 2, 5, 6}));
  CHECK((tokens == std::vector<uint32_t>{0, 2, 0, 1, 2, 1}));
  CHECK((rows == std::vector<uint32_t>{2, 0, 5, 3, 1, 4}));
}

}  // namespace
}  // namespace lily
