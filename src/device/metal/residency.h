// Keeps the device's memory resident while it is in use (macOS 15 and later; before, Metal makes
// resident what a command buffer uses, each time).
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "device/metal/objc.h"

namespace lily::metal {

// The system lets go of a set that lies idle. So a thread asks for it again twice a second, until
// nothing has been committed for three minutes.
class Residency {
 public:
  Residency(MTLDevice* device, MTLCommandQueue* queue);
  ~Residency();
  Residency(const Residency&) = delete;
  Residency& operator=(const Residency&) = delete;

  void add(MTLBuffer*);
  void remove(MTLBuffer*);
  void used();  // work was committed

 private:
  void keep();

  std::mutex mutex_;
  Ref<MTLResidencySet> set_;  // null where there are none
  std::condition_variable changed_;
  std::chrono::steady_clock::time_point last_use_{};
  bool idle_ = true, stop_ = false;
  std::thread keeper_;
};

}  // namespace lily::metal
