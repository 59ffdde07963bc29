// Rows in any strides and types as fp32, and numbers packed by lane. After common.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

inline float half_to_float(uint16_t x, Type type) {
  float result[N];
  uint16_t copies[N] = {x};
  Vec::store(result, Vec::load_as_float(copies, type));
  return result[0];
}

void to_float(const uint16_t* from, int64_t count, Type type, float* to) {
  int64_t i = 0;
  for (; i + N <= count; i += N) Vec::store(to + i, Vec::load_as_float(from + i, type));
  for (; i < count; ++i) to[i] = half_to_float(from[i], type);
}

inline uint16_t to_half(float x, Type type) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (type == Type::bf16) {
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
  const uint16_t sign = (bits >> 16) & 0x8000;
  const uint32_t size = bits & 0x7fffffff;
  if (size > 0x7f800000) return sign | 0x7e00;
  if (size >= 0x477ff000) return sign | 0x7c00;  // 65520 and above round to infinity
  if (size < 0x38800000) {                       // subnormal: let fp32 addition do the rounding
    float magnitude;
    std::memcpy(&magnitude, &size, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return sign | (uint16_t)(bits - 0x3f000000);
  }
  return sign | (uint16_t)((size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13);
}

void to_halves(const float* from, int64_t count, Type type, uint16_t* to) {
  int64_t i = 0;
  for (; i + N <= count && Vec::store_as_half(to + i, Vec::load(from + i), type); i += N) {}
  for (; i < count; ++i) to[i] = to_half(from[i], type);
}

inline const char* at(const View& view, Type type, int64_t batch, int64_t head, int64_t position) {
  const int64_t size = type == Type::f32 ? 4 : 2;
  return view.data + (batch * view.batch + head * view.head + position * view.position) * size;
}

template <int write>
inline void expect_row(const View& view, Type type, int64_t batch, int64_t head, int64_t position, int64_t width) {
  const char* row = at(view, type, batch, head, position);
  const int64_t bytes = width * (type == Type::f32 ? 4 : 2);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, write, 2);
}

// Rows of K or V as fp32: where they lie, or converted into `scratch`.
struct Rows {
  const float* data;
  int64_t stride;
};

inline Rows float_rows(const View& view, Type type, int64_t batch, int64_t head, int64_t first, int64_t count,
                       int64_t width, float* scratch) {
  const char* from = at(view, type, batch, head, first);
  if (type == Type::f32) return {(const float*)from, view.position};
  for (int64_t r = 0; r < count; ++r)
    to_float((const uint16_t*)from + r * view.position, width, type, scratch + r * width);
  return {scratch, width};
}

// to[j][i] = from[i][j] for i < rows, j < columns
void transpose(const float* from, int64_t from_stride, int64_t rows, int64_t columns, float* to, int64_t to_stride) {
  int64_t i = 0;
  for (; i + N <= rows; i += N) {
    int64_t j = 0;
    for (; j + N <= columns; j += N) Vec::transpose(from + i * from_stride + j, from_stride, to + j * to_stride + i, to_stride);
    for (; j < columns; ++j)
      for (int64_t r = i; r < i + N; ++r) to[j * to_stride + r] = from[r * from_stride + j];
  }
  for (; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) to[j * to_stride + i] = from[i * from_stride + j];
}

// packed[i][lane] = sign * query[lane][i]; lanes past `count` repeat the last query
void pack_floats(const View& view, Type type, int64_t batch, int64_t head, int64_t first, int64_t count, int64_t lanes,
                 int64_t width, float sign, float* scratch, float* packed) {
  const Rows rows = float_rows(view, type, batch, head, first, count, width, scratch);
  transpose(rows.data, rows.stride, count, width, packed, lanes);
  for (int64_t i = 0; i < width; ++i) {
    float* row = packed + i * lanes;
    for (int64_t lane = count; lane < lanes; ++lane) row[lane] = row[count - 1];
    for (int64_t lane = 0; sign < 0 && lane < lanes; ++lane) row[lane] = -row[lane];
  }
}

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
