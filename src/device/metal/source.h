// The text of a kernel as the Metal compiler gets it.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "device/device.h"

namespace lily::metal {

// A file of metal/, as the build found it; empty if there is none.
std::string_view embedded_file(std::string_view name);

bool has_kernel(std::string_view kernel);

// Dimensions and the forms of weights, as lines of #define.
std::string definitions(const Contract&, std::span<const std::byte> constants, Precision,
                        std::span<const PackSpec* const> weights);

// `<kernel>.metal`, our own headers in place: the Metal compiler is given text and cannot look for
// them. #line keeps its messages true.
std::string kernel_text(std::string_view kernel);

}  // namespace lily::metal
