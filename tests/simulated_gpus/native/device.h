// What torch asks a backend for: the current device and stream, events, random generators.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

#include "memory.h"

namespace simulated_gpus {

using c10::Device;
using c10::DeviceIndex;

inline Device cuda(int index) {
  return Device(c10::kCUDA, static_cast<DeviceIndex>(index));
}

struct Event {
  int device;
  Clock clock;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  Device getDevice() const override { return cuda(current_device); }
  void setDevice(Device device) const override {
    check_device(device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  Device exchangeDevice(Device device) const override {
    Device previous = getDevice();
    setDevice(device);
    return previous;
  }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(num_devices()); }
#if __has_include(<c10/core/DeviceCapability.h>)  // which torch 2.8 does not have
  c10::DeviceCapability getDeviceCapability(Device) const override {
    c10::DeviceCapability every;
    every.capability_data.capability_bits = (1ULL << c10::NUMBER_OF_DEVICE_CAPABILITIES) - 1;
    return every;
  }
#endif

  c10::Stream getStream(Device device) const override { return stream(device, stream_id_of(checked(device))); }
  c10::Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device); }
  c10::Stream getNewStream(Device device, int = 0) const override {
    static std::atomic<int64_t> last{0};
    return stream(device, ++last);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto previous = getStream(next.device());
    current_stream_id[next.device_index()] = next.id();
    return previous;
  }
  // Not marked `override`, since torch 2.8 does not ask for it.
  void* getStreamNativeHandle(const c10::Stream next) const { return reinterpret_cast<void*>(next.id()); }

  void record(void** event, const c10::Stream& on, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event{on.device_index(), {}};
    if (costs_nothing) return;
    Lock lock;
    auto* recorded = static_cast<Event*>(*event);
    TORCH_CHECK(
        recorded->device == on.device_index(), "Event device ", recorded->device,
        " does not match recording stream's device ", static_cast<int>(on.device_index()));
    auto index = index_of(on);
    tick(index);
    recorded->clock = world().streams[index].clock;
    world().counts["events"]++;
    write_log("event", "record", index);
  }
  void block(void* event, const c10::Stream& waiting) const override {
    if (!event || costs_nothing) return;  // An event that was never recorded makes no stream wait.
    Lock lock;
    auto index = index_of(waiting);
    merge(world().streams[index].clock, static_cast<Event*>(event)->clock);
    world().counts["waits"]++;
    write_log("wait", "wait for event", index);
  }
  // Kernels run when they are launched, so everything is always finished. A host thread that has asked knows that.
  bool queryEvent(void* event) const override {
    Lock lock;
    if (event) merge(host_clock, static_cast<Event*>(event)->clock);
    return true;
  }
  bool queryStream(const c10::Stream& asked) const override {
    Lock lock;
    merge(host_clock, world().streams[index_of(asked)].clock);
    return true;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

  void synchronizeStream(const c10::Stream& finished) const override {
    Lock lock;
    host_waits_for_stream(index_of(finished), "synchronize stream");
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    Lock lock;
    world().counts["host_syncs"]++;
    merge(host_clock, static_cast<Event*>(event)->clock);
    write_log("host sync", "synchronize event", stream_index(static_cast<Event*>(event)->device, 0));
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    check_device(device);
    Lock lock;
    host_waits_for_device(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& user) const override {
    if (costs_nothing) return;
    Lock lock;
    if (auto* block = block_of(pointer)) block->recorded.insert(index_of(user));
  }

 private:
  static int checked(Device device) {
    check_device(device.index());
    return device.index();
  }
  static c10::Stream stream(Device device, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, device, id); }
  static size_t index_of(const c10::Stream& some) { return stream_index(some.device_index(), some.id()); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// The random numbers of one device. CPU kernels draw them from a generator of the CPU that belongs to this device alone.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(int device, uint64_t seed = c10::default_rng_seed_val)
      : GeneratorImpl(cuda(device), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        on_host_(at::detail::createCPUGenerator(seed)) {}
  const at::Generator& on_host() const { return on_host_; }
  void set_current_seed(uint64_t seed) override { on_host_.set_current_seed(seed); }
  uint64_t current_seed() const override { return on_host_.current_seed(); }
  uint64_t seed() override { return on_host_.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "simulated devices have no offset of random numbers"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "simulated devices have no offset of random numbers"); }
  void set_state(const c10::TensorImpl& state) override { on_host_.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return on_host_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->set_state(*get_state());
    return copy;
  }
  at::Generator on_host_;
};

inline const at::Generator& default_generator(int device) {
  static auto& all = *[] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < num_devices(); i++) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  check_device(device);
  return all[device];
}

// Torch finds this class by its name.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(num_devices()); }
  int getNumGPUs() const override { return num_devices(); }
  DeviceIndex current_device() const override { return getCurrentDevice(); }
  DeviceIndex getCurrentDevice() const override { return static_cast<DeviceIndex>(simulated_gpus::current_device); }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice(cuda(device)); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return device < 0 ? DeviceIndex{-1} : Guard().exchangeDevice(cuda(device)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  std::string showConfig() const override { return "simulated GPUs"; }
  void deviceSynchronize(DeviceIndex device) const override { Guard().synchronizeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return PinnedAllocator::contains(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator(); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device < 0 ? simulated_gpus::current_device : device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? simulated_gpus::current_device : device);
  }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace simulated_gpus
