// The exceptions that C++ throws; the bindings turn each into the Python class of the same name.
#pragma once

#include <stdexcept>
#include <string>

namespace lily {

// One sentence, no final period: where, what, expected, found; then an optional "hint:" line.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct CheckpointError : Error {
  using Error::Error;
};
struct DeviceError : Error {
  using Error::Error;
};
struct ContextError : Error {
  using Error::Error;
};
// A broken promise inside lily, never the caller's fault.
struct InternalError : Error {
  using Error::Error;
};
// A bad argument; Python sees ValueError.
struct ArgumentError : Error {
  using Error::Error;
};
// The caller asked for a stop; the state is as it was before the interrupted step.
struct Cancelled : Error {
  using Error::Error;
};

}  // namespace lily

#define LILY_CHECK(condition)                                                              \
  do {                                                                                     \
    if (!(condition))                                                                      \
      throw ::lily::InternalError(std::string(__FILE__ ":") + std::to_string(__LINE__) +   \
                                  ": expected " #condition);                               \
  } while (0)
