// How blocks hand values to each other without a grid barrier.
//
// A word says itself whether it is fresh: [tag:16 | bf16:16], the tag counting exchanges. A reader polls the data, not
// a flag, so there is no fence, no counter to reset, and nothing an aborted launch can leave in a wrong state but tags,
// which the host clears. A buffer is written again only after an all-to-all exchange that every reader has passed.
//
// A sum over groups takes one hop: every thread of every block adds the groups' shares of its rows, in their order. A
// share is fp32 but for its four lowest bits, which count the sums. All blocks poll the same words: a copy for each
// block takes so many writes that the weight stream's queues delay them (H200, 0.6B frame inside a launch, ms: an
// owner's sum in 128 copies 1.36, in eight 1.25; shares in eight copies 1.25, in four 1.19, in one 1.18).
#pragma once
#include "state.cuh"

// By value: a variable whose address is taken lives in local memory, and every poll would go there.
constexpr u64 GAVE_UP = ~0ull;
__device__ __noinline__ u64 give_up_slow(const Params* p, Shared* s, u32 block, u32 tid, u32 tag, u64 since, int what) {
  if (get32((u32*)&p->status[0])) { s->dead = 1; return GAVE_UP; }
  const u64 now = nanoseconds();
  if (since == 0) return now;
  if (now - since <= p->timeout_ns) return since;
  s->dead = 1;
  put32((u32*)&p->status[1], block); put32((u32*)&p->status[2], tid);
  put32((u32*)&p->status[3], what); put32((u32*)&p->status[4], tag);
  put32((u32*)&p->status[0], 1);
  return GAVE_UP;
}
struct Watch { u32 spins; u64 since; };
DEV bool give_up(Ctx& c, Watch& w, int what) {
  if ((++w.spins & 255u) != 0) return false;
  if (*(volatile u32*)&c.s->dead) return true;
  w.since = give_up_slow(c.p, c.s, c.block, c.tid, c.tag, w.since, what);
  return w.since == GAVE_UP;
}

DEV void publish(u32* word, u32 tag, float value) { put32(word, (tag << 16) | to_bf16(value)); }

// Four words -> four bf16 in two registers.
// Polls leave their loop as a whole warp: lanes that leave one by one diverge, which cost 0.2 ms a frame.
DEV void poll4(Ctx& c, const u32* p, u32 tag, u32& a, u32& b) {   // whole warps, or the lanes of a warp that are active
  u32 v[4]; Watch w = {0, 0}; const u32 t = tag << 16; const u32 active = __activemask();
  for (;;) {
    get32x4(p, v);
    const bool ok = (((v[0] ^ t) | (v[1] ^ t) | (v[2] ^ t) | (v[3] ^ t)) >> 16) == 0;
    if (__all_sync(active, ok) || give_up(c, w, 1)) break;
  }
  a = __byte_perm(v[0], v[1], 0x5410); b = __byte_perm(v[2], v[3], 0x5410);
}
template <int N> DEV void poll64n(Ctx& c, const u64* p, u32 step, u32 tag, float (&out)[N]) {
  Watch w = {0, 0};
  for (;;) {
    u64 v[N]; u32 bad = 0;
    UNROLL for (int i = 0; i < N; i++) v[i] = get64(p + i * step);
    UNROLL for (int i = 0; i < N; i++) { bad |= (u32)(v[i] >> 32) ^ tag; out[i] = __uint_as_float((u32)v[i]); }
    if (__all_sync(~0u, bad == 0) || give_up(c, w, 3)) break;
  }
}

// `row`: within the rows that this rank was dealt, EACH a rank. Cut, not rounded: NaN stays NaN.
template <class S, int EACH> DEV void send_part(const Ctx& c, Shares& to, int n, u32 row, float value) {
  const u32 word = (__float_as_uint(value) & ~15u) | (c.layers[S::ID] & 15u);
  put32(&to[n][c.group][c.rank * EACH + row], word);
}
// Sums over groups of the four rows from `at` on, each rounded as a projection's output is. Whole warps, or the lanes
// of a warp that are active. Added while polled: words that are kept until all are fresh spilled 0.8 KB of registers.
template <class S> DEV void take_parts(Ctx& c, const Shares& from, int n, u32 at, float (&sum)[4]) {
  Watch w = {0, 0}; const u32 t = c.layers[S::ID] & 15u, active = __activemask();
  for (;;) {
    u32 bad = 0; float s[4] = {0.f, 0.f, 0.f, 0.f};
    UNROLL for (int g = 0; g < NKV; g++) {
      u32 v[4]; get32x4(&from[n][g][at], v);
      UNROLL for (int i = 0; i < 4; i++) { bad |= v[i] ^ t; s[i] += __uint_as_float(v[i] & ~15u); }
    }
    UNROLL for (int i = 0; i < 4; i++) sum[i] = round_bf16(s[i]);
    if (__all_sync(active, (bad & 15u) == 0) || give_up(c, w, 3)) break;
  }
}
