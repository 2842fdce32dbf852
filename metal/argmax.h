// The largest of some values, the lowest index on ties. Only Metal reads this header.
#pragma once

#define LILY_NO_INDEX 0xffffffffu

struct Best {
  float value;
  uint index;

  // In falling order of value, then in rising order of index. False where a value is not a number.
  METAL_FUNC bool before(Best other) const thread {
    return value > other.value || (value == other.value && index < other.index);
  }
};

// The first of the simdgroup's, in every lane. Values must be numbers.
METAL_FUNC Best simd_best(Best mine) {
  Best best;
  best.value = simd_max(mine.value);
  best.index = simd_min(mine.value == best.value ? mine.index : LILY_NO_INDEX);
  return best;
}
