// config.cpp: what Python may set in the native core, as plain C functions for ctypes: the tables of a GPU, and batch
// invariance. Each returns 0, or 1 with the reason in `text`.
#include "c_api.h"
#include "../core/batch_invariant.h"
#include "../core/types.h"
#include "../plan/tables.h"

namespace {

using namespace onepass;

constexpr int kNumbers = 6;  // of an entry

std::string json(const std::vector<Entry>& table) {
  std::string text = "[";
  for (const Entry& e : table) {
    text += (text.size() > 1 ? ", [" : "[") + std::to_string(e.limit);
    for (const int number : {e.tier, e.threads, e.items_per_thread, e.blocks_per_row, e.smem_vecs})
      text += ", " + std::to_string(number);
    text += "]";
  }
  return text + "]";
}

}  // namespace

// The tables in use for the GPUs of a name, as JSON, `origin` first, on a line of its own.
ONEPASS_API int onepass_tables(const char* gpu, char* text, int64_t size) {
  return return_text(text, size, [&] {
    const Tables& tables = tables_of(gpu);
    std::string all;
    for (const auto& [name, table] : kTables)
      all += std::string(all.empty() ? "{\"" : ", \"") + name + "\": " + json(tables.*table);
    return tables.origin + "\n" + all + "}";
  });
}

// Sets them: `counts` entries of the tables in the order of kTables, one after another in `numbers`.
ONEPASS_API int onepass_set_tables(const char* gpu, const char* origin, const int64_t* counts, const int64_t* numbers,
                                   char* text, int64_t size) {
  return return_text(text, size, [&] {
    Tables made;
    made.origin = origin;
    for (const auto& [name, table] : kTables) {
      for (int64_t left = *counts++; left > 0; --left, numbers += kNumbers) {
        for (int k = 1; k < kNumbers; ++k) {
          if (numbers[k] < -1 || numbers[k] > 4096) {
            throw std::runtime_error(std::string("onepass: table ") + name + " with the number " +
                                     std::to_string(numbers[k]));
          }
        }
        (made.*table)
            .push_back(
                {numbers[0], int(numbers[1]), int(numbers[2]), int(numbers[3]), int(numbers[4]), int(numbers[5])});
      }
    }
    set_tables(gpu, std::move(made));
    return std::string();
  });
}

// Sets the switch of this thread (`scoped`; -1: as the process has it) or of the process, and says what it was. 2 only
// asks.
ONEPASS_API int onepass_set_invariant(bool scoped, int value, char* text, int64_t size) {
  return return_text(text, size, [&] {
    const int before = scoped ? thread_invariant : process_invariant.load();
    if (value == 2) return std::to_string(before);
    if (scoped)
      thread_invariant = value;
    else
      process_invariant = value != 0;
    return std::to_string(before);
  });
}

// The functions in the order of their numbers, as JSON: {name: [is_reduction, leading_planes]}.
ONEPASS_API int onepass_functions(char* text, int64_t size) {
  return return_text(text, size, [&] {
    std::string all;
    for (const FunctionTraits& function : kFunctions) {
      all += std::string(all.empty() ? "{\"" : ", \"") + function.name + "\": [" +
             (function.is_reduction ? "true" : "false") + ", " + std::to_string(function.leading_planes) + "]";
    }
    return all + "}";
  });
}
