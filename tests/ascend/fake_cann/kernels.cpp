// The few operators that the fake NPU can compute (libopapi.so): elementwise ones, products of matrices, sums, casts.
//
// As in CANN an operator is two functions: aclnnXGetWorkspaceSize prepares, aclnnX queues on a stream. The work reads
// its operands only when its turn comes. An operator that is not here does not exist, none succeeds silently.
#include "device.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

struct aclTensor {
  aclDataType type;
  std::vector<int64_t> dims, strides;  // in elements
  int64_t offset;
  char* memory;  // of the storage

  int64_t numel() const { return std::accumulate(dims.begin(), dims.end(), int64_t{1}, std::multiplies<>()); }
  bool dense() const {
    int64_t expected = 1;
    for (size_t i = dims.size(); i-- > 0; expected *= dims[i])
      if (dims[i] != 1 && strides[i] != expected) return false;
    return true;
  }
};
struct aclScalar {
  double real;
  int64_t whole;
  bool is_real;

  template <class T>
  T as() const {
    return is_real ? static_cast<T>(real) : static_cast<T>(whole);
  }
};
struct aclIntArray {
  std::vector<int64_t> values;
};
struct aclOpExecutor {
  std::function<void()> work;
};

namespace {

// Calls `function` with a value of the C++ type of `type`.
template <class Function>
void with_type(aclDataType type, Function function) {
  switch (type) {
    case ACL_FLOAT: return function(float{});
    case ACL_DOUBLE: return function(double{});
    case ACL_BOOL:
    case ACL_UINT8: return function(uint8_t{});
    case ACL_INT8: return function(int8_t{});
    case ACL_INT16: return function(int16_t{});
    case ACL_INT32: return function(int32_t{});
    case ACL_INT64: return function(int64_t{});
    default: std::fprintf(stderr, "fake CANN: no kernels for data type %d\n", type), std::abort();
  }
}

// Where element `flat` of a result with `dims` comes from, under broadcasting.
int64_t position(const aclTensor& operand, const std::vector<int64_t>& dims, int64_t flat) {
  int64_t found = operand.offset;
  const auto extra = static_cast<int64_t>(dims.size()) - static_cast<int64_t>(operand.dims.size());
  for (auto i = static_cast<int64_t>(dims.size()) - 1; i >= 0; --i) {
    const int64_t at = flat % dims[i];
    flat /= dims[i];
    if (i >= extra && operand.dims[i - extra] != 1) found += at * operand.strides[i - extra];
  }
  return found;
}

template <class T>
T& at(const aclTensor& tensor, int64_t place) {
  return reinterpret_cast<T*>(tensor.memory)[place];
}

template <class T>
T value(const aclTensor& operand, const std::vector<int64_t>& dims, int64_t flat) {
  const int64_t place = position(operand, dims, flat);
  T found{};
  if (operand.type == ACL_FLOAT && std::is_same_v<T, float>) return static_cast<T>(at<float>(operand, place));
  with_type(operand.type, [&](auto type) { found = static_cast<T>(at<decltype(type)>(operand, place)); });
  return found;
}

// `function` of a vector of the operands' values, in the type of the result.
template <class Function>
void pointwise(const aclTensor& out, const std::vector<aclTensor>& in, Function function) {
  with_type(out.type, [&](auto type) {
    using T = decltype(type);
    std::vector<T> values(in.size());
    bool straight = out.dense();
    for (const auto& operand : in)
      straight = straight && operand.type == out.type && operand.dims == out.dims && operand.dense();
    const int64_t count = out.numel();
    for (int64_t i = 0; i < count; ++i) {
      for (size_t k = 0; k < in.size(); ++k)
        values[k] = straight ? at<T>(in[k], in[k].offset + i) : value<T>(in[k], out.dims, i);
      at<T>(out, straight ? out.offset + i : position(out, out.dims, i)) = static_cast<T>(function(values));
    }
  });
}

int prepare(aclOpExecutor** executor, uint64_t* workspace, std::vector<aclTensor> used, std::function<void()> work) {
  for (const auto& tensor : used) fake::note_operand(tensor.memory);
  *workspace = 0;
  *executor = new aclOpExecutor{std::move(work)};
  return 0;
}

int launch(aclOpExecutor* executor, aclrtStream stream) {
  fake::enqueue(stream, [work = std::move(executor->work)] {
    fake::kernel_time();
    work();
  });
  delete executor;
  return 0;
}

void product(const aclTensor& a, const aclTensor& b, const aclTensor& out) {
  const int64_t rows = out.dims[0], columns = out.dims[1], inner = a.dims[1];
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      float sum = 0;
      for (int64_t k = 0; k < inner; ++k)
        sum += at<float>(a, a.offset + i * a.strides[0] + k * a.strides[1]) *
               at<float>(b, b.offset + k * b.strides[0] + j * b.strides[1]);
      at<float>(out, out.offset + i * out.strides[0] + j * out.strides[1]) = sum;
    }
}

