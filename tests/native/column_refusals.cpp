// A driver that refuses the cooperative launches of columns: a call is then planned again without them and served, a
// plan that was given is an error, and nothing of it is remembered. Exits with 1 at the first thing that is wrong.
#include <cstdio>

#include "column_launches.h"

namespace {

bool right = true;
void expect(bool holds, const std::string& what) {
  if (!holds) right = false, std::printf("%s\n", what.c_str());
}

std::string words_of_error(const Problem& call, int device, const CudaPlan* forced = nullptr) {
  try {
    run(call, device, nullptr, forced);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "no error";
}

// Serves a call; its launches are those of these plans, of which `plans` are made now.
void expect_launches(const std::string& name, const Problem& call, int device, const std::vector<CudaPlan>& of,
                     int plans) {
  planned = 0;
  run(call, device, nullptr);
  expect(planned == plans, name + ": plans made: " + std::to_string(planned));
  expect(seen.size() == of.size(), name + ": launches: " + std::to_string(seen.size()));
  for (size_t i = 0; i < of.size() && i < seen.size(); ++i) {
    const std::string what = mistake(seen[i], of[i], call, device, nullptr);
    expect(what.empty(), name + ": " + what);
  }
}

// Of a call whose own plan is of this tier, launched cooperatively.
void look(std::string name, const Problem& call, Tier tier) {
  const int device = 0;
  const CudaPlan own = plan_of(call, device), instead = plan_of(call, device, false);
  name += std::string(" ") + kTierNames[int(tier)];
  expect(own.tier == tier && own.in_grid(), name + ": the plan is of " + kTierNames[int(own.tier)]);
  expect(!instead.in_grid(), name + ": a cooperative launch where there is none");
  for (const Result refusal : {kTooLarge, kNotSupported}) {
    answer = refusal;
    for (int i = 0; i < 3; ++i) run(call, device, nullptr);
    expect_launches(name + ", refused", call, device, {own, instead}, 1);
    expect_launches(name + ", refused again", call, device, {own, instead}, 1);
    expect(words_of_error(call, device, &own) == "onepass: the driver refuses a cooperative launch of this plan",
           name + ", forced and refused");
    expect(seen.size() == 1 && seen[0].cooperative, name + ", forced and refused: another launch");
    answer = 0;
    expect_launches(name + ", taken", call, device, {own}, 0);
    run(call, device, nullptr, &instead);
    expect_launches(name + ", taken after another was forced", call, device, {own}, 0);
  }
  // What is no refusal is an error, and no reason for another plan.
  for (Result* const of : {&answer, &otherwise}) {
    const bool cooperative = of == &answer;
    for (const Result failure : {1, cooperative ? 700 : kTooLarge}) {
      *of = failure;
      const CudaPlan* const forced = cooperative ? nullptr : &instead;
      expect(words_of_error(call, device, forced) == "cuLaunchKernelEx", name + ": a failure without an error");
      expect(seen.size() == 1, name + ": a failure and another launch");
      *of = 0;
    }
  }
  expect_launches(name + ", after failures", call, device, {own}, 0);
}

}  // namespace

int main() {
  const auto at = [](int64_t place) { return reinterpret_cast<char*>(place << 20); };
  const int64_t strides[] = {8, 1}, of_row[] = {0, 1}, none[] = {0, 0};
  const bool reduce[] = {true, false};
  const int64_t* const each[] = {strides, strides, strides, none};
  const int64_t* const each_of_lse[] = {strides, strides, of_row, of_row};
  constexpr DType kFloat = DType::float32;
  const auto softmax = [&](DType type, const int64_t* sizes) {
    return Problem::forward(make_forward_layout(2, sizes, strides, strides, reduce, false), Function::softmax, type,
                            type, at(1), at(2));
  };
  for (const auto& [n, tier] : {std::pair(1 << 18, Tier::columns_grid), std::pair(1 << 23, Tier::columns_twopass)}) {
    const int64_t sizes[] = {n, 8};
    for (const DType type : {kFloat, DType::bfloat16}) {
      const std::string name = kDTypeNames[int(type)];
      look(name + " softmax", softmax(type, sizes), tier);
      look(name + " logsumexp",
           Problem::forward(make_forward_layout(2, sizes, strides, of_row, reduce, true), Function::logsumexp, type,
                            kFloat, at(1), at(2)),
           tier);
      look(name + " gradient",
           Problem::backward(make_backward_layout(2, sizes, each, reduce, false), Function::softmax, type, type, at(1),
                             at(2), at(3)),
           tier);
    }
  }
  answer = kTooLarge;
  const int64_t sizes[] = {1 << 20, 8};
  // The gradient of logsumexp merges nothing: its blocks share columns without a cooperative launch.
  const Problem back = Problem::backward(make_backward_layout(2, sizes, each_of_lse, reduce, true), Function::logsumexp,
                                         kFloat, kFloat, at(1), at(2), at(3), at(4));
  expect(plan_of(back, 0).in_grid(), "gradient of logsumexp: one block");
  run(back, 0, nullptr);
  expect_launches("gradient of logsumexp", back, 0, {plan_of(back, 0)}, 0);
  // Nor is one made on a device that takes none.
  const Problem call = softmax(kFloat, sizes);
  run(call, 1, nullptr);
  expect_launches("no cooperative launches", call, 1, {plan_of(call, 1)}, 0);
  expect(!seen[0].cooperative, "a cooperative launch on a device that takes none");
  return right ? 0 : 1;
}
