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

// Random bits of the elements from `first` on, a vector at a time and one at a time. The upper half of the index is the
// same for all of a chunk's elements, which lie between two multiples of kChunk.
class Draws {
 public:
  Draws(uint64_t key, int64_t first) : key_(key), first_(uint64_t(first)) {}
  MO_RULE u32v vector(int64_t i) const {
    u32v scaled;
    memcpy(&scaled, kScaledLanes, sizeof scaled);
    return draw_scaled(u32v(scaled + (uint32_t(first_) + uint32_t(i)) * kIndexScale), uint32_t(first_ >> 32), key_);
  }
  MO_RULE uint32_t one(int64_t i) const {
    return draw(uint32_t(first_) + uint32_t(i), uint32_t(first_ >> 32), key_);
  }

 private:
  uint64_t key_, first_;
};

}  // namespace
}  // namespace MO_ISA
}  // namespace mo
