// Who waits where: the text of a launch that did not end.
//
// It groups the threads of a block by what they wait for, so that 288 threads make three lines. It
// runs on the worker's own stack after the fibers have stopped for good.
#pragma once

#include <cstdio>
#include <map>
#include <string>

#include "mbarrier.h"

namespace host {

inline std::string format(const char* pattern, auto... values) {
  char text[512];
  snprintf(text, sizeof text, pattern, values...);
  return text;
}

inline std::string place(Site site) {
  return site.line ? format("%s:%d", site.file, site.line) : std::string("?");
}

// "0-255, 260": thread numbers as ranges.
inline std::string ranges(const std::string& flags) {
  std::string text;
  for (size_t i = 0; i < flags.size(); i++) {
    if (!flags[i]) continue;
    size_t end = i;
    while (end + 1 < flags.size() && flags[end + 1]) end++;
    if (!text.empty()) text += ", ";
    text += std::to_string(i);
    if (end > i) text += "-" + std::to_string(end);
    i = end;
  }
  return text;
}

// What lane `lane` of `w` does, without saying who it is: lanes with equal texts are one group.
inline std::string describe(const Block& b, const Warp& w, int lane) {
  uint32_t bit = uint32_t{1} << lane;
  const Fiber& f = w.fibers[lane];
  if (w.exited & bit) return "have exited";
  if (w.arrived & bit) {
    return format("wait in %s at ", name_of(w.kind)) + place(w.collective_site) +
           format(" (lanes %08x of warp %d are there)", w.arrived, int(&w - b.warps));
  }
  if (w.at_barrier & bit) {
    const Barrier& bar = b.barriers[w.barrier];
    std::string name = w.barrier ? format("barrier %d", w.barrier) : "__syncthreads";
    return "wait in " + name + " at " + place(w.barrier_site) +
           format(" (%u of %u threads are there)", bar.arrived,
                  bar.expected ? bar.expected : b.live);
  }
  if (f.in_loop) return "run in a loop that meets no barrier, wait, poll or pause";
  if (!f.waiting.site.line) return "can run";
  // In a wait, or woken to look again. A null address is a pause.
  auto offset = static_cast<const unsigned char*>(f.waiting.address) - b.shared;
  if (b.shared && f.waiting.address && offset >= 0 &&
      offset < static_cast<ptrdiff_t>(b.shared_bytes)) {
    const MbarrierWord* word = word_of(static_cast<const uint64_t*>(f.waiting.address));
    return format("wait for the mbarrier at shared memory offset %d, parity %u, at ", int(offset),
                  f.waiting.parity) +
           place(f.waiting.site) +
           format(" (phase %d: %u of %u arrivals and %u bytes are missing)", int(word->phase),
                  unsigned(word->pending), unsigned(word->count), unsigned(word->bytes));
  }
  std::string text = "poll at " + place(f.waiting.site);
  if (!f.last_load) return text;
  return text +
         format(" (last loaded %d from %p)", f.last_value, static_cast<const void*>(f.last_load));
}

inline std::string describe(const Block& b) {
  std::map<std::string, std::string> groups;  // what -> a flag per thread
  size_t threads = static_cast<size_t>(b.n_warps) * WARP_SIZE;
  for (size_t t = 0; t < threads; t++) {
    const Warp& w = b.warps[t / WARP_SIZE];
    if (!(w.members >> (t % WARP_SIZE) & 1)) continue;
    auto [group, fresh] = groups.try_emplace(describe(b, w, int(t % WARP_SIZE)), threads, '\0');
    group->second[t] = 1;
  }
  std::string text = format("block (%u,%u,%u):\n", b.index.x, b.index.y, b.index.z);
  for (const auto& [what, who] : groups) text += "  threads " + ranges(who) + " " + what + "\n";
  return text;
}

}  // namespace host
