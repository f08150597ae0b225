// Every operator without a kernel of its own: the CPU kernel runs over the same memory, as one launch.
#pragma once

#include <torch/csrc/jit/runtime/custom_operator.h>

#include <set>

#include "free.h"

namespace simulated_gpus {

// Return whether the host must know the size or the value of the result of an operator, and so waits for it. `item` and copies
// to the host are not listed: they have kernels of their own, which wait.
inline bool waits_for_result(const std::string& name) {
  static const std::set<std::string> names{
      "nonzero",  "masked_select",     "equal",      "bincount",           "repeat_interleave",
      "_unique2", "unique_dim",        "_unique",    "unique_consecutive", "unique_dim_consecutive"};
  return names.count(name) > 0;
}

// The arguments of one call: which device it runs on, and what becomes of its tensors.
class Call {
 public:
  Call(const c10::OperatorHandle& op, const std::string& name) : schema_(op.schema()), name_(name) {}

  void find_device(const std::vector<c10::IValue>& arguments) {
    for (size_t i = 0; i < arguments.size(); i++) {
      const auto& value = arguments[i];
      if (value.isTensor()) check(value.toTensor(), is_written(i), false);
      else if (value.isTensorList())
        for (const Tensor& tensor : value.toTensorVector()) check(tensor, is_written(i), false);
      else if (value.isOptionalTensorList()) {
        for (const std::optional<Tensor>& tensor : value.toOptionalTensorList().vec())  // indices
          if (tensor) check(*tensor, false, true);
      } else if (value.isDevice() && value.toDevice().is_cuda() && device_ < 0)
        device_ = index_or_current(value.toDevice());
    }
    if (device_ < 0) device_ = current_device;
    check_device(device_);
  }

  torch::jit::Stack arguments_on_host(const std::vector<c10::IValue>& arguments) {
    torch::jit::Stack stack;
    for (size_t i = 0; i < arguments.size(); i++) {
      const auto& value = arguments[i];
      if (value.isTensor()) stack.emplace_back(on_host(value.toTensor(), is_written(i)));
      else if (value.isTensorList()) {
        std::vector<Tensor> tensors;
        for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(on_host(tensor, is_written(i)));
        stack.emplace_back(tensors);
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> tensors;
        for (const std::optional<Tensor>& tensor : value.toOptionalTensorList().vec())
          tensors.push_back(tensor ? std::optional<Tensor>(on_host(*tensor, false)) : tensor);
        stack.emplace_back(tensors);
      } else if (value.isDevice()) stack.emplace_back(Device(c10::kCPU));
      else if (schema_.arguments()[i].name() == "generator") stack.emplace_back(generator_on_host(value));
      else stack.emplace_back(value);
    }
    return stack;
  }

  // The CPU kernel has resized the views of outputs of another size, and given them new memory of the host where the old was
  // too small. Do the same to the tensors of the device.
  void resize_outputs() {
    for (auto& [original, view] : written_)
      if (!view.sizes().equals(original.sizes()) || !view.strides().equals(original.strides()) ||
          view.storage().data() != original.storage().data()) {
        bool moved = view.storage().data() != original.storage().data();
        resize_to(original, view.sizes(), view.strides());
        if (moved && view.numel()) host_view(original).copy_(view);
      }
  }

  c10::IValue result(const c10::IValue& value) {
    if (value.isTensor()) return result(value.toTensor());
    if (!value.isTensorList()) return value;
    std::vector<Tensor> tensors;
    for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(result(tensor));
    return tensors;
  }

  void count() {
    if (made_view_ && !made_tensor_ && writes_.empty()) return;  // A view is no work for the device.
    bool empty = !writes_.empty();
    for (const auto& tensor : writes_) empty = empty && tensor.numel() == 0;
    if (empty && !waits_for_result(name_)) return;  // Nothing is launched for a result without elements.
    auto stream = current_stream(device_);
    launch(name_, stream, reads_, writes_);
    if (waits_for_result(name_)) host_waits_for_stream(stream, name_);
    // For `index`, torch reads masks and moves indices before the call; for `index_put_`, within it.
    else if (name_ == "_index_put_impl_" && (mask_ || index_on_host_))
      host_waits_for_stream(stream, mask_ ? name_ + " with a mask" : name_ + " with indices on the host");
  }

