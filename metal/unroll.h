// Only Metal reads this header.
#pragma once

// Before a loop over a lane's array: unrolled, the array stays in registers.
#define LILY_UNROLL _Pragma("clang loop unroll(full)")
