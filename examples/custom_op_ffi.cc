// RMS norm over the last dim as an XLA FFI handler: y = x / sqrt(mean(x^2) + eps).

#include <cmath>
#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error RmsNormRows(float eps, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  auto dims = x.dimensions();
  if (dims.size() == 0) return ffi::Error::InvalidArgument("x needs a dim to normalize over");
  const int64_t n = dims.back();
  const int64_t rows = n == 0 ? 0 : x.element_count() / n;
  for (int64_t row = 0; row < rows; ++row) {
    const float* in = x.typed_data() + row * n;
    float* out = y->typed_data() + row * n;
    float sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += in[i] * in[i];
    const float scale = 1.0f / std::sqrt(sum / n + eps);
    for (int64_t i = 0; i < n; ++i) out[i] = in[i] * scale;
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(RmsNorm, RmsNormRows,
                              ffi::Ffi::Bind()
                                  .Attr<float>("eps")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
