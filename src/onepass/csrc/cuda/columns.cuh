// columns.cuh: tiles of columns, softmaxes whose neighbouring elements are apart in memory and whose neighbours lie
// side by side. A thread has vectors of V columns, each as far from the last as the next, so that it makes V states;
// those of the threads that share a column are merged through shared memory, then over the blocks of a cluster.
//
//   tile     `across` threads side by side, `down` of them down the columns
//   slab     a piece of memory that holds all of some columns, whose number need not be one of whole vectors: threads
//            take vectors one after another, in turns of a whole number of lines of the slab, so that a thread's
//            columns are always the same
//   strided  any strides, element by element
//
// AHEAD 1: a block takes one tile after another, and of the next one whole vectors are fetched into shared memory while
// it is busy with this one. SHELVED 1: of this one, those that registers do not hold. GRID 1: the blocks of one y share
// columns, by messages through memory, in a cooperative launch.
#pragma once

#include "held.cuh"
#include "meeting.cuh"
