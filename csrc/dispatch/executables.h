#pragma once

// Where every executable comes from: the one way from a program's text to something that runs.

#include <memory>
#include <string>
#include <vector>

#include "pjrt/pjrt.h"

namespace torch_tpu {

// The executable of a program for the current plug-in: from the host's directory or the remote root
// (torch_tpu/program/cache.py), else from the compiler. `name` is what errors and reports call it;
// `text` is StableHLO, `options` a CompileOptionsProto (see pjrt/compile_options.h). Counts in
// counters(). May be called with or without the GIL, and gives it up while it works. Throws what
// raise_compile_error raises.
std::shared_ptr<pjrt::Executable> obtain_executable(const char* name, const std::string& text,
                                                    const std::string& options);

struct ExecutableRecord {
  std::string name;
  const char* source;  // "compiled", "disk" or "remote"
  double seconds;      // it took to obtain
  int64_t launches;
  int64_t last_launch;  // nanoseconds since the epoch; 0: never
};
// What obtain_executable gave and is still held by somebody, in that order.
std::vector<ExecutableRecord> executable_records();

}  // namespace torch_tpu
