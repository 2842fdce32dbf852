#include "runtime.h"

#include "settings.h"

#include <deque>
#include <mutex>
#include <unordered_set>
#include <vector>

namespace fake {

namespace {

constexpr size_t most_shells = 1 << 16;  // of objects that are gone

struct Runtime {
  std::recursive_mutex mutex;
  std::map<std::string, Selector*> selectors;
  std::map<std::string, Class*> classes;
  std::unordered_set<const Object*> live, gone;
  std::deque<Object*> shells;
};

// Never taken down: other libraries' destructors still send messages.
Runtime& runtime() {
  static Runtime* r = new Runtime;
  return *r;
}

thread_local std::vector<std::vector<Object*>> pools;

// What a message to nil gives, as a number, a pointer or a double.
struct Nothing {
  int64_t word = 0;
  double number = 0;
};
Nothing nothing() { return {}; }

std::string name_of(const Object* o) { return o->isa ? o->isa->name : "class"; }

const Method* look_up(Object* o, const Selector* selector) {
  const bool is_class = dynamic_cast<Class*>(o);
  const int system = is_class ? system_version() : o->system;
  for (Class* c : {o->isa, find_class(is_class ? "+NSObject" : "NSObject")}) {
    auto found = c->methods.find(selector);
    if (found != c->methods.end() && found->second.since <= system) return &found->second;
  }
  return nullptr;
}

}  // namespace

Object::Object(const char* class_name)
    : isa(class_name ? find_class(class_name) : nullptr), system(system_version()) {
  std::lock_guard lock(runtime().mutex);
  runtime().live.insert(this);
}

Class::Class(std::string name, Class* meta) : Object(nullptr), name(std::move(name)) { isa = meta; }

Class* find_class(const std::string& name) {
  std::lock_guard lock(runtime().mutex);
  Class*& c = runtime().classes[name];
  if (!c) {
    Class* meta = name[0] == '+' ? nullptr : find_class("+" + name);
    runtime().classes[name] = new Class(name, meta);
  }
  return runtime().classes[name];
}

const Selector* find_selector(const std::string& name) {
  std::lock_guard lock(runtime().mutex);
  Selector*& s = runtime().selectors[name];
  if (!s) s = new Selector{name};
  return s;
}

void add_method(const char* class_name, const char* selector, Method method, bool of_class) {
  Class* c = find_class(class_name);
  (of_class ? c->isa : c)->methods[find_selector(selector)] = std::move(method);
}

Object* retain(Object* o) {
  if (o) ++o->references;
  return o;
}

void release(Object* o) {
  if (!o) return;
  const int64_t left = --o->references;
  if (left > 0) return;
  o->dispose();
  std::lock_guard lock(runtime().mutex);
  Runtime& r = runtime();
  r.live.erase(o);
  r.gone.insert(o);
  r.shells.push_back(o);
  if (r.shells.size() <= most_shells) return;
  r.gone.erase(r.shells.front());
  delete r.shells.front();
  r.shells.pop_front();
}

Object* autorelease(Object* o) {
  if (pools.empty())
    report("leak: " + name_of(o) + " was returned where there is no autorelease pool");
  else
    pools.back().push_back(o);
  return o;
}

uint64_t live_objects() {
  std::lock_guard lock(runtime().mutex);
  return runtime().live.size();
}

std::string describe_methods() {
  std::lock_guard lock(runtime().mutex);
  std::string text;
  for (const auto& [name, c] : runtime().classes)
    for (const auto& [selector, method] : c->methods)
      text += (name[0] == '+' ? name : "-" + name) + " " + selector->name + " " + method.types + "\n";
  return text;
}

namespace {

// A type of a list of them, from `at` on; which then is behind it.
std::string next_type(const std::string& types, size_t& at) {
  const size_t begin = at;
  while (types[at] == 'r' || types[at] == '^') ++at;
  if (types[at++] == '{') at = types.find('}', at) + 1;
  return types.substr(begin, at - begin);
}

struct MethodSignature final : Object {
  explicit MethodSignature(const std::string& all) : Object("NSMethodSignature") {
    for (size_t at = 0; at < all.size();) types.push_back(next_type(all, at));
  }
  std::vector<std::string> types;  // the result's first
};

Object* signature(Object* o, Sel, void* given) {
  const Sel selector = static_cast<Sel>(given);
  const Method* method = look_up(o, selector);
  if (!method) return nullptr;
  return autorelease(new MethodSignature(
      selector == settings().wrong_types ? method->types + "d" : method->types));
}

struct NSObjectMethods {
  NSObjectMethods() {
    add("NSObject", "methodSignatureForSelector:", &signature);
    add("NSObject", "methodSignatureForSelector:",
        +[](Class* c, Sel s, void* given) -> Object* { return signature(c, s, given); });
    add("NSMethodSignature", "numberOfArguments",
        +[](MethodSignature* s, Sel) -> uint64_t { return s->types.size() - 1; });
    add("NSMethodSignature", "getArgumentTypeAtIndex:",
        +[](MethodSignature* s, Sel, uint64_t i) -> const char* { return s->types.at(i + 1).c_str(); });
    add("NSMethodSignature", "methodReturnType",
        +[](MethodSignature* s, Sel) -> const char* { return s->types[0].c_str(); });
    add("NSObject", "retain", +[](Object* o, Sel) -> Object* { return retain(o); });
    add("NSObject", "release", +[](Object* o, Sel) { release(o); });
    add("NSObject", "respondsToSelector:",
        +[](Object* o, Sel, void* s) -> bool { return look_up(o, static_cast<Sel>(s)); });
  }
} const ns_object_methods;

}  // namespace

}  // namespace fake

