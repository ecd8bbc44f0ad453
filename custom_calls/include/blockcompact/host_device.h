// Marks code that runs on the host and, where nvcc compiles it, on a CUDA device as well.
#pragma once

#if defined(__CUDACC__)
#define BLOCKCOMPACT_HOST_DEVICE __host__ __device__
#define BLOCKCOMPACT_UNROLL _Pragma("unroll")
#else
#define BLOCKCOMPACT_HOST_DEVICE
#define BLOCKCOMPACT_UNROLL
#endif
