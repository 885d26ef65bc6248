#pragma once

// RAII over the PJRT C API. No torch headers below this point.
//
// Lifetimes: an Api is immortal; a Client must outlive every Buffer, Executable and Event made
// from it; Device values are plain references into their Client. All functions may be called from
// several threads at once, except that one object must not be moved or destroyed while in use.

#include "api.h"
#include "buffer.h"
#include "client.h"
#include "compile_options.h"
#include "device.h"
#include "event.h"
#include "executable.h"
#include "topology.h"
