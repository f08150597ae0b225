// The threads of the autograd engine, one for each device, at the end of a process.
//
// NOTE [threads of autograd at exit] A backward pass returns once its last node has run. The thread of a device drops the pass
// only after that, and often as the last that had it: with it go objects of Python, such as the context variables of the
// caller, and so the thread needs the GIL. If Python has begun to end by then, it does not give the GIL but unwinds the
// thread, through a destructor, which terminates the process. So before Python ends, each thread gets another pass to run. When
// it takes that one up, it has dropped all before; and that one holds nothing of Python.
#pragma once

#include <future>

#include "tensors.h"

namespace simulated_gpus {

// Return once no thread of the autograd engine holds an object of Python.
inline void wait_for_autograd() {
  // In a thread of its own, which has no thread-local objects of Python that the pass would take along.
  std::async(std::launch::async, [] {
    for (int device = 0; device < num_devices(); device++) {
      auto leaf = new_tensor({1}, {1}, at::kFloat, device).requires_grad_();
      leaf.view({1}).backward(at::zeros_like(leaf));
    }
  }).get();
}

}  // namespace simulated_gpus
