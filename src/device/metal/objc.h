// Metal by way of the Objective-C runtime, in plain C++: each class, selector and signature that
// lily uses, once. A method here is a typed call of objc_msgSend:
//
//   Ref<MTLBuffer> b = Ref<MTLBuffer>::taking(device->newBufferWithLength(bytes, options));
//
// Names are Metal's. Nothing is called before the first use, so an import touches no Metal.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace lily::metal {

extern "C" {
void* objc_getClass(const char* name);
void* sel_registerName(const char* name);
void objc_msgSend(void);
void* objc_autoreleasePoolPush(void);
void objc_autoreleasePoolPop(void* pool);
void* MTLCreateSystemDefaultDevice(void);
}

using NSInteger = int64_t;
using NSUInteger = uint64_t;

struct MTLSize {
  NSUInteger width, height, depth;
};

struct NSOperatingSystemVersion {
  NSInteger majorVersion, minorVersion, patchVersion;
};

namespace objc {

// A type as the runtime writes it: an unsigned 64-bit number is "Q", an object "@".
template <class T>
std::string type_code() {
  if constexpr (std::is_void_v<T>) return "v";
  else if constexpr (std::is_same_v<T, bool>) return "B";
  else if constexpr (std::is_same_v<T, double>) return "d";
  else if constexpr (std::is_same_v<T, NSInteger>) return "q";
  else if constexpr (std::is_same_v<T, NSUInteger>) return "Q";
  else if constexpr (std::is_same_v<T, MTLSize>) return "{?=QQQ}";
  else if constexpr (std::is_same_v<T, NSOperatingSystemVersion>) return "{?=qqq}";
  else if constexpr (std::is_same_v<T, const char*>) return "r*";
  else if constexpr (std::is_same_v<T, const void*>) return "r^v";
  else if constexpr (std::is_same_v<T, void*>) return "^v";
  else if constexpr (std::is_pointer_v<std::remove_pointer_t<T>>)
    return std::string("^").append(type_code<std::remove_pointer_t<T>>());
  else return "@";
}

template <class Signature>
struct Message;

template <class R, class... P>
struct Message<R(P...)> {
  static R send(const void* receiver, void* selector, P... p) {
    return reinterpret_cast<R (*)(const void*, void*, P...)>(&objc_msgSend)(receiver, selector, p...);
  }
  static std::string types() { return type_code<R>() + "@:" + (std::string() + ... + type_code<P>()); }
};

struct Method {
  const char* owner;
  const char* selector;
  std::string types;
  bool of_class;
};

}  // namespace objc

#define LILY_OBJC_METHOD(name, selector, ...)                                       \
  static constexpr const char* name##_selector = selector;                          \
  template <class... A>                                                             \
  auto name(A... a) const {                                                         \
    static void* const registered = sel_registerName(selector);                     \
    return objc::Message<__VA_ARGS__>::send(this, registered, a...);                \
  }
#define LILY_OBJC_CLASS_METHOD(name, selector, ...)                                 \
  template <class... A>                                                             \
  static auto name(A... a) {                                                        \
    static void* const registered = sel_registerName(selector);                     \
    static void* const receiver = objc_getClass(class_name);                        \
    return objc::Message<__VA_ARGS__>::send(receiver, registered, a...);            \
  }
#define LILY_OBJC_LIST_METHOD(name, selector, ...) \
  list.push_back({class_name, selector, objc::Message<__VA_ARGS__>::types(), false});
#define LILY_OBJC_LIST_CLASS_METHOD(name, selector, ...) \
  list.push_back({class_name, selector, objc::Message<__VA_ARGS__>::types(), true});

// Never made in C++: a pointer to one is what the runtime calls an id.
#define LILY_OBJC_CLASS(Name)                                                       \
  struct Name : NSObject {                                                          \
    static constexpr const char* class_name = #Name;                                \
    Name##_METHODS(LILY_OBJC_METHOD, LILY_OBJC_CLASS_METHOD)                        \
    static void add_methods([[maybe_unused]] std::vector<objc::Method>& list) {      \
      Name##_METHODS(LILY_OBJC_LIST_METHOD, LILY_OBJC_LIST_CLASS_METHOD)            \
    }                                                                               \
  };

#define NSObject_METHODS(METHOD, CLASS_METHOD)                                      \
  METHOD(retain, "retain", NSObject*())                                             \
  METHOD(release, "release", void())                                                \
  METHOD(respondsToSelector, "respondsToSelector:", bool(void*))                    \
  METHOD(methodSignatureForSelector, "methodSignatureForSelector:",                 \
         NSMethodSignature*(void*))

