// torch.profiler's view of the device: the spans of activity.h as a kineto activity profiler, which
// torch.profiler runs when ProfilerActivity.PrivateUse1 is asked for.
//
// Device rows: executions and copies, each linked to the ATen op that asked for it. Host rows:
// lowering, compiling, waiting, CPU fallbacks. An execution lasts from its hand-over, or the end of
// the one before, until its results are ready.

#define USE_KINETO  // torch is built with it; its headers ask the includer all the same
#define FMT_HEADER_ONLY 1

#include <c10/util/Exception.h>
#include <libkineto.h>
#include <output_base.h>
#include <torch/csrc/profiler/standalone/privateuse1_profiler.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iomanip>
#include <memory>
#include <set>
#include <string>

#include "core/activity.h"

namespace torch_tpu {

namespace {

using activity::Kind;
using libkineto::ActivityType;

// What torch_tpu.tpu.profiler.TpuProfilerConfig writes:
// "tpu;host:2;device:1;lines:1;rank:0;run_dir:/percent%20encoded": kineto takes no '=' or '#' here.
struct Levels {
  int host = 2;  // 0 nothing; 1 lowering, compiling, fallbacks; 2 waits and launches too
  int device = 1;
  bool lines = true;
  int rank = 0;
  std::string run_dir;  // none: no file of our own

  static std::string decoded(const std::string& text) {
    std::string out;
    for (size_t i = 0; i < text.size(); ++i) {
      if (text[i] == '%' && i + 2 < text.size()) {
        out += static_cast<char>(std::stoi(text.substr(i + 1, 2), nullptr, 16));
        i += 2;
      } else {
        out += text[i];
      }
    }
    return out;
  }
  static Levels parse(const std::string& text) {
    Levels levels;
    const auto number = [&text](const char* key, int otherwise) {
      const size_t at = text.find(key);
      return at == std::string::npos ? otherwise : std::atoi(text.c_str() + at + strlen(key));
    };
    if (text.rfind("tpu;", 0) != 0) return levels;
    levels.host = number("host:", levels.host);
    levels.device = number("device:", levels.device);
    levels.lines = number("lines:", 1) != 0;
    levels.rank = number("rank:", 0);
    const size_t at = text.find("run_dir:");
    if (at != std::string::npos) levels.run_dir = decoded(text.substr(at + strlen("run_dir:")));
    return levels;
  }
};

const std::set<ActivityType>& our_types() {
  static const auto* types = new std::set<ActivityType>{
      ActivityType::CONCURRENT_KERNEL, ActivityType::GPU_MEMCPY, ActivityType::PRIVATEUSE1_RUNTIME};
  return *types;
}

bool on_device(Kind kind) {
  return kind == Kind::kExecute || kind == Kind::kToDevice || kind == Kind::kToHost ||
         kind == Kind::kAcross;
}

int host_level(Kind kind) {
  switch (kind) {
    case Kind::kLower:
    case Kind::kCompile:
    case Kind::kLoad:
    case Kind::kFallback:
      return 1;
    case Kind::kLaunch:
    case Kind::kWait:
      return 2;
    default:
      return INT_MAX;
  }
}

std::string title(const activity::Span& span) {
  switch (span.kind) {
    case Kind::kExecute:
      return span.name;
    case Kind::kToDevice:
      return "Memcpy HtoD";
    case Kind::kToHost:
      return "Memcpy DtoH";
    case Kind::kAcross:
      return "Memcpy DtoD";
    default:
      return std::string("tpu::") + activity::kind_name(span.kind) + " " + span.name;
  }
}

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out;
}

class Session final : public libkineto::IActivityProfilerSession {
 public:
  Session(std::set<ActivityType> types, Levels levels)
      : types_(std::move(types)),
        levels_(levels),
        flags_(levels.lines ? activity::kTrace | activity::kLines : +activity::kTrace) {}
  ~Session() override { stop(); }

  void start() override {
    if (running_) return;
    running_ = true;
    activity::take_spans();  // of a session that nobody asked for its trace
    activity::enable(flags_);
    status_ = libkineto::TraceStatus::RECORDING;
  }
  void stop() override {
    if (!running_) return;
    running_ = false;
    dropped_ = activity::dropped_spans();
    spans_ = activity::take_spans();
    activity::disable(flags_);
    status_ = libkineto::TraceStatus::PROCESSING;
  }
  std::vector<std::string> errors() override {
    if (dropped_ == 0) return {};
    return {"tpu: " + std::to_string(dropped_) + " spans were dropped, the trace was too long"};
  }
  void processTrace(libkineto::ActivityLogger& logger) override {
    processTrace(logger, nullptr, 0, INT64_MAX);
  }
  void processTrace(libkineto::ActivityLogger& logger, libkineto::getLinkedActivityCallback linked,
                    int64_t start_time, int64_t end_time) override {
    buffer_ = std::make_unique<libkineto::CpuTraceBuffer>();
    buffer_->span = libkineto::TraceSpan(start_time, end_time, "tpu");
    for (const activity::Span& span : spans_) {
      const bool device = on_device(span.kind);
      if (device ? levels_.device < 1 : levels_.host < host_level(span.kind)) continue;
      if (span.end < start_time || span.start > end_time) continue;
      emit(logger, span, device, linked);
    }
    if (!levels_.run_dir.empty()) write_chrome_trace(start_time);
  }
  std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override { return nullptr; }
  std::vector<libkineto::ResourceInfo> getResourceInfos() override {
    std::vector<libkineto::ResourceInfo> infos;
    for (const int device : devices_) {
      infos.push_back({0, 0, device, "programs"});
      infos.push_back({1, 1, device, "copies"});
    }
    return infos;
  }
  std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override {
    return std::move(buffer_);
  }
  void pushCorrelationId(uint64_t id) override { activity::push_correlation(id); }
  void popCorrelationId() override { activity::pop_correlation(); }

