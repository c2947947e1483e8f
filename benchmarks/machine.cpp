// What the processor can do at best: reading memory, and multiplying int8 in registers.
//
//     machine THREADS  ->  "<bytes/s> <int8 operations/s> <instruction>"
//
// A multiply-add counts as two operations. Built for the machine that it runs on (machine.py).

#include <immintrin.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr size_t kBytes = size_t{256} << 20;  // each thread's, beyond what caches keep
constexpr int kRounds = 5;
constexpr int kRepeats = 200000;
volatile int64_t sink;  // keeps the compiler from leaving work out

double Seconds() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

// Memory in large pages, where the system has them.
int64_t* Filled(size_t bytes) {
  void* memory = std::aligned_alloc(size_t{2} << 20, bytes);
  if (memory == nullptr) std::exit(1);
  madvise(memory, bytes, MADV_HUGEPAGE);
  std::memset(memory, 1, bytes);
  return static_cast<int64_t*>(memory);
}

int64_t Sum(const int64_t* data, size_t count) {
  int64_t sums[8] = {};
  for (size_t i = 0; i + 8 <= count; i += 8)
    for (size_t j = 0; j < 8; ++j) sums[j] += data[i + j];
  int64_t total = 0;
  for (int64_t sum : sums) total += sum;
  return total;
}

// Each multiplies int8 in independent chains and returns the operations done.
#if defined(__AMX_INT8__)
constexpr const char* kInstruction = "AMX";
double Int8Products() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) std::exit(1);
  alignas(64) struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  alignas(64) static const int8_t ones[1024] = {1};
  asm volatile("" : : "r"(&config) : "memory");  // GCC 12 lets the next line read 8 bytes only
  _tile_loadconfig(&config);
  _tile_loadd(4, ones, 64);
  _tile_loadd(5, ones, 64);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int i = 0; i < kRepeats; ++i) {
    _tile_dpbssd(0, 4, 5);
    _tile_dpbssd(1, 4, 5);
    _tile_dpbssd(2, 4, 5);
    _tile_dpbssd(3, 4, 5);
  }
  alignas(64) int32_t out[256];
  _tile_stored(0, out, 64);
  sink = out[0];
  _tile_release();
  return 4.0 * kRepeats * 2 * 16 * 16 * 64;
}
#else
constexpr int kChains = 10;
#if defined(__AVX512VNNI__)
constexpr const char* kInstruction = "AVX-512 VNNI";
using Vector = __m512i;
Vector All(char value) { return _mm512_set1_epi8(value); }
Vector Product(Vector sum, Vector a, Vector b) { return _mm512_dpbusd_epi32(sum, a, b); }
#elif defined(__AVXVNNI__)
constexpr const char* kInstruction = "AVX-VNNI";
using Vector = __m256i;
Vector All(char value) { return _mm256_set1_epi8(value); }
Vector Product(Vector sum, Vector a, Vector b) { return _mm256_dpbusd_avx_epi32(sum, a, b); }
#else
constexpr const char* kInstruction = "AVX2";
using Vector = __m256i;
Vector All(char value) { return _mm256_set1_epi8(value); }
Vector Product(Vector sum, Vector a, Vector b) {
  const Vector pairs = _mm256_maddubs_epi16(a, b);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif
double Int8Products() {
  Vector sums[kChains], a = All(1), b = All(2);
  for (Vector& sum : sums) sum = All(0);
  for (int i = 0; i < kRepeats; ++i) {
    for (Vector& sum : sums) sum = Product(sum, a, b);
    asm volatile("" : "+x"(a), "+x"(b));
  }
  for (const Vector& sum : sums) sink = *reinterpret_cast<const int32_t*>(&sum);
  return 1.0 * kRepeats * kChains * sizeof(Vector) * 2;
}
#endif

// The best rate of several rounds in which every thread does `work`.
template <class Work>
double BestRate(int threads, Work work) {
  double best = 0;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<double> done(threads);
    std::vector<std::thread> running;
    const double began = Seconds();
    for (int i = 0; i < threads; ++i) running.emplace_back([&, i] { done[i] = work(i); });
    for (std::thread& thread : running) thread.join();
    const double seconds = Seconds() - began;
    double all = 0;
    for (double part : done) all += part;
    if (all / seconds > best) best = all / seconds;
  }
  return best;
}

}  // namespace

int main(int count, char** arguments) {
  const int threads = count > 1 ? std::atoi(arguments[1]) : 1;
  std::vector<int64_t*> data;
  for (int i = 0; i < threads; ++i) data.push_back(Filled(kBytes));
  const double bandwidth = BestRate(threads, [&](int i) {
    sink = Sum(data[i], kBytes / sizeof(int64_t));
    return double(kBytes);
  });
  const double products = BestRate(threads, [](int) { return Int8Products(); });
  std::printf("%.6g %.6g %s\n", bandwidth, products, kInstruction);
}
