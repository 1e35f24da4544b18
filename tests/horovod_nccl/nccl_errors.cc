// One rank of Horovod on a stub of a GPU. Its collectives stay pending, fail or are aborted as the
// case in argv[1] demands, and each of them must end with the status that the case expects.

#include "gpu_stub.h"

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "horovod/common/operations.h"

using namespace horovod::common;

namespace {
constexpr auto PATIENCE = std::chrono::seconds(30);

[[noreturn]] void fail(const std::string& message) {
  fprintf(stderr, "failed: %s\n", message.c_str());
  _Exit(1);
}

void expect(bool holds, const std::string& message) {
  if (!holds) {
    fail(message);
  }
}

class Int64Tensor : public Tensor {
public:
  explicit Int64Tensor(std::vector<int64_t> values, DataType type = HOROVOD_INT64)
      : values(std::move(values)), type(type) {}
  const DataType dtype() const override { return type; }
  const TensorShape shape() const override { return TensorShape({(int64_t)values.size()}); }
  const void* data() const override { return values.data(); }
  int64_t size() const override { return values.size() * sizeof(int64_t); }

  std::vector<int64_t> values;

private:
  DataType type;
};

class Buffer : public PersistentBuffer {
public:
  explicit Buffer(int64_t size) : bytes(size) {}
  const void* AccessData(std::shared_ptr<OpContext>) const override { return bytes.data(); }

private:
  std::vector<char> bytes;
};

class Context : public OpContext {
public:
  Status AllocatePersistent(int64_t size, std::shared_ptr<PersistentBuffer>* buffer) override {
    *buffer = std::make_shared<Buffer>(size);
    return Status::OK();
  }
  Status AllocateOutput(TensorShape shape, std::shared_ptr<Tensor>* tensor,
                        std::shared_ptr<ReadyEvent>*) override {
    *tensor = std::make_shared<Int64Tensor>(std::vector<int64_t>(shape.num_elements()));
    return Status::OK();
  }
  Status AllocateOutput(int, TensorShape shape, std::shared_ptr<Tensor>* tensor,
                        std::shared_ptr<ReadyEvent>* event) override {
    return AllocateOutput(shape, tensor, event);
  }
  Status AllocateZeros(int64_t, DataType, std::shared_ptr<Tensor>*) override {
    return Status::InvalidArgument("not used");
  }
  Framework framework() const override { return PYTORCH; }
};

// Collectives in the order of their begin, and their statuses.
class Collectives {
public:
  std::function<void()> before_status = [] {};

  // Begins an all-reduce of `values`; or several together, which one collective all.
  std::vector<std::shared_ptr<Int64Tensor>> begin(const std::vector<std::vector<int64_t>>& values) {
    std::vector<std::shared_ptr<OpContext>> contexts;
    std::vector<std::shared_ptr<Tensor>> inputs, outputs;
    std::vector<std::shared_ptr<Int64Tensor>> results;
    std::vector<ReadyEventList> events(values.size());
    std::vector<std::string> names;
    std::vector<StatusCallback> callbacks;
    for (auto& each : values) {
      contexts.push_back(std::make_shared<Context>());
      inputs.push_back(std::make_shared<Int64Tensor>(each));
      results.push_back(std::make_shared<Int64Tensor>(std::vector<int64_t>(each.size())));
      outputs.push_back(results.back());
      names.push_back("sum" + std::to_string(begun));
      callbacks.push_back(callback());
    }
    auto status =
        EnqueueTensorAllreduces(contexts, inputs, outputs, events, names, 0, callbacks);
    expect(status.ok(), "begin: " + status.reason());
    return results;
  }

  void begin_alltoall() {
    std::vector<int64_t> values = {1, 2}, empty;
    auto splits = std::make_shared<Int64Tensor>(empty, HOROVOD_INT32);
    auto status = EnqueueTensorAlltoall(std::make_shared<Context>(),
                                        std::make_shared<Int64Tensor>(values), splits, {},
                                        "alltoall", 0, callback());
    expect(status.ok(), "begin: " + status.reason());
  }

  // Waits until all have ended, each with success or each without.
  void expect_all(bool success) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait_for(lock, PATIENCE, [this] { return (int)statuses.size() == begun; });
    for (int i = 0; i < begun; i++) {
      auto name = "collective " + std::to_string(i);
      auto found = statuses.find(i);
      expect(found != statuses.end(), name + " has not ended");
      printf("%s: %s\n", name.c_str(),
             found->second.ok() ? "success" : found->second.reason().c_str());
      expect(found->second.ok() == success, success ? name + " failed"
                                                    : name + " was aborted but reported success");
    }
  }

private:
  StatusCallback callback() {
    return [this, number = begun++](const Status& status) {
      before_status();
      std::lock_guard<std::mutex> guard(mutex);
      expect(statuses.emplace(number, status).second,
             "collective " + std::to_string(number) + " has ended twice");
      changed.notify_all();
    };
  }

