// Between Adafactor's second and third pass: the step size of each row, from the sums over its tiles.
// Formula: rules/adafactor.h, size_adafactor; double, the tiles in an order that depends on their number alone.
// Reference: mo_fused/reference.py, AdafactorScalars.sized.
// Bytes: 16 read a tile; 128 read and 16 written a row.
// Assumes of the table: row scalars prepared by the finish, both sums of every tile; one block for a row.
#include "cuda/tile.cuh"

namespace mo {
namespace {

__global__ void __launch_bounds__(kThreads) sizes_kernel(const DeviceStep s) {
  if (was_skipped(s)) return;
  const Row& row = as<const Row>(s.rows)[blockIdx.x];
  if (!(row.flags & kActive)) return;
  double update = 0.0, param = 0.0;
  for (int64_t c = row.first_chunk + threadIdx.x; c < row.first_chunk + row.chunks; c += kThreads) {
    update += as<const double>(s.update_sums)[c];
    param += as<const double>(s.param_sums)[c];
  }
  update = block_reduce(update, Add());
  param = block_reduce(param, Add());
  if (threadIdx.x != 0) return;
  RowScalars& scalars = as<DeviceScalars>(s.scalars)[blockIdx.x].scalars;
  const Factored& f = factored_of(row);
  if (f.whole) {
    update = as<const double>(f.whole)[0];
    param = as<const double>(f.whole)[1];
  }
  MO_ISA::size_adafactor(settings_of(s, row).hyper, double(f.whole_numel), update, param, scalars);
}

}  // namespace

cudaError_t launch_sizes(const DeviceStep& s, cudaStream_t stream) {
  if (s.n_rows == 0) return cudaSuccess;
  MO_LAUNCH(sizes_kernel, int(s.n_rows), kThreads, stream, s);
  return launched();
}

}  // namespace mo
