// A thread group on one CPU thread: a fiber for each GPU thread, taking turns at every collective operation.
// fibers.cc is compiled once; every kernel's text sees only what is declared here, so that it compiles quickly.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

namespace host {

extern int groups, threads, group, current;

inline int lane() { return current % 32; }
inline int warp() { return current / 32; }
void wait_warp();
void wait_group();

struct Slot {
  uint32_t word[8];
};
// Shows at most eight words to the warp, waits for all its lanes, and returns what each has shown.
const Slot* exchange(const uint32_t* mine, int words);

// A tensor core's product of 16x16 and 16x8 bfloat16 values, added to this lane's four values of the result.
void multiply(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1);
void multiply(int* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1);

// Asynchronous copies of 16 bytes, in groups: nothing arrives before it is waited for.
void copy(void* to, const void* from, bool there);
void commit();
void wait_copies(int groups_left);

// Copies that report to a word: nothing arrives before all that was expected was asked for, and is waited for.
void full_begin(const void* full);
void full_expect(const void* full, int bytes);
void full_copy(void* to, const void* from, int bytes, const void* full);
void full_wait(const void* full, int parity);

// Runs the body on every thread of every group, one group after another.
void run(int group_count, int thread_count, void (*body)(void**), void** pointers);

inline uint32_t bits_of(float v) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  return bits;
}
inline float float_of(uint32_t bits) {
  float v;
  memcpy(&v, &bits, 4);
  return v;
}
template <typename T> T from_lane(T v, int other) {
  static_assert(sizeof(T) == 4);
  uint32_t word;
  memcpy(&word, &v, 4);
  memcpy(&v, exchange(&word, 1)[other].word, 4);
  return v;
}

// A group's memory starts without meaning: its first thread comes here before any other runs.
inline void poison(void* p, size_t bytes) {
  if (current == 0) memset(p, 0xFF, bytes);
}

inline uint16_t to_bfloat(float v) {
  const uint32_t bits = bits_of(v);
  if (v != v) return 0x7FC0;
  return uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
inline float from_bfloat(uint16_t v) { return float_of(uint32_t(v) << 16); }
float from_half(uint16_t v);
uint16_t to_half(float v);

}  // namespace host
