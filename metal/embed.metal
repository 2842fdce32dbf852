// x[row] = E[tokens[first + row]]
//
// Grid: a threadgroup of EMBED_THREADS for each row. A thread owns runs of 16 columns, which it
// loads at once.
#include "embed.h"
#include "embedding_row.h"
#include "grids.h"

LILY_PACKED(Embed, weight)

kernel void embed(LILY_ARGUMENTS(Embed), uint group [[threadgroup_position_in_grid]],
                  uint index [[thread_index_in_threadgroup]]) {
  EmbeddingRow<Embed_weight> row;
  row.weight = weight;
  row.x = x + ulong(group) * Embed_D;
  row.token = tokens[p.first + group];
  row.thread_index = index;
  row.threads = EMBED_THREADS;
  row.write();
}
