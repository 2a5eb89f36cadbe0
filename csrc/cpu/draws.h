// Random bits (rules/random.h) of consecutive elements, a vector at a time.
#pragma once

#include "cpu/lanes.h"
#include "rules/random.h"

namespace mo {
namespace MO_ISA {
namespace {  // each object has its own: see csrc/README.md, no weak symbols

#define MO_LANE(k) (k * kIndexScale)
alignas(64) constexpr uint32_t kScaledLanes[16] = {
    MO_LANE(0), MO_LANE(1), MO_LANE(2),  MO_LANE(3),  MO_LANE(4),  MO_LANE(5),  MO_LANE(6),  MO_LANE(7),
    MO_LANE(8), MO_LANE(9), MO_LANE(10), MO_LANE(11), MO_LANE(12), MO_LANE(13), MO_LANE(14), MO_LANE(15)};
#undef MO_LANE
alignas(64) constexpr uint32_t kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Random bits of the elements from number `first` of the whole tensor on, at most kChunk of them, a vector at a time and
// one at a time. The upper half of the index is the same for all of them, but where its lower half begins anew.
class Draws {
 public:
  Draws(uint64_t key, int64_t first)
      : key_(key), first_(uint64_t(first)), carries_(uint32_t(first) > 0u - uint32_t(kChunk)) {}
  MO_RULE u32v vector(int64_t i) const {
    const uint32_t low = uint32_t(first_) + uint32_t(i), high = uint32_t(first_ >> 32);
    u32v scaled, lanes;
    memcpy(&scaled, kScaledLanes, sizeof scaled);
    scaled += low * kIndexScale;
    if (__builtin_expect(!carries_, 1)) return draw_scaled(scaled, high, key_);
    memcpy(&lanes, kLanes, sizeof lanes);
    const u32v anew = (u32v)(u32v(lanes + low) < uint32_t(first_));  // all ones from there on
    return draw_scaled(scaled, u32v(high - anew), key_);
  }
  MO_RULE uint32_t one(int64_t i) const {
    const uint64_t index = first_ + uint64_t(i);
    return draw(uint32_t(index), uint32_t(index >> 32), key_);
  }

 private:
  uint64_t key_, first_;
  bool carries_;
};

}  // namespace
}  // namespace MO_ISA
}  // namespace mo
