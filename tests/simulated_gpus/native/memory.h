// Memory of the devices: an allocator that shows what is read too early or freed too soon, and who uses which block.
//
// NOTE [races] Two kernels race if both use a block, at least one of them writes to it, and neither is ordered before the
// other (NOTE [vector clocks]). A block is the memory of one storage: views of it are not told apart.
//
// NOTE [unsafe reuse] The caching allocator of CUDA hands a freed block out again at once, to the stream on which it was
// allocated. That is safe for work of the same stream, which runs before whatever comes next there. Another stream that has
// been given work on the block may not have run it: `record_stream` tells the allocator so, and the block then stays
// reserved until that stream is done. Without it, the free is safe only if the allocating stream, or the host thread that
// frees, is known to run after that work. Every other free is reported, whether or not the block is handed out again.
#pragma once

#include <c10/core/Allocator.h>

#include <cstring>
#include <set>

#include "order.h"

namespace simulated_gpus {

struct Use {
  uint64_t time;
  std::string name;
};

struct Block {
  void* pointer;
  size_t bytes;
  size_t stream;  // on which it was allocated
  std::optional<size_t> writer;
  Use written{0, "nothing"};
  std::map<size_t, Use> uses;  // the last read or write of each stream
  std::set<size_t> recorded;   // the streams that `record_stream` was called with
};

constexpr int kNaN = 0xFF;  // A floating point number of any size whose bytes are all 0xFF is NaN; an integer is -1.

inline void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    Lock lock;
    auto& all = world();
    for (const auto& [stream, use] : block->uses) {
      if (stream == block->stream || block->recorded.count(stream)) continue;
      if (entry(all.streams[block->stream].clock, stream) >= use.time || host_knows_finished(stream, use.time)) continue;
      all.hazards.push_back(
          "memory of " + std::to_string(block->bytes) + " bytes, written by " + block->written.name +
          (block->writer ? " on " + stream_name(*block->writer) : "") + ", is freed to " + stream_name(block->stream) +
          " while " + use.name + " on " + stream_name(stream) + " may still use it, without record_stream");
    }
  }
  std::memset(block->pointer, kNaN, block->bytes);
  std::free(block->pointer);
  delete block;
}

inline void free_unwatched(void* pointer) {
  std::free(pointer);
}

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(current_device, bytes); }
  c10::DataPtr allocate_on(int device, size_t bytes) {
    check_device(device);
    if (costs_nothing) {
      void* unwatched = std::malloc(std::max<size_t>(bytes, 64));
      if (!unwatched) throw std::bad_alloc();
      return {unwatched, unwatched, &free_unwatched, c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device))};
    }
    Lock lock;
    void* pointer = nullptr;
    if (posix_memalign(&pointer, 64, std::max<size_t>(bytes, 64))) throw std::bad_alloc();
    std::memset(pointer, kNaN, bytes);
    auto stream = current_stream(device);
    auto* block = new Block{pointer, bytes, stream};
    if (bytes) {
      world().counts["allocations"]++;
      world().counts["bytes_allocated"] += static_cast<int64_t>(bytes);
      write_log("allocation", "allocation", stream, "", static_cast<int64_t>(bytes));
    }
    return {pointer, block, &free_block, c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device))};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

inline Allocator& allocator() {
  static Allocator& allocator = *new Allocator;
  return allocator;
}

// Pinned memory of the host. During a copy between it and a device that need not block, the host goes on. Whether the host
// reads the memory too early is not checked, since only kernels of the devices are observed.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = nullptr;
    if (posix_memalign(&pointer, 64, std::max<size_t>(bytes, 64))) throw std::bad_alloc();
    std::memset(pointer, kNaN, bytes);
    Lock lock;
    ranges()[static_cast<char*>(pointer)] = std::max<size_t>(bytes, 1);
    return {pointer, pointer, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

  static bool contains(const void* data) {
    Lock lock;
    auto after = ranges().upper_bound(static_cast<char*>(const_cast<void*>(data)));
    if (after == ranges().begin()) return false;
    auto [start, bytes] = *std::prev(after);
    return data < start + bytes;
  }

 private:
  static std::map<char*, size_t>& ranges() {
    static auto& ranges = *new std::map<char*, size_t>;
    return ranges;
  }
  static void free_pinned(void* pointer) {
    Lock lock;
    ranges().erase(static_cast<char*>(pointer));
    std::free(pointer);
  }
};

inline PinnedAllocator& pinned_allocator() {
  static PinnedAllocator& allocator = *new PinnedAllocator;
  return allocator;
}

inline Block* block_of(const c10::DataPtr& pointer) {
  return pointer.get_deleter() == &free_block ? static_cast<Block*>(pointer.get_context()) : nullptr;
}

inline Block* block_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda() && tensor.has_storage() ? block_of(tensor.storage().data_ptr()) : nullptr;
}

inline std::string describe(at::ArrayRef<at::Tensor> tensors) {
  std::ostringstream text;
  for (const auto& tensor : tensors)
    if (tensor.defined()) text << (text.tellp() > 0 ? " " : "") << tensor.scalar_type() << tensor.sizes();
  return text.str();
}

// Count a kernel or a copy on `stream`, and check that what it uses is ordered before it.
inline void launch(
    const std::string& name, size_t stream, at::ArrayRef<at::Tensor> reads, at::ArrayRef<at::Tensor> writes,
    int64_t bytes = 0) {
  if (costs_nothing) return;
  Lock lock;
  auto& all = world();
  all.counts["launches"]++;
  auto now = tick(stream);
  const auto& clock = all.streams[stream].clock;
  if (all.logging) write_log("launch", name, stream, describe(reads) + " -> " + describe(writes), bytes);

  auto report = [&](const std::string& does, const Use& other, size_t where, const std::string& did) {
    all.races.push_back(
        name + " on " + stream_name(stream) + does + other.name + " on " + stream_name(where) + did +
        ", and nothing orders the two");
  };
  for (const auto& tensor : reads)
    if (auto* block = block_of(tensor); block && block->writer && entry(clock, *block->writer) < block->written.time)
      report(" reads what ", block->written, *block->writer, " writes");
  for (const auto& tensor : writes)
    if (auto* block = block_of(tensor))
      for (const auto& [other, use] : block->uses)
        if (entry(clock, other) < use.time) report(" overwrites what ", use, other, " uses");

  for (const auto& tensor : reads)
    if (auto* block = block_of(tensor)) block->uses[stream] = {now, name};
  for (const auto& tensor : writes)
    if (auto* block = block_of(tensor)) {
      block->uses[stream] = block->written = {now, name};
      block->writer = stream;
    }
}

}  // namespace simulated_gpus
