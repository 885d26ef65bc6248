#pragma once

// What Fused mode has recorded and not yet run: calls, the values between them, and their operands.

#include <cstdint>
#include <vector>

#include "dispatch/program.h"

namespace torch_tpu {

struct Recording {
  // Values are numbered in order of first use: inputs and results of calls alike.
  struct Value {
    BufferRef buffer;
    int node = -1;    // the call that computes it, -1 for an input
    int result = 0;   // which result of that call
    int origin = -1;  // the input whose memory it may take over (a chain of writes), or -1
  };
  struct Node {
    ProgramRef program;
    uint32_t first_argument = 0;  // into `arguments`: a value for each of the program's parameters
    uint32_t first_int = 0;
    uint32_t first_float = 0;
    uint32_t first_value = 0;  // its results are consecutive values
  };

  std::vector<Node> nodes;
  std::vector<Value> values;
  std::vector<uint32_t> arguments;
  std::vector<int64_t> ints;
  std::vector<double> floats;
  // Identifies the calls and what is fed to what; not operands, not which results are wanted.
  std::vector<uint64_t> key;

  size_t num_arguments(const Node& node) const { return node.program->parameters.size(); }
};

}  // namespace torch_tpu
