// The vector code of csrc/cpu/lanes.h and csrc/cpu/span.h as functions over arrays, one table per instruction set.
#pragma once

#include <cstdint>

namespace lanes_test {

struct Table {
  const char* name;
  int width;  // elements of a float vector: `n` is a multiple of twice this where nothing else is said
  // [0] bf16, [1] fp16, stored as their 16 bits.
  void (*widen_vectors[2])(const uint16_t* from, float* to, int64_t n);
  void (*narrow_vectors[2])(const float* from, uint16_t* to, int64_t n);
  void (*widen_scalars[2])(const uint16_t* from, float* to, int64_t n);
  void (*narrow_scalars[2])(const float* from, uint16_t* to, int64_t n);
  void (*widen_any[2])(const uint16_t* from, float* to, int64_t n);  // any n
  void (*narrow_any[2])(const float* from, uint16_t* to, int64_t n);
  void (*stored[2])(const float* from, float* to, int64_t n);
  // bf16 only: to[i] are the elements in sequence again, however the two vectors hold them.
  void (*widen_pairs)(const uint16_t* from, float* to, int64_t n);
  void (*narrow_pairs)(const float* from, uint16_t* to, int64_t n);
  void (*root_f32)(const float* from, float* to, int64_t n);
  void (*root_f64)(const double* from, double* to, int64_t n);
};

}  // namespace lanes_test
