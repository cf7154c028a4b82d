// loss_backward.cpp: gradients of losses, compiled once per instruction set (ONEPASS_ISA is its name and namespace).
// The gradient of the score s of class c, where p is exp((s - m) - log l), is
//
//   p * (a + b * log p) + w[c] * d - picks[c]
//
// a, b and d are numbers of the row; w is 1 without weights. These numbers and the picks are first multiplied by the
// factor of the row's scores. The slope of the softcap comes last. Each element is read once, in place, and then
// written.
#include "loss_rows.h"

namespace onepass::ONEPASS_ISA {

namespace {

constexpr int64_t kPicks = 8192;    // elements of a tile whose picks are laid out at a time
constexpr int64_t kFetched = 2048;  // in rows: distance in elements to what is prefetched
constexpr int64_t kBlock = 1024;    // gradients that are buffered before their conversion

// kColumns: the lanes are rows; otherwise classes. For kPlain see LossPlan::is_plain.
template <class T, bool kColumns, bool kPlain>
struct LossBackward : LossRows<T> {
  using Base = LossRows<T>;
  using Base::L, Base::p, Base::plan, Base::weight, Base::plane;
  using typename Base::A, typename Base::Vector;
  // The strides between elements that are computed together. Short rows are copied, so that the stride is 1.
  const int64_t x_stride = this->last_stride(p.x_strides), dx_stride = this->last_stride(p.dx_strides);
  const bool copies = kColumns && p.n <= short_grad_row(sizeof(T)) && (x_stride != 1 || dx_stride != 1);
  const int64_t x_lane = copies ? 1 : kColumns ? x_stride : p.x_step;
  const int64_t dx_lane = copies ? 1 : kColumns ? dx_stride : p.dx_step;
  const A smoothed = A(p.smoothing / double(p.n)), total = p.total ? *static_cast<const A*>(p.total) : A(1);
  const A* const grads = static_cast<const A*>(p.grads);  // of terms, or of wide losses
  A* const picks = reinterpret_cast<A*>(scratch());       // picks of the elements of a tile or chunk; 0 between these
  T* const copy = reinterpret_cast<T*>(picks + kPicks);

  using Base::Base;

  // Numbers -----------------------------------------------------------------------------------------------------------

