// What has been launched, in which order: vector clocks of streams and of host threads, counters, the log.
//
// NOTE [vector clocks]
// Every stream counts what it runs. Its clock holds, for each stream, how far that one is known to be finished when this
// stream runs its next kernel. An event is a copy of the clock of the stream that records it, and a stream that waits for the
// event takes the larger value of each entry. A host thread has a clock as well: it grows when the thread waits for a
// device, and a kernel that the thread launches starts after all that its host knows to be finished. Work at time `t` of
// stream `s` is ordered before a kernel of another stream exactly if entry `s` of that stream's clock is at least `t`.
#pragma once

#include <torch/extension.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace simulated_gpus {

using Clock = std::vector<uint64_t>;

inline uint64_t entry(const Clock& clock, size_t stream) {
  return stream < clock.size() ? clock[stream] : 0;
}

inline void merge(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size(), 0);
  for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}

struct StreamState {
  int device;
  int64_t id;  // 0 is the default stream of its device
  Clock clock;
};

// One line of the log: a kernel, a copy, a wait of the host, a recorded event, a wait of a stream, an allocation.
struct Entry {
  std::string kind, name, stream, details;
  int64_t bytes;
};

// All that streams share. It is never destroyed: threads of the autograd engine free tensors until the process ends.
struct World {
  std::recursive_mutex mutex;
  std::vector<StreamState> streams;
  std::map<std::pair<int, int64_t>, size_t> index;
  Clock finished;  // what `settle` declared finished, for every stream and every host thread
  std::vector<std::string> races, hazards;
  std::map<std::string, int64_t> counts;
  std::vector<Entry> log;
  bool logging = false;
};

inline World& world() {
  static World& world = *new World;
  return world;
}

// A thread that holds `World::mutex` may need the GIL, for an operator that is implemented in Python or for the deleter of a
// Python object. So a thread that has the GIL gives it up while it waits for the mutex, and for as long as it holds it.
class Lock {
 public:
  Lock() {
    if (Py_IsInitialized() && PyGILState_Check()) without_gil_.emplace();
    guard_.emplace(world().mutex);
  }
  ~Lock() {
    guard_.reset();
    without_gil_.reset();
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  std::optional<pybind11::gil_scoped_release> without_gil_;
  std::optional<std::lock_guard<std::recursive_mutex>> guard_;
};

inline std::atomic<bool> costs_nothing{false};  // see free.h

inline thread_local Clock host_clock;
inline thread_local int current_device = 0;
inline thread_local std::map<int, int64_t> current_stream_id;

inline int num_devices() {
  static const int number = [] {
    const char* text = std::getenv("SIMULATED_GPUS");
    return text ? std::atoi(text) : 0;
  }();
  return number;
}

inline void check_device(int device) {
  TORCH_CHECK(0 <= device && device < num_devices(), "CUDA error: invalid device ordinal (", device, ")");
}

inline size_t stream_index(int device, int64_t id) {
  auto& all = world();
  auto [place, is_new] = all.index.try_emplace({device, id}, all.streams.size());
  if (is_new) all.streams.push_back({device, id, {}});
  return place->second;
}

inline int64_t stream_id_of(int device) {
  auto found = current_stream_id.find(device);
  return found == current_stream_id.end() ? 0 : found->second;
}

inline size_t current_stream(int device) {
  return stream_index(device, stream_id_of(device));
}

inline std::string stream_name(size_t stream) {
  const auto& state = world().streams[stream];
  auto device = "cuda:" + std::to_string(state.device);
  return state.id == 0 ? device : device + " stream " + std::to_string(state.id);
}

// Advance the clock of a stream by one piece of work, and return the time of that work.
inline uint64_t tick(size_t stream) {
  auto& clock = world().streams[stream].clock;
  merge(clock, host_clock);
  merge(clock, world().finished);
  if (clock.size() <= stream) clock.resize(stream + 1, 0);
  return ++clock[stream];
}

inline bool host_knows_finished(size_t stream, uint64_t time) {
  return entry(host_clock, stream) >= time || entry(world().finished, stream) >= time;
}

inline void write_log(std::string kind, std::string name, size_t stream, std::string details = "", int64_t bytes = 0) {
  auto& all = world();
  if (all.logging) all.log.push_back({std::move(kind), std::move(name), stream_name(stream), std::move(details), bytes});
}

// Let the host wait until a stream has finished what it was given.
inline void host_waits_for_stream(size_t stream, const std::string& reason) {
  world().counts["host_syncs"]++;
  merge(host_clock, world().streams[stream].clock);
  write_log("host sync", reason, stream);
}

inline void host_waits_for_device(int device) {
  world().counts["host_syncs"]++;
  for (const auto& stream : world().streams)
    if (stream.device == device) merge(host_clock, stream.clock);
  write_log("host sync", "synchronize device", stream_index(device, 0));
}

// Declare all work that was ever launched finished, for every thread. The tests do so between two of them.
inline void settle() {
  for (const auto& stream : world().streams) merge(world().finished, stream.clock);
  for (auto& stream : world().streams) merge(stream.clock, world().finished);
}

}  // namespace simulated_gpus
