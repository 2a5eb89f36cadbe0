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
  // One element is always contiguous, also of a lazily negated view: it is not said here, so that Python looks closer.
  r.contiguous = numel == 0 || (contiguous && numel > 1);
}

// What scan and scan_rows need of Python, taken apart once a call.
struct Exchange {
  const DLPackExchangeAPI* api;
  const PyObject* tensor_type;
  const PyObject* parameter_type;
  const PyObject* dtensor_type;  // or None: nobody has imported it

  explicit Exchange(PyObject* tuple)
      : api(static_cast<const DLPackExchangeAPI*>(
            PyCapsule_GetPointer(PyTuple_GET_ITEM(tuple, 0), "dlpack_exchange_api"))),
        tensor_type(PyTuple_GET_ITEM(tuple, 1)),
        parameter_type(PyTuple_GET_ITEM(tuple, 2)),
        dtensor_type(PyTuple_GET_ITEM(tuple, 3)) {}

  bool is_tensor(const PyObject* item) const {
    const PyObject* type = reinterpret_cast<const PyObject*>(Py_TYPE(item));
    return type == tensor_type || type == parameter_type;
  }

  // Returns 1 for an item that is neither None (null here) nor plain. A DTensor is looked at as its local tensor, which
  // it keeps alive.
  int64_t record(PyObject* item, TensorRecord& r) const {
    static PyObject* const local_name = PyUnicode_InternFromString("_local_tensor");
    r = TensorRecord{};
    r.dtype = -1;
    if (!item || item == Py_None) return 0;
    if (reinterpret_cast<const PyObject*>(Py_TYPE(item)) == dtensor_type) {
      item = PyObject_GetAttr(item, local_name);
      if (item) Py_DECREF(item);
    }
    DLTensor t;
    if (!item || !is_tensor(item) || api->dltensor_from_py_object_no_sync(item, &t) != 0) {
      PyErr_Clear();  // sparse, conjugated or otherwise without plain strided storage: told apart by the caller
      r.layout = 1;
      return 1;
    }
    describe(t, r);
    r.plain = 1;
    return 0;
  }
};

uint64_t& address_in(Row& row, int32_t place) {
  return place == kMaster ? row.master : place >= kOperands ? row.scale[place - kOperands] : row.state[place - kState0];
}

}  // namespace

int64_t scan(PyObject* api, PyObject* items, TensorRecord* out) {
  const Exchange exchange(api);
  if (!exchange.api) return -1;
  const Py_ssize_t n = PyList_GET_SIZE(items);
  int64_t others = 0;
  for (Py_ssize_t i = 0; i < n; ++i) others += exchange.record(PyList_GET_ITEM(items, i), out[i]);
  return others;
}

int64_t refresh_rows(PyObject* api, PyObject* params, PyObject* states, PyObject* keys, bool has_step, PyObject* grads,
                     const uint64_t* seen, const int32_t* flags, const int32_t* places, Row* rows) {
  const Exchange exchange(api);
  if (!exchange.api) return -1;
  static PyObject* const grad_name = PyUnicode_InternFromString("grad");
  const Py_ssize_t n = PyList_GET_SIZE(params);
  const Py_ssize_t n_keys = PyTuple_GET_SIZE(keys);
  const Py_ssize_t slots = n_keys - (has_step ? 1 : 0);
  if (PyList_GET_SIZE(states) != n || PyList_GET_SIZE(grads) != n) {
    PyErr_SetString(PyExc_ValueError, "refresh_rows: expected lists of one length");
    return -1;
  }
  int64_t result = 0;
  TensorRecord r;
  for (Py_ssize_t i = 0; i < n; ++i) {
    Row& row = rows[i];
    PyObject* param = PyList_GET_ITEM(params, i);
    exchange.record(param, r);
    if (r.layout != seen[i]) return kRowsChanged;
    row.param = r.address;

    PyObject* grad = PyList_GET_ITEM(grads, i);  // one that is given, or the parameter's
    if (grad == Py_None) {
      grad = PyObject_GetAttr(param, grad_name);
      if (!grad) return -1;
      PyList_SetItem(grads, i, grad);  // takes the reference
    }
    exchange.record(grad, r);
    if (r.layout != 0 && r.layout != seen[n + i]) return kRowsChanged;
    row.grad = r.address;
    row.flags = flags[i] | (r.layout != 0 ? kActive : 0);
    if (r.layout == 0) {
      result |= kMissingGradient;
    } else if (!r.contiguous) {
      result |= kStridedGradient;
    }

    PyObject* state = PyList_GET_ITEM(states, i);
    for (Py_ssize_t k = 0; k < n_keys; ++k) {
      const uint64_t expected = seen[(2 + k) * n + i];
      if (expected == 0) continue;  // this row has no such slot
      PyObject* item = PyDict_GetItemWithError(state, PyTuple_GET_ITEM(keys, k));
      if (!item && PyErr_Occurred()) return -1;
      exchange.record(item, r);
      if (r.layout != expected) return kRowsChanged;
      (k >= slots ? row.step : address_in(row, places[k])) = r.address;
    }
  }
  return result;
}

bool same_items(PyObject* a, PyObject* b) {
  const Py_ssize_t n = PyList_GET_SIZE(a);
  if (PyList_GET_SIZE(b) != n) return false;
  for (Py_ssize_t i = 0; i < n; ++i) {
    if (PyList_GET_ITEM(a, i) != PyList_GET_ITEM(b, i)) return false;
  }
  return true;
}

}  // namespace mo
