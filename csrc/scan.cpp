// See scan.h.
#include "scan.h"

#include "abi.h"
#include "dlpack.h"

namespace mo {
namespace {

enum DLCode { kDLFloat = 2, kDLBfloat = 4 };

inline uint64_t mix(uint64_t hash, uint64_t value) {
  hash ^= value;
  hash *= 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 29);
}

int32_t dtype_of(DLDataType t) {
  if (t.lanes != 1) return -1;
  if (t.code == kDLFloat) return t.bits == 32 ? kF32 : t.bits == 16 ? kF16 : t.bits == 64 ? kF64 : -1;
  return t.code == kDLBfloat && t.bits == 16 ? int32_t(kBF16) : -1;
}

void describe(const DLTensor& t, TensorRecord& r) {
  uint64_t hash = 0x243F6A8885A308D3ull;
  hash = mix(hash, uint64_t(t.dtype.code) << 32 | uint64_t(t.dtype.bits) << 16 | t.dtype.lanes);
  hash = mix(hash, uint64_t(uint32_t(t.device.device_type)) << 32 | uint32_t(t.device.device_id));
  hash = mix(hash, uint64_t(t.ndim));
  int64_t numel = 1;
  bool contiguous = true;
  for (int d = t.ndim - 1; d >= 0; --d) {
    hash = mix(mix(hash, uint64_t(t.shape[d])), uint64_t(t.strides[d]));
    if (t.shape[d] != 1 && t.strides[d] != numel) contiguous = false;
    numel *= t.shape[d];
  }
  r.address = uint64_t(reinterpret_cast<uintptr_t>(t.data)) + t.byte_offset;
  r.layout = hash | 1;
  r.numel = numel;
  r.dtype = dtype_of(t.dtype);
  r.device = t.device.device_type << 16 | t.device.device_id;
  r.contiguous = contiguous || numel == 0;
}

}  // namespace

int64_t scan(PyObject* api, PyObject* items, PyObject* key, TensorRecord* out) {
  const auto* exchange = static_cast<const DLPackExchangeAPI*>(
      PyCapsule_GetPointer(PyTuple_GET_ITEM(api, 0), "dlpack_exchange_api"));
  if (!exchange) return -1;
  const PyObject* tensor_type = PyTuple_GET_ITEM(api, 1);
  const PyObject* parameter_type = PyTuple_GET_ITEM(api, 2);
  if (!PyList_Check(items)) {
    PyErr_SetString(PyExc_TypeError, "scan: expected a list");
    return -1;
  }
  const Py_ssize_t n = PyList_GET_SIZE(items);
  int64_t others = 0;
  for (Py_ssize_t i = 0; i < n; ++i) {
    TensorRecord& r = out[i];
    r = TensorRecord{};
    r.dtype = -1;
    PyObject* item = PyList_GET_ITEM(items, i);
    if (key) item = PyDict_Check(item) ? PyDict_GetItemWithError(item, key) : nullptr;
    if (PyErr_Occurred()) return -1;
    if (!item || item == Py_None) continue;
    const PyObject* type = reinterpret_cast<const PyObject*>(Py_TYPE(item));
    DLTensor t;
    if ((type != tensor_type && type != parameter_type) || exchange->dltensor_from_py_object_no_sync(item, &t) != 0) {
      PyErr_Clear();  // sparse, conjugated or otherwise without plain strided storage: told apart by the caller
      r.layout = 1;
      ++others;
      continue;
    }
    describe(t, r);
    r.plain = 1;
  }
  return others;
}

}  // namespace mo
