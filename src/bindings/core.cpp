// The extension `lily._core`: converts, releases the interpreter lock, calls.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "base/error.h"
#include "runtime/check.h"
#include "runtime/session.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace lily {
namespace {

using Ids = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Values = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Row = nb::ndarray<nb::numpy, float, nb::ndim<1>>;
using Numbers = nb::typed<nb::dict, nb::str, nb::int_>;
using Rows = nb::ndarray<nb::numpy, float, nb::ndim<2>>;

std::span<const uint32_t> span(const Ids& ids) { return {ids.data(), ids.size()}; }

Row array(std::vector<float> values) {
  auto* owned = new std::vector<float>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
  return Row(owned->data(), {owned->size()}, owner);
}

// lily's exceptions become the classes in lily.errors, a bad argument ValueError.
void register_errors() {
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    const char* name = nullptr;
    std::string text;
    try {
      std::rethrow_exception(p);
    } catch (const ArgumentError& e) {
      PyErr_SetString(PyExc_ValueError, e.what());
      return;
    } catch (const CheckpointError& e) {
      name = "CheckpointError", text = e.what();
    } catch (const DeviceError& e) {
      name = "DeviceError", text = e.what();
    } catch (const ContextError& e) {
      name = "ContextError", text = e.what();
    } catch (const Cancelled& e) {
      name = "Cancelled", text = e.what();
    } catch (const InternalError& e) {
      name = "InternalError", text = e.what();
    }
    nb::object type = nb::module_::import_("lily.errors").attr(name);
    PyErr_SetString(type.ptr(), text.c_str());
  });
}

// Called from C++ without the lock: lets Python handle signals, then the caller's function.
template <class A, class B>
std::function<void(A, B)> polling(const nb::object& callback) {
  return [&callback](A done, B total) {
    nb::gil_scoped_acquire lock;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (!callback.is_none()) callback(done, total);
  };
}

FileType file_type(const std::string& name) {
  if (name == "U32") return FileType::u32;
  if (name == "BF16") return FileType::bf16;
  if (name == "F16") return FileType::f16;
  if (name == "F32") return FileType::f32;
  throw CheckpointError("dtype " + name + ", expected U32, BF16, F16 or F32");
}

Precision precision_named(const std::string& name) {
  if (name == "fast") return Precision::fast;
  if (name == "float32") return Precision::float32;
  throw ArgumentError("precision: expected \"fast\" or \"float32\", found \"" + name + "\"");
}

PlanKind plan_kind(const std::string& name) {
  for (PlanKind k = PlanKind::prefill; k <= PlanKind::next_drawn; k = PlanKind(uint8_t(k) + 1))
    if (name == plan_name(k)) return k;
  throw ArgumentError("kind: no plan is called \"" + name + "\"");
}

struct PyDevice {
  std::shared_ptr<Device> device;
};

Numbers need_dict(const MemoryNeed& need) {
  Numbers d;
  d["weight_bytes"] = need.weight_bytes;
  d["session_bytes"] = need.session_bytes;
  d["position_bytes"] = need.position_bytes;
  d["scratch_bytes"] = need.scratch_bytes;
  d["available_bytes"] = need.available_bytes;
  d["token_dispatches"] = need.token_dispatches;
  d["chunk_dispatches"] = need.chunk_dispatches;
  d["largest_context"] = need.largest_context();
  return d;
}

Numbers stats_dict(const PlanStats& s) {
  Numbers d;
  d["dispatches"] = s.dispatches;
  d["host_steps"] = s.host_steps;
  d["stages"] = s.stages;
  d["barriers"] = s.barriers;
  d["weight_bytes"] = s.weight_bytes;
  d["read_bytes"] = s.read_bytes;
  d["written_bytes"] = s.written_bytes;
  d["temporary_bytes"] = s.temporary_bytes;
  return d;
}

nb::list report_list(const std::vector<KernelReport>& reports) {
  nb::list list;
  for (const KernelReport& r : reports) {
    nb::dict d;
    d["kernel"] = r.name;
    d["plan"] = r.plan;
    d["stage"] = r.stage;
    d["error"] = r.error;
    d["max_threads"] = r.facts.max_threads;
    d["compile_s"] = r.facts.compile_s;
    d["dispatches"] = r.dispatches;
    d["slot"] = r.slot;
    d["difference"] = r.difference;
    d["seconds"] = r.seconds;
    list.append(d);
  }
  return list;
}

