// ring.cuh: all vectors of a thread come through its shelf, chunk after chunk. The first, as many as registers keep, go
// on to those, and into their places come others, of which the last stay there. (Loads into registers would be waited
// for all together: the compiler has six counters for them, and across a branch one.)
#pragma once

constexpr int kMany = 6, kFew = 4;  // chunks on their way, where the shelf has places for so many

// Which chunk is where. `ask(q, slot)` begins to fetch the vectors from q on to the slots from `slot` on.
template <int Slots>
struct Ring {
  static constexpr int kKept = (Slots + kChunk - 1) / kChunk;  // chunks that go on to registers
  int shelf;                                                   // slots
  int from, to;  // those of the next chunk to take, and of the next to ask for

  template <class Ask>
  __device__ void begin(int slots, Ask ask) {
    shelf = slots, from = to = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < lead(); ++chunk) fetch_next(chunk, ask);
  }
  // Once the chunk number `taken` has been taken.
  template <class Ask>
  __device__ void refill(int taken, Ask ask) {
    fetch_next(taken + lead(), ask);
  }
  // Until the next chunk is there.
  __device__ void await() const {
    if (shelf >= kMany * kChunk)
      await_copies<kMany - 1>();
    else if (shelf >= kFew * kChunk)
      await_copies<kFew - 1>();
    else
      await_copies<0>();
  }
  // Its slot, again and again from the first that stays in the shelf.
  __device__ int next() {
    const int slot = from;
    from = after(from);
    return slot;
  }

 private:
  __device__ int lead() const {
    return shelf >= kMany * kChunk ? kMany : shelf >= kFew * kChunk ? kFew : shelf / kChunk;
  }
  __device__ int after(int slot) const { return slot + kChunk < shelf ? slot + kChunk : 0; }
  template <class Ask>
  __device__ void fetch_next(int chunk, Ask ask) {
    const int q = chunk < kKept ? chunk * kChunk : Slots + (chunk - kKept) * kChunk;
    if (q < Slots + shelf) ask(q, to);
    commit_copies();
    to = after(to);
  }
};
