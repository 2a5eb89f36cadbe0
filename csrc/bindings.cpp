// The Python border: addresses and plain numbers in, nothing but native calls behind. The only file that knows pybind11.
#include <pybind11/pybind11.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "abi.h"
#include "cpu/kernels.h"
#include "cpu/step.h"
#include "scan.h"
#if defined(MO_HAVE_CUDA)
#include "cuda/step.h"
#endif

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
  d["DeviceChunk"] = sizeof(mo::DeviceChunk);
  d["Settings"] = sizeof(mo::Settings);
  d["DeviceScalars"] = sizeof(mo::DeviceScalars);
  d["DeviceStep"] = sizeof(mo::DeviceStep);
  d["Factored"] = sizeof(mo::Factored);
  d["Tile"] = sizeof(mo::Tile);
  d["stat_columns"] = int(mo::kStatColumns);
  d["TensorRecord"] = sizeof(mo::TensorRecord);
  d["chunk_elements"] = mo::kChunk;
  d["max_dims"] = mo::kMaxDims;
  return d;
}

void cpu_step(uint64_t table) {
  py::gil_scoped_release nogil;
  mo::run_step(*reinterpret_cast<const mo::StepTable*>(table));
}

#if defined(MO_HAVE_CUDA)
void cuda_step(uint64_t step) {
  const char* error = mo::run_device_step(*reinterpret_cast<const mo::DeviceStep*>(step));
  if (error) throw std::runtime_error(std::string("CUDA refused a launch of mo_fused: ") + error);
}

py::tuple cuda_versions() {
  const mo::CudaVersions v = mo::cuda_versions();
  return py::make_tuple(v.runtime, v.driver, v.shim);
}
#endif

int64_t checked(int64_t others) {
  if (others < 0) throw py::error_already_set();
  return others;
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
#if defined(MO_HAVE_CUDA)
  m.def("cuda_step", &cuda_step, py::arg("step"), "Launches the phases that the DeviceStep at this address asks for.");
  m.def("cuda_versions", &cuda_versions, "(runtime of the build, what the driver supports or 0, test shim or not)");
#endif
  m.def(
      "scan",
      [](const py::tuple& api, const py::list& items, uint64_t out) {
        return checked(mo::scan(api.ptr(), items.ptr(), reinterpret_cast<mo::TensorRecord*>(out)));
      },
      py::arg("api"), py::arg("items"), py::arg("out"),
      "Writes a TensorRecord for each tensor of the list; returns how many are neither None nor plain.");
  m.def(
      "refresh_rows",
      [](const py::tuple& api, const py::list& params, const py::list& states, const py::tuple& keys, bool has_step,
         const py::list& grads, uint64_t seen, uint64_t flags, uint64_t places, uint64_t rows) {
        return checked(mo::refresh_rows(api.ptr(), params.ptr(), states.ptr(), keys.ptr(), has_step, grads.ptr(),
                                        reinterpret_cast<const uint64_t*>(seen),
                                        reinterpret_cast<const int32_t*>(flags),
                                        reinterpret_cast<const int32_t*>(places), reinterpret_cast<mo::Row*>(rows)));
      },
      py::arg("api"), py::arg("params"), py::arg("states"), py::arg("keys"), py::arg("has_step"), py::arg("grads"),
      py::arg("seen"), py::arg("flags"), py::arg("places"), py::arg("rows"),
      "Writes the present addresses of all rows; sums of 1: more than addresses changed, 2: a gradient is not contiguous, 4: one is missing.");
  m.def(
      "same_items", [](const py::list& a, const py::list& b) { return mo::same_items(a.ptr(), b.ptr()); }, py::arg("a"),
      py::arg("b"), "Whether two lists hold the same objects.");
}
