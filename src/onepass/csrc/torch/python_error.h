// python_error.h: an error of torch's that came as far as Python, thrown on as what it was there.
//
// A C function of libtorch gives a code for an error: that it was an IndexError, say, is lost. libtorch_python has an
// exception class for errors whose Python type the thrower chooses. It is recognised by its name, and asked by two
// virtual functions, both ours here: nothing is linked, no member shared. A torch that has no such class takes this for
// the std::exception that it also is, and raises RuntimeError with the same words.
#pragma once

#include <exception>
#include <string>
#include <utility>

namespace torch {

struct PyTorchError : std::exception {
  virtual void* python_type() = 0;
};

}  // namespace torch

namespace onepass {

class PythonError final : public torch::PyTorchError {
 public:
  PythonError(void* type, std::string words) : type_(type), words_(std::move(words)) {}

  void* python_type() override { return type_; }
  const char* what() const noexcept override { return words_.c_str(); }

 private:
  void* type_;
  std::string words_;
};

}  // namespace onepass
