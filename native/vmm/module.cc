// The Python face of the drivers. Every verb releases the GIL; native code never calls Python, except to build the
// exception or the capsule it returns.
#include <nanobind/eval.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "acl_driver.h"
#include "faulty_driver.h"
#include "host_driver.h"
#include "host_pages.h"
#include "simulated_driver.h"
#include "view.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace xllm::vmm;

namespace {

using NoGil = nb::call_guard<nb::gil_scoped_release>;

constexpr char kErrors[] = R"py(
class VmmError(Exception):
    """A driver verb failed: `op` its name, `code` the vendor's (errno on the host), `address` 0 where none applies."""

    def __init__(self, op, code, address, text):
        super().__init__(op, code, address, text)
        self.op, self.code, self.address, self.text = op, code, address, text

    def __str__(self):
        place = f" at {self.address:#x}" if self.address else ""
        return f"{self.op}{place}: {self.text} (code {self.code})"

class VmmShortage(VmmError):
    """Out of pages, memory or address-space entries: a miss, try again later."""
)py";

struct ErrorTypes {
  PyObject* error;
  PyObject* shortage;
};

void translate(const std::exception_ptr& pointer, void* payload) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    const auto* types = static_cast<const ErrorTypes*>(payload);
    PyObject* const type = dynamic_cast<const Shortage*>(&error) != nullptr ? types->shortage : types->error;
    PyErr_SetObject(type, nb::make_tuple(verb_name(error.verb), error.code, error.address, error.text).ptr());
  }
}

void bind_errors(nb::module_& module) {
  nb::dict scope;
  scope["__builtins__"] = nb::module_::import_("builtins");
  scope["__name__"] = "xllm_cli._vmm";
  nb::exec(kErrors, scope);
  module.attr("VmmError") = scope["VmmError"];
  module.attr("VmmShortage") = scope["VmmShortage"];
  // Lives as long as the interpreter, like the module.
  auto* const types =
      new ErrorTypes{nb::object(scope["VmmError"]).release().ptr(), nb::object(scope["VmmShortage"]).release().ptr()};
  nb::register_exception_translator(translate, types);
}

// A capsule that nobody took over still owns its view.
void drop_capsule(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor") == 0) return;
  auto* const managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  managed->deleter(managed);
}

nb::object make_capsule(Views& views, Address address, std::vector<std::int64_t> shape,
                        std::vector<std::int64_t> strides, int code, int bits, int device_type, int device_id) {
  if (shape.size() != strides.size()) throw std::invalid_argument("shape and strides differ in length");
  const DLDataType dtype{static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(bits), 1};
  const DLDevice device{device_type, device_id};
  DLManagedTensor* const managed = views.describe(address, std::move(shape), std::move(strides), dtype, device);
  PyObject* const capsule = PyCapsule_New(managed, "dltensor", drop_capsule);
  if (capsule == nullptr) {
    managed->deleter(managed);
    throw nb::python_error();
  }
  return nb::steal(capsule);
}

// A driver that nobody closed closes when Python drops it, and not even then with the GIL held.
template <typename Kind>
struct Bound final : Kind {
  using Kind::Kind;
  ~Bound() override {
    const nb::gil_scoped_release no_gil;
    Kind::close();
  }
};

void map_pairs(Driver& driver, const std::vector<std::pair<Address, Handle>>& pairs) {
  std::vector<Page> pages;
  pages.reserve(pairs.size());
  for (const auto& [address, handle] : pairs) pages.push_back({address, handle});
  driver.map(std::move(pages));
}

std::tuple<int, std::uint64_t, std::size_t> export_tuple(Driver& driver, Handle handle) {
  const Export exported = driver.export_handle(handle);
  return {exported.fd, exported.offset, exported.nbytes};
}

