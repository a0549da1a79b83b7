// A thread group on one CPU thread: a fiber for each GPU thread, taking turns at every collective operation.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>

namespace host {

struct Barrier {
  int arrived = 0;
  unsigned turn = 0;
};

struct Warp {
  Barrier barrier;
  uint32_t slot[32][8];
};

inline int groups, threads, group, current;
inline std::vector<ucontext_t> fibers;
inline std::vector<std::vector<char>> stacks;
inline std::vector<bool> finished;
inline std::vector<Warp> warps;
inline Barrier whole;
inline ucontext_t scheduler;
inline std::function<void()> body;

inline int lane() { return current % 32; }
inline int warp() { return current / 32; }
inline void yield() { swapcontext(&fibers[current], &scheduler); }

// A fiber that waits for ever would mean that a thread of its warp has left: count the turns.
inline void wait(Barrier& b, int count) {
  const unsigned turn = b.turn;
  if (++b.arrived == count) {
    b.arrived = 0;
    ++b.turn;
    return;
  }
  for (long tries = 0; b.turn == turn; ++tries) {
    if (tries > 1000000) {
      std::fprintf(stderr, "a collective operation was not reached by every thread\n");
      std::abort();
    }
    yield();
  }
}
inline void wait_warp() { wait(warps[warp()].barrier, 32); }
inline void wait_group() { wait(whole, threads); }

template <typename T> T from_lane(T v, int other) {
  static_assert(sizeof(T) == 4);
  auto& slots = warps[warp()].slot;
  std::memcpy(slots[lane()], &v, 4);
  wait_warp();
  T r;
  std::memcpy(&r, slots[other], 4);
  wait_warp();
  return r;
}

// A group's memory starts without meaning: its first thread comes here before any other runs.
inline void poison(void* p, size_t bytes) {
  if (current == 0) std::memset(p, 0xFF, bytes);
}

inline float float_of(uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}
inline uint32_t bits_of(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  return bits;
}
inline uint16_t to_bfloat(float v) {
  const uint32_t bits = bits_of(v);
  if (v != v) return 0x7FC0;
  return uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
inline float from_bfloat(uint16_t v) { return float_of(uint32_t(v) << 16); }
inline float from_half(uint16_t v) {
  const int exponent = v >> 10 & 31, mantissa = v & 1023;
  float r = exponent == 0    ? mantissa * 0x1p-24f
            : exponent == 31 ? (mantissa ? float_of(0x7FC00000) : float_of(0x7F800000))
                             : float_of(uint32_t(exponent + 112) << 23 | uint32_t(mantissa) << 13);
  return v & 0x8000 ? -r : r;
}
inline uint16_t to_half(float v) {
  if (v != v) return 0x7E00;
  const uint16_t sign = v < 0 ? 0x8000 : 0;
  const float a = v < 0 ? -v : v;
  if (a >= 65520.0f) return sign | 0x7C00;
  // The neighbours are found by search: slow, and certain.
  int low = 0, high = 0x7BFF;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (from_half(uint16_t(middle)) <= a) low = middle; else high = middle - 1;
  }
  if (low < 0x7BFF) {
    const float under = a - from_half(uint16_t(low)), over = from_half(uint16_t(low + 1)) - a;
    if (over < under || (over == under && low % 2)) ++low;
  }
  return uint16_t(sign | low);
}

inline void enter() {
  body();
  finished[current] = true;
  swapcontext(&fibers[current], &scheduler);
}

inline void run(int group_count, int thread_count, std::function<void()> f) {
  groups = group_count;
  threads = thread_count;
  body = std::move(f);
  fibers.resize(threads);
  stacks.resize(threads);
  for (auto& s : stacks) s.resize(1 << 16);
  for (group = 0; group < groups; ++group) {
    finished.assign(threads, false);
    warps.assign(threads / 32, Warp{});
    whole = Barrier{};
    for (current = 0; current < threads; ++current) {
      getcontext(&fibers[current]);
      fibers[current].uc_stack.ss_sp = stacks[current].data();
      fibers[current].uc_stack.ss_size = stacks[current].size();
      fibers[current].uc_link = nullptr;
      makecontext(&fibers[current], enter, 0);
    }
    for (int left = threads; left > 0;) {
      for (current = 0; current < threads; ++current) {
        if (finished[current]) continue;
        swapcontext(&scheduler, &fibers[current]);
        left -= finished[current];
      }
    }
  }
}

}  // namespace host
