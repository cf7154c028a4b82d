// walks.h: the lengths and numbers of rows that warm-up walks. The plan of any rows is the plan of some of these.
#pragma once

#include <set>
#include <vector>

#include "../plan/tables.h"

namespace onepass {

constexpr int64_t kEveryWalked = 4224;                      // up to here every length is walked
constexpr int64_t kLongestWalked = (int64_t(1) << 33) + 1;  // and up to here the lengths at which a plan may change
// Numbers of rows, closer together if they are small: what a block keeps depends on how many rows share the chip. Rows
// of a reduction are streamed, unless there are fewer rows than multiprocessors, or a few more; these numbers are
// walked too.
inline std::vector<int64_t> rows_to_walk(const Gpu& gpu) {
  const int64_t chip = gpu.sm_count;
  return {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, chip * 11 / 20, 128, chip + 1, 256, 512, 1024, 4096, 1000000};
}

// Lengths such that a plan of any length is the plan of one of these: all short ones; lengths around each limit of the
// tables (and around its half and its double, for other sizes of elements), and around the powers of two and the
// middles between them; and lengths in steps of 1%.
inline std::vector<int64_t> lengths_to_walk(const Tables& tables) {
  std::set<int64_t> lengths;
  for (int64_t n = 1; n <= kEveryWalked; ++n) lengths.insert(n);
  const auto around = [&](int64_t n) {
    if (n > kLongestWalked) return;
    for (const int64_t step : {-17, -16, -9, -8, -7, -4, -1, 0, 1, 4, 7, 8, 9, 16, 17}) {
      if (n + step > kEveryWalked) lengths.insert(n + step);
    }
  };
  const auto limits = [&](const auto& table) {
    for (const Entry& entry : table) {
      if (entry.limit == kAnyLength) continue;
      for (const int64_t n : {entry.limit / 2, entry.limit, entry.limit * 2}) around(n);
    }
  };
  for (const NamedTable& named : kTables) limits(tables.*named.table);
  for (const bool half : {false, true}) limits(rows_backward_table(half));
  for (int64_t n = 4096; n <= kLongestWalked; n *= 2) around(n), around(n + n / 2);
  for (double n = kEveryWalked; n < double(kLongestWalked); n *= 1.01)
    lengths.insert(int64_t(n) | 1), lengths.insert(int64_t(n) & ~7);
  return {lengths.begin(), lengths.end()};
}

// The element of a vector with which a tensor begins: the first if the allocator placed it, others for views.
constexpr int kFirsts[] = {0, 1, 2, 4};

}  // namespace onepass
