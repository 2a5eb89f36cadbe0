// Addresses and layouts of many tensors in one call.
//
// A step has to notice a changed p.data, gradient or state tensor, so it looks at every tensor every time. Through
// Python's data_ptr(), stride() and size() that costs 0.2 ms per thousand tensors and operand; through the C exchange
// interface that torch publishes on its Tensor type (2.10 and newer) about a tenth.
#pragma once

#include <Python.h>

#include <cstdint>

#include "abi.h"

namespace mo {

struct TensorRecord {
  uint64_t address;
  uint64_t layout;  // hash of dtype, device, sizes and strides; 0: there is no tensor (None)
  int64_t numel;
  int32_t dtype;       // DType, or -1
  int32_t device;      // DLPack device type << 16 | index
  int32_t contiguous;  // 1: row-major without gaps, and not a single element
  int32_t plain;       // 1: exactly torch.Tensor or torch.nn.Parameter (of a DTensor: its local tensor is)
};
static_assert(sizeof(TensorRecord) == 40, "mirrored by mo_fused/table.py");

// `api`: tuple (capsule of the exchange interface, torch.Tensor, torch.nn.Parameter, DTensor or None). On a Python error
// both return -1 with the error set. Types of the arguments are checked in bindings.cpp.

// One record for each tensor of a list; returns the number of items that are neither None nor plain.
int64_t scan(PyObject* api, PyObject* items, TensorRecord* out);

enum RefreshResult : int64_t { kRowsChanged = 1, kStridedGradient = 2, kMissingGradient = 4 };

// Writes the present addresses and flags of all rows, unless something else than an address has changed: then returns
// kRowsChanged at once (the rows have to be planned again). `keys`: names of the state slots, the step last where
// has_step; `places`: for each slot its Operand (kOperands and more: scales of state 0, 1, 2),
// which slots that no row has together may share. `seen`: layout hashes
// that the rows were planned for, [2 + len(keys)][n]: parameters, gradients, keys; 0 for a slot that a row does not
// have. `flags`: RowFlag bits beside kActive. `grads` receives the gradients where it does not give one itself.
int64_t refresh_rows(PyObject* api, PyObject* params, PyObject* states, PyObject* keys, bool has_step, PyObject* grads,
                     const uint64_t* seen, const int32_t* flags, const int32_t* places, Row* rows);

// Whether two lists hold the same objects.
bool same_items(PyObject* a, PyObject* b);

}  // namespace mo
