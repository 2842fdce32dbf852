"""What the check has to refuse, each with the line; and its counterpart that it has to accept."""

from __future__ import annotations

import pytest

from softmetal import toolchain
from softmetal.build import CompileError, check

MISSING = toolchain.why_missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

# name: (a wrong line, what the message says, the right line). `p` is a device pointer, `c` a
# constant reference, `s` a threadgroup array, `v` a float.
LINES = {
    "wrong address space": (
        "threadgroup float* q = p;",
        "cannot initialize",
        "device float* q = p;",
    ),
    "from device to thread": (
        "thread float* q = p;",
        "cannot initialize",
        "device float* q = p + 1;",
    ),
    "const dropped": ("device float* q = in;", "cannot initialize", "const device float* q = in;"),
    "write to constant": ("c = 1.0f;", "const-qualified", "v = c;"),
    "unqualified pointer": ("float* q = &v;", "without an address space", "thread float* q = &v;"),
    "unqualified reference": (
        "const float& q = v;",
        "without an address space",
        "const thread float& q = v;",
    ),
    "too many components": (
        "float4 q = float4(v, v, float3(v));",
        "components",
        "float4 q = float4(v, float3(v));",
    ),
    "too few components": (
        "float4 q = float4(v, v);",
        "components",
        "float4 q = float4(v, v, v, v);",
    ),
    "vector to scalar": ("float q = float2(v);", "", "float q = float2(v).x;"),
    "vectors of two sizes": ("float2 q = float4(v).xyz;", "", "float2 q = float4(v).xy;"),
    "implicit bfloat": ("bfloat q = v;", "implicit conversion", "bfloat q = bfloat(v);"),
    "implicit bfloat argument": ("take(v);", "implicit conversion", "take(bfloat(v));"),
    "math on bfloat": ("v = float(exp(bfloat(v)));", "deleted", "v = exp(float(bfloat(v)));"),
    "simd function on bfloat": (
        "v = float(simd_shuffle(bfloat(v), 1));",
        "bfloat",
        "v = simd_shuffle(v, 1);",
    ),
    "mixed types": ("v = max(v, 0);", "ambiguous", "v = max(v, 0.0f);"),
    "mixed integers": ("n = min(n, int(n));", "ambiguous", "n = min(n, uint(n));"),
    "as_type of another size": (
        "n = uint(as_type<ushort>(v));",
        "as_type",
        "n = as_type<uint>(v);",
    ),
    "a double": ("double q = 1.0;", "not in Metal", "float q = 1.0;"),
    "std": ("std::swap(v, v);", "not in Metal", "v = v;"),
    "a lambda": ("auto q = [](float x) { return x; };", "lambda", "auto q = v;"),
    "a lambda that captures": ("v = [&]() { return v; }();", "lambda", "v = v;"),
    "structured binding": ("auto [x, y] = pair; v = x + y;", "C++17", "v = pair.x + pair.y;"),
    "if constexpr": (
        "if constexpr (sizeof(v) == 4) v = 1.0f;",
        "C++17",
        "if (sizeof(v) == 4) v = 1.0f;",
    ),
    "init in if": ("if (uint q = n; q > 1) v = 1.0f;", "C++17", "if (n > 1) v = 1.0f;"),
    "deduced class arguments": ("Box q{v};", "template arguments", "Box<float> q{v};"),
    "designated initialiser": ("Two q = {.x = v, .y = v};", "C++20", "Two q = {v, v};"),
    "threadgroup in a block": (
        "{ threadgroup float t[4]; t[n] = v; }",
        "address space",
        "{ s[n] = v; }",
    ),
    "atomic used plainly": (
        "v = float(*a);",
        "",
        "v = float(atomic_load_explicit(a, memory_order_relaxed));",
    ),
    "64-bit atomic": (
        "threadgroup atomic<ulong>* q = nullptr; atomic_load_explicit(q, memory_order_relaxed);",
        "32 bits",
        "v = 1.0f;",
    ),
    "matrix of another size": (
        "simdgroup_matrix<float, 4, 4> m;",
        "8 by 8",
        "simdgroup_matrix<float, 8, 8> m;",
    ),
    "lane layout": (
        "simdgroup_float8x8 m; v = m.thread_elements()[0];",
        "thread_elements",
        "simdgroup_float8x8 m(v);",
    ),
    "matrix of another type": (
        "simdgroup_half8x8 m; simdgroup_load(m, s);",
        "no matching",
        "simdgroup_float8x8 m; simdgroup_load(m, s);",
    ),
}

