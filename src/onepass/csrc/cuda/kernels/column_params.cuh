// column_params.cuh: how columns are cut into tiles, as the host tells the kernels. Of both sides: no CUDA, no headers.
#pragma once

// The dims of a call that no other is merged with, at most; a call of more is gathered.
constexpr int kTileDims = 6;
constexpr int kTileTensors = 4;

struct TileDims {
  int count;
  long long sizes[kTileDims];  // the slowest first
  long long steps[kTileTensors][kTileDims];
};

// Division by a constant of numbers below 2^31: a product and a shift.
struct Divider {
  unsigned multiplier, shift;
};

// How many vectors of a thread lie before an end: `all`, and one more where its first lies before `rest`.
struct Counted {
  int all, rest;
};

struct Tiles {
  long long n, inner;  // elements of a column, and columns that lie side by side
  // Of each tensor, from one element of a column to the next; of one that has one element a column, from that to its
  // neighbour's.
  long long steps[kTileTensors];
  TileDims outer, reduced;       // reduced: where the elements of a column are not one step apart (EDGES strided)
  long long side, tall;          // tiles side by side, and how often
  long long jump[kTileTensors];  // from a thread's vector to its next
  void* messages;                // what the blocks of a group tell each other, of each column
  long long plane;               // elements between the two planes of a state
  int across, down;              // threads of a block side by side, and down a column
  int pitch;                     // columns of a tile
  int parts;                     // states of a column that the threads of a block make
  int stride;                    // elements of shared memory from one of them to the next
  int group, group_bits;         // threads that merge them: 1 << group_bits
  int narrow;                    // lines of a tile are less than two of the cache's, and others' beside them
  int shelf;                     // vectors of a thread that wait in shared memory
  int waiting;                   // bytes of shared memory of those
  int turns;                     // vectors of a column, or of a slab, that a thread comes to at most
  Divider by_side, by_line;      // by_line: by `across`, of a slab by its pitch
  Counted there, whole;          // vectors that are there at least in part, and as a whole
};