void sum(const aclTensor& in, const aclTensor& out, double scale) {
  if (out.numel() != 1) std::fprintf(stderr, "fake CANN: sums over everything only\n"), std::abort();
  double total = 0;
  for (int64_t i = 0; i < in.numel(); ++i) total += value<double>(in, in.dims, i);
  with_type(out.type, [&](auto type) { at<decltype(type)>(out, out.offset) = static_cast<decltype(type)>(total * scale); });
}

}  // namespace

// ---- operands
EXPORT aclTensor* aclCreateTensor(
    const int64_t* dims, uint64_t count, aclDataType type, const int64_t* strides, int64_t offset, aclFormat,
    const int64_t*, uint64_t, void* memory) {
  return new aclTensor{type, {dims, dims + count}, {strides, strides + count}, offset, static_cast<char*>(memory)};
}
EXPORT int aclDestroyTensor(const aclTensor* tensor) { return delete tensor, 0; }
EXPORT aclScalar* aclCreateScalar(void* value, aclDataType type) {
  auto* scalar = new aclScalar{0, 0, type == ACL_FLOAT || type == ACL_DOUBLE};
  with_type(type, [&](auto kind) {
    const auto given = *static_cast<decltype(kind)*>(value);
    scalar->real = static_cast<double>(given);
    scalar->whole = static_cast<int64_t>(given);
  });
  return scalar;
}
EXPORT int aclDestroyScalar(const aclScalar* scalar) { return delete scalar, 0; }
EXPORT aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t count) {
  return new aclIntArray{{values, values + count}};
}
EXPORT int aclDestroyIntArray(const aclIntArray* array) { return delete array, 0; }

// ---- operators. Scalars are values of the operand's type by the time they are used.
#define OPERATOR(name, parameters, used, work)                                                             \
  EXPORT int name##GetWorkspaceSize parameters { return prepare(executor, workspace, used, work); }        \
  EXPORT int name(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) { return launch(executor, stream); }
#define END uint64_t *workspace, aclOpExecutor **executor
#define LIST(...) (std::vector<aclTensor>{__VA_ARGS__})
#define V const auto& v
using T_ = const aclTensor*;
using S_ = const aclScalar*;

#define BINARY(name, expression)                                                                           \
  OPERATOR(name, (T_ a, T_ b, T_ out, END), LIST(*a, *b, *out),                                            \
           ([a = *a, b = *b, out = *out] { pointwise(out, {a, b}, [](V) { return expression; }); }))
#define BINARY_INPLACE(name, expression)                                                                   \
  OPERATOR(name, (T_ a, T_ b, END), LIST(*a, *b),                                                          \
           ([a = *a, b = *b] { pointwise(a, {a, b}, [](V) { return expression; }); }))
