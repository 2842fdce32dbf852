// A small Objective-C runtime: classes with methods, messages, reference counts, pools.
//
// What would crash or leak in the real one is a report: a selector that is not there, a message to
// an object that is gone, a release too many, an object left to a pool that is not there.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <type_traits>

namespace fake {

struct Class;

struct Object {
  explicit Object(const char* class_name);
  virtual ~Object() = default;
  virtual void dispose() {}  // the last reference is gone; the shell stays to be found out

  Class* isa;
  std::atomic<int64_t> references{1};
  const int system;  // where it was made; another test's device may live on in an older one
};

struct Selector {
  std::string name;
};

struct Method {
  void* function;
  std::string types;
  int since;  // the macOS that has it
};

struct Class final : Object {
  explicit Class(std::string name, Class* meta);

  std::string name;
  int since = 0;
  std::map<const Selector*, Method> methods;
};

Class* find_class(const std::string& name);  // made if it is not there
const Selector* find_selector(const std::string& name);

Object* retain(Object*);
void release(Object*);
Object* autorelease(Object*);

void report(std::string text);
int system_version();
uint64_t live_objects();

// A type as the runtime writes it.
template <class T>
std::string type_code() {
  if constexpr (std::is_void_v<T>) return "v";
  else if constexpr (std::is_same_v<T, bool>) return "B";
  else if constexpr (std::is_same_v<T, double>) return "d";
  else if constexpr (std::is_same_v<T, int64_t>) return "q";
  else if constexpr (std::is_same_v<T, uint64_t>) return "Q";
  else if constexpr (std::is_same_v<T, const char*>) return "r*";
  else if constexpr (std::is_same_v<T, const void*>) return "r^v";
  else if constexpr (std::is_same_v<T, void*>) return "^v";
  else if constexpr (std::is_class_v<T>) return T::type_code;
  else if constexpr (std::is_pointer_v<std::remove_pointer_t<T>>) return "^@";
  else return "@";
}

using Sel = const Selector*;

void add_method(const char* class_name, const char* selector, Method method, bool of_class);

// add("MTLBuffer", "contents", +[](Buffer* self, Sel) -> void* { return self->memory; });
template <class R, class Self, class... P>
void add(const char* class_name, const char* selector, R (*f)(Self*, Sel, P...), int since = 0) {
  const std::string types = type_code<R>() + "@:" + (std::string() + ... + type_code<P>());
  add_method(class_name, selector, {reinterpret_cast<void*>(f), types, since},
             std::is_same_v<Self, Class>);
}

}  // namespace fake
