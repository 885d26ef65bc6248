#pragma once

// Links recorded calls into one StableHLO module.

#include <string>
#include <vector>

#include "dispatch/recording.h"

namespace torch_tpu {

struct Linked {
  std::string text;
  std::vector<uint32_t> inputs;   // values fed to the program, in order
  std::vector<uint32_t> outputs;  // values it computes, in order
  // For each output the position of the input whose memory it may take over, or -1.
  std::vector<int> donors;
  bool takes_ints = false;
  bool takes_floats = false;
  // Of the programs that check; their codes are one i64 array after the outputs.
  std::vector<ChecksRef> checks;
  size_t num_nodes = 0;  // without the calls nobody needs
};

// Each distinct program becomes a private function of the module, and `main` calls them in order;
// the compiler inlines. `live` says which values are wanted. Calls that contribute to none of them
// (and check nothing) are left out.
Linked link(const Recording& recording, const std::vector<bool>& live);

}  // namespace torch_tpu
