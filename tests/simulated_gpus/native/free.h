// Kernels, copies and streams that cost nothing, for benchmarks of all that the host does above them.
//
// While `costs_nothing` is set, an operator computes nothing: it returns tensors of the right kind over memory that nobody has
// filled. What kind that is, an operator without a kernel of its own shows in its first call with arguments of these dtypes,
// sizes, strides, devices and numbers, which does run; later ones look it up. No order of streams is followed, and nothing is
// counted. A value that the host asks for is whatever its memory holds.
#pragma once

#include <shared_mutex>
#include <unordered_map>

#include "tensors.h"

namespace simulated_gpus {

using Key = std::vector<int64_t>;

struct KeyHash {
  size_t operator()(const Key& key) const {
    size_t hash = key.size();
    for (auto word : key) hash = (hash ^ static_cast<size_t>(word)) * 0x9E3779B97F4A7C15ull;
    return hash ^ (hash >> 32);
  }
};

// How to make one tensor of a result.
struct Made {
  enum { undefined, argument, view, fresh } how;
  size_t source;  // which tensor among the arguments: the result itself, or the base of a view
  std::vector<int64_t> sizes, strides;
  int64_t offset;
  caffe2::TypeMeta dtype;
};

struct Result {
  bool is_list;
  std::vector<Made> tensors;
};

struct Known {
  int device;
  std::vector<Result> results;
};

// One call of an operator.
class FreeCall {
 public:
  FreeCall(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments) {
    key_.reserve(64);
    key_.push_back(reinterpret_cast<int64_t>(&op.schema()));
    for (const auto& argument : arguments) usable_ = usable_ && add(argument);
  }

  // Put the results of an earlier call of this kind on the stack, unless there was none.
  bool repeat(torch::jit::Stack& stack, size_t arguments) const {
    if (!usable_) return false;
    const Known* known = nullptr;
    {
      std::shared_lock lock(mutex());
      auto found = calls().find(key_);
      if (found == calls().end()) return false;
      known = &found->second;
    }
    std::vector<c10::IValue> values;
    for (const auto& result : known->results) {
      if (!result.is_list) values.emplace_back(make(result.tensors[0], known->device));
      else {
        std::vector<Tensor> tensors;
        for (const auto& made : result.tensors) tensors.push_back(make(made, known->device));
        values.emplace_back(std::move(tensors));
      }
    }
    torch::jit::drop(stack, arguments);
    for (auto& value : values) stack.emplace_back(std::move(value));
    return true;
  }

  // Remember what this call has returned, unless that is more than tensors, or it has resized an argument.
  void remember(const FreeCall& after, at::ArrayRef<c10::IValue> values) const {
    if (!usable_ || key_ != after.key_) return;
    Known known{-1, {}};
    for (const auto& value : values) {
      if (!value.isTensor() && !value.isTensorList()) return;
      Result result{value.isTensorList(), {}};
      for (const auto& tensor : result.is_list ? value.toTensorVector() : std::vector<Tensor>{value.toTensor()}) {
        result.tensors.push_back(describe(tensor));
        if (result.tensors.back().how == Made::fresh) known.device = tensor.device().index();
      }
      known.results.push_back(std::move(result));
    }
    std::unique_lock lock(mutex());
    calls().emplace(key_, std::move(known));
  }

 private:
  // They live as long as the process, since threads of the autograd engine do.
  static std::shared_mutex& mutex() {
    static auto& mutex = *new std::shared_mutex;
    return mutex;
  }
  static std::unordered_map<Key, Known, KeyHash>& calls() {
    static auto& calls = *new std::unordered_map<Key, Known, KeyHash>;
    return calls;
  }

  void add_numbers(at::IntArrayRef numbers) {
    key_.push_back(static_cast<int64_t>(numbers.size()));
    key_.insert(key_.end(), numbers.begin(), numbers.end());
  }

  void add_tensor(const Tensor& tensor) {
    tensors_.push_back(tensor);
    if (!tensor.defined()) return key_.push_back(-1);
    key_.push_back(static_cast<int64_t>(tensor.scalar_type()));
    key_.push_back(tensor.device().is_cuda() ? tensor.device().index() : -1);
    key_.push_back(tensor.storage_offset());
    add_numbers(tensor.sizes());
    add_numbers(tensor.strides());
  }

  // Return whether this is something that a key can hold.
  bool add(const c10::IValue& value) {
    key_.push_back(value.isNone() ? 0 : value.isTensor() ? 1 : value.isBool() ? 2 : value.isInt() ? 3 : value.isDouble() ? 4 : 5);
    if (value.isNone()) return true;
    if (value.isTensor()) add_tensor(value.toTensor());
    else if (value.isBool()) key_.push_back(value.toBool());
    else if (value.isInt()) key_.push_back(value.toInt());
    else if (value.isDouble()) {
      double number = value.toDouble();
      std::memcpy(&key_.emplace_back(), &number, sizeof number);
    } else if (value.isIntList()) add_numbers(value.toIntVector());
    else if (value.isDevice()) add_numbers({static_cast<int64_t>(value.toDevice().type()), value.toDevice().index()});
    else if (value.isTensorList() || value.isBoolList()) {
      auto list = value.toListRef();
      key_.push_back(static_cast<int64_t>(list.size()));
      for (const auto& one : list) add(one);
    } else return false;
    return true;
  }

  Made describe(const Tensor& tensor) const {
    if (!tensor.defined()) return {Made::undefined, 0, {}, {}, 0, {}};
    Made made{Made::fresh, 0, tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset(), tensor.dtype()};
    for (size_t i = 0; i < tensors_.size() && made.how != Made::argument; i++) {
      if (!tensors_[i].defined()) continue;
      if (tensors_[i].is_same(tensor)) made.how = Made::argument, made.source = i;
      else if (tensors_[i].is_alias_of(tensor)) made.how = Made::view, made.source = i;
    }
    return made;
  }

  Tensor make(const Made& made, int device) const {
    if (made.how == Made::undefined) return {};
    if (made.how == Made::argument) return tensors_[made.source];
    if (made.how == Made::fresh) return new_tensor(made.sizes, made.strides, made.dtype.toScalarType(), device);
    const auto& base = tensors_[made.source];
    auto view = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), made.dtype);
    view.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes, made.strides, made.offset);
    return view;
  }

  Key key_;
  std::vector<Tensor> tensors_;
  bool usable_ = true;
};

}  // namespace simulated_gpus
