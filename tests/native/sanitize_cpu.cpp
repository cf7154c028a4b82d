// sanitize_cpu.cpp: the CPU engine without torch, over random calls, a third of them gradients, in memory that ends
// where the tensors end. Built with -fsanitize=address,undefined by scripts/sanitize.py, once with the engine of every
// instruction set; ONEPASS_CPU_CAPABILITY says which one is driven.
//
//   sanitize_cpu SEED CALLS [read | page | write | value]
//
// A buffer is as long as its tensor reaches: from the heap, or at either end of an island between two pages that cannot
// be touched. The pages catch what AddressSanitizer does not look at, masked vector accesses among them. Results are
// compared with the definition in double (long double for doubles), what lies between their elements with what was
// there before, and a call cut into parts, as threads cut it, with the whole one, bit by bit. Prints the instruction
// set and how many calls were checked; exits with 1 at the first that is wrong. The last argument plants a fault, which
// must be found.
#include "sanitize_backward.h"

namespace {

using namespace onepass;

// Sizes, the reduced dims and strides of input and output, as a tensor has them.
struct Shape {
  int rank = 0;
  int64_t sizes[5], x[5], y[5];
  bool reduced[5] = {};

  int64_t numel() const { return std::accumulate(sizes, sizes + rank, int64_t(1), std::multiplies<>()); }
  // How many elements a tensor of these strides reaches over.
  int64_t reach(const int64_t* strides) const {
    int64_t last = 0;
    for (int i = 0; i < rank; ++i) last += (sizes[i] - 1) * strides[i];
    return last + 1;
  }
};

void strides(Draw& draw, Shape& shape, int64_t* made, bool skip_reduced, bool gaps, bool zeros) {
  strides(draw, shape.rank, shape.sizes, skip_reduced ? shape.reduced : nullptr, made, gaps, zeros);
}

Shape any_shape(Draw& draw, Function function) {
  Shape shape;
  const bool plain = draw.one_in(2);  // rows, columns, or something in the middle
  shape.rank = plain ? int(1 + draw.upto(2)) : int(draw.upto(5));
  const int long_one = shape.rank ? int(draw.upto(shape.rank - 1)) : 0;
  for (int i = 0; i < shape.rank; ++i) {
    shape.sizes[i] = i == long_one ? length(draw) : draw.of<int64_t>({1, 2, 3, 4, 5, 8, 17, 65});
    shape.reduced[i] = plain ? i == long_one : draw.one_in(2);
  }
  if (plain && draw.one_in(15)) shape.sizes[long_one] = 60000 + draw.upto(40000);
  for (int i = 0; shape.numel() > kMost && i < shape.rank; ++i) {
    if (i != long_one) shape.sizes[i] = 1 + draw.upto(1);
  }
  if (!plain && shape.rank) shape.reduced[draw.upto(shape.rank - 1)] = true;
  const bool gaps = draw.one_in(plain ? 4 : 2);
  strides(draw, shape, shape.x, false, gaps, draw.one_in(3));
  if (function == Function::state ||
      (is_reduction(function) && draw.one_in(2))) {  // contiguous, without the reduced dims
    int64_t step = 1;
    for (int i = shape.rank - 1; i >= 0; --i) {
      shape.y[i] = shape.reduced[i] ? 0 : step;
      step *= shape.reduced[i] ? 1 : shape.sizes[i];
    }
  } else if (!is_reduction(function) && draw.one_in(2)) {  // as torch.empty_like of a tensor without gaps
    std::copy(shape.x, shape.x + shape.rank, shape.y);
    for (int i = 0; i < shape.rank; ++i) {
      if (shape.x[i] == 0 && shape.sizes[i] > 1) strides(draw, shape, shape.y, false, gaps, false);
    }
  } else {
    strides(draw, shape, shape.y, is_reduction(function), gaps, false);
  }
  return shape;
}

// Contiguous, and more than what goes past the caches.
Shape huge_shape(Draw& draw, Function function) {
  const int64_t n = draw.of<int64_t>({33, 781, 4096, 70001, 2200000}), rows = 2200000 / n;
  Shape shape = {2, {rows, n}, {n, 1}, {n, 1}, {false, true}};
  if (draw.one_in(3)) std::swap(shape.reduced[0], shape.reduced[1]);
  for (int i = 0; i < 2 && is_reduction(function); ++i) shape.y[i] = !shape.reduced[i];
  return shape;
}

Shape shape_of(Draw& draw, Function function) {
  if (draw.one_in(400)) return huge_shape(draw, function);
  for (;;) {
    const Shape shape = any_shape(draw, function);
    if (shape.reach(shape.x) <= kReach && shape.reach(shape.y) <= kReach) return shape;
  }
}

template <class X>
void fill(Draw& draw, X* x, int64_t count) {
  std::normal_distribution<double> normal(draw.of({0.0, 0.0, 0.0, -500.0, 2500.0}),
                                          draw.of({0.01, 1.0, 4.0, 30.0, 300.0}));
  for (int64_t i = 0; i < count; ++i) x[i] = rounded<X>(normal(draw.engine));
  const double inf = std::numeric_limits<double>::infinity();
  for (int64_t times = draw.one_in(3) ? draw.upto(4) : 0; times > 0; --times) {
    const double special =
        draw.of({inf, -inf, -inf, std::nan(""), 0.0, -0.0, 88.7, -103.9, 6e4, -6e4, 1e-40, 3e38, -3e38});
    const int64_t step = draw.of<int64_t>({1, 2, 7, 64, 1000000});
    for (int64_t i = draw.upto(count - 1); i < count; i += step) x[i] = rounded<X>(special);
  }
}

// Of all elements of some dims, where they are in the input and in the output.
std::vector<std::pair<int64_t, int64_t>> places(const Shape& shape, bool reduced) {
  std::vector<std::pair<int64_t, int64_t>> all = {{0, 0}};
  for (int d = 0; d < shape.rank; ++d) {
    if (shape.reduced[d] != reduced) continue;
    std::vector<std::pair<int64_t, int64_t>> next;
    for (const auto& [x, y] : all)
      for (int64_t i = 0; i < shape.sizes[d]; ++i) next.emplace_back(x + i * shape.x[d], y + i * shape.y[d]);
    all = std::move(next);
  }
  return all;
}

struct Driver {
  Draw draw;
  const CpuEngine& engine = cpu_engine();
  Gradients gradients{draw, engine};
  Island x_island, y_island;
  std::string plant;
  int64_t planted = 0;

