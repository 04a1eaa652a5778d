// A tour through everything the acl driver does, for test_acl_mutants.py: it is linked with the driver's own sources, one
// of them perhaps broken on purpose, and ends with 0 only if the driver kept its contract and the vendor's. The emulated
// runtime runs in strict mode: a broken rule of the vendor's ends the process with its name.
//
//   acl_tour LIBRARY
#include <dlfcn.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>

#include "acl_driver.h"

using namespace xllm::vmm;

namespace {

constexpr std::size_t kPage = std::size_t{2} << 20;
constexpr std::size_t kGiB = std::size_t{1} << 30;

int (*init)(const char*);
const char* (*script)(const char* lines);
const char* (*report)();

void expect(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "tour: %s\n", what);
  std::_Exit(3);
}

enum class Outcome { kDone, kMisuse, kError, kShortage };

Outcome outcome(const std::function<void()>& action) {
  try {
    action();
  } catch (const Shortage&) {
    return Outcome::kShortage;
  } catch (const Error& error) {
    return error.code == EINVAL || error.code == EBUSY ? Outcome::kMisuse : Outcome::kError;
  }
  return Outcome::kDone;
}

void plan(const char* lines) {
  const char* const complaint = script(lines);
  if (complaint != nullptr && *complaint != '\0') expect(false, complaint);
}

struct Tour {
  AclDriver driver;
  Address range;

  explicit Tour(const char* library) : driver({library, 0, std::nullopt, 0}), range(driver.reserve(16 * kPage)) {}

  Address page(std::size_t number) const { return range + number * kPage; }
  std::uint64_t mapped() const { return driver.usage().at("mapped"); }

  void opening(const char* library) {
    const auto odd = [library] { AclDriver({library, 0, kPage + kPage / 2, 0}); };
    try {
      odd();
      expect(false, "a page that is no multiple of the vendor's was accepted");
    } catch (const std::invalid_argument&) {
    }
    expect(driver.info().page_bytes == kPage, "the page is not the vendor's");
  }

  void ranges() {
    expect(outcome([&] { driver.reserve(0); }) == Outcome::kMisuse, "an empty range was accepted");
    expect(outcome([&] { driver.reserve(128 * kGiB + kPage); }) == Outcome::kMisuse, "a range above 128 GiB was tried");
    std::vector<Address> many;
    const auto reserve_all = [&] {
      for (int i = 0; i < 64; ++i) many.push_back(driver.reserve(128 * kGiB));
    };
    expect(outcome(reserve_all) == Outcome::kShortage, "running out of addresses is no shortage");
    expect(many.size() >= 40, "a range of 128 GiB was refused");
    for (const Address address : many) driver.release(address, 128 * kGiB);
  }

  void pages() {
    const std::uint64_t free = driver.info().free;
    const std::vector<Handle> handles = driver.create(8);
    expect(driver.info().free == free - 8 * kPage, "eight pages do not cost eight pages of the device");
    driver.map({{page(3), handles[0]}, {page(4), handles[1]}, {page(9), handles[2]}, {page(15), handles[2]}});
    for (const std::size_t number : {3, 4, 9}) std::memset(reinterpret_cast<void*>(page(number)), 'x', kPage);
    expect(*reinterpret_cast<char*>(page(15) + kPage - 1) == 'x', "one handle at two addresses is not one memory");
    expect(outcome([&] { driver.map({{page(4), handles[3]}}); }) == Outcome::kMisuse, "mapped over a page");
    expect(outcome([&] { driver.map({{page(16), handles[3]}}); }) == Outcome::kMisuse, "mapped beyond the range");
    expect(outcome([&] { driver.map({{page(5) + 4096, handles[3]}}); }) == Outcome::kMisuse, "mapped inside a page");
    expect(outcome([&] { driver.unmap({page(5)}); }) == Outcome::kMisuse, "unmapped nothing");
    expect(outcome([&] { driver.destroy({handles[0]}); }) == Outcome::kMisuse, "destroyed a mapped handle");
    expect(outcome([&] { driver.release(range, 16 * kPage); }) == Outcome::kMisuse, "released a range with pages");
    expect(driver.unmap({page(15), page(3), page(4)}).empty() && mapped() == 1, "pages stayed");
    driver.map({{page(3), handles[1]}});
    expect(*reinterpret_cast<char*>(page(3)) == 'x', "bytes did not stay with the handle");
    expect(driver.unmap({page(3), page(9)}).empty() && driver.destroy(handles).empty(), "pages were kept");
    expect(outcome([&] { driver.destroy({handles[0]}); }) == Outcome::kMisuse, "destroyed twice");
    expect(driver.info().free == free, "destroyed pages did not go back to the device");
  }

