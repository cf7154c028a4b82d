// score_map.cuh: ScoreMap, which tells kernels where scored rows or columns are, and the tensors of their scores (a
// bias, a mask, scales, slopes, sinks). The host fills it in. Both sides include this file, so it has no CUDA.
#pragma once

#include "column_params.cuh"

// The parts of a score. A kernel is compiled for a set of them.
enum ScorePart : unsigned {
  kScoreScale = 1,         // a scale per row, besides the number
  kScoreBias = 2,          // a bias
  kScoreBiasVectors = 4,   // the bias has aligned vectors where x has them
  kScoreMask = 8,          // a mask
  kScoreMaskVectors = 16,  // the mask has aligned vectors where x has them
  kScoreWindow = 32,       // elements outside a window do not take part
  kScoreAlibi = 64,        // a slope per row
  kScoreSoftcap = 128,     // c tanh(s / c)
  kScoreRow = 256,         // a sink, a logsumexp to write, or 0 for rows without any element that takes part
  kScoreElements = 512,    // other tensors are read element by element, not as the words that hold a vector
  kScoreXVectors = 1024,   // backward, with a softcap: the vectors of x are aligned where those of y are
  kScored = 2048,          // always set
  kScoreBiasSame = 4096,   // the elements of a vector have one bias
  kScoreMaskSame = 8192,   // the elements of a vector have one mask value
  // For the gradient of logsumexp. A line has elements of several rows; the values of the rows are vectors in that
  // line.
  kScoreRowsInLine = 16384,
  kScoreRowVectors = 32768,
  kScoreBiasGrad = 131072,  // backward: the gradient of a bias that rows share is computed with that of x
  kScoreSkips = 65536,      // gradients of columns: vectors outside the window, where y is 0, are not read
  kScoreSlopeOfY = 262144   // backward, with a softcap: its slope follows from y, the row's logsumexp and a bias
};

// The tensors of a map. Input and result are x and y in the forward. In the backward they are y and the gradient of x;
// then there is also the gradient of y and, with a softcap, x or the logsumexp of each row.
enum MapTensor {
  kMapInput,
  kMapResult,
  kMapGrad,
  kMapScale,
  kMapBias,
  kMapAlibi,
  kMapSink,
  kMapMask,
  kMapLse,
  kMapX,
  kMapTensors
};

constexpr int kMapDims = 5;  // outer dims that do not merge, and reduced dims

struct ScoreMap {
  void* data[kMapTensors];
  long long strides[kMapTensors][kMapDims];  // along the outer dims, the fastest first
  long long distances[kMapDims];             // the same for the distance k - (q + offset)
  long long steps[kMapTensors];              // from one element of a row to the next
  int sizes[kMapDims];
  FastDivisor divisors[kMapDims];
  int dims, distance_step;
  // If the elements of a row have no single step (strided access): the same along the reduced dims.
  long long reduced_strides[kMapTensors][kMapDims], reduced_distances[kMapDims];
  int reduced_sizes[kMapDims], reduced_dims;
  FastDivisor reduced_divisors[kMapDims];
  long long pitches[kMapGrad + 1];  // from row to row of input, result and gradient, if they have one stride
  long long count, n;
  int distance;                                              // the distance of the very first element
  int least, most;                                           // the range of distances inside the window
  double factor, softcap, sink, per_softcap;                 // per_softcap: 1 / softcap
  float factor_f32, softcap_f32, sink_f32, per_softcap_f32;  // the same as float
  int empty_is_zero, of_scores;                              // of_scores: see ScoredProblem
  int sink_is_same;  // whether the sink is a tensor with one number for all rows
};