  int64_t lead() { return draw.one_in(2) ? 0 : draw.upto(16); }

  // A call as torch/dispatch.cpp makes it, but cut into any parts, in any order; or `whole`.
  void make(const Problem& call, bool whole) {
    engine.execute(call, [&](int64_t count, int64_t, auto&& work) { in_parts(draw, count, whole, work); });
  }

  template <class X, class Y>
  bool once(Function function, DType x_type, DType y_type) {
    const Shape shape = shape_of(draw, function);
    const bool reduced = is_reduction(function), in_place = x_type == y_type && !reduced && draw.one_in(5) &&
                                                            std::equal(shape.x, shape.x + shape.rank, shape.y);
    const int64_t x_reach = shape.reach(shape.x), planes = function == Function::state ? 2 : 1;
    const auto rows = places(shape, false), elements = places(shape, true);
    Shape result = shape;
    for (int i = 0; i < shape.rank; ++i) result.sizes[i] = reduced && shape.reduced[i] ? 1 : shape.sizes[i];
    const int64_t y_reach = planes == 2 ? 2 * int64_t(rows.size()) : result.reach(shape.y);
    Place x_place = Place(draw.upto(2)), y_place = Place(draw.upto(2));
    if (!plant.empty()) x_place = plant == "page" ? Place::end : Place::heap;
    Buffer<X> x(x_island, x_place, x_reach, lead());
    Buffer<Y> own(y_island, y_place, in_place ? 1 : y_reach, lead());
    fill(draw, x.data, x_reach);
    const std::vector<X> given(x.data, x.data + x_reach);
    Y* const y = in_place ? reinterpret_cast<Y*>(x.data) : own.data;
    if (!in_place) std::memset(static_cast<void*>(y), 0xa5, size_t(y_reach) * sizeof(Y));
    const std::vector<Y> before(y, y + y_reach);

    const bool flat = shape.rank == 2 && shape.reduced[1] && !shape.reduced[0] && shape.x[1] == 1 && draw.one_in(2) &&
                      shape.x[0] == shape.sizes[1] &&
                      (reduced ? shape.y[0] == 1 : shape.y[1] == 1 && shape.y[0] == shape.x[0]);
    const Layout layout = flat ? contiguous_layout(shape.sizes[0], shape.sizes[1], reduced)
                               : make_forward_layout(shape.rank, shape.sizes, shape.x, shape.y, shape.reduced, reduced);
    const Problem call = Problem::forward(layout, function, x_type, y_type, x.data, y);
    make(call, false);
    if (plant == "read") planted += reinterpret_cast<const volatile uint8_t*>(x.data)[x_reach * int64_t(sizeof(X))];
    if (plant == "page") planted += unseen(x.data + x_reach);
    if (plant == "value") y[rows.back().second] = rounded<Y>(0.123);

    std::vector<char> written(size_t(y_reach), 0);
    for (const auto& row : rows) {
      const Row<Y> want(function, given.data() + row.first, elements);
      for (size_t i = 0; i < (reduced ? 1 : elements.size()); ++i) {
        const int64_t at = row.second + (reduced ? 0 : elements[i].second);
        written[size_t(at)] = 1;
        if (!want.good(y[at], i, false)) return wrong(call, shape, want, y[at], i, false);
        if (planes == 2) {
          const int64_t second = at + int64_t(rows.size());
          written[size_t(second)] = 1;
          if (!want.good(y[second], i, true)) return wrong(call, shape, want, y[second], i, true);
        }
      }
    }
    if (plant == "write" && !written[size_t(y_reach / 2)]) y[y_reach / 2] = rounded<Y>(0.123);
    for (int64_t i = 0; i < y_reach; ++i) {
      if (!written[size_t(i)] && std::memcmp(&before[size_t(i)], &y[i], sizeof(Y)))
        return told(
            call, shape,
            "element " + std::to_string(i) + " of the memory of the result is no element of it, and was written");
    }
    if (!in_place && std::memcmp(given.data(), x.data, given.size() * sizeof(X)))
      return told(call, shape, "the input was written");
    if (in_place) std::copy(given.begin(), given.end(), x.data);
    const std::vector<Y> first = in_place ? std::vector<Y>() : std::vector<Y>(y, y + y_reach);
    if (in_place || !draw.one_in(3)) return true;
    make(call, true);
    return !std::memcmp(first.data(), y, first.size() * sizeof(Y)) ||
           told(call, shape, "in one piece it has other bits");
  }

