// What a compiled solution is called with. A solution is one function:
//
//   extern "C" int run(const FirTensor* args, size_t count, char* message, size_t room);
//
// `args` are the definition's inputs in order, then its outputs; a number is a tensor of rank 0. Tensors are row-major and
// begin at a cache line. 0 says that it went well; anything else fails the run, with `message` for its log.
#pragma once
#include <stddef.h>
#include <stdint.h>

enum FirDType {
  FIR_FLOAT32, FIR_FLOAT16, FIR_BFLOAT16, FIR_FLOAT8_E4M3, FIR_FLOAT8_E5M2, FIR_FLOAT4_E2M1X2,
  FIR_INT64, FIR_INT32, FIR_INT16, FIR_INT8, FIR_BOOL
};

struct FirTensor {
  void* data;
  const int64_t* shape;
  int32_t rank;
  int32_t dtype;
};
