// The smallest test frame that does: named cases, CHECK, a line for each.
#pragma once

#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace lily::test {

struct Case {
  const char* name;
  std::function<void()> body;
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Register {
  Register(const char* name, std::function<void()> body) { cases().push_back({name, body}); }
};

template <class E>
bool throws(const std::function<void()>& body, const std::string& part) {
  try {
    body();
  } catch (const E& e) {
    if (std::string(e.what()).find(part) != std::string::npos) return true;
    std::printf("  said: %s\n", e.what());
  }
  return false;
}

}  // namespace lily::test

#define TEST(name)                                                \
  static void name();                                             \
  static ::lily::test::Register register_##name(#name, name);     \
  static void name()

#define CHECK(condition)                                                                  \
  do {                                                                                    \
    if (!(condition))                                                                     \
      throw std::runtime_error(std::string(__FILE__ ":") + std::to_string(__LINE__) +     \
                               ": " #condition);                                          \
  } while (0)