  template <class Want, class Y>
  bool wrong(const Problem& call, const Shape& shape, const Want& want, Y got, size_t i, bool second) {
    char text[160];
    std::snprintf(text, sizeof text, "element %zu of a row%s: got %.9g, want %.9g within %.3g", i,
                  second ? " (sum)" : "", double(wide(got)), double(want.value(i, second)),
                  double(want.limit(i, second)));
    return told(call, shape, text + ("; the row begins with " + want.begin()));
  }

  bool told(const Problem& call, const Shape& shape, const std::string& what) {
    static const char* const kTypes[] = {"float32", "float64", "float16", "bfloat16"};
    std::printf("%s %d, %s -> %s, x at %p, y at %p:", name(call.layout.view), int(call.function),
                kTypes[int(call.type(kX))], kTypes[int(call.type(kY))], call.tensors[kX].data, call.tensors[kY].data);
    for (int i = 0; i < shape.rank; ++i) {
      std::printf(" %ld%s (%ld, %ld)", long(shape.sizes[i]), shape.reduced[i] ? "*" : "", long(shape.x[i]),
                  long(shape.y[i]));
    }
    std::printf(": %s\n", what.c_str());
    return false;
  }

  bool any() {
    if (plant.empty() && draw.one_in(3)) return gradients.any();
    const Function function = Function(draw.upto(4));
    const bool same = function == Function::logsumexp, state = function == Function::state;
    switch (draw.upto(state ? 3 : same ? 5 : 7)) {
      case 0: return once<float, float>(function, DType::float32, DType::float32);
      case 1: return once<double, double>(function, DType::float64, DType::float64);
      case 2:
        if (state) return once<float16, float>(function, DType::float16, DType::float32);
        return once<float16, float16>(function, DType::float16, DType::float16);
      case 3:
        if (state) return once<bfloat16, float>(function, DType::bfloat16, DType::float32);
        return once<bfloat16, bfloat16>(function, DType::bfloat16, DType::bfloat16);
      case 4: return once<float16, float>(function, DType::float16, DType::float32);
      case 5: return once<bfloat16, float>(function, DType::bfloat16, DType::float32);
      case 6: return once<float, float16>(function, DType::float32, DType::float16);
      default: return once<float, bfloat16>(function, DType::float32, DType::bfloat16);
    }
  }
};

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) return std::printf("usage: sanitize_cpu SEED CALLS [read | page | write | value]\n"), 2;
  Driver driver;
  driver.draw.engine.seed(std::stoull(arguments[1]));
  driver.plant = count > 3 ? arguments[3] : "";
  const int64_t calls = std::stoll(arguments[2]);
  for (int64_t i = 0; i < calls; ++i) {
    if (!driver.any())
      return std::printf("%s: call %ld of seed %s is wrong\n", driver.engine.isa, long(i), arguments[1]), 1;
  }
  std::printf("%s %ld\n", driver.engine.isa, long(calls));
}
