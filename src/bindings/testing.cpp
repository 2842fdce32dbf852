// For tests only: one dispatch of one kernel on NumPy arrays, packing, and the contracts as data.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "base/error.h"
#include "device/cpu/device.h"
#include "metal/contracts.h"
#ifdef LILY_METAL
#include "device/metal/device.h"
#include "device/metal/objc.h"
#include "device/metal/source.h"
#endif
#ifdef LILY_SOFTMETAL
#include "fake.h"
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace lily {

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

// An array's memory as a buffer; the array outlives it.
struct View final : Buffer {
  View(void* memory, size_t size) {
    data = static_cast<std::byte*>(memory);
    bytes = size;
  }
};

// `isa` is one of the CPU device's, or begins with "metal": one device for each such name.
Device& device(uint32_t threads, const std::string& isa) {
  static std::map<std::pair<uint32_t, std::string>, std::unique_ptr<Device>> devices;
  const bool metal = isa.starts_with("metal");
  auto& made = devices[{metal ? 1 : threads, isa}];
#ifdef LILY_METAL
  if (!made && metal) made = std::make_unique<metal::MetalDevice>();
#endif
  if (!made) made = std::make_unique<cpu::CpuDevice>(threads, isa);
  return *made;
}

const Contract& contract(const std::string& name) {
  for (const Contract* c : all_contracts())
    if (c->name == name) return *c;
  throw nb::key_error(name.c_str());
}

std::vector<std::byte> constants_of(const Contract& c, nb::dict values) {
  if (values.size() != c.n_constants)
    throw nb::value_error((std::string(c.name) + ": wrong number of constants").c_str());
  std::vector<std::byte> packed(4 * c.n_constants);
  for (uint32_t i = 0; i < c.n_constants; ++i) {
    nb::handle value = values[std::string(c.constants[i].name).c_str()];
    if (c.constants[i].is_float) {
      const float f = nb::cast<float>(value);
      std::memcpy(packed.data() + 4 * i, &f, 4);
    } else {
      const uint32_t u = nb::cast<uint32_t>(value);
      std::memcpy(packed.data() + 4 * i, &u, 4);
    }
  }
  return packed;
}

struct Packed {
  PackSpec spec;
  std::shared_ptr<Buffer> buffer;
  std::string isa;
};

// Segments are (bits, rows, cols, weight, scales, biases), arrays of bytes [experts, rows, …].
// `step` rows are packed at a time.
Packed pack(const std::vector<nb::tuple>& segments, uint32_t step, const std::string& isa) {
  Device& dev = device(1, isa);
  Packed p;
  p.isa = isa;
  for (const nb::tuple& s : segments) {
    p.spec.segments.push_back({nb::cast<uint32_t>(s[0]), nb::cast<uint32_t>(s[1]),
                               nb::cast<uint32_t>(s[2]), 64});
    p.spec.experts = static_cast<uint32_t>(nb::cast<Bytes>(s[3]).shape(0));
  }
  p.buffer = dev.allocate(dev.packed_bytes(p.spec), "a test's weight");
  dev.pack_begin(p.spec, p.buffer->data);
  for (uint32_t i = 0; i < segments.size(); ++i) {
    const uint32_t rows = p.spec.segments[i].rows;
    auto part = [&](size_t index, uint32_t expert, uint32_t row) -> const std::byte* {
      if (segments[i][index].is_none()) return nullptr;
      Bytes a = nb::cast<Bytes>(segments[i][index]);
      LILY_CHECK(a.shape(0) == p.spec.experts && a.shape(1) == rows);
      return reinterpret_cast<const std::byte*>(a.data()) +
             (size_t{expert} * rows + row) * a.shape(2);
    };
    for (uint32_t e = 0; e < p.spec.experts; ++e)
      for (uint32_t row = 0; row < rows; row += step)
        dev.pack_rows(p.spec, p.buffer->data, e, i, row, std::min(step, rows - row),
                      {part(3, e, row), part(4, e, row), part(5, e, row)});
  }
  return p;
}

auto unpack(const Packed& p, uint32_t expert, uint32_t segment) {
  const Segment& s = p.spec.segments.at(segment);
  float* out = new float[size_t{s.rows} * s.cols];
  nb::capsule owner(out, [](void* memory) noexcept { delete[] static_cast<float*>(memory); });
  device(1, p.isa).unpack(p.spec, p.buffer->data, expert, segment, out);
  return nb::ndarray<nb::numpy, float>(out, {s.rows, s.cols}, owner);
}

// A slot's array, and where the kernel finds it: in place on the CPU, else in a copy.
struct Bound {
  View array;
  std::shared_ptr<Buffer> copy;
  Slot slot;
};

constexpr size_t margin = 256;  // bytes around a copy that must stay as they are
constexpr std::byte poison{0xa5};

Bound bind_array(const SlotInfo& info, nb::handle value, Precision precision, Device& dev) {
  auto array = nb::cast<nb::ndarray<nb::c_contig, nb::device::cpu>>(value, false);
  const bool wide = precision == Precision::float32;
  const nb::dlpack::dtype expected = info.type == SlotType::u32 ? nb::dtype<uint32_t>()
                                     : info.type == SlotType::f32 || wide ? nb::dtype<float>()
                                                                          : nb::dtype<uint16_t>();
  const bool bytes = info.type == SlotType::cache && array.dtype() == nb::dtype<uint8_t>();
  if (array.dtype() != expected && !bytes)
    throw nb::type_error(("slot " + std::string(info.name) + ": wrong dtype").c_str());
  Bound b{{array.data(), array.nbytes()}, nullptr, {}};
  if (dev.info().name == "cpu") return b;
  b.copy = dev.allocate(b.array.bytes + 2 * margin, "a test's array");
  std::fill_n(b.copy->data, b.copy->bytes, poison);
  std::copy_n(b.array.data, b.array.bytes, b.copy->data + margin);
  b.slot = {b.copy.get(), margin, b.array.bytes};
  return b;
}

void take_back(const SlotInfo& info, const Bound& b) {
  if (!b.copy) return;
  for (size_t i = 0; i < margin; ++i)
    if (b.copy->data[i] != poison || b.copy->data[margin + b.array.bytes + i] != poison)
      throw DeviceError("slot " + std::string(info.name) + ": written outside");
  if (info.access != Access::read)
    std::copy_n(b.copy->data + margin, b.array.bytes, b.array.data);
}

// Returns the packed bytes that the kernel says it read.
uint64_t run(const std::string& op, nb::dict constants, nb::bytes params, nb::list slots,
             const std::string& precision, uint32_t threads, const std::string& isa) {
  const Contract& c = contract(op);
  if (slots.size() != c.n_slots)
    throw nb::value_error((op + ": wrong number of slots").c_str());
  const Precision build = precision == "fast" ? Precision::fast : Precision::float32;
  Device& dev = device(threads, isa);
  std::vector<Bound> bound;
  std::vector<Slot> given;
  std::vector<const PackSpec*> forms;
  bound.reserve(c.n_slots);
  for (uint32_t i = 0; i < c.n_slots; ++i) {
    nb::handle value = slots[i];
    const bool packed = c.slots[i].type == SlotType::packed;
    bound.push_back({{nullptr, 0}, nullptr, {}});
    if (packed) forms.push_back(value.is_none() ? nullptr : &nb::cast<Packed&>(value).spec);
    if (value.is_none()) {
      given.push_back({});
    } else if (packed) {
      Buffer* buffer = nb::cast<Packed&>(value).buffer.get();
      given.push_back({buffer, 0, buffer->bytes});
    } else {
      Bound& b = bound.back() = bind_array(c.slots[i], value, build, dev);
      given.push_back(b.copy ? b.slot : Slot{&b.array, 0, b.array.bytes});
    }
  }
  const Kernel* kernel = dev.kernel(c, constants_of(c, constants), build, forms);
  const std::byte* first = reinterpret_cast<const std::byte*>(params.data());
  const uint64_t before = dev.weight_bytes_read();
  {
    nb::gil_scoped_release released;
    std::unique_ptr<CommandBuffer> commands = dev.command_buffer();
    commands->dispatch({kernel, given, {first, params.size()}, {}});
    commands->commit();
    commands->wait();
  }
  for (uint32_t i = 0; i < c.n_slots; ++i) take_back(c.slots[i], bound[i]);
  return dev.weight_bytes_read() - before;
}

constexpr const char* types[] = {"float32", "uint32", "act", "cache", "packed"};

nb::dict contracts() {
  constexpr const char* accesses[] = {"read", "write", "update"};
  nb::dict all;
  for (const Contract* c : all_contracts()) {
    nb::list slots, constants;
    for (uint32_t i = 0; i < c->n_slots; ++i) {
      const SlotInfo& s = c->slots[i];
      slots.append(nb::make_tuple(std::string(s.name), types[static_cast<int>(s.type)],
                                  accesses[static_cast<int>(s.access)], std::string(s.shape)));
    }
    for (uint32_t i = 0; i < c->n_constants; ++i)
      constants.append(std::string(c->constants[i].name));
    nb::dict entry;
    entry["slots"] = slots;
    entry["constants"] = constants;
    entry["params_bytes"] = c->params_bytes;
    all[std::string(c->name).c_str()] = entry;
  }
  return all;
}

#ifdef LILY_METAL
void bind_metal(nb::module_& m) {
  m.def("has_metal_kernel", [](const std::string& op) {
    return metal::has_kernel(op) && metal::find_launch(op) != nullptr;
  });
  // Class, selector and types of each message that the Metal device sends, one a line.
  m.def("objc_methods", [] {
    std::string text;
    for (const metal::objc::Method& method : metal::all_methods())
      text.append(method.of_class ? "+" : "-")
          .append(method.owner)
          .append(" ")
          .append(method.selector)
          .append(" ")
          .append(method.types)
          .append("\n");
    return text;
  });
  // How much the device of this name commits at once, and of attention in one dispatch.
  m.def("metal_budget", [](const std::string& isa, std::optional<uint32_t> attention_rows) {
    metal::Budget& budget = static_cast<metal::MetalDevice&>(device(1, isa)).budget;
    budget = {};
    if (attention_rows)
      budget = {.flops = 1, .attention_flops = 1, .attention_rows = *attention_rows};
  }, "isa"_a, "attention_rows"_a.none());
  m.def("metal_or_cpu", [] {
    const DeviceInfo info = metal_or_cpu(1)->info();
    return nb::make_tuple(info.name, info.warning);
  });
}
#endif

#ifdef LILY_SOFTMETAL
// The controls of the software Metal; see tests/softmetal/fake/fake.h.
void bind_softmetal(nb::module_& m) {
  m.def(
      "fake_set",
      [](const std::string& name, std::optional<std::string> value) {
        if (!fake_metal_set(name.c_str(), value ? value->c_str() : nullptr))
          throw nb::value_error((name + ": no such setting or value").c_str());
      },
      "name"_a, "value"_a.none());
  m.def("fake_reports", [] {
    std::vector<std::string> all;
    for (uint32_t i = 0; i < fake_metal_report_count(); ++i) all.push_back(fake_metal_report(i));
    fake_metal_clear();
    return all;
  });
  m.def("fake_number", [](const std::string& name) { return fake_metal_number(name.c_str()); });
  m.def("fake_counts", [](uint32_t index) {
    uint64_t read, written;
    fake_metal_counts(index, &read, &written);
    return nb::make_tuple(read, written);
  });
  // By type of slot.
  m.def("fake_moved", [] {
    nb::dict all;
    for (size_t i = 0; i < std::size(types); ++i) {
      uint64_t loaded, read, written;
      fake_metal_moved(static_cast<uint32_t>(i), &loaded, &read, &written);
      all[types[i]] = nb::make_tuple(loaded, read, written);
    }
    return all;
  });
}
#endif

}  // namespace

}  // namespace lily

NB_MODULE(_testing, m) {
  nb::module_::import_("lily._core");  // it turns lily's exceptions into Python's
  using namespace lily;
  nb::class_<Packed>(m, "Packed")
      .def("unpack", &unpack, "expert"_a = 0, "segment"_a = 0)
      .def_prop_ro("bytes", [](const Packed& p) {
        return nb::bytes(reinterpret_cast<const char*>(p.buffer->data), p.buffer->bytes);
      });
  m.def("pack", &pack, "segments"_a, "step"_a = 1u << 30, "isa"_a = "");
  m.def("run", &run, "op"_a, "constants"_a, "params"_a, "slots"_a, "precision"_a = "fast",
        "threads"_a = 1, "isa"_a = "");
  m.def("contracts", &contracts);
#ifdef LILY_METAL
  bind_metal(m);
#endif
#ifdef LILY_SOFTMETAL
  bind_softmetal(m);
#endif
  m.def(
      "description",
      [](uint32_t threads, const std::string& isa) {
        return device(threads, isa).info().description;
      },
      "threads"_a = 1, "isa"_a = "");
}
