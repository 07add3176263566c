// A device of torch's kind PrivateUse1 whose memory is the host's. Operations run on the CPU.

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <set>
#include <sstream>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

int64_t bytes_in_use = 0;
int64_t most_bytes_in_use = 0;
int64_t synchronisations = 0;
std::vector<std::string> fallbacks;

struct Block {
  void* data;
  size_t size;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  bytes_in_use -= static_cast<int64_t>(block->size);
  std::free(block->data);
  delete block;
}

struct HostMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto* block = new Block{std::calloc(1, size ? size : 1), size};
    bytes_in_use += static_cast<int64_t>(size);
    most_bytes_in_use = std::max(most_bytes_in_use, bytes_in_use);
    return {block->data, block, &release, c10::Device(kDevice, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
};

HostMemory memory;
REGISTER_ALLOCATOR(kDevice, &memory)

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kDevice;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return {kDevice, 0};
  }
  c10::Device getDevice() const override {
    return {kDevice, 0};
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetCPUAllocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto fresh = memory.allocate(size);
    memory.copy_data(fresh.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

Hooks hooks;
const bool are_hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

// The same memory as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) {
    return tensor;
  }
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &memory, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, c10::dtype_or_default(dtype));
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  on_host(to).copy_(on_host(from));
  return to;
}

const at::Tensor& resize_(const at::Tensor& tensor, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  at::native::resize_impl_cpu_(tensor.unsafeGetTensorImpl(), size, std::nullopt);
  return tensor;
}

at::Scalar scalar_of(const at::Tensor& tensor) {
  return on_host(tensor).item();
}

at::Tensor view(const at::Tensor& tensor, c10::IntArrayRef size) {
  return at::native::view(tensor, size);
}

at::Tensor reshape_alias(const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, tensor.storage_offset());
}

at::Tensor as_strided(
    const at::Tensor& tensor,
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}

at::Tensor& set_storage(
    at::Tensor& tensor,
    at::Storage storage,
    int64_t offset,
    c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(tensor, std::move(storage), offset, size, stride);
}

// Operations that this device does not have: they are noted as run on the CPU, as TorchNeuron notes its own.
const std::set<std::string>& missing_operations() {
  static const std::set<std::string> names = [] {
    std::set<std::string> found;
    const char* text = std::getenv("TORCH_NEURON_STAND_IN_MISSING");
    std::istringstream stream(text ? text : "");
    for (std::string name; std::getline(stream, name, ',');) {
      found.insert(name);
    }
    return found;
  }();
  return names;
}

void run_on_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& name = operation.schema().name();
  if (missing_operations().count(name)) {
    fallbacks.push_back(name);
  }
  at::native::cpu_fallback(operation, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

// Operations without a derivative, such as those of torch.distributed, pass to the device.
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("resize_", &resize_);
  library.impl("_local_scalar_dense", &scalar_of);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("as_strided", &as_strided);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
}

TORCH_LIBRARY(torch_neuron_stand_in, library) {
  library.def("synchronize", []() { ++synchronisations; });
  library.def("synchronisations", []() { return synchronisations; });
  library.def("most_bytes_in_use", []() { return most_bytes_in_use; });
  library.def("fallbacks", []() { return fallbacks; });
}

} // namespace
