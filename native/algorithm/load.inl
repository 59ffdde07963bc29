// Loads rows of any strides and type as fp32, and packs them by lane. After common.inl.

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
  if (size < 0x38800000) {                       // subnormal: an fp32 addition does the rounding
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
  for (; i + N <= count && Vec::store_as_half(to + i, Vec::load(from + i), type); i += N) {
  }
  for (; i < count; ++i) to[i] = to_half(from[i], type);
}

inline const char* at(const View& view, Type type, int64_t batch, int64_t head, int64_t position) {
  const int64_t size = type == Type::f32 ? 4 : 2;
  return view.data + (batch * view.batch + head * view.head + position * view.position) * size;
}

template <int write>
inline void prefetch_lines(const char* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, write, 2);
}

template <int write>
inline void prefetch_row(const View& view, Type type, int64_t batch, int64_t head, int64_t position, int64_t width) {
  prefetch_lines<write>(at(view, type, batch, head, position), width * (type == Type::f32 ? 4 : 2));
}

// Rows as fp32: in place, or converted into `scratch`.
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
  const int64_t whole = rows / N * N;
  for (int64_t i = 0; i < whole; i += N) {
    int64_t j = 0;
    for (; j + N <= columns; j += N) {
      const float* corner = from + i * from_stride + j;
      Vec::transpose([=](int k) { return Vec::load(corner + k * from_stride); }, to + j * to_stride + i, to_stride);
    }
    for (; j < columns; ++j)
      for (int64_t r = i; r < i + N; ++r) to[j * to_stride + r] = from[r * from_stride + j];
  }
  for (int64_t i = whole; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) to[j * to_stride + i] = from[i * from_stride + j];
}

// The same for multiples of N rows and columns, where from(i, j) is the vector of columns from j on of row i.
template <class From>
void transpose_whole(int64_t rows, int64_t columns, From from, float* to, int64_t to_stride) {
  for (int64_t i = 0; i < rows; i += N)
    for (int64_t j = 0; j < columns; j += N)
      Vec::transpose([=](int k) { return from(i + k, j); }, to + j * to_stride + i, to_stride);
}

// packed[i][lane] = sign * query[lane][i]; the lanes from `count` on repeat the last query
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

// The same for bf16: packed[i][lane] = the features 2 i and 2 i + 1 of query[lane] as one 32-bit number.
void pack_pairs(const View& view, Type type, int64_t batch, int64_t head, int64_t first, int64_t count, int64_t lanes,
                int64_t width, float sign, void* scratch, uint32_t* packed) {
  const char* from = at(view, type, batch, head, first);
  int64_t stride = view.position;
  if (stride % 2 || (uintptr_t)from % sizeof(uint32_t)) {
    for (int64_t r = 0; r < count; ++r)
      std::memcpy((uint16_t*)scratch + r * width, (const uint16_t*)from + r * stride, sizeof(uint16_t) * width);
    from = (const char*)scratch, stride = width;
  }
  transpose((const float*)from, stride / 2, count, width / 2, (float*)packed, lanes);  // only moves bits
  for (int64_t i = 0; i < width / 2; ++i) {
    uint32_t* row = packed + i * lanes;
    for (int64_t lane = count; lane < lanes; ++lane) row[lane] = row[count - 1];
    for (int64_t lane = 0; sign < 0 && lane < lanes; ++lane) row[lane] ^= 0x80008000;
  }
}

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