#define WITH_SCALAR(name, expression)                                                                      \
  OPERATOR(name, (T_ a, S_ s, T_ out, END), LIST(*a, *out), ([a = *a, s = *s, out = *out] {                \
             pointwise(out, {a}, [&](V) { const auto x = s.as<std::decay_t<decltype(v[0])>>(); return expression; }); \
           }))
#define WITH_SCALAR_INPLACE(name, expression)                                                              \
  OPERATOR(name, (T_ a, S_ s, END), LIST(*a), ([a = *a, s = *s] {                                          \
             pointwise(a, {a}, [&](V) { const auto x = s.as<std::decay_t<decltype(v[0])>>(); return expression; }); \
           }))
#define UNARY(name, expression)                                                                            \
  OPERATOR(name, (T_ a, T_ out, END), LIST(*a, *out),                                                      \
           ([a = *a, out = *out] { pointwise(out, {a}, [](V) { return expression; }); }))

BINARY(aclnnMul, v[0] * v[1])
BINARY_INPLACE(aclnnInplaceMul, v[0] * v[1])
WITH_SCALAR(aclnnMuls, v[0] * x)
WITH_SCALAR_INPLACE(aclnnInplaceMuls, v[0] * x)
BINARY(aclnnDiv, v[0] / v[1])
BINARY_INPLACE(aclnnInplaceDiv, v[0] / v[1])
WITH_SCALAR(aclnnDivs, v[0] / x)
WITH_SCALAR_INPLACE(aclnnInplaceDivs, v[0] / x)
BINARY(aclnnTanhBackward, v[0] * (1 - v[1] * v[1]))
BINARY_INPLACE(aclnnInplaceCopy, v[1])
UNARY(aclnnTanh, std::tanh(v[0]))
UNARY(aclnnSqrt, std::sqrt(v[0]))
UNARY(aclnnNeg, -v[0])
WITH_SCALAR(aclnnPowTensorScalar, std::pow(v[0], x))
WITH_SCALAR_INPLACE(aclnnInplaceFillScalar, x)
OPERATOR(aclnnInplaceZero, (T_ a, END), LIST(*a), ([a = *a] { pointwise(a, {}, [](V) { return 0; }); }))
OPERATOR(aclnnInplaceOne, (T_ a, END), LIST(*a), ([a = *a] { pointwise(a, {}, [](V) { return 1; }); }))
OPERATOR(aclnnCast, (T_ a, aclDataType, T_ out, END), LIST(*a, *out),
         ([a = *a, out = *out] { pointwise(out, {a}, [](V) { return v[0]; }); }))

// a + alpha * b, and so on
#define SCALED(name, operation)                                                                            \
  OPERATOR(aclnn##name, (T_ a, T_ b, S_ alpha, T_ out, END), LIST(*a, *b, *out),                           \
           ([a = *a, b = *b, s = *alpha, out = *out] {                                                     \
             pointwise(out, {a, b}, [&](V) { return v[0] operation s.as<std::decay_t<decltype(v[0])>>() * v[1]; }); \
           }))                                                                                             \
  OPERATOR(aclnnInplace##name, (T_ a, T_ b, S_ alpha, END), LIST(*a, *b), ([a = *a, b = *b, s = *alpha] {  \
             pointwise(a, {a, b}, [&](V) { return v[0] operation s.as<std::decay_t<decltype(v[0])>>() * v[1]; }); \
           }))                                                                                             \
  OPERATOR(aclnn##name##s, (T_ a, S_ b, S_ alpha, T_ out, END), LIST(*a, *out),                            \
           ([a = *a, b = *b, s = *alpha, out = *out] {                                                     \
             pointwise(out, {a}, [&](V) {                                                                  \
               using N = std::decay_t<decltype(v[0])>;                                                     \
               return v[0] operation s.as<N>() * b.as<N>();                                                \
             });                                                                                           \
           }))                                                                                             \
  OPERATOR(aclnnInplace##name##s, (T_ a, S_ b, S_ alpha, END), LIST(*a), ([a = *a, b = *b, s = *alpha] {   \
             pointwise(a, {a}, [&](V) {                                                                    \
               using N = std::decay_t<decltype(v[0])>;                                                     \
               return v[0] operation s.as<N>() * b.as<N>();                                                \
             });                                                                                           \
           }))