 private:
  bool is_written(size_t argument) const {
    const auto* alias = schema_.arguments()[argument].alias_info();
    return alias && alias->isWrite();
  }

  void check(const Tensor& tensor, bool written, bool index) {
    if (!tensor.defined()) return;
    if (tensor.is_cuda()) {
      int device = tensor.device().index();
      TORCH_CHECK(
          device_ < 0 || device_ == device, "Expected all tensors to be on the same device, but found at least two devices, "
          "cuda:", device_, " and cuda:", device, "! (when checking arguments of ", name_, ")");
      device_ = device;
      mask_ = mask_ || (index && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte));
    } else if (tensor.device().is_cpu()) {
      // Single numbers may be tensors of the CPU, and so may indices, which torch copies to the device.
      TORCH_CHECK(
          (tensor.dim() == 0 && !written) || index, "Expected all tensors to be on the same device, but found at least two "
          "devices, cuda and cpu! (when checking arguments of ", name_, ")");
      index_on_host_ = index_on_host_ || index;
    }
  }

  Tensor on_host(const Tensor& tensor, bool written) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    auto view = host_view(tensor);
    views_.emplace_back(tensor, view);
    if (written) written_.emplace_back(tensor, view);
    (written ? writes_ : reads_).push_back(tensor);
    return view;
  }

  c10::IValue generator_on_host(const c10::IValue& value) const {
    auto generator = value.isNone() ? default_generator(device_) : value.toGenerator();
    TORCH_CHECK(
        generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
        generator.device().type(), "'");
    return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->on_host();
  }

  Tensor result(const Tensor& computed) {
    if (!computed.defined()) return computed;
    for (const auto& [original, view] : views_)
      if (view.is_same(computed)) return original;
    for (const auto& [original, view] : views_)
      if (computed.has_storage() && computed.storage().is_alias_of(view.storage())) {
        made_view_ = true;
        return view_as(original, computed);
      }
    made_tensor_ = true;
    writes_.push_back(result_on(device_, computed));
    return writes_.back();
  }

  const c10::FunctionSchema& schema_;
  const std::string& name_;
  int device_ = -1;
  bool made_tensor_ = false, made_view_ = false, mask_ = false, index_on_host_ = false;
  std::vector<Tensor> reads_, writes_;
  std::vector<std::pair<Tensor, Tensor>> views_, written_;  // tensor of the device, view of the host
};

inline void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto number = op.schema().arguments().size();
  std::optional<FreeCall> free;
  if (costs_nothing) {
    free.emplace(op, torch::jit::last(*stack, number));
    if (free->repeat(*stack, number)) return;
  }
  auto arguments = torch::jit::last(*stack, number).vec();
  // The overload is left out of the name, since torch runs most operators, `x + 1` and `x.add_(1)` among them, as `add.out`.
  std::string name = op.schema().name();
  if (name.rfind("aten::", 0) == 0) name = name.substr(std::string("aten::").size());

  Call call(op, name);
  call.find_device(arguments);
  torch::jit::Stack values;
  {
    Lock lock;
    OnHost guards;
    values = call.arguments_on_host(arguments);
    TORCH_CHECK_NOT_IMPLEMENTED(
        op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
        "simulated GPUs have no kernel for ", op.schema().name(), ", since the CPU has none");
    op.callBoxed(&values);
    call.resize_outputs();
    for (auto& value : values) value = call.result(value);
    call.count();
  }
  if (free) free->remember(FreeCall(op, arguments), values);
  torch::jit::drop(*stack, number);
  for (auto& value : values) stack->emplace_back(std::move(value));
}

// Torch would choose among its kernels for CUDA, of which the CPU build has only some: `_conv_depthwise2d` and the backward
// of transposed, dilated and 3-D convolutions are missing. So the CPU chooses, as one launch each way. The types are checked
// first, as torch does.
inline void convolution(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  auto input = arguments[0].toTensor();
  for (size_t i : {1, 2}) {
    if (arguments[i].isNone() || !arguments[i].toTensor().defined()) continue;
    auto parameter = arguments[i].toTensor();
    TORCH_CHECK(
        input.options().type_equal(parameter.options()), "Input type (", input.toString(), ") and ",
        i == 1 ? "weight" : "bias", " type (", parameter.toString(), ") should be the same");
  }
  fallback(op, keys, stack);
}

}  // namespace simulated_gpus
