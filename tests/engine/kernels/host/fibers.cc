// The fibers themselves. They change places by setjmp and longjmp: swapcontext asks the system each time.
#include "fibers.h"
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <ucontext.h>
#include <vector>

namespace host {

int groups, threads, group, current;

namespace {

struct Barrier {
  int arrived = 0;
  unsigned turn = 0;
};
struct Warp {
  Barrier barrier;
  // One set of slots is written while the other is still read.
  Slot slots[2][32];
};
struct Copy {
  void* to;
  const void* from;
  bool there;
};
struct Bulk {
  void* to;
  const void* from;
  int bytes;
};
struct Full {
  int missing = 0;
  unsigned turn = 0;
  std::vector<Bulk> asked;
};
struct Fiber {
  std::vector<char> stack = std::vector<char>(1 << 16);
  jmp_buf place;
  bool started = false, finished = false;
  const Barrier* barrier = nullptr;
  unsigned turn = 0;
  std::deque<std::vector<Copy>> asked;
};

std::deque<Fiber> fibers;
std::map<const void*, Full> fulls;
std::vector<Warp> warps;
Barrier whole;
jmp_buf scheduler;
void (*body)(void**);
void** pointers;

void yield() {
  if (_setjmp(fibers[current].place) == 0) _longjmp(scheduler, 1);
}

// A fiber outlives its group: it takes the next one's body.
void enter() {
  for (;;) {
    body(pointers);
    fibers[current].finished = true;
    yield();
  }
}

void resume(Fiber& f) {
  if (_setjmp(scheduler) != 0) return;
  if (f.started) _longjmp(f.place, 1);
  f.started = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = f.stack.data();
  context.uc_stack.ss_size = f.stack.size();
  context.uc_link = nullptr;
  makecontext(&context, enter, 0);
  setcontext(&context);
}

void wait(Barrier& b, int count) {
  if (++b.arrived == count) {
    b.arrived = 0;
    ++b.turn;
    return;
  }
  fibers[current].barrier = &b;
  fibers[current].turn = b.turn;
  yield();
}

}  // namespace

void wait_warp() { wait(warps[warp()].barrier, 32); }
void wait_group() { wait(whole, threads); }

const Slot* exchange(const uint32_t* mine, int words) {
  Warp& w = warps[warp()];
  Slot* slots = w.slots[w.barrier.turn % 2];
  memcpy(slots[lane()].word, mine, 4 * words);
  wait(w.barrier, 32);
  return slots;
}

void multiply(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
  const Slot* slots = exchange(mine, 6);
  const int g = lane() / 4, t = lane() % 4;
  auto part = [](uint32_t pair, int which) { return from_bfloat(uint16_t(which ? pair >> 16 : pair)); };
  for (int i = 0; i < 4; ++i) {
    const int row = g + (i / 2) * 8, column = t * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const uint32_t* a = slots[row % 8 * 4 + k % 8 / 2].word;
      const uint32_t* b = slots[column * 4 + k % 8 / 2].word;
      c[i] += part(a[row / 8 + k / 8 * 2], k % 2) * part(b[4 + k / 8], k % 2);
    }
  }
}

void multiply(int* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
  const Slot* slots = exchange(mine, 6);
  const int g = lane() / 4, t = lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + (i / 2) * 8, column = t * 2 + i % 2;
    for (int k = 0; k < 32; ++k) {
      const uint32_t a = slots[row % 8 * 4 + k % 16 / 4].word[row / 8 + k / 16 * 2] >> k % 4 * 8;
      const uint32_t b = slots[column * 4 + k % 16 / 4].word[4 + k / 16] >> k % 4 * 8;
      c[i] += int(a & 0xFF) * int(int8_t(b & 0xFF));
    }
  }
}

void copy(void* to, const void* from, bool there) { fibers[current].asked.back().push_back({to, from, there}); }
void commit() { fibers[current].asked.emplace_back(); }
void wait_copies(int groups_left) {
  auto& asked = fibers[current].asked;
  while (int(asked.size()) > groups_left + 1) {
    for (const Copy& c : asked.front()) {
      if (c.there) memcpy(c.to, c.from, 16); else memset(c.to, 0, 16);
    }
    asked.pop_front();
  }
}

void full_begin(const void* full) { fulls[full] = Full{}; }
void full_expect(const void* full, int bytes) { fulls.at(full).missing += bytes; }
void full_copy(void* to, const void* from, int bytes, const void* full) {
  if (bytes % 16 || uintptr_t(to) % 16 || uintptr_t(from) % 16) {
    std::fprintf(stderr, "a copy is not of whole vectors\n");
    std::abort();
  }
  fulls.at(full).asked.push_back({to, from, bytes});
  fulls.at(full).missing -= bytes;
}
void full_wait(const void* full, int parity) {
  for (int turns = 0;; ++turns) {
    auto found = fulls.find(full);
    if (found != fulls.end() && found->second.turn % 2 != parity) return;
    if (found != fulls.end() && !found->second.missing && !found->second.asked.empty()) {
      for (const Bulk& c : found->second.asked) memcpy(c.to, c.from, c.bytes);
      found->second.asked.clear();
      ++found->second.turn;
      continue;
    }
    if (turns > 1000) {
      std::fprintf(stderr, "what is waited for was not asked for\n");
      std::abort();
    }
    yield();
  }
}

void run(int group_count, int thread_count, void (*text)(void**), void** arguments) {
  groups = group_count;
  threads = thread_count;
  body = text;
  pointers = arguments;
  while (int(fibers.size()) < threads) fibers.emplace_back();
  for (Fiber& f : fibers) f.asked.assign(1, {});
  for (group = 0; group < groups; ++group) {
    warps.assign(threads / 32, Warp{});
    whole = Barrier{};
    fulls.clear();
    for (int i = 0; i < threads; ++i) {
      fibers[i].finished = false;
      fibers[i].barrier = nullptr;
    }
    for (int left = threads; left > 0;) {
      bool moved = false;
      for (current = 0; current < threads; ++current) {
        Fiber& f = fibers[current];
        if (f.finished || (f.barrier && f.barrier->turn == f.turn)) continue;
        moved = true;
        f.barrier = nullptr;
        resume(f);
        left -= f.finished;
      }
      if (!moved) {
        std::fprintf(stderr, "a collective operation was not reached by every thread\n");
        std::abort();
      }
    }
  }
}

float from_half(uint16_t v) {
  const int exponent = v >> 10 & 31, mantissa = v & 1023;
  float r = exponent == 0    ? mantissa * 0x1p-24f
            : exponent == 31 ? (mantissa ? float_of(0x7FC00000) : float_of(0x7F800000))
                             : float_of(uint32_t(exponent + 112) << 23 | uint32_t(mantissa) << 13);
  return v & 0x8000 ? -r : r;
}

uint16_t to_half(float v) {
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

}  // namespace host
