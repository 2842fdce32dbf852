#include "device/metal/commands.h"

#include "base/error.h"
#include "device/metal/declared.h"
#include "device/metal/device.h"

namespace lily::metal {

namespace {

MTLSize groups(const Launch& l) { return {l.groups[0], l.groups[1], l.groups[2]}; }
MTLSize threads(const Launch& l) { return {l.threads, 1, 1}; }

bool empty(const Launch& l) { return !l.groups[0] || !l.groups[1] || !l.groups[2]; }

}  // namespace

MetalCommandBuffer::~MetalCommandBuffer() {
  if (work_.commands) device_.finish(work_);
}

void MetalCommandBuffer::dispatch(const Dispatch& d) {
  const MetalKernel& kernel = static_cast<const MetalKernel&>(*d.kernel);
  const Contract& contract = kernel.contract;
  LILY_CHECK(!work_.commands);
  LILY_CHECK(d.slots.size() == contract.n_slots);
  LILY_CHECK(d.params.size() == contract.params_bytes);
  for (const Slot& s : d.slots)
    LILY_CHECK(!s.buffer || (s.offset <= s.buffer->bytes && s.bytes <= s.buffer->bytes - s.offset));
  kernel.ready();
  const Launch launch = kernel.launch(d.params);
  if (empty(launch)) return;
  if (launch.threads > kernel.max_threads)
    throw DeviceError("metal: kernel " + std::string(contract.name) + " takes threadgroups of " +
                      std::to_string(launch.threads) + " threads, this GPU allows it " +
                      std::to_string(kernel.max_threads));
  work_.steps.push_back({&kernel, launch, work_.slots.size(), work_.params.size()});
  work_.slots.insert(work_.slots.end(), d.slots.begin(), d.slots.end());
  work_.params.insert(work_.params.end(), d.params.begin(), d.params.end());
  work_.last_place = (d.stage.empty() ? "" : std::string(d.stage) + ": ") + std::string(contract.name);
  if (work_.dispatches++ == 0) work_.first_place = work_.last_place;
}

void MetalCommandBuffer::barrier() {
  if (!work_.steps.empty() && work_.steps.back().kernel) work_.steps.push_back({});
}

void MetalCommandBuffer::commit() {
  LILY_CHECK(!work_.commands);
  device_.submit(work_);
}

Timing MetalCommandBuffer::wait() {
  LILY_CHECK(work_.commands);
  device_.finish(work_);
  if (!work_.error.empty()) throw DeviceError(work_.error);
  return work_.timing;
}

void encode(MTLComputeCommandEncoder* encoder, const Work& work, const Buffer& unbound) {
  for (const Work::Step& step : work.steps) {
    if (!step.kernel) {
      encoder->memoryBarrierWithScope(MTLBarrierScopeBuffers);
      continue;
    }
    const Contract& contract = step.kernel->contract;
    encoder->setComputePipelineState(step.kernel->pipeline.get());
    encoder->setBytes(work.params.data() + step.first_param, contract.params_bytes, 0);
    for (uint32_t i = 0; i < contract.n_slots; ++i) {
      const Slot& slot = work.slots[step.first_slot + i];
      const SlotInfo& info = contract.slots[i];
      encoder->setBuffer(object_of(slot.buffer ? *slot.buffer : unbound), slot.offset, info.number);
      if (declare_slot) declare_slot(info.number, info.access, slot.bytes);
    }
    encoder->dispatchThreadgroups(groups(step.launch), threads(step.launch));
  }
}

}  // namespace lily::metal
