// sanitize_backward.h: gradients of the CPU engine over random calls: shapes, strides, expanded gradients, in place,
// special values; compared with the definition in double (long double of doubles), with the memory beside dx and the
// operands before, and, cut into parts, with the whole call and with whole rows, bit by bit.
#pragma once

#include "cpu/isa_dispatch.h"
#include "sanitize_draw.h"

namespace {

using namespace onepass;

struct Gradients {
  Draw& draw;
  const CpuEngine& engine;
  Island islands[kBackwardTensors] = {};

  Gradients(Draw& from, const CpuEngine& of) : draw(from), engine(of) {}

  int rank = 0;
  int64_t sizes[5] = {}, strides_of[kBackwardTensors][5] = {};
  bool reduced[5] = {};

  int64_t numel() const { return std::accumulate(sizes, sizes + rank, int64_t(1), std::multiplies<>()); }
  int64_t reach(int tensor) const {
    int64_t last = 0;
    for (int i = 0; i < rank; ++i) last += (sizes[i] - 1) * strides_of[tensor][i];
    return last + 1;
  }

  void any_shape(bool one_a_row) {
    const bool plain = draw.one_in(2), huge = draw.one_in(400);
    rank = huge ? 2 : plain ? int(1 + draw.upto(2)) : int(draw.upto(5));
    const int at = rank ? int(draw.upto(rank - 1)) : 0;
    for (int i = 0; i < rank; ++i) {
      sizes[i] = i == at ? length(draw) : draw.of<int64_t>({1, 2, 3, 4, 5, 8, 17, 65, 80});
      reduced[i] = plain || huge ? i == at : draw.one_in(2);
    }
    if (plain && draw.one_in(15)) sizes[at] = 60000 + draw.upto(40000);
    for (int i = 0; numel() > kMost && i < rank; ++i) {
      if (i != at) sizes[i] = 1 + draw.upto(1);
    }
    if (huge) sizes[at] = draw.of<int64_t>({16, 33, 781, 4096, 70001, 2200000}), sizes[1 - at] = 2200000 / sizes[at];
    if (!plain && rank) reduced[draw.upto(rank - 1)] = true;
    const bool gaps = !huge && draw.one_in(4), contiguous = huge || draw.one_in(2);
    for (int t = 0; t < kBackwardTensors; ++t) {
      const bool of_rows = t == kLse || (t == kGrad && one_a_row), zeros = t != kDx && draw.one_in(3) && !huge;
      if (contiguous && !zeros) {
        int64_t step = 1;
        for (int i = rank - 1; i >= 0; --i) {
          const bool gone = of_rows && reduced[i];
          strides_of[t][i] = gone ? 0 : step;
          step *= gone ? 1 : sizes[i];
        }
      } else if ((t == kSaved || (t == kGrad && !one_a_row)) && draw.one_in(2) && !zeros) {
        std::copy(strides_of[kDx], strides_of[kDx] + rank, strides_of[t]);
      } else {
        strides(draw, rank, sizes, of_rows ? reduced : nullptr, strides_of[t], gaps, zeros);
      }
      if (t == kGrad && !one_a_row && draw.one_in(8)) {  // the same along a row, or everywhere
        for (int i = 0; i < rank; ++i) strides_of[t][i] *= !reduced[i];
      }
    }
  }

  // Offsets of all elements of some dims in each tensor.
  typedef std::array<int64_t, kBackwardTensors> At;
  std::vector<At> places(bool of_reduced) const {
    std::vector<At> all = {At{}};
    for (int d = 0; d < rank; ++d) {
      if (reduced[d] != of_reduced) continue;
      std::vector<At> next;
      for (const At& at : all) {
        for (int64_t i = 0; i < sizes[d]; ++i) {
          next.push_back(at);
          for (int t = 0; t < kBackwardTensors; ++t) next.back()[size_t(t)] += i * strides_of[t][d];
        }
      }
      all = std::move(next);
    }
    return all;
  }

  template <class Y>
  void fill(Y* to, int64_t count, double mean, double deviation, std::initializer_list<double> specials) {
    std::normal_distribution<double> normal(mean, deviation);
    for (int64_t i = 0; i < count; ++i) to[i] = rounded<Y>(normal(draw.engine));
    for (int64_t times = draw.one_in(4) ? draw.upto(3) : 0; times > 0; --times) {
      const double special = draw.of(specials);
      const int64_t step = draw.of<int64_t>({1, 2, 7, 64, 1000000});
      for (int64_t i = draw.upto(count - 1); i < count; i += step) to[i] = rounded<Y>(special);
    }
  }

  // Runs a call as the operators do, but cut into any parts. With `whole_rows` long rows are not cut into chunks: so
  // are those that are enough for all threads.
  void make(Problem call, bool whole, bool whole_rows) {
    call.threads = whole_rows ? 0 : int64_t(1) << 20;
    engine.execute(call, [&](int64_t count, int64_t, auto&& work) { in_parts(draw, count, whole, work); });
  }

