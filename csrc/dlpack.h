// The part of the DLPack C exchange interface that scan.cpp reads (layout of DLPack 1.x; specification and names by the
// DLPack project, Apache-2.0, https://dmlc.github.io/dlpack). Structures are data layouts, so the names are theirs.
#pragma once

#include <cstdint>

namespace mo {

struct DLDevice {
  int32_t device_type;
  int32_t device_id;
};

struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct DLPackExchangeAPI {
  uint32_t major;
  uint32_t minor;
  void* prev_api;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  int (*dltensor_from_py_object_no_sync)(void* object, DLTensor* out);
  void* current_work_stream;
};

}  // namespace mo
