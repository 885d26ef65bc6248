#pragma once

// The line of the user's Python code that a call comes from: the innermost frame outside PyTorch,
// this package and the standard library.
//
// In a backward pass autograd's own threads have no Python frames. There it is the line of the
// forward op, if that op was observed too, else the line that called backward().

#include <cstdint>
#include <string>

namespace torch_tpu {

using LineId = uint32_t;
constexpr LineId kNoLine = 0;

struct SourceLine {
  std::string file;
  int line = 0;
  std::string function;
  bool backward = false;  // the backward pass of what stands on this line
};

// Takes the GIL: hold no lock of ours. kNoLine where there is no Python.
LineId current_line();
const SourceLine& source_line(LineId id);  // lives forever
std::string to_string(LineId id);          // "train.py:12 in step", "" for kNoLine

// Notes that the autograd node made last by this thread belongs to `line`. To be called from the
// kernel of an op that autograd records: its node is made just before.
void remember_node(LineId line);

}  // namespace torch_tpu
