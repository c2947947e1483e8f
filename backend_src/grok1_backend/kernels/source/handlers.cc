// What XLA calls: arguments are checked here, so that a wrong one is an error and not a crash.
#include <algorithm>
#include <vector>

#include "blocks.h"
#include "compute.h"
#include "experts.h"
#include "parallel.h"
#include "products.h"
#include "workspace.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace grok1 {

namespace {

using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;

#define GROK1_CHECK(condition) \
  if (!(condition)) return ffi::Error::InvalidArgument("native kernel: not so: " #condition)

Storage StorageOf(bool int8) { return int8 ? Storage::kInt8 : Storage::kFloat32; }

// A stack [layers, (experts,) depth, columns], in rows or `blocked`, and its scales, or an empty
// array for none.
ffi::Error ReadStack(const ffi::AnyBuffer& weight, const ffi::AnyBuffer& scales, int64_t layer,
                     bool blocked, Stack& stack) {
  const auto shape = weight.dimensions();
  GROK1_CHECK(shape.size() == 3 || shape.size() == 4);
  GROK1_CHECK(layer >= 0 && layer < shape[0]);
  const bool int8 = weight.element_type() == ffi::S8;
  GROK1_CHECK(int8 || weight.element_type() == ffi::F32);
  const int64_t experts = shape.size() == 4 ? shape[1] : 1;
  const int64_t rows = shape[shape.size() - 2];
  const int64_t columns = shape.back();
  Matrix& first = stack.first;
  first.storage = StorageOf(int8);
  first.depth = rows;
  first.columns = columns;
  first.scales = nullptr;
  first.scales_bfloat16 = scales.element_type() == ffi::BF16;
  first.groups = 1;
  stack.scale_bytes = first.scales_bfloat16 ? 2 : 4;
  first.data = static_cast<const char*>(weight.untyped_data()) + layer * experts * stack.Bytes();
  if (int8) {
    GROK1_CHECK(first.scales_bfloat16 || scales.element_type() == ffi::F32);
    const auto of_scales = scales.dimensions();
    GROK1_CHECK(of_scales.size() == shape.size());
    for (size_t i = 0; i < shape.size(); ++i) {
      GROK1_CHECK(i == shape.size() - 2 || of_scales[i] == shape[i]);
    }
    first.groups = of_scales[shape.size() - 2];
    GROK1_CHECK(first.groups > 0 && rows % first.groups == 0);
    first.scales = static_cast<const char*>(scales.untyped_data()) +
                   layer * experts * first.groups * columns * stack.scale_bytes;
  }
  first.quad = blocked ? QuadOf(first.storage, rows, first.groups) : 0;
  GROK1_CHECK(!blocked || first.quad);
  return ffi::Error::Success();
}

#define GROK1_RETURN_IF_ERROR(expression) \
  if (ffi::Error error = (expression); error.failure()) return error

// x [rows, width], experts and gates [rows, selected], valid [rows], layer [], the stacks
// linear and linear_v [layers, experts, width, ffn size] and linear_1 [layers, experts, ffn size,
// width] with scales -> out [rows, width].
ffi::Error Experts(ffi::ThreadPool pool, Floats x, Ints experts, Floats gates,
                   ffi::Buffer<ffi::PRED> valid, Ints layer, ffi::AnyBuffer linear,
                   ffi::AnyBuffer linear_scales, ffi::AnyBuffer linear_v,
                   ffi::AnyBuffer linear_v_scales, ffi::AnyBuffer linear_1,
                   ffi::AnyBuffer linear_1_scales, ffi::Result<Floats> out, bool blocked) {
  GROK1_CHECK(x.dimensions().size() == 2 && experts.dimensions().size() == 2);
  GROK1_CHECK(layer.element_count() == 1);
  ExpertStep step;
  step.rows = x.dimensions()[0];
  step.selected = experts.dimensions()[1];
  const int64_t width = x.dimensions()[1];
  const int64_t at = layer.typed_data()[0];
  GROK1_RETURN_IF_ERROR(ReadStack(linear, linear_scales, at, blocked, step.linear));
  GROK1_RETURN_IF_ERROR(ReadStack(linear_v, linear_v_scales, at, blocked, step.linear_v));
  GROK1_RETURN_IF_ERROR(ReadStack(linear_1, linear_1_scales, at, blocked, step.linear_1));
  GROK1_CHECK(linear.dimensions().size() == 4 && linear_1.dimensions().size() == 4);
  GROK1_CHECK(linear.dimensions() == linear_v.dimensions());
  step.num_experts = linear.dimensions()[1];
  const int64_t ffn = step.linear.first.columns;
  GROK1_CHECK(step.linear.first.depth == width && linear_1.dimensions()[1] == step.num_experts);
  GROK1_CHECK(step.linear_1.first.depth == ffn && step.linear_1.first.columns == width);
  GROK1_CHECK(experts.dimensions()[0] == step.rows && gates.dimensions() == experts.dimensions());
  GROK1_CHECK(static_cast<int64_t>(valid.element_count()) == step.rows);
  GROK1_CHECK(out->dimensions() == x.dimensions());
  step.x = x.typed_data();
  step.experts = experts.typed_data();
  step.gates = gates.typed_data();
  step.valid = valid.typed_data();
  step.out = out->typed_data();
  Parallel parallel(pool);
  ComputeExperts(step, parallel);
  return ffi::Error::Success();
}

// x [rows, depth], layer [], then for each product a stack [layers, depth, columns] and
// its scales -> each [rows, columns].
ffi::Error ProductsOf(ffi::ThreadPool pool, Floats x, Ints layer, ffi::RemainingArgs weights,
                      ffi::RemainingRets outs, bool blocked) {
  GROK1_CHECK(x.dimensions().size() == 2 && layer.element_count() == 1);
  GROK1_CHECK(weights.size() == 2 * outs.size());
  const int64_t rows = x.dimensions()[0];
  const int64_t depth = x.dimensions()[1];
  std::vector<Product> products;
  for (size_t i = 0; i < outs.size(); ++i) {
    const auto weight = weights.get<ffi::AnyBuffer>(2 * i);
    const auto scales = weights.get<ffi::AnyBuffer>(2 * i + 1);
    auto out = outs.get<Floats>(i);
    GROK1_CHECK(weight.has_value() && scales.has_value() && out.has_value());
    GROK1_CHECK(weight->dimensions().size() == 3);
    Stack stack;
    GROK1_RETURN_IF_ERROR(ReadStack(*weight, *scales, layer.typed_data()[0], blocked, stack));
    GROK1_CHECK(stack.first.depth == depth && (*out)->dimensions().size() == 2);
    GROK1_CHECK((*out)->dimensions()[0] == rows);
    GROK1_CHECK((*out)->dimensions()[1] == stack.first.columns);
    products.push_back({stack.first, (*out)->typed_data()});
  }
  Parallel parallel(pool);
  ComputeProducts(x.typed_data(), rows, products, parallel);
  return ffi::Error::Success();
}

// KV heads that one task takes where each row has one token, and time is that of reading: as many as
// keep a block in the second cache and leave each thread something to do.
int64_t HeadsTogether(int64_t kv_heads, int64_t size, int64_t rows, const Parallel& parallel) {
  constexpr int64_t kFloats = 256;
  int64_t heads = kv_heads;
  while (heads > 1 && (kv_heads % heads || heads * size > kFloats ||
                       rows * kv_heads / heads < parallel.threads())) {
    --heads;
  }
  return heads;
}

// queries [batch, length, heads, size], keys and values [layers, pages, page size, KV heads, size],
// layer [], block table [batch, width], positions [batch, length], lengths [batch] -> outputs as
// queries; 0 for tokens beyond a row's length.
ffi::Error Attention(ffi::ThreadPool pool, Floats queries, Floats keys, Floats values, Ints layer,
                     Ints table, Ints positions, Ints lengths, ffi::Result<Floats> outputs,
                     float multiplier, float cap) {
  GROK1_CHECK(queries.dimensions().size() == 4 && keys.dimensions().size() == 5);
  GROK1_CHECK(layer.element_count() == 1 && table.dimensions().size() == 2);
  const auto shape = queries.dimensions();
  const auto paged = keys.dimensions();
  const int64_t batch = shape[0], length = shape[1], heads = shape[2], size = shape[3];
  const int64_t pages = paged[1], page_size = paged[2], kv_heads = paged[3];
  const int64_t width = table.dimensions()[1];
  const int64_t at = layer.typed_data()[0];
  GROK1_CHECK(values.dimensions() == paged && outputs->dimensions() == shape);
  GROK1_CHECK(at >= 0 && at < paged[0] && pages > 0 && page_size > 0 && width > 0);
  GROK1_CHECK(kv_heads > 0 && heads % kv_heads == 0 && paged[4] == size && size > 0);
  GROK1_CHECK(table.dimensions()[0] == batch && heads / kv_heads <= kMaxAttention);
  GROK1_CHECK(static_cast<int64_t>(positions.element_count()) == batch * length);
  GROK1_CHECK(static_cast<int64_t>(lengths.element_count()) == batch && cap > 0);

  std::vector<int32_t> safe(table.typed_data(), table.typed_data() + table.element_count());
  for (int32_t& page : safe) page = std::clamp<int32_t>(page, 0, pages - 1);
  const Compute& compute = BestCompute();
  const int64_t group = heads / kv_heads;
  const int64_t tokens = std::max<int64_t>(1, kMaxAttention / 2 / group);
  const int64_t tiles = (length + tokens - 1) / tokens;
  Parallel parallel(pool);
  const int64_t heads_of_task = length > 1 ? 1 : HeadsTogether(kv_heads, size, batch, parallel);
  const int64_t parts = kv_heads / heads_of_task;
  AttentionRows common;
  common.queries = queries.typed_data();
  common.outputs = outputs->typed_data();
  common.head_stride = group * size;
  common.heads = heads_of_task;
  common.page_size = page_size;
  common.position_stride = kv_heads * size;
  common.page_stride = page_size * common.position_stride;
  common.size = size;
  common.multiplier = multiplier;
  common.cap = cap;
  const int64_t scratch =
      compute.attend_scratch(size, heads_of_task) * static_cast<int64_t>(sizeof(float));
  parallel.For(tiles * batch * parts, [&](int64_t task) {
    const int64_t head = task % parts * heads_of_task;
    const int64_t row = task / parts % batch;
    // The last tokens see most: they go first, so that the threads end together.
    const int64_t first = (tiles - 1 - task / parts / batch) * tokens;
    int64_t offsets[kMaxAttention];
    int64_t seen[kMaxAttention];
    AttentionRows rows = common;
    rows.rows = 0;
    for (int64_t t = first; t < std::min(first + tokens, length); ++t) {
      const int64_t position = positions.typed_data()[row * length + t];
      const int64_t start = ((row * length + t) * heads + head * group) * size;
      if (t >= lengths.typed_data()[row]) {
        std::fill_n(common.outputs + start, heads_of_task * group * size, 0.0f);
        continue;
      }
      for (int64_t h = 0; h < group; ++h) {
        offsets[rows.rows] = start + h * size;
        seen[rows.rows++] = std::clamp<int64_t>(position + 1, 1, width * page_size);
      }
    }
    if (rows.rows == 0) return;
    const int64_t start = at * pages * common.page_stride + head * size;
    rows.offsets = offsets;
    rows.lengths = seen;
    rows.keys = keys.typed_data() + start;
    rows.values = values.typed_data() + start;
    rows.pages = safe.data() + row * width;
    compute.attend(rows, reinterpret_cast<float*>(ThreadMemory(scratch)));
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace grok1

#define GROK1_EXPORT extern "C" __attribute__((visibility("default")))

GROK1_EXPORT XLA_FFI_Error* Grok1Experts(XLA_FFI_CallFrame* call);
GROK1_EXPORT XLA_FFI_Error* Grok1Products(XLA_FFI_CallFrame* call);
GROK1_EXPORT XLA_FFI_Error* Grok1Attention(XLA_FFI_CallFrame* call);

XLA_FFI_DEFINE_HANDLER_SYMBOL(Grok1Experts, grok1::Experts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<grok1::Floats>()
                                  .Arg<grok1::Ints>()
                                  .Arg<grok1::Floats>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<grok1::Ints>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<grok1::Floats>()
                                  .Attr<bool>("blocked"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(Grok1Products, grok1::ProductsOf,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<grok1::Floats>()
                                  .Arg<grok1::Ints>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<bool>("blocked"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(Grok1Attention, grok1::Attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<grok1::Floats>()
                                  .Arg<grok1::Floats>()
                                  .Arg<grok1::Floats>()
                                  .Arg<grok1::Ints>()
                                  .Arg<grok1::Ints>()
                                  .Arg<grok1::Ints>()
                                  .Arg<grok1::Ints>()
                                  .Ret<grok1::Floats>()
                                  .Attr<float>("multiplier")
                                  .Attr<float>("cap"));

// Whether products take weights of such a depth, in groups that share scales, in blocks.
GROK1_EXPORT bool grok1_takes_blocks(bool int8, int64_t depth, int64_t groups) {
  return grok1::QuadOf(grok1::StorageOf(int8), depth, groups);
}

// Brings matrices [count, depth, columns] to blocks, each in place.
GROK1_EXPORT void grok1_to_blocks(void* data, bool int8, int64_t count, int64_t depth,
                                  int64_t columns, int64_t groups) {
  const grok1::Storage storage = grok1::StorageOf(int8);
  const int64_t bytes = depth * columns * grok1::ItemBytes(storage);
  for (int64_t i = 0; i < count; ++i) {
    grok1::ToBlocks(static_cast<char*>(data) + i * bytes, storage, depth, columns, groups);
  }
}

// [expert rows, weight bytes] since the library was loaded.
GROK1_EXPORT void grok1_counters(int64_t* counters) {
  const grok1::Counters read = grok1::ReadCounters();
  counters[0] = read.expert_rows;
  counters[1] = read.weight_bytes;
}
