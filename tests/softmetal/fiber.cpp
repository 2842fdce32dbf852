#include "fiber.h"

#include <sys/mman.h>

#include <new>

namespace softmetal {

// Only what a called function must keep is saved. A new context's registers are whatever its stack
// held: `prepare` leaves room for them and the address to return to.
#if defined(__x86_64__)
asm(R"(
.text
.globl softmetal_switch
.hidden softmetal_switch
.type softmetal_switch, @function
softmetal_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size softmetal_switch, .-softmetal_switch
)");
constexpr size_t return_word = 6, frame_words = 8;
#elif defined(__aarch64__)
asm(R"(
.text
.globl softmetal_switch
.hidden softmetal_switch
.type softmetal_switch, %function
softmetal_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size softmetal_switch, .-softmetal_switch
)");
constexpr size_t return_word = 11, frame_words = 20;
#else
#error "the switch between fibers is written for x86-64 and aarch64"
#endif

Stacks::Stacks() {
  void* p = mmap(nullptr, stride * max_lanes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<char*>(p);
  // A lane that needs more stack ends the process rather than another lane's variables.
  for (uint32_t lane = 0; lane < max_lanes; ++lane)
    mprotect(base_ + lane * stride, guard, PROT_NONE);
}

Stacks::~Stacks() { munmap(base_, stride * max_lanes); }

void* Stacks::prepare(uint32_t lane, void (*entry)()) {
  // Stacks that all began at one offset would share a few sets of the cache.
  const size_t colour = lane % 64 * 320;
  auto* top = reinterpret_cast<uintptr_t*>(base_ + (lane + 1) * stride - colour);
  uintptr_t* frame = top - frame_words;
  // On x86-64 a function begins with the stack 8 off a multiple of 16, as after a call.
  for (size_t i = 0; i < frame_words; ++i) frame[i] = 0;
  frame[return_word] = reinterpret_cast<uintptr_t>(entry);
  return frame;
}

}  // namespace softmetal
