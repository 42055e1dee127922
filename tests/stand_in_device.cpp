// An accelerator for machines that have none. Its memory is the host's and its kernels are the
// CPU's, but its tensors do not mix with the host's, it knows pinned memory, and a copy that does
// not block comes as late as it may: one to the host when the device is waited for, one from pinned
// memory when the device is next used. Until then the target holds NaN.
//
// What it does not have: streams that run beside each other, graphs, more than one device.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

namespace {

using at::Tensor;
using c10::IntArrayRef;
using c10::SymIntArrayRef;

constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// ---- memory ---------------------------------------------------------------------------------

std::mutex memory_lock;  // nothing else is waited for under it
std::map<uintptr_t, size_t> pinned;
std::map<uintptr_t, size_t> on_device;
std::atomic<int64_t> allocated{0}, peak{0};

void* take(std::map<uintptr_t, size_t>& blocks, size_t size) {
  void* block = aligned_alloc(64, (size + 63) / 64 * 64);
  std::lock_guard<std::mutex> guard(memory_lock);
  blocks[reinterpret_cast<uintptr_t>(block)] = size;
  return block;
}

size_t give_back(std::map<uintptr_t, size_t>& blocks, void* block) {
  std::lock_guard<std::mutex> guard(memory_lock);
  auto place = blocks.find(reinterpret_cast<uintptr_t>(block));
  size_t size = place->second;
  blocks.erase(place);
  free(block);
  return size;
}

void free_on_device(void* block) {
  if (block) allocated -= give_back(on_device, block);
}

void free_pinned(void* block) {
  if (block) give_back(pinned, block);
}

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(memory_lock);
  auto after = pinned.upper_bound(reinterpret_cast<uintptr_t>(data));
  if (after == pinned.begin()) return false;
  --after;
  return reinterpret_cast<uintptr_t>(data) < after->first + after->second;
}

template <void (*Free)(void*)>
struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    bool is_here = Free == free_on_device;
    c10::Device device = is_here ? kDevice : c10::Device(c10::kCPU);
    void* block = size ? take(is_here ? on_device : pinned, size) : nullptr;
    if (is_here && size) {
      int64_t now = allocated += size;
      if (now > peak) peak = now;
    }
    return {block, block, Free, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return Free; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};

Allocator<free_on_device> device_allocator;
Allocator<free_pinned> pinned_allocator;
REGISTER_ALLOCATOR(kType, &device_allocator);

bool is_here(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

// The same memory as a tensor of the CPU.
Tensor unveiled(const Tensor& tensor) {
  if (!is_here(tensor)) return tensor;
  auto data = at::DataPtr(tensor.storage().mutable_data(), c10::Device(c10::kCPU));
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), nullptr, false);
  auto same = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  same.unsafeGetTensorImpl()->set_sizes_and_strides(
      tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return same;
}

Tensor moved_here(const Tensor& tensor) {
  auto moved = at::empty_strided(
      tensor.sizes(), tensor.strides(), tensor.options().device(kDevice));
  unveiled(moved).copy_(tensor);
  return moved;
}

// ---- copies that do not block ---------------------------------------------------------------

struct Late {
  Tensor from, to, owner;
};
std::recursive_mutex lock;
std::vector<Late> to_host, to_device;

void arrive(std::vector<Late>& copies) {
  std::vector<Late> due;  // its end waits for Python's lock, so it comes after that of the guard
  std::lock_guard<std::recursive_mutex> guard(lock);
  due = std::move(copies);
  copies.clear();
  for (auto& copy : due) copy.to.copy_(copy.from);
}

void synchronize() {
  arrive(to_device);
  arrive(to_host);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  arrive(to_device);
  auto source = unveiled(from), target = unveiled(to);
  bool to_the_host = non_blocking && is_here(from) && !is_here(to);
  bool from_the_host = non_blocking && !is_here(from) && is_pinned(from.data_ptr());
  if (!to_the_host && !from_the_host) {
    if (!is_here(to)) synchronize();
    target.copy_(source);
    return to;
  }
  std::lock_guard<std::recursive_mutex> guard(lock);
  if (to_the_host) source = source.clone();  // the device's kernels come in their order
  if (target.is_floating_point()) target.fill_(NAN);
  (to_the_host ? to_host : to_device).push_back({source, target, to});
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  return copy_from(from, to, false);
}

// ---- device, streams, events ----------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
};

thread_local c10::StreamId current_stream = 0;
std::atomic<c10::StreamId> last_stream{0};

