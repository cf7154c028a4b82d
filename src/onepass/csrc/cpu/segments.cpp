// segments.cpp: rows of unequal length (segments): their plan, functions and gradients, compiled once per instruction
// set (ONEPASS_ISA is its name and namespace).
//
// Blocks of neighbouring segments are copied (segment_copies.h) and computed (segment_block.h). A segment that does not
// fit into a block is cut into chunks, whose states are merged.
#include "../core/batch_invariant.h"
#include "segment_copies.h"

namespace onepass::ONEPASS_ISA {

namespace {

constexpr int64_t kSegmentChunk = 8192;  // elements in a chunk of a long segment

template <class A>
struct SegmentRows : SegmentCopies<A> {
  using Base = SegmentCopies<A>;
  using Base::L, Base::p, Base::plan, Base::block, Base::columns, Base::pitch, Base::parts;
  using Base::offsets, Base::first, Base::items;
  using Base::set_tile, Base::is_run, Base::load_scores, Base::load_gradients, Base::store;
  using Base::store_row, Base::read_row;
  using typename Base::P;
  int64_t segments[kMaxPieces + 1];  // the segments of the block
  int filled = 0;                    // how many these are

  using Base::Base;

  // Blocks ------------------------------------------------------------------------------------------------------------

  // Calls work(constant) with the number of different lanes of a vector (segment_block.h).
  template <class Work>
  ONEPASS_INLINE void with_period(Work work) const {
    if (pitch == 1) return work(std::integral_constant<int, 1>());
    if constexpr (L > 2) {
      if (pitch == 2) return work(std::integral_constant<int, 2>());
    }
    if constexpr (L > 4) {
      if (pitch == 4) return work(std::integral_constant<int, 4>());
    }
    if constexpr (L > 8) {
      if (pitch == 8) return work(std::integral_constant<int, 8>());
    }
    work(std::integral_constant<int, L>());
  }
  // Fills a block with segments from s on, without empty ones. Returns the first segment behind the block.
  template <class Index>
  int64_t fill_block(const Index* starts, int64_t s, int64_t last) {
    const int64_t block_size = block.kBlock / pitch, whole = block.kMostNumbers / pitch, most = plan.most;
    const int64_t each = pitch, lanes = std::min<int64_t>(pitch, L), many = parts, most_filled = kMaxPieces / parts;
    const bool stores_empty = p.is_reduction() && !p.is_backward();
    int64_t from = starts[s], begin = from, end, count = 0;
    for (; s < last; ++s, begin = end) {
      end = starts[s + 1];
      const int64_t n = end - begin, at = begin - from;
      if (n == 0 && stores_empty) {
        for (int64_t j = 0; j < columns; ++j) store_row(s, j, -kInf<A>, 0);
      } else if (n > most) {
        if (count) break;
        from = end;
      } else {
        if (count && (at >= block_size || at + n > whole || count == most_filled)) break;
        for (int64_t part = 0; part < many; ++part) {
          block.pieces[count * many + part] = {int32_t(at * each + part * L), int32_t(n * lanes)};
        }
        segments[count] = s;
        count += n > 0;
      }
    }
    first = from, items = begin - from, filled = int(count), block.count = int(count * many);
    return s;
  }
  void finish_block() {
    block.elements = items * pitch;
    block.finish_pieces();
  }
  // Reads the numbers of segments for the gradient of logsumexp.
  void read_rows() {
    for (int k = 0; k < filled; ++k) {
      for (int64_t j = 0; j < columns; ++j) {
        block.base[k * pitch + j] = read_row(P::kOfY, segments[k], j);
        block.high[k * pitch + j] = read_row(P::kOfGrad, segments[k], j) * A(p.factor);
      }
    }
  }
  // Stores the results of the segments of the block.
  void store_rows(const A* values, const A* sums) const {
    dispatch_type(p.types[P::kOfY], [&](auto type) {
      for (int k = 0; k < filled; ++k) {
        for (int64_t j = 0; j < columns; ++j) {
          this->template store_as_type<TypeOf<decltype(type)>>(segments[k], j, values[k * pitch + j],
                                                               sums[k * pitch + j]);
        }
      }
    });
  }
  void compute_block() {
    if (!items) return;
    finish_block();
    if (p.is_backward()) return compute_gradients();
    load_scores();
    const DType type = p.is_reduction() ? DType::float32 : p.types[P::kOfY];
    with_period([&](auto period) { block.template forward<period.value>(p.function, type); });
    if (!p.is_reduction()) return store(P::kOfY, block.result_of(p.function));
    const A* const results = p.function == Function::state ? block.m : block.base;
    store_rows(results, block.high);
  }
  void compute_gradients() {
    if (p.function == Function::logsumexp) {
      load_scores();
      read_rows();
      with_period([&](auto period) { block.template logsumexp_gradients<period.value>(); });
      return store(P::kOfDx, block.a);
    }
    if (computed_where_they_are()) return;
    load_gradients();
    with_period([&](auto period) { block.template gradients<period.value>(p.function, A(p.factor)); });
    store(P::kOfDx, block.gradient_of(p.function));
  }

