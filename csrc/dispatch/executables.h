#pragma once

// Where every executable comes from: the one way from a program's text to something that runs.

#include <memory>
#include <string>

#include "pjrt/pjrt.h"

namespace torch_tpu {

// The executable of a program for the current plug-in. `name` is what errors call it; `text` is
// StableHLO, `options` a CompileOptionsProto (see pjrt/compile_options.h). Counts compiles and
// their time. May be called with or without the GIL, and gives it up while it compiles. Throws what
// raise_compile_error raises.
std::shared_ptr<pjrt::Executable> obtain_executable(const char* name, const std::string& text,
                                                    const std::string& options);

}  // namespace torch_tpu
