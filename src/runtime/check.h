// Do a device's kernels compile here, and do they compute what another device's do?
#pragma once

#include <string>
#include <vector>

#include "runtime/engine.h"

namespace lily {

// What was found of one kernel, compiled for one set of dimensions.
struct KernelReport {
  std::string name;   // "attend"
  std::string plan;   // the plan that asked for it first: "next_greedy"
  std::string stage;  // and where: "layer.3/attention"
  std::string error;  // empty if all is well
  KernelFacts facts;

  // Of a comparison: dispatches; the largest difference of a slot, over the largest number in it;
  // that slot; the shortest time of a dispatch on the device's clock.
  uint32_t dispatches = 0;
  double difference = 0;
  std::string slot;
  double seconds = 0;
};

// Compiles every kernel that a plan of this configuration asks for. One that fails does not stop
// the others. Reads no weights.
std::vector<KernelReport> compile_kernels(Device&, const Config&, const TensorTable&,
                                          const EngineOptions&);

// Runs every dispatch of every plan on both devices, given the same inputs: what the plan's
// dispatches before it left, random numbers where a session would be bound. Loads the weights on
// both. One that fails does not stop the others: these go on with the reference's results.
std::vector<KernelReport> compare_kernels(Device&, Device& reference, const Config&,
                                          const TensorTable&, const EngineOptions&);

// The largest difference that compare_kernels takes for rounding.
double allowed_difference(Precision);

}  // namespace lily
