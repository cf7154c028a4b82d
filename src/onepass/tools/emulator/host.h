// host.h: launches of translated kernels.
#pragma once

#include "scheduler.h"

namespace emulator {

// A translated kernel, in a library that is loaded when it is first asked for.
struct Code {
  Kernel kernel;
  uint32_t static_shared, parameters;
  const uint32_t* sizes;  // of parameters
};
const Code& code_of(const std::string& library);

// How the next launches go: what is drawn, the order of threads (scheduler.h), how late copies are (machine.h), and
// what memory there is.
struct Way {
  unsigned seed;
  int order, lateness;
  std::vector<Range> ranges;
  bool others = false;  // whether another process writes what is waited for
};
extern Way way;

void launch(const Launch& launch, const Code& code, void** arguments);

// What `body` throws, or "".
template <class Body>
const char* said_by(Body body) {
  static std::string said;
  said.clear();
  try {
    body();
  } catch (const std::exception& error) {
    said = error.what();
  }
  return said.c_str();
}

}  // namespace emulator
