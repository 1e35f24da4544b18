// Commands to the stubs of CUDA and NCCL. All may be called from any thread.
#pragma once

namespace stub {
// Collectives launched from now on end only by `release` or by the abort of their communicator.
void hold();
// Ends every held collective, complete.
void release();
// The collective after the next `launches` finds that a peer is gone: its launch returns
// ncclRemoteError, and so does ncclCommGetAsyncError from then on.
void fail_launch_after(int launches);
// ncclCommGetAsyncError of every communicator finds that a peer is gone.
void fail_asynchronously();
// Before a launch fails, and before the next abort, wait until another thread is inside
// ncclCommGetAsyncError, and keep it there for a while: it may be there at any time.
void overlap_poll();
// Number of collectives launched, and of communicators that are neither aborted nor destroyed.
int launched();
int communicators();
} // namespace stub
