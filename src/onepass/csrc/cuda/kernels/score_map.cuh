// score_map.cuh: where scored rows or columns and the tensors beside them lie, as the host tells the kernels. Both
// sides include it, so it has no CUDA.
#pragma once

#include "column_params.cuh"

// The parts of a score that a kernel is compiled for.
enum ScorePart : unsigned {
  kScoreScale = 1,         // a scale per row, besides the number
  kScoreBias = 2,          // a bias
  kScoreBiasVectors = 4,   // whose vectors are aligned where those of x are
  kScoreMask = 8,          // a mask
  kScoreMaskVectors = 16,  // the same
  kScoreWindow = 32,       // elements outside a window do not take part
  kScoreAlibi = 64,        // a slope per row
  kScoreSoftcap = 128,     // c tanh(s / c)
  kScoreRow = 256,         // a sink, a logsumexp to write, or 0 for rows of nothing
  kScoreElements = 512,    // others are read element by element, not as the words that hold a vector
  kScoreXVectors = 1024,   // backward, with a softcap: the vectors of x are aligned where those of y are
  kScored = 2048,          // always
  kScoreBiasSame = 4096,   // the elements of a vector have one bias
  kScoreMaskSame = 8192,   // the same
  // Of the gradient of logsumexp: a line has elements of several rows; what each row has lies in vectors there.
  kScoreRowsInLine = 16384,
  kScoreRowVectors = 32768,
  kScoreBiasGrad = 131072,  // backward: the gradient of a bias that rows share is made with that of x
  kScoreSkips = 65536       // gradients of columns: vectors outside the window, where y is 0, are not read
};

// The tensors of a map. Input and result: x and y, or y and the gradient of x, which also has the gradient of y and,
// with a softcap, x.
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

constexpr int kMapDims = 5;  // outer dims that do not merge, and reduced ones

struct ScoreMap {
  void* data[kMapTensors];
  long long strides[kMapTensors][kMapDims];  // along the outer dims, the fastest first
  long long distances[kMapDims];             // the same of k - (q + offset)
  long long steps[kMapTensors];              // from one element of a row to the next
  int sizes[kMapDims];
  FastDivisor divisors[kMapDims];
  int dims, distance_step;
  // Where the elements of a row have no single step (strided access): the same along the reduced dims.
  long long reduced_strides[kMapTensors][kMapDims], reduced_distances[kMapDims];
  int reduced_sizes[kMapDims], reduced_dims;
  FastDivisor reduced_divisors[kMapDims];
  long long pitches[kMapGrad + 1];  // from row to row of the input, the result and the gradient, where these are even
  long long count, n;
  int distance;                                              // of the first element of all
  int least, most;                                           // distances inside the window
  double factor, softcap, sink, per_softcap;                 // per_softcap: 1 / softcap
  float factor_f32, softcap_f32, sink_f32, per_softcap_f32;  // the same
  int empty_is_zero, of_scores;                              // of_scores: see ScoredProblem
};
