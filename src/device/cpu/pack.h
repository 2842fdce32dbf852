// Puts the checkpoint's rows into the form of packed.h, and takes them out again for tests.
#pragma once

#include "device/device.h"

namespace lily::cpu {

// Throws ArgumentError if the CPU has no packed form for the specification.
size_t packed_bytes(const PackSpec&);

// Writes the header and zeroes the rows that fill up the last blocks.
void pack_begin(const PackSpec&, std::byte* packed);

// Threads may pack different rows of one weight at the same time.
void pack_rows(std::byte* packed, uint32_t expert, uint32_t segment, uint32_t first_row,
               uint32_t n_rows, const RawRows&);

// One row of a segment as float32 [cols].
void unpack_row(const std::byte* packed, uint32_t expert, uint32_t segment, uint32_t row,
                float* out);

// All its rows, [rows, cols].
void unpack(const std::byte* packed, uint32_t expert, uint32_t segment, float* out);

}  // namespace lily::cpu
