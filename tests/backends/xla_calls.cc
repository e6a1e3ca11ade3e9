// XLA's part in calls of a library of `kernels.cc` for another processor, which an emulator runs:
// reads calls from the standard input and writes their results to the standard output.
//
// A call is words, then the bytes of its arguments: see `emulated.py`.

#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iostream>
#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

template <typename T>
T Read() {
  T value{};
  std::cin >> value;
  return value;
}

// Arguments or results, as a handler finds them.
struct Arrays {
  std::deque<std::vector<int64_t>> shapes;
  std::deque<std::vector<char>> bytes;
  std::deque<XLA_FFI_Buffer> buffers;
  std::vector<void*> pointers;

  void Add(XLA_FFI_DataType dtype, void* data = nullptr) {
    auto& shape = shapes.emplace_back(Read<int64_t>());
    int64_t size = dtype == XLA_FFI_DataType_S8 ? 1 : 4;
    for (int64_t& axis : shape) size *= axis = Read<int64_t>();
    bytes.emplace_back(size, -1);  // No number, where a result is not written.
    buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, dtype,
                       data ? data : bytes.back().data(), static_cast<int64_t>(shape.size()),
                       shape.data()});
    pointers.push_back(&buffers.back());
  }
};

int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (!library) return std::cerr << dlerror() << std::endl, 1;
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* error) -> XLA_FFI_Error* {
    std::cerr << error->message << std::endl;
    std::exit(1);
  };
  api.XLA_FFI_ThreadPool_NumThreads = [](XLA_FFI_ThreadPool_NumThreads_Args* threads) {
    *threads->num_threads = 3;
    return static_cast<XLA_FFI_Error*>(nullptr);
  };
  for (std::string name; std::cin >> name;) {
    Arrays args, rets;
    for (auto left = Read<int>(); left > 0; --left) {
      args.Add(static_cast<XLA_FFI_DataType>(Read<int>()));
    }
    for (auto left = Read<int>(); left > 0; --left) {  // Float32; in place of an argument, or -1.
      const auto argument = Read<int>();
      rets.Add(XLA_FFI_DataType_F32, argument < 0 ? nullptr : args.buffers[argument].data);
    }
    const auto count = Read<int>();  // Attributes by name: a type, and the bits of a number.
    std::vector<std::string> names(count);
    std::vector<int64_t> bits(count);
    std::vector<XLA_FFI_ByteSpan> spans(count);
    std::vector<XLA_FFI_Scalar> scalars(count);
    std::vector<XLA_FFI_ByteSpan*> span_pointers;
    std::vector<void*> scalar_pointers;
    for (int i = 0; i < count; ++i) {
      const auto type = (std::cin >> names[i], static_cast<XLA_FFI_DataType>(Read<int>()));
      bits[i] = Read<int64_t>();
      spans[i] = {names[i].data(), names[i].size()};
      scalars[i] = {type, &bits[i]};
      span_pointers.push_back(&spans[i]);
      scalar_pointers.push_back(&scalars[i]);
    }
    std::cin.get();  // The end of the line.
    for (auto& bytes : args.bytes) std::cin.read(bytes.data(), bytes.size());
    std::vector<XLA_FFI_ArgType> arg_types(args.buffers.size(), XLA_FFI_ArgType_BUFFER);
    std::vector<XLA_FFI_RetType> ret_types(rets.buffers.size(), XLA_FFI_RetType_BUFFER);
    std::vector<XLA_FFI_AttrType> attr_types(count, XLA_FFI_AttrType_SCALAR);
    XLA_FFI_CallFrame frame = {};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = &api;
    frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
    frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(arg_types.size()),
                  arg_types.data(), args.pointers.data()};
    frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(ret_types.size()),
                  ret_types.data(), rets.pointers.data()};
    frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, count, attr_types.data(),
                   span_pointers.data(), scalar_pointers.data()};
    reinterpret_cast<XLA_FFI_Handler*>(dlsym(library, name.c_str()))(&frame);
    for (size_t i = 0; i < rets.buffers.size(); ++i) {
      std::cout.write(static_cast<char*>(rets.buffers[i].data), rets.bytes[i].size());
    }
    std::cout.flush();
  }
}
