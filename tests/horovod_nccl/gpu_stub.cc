// Stubs of the CUDA runtime, of NCCL for one rank, and of Horovod's kernels, in host memory.
//
// A communicator that is used after it was freed ends the process with a message. State that
// several threads use is atomic and relaxed, without locks: a lock here would order the
// threads of Horovod, and hide from ThreadSanitizer that Horovod does not.

#include "gpu_stub.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "horovod/common/ops/cuda/cuda_kernels.h"
#include "horovod/common/optim/bayesian_optimization.h"
#include <nccl.h>

template <class T> struct Relaxed {
  std::atomic<T> value{};
  operator T() const { return value.load(std::memory_order_relaxed); }
  T operator=(T other) {
    value.store(other, std::memory_order_relaxed);
    return other;
  }
  T operator++(int) { return value.fetch_add(1, std::memory_order_relaxed); }
  T operator--(int) { return value.fetch_sub(1, std::memory_order_relaxed); }
};

struct Kernel {
  Relaxed<StubComm*> comm;
  Relaxed<bool> ended;
};

constexpr int MOST_KERNELS = 1000;
struct StubStream {
  Relaxed<int> size;
  Kernel kernels[MOST_KERNELS];
};

struct StubEvent {
  StubStream* stream = nullptr;
  int after = 0; // of the stream's kernels
  bool ready() const {
    for (int i = 0; i < after; i++) {
      if (!stream->kernels[i].ended) {
        return false;
      }
    }
    return true;
  }
};

// Never deleted, to detect its use.
struct StubComm {
  Relaxed<bool> freed;
  int memory = 0; // not atomic: ThreadSanitizer reports who frees it while another reads it
};

namespace {
StubStream stream;
Relaxed<bool> held, peer_gone, overlapping;
Relaxed<int> until_failure, all_launched, alive, polling;
Relaxed<unsigned> aborts;

void nap() { std::this_thread::sleep_for(std::chrono::microseconds(100)); }

void check(StubComm* comm, const char* function) {
  if (comm->freed) {
    fprintf(stderr, "%s used a communicator that had been freed\n", function);
    _Exit(3);
  }
}

void wait_for_poll() {
  for (int i = 0; overlapping && polling == 0 && i < 5000; i++) {
    nap();
  }
}

ncclResult_t free_comm(StubComm* comm, const char* function) {
  check(comm, function);
  comm->freed = true;
  comm->memory = 1;
  alive--;
  return ncclSuccess;
}

ncclResult_t launch(const void* from, void* to, size_t bytes, StubComm* comm) {
  check(comm, "a collective");
  if (until_failure != 0 && until_failure-- == 1) {
    peer_gone = true;
    wait_for_poll();
  }
  if (peer_gone) {
    return ncclRemoteError;
  }
  int i = stream.size;
  if (i == MOST_KERNELS) {
    abort();
  }
  if (from != to && from != nullptr && to != nullptr) {
    memcpy(to, from, bytes);
  }
  stream.kernels[i].comm = comm;
  stream.kernels[i].ended = !held;
  stream.size = i + 1;
  all_launched++;
  return ncclSuccess;
}

size_t size_of(ncclDataType_t type) {
  constexpr size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return sizes[type];
}
} // namespace

namespace stub {
void hold() { held = true; }
void release() {
  held = false;
  for (int i = 0; i < stream.size; i++) {
    stream.kernels[i].ended = true;
  }
}
void fail_launch_after(int launches) { until_failure = launches + 1; }
void fail_asynchronously() { peer_gone = true; }
void overlap_poll() { overlapping = true; }
int launched() { return all_launched; }
int communicators() { return alive; }
} // namespace stub