  struct Numbers {
    alignas(64) A factor[kLossColumns], a[kLossColumns], b[kLossColumns], d[kLossColumns], counts[kLossColumns];
    A pick[kLossColumns];  // for losses
    const A *m, *log_l;
    bool ignores;  // whether some rows are ignored; their counts are 0
  };
  A grad_of_loss(int64_t row) const {
    return (p.is_wide ? grads[row] : A(to_acc(static_cast<const T*>(p.grads)[row]))) / total;
  }
  A grad_of(int64_t number, int64_t row) const { return grads[number * p.rows + row]; }
  const A* weight_at(int64_t c) const { return weight ? weight + c : nullptr; }
  void loss_numbers(int64_t row, int64_t count, Numbers& of) const {
    const A of_class = 1 - this->smoothing, of_all = p.smoothing != 0 ? smoothed * this->weight_sum : A(0);
    const A of_d = -smoothed, of_lse = 2 * this->z_loss;
    A *const a = of.a, *const d = of.d, *const pick = of.pick;
    const A *const factor = of.factor, *const m = of.m, *const log_l = of.log_l;
    of.ignores = this->ignores(row, count);
    std::fill_n(a, count, grad_of_loss(0)), std::fill_n(pick, count, of_class), std::fill_n(of.counts, count, A(1));
    for (int64_t j = 0; p.grads_per_row && j < count; ++j) a[j] = grad_of_loss(row + j);
    for (int64_t j = 0; of.ignores && j < count; ++j) of.counts[j] = !this->is_ignored(row + j);
    for (int64_t j = 0; weight && j < count; ++j) {
      if (of.counts[j] != A(0)) pick[j] *= weight[p.index[row + j]];
    }
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) {
      const A grad = a[j], lse = m[j] + log_l[j], w = pick[j];
      a[j] = grad * (w + of_all + of_lse * lse) * factor[j], d[j] = grad * of_d * factor[j],
      pick[j] = grad * w * factor[j];
    }
    const A* const grad_lse = static_cast<const A*>(p.grad_lse);
    for (int64_t j = 0; grad_lse && j < count; ++j) a[j] += grad_lse[row + j] * factor[j];
    for (int64_t j = 0; of.ignores && j < count; ++j) {
      if (of.counts[j] == A(0)) a[j] = d[j] = pick[j] = 0;
    }
  }
  void term_numbers(int64_t row, int64_t count, Numbers& of) const {
    for (int64_t j = 0; j < count; ++j, ++row) {
      A a = grad_of(1, row), b = 0, d = 0;
      for (int64_t k = 0; k < p.picks; ++k) a += grad_of(p.first_pick_plane() + k, row);
      if (p.has_spread) d = -grad_of(p.spread_plane(), row), a -= d * this->weight_sum;
      if (p.has_entropy) b = -grad_of(p.entropy_plane(), row), a += b * *plane(p.entropy_plane(), row);
      of.a[j] = a * of.factor[j], of.b[j] = b * of.factor[j], of.d[j] = d * of.factor[j];
    }
  }
  void get_numbers(int64_t row, int64_t count, Numbers& of) const {
    of.m = plane(0, row), of.log_l = plane(1, row), of.ignores = false;
    std::fill_n(of.factor, count, A(p.factor));
    for (int64_t j = 0; this->scale && j < count; ++j) of.factor[j] *= this->scale[row + j];
    p.is_cross ? loss_numbers(row, count, of) : term_numbers(row, count, of);
  }
  // Adds the gradients of the picks of rows to those of the classes [first, last), or makes these 0 again. `grads`: for
  // a cross-entropy, the gradients of the picks. Other picks are multiplied by the factors.
  void lay_picks(int64_t row, int64_t count, int64_t first, int64_t last, int64_t width, bool clears, const A* grads,
                 const A* factors, int64_t paired = 0) const {
    const int64_t* const index = p.index + row * p.picks;
    const int64_t each = p.picks;
    const uint64_t classes = uint64_t(last - first);
    if (p.is_cross && !paired) {
      for (int64_t j = 0; j < count; ++j) {
        const uint64_t at = uint64_t(index[j] - first);
        if (at < classes) picks[int64_t(at) * width + j] = clears ? A(0) : grads[j];
      }
      return;
    }
    for (int64_t j = 0; j < count; ++j) {
      for (int64_t k = 0; k < each; ++k) {
        int64_t at = index[j * each + k] - first;
        if (uint64_t(at) >= classes) continue;
        if (at < paired) at = at / kPair * kPair + at % 2 * L + at % kPair / 2;
        A& pick = picks[at * width + j];
        const A grad = p.is_cross ? grads[j] : grad_of(p.first_pick_plane() + k, row + j) * factors[j];
        pick = clears ? A(0) : pick + grad;
      }
    }
  }

  // Elements ----------------------------------------------------------------------------------------------------------

