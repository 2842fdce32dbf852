#include "device/metal/commands.h"

#include <cstring>

#include "base/error.h"
#include "device/metal/declared.h"
#include "device/metal/device.h"
#include "metal/prefill_attend.h"

namespace lily::metal {

namespace {

MTLSize groups(const Launch& l) { return {l.groups[0], l.groups[1], l.groups[2]}; }
MTLSize threads(const Launch& l) { return {l.threads, 1, 1}; }

bool empty(const Launch& l) { return !l.groups[0] || !l.groups[1] || !l.groups[2]; }

}  // namespace

MetalCommandBuffer::~MetalCommandBuffer() { device_.finish(work_); }

void MetalCommandBuffer::dispatch(const Dispatch& d) {
  const MetalKernel& kernel = static_cast<const MetalKernel&>(*d.kernel);
  const Contract& contract = kernel.contract;
  LILY_CHECK(!work_.committed);
  LILY_CHECK(d.slots.size() == contract.n_slots);
  LILY_CHECK(d.params.size() == contract.params_bytes);
  for (const Slot& s : d.slots)
    LILY_CHECK(!s.buffer || (s.offset <= s.buffer->bytes && s.bytes <= s.buffer->bytes - s.offset));
  kernel.ready();
  if (&contract == &PrefillAttend::contract) return add_slices(d, kernel);
  add(d, kernel, d.slots, d.params);
}

void MetalCommandBuffer::add(const Dispatch& d, const MetalKernel& kernel,
                             std::span<const Slot> slots, std::span<const std::byte> params) {
  const Contract& contract = kernel.contract;
  const Launch launch = kernel.launch(params);
  if (empty(launch)) return;
  if (launch.threads > kernel.max_threads)
    throw DeviceError("metal: kernel " + std::string(contract.name) + " takes threadgroups of " +
                      std::to_string(launch.threads) + " threads, this GPU allows it " +
                      std::to_string(kernel.max_threads));
  if (work_.stages.empty() || work_.stages.back() != d.stage) work_.stages.emplace_back(d.stage);
  work_.steps.push_back({&kernel, launch, work_.slots.size(), work_.params.size(),
                         flops(contract, kernel.constants.data(), params.data()),
                         work_.stages.back()});
  work_.slots.insert(work_.slots.end(), slots.begin(), slots.end());
  work_.params.insert(work_.params.end(), params.begin(), params.end());
}

// Attention over many keys is cut by rows: some rows later are the same as fewer rows further on.
void MetalCommandBuffer::add_slices(const Dispatch& d, const MetalKernel& kernel) {
  PrefillAttend::Constants c;
  PrefillAttend::Params p;
  std::memcpy(&c, kernel.constants.data(), sizeof c);
  std::memcpy(&p, d.params.data(), sizeof p);
  const size_t head = size_t{c.DH} * kernel.act_bytes;
  std::vector<Slot> slots(d.slots.begin(), d.slots.end());
  for (uint32_t done = 0, rows; done < p.rows; done += rows) {
    PrefillAttend::Params rest = p;
    rest.rows -= done;
    rest.position += done;
    rows = rest.rows = attention_rows(device_.budget, &c, &rest);
    for (uint32_t i = 0; i < kernel.contract.n_slots; ++i) {
      const std::string_view name = kernel.contract.slots[i].name;
      const size_t heads = name == "q" || name == "u" ? c.HEADS
                           : name == "qkv"            ? 2 * (c.HEADS + c.KV_HEADS)
                                                      : 0;  // keys and values: all of them
      if (!heads) continue;
      slots[i].offset = d.slots[i].offset + done * heads * head;
      slots[i].bytes = rows * heads * head;
    }
    add(d, kernel, slots, std::as_bytes(std::span(&rest, 1)));
  }
}

void MetalCommandBuffer::barrier() {
  if (!work_.steps.empty() && work_.steps.back().kernel) work_.steps.push_back({});
}

void MetalCommandBuffer::commit() {
  LILY_CHECK(!work_.committed);
  work_.committed = true;
  device_.submit(work_);
}

Timing MetalCommandBuffer::wait() {
  LILY_CHECK(work_.committed);
  device_.finish(work_);
  if (!work_.error.empty()) throw DeviceError(work_.error);
  return work_.timing;
}

size_t end_of_part(const Work& work, size_t first, const Budget& budget) {
  double sum = work.steps[first].flops;
  size_t i = first + 1;
  for (; i < work.steps.size(); ++i) {
    if (sum + work.steps[i].flops > budget.flops && sum > 0) break;
    sum += work.steps[i].flops;
  }
  return i;
}

void encode(MTLComputeCommandEncoder* encoder, const Work& work, const Work::Part& part,
            const Buffer& unbound) {
  for (size_t s = part.first; s < part.last; ++s) {
    const Work::Step& step = work.steps[s];
    if (!step.kernel) {
      // Between two parts stands a fence.
      if (s > part.first && s + 1 < part.last)
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
      if (declare_slot) declare_slot(info, slot.bytes);
    }
    encoder->dispatchThreadgroups(groups(step.launch), threads(step.launch));
  }
}

}  // namespace lily::metal
