# Writes a C++ file that holds the files of metal/, for src/device/metal/source.cpp.
#
#   cmake -D FOLDER=…/metal -D OUT=embedded.cpp -P embed_metal.cmake

file(GLOB names RELATIVE "${FOLDER}" "${FOLDER}/*.metal" "${FOLDER}/*.h")
list(REMOVE_ITEM names contracts.h)  # only C++ reads it
list(SORT names)
set(code "// Made by cmake/embed_metal.cmake.
#include \"device/metal/source.h\"

namespace lily::metal {

std::string_view embedded_file(std::string_view name) {
")
foreach(name IN LISTS names)
  file(READ "${FOLDER}/${name}" text)
  string(APPEND code "  if (name == \"${name}\")\n    return R\"metal(${text})metal\";\n")
endforeach()
string(APPEND code "  return {};\n}\n\n}  // namespace lily::metal\n")
file(WRITE "${OUT}" "${code}")
