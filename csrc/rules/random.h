// Counter-based random numbers: a function of a key and an element's index, so that they do not depend on threads, chunks or
// backends, and a run that is resumed goes on with the same ones. The mixing functions are David Stafford's variant 13 of
// the splitmix64 finalizer (Steele, Lea & Flood 2014) and a 32-bit one of the same form, whose shifts and multipliers
// (16 21f0aaad 15 735a2d97 15) were found with github.com/skeeto/hash-prospector (issue 19). The second half of the key
// goes in between its two rounds: all 64 bits of the key count, and two keys do not give one sequence in two orders.
#pragma once

#include <cstdint>

#include "rules/portable.h"

namespace mo {
namespace MO_ISA {

MO_RULE uint64_t mix64(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// The key of one slot of one parameter in one step. `stream` comes from the seed and the parameter's position.
MO_RULE uint64_t step_key(uint64_t stream, int64_t step, uint64_t slot) {
  return mix64(mix64(stream + slot * 0x9e3779b97f4a7c15ull) + uint64_t(step) * 0xd1342543de82ef95ull);
}

// 32 random bits for element `index`. U: uint32_t, or a vector of it, and so is H or one number for all of a vector; `low`
// and `high` are the halves of the index.
// `scaled`: low * kIndexScale, which a vector of consecutive elements has from its first one's with an addition.
constexpr uint32_t kIndexScale = 0x9e3779b1u;
template <class U, class H>
MO_RULE U draw_scaled(U scaled, H high, uint64_t key) {
  U x = scaled ^ (uint32_t(key) + high * 0x85ebca77u);
  x ^= x >> 16;
  x *= 0x21f0aaadu;
  x ^= x >> 15;
  x += uint32_t(key >> 32);
  x *= 0x735a2d97u;
  return x ^ (x >> 15);
}
template <class U>
MO_RULE U draw(U low, uint32_t high, uint64_t key) {
  return draw_scaled(U(low * kIndexScale), high, key);
}

}  // namespace MO_ISA
}  // namespace mo
