// Runs the C++ tests whose names contain the first argument; all without one.
#include <cstring>

#include "check.h"

int main(int argc, char** argv) {
  int failed = 0;
  for (const auto& test : lily::test::cases()) {
    if (argc > 1 && !std::strstr(test.name, argv[1])) continue;
    try {
      test.body();
      std::printf("ok      %s\n", test.name);
    } catch (const std::exception& e) {
      std::printf("FAILED  %s: %s\n", test.name, e.what());
      ++failed;
    }
    std::fflush(stdout);
  }
  return failed != 0;
}
