// In place of the file that CMake makes of Gloo's config.h.in.
#pragma once

#define GLOO_USE_CUDA 0
#define GLOO_USE_LIBUV 0
#define GLOO_USE_MPI 0
#define GLOO_HAVE_TRANSPORT_TCP 1
#define GLOO_HAVE_TRANSPORT_TCP_TLS 0
#define GLOO_HAVE_TRANSPORT_UV 0
