// cpu-online: maximum and sum in one loop.
//
// Idea: keep the sum relative to the largest element so far, and where a larger one comes, rescale it by exp(old -
// new): the pair (maximum, sum) of all elements so far. The loops for the maximum and for the sum become one (Milakov
// and Gimelshein, arXiv:1805.02867).
//
// Traffic: reads 2MN, writes MN; from memory reads MN, writes MN while a row stays in the core's cache.
//
// Limit: arithmetic, still: as many calls of exp as before, one at a time on one core, and each element waits for the
// sum of the one before it. What is saved is a pass of comparisons, and for rows longer than the caches a read of
// memory.
#include "cpu.h"

namespace {

template <class T>
void softmax(const T* x, T* y, int64_t n) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  float maximum = -infinity;
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float value = float(x[i]);
    if (value == -infinity) continue;  // adds nothing, and before the first other value -inf - -inf would be NaN
    if (value > maximum) {
      sum *= std::exp(maximum - value);
      maximum = value;
    }
    sum += std::exp(value - maximum);
  }
  for (int64_t i = 0; i < n; ++i) y[i] = T(std::exp(float(x[i]) - maximum) / float(sum));
}

}  // namespace

ONEPASS_VARIANT(onepass_gallery_cpu_online)