  // Y: of what was saved, D: of dx, R: of the result's gradient, and of logsumexp's result.
  template <class Y, class D, class R = Y>
  bool once(Function function, DType type, DType dx_type) {
    using Real = std::conditional_t<sizeof(Y) == 8, long double, double>;
    const bool lse = function == Function::logsumexp, log = function == Function::log_softmax;
    do {
      any_shape(lse);
    } while (numel() <= kMost * 5 && std::max({reach(kDx), reach(kSaved), reach(kGrad), reach(kLse)}) > kReach);
    const auto rows = places(false), elements = places(true);
    const auto place = [&] { return Place(draw.upto(2)); };
    const auto lead = [&] { return draw.one_in(2) ? 0 : draw.upto(16); };
    const auto same = [&](int t) { return std::equal(strides_of[kDx], strides_of[kDx] + rank, strides_of[t]); };
    const bool in_y = std::is_same_v<Y, D> && same(kSaved) && draw.one_in(5);
    const bool in_g = std::is_same_v<R, D> && !lse && !in_y && same(kGrad) && draw.one_in(5);
    Buffer<Y> y(islands[kSaved], place(), reach(kSaved), lead());
    Buffer<R> g(islands[kGrad], place(), reach(kGrad), lead());
    Buffer<R> of_lse(islands[kLse], place(), lse ? reach(kLse) : 1, lead());
    Buffer<D> own(islands[kDx], place(), in_y || in_g ? 1 : reach(kDx), lead());
    const double inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
    fill(g.data, reach(kGrad), draw.of({0.0, 0.0, 1.0}), draw.of({0.0, 0.01, 1.0, 100.0}), {inf, -inf, nan, 0.0, 6e4});
    if (lse) {
      fill(y.data, reach(kSaved), draw.of({0.0, -300.0, 700.0}), draw.of({0.0, 1.0, 5.0}), {-inf, inf, nan, 0.0});
    } else if (log) {
      fill(y.data, reach(kSaved), -8, draw.of({0.0, 1.0, 4.0}), {-inf, -0.0, nan, -40.0});
      for (int64_t i = 0; i < reach(kSaved); ++i) {
        if (wide(y.data[i]) > 0) y.data[i] = rounded<Y>(-0.25);
      }
    } else {
      fill(y.data, reach(kSaved), 0, 1.0 / double(elements.size()), {0.0, 1.0, nan, 1e-40, 0.5});
      for (int64_t i = 0; i < reach(kSaved); ++i) y.data[i] = rounded<Y>(std::fabs(wide(y.data[i])));
    }
    // A logsumexp of each row; where rows share one, that of the last.
    for (const At& row : rows) {
      Real top = -inf, sum = 0;
      for (const At& e : elements) top = std::fmax(top, Real(wide(y.data[row[kSaved] + e[kSaved]])));
      for (const At& e : elements) sum += std::exp(wide(y.data[row[kSaved] + e[kSaved]]) - (std::isinf(top) ? 0 : top));
      if (lse) of_lse.data[row[kLse]] = rounded<R>(double((std::isinf(top) ? 0 : top) + std::log(sum)));
    }
    for (const At& row : rows) {
      for (const At& e : elements) {
        if (!lse) break;
        Y& x = y.data[row[kSaved] + e[kSaved]];
        const double top = wide(of_lse.data[row[kLse]]);
        if (wide(x) > top) x = rounded<Y>(sizeof(R) > sizeof(Y) ? top - std::fabs(top) / 64 : top);
      }
    }
    const std::vector<Y> y_given(y.data, y.data + reach(kSaved));
    const std::vector<R> g_given(g.data, g.data + reach(kGrad));
    D* const dx = in_y ? reinterpret_cast<D*>(y.data) : in_g ? reinterpret_cast<D*>(g.data) : own.data;
    const int64_t reached = reach(kDx);
    if (!in_y && !in_g) std::memset(static_cast<void*>(dx), 0xa5, size_t(reached) * sizeof(D));
    const std::vector<D> before(dx, dx + reached);
    const int64_t* const each[] = {strides_of[0], strides_of[1], strides_of[2], strides_of[3]};
    const Problem call = Problem::backward(make_backward_layout(rank, sizes, each, reduced, lse), function, type,
                                           dx_type, dx, y.data, g.data, lse ? of_lse.data : nullptr);
    make(call, false, false);

    const Numbers out = kNumbers<D>;
    const double inner = std::max(sizeof(Y) == 8 ? 4e-16 : 1.2e-7, sizeof(D) == 2 ? 0x1p-18 : 0.0);
    std::vector<char> written(size_t(reached), 0);
    for (const At& row : rows) {
      const auto y_at = [&](const At& e) { return Real(wide(y_given[size_t(row[kSaved] + e[kSaved])])); };
      const auto g_at = [&](const At& e) { return Real(wide(g_given[size_t(row[kGrad] + e[kGrad])])); };
      Real sum = 0, size = 0;
      for (const At& e : elements) {
        const Real term = log ? g_at(e) : y_at(e) * g_at(e);
        sum += term, size += std::fabs(term);
      }
      for (const At& e : elements) {
        Real want, terms;
        bool vanishes = false;  // an infinite gradient times an exponential that is 0 in floats: NaN, as torch has it
        if (lse) {
          const Real d = y_at(e) - Real(wide(of_lse.data[row[kLse]]));
          want = g_at(e) * std::exp(d), terms = std::fabs(want) * (1 + (std::isfinite(d) ? std::fabs(d) : 0));
          vanishes = std::isinf(g_at(e)) && sizeof(Y) < 8 && d < -100;
        } else if (log) {
          want = g_at(e) - std::exp(y_at(e)) * sum;
          terms =
              std::fabs(g_at(e)) + std::exp(y_at(e)) * size * (1 + (std::isfinite(y_at(e)) ? std::fabs(y_at(e)) : 0));
        } else {
          want = y_at(e) * (g_at(e) - sum) * (function == Function::softmin ? -1 : 1);
          terms = y_at(e) * (std::fabs(g_at(e)) + size);
        }
        const int64_t at = row[kDx] + e[kDx];
        written[size_t(at)] = 1;
        const double got = wide(dx[at]);
        const Real limit = out.eps * std::fabs(want) + 8 * inner * terms + 2 * std::max(out.tiny * out.eps, 1.2e-38);
        const bool near = std::fabs(Real(got) - want) <= limit, over = std::fabs(want) + limit >= Real(out.top);
        const bool good = std::isnan(want) || (vanishes && std::isnan(got))
                              ? std::isnan(got)
                              : near || (over && std::isinf(got) && (got > 0) == (want > 0));
        if (good) continue;
        char text[160];
        std::snprintf(text, sizeof text, "element %ld: got %.9g, want %.9g within %.3g", long(at), got, double(want),
                      double(limit));
        return told(call, text, in_y, in_g);
      }
    }
    for (int64_t i = 0; i < reached; ++i) {
      if (!written[size_t(i)] && std::memcmp(&before[size_t(i)], &dx[i], sizeof(D)))
        return told(call, "what is no element of dx was written", in_y, in_g);
    }
    if (!in_y && std::memcmp(y_given.data(), y.data, y_given.size() * sizeof(Y)))
      return told(call, "the saved tensor was written", in_y, in_g);
    if (!in_g && std::memcmp(g_given.data(), g.data, g_given.size() * sizeof(R)))
      return told(call, "the result's gradient was written", in_y, in_g);
    const std::vector<D> first(dx, dx + reached);
    for (int again = 0; again < 2; ++again) {
      std::copy(y_given.begin(), y_given.end(), y.data), std::copy(g_given.begin(), g_given.end(), g.data);
      make(call, true, again);
      if (std::memcmp(first.data(), dx, first.size() * sizeof(D)))
        return told(call, again ? "whole rows have other bits" : "in one piece it has other bits", in_y, in_g);
    }
    return true;
  }

