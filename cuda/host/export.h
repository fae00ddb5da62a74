// C entry points of a kernel, so that Python can launch it from a shared library.
//
// HOST_EXPORT(name) makes two functions: host_parameters_NAME tells sizes and kinds of the kernel's
// parameters, host_launch_NAME runs it. mkref/machine/hostcc.py calls both through ctypes.
#pragma once

#include <cstring>
#include <type_traits>

#include "launch.h"

namespace host {

// Sizes in bytes; pointers are given as negative sizes. Returns the number of parameters.
template <class... P>
int describe_parameters(void (*)(P...), int* sizes, int capacity) {
  const int all[] = {(std::is_pointer_v<P> ? -1 : 1) * static_cast<int>(sizeof(P))..., 0};
  for (int i = 0; i < static_cast<int>(sizeof...(P)) && i < capacity; i++) sizes[i] = all[i];
  return static_cast<int>(sizeof...(P));
}

// `shape`: grid x, y, z, block x, y, z. `stack_bytes` 0: the default. Returns a Code.
template <class... P>
int launch_from_c(void (*kernel)(P...), const unsigned* shape, unsigned long long shared_bytes,
                  void** values, int workers, unsigned long long seed, double timeout_s,
                  unsigned long long stack_bytes, char* report, unsigned long long report_bytes) {
  Options options;
  options.workers = workers;
  options.seed = seed;
  options.timeout_s = timeout_s;
  if (stack_bytes) options.stack_bytes = stack_bytes;
  std::string text;
  Shape all{dim3(shape[0], shape[1], shape[2]), dim3(shape[3], shape[4], shape[5]),
            size_t(shared_bytes)};
  int code = launch_kernel(kernel, all, options, values, text);
  if (report_bytes) {
    size_t n = std::min<size_t>(text.size(), report_bytes - 1);
    memcpy(report, text.data(), n);
    report[n] = '\0';
  }
  return code;
}

using LaunchFunction = int (*)(const unsigned*, unsigned long long, void**, int, unsigned long long,
                               double, unsigned long long, char*, unsigned long long);

}  // namespace host

#define HOST_EXPORT(name)                                                                      \
  extern "C"                                                                                   \
      __attribute__((visibility("default"))) int host_parameters_##name(int* sizes, int n) {   \
    return host::describe_parameters(name, sizes, n);                                          \
  }                                                                                            \
  extern "C" __attribute__((visibility("default"))) int host_launch_##name(                    \
      const unsigned* shape, unsigned long long shared_bytes, void** values, int workers,      \
      unsigned long long seed, double timeout_s, unsigned long long stack_bytes, char* report, \
      unsigned long long report_bytes) {                                                       \
    return host::launch_from_c(name, shape, shared_bytes, values, workers, seed, timeout_s,    \
                               stack_bytes, report, report_bytes);                             \
  }