void bind_config(nb::module_& m) {
  nb::class_<Config>(m, "Config", "Dimensions of a checkpoint, named as in its config.json.")
      .def(nb::init<>())
      .def_rw("hidden_size", &Config::hidden_size)
      .def_rw("vocab_size", &Config::vocab_size)
      .def_rw("num_attention_heads", &Config::num_attention_heads)
      .def_rw("num_key_value_heads", &Config::num_key_value_heads)
      .def_rw("head_dim", &Config::head_dim)
      .def_rw("rotary_dim", &Config::rotary_dim)
      .def_rw("linear_num_key_heads", &Config::linear_num_key_heads)
      .def_rw("linear_num_value_heads", &Config::linear_num_value_heads)
      .def_rw("linear_key_head_dim", &Config::linear_key_head_dim)
      .def_rw("linear_value_head_dim", &Config::linear_value_head_dim)
      .def_rw("num_experts", &Config::num_experts)
      .def_rw("num_experts_per_tok", &Config::num_experts_per_tok)
      .def_rw("moe_intermediate_size", &Config::moe_intermediate_size)
      .def_rw("shared_expert_intermediate_size", &Config::shared_expert_intermediate_size)
      .def_rw("rms_norm_eps", &Config::rms_norm_eps)
      .def_rw("rope_theta", &Config::rope_theta)
      .def_rw("tie_word_embeddings", &Config::tie_word_embeddings)
      .def_rw("full_attention", &Config::full_attention)
      .def_rw("n_tokens", &Config::n_tokens);

  nb::class_<TensorTable>(m, "TensorTable", "Where a checkpoint's tensors are.")
      .def(nb::init<>())
      .def_rw("files", &TensorTable::files)
      .def_rw("published", &TensorTable::published)
      .def(
          "add_tensor",
          [](TensorTable& t, const std::string& name, uint32_t file, uint64_t offset,
             uint64_t bytes, const std::string& dtype, std::vector<uint64_t> shape) {
            t.tensors[name] = {file, offset, bytes, file_type(dtype), std::move(shape)};
          },
          "name"_a, "file"_a, "offset"_a, "bytes"_a, "dtype"_a, "shape"_a)
      .def(
          "add_format",
          [](TensorTable& t, const std::string& module, uint32_t bits, uint32_t group) {
            t.formats[module] = {bits, group};
          },
          "module"_a, "bits"_a, "group"_a);
}