  // The gradient of softmax of columns that fill vectors needs no block, if the three tensors have one type and are
  // runs. Returns whether this is the case.
  bool computed_where_they_are() const {
    const DType type = p.types[P::kOfDx];
    const bool is_alike = type == p.types[P::kOfY] && type == p.types[P::kOfGrad];
    if (p.function != Function::softmax || pitch < L || !is_alike) return false;
    if (!is_run(P::kOfY) || !is_run(P::kOfGrad) || !is_run(P::kOfDx)) return false;
    const int64_t many = parts;
    bool is_done = false;
    dispatch_type(type, [&](auto of) {
      using T = TypeOf<decltype(of)>;
      if constexpr (kHasFastPaths && Base::template kVectors<T>) {
        // If items of float32 are longer, the block reads them as fast.
        if (sizeof(T) == sizeof(A) && many > 8) return;
        if (many % 8 == 0) {
          column_gradients<T, 8>();
        } else if (many % 4 == 0) {
          column_gradients<T, 4>();
        } else {
          many % 2 ? column_gradients<T, 1>() : column_gradients<T, 2>();
        }
        is_done = true;
      }
    });
    return is_done;
  }
  // Computes N vectors of an item at a time, so that long pieces of memory are read.
  template <class T, int N>
  void column_gradients() const {
    const auto at = [&](int t) { return static_cast<const T*>(p.data[t]) + offsets[t] + first * columns; };
    const T *const y = at(P::kOfY), *const g = at(P::kOfGrad);
    T* const dx = const_cast<T*>(at(P::kOfDx));
    const A factor = A(p.factor);
    const int64_t each = block.step;
    const bool streams = plan.streaming && N * L * sizeof(T) % kLine == 0 && uintptr_t(dx) % kLine == 0;
    for (int piece = 0; piece < block.count; piece += N) {
      const int64_t begin = block.pieces[piece].at, end = begin + block.pieces[piece].n / L * each;
      typename SegmentBlock<A>::AnySums sums[N];
      const auto add = [&](int64_t i, auto count) __attribute__((always_inline)) {
        for (int k = 0; k < N; ++k) {
          Vec v[count.value];
          for (int j = 0; j < count.value; ++j) {
            const int64_t from = i + j * each + k * L;
            v[j] = load_vector(y + from) * load_vector(g + from);
          }
          sums[k].add(count.value == 4 ? (v[0] + v[count.value / 4]) + (v[count.value / 2] + v[count.value - 1])
                                       : v[0]);
        }
      };
      int64_t i = begin;
      for (; i + 4 * each <= end; i += 4 * each) add(i, std::integral_constant<int, 4>());
      for (; i < end; i += each) add(i, std::integral_constant<int, 1>());
      Vec totals[N];
      for (int k = 0; k < N; ++k) totals[k] = block.total_of(sums[k].sum, sums[k].error);
      with_streaming(streams, [&](auto streaming) {
        for (i = begin; i < end; i += each) {
          for (int k = 0; k < N; ++k) {
            const int64_t to = i + k * L;
            const Vec v = load_vector(y + to) * (load_vector(g + to) - totals[k]) * factor;
            streaming.value ? stream_vector<true>(dx + to, v) : store_vector<true>(dx + to, v);
          }
        }
      });
    }
  }

  // Work items --------------------------------------------------------------------------------------------------------