using namespace fake;

extern "C" {

#define EXPORT __attribute__((visibility("default")))

EXPORT void* sel_registerName(const char* name) {
  return const_cast<Selector*>(find_selector(name));
}

EXPORT void* objc_getClass(const char* name) {
  std::lock_guard lock(runtime().mutex);
  auto found = runtime().classes.find(name);
  if (found == runtime().classes.end()) return nullptr;
  bool there = false;  // on this system
  for (Class* c : {found->second, found->second->isa})
    for (const auto& [selector, method] : c->methods) there |= method.since <= system_version();
  return there ? found->second : nullptr;
}

EXPORT void* objc_autoreleasePoolPush() {
  pools.emplace_back();
  return reinterpret_cast<void*>(pools.size());
}

EXPORT void objc_autoreleasePoolPop(void* pool) {
  if (pools.empty() || reinterpret_cast<void*>(pools.size()) != pool) {
    report("pool: pools do not end in the order in which they began");
    return;
  }
  const std::vector<Object*> objects = std::move(pools.back());
  pools.pop_back();
  for (Object* o : objects) release(o);
}

// Called by objc_msgSend: the function to jump to.
__attribute__((used, visibility("hidden"))) void* fake_look_up(Object* o, Sel selector) {
  const auto none = reinterpret_cast<void*>(&nothing);
  if (!o) return none;
  {
    std::lock_guard lock(runtime().mutex);
    const bool gone = runtime().gone.count(o);
    if (gone || !runtime().live.count(o)) {
      report("use after release: " + selector->name + " sent to " +
             (gone ? "a " + name_of(o) + " that is gone" : "something that is no object"));
      return none;
    }
  }
  if (const Method* method = look_up(o, selector)) return method->function;
  report("unknown selector: " + name_of(o) + " has no " + selector->name + " in macOS " +
         std::to_string(system_version()));
  return none;
}

// Keeps the arguments, asks fake_look_up, and goes on there with the same arguments.
#if defined(__x86_64__)
asm(R"(
.globl objc_msgSend
.type objc_msgSend, @function
objc_msgSend:
  push %rbp
  mov %rsp, %rbp
  sub $176, %rsp
  mov %rdi, -8(%rbp)
  mov %rsi, -16(%rbp)
  mov %rdx, -24(%rbp)
  mov %rcx, -32(%rbp)
  mov %r8, -40(%rbp)
  mov %r9, -48(%rbp)
  movups %xmm0, -64(%rbp)
  movups %xmm1, -80(%rbp)
  movups %xmm2, -96(%rbp)
  movups %xmm3, -112(%rbp)
  movups %xmm4, -128(%rbp)
  movups %xmm5, -144(%rbp)
  movups %xmm6, -160(%rbp)
  movups %xmm7, -176(%rbp)
  call fake_look_up
  mov %rax, %r11
  mov -8(%rbp), %rdi
  mov -16(%rbp), %rsi
  mov -24(%rbp), %rdx
  mov -32(%rbp), %rcx
  mov -40(%rbp), %r8
  mov -48(%rbp), %r9
  movups -64(%rbp), %xmm0
  movups -80(%rbp), %xmm1
  movups -96(%rbp), %xmm2
  movups -112(%rbp), %xmm3
  movups -128(%rbp), %xmm4
  movups -144(%rbp), %xmm5
  movups -160(%rbp), %xmm6
  movups -176(%rbp), %xmm7
  leave
  jmp *%r11
.size objc_msgSend, .-objc_msgSend
)");
#elif defined(__aarch64__)
asm(R"(
.globl objc_msgSend
.type objc_msgSend, %function
objc_msgSend:
  stp x29, x30, [sp, #-224]!
  mov x29, sp
  stp x0, x1, [sp, #16]
  stp x2, x3, [sp, #32]
  stp x4, x5, [sp, #48]
  stp x6, x7, [sp, #64]
  str x8, [sp, #80]
  stp q0, q1, [sp, #96]
  stp q2, q3, [sp, #128]
  stp q4, q5, [sp, #160]
  stp q6, q7, [sp, #192]
  bl fake_look_up
  mov x16, x0
  ldp x0, x1, [sp, #16]
  ldp x2, x3, [sp, #32]
  ldp x4, x5, [sp, #48]
  ldp x6, x7, [sp, #64]
  ldr x8, [sp, #80]
  ldp q0, q1, [sp, #96]
  ldp q2, q3, [sp, #128]
  ldp q4, q5, [sp, #160]
  ldp q6, q7, [sp, #192]
  ldp x29, x30, [sp], #224
  br x16
.size objc_msgSend, .-objc_msgSend
)");
#else
#error "the fake Objective-C runtime knows x86-64 and aarch64"
#endif

}  // extern "C"