  // Stores the gradients make(i, v), or make(i, v, count) for the first `count` elements of a vector.
  template <bool kPaired = false, class Make>
  ONEPASS_INLINE void store(T* to, int64_t count, Make make) const {
    if constexpr (std::is_same_v<A, float>) {
      if (dx_lane == 1) return store_row<kPaired, kPaired, false, !kPaired>(to, count, plan.streaming, make);
    }
    A block[kBlock];
    for (int64_t first = 0; first < count; first += kBlock) {
      const int64_t now = std::min(kBlock, count - first);
      Vector v[1];
      int64_t i = 0;
      for (; i + L <= now; i += L) make(first + i, v), store_as(block + i, v[0]);
      if (i < now) make(first + i, v, now - i), store_as(block + i, v[0]);
      for (i = 0; i < now; ++i) to[(first + i) * dx_lane] = from_acc<T>(block[i]);
    }
  }
  // The gradients of `count` elements at x. They are elements of one class, whose weight is at `w`, of the rows of a
  // tile; or of the classes of row j, whose weights begin at `w`.
  template <bool kPaired = false>
  void gradients(const T* x, T* dx, int64_t count, const Numbers& of, int64_t j, const A* w, const A* picked,
                 int64_t ahead) const {
    const A row_factor = of.factor[j], row_m = of.m[j], row_log_l = of.log_l[j];
    const A row_a = of.a[j], row_b = of.b[j], row_d = of.d[j];
    const bool caps = !kPlain && p.softcap != 0, has_entropy = !kPlain && p.has_entropy;
    const bool has_weights = !kPlain && weight, has_picks = p.picks > 0, ignores = kColumns && of.ignores;
    const int64_t lane = kPlain ? 1 : x_lane;
    const Base base = *this;
    // Computes the vectors from element i on. More than two at a time would not fit into the registers.
    const auto make = [=, &of](int64_t i, auto& v, auto... part) __attribute__((always_inline)) {
      constexpr int K = int(sizeof(v) / sizeof(Vector));
      const auto get = [=](const A* each, A one, Vector(&to)[K]) __attribute__((always_inline)) {
        kColumns ? load_operand<A>(each + i, 1, to, part...) : load_operand<A>(&one, 0, to, part...);
      };
      Vector log_p[K], slope[K], n[K];
      if (!kPlain) get(of.factor, row_factor, n);
      for (int k = 0; k < K; ++k) slope[k] = v[k] *= kPlain ? broadcast_as(row_factor) : n[k];
      if (caps) base.cap(v);
      get(of.m, row_m, n);
      for (int k = 0; k < K; ++k) v[k] -= n[k];
      get(of.log_l, row_log_l, n);
      for (int k = 0; k < K; ++k) log_p[k] = v[k] -= n[k];
      Base::exp_of(v);
      get(of.a, row_a, n);
      if (has_entropy) {
        Vector b[K];
        get(of.b, row_b, b);
        for (int k = 0; k < K; ++k) n[k] += v[k] == A(0) ? Vector{} : b[k] * log_p[k];
      }
      for (int k = 0; k < K; ++k) v[k] *= n[k];
      get(of.d, row_d, n);
      if (has_weights) {
        Vector each[K];
        load_operand<A>(kColumns ? w : w + i, kColumns ? 0 : 1, each, part...);
        for (int k = 0; k < K; ++k) n[k] *= each[k];
      }
      for (int k = 0; k < K; ++k) v[k] += n[k];
      if (has_picks) {
        load_operand<A>(picked + i, 1, n, part...);
        for (int k = 0; k < K; ++k) v[k] -= n[k];
      }
      if (caps) {
        for (Vector& each : slope) each *= base.uncap;
        apply_tanh_slope<sizeof(T) == 2>(slope);
        for (int k = 0; k < K; ++k) v[k] *= slope[k];
      }
      if (!ignores) return;
      load_operand<A>(of.counts + i, 1, n, part...);
      for (int k = 0; k < K; ++k) v[k] = n[k] != A(0) ? v[k] : Vector{};
    };
    store<kPaired>(dx, count, [=](int64_t i, auto& v, auto... part) __attribute__((always_inline)) {
      constexpr int K = int(sizeof(v) / sizeof(Vector)), kTwo = K < 2 ? 1 : 2;
      const char* const next = reinterpret_cast<const char*>(x + i * lane + ahead);
      for (int64_t line = 0; line < K * L * int64_t(sizeof(T)); line += kLine) __builtin_prefetch(next + line);
#pragma GCC unroll 2
      for (int k = 0; k < K; k += kTwo) {
        Vector two[kTwo];
        if constexpr (kPaired) {
          load_vectors<true>(x + i + k * L, two, part...);
        } else {
          load_operand<A>(x + (i + k * L) * lane, lane, two, part...);
        }
        make(i + k * L, two, part...);
#pragma GCC unroll 2
        for (int j = 0; j < kTwo; ++j) v[k + j] = two[j];
      }
    });
  }

  // Work items --------------------------------------------------------------------------------------------------------

  // Where the elements of a row begin.
  const T* x_of(int64_t row) const { return static_cast<const T*>(p.x) + this->offset_of(row, p.x_strides); }
  T* dx_of(int64_t row) const { return static_cast<T*>(p.dx) + this->offset_of(row, p.dx_strides); }