  void threads() {
    Outcome seen = Outcome::kError;
    std::thread([&] { seen = outcome([&] { driver.info(); }); }).join();
    expect(seen == Outcome::kDone, "another thread cannot ask the device");
  }

  void failures() {
    const std::vector<Handle> handles = driver.create(4);
    const std::vector<Page> batch{{page(0), handles[0]}, {page(1), handles[1]}, {page(2), handles[2]}, {page(5), handles[3]}};
    plan("inject aclrtMapMem 3 207001");
    expect(outcome([&] { driver.map(batch); }) == Outcome::kShortage && mapped() == 0, "207001 is no clean shortage");
    plan("inject aclrtMapMem 4 507899");
    expect(outcome([&] { driver.map(batch); }) == Outcome::kError && mapped() == 0, "507899 is no clean error");
    driver.map(batch);
    plan("inject aclrtUnmapMem 2 507899");
    expect(driver.unmap({page(0), page(1), page(2)}) == std::vector<Address>{page(1)}, "the stuck page is another");
    expect(driver.unmap({page(1), page(5)}).empty(), "the stuck page stayed");
    plan("inject aclrtFreePhysical 1 507899");
    expect(driver.destroy(handles) == std::vector<Handle>{handles[0]}, "the stuck handle is another");
    expect(driver.destroy({handles[0]}).empty(), "the stuck handle stayed");
    const std::uint64_t free = driver.info().free;
    plan("inject aclrtMallocPhysical 3 207018");
    expect(outcome([&] { driver.create(4); }) == Outcome::kShortage, "207018 is no shortage");
    expect(driver.info().free == free, "half of a batch was kept");
  }

  // The undo fails, too: what is left is tried again before it does harm.
  void leftovers() {
    const std::vector<Handle> handles = driver.create(2);
    plan("inject aclrtMapMem 2 507899; inject aclrtUnmapMem 1 507899");
    expect(outcome([&] { driver.map({{page(0), handles[0]}, {page(1), handles[1]}}); }) == Outcome::kError, "no error");
    driver.map({{page(0), handles[1]}});
    plan("inject aclrtMallocPhysical 2 207001; inject aclrtFreePhysical 1 507899");
    expect(outcome([&] { driver.create(2); }) == Outcome::kShortage, "no shortage");
    expect(driver.usage().at("handles") == 3, "a page that could not be freed was forgotten");
    expect(driver.unmap({page(0)}).empty() && driver.destroy(handles).empty(), "pages were kept");
    expect(driver.usage().at("handles") == 0, "a page that could not be freed was never tried again");
  }

  void end() {
    driver.map({{page(7), driver.create(3)[1]}});
    driver.close();
    expect(driver.usage().at("handles") == 0 && mapped() == 0, "close kept pages");
    const std::string left = report();
    expect(left.find("\"handles\": [], \"mappings\": []") != left.npos, "the device still has handles or mappings");
  }
};

}  // namespace

int main(int count, char** arguments) {
  expect(count == 2, "usage: acl_tour LIBRARY");
  void* const library = ::dlopen(arguments[1], RTLD_NOW);
  expect(library != nullptr, "the library cannot be loaded");
  init = reinterpret_cast<decltype(init)>(::dlsym(library, "aclInit"));
  script = reinterpret_cast<decltype(script)>(::dlsym(library, "ascendcl_emulator_script"));
  report = reinterpret_cast<decltype(report)>(::dlsym(library, "ascendcl_emulator_report"));
  expect(init(nullptr) == 0, "somebody initialised the runtime before");
  try {
    Tour tour(arguments[1]);
    tour.opening(arguments[1]);
    tour.ranges();
    tour.pages();
    tour.threads();
    tour.failures();
    tour.leftovers();
    tour.end();
  } catch (const std::exception& error) {
    expect(false, error.what());
  }
  std::puts("done");
}