c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return stream(++last_stream);
  }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(++last_stream); }
  c10::Stream exchangeStream(c10::Stream next) const noexcept override {
    return stream(std::exchange(current_stream, next.id()));
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { synchronize(); }
  void synchronizeDevice(c10::DeviceIndex) const override { synchronize(); }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    *event = &last_stream;  // anything but null: it has been recorded
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { synchronize(); }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- kernels --------------------------------------------------------------------------------

Tensor argument(const Tensor& tensor, const c10::FunctionSchema& schema) {
  TORCH_CHECK(
      !tensor.defined() || tensor.dim() == 0 || is_here(tensor), "a tensor of ",
      tensor.device(), " among tensors of ", kDevice, " in ", schema.name());
  bool is_to_be_resized = is_here(tensor) && tensor.sizes() == IntArrayRef{0};
  return is_to_be_resized ? at::empty({0}, tensor.options().device(c10::kCPU)) : unveiled(tensor);
}

void replace(const Tensor& tensor, const Tensor& by) {
  auto* place = tensor.unsafeGetTensorImpl();
  place->set_storage_keep_dtype(by.storage());
  place->set_sizes_and_strides(by.sizes(), by.strides(), by.storage_offset());
}

// What a kernel of the CPU has returned, as what the caller knows: its own argument, or a new one.
c10::IValue result(
    const c10::IValue& returned, const c10::AliasInfo* alias, const c10::FunctionSchema& schema,
    const std::vector<c10::IValue>& arguments) {
  if (returned.isTensorList()) {
    c10::List<Tensor> moved;
    for (const Tensor& each : returned.toTensorVector()) moved.push_back(moved_here(each));
    return moved;
  }
  if (!returned.isTensor() || !returned.toTensor().defined()) return returned;
  Tensor tensor = returned.toTensor();
  if (!alias) return moved_here(tensor);
  TORCH_CHECK(alias->isWrite(), "a view that is not known here: ", schema.name());
  for (size_t place = 0; place < arguments.size(); ++place) {
    auto* own = schema.arguments()[place].alias_info();
    if (!own || !(*own == *alias)) continue;
    Tensor given = arguments[place].toTensor();
    if (given.sizes() != tensor.sizes()) {
      TORCH_CHECK(given.numel() == 0, schema.name(), " resizes a tensor of ", given.sizes());
      replace(given, moved_here(tensor));
    }
    return given;
  }
  TORCH_CHECK(false, "what ", schema.name(), " returns is not an argument");
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  arrive(to_device);
  const auto& schema = op.schema();
  const size_t inputs = schema.arguments().size(), outputs = schema.returns().size();
  const size_t first = stack->size() - inputs;
  const std::vector<c10::IValue> arguments(stack->begin() + first, stack->end());
  for (size_t place = first; place < stack->size(); ++place) {
    auto& value = (*stack)[place];
    if (value.isTensor()) {
      value = argument(value.toTensor(), schema);
    } else if (value.isTensorList()) {
      c10::List<Tensor> tensors;
      for (const Tensor& each : value.toTensorVector()) tensors.push_back(argument(each, schema));
      value = tensors;
    } else if (value.isOptionalTensorList()) {  // indices may be the host's
      c10::List<std::optional<Tensor>> tensors;
      for (std::optional<Tensor> each : value.toOptionalTensorList())
        tensors.push_back(each ? std::optional<Tensor>(unveiled(*each)) : std::nullopt);
      value = tensors;
    } else if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (size_t place = 0; place < outputs; ++place) {
    auto& returned = (*stack)[stack->size() - outputs + place];
    returned = result(returned, schema.returns()[place].alias_info(), schema, arguments);
  }
}

c10::ScalarType kind_of(std::optional<c10::ScalarType> dtype) {
  return dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype()));
}

Tensor empty(
    IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &device_allocator, kKeys, kind_of(dtype), format);
}

Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, kKeys, kind_of(dtype));
}

Tensor as_strided(
    const Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride,
    std::optional<c10::SymInt> offset) {
  auto part = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(), tensor.dtype());
  part.unsafeGetTensorImpl()->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? offset->expect_int() : tensor.storage_offset());
  return part;
}

Tensor reshape_alias(const Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride) {
  return as_strided(tensor, size, stride, std::nullopt);
}

Tensor view(const Tensor& tensor, SymIntArrayRef size) {
  auto same = unveiled(tensor).view(C10_AS_INTARRAYREF_SLOW(size));
  return as_strided(tensor, same.sym_sizes(), same.sym_strides(), std::nullopt);
}

Tensor& set_storage(
    Tensor& tensor, c10::Storage storage, c10::SymInt offset, SymIntArrayRef size,
    SymIntArrayRef stride) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return tensor;
}

Tensor& set_whole_storage(Tensor& tensor, c10::Storage storage) {
  const c10::SymInt size = storage.nbytes() / tensor.itemsize(), stride = 1;
  return set_storage(tensor, std::move(storage), 0, {size}, {stride});
}

const Tensor& resize(const Tensor& tensor, SymIntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (c10::multiply_integers(sizes) * tensor.itemsize() > tensor.storage().nbytes()) {
    TORCH_CHECK(tensor.numel() == 0, "a tensor of ", tensor.sizes(), " is made larger");
    replace(tensor, at::empty(sizes, tensor.options()));
  } else {
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  }
  return tensor;
}

c10::Scalar local_scalar(const Tensor& tensor) {
  synchronize();
  return unveiled(tensor).item();
}

void record_stream(Tensor&, c10::Stream) {}

const bool has_hooks = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("resize_", resize);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("record_stream", record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY(stand_in, library) {
  library.def("memory_allocated() -> int", [] { return allocated.load(); });
  library.def("max_memory_allocated() -> int", [] { return peak.load(); });
  library.def("reset_peak_memory_stats() -> ()", [] { peak = allocated.load(); });
}