struct NSMethodSignature;
struct NSObject {
  static constexpr const char* class_name = "NSObject";
  NSObject_METHODS(LILY_OBJC_METHOD, LILY_OBJC_CLASS_METHOD)
  static void add_methods(std::vector<objc::Method>& list) {
    NSObject_METHODS(LILY_OBJC_LIST_METHOD, LILY_OBJC_LIST_CLASS_METHOD)
  }
  // For what a newer system has: object->responds(MTLDevice::newThing_selector).
  bool responds(const char* selector) const {
    return respondsToSelector(sel_registerName(selector));
  }
  NSMethodSignature* signature(const char* selector) const {
    return methodSignatureForSelector(sel_registerName(selector));
  }

 protected:
  NSObject() = default;
};

// The types of a method, as the running system states them.
#define NSMethodSignature_METHODS(METHOD, CLASS_METHOD)                             \
  METHOD(numberOfArguments, "numberOfArguments", NSUInteger())                      \
  METHOD(getArgumentTypeAtIndex, "getArgumentTypeAtIndex:", const char*(NSUInteger)) \
  METHOD(methodReturnType, "methodReturnType", const char*())
LILY_OBJC_CLASS(NSMethodSignature)

#define NSString_METHODS(METHOD, CLASS_METHOD)                                      \
  CLASS_METHOD(stringWithUTF8String, "stringWithUTF8String:", NSString*(const char*)) \
  METHOD(UTF8String, "UTF8String", const char*())
LILY_OBJC_CLASS(NSString)

#define NSError_METHODS(METHOD, CLASS_METHOD)                                       \
  METHOD(code, "code", NSInteger())                                                 \
  METHOD(domain, "domain", NSString*())                                             \
  METHOD(localizedDescription, "localizedDescription", NSString*())
LILY_OBJC_CLASS(NSError)

#define NSProcessInfo_METHODS(METHOD, CLASS_METHOD)                                 \
  CLASS_METHOD(processInfo, "processInfo", NSProcessInfo*())                        \
  METHOD(operatingSystemVersionString, "operatingSystemVersionString", NSString*()) \
  METHOD(isOperatingSystemAtLeastVersion, "isOperatingSystemAtLeastVersion:",       \
         bool(NSOperatingSystemVersion))
LILY_OBJC_CLASS(NSProcessInfo)

#define MTLCompileOptions_METHODS(METHOD, CLASS_METHOD)                             \
  CLASS_METHOD(make, "new", MTLCompileOptions*())                                   \
  METHOD(setLanguageVersion, "setLanguageVersion:", void(NSUInteger))               \
  METHOD(setFastMathEnabled, "setFastMathEnabled:", void(bool))                     \
  METHOD(setMathMode, "setMathMode:", void(NSInteger)) /* macOS 15 */               \
  METHOD(setMathFloatingPointFunctions, "setMathFloatingPointFunctions:", void(NSInteger))
LILY_OBJC_CLASS(MTLCompileOptions)

#define MTLFunction_METHODS(METHOD, CLASS_METHOD)
LILY_OBJC_CLASS(MTLFunction)

#define MTLLibrary_METHODS(METHOD, CLASS_METHOD)                                    \
  METHOD(newFunctionWithName, "newFunctionWithName:", MTLFunction*(NSString*))
LILY_OBJC_CLASS(MTLLibrary)

#define MTLComputePipelineDescriptor_METHODS(METHOD, CLASS_METHOD)                  \
  CLASS_METHOD(make, "new", MTLComputePipelineDescriptor*())                        \
  METHOD(setComputeFunction, "setComputeFunction:", void(MTLFunction*))             \
  METHOD(setRequiredThreadsPerThreadgroup, "setRequiredThreadsPerThreadgroup:",     \
         void(MTLSize)) /* macOS 26 */
LILY_OBJC_CLASS(MTLComputePipelineDescriptor)

// Only passed as null.
#define MTLComputePipelineReflection_METHODS(METHOD, CLASS_METHOD)
LILY_OBJC_CLASS(MTLComputePipelineReflection)

#define MTLComputePipelineState_METHODS(METHOD, CLASS_METHOD)                       \
  METHOD(threadExecutionWidth, "threadExecutionWidth", NSUInteger())                \
  METHOD(maxTotalThreadsPerThreadgroup, "maxTotalThreadsPerThreadgroup", NSUInteger())
LILY_OBJC_CLASS(MTLComputePipelineState)

#define MTLBuffer_METHODS(METHOD, CLASS_METHOD)                                     \
  METHOD(contents, "contents", void*())                                             \
  METHOD(setLabel, "setLabel:", void(NSString*))
