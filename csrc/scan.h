// Addresses and layouts of many tensors in one call.
//
// A step has to notice a changed p.data, gradient or state tensor, so it looks at every tensor every time. Through
// Python's data_ptr(), stride() and size() that costs 0.2 ms per thousand tensors and operand; through the C exchange
// interface that torch publishes on its Tensor type (2.10 and newer) about a tenth.
#pragma once

#include <Python.h>

#include <cstdint>

namespace mo {

struct TensorRecord {
  uint64_t address;
  uint64_t layout;  // hash of dtype, device, sizes and strides; 0: there is no tensor (None)
  int64_t numel;
  int32_t dtype;       // DType, or -1
  int32_t device;      // DLPack device type << 16 | index
  int32_t contiguous;  // 1: row-major without gaps
  int32_t plain;       // 1: exactly torch.Tensor or torch.nn.Parameter
};
static_assert(sizeof(TensorRecord) == 40, "mirrored by mo_fused/table.py");

// `api`: tuple (capsule of the exchange interface, torch.Tensor, torch.nn.Parameter). `items`: list of tensors, or of
// dicts when `key` is given. Writes one record an item and returns the number of items that are neither None nor plain.
// On a Python error returns -1 with the error set.
int64_t scan(PyObject* api, PyObject* items, PyObject* key, TensorRecord* out);

}  // namespace mo
