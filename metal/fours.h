// Four neighbours into a tile in threadgroup memory. Only Metal reads this header.
#pragma once

METAL_FUNC void put4(threadgroup float* to, float4 v) { *(threadgroup float4*)to = v; }
METAL_FUNC void put4(threadgroup half* to, float4 v) { *(threadgroup half4*)to = half4(v); }
METAL_FUNC void put4(threadgroup bfloat* to, float4 v) { *(threadgroup bfloat4*)to = bfloat4(v); }
