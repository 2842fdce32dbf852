#include "fake.h"

#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>

#include "runtime.h"
#include "settings.h"

namespace fake {

std::string describe_methods();

namespace {

constexpr const char* orders[] = {"in_turn", "reversed", "random", "ahead", "mixed"};

struct Reports {
  std::mutex mutex;
  std::deque<std::string> list;
};

Reports& reports() {
  static Reports* r = new Reports;
  return *r;
}

bool set(Settings& s, const std::string& name, const char* given) {
  auto value = [&](const char* variable, const char* standard) -> std::string {
    if (given) return given;
    const char* from_environment = variable ? std::getenv(variable) : nullptr;
    return from_environment ? from_environment : standard;
  };
  auto number = [&](std::atomic<uint64_t>& n, const char* variable, const char* standard) {
    n = std::strtoull(value(variable, standard).c_str(), nullptr, 10);
    return true;
  };
  if (name == "mode") {
    const std::string mode = value("LILY_SOFTMETAL_MODE", "plain");
    s.mode = mode == "detect" ? Mode::detect : mode == "stub" ? Mode::stub : Mode::plain;
    return s.mode != Mode::plain || mode == "plain";
  }
  if (name == "order") {
    const std::string order = value("LILY_SOFTMETAL_ORDER", "mixed");
    for (int i = 0; i <= mixed_order; ++i)
      if (order == orders[i]) return s.order = i, true;
    return false;
  }
  if (name == "seed") return number(s.seed, "LILY_SOFTMETAL_SEED", "1");
  if (name == "memory") return number(s.memory, nullptr, "8589934592");
  if (name == "width") return number(s.width, nullptr, "32");
  if (name == "max_threads") return number(s.max_threads, nullptr, "1024");
  if (name == "system") {
    const std::string text = value(nullptr, "26");
    const size_t dot = text.find('.');
    s.told_major = std::atoi(text.c_str());
    s.system = s.told_major == 16 ? 26 : s.told_major.load();
    s.told_minor = dot == std::string::npos ? 0 : std::atoi(text.c_str() + dot + 1);
    return true;
  }
  if (name == "chip") return s.chip = std::atoi(value(nullptr, "3").c_str()), true;
  if (name == "wrong_types") return s.wrong_types = given ? find_selector(given) : nullptr, true;
  if (name == "fail_command_buffer") {
    const std::string text = value(nullptr, "0");
    const size_t colon = text.find(':');
    s.fail_code = colon == std::string::npos ? 1 : std::atoll(text.c_str() + colon + 1);
    s.fail_command_buffer = std::atoll(text.c_str());
    return true;
  }
  for (auto& [which, countdown] : {std::pair{"fail_allocation", &s.fail_allocation},
                                   std::pair{"fail_library", &s.fail_library},
                                   std::pair{"fail_pipeline", &s.fail_pipeline}})
    if (name == which) return *countdown = std::atoll(value(nullptr, "0").c_str()), true;
  return false;
}

}  // namespace

Settings::Settings() {
  for (const char* name : {"mode", "order", "seed", "memory", "width", "max_threads", "system", "chip",
                           "wrong_types",
                           "fail_command_buffer", "fail_allocation", "fail_library",
                           "fail_pipeline"})
    set(*this, name, nullptr);
}

Settings& settings() {
  static Settings* s = new Settings;
  return *s;
}

Numbers& numbers() {
  static Numbers* n = new Numbers{};
  return *n;
}

int system_version() { return settings().system; }

void report(std::string text) {
  std::lock_guard lock(reports().mutex);
  reports().list.push_back(std::move(text));
}

}  // namespace fake

using namespace fake;

int fake_metal_set(const char* name, const char* value) { return set(settings(), name, value); }

uint32_t fake_metal_report_count() {
  std::lock_guard lock(reports().mutex);
  return static_cast<uint32_t>(reports().list.size());
}

const char* fake_metal_report(uint32_t i) {
  std::lock_guard lock(reports().mutex);
  return i < reports().list.size() ? reports().list[i].c_str() : nullptr;
}

void fake_metal_clear() {
  std::lock_guard lock(reports().mutex);
  reports().list.clear();
}

uint64_t fake_metal_number(const char* name) {
  const Numbers& n = numbers();
  const std::pair<const char*, const std::atomic<uint64_t>*> all[] = {
      {"buffers", &n.buffers},
      {"allocations", &n.allocations},
      {"command_buffers", &n.command_buffers},
      {"dispatches", &n.dispatches},
      {"barriers", &n.barriers},
      {"compiled", &n.compiled},
      {"residency_requests", &n.residency_requests},
      {"devices", &n.devices}};
  for (const auto& [known, value] : all)
    if (std::strcmp(name, known) == 0) return *value;
  return std::strcmp(name, "objects") == 0 ? live_objects() : 0;
}

const char* fake_metal_methods() {
  static const std::string text = describe_methods();
  return text.c_str();
}
