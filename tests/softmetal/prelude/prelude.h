// The Metal Shading Language as far as lily's kernels use it, for clang-22 in C++ with real address
// spaces. Force-included before every translated source; see ../README.md for what is left out.
#pragma once
#pragma clang system_header

#include "types.h"

#include "../runtime.h"

#include "vectors.h"

#include "math.h"

#include "atomic.h"

#include "simd.h"

#include "matrix.h"

#include "tensor.h"

#include "entry.h"
