// The Python border: addresses and plain numbers in, nothing but native calls behind. The only file that knows pybind11.
#include <pybind11/pybind11.h>

#include <cstring>

#include "abi.h"
#include "cpu/kernels.h"
#include "cpu/step.h"
#include "scan.h"

namespace py = pybind11;

namespace {

// Sizes and offsets that mo_fused/table.py checks before the first call.
py::dict abi_sizes() {
  py::dict d;
  d["Row"] = sizeof(mo::Row);
  d["Layout"] = sizeof(mo::Layout);
  d["Chunk"] = sizeof(mo::Chunk);
  d["Hyper"] = sizeof(mo::Hyper);
  d["ChunkStats"] = sizeof(mo::ChunkStats);
  d["RowStats"] = sizeof(mo::RowStats);
  d["Result"] = sizeof(mo::Result);
  d["RowScalars"] = sizeof(mo::RowScalars);
  d["Control"] = sizeof(mo::Control);
  d["StepTable"] = sizeof(mo::StepTable);
  d["TensorRecord"] = sizeof(mo::TensorRecord);
  d["chunk_elements"] = mo::kChunk;
  d["max_dims"] = mo::kMaxDims;
  return d;
}

void cpu_step(uint64_t table) {
  py::gil_scoped_release nogil;
  mo::run_step(*reinterpret_cast<const mo::StepTable*>(table));
}

py::tuple cpu_isa() {
  const char* error = nullptr;
  const char* name = mo::kernels(&error).name;
  return py::make_tuple(name, error ? py::object(py::str(error)) : py::object(py::none()));
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native kernels of mo_fused. Takes addresses of the records in csrc/abi.h; all checks live in Python.";
  m.def("abi", &abi_sizes);
  m.def("cpu_isa", &cpu_isa, "(instruction set in use, error text or None)");
  m.def("cpu_step", &cpu_step, py::arg("table"), "Runs the phases that the StepTable at this address asks for.");
  m.def(
      "scan",
      [](py::handle api, py::handle items, py::object key, uint64_t out) {
        const int64_t others = mo::scan(api.ptr(), items.ptr(), key.is_none() ? nullptr : key.ptr(),
                                        reinterpret_cast<mo::TensorRecord*>(out));
        if (others < 0) throw py::error_already_set();
        return others;
      },
      py::arg("api"), py::arg("items"), py::arg("key"), py::arg("out"),
      "Writes a TensorRecord for each tensor of the list (or for item[key] of each dict); returns how many are not plain.");
}
