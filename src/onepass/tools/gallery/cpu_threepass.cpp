// cpu-threepass: three loops, as in the definition.
//
// Idea: a loop for the maximum, a loop for the sum of exp(x - maximum), a loop that writes each exp(x - maximum) / sum.
//
// Traffic: reads 3MN, writes MN; from memory reads MN, writes MN while a row stays in the core's cache.
//
// Limit: arithmetic. Each element costs two calls of exp, one at a time and on one core, and memory waits for them. The
// sum is a double: a float would be off by 1e-5 for a row of 300000 elements.
#include "cpu.h"

namespace {

template <class T>
void softmax(const T* x, T* y, int64_t n) {
  float maximum = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < n; ++i) {
    if (float(x[i]) > maximum) maximum = float(x[i]);
  }
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += std::exp(float(x[i]) - maximum);
  for (int64_t i = 0; i < n; ++i) y[i] = T(std::exp(float(x[i]) - maximum) / float(sum));
}

}  // namespace

ONEPASS_VARIANT(onepass_gallery_cpu_threepass)
