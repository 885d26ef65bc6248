#include "dispatch/link.h"

#include <c10/util/Exception.h>

#include <string_view>
#include <unordered_map>

namespace torch_tpu {

namespace {

// A program's text as a function: what stands between its parentheses, and its lines.
struct Function {
  std::vector<std::string_view> parameters;  // types
  std::vector<std::string_view> results;     // types
  std::string header;                        // "(%s0: tensor<4xf32>) -> (tensor<4xf32>) {\n"
  std::string_view body;                     // to the closing brace of the function
};

// Types hold commas only inside brackets, and attributes stand in braces.
std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> out;
  int depth = 0;
  size_t start = 0;
  for (size_t i = 0; i <= text.size(); ++i) {
    const char c = i < text.size() ? text[i] : ',';
    if (c == '<' || c == '{' || c == '(') ++depth;
    if (c == '>' || c == '}' || c == ')') --depth;
    if (c != ',' || (depth > 0 && i < text.size())) continue;
    std::string_view part = text.substr(start, i - start);
    while (!part.empty() && part.front() == ' ') part.remove_prefix(1);
    if (!part.empty()) out.push_back(part);
    start = i + 1;
  }
  return out;
}

Function as_function(const Program& program) {
  constexpr std::string_view kMain = "func.func public @main(";
  constexpr std::string_view kArrow = ") -> (";
  const std::string_view text = program.text;
  const size_t main = text.find(kMain);
  const size_t arrow = text.find(kArrow, main);
  const size_t end = text.find(") {\n", arrow);
  const size_t close = text.rfind("  }\n}");
  TORCH_INTERNAL_ASSERT(main != std::string_view::npos && arrow != std::string_view::npos &&
                            end != std::string_view::npos && close != std::string_view::npos,
                        program.name, ": a program of unexpected form");
  Function f;
  f.header = "(";
  for (std::string_view parameter :
       split(text.substr(main + kMain.size(), arrow - main - kMain.size()))) {
    parameter = parameter.substr(0, parameter.find(" {"));  // donation is main's business
    const size_t colon = parameter.find(": ");
    f.parameters.push_back(parameter.substr(colon + 2));
    if (f.header.size() > 1) f.header += ", ";
    f.header += parameter;
  }
  const std::string_view results = text.substr(arrow + kArrow.size(), end - arrow - kArrow.size());
  f.results = split(results);
  f.header.append(") -> (").append(results).append(") {\n");
  f.body = text.substr(end + 4, close - end - 4);
  return f;
}

std::vector<bool> needed_nodes(const Recording& r, const std::vector<bool>& live) {
  std::vector<bool> wanted = live;
  std::vector<bool> needed(r.nodes.size(), false);
  for (size_t n = r.nodes.size(); n-- > 0;) {
    const Recording::Node& node = r.nodes[n];
    bool use = node.program->checks != nullptr;
    for (size_t i = 0; i < node.program->outputs.size(); ++i) {
      use = use || wanted[node.first_value + i];
    }
    if (!use) continue;
    needed[n] = true;
    for (size_t i = 0; i < r.num_arguments(node); ++i) {
      wanted[r.arguments[node.first_argument + i]] = true;
    }
  }
  return needed;
}

class Linker {
 public:
  Linker(const Recording& r, const std::vector<bool>& live)
      : r_(r), live_(live), names_(r.values.size()), types_(r.values.size()) {}

  Linked link() {
    const std::vector<bool> needed = needed_nodes(r_, live_);
    for (size_t n = 0; n < r_.nodes.size(); ++n) {
      if (needed[n]) call(n);
    }
    collect_outputs();
    return std::move(out_);
  }

 private:
  struct Known {
    Function function;
    std::string name;
  };

