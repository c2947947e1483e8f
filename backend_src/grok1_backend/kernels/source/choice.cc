// What of the arithmetic this CPU can run, and of that the best.
#include <cstdlib>
#include <string_view>

#include "compute.h"
#include "integer.h"
#include "table.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace grok1 {

const Compute& ComputeBase();
#if defined(__x86_64__)
const Compute& ComputeAvx2();
const Compute& ComputeAvx512();
const Products& IntegerAvxVnni();
const Products& IntegerVnni();
const Products& IntegerAmx();
#endif

const TableProduct& FloatTableBase();
#if defined(__x86_64__)
const TableProduct& FloatTableAvx2();
const TableProduct& FloatTableAvx512();
const TableProduct& IntegerTableVnni();
const TableProduct& IntegerTableAmx();
#endif

namespace {

// GROK1_NATIVE_KERNELS=base, avx2, avxvnni, avx512 or vnni takes less than the CPU has: the tests try
// each.
std::string_view Named() {
  const char* const named = std::getenv("GROK1_NATIVE_KERNELS");
  return named ? named : "";
}

#if defined(__x86_64__)
bool HasAvx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool HasVnni() {
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni");
}

// Not all compilers know these by name.
bool HasAvxVnni() {
  unsigned a, b, c, d;
  return HasAvx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

bool HasAmx() {
  unsigned a, b, c, d;
  if (!HasVnni() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kTile = 1u << 24, kTileInt8 = 1u << 25;
  if (!(d & kTile) || !(d & kTileInt8)) return false;
  // Linux gives a process the tile registers when it asks for them.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

const Compute& ChooseCompute() {
#if defined(__x86_64__)
  const std::string_view most = Named();
  if (most == "base") return ComputeBase();
  const bool wide = most != "avx2" && most != "avxvnni";
  if (wide && __builtin_cpu_supports("avx512f")) return ComputeAvx512();
  if (HasAvx2()) return ComputeAvx2();
#endif
  return ComputeBase();
}

const Products* ChooseInteger() {
#if defined(__x86_64__)
  const std::string_view most = Named();
  if (most == "base" || most == "avx2" || most == "avx512") return nullptr;
  if (most != "avxvnni") {
    if (most != "vnni" && HasAmx()) return &IntegerAmx();
    if (HasVnni()) return &IntegerVnni();
  }
  if (HasAvxVnni()) return &IntegerAvxVnni();
#endif
  return nullptr;
}

}  // namespace

const Compute& BestCompute() {
  static const Compute& best = ChooseCompute();
  return best;
}

const Products* BestInteger() {
  static const Products* const best = ChooseInteger();
  return best;
}

const Products& BestProducts(const Matrix& weight) {
  const bool integer = weight.storage == Storage::kInt8 && BestInteger() &&
                       weight.depth / weight.groups <= kMaxIntegerDepth;
  return integer ? *BestInteger() : BestCompute().products;
}

const TableProduct& BestTableProduct(const Table& table) {
#if defined(__x86_64__)
  if (table.scales && BestInteger() && table.depth <= kMaxIntegerDepth) {
    if (BestInteger() == &IntegerAmx()) return IntegerTableAmx();
    if (BestInteger() == &IntegerVnni()) return IntegerTableVnni();
  }
  if (&BestCompute() == &ComputeAvx512()) return FloatTableAvx512();
  if (&BestCompute() == &ComputeAvx2()) return FloatTableAvx2();
#endif
  return FloatTableBase();
}

}  // namespace grok1
