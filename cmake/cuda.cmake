# The optional CUDA component: a module of its own, `_cuda`, that links the CUDA runtime statically and
# so imports on machines without CUDA. Sets blockcompact_cuda_state, what `blockcompact info` says (no
# semicolons: CMake would split it).
if(BLOCKCOMPACT_CUDA STREQUAL "OFF")
  set(blockcompact_cuda_state
      "not compiled: off by default, install with -Ccmake.define.BLOCKCOMPACT_CUDA=ON")
  return()
endif()

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(BLOCKCOMPACT_CUDA STREQUAL "ON")
    message(FATAL_ERROR "BLOCKCOMPACT_CUDA is ON but no working nvcc was found; put nvcc on PATH or "
                        "set CUDACXX, or build with BLOCKCOMPACT_CUDA=OFF")
  endif()
  find_program(nvcc nvcc NO_CACHE)
  if(nvcc)
    set(blockcompact_cuda_state "not compiled: ${nvcc} does not work")
  else()
    set(blockcompact_cuda_state "not compiled: nvcc not found")
  endif()
  return()
endif()

set(CMAKE_CUDA_ARCHITECTURES "80;90")
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)

pybind11_add_module(
  _cuda
  MODULE
  custom_calls/cuda/device_check.cc
  custom_calls/cuda/device_runtime.cc
  custom_calls/cuda/launch.cu
  ffi/buffers.cc
  ffi/cuda_handlers.cc
  ffi/cuda_module.cc
  ffi/device_memory.cc
  ffi/score_operands.cc)
set_target_properties(_cuda PROPERTIES CUDA_RUNTIME_LIBRARY Static INTERPROCEDURAL_OPTIMIZATION OFF)
target_include_directories(_cuda PRIVATE custom_calls/cuda)
target_include_directories(_cuda SYSTEM PRIVATE "${XLA_FFI_INCLUDE_DIR}")
target_link_libraries(_cuda PRIVATE blockcompact_kernels CUDA::cudart_static)
target_compile_options(_cuda PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wshadow>")
install(TARGETS _cuda LIBRARY DESTINATION blockcompact_jax)
set(blockcompact_cuda_state "compiled: CUDA ${CMAKE_CUDA_COMPILER_VERSION} for sm_80 and sm_90")
