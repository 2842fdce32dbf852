// What `lily doctor` prints of the GPU, and whether the system's methods have the types that objc.h
// says.
#include <cstdio>
#include <cstring>

#include "device/metal/commands.h"
#include "device/metal/device.h"

namespace lily::metal {

namespace {

std::string gigabytes(uint64_t bytes) {
  char text[40];
  std::snprintf(text, sizeof text, "%.2f GB", static_cast<double>(bytes) / 1e9);
  return text;
}

std::string yes(bool is) { return is ? "yes" : "no"; }

// The type at `at` in the runtime's spelling, in one word for all that a call treats alike: an
// object and any pointer are one. `at` moves behind it.
std::string call_type(const char*& at) {
  while (std::strchr("rnNoORVA", *at) && *at) ++at;  // const, in, out, oneway, …
  const char c = *at++;
  if (c == '^') return call_type(at), "pointer";
  if (c == '{') {
    while (*at && *at != '=' && *at != '}') ++at;
    if (*at == '=') ++at;
    std::string fields;
    while (*at && *at != '}') fields += call_type(at) + " ";
    if (*at) ++at;
    return "{" + fields + "}";
  }
  if (c == '@') {
    if (*at == '?') ++at;
    return "pointer";
  }
  if (std::strchr("*:#", c)) return "pointer";
  if (std::strchr("qQ", c)) return "int64";
  if (std::strchr("iIlL", c)) return "int32";
  if (std::strchr("BcC", c)) return "bool";
  return std::string(1, c);
}

std::string listed(const std::string& types) {
  std::string all;
  for (const char* at = types.c_str(); *at;) all += call_type(at) + " ";
  return all;
}

std::string told(const NSMethodSignature* signature) {
  const char* result = signature->methodReturnType();
  std::string all = call_type(result) + " ";
  for (NSUInteger i = 0; i < signature->numberOfArguments(); ++i) {
    const char* type = signature->getArgumentTypeAtIndex(i);
    all += call_type(type) + " ";
  }
  return all;
}

// Methods that lily asks for before it sends them, and classes that came with them.
bool may_be_missing(const objc::Method& m) {
  const std::string_view owner = m.owner, selector = m.selector;
  return owner.starts_with("MTLResidencySet") || selector == "addResidencySet:" ||
         selector.starts_with("newResidencySet") || selector.starts_with("setMath") ||
         selector == "setRequiredThreadsPerThreadgroup:";
}

}  // namespace

std::vector<Finding> MetalDevice::findings() {
  Pool pool;
  std::vector<Finding> list;
  list.push_back({"GPU", text(device_->name())});
  list.push_back({"macOS", text(NSProcessInfo::processInfo()->operatingSystemVersionString())});
  std::string families;
  constexpr std::pair<const char*, NSInteger> known[] = {
      {"Apple7", MTLGPUFamilyApple7}, {"Apple8", MTLGPUFamilyApple8}, {"Apple9", MTLGPUFamilyApple9},
      {"Apple10", MTLGPUFamilyApple10}, {"Metal3", MTLGPUFamilyMetal3},
      {"Metal4", MTLGPUFamilyMetal4}};
  for (const auto& [name, family] : known)
    if (device_->supportsFamily(family)) families.append(families.empty() ? "" : " ").append(name);
  list.push_back({"GPU families", families});
  list.push_back({"GPU architecture", text(device_->architecture()->name())});
  const bool unified = device_->hasUnifiedMemory();
  list.push_back({"unified memory", yes(unified), !unified});
  list.push_back({"GPU working set", gigabytes(device_->recommendedMaxWorkingSetSize())});
  list.push_back({"largest buffer", gigabytes(device_->maxBufferLength())});
  list.push_back({"residency sets",
                  yes(device_->responds(MTLDevice::newResidencySetWithDescriptor_selector))});
  list.push_back({"prefill attention", tier_.half_tiles ? "tiles of half: M1 and M2 emulate bf16"
                                                        : "tiles of bf16"});
  const bool tried = tier_.tensors || tier_.tensors_reason.starts_with("the probe");
  list.push_back({"tensor operations", std::string(tier_.tensors ? "used: " : "not used: ") +
                                           tier_.tensors_reason, tried && !tier_.tensors});
  if (const std::string why = compiler_.fallback(); !why.empty())
    list.push_back({"tensor kernels", "base kernels do instead: " + why, true});

  // One object of each class, to be asked for its methods.
  NSError* error = nullptr;
  const auto options = Ref<MTLCompileOptions>::taking(MTLCompileOptions::make());
  options->setLanguageVersion(MTLLanguageVersion3_1);
  options->setFastMathEnabled(false);
  auto library_of = [&](const char* source) {
    return Ref<MTLLibrary>::taking(
        device_->newLibraryWithSource(string(source), options.get(), &error));
  };
  const auto wrong_library = library_of("not Metal");  // for its error
  NSError* const refused = wrong_library ? nullptr : error;
  const auto library =
      library_of("kernel void nothing(device float* x [[buffer(0)]]) { x[0] = 0.0f; }\n");
  Ref<MTLFunction> function;
  if (library) function = Ref<MTLFunction>::taking(library->newFunctionWithName(string("nothing")));
  Ref<MTLComputePipelineState> pipeline;
  if (function)
    pipeline = Ref<MTLComputePipelineState>::taking(
        device_->newComputePipelineStateWithFunction(function.get(), &error));
  const auto description_of_pipeline =
      Ref<MTLComputePipelineDescriptor>::taking(MTLComputePipelineDescriptor::make());
  const auto buffer = allocate(16, "a look at its methods");
  auto commands = Ref<MTLCommandBuffer>::sharing(queue_->commandBufferWithUnretainedReferences());
  MTLComputeCommandEncoder* encoder =
      commands->computeCommandEncoderWithDispatchType(MTLDispatchTypeConcurrent);
  encoder->endEncoding();
  Ref<MTLResidencySetDescriptor> description;
  Ref<MTLResidencySet> set;
  if (device_->responds(MTLDevice::newResidencySetWithDescriptor_selector)) {
    description = Ref<MTLResidencySetDescriptor>::taking(MTLResidencySetDescriptor::make());
    set = Ref<MTLResidencySet>::taking(
        device_->newResidencySetWithDescriptor(description.get(), &error));
  }
  const std::pair<std::string_view, const NSObject*> objects[] = {
      {"NSObject", device_.get()},
      {"NSMethodSignature", device_->signature("name")},
      {"NSString", string("a")},
      {"NSError", refused},
      {"NSProcessInfo", NSProcessInfo::processInfo()},
      {"MTLCompileOptions", options.get()},
      {"MTLLibrary", library.get()},
      {"MTLComputePipelineDescriptor", description_of_pipeline.get()},
      {"MTLComputePipelineState", pipeline.get()},
      {"MTLBuffer", object_of(*buffer)},
      {"MTLResidencySetDescriptor", description.get()},
      {"MTLResidencySet", set.get()},
      {"MTLComputeCommandEncoder", encoder},
      {"MTLCommandBuffer", commands.get()},
      {"MTLCommandQueue", queue_.get()},
      {"MTLArchitecture", device_->architecture()},
      {"MTLDevice", device_.get()},
  };
  uint32_t asked = 0, absent = 0;
  const size_t before = list.size();
  for (const objc::Method& m : all_methods()) {
    const NSObject* receiver = nullptr;
    for (const auto& [name, object] : objects)
      if (name == m.owner) receiver = object;
    if (m.of_class) receiver = class_named(m.owner);
    const NSMethodSignature* signature = receiver ? receiver->signature(m.selector) : nullptr;
    const std::string message =
        std::string(m.of_class ? "+[" : "-[") + m.owner + " " + m.selector + "]";
    if (!signature) {
      ++absent;
      if (receiver && !may_be_missing(m)) list.push_back({message, "not in this system", true});
      continue;
    }
    ++asked;
    const std::string expected = listed(m.types), found = told(signature);
    if (expected != found)
      list.push_back({message, "takes " + found + "here, expected " + expected, true});
  }
  const bool good = list.size() == before;
  list.insert(list.begin() + static_cast<ptrdiff_t>(before),
              {"messages", std::to_string(asked) + " of the types that lily expects, " +
                               std::to_string(absent) + " that could not be asked for"});
  if (!good) list[before].value = std::to_string(list.size() - before - 1) + " of " +
                                  std::to_string(asked + absent) + " are not as lily expects";
  return list;
}

}  // namespace lily::metal
