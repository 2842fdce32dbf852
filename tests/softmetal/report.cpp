#include "report.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <sstream>

namespace softmetal {

namespace {

using Lines = std::map<uintptr_t, std::pair<std::string, uint32_t>>;

// The call that returns to `site` is the instruction before it.
uintptr_t offset_in_library(const void* site) {
  Dl_info info;
  if (!site || !dladdr(site, &info)) return 0;
  return reinterpret_cast<uintptr_t>(site) - reinterpret_cast<uintptr_t>(info.dli_fbase) - 1;
}

// addr2line is part of the linker's package. Its answer: the address, then file:line.
Lines look_up(const std::string& library, const std::vector<uintptr_t>& offsets) {
  Lines lines;
  std::ostringstream command;
  command << "addr2line -a -e '" << library << "'" << std::hex;
  for (uintptr_t offset : offsets) command << " 0x" << offset;
  std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.str().c_str(), "r"), pclose);
  char row[4096];
  uintptr_t offset = 0;
  while (pipe && std::fgets(row, sizeof row, pipe.get())) {
    const std::string text = row;
    if (text.rfind("0x", 0) == 0) {
      offset = std::strtoull(row, nullptr, 16);
    } else if (size_t colon = text.rfind(':'); colon != std::string::npos) {
      std::string file = text.substr(0, colon);
      if (file.rfind("./", 0) == 0) file = file.substr(2);
      lines[offset] = {file, static_cast<uint32_t>(std::strtoul(row + colon + 1, nullptr, 10))};
    }
  }
  return lines;
}

std::string shown(const Place& place) {
  return place.line ? place.file + ":" + std::to_string(place.line) : "unknown line";
}

std::string text(const Report& r, const std::string& kernel) {
  std::ostringstream out;
  out << name(r.kind) << " in " << kernel << ": ";
  if (r.place.site) out << shown(r.place) << ": ";
  out << r.what;
  if (r.other.site) out << " (lane " << r.other_lane << " at " << shown(r.other) << ")";
  if (r.kind != Kind::launch)
    out << "; threadgroup " << r.group[0] << "," << r.group[1] << "," << r.group[2] << " lane "
        << r.lane;
  if (r.count > 1) out << "; " << r.count << " times";
  return out.str();
}

}  // namespace

const char* name(Kind kind) {
  switch (kind) {
    case Kind::race: return "race";
    case Kind::out_of_bounds: return "out of bounds";
    case Kind::undeclared: return "undeclared access";
    case Kind::uninitialised: return "uninitialised read";
    case Kind::misaligned: return "misaligned access";
    case Kind::divergence: return "divergence";
    case Kind::early_return: return "early return";
    case Kind::bad_lane: return "bad lane";
    case Kind::launch: return "launch";
  }
  return "";
}

void Reports::add(Report report) {
  for (Report& known : all_)
    if (known.kind == report.kind && known.place.site == report.place.site &&
        known.other.site == report.other.site &&
        (report.place.site || known.what == report.what)) {
      known.count += 1;
      return;
    }
  if (all_.size() < most) all_.push_back(std::move(report));
}

void Reports::finish(const std::string& kernel, const std::string& library) {
  std::vector<uintptr_t> offsets;
  for (const Report& r : all_)
    for (const Place* place : {&r.place, &r.other})
      if (place->site) offsets.push_back(offset_in_library(place->site));
  const Lines lines = offsets.empty() ? Lines{} : look_up(library, offsets);
  for (Report& r : all_) {
    for (Place* place : {&r.place, &r.other})
      if (auto found = lines.find(offset_in_library(place->site)); found != lines.end())
        std::tie(place->file, place->line) = found->second;
    r.text = text(r, kernel);
  }
}

}  // namespace softmetal
