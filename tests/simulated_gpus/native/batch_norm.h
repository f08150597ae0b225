// The batch norm operators that only CUDA has, with the checks of its kernels.
//
// Which dtypes an operator takes depends on the format of the input, since CUDA has a kernel for each of three: contiguous,
// channels last, and everything else. The statistics that are returned are rounded once, from float64: kernels of GPUs are not
// that exact.
#pragma once

#include <ATen/AccumulateType.h>

#include "tensors.h"

namespace simulated_gpus {

using OptionalTensor = std::optional<Tensor>;

inline Tensor or_undefined(const OptionalTensor& tensor) {
  return tensor ? *tensor : Tensor();
}

// Return the dtype in which CUDA accumulates values of `dtype`.
inline at::ScalarType accumulated(at::ScalarType dtype) {
  return at::toAccumulateType(dtype, /*is_cuda=*/true);
}

enum class Kernel { contiguous, channels_last, general };

inline bool is_channels_last(const Tensor& tensor) {
  return tensor.is_contiguous(at::MemoryFormat::ChannelsLast) || tensor.is_contiguous(at::MemoryFormat::ChannelsLast3d) ||
      (tensor.is_contiguous() && tensor.stride(1) == 1);
}

inline Kernel kernel_for(const Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor.stride(1) == 1 ? Kernel::channels_last : Kernel::contiguous;
  return tensor.is_contiguous(at::MemoryFormat::ChannelsLast) ? Kernel::channels_last : Kernel::general;
}

inline void check_dtype(const char* name, const Tensor& tensor, at::ScalarType dtype) {
  TORCH_CHECK(
      !tensor.defined() || tensor.scalar_type() == dtype, "Expected ", name, " to have type ", dtype, " but got ",
      tensor.scalar_type());
}

// Check what each of these operators demands of its input, and return the device of that.
inline int check_input(const char* op, const Tensor& input, std::initializer_list<Tensor> others) {
  TORCH_CHECK(at::isFloatingType(input.scalar_type()), "\"", op, "\" not implemented for '", input.scalar_type(), "'");
  TORCH_CHECK(input.numel() > 0, "CUDA error: invalid configuration argument (", op, " of a tensor without elements)");
  for (const auto& tensor : others)
    TORCH_CHECK(
        !tensor.defined() || tensor.device() == input.device(), "Expected all tensors to be on the same device, but found at "
        "least two devices, ", input.device(), " and ", tensor.device(), "! (when checking arguments of ", op, ")");
  return input.device().index();
}

inline Tensor as(at::ScalarType dtype, const Tensor& tensor) {
  return tensor.defined() ? host_view(tensor).to(dtype) : tensor;
}

inline Tensor in_double(const Tensor& tensor) {
  return as(at::kDouble, tensor);
}

// (C,) -> (1, C, 1, ...)
inline Tensor per_channel(const Tensor& vector, const Tensor& input) {
  std::vector<int64_t> shape(input.dim(), 1);
  shape[1] = -1;
  return vector.reshape(shape);
}

inline std::vector<int64_t> all_but_channels(const Tensor& input) {
  std::vector<int64_t> dimensions{0};
  for (int64_t i = 2; i < input.dim(); i++) dimensions.push_back(i);
  return dimensions;
}

inline void launch_on(
    const char* op, int device, std::initializer_list<Tensor> reads, std::initializer_list<Tensor> writes) {
  launch(op, current_stream(device), std::vector<Tensor>(reads), std::vector<Tensor>(writes));
}

// Return one vector, or one number for each channel of `like`, which nobody has filled.
inline Tensor unfilled(const Tensor& like, at::ScalarType dtype) {
  return new_tensor({like.dim() == 1 ? like.size(0) : like.size(1)}, {1}, dtype, like.device().index());
}

inline std::pair<Tensor, Tensor> biased_var_and_mean(const Tensor& input) {
  auto [var, mean] = at::var_mean(in_double(input), all_but_channels(input), /*unbiased=*/false);
  return {var, mean};
}

// running = (1 - momentum) * running + momentum * batch, with the unbiased variance.
inline void move_running(
    const Tensor& running_mean, const Tensor& running_var, const Tensor& mean, const Tensor& var, double momentum,
    const Tensor& count) {
  if (running_mean.defined()) host_view(running_mean).copy_((1 - momentum) * in_double(running_mean) + momentum * mean);
  if (running_var.defined())
    host_view(running_var).copy_((1 - momentum) * in_double(running_var) + momentum * var * count / (count - 1));
}

inline std::tuple<Tensor, Tensor> batch_norm_stats(const Tensor& input, double eps) {
  const char* op = "batch_norm_stats";
  int device = check_input(op, input, {});
  auto dtype = accumulated(input.scalar_type());
  if (costs_nothing) return {unfilled(input, dtype), unfilled(input, dtype)};
  Lock lock;
  OnHost on_host;
  auto [var, mean] = biased_var_and_mean(input);
  auto out_mean = result_on(device, mean.to(dtype)), invstd = result_on(device, (var + eps).rsqrt().to(dtype));
  launch_on(op, device, {input}, {out_mean, invstd});
  return {out_mean, invstd};
}

inline std::tuple<Tensor, Tensor> batch_norm_update_stats(
    const Tensor& input, const OptionalTensor& running_mean_, const OptionalTensor& running_var_, double momentum) {
  const char* op = "batch_norm_update_stats";
  auto running_mean = or_undefined(running_mean_), running_var = or_undefined(running_var_);
  int device = check_input(op, input, {running_mean, running_var});
  TORCH_CHECK(running_mean.defined() == running_var.defined(), "running_mean and running_var: both or none");
  auto dtype = accumulated(input.scalar_type());
  if (costs_nothing) return {unfilled(input, dtype), unfilled(input, dtype)};
  Lock lock;
  OnHost on_host;
  auto [var, mean] = biased_var_and_mean(input);
  auto out_mean = result_on(device, mean.to(dtype)), out_var = result_on(device, var.to(dtype));
  launch_on(op, device, {input}, {out_mean, out_var});
  if (running_mean.defined()) {  // CUDA moves these in a kernel of its own.
    auto count = at::scalar_tensor(static_cast<double>(input.numel() / mean.numel()), at::kDouble);
    move_running(running_mean, running_var, mean, var, momentum, count);
    launch_on("batch_norm_update_stats: running statistics", device, {out_mean, out_var}, {running_mean, running_var});
  }
  return {out_mean, out_var};
}

inline Tensor& batch_norm_elemt_out(
    const Tensor& input, const OptionalTensor& weight_, const OptionalTensor& bias_, const Tensor& mean,
    const Tensor& invstd, double, Tensor& out) {
  const char* op = "batch_norm_elemt";
  auto weight = or_undefined(weight_), bias = or_undefined(bias_);
  int device = check_input(op, input, {weight, bias, mean, invstd, out});
  auto dtype = input.scalar_type();
  if (!out.sizes().equals(input.sizes())) resize_to(out, input.sizes(), input.strides());
  // The kernel for channels last needs an output of the same format. For any other one CUDA falls back to the general
  // kernel, which converts each number.
  auto kernel = kernel_for(input);
  if (kernel == Kernel::channels_last && !out.strides().equals(input.strides())) kernel = Kernel::general;
  if (kernel != Kernel::general) {
    check_dtype("output", out, dtype);
    auto first = weight.defined() ? weight.scalar_type() : bias.defined() ? bias.scalar_type() : dtype;
    auto parameters = first == dtype ? dtype : accumulated(dtype);
    check_dtype("weight", weight, parameters);
    check_dtype("bias", bias, parameters);
    check_dtype("mean", mean, accumulated(dtype));
    check_dtype("invstd", invstd, accumulated(dtype));
  }
  if (costs_nothing) return out;
  Lock lock;
  OnHost on_host;
  auto wide = accumulated(dtype);
  auto value = [&](const Tensor& vector) { return per_channel(as(wide, vector), input); };
  auto result = (as(wide, input) - value(mean)) * value(invstd);
  if (weight.defined()) result = result * value(weight);
  if (bias.defined()) result = result + value(bias);
  host_view(out).copy_(result);
  launch_on(op, device, {input, weight, bias, mean, invstd}, {out});
  return out;
}

inline Tensor batch_norm_elemt(
    const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, const Tensor& mean,
    const Tensor& invstd, double eps) {
  auto out = at::empty_like(input);
  batch_norm_elemt_out(input, weight, bias, mean, invstd, eps, out);
  return out;
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward_reduce(
    const Tensor& grad_output, const Tensor& input, const Tensor& mean, const Tensor& invstd,
    const OptionalTensor& weight_, bool input_g, bool weight_g, bool bias_g) {
  const char* op = "batch_norm_backward_reduce";
  auto weight = or_undefined(weight_);
  int device = check_input(op, input, {grad_output, mean, invstd, weight});
  auto dtype = grad_output.scalar_type();
  check_dtype("input", input, dtype);
  check_dtype("weight", weight, weight.defined() && weight.scalar_type() != dtype ? accumulated(dtype) : dtype);
  check_dtype("mean", mean, accumulated(dtype));
  check_dtype("invstd", invstd, accumulated(dtype));
  bool channels_last = is_channels_last(grad_output) && is_channels_last(input);
  TORCH_CHECK(channels_last || weight.defined() || !(weight_g || bias_g), "tensor does not have a device");
  if (costs_nothing) {
    auto sum = [&](bool wanted, const Tensor& like) { return wanted ? unfilled(mean, like.scalar_type()) : Tensor(); };
    return {
        sum(input_g, mean), sum(input_g, mean), sum(weight_g && weight.defined(), weight),
        sum(bias_g && weight.defined(), weight)};
  }
  Lock lock;
  OnHost on_host;
  auto dy = in_double(grad_output), xmu = in_double(input) - per_channel(in_double(mean), input);
  auto sum_dy = dy.sum(all_but_channels(input)), sum_dy_xmu = (dy * xmu).sum(all_but_channels(input));
  Tensor out_dy, out_dy_xmu, grad_weight, grad_bias;
  // The kernel for channels last makes all four results. Without a weight, the gradients of weight and bias have no elements.
  if (input_g || channels_last) {
    out_dy = result_on(device, sum_dy.to(mean.scalar_type()));
    out_dy_xmu = result_on(device, sum_dy_xmu.to(mean.scalar_type()));
  }
  if (weight.defined()) {
    if (weight_g || channels_last)
      grad_weight = result_on(device, (sum_dy_xmu * in_double(invstd)).to(weight.scalar_type()));
    if (bias_g || channels_last) grad_bias = result_on(device, sum_dy.to(weight.scalar_type()));
  } else if (channels_last) {
    grad_weight = new_tensor({0}, {1}, mean.scalar_type(), device);
    grad_bias = new_tensor({0}, {1}, mean.scalar_type(), device);
  }
  launch_on(op, device, {grad_output, input, mean, invstd, weight}, {out_dy, out_dy_xmu, grad_weight, grad_bias});
  return {out_dy, out_dy_xmu, grad_weight, grad_bias};
}

inline Tensor batch_norm_backward_elemt(
    const Tensor& grad_output, const Tensor& input, const Tensor& mean, const Tensor& invstd,
    const OptionalTensor& weight_, const Tensor& sum_dy, const Tensor& sum_dy_xmu, const Tensor& count) {
  const char* op = "batch_norm_backward_elemt";
  auto weight = or_undefined(weight_);
  int device = check_input(op, input, {grad_output, mean, invstd, weight, sum_dy, sum_dy_xmu, count});
  auto dtype = input.scalar_type(), wide = accumulated(dtype);
  bool channels_last = is_channels_last(grad_output) && is_channels_last(input);
  check_dtype("grad_output", grad_output, dtype);
  check_dtype("mean", mean, wide);
  check_dtype("invstd", invstd, wide);
  check_dtype("sum_dy", sum_dy, wide);
  check_dtype("sum_dy_xmu", sum_dy_xmu, wide);
  // Only the kernel for channels last takes a weight of the dtype of a float16 or bfloat16 input.
  check_dtype("weight", weight, channels_last && weight.defined() && weight.scalar_type() == dtype ? dtype : wide);
  TORCH_CHECK(count.scalar_type() == at::kInt, "expected scalar type Int but found ", count.scalar_type());
  if (costs_nothing) return at::empty_like(input);
  Lock lock;
  OnHost on_host;
  auto value = [&](const Tensor& vector) { return per_channel(as(wide, vector), input); };
  auto total = host_view(count).sum().item<double>();
  auto xmu = as(wide, input) - value(mean);
  auto scaled = value(invstd) * value(invstd) * value(sum_dy_xmu) / total;
  auto grad_input = as(wide, grad_output) - value(sum_dy) / total - xmu * scaled;
  grad_input = grad_input * value(invstd);
  if (weight.defined()) grad_input = grad_input * value(weight);
  auto like = host_view(input);
  auto format = channels_last ? at::MemoryFormat::Preserve : at::MemoryFormat::Contiguous;
  auto out = result_on(device, at::empty_like(like, format).copy_(grad_input));
  launch_on(op, device, {grad_output, input, mean, invstd, weight, sum_dy, sum_dy_xmu, count}, {out});
  return out;
}

// (R, C) statistics of R replicas and their (R,) numbers of elements -> (C,) statistics of all.
inline std::tuple<Tensor, Tensor> batch_norm_gather_stats_with_counts(
    const Tensor& input, const Tensor& mean, const Tensor& invstd, const OptionalTensor& running_mean_,
    const OptionalTensor& running_var_, double momentum, double eps, const Tensor& counts) {
  const char* op = "batch_norm_gather_stats_with_counts";
  auto running_mean = or_undefined(running_mean_), running_var = or_undefined(running_var_);
  int device = check_input(op, mean, {input, invstd, running_mean, running_var, counts});
  // Only the dtype of the input matters, and only if there are no running statistics.
  auto dtype = running_mean.defined() ? running_mean.scalar_type() : input.scalar_type();
  check_dtype("mean", mean, accumulated(dtype));
  check_dtype("invstd", invstd, accumulated(dtype));
  check_dtype("running_mean", running_mean, dtype);
  check_dtype("running_var", running_var, dtype);
  check_dtype("counts", counts, dtype);
  TORCH_CHECK(mean.dim() == 2 && invstd.dim() == 2 && counts.dim() == 1, "Expected mean and invstd of 2 dimensions, counts of 1");
  if (costs_nothing) return {unfilled(mean, mean.scalar_type()), unfilled(mean, mean.scalar_type())};
  Lock lock;
  OnHost on_host;
  auto n = in_double(counts).unsqueeze(1), means = in_double(mean), vars = in_double(invstd).pow(-2) - eps;
  auto total = n.sum();
  auto merged = (means * n).sum(0) / total;
  auto var = ((vars + (means - merged).pow(2)) * n).sum(0) / total;
  move_running(running_mean, running_var, merged, var, momentum, total);
  auto out_mean = result_on(device, merged.to(mean.scalar_type()));
  auto out_invstd = result_on(device, (var + eps).rsqrt().to(mean.scalar_type()));
  launch_on(op, device, {mean, invstd, counts}, {out_mean, out_invstd, running_mean, running_var});
  return {out_mean, out_invstd};
}

}  // namespace simulated_gpus