# The same for whole functions before the kernel.
FUNCTIONS = {
    "unqualified parameter": (
        "float first(float* q) { return q[0]; }",
        "without an address space",
        "float first(const device float* q) { return q[0]; }",
    ),
    "unqualified reference parameter": (
        "void set(float& q) { q = 1.0f; }",
        "without an address space",
        "void set(thread float& q) { q = 1.0f; }",
    ),
    "unqualified member": (
        "struct View { float* data; };",
        "without an address space",
        "struct View { device float* data; };",
    ),
    "unqualified result": (
        "const float* same(const device float* q);",
        "without an address space",
        "const device float* same(const device float* q);",
    ),
    "by-value buffer": (
        "kernel void other(float q [[buffer(0)]]) {}",
        "not a pointer",
        "kernel void other(constant float& q [[buffer(0)]]) {}",
    ),
    "no attribute": (
        "kernel void other(constant float& q) {}",
        "no attribute",
        "kernel void other(constant float& q [[buffer(3)]]) {}",
    ),
    "buffer index": (
        "kernel void other(constant float& q [[buffer(31)]]) {}",
        "[0, 31)",
        "kernel void other(constant float& q [[buffer(30)]]) {}",
    ),
    "threadgroup in a helper": (
        "void helper() { threadgroup float t[4]; t[0] = 1.0f; }",
        "address space",
        "void helper(threadgroup float* t) { t[0] = 1.0f; }",
    ),
    "late threadgroup": (
        "kernel void other() { float x = 1.0f; threadgroup float t[4]; t[0] = x; }",
        "top of a kernel",
        "kernel void other() { threadgroup float t[4]; float x = 1.0f; t[0] = x; }",
    ),
    "mutable global": ("float global = 1.0f;", "constant", "constant float global = 1.0f;"),
    "nested namespace": ("namespace one::two { }", "C++17", "namespace one { namespace two { } }"),
    "inline variable": ("struct S { static inline int n = 1; };", "C++17", "struct S { int n; };"),
    "fold expression": (
        "template <class... T> int sum(T... t) { return (t + ...); }",
        "C++17",
        "template <class... T> int count(T... t) { return int(sizeof...(t)); }",
    ),
    "two kernels of one name": ("kernel void k() {}", "two kernels", "kernel void k2() {}"),
}

TEMPLATE = """\
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
struct Two {{ float x, y; }};
template <class T> struct Box {{ T value; }};
METAL_FUNC void take(bfloat x) {{ (void)x; }}
{function}
kernel void k(device float* p [[buffer(0)]], const device float* in [[buffer(1)]],
              constant float& c [[buffer(2)]], threadgroup float* given [[threadgroup(0)]],
              threadgroup atomic_uint* a [[threadgroup(1)]], uint n [[thread_position_in_grid]]) {{
  threadgroup float s[64];
  float v = in[n];
  Two pair = {{v, v}};
{line}
  s[n] = given[n] + pair.x;
  p[n] = v;
}}
"""
FUNCTION_LINE, LINE = 7, 14


def _source(*, function: str = "", line: str = "") -> str:
    return TEMPLATE.format(function=function, line=line)


@pytest.mark.parametrize("name", LINES)
def test_statements(name: str) -> None:
    wrong, message, right = LINES[name]
    with pytest.raises(CompileError) as error:
        check(_source(line=wrong))
    assert f"program_source:{LINE}:" in str(error.value)
    assert message in str(error.value)
    check(_source(line=right))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    wrong, message, right = FUNCTIONS[name]
    with pytest.raises(CompileError) as error:
        check(_source(function=wrong))
    assert f"program_source:{FUNCTION_LINE}:" in str(error.value)
    assert message in str(error.value)
    check(_source(function=right))


def test_metal_4_has_lambdas_and_cpp_17() -> None:
    source = _source(line="auto [x, y] = pair; v = [](float q) { return q; }(x + y);")
    check(source, language="metal4.0")
    with pytest.raises(CompileError):
        check(source)


def test_messages_speak_metal() -> None:
    with pytest.raises(CompileError, match="'device float \\*'"):
        check(_source(line="thread float* q = p;"))


def test_warnings_are_returned() -> None:
    assert check(_source()) == ""
    assert "unused variable" in check(_source(line="float unused;"))


def test_lines_of_a_concatenated_source() -> None:
    source = '#line 1 "metal/first.metal"\n\n#line 7 "metal/second.metal"\nfloat* wrong(int x);\n'
    with pytest.raises(CompileError, match=r"metal/second\.metal:7: error: "):
        check(source)