  const Known& function_of(const Program& program) {
    const auto [it, fresh] = functions_.try_emplace(program.uid);
    if (fresh) {
      it->second.function = as_function(program);
      it->second.name = "@f" + std::to_string(functions_.size() - 1);
      bodies_.append("  func.func private ").append(it->second.name);
      bodies_.append(it->second.function.header).append(it->second.function.body);
      bodies_.append("  }\n");
    }
    return it->second;
  }

  void call(size_t n) {
    const Recording::Node& node = r_.nodes[n];
    const Program& program = *node.program;
    const Known& callee = function_of(program);
    const Function& f = callee.function;
    std::string arguments;
    std::string types;
    const auto add = [&](std::string_view name, std::string_view type) {
      if (!arguments.empty()) {
        arguments += ", ";
        types += ", ";
      }
      arguments += name;
      types += type;
    };
    size_t p = 0;
    for (; p < program.parameters.size(); ++p) {
      const uint32_t value = r_.arguments[node.first_argument + p];
      if (names_[value].empty()) input(value, f.parameters[p]);
      add(names_[value], f.parameters[p]);
    }
    const std::string suffix = std::to_string(n);
    if (program.takes_ints) {
      add(operand("%i" + suffix, "%ints", "i64", f.parameters[p], node.first_int, r_.ints.size()),
          f.parameters[p]);
      ++p;
      out_.takes_ints = true;
    }
    if (program.takes_floats) {
      add(operand("%d" + suffix, "%floats", "f64", f.parameters[p], node.first_float,
                  r_.floats.size()),
          f.parameters[p]);
      out_.takes_floats = true;
    }
    const std::string result = "%v" + suffix;
    const size_t count = f.results.size();
    lines_.append("    ").append(result);
    if (count > 1) lines_.append(":").append(std::to_string(count));
    lines_.append(" = func.call ").append(callee.name).append("(").append(arguments);
    lines_.append(") : (").append(types).append(") -> (");
    for (size_t i = 0; i < count; ++i) {
      if (i > 0) lines_.append(", ");
      lines_.append(f.results[i]);
      const std::string name = count > 1 ? result + "#" + std::to_string(i) : result;
      if (i < program.outputs.size()) {
        names_[node.first_value + i] = name;
        types_[node.first_value + i] = f.results[i];
      } else {
        codes_.push_back(name);
        out_.checks.push_back(program.checks);
      }
    }
    lines_.append(")\n");
    ++out_.num_nodes;
  }

  // The part of a pack of operands that belongs to one call.
  std::string operand(const std::string& name, const char* pack, const char* element,
                      std::string_view type, uint32_t first, size_t total) {
    size_t count = 0;
    for (const char c : type.substr(7)) {
      if (c < '0' || c > '9') break;
      count = count * 10 + static_cast<size_t>(c - '0');
    }
    if (count == total) return pack;
    lines_.append("    ").append(name).append(" = stablehlo.slice ").append(pack).append(" [");
    lines_.append(std::to_string(first)).append(":").append(std::to_string(first + count));
    lines_.append("] : (tensor<").append(std::to_string(total)).append("x").append(element);
    lines_.append(">) -> ").append(type).append("\n");
    return name;
  }

  void input(uint32_t value, std::string_view type) {
    names_[value] = "%a" + std::to_string(out_.inputs.size());
    types_[value] = type;
    out_.inputs.push_back(value);
  }