LILY_OBJC_CLASS(MTLBuffer)

#define MTLFence_METHODS(METHOD, CLASS_METHOD)
LILY_OBJC_CLASS(MTLFence)

// macOS 15.
#define MTLResidencySetDescriptor_METHODS(METHOD, CLASS_METHOD) \
  CLASS_METHOD(make, "new", MTLResidencySetDescriptor*())
LILY_OBJC_CLASS(MTLResidencySetDescriptor)

#define MTLResidencySet_METHODS(METHOD, CLASS_METHOD)                               \
  METHOD(addAllocation, "addAllocation:", void(MTLBuffer*))                         \
  METHOD(removeAllocation, "removeAllocation:", void(MTLBuffer*))                   \
  METHOD(commit, "commit", void())                                                  \
  METHOD(requestResidency, "requestResidency", void())                              \
  METHOD(endResidency, "endResidency", void())
LILY_OBJC_CLASS(MTLResidencySet)

#define MTLComputeCommandEncoder_METHODS(METHOD, CLASS_METHOD)                      \
  METHOD(setComputePipelineState, "setComputePipelineState:", void(MTLComputePipelineState*)) \
  METHOD(setBuffer, "setBuffer:offset:atIndex:", void(MTLBuffer*, NSUInteger, NSUInteger)) \
  METHOD(setBytes, "setBytes:length:atIndex:", void(const void*, NSUInteger, NSUInteger)) \
  METHOD(dispatchThreadgroups, "dispatchThreadgroups:threadsPerThreadgroup:",       \
         void(MTLSize, MTLSize))                                                    \
  METHOD(memoryBarrierWithScope, "memoryBarrierWithScope:", void(NSUInteger))       \
  METHOD(waitForFence, "waitForFence:", void(MTLFence*))                            \
  METHOD(updateFence, "updateFence:", void(MTLFence*))                              \
  METHOD(endEncoding, "endEncoding", void())
LILY_OBJC_CLASS(MTLComputeCommandEncoder)

#define MTLCommandBuffer_METHODS(METHOD, CLASS_METHOD)                              \
  METHOD(computeCommandEncoderWithDispatchType, "computeCommandEncoderWithDispatchType:", \
         MTLComputeCommandEncoder*(NSUInteger))                                     \
  METHOD(commit, "commit", void())                                                  \
  METHOD(waitUntilCompleted, "waitUntilCompleted", void())                          \
  METHOD(status, "status", NSUInteger())                                            \
  METHOD(error, "error", NSError*())                                                \
  METHOD(GPUStartTime, "GPUStartTime", double())                                    \
  METHOD(GPUEndTime, "GPUEndTime", double())
LILY_OBJC_CLASS(MTLCommandBuffer)

#define MTLCommandQueue_METHODS(METHOD, CLASS_METHOD)                               \
  METHOD(commandBufferWithUnretainedReferences, "commandBufferWithUnretainedReferences", \
         MTLCommandBuffer*())                                                       \
  METHOD(addResidencySet, "addResidencySet:", void(MTLResidencySet*)) /* macOS 15 */
LILY_OBJC_CLASS(MTLCommandQueue)

#define MTLArchitecture_METHODS(METHOD, CLASS_METHOD) METHOD(name, "name", NSString*())
LILY_OBJC_CLASS(MTLArchitecture)

#define MTLDevice_METHODS(METHOD, CLASS_METHOD)                                     \
  METHOD(name, "name", NSString*())                                                 \
  METHOD(architecture, "architecture", MTLArchitecture*())                          \
  METHOD(hasUnifiedMemory, "hasUnifiedMemory", bool())                              \
  METHOD(supportsFamily, "supportsFamily:", bool(NSInteger))                        \
  METHOD(recommendedMaxWorkingSetSize, "recommendedMaxWorkingSetSize", NSUInteger()) \
  METHOD(maxBufferLength, "maxBufferLength", NSUInteger())                          \
  METHOD(newCommandQueue, "newCommandQueue", MTLCommandQueue*())                    \
  METHOD(newBufferWithLength, "newBufferWithLength:options:",                       \
         MTLBuffer*(NSUInteger, NSUInteger))                                        \
  METHOD(newLibraryWithSource, "newLibraryWithSource:options:error:",               \
         MTLLibrary*(NSString*, MTLCompileOptions*, NSError**))                     \
  METHOD(newComputePipelineStateWithFunction, "newComputePipelineStateWithFunction:error:", \
         MTLComputePipelineState*(MTLFunction*, NSError**))                         \
  METHOD(newComputePipelineStateWithDescriptor,                                     \
         "newComputePipelineStateWithDescriptor:options:reflection:error:",         \
         MTLComputePipelineState*(MTLComputePipelineDescriptor*, NSUInteger,        \
                                  MTLComputePipelineReflection**, NSError**))       \
  METHOD(newFence, "newFence", MTLFence*())                                         \
  METHOD(newResidencySetWithDescriptor, "newResidencySetWithDescriptor:error:",     \
         MTLResidencySet*(MTLResidencySetDescriptor*, NSError**)) /* macOS 15 */