 private:
  // The spans alone, for trace viewers: one process per device, one for the host.
  void write_chrome_trace(int64_t start_time) const {
    const std::string path = levels_.run_dir + "/rank" + std::to_string(levels_.rank) + "_" +
                             std::to_string(getpid()) + "_" + std::to_string(start_time) +
                             ".tpu.trace.json";
    std::ofstream file(path);
    file << std::fixed << std::setprecision(3)
         << "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [";
    const char* separator = "\n";
    for (const auto& activity : buffer_->activities) {
      const bool device = activity->activityType != ActivityType::PRIVATEUSE1_RUNTIME;
      file << separator << "{\"ph\": \"X\", \"name\": \"" << escaped(activity->activityName)
           << "\", \"cat\": \"" << libkineto::toString(activity->activityType) << "\", \"pid\": \""
           << (device ? "tpu:" + std::to_string(activity->device) : "host")
           << "\", \"tid\": " << activity->resource
           << ", \"ts\": " << static_cast<double>(activity->startTime - start_time) / 1e3
           << ", \"dur\": " << static_cast<double>(activity->duration()) / 1e3 << ", \"args\": {"
           << activity->metadataJson() << "}}";
      separator = ",\n";
    }
    file << "\n]}\n";
    file.close();
    if (!file.good()) TORCH_WARN("tpu: the profiler could not write ", path);
  }

  void emit(libkineto::ActivityLogger& logger, const activity::Span& span, bool device,
            const libkineto::getLinkedActivityCallback& linked) {
    const ActivityType type = !device                       ? ActivityType::PRIVATEUSE1_RUNTIME
                              : span.kind == Kind::kExecute ? ActivityType::CONCURRENT_KERNEL
                                                            : ActivityType::GPU_MEMCPY;
    if (types_.count(type) == 0) return;
    buffer_->emplace_activity(buffer_->span, type, title(span));
    libkineto::GenericTraceActivity& out = *buffer_->activities.back();
    out.startTime = span.start;
    out.endTime = span.end;
    out.threadId = span.thread;
    if (linked != nullptr && span.correlation != 0) {
      out.linked = linked(static_cast<int32_t>(span.correlation));
    }
    if (span.kind == Kind::kLaunch || span.kind == Kind::kExecute) {  // the arrow between the two
      out.flow.id = static_cast<uint32_t>(span.correlation);
      out.flow.type = libkineto::kLinkAsyncCpuGpu;
      out.flow.start = span.kind == Kind::kLaunch ? 1 : 0;
    }
    if (device) {
      devices_.insert(span.device);
      out.device = span.device;
      out.resource = span.kind == Kind::kExecute ? 0 : 1;
      // Of a host row it would make PyTorch count the op's executions for that row too.
      out.id = static_cast<int32_t>(span.correlation);
    } else {
      out.device = static_cast<int32_t>(getpid());
      out.resource = span.thread;
    }
    if (span.bytes != 0) out.addMetadata("bytes", span.bytes);
    if (!device) out.addMetadataQuoted("op", escaped(span.name));
    if (span.line != kNoLine) out.addMetadataQuoted("line", escaped(to_string(span.line)));
    logger.handleGenericActivity(out);
  }

  std::set<ActivityType> types_;  // what was asked for: without the device, only host spans
  Levels levels_;
  uint32_t flags_;
  bool running_ = false;
  int64_t dropped_ = 0;
  std::vector<activity::Span> spans_;
  std::set<int> devices_;
  std::unique_ptr<libkineto::CpuTraceBuffer> buffer_;
};

class Profiler final : public libkineto::IActivityProfiler {
 public:
  const std::string& name() const override {
    static const auto* name = new std::string("tpu");
    return *name;
  }
  const std::set<ActivityType>& availableActivities() const override { return our_types(); }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      const std::set<ActivityType>& types, const libkineto::Config& config) override {
    const bool asked = std::any_of(types.begin(), types.end(),
                                   [](ActivityType type) { return our_types().count(type) != 0; });
    if (!asked) return nullptr;
    return std::make_unique<Session>(types, Levels::parse(config.getCustomConfig()));
  }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      int64_t /*ts_ms*/, int64_t /*duration_ms*/, const std::set<ActivityType>& types,
      const libkineto::Config& config) override {
    return configure(types, config);
  }
};

REGISTER_PRIVATEUSE1_PROFILER(Profiler);

}  // namespace

}  // namespace torch_tpu
