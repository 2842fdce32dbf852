#include "device/metal/source.h"

#include <cstdio>
#include <cstring>
#include <set>

#include "base/error.h"
#include "device/metal/pack.h"

namespace lily::metal {

namespace {

void define(std::string& out, const std::string& name, const std::string& value) {
  out += "#define " + name + " " + value + "\n";
}

std::string unsigned_text(size_t value) { return std::to_string(value) + "u"; }

// All digits that tell a float from its neighbours.
std::string float_text(float value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9e", static_cast<double>(value));
  return std::string(text) + "f";
}

void define_weight(std::string& out, const std::string& slot, const PackSpec& spec) {
  const Layout layout(spec);
  std::string parts;
  for (const Part& p : layout.parts)
    parts += " P(" + unsigned_text(p.first_row) + ", " + unsigned_text(p.rows) + ", " +
             unsigned_text(p.bits) + ", " + unsigned_text(p.codes_offset) + ", " +
             unsigned_text(p.affine_offset) + ")";
  define(out, slot + "_PARTS(P)", parts.substr(1));
  define(out, slot + "_N_PARTS", unsigned_text(layout.parts.size()));
  define(out, slot + "_COLS", unsigned_text(layout.cols));
  define(out, slot + "_EXPERT_BYTES", std::to_string(layout.expert_bytes) + "ul");
}

// `Op` of the contract: delta_project is DeltaProject.
std::string op_name(std::string_view kernel) {
  std::string name;
  bool upper = true;
  for (char c : kernel) {
    if (c != '_') name += upper ? static_cast<char>(c - 'a' + 'A') : c;
    upper = c == '_';
  }
  return name;
}

void append_line_marker(std::string& out, size_t line, const std::string& file) {
  out.append("#line ").append(std::to_string(line)).append(" \"").append(file).append("\"\n");
}

// Each header once, where it is first included.
void flatten(const std::string& name, std::set<std::string>& seen, std::string& out) {
  constexpr std::string_view include = "#include \"", once = "#pragma once";
  std::string_view rest = embedded_file(name);
  if (rest.empty()) throw InternalError("metal: no file " + name);
  append_line_marker(out, 1, name);
  for (size_t line = 1; !rest.empty(); ++line) {
    const size_t length = std::min(rest.find('\n'), rest.size());
    const std::string_view text = rest.substr(0, length);
    rest.remove_prefix(std::min(length + 1, rest.size()));
    if (text.starts_with(include)) {
      const std::string header(text.substr(include.size(), text.rfind('"') - include.size()));
      if (seen.insert(header).second) flatten(header, seen, out);
      append_line_marker(out, line + 1, name);
    } else if (text == once) {
      out += '\n';
    } else {
      out.append(text).append("\n");
    }
  }
}

std::string file_name(std::string_view kernel) { return std::string(kernel).append(".metal"); }

}  // namespace

bool has_kernel(std::string_view kernel) { return !embedded_file(file_name(kernel)).empty(); }

std::string kernel_text(std::string_view kernel) {
  std::string text;
  std::set<std::string> seen;
  flatten(file_name(kernel), seen, text);
  return text;
}

std::string definitions(const Contract& contract, std::span<const std::byte> constants,
                        Precision precision, std::span<const PackSpec* const> weights) {
  LILY_CHECK(constants.size() == 4 * size_t{contract.n_constants});
  const std::string op = op_name(contract.name);
  const bool wide = precision == Precision::float32;
  std::string out;
  define(out, "LILY_FLOAT32", wide ? "1" : "0");
  define(out, "ACT", wide ? "float" : "bfloat");
  for (uint32_t i = 0; i < contract.n_constants; ++i) {
    const ConstantInfo& c = contract.constants[i];
    uint32_t bits;
    std::memcpy(&bits, constants.data() + 4 * i, 4);
    float number;
    std::memcpy(&number, &bits, 4);
    define(out, op + "_" + std::string(c.name), c.is_float ? float_text(number) : unsigned_text(bits));
  }
  size_t w = 0;
  for (uint32_t i = 0; i < contract.n_slots; ++i) {
    const SlotInfo& slot = contract.slots[i];
    if (slot.type != SlotType::packed) continue;
    LILY_CHECK(w < weights.size());
    if (const PackSpec* spec = weights[w++]) define_weight(out, op + "_" + std::string(slot.name), *spec);
  }
  return out;
}

}  // namespace lily::metal
