// The Python face of the block list.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "blocks.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace xllm::blocks;

namespace {

// Drops one reference on each; blocks that nobody holds then stay cached if they are keys of `published`, which are
// returned, else are free. The list's own objects are looked up and returned: no number is made twice.
nb::list give_back(BlockList& list, const nb::list& blocks, const nb::dict& published) {
  nb::list idle;
  std::vector<Block> gone;
  gone.reserve(blocks.size());
  const bool any = published.size() > 0;
  for (const nb::handle item : blocks) {
    const auto block = nb::cast<Block>(item);
    if (!list.release(block)) continue;
    if (any && published.contains(item)) {
      list.cache(block);
      idle.append(item);
    } else {
      gone.push_back(block);
    }
  }
  list.free_held(gone);
  return idle;
}

std::vector<std::pair<std::size_t, Page>> take_turned(Widths& widths) {
  std::vector<std::pair<std::size_t, Page>> pages;
  for (const Turned& turned : widths.take_turned()) pages.emplace_back(turned.width, turned.page);
  return pages;
}

std::pair<std::vector<Run>, std::int64_t> cold(BlockList& list, std::int64_t count, std::int64_t pages,
                                               const std::vector<std::pair<std::size_t, Page>>& gone) {
  Cold found = list.cold(count, pages, gone);
  return {std::move(found.runs), found.blocks};
}

// Broken preconditions are the caller's bug: an AssertionError, as everywhere in the cache.
void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::logic_error& error) {
    PyErr_SetString(PyExc_AssertionError, error.what());
  }
}

}  // namespace

NB_MODULE(_blocks, module) {
  module.doc() = "Blocks, their references and the pages they touch: the contract is in native/blocks/blocks.h.";
  nb::set_leak_warnings(false);
  nb::register_exception_translator(translate);
  nb::class_<Pages>(module, "Pages")
      .def(nb::init<std::int64_t, std::int64_t, std::int64_t>(), "width"_a, "page_bytes"_a, "tensors"_a)
      .def_prop_ro("num_spares", &Pages::num_spares)
      .def("live", &Pages::live, "page"_a)
      .def("is_present", &Pages::is_present, "page"_a)
      .def("set_usable", &Pages::set_usable, "page"_a, "usable"_a)
      .def("add_spare", &Pages::add_spare, "page"_a, "since"_a)
      .def("remove_spare", &Pages::remove_spare, "page"_a)
      .def("oldest_spare", &Pages::oldest_spare)
      .def("since", &Pages::since, "page"_a)
      .def("spares", &Pages::spares)
      .def("counts", &Pages::counts);
  nb::class_<Widths>(module, "Widths")
      .def(nb::init<std::vector<std::shared_ptr<Pages>>>(), "pages"_a)
      .def_rw("now", &Widths::now)
      .def_prop_ro("has_turned", &Widths::has_turned)
      .def("retain", &Widths::retain, "start"_a, "stop"_a)
      .def("release", &Widths::release, "start"_a, "stop"_a)
      .def("take_turned", &take_turned);
  nb::class_<BlockList>(module, "BlockList")
      .def(nb::init<std::int64_t, std::int64_t, std::int64_t, std::shared_ptr<Widths>>(), "num_blocks"_a,
           "group_width"_a, "group_page"_a, "widths"_a)
      .def_ro("num_blocks", &BlockList::num_blocks)
      .def_prop_ro("num_ready", &BlockList::num_ready)
      .def_prop_ro("num_held", &BlockList::num_held)
      .def_prop_ro("num_cached", &BlockList::num_cached)
      .def_prop_ro("activated", &BlockList::activated)
      .def_prop_ro("cold_from", &BlockList::cold_from)
      .def("state", [](const BlockList& list, Block block) { return static_cast<int>(list.state(block)); }, "block"_a)
      .def("references", &BlockList::references, "block"_a)
      .def("states", [](const BlockList& list) {
        return nb::bytes(reinterpret_cast<const char*>(list.states().data()), list.states().size());
      })
      .def("take_padding", &BlockList::take_padding)
      .def("take_ready", &BlockList::take_ready, "count"_a, "near"_a)
      .def("cold", &cold, "count"_a, "pages"_a, "gone"_a)
      .def("take_cold", &BlockList::take_cold, "count"_a, "pages"_a)
      .def("take", &BlockList::take, "start"_a, "stop"_a)
      .def("retain", &BlockList::retain, "block"_a)
      .def("give_back", &give_back, "blocks"_a, "published"_a)
      .def("free_cached", &BlockList::free_cached, "blocks"_a)
      .def("settle", &BlockList::settle)
      .def("group", &BlockList::group, "block"_a)
      .def("group_start", &BlockList::group_start, "group"_a)
      .def("used", &BlockList::used, "group"_a)
      .def("idle_groups", &BlockList::idle_groups)
      .def("is_idle", &BlockList::is_idle, "group"_a)
      .def("is_any", [](const BlockList& list, Block start, Block stop, int state) {
        return list.is_any(start, stop, static_cast<State>(state));
      }, "start"_a, "stop"_a, "state"_a)
      .def("blocks_in", [](const BlockList& list, Block start, Block stop, int state) {
        return list.blocks_in(start, stop, static_cast<State>(state));
      }, "start"_a, "stop"_a, "state"_a)
      .def("pinned", &BlockList::pinned)
      .def("moves", &BlockList::moves, "limit"_a, "pages"_a)
      .def("move", &BlockList::move, "source"_a, "target"_a)
      .def("group_totals", &BlockList::group_totals);
}