  void columns(int64_t item, Numbers& numbers) const {
    const auto [row, count] = this->tile(item);
    const T* const x = x_of(row);
    T* const dx = dx_of(row);
    get_numbers(row, count, numbers);
    if (!copies) return steps(row, count, x, p.x_step, dx, p.dx_step, numbers);
    this->copy_rows(x, x_stride, p.x_step, copy, 1, kLossColumns, count, p.n);
    steps(row, count, copy, kLossColumns, copy, kLossColumns, numbers);
    this->copy_rows(copy, 1, kLossColumns, dx, dx_stride, p.dx_step, count, p.n);
  }
  void steps(int64_t row, int64_t count, const T* x, int64_t x_step, T* dx, int64_t dx_step, Numbers& numbers) const {
    const int64_t width = std::min(kLossColumns, up_to(count, L)), classes = kPicks / width;
    for (int64_t first = 0; first < p.n; first += classes) {
      const int64_t last = std::min(first + classes, p.n);
      lay_picks(row, count, first, last, width, false, numbers.pick, numbers.factor);
      for (int64_t c = first; c < last; ++c) {
        const int64_t ahead = c + 1 < p.n ? x_step : kLossColumns * x_lane - c * x_step;
        gradients(x + c * x_step, dx + c * dx_step, count, numbers, 0, weight_at(c), picks + (c - first) * width,
                  ahead);
      }
      lay_picks(row, count, first, last, width, true, numbers.pick, numbers.factor);
    }
  }
  // Pairs of vectors of bfloat16 stay deinterleaved if no NaN comes from the input. This takes fewer steps.
  static constexpr bool kPairs = std::is_same_v<T, bfloat16> && kPlain && !kColumns;
  bool stays_in_pairs(const Numbers& of, int64_t j) const {
    // If a number is not finite, its difference with itself is NaN, and so is the sum.
    const A none = (of.log_l[j] - of.log_l[j]) + (of.a[j] - of.a[j]) + (of.d[j] - of.d[j]);
    return kPairs && dx_lane == 1 && none == A(0);
  }
  // Stores the gradients of the classes [first, last) of a row. Its numbers are those of row j in `numbers`.
  void classes(int64_t row, int64_t first, int64_t last, const T* x, T* dx, const Numbers& numbers, int64_t j) const {
    const int64_t count = last - first;
    if (numbers.ignores && numbers.counts[j] == A(0)) {
      return store(dx, count, [](int64_t, auto& v, auto...) __attribute__((always_inline)) {
        for (Vector& each : v) each = Vector{};
      });
    }
    // The middle part stays in pairs. Streaming stores write whole lines.
    int64_t ends[] = {count, count, count};
    if (stays_in_pairs(numbers, j)) {
      ends[0] = plan.streaming ? std::min(count, int64_t(-uintptr_t(dx) % kLine / sizeof(T))) : 0;
      ends[1] = ends[0] + (count - ends[0]) / kUnroll * kUnroll;
    }
    const A *const pick = numbers.pick + j, *const factor = numbers.factor + j;
    int64_t from = 0;
    for (int part = 0; part < 3; from = ends[part++]) {
      const int64_t to = ends[part], paired = part == 1 ? to - from : 0;
      if (from == to) continue;
      lay_picks(row, 1, first + from, first + to, 1, false, pick, factor, paired);
      if (kPairs && paired) {
        gradients<kPairs>(x + from, dx + from, paired, numbers, j, nullptr, picks, kFetched);
      } else {
        gradients(x + from * p.x_step, dx + from * dx_lane, to - from, numbers, j, weight_at(first + from), picks,
                  kFetched * p.x_step);
      }
      lay_picks(row, 1, first + from, first + to, 1, true, pick, factor, paired);
    }
  }
  void rows(int64_t item, Numbers& numbers) const {
    const auto [row, count] = this->tile(item);
    const T* const x = x_of(row);
    T* const dx = dx_of(row);
    get_numbers(row, count, numbers);
    for (int64_t j = 0; j < count; ++j) {
      classes(row + j, 0, p.n, x + j * x_stride, dx + j * dx_stride, numbers, j);
    }
  }
  void chunk(int64_t item, Numbers& numbers) const {
    const int64_t row = item / plan.per_dim, first = item % plan.per_dim * kLossChunk;
    get_numbers(row, 1, numbers);
    classes(row, first, std::min(first + kLossChunk, p.n), x_of(row) + first * p.x_step, dx_of(row) + first * p.dx_step,
            numbers, 0);
  }
  void run(int64_t begin, int64_t end) const {
    std::fill_n(picks, p.picks ? std::min(kPicks, plan.in_columns ? kPicks : p.n) : 0, A(0));
    Numbers numbers;
    for (int64_t item = begin; item < end; ++item) {
      if constexpr (kColumns) {
        columns(item, numbers);
      } else {
        p.n > kLossChunk ? chunk(item, numbers) : rows(item, numbers);
      }
    }
    if (plan.streaming) fence_streaming_stores();
  }
};

}  // namespace

void run_loss_backward(const LossProblem& p, const LossPlan& plan, int64_t begin, int64_t end) {
  dispatch_type(p.type, [&](auto type) {
    using T = TypeOf<decltype(type)>;
    const auto run = [&](auto in_columns) {
      plan.is_plain ? LossBackward<T, in_columns.value, kHasFastPaths>(p, plan).run(begin, end)
                    : LossBackward<T, in_columns.value, false>(p, plan).run(begin, end);
    };
    plan.in_columns ? run(std::true_type()) : run(std::false_type());
  });
}

}  // namespace onepass::ONEPASS_ISA