  int begun = 0;
  std::map<int, Status> statuses;
  std::mutex mutex;
  std::condition_variable changed;
};

void start(bool elastic) {
  setenv("HOROVOD_ELASTIC", elastic ? "1" : "0", 1);
  expect(horovod_init(nullptr, 0, nullptr, nullptr, 0), "horovod_init");
}

void shut_down() {
  horovod_shutdown();
  expect(stub::communicators() == 0, "a communicator was not freed");
}

void wait_for_launches(int number) {
  auto end = std::chrono::steady_clock::now() + PATIENCE;
  while (stub::launched() < number) {
    expect(std::chrono::steady_clock::now() < end, "not launched");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Begins `number` collectives, which stay pending.
void begin_held(Collectives& all, int number) {
  stub::hold();
  for (int i = 0; i < number; i++) {
    all.begin({{i}});
  }
}

void sum_again() {
  stub::release();
  start(false);
  Collectives all;
  auto results = all.begin({{7}});
  all.expect_all(true);
  expect(results[0]->values[0] == 7, "wrong sum");
  shut_down();
}

void launch_error(bool elastic) {
  Collectives all;
  start(elastic);
  stub::overlap_poll();
  stub::fail_launch_after(2);
  begin_held(all, 4);
  all.expect_all(false);
  shut_down();
}

void asynchronous_error() {
  Collectives all;
  start(true);
  begin_held(all, 3);
  wait_for_launches(3);
  stub::overlap_poll();
  stub::fail_asynchronously();
  all.expect_all(false);
  shut_down();
}

void shutdown_after_error() {
  Collectives all;
  start(false);
  begin_held(all, 3);
  wait_for_launches(3);
  stub::fail_asynchronously();
  shut_down();
  all.expect_all(false);
}

void shutdown_while_pending() {
  Collectives all;
  start(true);
  begin_held(all, 3);
  wait_for_launches(3);
  stub::overlap_poll();
  shut_down();
  all.expect_all(false);
  sum_again();
}

void shutdown_while_alltoall_is_pending() {
  Collectives all;
  start(true);
  stub::hold();
  all.begin_alltoall();
  wait_for_launches(2); // to send and to receive
  shut_down();
  all.expect_all(false);
}

// The thread that reports statuses is late: the others are ready to end without it.
void shutdown_while_statuses_are_late() {
  Collectives all;
  all.before_status = [] { std::this_thread::sleep_for(std::chrono::milliseconds(300)); };
  start(true);
  begin_held(all, 3);
  wait_for_launches(3);
  shut_down();
  all.expect_all(false);
  sum_again();
}

// Another rank has the sum already, and ends.
void shutdown_while_completing() {
  Collectives all;
  start(false);
  begin_held(all, 3);
  wait_for_launches(3);
  std::thread peer([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    stub::release();
  });
  shut_down();
  peer.join();
  all.expect_all(true);
}

void fused_int64() {
  setenv("HOROVOD_FUSION_THRESHOLD", "1000", 1);
  Collectives all;
  start(false);
  int64_t value = (int64_t(1) << 60) + 1; // not a double
  auto results = all.begin({{value}, {value + 1, -value}});
  all.expect_all(true);
  expect(stub::launched() == 1, "not summed together");
  expect(results[0]->values == std::vector<int64_t>({value}) &&
             results[1]->values == std::vector<int64_t>({value + 1, -value}),
         "the sums lost bits");
  shut_down();
}
} // namespace

int main(int, char** argv) {
  setenv("HOROVOD_FUSION_THRESHOLD", "0", 1);
  const std::map<std::string, std::function<void()>> cases = {
      {"launch_error", [] { launch_error(false); }},
      {"launch_error_elastic", [] { launch_error(true); }},
      {"asynchronous_error", asynchronous_error},
      {"shutdown_after_error", shutdown_after_error},
      {"shutdown_while_pending", shutdown_while_pending},
      {"shutdown_while_alltoall_is_pending", shutdown_while_alltoall_is_pending},
      {"shutdown_while_statuses_are_late", shutdown_while_statuses_are_late},
      {"shutdown_while_completing", shutdown_while_completing},
      {"fused_int64", fused_int64},
  };
  cases.at(argv[1])();
  return 0;
}
