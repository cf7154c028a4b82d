// c_api.h: what the plain C functions for ctypes share. Instead of throwing, they put an exception's message into a
// buffer.
#pragma once

#include <cstdint>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>

#include "../plan/plan.h"

#define ONEPASS_API extern "C" __attribute__((visibility("default")))

namespace onepass {

inline void put(const std::string& from, char* text, int64_t size) {
  std::snprintf(text, size_t(size), "%s", from.c_str());
}

// Puts the string that `body` returns into `text` and returns 0, or the message of its exception and returns 1.
template <class Body>
int return_text(char* text, int64_t size, Body body) {
  try {
    put(body(), text, size);
    return 0;
  } catch (const std::exception& error) {
    put(error.what(), text, size);
    return 1;
  }
}

// The numbers of a plan, in the form that the private operators take.
inline std::string numbers(const CudaPlan& plan) {
  std::string text = "[" + std::to_string(int(plan.tier));
  for (const int number : {plan.threads_per_row, plan.rows_per_block, plan.items_per_thread, plan.vec_size,
                           plan.blocks_per_row, plan.smem_vecs, int(plan.access)})
    text += ", " + std::to_string(number);
  return text + "]";
}

// Writes `code` to the file `path`. Returns the path.
inline std::string write_file(const std::string& code, const char* path) {
  std::FILE* file = std::fopen(path, "wb");
  if (!file) throw std::runtime_error(std::string("onepass: cannot write ") + path);
  const bool whole = std::fwrite(code.data(), 1, code.size(), file) == code.size();
  if (std::fclose(file) || !whole) throw std::runtime_error(std::string("onepass: cannot write ") + path);
  return path;
}

}  // namespace onepass
