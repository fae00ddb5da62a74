// One kernel launch as a program of its own, for builds that an ordinary Python cannot load.
//
// A folder holds the launch: `launch.txt` and a file per buffer and per argument value. The program
// allocates every buffer exactly as large as it is, so that AddressSanitizer sees the first byte
// beyond, puts the new addresses where the old ones were, runs the kernel and writes the buffers
// back. mkref/machine/sanitize.py writes the folder and reads it again.
#pragma once

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "export.h"

namespace host {

struct ProgramKernel {
  const char* name;
  LaunchFunction launch;
};

struct ProgramBuffer {
  std::string file;
  unsigned char* data;
  size_t bytes;
};

inline std::vector<unsigned char> read_file(const std::string& path, size_t bytes) {
  std::vector<unsigned char> data(bytes);
  FILE* file = fopen(path.c_str(), "rb");
  if (!file || fread(data.data(), 1, bytes, file) != bytes) {
    fprintf(stderr, "cannot read %zu bytes from %s\n", bytes, path.c_str());
    exit(BAD_LAUNCH);
  }
  fclose(file);
  return data;
}

// Lines of launch.txt: "kernel NAME", "shape gx gy gz bx by bz", "shared BYTES",
// "options WORKERS SEED SECONDS STACK", "buffer BYTES ADDRESS_MODULO_64", "value BYTES",
// "pointer VALUE OFFSET BUFFER OFFSET" (in the value, in the buffer).
inline int run_program(const ProgramKernel* kernels, int n_kernels, int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
    return BAD_LAUNCH;
  }
  std::string folder = std::string(argv[1]) + "/";
  FILE* launch_file = fopen((folder + "launch.txt").c_str(), "r");
  if (!launch_file) {
    fprintf(stderr, "no launch.txt in %s\n", argv[1]);
    return BAD_LAUNCH;
  }
  std::string kernel;
  unsigned shape[6] = {1, 1, 1, 1, 1, 1};
  unsigned long long shared = 0, seed = 0, stack = 0, n[4];
  int workers = 0;
  double timeout = 60;
  std::vector<ProgramBuffer> buffers;
  std::vector<std::vector<unsigned char>> values;
  char line[512], name[256];
  while (fgets(line, sizeof line, launch_file)) {
    if (sscanf(line, "kernel %255s", name) == 1) kernel = name;
    sscanf(line, "shape %u %u %u %u %u %u", &shape[0], &shape[1], &shape[2], &shape[3], &shape[4],
           &shape[5]);
    sscanf(line, "shared %llu", &shared);
    sscanf(line, "options %d %llu %lf %llu", &workers, &seed, &timeout, &stack);
    if (sscanf(line, "buffer %llu %llu", &n[0], &n[1]) == 2) {
      std::string file = folder + "buffer" + std::to_string(buffers.size()) + ".bin";
      std::vector<unsigned char> content = read_file(file, n[0]);
      void* memory = nullptr;
      if (posix_memalign(&memory, 64, n[0] + n[1] + (n[0] == 0)) != 0) return BAD_LAUNCH;
      unsigned char* data = static_cast<unsigned char*>(memory) + n[1];
      if (n[0]) memcpy(data, content.data(), n[0]);
      buffers.push_back({file, data, n[0]});
    }
    if (sscanf(line, "value %llu", &n[0]) == 1) {
      values.push_back(read_file(folder + "value" + std::to_string(values.size()) + ".bin", n[0]));
    }
    if (sscanf(line, "pointer %llu %llu %llu %llu", &n[0], &n[1], &n[2], &n[3]) == 4) {
      unsigned char* address = buffers[n[2]].data + n[3];
      memcpy(values[n[0]].data() + n[1], &address, sizeof address);
    }
  }
  fclose(launch_file);
  std::vector<void*> pointers;
  for (auto& value : values) pointers.push_back(value.data());
  for (int i = 0; i < n_kernels; i++) {
    if (kernel != kernels[i].name) continue;
    std::vector<char> report(1 << 16);
    int code = kernels[i].launch(shape, shared, pointers.data(), workers, seed, timeout, stack,
                                 report.data(), report.size());
    if (code != OK) fprintf(stderr, "%s\n", report.data());
    for (const ProgramBuffer& buffer : buffers) {
      FILE* out = fopen(buffer.file.c_str(), "wb");
      if (!out || fwrite(buffer.data, 1, buffer.bytes, out) != buffer.bytes) return BAD_LAUNCH;
      fclose(out);
    }
    return code;
  }
  fprintf(stderr, "no kernel %s in this program\n", kernel.c_str());
  return BAD_LAUNCH;
}

}  // namespace host
