// Tiles of rows that are grouped by expert. Only Metal reads this header.
#pragma once

// Rows first … first + rows - 1 belong to one expert.
struct GroupedTile {
  uint expert, first, rows;
};

template <uint ROWS>
METAL_FUNC uint tiles_of(uint rows) {
  return (rows + ROWS - 1) / ROWS;
}

// Tile number `tile`, of ROWS rows, counted expert by expert, or false beyond the last. Every
// simdgroup finds it from the offsets, a few experts in each lane: cheaper than a map that someone
// has to write first.
template <uint EXPERTS, uint ROWS>
METAL_FUNC bool find_tile(device const uint* offsets, uint tile, uint lane,
                          thread GroupedTile& found) {
  constexpr uint N = (EXPERTS + 31) / 32;
  uint own = 0;
  for (uint e = N * lane; e < min(N * lane + N, EXPERTS); e++)
    own += tiles_of<ROWS>(offsets[e + 1] - offsets[e]);
  const uint next = simd_prefix_inclusive_sum(own);  // first tile of the next lane
  const uint hit = simd_min(next > tile ? lane : 32u);
  if (hit == 32) return false;

  uint before = next - own;
  uint3 place = uint3(0, 0, 0);  // expert, first row, end
  for (uint e = N * lane; e < min(N * lane + N, EXPERTS); e++) {
    const uint begin = offsets[e], end = offsets[e + 1], n = tiles_of<ROWS>(end - begin);
    if (tile >= before && tile < before + n)
      place = uint3(e, begin + (tile - before) * ROWS, end);
    before += n;
  }
  found.expert = simd_shuffle(place.x, ushort(hit));
  found.first = simd_shuffle(place.y, ushort(hit));
  found.rows = min(simd_shuffle(place.z, ushort(hit)) - found.first, ROWS);
  return true;
}