SCALED(Add, +)
SCALED(Sub, -)

#define ADDC(name, operation)                                                                              \
  OPERATOR(aclnn##name, (T_ a, T_ b, T_ c, S_ scale, T_ out, END), LIST(*a, *b, *c, *out),                 \
           ([a = *a, b = *b, c = *c, s = *scale, out = *out] {                                             \
             pointwise(out, {a, b, c},                                                                     \
                       [&](V) { return v[0] + s.as<std::decay_t<decltype(v[0])>>() * v[1] operation v[2]; }); \
           }))                                                                                             \
  OPERATOR(aclnnInplace##name, (T_ a, T_ b, T_ c, S_ scale, END), LIST(*a, *b, *c),                        \
           ([a = *a, b = *b, c = *c, s = *scale] {                                                         \
             pointwise(a, {a, b, c},                                                                       \
                       [&](V) { return v[0] + s.as<std::decay_t<decltype(v[0])>>() * v[1] operation v[2]; }); \
           }))
ADDC(Addcmul, *)
ADDC(Addcdiv, /)

OPERATOR(aclnnLerps, (T_ a, T_ b, S_ weight, T_ out, END), LIST(*a, *b, *out),
         ([a = *a, b = *b, s = *weight, out = *out] {
           pointwise(out, {a, b}, [&](V) { return v[0] + s.as<std::decay_t<decltype(v[0])>>() * (v[1] - v[0]); });
         }))
OPERATOR(aclnnInplaceLerps, (T_ a, T_ b, S_ weight, END), LIST(*a, *b), ([a = *a, b = *b, s = *weight] {
           pointwise(a, {a, b}, [&](V) { return v[0] + s.as<std::decay_t<decltype(v[0])>>() * (v[1] - v[0]); });
         }))
OPERATOR(aclnnMatmul, (T_ a, T_ b, T_ out, int8_t, END), LIST(*a, *b, *out),
         ([a = *a, b = *b, out = *out] { product(a, b, out); }))
OPERATOR(aclnnMm, (T_ a, T_ b, T_ out, int8_t, END), LIST(*a, *b, *out),
         ([a = *a, b = *b, out = *out] { product(a, b, out); }))
OPERATOR(aclnnReduceSum, (T_ a, const aclIntArray*, bool, aclDataType, T_ out, END), LIST(*a, *out),
         ([a = *a, out = *out] { sum(a, out, 1.0); }))
OPERATOR(aclnnMean, (T_ a, const aclIntArray*, bool, aclDataType, T_ out, END), LIST(*a, *out),
         ([a = *a, out = *out] { sum(a, out, 1.0 / static_cast<double>(a.numel())); }))

// The older way to run operators. That torch_npu takes it means that one is missing above. (An error would not do: with
// the task queue it is only said later, and by then everything has become a success that does nothing.)
EXPORT aclError aclopCompileAndExecute(const char* type) {
  std::fprintf(stderr, "fake CANN: there is no operator for %s\n", type);
  std::abort();
}
EXPORT aclError aclopCompileAndExecuteV2(const char* type) { return aclopCompileAndExecute(type); }
EXPORT aclError aclSetCompileopt(int, const char*) { return 0; }
EXPORT aclError aclrtCtxSetSysParamOpt(aclSysParamOpt, int64_t) { return 0; }
EXPORT aclError aclrtSetSysParamOpt(aclSysParamOpt, int64_t) { return 0; }
EXPORT aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t* value) { return *value = 0, 0; }
