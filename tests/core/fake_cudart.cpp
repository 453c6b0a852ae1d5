// Stands in for libcudart (LD_PRELOAD) so that the real caching allocator of torch's CUDA build runs without a GPU.
//
// Device memory is host memory, every call is synchronous, there are no kernels: a test may allocate, free and copy, it
// may not compute. FAKE_CUDA_CAPACITY is the size of the device in bytes. Only what allocation, copies, streams and
// events need is here; everything else still reaches the real library, which reports that there is no driver. Built
// with the soname libcuda.so.1, it also is the driver that torch opens to ask whether a context exists.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace {
size_t capacity() {
  const char* text = std::getenv("FAKE_CUDA_CAPACITY");
  return text ? std::strtoull(text, nullptr, 10) : size_t{256} << 20;
}
std::mutex lock;
std::unordered_map<void*, size_t> blocks;
size_t used = 0;
std::atomic<uintptr_t> next_stream{0x1000};
thread_local cudaError_t last_error = cudaSuccess;

struct Mark {
  std::chrono::steady_clock::time_point at;
};
cudaError_t fail(cudaError_t error) { return last_error = error; }
}  // namespace

#undef cudaGetDeviceProperties
extern "C" {
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : fail(cudaErrorInvalidDevice); }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 1, cudaSuccess; }

// The struct is laid out as in the headers this file was compiled with. torch reads mostly its beginning.
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::memset(properties, 0, sizeof *properties);
  std::snprintf(properties->name, sizeof properties->name, "fake device");
  properties->totalGlobalMem = capacity();
  properties->major = 9;
  properties->warpSize = 32;
  properties->multiProcessorCount = 1;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties_v2(cudaDeviceProp* properties, int device) {
  return cudaGetDeviceProperties(properties, device);
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  std::lock_guard<std::mutex> guard(lock);
  *total = capacity();
  *free_bytes = *total - used;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** address, size_t nbytes) {
  std::lock_guard<std::mutex> guard(lock);
  if (nbytes > capacity() - used) return fail(cudaErrorMemoryAllocation);
  *address = std::aligned_alloc(512, (nbytes + 511) / 512 * 512);
  if (!*address) return fail(cudaErrorMemoryAllocation);
  blocks[*address] = nbytes;
  used += nbytes;
  return cudaSuccess;
}
cudaError_t cudaFree(void* address) {
  std::lock_guard<std::mutex> guard(lock);
  const auto found = blocks.find(address);
  if (found == blocks.end()) return address ? fail(cudaErrorInvalidValue) : cudaSuccess;
  used -= found->second;
  std::memset(address, 0xDB, found->second);  // a read after this shows
  blocks.erase(found);
  std::free(address);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t nbytes, cudaMemcpyKind) {
  return std::memcpy(to, from, nbytes), cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t nbytes, cudaMemcpyKind, cudaStream_t) {
  return std::memcpy(to, from, nbytes), cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t nbytes, cudaStream_t) {
  return std::memset(to, value, nbytes), cudaSuccess;
}
cudaError_t cudaHostRegister(void* address, size_t nbytes, unsigned int) {
  return address && nbytes ? cudaSuccess : fail(cudaErrorInvalidValue);
}
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int, int) {
  return *stream = reinterpret_cast<cudaStream_t>(next_stream += 16), cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned int) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  return *event = reinterpret_cast<cudaEvent_t>(new Mark{}), cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete reinterpret_cast<Mark*>(event), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  return reinterpret_cast<Mark*>(event)->at = std::chrono::steady_clock::now(), cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  const auto between = reinterpret_cast<Mark*>(end)->at - reinterpret_cast<Mark*>(start)->at;
  return *ms = std::chrono::duration<float, std::milli>(between).count(), cudaSuccess;
}
cudaError_t cudaEventElapsedTime_v2(float* ms, cudaEvent_t start, cudaEvent_t end) {
  return cudaEventElapsedTime(ms, start, end);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned int* flags, int* active) {
  return *flags = 0, *active = 1, CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) { return *text = "not in the fake driver", CUDA_SUCCESS; }
}