  bool told(const Problem& call, const std::string& what, bool in_y, bool in_g) {
    static const char* const kTypes[] = {"float32", "float64", "float16", "bfloat16"};
    std::printf("gradient, %s %d, %s -> %s%s:", name(call.layout.view), int(call.function),
                kTypes[int(call.type(kGrad))], kTypes[int(call.type(kDx))],
                in_y   ? ", in place of y"
                : in_g ? ", in place of the gradient"
                       : "");
    for (int i = 0; i < rank; ++i) {
      std::printf(" %ld%s (%ld, %ld, %ld, %ld)", long(sizes[i]), reduced[i] ? "*" : "", long(strides_of[0][i]),
                  long(strides_of[1][i]), long(strides_of[2][i]), long(strides_of[3][i]));
    }
    std::printf(": %s\n", what.c_str());
    return false;
  }

  template <class Y>
  bool to_any(Function function, DType type) {
    if constexpr (sizeof(Y) == 2) {
      if (function == Function::logsumexp && draw.one_in(2)) return once<Y, Y, float>(function, DType::float32, type);
    }
    if (function == Function::logsumexp || draw.one_in(2)) return once<Y, Y>(function, type, type);
    switch (draw.upto(3)) {
      case 0: return once<Y, float>(function, type, DType::float32);
      case 1: return once<Y, double>(function, type, DType::float64);
      case 2: return once<Y, float16>(function, type, DType::float16);
      default: return once<Y, bfloat16>(function, type, DType::bfloat16);
    }
  }
  bool any() {
    const Function function = Function(draw.upto(3));
    switch (draw.upto(3)) {
      case 0: return to_any<float>(function, DType::float32);
      case 1: return to_any<double>(function, DType::float64);
      case 2: return to_any<float16>(function, DType::float16);
      default: return to_any<bfloat16>(function, DType::bfloat16);
    }
  }
};

}  // namespace
