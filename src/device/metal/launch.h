// How many threadgroups and threads a kernel takes, as its constants and params ask.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "metal/contract.h"

namespace lily::metal {

struct Launch {
  uint32_t groups[3];  // none if one of them is 0
  uint32_t threads;    // of each
};

struct LaunchEntry {
  std::string_view kernel;
  Launch (*launch)(const void* constants, const void* params);
};

// {"embed", &typed<Embed, embed>}: a row of a table.
template <class Op, Launch (*f)(const typename Op::Constants&, const typename Op::Params&)>
Launch typed(const void* constants, const void* params) {
  return f(*static_cast<const typename Op::Constants*>(constants),
           *static_cast<const typename Op::Params*>(params));
}

std::span<const LaunchEntry> decode_launches();   // launch_decode.cpp
std::span<const LaunchEntry> prefill_launches();  // launch_prefill.cpp

const LaunchEntry* find_launch(std::string_view kernel);  // null if there is none

}  // namespace lily::metal
