// Kernel libraries by way of softmetal.build, as a process; its answers are kept beside its cache.
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>

#include "metal.h"
#include "settings.h"

namespace fake {

namespace {

namespace fs = std::filesystem;

const fs::path tests = SOFTMETAL_TESTS;

std::string from_environment(const char* name, const std::string& otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? value : otherwise;
}

fs::path cache_folder() {
  const fs::path folder = from_environment("LILY_SOFTMETAL_CACHE",
                                           (tests.parent_path() / "build" / "softmetal").string());
  fs::create_directories(folder);
  return folder;
}

uint64_t hash(const std::string& text, uint64_t h = 14695981039346656037u) {
  for (unsigned char c : text) h = (h ^ c) * 1099511628211u;
  return h;
}

// Changes when the tools do.
const std::string& tools() {
  static const std::string state = [] {
    std::ostringstream out;
    std::set<fs::path> files;
    for (const auto& e : fs::recursive_directory_iterator(tests / "softmetal"))
      if (e.is_regular_file() && (e.path().extension() == ".py" || e.path().extension() == ".h" ||
                                  e.path().filename() == "glue.cpp"))
        files.insert(e.path());
    for (const fs::path& file : files)
      out << file << fs::file_size(file) << fs::last_write_time(file).time_since_epoch().count();
    return out.str();
  }();
  return state;
}

std::string quoted(const std::string& text) { return "'" + text + "'"; }

}  // namespace

std::string compile(const std::string& source, const std::string& language,
                    const std::string& mode, std::string& error) {
  const std::string key = mode + "\n" + language + "\n" + tools() + "\n" + source;
  char name[64];
  std::snprintf(name, sizeof name, "fake-%016lx%016lx", static_cast<unsigned long>(hash(key)),
                static_cast<unsigned long>(hash(key, hash(key) * 31 + 7)));
  const fs::path noted = cache_folder() / name;
  std::string path;
  if (std::ifstream(noted) >> path && fs::exists(path)) return path;

  const std::string unique = "." + std::to_string(getpid()) + "." +
                             std::to_string(std::hash<std::string>{}(key));
  const fs::path text = noted.string() + unique + ".metal";
  std::ofstream(text) << source;
  const std::string command =
      "cd " + quoted(tests.string()) + " && env -u LD_PRELOAD PYTHONPATH=" + quoted(tests.string()) +
      " " + from_environment("LILY_SOFTMETAL_PYTHON", "python3") + " -m softmetal.build --mode " +
      mode + " --language " + language + " --name program_source " + quoted(text.string()) + " 2>&1";
  std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), nullptr);
  std::string output;
  char piece[4096];
  while (size_t n = std::fread(piece, 1, sizeof piece, pipe.get())) output.append(piece, n);
  const int status = pclose(pipe.release());
  fs::remove(text);
  while (!output.empty() && output.back() == '\n') output.pop_back();
  if (status != 0) {
    error = output;
    return "";
  }
  numbers().compiled++;
  path = output.substr(output.rfind('\n') + 1);
  std::ofstream(noted.string() + unique) << path;
  fs::rename(noted.string() + unique, noted);
  return path;
}

}  // namespace fake
