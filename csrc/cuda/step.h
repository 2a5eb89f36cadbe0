// A step on a device: what bindings.cpp calls. No CUDA header is needed to include it.
#pragma once

#include "abi.h"

namespace mo {

// Further DevicePhases: what comes before Adafactor's update. Factors and sizes are made of all rows at once, whatever
// their compute type; the others have a launch for each.
enum AdafactorPhase : int32_t { kDeviceFactors = 64, kDeviceFactoredRms = 128, kDeviceSizes = 256 };

// Launches the phases that `step` asks for on its device and stream, and waits for nothing. Null, or what CUDA said.
const char* run_device_step(const DeviceStep& step);

struct CudaVersions {
  int runtime;  // what this library was built with, as 1000 * major + 10 * minor
  int driver;   // what the installed driver supports; 0: there is none
  bool shim;    // the kernels run on the CPU, for the tests
};
CudaVersions cuda_versions();

}  // namespace mo