void bind_engine(nb::module_& m) {
  nb::class_<PyDevice>(m, "Device", "A device: \"auto\", \"cpu\" or \"metal\".")
      .def(
          "__init__",
          [](PyDevice* self, const std::string& name, uint32_t threads, bool checked) {
            std::shared_ptr<Device> device;
            {
              nb::gil_scoped_release unlocked;
              device = make_device(name, threads, checked);
            }
            const std::string& warning = device->info().warning;
            if (!warning.empty() && PyErr_WarnEx(PyExc_RuntimeWarning, warning.c_str(), 1) < 0)
              throw nb::python_error();
            new (self) PyDevice{std::move(device)};
          },
          "name"_a, "threads"_a, "checked"_a = true)
      .def_prop_ro("name", [](const PyDevice& d) { return d.device->info().name; })
      .def_prop_ro("description", [](const PyDevice& d) { return d.device->info().description; })
      .def_prop_ro("memory_bytes", [](const PyDevice& d) { return d.device->info().memory_bytes; })
      .def_prop_ro("weight_bytes_read",
                   [](const PyDevice& d) { return d.device->weight_bytes_read(); })
      .def(
          "findings",
          [](PyDevice& d) {
            std::vector<std::tuple<std::string, std::string, bool>> list;
            nb::gil_scoped_release unlocked;
            for (Finding& f : d.device->findings())
              list.emplace_back(std::move(f.name), std::move(f.value), f.wrong);
            return list;
          },
          "What the device says of itself: name, value, whether it is wrong.");

  nb::class_<EngineOptions>(m, "Options", "How a model is run.")
      .def(
          "__init__",
          [](EngineOptions* self, const std::string& precision, uint32_t chunk, size_t memory_bytes,
             uint32_t io_threads, const std::vector<std::string>& ablate, bool kv_int8,
             uint32_t attention_block) {
            new (self) EngineOptions{.precision = precision_named(precision),
                                     .chunk = chunk,
                                     .io_threads = io_threads,
                                     .memory_bytes = memory_bytes,
                                     .ablation = Ablation(ablate),
                                     .kv_int8 = kv_int8,
                                     .attention_block = attention_block};
          },
          "precision"_a, nb::kw_only(), "chunk"_a = 0, "memory_bytes"_a = 0, "io_threads"_a = 1,
          "ablate"_a = std::vector<std::string>(), "kv_int8"_a = false,
          "attention_block"_a = 0);
  m.def("techniques", [] {
    std::vector<std::pair<std::string, std::string>> out;
    for (const TechniqueInfo& t : techniques()) out.emplace_back(t.name, t.without);
    return out;
  });

  m.def(
      "memory_need",
      [](PyDevice& d, const Config& config, const TensorTable& table,
         const EngineOptions& options) {
        return need_dict(Engine::need(*d.device, config, table, options));
      },
      "device"_a, "config"_a, "table"_a, "options"_a);
  m.def(
      "plan_stats",
      [](PyDevice& d, const Config& config, const TensorTable& table, const EngineOptions& options,
         const std::string& kind, bool single_block, bool penalties) {
        return stats_dict(Engine::stats(
            *d.device, config, table, options,
            {.kind = plan_kind(kind), .single_block = single_block, .penalties = penalties}));
      },
      "device"_a, "config"_a, "table"_a, "options"_a, "kind"_a, "single_block"_a, "penalties"_a);

  using Reports = nb::typed<nb::list, nb::typed<nb::dict, nb::str, nb::any>>;
  m.def(
      "compile_kernels",
      [](PyDevice& d, const Config& config, const TensorTable& table,
         const EngineOptions& options) {
        std::vector<KernelReport> reports;
        {
          nb::gil_scoped_release unlocked;
          reports = compile_kernels(*d.device, config, table, options);
        }
        return Reports(report_list(reports));
      },
      "device"_a, "config"_a, "table"_a, "options"_a);
  m.def(
      "compare_kernels",
      [](PyDevice& d, PyDevice& reference, const Config& config, const TensorTable& table,
         const EngineOptions& options) {
        std::vector<KernelReport> reports;
        {
          nb::gil_scoped_release unlocked;
          reports = compare_kernels(*d.device, *reference.device, config, table, options);
        }
        return Reports(report_list(reports));
      },
      "device"_a, "reference"_a, "config"_a, "table"_a, "options"_a);

  nb::class_<Engine>(m, "Engine", "A loaded model.")
      .def_static(
          "load",
          [](PyDevice& d, const Config& config, const TensorTable& table,
             const EngineOptions& options, nb::object progress) {
            auto poll = polling<uint64_t, uint64_t>(progress);
            nb::gil_scoped_release unlocked;
            return Engine::load(d.device, config, table, options, poll);
          },
          "device"_a, "config"_a, "table"_a, "options"_a, "progress"_a.none())
      .def(
          "without",
          [](const Engine& e, const std::vector<std::string>& names) {
            return e.without(Ablation(names));
          },
          "names"_a)
      .def_prop_ro("memory", [](Engine& e) { return need_dict(e.memory()); })
      .def_prop_ro("chunk", [](Engine& e) { return e.options().chunk; })
      .def(
          "plan_stats",
          [](Engine& e, const std::string& kind, bool single_block, bool penalties) {
            return stats_dict(e.plan({.kind = plan_kind(kind),
                                      .single_block = single_block,
                                      .penalties = penalties})
                                  .stats());
          },
          "kind"_a, "single_block"_a, "penalties"_a)
      .def(
          "plan_entries",
          [](Engine& e, const std::string& kind, bool single_block) {
            std::vector<std::tuple<std::string, std::string, size_t>> list;
            const Plan& plan = e.plan({.kind = plan_kind(kind), .single_block = single_block});
            for (const Plan::Entry& entry : plan.entries())
              list.emplace_back(entry.stage, entry.contract->name, entry.bytes);
            return list;
          },
          "kind"_a, "single_block"_a,
          "Stage, kernel and bytes that it moves, KV cache aside, of each dispatch in turn.");
}

// A slot's memory as a writable array: float32, uint32, or uint16 for bf16; bytes of an int8 cache;
// packed weights are left out.
nb::object slot_array(const SlotInfo& info, const Slot& slot, const EngineOptions& options) {
  if (!slot.buffer || info.type == SlotType::packed) return nb::none();
  void* data = slot.buffer->data + slot.offset;
  auto view = [&]<class T>(T*) {
    const size_t n = slot.bytes / sizeof(T);
    return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {n}, nb::none()),
                    nb::rv_policy::reference);
  };
  if (info.type == SlotType::u32) return view(static_cast<uint32_t*>(nullptr));
  const bool cache = info.type == SlotType::cache;
  if (cache && options.kv_int8) return view(static_cast<uint8_t*>(nullptr));
  if ((cache || info.type == SlotType::act) && options.precision == Precision::fast)
    return view(static_cast<uint16_t*>(nullptr));
  return view(static_cast<float*>(nullptr));
}

