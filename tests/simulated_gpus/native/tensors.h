// Tensors of the devices: how they are made, viewed, copied and read. Their memory is memory of the host.
#pragma once

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "device.h"

namespace simulated_gpus {

using at::Tensor;

// Keeps autograd and autocast from stepping in again while a kernel computes on views that are CPU tensors.
struct OnHost {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

// Return a CPU tensor over the same memory, which is valid as long as `tensor` is.
inline Tensor host_view(const Tensor& tensor) {
  const auto& storage = tensor.storage();
  c10::DataPtr borrowed(const_cast<void*>(storage.data()), Device(c10::kCPU));
  c10::Storage same(
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(borrowed), c10::GetCPUAllocator(), /*resizable=*/true);
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      std::move(same), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  return view;
}

// Return a view of the memory of `base` with the sizes, the strides, the offset and the dtype of `like`.
inline Tensor view_as(const Tensor& base, const Tensor& like) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), like.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return view;
}

inline Tensor new_tensor(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype, int device) {
  check_device(device);
  c10::DeviceGuard guard(cuda(device));
  return at::detail::empty_strided_generic(
      size, stride, &allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype);
}

// Move what a CPU kernel has computed to a device. This is part of the kernel, and is not counted as a copy.
inline Tensor result_on(int device, const Tensor& computed) {
  auto result = new_tensor(computed.sizes(), computed.strides(), computed.scalar_type(), device);
  if (computed.numel()) host_view(result).copy_(computed);
  return result;
}

inline int index_or_current(std::optional<Device> device) {
  return device && device->has_index() ? device->index() : current_device;
}

inline at::ScalarType or_default(std::optional<at::ScalarType> dtype) {
  return dtype.value_or(c10::get_default_dtype_as_scalartype());
}

inline Tensor empty_memory_format(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
    std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  int index = index_or_current(device);
  check_device(index);
  c10::DeviceGuard guard(cuda(index));
  return at::detail::empty_generic(
      size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), or_default(dtype), format);
}

inline Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  return new_tensor(size, stride, or_default(dtype), index_or_current(device));
}

inline Tensor as_strided(
    const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(self.storage_offset()));
  return view;
}

// Copy between two GPUs as torch does: the stream of the source runs the copy. It waits until the stream of the destination
// is done with what was there before, and that stream waits for the copy in turn. Torch makes two events and two waits for
// this. They are not counted, since every such copy has them.
inline void copy_between_devices(Tensor& self, const Tensor& source) {
  Lock lock;
  auto from = current_stream(source.device().index()), to = current_stream(self.device().index());
  auto bytes = static_cast<int64_t>(self.nbytes());
  auto& all = world();
  tick(to);
  merge(all.streams[from].clock, all.streams[to].clock);
  host_view(self).copy_(host_view(source));
  launch("copy between devices", from, {source}, {self}, bytes);
  merge(all.streams[to].clock, all.streams[from].clock);
  all.counts["copies_between_devices"]++;
  all.counts["bytes_between_devices"] += bytes;
}

// Return whether two tensors have their elements in the same order in memory: the stride of a dimension of one element says
// nothing about it.
inline bool are_laid_out_alike(const Tensor& first, const Tensor& second) {
  if (!first.sizes().equals(second.sizes())) return false;
  for (int64_t i = 0; i < first.dim(); i++)
    if (first.size(i) != 1 && first.stride(i) != second.stride(i)) return false;
  return true;
}