  // The first segment at or behind a place in the list of items and segments.
  int64_t segment_at(int64_t place) const {
    int64_t low = 0, high = p.segments;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      p.offset(middle) + middle < place ? low = middle + 1 : high = middle;
    }
    return low;
  }
  void compute_run(int64_t number) {
    const int64_t last = segment_at((number + 1) * plan.run_size);
    for (int64_t s = segment_at(number * plan.run_size); s < last;) {
      s = p.has_wide_indices ? fill_block(static_cast<const int64_t*>(p.offsets), s, last)
                             : fill_block(static_cast<const int32_t*>(p.offsets), s, last);
      compute_block();
    }
  }
  // Calls work(segment, chunk) for the chunks of long segments that begin in a run. The chunk is counted over all
  // segments.
  template <class Work>
  void for_each_chunk(int64_t number, Work work) {
    const int64_t begin = number * plan.run_size, end = begin + plan.run_size;
    const auto& all = plan.long_segments;
    auto of = std::partition_point(all.begin(), all.end(), [&](const LongSegment& each) {
      return p.offset(each.segment) + each.segment + (each.chunks - 1) * plan.chunk < begin;
    });
    for (; of != all.end(); ++of) {
      const int64_t from = p.offset(of->segment) + of->segment;
      if (from >= end) return;
      int64_t chunk = std::max<int64_t>(0, ceil_div(begin - from, plan.chunk));
      for (; chunk < of->chunks && from + chunk * plan.chunk < end; ++chunk) work(*of, of->first_chunk + chunk);
    }
  }
  // Makes a chunk of a long segment the block.
  void set_chunk(const LongSegment& of, int64_t chunk) {
    const int64_t from = p.offset(of.segment) + (chunk - of.first_chunk) * plan.chunk;
    first = from, items = std::min(plan.chunk, p.offset(of.segment + 1) - from), filled = 1, block.count = int(parts);
    segments[0] = of.segment;
    for (int64_t part = 0; part < parts; ++part) {
      block.pieces[part] = {int32_t(part * L), int32_t(items * std::min<int64_t>(pitch, L))};
    }
    finish_block();
  }
  void compute_chunk_state(SegmentState* state) {
    if (p.is_backward()) {
      load_gradients();
      with_period([&](auto period) { block.template sum_gradients<period.value>(p.function); });
    } else {
      load_scores();
      with_period([&](auto period) {
        block.template begin_forward<period.value>();
        block.exponentials_for(DType::float32);
        block.template sum_exponentials<period.value>();
      });
    }
    for (int64_t j = 0; j < columns; ++j) state[j] = {double(block.m[j]), double(block.high[j])};
  }
  void finish_chunk(const SegmentState* state) {
    if (p.is_backward()) {
      load_gradients();
      for (int64_t j = 0; j < columns; ++j) block.high[j] = A(state[j].l);
      with_period([&](auto period) { block.template store_gradients<period.value>(p.function, A(p.factor)); });
      return store(P::kOfDx, block.gradient_of(p.function));
    }
    for (int64_t j = 0; j < columns; ++j) {
      const double m = state[j].m, l = std::isfinite(m) ? state[j].l : kNan<double>;
      const double value = p.function == Function::softmax ? double(kTileUnscale<A>) / l : std::log(l);
      block.base[j] = A(std::isfinite(m) ? m : 0);
      block.high[j] = A(value), block.low[j] = A(value - double(A(value)));
    }
    load_scores();
    with_period([&](auto period) {
      if (p.function == Function::softmax) {
        block.template begin_with_base<period.value>();
        block.exponentials_for(p.types[P::kOfY]);
      }
      block.template finish_with_numbers<period.value>(p.function);
    });
    store(P::kOfY, block.result_of(p.function));
  }
  // Merges the states of the chunks of each long segment, in order, into the state of its first chunk.
  void merge(SegmentState* states) {
    for (const LongSegment& of : plan.long_segments) {
      for (int64_t tile = 0; tile < plan.tiles; ++tile) {
        set_tile(tile);
        for (int64_t j = 0; j < columns; ++j) {
          State<double> total;
          if (p.is_backward()) total.m = 0;
          for (int64_t chunk = of.first_chunk; chunk < of.first_chunk + of.chunks; ++chunk) {
            const SegmentState one = plan.state(states, chunk, tile)[j];
            if (p.is_backward()) {
              total.l.add(one.l);
            } else {
              total = onepass::ONEPASS_ISA::merge(total, State<double>{one.m, {one.l, 0}});
            }
          }
          const double l = total.l.value();
          plan.state(states, of.first_chunk, tile)[j] = {total.m, l};
          if (p.is_backward() || !p.is_reduction()) continue;
          const double lse = finite_or_zero(total.m) + std::log(l);
          store_row(of.segment, j, A(p.function == Function::state ? total.m : lse), A(l));
        }
      }
    }
  }
  void run(CpuPhase phase, SegmentState* states, int64_t begin, int64_t end) {
    if (phase == CpuPhase::merge) return merge(states);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t tile = item % plan.tiles, number = item / plan.tiles;
      set_tile(tile);
      if (phase != CpuPhase::finish) compute_run(number);
      for_each_chunk(number, [&](const LongSegment& of, int64_t chunk) {
        set_chunk(of, chunk);
        if (!plan.reduces) return compute_gradients();  // the gradient of logsumexp, which needs no sum
        phase == CpuPhase::finish ? finish_chunk(plan.state(states, of.first_chunk, tile))
                                  : compute_chunk_state(plan.state(states, chunk, tile));
      });
    }
    if (plan.streaming) fence_streaming_stores();
  }
};

}  // namespace