LILY_OBJC_CLASS(MTLDevice)

// All of the above, for tests and for `lily doctor`.
inline std::vector<objc::Method> all_methods() {
  std::vector<objc::Method> list;
  NSObject::add_methods(list);
  NSMethodSignature::add_methods(list);
  NSString::add_methods(list);
  NSError::add_methods(list);
  NSProcessInfo::add_methods(list);
  MTLCompileOptions::add_methods(list);
  MTLLibrary::add_methods(list);
  MTLComputePipelineDescriptor::add_methods(list);
  MTLComputePipelineState::add_methods(list);
  MTLBuffer::add_methods(list);
  MTLResidencySetDescriptor::add_methods(list);
  MTLResidencySet::add_methods(list);
  MTLComputeCommandEncoder::add_methods(list);
  MTLCommandBuffer::add_methods(list);
  MTLCommandQueue::add_methods(list);
  MTLArchitecture::add_methods(list);
  MTLDevice::add_methods(list);
  return list;
}

// Metal's constants, those that lily uses.
constexpr NSUInteger MTLLanguageVersion3_1 = (3 << 16) + 1;
constexpr NSUInteger MTLLanguageVersion4_0 = 4 << 16;
constexpr NSInteger MTLMathModeSafe = 0;
constexpr NSInteger MTLMathFloatingPointFunctionsPrecise = 1;
constexpr NSUInteger MTLResourceStorageModeShared = 0;
constexpr NSUInteger MTLResourceHazardTrackingModeUntracked = 1 << 8;
constexpr NSUInteger MTLPipelineOptionNone = 0;
constexpr NSUInteger MTLDispatchTypeConcurrent = 1;
constexpr NSUInteger MTLBarrierScopeBuffers = 1;
constexpr NSUInteger MTLCommandBufferStatusCompleted = 4;
constexpr NSInteger MTLCommandBufferErrorTimeout = 2;
constexpr NSInteger MTLCommandBufferErrorAccessRevoked = 4;
constexpr NSInteger MTLCommandBufferErrorOutOfMemory = 8;
constexpr NSInteger MTLCommandBufferErrorDeviceRemoved = 11;
constexpr NSInteger MTLGPUFamilyApple7 = 1007;
constexpr NSInteger MTLGPUFamilyApple8 = 1008;
constexpr NSInteger MTLGPUFamilyApple9 = 1009;
constexpr NSInteger MTLGPUFamilyApple10 = 1010;
constexpr NSInteger MTLGPUFamilyMetal3 = 5001;
constexpr NSInteger MTLGPUFamilyMetal4 = 5002;

// Owns one reference.
template <class T>
class Ref {
 public:
  Ref() = default;
  // What a method named new… returned.
  static Ref taking(T* object) { return Ref(object); }
  // What any other method returned; it may be gone when the pool is.
  static Ref sharing(T* object) {
    if (object) object->retain();
    return Ref(object);
  }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() {
    if (object_) object_->release();
  }
  T* get() const { return object_; }
  T* operator->() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  explicit Ref(T* object) : object_(object) {}
  T* object_ = nullptr;
};

// Objects that methods return without being named new… live until the pool around the call ends.
class Pool {
 public:
  Pool() : pool_(objc_autoreleasePoolPush()) {}
  ~Pool() { objc_autoreleasePoolPop(pool_); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

 private:
  void* pool_;
};

// A class is an object as well; null if the system has no such class.
inline const NSObject* class_named(const char* name) {
  return static_cast<const NSObject*>(objc_getClass(name));
}

inline NSString* string(const std::string& text) {
  return NSString::stringWithUTF8String(text.c_str());
}

inline std::string text(const NSString* string) {
  const char* bytes = string ? string->UTF8String() : nullptr;
  return bytes ? bytes : "";
}

inline std::string text(const NSError* error) {
  if (!error) return "no reason given";
  return text(error->localizedDescription()) + " (" + text(error->domain()) + " " +
         std::to_string(error->code()) + ")";
}

}  // namespace lily::metal