Plan::Observer observer(Session& s, const nb::object& callback) {
  return [&s, &callback](const Plan::Entry& e, std::span<const Slot> slots, const Timing* timing) {
    nb::gil_scoped_acquire lock;
    nb::dict arrays;
    for (uint32_t i = 0; i < e.contract->n_slots; ++i) {
      const SlotInfo& info = e.contract->slots[i];
      arrays[std::string(info.name).c_str()] =
          slot_array(info, slots[i], s.engine().options());
    }
    nb::object seconds = timing ? nb::cast(timing->end_s - timing->start_s) : nb::none();
    callback(e.stage, std::string(e.contract->name), arrays, seconds);
  };
}

nb::bytes token_bytes(const std::vector<uint32_t>& tokens) {
  return nb::bytes(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(uint32_t));
}

// Shows each range of a snapshot's memory to a Python function, which may read or fill it.
KvCache::Visit showing(const nb::object& callback) {
  return [&callback](std::span<std::byte> bytes) {
    nb::gil_scoped_acquire lock;
    callback(nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(bytes.data(), {bytes.size()},
                                                                   nb::none()),
                      nb::rv_policy::reference));
  };
}

void bind_snapshot(nb::module_& m) {
  nb::class_<Snapshot>(m, "Snapshot", "A session's state at one position.")
      .def_prop_ro("position", &Snapshot::position)
      .def_prop_ro("nbytes", &Snapshot::bytes)
      .def_prop_ro("tokens", [](const Snapshot& s) { return s.at.tokens; })
      .def_prop_ro("token_bytes", [](const Snapshot& s) { return token_bytes(s.at.tokens); })
      .def_prop_ro("prompt_length", [](const Snapshot& s) { return s.at.prompt_length; })
      .def_prop_ro("exact_length", [](const Snapshot& s) { return s.at.exact_length; })
      .def_prop_ro("exact", &Snapshot::exact)
      .def_prop_ro("pending", [](const Snapshot& s) { return s.at.pending; })
      .def_prop_ro("has_logits", [](const Snapshot& s) { return s.logits != nullptr; })
      .def_prop_ro("kv_bytes", [](const Snapshot& s) { return s.kv.bytes(); })
      .def_prop_ro("kv_bytes_trimmed", [](const Snapshot& s) { return s.kv.bytes_of(s.position()); })
      .def_prop_ro("kv_identity", [](const Snapshot& s) { return s.kv.identity(); })
      .def_prop_ro("kv_owners", [](const Snapshot& s) { return s.kv.owners(); })
      .def("precedes", &Snapshot::precedes, "longer"_a)
      .def("sharing", &Snapshot::sharing, "longer"_a)
      .def("trimmed", &Snapshot::trimmed, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "visit",
          [](const Snapshot& s, nb::object callback) {
            auto show = showing(callback);
            nb::gil_scoped_release unlocked;
            s.visit(show);
          },
          "callback"_a, "Show all numbers in turn, as uint8 arrays that are valid during the call.")
      .def_static("payload_bytes", &Snapshot::payload_bytes, "engine"_a, "tokens"_a, "logits"_a)
      .def_static(
          "build",
          [](std::shared_ptr<Engine> engine, const Ids& tokens, uint32_t prompt_length,
             uint32_t exact_length, std::optional<uint32_t> pending, bool logits,
             nb::object callback) {
            auto show = showing(callback);
            Place at{{tokens.data(), tokens.data() + tokens.size()},
                     prompt_length,
                     exact_length,
                     pending};
            nb::gil_scoped_release unlocked;
            return Snapshot::build(std::move(engine), std::move(at), logits, show);
          },
          "engine"_a, "tokens"_a, "prompt_length"_a, "exact_length"_a, "pending"_a.none(),
          "logits"_a, "callback"_a, "One whose numbers `callback` fills, in the order of visit().");
}

