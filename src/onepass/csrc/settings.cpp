// settings.cpp: what Python may set in the native core, as plain C functions for ctypes: the tables of a GPU, and batch
// invariance. Each returns 0, or 1 with the reason in `text`.
#include "guarded.h"
#include "invariant.h"
#include "tables.h"

namespace {

using namespace onepass;

constexpr int kNumbers = 6;  // of an entry

std::string json(const std::vector<Entry>& table) {
  std::string text = "[";
  for (const Entry& e : table) {
    text += (text.size() > 1 ? ", [" : "[") + std::to_string(e.limit);
    for (const int number : {e.tier, e.lanes, e.values, e.split, e.shelf}) text += ", " + std::to_string(number);
    text += "]";
  }
  return text + "]";
}

}  // namespace

// The tables in use for a GPU, as JSON, `origin` first, on a line of its own.
ONEPASS_API int onepass_tables(int compute, int multiprocessors, char* text, int64_t size) {
  return guarded(text, size, [&] {
    const Tables& t = tables_of(compute, multiprocessors);
    return t.origin + "\n{\"rows32\": " + json(t.rows32) + ", \"rows16\": " + json(t.rows16) +
           ", \"odd32\": " + json(t.odd32) + ", \"odd16\": " + json(t.odd16) + "}";
  });
}

// Sets them: `counts` entries of rows32, rows16, odd32 and odd16, one after another in `numbers`.
ONEPASS_API int onepass_set_tables(int compute, int multiprocessors, const char* origin, const int64_t* counts,
                                   const int64_t* numbers, char* text, int64_t size) {
  return guarded(text, size, [&] {
    Tables made;
    made.origin = origin;
    std::vector<Entry>* const tables[] = {&made.rows32, &made.rows16, &made.odd32, &made.odd16};
    for (int t = 0; t < 4; ++t) {
      for (int64_t i = 0; i < counts[t]; ++i, numbers += kNumbers) {
        for (int k = 1; k < kNumbers; ++k) {
          if (numbers[k] < -1 || numbers[k] > 4096)
            throw std::runtime_error("onepass: a table with the number " + std::to_string(numbers[k]));
        }
        tables[t]->push_back(
            {numbers[0], int(numbers[1]), int(numbers[2]), int(numbers[3]), int(numbers[4]), int(numbers[5])});
      }
    }
    set_tables(compute, multiprocessors, std::move(made));
    return std::string();
  });
}

// Sets the switch of this thread (`scoped`; -1: as the process has it) or of the process, and says what it was. 2 only
// asks.
ONEPASS_API int onepass_set_invariant(bool scoped, int value, char* text, int64_t size) {
  return guarded(text, size, [&] {
    const int before = scoped ? thread_invariant : process_invariant.load();
    if (value == 2) return std::to_string(before);
    if (scoped)
      thread_invariant = value;
    else
      process_invariant = value != 0;
    return std::to_string(before);
  });
}
