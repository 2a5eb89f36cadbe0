// bf16 and fp16 to float and back: every pattern, every place where rounding decides, in scalar and in vector code of
// every instruction set, against exact arithmetic (storage.h). Also the square roots of csrc/cpu/lanes.h.
#include <cmath>
#include <memory>
#include <vector>

#include "check.h"
#include "isa.h"
#include "lanes_kernel.h"
#include "storage.h"

namespace mo {
namespace base {
extern const lanes_test::Table lanes_table;
}
#if defined(MO_HAVE_AVX2)
namespace avx2 {
extern const lanes_test::Table lanes_table;
}
#endif
#if defined(MO_HAVE_AVX512)
namespace avx512 {
extern const lanes_test::Table lanes_table;
}
#endif
}  // namespace mo

namespace {

using lanes_test::Table;
using storage::bits_as;
using storage::Format;

const Format kFormats[2] = {storage::kBfloat16, storage::kHalf};
const char* const kNames[2] = {"bf16", "fp16"};

std::vector<const Table*> tables() {
  std::vector<const Table*> there{&mo::base::lanes_table};
#if defined(MO_HAVE_AVX2)
  if (mo::runs_avx2()) there.push_back(&mo::avx2::lanes_table);
#endif
#if defined(MO_HAVE_AVX512)
  if (mo::runs_avx512()) there.push_back(&mo::avx512::lanes_table);
#endif
  return there;
}

// Floats on, just beside and halfway between neighbouring numbers of a 16-bit format: all the places where rounding has
// to decide, overflow and underflow among them. Then patterns spread over all floats, NaNs included.
std::vector<float> rounding_cases(const Format& f) {
  std::vector<float> cases;
  const auto both_signs = [&](float x) {
    cases.push_back(x);
    cases.push_back(-x);
  };
  const auto around = [&](float x) {
    both_signs(x);
    both_signs(std::nextafter(x, 0.0f));
    both_signs(std::nextafter(x, INFINITY));
  };
  const uint16_t infinity = uint16_t(((1 << (16 - f.precision)) - 1) << (f.precision - 1));
  for (int bits = 0; bits < infinity; ++bits) {
    const double low = storage::decode(uint16_t(bits), f);
    // Beyond the largest number the grid goes on as if there were one more exponent.
    const double beyond = std::ldexp(1.0, f.max_exponent + 1);
    const double high = bits + 1 < infinity ? storage::decode(uint16_t(bits + 1), f) : beyond;
    around(float(low));
    if (float((low + high) / 2) < INFINITY) around(float((low + high) / 2));
    around(float(low + (high - low) / 4));
    around(float(low + (high - low) * 3 / 4));
  }
  for (uint64_t u = 0; u < (uint64_t(1) << 32); u += 4093) cases.push_back(bits_as<float>(uint32_t(u)));
  for (uint32_t u : {0x7f800000u, 0xff800000u, 0x7f800001u, 0xff800001u, 0x7fbfffffu, 0x7fc00000u, 0x7fffffffu,
                     0xffffffffu, 0x7f7fffffu, 0xff7fffffu, 0x00000001u, 0x80000001u, 0x007fffffu, 0x00800000u,
                     0x33000000u, 0x33000001u}) {
    cases.push_back(bits_as<float>(u));
  }
  while (cases.size() % 64) cases.push_back(0.0f);  // whole vectors of every width
  return cases;
}

bool is_nan16(uint16_t bits, const Format& f) { return std::isnan(storage::decode(bits, f)); }

void test_widen(const Table& t, int format) {
  const Format& f = kFormats[format];
  std::vector<uint16_t> patterns(65536);
  for (int i = 0; i < 65536; ++i) patterns[size_t(i)] = uint16_t(i);
  std::vector<float> got(65536);
  const auto check_all = [&](const char* form) {
    for (int i = 0; i < 65536; ++i) {
      const double want = storage::decode(uint16_t(i), f);
      const float x = got[size_t(i)];
      const bool same = want != want ? x != x : bits_as<uint64_t>(double(x)) == bits_as<uint64_t>(want);
      CHECK_SAYS(same, "%s %s %s: 0x%04x gave %a, not %a", t.name, kNames[format], form, unsigned(i), double(x), want);
    }
    std::fill(got.begin(), got.end(), -1.0f);
  };
  t.widen_scalars[format](patterns.data(), got.data(), 65536);
  check_all("scalar");
  t.widen_vectors[format](patterns.data(), got.data(), 65536);
  check_all("vector");
  t.widen_any[format](patterns.data(), got.data(), 65536);
  check_all("span");
  if (format == 0) {
    t.widen_pairs(patterns.data(), got.data(), 65536);
    check_all("pairs");
  }
}

void test_narrow(const Table& t, int format, const std::vector<float>& cases, const std::vector<uint16_t>& want) {
  const Format& f = kFormats[format];
  const int64_t n = int64_t(cases.size());
  std::vector<uint16_t> got(cases.size());
  const auto check_all = [&](const char* form) {
    for (size_t i = 0; i < cases.size(); ++i) {
      // Pairs are stored without a look for NaN: the kernels only ever hand over NaNs whose lower half is zero.
      if (form[0] == 'p' && cases[i] != cases[i] && (bits_as<uint32_t>(cases[i]) & 0xffff)) continue;
      const bool same = is_nan16(want[i], f) ? is_nan16(got[i], f) : got[i] == want[i];
      CHECK_SAYS(same, "%s %s %s: %a (0x%08x) gave 0x%04x, not 0x%04x", t.name, kNames[format], form, double(cases[i]),
                 bits_as<uint32_t>(cases[i]), unsigned(got[i]), unsigned(want[i]));
    }
    std::fill(got.begin(), got.end(), uint16_t(0x1234));
  };
  t.narrow_scalars[format](cases.data(), got.data(), n);
  check_all("scalar");
  t.narrow_vectors[format](cases.data(), got.data(), n);
  check_all("vector");
  t.narrow_any[format](cases.data(), got.data(), n);
  check_all("span");
  if (format == 0) {
    t.narrow_pairs(cases.data(), got.data(), n);
    check_all("pairs");
  }
  std::vector<float> kept(cases.size());
  t.stored[format](cases.data(), kept.data(), n);
  for (size_t i = 0; i < cases.size(); ++i) {
    const double value = storage::decode(want[i], f);
    const double x = double(kept[i]);
    const bool same = value != value ? x != x : bits_as<uint64_t>(x) == bits_as<uint64_t>(value);
    CHECK_SAYS(same, "%s %s stored_value: %a gave %a, not %a", t.name, kNames[format], double(cases[i]), x, value);
  }
}

// Spans of every length up to several vectors, from addresses that only the element type aligns, in allocations that
// end with the span, so that the address sanitizer sees one element too many.
void test_spans(const Table& t, int format) {
  for (int64_t n = 0; n <= 70; ++n) {
    for (int64_t shift = 0; shift < 2; ++shift) {
      const std::unique_ptr<uint16_t[]> half(new uint16_t[size_t(n + shift)]);
      const std::unique_ptr<float[]> wide(new float[size_t(n + shift)]);
      const std::unique_ptr<uint16_t[]> back(new uint16_t[size_t(n + shift)]);
      for (int64_t i = 0; i < n; ++i) half[size_t(shift + i)] = uint16_t(0x3c00 + 7 * i);
      t.widen_any[format](half.get() + shift, wide.get() + shift, n);
      t.narrow_any[format](wide.get() + shift, back.get() + shift, n);
      for (int64_t i = shift; i < n + shift; ++i) {
        CHECK(double(wide[size_t(i)]) == storage::decode(half[size_t(i)], kFormats[format]));
        CHECK(back[size_t(i)] == half[size_t(i)]);
      }
    }
  }
}

void test_roots(const Table& t) {
  // Squares (exact), their neighbours, denormals and patterns over the whole range; IEEE says which bits come out.
  std::vector<float> narrow{0.0f, -0.0f, INFINITY, NAN, -1.0f, -INFINITY, 1e-45f, 1.17549421e-38f, 3.40282347e38f};
  std::vector<double> wide{0.0, -0.0, INFINITY, NAN, -1.0, -INFINITY, 5e-324, 2.2250738585072009e-308,
                           1.7976931348623157e308};
  for (uint64_t u = 1; u < 0x7f800000u; u += 20011) narrow.push_back(bits_as<float>(uint32_t(u)));
  for (int k = 1; k < 4096; ++k) narrow.push_back(float(k * k));
  for (uint64_t k = 0; k < 100000; ++k) wide.push_back(bits_as<double>(k * 92233720368547ull + k * k));
  while (narrow.size() % 64) narrow.push_back(2.0f);
  while (wide.size() % 64) wide.push_back(2.0);
  std::vector<float> roots(narrow.size());
  t.root_f32(narrow.data(), roots.data(), int64_t(narrow.size()));
  for (size_t i = 0; i < narrow.size(); ++i) {
    // A double has more than twice the digits: rounding its root once more gives the correctly rounded float.
    const float want = float(std::sqrt(double(narrow[i])));
    CHECK_SAYS(want != want ? roots[i] != roots[i] : bits_as<uint32_t>(roots[i]) == bits_as<uint32_t>(want),
               "%s root of %a: %a, not %a", t.name, double(narrow[i]), double(roots[i]), double(want));
  }
  std::vector<double> wide_roots(wide.size());
  t.root_f64(wide.data(), wide_roots.data(), int64_t(wide.size()));
  for (size_t i = 0; i < wide.size(); ++i) {
    const double want = std::sqrt(wide[i]);
    const double root = wide_roots[i];
    CHECK_SAYS(want != want ? root != root : bits_as<uint64_t>(root) == bits_as<uint64_t>(want),
               "%s root of %a: %a, not %a", t.name, wide[i], root, want);
  }
}

// The oracle itself, where the answer is known by heart.
void test_oracle() {
  CHECK(storage::decode(0x3f80, storage::kBfloat16) == 1.0);
  CHECK(storage::decode(0x0001, storage::kBfloat16) == std::ldexp(1.0, -133));
  CHECK(storage::decode(0x7bff, storage::kHalf) == 65504.0);
  CHECK(storage::decode(0x0001, storage::kHalf) == std::ldexp(1.0, -24));
  CHECK(storage::encode(65519.996, storage::kHalf) == 0x7bff);
  CHECK(storage::encode(65520.0, storage::kHalf) == 0x7c00);
  CHECK(storage::encode(std::ldexp(1.0, -25), storage::kHalf) == 0x0000);  // a tie, to even
  CHECK(storage::encode(std::ldexp(3.0, -25), storage::kHalf) == 0x0002);
  CHECK(storage::encode(-1.00390625, storage::kBfloat16) == 0xbf80);  // a tie, to even
  CHECK(storage::encode(1.01171875, storage::kBfloat16) == 0x3f82);
  CHECK(storage::encode(3.4e38, storage::kBfloat16) == 0x7f80);
}

}  // namespace

int main() {
  test_oracle();
  isa::names(1);  // says what is left out
  for (int format = 0; format < 2; ++format) {
    const std::vector<float> cases = rounding_cases(kFormats[format]);
    std::vector<uint16_t> want(cases.size());
    for (size_t i = 0; i < cases.size(); ++i) want[i] = storage::encode(double(cases[i]), kFormats[format]);
    for (const Table* t : tables()) {
      test_widen(*t, format);
      test_narrow(*t, format, cases, want);
      test_spans(*t, format);
    }
  }
  for (const Table* t : tables()) test_roots(*t);
  return check::report("narrow_test");
}