extern "C" {
const char* cudaGetErrorString(cudaError_t) { return "an error of CUDA"; }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int*, int* greatest) {
  *greatest = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* created, unsigned, int) {
  *created = &stream;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new StubEvent;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t on) {
  event->stream = on;
  event->after = on->size;
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return event->ready() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  while (!event->ready()) {
    nap();
  }
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t on) {
  StubEvent event;
  cudaEventRecord(&event, on);
  return cudaEventSynchronize(&event);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  memcpy(to, from, bytes);
  return cudaSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclRemoteError ? "remote process exited" : "another error of NCCL";
}
ncclResult_t ncclGetUniqueId(ncclUniqueId*) { return ncclSuccess; }
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int, ncclUniqueId, int) {
  *comm = new StubComm;
  alive++;
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  if (comm == nullptr) {
    return ncclInvalidArgument;
  }
  check(comm, "ncclCommGetAsyncError");
  polling++;
  unsigned before = aborts;
  // Long enough for an abort that does not wait for this thread.
  for (int i = 0; overlapping && i < 3000 && before == aborts; i++) {
    nap();
  }
  check(comm, "ncclCommGetAsyncError");
  *error = comm->memory == 0 && peer_gone ? ncclRemoteError : ncclSuccess;
  polling--;
  return ncclSuccess;
}
// Ends the kernels of a communicator as if they were complete, and frees it.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (comm == nullptr) {
    return ncclSuccess;
  }
  free_comm(comm, "ncclCommAbort");
  aborts++;
  for (int i = 0; i < stream.size; i++) {
    if (stream.kernels[i].comm == comm) {
      stream.kernels[i].ended = true;
    }
  }
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  cudaStreamSynchronize(&stream);
  return free_comm(comm, "ncclCommDestroy");
}
ncclResult_t ncclGroupStart() { return ncclSuccess; }
ncclResult_t ncclGroupEnd() { return ncclSuccess; }
ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclRedOp_t, ncclComm_t comm, cudaStream_t) {
  return launch(from, to, count * size_of(type), comm);
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                               ncclRedOp_t, ncclComm_t comm, cudaStream_t) {
  return launch(from, to, count * size_of(type), comm);
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t) {
  return launch(from, to, count * size_of(type), comm);
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int,
                           ncclComm_t comm, cudaStream_t) {
  return launch(from, to, count * size_of(type), comm);
}
ncclResult_t ncclBcast(void*, size_t, ncclDataType_t, int, ncclComm_t comm, cudaStream_t) {
  return launch(nullptr, nullptr, 0, comm);
}
ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t,
                        int, ncclComm_t comm, cudaStream_t) {
  return launch(from, to, count * size_of(type), comm);
}
ncclResult_t ncclSend(const void*, size_t, ncclDataType_t, int, ncclComm_t comm, cudaStream_t) {
  return launch(nullptr, nullptr, 0, comm);
}
ncclResult_t ncclRecv(void*, size_t, ncclDataType_t, int, ncclComm_t comm, cudaStream_t) {
  return launch(nullptr, nullptr, 0, comm);
}
}

namespace horovod {
namespace common {
void BatchedD2DMemcpyCudaImpl(BatchedD2DParams& params, int num_copies, cudaStream_t) {
  for (int i = 0; i < num_copies; i++) {
    memcpy(params.out[i], params.in[i], params.sizes[i]);
  }
}
// As Horovod's kernel: an int64 is multiplied by a double.
void BatchedScaledD2DMemcpyCudaImpl(BatchedD2DParams& params, int num_copies, double scale_factor,
                                    DataType dtype, cudaStream_t) {
  for (int i = 0; i < num_copies; i++) {
    if (dtype != HOROVOD_INT64) {
      abort();
    }
    for (size_t j = 0; j < params.sizes[i] / sizeof(int64_t); j++) {
      ((int64_t*)params.out[i])[j] = ((const int64_t*)params.in[i])[j] * scale_factor;
    }
  }
}
void ScaleBufferCudaImpl(const void*, void*, const int64_t, double, DataType, cudaStream_t) {
  abort();
}

// Autotuning, which is off: its sources would take the longest to compile.
GaussianProcessRegressor::GaussianProcessRegressor(double alpha) : alpha_(alpha) {}
BayesianOptimization::BayesianOptimization(std::vector<std::pair<double, double>> bounds,
                                           double alpha, double)
    : bounds_(bounds), gpr_(alpha) {}
void BayesianOptimization::AddSample(const Eigen::VectorXd&, double) { abort(); }
Eigen::VectorXd BayesianOptimization::NextSample(bool) { abort(); }
void BayesianOptimization::Clear() {}
} // namespace common
} // namespace horovod