void bind_session(nb::module_& m) {

  nb::class_<Session>(m, "Session", "One token timeline.")
      .def(nb::init<std::shared_ptr<Engine>, uint32_t>(), "engine"_a, "context"_a)
      .def(
          "prefill",
          [](Session& s, const Ids& tokens, nb::object progress) {
            auto poll = polling<uint32_t, uint32_t>(progress);
            nb::gil_scoped_release unlocked;
            s.prefill(span(tokens), poll);
          },
          "tokens"_a, "progress"_a.none())
      .def(
          "score",
          [](Session& s, const Ids& tokens, nb::object progress) {
            const size_t v = s.engine().config().vocab_size;
            auto* values = new std::vector<float>(tokens.size() * v);
            nb::capsule owner(
                values, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
            {
              auto poll = polling<uint32_t, uint32_t>(progress);
              nb::gil_scoped_release unlocked;
              s.score(span(tokens), values->data(), poll);
            }
            return Rows(values->data(), {tokens.size(), v}, owner);
          },
          "tokens"_a, "progress"_a.none())
      .def(
          "observe",
          [](Session& s, const Ids& tokens, bool as_prefill, nb::object callback) {
            auto observe = observer(s, callback);
            nb::gil_scoped_release unlocked;
            s.observe(span(tokens), as_prefill, observe);
          },
          "tokens"_a, "as_prefill"_a, "callback"_a)
      .def("reserve", &Session::reserve, "tokens"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("decode", &Session::decode, "token"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("logits",
           [](Session& s) -> std::optional<Row> {
             const auto held = s.turn();
             const float* p = s.logits();
             if (!p) return std::nullopt;
             const size_t v = s.engine().config().vocab_size;
             return array({p, p + v});
           })
      .def(
          "start",
          [](Session& s, float temperature, uint32_t top_k, float top_p, float min_p,
             float repetition, float presence, float frequency, uint64_t seed,
             const Ids& bias_ids, const Values& bias, uint32_t max_tokens) {
            const Draw draw{.temperature = temperature,
                            .top_p = top_p,
                            .min_p = min_p,
                            .repetition = repetition,
                            .presence = presence,
                            .frequency = frequency,
                            .top_k = top_k,
                            .n_bias = 0,
                            .seed = seed};
            nb::gil_scoped_release unlocked;
            s.start(draw, {span(bias_ids), {bias.data(), bias.size()}}, max_tokens);
          },
          "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "repetition"_a, "presence"_a,
          "frequency"_a, "seed"_a, "bias_ids"_a, "bias"_a, "max_tokens"_a)
      .def("next", &Session::next, nb::call_guard<nb::gil_scoped_release>())
      .def("advance", &Session::advance, nb::call_guard<nb::gil_scoped_release>())
      .def("force", &Session::force, "token"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("stop", &Session::stop, nb::call_guard<nb::gil_scoped_release>())
      .def("cancel", &Session::cancel)
      .def_prop_ro("cancelled", &Session::cancelled)
      .def_prop_ro("streaming", &Session::streaming)
      .def("reset", &Session::reset, nb::call_guard<nb::gil_scoped_release>())
      .def("snapshot", &Session::snapshot, nb::call_guard<nb::gil_scoped_release>())
      .def("restore", &Session::restore, "snapshot"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("discard_pending", &Session::discard_pending, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("position", &Session::position)
      .def_prop_ro("context", &Session::context)
      .def_prop_ro("pending", &Session::pending)
      .def_prop_ro("exact", &Session::exact)
      .def_prop_ro("tokens",
                   [](Session& s) {
                     const auto held = s.turn();
                     return s.tokens();
                   })
      .def_prop_ro("token_bytes",
                   [](Session& s) {
                     const auto held = s.turn();
                     return token_bytes(s.tokens());
                   })
      .def("snapshot_bytes", &Session::snapshot_bytes, "rows"_a)
      .def_prop_ro("kv_bytes", &Session::kv_bytes)
      .def_prop_ro("device_s", &Session::device_s)
      .def("state", [](const Session& s, uint32_t layer) { return array(s.state(layer)); }, "layer"_a)
      .def("conv", [](const Session& s, uint32_t layer) { return array(s.conv(layer)); }, "layer"_a);
}

}  // namespace
}  // namespace lily

NB_MODULE(_core, m) {
  m.doc() = "lily's C++ core. Use the classes in `lily`; this module's names may change.";
#ifdef LILY_METAL
  m.attr("has_metal") = true;
#else
  m.attr("has_metal") = false;
#endif
  lily::register_errors();
  lily::bind_config(m);
  lily::bind_engine(m);
  lily::bind_snapshot(m);
  lily::bind_session(m);
}
