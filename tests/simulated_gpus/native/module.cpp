// Simulated CUDA devices for the CPU build of torch: registers the kernels, and what Python sees.
//
// All files are one translation unit, because almost all of the time goes into reading the headers of torch.
#include "batch_norm.h"
#include "engine.h"
#include "fallback.h"

using namespace simulated_gpus;

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty_memory_format);
  library.impl("empty_strided", &simulated_gpus::empty_strided);
  library.impl("as_strided", &simulated_gpus::as_strided);
  library.impl("copy_", &copy_);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("resize_", &simulated_gpus::resize_);
  library.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("record_stream", &simulated_gpus::record_stream);
  library.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&simulated_gpus::convolution>());
  library.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  library.impl("batch_norm_stats", &simulated_gpus::batch_norm_stats);
  library.impl("batch_norm_update_stats", &simulated_gpus::batch_norm_update_stats);
  library.impl("batch_norm_elemt", &simulated_gpus::batch_norm_elemt);
  library.impl("batch_norm_elemt.out", &simulated_gpus::batch_norm_elemt_out);
  library.impl("batch_norm_backward_reduce", &simulated_gpus::batch_norm_backward_reduce);
  library.impl("batch_norm_backward_elemt", &simulated_gpus::batch_norm_backward_elemt);
  library.impl("batch_norm_gather_stats_with_counts", &simulated_gpus::batch_norm_gather_stats_with_counts);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  c10::SetAllocator(c10::kCUDA, &allocator());
  module.def("num_devices", &num_devices);
  module.def("default_generator", &default_generator);
  module.def("races", [] {
    Lock lock;
    return world().races;
  });
  module.def("hazards", [] {
    Lock lock;
    return world().hazards;
  });
  module.def("counts", [] {
    Lock lock;
    return world().counts;
  });
  module.def("log", [](size_t from) {
    Lock lock;
    std::vector<std::tuple<std::string, std::string, std::string, std::string, int64_t>> lines;
    for (size_t i = from; i < world().log.size(); i++) {
      const auto& entry = world().log[i];
      lines.emplace_back(entry.kind, entry.name, entry.stream, entry.details, entry.bytes);
    }
    return lines;
  });
  module.def("log_length", [] {
    Lock lock;
    return world().log.size();
  });
  module.def("wait_for_autograd", &wait_for_autograd, py::call_guard<py::gil_scoped_release>());
  module.def("set_costs_nothing", [](bool on) { costs_nothing = on; });
  // As torch._C has them in a build for CUDA.
  module.def("current_stream", [](int device) {
    return std::make_tuple(stream_id_of(device), device, static_cast<int>(c10::kCUDA));
  });
  module.def(
      "set_stream",
      [](int64_t stream_id, int device_index, int) {
        Guard().setDevice(cuda(device_index));
        current_stream_id[device_index] = stream_id;
      },
      py::arg("stream_id"), py::arg("device_index"), py::arg("device_type"));
  module.def("current_device", [] { return simulated_gpus::current_device; });
  module.def("exchange_device", [](int device) {
    return device < 0 ? -1 : static_cast<int>(Guard().exchangeDevice(cuda(device)).index());
  });
  module.def("set_logging", [](bool on) {
    Lock lock;
    world().logging = on;
  });
  module.def("clear", [] {
    Lock lock;
    world().races.clear();
    world().hazards.clear();
    world().log.clear();
    world().counts.clear();
  });
  module.def("settle", [] {
    Lock lock;
    settle();
  });
  module.def("synchronize", [](int device) { Guard().synchronizeDevice(static_cast<DeviceIndex>(device)); });
  // What a thread knows to be finished is also known to a thread that it starts, and to one that waits for its end.
  module.def("host_clock", [] {
    Lock lock;
    return host_clock;
  });
  module.def("merge_host_clock", [](const Clock& other) {
    Lock lock;
    merge(host_clock, other);
  });
}