  void collect_outputs() {
    std::vector<int> position(r_.values.size(), -1);
    for (size_t i = 0; i < out_.inputs.size(); ++i) position[out_.inputs[i]] = static_cast<int>(i);
    std::vector<int> taken_by(out_.inputs.size(), -1);
    std::string names;
    std::string types;
    const auto add = [&](std::string_view name, std::string_view type) {
      names.append(names.empty() ? "" : ", ").append(name);
      types.append(types.empty() ? "" : ", ").append(type);
    };
    // A value overwritten later is no longer the newest of its chain: the last one takes the
    // memory.
    for (size_t v = r_.values.size(); v-- > 0;) {
      const Recording::Value& value = r_.values[v];
      if (!live_[v] || value.node < 0 || value.origin < 0) continue;
      const int donor = position[static_cast<size_t>(value.origin)];
      if (donor >= 0 && taken_by[static_cast<size_t>(donor)] < 0 &&
          types_[v] == types_[static_cast<size_t>(value.origin)]) {
        taken_by[static_cast<size_t>(donor)] = static_cast<int>(v);
      }
    }
    for (uint32_t v = 0; v < r_.values.size(); ++v) {
      if (!live_[v] || r_.values[v].node < 0) continue;
      const int origin = r_.values[v].origin;
      int donor = origin >= 0 ? position[static_cast<size_t>(origin)] : -1;
      if (donor >= 0 && taken_by[static_cast<size_t>(donor)] != static_cast<int>(v)) donor = -1;
      out_.outputs.push_back(v);
      out_.donors.push_back(donor);
      add(names_[v], types_[v]);
    }
    if (!codes_.empty()) add(join_codes(), "tensor<" + std::to_string(codes_.size()) + "xi64>");

    std::string parameters;
    std::vector<int> alias(out_.inputs.size(), -1);
    for (size_t o = 0; o < out_.donors.size(); ++o) {
      if (out_.donors[o] >= 0) alias[static_cast<size_t>(out_.donors[o])] = static_cast<int>(o);
    }
    const auto parameter = [&](std::string_view name, std::string_view type) {
      parameters.append(parameters.empty() ? "" : ", ").append(name).append(": ").append(type);
    };
    for (size_t i = 0; i < out_.inputs.size(); ++i) {
      parameter(names_[out_.inputs[i]], types_[out_.inputs[i]]);
      if (alias[i] >= 0) {
        parameters.append(" {tf.aliasing_output = ").append(std::to_string(alias[i]));
        parameters.append(" : i32}");
      }
    }
    if (out_.takes_ints) {
      parameter("%ints", "tensor<" + std::to_string(r_.ints.size()) + "xi64>");
    }
    if (out_.takes_floats) {
      parameter("%floats", "tensor<" + std::to_string(r_.floats.size()) + "xf64>");
    }
    std::string& text = out_.text;
    text.reserve(lines_.size() + bodies_.size() + parameters.size() + 2 * types.size() + 256);
    text.append("module {\n  func.func public @main(").append(parameters).append(") -> (");
    text.append(types).append(") {\n").append(lines_).append("    return ").append(names);
    text.append(" : ").append(types).append("\n  }\n").append(bodies_).append("}\n");
  }

  std::string join_codes() {
    const std::string total = "tensor<" + std::to_string(codes_.size()) + "xi64>";
    std::string names;
    std::string types;
    for (size_t i = 0; i < codes_.size(); ++i) {
      const std::string name = "%c" + std::to_string(i);
      lines_.append("    ").append(name).append(" = stablehlo.reshape ").append(codes_[i]);
      lines_.append(" : (tensor<i64>) -> tensor<1xi64>\n");
      names.append(i > 0 ? ", " : "").append(name);
      types.append(i > 0 ? ", " : "").append("tensor<1xi64>");
    }
    if (codes_.size() == 1) return "%c0";
    lines_.append("    %codes = stablehlo.concatenate ").append(names).append(", dim = 0 : (");
    lines_.append(types).append(") -> ").append(total).append("\n");
    return "%codes";
  }

  const Recording& r_;
  const std::vector<bool>& live_;
  std::vector<std::string> names_;
  std::vector<std::string_view> types_;
  std::unordered_map<uint64_t, Known> functions_;
  std::vector<std::string> codes_;
  std::string lines_;
  std::string bodies_;
  Linked out_;
};

}  // namespace

Linked link(const Recording& recording, const std::vector<bool>& live) {
  return Linker(recording, live).link();
}

}  // namespace torch_tpu