// Copy between host and device. Only a dense block is copied as it is, and only to the same dtype and layout: everything
// else is first made a contiguous block, on the side of the source, and put in place after the copy.
inline void copy_from_or_to_host(Tensor& self, const Tensor& source, bool non_blocking) {
  bool plain = self.scalar_type() == source.scalar_type() && self.is_non_overlapping_and_dense() &&
      are_laid_out_alike(self, source) && self.is_conj() == source.is_conj() && self.is_neg() == source.is_neg();
  if (!plain) {
    auto block = at::empty(self.sizes(), source.options().dtype(self.dtype()));
    block.copy_(source.expand_as(self));
    if (self.is_contiguous() && !self.is_conj() && !self.is_neg()) {
      copy_from_or_to_host(self, block, non_blocking);
    } else {
      auto arrived = at::empty(self.sizes(), self.options());
      copy_from_or_to_host(arrived, block, non_blocking);
      self.copy_(arrived);
    }
    return;
  }
  Lock lock;
  bool to_device = self.is_cuda();
  auto stream = current_stream(to_device ? self.device().index() : source.device().index());
  auto bytes = static_cast<int64_t>(self.nbytes());
  (to_device ? host_view(self) : self).copy_(to_device ? source : host_view(source));
  launch(to_device ? "copy to device" : "copy to host", stream, {source}, {self}, bytes);
  world().counts[to_device ? "bytes_to_device" : "bytes_to_host"] += bytes;
  // A copy into memory of the host that is not pinned has arrived before it returns, even if it need not block.
  bool arrives = !to_device && !PinnedAllocator::contains(self.storage().data());
  if (!non_blocking || arrives) host_waits_for_stream(stream, to_device ? "copy to device" : "copy to host");
}

inline Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  TORCH_CHECK(self.defined() && source.defined(), "copy_ of an undefined tensor");
  if (self.is_same(source) || costs_nothing) return self;
  OnHost on_host;
  if (self.numel() == 0) {  // The kernel of the CPU still checks the shapes.
    auto target = self.is_cuda() ? host_view(self) : self;
    target.copy_(source.is_cuda() ? host_view(source) : source);
  } else if (!self.is_cuda() || !source.is_cuda()) {
    copy_from_or_to_host(self, source, non_blocking);
  } else if (self.device() != source.device()) {
    copy_between_devices(self, source);
  } else {
    Lock lock;
    host_view(self).copy_(host_view(source));
    launch("copy_", current_stream(self.device().index()), {source}, {self});
  }
  return self;
}

inline at::Scalar local_scalar_dense(const Tensor& self) {
  Lock lock;
  OnHost on_host;
  auto stream = current_stream(self.device().index());
  launch("_local_scalar_dense", stream, {self}, {});
  world().counts["bytes_to_host"] += static_cast<int64_t>(self.itemsize());
  host_waits_for_stream(stream, "item");
  return at::_local_scalar_dense(host_view(self));
}

// Change sizes and strides. A storage that is too small gets new memory with the old contents.
inline void resize_to(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  Lock lock;
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  auto needed = at::detail::computeStorageNbytes(size, stride, self.itemsize(), self.storage_offset());
  auto& storage = self.storage();
  auto old = storage.nbytes();
  if (needed <= old) return;
  auto memory = allocator().allocate_on(self.device().index(), needed);
  if (old) std::memcpy(memory.get(), storage.data(), old);
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(needed);
  if (old) launch("resize_", current_stream(self.device().index()), {}, {self});
}

inline const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.sizes() == size && !format) return self;
  auto meta = at::empty(size, self.options().device(c10::kMeta).memory_format(format.value_or(at::MemoryFormat::Contiguous)));
  resize_to(self, size, meta.strides());
  return self;
}

inline Tensor& set_storage_offset(
    Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(
      source.device_type() == c10::kCUDA && source.device() == self.device(), "Expected a storage on ", self.device(),
      ", but got one on ", source.device());
  auto* implementation = self.unsafeGetTensorImpl();
  implementation->set_storage_keep_dtype(source);
  if (stride.empty()) {
    implementation->set_sizes_contiguous(size);
    implementation->set_storage_offset(offset);
  } else {
    implementation->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

inline Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

inline Tensor& set_storage(Tensor& self, at::Storage source) {
  auto elements = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage_offset(self, std::move(source), 0, {elements}, {});
}

inline void record_stream(Tensor& self, c10::Stream stream) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

}  // namespace simulated_gpus
