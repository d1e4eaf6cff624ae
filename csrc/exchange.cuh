// How blocks exchange values without a grid barrier.
//
// A word shows by itself whether it is fresh: [tag:16 | bf16:16], where the tag counts exchanges. A reader polls the
// data, not a flag, so no fence is needed and no counter must be reset. After a launch that gave up, the host clears
// all words and tags. A buffer is rewritten only after an all-to-all exchange that every reader has passed.
//
// A sum over groups also takes one hop: each group adds its share of a row to the row's word, in L2, and every block
// reads the sum. Shares are added in fixed point, which is exact, so their order does not affect the result. The
// word's upper eight bits count shares and show when the sum is complete. Before a word's next sum, and after every
// block has read the last one, group 0 subtracts that again; the count continues. (If every block read and added all
// shares itself, it would read 32 KB a sum, at 0.6B, instead of 8; an owner that adds and forwards is a second hop.)
#pragma once
#include "state.cuh"

// Arguments by value: a variable whose address is taken would be in local memory, which every poll would access.
constexpr u64 GAVE_UP = ~0ull;
// What a wait was for: the number in the status of a launch that gave up; mktts/kernel/launch.py has the names.
enum { WORDS = 1, PARTS = 3, WEIGHTS = 5, HEAD_WORDS, ANSWER, EARLIER_COPY, LAST_COPIES };
DEV void lose(const Params* p, Shared* s, u32 block, u32 tid, u32 tag, int what) {
  s->dead = 1;
  if (get32((u32*)&p->status[0])) return;               // another wait has been reported
  put32((u32*)&p->status[1], block); put32((u32*)&p->status[2], tid);
  put32((u32*)&p->status[3], what); put32((u32*)&p->status[4], tag);
  put32((u32*)&p->status[0], 1);
}
__device__ __noinline__ u64 give_up_slow(const Params* p, Shared* s, u32 block, u32 tid, u32 tag, u64 since, int what) {
  if (get32((u32*)&p->status[0])) { s->dead = 1; return GAVE_UP; }
  const u64 now = nanoseconds();
  if (since == 0) return now;
  if (now - since <= p->timeout_ns) return since;
  lose(p, s, block, tid, tag, what);
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
// A warp leaves a polling loop as a whole: lanes that leave one by one diverge, which cost 0.2 ms a frame.
DEV void poll4(Ctx& c, const u32* p, u32 tag, u32& a, u32& b) {   // called by whole warps, or by the active lanes
  u32 v[4]; Watch w = {0, 0}; const u32 t = tag << 16; const u32 active = __activemask();
  for (;;) {
    get32x4(p, v);
    const bool ok = (((v[0] ^ t) | (v[1] ^ t) | (v[2] ^ t) | (v[3] ^ t)) >> 16) == 0;
    if (__all_sync(active, ok) || give_up(c, w, WORDS)) break;
  }
  a = __byte_perm(v[0], v[1], 0x5410); b = __byte_perm(v[2], v[3], 0x5410);
}
template <int N> DEV void poll64n(Ctx& c, const u64* p, u32 step, u32 tag, float (&out)[N]) {
  Watch w = {0, 0};
  for (;;) {
    u64 v[N]; u32 bad = 0;
    UNROLL for (int i = 0; i < N; i++) v[i] = get64(p + i * step);
    UNROLL for (int i = 0; i < N; i++) { bad |= (u32)(v[i] >> 32) ^ tag; out[i] = __uint_as_float((u32)v[i]); }
    if (__all_sync(~0u, bad == 0) || give_up(c, w, PARTS)) break;
  }
}

// Fixed point with 28 binary places: shares below 2^18, exact to 2^-29. A larger share, or NaN, makes its sum NaN.
constexpr float PLACES = 268435456.f, MOST = 262144.f;
constexpr i64 NOT_A_SHARE = 1ll << 50, WHOLE = NOT_A_SHARE / 2;             // valid sums are at most WHOLE
static_assert(NKV * (u64)(MOST * PLACES) <= WHOLE, "more than all shares of a sum, in either direction, are no sum");
DEV i64 to_fixed(float v) { return fabsf(v) < MOST ? __float2ll_rn(v * PLACES) : NOT_A_SHARE; }
DEV float from_fixed(i64 v) {
  return v <= WHOLE && v >= -WHOLE ? __ll2float_rn(v) * (1.f / PLACES) : __uint_as_float(0x7fffffffu);
}
// Once a layer, before its sums.
DEV void expect_shares(Ctx& c, int kind) {
  const u32 byte = 255u << 8 * kind;
  c.counts = (c.counts & ~byte) | (c.counts + (NKV << 8 * kind) & byte);
}
template <u32 LENGTH> DEV void add_to(u64 (&words)[COPIES][LENGTH], u32 row, u64 value) {
  UNROLL for (u32 k = 0; k < COPIES; k++) add64(&words[k][place(row)], value);
}
template <u32 LENGTH> DEV void send_share(u64 (&words)[COPIES][LENGTH], u32 row, float value) {
  add_to(words, row, (1ull << 56) + (u64)to_fixed(value));
}
// Nonzero while shares are missing in any of the words.
DEV u32 shares_missing(const u64 (&v)[4], u32 count) {
  u32 bad = 0;
  UNROLL for (int i = 0; i < 4; i++) bad |= (((u32)(v[i] >> 32) + (1u << 23)) >> 24) ^ count;
  return bad;
}