void bind_drivers(nb::module_& module) {
  nb::class_<Info>(module, "DriverInfo")
      .def_ro("name", &Info::name)
      .def_ro("mode", &Info::mode)
      .def_ro("page_bytes", &Info::page_bytes)
      .def_ro("total", &Info::total)
      .def_ro("free", &Info::free)
      .def_ro("can_alias", &Info::can_alias)
      .def_ro("max_reserve_bytes", &Info::max_reserve_bytes);
  nb::class_<Driver>(module, "Driver")
      .def("info", &Driver::info, NoGil())
      .def("reserve", &Driver::reserve, "nbytes"_a, NoGil())
      .def("release", &Driver::release, "address"_a, "nbytes"_a, NoGil())
      .def("create", &Driver::create, "count"_a, NoGil())
      .def("destroy", &Driver::destroy, "handles"_a, NoGil())
      .def("map", &map_pairs, "pages"_a, NoGil())
      .def("unmap", &Driver::unmap, "addresses"_a, NoGil())
      .def("export", &export_tuple, "handle"_a, NoGil())
      .def("counts", &Driver::counts, NoGil())
      .def("reset_counts", &Driver::reset_counts, NoGil())
      .def("usage", &Driver::usage, NoGil())
      .def("memfd_bytes", &Driver::memfd_bytes, NoGil())
      .def("last_failure", &Driver::last_failure, NoGil())
      .def("close", &Driver::close, NoGil());
  nb::class_<Bound<HostDriver>, Driver>(module, "HostDriver")
      .def(
          "__init__",
          [](Bound<HostDriver>* self, bool huge, std::size_t page_bytes, std::uint64_t total_bytes,
             std::optional<std::uint8_t> poison,
             std::int64_t vma_limit) { new (self) Bound<HostDriver>({huge, page_bytes, total_bytes, poison, vma_limit}); },
          nb::kw_only(), "huge"_a, "page_bytes"_a, "total_bytes"_a = 0, "poison"_a = nb::none(), "vma_limit"_a = 0);
  nb::class_<Bound<AclDriver>, Driver>(module, "AclDriver")
      .def(
          "__init__",
          [](Bound<AclDriver>* self, std::string library, int device, std::optional<std::size_t> page_bytes,
             std::uint64_t total_bytes) {
            new (self) Bound<AclDriver>({std::move(library), device, page_bytes, total_bytes});
          },
          nb::kw_only(), "library"_a = "", "device"_a = 0, "page_bytes"_a = nb::none(), "total_bytes"_a = 0, NoGil());
  nb::class_<FaultyDriver, Driver>(module, "FaultyDriver")
      .def(nb::init<std::shared_ptr<Driver>>(), "inner"_a)
      .def(
          "fail",
          [](FaultyDriver& self, const std::string& verb, std::uint64_t nth, bool shortage) {
            self.fail(verb_from_name(verb), nth, shortage);
          },
          "verb"_a, "nth"_a, "shortage"_a, NoGil());
  nb::class_<SimulatedDriver, Driver>(module, "SimulatedDriver")
      .def(nb::init<std::shared_ptr<Driver>, std::uint64_t>(), "inner"_a, nb::kw_only(), "total_bytes"_a)
      .def("take", &SimulatedDriver::take, "nbytes"_a, NoGil())
      .def("give", &SimulatedDriver::give, "nbytes"_a, NoGil())
      .def_prop_ro("outside", &SimulatedDriver::outside)
      .def_prop_rw("peer", &SimulatedDriver::peer, &SimulatedDriver::set_peer)
      .def(
          "before",
          [](SimulatedDriver& self, const std::string& verb, std::uint64_t nth, std::int64_t peer_bytes) {
            self.before(verb_from_name(verb), nth, peer_bytes);
          },
          "verb"_a, "nth"_a, "peer_bytes"_a, NoGil());
}

}  // namespace

NB_MODULE(_vmm, module) {
  module.doc() = "Virtual-memory drivers: the contract is in native/vmm/driver.h.";
  nb::set_leak_warnings(false);  // a traceback that outlives the interpreter is no fault of ours
  bind_errors(module);
  bind_drivers(module);
  nb::class_<Probe>(module, "Probe").def_ro("huge", &Probe::huge).def_ro("reason", &Probe::reason);
  module.def("probe_host", &probe_host, NoGil());
  nb::class_<AclProbe>(module, "AclProbe")
      .def_ro("num_devices", &AclProbe::num_devices)
      .def_ro("reason", &AclProbe::reason);
  module.def("probe_acl", &probe_acl, "library"_a = "", NoGil());
  module.def(
      "host_memory",
      [](const std::string& root) {
        const MemoryReading reading = HostMemory(root).read();
        return std::pair(reading.total, reading.free);
      },
      "root"_a = "", NoGil());
  nb::class_<Views>(module, "Views")
      .def(nb::init<>())
      .def("count", &Views::count)
      .def("capsule", &make_capsule, "address"_a, "shape"_a, "strides"_a, "code"_a, "bits"_a,
           "device_type"_a = 1, "device_id"_a = 0);
  nb::class_<AnonymousMemory>(module, "AnonymousMemory")
      .def(nb::init<std::size_t>(), "nbytes"_a)
      .def_prop_ro("address", &AnonymousMemory::address)
      .def_prop_ro("nbytes", &AnonymousMemory::nbytes)
      .def("free", &AnonymousMemory::free, NoGil());
}