SegmentPlan plan_segments(const SegmentProblem& p, int64_t longest) {
  using P = SegmentProblem;
  const bool doubles = p.accumulator() == DType::float64;
  const int64_t L = doubles ? kLanes<double> : kLanes<float>, whole = kWholeBytes / (doubles ? 8 : 4);
  SegmentPlan plan;
  const DimOf<P::kTensors> last = p.inner.innermost();
  // How the sum of a row is distributed over lanes depends on the columns of a tile.
  const bool in_columns = p.inner.count && last.strides[p.has(P::kOfX) ? P::kOfX : P::kOfY] == 1 && !batch_invariant();
  if (in_columns) {
    plan.per_span = ceil_div(last.size, kMaxTileVectors * L);
    plan.width = plan.per_span == 1 ? last.size : up_to(ceil_div(last.size, plan.per_span), L);
    plan.per_span = ceil_div(last.size, plan.width);
    plan.tiles = p.columns / last.size * plan.per_span;
  } else {
    plan.tiles = p.columns;
  }
  const int64_t pitch = doubles ? pitch_of<double>(plan.width) : pitch_of<float>(plan.width);
  plan.most = whole / pitch, plan.chunk = kSegmentChunk / pitch;
  plan.run_size = std::max<int64_t>(1, kCpuGrain / pitch);
  plan.runs = ceil_div(p.items + p.segments, plan.run_size);
  for (int64_t s = 0; longest > plan.most && s < p.segments; ++s) {
    const int64_t n = p.offset(s + 1) - p.offset(s);
    if (n <= plan.most) continue;
    plan.long_segments.push_back({s, plan.chunks, ceil_div(n, plan.chunk)});
    plan.chunks += plan.long_segments.back().chunks;
  }
  plan.work_items = plan.runs * plan.tiles;
  plan.grain_size =
      std::max<int64_t>(1, kCpuGrain / (pitch * std::min(plan.run_size, std::max<int64_t>(1, p.items + p.segments))));
  plan.reduces = plan.chunks > 0 && !(p.is_backward() && p.function == Function::logsumexp);
  const int made = p.result();
  const bool stores = p.is_backward() || !p.is_reduction(), in_place = p.data[made] == p.data[P::kOfX];
  const bool is_run = !p.order && p.steps[made] == plan.width && (plan.width == 1 || last.strides[made] == 1);
  plan.streaming = kHasStreamingStores && stores && !in_place && is_run && !doubles &&
                   p.items * p.columns * size_of(p.types[made]) >= kStreamingBytes;
  return plan;
}

void run_segments(const SegmentProblem& p, const SegmentPlan& plan, CpuPhase phase, SegmentState* states, int64_t begin,
                  int64_t end) {
  if (p.accumulator() == DType::float64) {
    SegmentRows<double>(p, plan).run(phase, states, begin, end);
  } else {
    SegmentRows<float>(p, plan).run(phase, states, begin, end);
  }
}

}  // namespace onepass::ONEPASS_ISA
