// calls.h: calls of losses, of segments and with scores, as Python describes them in words: the function, and the
// options that the call is given. From a Call come the problems that planners take.
#pragma once

#include <cstring>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>

#include "../core/divergence_problem.h"
#include "../core/loss_problem.h"
#include "../core/scored_problem.h"
#include "../core/segment_problem.h"

namespace onepass {

struct Call {
  std::string function;
  std::set<std::string> options;  // as _call_names.py lists them
  bool backward;
  DType in, out;  // of what a kernel reads and writes; losses and divergences have one type

  Call(const char* words, bool is_backward, int in_type, int out_type)
      : backward(is_backward), in(DType(in_type)), out(DType(out_type)) {
    std::istringstream text(words);
    text >> function;
    for (std::string word; text >> word;) options.insert(word);
  }

  bool has(const char* option) const { return options.count(option) > 0; }
  bool is_of_segments() const { return function.rfind("segment_", 0) == 0; }
  bool is_scored() const {
    return function == "logsumexp" || function.rfind("soft", 0) == 0 || function == "log_softmax";
  }
  bool is_divergence() const { return function == "kl_div" || has("probabilities"); }
  Direction direction() const { return backward ? Direction::backward : Direction::forward; }
  // The score's factor. Kernels depend only on whether it is 1.
  double factor() const { return has("temperature") ? 0.5 : 1; }
  double softcap() const { return has("softcap") ? 30 : 0; }
};

// The address of a tensor that begins with element `first` of a vector. Nothing is read there.
inline void* address_of(DType type, int64_t first = 0) {
  return reinterpret_cast<void*>(uintptr_t(4096 + first * size_of(type)));
}

// The function whose name, after `prefix`, is `name`.
inline Function function_of(const std::string& name, const char* prefix = "") {
  for (size_t i = 0; i < std::size(kFunctions); ++i) {
    if (prefix + std::string(kFunctions[i].name) == name) return Function(i);
  }
  throw std::runtime_error("onepass: no function " + name);
}

// The problem of a call, without its layout and without the addresses that plans depend on.
inline LossProblem loss_problem(const Call& call) {
  LossProblem problem = {};
  problem.direction = call.direction(), problem.type = call.in;
  problem.is_cross = call.function == "cross_entropy";
  problem.picks = problem.is_cross || call.function == "log_prob";
  problem.has_entropy = call.function == "entropy" || call.has("return_entropy");
  problem.has_spread = call.has("label_smoothing"), problem.smoothing = problem.has_spread ? 0.1 : 0;
  problem.factor = call.factor(), problem.softcap = call.softcap();
  const void* const given = address_of(DType::float32);
  if (call.has("weight")) problem.weight = given;
  if (call.backward && call.has("return_lse")) problem.grad_lse = given;
  return problem;
}
inline DivergenceProblem divergence_problem(const Call& call) {
  DivergenceProblem problem = {};
  problem.direction = call.direction(), problem.type = call.in;
  problem.is_kl = call.function == "kl_div";
  problem.factor = call.factor(), problem.softcap = call.softcap();
  if (call.has("weight")) problem.weight = address_of(DType::float32);
  return problem;
}
inline SegmentProblem segment_problem(const Call& call) {
  using P = SegmentProblem;
  P problem;
  problem.direction = call.direction();
  problem.function = function_of(call.function, "segment_");
  // A gradient reads the result and its gradient. For logsumexp it reads x too, and both are in the accumulator's type.
  const bool reads_x = !call.backward || problem.is_reduction();
  const auto give = [&](int tensor, DType type) {
    problem.data[tensor] = address_of(type), problem.types[tensor] = type;
  };
  if (reads_x) give(P::kOfX, call.in);
  if (!call.backward) give(P::kOfY, call.out);
  if (call.backward) {
    const bool wide = call.in != DType::float64 && problem.is_reduction();
    for (const int tensor : {P::kOfY, P::kOfGrad}) give(tensor, wide ? DType::float32 : call.in);
    give(P::kOfDx, call.out);
  }
  if (reads_x && call.has("bias")) give(P::kOfBias, call.in);
  if (call.has("order")) problem.order = address_of(DType::float32);
  return problem;
}
// Scale and sink are numbers. A gradient is the gradient of the elements, not of the scores; it has a bias only for
// logsumexp, or with the word "lse": then the logsumexp of each row is written, or read for the slope of a softcap.
inline ScoredProblem scored_problem(const Call& call) {
  ScoredProblem problem = {};
  problem.function = call.function == "softmin" ? Function::softmax : function_of(call.function);
  problem.direction = call.direction(), problem.in = call.in, problem.out = call.out;
  problem.bias_type = call.in;
  if (call.has("scale")) problem.factor = 0.5;
  if (call.has("sink")) problem.sink = 0;
  if (call.has("causal")) problem.most = 0;
  problem.softcap = call.softcap(), problem.empty_is_zero = call.has("empty");
  const auto give = [&](ScoredTensor tensor, DType type) {
    problem.data[tensor] = address_of(type);
    problem.storage_end[tensor] = reinterpret_cast<const void*>(~uintptr_t(0));
  };
  const bool of_lse = call.backward && is_reduction(problem.function);
  give(kInput, call.in), give(kResult, call.out);
  if (call.backward) give(kGradOf, of_lse ? problem.accumulator() : call.in);
  if (of_lse || call.has("lse")) give(kRowLse, problem.accumulator());
  if (call.backward && !of_lse && problem.softcap != 0) give(kOfCap, call.out);
  if (call.has("mask")) give(kMask, DType::float32);
  const bool has_scores = !call.backward || of_lse || call.has("lse");
  if (call.has("bias") && has_scores) give(kBias, call.in);
  if (call.has("alibi") && (!call.backward || of_lse)) give(kAlibi, problem.accumulator());
  return problem;
}

}  // namespace onepass
