// The product with the embedding table, as XLA calls it.
#include "table.h"

#include <algorithm>

#include "parallel.h"
#include "workspace.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace grok1 {
namespace {

using Floats = ffi::Buffer<ffi::F32>;

constexpr int64_t kStrip = 192;  // rows of the table that one task multiplies

#define GROK1_CHECK(condition) \
  if (!(condition)) return ffi::Error::InvalidArgument("native kernel: not so: " #condition)

// x [rows, depth], table [V, depth] float32 with no scales or int8 with scales [V] -> [rows, V].
ffi::Error MultiplyTable(ffi::ThreadPool pool, Floats x, ffi::AnyBuffer weight, Floats scales,
                        ffi::Result<Floats> out) {
  const auto shape = weight.dimensions();
  GROK1_CHECK(x.dimensions().size() == 2 && shape.size() == 2);
  GROK1_CHECK(x.dimensions()[1] == shape[1] && out->dimensions().size() == 2);
  GROK1_CHECK(out->dimensions()[0] == x.dimensions()[0] && out->dimensions()[1] == shape[0]);
  const bool int8 = weight.element_type() == ffi::S8;
  GROK1_CHECK(int8 || weight.element_type() == ffi::F32);
  GROK1_CHECK(static_cast<int64_t>(scales.element_count()) == (int8 ? shape[0] : 0));
  const Table table{weight.untyped_data(), int8 ? scales.typed_data() : nullptr, shape[0],
                    shape[1]};
  const int64_t rows = x.dimensions()[0];
  const TableProduct& product = BestTableProduct(table);
  Workspace workspace;
  void* const packed = workspace.AtLeast(product.packed_bytes(rows, table.depth));
  product.pack(x.typed_data(), rows, table.depth, packed);
  Parallel(pool).For((table.rows + kStrip - 1) / kStrip, [&](int64_t task) {
    const int64_t first = task * kStrip;
    const int64_t count = std::min(kStrip, table.rows - first);
    product.multiply(packed, rows, table, first, count, out->typed_data());
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace grok1

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* Grok1TableProduct(
    XLA_FFI_CallFrame* call);

XLA_FFI_DEFINE_HANDLER_SYMBOL(Grok1TableProduct, grok1::MultiplyTable,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<grok1::Floats>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<grok1::Floats>()
                                  .Ret<grok1::Floats>());
