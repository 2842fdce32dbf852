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

cpu::CpuDevice& device(uint32_t threads, const std::string& isa) {
  static std::map<std::pair<uint32_t, std::string>, std::unique_ptr<cpu::CpuDevice>> devices;
  auto& made = devices[{threads, isa}];
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
};

// Segments are (bits, rows, cols, weight, scales, biases), arrays of bytes [experts, rows, …].
// `step` rows are packed at a time.
Packed pack(const std::vector<nb::tuple>& segments, uint32_t step, const std::string& isa) {
  cpu::CpuDevice& dev = device(1, isa);
  Packed p;
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
  device(1, "portable").unpack(p.spec, p.buffer->data, expert, segment, out);
  return nb::ndarray<nb::numpy, float>(out, {s.rows, s.cols}, owner);
}

// Binds an array or a Packed to a slot, in place.
Slot slot_of(const SlotInfo& info, nb::handle value, Precision precision,
             std::vector<std::unique_ptr<View>>& views) {
  if (value.is_none()) return {};
  if (info.type == SlotType::packed) {
    Buffer* buffer = nb::cast<Packed&>(value).buffer.get();
    return {buffer, 0, buffer->bytes};
  }
  auto array = nb::cast<nb::ndarray<nb::c_contig, nb::device::cpu>>(value, false);
  const bool wide = precision == Precision::float32;
  const nb::dlpack::dtype expected = info.type == SlotType::u32 ? nb::dtype<uint32_t>()
                                     : info.type == SlotType::f32 || wide ? nb::dtype<float>()
                                                                          : nb::dtype<uint16_t>();
  if (array.dtype() != expected)
    throw nb::type_error(("slot " + std::string(info.name) + ": wrong dtype").c_str());
  views.push_back(std::make_unique<View>(array.data(), array.nbytes()));
  return {views.back().get(), 0, array.nbytes()};
}

// Returns the packed bytes that the kernel says it read.
uint64_t run(const std::string& op, nb::dict constants, nb::bytes params, nb::list slots,
             const std::string& precision, uint32_t threads, const std::string& isa) {
  const Contract& c = contract(op);
  if (slots.size() != c.n_slots)
    throw nb::value_error((op + ": wrong number of slots").c_str());
  const Precision build = precision == "fast" ? Precision::fast : Precision::float32;
  cpu::CpuDevice& dev = device(threads, isa);
  const Kernel* kernel = dev.kernel(c, constants_of(c, constants), build);
  std::vector<std::unique_ptr<View>> views;
  std::vector<Slot> bound;
  for (uint32_t i = 0; i < c.n_slots; ++i)
    bound.push_back(slot_of(c.slots[i], nb::handle(slots[i]), build, views));
  const std::byte* first = reinterpret_cast<const std::byte*>(params.data());
  std::unique_ptr<CommandBuffer> commands = dev.command_buffer();
  commands->dispatch({kernel, bound, {first, params.size()}});
  const uint64_t before = dev.weight_bytes_read();
  nb::gil_scoped_release released;
  commands->commit();
  commands->wait();
  return dev.weight_bytes_read() - before;
}

nb::dict contracts() {
  constexpr const char* types[] = {"float32", "uint32", "act", "packed"};
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
  m.def(
      "description",
      [](uint32_t threads, const std::string& isa) {
        return device(threads, isa).info().description;
      },
      "threads"_a = 1, "isa"_a = "");
}
